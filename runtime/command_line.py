"""How a script begins and ends: options that several scripts have, and errors as one line that says
what to do."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.devices import out_of_memory
from runtime.startup import PATH_ERRORS, broken, end_at_once, interrupted, interruptible
from runtime.validation import Count, Seed


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of every script that loads a model."""

    seed: Seed = 0
    """Of all that is drawn at random."""
    weights: Literal["ema", "raw"] = "ema"
    """The averaged weights, where there are any, or the last ones."""
    block_size: Count | None = None
    """Another than the model was trained with: only for models without tables of positions."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision; auto: bfloat16 on a GPU that has it, float32 elsewhere."""


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit. A ValueError, an OSError or too little memory is the user's to
    mend: its message, exit status 2, no traceback (set AOGPT_TRACEBACK=1 to see it). An interrupt
    ends in one line and status 130."""
    try:
        interruptible()
        status = status_of(main)
        signal.signal(signal.SIGINT, end_at_once)
    except KeyboardInterrupt:  # before main, or while it was told how that has ended
        end_at_once()
    try:
        sys.stdout.flush()
    except OSError:  # BrokenPipeError, as below, or a full disk
        _stop_printing()
        status = status or 141
    sys.exit(status or 141 * broken(sys.stdout))


def status_of(main: Callable[[], int | None]) -> int:
    """Run a script's main; the exit status, after a line on what has gone wrong."""
    try:
        return main_or_interrupt(main) or 0
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        _stop_printing()
        return 141
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        full = out_of_memory(error)
        of_paths = str(error).startswith(PATH_ERRORS)
        if isinstance(error, RuntimeError) and not full and not of_paths:
            raise
        if os.environ.get("AOGPT_TRACEBACK"):
            traceback.print_exc()
        rank = os.environ.get("RANK")
        advice = (
            "out of memory; ask for less at once, such as a smaller batch size or fewer samples: "
            if full
            else ""
        )
        with contextlib.suppress(OSError):  # nobody may be listening
            print(f"error{f' (rank {rank})' if rank else ''}: {advice}{error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, end_at_once)  # another one
        with contextlib.suppress(OSError):
            print("\ninterrupted", file=sys.stderr)
        return 130


def main_or_interrupt(main: Callable[[], int | None]) -> int | None:
    """Run a script's main; what it raises because of an interrupt is a KeyboardInterrupt."""
    try:
        return main()
    except Exception as error:
        if interrupted():
            raise KeyboardInterrupt from error
        raise


def _stop_printing() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
