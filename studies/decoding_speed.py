"""bench decode: the same plans decoded by every system.

All systems run in turn, so that other work of the machine affects them alike, and the
median of the repeats counts. In slow systems only some model calls are timed. They are
spread evenly over the plan, and their time is scaled to all calls (`~` in the table).
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from annotated_types import Ge

from aogpt.model import AOGPT
from aogpt.runtime.devices import pick_device, pick_dtype
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import Count
from aogpt.sampling import Engine, Generation, Plan, TokenChoice, group_sizes, plans
from aogpt.sampling.compiled import Graphed
from studies import bench_common as common
from studies.bench_common import SIZES, BenchOptions


@dataclass(frozen=True)
class System:
    """A way to decode. The name of its model is the system's own unless it has another
    one."""

    description: str
    model: str = "ours"
    is_eager: bool = False  # not compiled
    is_slow: bool = False  # some of its model calls are timed
    has_own_steps: bool = False  # they do not depend on --steps: it is timed once
    has_floor: bool = False  # its inputs are those that `floor_of` counts


SYSTEMS = {
    "ours": System(
        "AO-GPT: a cache, and only what is unmasked is computed (Lemma 4.1)",
        has_floor=True,
    ),
    "no-cache": System("Lemma 4.1 without a cache", is_slow=True),
    "cache-only": System("a cache, but every unknown position computed in every step"),
    "encoder": System("an encoder of the same size", model="encoder", is_slow=True),
    "encoder-eager": System(
        "the same encoder, not compiled", model="encoder", is_eager=True, is_slow=True
    ),
    "l2r": System(
        "AO-GPT left to right, a token a step", has_own_steps=True, has_floor=True
    ),
    "speculative": System(
        "AO-GPT in random order, --draft tokens drafted at a time and verified",
        has_own_steps=True,
    ),
    "gpt": System(
        "a plain GPT with a cache, a token a step",
        model="gpt",
        has_own_steps=True,
        has_floor=True,
    ),
    "rotary": System(
        "AO-GPT with relative attention, without adaLN", model="rotary", has_floor=True
    ),
    "adaln-rotary": System(
        "AO-GPT with adaLN beside relative attention", model="adaln-rotary"
    ),
    "two-stream": System(
        "two streams with relative attention, without adaLN", model="two-stream"
    ),
    "mask-query": System(
        "a [MASK] at the target as the query, with relative attention",
        model="mask-query",
    ),
}
DESCRIPTIONS = {name: system.description for name, system in SYSTEMS.items()}
SLOW_CALLS = 8  # of a slow system that are timed
LONGEST_CACHE_ONLY = 2048  # tokens; beyond, all its calls would take minutes
CHOICE = TokenChoice(0.9, 0.95)
# Parts of a step, by words in the names of operations and kernels.
PARTS = {
    "attention": ("attention", "_attend", "_merge", "flash", "fmha"),
    "token choice": ("topk", "softmax", "argmax", "exponential"),
    "matrix products": ("gemm", "cutlass", "nvjet", "addmm", "::mm", "linear", "bmm"),
}
# Nats. Language models of these sizes have 3.4 to 4.9 (perplexities of 30 to 140).
ENTROPY = 4.0


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """Decode the same plans with every system and compare. The floor is the time that
    the arithmetic and the memory traffic take at the rates measured on this machine."""

    systems: Annotated[
        tuple[Literal[*SYSTEMS], ...], tyro.conf.arg(help=common.listed(DESCRIPTIONS))
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
    draft: Annotated[int, Ge(2)] = 8
    """Tokens that `speculative` drafts at a time."""
    compile: bool = False
    """Let the engine compile its step, on a GPU also with ragged attention and CUDA
    graphs."""
    without: tuple[Literal["attention", "graphs"], ...] = ()
    """On a GPU: leave out these, to see what each is worth."""
    shares: Path | None = None
    """Write where the time of `ours` goes, for the last of batch sizes, lengths and
    steps."""


def bench_decode(o: DecodeOptions) -> dict:
    """Run the benchmark, report, and return what --json holds."""
    outputs = o.check({"--shares": o.shares})
    device = pick_device(o.device)
    dtype = pick_dtype(o.dtype, device)
    rows = []
    for batch_size, length in itertools.product(o.batch_size, o.lengths):
        bench = DecodeBench(o, batch_size, length, device, dtype)
        all_steps = o.steps
        if o.group:
            all_steps = (math.ceil(length / o.group),)
        for steps in all_steps:
            rows += bench.rows(steps)
            # After every measurement, so that a run that is cut short leaves its rows.
            outputs.write_json(o.json, {"rows": rows})
    figures = {"rates": bench.rates, "rows": rows}
    result = common.publish(o, outputs, dtype, device, figures, report)
    if o.shares is not None:
        outputs.write_json(o.shares, bench.shares(steps))
    return result


class DecodeBench:
    """The models of one batch size B and length T, and the systems that decode with
    them."""

    def __init__(
        self, o: DecodeOptions, B: int, T: int, device: torch.device, dtype: torch.dtype
    ):
        self.options = o
        self.B = B
        self.T = T
        self.device = device
        self.systems = list(dict.fromkeys(("ours", *o.systems)))
        if T > LONGEST_CACHE_ONLY and "cache-only" in self.systems:
            self.systems.remove("cache-only")
        self.engines: dict[tuple[str, bool], Engine] = {}
        self.repeated: dict[str, list[dict]] = {}  # timings of systems with own steps
        self.models: dict[str, AOGPT] = {}
        self.vocab_size = SIZES[o.size][1]
        for system in self.systems:
            name = SYSTEMS[system].model
            if name not in self.models:
                common.tell(f"{o.size}, {T} tokens: weights of {name}")
                config = common.config_of(name, o.size, T)
                model = common.random_model(config, device).to(dtype)
                scale_logits(model, self.vocab_size)
                self.models[name] = model
        common.tell("rates of this machine")
        self.rates = common.measure_rates(
            self.models["ours"].config, B * T, dtype, device
        )

    def rows(self, steps: int) -> list[dict]:
        """Time every system with the same plans, in turn; a row for each. Every repeat
        has a plan of its own: repeated shapes would hide what new ones cost. The first
        plan is a warm-up, in which memory is allocated, steps are compiled and graphs
        recorded."""
        generator = common.seeded()
        all_plans = []
        for _ in range(1 + self.options.repeats):
            batch = plans.Samples(self.B, self.T, generator)
            plan = plans.mdm_plan(batch, steps)
            all_plans.append(plan)
        timings: dict[str, list[dict]] = {}
        for number, plan in enumerate(all_plans):
            for system in self.systems:
                if system in self.repeated:
                    continue
                common.tell(f"{self.T} tokens, {steps} steps, {system}: ", end="")
                timing = self.time(system, plan)
                if number > 0:
                    timings.setdefault(system, []).append(timing)
                common.tell(f"{timing['seconds']:.3g} s")
        for system, own in timings.items():
            if SYSTEMS[system].has_own_steps:
                self.repeated[system] = own
        rows = []
        for system in self.systems:
            own = self.repeated.get(system) or timings[system]
            rows.append(self.row(system, steps, own, all_plans[0]))
        for row in rows:
            row["times_ours"] = row["seconds"] / rows[0]["seconds"]
        return rows

    def row(self, system: str, steps: int, timings: list[dict], plan: Plan) -> dict:
        """Return what is measured of a system, with the counts of its first plan."""
        all_seconds = [timing["seconds"] for timing in timings]
        seconds = statistics.median(all_seconds)
        of_a_call = [timing["seconds"] / timing["calls"] for timing in timings]
        row = {
            "system": system,
            "description": SYSTEMS[system].description,
            "seconds": seconds,
            "calls": timings[0]["calls"],
            "timed_calls": timings[0]["timed_calls"],
            "token_forwards": timings[0]["token_forwards"],
            "batch_size": self.B,
            "length": self.T,
            "steps": steps,
            "all_seconds": all_seconds,
            "tokens_per_second": self.B * self.T / seconds,
            "ms_per_call": 1000 * statistics.median(of_a_call),
        }
        if SYSTEMS[system].has_floor:
            ratios = [timing["seconds"] / timing["floor"] for timing in timings]
            row["times_floor"] = statistics.median(ratios)
        if self.options.memory:
            row["peak_bytes"] = self.peak(system, plan)
        return row

    def time(self, system: str, plan: Plan) -> dict:
        """Time a plan; of a slow system some of its calls, scaled to all of them."""
        if not SYSTEMS[system].is_slow:
            own = plan_of(system, plan, self.options.draft)
            seconds, (generation,) = self.decode(system, [own])
            model = self.models[SYSTEMS[system].model]
            return {
                "seconds": seconds,
                "floor": floor_of(own, model, self.vocab_size, self.rates),
                "calls": generation.model_calls,
                "timed_calls": generation.model_calls,
                "token_forwards": generation.token_forwards,
            }
        sizes = group_sizes(plan)  # (B, G) positions that each call unmasks
        calls = sizes.shape[1]
        timed = min(SLOW_CALLS, calls)
        chosen = [int((i + 0.5) * calls / timed) for i in range(timed)]
        without_calls = parts_of(system, plan, [])
        fixed, _ = self.decode(system, without_calls)
        with_some = parts_of(system, plan, chosen)
        seconds, _ = self.decode(system, with_some)
        inputs = torch.full_like(sizes, self.T)
        if system == "no-cache":
            inputs = sizes.cumsum(dim=1)
        return {
            "seconds": fixed + (seconds - fixed) * calls / timed,
            "calls": calls,
            "timed_calls": timed,
            "token_forwards": int(inputs[sizes > 0].sum()),
        }

    def decode(self, system: str, parts: list[Plan]) -> tuple[float, list[Generation]]:
        """Decode plans with the model of a system, one after the other. Return the
        seconds, without those in which graphs are recorded, and the samples of each
        plan."""
        shape = (self.B, self.T)
        engine = self.engine(system)
        generator = common.seeded(1)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        before = recording_seconds(engine)
        common.synchronize(self.device)
        started = time.perf_counter()
        generations = [engine.generate(plan, tokens, generator) for plan in parts]
        common.synchronize(self.device)
        seconds = time.perf_counter() - started
        recording = recording_seconds(engine) - before
        return seconds - recording, generations

    def engine(self, system: str) -> Engine:
        """Return the engine of a system; its buffers, packed weights, compiled steps
        and graphs are made once."""
        name = SYSTEMS[system].model
        is_eager = SYSTEMS[system].is_eager
        key = (name, is_eager)
        if key not in self.engines:
            engine = Engine(
                self.models[name],
                CHOICE,
                self.vocab_size,
                compile=self.options.compile and not is_eager,
            )
            batch = engine.batch_of(self.B, self.T)
            if isinstance(batch, Graphed):
                if "attention" in self.options.without:
                    batch.kernel = None
                batch.is_recorded = "graphs" not in self.options.without
            self.engines[key] = engine
        return self.engines[key]

    def shares(self, steps: int) -> dict:
        """Return where the time of `ours` goes: the share of each of PARTS, and the ten
        operations or kernels that take most, in milliseconds of a plan."""
        generator = common.seeded(1)
        plan = plans.mdm_plan(plans.Samples(self.B, self.T, generator), steps)
        self.decode("ours", [plan])
        on_gpu = self.device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            _, (generation,) = self.decode("ours", [plan])
        milliseconds = {}
        for event in profile.key_averages():
            microseconds = event.self_cpu_time_total
            if on_gpu:
                microseconds = event.self_device_time_total
            if microseconds > 0:
                milliseconds[event.key] = microseconds / 1000
        total = sum(milliseconds.values())
        parts = dict.fromkeys([*PARTS, "rest"], 0.0)
        for name, value in milliseconds.items():
            parts[part_of(name)] += value / total
        names = sorted(milliseconds, key=lambda name: -milliseconds[name])
        return {
            "steps": steps,
            "calls": generation.model_calls,
            "milliseconds": total,
            "shares": parts,
            "largest": {name: milliseconds[name] for name in names[:10]},
        }

    def peak(self, system: str, plan: Plan) -> int:
        """Return the most bytes of tensors that decoding takes, without the weights; of
        slow systems in the last two calls."""
        parts = [plan_of(system, plan, self.options.draft)]
        if SYSTEMS[system].is_slow:
            calls = group_sizes(plan).shape[1]
            parts = parts_of(system, plan, range(calls)[-2:])
        device = self.device
        shape = (self.B, self.T)
        self.engines.clear()  # an engine has a copy of the weights, too
        weights, _ = allocated(device, lambda: self.engine(system, (1, 1)))
        self.engines.clear()
        buffers, _ = allocated(device, lambda: self.engine(system, shape))
        _, most = allocated(device, lambda: self.decode(system, parts))
        return buffers - weights + most


def part_of(name: str) -> str:
    """Return the part of a step that an operation or kernel belongs to."""
    for part, words in PARTS.items():
        if any(word in name for word in words):
            return part
    return "rest"


def recording_seconds(engine: Engine) -> float:
    """Return the seconds in which the engine has recorded graphs so far."""
    return getattr(engine.batch, "recording_seconds", 0.0)


def allocated(device: torch.device, work: Callable) -> tuple[int, int]:
    """Return the bytes of tensors that some work leaves behind, and the most that it
    takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        after = torch.cuda.memory_allocated(device)
        most = torch.cuda.max_memory_allocated(device)
        return after - before, most - before
    # A CPU's allocator keeps no statistics: add up what the profiler saw come and go.
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    now = 0
    most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return now, most


