"""bench decode: the same plans decoded by every system.

All systems run in turn, so that other work of the machine affects them alike, and the median of the
repeats counts. Of slow systems only some model calls are timed, spread evenly over the plan, and
scaled to all of them (`~` in the table).
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from aogpt.model import AOGPT, ModelConfig
from aogpt.runtime.devices import pick_device, pick_dtype, synchronize
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import Count
from aogpt.sampling import Engine, Generation, Plan, TokenChoice, group_sizes, plans
from studies import bench_common as common
from studies.bench_common import OTHER_MODELS, SIZES, BenchOptions

SYSTEMS = {
    "ours": "AO-GPT: a cache, and only what is unmasked is computed (Lemma 4.1)",
    "no-cache": "Lemma 4.1 without a cache",
    "cache-only": "a cache, but every unknown position computed in every step",
    "encoder": "an encoder of the same size",
    "l2r": "AO-GPT left to right, a token a step",
    "speculative": "AO-GPT, eight tokens drafted at a time and verified",
    "gpt": "a plain GPT with a cache, a token a step",
    "rotary": "AO-GPT with relative attention, without adaLN",
}
# systems of which this many model calls are timed
SLOW = ("no-cache", "encoder")
SLOW_CALLS = 8
LONGEST_CACHE_ONLY = 2048  # tokens; beyond, all its calls would take minutes
DRAFT = 8
CHOICE = TokenChoice(0.9, 0.95)
ENTROPY = 4.0  # nats; language models of these sizes have 3.4 to 4.9 (perplexities of 30 to 140)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """Decode the same plans with every system and compare. The floor is the time that the
    arithmetic and the memory traffic of `ours` take at the rates measured on this machine."""

    systems: Annotated[
        tuple[Literal[*SYSTEMS], ...], tyro.conf.arg(help=common.listed(SYSTEMS))
    ] = ("ours", "no-cache", "encoder")
    batch_size: tuple[Count, ...] = (8,)
    lengths: tuple[Count, ...] = (1024,)
    """Tokens in a sample."""
    steps: tuple[Count, ...] = (64, 256, 1024)
    """Steps of masked-diffusion sampling, one measurement for each."""
    group: Count | None = None
    """Tokens per step, instead of --steps."""
    memory: bool = False
    """Also measure the peak memory of tensors, without the weights."""
    repeats: Count = 3
    """How often every system runs, in turn; the median counts."""
    compile: bool = False
    """Let the engine compile its step."""
    kernels: bool = False
    """On a GPU: draw tokens with a Triton kernel, and with --compile record CUDA graphs."""


def bench_decode(o: DecodeOptions) -> dict:
    """Run the benchmark, report, and return what --json holds."""
    outputs = o.check()
    device = pick_device(o.device)
    dtype = pick_dtype(o.dtype, device)
    rows = []
    for batch_size, length in itertools.product(o.batch_size, o.lengths):
        bench = DecodeBench(o, batch_size, length, device, dtype)
        for steps in [math.ceil(length / o.group)] if o.group else o.steps:
            rows += bench.rows(steps)
            # After every measurement, so that a run that is cut short leaves its rows.
            outputs.write_json(o.json, {"rows": rows})
    figures = {"rates": bench.rates, "rows": rows}
    return common.publish(o, outputs, dtype, device, figures, report)


class DecodeBench:
    """The models of one batch size B and length T, and the systems that decode with them."""

    def __init__(
        self, o: DecodeOptions, B: int, T: int, device: torch.device, dtype: torch.dtype
    ):
        self.options = o
        self.B = B
        self.T = T
        self.device = device
        known = dict.fromkeys(("ours", *o.systems))
        self.systems = [
            s for s in known if s != "cache-only" or T <= LONGEST_CACHE_ONLY
        ]
        self.engines: dict[AOGPT, Engine] = {}
        self.models = {}
        for system in (s for s in known if s == "ours" or s in OTHER_MODELS):
            common.tell(f"{o.size}, {T} tokens: weights of {system}")
            config = common.config_of(system, o.size, T)
            self.vocab_size = SIZES[o.size][1]
            self.models[system] = common.random_model(config, device).to(dtype)
            scale_logits(self.models[system], self.vocab_size)
        common.tell("rates of this machine")
        self.rates = common.measure_rates(
            self.models["ours"].config, B * T, dtype, device
        )

    def rows(self, steps: int) -> list[dict]:
        """Time every system with the same plans, in turn; a row for each, that of `ours` with its
        floor. Every repeat has a plan of its own: repeated shapes would hide what new ones cost.
        The first plan is a warm-up, in which memory is allocated and steps are compiled."""
        generator = common.seeded()
        repeats = range(1 + self.options.repeats)
        sizes = (self.B, self.T, steps)
        drawn = [plans.mdm_plan(*sizes, generator) for _ in repeats]
        timings: dict[str, list[dict]] = {system: [] for system in self.systems}
        for number, plan in enumerate(drawn):
            for system, of in timings.items():
                common.tell(f"{self.T} tokens, {steps} steps, {system}: ", end="")
                timing = self.time(system, plan)
                of += [timing] * (number > 0)
                common.tell(f"{timing['seconds']:.3g} s")
        rows = [self.row(system, steps, of, drawn[0]) for system, of in timings.items()]
        ours = rows[0]
        model = self.models["ours"]
        shape = model.config, self.vocab_size, model.wte.weight.dtype.itemsize
        floors = [floor_of(plan, *shape, self.rates) for plan in drawn[1:]]
        pairs = zip(ours["all_seconds"], floors, strict=True)
        ours["times_floor"] = statistics.median(
            seconds / floor for seconds, floor in pairs
        )
        for row in rows:
            row["times_ours"] = row["seconds"] / ours["seconds"]
        return rows

    def row(self, system: str, steps: int, timings: list[dict], plan: Plan) -> dict:
        row = {"system": system, "description": SYSTEMS[system]} | timings[0]
        row |= {"batch_size": self.B, "length": self.T, "steps": steps}
        row["all_seconds"] = [timing["seconds"] for timing in timings]
        row["seconds"] = statistics.median(row["all_seconds"])
        row["ms_per_call"] = 1000 * statistics.median(
            t["seconds"] / t["calls"] for t in timings
        )
        if self.options.memory:
            row["peak_bytes"] = self.peak(system, plan)
        return row

    def time(self, system: str, plan: Plan) -> dict:
        """Time a plan; of a slow system some of its calls, scaled to all of them."""
        if system not in SLOW:
            seconds, (done,) = self.decode(system, [plan_of(system, plan)])
            calls = done.model_calls
            forwards = done.token_forwards
            counts = {"calls": calls, "timed_calls": calls, "token_forwards": forwards}
            return {"seconds": seconds} | counts
        sizes = group_sizes(plan)  # (B, G) positions that each call unmasks
        calls = sizes.shape[1]
        timed = min(SLOW_CALLS, sizes.shape[1])
        chosen = [int((i + 0.5) * calls / timed) for i in range(timed)]
        fixed, _ = self.decode(
            system, parts_of(system, plan, [])
        )  # the cost besides its calls
        seconds, _ = self.decode(system, parts_of(system, plan, chosen))
        inputs = (
            sizes.cumsum(dim=1)
            if system == "no-cache"
            else torch.full_like(sizes, self.T)
        )
        counts = {"calls": calls, "timed_calls": timed}
        counts["token_forwards"] = int(inputs[sizes > 0].sum())
        return {"seconds": fixed + (seconds - fixed) * calls / timed} | counts

    def decode(self, system: str, parts: list[Plan]) -> tuple[float, list[Generation]]:
        """Decode plans with the model of a system, one after the other; the seconds, too."""
        engine = self.engine(system, (self.B, self.T))
        generator = common.seeded(1)
        tokens = torch.randint(self.vocab_size, (self.B, self.T), generator=generator)
        synchronize(self.device)
        started = time.perf_counter()
        done = [engine.generate(plan, tokens, generator=generator) for plan in parts]
        synchronize(self.device)
        return time.perf_counter() - started, done

    def engine(self, system: str, shape: tuple[int, int]) -> Engine:
        """Buffers, packed weights and compiled steps are made once."""
        model = self.models.get(system, self.models["ours"])
        if model not in self.engines:
            o = self.options
            self.engines[model] = Engine(
                model, *shape, CHOICE, self.vocab_size, o.compile, o.kernels
            )
        return self.engines[model]

    def peak(self, system: str, plan: Plan) -> int:
        """The most bytes of tensors that decoding takes, without the weights; of slow systems in
        the last two calls."""
        parts = [plan_of(system, plan)]
        if system in SLOW:
            parts = parts_of(system, plan, range(group_sizes(plan).shape[1])[-2:])
        self.engines.clear()  # an engine has a copy of the weights, too
        weights, _ = allocated(self.device, lambda: self.engine(system, (1, 1)))
        self.engines.clear()
        buffers, _ = allocated(
            self.device, lambda: self.engine(system, (self.B, self.T))
        )
        return (
            buffers
            - weights
            + allocated(self.device, lambda: self.decode(system, parts))[1]
        )


def allocated(device: torch.device, work: Callable) -> tuple[int, int]:
    """Bytes of tensors that some work leaves behind, and the most that it takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        after = torch.cuda.memory_allocated(device)
        most = torch.cuda.max_memory_allocated(device)
        return after - before, most - before
    # A CPU's allocator keeps no statistics: add up what the profiler saw come and go.
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as found:
        work()
    events = [
        e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    sizes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    ]
    return sum(sizes), max(itertools.accumulate(sizes, initial=0))


