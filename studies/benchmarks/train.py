"""bench.py train: the same training step, of every system.

A step of every system is taken in turn, so that what disturbs the machine disturbs all of them
alike. The median step counts, and ratios come with the least and the largest of their turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model import ModelConfig
from objectives import ao_ar_loss
from orders import OrderConfig, orders_at
from runtime.devices import autocast, has_compiler, peak_flops, pick_device, pick_dtype
from runtime.errors import UserError
from runtime.reports import markdown_table, new_figure, png
from runtime.validation import Count
from studies.benchmarks import common
from studies.benchmarks.baselines import PerToken
from studies.benchmarks.common import SIZES, BenchOptions
from training.averages import EMA
from training.config import Config, OptimConfig
from training.optimizers import make_optimizer, named_state
from variants import flops_per_token

System = Literal[
    "aogpt",
    "rotary",
    "rotary-only",
    "muon",
    "gpt",
    "per-token",
    "aogpt-eager",
    "rotary-eager",
    "gpt-eager",
]
COMPILED = ("aogpt", "rotary", "rotary-only", "muon", "gpt")
BASES = ("gpt", "per-token", "aogpt", "aogpt-eager")  # the systems that others are compared with
PHASES = ("forward", "backward", "optimizer")
TOP_OPERATIONS = 30


@dataclass(frozen=True, kw_only=True)
class TrainOptions(BenchOptions):
    """Take the same training steps with every system and compare.

    Data and orders are drawn before the clock starts. The learning rate is constant. After the
    warm-up a system that is compiled again is an error.
    """

    batch_size: Count = 2
    """Sequences in a step, which is one forward and one backward pass."""
    length: Count | None = None
    """Tokens in a sequence; the model's block size if left out (tiny: 128, the others: 1024)."""
    systems: tuple[System, ...] = ("aogpt", "gpt", "per-token")
    """aogpt: AO-GPT, random orders with 10% left to right, compiled. gpt: the same model without
    target positions, left to right, compiled. per-token: AO-GPT as one writes it first
    (benchmarks/baselines.py), uncompiled. rotary: aogpt with rotary positions; rotary-only: and
    with its targets told by them alone; muon: aogpt moved by Muon. NAME-eager: uncompiled."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    repeats: Count = 5
    """Steps of every system that are timed, in turn; the median counts."""
    warmup: Count = 3
    """Steps of every system before that, in which it is compiled."""
    profile: Path | None = None
    """Write a Chrome trace and a table of the top operations of one more step of every system to
    this folder."""

    @property
    def tokens_in_sequence(self) -> int:
        return self.length or SIZES[self.size][0].block_size


def bench_train(options: TrainOptions) -> None:
    """Run the benchmark and report. Raises ValueError for settings that no system could run."""
    options.check()
    check_settings(options)
    options.use_threads()
    device = pick_device(options.device)
    dtype, length = pick_dtype(options.dtype, device), options.tokens_in_sequence
    tokens = options.batch_size * length
    rates = common.measure_rates(SIZES[options.size][0], tokens, dtype, device)
    # Names of compiled kernels in a profile of the CPU; it must be set before they are compiled.
    with torch._inductor.config.patch("cpp.enable_kernel_profile", options.profile is not None):
        names = dict.fromkeys(options.systems)
        systems = [Trainee(name, options, length, device, dtype) for name in names]
        steps = measure(systems, options)
        if options.profile:
            for system in systems:
                profile(system, options.profile, options.warmup + options.repeats)
    peak = peak_flops(device, dtype)
    result = common.describe(
        dataclasses.replace(options, length=length),
        dtype,
        device,
        peak_flops=peak,
        matrix_product_flops=rates.flops,
        rows=summaries(systems, steps, tokens, peak, rates.flops),
    )
    plot = functools.partial(plot_parts, result)
    common.publish(options, "Training speed", result, report(result), plot)


def check_settings(options: TrainOptions) -> None:
    """Raise ValueError for settings that do not go together, or that this machine cannot run."""
    block_size = SIZES[options.size][0].block_size
    if options.tokens_in_sequence > block_size:
        raise UserError(
            f"--length {options.length} exceeds the block size of {options.size}, {block_size}; "
            "lower it"
        )
    if options.profile is not None and options.profile.is_file():
        raise UserError(f"--profile {options.profile} is a file; name a folder")
    compiled = [name for name in options.systems if name in COMPILED]
    if compiled and pick_device(options.device).type == "cpu" and not has_compiler():
        raise UserError(
            f"{' and '.join(compiled)}: compiling needs a C++ compiler on a CPU and there is none; "
            "name systems that are not compiled, e.g. --systems aogpt-eager gpt-eager per-token"
        )


# ---- one system ----------------------------------------------------------------------------------


class Trainee:
    """A system with its own weights, average and optimizer, as in training."""

    def __init__(
        self,
        name: System,
        options: TrainOptions,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.name, self.options, self.length = name, options, length
        self.device, self.dtype = device, dtype
        shape, self.vocab_size = SIZES[options.size]
        config = train_config(name, shape, options.optimizer)
        self.orders = config.order
        self.model = common.random_model(config.model, options.seed, device).train()
        self.ema = EMA(self.model, config.optim.ema_decay)
        self.optimizer = make_optimizer(self.model, config)
        self.grad_clip = config.optim.grad_clip
        self.peak = 0
        self.called = PerToken(self.model) if name == "per-token" else self.model
        if name in COMPILED:
            self.model.compile(dynamic=False)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and orders (B, T) of a step; the same tokens in every system, and the same orders
        in all of one kind."""
        B, seed = self.options.batch_size, self.options.seed
        tokens = torch.randint(
            self.vocab_size, (B, self.length), generator=common.seeded(seed + step)
        )
        order = orders_at(self.orders, seed, step, range(B), self.length)
        return tokens.to(self.device), order.to(self.device)

    def step(self, tokens: Tensor, order: Tensor, mark: Callable[[], None]) -> Tensor:
        """One training step; calls `mark` before it and after each of PHASES. Returns the loss, on
        the device."""
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

    def timed_step(self, step: int) -> Step:
        batch, clock = self.batch(step), Clock(self.device)
        loss = self.step(*batch, clock.mark)
        return Step(float(loss), *clock.parts())

    def peak_bytes(self, step: int) -> int:
        """Take a step; the most that tensors of this system took in it, in bytes."""
        batch, state = self.batch(step), self.state_bytes()
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.step(*batch, lambda: None)
            return state + torch.cuda.max_memory_allocated(self.device) - before
        # A CPU's allocator keeps no statistics: add up what the profiler saw come and go.
        with profiler(self.device, profile_memory=True) as found:
            self.step(*batch, lambda: None)
        events = found.profiler.kineto_results.events()
        changes = [event for event in events if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return state + max(itertools.accumulate((event.nbytes() for event in changes), initial=0))

    def state_bytes(self) -> int:
        """What lies in memory between the steps: weights, their average and the optimizer's
        moments."""
        tensors = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        tensors |= {average.data_ptr(): average.nbytes for average in self.ema.weights.values()}
        for of_weight in named_state(self.model, self.optimizer).values():
            tensors |= {state.data_ptr(): state.nbytes for state in of_weight.values()}
        return sum(tensors.values())


def train_config(name: System, shape: ModelConfig, optimizer: str) -> Config:
    """A run's configuration for a system; rates and decays are the defaults."""
    optim = OptimConfig(kind="muon" if name == "muon" else optimizer)
    if name.startswith("rotary"):
        shape = dataclasses.replace(shape, position="rotary")
    if name == "rotary-only":
        shape = dataclasses.replace(shape, target="rotary")
    if name.startswith("gpt"):
        plain = dataclasses.replace(shape, target="none")
        return Config(model=plain, order=OrderConfig("l2r"), optim=optim)
    return Config(model=shape, order=OrderConfig("mixture"), optim=optim)


@dataclass(frozen=True)
class Step:
    """The loss of a step, and the seconds of its parts."""

    loss: float
    forward: float
    backward: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.optimizer


class Clock:
    """Times between marks: on a GPU those at which the GPU got there, with no wait in between."""

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
        """Seconds from each mark to the next."""
        pairs = list(itertools.pairwise(self.marks))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [first.elapsed_time(second) / 1000 for first, second in pairs]
        return [second - first for first, second in pairs]


def profiler(device: torch.device, **settings) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, **settings)


