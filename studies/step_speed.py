"""bench train: the same training step of every system.

All systems take a step in turn, so that other work of the machine affects them alike. The median
step counts; ratios come with the least and the largest over the repetitions.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from model import ModelConfig
from objectives import ao_ar_loss
from orders import OrderConfig, orders_at
from runtime.devices import autocast, has_compiler, pick_device, pick_dtype, synchronize
from runtime.errors import UserError
from runtime.reports import markdown_table
from runtime.validation import Count
from studies import bench_common as common
from studies.baselines import PerToken
from studies.bench_common import SIZES, BenchOptions
from training.averages import EMA
from training.config import Config, OptimConfig
from training.gpus import peak_flops
from training.optimizers import make_optimizer
from variants import flops_per_token

SYSTEMS = {
    "aogpt": "AO-GPT, random orders with 10% left to right",
    "gpt": "the same model without target positions, left to right",
    "per-token": "AO-GPT with adaLN for every token, not compiled",
    "rotary": "AO-GPT with rotary positions",
    "rotary-only": "the same, conditioned on targets by rotation only",
    "muon": "AO-GPT trained by Muon",
    "aogpt-eager": "not compiled",
    "rotary-eager": "not compiled",
    "gpt-eager": "not compiled",
}
System = Literal[*SYSTEMS]
COMPILED = ("aogpt", "gpt", "rotary", "rotary-only", "muon")
BASES = ("gpt", "per-token", "aogpt", "aogpt-eager")  # with which the others are compared


@dataclass(frozen=True, kw_only=True)
class TrainOptions(BenchOptions):
    """Take the same training steps with every system and compare. Data and orders are drawn before
    the clock starts. A system that is compiled again after the warm-up is an error."""

    batch_size: Count = 2
    """Sequences in a step, which is one forward and one backward pass."""
    length: Count | None = None
    """Tokens in a sequence; by default the model's block size (tiny: 128, others: 1024)."""
    systems: Annotated[
        tuple[System, ...], tyro.conf.arg(help=". ".join(map(": ".join, SYSTEMS.items())))
    ] = ("aogpt", "gpt", "per-token")
    optimizer: Literal["adamw", "muon"] = "adamw"
    repeats: Count = 5
    """Timed steps of every system, in turn; the median counts."""
    warmup: Count = 3
    """Steps of every system before that."""


def bench_train(o: TrainOptions) -> dict:
    """Run the benchmark, report, and return what --json holds. Raises UserError for settings that
    no system can run."""
    o.check()
    config, device = SIZES[o.size][0], pick_device(o.device)
    if (o.length or 0) > config.block_size:
        raise UserError(
            f"--length {o.length} exceeds the block size of {o.size}, {config.block_size}; lower it"
        )
    compiled = [name for name in o.systems if name in COMPILED]
    if compiled and device.type == "cpu" and not has_compiler():
        raise UserError(
            f"{' and '.join(compiled)}: compiling on a CPU needs a C++ compiler and there is none; "
            "name systems that are not compiled, e.g. --systems aogpt-eager gpt-eager per-token"
        )
    o = dataclasses.replace(o, length=o.length or config.block_size)
    dtype = pick_dtype(o.dtype, device)
    product = common.measure_rates(config, o.batch_size * o.length, dtype, device)["flops"]
    systems = [Trainee(name, o, device, dtype) for name in dict.fromkeys(o.systems)]
    steps, peak = measure(systems, o), peak_flops(device, dtype)
    rows = [summary(system, steps, peak, product) for system in systems]
    figures = {"peak_flops": peak, "matrix_product_flops": product, "rows": rows}
    return common.publish(o, dtype, device, "Training speed", figures, report)


