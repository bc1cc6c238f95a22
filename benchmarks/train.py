"""bench.py train: the same training step, of every system."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from benchmarks.baselines import PerToken
from benchmarks.common import (
    SIZES,
    SizeName,
    check_settings,
    command,
    machine,
    measure_rates,
    png,
    publish,
    random_model,
    seeded,
    short,
    table,
)
from checkpoints.store import EMA
from model import ModelConfig
from objectives import ao_ar_loss
from orders import OrderConfig, orders_at
from runtime.devices import autocast, peak_flops, pick_device, pick_dtype
from runtime.reports import versions
from training.config import Config, OptimConfig
from training.optimizers import make_optimizer

System = Literal["aogpt", "gpt", "per-token", "aogpt-eager", "gpt-eager"]
COMPILED = ("aogpt", "gpt")
BASES = ("gpt", "per-token")  # the systems that the others are compared with
PHASES = ("forward", "backward", "optimizer")
TOP_OPERATIONS = 30


@dataclass(frozen=True)
class TrainArguments:
    size: SizeName = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium 24/1024/16; random weights."""
    batch_size: int = 2
    """Sequences in a step, which is one forward and one backward pass."""
    length: int | None = None
    """Tokens in a sequence; the model's block size if left out (tiny: 128, the others: 1024)."""
    systems: tuple[System, ...] = ("aogpt", "gpt", "per-token")
    """aogpt: AO-GPT, random orders with 10% left to right, compiled. gpt: the same model without target positions, left
    to right, compiled. per-token: AO-GPT as one writes it first (baselines.PerToken), uncompiled. aogpt-eager,
    gpt-eager: the first two, uncompiled."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    repeats: int = 5
    """Steps of every system that are timed, in turn; the median counts."""
    warmup: int = 3
    """Steps of every system before that, in which it is compiled."""
    threads: int | None = None
    """Threads of PyTorch on a CPU."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix work; auto: bfloat16 on a GPU that has it, float32 elsewhere. Weights stay float32."""
    seed: int = 0
    json: Path | None = None
    """Write every figure, with settings, machine and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw the parts of a step as a PNG."""
    profile: Path | None = None
    """Write a Chrome trace and a table of the top operations of one more step of every system to this folder."""


