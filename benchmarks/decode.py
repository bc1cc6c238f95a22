"""bench.py decode: the same plans, decoded by every system."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from benchmarks.baselines import decode_cached, decode_uncached
from benchmarks.common import (
    SIZES,
    Rates,
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
    synchronize,
    table,
)
from checkpoints import store as checkpoint
from model import AOGPT, ModelConfig
from runtime.devices import pick_device, pick_dtype
from runtime.reports import versions
from sampling.engine import Engine, Generation, Plan, TokenChoice, group_sizes, mdm_plan

System = Literal["ours", "baseline", "no-cache", "encoder"]
SAMPLED = ("no-cache", "encoder")  # systems so slow that a part of their model calls is timed
ENTROPY = 4.0  # nats: language models of these sizes have perplexities of 30 to 140, which are 3.4 to 4.9 nats


@dataclass(frozen=True)
class DecodeArguments:
    size: SizeName = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium 24/1024/16; random weights."""
    run: str | None = None
    """Take size and weights of AO-GPT from this run folder or checkpoint; the encoder keeps random weights."""
    batch_size: int = 8
    length: int = 1024
    """Tokens in a sample."""
    steps: tuple[int, ...] = (64, 256, 1024)
    """Steps of masked-diffusion sampling, one measurement for each."""
    plan: Literal["exact", "even"] = "exact"
    """exact: every position unmasks at its own random time. even: a random order in equal groups."""
    systems: tuple[System, ...] = ("ours", "baseline", "no-cache", "encoder")
    """ours: decode.generate on AO-GPT. baseline: a plain cached sampler of it. no-cache: the same without a cache.
    encoder: decode.generate on an encoder of the same size."""
    temperature: float = 0.9
    top_p: float = 0.95
    repeats: int = 3
    """Times every system is run, in turn; the median counts."""
    slow_calls: int = 8
    """Model calls of no-cache and encoder that are timed, spread evenly over the plan; 0 times all of them."""
    logit_scale: Literal["auto"] | float = "auto"
    """Factor on the head's weights. auto: random weights get a language model's entropy, a run keeps its own."""
    compile: bool = False
    """Let decode.generate compile its step."""
    threads: int | None = None
    """Threads of PyTorch on a CPU."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the models; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    seed: int = 0
    json: Path | None = None
    """Write every figure, with settings, machine and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw seconds over steps as a PNG."""


# ---- decoding --------------------------------------------------------------------------------------------------------


def decode(arguments: Annotated[DecodeArguments, tyro.conf.arg(name="")]) -> None:
    """Decode the same plans with every system and compare.

    The floor is what the arithmetic and the memory traffic of `ours` take at the rates measured on this machine.
    """
    a = arguments
    check_arguments(a)
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    device = pick_device(a.device)
    bench = DecodeBench(a, device, pick_dtype(a.dtype, device))
    rates = measure_rates(bench.model.config, a.batch_size * a.length, bench.dtype, device)
    rows = [row for steps in dict.fromkeys(a.steps) for row in bench.rows(steps, rates)]
    result = {
        "command": command(),
        "settings": dataclasses.asdict(a) | {"dtype": str(bench.dtype).removeprefix("torch.")},
        "machine": machine(device),
        "versions": versions(),
        "rates": dataclasses.asdict(rates),
        "models": bench.models,
        "rows": rows,
    }
    report = "\n".join([*facts(result), "", *markdown_table(rows), "", *notes(result), ""])
    title = f"{result['machine']['name']}, {a.batch_size} samples of {a.length} tokens"
    publish(a, "Decoding speed", result, report, lambda: plot_seconds(rows, title))


def check_arguments(a: DecodeArguments) -> None:
    """Raise ValueError for settings that no system could run."""
    check_settings(
        a, {"batch_size": 1, "length": 1, "repeats": 1, "slow_calls": 0, "seed": 0, "threads": 1}
    )
    if not a.steps or min(a.steps) < 1:
        raise ValueError(f"--steps is {a.steps}; give numbers of at least 1")
    if a.logit_scale != "auto" and not 0 < a.logit_scale < math.inf:
        raise ValueError(f"--logit-scale is {a.logit_scale}; give auto or a positive number")
    TokenChoice(a.temperature, a.top_p)


class DecodeBench:
    """The models of one run and the systems that decode with them."""

    def __init__(self, a: DecodeArguments, device: torch.device, dtype: torch.dtype):
        self.a, self.device, self.dtype = a, device, dtype
        self.choice = TokenChoice(a.temperature, a.top_p)
        self.model, self.vocab_size = load_decoder(a, device)
        if a.length > self.model.config.block_size:
            raise ValueError(
                f"--length {a.length} exceeds the model's block size, {self.model.config.block_size}; lower it"
            )
        loaded = {"ours": self.model.to(dtype)}
        scales = {"ours": 1.0 if a.run and a.logit_scale == "auto" else a.logit_scale}
        if "encoder" in a.systems:
            self.encoder = random_model(
                encoder_config(self.model.config, self.vocab_size), a.seed, device
            ).to(dtype)
            loaded["encoder"], scales["encoder"] = self.encoder, a.logit_scale
        self.models = {}
        for name, model in loaded.items():
            scale, entropy = scale_logits(model, scales[name], self.vocab_size, a.length, a.seed)
            self.models[name] = {
                "parameters": model.num_params(),
                "logit_scale": scale,
                "entropy": entropy,
            }

    def rows(self, steps: int, rates: Rates) -> list[dict]:
        """Time every system under one plan, in turn; a row of the table for each."""
        a, systems = self.a, list(dict.fromkeys(self.a.systems))
        plan = mdm_plan(a.batch_size, a.length, steps, seeded(a.seed), even=a.plan == "even")
        for system in systems:  # warm up; the slow systems in a few calls only
            self.time(system, plan, self.sampled_calls(system, plan, most=2))
        timings = {system: [] for system in systems}
        for _ in range(a.repeats):
            for system in systems:
                timings[system].append(
                    self.time(system, plan, self.sampled_calls(system, plan, a.slow_calls))
                )
                seconds = timings[system][-1].seconds
                print(f"{steps} steps, {system}: {seconds:.3g} s", file=sys.stderr, flush=True)
        floor = floor_of(self.model.config, plan, self.vocab_size, self.dtype.itemsize, rates)
        rows = [
            summary(system, steps, timings[system], a.batch_size * a.length) for system in systems
        ]
        ours = next((row["seconds"] for row in rows if row["system"] == "ours"), None)
        for row in rows:
            row["times_ours"] = None if ours is None else row["seconds"] / ours
            if row["system"] == "ours":
                row |= floor | {"times_floor": row["seconds"] / floor["floor_seconds"]}
        return rows

    def sampled_calls(self, system: System, plan: Plan, most: int) -> list[int] | None:
        """The calls that are timed, the middles of `most` equal parts of all; None for every call."""
        total = model_calls(system, plan)
        if system not in SAMPLED or not 0 < most < total:
            return None
        return [int((i + 0.5) * total / most) for i in range(most)]

    def time(self, system: System, plan: Plan, calls: list[int] | None) -> Timing:
        """Time a plan, or some of its calls, scaled to all. What one decoding costs besides its calls is not scaled."""
        seconds, done = self.stopwatch(system, plan, calls)
        if calls is None:
            return Timing(seconds, done.model_calls, done.token_forwards, done.model_calls)
        fixed, _ = self.stopwatch(system, plan, [])
        total, forwards = model_calls(system, plan), done.token_forwards
        if system == "encoder":  # its shortened plan knows nothing of the whole
            assert done.model_calls == len(calls)
            forwards = plan.order.shape[1] * int(group_sizes(plan).count_nonzero())
        return Timing(fixed + (seconds - fixed) * total / len(calls), total, forwards, len(calls))

    def stopwatch(
        self, system: System, plan: Plan, calls: Collection[int] | None
    ) -> tuple[float, Generation]:
        synchronize(self.device)
        started = time.perf_counter()
        done = self.run(system, plan, calls)
        synchronize(self.device)
        return time.perf_counter() - started, done

    def run(self, system: System, plan: Plan, calls: Collection[int] | None) -> Generation:
        """Decode a plan with one system; of SAMPLED systems only some calls, if `calls` says which."""
        common = {"choice": self.choice, "vocab_size": self.vocab_size}
        if system == "baseline":
            return decode_cached(
                self.model, plan, generator=seeded(self.a.seed, self.device), **common
            )
        if system == "no-cache":
            return decode_uncached(
                self.model, plan, generator=seeded(self.a.seed, self.device), calls=calls, **common
            )
        generator = seeded(self.a.seed)
        if system == "ours":
            return self.engine(self.model).generate(plan, generator=generator)
        if calls is not None:
            plan = only_calls(plan, calls)
        tokens = torch.randint(self.vocab_size, plan.order.shape, generator=generator)
        return self.engine(self.encoder).generate(plan, tokens, generator=generator)

    @functools.cache  # noqa: B019
    def engine(self, model: AOGPT) -> Engine:
        """Caches, packed weights and compiled steps are made once, as for a long series of samples."""
        return Engine(
            model, self.a.batch_size, self.a.length, self.choice, self.vocab_size, self.a.compile
        )


@dataclass(frozen=True)
class Timing:
    """One decoding: seconds of all its model calls, of which `measured_calls` were run."""

    seconds: float
    model_calls: int
    token_forwards: int
    measured_calls: int


def summary(system: System, steps: int, timings: list[Timing], tokens: int) -> dict:
    """The figures of one system at one number of steps; `tokens`: generated by one decoding."""
    seconds, first = [t.seconds for t in timings], timings[0]
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
        "measured_calls": first.measured_calls,
        "extrapolated": first.measured_calls < first.model_calls,
        "token_forwards": first.token_forwards,
        "ms_per_call": 1000 * median / first.model_calls,
    }


# ---- plans, as the systems go through them ---------------------------------------------------------------------------


def row_groups(plan: Plan) -> Tensor:
    """The plan with every row's own non-empty steps numbered from 0, (B, T): what decode.generate goes through."""
    starts = plan.step.diff(dim=1, prepend=torch.full_like(plan.step[:, :1], -1)) > 0
    return starts.cumsum(dim=1) - 1


