"""Turn text into token files; `python data/prepare.py --help` lists what can be
prepared.

The code is aogpt/data/prepare.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # where the package `aogpt` is
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing
from aogpt.data.prepare import main
from aogpt.runtime.command_line import run_script

if __name__ == "__main__":
    run_script(main)