class Trainee:
    """A system with its own weights, average and optimizer, as in training."""

    def __init__(self, name: str, options: TrainOptions, device: torch.device, dtype: torch.dtype):
        self.name, self.options, self.device, self.dtype = name, options, device, dtype
        shape, self.vocab_size = SIZES[options.size]
        self.config = train_config(name, shape, options.optimizer)
        self.model = common.random_model(self.config.model, options.seed, device).train()
        self.average = EMA(self.model, self.config.optim.ema_decay)
        self.optimizer = make_optimizer(self.model, self.config)
        self.memory: int | None = None  # bytes that a step takes on a GPU
        self.called = PerToken(self.model) if name == "per-token" else self.model
        if name in COMPILED:
            self.model.compile(dynamic=False)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and orders (B, T) of a step; the same tokens in every system, the same orders in
        all of one kind."""
        o = self.options
        generator = common.seeded(o.seed + step)
        tokens = torch.randint(self.vocab_size, (o.batch_size, o.length), generator=generator)
        order = orders_at(self.config.order, o.seed, step, range(o.batch_size), o.length)
        return tokens.to(self.device), order.to(self.device)

    def step(self, step: int) -> dict:
        """Take a training step: its loss and seconds."""
        tokens, order = self.batch(step)
        synchronize(self.device)
        started = time.perf_counter()
        with autocast(self.device, self.dtype):
            loss = ao_ar_loss(self.called, tokens, order)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)
        self.optimizer.step()
        self.average.update(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        done = {"loss": float(loss), "seconds": time.perf_counter() - started}
        if not math.isfinite(done["loss"]):
            raise RuntimeError(f"the loss of {self.name} is {done['loss']} in step {step}")
        print(f"step {step}, {self.name}: {done['seconds']:.3g} s", file=sys.stderr, flush=True)
        return done


def train_config(name: str, shape: ModelConfig, optimizer: str) -> Config:
    """A system's configuration; rates and decays are the defaults."""
    optim = OptimConfig(kind="muon" if name == "muon" else optimizer)
    if name.startswith("gpt"):
        plain = dataclasses.replace(shape, target="none")
        return Config(model=plain, order=OrderConfig("l2r"), optim=optim)
    if name.startswith("rotary"):
        shape = dataclasses.replace(shape, position="rotary")
    if name == "rotary-only":
        shape = dataclasses.replace(shape, target="rotary")
    return Config(model=shape, order=OrderConfig("mixture"), optim=optim)


def measure(systems: list[Trainee], o: TrainOptions) -> dict[str, list[dict]]:
    """Warm up, then take a step of every system in turn."""
    steps: dict[str, list[dict]] = {system.name: [] for system in systems}
    for system in systems:
        on_gpu = system.device.type == "cuda"
        before = torch.cuda.memory_allocated(system.device) if on_gpu else 0
        for step in range(o.warmup):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(system.device)
            steps[system.name].append(system.step(step))
        if on_gpu:  # weights and their average were there before
            weights = 8 * sum(p.numel() for p in system.model.parameters())
            most = torch.cuda.max_memory_allocated(system.device)
            system.memory = weights + most - before
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(o.warmup, o.warmup + o.repeats):
            for system in systems:
                steps[system.name].append(system.step(step))
    return steps


def summary(
    system: Trainee, steps: dict[str, list[dict]], peak: float | None, product: float
) -> dict:
    """The row of a system; `peak` and `product`: operations per second."""
    o = system.options
    seconds = {name: [s["seconds"] for s in taken[o.warmup :]] for name, taken in steps.items()}
    of = seconds[system.name]
    speed = o.batch_size * o.length / statistics.median(of)
    flops = speed * flops_per_token(system.model.config, o.length)
    row = {
        "system": system.name,
        "seconds": statistics.median(of),
        "all_steps": steps[system.name],
        "all_seconds": of,
        "tokens_per_second": speed,
        "mfu": flops / peak if peak else None,
        "share_of_matrix_product": flops / product,
        "parameters": sum(p.numel() for p in system.model.parameters()),
        "peak_bytes": system.memory,
        "ratios": {},
    }
    for base in (name for name in BASES if name in seconds):
        ratios = [mine / other for mine, other in zip(of, seconds[base], strict=True)]
        median = row["seconds"] / statistics.median(seconds[base])
        row["ratios"][base] = [median, min(ratios), max(ratios)]
    return row


def report(result: dict) -> str:
    s = result["settings"]
    return common.paragraphs(
        result,
        f"Size {s['size']}, {s['batch_size']} sequences of {s['length']} tokens in a step, "
        f"{s['optimizer']}, {s['dtype']}; median of {s['repeats']} steps after {s['warmup']} steps "
        "of warm-up.",
        f"{result['matrix_product_flops'] / 1e9:,.0f} GFLOP/s in a matrix product.",
        table(result["rows"]),
        "x NAME: median step relative to that system's; least and largest ratio of two steps in "
        "the same repetition. MFU, of product: operations of forward and backward relative to the "
        "peak in the device's data sheet and to the matrix product above. peak: the most memory of "
        "a step, on a GPU.",
    )


def table(rows: list[dict]) -> str:
    """Ratios first."""
    head = ["system", *(f"x {base} (min - max)" for base in rows[0]["ratios"])]
    head += ["step ms (min - max)", "tokens/s", "MFU", "of product", "peak MB"]
    lines = [
        [
            r["system"],
            *("{:.3f} ({:.3f} - {:.3f})".format(*ratio) for ratio in r["ratios"].values()),
            common.spread_of([1000 * seconds for seconds in r["all_seconds"]]),
            common.short(r["tokens_per_second"]),
            "unknown" if r["mfu"] is None else f"{r['mfu']:.1%}",
            f"{r['share_of_matrix_product']:.1%}",
            "unknown" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 1e6:,.0f}",
        ]
        for r in rows
    ]
    return "\n".join(markdown_table(head, lines))