def model_calls(system: System, plan: Plan) -> int:
    """Forward passes: the baselines go through the plan's steps, decode.generate through each row's own."""
    return (
        len(plan.step.unique())
        if system in ("baseline", "no-cache")
        else group_sizes(plan).shape[1]
    )


def only_calls(plan: Plan, calls: Collection[int]) -> Plan:
    """A plan of these calls of decode.generate alone; what the others reveal is given.

    An encoder feeds all positions of a row in every call, whichever are known, so each call costs what it costs in the
    whole plan.
    """
    groups = row_groups(plan)
    kept = torch.isin(groups, torch.tensor(list(calls), dtype=torch.long))
    first = kept.to(torch.uint8).argsort(dim=1, stable=True)  # given positions come first
    return Plan(plan.order.gather(1, first), groups.where(kept, -1).gather(1, first))


# ---- models ----------------------------------------------------------------------------------------------------------


def load_decoder(a: DecodeArguments, device: torch.device) -> tuple[AOGPT, int]:
    """AO-GPT of --run or of --size with random weights, in eval mode, and how many of its ids are tokens."""
    if a.run is None:
        config, vocab_size = SIZES[a.size]
        return random_model(config, a.seed, device), vocab_size
    loaded = checkpoint.load(a.run, device=device)
    c = loaded.model.config
    if (c.attention, c.target, c.start) != ("causal", "adaln", "attended"):
        raise ValueError(
            f"{a.run} is not AO-GPT: give a decoder with model.target = 'adaln' and an attended start"
        )
    if c.tied_head and a.logit_scale != "auto":
        raise ValueError(
            f"the head of {a.run} shares the token table and cannot be scaled; leave out --logit-scale"
        )
    return loaded.model, loaded.vocab_size


