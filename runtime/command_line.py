"""How a script runs: options that several scripts have, and mistakes told in one line."""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.errors import UserError
from runtime.validation import Count, Seed


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every script that loads a model."""

    seed: Seed = 0
    """Seed of everything random."""
    weights: Literal["ema", "raw"] = "ema"
    """The averaged weights, where there are any, or the last ones."""
    checkpoint: str = "last"
    """Of a run folder: last, best (the lowest validation loss) or a step's number."""
    block_size: Count | None = None
    """Another length than in training; only for models without position tables."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, mps or another that PyTorch knows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision; auto: bfloat16 on a GPU that has it, float32 elsewhere."""


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit. UserError, OSError and too little memory or too few processes
    end in one line and status 2 (AOGPT_TRACEBACK=1 shows the traceback), an interrupt in one line
    and status 130. Any other exception keeps its traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # a sample may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        status = main() or 0
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        status = 130
    except Exception as error:
        advice = ""
        if not isinstance(error, UserError | OSError):
            from runtime.devices import out_of_memory  # imports torch: a mistake need not wait

            if out_of_memory(error):
                advice = "out of memory; use a smaller batch or fewer samples: "
            elif "can't start new thread" in str(error):
                advice = "too many processes; raise their limit (ulimit -u): "
            else:
                raise
        if os.environ.get("AOGPT_TRACEBACK"):
            traceback.print_exc()
        rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
        if isinstance(error, OSError) and error.errno and error.filename is None:
            advice = "the output cannot be written: "  # of a full disk, which names no file
        print(f"error{rank}: {advice}{error}", file=sys.stderr)
        status = 2
    sys.exit(status)