# ---- all systems, in turn ------------------------------------------------------------------------


def measure(systems: list[Trainee], options: TrainOptions) -> dict[str, list[Step]]:
    """Warm up, then take a step of every system in turn. Raises RuntimeError if one is compiled
    again in that."""
    steps: dict[str, list[Step]] = {system.name: [] for system in systems}
    for system in systems:
        for step in range(options.warmup):
            steps[system.name].append(take_step(system, step))
        system.peak = system.peak_bytes(options.warmup)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(options.warmup, options.warmup + options.repeats):
            for system in systems:
                steps[system.name].append(take_step(system, step))
    return steps


def take_step(system: Trainee, step: int) -> Step:
    done = system.timed_step(step)
    if not math.isfinite(done.loss):
        raise RuntimeError(f"the loss of {system.name} is {done.loss} in step {step}")
    print(f"step {step}, {system.name}: {done.seconds:.3g} s", file=sys.stderr, flush=True)
    return done


def summaries(
    systems: list[Trainee], steps: dict, tokens: int, peak: float | None, product: float
) -> list[dict]:
    """A row for each system; `tokens` in a step, `peak` and `product`: operations per second."""
    warmup = systems[0].options.warmup
    timings = {name: taken[warmup:] for name, taken in steps.items()}
    rows = []
    for system in systems:
        own = timings[system.name]
        row = summary(system, own, tokens) | {"first_loss": steps[system.name][0].loss}
        flops = tokens * flops_per_token(system.model.config, system.length)
        row["mfu"] = flops / row["seconds"] / peak if peak else None
        row["share_of_matrix_product"] = flops / row["seconds"] / product
        for base in (name for name in BASES if name in timings):
            other = timings[base]
            turns = [mine.seconds / theirs.seconds for mine, theirs in zip(own, other, strict=True)]
            key = ratio_key(base)
            row[key] = row["seconds"] / statistics.median(step.seconds for step in other)
            row[f"{key}_min"], row[f"{key}_max"] = min(turns), max(turns)
        rows.append(row)
    return rows


