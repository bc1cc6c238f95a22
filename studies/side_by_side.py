"""Is this checkout as fast as another one? The same benchmarks of both on a CPU, in whole
processes that take turns.

    git worktree add ../before d5e37c3
    python -m studies.side_by_side ../before --json results/side_by_side_cpu.json

Each repetition runs bench decode and bench train of one checkout, then of the other; the next
one begins with the other. What counts is the processor's time of one thread, which other work of
the machine hardly changes. A ratio is this checkout's time divided by the other one's in the same
repetition."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import (
    OutputOptions,
    Outputs,
    command,
    markdown_table,
    versions,
)
from aogpt.runtime.validation import Count, check_values
from studies.bench_common import cpu_name
from studies.runs import ROOT

STEPS = ("64", "256", "1024")
DECODE = ("decode", "--lengths", "1024", "--systems", "ours", "--steps", *STEPS)
TRAIN = ("train", "--systems", "aogpt", "gpt", "--no-compile", "--warmup", "2")
LIMIT = 1.03
HEAD = ["what", "here, s", "other, s", "ratio", "95% interval", "target"]
# The benchmarks read this clock.
CLOCK = """\
import runpy, sys, time
time.perf_counter = time.process_time
sys.path.insert(0, "")
sys.argv = ["bench", *sys.argv[1:]]
runpy.run_module("studies.bench", run_name="__main__")
"""


@dataclass(frozen=True, kw_only=True)
class Arguments(OutputOptions):
    other: Annotated[Path, tyro.conf.Positional]
    """Folder of the other checkout."""
    repeats: Count = 7
    """Processes of each checkout and benchmark."""
    size: str = "tiny"
    """Of the models, as in studies.bench."""
    batch_size: Count = 4
    """Samples that are decoded, and sequences in a training step."""
    training_steps: Count = 20
    """Timed steps of a process."""
    json: Path | None = None
    """Write every time, with settings and versions."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    check_values(a)
    if not (a.other / "studies" / "bench.py").is_file():
        raise UserError(f"{a.other} is not a checkout of this project: name its folder")
    outputs = Outputs({"--json": a.json}, (), a.overwrite)
    folders = {"here": ROOT, "other": a.other.resolve()}
    times: dict[str, dict[str, list[float]]] = {}
    for repeat in range(a.repeats):
        names = list(folders)
        if repeat % 2:
            names.reverse()
        for name in names:
            for what, seconds in measure(folders[name], a).items():
                both = times.setdefault(what, {"here": [], "other": []})
                both[name].append(seconds)
        show(f"repetition {repeat + 1} of {a.repeats}", file=sys.stderr, flush=True)
    rows = [row_of(what, both) for what, both in times.items()]
    settings = {
        key: getattr(a, key) for key in ("size", "batch_size", "training_steps")
    }
    report = {
        "command": command(),
        "commits": {name: commit_of(folder) for name, folder in folders.items()},
        "versions": versions(),
        "processor": cpu_name(),
        "settings": settings | {"repeats": a.repeats, "threads": 1},
        "rows": rows,
    }
    with outputs:
        outputs.write_json(a.json, report)
        show(*table_of(rows), sep="\n")


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with "-dirty" if its files have changed."""
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    found = subprocess.run(words, capture_output=True, text=True).stdout
    return found.strip() or "unknown"


def measure(folder: Path, a: Arguments) -> dict[str, float]:
    """Return the seconds of the processor that a checkout takes, by what it does."""
    common = ("--size", a.size, "--threads", "1", "--device", "cpu")
    batch = ("--batch-size", str(a.batch_size))
    decoded = run_bench(folder, *DECODE, *common, *batch, "--repeats", "1")
    trained = run_bench(
        folder, *TRAIN, *common, *batch, "--repeats", str(a.training_steps)
    )
    seconds = {}
    for row in decoded:
        seconds[f"decoding, {row['steps']:,} steps"] = row["seconds"]
    for row in trained:
        if row["system"] == "aogpt":
            seconds["a training step"] = row["seconds"]
    return seconds


def run_bench(folder: Path, *words: str) -> list[dict]:
    """Return the rows of a benchmark of a checkout, a process of its own. Raises UserError if it
    fails."""
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "rows.json"
        done = subprocess.run(
            [sys.executable, "-c", CLOCK, *words, "--json", str(file)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"studies.bench {words[0]} failed in {folder}: {last}")
        return json.loads(file.read_text())["rows"]


def row_of(what: str, seconds: dict[str, list[float]]) -> dict:
    """Return the ratio of two checkouts: the median over repetitions, and the interval in which
    the median lies at 95% at least."""
    ratios = []
    for here, other in zip(seconds["here"], seconds["other"], strict=True):
        ratios.append(here / other)
    low, high = median_interval(ratios)
    return {
        "what": what,
        "seconds": seconds,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "interval": [low, high],
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return an interval of order statistics that covers the median with a probability of at
    least 95%; of less than six values the smallest and the largest, which cover it less
    often."""
    ordered = sorted(values)
    count = len(ordered)
    coin = torch.distributions.Binomial(count, torch.tensor(0.5))
    below = coin.log_prob(torch.arange(count + 1.0)).exp().cumsum(0)
    skipped = 0
    # Skipping k values at each end misses the median with probability 2 P(at most k heads).
    while 2 * float(below[skipped]) <= 0.05:
        skipped += 1
    first = max(skipped - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def table_of(rows: list[dict]) -> list[str]:
    """Return the lines of the table."""
    cells = []
    for row in rows:
        low, high = row["interval"]
        verdict = "met" if high <= LIMIT else "not met" if low > LIMIT else "open"
        cells.append(
            [
                row["what"],
                f"{statistics.median(row['seconds']['here']):.3g}",
                f"{statistics.median(row['seconds']['other']):.3g}",
                f"{row['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"<= {LIMIT}: {verdict}",
            ]
        )
    return markdown_table(HEAD, cells, left=1)


if __name__ == "__main__":
    run_script(main)
