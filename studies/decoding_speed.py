"""bench decode: the same plans decoded by every system.

All systems run in turn, so that other work of the machine affects them alike, and the median of the
repeats counts. Of slow systems only some model calls are timed, spread evenly over the plan, and
scaled to all of them (`~` in the table).
"""

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from annotated_types import Ge

from model import AOGPT, ModelConfig
from runtime.devices import pick_device, pick_dtype, synchronize
from runtime.errors import UserError
from runtime.outputs import markdown_table
from runtime.validation import Count, NonNegative
from sampling import (
    Engine,
    Generation,
    Plan,
    TokenChoice,
    adaptive_plan,
    group_sizes,
    l2r_plan,
    mdm_plan,
    speculative_plan,
)
from studies import bench_common as common
from studies.baselines import decode_plainly
from studies.bench_common import SIZES, BenchOptions

SYSTEMS = {
    "ours": "AO-GPT: a cache, and only what is unmasked is computed (Lemma 4.1)",
    "baseline": "the same with a plain cached sampler",
    "no-cache": "Lemma 4.1 without a cache",
    "cache-only": "a cache, but every unknown position computed in every step",
    "encoder": "an encoder of the same size",
    "l2r": "AO-GPT left to right, a token a step",
    "speculative": "AO-GPT, eight tokens drafted at a time and verified",
    "gpt": "a plain GPT with a cache, a token a step",
    "rotary": "AO-GPT with relative attention, without adaLN",
}
SLOW = ("no-cache", "encoder")  # systems of which some model calls are timed
OTHER_MODELS = ("encoder", "gpt", "rotary")  # the other systems decode with AO-GPT
LONGEST_CACHE_ONLY = 2048  # tokens; beyond, all its calls would take minutes
DRAFT = 8
ENTROPY = 4.0  # nats; language models of these sizes have 3.4 to 4.9 (perplexities of 30 to 140)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """Decode the same plans with every system and compare. The floor is the time that the
    arithmetic and the memory traffic of `ours` take at the rates measured on this machine."""

    systems: Annotated[
        tuple[Literal[*SYSTEMS], ...], tyro.conf.arg(help=common.listed(SYSTEMS))
    ] = ("ours", "baseline", "no-cache", "encoder")
    batch_size: tuple[Count, ...] = (8,)
    length: Count = 1024
    """Tokens in a sample."""
    steps: tuple[Count, ...] = (64, 256, 1024)
    """Steps of masked-diffusion sampling, one measurement for each."""
    lengths: tuple[Count, ...] = ()
    """Instead of --length and --steps: decode samples of these lengths, --group tokens a step, and
    fit how the figures grow with the length."""
    group: Count = 4
    memory: bool = False
    """Also measure the peak memory of tensors, without the weights."""
    temperature: Annotated[float, Ge(0)] = 0.9
    top_p: float = 0.95
    repeats: Count = 3
    """How often every system runs, in turn; the median counts."""
    slow_calls: NonNegative = 8
    """Model calls of no-cache and encoder that are timed, spread evenly over the plan; 0: all."""
    compile: bool = False
    """Let the engine compile its step."""

    def check(self) -> None:
        super().check()
        if not self.steps or not self.batch_size or len(set(self.lengths)) == 1:
            raise UserError("give --steps and --batch-size a number, and --lengths two or none")


def bench_decode(o: DecodeOptions) -> dict:
    """Run the benchmark, report, and return what --json holds. Raises UserError for settings that
    no system can run."""
    o.check()
    device = pick_device(o.device)
    dtype, rows = pick_dtype(o.dtype, device), []
    settings = [(o.length, steps) for steps in dict.fromkeys(o.steps)]
    if o.lengths:
        settings = [(length, math.ceil(length / o.group)) for length in sorted(set(o.lengths))]
    for batch_size, (length, steps) in itertools.product(dict.fromkeys(o.batch_size), settings):
        systems = [s for s in o.systems if s != "cache-only" or length <= LONGEST_CACHE_ONLY]
        bench = DecodeBench(o, batch_size, length, systems, device, dtype)
        rates = common.measure_rates(bench.model.config, batch_size * length, dtype, device)
        rows += bench.rows(steps, rates)
    figures = {"rates": rates, "rows": rows} | ({"exponents": exponents(rows)} if o.lengths else {})
    return common.publish(o, dtype, device, "Decoding speed", figures, report)


class DecodeBench:
    """The models of one batch size and length, and the systems that decode with them."""

    def __init__(
        self,
        options: DecodeOptions,
        batch_size: int,
        length: int,
        systems: list[str],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.options, self.device, self.dtype = options, device, dtype
        self.batch_size, self.length, self.systems = batch_size, length, dict.fromkeys(systems)
        self.choice = TokenChoice(options.temperature, options.top_p)
        self.engines: dict[AOGPT, Engine] = {}
        config, self.vocab_size = SIZES[options.size]
        config = dataclasses.replace(config, block_size=max(config.block_size, length))
        self.models = {}
        for system in ("ours", *(s for s in OTHER_MODELS if s in systems)):
            changed = other_config(system, config, self.vocab_size)
            self.models[system] = common.random_model(changed, options.seed, device).to(dtype)
            scale_logits(self.models[system], self.vocab_size, length, options.seed)
        self.model = self.models["ours"]

    def rows(self, steps: int, rates: dict[str, float]) -> list[dict]:
        """Time every system with the same plans, in turn; a row for each, that of `ours` with its
        floor. Every repeat has a plan of its own: repeated shapes would hide what new ones cost.
        The first plan is a warm-up, in which memory is allocated and steps are compiled."""
        o, generator = self.options, common.seeded(self.options.seed)
        sizes = {"batch_size": self.batch_size, "length": self.length, "steps": steps}
        plans = [mdm_plan(**sizes, generator=generator) for _ in range(1 + o.repeats)]
        timings: dict[str, list[dict]] = {system: [] for system in self.systems}
        for number, plan in enumerate(plans):
            for system, of in timings.items():
                of.append(self.time(system, plan, o.slow_calls if number else 2))
                told = f"{self.length} tokens, {steps} steps, {system}: {of[-1]['seconds']:.3g} s"
                print(told, file=sys.stderr, flush=True)
        rows = []
        for system, (first, *of) in timings.items():
            seconds, forwards = ([t[key] for t in of] for key in ("seconds", "token_forwards"))
            name = system if len(o.batch_size) == 1 else f"{system}_{self.batch_size}"
            row = {"system": system, "name": name, "description": SYSTEMS[system]} | sizes | of[0]
            row |= {"seconds": statistics.median(seconds), "first_seconds": first["seconds"]}
            row["ms_per_call"] = 1000 * statistics.median(t["seconds"] / t["calls"] for t in of)
            row["by_repeat"] = {"seconds": seconds, "forwards": forwards}
            if o.memory:
                peaks = self.peak(system, plans[0]), self.planned(system)
                row["by_repeat"] |= {
                    kind: [size / 2**20] * o.repeats
                    for kind, size in zip(("peak", "planned"), peaks, strict=True)
                }
            rows.append(row)
        ours = next((row for row in rows if row["system"] == "ours"), None)
        if ours:
            shape = self.model.config, self.vocab_size, self.dtype.itemsize
            pairs = zip(ours["by_repeat"]["seconds"], plans[1:], strict=True)
            ratios = [seconds / floor_of(plan, *shape, rates) for seconds, plan in pairs]
            ours["times_floor"] = statistics.median(ratios)
        for row in rows:
            row["times_ours"] = row["seconds"] / ours["seconds"] if ours else None
        return rows

    def peak(self, system: str, plan: Plan) -> int:
        """The most bytes of tensors that decoding takes, without the weights; of slow systems in
        the last two calls."""
        calls = range(model_calls(system, plan))[-2:] if system in SLOW else None
        model, self.engines, buffers = self.models.get(system, self.model), {}, 0
        if system not in ("baseline", "no-cache"):  # an engine has a copy of the weights, too
            weights, _ = allocated(self.device, lambda: self.engine(model, (1, 1)))
            self.engines.clear()
            buffers, _ = allocated(self.device, lambda: self.engine(model, plan.order.shape))
            buffers -= weights
        return buffers + allocated(self.device, lambda: self.decode(system, plan, calls))[1]

    def planned(self, system: str) -> int:
        """Bytes of keys and values, and of adaLN's modulations of all positions, which decoding
        keeps if they are not more."""
        c, size = self.models.get(system, self.model).config, self.dtype.itemsize
        cache = 2 * c.n_layer * self.batch_size * self.length * c.n_embd * size
        modulations = c.block_size * (6 * c.n_layer + 2) * c.n_embd * size
        kept = modulations if c.has_adaln and modulations <= cache else 0
        return 0 if system in SLOW else cache + kept

    def time(self, system: str, plan: Plan, most: int) -> dict:
        """Time a plan; of a slow system `most` of its calls, scaled to all of them."""
        calls, timed = model_calls(system, plan), most
        if system not in SLOW or not 0 < most < calls:
            seconds, done = self.decode(system, plan)
            calls = timed = done.model_calls
        else:
            chosen = [int((i + 0.5) * calls / most) for i in range(most)]
            fixed, _ = self.decode(system, plan, [])  # what decoding costs besides its calls
            seconds, done = self.decode(system, plan, chosen)
            seconds = fixed + (seconds - fixed) * calls / most
        forwards = done.token_forwards
        if system == "encoder":  # a shortened plan does not know the whole
            forwards = plan.order.shape[1] * int(group_sizes(plan).count_nonzero())
        figures = {"seconds": seconds, "calls": calls, "timed_calls": timed}
        return figures | {"token_forwards": forwards}

    def decode(
        self, system: str, plan: Plan, calls: Collection[int] | None = None
    ) -> tuple[float, Generation]:
        """Decode a plan with one system; of the slow systems only `calls`, if they are given.
        Returns the seconds, too."""
        o, model = self.options, self.models.get(system, self.model)
        plain, generator = system in ("baseline", "no-cache"), common.seeded(o.seed)
        engine = None if plain else self.engine(model, plan.order.shape)
        synchronize(self.device)
        started = time.perf_counter()
        if plain:
            options = {"choice": self.choice, "vocab_size": self.vocab_size, "calls": calls}
            options["generator"] = common.seeded(o.seed, self.device)
            done = decode_plainly(model, plan, cached=system == "baseline", **options)
        else:
            plan = plan_of(system, plan) if calls is None else only_calls(plan, calls)
            tokens = torch.randint(self.vocab_size, plan.order.shape, generator=generator)
            done = engine.generate(plan, tokens, generator=generator)
        synchronize(self.device)
        return time.perf_counter() - started, done

    def engine(self, model: AOGPT, shape: tuple[int, int]) -> Engine:
        """Buffers, packed weights and compiled steps are made once."""
        if model not in self.engines:
            made = Engine(model, *shape, self.choice, self.vocab_size, self.options.compile)
            self.engines[model] = made
        return self.engines[model]


def allocated(device: torch.device, work: Callable) -> tuple[int, int]:
    """Bytes of tensors that some work leaves behind, and the most that it takes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        after, most = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return after - before, most - before
    # A CPU's allocator keeps no statistics: add up what the profiler saw come and go.
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as found:
        work()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(sizes), max(itertools.accumulate(sizes, initial=0))