def plan_of(system: str, plan: Plan, draft: int) -> Plan:
    """Return the plan that a system follows. Some have their own, with the same number
    of samples of the same length, and for cache-only the same number of tokens a step.
    draft: number of tokens that are drafted."""
    B, n = plan.order.shape
    batch = plans.Samples(B, n, common.seeded(int(plan.order[0, 0])))
    match system:
        case "cache-only":
            group = math.ceil(n / len(plan.step.unique()))
            return plans.score_plan(batch, group=group)
        case "speculative":
            return plans.speculative_plan(batch, draft)
        case "l2r" | "gpt":
            return plans.order_plan(batch, "l2r")
    return plan


def parts_of(system: str, plan: Plan, calls: Collection[int]) -> list[Plan]:
    """Return plans that take these calls only of a slow system, each as it is in the
    whole plan.

    An encoder computes all positions of a row in every call, so that those of the other
    calls can be given. Without a cache a call computes the known tokens and its group,
    wherever they stand: a prompt, in front of which nothing is cached, and its
    continuation."""
    first = plan.step[:, :1]
    starts = plan.step.diff(dim=1, prepend=torch.full_like(first, -1)) > 0
    # (B, T), the call of each position, as the engine counts.
    groups = starts.cumsum(dim=1) - 1
    if SYSTEMS[system].model == "encoder":
        timed = torch.tensor(list(calls), dtype=torch.long)
        chosen = torch.isin(groups, timed)
        given_first = chosen.to(torch.uint8).argsort(dim=1, stable=True)
        order = plan.order.gather(1, given_first)
        step = groups.where(chosen, -1).gather(1, given_first)
        return [Plan(order, step)]
    order = torch.arange(plan.order.shape[1]).expand_as(plan.order)
    parts = []
    for call in calls:
        is_active = (groups == call).any(dim=1)
        length = (groups <= call).sum(dim=1) * is_active
        step = groups.where(groups >= call, -1)
        parts.append(Plan(order, step, length))
    return parts