def ratio_key(base: str) -> str:
    return f"times_{base.replace('-', '_')}"


def summary(system: Trainee, steps: list[Step], tokens: int) -> dict:
    seconds = [step.seconds for step in steps]
    median = statistics.median(seconds)
    phases = {
        f"{phase}_seconds": statistics.median(getattr(step, phase) for step in steps)
        for phase in PHASES
    }
    return {
        "system": system.name,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        **phases,
        "all_steps": [dataclasses.asdict(step) for step in steps],
        "tokens_per_second": tokens / median,
        "parameters": sum(p.numel() for p in system.model.parameters()),
        "state_bytes": system.state_bytes(),
        "peak_bytes": system.peak,
    }


def profile(system: Trainee, folder: Path, step: int) -> None:
    """Write FOLDER/SYSTEM.json, a Chrome trace of one step, and FOLDER/SYSTEM.txt, its operations
    by time."""
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu = system.device.type == "cuda"
    phases, current = iter((*PHASES, None)), contextlib.ExitStack()

    def mark() -> None:
        """End the phase before, and begin the next."""
        current.close()
        if phase := next(phases):
            current.enter_context(torch.profiler.record_function(phase))

    batch = system.batch(step)
    with profiler(system.device) as found:
        system.step(*batch, mark)
        if on_gpu:
            torch.cuda.synchronize(system.device)
    found.export_chrome_trace(str(folder / f"{system.name}.json"))
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    operations = found.key_averages()
    text = operations.table(sort_by=by, row_limit=TOP_OPERATIONS, max_name_column_width=80)
    (folder / f"{system.name}.txt").write_text(text)


# ---- the report ----------------------------------------------------------------------------------


def report(result: dict) -> str:
    """What was measured on what, the table, and how to read it."""
    s = result["settings"]
    return common.paragraphs(
        f"Size {s['size']}, {s['batch_size']} sequences of {s['length']} tokens in a step, "
        f"{s['optimizer']}, {s['dtype']}; median of {s['repeats']} steps, after {s['warmup']} to "
        "warm up.",
        f"{common.machine_line(result)}: {result['matrix_product_flops'] / 1e9:,.0f} GFLOP/s in a "
        "matrix product.",
        table(result["rows"]),
        "x NAME: median step relative to that system's; least and largest ratio of two steps in "
        "the same turn.",
        "forward, backward, optimizer (with clipping and averaging): shares of the step.",
        "MFU, of product: operations of forward and backward (AOGPT.flops_per_token) relative to "
        "the peak in the device's data sheet and to the matrix product above.",
        "state: weights, their average and the optimizer's moments. peak: the most that tensors "
        "take in a step.",
        common.ratios_only(result),
    )


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table; ratios first."""
    bases = [base for base in BASES if ratio_key(base) in rows[0]]
    head = ["system", *(f"x {base} (min - max)" for base in bases), *PHASES]
    head += ["step ms (min - max)", "tokens/s", "MFU", "of product", "state MB", "peak MB"]
    lines = []
    for r in rows:
        ratios = [
            f"{r[key]:.3f} ({r[f'{key}_min']:.3f} - {r[f'{key}_max']:.3f})"
            for key in map(ratio_key, bases)
        ]
        shares = [f"{r[f'{phase}_seconds'] / r['seconds']:.1%}" for phase in PHASES]
        lines.append(
            [
                r["system"],
                *ratios,
                *shares,
                common.with_range(
                    *(1000 * r[key] for key in ("seconds", "seconds_min", "seconds_max"))
                ),
                common.short(r["tokens_per_second"]),
                "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}",
                f"{r['share_of_matrix_product']:.1%}",
                f"{r['state_bytes'] / 1e6:,.0f}",
                f"{r['peak_bytes'] / 1e6:,.0f}",
            ]
        )
    return "\n".join(markdown_table(head, lines))


def plot_parts(result: dict) -> bytes:
    """PNG of the parts of each system's step, stacked."""
    rows, s = result["rows"], result["settings"]
    figure, axes = new_figure(size=(7, 1.2 + 0.6 * len(rows)))
    names, left = [row["system"] for row in rows], [0.0] * len(rows)
    for phase in PHASES:
        widths = [1000 * row[f"{phase}_seconds"] for row in rows]
        axes.barh(names, widths, left=left, label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    name = result["machine"]["name"]
    title = f"{name}, size {s['size']}, {s['batch_size']} x {s['length']} tokens"
    axes.set(xlabel="milliseconds", title=title)
    axes.invert_yaxis()
    axes.legend()
    return png(figure)
