"""bench decode: the same plans decoded by every system.

All systems run in turn, so that other work of the machine affects them alike, and the median of the
repeats counts. Of slow systems only some model calls are timed, spread evenly over the plan, and
scaled to all of them (`~` in the table).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import tyro
from annotated_types import Ge

from checkpoints import load
from model import AOGPT, ModelConfig
from runtime.devices import pick_device, pick_dtype, synchronize
from runtime.errors import UserError
from runtime.reports import markdown_table
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
from studies.baselines import AO_GPT, decode_plainly, is_ao_gpt
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
System = Literal[*SYSTEMS]
SLOW = ("no-cache", "encoder")  # systems of which some model calls are timed
OTHER_MODELS = ("encoder", "gpt", "rotary")  # the other systems decode with AO-GPT
LONGEST_CACHE_ONLY = 2048  # tokens; beyond, all its calls would take minutes
DRAFT = 8
ENTROPY = 4.0  # nats; language models of these sizes have 3.4 to 4.9 (perplexities of 30 to 140)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """Decode the same plans with every system and compare. The floor is the time that the
    arithmetic and the memory traffic of `ours` take at the rates measured on this machine."""

    run: str | None = None
    """Use AO-GPT of this run folder or checkpoint; other models keep random weights."""
    batch_size: Count = 8
    length: Count = 1024
    """Tokens in a sample."""
    steps: tuple[Count, ...] = (64, 256, 1024)
    """Steps of masked-diffusion sampling, one measurement for each."""
    plan: Literal["exact", "even"] = "exact"
    """exact: every position unmasks at its own random time. even: a random order, equal groups."""
    systems: Annotated[
        tuple[System, ...], tyro.conf.arg(help=". ".join(map(": ".join, SYSTEMS.items())))
    ] = ("ours", "baseline", "no-cache", "encoder")
    lengths: tuple[Count, ...] = ()
    """Instead of --length and --steps: decode samples of these lengths, --group tokens a step, and
    fit how seconds and computed tokens grow with the length."""
    group: Count = 4
    memory: tuple[Count, ...] = ()
    """With --lengths: measure peak memory with these batch sizes instead of time."""
    temperature: Annotated[float, Ge(0)] = 0.9
    top_p: float = 0.95
    repeats: Count = 3
    """How often every system runs, in turn; the median counts."""
    slow_calls: NonNegative = 8
    """Model calls of no-cache and encoder that are timed, spread evenly over the plan; 0: all."""
    compile: bool = False
    """Let the engine compile its step."""


def bench_decode(o: DecodeOptions) -> dict:
    """Run the benchmark, report, and return what --json holds. Raises UserError for settings that
    no system can run."""
    o.check()
    if not o.steps:
        raise UserError("--steps is empty; give numbers of at least 1")
    device = pick_device(o.device)
    dtype = pick_dtype(o.dtype, device)
    settings = [(o.length, steps) for steps in dict.fromkeys(o.steps)]
    if o.lengths:
        settings = [(length, math.ceil(length / o.group)) for length in sorted(set(o.lengths))]
    rows = []
    for length, steps in settings:
        kept = [s for s in o.systems if s != "cache-only" or length <= LONGEST_CACHE_ONLY]
        bench = DecodeBench(dataclasses.replace(o, length=length, systems=kept), device, dtype)
        rates = common.measure_rates(bench.model.config, o.batch_size * length, dtype, device)
        rows += bench.rows(steps, rates)
    figures = {"rates": rates, "rows": rows}
    if o.lengths:
        figures["exponents"] = exponents(rows)
    return common.publish(o, dtype, device, "Decoding speed", figures, report)


class DecodeBench:
    """The models of one length and the systems that decode with them."""

    def __init__(self, options: DecodeOptions, device: torch.device, dtype: torch.dtype):
        self.options, self.device, self.dtype = options, device, dtype
        self.choice = TokenChoice(options.temperature, options.top_p)
        self.engines: dict[AOGPT, Engine] = {}
        self.model, self.vocab_size = load_decoder(options, device)
        if options.length > (size := self.model.config.block_size):
            raise UserError(
                f"--length {options.length} exceeds the model's block size, {size}; lower it"
            )
        self.models = {"ours": self.model.to(dtype)}
        for system in (s for s in OTHER_MODELS if s in options.systems):
            config = other_config(system, self.model.config, self.vocab_size)
            self.models[system] = common.random_model(config, options.seed, device).to(dtype)
        for system, model in self.models.items():
            if options.run is None or system != "ours":
                scale_logits(model, self.vocab_size, options.length, options.seed)

    def rows(self, steps: int, rates: dict[str, float]) -> list[dict]:
        """Time every system with the same plans, in turn; a row for each, that of `ours` with its
        floor. Every repeat has a plan of its own: repeated shapes would hide what new ones cost.
        The first plan is a warm-up, in which memory is allocated and steps are compiled."""
        o, systems = self.options, list(dict.fromkeys(self.options.systems))
        generator, even = common.seeded(o.seed), o.plan == "even"
        first, *plans = (
            mdm_plan(o.batch_size, o.length, steps, generator, even=even)
            for _ in range(1 + o.repeats)
        )
        warm_up = {system: self.time(system, first, most=2) for system in systems}
        timings: dict[str, list[dict]] = {system: [] for system in systems}
        for plan in plans:
            for system in systems:
                timings[system].append(self.time(system, plan, o.slow_calls))
                seconds = timings[system][-1]["seconds"]
                print(
                    f"{o.length} tokens, {steps} steps, {system}: {seconds:.3g} s", file=sys.stderr
                )
        rows = []
        for system, of in timings.items():
            seconds, forwards = ([t[key] for t in of] for key in ("seconds", "token_forwards"))
            rows.append(
                {"system": system, "name": system, "description": SYSTEMS[system]}
                | {"length": o.length, "steps": steps, **of[0]}
                | {"seconds": statistics.median(seconds)}
                | {"first_seconds": warm_up[system]["seconds"]}
                | {"ms_per_call": 1000 * statistics.median(t["seconds"] / t["calls"] for t in of)}
                | {"by_repeat": {"seconds": seconds, "forwards": forwards}}
            )
        ours = next((row for row in rows if row["system"] == "ours"), None)
        if ours:
            settings = self.vocab_size, self.dtype.itemsize, rates
            floors = [floor_of(self.model.config, plan, *settings) for plan in plans]
            pairs = zip(ours["by_repeat"]["seconds"], floors, strict=True)
            ours["times_floor"] = statistics.median(seconds / floor for seconds, floor in pairs)
        for row in rows:
            row["times_ours"] = row["seconds"] / ours["seconds"] if ours else None
        return rows

    def time(self, system: str, plan: Plan, most: int) -> dict:
        """Time a plan; of a slow system `most` of its calls, scaled to all of them."""
        total = model_calls(system, plan)
        if system not in SLOW or not 0 < most < total:
            seconds, done = self.stopwatch(system, plan)
            calls = timed = done.model_calls
            forwards = done.token_forwards
        else:
            chosen = [int((i + 0.5) * total / most) for i in range(most)]
            fixed, _ = self.stopwatch(system, plan, [])  # what decoding costs besides its calls
            seconds, done = self.stopwatch(system, plan, chosen)
            seconds = fixed + (seconds - fixed) * total / most
            calls, timed, forwards = total, most, done.token_forwards
            if system == "encoder":  # its shortened plan does not know the whole
                forwards = plan.order.shape[1] * int(group_sizes(plan).count_nonzero())
        figures = {"seconds": seconds, "calls": calls, "timed_calls": timed}
        return figures | {"token_forwards": forwards}

    def stopwatch(
        self, system: str, plan: Plan, calls: Collection[int] | None = None
    ) -> tuple[float, Generation]:
        synchronize(self.device)
        started = time.perf_counter()
        done = self.decode(system, plan, calls)
        synchronize(self.device)
        return time.perf_counter() - started, done

    def decode(self, system: str, plan: Plan, calls: Collection[int] | None) -> Generation:
        """Decode a plan with one system; of the slow systems only `calls`, if they are given."""
        o, generator = self.options, common.seeded(self.options.seed)
        if system in ("baseline", "no-cache"):
            options = {"cached": system == "baseline", "calls": calls, "choice": self.choice}
            generator = common.seeded(o.seed, self.device)
            options |= {"vocab_size": self.vocab_size, "generator": generator}
            return decode_plainly(self.model, plan, **options)
        model = self.models.get(system, self.model)
        if model not in self.engines:  # caches, packed weights and compiled steps are made once
            made = Engine(model, o.batch_size, o.length, self.choice, self.vocab_size, o.compile)
            self.engines[model] = made
        plan = plan_of(system, plan) if calls is None else only_calls(plan, calls)
        tokens = torch.randint(self.vocab_size, plan.order.shape, generator=generator)
        return self.engines[model].generate(plan, tokens, generator=generator)


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


def load_decoder(o: DecodeOptions, device: torch.device) -> tuple[AOGPT, int]:
    """AO-GPT of --run, or of --size with random weights, and how many of its ids are tokens."""
    if o.run is None:
        config, vocab_size = SIZES[o.size]
        config = dataclasses.replace(config, block_size=max(config.block_size, o.length))
        return common.random_model(config, o.seed, device), vocab_size
    loaded = load(o.run, device=device)
    if not is_ao_gpt(loaded.model.config):
        raise UserError(f"{o.run} is not AO-GPT: give {AO_GPT}")
    return loaded.model, loaded.vocab_size


def other_config(system: str, config: ModelConfig, vocab_size: int) -> ModelConfig:
    """An encoder (with [MASK] after the tokens), GPT or rotary AO-GPT of the decoder's size."""
    changes = {"position": "rotary", "target": "rotary"}
    if system == "gpt":
        changes = {"target": "none"}
    if system == "encoder":
        changes = {"attention": "full", "target": "none", "tied_head": False}
        changes |= {"mask_token": vocab_size}
        changes |= {"vocab_size": max(config.vocab_size, vocab_size + 1)}
    return dataclasses.replace(config, **changes)


