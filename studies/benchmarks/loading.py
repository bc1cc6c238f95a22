"""bench.py loading: what it costs to check a checkpoint while it is loaded, from the disk and from
the files that the system still holds in memory."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from checkpoints import on_disk, store
from checkpoints.load import load
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import markdown_table
from runtime.validation import Count, NonNegative, check_values
from studies.benchmarks.common import SIZES, SizeName, describe, random_model
from training.averages import EMA

HEAD = ["files", "unchecked, s", "checked, s", "checked / unchecked"]


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(OutputOptions):
    """Load the averaged weights of a checkpoint with and without its checksums, in turns."""

    size: SizeName = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium 24/1024/16; random
    weights."""
    repeats: Count = 12
    threads: Count = 1
    seed: NonNegative = 0
    folder: Path | None = None
    """Where the checkpoint is written for the time being, on the disk to be measured; by default
    among the system's temporary files."""
    json: Path | None = None


def bench_loading(options: LoadingOptions) -> None:
    check_values(options)
    outputs = Outputs({"--json": options.json}, (), options.overwrite)
    torch.set_num_threads(options.threads)
    with outputs, tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size = write_checkpoint(Path(folder), options)
        rows = [measure(Path(folder), cold, options.repeats) for cold in (True, False)]
        lines = markdown_table(HEAD, [cells(row) for row in rows], left=1)
        print(*lines, f"medians of {options.repeats}; {size / 1e6:,.0f} MB", sep="\n")
        device = torch.device("cpu")
        found = describe(options, torch.float32, device, bytes=size, rows=rows)
        outputs.write_json(options.json, found)


def write_checkpoint(folder: Path, options: LoadingOptions) -> int:
    """A checkpoint of random weights and their averages; the bytes that are loaded of it."""
    config, vocab_size = SIZES[options.size]
    model = random_model(config, options.seed, torch.device("cpu"))
    averages = EMA(model, 0.9).weights
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    tensors |= {f"ema.{name}": average for name, average in averages.items()}
    values = {"step": 0, "best": None, "skipped": 0, "skipped_in_a_row": 0, "config": {}}
    values |= {"ema": {"updates": 0, "decay": 0.9}, "model_config": asdict(config)}
    values |= {"data": {"tokenizer": "gpt2", "vocab_size": vocab_size}}
    store.write(folder, values, tensors, keep=1)
    return sum(average.nbytes for average in averages.values())


def measure(run: Path, cold: bool, repeats: int) -> dict:
    """Seconds of loading, unchecked and checked in turns. cold: the system forgets the files before
    each."""
    seconds = {False: [], True: []}
    for _ in range(1 + repeats):  # the first of each kind is not counted
        for checked in seconds:
            if cold:
                forget(run)
            check = nullcontext() if checked else patch.object(on_disk, "_check_parts")
            with check:
                started = time.perf_counter()
                load(run)
                seconds[checked].append(time.perf_counter() - started)
    return {"cold": cold, "unchecked": seconds[False][1:], "checked": seconds[True][1:]}


def forget(run: Path) -> None:
    """Let the system drop what it holds of a run's files in memory."""
    for path in run.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def cells(row: dict) -> list[str]:
    unchecked, checked = (statistics.median(row[key]) for key in ("unchecked", "checked"))
    files = "on the disk" if row["cold"] else "in memory"
    return [files, f"{unchecked:.3f}", f"{checked:.3f}", f"{checked / unchecked:.2f}"]