@torch.no_grad()
def scale_logits(model: AOGPT, vocab_size: int) -> None:
    """Scale the head's nearly flat random logits to an entropy of about ENTROPY. Normal
    logits of standard deviation s have log V - s^2 / 2; hidden states have a mean
    square of 1."""
    weight = model.head.weight
    std = weight.float().std() * math.sqrt(model.config.n_embd)
    too_high = max(math.log(vocab_size) - ENTROPY, 0.1)
    weight.mul_(math.sqrt(2 * too_high) / std)


def floor_of(
    plan: Plan, model: AOGPT, vocab_size: int, rates: dict[str, float]
) -> float:
    """Return a lower bound on the seconds of the engine on AO-GPT at these rates: in
    each model call the larger of two times. Bytes: the weights of blocks and head, and
    the keys and values of all cached inputs, once. Operations: two per weight and
    input, two per weight of the head and unmasked token, four per width, layer and pair
    of an input and one it sees. Not included: adaLN, embeddings, norms, token
    choice."""
    sizes = group_sizes(plan)
    D = model.config.n_embd
    L = model.config.n_layer
    itemsize = model.wte.weight.dtype.itemsize
    active = sizes > 0
    known_before = sizes.cumsum(dim=1) - sizes
    # The first copy of the group before has stayed in the cache; the others are
    # computed again.
    uncached = sizes[:, :-1] - 1
    fresh = torch.nn.functional.pad(uncached, (1, 0)).where(active, 0)
    cached = (known_before - fresh).where(active, 0)
    pairs = fresh * cached
    pairs += fresh * (fresh + 1) // 2
    pairs += sizes * (known_before + 1)
    block_weights = 12 * L * D**2
    head_weights = D * vocab_size
    cache = 2 * L * D * cached.sum(dim=0).double()
    read = itemsize * (block_weights + head_weights + cache)
    flops = 2 * block_weights * (fresh + sizes)
    flops += 2 * head_weights * sizes
    flops += 4 * L * D * pairs
    of_memory = read / rates["bandwidth"]
    of_arithmetic = flops.sum(dim=0) / rates["flops"]
    return float(torch.maximum(of_memory, of_arithmetic).sum())