@torch.no_grad()
def scale_logits(model: AOGPT, vocab_size: int, length: int, seed: int) -> None:
    """Scale the head's weights to an entropy of about ENTROPY: the logits of random weights are
    nearly flat, and their nucleus has nearly all tokens. Normal logits of standard deviation s have
    an entropy of log V - s^2 / 2."""
    generator, device = common.seeded(seed), model.wte.weight.device
    shape = 2, min(length, 64)
    tokens = torch.randint(vocab_size, shape, generator=generator).to(device)
    order = torch.rand(shape, generator=generator).argsort(dim=1).to(device)
    if model.config.is_encoder:
        hidden = model.hidden(tokens.where(order >= shape[1] / 2, model.config.mask_token))
    else:
        hidden = model.hidden(tokens, order)
    std = model.head_logits(hidden)[..., :vocab_size].float().std(dim=-1).mean()
    model.head.weight.mul_(math.sqrt(2 * max(math.log(vocab_size) - ENTROPY, 0.1)) / std)


def floor_of(
    config: ModelConfig, plan: Plan, vocab_size: int, itemsize: int, rates: dict[str, float]
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
        f"{s['batch_size']} samples, {s['plan']} plans, temperature {s['temperature']}, top-p "
        f"{s['top_p']}, {s['dtype']}{', compiled' if s['compile'] else ''}; median of "
        f"{s['repeats']}.",
        f"{rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, {rates['bandwidth'] / 1e9:,.1f} "
        "GB/s from memory.",
        table(result["rows"], s["batch_size"]),
        "x ours: seconds relative to `ours`. x floor: seconds of `ours` relative to the time that "
        "its arithmetic and memory traffic take at these rates. ~: some of the calls were timed "
        "and scaled to all.",
        exponents_table(result),
    )


def table(rows: list[dict], batch_size: int) -> str:
    """Ratios first."""
    head = ["system", "tokens", "steps", "x ours", "x floor", "model calls", "token-forwards"]
    head += ["ms/call", "tokens/s", "seconds (min - max)"]
    lines = []
    for r in rows:
        about = "~" if r["timed_calls"] < r["calls"] else ""
        lines.append(
            [
                r["system"],
                *(str(r[key]) for key in ("length", "steps")),
                f"{r['times_ours']:.2f}" if r["times_ours"] else "",
                f"{r['times_floor']:.2f}" if "times_floor" in r else "",
                *(f"{r[key]:,}" for key in ("calls", "token_forwards")),
                common.short(r["ms_per_call"]),
                common.short(batch_size * r["length"] / r["seconds"]),
                about + common.spread_of(r["by_repeat"]["seconds"]),
            ]
        )
    return "\n".join(markdown_table(head, lines))
