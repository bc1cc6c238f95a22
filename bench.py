"""Measure speed, as ratios between systems that run side by side.

python bench.py decode --size small --batch-size 32 --steps 64 256 1024 --markdown decoding.md --plot decoding.png
python bench.py train --size small --batch-size 16 --markdown training.md --profile traces
"""

import tyro

from benchmarks.decode import decode
from benchmarks.train import train
from runtime.command_line import run_script


def main() -> None:
    tyro.extras.subcommand_cli_from_dict({"decode": decode, "train": train}, description=__doc__)


if __name__ == "__main__":
    run_script(main)