def encoder_config(config: ModelConfig, vocab_size: int) -> ModelConfig:
    """An encoder of the decoder's size, with [MASK] after the tokens."""
    rows = max(config.vocab_size, vocab_size + 1)
    return dataclasses.replace(
        config,
        attention="full",
        target="none",
        mask_token=vocab_size,
        vocab_size=rows,
        tied_head=False,
    )


@torch.no_grad()
def scale_logits(
    model: AOGPT, scale: float | str, vocab_size: int, length: int, seed: int
) -> tuple[float, float]:
    """Multiply the head's weights so that sampling has realistic work: freshly initialised logits are nearly flat.

    scale: the factor, or "auto" for one that gives ENTROPY, or as near as the vocabulary allows.

    Returns the factor and the mean entropy (nats, over random tokens) of the next-token distribution it leads to.
    """
    hidden = hidden_sample(model, vocab_size, min(length, 64), seed)
    if scale == "auto":
        low, high = 0.0, 1000.0
        for _ in range(30):
            scale = (low + high) / 2
            low, high = (
                (scale, high)
                if mean_entropy(model, hidden, scale, vocab_size) > ENTROPY
                else (low, scale)
            )
    model.head.weight.mul_(scale)
    return scale, mean_entropy(model, hidden, 1.0, vocab_size)


