"""Measure speed, as ratios between systems that run side by side; memory; and what precision costs.

Examples:
    python -m studies.bench decode --size medium --batch-size 32 --steps 64 256 1024 --plot decoding.png
    python -m studies.bench train --size small --batch-size 16 --markdown training.md --profile traces
    python -m studies.bench lengths --size tiny --threads 1 --lengths 256 512 1024 2048 4096 8192
    python -m studies.bench memory --lengths 1024 2048 4096 8192 --batch-sizes 1 8
    python -m studies.bench loading --size bench --repeats 12
    python -m studies.bench tf32 out/quickstart --dataset stories
"""

import tyro

from runtime.command_line import run_script
from studies.benchmarks.decode import DecodeOptions, bench_decode
from studies.benchmarks.lengths import LengthsOptions, bench_lengths
from studies.benchmarks.loading import LoadingOptions, bench_loading
from studies.benchmarks.memory import MemoryOptions, bench_memory
from studies.benchmarks.tf32 import TF32Options, bench_tf32
from studies.benchmarks.train import TrainOptions, bench_train

BENCHMARKS = {
    "decode": (DecodeOptions, bench_decode),
    "lengths": (LengthsOptions, bench_lengths),
    "loading": (LoadingOptions, bench_loading),
    "memory": (MemoryOptions, bench_memory),
    "train": (TrainOptions, bench_train),
    "tf32": (TF32Options, bench_tf32),
}


def main() -> None:
    kinds = {name: kind for name, (kind, _) in BENCHMARKS.items()}
    options = tyro.extras.subcommand_cli_from_dict(kinds, description=__doc__)
    next(bench for kind, bench in BENCHMARKS.values() if type(options) is kind)(options)


if __name__ == "__main__":
    run_script(main)