def plan_of(system: str, plan: Plan) -> Plan:
    """The plan that a system follows: some have their own, with as many samples of the same length,
    and for cache-only as many tokens a step."""
    B, n = plan.order.shape
    generator = common.seeded(int(plan.order[0, 0]))
    match system:
        case "cache-only":
            group = math.ceil(n / len(plan.step.unique()))
            return adaptive_plan(B, n, "confidence", generator, group=group)
        case "speculative":
            return speculative_plan(B, n, DRAFT, generator)
        case "l2r" | "gpt":
            return l2r_plan(B, n)
    return plan


def model_calls(system: str, plan: Plan) -> int:
    """Forward passes: the baselines take the plan's steps, the engine each row's own."""
    if system in ("baseline", "no-cache"):
        return len(plan.step.unique())
    return group_sizes(plan).shape[1]


def only_calls(plan: Plan, calls: Collection[int]) -> Plan:
    """A plan of these calls only, with the positions of the others given. In every call an encoder
    computes all positions of a row, so that each call costs what it costs in the whole plan."""
    starts = plan.step.diff(dim=1, prepend=torch.full_like(plan.step[:, :1], -1)) > 0
    groups = starts.cumsum(dim=1) - 1  # (B, T) the call of each position, as the engine counts
    chosen = torch.isin(groups, torch.tensor(list(calls), dtype=torch.long))
    given_first = chosen.to(torch.uint8).argsort(dim=1, stable=True)
    step = groups.where(chosen, -1)
    return Plan(plan.order.gather(1, given_first), step.gather(1, given_first))