def hidden_sample(model: AOGPT, vocab_size: int, length: int, seed: int) -> Tensor:
    """Final hidden states (2 x length, D) for random tokens: of a random order, or of a half-masked sequence."""
    generator, device = seeded(seed), model.wte.weight.device
    tokens = torch.randint(vocab_size, (2, length), generator=generator).to(device)
    order = torch.rand(2, length, generator=generator).argsort(dim=1).to(device)
    if model.config.is_encoder:
        masked = order < length / 2
        return model.hidden(tokens.where(~masked, model.config.mask_token)).flatten(0, 1)
    return model.hidden(tokens, order).flatten(0, 1)


def mean_entropy(model: AOGPT, hidden: Tensor, scale: float, vocab_size: int) -> float:
    """Nats, with the head's weights multiplied by `scale`."""
    logits = model.logits(hidden)[:, :vocab_size]
    bias = 0 if model.head.bias is None else model.head.bias[:vocab_size]
    log_probs = ((logits - bias) * scale + bias).float().log_softmax(dim=-1)
    return float(-(log_probs.exp() * log_probs).sum(dim=-1).mean())


# ---- the floor -------------------------------------------------------------------------------------------------------


def floor_of(config: ModelConfig, plan: Plan, vocab_size: int, itemsize: int, rates: Rates) -> dict:
    """Seconds that decode.generate on AO-GPT cannot beat at these rates, with its bytes and operations in all.

    Per model call the larger of two times. Bytes: the weights of blocks and head once, and the keys and values of every
    row's cached inputs once. Operations: two per weight and input, two per weight of the head and revealed token, and
    four per width, layer and pair of an input and one it sees. adaLN, a table per position that is computed once,
    embeddings, norms, token choice and activations are left out.
    """
    sizes, D, L = group_sizes(plan), config.n_embd, config.n_layer
    active, known = sizes > 0, sizes.cumsum(dim=1) - sizes
    fresh = torch.nn.functional.pad(sizes[:, :-1] - 1, (1, 0)).where(active, 0)
    cached = (known - fresh).where(active, 0)
    pairs = fresh * cached + fresh * (fresh + 1) // 2 + sizes * (known + 1)
    block_weights, head_weights = 12 * L * D**2, D * vocab_size
    bytes_ = itemsize * (block_weights + head_weights + 2 * L * D * cached.sum(dim=0).double())
    flops = (
        (2 * block_weights * (fresh + sizes) + 2 * head_weights * sizes + 4 * L * D * pairs)
        .sum(dim=0)
        .double()
    )
    seconds = torch.maximum(bytes_ / rates.bandwidth, flops / rates.flops)
    return {
        "floor_seconds": float(seconds.sum()),
        "floor_bytes": float(bytes_.sum()),
        "floor_flops": float(flops.sum()),
    }