def report(result: dict) -> list[str]:
    """Return the settings, and a table with ratios first."""
    s = result["settings"]
    rates = result["rates"]
    head = ["system", "samples", "tokens", "steps", "x ours", "x floor", "model calls"]
    head += ["token-forwards", "tokens/s", "ms/call", "seconds (min - max)"]
    if s["memory"]:
        head.append("peak MiB")
    lines = []
    for r in result["rows"]:
        partly = "~" if r["timed_calls"] < r["calls"] else ""
        cells = [
            r["system"],
            str(r["batch_size"]),
            str(r["length"]),
            str(r["steps"]),
            f"{r['times_ours']:.2f}",
            f"{r['times_floor']:.2f}" if "times_floor" in r else "",
            f"{r['calls']:,}",
            f"{r['token_forwards']:,}",
            common.short(r["tokens_per_second"]),
            common.short(r["ms_per_call"]),
            partly + common.spread_of(r["all_seconds"]),
        ]
        if s["memory"]:
            cells.append(common.short(r["peak_bytes"] / 2**20))
        lines.append(cells)
    settings = f"Temperature {CHOICE.temperature}, top-p {CHOICE.top_p}, {s['dtype']}"
    if s["compile"]:
        settings += ", compiled"
    if s["without"]:
        settings += f", without {' and '.join(s['without'])}"
    own_steps = []
    for name, system in SYSTEMS.items():
        if system.has_own_steps:
            own_steps.append(name)
    text = (
        f"{settings}; median of {s['repeats']}. "
        f"{rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, "
        f"{rates['bandwidth'] / 1e9:,.1f} GB/s from memory. x ours: seconds relative "
        "to `ours`. x floor: seconds relative to the arithmetic and memory traffic at "
        "these rates. ~: scaled up from some of the calls. Recording of CUDA graphs is "
        f"not included. Steps of {', '.join(own_steps)} do not depend on --steps."
    )
    return [text, "", *markdown_table(head, lines)]
