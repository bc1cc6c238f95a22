"""Is this checkout as fast as another one? The benchmarks of both on a CPU, in turn.

    git worktree add ../before d5e37c3
    python -m studies.side_by_side ../before --json results/side_by_side_cpu.json

A repetition starts a process of each checkout, with one thread, both on one processor
core. They take turns: one decodes a plan or takes some training steps while the other
waits, then the other does the same. In every other pair the other one begins. What
counts is the processor's time. Even that changes by a fifth within a minute on a busy
machine, but the halves of a pair are seconds apart. A repetition's ratio is the median
of its pairs."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from scipy import stats

from aogpt.runtime.command_line import run_script, show, with_help
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

TRAINING_STEPS = 5  # of a turn
# By benchmark: what a turn does, and the number of pairs of turns in a repetition.
TURNS = {
    "decoding, 64 steps": ({"steps": 64}, 5),
    "decoding, 256 steps": ({"steps": 256}, 3),
    "decoding, 1,024 steps": ({"steps": 1024}, 2),
    "a training step": ({"training_steps": TRAINING_STEPS}, 5),
}
WARM_UP = ("decoding, 64 steps", "a training step")
LENGTH = 1024  # tokens of a sample
LIMIT = 1.03
# Answers each line with the seconds of the turn that it names. It runs in both
# checkouts, so it uses only what both have.
WORKER = """\
import json, sys, time
time.perf_counter = time.process_time  # the clock of the benchmarks
sys.path.insert(0, "")
import torch
from studies import bench_common, decoding_speed, step_speed