def other_config(system: str, config: ModelConfig, vocab_size: int) -> ModelConfig:
    """An encoder (with [MASK] after the tokens), GPT or rotary AO-GPT of the decoder's size."""
    ids = {"mask_token": vocab_size, "vocab_size": max(config.vocab_size, vocab_size + 1)}
    changes = {
        "gpt": {"target": "none"},
        "rotary": {"position": "rotary", "target": "rotary"},
        "encoder": {"attention": "full", "target": "none", "tied_head": False} | ids,
    }
    return dataclasses.replace(config, **changes.get(system, {}))


@torch.no_grad()
def scale_logits(model: AOGPT, vocab_size: int, length: int, seed: int) -> None:
    """Scale the head's weights to an entropy of about ENTROPY: the logits of random weights are
    nearly flat, and their nucleus has nearly all tokens. Normal logits of standard deviation s have
    an entropy of log V - s^2 / 2."""
    generator, shape = common.seeded(seed), (2, min(length, 64))
    tokens, order = (
        values.to(model.wte.weight.device)
        for values in (
            torch.randint(vocab_size, shape, generator=generator),
            torch.rand(shape, generator=generator).argsort(dim=1),
        )
    )
    if model.config.is_encoder:
        inputs = (tokens.where(order >= shape[1] / 2, model.config.mask_token),)
    else:
        inputs = tokens, order
    std = model.head_logits(model.hidden(*inputs))[..., :vocab_size].float().std(dim=-1).mean()
    model.head.weight.mul_(math.sqrt(2 * max(math.log(vocab_size) - ENTROPY, 0.1)) / std)


