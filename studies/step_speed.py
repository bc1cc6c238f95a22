"""bench train: the same training step of every system.

All systems take a step in turn, so that other work of the machine affects them alike.
The median step counts; ratios come with the least and the largest over the repetitions.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from aogpt.model import Transformer
from aogpt.objectives import ao_ar_loss
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime.devices import autocast, has_compiler, pick_device, pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import Count
from aogpt.systems import flops_per_token
from aogpt.training.config import Config, OptimConfig
from aogpt.training.metrics import peak_flops
from aogpt.training.optimizers import EMA, MAX_GRAD_NORM, make_optimizers
from studies import bench_common as common
from studies.bench_common import SIZES, BenchOptions

SYSTEMS = {
    "aogpt": "AO-GPT, random orders with 10% left to right",
    "gpt": "the same model without target positions, left to right",
    "rotary": "AO-GPT with relative attention, without adaLN",
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions(BenchOptions):
    """Take the same training steps with every system and compare. Data and orders are
    drawn before the clock starts. A system that is compiled again after the warm-up is
    an error."""

    systems: Annotated[
        tuple[Literal[*SYSTEMS], ...], tyro.conf.arg(help=common.listed(SYSTEMS))
    ] = ("aogpt", "gpt")
    batch_size: Count = 2
    """Sequences in a step, which is one forward and one backward pass."""
    length: Count | None = None
    """Tokens in a sequence; by default the model's block size (tiny: 128, others:
    1024)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    compile: bool = True
    repeats: Count = 5
    """Timed steps of every system, in turn; the median counts."""
    warmup: Count = 3
    """Steps of every system before that."""


def bench_train(o: TrainOptions) -> dict:
    """Run the benchmark, report, and return what --json holds. Raises UserError for
    settings that no system can run."""
    outputs = o.check()
    device = pick_device(o.device)
    model, _ = SIZES[o.size]
    o = dataclasses.replace(o, length=o.length or model.block_size)
    if o.compile and device.type == "cpu" and not has_compiler():
        raise UserError(
            "compiling on a CPU needs a C++ compiler and there is none: --no-compile"
        )
    dtype = pick_dtype(o.dtype, device)
    systems = [Trainee(name, o, device, dtype) for name in dict.fromkeys(o.systems)]
    steps = measure(systems, o)
    peak = peak_flops(device, dtype)
    rows = [summary(system, steps, peak) for system in systems]
    figures = {"peak_flops": peak, "rows": rows}
    return common.publish(o, outputs, dtype, device, figures, report)


class Trainee:
    """A system with its own weights, average and optimizer, as in training."""

    def __init__(
        self, name: str, options: TrainOptions, device: torch.device, dtype: torch.dtype
    ):
        common.tell(f"{options.size}: weights of {name}")
        self.name = name
        self.options = options
        self.device = device
        self.dtype = dtype
        self.vocab_size = SIZES[options.size][1]
        self.config = Config(
            model=common.config_of(name, options.size, options.length),
            order=OrderConfig("l2r" if name == "gpt" else "mixture"),
            optim=OptimConfig(kind=options.optimizer),
        )
        self.model = common.random_model(self.config.model, device).train()
        self.average = EMA(self.model, self.config.optim.ema_decay)
        self.optimizers = make_optimizers(self.model, self.config)
        self.memory: int | None = None  # bytes that a step takes on a GPU
        if options.compile:
            self.model.compile(dynamic=False)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and orders (B, T) of a step; the same tokens in every system,
        the same orders in all of one kind."""
        o = self.options
        generator = common.seeded(step)
        tokens = torch.randint(
            self.vocab_size, (o.batch_size, o.length), generator=generator
        )
        order = orders_at(self.config.order, 0, step, range(o.batch_size), o.length)
        return tokens.to(self.device), order.to(self.device)

    def step(self, step: int) -> dict:
        """Take a training step: its loss and seconds."""
        tokens, order = self.batch(step)
        common.synchronize(self.device)
        started = time.perf_counter()
        with autocast(self.device, self.dtype):
            loss = ao_ar_loss(self.model, tokens, order)
        update(loss, self.model, self.optimizers, self.average)
        common.synchronize(self.device)
        measured = {"loss": loss.item(), "seconds": time.perf_counter() - started}
        common.tell(f"step {step}, {self.name}: {measured['seconds']:.3g} s")
        return measured

    def warm_up(self) -> list[dict]:
        """Return the first steps; on a GPU with the memory of weights, average and what
        a step adds."""
        if self.device.type != "cuda":
            return [self.step(step) for step in range(self.options.warmup)]
        before = torch.cuda.memory_allocated(self.device)
        steps = []
        for step in range(self.options.warmup):
            torch.cuda.reset_peak_memory_stats(self.device)
            steps.append(self.step(step))
        weights = sum(p.nbytes for p in self.model.parameters())
        self.memory = (
            2 * weights + torch.cuda.max_memory_allocated(self.device) - before
        )
        return steps


def update(
    loss: Tensor,
    model: Transformer,
    optimizers: list[torch.optim.Optimizer],
    average: EMA,
) -> None:
    """Update weights and their average from a loss, as a run does on one process."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    average.update()