size, batch_size, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
bench_common.measure_rates = lambda *_: {"flops": 1.0, "bandwidth": 1.0}
device = torch.device("cpu")
options = decoding_speed.DecodeOptions(size=size, systems=("ours",))
bench = decoding_speed.DecodeBench(options, batch_size, length, device, torch.float32)
options = step_speed.TrainOptions(
    size=size,
    batch_size=batch_size,
    length=bench_common.SIZES[size][0].block_size,
    compile=False,
)
trainee = step_speed.Trainee("aogpt", options, device, torch.float32)
for line in sys.stdin:
    turn = json.loads(line)
    if "steps" in turn:
        generator = bench_common.seeded(turn["number"])
        samples = decoding_speed.plans.Samples(batch_size, length, generator)
        plan = decoding_speed.plans.mdm_plan(samples, turn["steps"])
        seconds = bench.time("ours", plan)["seconds"]
    else:
        first = turn["number"] * turn["training_steps"]
        seconds = 0.0
        for step in range(first, first + turn["training_steps"]):
            seconds += trainee.step(step)["seconds"]
        seconds /= turn["training_steps"]
    print(json.dumps(seconds), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Arguments(OutputOptions):
    other: Annotated[Path, tyro.conf.Positional]
    """Folder of the other checkout."""
    repeats: Count = 7
    """Processes of each checkout."""
    size: str = "tiny"
    """Size of the models, as in studies.bench."""
    batch_size: Count = 4
    """Samples that are decoded, and sequences in a training step."""
    json: Path | None = None
    """Write every time, with settings and versions."""


Seconds = dict[str, list[float]]  # of "here" and of "other", by pair


class Checkout:
    """A process that runs the benchmarks of a checkout."""

    def __init__(self, folder: Path, a: Arguments):
        self.folder = folder
        words = ["-c", WORKER, a.size, str(a.batch_size), str(LENGTH)]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # One core for both: another may be shared with other work.
        os.sched_setaffinity(self.process.pid, {max(os.sched_getaffinity(0))})

    def take(self, turn: dict[str, int], number: int) -> float:
        """Return the seconds of a turn; its number decides the plan, or the batches.
        Raises UserError if the process has ended."""
        assert self.process.stdin and self.process.stdout and self.process.stderr
        line = json.dumps({**turn, "number": number})
        with contextlib.suppress(BrokenPipeError):  # its last words are read below
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            lines = self.process.stderr.read().strip().splitlines()
            problem = lines[-1] if lines else "nothing on stderr"
            raise UserError(f"the benchmarks of {self.folder} failed: {problem}")
        return json.loads(answer)


def main() -> None:
    a = tyro.cli(with_help(Arguments), description=__doc__)
    check_values(a)
    if not (a.other / "studies" / "bench.py").is_file():
        raise UserError(f"{a.other} is not a checkout of this project: name its folder")
    if not hasattr(os, "sched_setaffinity"):
        raise UserError("this machine cannot bind a process to a core: use Linux")
    outputs = Outputs({"--json": a.json}, (), a.overwrite)
    folders = {"here": ROOT, "other": a.other.resolve()}
    repetitions: dict[str, list[Seconds]] = {benchmark: [] for benchmark in TURNS}
    for number in range(a.repeats):
        ratios = []
        for benchmark, seconds in repetition(folders, a, number).items():
            repetitions[benchmark].append(seconds)
            ratios.append(f"{benchmark} {ratio_of(seconds):.3f}")
        show(
            f"{number + 1} of {a.repeats}: {', '.join(ratios)}",
            file=sys.stderr,
            flush=True,
        )
    rows = []
    for benchmark, all_seconds in repetitions.items():
        rows.append(row_of(benchmark, all_seconds))
    report = {
        "command": command(),
        "commits": {
            "here": commit_of(folders["here"]),
            "other": commit_of(folders["other"]),
        },
        "versions": versions(),
        "processor": cpu_name(),
        "settings": {
            "size": a.size,
            "batch_size": a.batch_size,
            "length": LENGTH,
            "threads": 1,
        },
        "rows": rows,
    }
    with outputs:
        outputs.write_json(a.json, report)
        show("\n".join(table_of(rows)))


def commit_of(folder: Path) -> str:
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    described = subprocess.run(words, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def repetition(
    folders: dict[str, Path], a: Arguments, number: int
) -> dict[str, Seconds]:
    """Return the times of the turns of a new process of each checkout, by benchmark."""
    checkouts = {name: Checkout(folder, a) for name, folder in folders.items()}
    seconds: dict[str, Seconds] = {}
    try:
        for checkout in checkouts.values():
            for benchmark in WARM_UP:
                turn, _ = TURNS[benchmark]
                checkout.take(turn, 0)
        for benchmark, (turn, pairs) in TURNS.items():
            seconds[benchmark] = {"here": [], "other": []}
            for pair in range(1, pairs + 1):
                names = ["here", "other"]
                if (number + pair) % 2:
                    names.reverse()
                for name in names:
                    time = checkouts[name].take(turn, pair)
                    seconds[benchmark][name].append(time)
    finally:
        for checkout in checkouts.values():
            checkout.process.kill()
            checkout.process.wait()
    return seconds


def ratio_of(seconds: Seconds) -> float:
    """Return the median over pairs of this checkout's time divided by the other
    one's."""
    ratios = []
    for here, other in zip(seconds["here"], seconds["other"], strict=True):
        ratios.append(here / other)
    return statistics.median(ratios)


def row_of(benchmark: str, repetitions: list[Seconds]) -> dict:
    """Return the median of the repetitions' ratios, and its interval."""
    ratios = [ratio_of(seconds) for seconds in repetitions]
    return {
        "what": benchmark,
        "seconds": repetitions,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "interval": median_interval(ratios),
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return two of the values, between which the median lies with a probability of at
    least 95% (sign test); of fewer than six values the smallest and the largest, which
    is less sure."""
    if len(values) < 6:
        return min(values), max(values)
    low, high = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    return float(low), float(high)


def table_of(rows: list[dict]) -> list[str]:
    """Return a line for each benchmark: median times, the ratio and whether it is
    met."""
    lines = []
    for row in rows:
        low, high = row["interval"]
        verdict = "open"
        if high <= LIMIT:
            verdict = "met"
        elif low > LIMIT:
            verdict = "missed"
        lines.append(
            [
                row["what"],
                milliseconds(row, "here"),
                milliseconds(row, "other"),
                f"{row['ratio']:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"at most {LIMIT}: {verdict}",
            ]
        )
    head = ["what", "here, ms", "other, ms", "ratio", "interval", "target"]
    return markdown_table(head, lines, left=1)


def milliseconds(row: dict, checkout: str) -> str:
    """Return the median over all turns of a checkout."""
    times = []
    for repetition in row["seconds"]:
        times += repetition[checkout]
    return f"{1000 * statistics.median(times):.3g}"


if __name__ == "__main__":
    run_script(main)
