"""Measure speed, as ratios between systems that run side by side; and what precision costs.

Examples:
    python bench.py decode --size medium --batch-size 32 --steps 64 256 1024 --plot decoding.png
    python bench.py train --size small --batch-size 16 --markdown training.md --profile traces
    python bench.py tf32 out/quickstart --dataset stories
"""

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

import tyro

from benchmarks.decode import DecodeOptions, bench_decode
from benchmarks.tf32 import TF32Options, bench_tf32
from benchmarks.train import TrainOptions, bench_train
from runtime.command_line import run_script

BENCHMARKS = {DecodeOptions: bench_decode, TrainOptions: bench_train, TF32Options: bench_tf32}


def main() -> None:
    kinds = {"decode": DecodeOptions, "train": TrainOptions, "tf32": TF32Options}
    options = tyro.extras.subcommand_cli_from_dict(kinds, description=__doc__)
    BENCHMARKS[type(options)](options)


if __name__ == "__main__":
    run_script(main)
