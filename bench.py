"""Measure speed, as ratios between systems that run side by side.

Examples:
    python bench.py decode --size medium --batch-size 32 --steps 64 256 1024 --plot decoding.png
    python bench.py train --size small --batch-size 16 --markdown training.md --profile traces
"""

import tyro

from benchmarks.decode import DecodeOptions, bench_decode
from benchmarks.train import TrainOptions, bench_train
from runtime.command_line import run_script


def main() -> None:
    options = tyro.extras.subcommand_cli_from_dict(
        {"decode": DecodeOptions, "train": TrainOptions}, description=__doc__
    )
    if isinstance(options, DecodeOptions):
        bench_decode(options)
    else:
        bench_train(options)


if __name__ == "__main__":
    run_script(main)
