"""Measure speed, as ratios between systems that run side by side; memory; and what precision costs.

Examples:
    python bench.py decode --size medium --batch-size 32 --steps 64 256 1024 --plot decoding.png
    python bench.py train --size small --batch-size 16 --markdown training.md --profile traces
    python bench.py lengths --size tiny --threads 1 --lengths 256 512 1024 2048 4096 8192
    python bench.py memory --lengths 1024 2048 4096 8192 --batch-sizes 1 8
    python bench.py loading --size bench --repeats 12
    python bench.py tf32 out/quickstart --dataset stories
"""

if __name__ == "__main__":
    from runtime.startup import begin

    begin()

import tyro

from benchmarks.decode import DecodeOptions, bench_decode
from benchmarks.lengths import LengthsOptions, bench_lengths
from benchmarks.loading import LoadingOptions, bench_loading
from benchmarks.memory import MemoryOptions, bench_memory
from benchmarks.tf32 import TF32Options, bench_tf32
from benchmarks.train import TrainOptions, bench_train
from runtime.command_line import run_script

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