def plan_of(system: str, plan: Plan) -> Plan:
    """The plan that a system follows: some have their own, with as many samples of the same length,
    and for cache-only as many tokens a step."""
    B, n = plan.order.shape
    generator = common.seeded(int(plan.order[0, 0]))
    match system:
        case "cache-only":
            group = math.ceil(n / len(plan.step.unique()))
            return plans.adaptive_plan(B, n, "confidence", generator, group=group)
        case "speculative":
            return plans.speculative_plan(B, n, DRAFT, generator)
        case "l2r" | "gpt":
            return plans.l2r_plan(B, n)
    return plan


def parts_of(system: str, plan: Plan, calls: Collection[int]) -> list[Plan]:
    """Plans that take these calls only of a slow system, each as it is in the whole plan.

    An encoder computes all positions of a row in every call, so that those of the other calls can
    be given. Without a cache a call computes the known tokens and its group, wherever they stand:
    a prompt, in front of which nothing is cached, and its continuation."""
    starts = plan.step.diff(dim=1, prepend=torch.full_like(plan.step[:, :1], -1)) > 0
    groups = (
        starts.cumsum(dim=1) - 1
    )  # (B, T) the call of each position, as the engine counts
    if system == "encoder":
        chosen = torch.isin(groups, torch.tensor(list(calls), dtype=torch.long))
        given_first = chosen.to(torch.uint8).argsort(dim=1, stable=True)
        step = groups.where(chosen, -1)
        return [Plan(plan.order.gather(1, given_first), step.gather(1, given_first))]
    order = torch.arange(plan.order.shape[1]).expand_as(plan.order)
    parts = []
    for call in calls:
        length = (groups <= call).sum(dim=1) * (groups == call).any(dim=1)
        parts.append(Plan(order, groups.where(groups >= call, -1), length))
    return parts


