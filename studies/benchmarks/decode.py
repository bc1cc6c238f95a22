"""bench.py decode: the same plans of generation, decoded by every system.

Every system is run in turn, so that what disturbs the machine disturbs all of them alike, and the
median of the repeats counts. Of systems that take minutes, only some model calls are timed, spread
evenly over the plan, and scaled to all of them; the report says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from checkpoints.load import load
from model import AOGPT, ModelConfig
from runtime.devices import pick_device, pick_dtype, synchronize
from runtime.errors import UserError
from runtime.reports import log_x, markdown_table, new_figure, png
from runtime.validation import Count, NonNegative
from sampling.engine import Engine, Generation
from sampling.plans import Plan, adaptive_plan, group_sizes, l2r_plan, mdm_plan, speculative_plan
from sampling.token_choice import TokenChoice
from studies.benchmarks import common
from studies.benchmarks.baselines import AO_GPT, decode_cached, decode_uncached, is_ao_gpt
from studies.benchmarks.common import SIZES, BenchOptions, Rates
from variants import parameter_counts

System = Literal[
    "ours", "baseline", "no-cache", "cache-only", "encoder", "l2r", "speculative", "gpt", "rotary"
]
SLOW = ("no-cache", "encoder")  # systems of which a part of the model calls is timed
OTHERS: tuple[System, ...] = ("encoder", "gpt", "rotary")  # models beside AO-GPT
TITLES = {"ours": "AO-GPT", "encoder": "Encoder", "gpt": "GPT"}
DRAFT = 8  # positions that speculation guesses at once
ENTROPY = 4.0  # nats; language models of these sizes have 3.4 to 4.9 (perplexities of 30 to 140)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(BenchOptions):
    """Decode the same plans with every system and compare.

    The floor is what the arithmetic and the memory traffic of `ours` take at the rates measured on
    this machine.
    """

    run: str | None = None
    """Take size and weights of AO-GPT from this run folder or checkpoint; the encoder keeps random
    weights."""
    batch_size: Count = 8
    length: Count = 1024
    """Tokens in a sample."""
    steps: tuple[Count, ...] = (64, 256, 1024)
    """Steps of masked-diffusion sampling, one measurement for each."""
    plan: Literal["exact", "even"] = "exact"
    """exact: every position unmasks at its own random time. even: a random order, equal groups."""
    systems: tuple[System, ...] = ("ours", "baseline", "no-cache", "encoder")
    """ours: decode.generate on AO-GPT. baseline: a plain cached sampler of it. no-cache: the same
    without a cache. encoder: decode.generate on an encoder of the same size. And, with plans of
    their own: cache-only, every unknown position predicted in every step, as without Lemma 4.1;
    l2r, one token a step from left to right; speculative, eight drafted at a time; gpt, a plain GPT
    from left to right. rotary: as ours, of a model of relative attention without adaLN."""
    temperature: Annotated[float, Ge(0)] = 0.9
    top_p: float = 0.95
    repeats: Count = 3
    """Times every system is run, in turn; the median counts."""
    slow_calls: NonNegative = 8
    """Model calls of no-cache and encoder that are timed, spread evenly over the plan; 0: all."""
    compile: bool = False
    """Let decode.generate compile its step."""


def bench_decode(options: DecodeOptions) -> None:
    """Run the benchmark and report. Raises ValueError for settings that no system could run."""
    options.check()
    if not options.steps:
        raise UserError("--steps is empty; give numbers of at least 1")
    options.use_threads()
    device = pick_device(options.device)
    bench = DecodeBench(options, device, pick_dtype(options.dtype, device))
    items = options.batch_size * options.length
    rates = common.measure_rates(bench.model.config, items, bench.dtype, device)
    rows = [row for steps in dict.fromkeys(options.steps) for row in bench.rows(steps, rates)]
    result = common.describe(
        options,
        bench.dtype,
        device,
        rates=dataclasses.asdict(rates),
        models=bench.models,
        rows=rows,
    )
    title = f"{result['machine']['name']}, {options.batch_size} samples of {options.length} tokens"
    plot = functools.partial(plot_seconds, rows, title)
    common.publish(options, "Decoding speed", result, report(result), plot)


class DecodeBench:
    """The models of one run and the systems that decode with them."""

    def __init__(self, options: DecodeOptions, device: torch.device, dtype: torch.dtype):
        self.options, self.device, self.dtype = options, device, dtype
        self.choice = TokenChoice(options.temperature, options.top_p)
        self.engines: dict[AOGPT, Engine] = {}
        self.model, self.vocab_size = load_decoder(options, device)
        block_size = self.model.config.block_size
        if options.length > block_size:
            raise UserError(
                f"--length {options.length} exceeds the model's block size, {block_size}; lower it"
            )
        self.model.to(dtype)
        # A trained model has its own entropy; random weights are given that of a language model.
        self.models = {"ours": self.prepare(self.model, scale=1.0 if options.run else None)}
        self.others: dict[System, AOGPT] = {}
        for system in (s for s in OTHERS if s in options.systems):
            config = other_config(system, self.model.config, self.vocab_size)
            self.others[system] = common.random_model(config, options.seed, device).to(dtype)
            self.models[system] = self.prepare(self.others[system], scale=None)

    def prepare(self, model: AOGPT, scale: float | None) -> dict:
        """Give the model realistic logits; what the report says of it."""
        scale, entropy = scale_logits(
            model, scale, self.vocab_size, self.options.length, self.options.seed
        )
        return {"parameters": parameter_counts(model), "logit_scale": scale, "entropy": entropy}

    def rows(self, steps: int, rates: Rates | None) -> list[dict]:
        """Time every system under the same plans, in turn; a row of the table for each, that of
        `ours` with its floor if the machine's rates are given.

        Every turn has a plan that no system has met: one that comes again would hide what new
        shapes cost. The first is apart: in it memory is taken, and steps are compiled.
        """
        o, systems = self.options, list(dict.fromkeys(self.options.systems))
        generator, even = common.seeded(o.seed), o.plan == "even"
        first, *plans = (
            mdm_plan(o.batch_size, o.length, steps, generator, even=even)
            for _ in range(1 + o.repeats)
        )
        # The slow systems warm up in a few calls only.
        warm_up = {s: self.time(s, first, timed_calls(s, first, most=2)) for s in systems}
        timings: dict[System, list[Timing]] = {system: [] for system in systems}
        for plan in plans:
            for system in systems:
                timing = self.time(system, plan, timed_calls(system, plan, o.slow_calls))
                timings[system].append(timing)
                progress = f"{steps} steps, {system}: {timing.seconds:.3g} s"
                print(progress, file=sys.stderr, flush=True)
        rows = [summary(s, steps, timings[s], o.batch_size * o.length) for s in systems]
        for row in rows:
            row["first_seconds"] = warm_up[row["system"]].seconds
        ours = next((row for row in rows if row["system"] == "ours"), None)
        if ours and rates:
            settings = self.vocab_size, self.dtype.itemsize, rates
            floors = [floor_of(self.model.config, plan, *settings) for plan in plans]
            ours |= {key: statistics.median(floor[key] for floor in floors) for key in floors[0]}
            pairs = zip(ours["all_seconds"], floors, strict=True)
            ours["times_floor"] = statistics.median(s / f["floor_seconds"] for s, f in pairs)
        for row in rows:
            row["times_ours"] = row["seconds"] / ours["seconds"] if ours else None
        return rows

    def time(self, system: System, plan: Plan, calls: list[int] | None) -> Timing:
        """Time a plan; or some of its calls, scaled to all of them."""
        seconds, done = self.stopwatch(system, plan, calls)
        if calls is None:
            return Timing(seconds, done.model_calls, done.token_forwards, done.model_calls)
        # What one decoding costs besides its calls is not scaled.
        fixed, _ = self.stopwatch(system, plan, [])
        total, forwards = model_calls(system, plan), done.token_forwards
        if system == "encoder":  # its shortened plan knows nothing of the whole
            assert done.model_calls == len(calls)
            forwards = plan.order.shape[1] * int(group_sizes(plan).count_nonzero())
        scaled = fixed + (seconds - fixed) * total / len(calls)
        return Timing(scaled, total, forwards, len(calls))

    def stopwatch(
        self, system: System, plan: Plan, calls: Collection[int] | None
    ) -> tuple[float, Generation]:
        synchronize(self.device)
        started = time.perf_counter()
        done = self.decode(system, plan, calls)
        synchronize(self.device)
        return time.perf_counter() - started, done

    def decode(self, system: System, plan: Plan, calls: Collection[int] | None) -> Generation:
        """Decode a plan with one system; of the slow systems only `calls`, if they are given."""
        sampler = {"choice": self.choice, "vocab_size": self.vocab_size}
        generator = common.seeded(self.options.seed)
        on_device = common.seeded(self.options.seed, self.device)
        match system:
            case "baseline":
                return decode_cached(self.model, plan, generator=on_device, **sampler)
            case "no-cache":
                return decode_uncached(
                    self.model, plan, generator=on_device, calls=calls, **sampler
                )
            case "ours" | "rotary":
                model = self.others.get(system, self.model)
                return self.engine(model).generate(plan, generator=generator)
            case "cache-only" | "l2r" | "speculative" | "gpt":
                model = self.others.get(system, self.model)
                return self.engine(model).generate(own_plan(system, plan), generator=generator)
            case "encoder":
                plan = plan if calls is None else only_calls(plan, calls)
                tokens = torch.randint(self.vocab_size, plan.order.shape, generator=generator)
                return self.engine(self.others[system]).generate(plan, tokens, generator=generator)

    def engine(self, model: AOGPT) -> Engine:
        """Caches, packed weights and compiled steps are made once, as for many samples."""
        if model not in self.engines:
            o = self.options
            made = Engine(model, o.batch_size, o.length, self.choice, self.vocab_size, o.compile)
            self.engines[model] = made
        return self.engines[model]


@dataclass(frozen=True)
class Timing:
    """One decoding: seconds of all its model calls, of which `measured_calls` were run."""

    seconds: float
    model_calls: int
    token_forwards: int
    measured_calls: int


def summary(system: System, steps: int, timings: list[Timing], tokens: int) -> dict:
    """The figures of one system at one number of steps; `tokens`: generated by one decoding."""
    seconds, first = [timing.seconds for timing in timings], timings[0]
    median = statistics.median(seconds)
    return {
        "system": system,
        "steps": steps,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "all_seconds": seconds,
        "tokens_per_second": tokens / median,
        "model_calls": first.model_calls,
        "all_model_calls": [timing.model_calls for timing in timings],
        "measured_calls": first.measured_calls,
        "extrapolated": first.measured_calls < first.model_calls,
        "token_forwards": first.token_forwards,
        "ms_per_call": 1000 * statistics.median(t.seconds / t.model_calls for t in timings),
    }


# ---- plans, as the systems go through them -------------------------------------------------------


def own_plan(system: System, plan: Plan) -> Plan:
    """That of a system that does not follow `plan`: as many samples of the same length, and of
    cache-only as many tokens a step."""
    B, n = plan.order.shape
    generator = common.seeded(int(plan.order[0, 0]))
    match system:
        case "cache-only":
            group = math.ceil(n / len(plan.step.unique()))
            return adaptive_plan(B, n, "confidence", generator, group=group)
        case "speculative":
            return speculative_plan(B, n, DRAFT, generator)
        case _:
            return l2r_plan(B, n)


def row_groups(plan: Plan) -> Tensor:
    """The plan with every row's own non-empty steps numbered from 0, (B, T): what the engine goes
    through."""
    starts = plan.step.diff(dim=1, prepend=torch.full_like(plan.step[:, :1], -1)) > 0
    return starts.cumsum(dim=1) - 1


def model_calls(system: System, plan: Plan) -> int:
    """Forward passes: the baselines take the plan's steps, the engine each row's own."""
    if system in ("baseline", "no-cache"):
        return len(plan.step.unique())
    return group_sizes(plan).shape[1]


def timed_calls(system: System, plan: Plan, most: int) -> list[int] | None:
    """The calls that are timed: the middles of `most` equal parts of all; None for every call."""
    total = model_calls(system, plan)
    if system not in SLOW or not 0 < most < total:
        return None
    return [int((i + 0.5) * total / most) for i in range(most)]


def only_calls(plan: Plan, calls: Collection[int]) -> Plan:
    """A plan of these calls of the engine alone; what the others unmask is given.

    An encoder feeds all positions of a row in every call, whichever are known, so each call costs
    what it costs in the whole plan.
    """
    groups = row_groups(plan)
    kept = torch.isin(groups, torch.tensor(list(calls), dtype=torch.long))
    given_first = kept.to(torch.uint8).argsort(dim=1, stable=True)
    step = groups.where(kept, -1)
    return Plan(plan.order.gather(1, given_first), step.gather(1, given_first))


# ---- models --------------------------------------------------------------------------------------


def load_decoder(options: DecodeOptions, device: torch.device) -> tuple[AOGPT, int]:
    """AO-GPT of --run, or of --size with random weights, in eval mode; and how many of its ids are
    tokens."""
    if options.run is None:
        config, vocab_size = SIZES[options.size]
        longer = max(config.block_size, options.length)
        config = dataclasses.replace(config, block_size=longer)
        return common.random_model(config, options.seed, device), vocab_size
    loaded = load(options.run, device=device)
    if not is_ao_gpt(loaded.model.config):
        raise UserError(f"{options.run} is not AO-GPT: give {AO_GPT}")
    return loaded.model, loaded.vocab_size


def other_config(system: System, config: ModelConfig, vocab_size: int) -> ModelConfig:
    """One of `OTHERS`, of the decoder's size."""
    match system:
        case "encoder":
            return encoder_config(config, vocab_size)
        case "gpt":
            return dataclasses.replace(config, target="none")
        case _:
            return dataclasses.replace(config, position="rotary", target="rotary")


