"""Measure speed as ratios between systems that run side by side, and memory.

python -m studies.bench decode --size medium --batch-size 32 --steps 64 256 1024
python -m studies.bench decode --size tiny --threads 1 --lengths 256 512 1024 --group 4
python -m studies.bench decode --lengths 1024 4096 --group 4 --memory --batch-size 1 8
python -m studies.bench train --size small --batch-size 16
"""

import tyro

from aogpt.runtime.command_line import run_script, with_help
from studies.decoding_speed import DecodeOptions, bench_decode
from studies.step_speed import TrainOptions, bench_train


def main() -> None:
    commands = {"decode": with_help(DecodeOptions), "train": with_help(TrainOptions)}
    chosen = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    if isinstance(chosen, DecodeOptions):
        bench_decode(chosen)
    else:
        bench_train(chosen)


if __name__ == "__main__":
    run_script(main)