@torch.no_grad()
def scale_logits(model: AOGPT, vocab_size: int) -> None:
    """Scale the head's nearly flat random logits to an entropy of about ENTROPY. Normal logits of
    standard deviation s have log V - s^2 / 2; hidden states have a mean square of 1."""
    std = model.head.weight.float().std() * math.sqrt(model.config.n_embd)
    model.head.weight.mul_(
        math.sqrt(2 * max(math.log(vocab_size) - ENTROPY, 0.1)) / std
    )


def floor_of(
    plan: Plan,
    config: ModelConfig,
    vocab_size: int,
    itemsize: int,
    rates: dict[str, float],
) -> float:
    """A lower bound on the seconds of the engine on AO-GPT at these rates: in each model call the
    larger of two times. Bytes: the weights of blocks and head, and the keys and values of all
    cached inputs, once. Operations: two per weight and input, two per weight of the head and
    unmasked token, four per width, layer and pair of an input and one it sees. Not included: adaLN,
    embeddings, norms, token choice."""
    sizes = group_sizes(plan)
    D = config.n_embd
    L = config.n_layer
    active = sizes > 0
    known = sizes.cumsum(dim=1) - sizes
    # The first copy of the group before has stayed in the cache; the others are computed again.
    fresh = torch.nn.functional.pad(sizes[:, :-1] - 1, (1, 0)).where(active, 0)
    cached = (known - fresh).where(active, 0)
    pairs = fresh * cached + fresh * (fresh + 1) // 2 + sizes * (known + 1)
    block_weights = 12 * L * D**2
    head_weights = D * vocab_size
    read = itemsize * (
        block_weights + head_weights + 2 * L * D * cached.sum(dim=0).double()
    )
    flops = (
        2 * block_weights * (fresh + sizes)
        + 2 * head_weights * sizes
        + 4 * L * D * pairs
    )
    seconds = torch.maximum(
        read / rates["bandwidth"], flops.sum(dim=0) / rates["flops"]
    )
    return float(seconds.sum())


def report(result: dict) -> list[str]:
    """The settings, and a table with ratios first."""
    s = result["settings"]
    rates = result["rates"]
    rows = result["rows"]
    head = ["system", "samples", "tokens", "steps", "x ours", "x floor", "model calls"]
    head += ["token-forwards", "ms/call", "seconds (min - max)"]
    head += ["peak MiB"] * s["memory"]
    lines = []
    for r in rows:
        cells = [str(r[key]) for key in ("batch_size", "length", "steps")]
        cells += [
            f"{r[key]:.2f}" if r.get(key) else ""
            for key in ("times_ours", "times_floor")
        ]
        cells += [f"{r[key]:,}" for key in ("calls", "token_forwards")]
        cells += [common.short(r["ms_per_call"])]
        cells += [
            "~" * (r["timed_calls"] < r["calls"]) + common.spread_of(r["all_seconds"])
        ]
        cells += [common.short(r["peak_bytes"] / 2**20)] if s["memory"] else []
        lines.append([r["system"], *cells])
    how = ", compiled" * s["compile"] + ", with kernels" * s["kernels"]
    text = (
        f"Temperature {CHOICE.temperature}, top-p {CHOICE.top_p}, {s['dtype']}{how}; median of "
        f"{s['repeats']}. "
        f"{rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, {rates['bandwidth'] / 1e9:,.1f} "
        "GB/s from memory. x ours: seconds relative to `ours`. x floor: seconds of `ours` relative "
        "to its arithmetic and memory traffic at these rates. ~: scaled up from some of the calls."
    )
    return [text, "", *markdown_table(head, lines)]
