"""Is everything right, and fast, on this GPU? One table says so.

    python -m studies.gpu                      # all parts: up to an hour
    python -m studies.gpu --parts 1 4 --out out/gpu

Parts: 0 the machine; 1 right or wrong, against float64 and the CPU, and training in processes;
2 and 3 speed of training, Small and Medium; 4 speed of decoding; 5 train.py itself. A part is a
process with a time limit, so that one which fails or hangs does not end the rest. Every line is
printed as soon as it is known; OUT/gpu.json holds all, OUT/gpu.md the table. On a CPU parts 0 and 1
run, at the same sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch.autograd import DeviceType

import train
from runtime.command_line import run_script
from runtime.devices import pick_device, pick_dtype, release_memory
from runtime.files import write_json, write_text
from runtime.reports import command, commit, markdown_table, versions
from runtime.validation import Positive, check_values
from studies.benchmarks import common, correctness
from studies.benchmarks import train as bench_train
from studies.benchmarks.common import SIZES
from studies.benchmarks.correctness import Check, at_most
from studies.benchmarks.decode import DecodeOptions, bench_decode
from studies.benchmarks.train import TrainOptions
from training.config import Config
from training.gpus import GPU
from training.metrics import read_metrics
from training.plan import plan_run

ROOT = Path(__file__).resolve().parent.parent
MARK = "== "  # before a check that a part has printed
Part = Literal[0, 1, 2, 3, 4, 5]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    parts: tuple[Part, ...] = ()
    """Parts to run, beside part 0; none: all that this device can."""
    out: Path = Path("out") / "gpu"
    """Folder of the report."""
    device: str = "auto"
    minutes: Positive = 9.0
    """Time limit of a part."""
    here: bool = False
    """Run the parts in this process, without a time limit, and write no report."""


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    check_values(arguments)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.here:
        for part in arguments.parts:
            run_part(part, pick_device(arguments.device), out)
        return 0
    # This process leaves the GPU alone, so that the parts have all of it.
    on_cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    chosen = arguments.parts or ((1,) if on_cpu else (1, 2, 3, 4, 5))
    rows: list[dict] = []
    for part in dict.fromkeys((0, *chosen)):
        for row in in_a_process(part, arguments):
            rows.append(row)
            report(rows, out)
    wrong = [row for row in rows if row["verdict"] not in ("ok", "")]
    print(f"\n{len(rows)} lines, {len(wrong)} not as they should be; {arguments.out / 'gpu.md'}")
    for row in wrong:
        print(f"  part {row['part']}, {row['check']}: {row['measured']} ({row['verdict']})")
    return 1 if wrong else 0


# ---- parts as processes --------------------------------------------------------------------------


def in_a_process(part: Part, arguments: Arguments) -> Iterator[dict]:
    """Run a part, and yield its lines as they come; a last one if it does not end well."""
    started = time.monotonic()
    words = ["--here", "--parts", str(part), "--device", arguments.device]
    words += ["--out", str(arguments.out)]
    with tempfile.TemporaryDirectory() as cache:  # what is compiled is compiled anew
        process = subprocess.Popen(
            [sys.executable, "-u", __file__, *words],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            start_new_session=True,
        )
        ended_by_us = []

        def end() -> None:  # it and whatever it has started
            ended_by_us.append(True)
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(60 * arguments.minutes, end)
        timer.start()
        try:
            print(f"part {part}: {PARTS[part].__doc__.splitlines()[0]}", flush=True)
            yield from lines_of(process, part)
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                end()
    seconds = time.monotonic() - started
    if process.returncode:
        why = "OUT OF TIME" if ended_by_us else f"STATUS {process.returncode}"
        yield row(part, Check(f"part {part} to its end", "", f"{seconds:.0f} s", False), why)


def lines_of(process: subprocess.Popen, part: Part) -> Iterator[dict]:
    for line in process.stdout:
        if not line.startswith(MARK):
            print(f"  {line}", end="", flush=True)
            continue
        found = json.loads(line.removeprefix(MARK))
        print("  {check}: {measured}  {target}  {verdict}".format(**found), flush=True)
        yield found


def row(part: Part, check: Check, verdict: str = "") -> dict:
    """A line of the report."""
    verdict = verdict or {True: "ok", False: "FAILS", None: ""}[check.ok]
    return {
        "part": part,
        "check": check.name,
        "target": check.target,
        "measured": check.measured,
        "verdict": verdict,
    }


def run_part(part: Part, device: torch.device, out: Path) -> None:
    """Print the lines of a part; a check that fails with an error is a line, too."""

    def say(check: Check, verdict: str = "") -> None:
        print(MARK + json.dumps(row(part, check, verdict)), flush=True)

    for name, checks in PARTS[part](device, out):
        try:
            for check in checks():
                say(check)
        except Exception as error:  # whatever it is, the others are to run
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            say(Check(name, "", text, False), "ERROR")
        with contextlib.suppress(RuntimeError):  # after some errors a GPU does nothing any more
            torch._dynamo.reset()
            release_memory(device)


def report(rows: list[dict], out: Path) -> None:
    """Write the JSON and the table of what is known by now."""
    result = {"command": command(), "commit": commit(), "versions": versions(), "rows": rows}
    write_json(out / "gpu.json", result)
    keys = ("part", "check", "target", "measured", "verdict")
    table = markdown_table(list(keys), [[str(r[key]) for key in keys] for r in rows], left=2)
    head = [f"    {result['command']}", "", f"Commit {result['commit']}.", ""]
    write_text(out / "gpu.md", "\n".join([*head, *table, ""]))


Checks = Iterable[tuple[str, Callable[[], Iterable[Check]]]]
"""Names, and functions that yield lines."""


# ---- part 0 --------------------------------------------------------------------------------------


def the_machine(device: torch.device, out: Path) -> Checks:
    """the machine: versions, rates, and which attention runs"""
    yield "versions", lambda: machine_versions(device)
    yield "rates", lambda: machine_rates(device)
    if device.type == "cuda":
        yield "attention", lambda: attention_kernels(device)


def machine_versions(device: torch.device) -> Iterator[Check]:
    yield Check("device", "", common.machine(device)["name"], None)
    for name, version in versions().items():
        yield Check(name, "", version, None)
    if device.type == "cuda":
        yield Check("CUDA", "", str(torch.version.cuda), None)
        yield Check("cuDNN", "", str(torch.backends.cudnn.version()), None)
        memory = torch.cuda.get_device_properties(device).total_memory
        yield Check("memory", "", f"{memory / 2**30:.1f} GiB", None)


def machine_rates(device: torch.device) -> Iterator[Check]:
    dtype = pick_dtype("auto", device)
    rates = common.measure_rates(SIZES["medium"][0], 4096, dtype, device)
    yield Check("matrix product", "", f"{rates.flops / 1e12:.3g} TFLOP/s", None)
    yield Check("reading memory", "", f"{rates.bandwidth / 1e9:,.0f} GB/s", None)


def attention_kernels(device: torch.device) -> Iterator[Check]:
    """The kernels that a causal training step in bfloat16 takes."""
    q = torch.randn(8, 12, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with bench_train.profiler(device) as found:
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        y.sum().backward()
        torch.cuda.synchronize(device)
    for name in sorted(times := kernel_times(found.key_averages()), key=times.get)[:-4:-1]:
        yield Check("kernel of attention", "", name[:80], None)


# ---- part 1 --------------------------------------------------------------------------------------


def right_or_wrong(device: torch.device, out: Path) -> Checks:
    """right or wrong: numbers against float64 and the CPU, processes, resumed runs"""
    yield "train.py", lambda: training_in_processes(device, out)
    yield from correctness.all_checks(device, train.training_loss)


def training_in_processes(device: torch.device, out: Path) -> Iterator[Check]:
    """Six steps alone; in processes, with ddp and with fsdp; in two halves; and twice the same."""
    kind = device.type
    processes = 2 if kind == "cpu" else min(2, torch.cuda.device_count())
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [
        *("--out", out / "runs", "--data.folder", prepare_stories(out), "--train.device", kind),
        *("--eval.interval", "3", "--eval.sequences", "8", "--checkpoint.interval", "3"),
        *("--train.dtype", "float32", "--train.batch-size", "8", "--train.micro-batch-size", "4"),
        *("--train.no-compile", "--train.log-interval", "1", "--optim.warmup-steps", "2"),
        *("--model.block-size", "64", "--model.n-layer", "2", "--model.n-embd", "64"),
    ]

    def losses(name: str, *more, before: Iterable[str] = ()) -> list[float]:
        python(*before, "train.py", "configs/quickstart.toml", "--name", name, *words, *more)
        lines = read_metrics(out / "runs" / name / "metrics.jsonl")
        return [line["loss"] for line in lines if "loss" in line]

    shutil.rmtree(out / "runs", ignore_errors=True)
    alone = losses("alone", "--train.steps", "6")
    for mode in ("ddp", "fsdp"):
        options = "--train.steps", "6", "--train.parallel", mode
        found = largest(losses(mode, *options, before=launcher), alone)
        yield at_most(f"train.py: {processes} processes, {mode}, against one, loss", found, 1e-4)
    losses("halves", "--train.steps", "3")
    found = largest(losses("halves", "--train.steps", "6"), alone)
    yield at_most("train.py: a resumed run against an undisturbed, loss", found, 1e-4)
    options = "--train.steps", "6", "--train.deterministic"
    twice = [losses(name, *options) for name in ("once", "again")]
    yield at_most("train.py: two deterministic runs, loss", largest(*twice), 0)


def largest(found: list[float], expected: list[float]) -> float:
    """The largest difference; infinite if there are not as many."""
    if len(found) != len(expected):
        return float("inf")
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def prepare_stories(out: Path) -> Path:
    """Tokens of the bundled text."""
    folder = out / "stories"
    if not (folder / "meta.json").exists():
        python("data/prepare.py", "stories", "--out", folder)
    return folder


def python(*words) -> None:
    """Run a script of this repository. Raises RuntimeError with the last thing that it said."""
    words = [str(word) for word in words]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        last = next((line for line in said if "error" in line.lower()), said[-1])
        raise RuntimeError(f"a script ended with status {done.returncode}: {last}")


# ---- parts 2 and 3 -------------------------------------------------------------------------------

MFU_GOALS = {"small": 0.45, "medium": 0.50}


def speed_of_small(device: torch.device, out: Path) -> Checks:
    """training of Small: tokens/s, MFU, ratios to a plain GPT, memory against the plan"""
    yield from speed_of_training("small", device, out)


def speed_of_medium(device: torch.device, out: Path) -> Checks:
    """training of Medium: the same"""
    yield from speed_of_training("medium", device, out)


def speed_of_training(size: str, device: torch.device, out: Path) -> Checks:
    for batch_size in (16, 32, 64):
        yield f"{size}, {batch_size}", lambda b=batch_size: training(size, b, device, out)
        if batch_size == 16:
            yield "shares", lambda: shares_of_time(size, device)


def training(size: str, batch_size: int, device: torch.device, out: Path) -> Iterator[Check]:
    file, name = out / f"train_{size}_{batch_size}.json", f"{size}, micro-batch {batch_size}"
    file.unlink(missing_ok=True)
    planned = planned_bytes(size, batch_size)
    memory = torch.cuda.get_device_properties(device).total_memory
    if planned > 1.3 * memory:  # compiled it takes less
        yield Check(name, "", f"needs {planned / 2**30:.0f} GiB by plan: left out", None)
        return
    # Compiling takes time, and adaLN per token much memory.
    more = ("rotary-only", "per-token") if batch_size == 16 else ()
    options = TrainOptions(
        size=size,
        batch_size=batch_size,
        systems=("aogpt", "gpt", *more),
        repeats=10,
        device=str(device),
        json=file,
        overwrite=True,
    )
    bench_train.bench_train(options)
    rows = {r["system"]: r for r in json.loads(file.read_text())["rows"]}
    ours = rows["aogpt"]
    yield Check(f"{name}: tokens/s", "", f"{ours['tokens_per_second']:,.0f}", None)
    ratio, goal = ours["times_gpt"], MFU_GOALS[size]
    yield Check(f"{name}: step x plain GPT's", "<= 1.08", f"{ratio:.3f}", ratio <= 1.08)
    if more:
        fast = rows["rotary-only"]["times_gpt"]
        yield Check(f"{name}: rotary target, step x plain GPT's", "", f"{fast:.3f}", None)
        gain = rows["per-token"]["seconds"] / ours["seconds"]
        yield Check(f"{name}: adaLN per token, step x ours", "", f"{gain:.2f}", None)
    mfu = ours["mfu"]  # unknown where the GPU's peak is
    text, ok = ("unknown", None) if mfu is None else (f"{mfu:.1%}", mfu >= goal)
    yield Check(f"{name}: MFU", f">= {goal:.0%}", text, ok)
    share = ours["peak_bytes"] / planned
    ok = 0.6 <= share <= 1.05  # what is compiled keeps less than the plan, which is of eager mode
    yield Check(f"{name}: peak memory / plan", "0.6 to 1.05", f"{share:.2f}", ok)


def planned_bytes(size: str, batch_size: int) -> int:
    """What `python -m training.plan` says of tensors, of the same step."""
    config = Config(model=SIZES[size][0])
    settings = {"batch_size": batch_size, "micro_batch_size": batch_size, "dtype": "bfloat16"}
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **settings))
    return sum(plan_run(config, 1, GPU("any", flops=1e15, memory_gib=1000)).memory.values())


def shares_of_time(size: str, device: torch.device) -> Iterator[Check]:
    """Where the time of a compiled step of AO-GPT goes, by names of kernels."""
    options = TrainOptions(size=size, batch_size=16, systems=("aogpt",), device=str(device))
    dtype = pick_dtype("auto", device)
    system = bench_train.Trainee("aogpt", options, 1024, device, dtype)
    for step in range(3):
        system.timed_step(step)
    batch = system.batch(3)
    with bench_train.profiler(device) as found:
        system.step(*batch, lambda: None)
        torch.cuda.synchronize(device)
    times = dict.fromkeys(("matrix products", "attention", "other"), 0.0)
    for name, spent in kernel_times(found.key_averages()).items():
        times[kind_of_kernel(name)] += spent
    total = sum(times.values())
    for kind, spent in times.items():
        yield Check(f"{size}, micro-batch 16: share of {kind}", "", f"{spent / total:.1%}", None)


def kernel_times(events) -> dict[str, float]:
    """Time on the GPU by kernel. A profile counts it twice more: for the operators that launch
    kernels, and for regions of code (annotations)."""
    on_gpu = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return {event.key: event.self_device_time_total for event in on_gpu}


def kind_of_kernel(name: str) -> str:
    name = name.lower()
    if any(word in name for word in ("flash", "fmha", "sdpa", "attention")):
        return "attention"
    products = ("gemm", "nvjet", "cutlass", "splitk")
    return "matrix products" if any(word in name for word in products) else "other"


# ---- part 4 --------------------------------------------------------------------------------------


def speed_of_decoding(device: torch.device, out: Path) -> Checks:
    """decoding: Medium, 32 samples of 1,024 tokens, against floor, plain sampler and encoder"""
    for steps in (1024, 256, 64):
        yield f"{steps} steps", lambda n=steps: decoding(n, device, out)
    yield "eager", lambda: eager_decoding(device, out)


def decoding(steps: int, device: torch.device, out: Path) -> Iterator[Check]:
    rows = {r["system"]: r for r in timings(steps, device, out, compile=True)}
    ours, name = rows["ours"], f"{steps} steps"
    yield Check(f"{name}: ms a call", "", f"{ours['ms_per_call']:.3g}", None)
    yield Check(f"{name}: first batch, with compiling", "", f"{ours['first_seconds']:.0f} s", None)
    yield at_most(f"{name}: x floor", round(ours["times_floor"], 2), 2.5)
    times = {system: rows[system]["times_ours"] for system in ("encoder", "baseline")}
    goal = 100 if steps == 1024 else None
    ok = None if goal is None else times["encoder"] >= goal
    yield Check(f"{name}: encoder x ours", ">= 100" if goal else "", f"{times['encoder']:.1f}", ok)
    yield Check(f"{name}: plain cached sampler x ours", "", f"{times['baseline']:.2f}", None)


def eager_decoding(device: torch.device, out: Path) -> Iterator[Check]:
    (ours,) = timings(256, device, out, compile=False, systems=("ours",))
    yield Check("256 steps, not compiled: ms a call", "", f"{ours['ms_per_call']:.3g}", None)
    yield Check("256 steps, not compiled: x floor", "", f"{ours['times_floor']:.2f}", None)


def timings(
    steps: int,
    device: torch.device,
    out: Path,
    compile: bool,
    systems: tuple = ("ours", "baseline", "encoder"),
) -> list[dict]:
    """The rows of bench.py decode."""
    file = out / f"decode_{steps}{'' if compile else '_eager'}.json"
    options = DecodeOptions(
        size="medium",
        batch_size=32,
        steps=(steps,),
        systems=systems,
        compile=compile,
        device=str(device),
        json=file,
        overwrite=True,
    )
    bench_decode(options)
    return json.loads(file.read_text())["rows"]


# ---- part 5 --------------------------------------------------------------------------------------


def train_itself(device: torch.device, out: Path) -> Checks:
    """train.py on real text: its speed against part 2's, checkpoints, evaluations, a resumed run"""
    yield "train.py", lambda: real_training(device, out)