def encoder_config(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """An encoder of the decoder's size, with [MASK] after the tokens."""
    return dataclasses.replace(
        config,
        attention="full",
        target="none",
        mask_token=vocab_size,
        vocab_size=max(config.vocab_size, vocab_size + 1),
        tied_head=False,
    )


@torch.no_grad()
def scale_logits(
    model: AOGPT, scale: float | None, vocab_size: int, length: int, seed: int
) -> tuple[float, float]:
    """Multiply the head's weights so that sampling has realistic work: the logits of fresh weights
    are nearly flat, and a nucleus of nearly all tokens is not what samplers meet.

    scale: the factor; None for one that gives ENTROPY, or as near as the vocabulary allows.

    Returns the factor and the mean entropy (nats, over random tokens) that it leads to.
    """
    hidden = hidden_sample(model, vocab_size, min(length, 64), seed)
    if scale is None:  # by bisection: the entropy falls as the scale rises
        low, high = 0.0, 1000.0
        for _ in range(30):
            scale = (low + high) / 2
            if mean_entropy(model, hidden, scale, vocab_size) > ENTROPY:
                low = scale
            else:
                high = scale
    model.head.weight.mul_(scale)
    return scale, mean_entropy(model, hidden, 1.0, vocab_size)


def hidden_sample(model: AOGPT, vocab_size: int, length: int, seed: int) -> Tensor:
    """Final hidden states (2 x length, D) for random tokens: of a decoder in a random order, of an
    encoder in a half-masked sequence."""
    generator, device = common.seeded(seed), model.wte.weight.device
    tokens = torch.randint(vocab_size, (2, length), generator=generator).to(device)
    order = torch.rand(2, length, generator=generator).argsort(dim=1).to(device)
    if model.config.is_encoder:
        masked = order < length / 2
        return model.hidden(tokens.where(~masked, model.config.mask_token)).flatten(0, 1)
    return model.hidden(tokens, order).flatten(0, 1)


def mean_entropy(model: AOGPT, hidden: Tensor, scale: float, vocab_size: int) -> float:
    """Nats, with the head's weights multiplied by `scale`."""
    logits = model.head_logits(hidden)[:, :vocab_size]
    bias = 0 if model.head.bias is None else model.head.bias[:vocab_size]
    log_probs = ((logits - bias) * scale + bias).float().log_softmax(dim=-1)
    return float(-(log_probs.exp() * log_probs).sum(dim=-1).mean())


# ---- the floor -----------------------------------------------------------------------------------


def floor_of(
    config: ModelConfig, plan: Plan, vocab_size: int, itemsize: int, rates: Rates
) -> dict[str, float]:
    """Seconds that the engine cannot beat on AO-GPT at these rates, with its bytes and operations.

    Per model call the larger of two times. Bytes: the weights of blocks and head once, and the keys
    and values of every row's cached inputs once. Operations: two per weight and input, two per
    weight of the head and unmasked token, and four per width, layer and pair of an input and one it
    sees. Left out: adaLN, which is a table per position that is computed once, embeddings, norms,
    token choice and activations.
    """
    sizes, D, L = group_sizes(plan), config.n_embd, config.n_layer
    active, known = sizes > 0, sizes.cumsum(dim=1) - sizes
    # Of the group before, the first copy has stayed in the cache; the others are fed anew.
    fresh = torch.nn.functional.pad(sizes[:, :-1] - 1, (1, 0)).where(active, 0)
    cached = (known - fresh).where(active, 0)
    pairs = fresh * cached + fresh * (fresh + 1) // 2 + sizes * (known + 1)
    block_weights, head_weights = 12 * L * D**2, D * vocab_size
    read = itemsize * (block_weights + head_weights + 2 * L * D * cached.sum(dim=0).double())
    flops = 2 * block_weights * (fresh + sizes) + 2 * head_weights * sizes + 4 * L * D * pairs
    flops = flops.sum(dim=0).double()
    seconds = torch.maximum(read / rates.bandwidth, flops / rates.flops)
    return {
        "floor_seconds": float(seconds.sum()),
        "floor_bytes": float(read.sum()),
        "floor_flops": float(flops.sum()),
    }


# ---- the report ----------------------------------------------------------------------------------


def report(result: dict) -> str:
    """What was measured on what, the table, and how to read it."""
    s, rates, rows = result["settings"], result["rates"], result["rows"]
    setting = (
        f"{s['batch_size']} samples of {s['length']} tokens, {s['plan']} plans, temperature "
        f"{s['temperature']}, top-p {s['top_p']}, {s['dtype']}"
        f"{', compiled' if s['compile'] else ''}; median of {s['repeats']}."
    )
    speed = (
        f"{common.machine_line(result)}: {rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, "
        f"{rates['bandwidth'] / 1e9:,.1f} GB/s from memory."
    )
    models = [
        f"{TITLES[name]}: "
        f"{sum(model['parameters'].values()) / 1e6:.1f} M parameters, head scaled by "
        f"{model['logit_scale']:.3g}, mean entropy {model['entropy']:.2f} nats."
        for name, model in result["models"].items()
    ]
    floors = ", ".join(
        f"{common.short(row['floor_seconds'])} s at {row['steps']} steps"
        for row in rows
        if row["system"] == "ours"
    )
    return common.paragraphs(
        setting,
        speed,
        *models,
        table(rows),
        "x ours: seconds relative to `ours` at the same steps. x floor: seconds of `ours` relative "
        "to the floor.",
        floors and f"Floor of `ours`, from the rates above: {floors}.",
        "Extrapolated: where the last column says so, a part of the calls was timed and scaled to "
        "all."
        if any(row["extrapolated"] for row in rows)
        else "",
        common.ratios_only(result),
    )


def table(rows: list[dict]) -> str:
    """The Markdown table; ratios first."""
    head = ["system", "steps", "x ours", "x floor", "model calls", "token-forwards", "ms/call"]
    head += ["tokens/s", "seconds (min - max)", "measured calls"]
    lines = []
    for r in rows:
        measured = f"{r['measured_calls']} of {r['model_calls']}" if r["extrapolated"] else "all"
        lines.append(
            [
                r["system"],
                str(r["steps"]),
                f"{r['times_ours']:.2f}" if r["times_ours"] else "",
                f"{r['times_floor']:.2f}" if "times_floor" in r else "",
                f"{r['model_calls']:,}",
                f"{r['token_forwards']:,}",
                common.short(r["ms_per_call"]),
                common.short(r["tokens_per_second"]),
                common.with_range(r["seconds"], r["seconds_min"], r["seconds_max"]),
                measured,
            ]
        )
    return "\n".join(markdown_table(head, lines))


def plot_seconds(rows: list[dict], title: str) -> bytes:
    """PNG of seconds over steps, a line per system and the floor of `ours`, both logarithmic."""
    figure, axes = new_figure()
    for system in dict.fromkeys(row["system"] for row in rows):
        own = sorted((row for row in rows if row["system"] == system), key=lambda row: row["steps"])
        steps, seconds = [row["steps"] for row in own], [row["seconds"] for row in own]
        label = f"{system} (extrapolated)" if any(row["extrapolated"] for row in own) else system
        (line,) = axes.plot(steps, seconds, marker="o", label=label)
        low, high = ([row[key] for row in own] for key in ("seconds_min", "seconds_max"))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if system == "ours":
            floor = [row["floor_seconds"] for row in own]
            axes.plot(steps, floor, "--", color=line.get_color(), label="floor of ours")
    axes.set(yscale="log", xlabel="steps", ylabel="seconds", title=title)
    log_x(axes, (row["steps"] for row in rows))
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)