def train(arguments: Annotated[TrainArguments, tyro.conf.arg(name="")]) -> None:
    """Take the same training steps with every system and compare.

    Data and orders are drawn before the clock starts. The learning rate is constant. After the warm-up a system that is
    compiled again is an error.
    """
    a = arguments
    check_arguments(a)
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    device = pick_device(a.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # events and streams are those of the current device
    dtype = pick_dtype(a.dtype, device)
    length = a.length or SIZES[a.size][0].block_size
    rates = measure_rates(SIZES[a.size][0], a.batch_size * length, dtype, device)
    with torch._inductor.config.patch("cpp.enable_kernel_profile", a.profile is not None):
        systems = [Trainee(name, a, length, device, dtype) for name in dict.fromkeys(a.systems)]
        steps = measure(systems, a)
        if a.profile:
            for system in systems:
                profile(system, a.profile, a.warmup + a.repeats)
    peak = peak_flops(device, dtype)
    result = {
        "command": command(),
        "settings": dataclasses.asdict(a)
        | {"length": length, "dtype": str(dtype).removeprefix("torch.")},
        "machine": machine(device),
        "versions": versions(),
        "peak_flops": peak,
        "matrix_product_flops": rates.flops,
        "rows": summaries(systems, steps, a.batch_size * length, peak, rates.flops),
    }
    report = "\n".join(
        [*facts(result), "", *markdown_table(result["rows"]), "", *notes(result), ""]
    )
    publish(a, "Training speed", result, report, lambda: plot_parts(result))


def check_arguments(a: TrainArguments) -> None:
    """Raise ValueError for settings that no system could run."""
    lowest = {"batch_size": 1, "length": 1, "repeats": 1, "warmup": 1, "seed": 0, "threads": 1}
    check_settings(a, lowest)
    block_size = SIZES[a.size][0].block_size
    if a.length is not None and a.length > block_size:
        raise ValueError(
            f"--length {a.length} exceeds the block size of {a.size}, {block_size}; lower it"
        )
    if a.profile is not None and a.profile.is_file():
        raise ValueError(f"--profile {a.profile} is a file; name a folder")
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    compiled = [name for name in a.systems if name in COMPILED]
    if compiled and pick_device(a.device).type == "cpu" and not compiler:
        raise ValueError(
            f"{' and '.join(compiled)}: compiling needs a C++ compiler on a CPU and there is none; "
            "name systems that are not compiled, e.g. --systems aogpt-eager gpt-eager per-token"
        )


# ---- one system ------------------------------------------------------------------------------------------------------


class Trainee:
    """A system with its own weights, average and optimizer, as in training."""

    def __init__(
        self, name: System, a: TrainArguments, length: int, device: torch.device, dtype: torch.dtype
    ):
        self.name, self.a, self.length, self.device, self.dtype = name, a, length, device, dtype
        shape, self.vocab_size = SIZES[a.size]
        config = train_config(name, shape, a.optimizer)
        self.orders = config.order
        self.model = random_model(config.model, a.seed, device).train()
        self.ema = EMA(self.model, config.optim.ema_decay)
        self.optimizer = make_optimizer(self.model, config)
        self.grad_clip = config.optim.grad_clip
        self.peak = 0
        self.called = PerToken(self.model) if name == "per-token" else self.model
        if name in COMPILED:
            self.model.compile(dynamic=False)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and orders (B, T) of a step; the same tokens in every system, and the same orders of one kind."""
        shape, rows = (self.a.batch_size, self.length), range(self.a.batch_size)
        tokens = torch.randint(self.vocab_size, shape, generator=seeded(self.a.seed + step))
        order = orders_at(self.orders, self.a.seed, step, rows, self.length)
        return tokens.to(self.device), order.to(self.device)

    def step(self, tokens: Tensor, order: Tensor, mark: Callable[[], None]) -> Tensor:
        """One training step; calls `mark` before it and after each of PHASES. Returns the loss, on the device."""
        mark()
        with autocast(self.device, self.dtype):
            loss = ao_ar_loss(self.called, tokens, order)
        mark()
        loss.backward()
        mark()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        self.optimizer.step()
        self.ema.update(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        mark()
        return loss.detach()

    def timed(self, step: int) -> Step:
        batch, clock = self.batch(step), Clock(self.device)
        loss = self.step(*batch, clock.mark)
        parts = clock.parts()
        return Step(float(loss), *parts)

    def peak_bytes(self, step: int) -> int:
        """Take a step; the most that tensors of this system took in it, in bytes."""
        batch, state = self.batch(step), self.state_bytes()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(*batch, lambda: None)
            return state + torch.cuda.max_memory_allocated(self.device) - before
        with profiler(self.device, profile_memory=True) as found:
            self.step(*batch, lambda: None)
        changes = [
            event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"
        ]
        changes.sort(key=lambda event: event.start_ns())
        return state + max(itertools.accumulate((event.nbytes() for event in changes), initial=0))

    def state_bytes(self) -> int:
        """What lies in memory between the steps: weights, their average and the optimizer's moments."""
        states = [self.optimizer.state_dict()]
        found: dict[int, int] = {}
        while states:
            state = states.pop()
            if isinstance(state, Tensor):
                found[state.data_ptr()] = state.nbytes
            elif isinstance(state, dict):
                states += state.values()
        parameters = sum(p.nbytes for p in self.model.parameters())
        return (
            sum(found.values())
            + parameters
            + sum(average.nbytes for average in self.ema.weights.values())
        )


def train_config(name: System, shape: ModelConfig, optimizer: str) -> Config:
    """A run's configuration for a system; rates and decays are the defaults."""
    optim = OptimConfig(kind=optimizer)
    if name.startswith("gpt"):
        return Config(
            model=dataclasses.replace(shape, target="none"), order=OrderConfig("l2r"), optim=optim
        )
    return Config(model=shape, order=OrderConfig("mixture"), optim=optim)


@dataclass(frozen=True)
class Step:
    """Seconds of a step's parts."""

    loss: float
    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


class Clock:
    """Times between marks: on a GPU those at which it got there, with no wait in between, else the host's."""

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def mark(self) -> None:
        if self.device.type == "cuda":
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def parts(self) -> list[float]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [first.elapsed_time(second) / 1000 for first, second in pairs]
        return [second - first for first, second in pairs]


def profiler(device: torch.device, **settings) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, **settings)


# ---- all systems, in turn --------------------------------------------------------------------------------------------


def measure(systems: list[Trainee], a: TrainArguments) -> dict[str, list[Step]]:
    """Warm up, then take a step of every system in turn. Raises RuntimeError if one is compiled again in that."""
    steps: dict[str, list[Step]] = {system.name: [] for system in systems}
    for system in systems:
        for step in range(a.warmup):
            steps[system.name].append(timed(system, step))
        system.peak = system.peak_bytes(a.warmup)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(a.warmup, a.warmup + a.repeats):
            for system in systems:
                steps[system.name].append(timed(system, step))
    return steps


def timed(system: Trainee, step: int) -> Step:
    done = system.timed(step)
    if not math.isfinite(done.loss):
        raise RuntimeError(f"the loss of {system.name} is {done.loss} in step {step}")
    print(f"step {step}, {system.name}: {done.seconds:.3g} s", file=sys.stderr, flush=True)
    return done


def summaries(
    systems: list[Trainee], steps: dict, tokens: int, peak: float | None, product: float
) -> list[dict]:
    """A row for each system; `tokens` in a step, `peak` and `product`: operations per second."""
    warmup = systems[0].a.warmup
    timings = {name: taken[warmup:] for name, taken in steps.items()}
    rows = []
    for system in systems:
        own = timings[system.name]
        row = summary(system, own, tokens) | {"first_loss": steps[system.name][0].loss}
        flops = tokens * system.model.flops_per_token(system.length)
        row["mfu"] = flops / row["seconds"] / peak if peak else None
        row["share_of_matrix_product"] = flops / row["seconds"] / product
        for base in (name for name in BASES if name in timings):
            turns = [
                mine.seconds / other.seconds for mine, other in zip(own, timings[base], strict=True)
            ]
            middle = statistics.median(step.seconds for step in timings[base])
            key = f"times_{base.replace('-', '_')}"
            row |= {
                key: row["seconds"] / middle,
                f"{key}_min": min(turns),
                f"{key}_max": max(turns),
            }
        rows.append(row)
    return rows