def real_training(device: torch.device, out: Path) -> Iterator[Check]:
    folder, run = prepare_stories(out), out / "runs" / "small"
    shutil.rmtree(run, ignore_errors=True)
    words = [
        *("train.py", "configs/aogpt_small.toml", "--name", "small", "--out", out / "runs"),
        *("--data.folder", folder, "--train.batch-size", "32", "--train.micro-batch-size", "32"),
        *("--train.log-interval", "5", "--optim.warmup-steps", "10", "--eval.interval", "50"),
        *("--eval.sequences", "64", "--checkpoint.interval", "50", "--train.device", str(device)),
    ]
    started = time.monotonic()
    python(*words, "--train.steps", "100")
    first = time.monotonic() - started
    python(*words, "--train.steps", "150")
    second = time.monotonic() - started - first
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    speed = statistics.median(line["tokens_per_second"] for line in lines[2:])
    yield Check("train.py, small: tokens/s", "", f"{speed:,.0f}", None)
    known, text, ok = out / "train_small_32.json", "unknown: part 2 has not been run", None
    if known.exists():
        rows = json.loads(known.read_text())["rows"]
        share = speed / next(r for r in rows if r["system"] == "aogpt")["tokens_per_second"]
        text, ok = f"{share:.3f}", share >= 0.95
    yield Check("train.py, small: tokens/s / bench.py's", ">= 0.95", text, ok)
    yield Check("train.py, small: 100 steps, all included", "", f"{first:.0f} s", None)
    yield Check("train.py, small: 50 more, resumed, all included", "", f"{second:.0f} s", None)
    steps = [line["step"] for line in lines]
    yield Check("train.py, small: steps logged", "to 150", f"to {steps[-1]}", steps[-1] == 150)
    fell = lines[0]["loss"] - lines[-1]["loss"]
    yield Check("train.py, small: fall of the loss, nats", "> 1", f"{fell:.2f}", fell > 1)


PARTS = {
    0: the_machine,
    1: right_or_wrong,
    2: speed_of_small,
    3: speed_of_medium,
    4: speed_of_decoding,
    5: train_itself,
}

if __name__ == "__main__":
    run_script(main)
