"""Run command lines of scripts, each in a process that forks from one with everything
imported: python tests/run_commands.py FILE.json, a list of lists of words; prints a
JSON object for each."""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import scipy.stats  # noqa: E402, F401, which the scripts import when they need it, as
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401

import eval_gen  # noqa: E402, F401
import eval_ppl  # noqa: E402, F401
import sample  # noqa: E402, F401
from aogpt import text_model  # noqa: E402, F401
from aogpt.data import prepare  # noqa: E402, F401

torch.set_num_threads(1)  # other threads do not survive a fork


def run(words: list[str]) -> dict:
    """Exit status of `python WORDS`, with MY.txt on standard input, CPU seconds and
    output."""
    with tempfile.TemporaryFile("w+") as output, open("MY.txt") as text:
        if (child := os.fork()) == 0:
            for number, file in enumerate((text, output, output)):
                os.dup2(file.fileno(), number)
            os._exit(run_here(words))
        _, status, used = os.wait4(child, 0)
        output.seek(0)
        seconds = used.ru_utime + used.ru_stime
        status = os.waitstatus_to_exitcode(status)
        return {
            "command": words,
            "status": status,
            "seconds": seconds,
            "output": output.read(),
        }


def run_here(words: list[str]) -> int:
    status = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except Exception as error:  # what would be a traceback
        print(f"Traceback: {error!r}", file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    for command in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run(command)), flush=True)