def measure(systems: list[Trainee], o: TrainOptions) -> dict[str, list[dict]]:
    """Warm up, then take a step of every system in turn."""
    steps = {system.name: system.warm_up() for system in systems}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(o.warmup, o.warmup + o.repeats):
            for system in systems:
                steps[system.name].append(system.step(step))
    return steps


def summary(system: Trainee, steps: dict[str, list[dict]], peak: float | None) -> dict:
    """Return the row of a system; peak: operations per second."""
    o = system.options
    seconds = {}
    for name, of_system in steps.items():
        seconds[name] = [step["seconds"] for step in of_system[o.warmup :]]
    own = seconds[system.name]
    median = statistics.median(own)
    speed = o.batch_size * o.length / median
    flops = flops_per_token(system.model.config, o.length)
    row = {
        "system": system.name,
        "seconds": median,
        "all_seconds": own,
        "losses": [step["loss"] for step in steps[system.name]],
        "tokens_per_second": speed,
        "mfu": speed * flops / peak if peak else None,
        "peak_bytes": system.memory,
    }
    if "gpt" in seconds:
        ratios = [one / gpt for one, gpt in zip(own, seconds["gpt"], strict=True)]
        ratio = median / statistics.median(seconds["gpt"])
        row["times_gpt"] = [ratio, min(ratios), max(ratios)]
    return row


def report(result: dict) -> list[str]:
    """Return the settings, and a table with ratios first."""
    s = result["settings"]
    lines = []
    for row in result["rows"]:
        ratio = ""
        if "times_gpt" in row:
            median, least, largest = row["times_gpt"]
            ratio = f"{median:.3f} ({least:.3f} - {largest:.3f})"
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        peak = "unknown"
        if row["peak_bytes"] is not None:
            peak = f"{row['peak_bytes'] / 1e6:,.0f}"
        milliseconds = [1000 * seconds for seconds in row["all_seconds"]]
        speed = common.short(row["tokens_per_second"])
        duration = common.spread_of(milliseconds)
        lines.append([row["system"], ratio, duration, speed, mfu, peak])
    head = ["system", "x gpt (min - max)", "step ms (min - max)"]
    head += ["tokens/s", "MFU", "peak MB"]
    legend = (
        f"Size {s['size']}, {s['batch_size']} sequences of {s['length']} tokens in a "
        f"step, {s['optimizer']}, {s['dtype']}; median of {s['repeats']} steps after "
        f"{s['warmup']} of warm-up. x gpt: step relative to the GPT's. MFU: operations "
        "of forward and backward relative to the device's data sheet. peak: the most "
        "memory of a step, on a GPU."
    )
    return [legend, "", *markdown_table(head, lines)]