# ---- the report ------------------------------------------------------------------------------------------------------


def facts(result: dict) -> list[str]:
    """What was measured, on what."""
    s, m, rates = result["settings"], result["machine"], result["rates"]
    lines = [
        f"{s['batch_size']} samples of {s['length']} tokens, {s['plan']} plans, temperature {s['temperature']}, "
        f"top-p {s['top_p']}, {s['dtype']}{', compiled' if s['compile'] else ''}; median of {s['repeats']}.",
        f"{m['name']}, {m['threads']} threads, torch {result['versions']['torch']}: "
        f"{rates['flops'] / 1e9:,.0f} GFLOP/s in a matrix product, {rates['bandwidth'] / 1e9:,.1f} GB/s from memory.",
    ]
    for name, model in result["models"].items():
        kind = "Encoder" if name == "encoder" else "AO-GPT"
        lines.append(
            f"{kind}: {sum(model['parameters'].values()) / 1e6:.1f} M parameters, head scaled by "
            f"{model['logit_scale']:.3g}, mean entropy {model['entropy']:.2f} nats."
        )
    return [line for part in lines for line in (part, "")][:-1]


def markdown_table(rows: list[dict]) -> list[str]:
    """The rows as a table that reads well as plain text too; ratios first."""
    titles = [
        "system",
        "steps",
        "x ours",
        "x floor",
        "model calls",
        "token-forwards",
        "ms/call",
        "tokens/s",
    ]
    lines = [[*titles, "seconds (min - max)", "measured calls"]]
    for r in rows:
        ours, floor = (
            f"{r[key]:.2f}" if r.get(key) else "" for key in ("times_ours", "times_floor")
        )
        lines.append(
            [
                r["system"],
                str(r["steps"]),
                ours,
                floor,
                f"{r['model_calls']:,}",
                f"{r['token_forwards']:,}",
            ]
            + [short(r["ms_per_call"]), short(r["tokens_per_second"])]
            + [f"{short(r['seconds'])} ({short(r['seconds_min'])} - {short(r['seconds_max'])})"]
            + [f"{r['measured_calls']} of {r['model_calls']}" if r["extrapolated"] else "all"]
        )
    return table(lines)


def notes(result: dict) -> list[str]:
    lines = [
        "x ours: seconds relative to `ours` at the same steps. x floor: seconds of `ours` relative to the floor."
    ]
    ours = [row for row in result["rows"] if row["system"] == "ours"]
    if ours:
        floors = (f"{short(row['floor_seconds'])} s at {row['steps']} steps" for row in ours)
        lines.append(f"Floor of `ours`, from the rates above: {', '.join(floors)}.")
    if any(row["extrapolated"] for row in result["rows"]):
        lines.append(
            "Extrapolated: where the last column says so, a part of the calls was timed and scaled to all."
        )
    if result["machine"]["device"] == "cpu":
        lines.append("On a CPU only the ratios mean something.")
    return [line for part in lines for line in (part, "")][:-1]


def plot_seconds(rows: list[dict], title: str) -> bytes:
    """PNG of seconds over steps, a line per system and the floor of `ours`, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for system in dict.fromkeys(row["system"] for row in rows):
        own = sorted((row for row in rows if row["system"] == system), key=lambda row: row["steps"])
        steps, seconds = [row["steps"] for row in own], [row["seconds"] for row in own]
        label = f"{system} (extrapolated)" if any(row["extrapolated"] for row in own) else system
        (line,) = axes.plot(steps, seconds, marker="o", label=label)
        low, high = ([row[key] for row in own] for key in ("seconds_min", "seconds_max"))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        if system == "ours":
            floor = [row["floor_seconds"] for row in own]
            axes.plot(steps, floor, linestyle="--", color=line.get_color(), label="floor of ours")
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="seconds", title=title)
    ticks = sorted({row["steps"] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)