def summary(system: Trainee, steps: list[Step], tokens: int) -> dict:
    seconds = [step.seconds for step in steps]
    median = statistics.median(seconds)
    return {
        "system": system.name,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **{
            f"{phase}_seconds": statistics.median(getattr(step, phase) for step in steps)
            for phase in PHASES
        },
        "all_steps": [dataclasses.asdict(step) for step in steps],
        "tokens_per_second": tokens / median,
        "parameters": sum(p.numel() for p in system.model.parameters()),
        "state_bytes": system.state_bytes(),
        "peak_bytes": system.peak,
    }


def profile(system: Trainee, folder: Path, step: int) -> None:
    """Write FOLDER/SYSTEM.json, a Chrome trace of one step, and FOLDER/SYSTEM.txt, its operations by time."""
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = system.device.type == "cuda"
    names = iter((*PHASES, None))
    current = contextlib.ExitStack()

    def mark() -> None:
        current.close()
        if name := next(names):
            current.enter_context(torch.profiler.record_function(name))

    batch = system.batch(step)
    with profiler(system.device) as found:
        system.step(*batch, mark)
        if on_gpu:
            torch.cuda.synchronize(system.device)
    found.export_chrome_trace(str(folder / f"{system.name}.json"))
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    text = found.key_averages().table(
        sort_by=by, row_limit=TOP_OPERATIONS, max_name_column_width=80
    )
    (folder / f"{system.name}.txt").write_text(text)


# ---- the report ------------------------------------------------------------------------------------------------------


def facts(result: dict) -> list[str]:
    """What was measured, on what."""
    s, m = result["settings"], result["machine"]
    return [
        f"Size {s['size']}, {s['batch_size']} sequences of {s['length']} tokens in a step, {s['optimizer']}, "
        f"{s['dtype']}; median of {s['repeats']} steps, after {s['warmup']} to warm up.",
        "",
        f"{m['name']}, {m['threads']} threads, torch {result['versions']['torch']}: "
        f"{result['matrix_product_flops'] / 1e9:,.0f} GFLOP/s in a matrix product.",
    ]


def markdown_table(rows: list[dict]) -> list[str]:
    """The rows as a table; ratios first."""
    bases = {base: f"times_{base.replace('-', '_')}" for base in BASES}
    bases = {base: key for base, key in bases.items() if key in rows[0]}
    titles = [
        "system",
        *(f"x {base} (min - max)" for base in bases),
        *PHASES,
        "step ms (min - max)",
        "tokens/s",
        "MFU",
    ]
    lines = [[*titles, "of product", "state MB", "peak MB"]]
    for r in rows:
        ratios = (
            f"{r[key]:.3f} ({r[f'{key}_min']:.3f} - {r[f'{key}_max']:.3f})"
            for key in bases.values()
        )
        parts = (f"{r[f'{phase}_seconds'] / r['seconds']:.1%}" for phase in PHASES)
        ms, low, high = (short(1000 * r[key]) for key in ("seconds", "seconds_min", "seconds_max"))
        mfu = "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}"
        lines.append(
            [
                r["system"],
                *ratios,
                *parts,
                f"{ms} ({low} - {high})",
                short(r["tokens_per_second"]),
                mfu,
            ]
            + [
                f"{r['share_of_matrix_product']:.1%}",
                f"{r['state_bytes'] / 1e6:,.0f}",
                f"{r['peak_bytes'] / 1e6:,.0f}",
            ]
        )
    return table(lines)


def notes(result: dict) -> list[str]:
    lines = [
        "x gpt, x per-token: median step relative to theirs; least and largest ratio of two steps in the same turn.",
        "forward, backward, optimizer (with clipping and the averaged weights): shares of the step.",
        "MFU, of product: operations of forward and backward (AOGPT.flops_per_token) relative to the peak in the "
        "device's data sheet and to the matrix product above.",
        "state: weights, their average and the optimizer's moments. peak: the most that tensors take in a step.",
    ]
    if result["machine"]["device"] == "cpu":
        lines.append("On a CPU only the ratios mean something.")
    return [line for part in lines for line in (part, "")][:-1]


def plot_parts(result: dict) -> bytes:
    """PNG of the parts of each system's step, stacked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, s = result["rows"], result["settings"]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.6 * len(rows)), layout="constrained")
    names, left = [row["system"] for row in rows], [0.0] * len(rows)
    for phase in PHASES:
        widths = [1000 * row[f"{phase}_seconds"] for row in rows]
        axes.barh(names, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    title = (
        f"{result['machine']['name']}, size {s['size']}, {s['batch_size']} x {s['length']} tokens"
    )
    axes.set(xlabel="milliseconds", title=title)
    axes.invert_yaxis()
    axes.legend()
    return png(figure)