def floor_of(
    plan: Plan, config: ModelConfig, vocab_size: int, itemsize: int, rates: dict[str, float]
) -> float:
    """A lower bound on the seconds of the engine on AO-GPT at these rates.

    In each model call the larger of two times. Bytes: the weights of blocks and head, and the keys
    and values of all cached inputs, once. Operations: two per weight and input, two per weight of
    the head and unmasked token, four per width, layer and pair of an input and one it sees. Not
    included: adaLN (a table per position, computed once), embeddings, norms, token choice."""
    sizes, D, L = group_sizes(plan), config.n_embd, config.n_layer
    active, known = sizes > 0, sizes.cumsum(dim=1) - sizes
    # The first copy of the group before has stayed in the cache; the others are computed again.
    fresh = torch.nn.functional.pad(sizes[:, :-1] - 1, (1, 0)).where(active, 0)
    cached = (known - fresh).where(active, 0)
    pairs = fresh * cached + fresh * (fresh + 1) // 2 + sizes * (known + 1)
    block_weights, head_weights = 12 * L * D**2, D * vocab_size
    read = itemsize * (block_weights + head_weights + 2 * L * D * cached.sum(dim=0).double())
    flops = 2 * block_weights * (fresh + sizes) + 2 * head_weights * sizes + 4 * L * D * pairs
    seconds = torch.maximum(read / rates["bandwidth"], flops.sum(dim=0) / rates["flops"])
    return float(seconds.sum())


def exponents(rows: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Slopes of the logarithm of each figure over that of the length, one a repeat."""
    found: dict[str, dict] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        of = [row for row in rows if row["name"] == name]
        x = np.log([row["length"] for row in of])
        for kind in of[0]["by_repeat"]:
            values = np.array([row["by_repeat"][kind] for row in of])  # (lengths, repeats)
            slopes = np.polyfit(x, np.log(np.maximum(values, 1e-9)), 1)[0]
            found.setdefault(name, {})[kind] = slopes.tolist()
    return found


def exponents_table(result: dict) -> str:
    fits = result.get("exponents", {})
    lines = [[name, *map(common.spread_of, fit.values())] for name, fit in fits.items()]
    kinds = list(next(iter(fits.values()), ()))
    head = ["system", *(f"exponent of {kind}" for kind in kinds)]
    return "\n".join(markdown_table(head, lines)) if lines else ""


def report(result: dict) -> str:
    s, rates = result["settings"], result["rates"]
    return common.paragraphs(
        result,
        f"Temperature {s['temperature']}, top-p {s['top_p']}, {s['dtype']}"
        f"{', compiled' * s['compile']}; median of {s['repeats']}. "
        f"{rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, {rates['bandwidth'] / 1e9:,.1f} "
        "GB/s from memory.",
        table(result["rows"]),
        "x ours: seconds relative to `ours`. x floor: seconds of `ours` relative to the time that "
        "its arithmetic and memory traffic take at these rates. ~: some of the calls were timed "
        "and scaled to all.",
        exponents_table(result),
    )


def table(rows: list[dict]) -> str:
    """Ratios first."""
    memory = "peak" in rows[0]["by_repeat"]
    head = ["system", "samples", "tokens", "steps", "x ours", "x floor", "model calls"]
    head += ["token-forwards", "ms/call", "tokens/s", "seconds (min - max)"]
    head += ["peak MiB", "planned"] * memory
    lines = []
    for r in rows:
        ratios = [f"{r[key]:.2f}" if r.get(key) else "" for key in ("times_ours", "times_floor")]
        counts = [f"{r[key]:,}" for key in ("calls", "token_forwards")]
        speed = r["batch_size"] * r["length"] / r["seconds"]
        speeds = [common.short(value) for value in (r["ms_per_call"], speed)]
        seconds, _, *sizes = r["by_repeat"].values()
        about = "~" * (r["timed_calls"] < r["calls"]) + common.spread_of(seconds)
        setting = [str(r[key]) for key in ("batch_size", "length", "steps")]
        cells = [*ratios, *counts, *speeds, about, *(common.short(mib) for mib, *_ in sizes)]
        lines.append([r["system"], *setting, *cells])
    return "\n".join(markdown_table(head, lines))
