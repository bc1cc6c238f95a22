"""Perplexity of a trained model on prepared text, left to right, in any order and averaged over orders of the context.

python eval_ppl.py out/quickstart --datasets pydocs
python eval_ppl.py RUN --datasets data/own --orders l2r random fixed_blockwise:block=32,seed=1 --num-orders 8
torchrun --nproc_per_node=8 eval_ppl.py RUN --datasets wikitext103 ptb --orders l2r random --ensemble 1 8 64 --json FILE
"""

from __future__ import annotations

import dataclasses
import math
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from tqdm import tqdm

from checkpoints import store as checkpoint
from data.loader import (
    TokenDataset,
    evaluation_split,
    find_dataset,
    load_meta,
    ngram_entropies,
    read_tokens,
)
from evaluation.ensembles import MAX_DRAWS, cheap_gains, direct_nll, passes
from evaluation.estimates import Estimate, estimate
from objectives import token_nll
from orders import OrderConfig
from runtime.command_line import run_script
from runtime.devices import autocast, available_memory, pick_dtype
from runtime.files import check_output, to_json
from runtime.processes import Processes, processes
from runtime.reports import versions

NGRAM_TOKENS = 10_000_000  # of the training split, for the entropies shown beside the model's
PRECISION_SAMPLE = 8  # blocks scored in both precisions
ORDERS_PER_CONTEXT = (
    8  # the cheap gain varies far less than the loss along an order: results/order_ensembles.md
)
JOINT_DRAWS = 8  # fewer means than these tell too little of their spread to stop at a target
LARGEST_PASS = {"cpu": 2**12, "cuda": 2**19}  # tokens: more do not make a pass faster
SETTINGS = {
    "mixture": ("l2r_prob",),
    "fixed_random": ("seed",),
    "fixed_blockwise": ("block", "seed"),
}  # of --orders
PUBLISHED = Path(__file__).parent / "data" / "published.toml"


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME), exported folder, released weights or Hugging Face repo id."""
    datasets: tuple[str, ...]
    """Prepared data sets: names under data/, or folders that data/prepare.py wrote."""
    split: str | None = None
    """By default the evaluation set's own, the only one, or val."""
    orders: tuple[str, ...] | None = None
    """Orders to score: l2r, random (any-order: the mean over uniform orders; an encoder's ELBO), or any distribution
    with its settings, as fixed_blockwise:block=32,seed=1 or mixture:l2r_prob=0.5. By default l2r and random, or that
    one of them which the model has."""
    ensemble: tuple[int, ...] = (1,)
    """Sizes of order ensembles: probabilities averaged over that many orders of the context. 1 is no ensemble."""
    ensemble_method: Literal["cheap", "direct"] = "cheap"
    """cheap: uniform orders, from few contexts whose remaining tokens are all scored at once; other orders are then
    scored without ensembles. direct: every step of every order, any orders; its check, and slow."""
    num_orders: int | None = None
    """Draws per sequence (Monte Carlo) of orders, of an encoder's masks, or of direct ensembles; by default 2, with
    --target-se at most 1000. The cheap ensemble draws a context for every 8 orders, but two at least."""
    target_se: float | None = None
    """Draw until the Monte Carlo standard error is at most this many nats per token, or --num-orders are drawn."""
    max_sequences: int | None = None
    """Score only the first blocks of the split."""
    batch_size: int | None = None
    """Sequences in a pass; by default what the memory takes. The results do not depend on it."""
    seed: int = 0
    """Of the random orders."""
    json: Path | None = None
    """Write results, settings and versions to this file, and the table beside it as Markdown (.md)."""
    per_token: Path | None = None
    """Write the loss of every token, averaged over draws, to this .npz file, with the tokens and the block numbers.
    Of an encoder: the token's terms of the ELBO, 0 where no draw masked it."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU that has it. The gains of ensembles are always float32: rounding looks like a gain."""

    @property
    def budget(self) -> int:
        return self.num_orders or (1000 if self.target_se else 2)


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    check_arguments(a)
    loaded = checkpoint.load(a.run, a.weights, procs.device)
    orders = choose_orders(a, loaded.model.config)
    texts = [open_text(name, a, loaded) for name in a.datasets]
    walker = Walker(procs, a, starting_batch_size(loaded.model.config, procs.device))
    entropies = {text.name: ngram_table(text.folder) for text in texts} if procs.main else {}
    results, tokens, lines = [], {}, []
    for text in texts:
        for name, config, sizes in orders:
            found, sums = score(Job(loaded, text, name, config, sizes, a, walker))
            results += found
            tokens |= {f"{text.name}/{name}/{size}/nll": nll for size, nll in sums.items()}
            if procs.main:  # after every one, so that none is lost
                lines = markdown(results, entropies, a, loaded, orders)
                if a.json:
                    write_report(a, results, entropies, lines, loaded, procs)
                if a.per_token:
                    write_tokens(a.per_token, texts, tokens)
    if procs.main:
        print("\n".join(lines))


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check_arguments(a: Arguments) -> None:
    for name in ("num_orders", "batch_size", "max_sequences"):
        if getattr(a, name) is not None and getattr(a, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(a, name)}; give at least 1")
    if a.budget >= MAX_DRAWS:
        raise ValueError(f"--num-orders is {a.num_orders}; give less than {MAX_DRAWS}")
    if not a.datasets:
        raise ValueError(
            "--datasets names nothing; give RUN first, then --datasets with one name or folder at least"
        )
    if len({Path(name).name for name in a.datasets}) < len(a.datasets):
        raise ValueError(
            f"--datasets {' '.join(a.datasets)}: results go by the last part of a path; give each its own"
        )
    if not a.ensemble or not all(1 <= size < 2**16 for size in a.ensemble):
        raise ValueError(f"--ensemble is {a.ensemble}; give sizes from 1 to 65535")
    if a.target_se is not None and not a.target_se > 0:
        raise ValueError(f"--target-se is {a.target_se}; give a number above 0, in nats per token")
    if a.target_se is not None and a.budget < 2:
        raise ValueError(
            "--target-se needs --num-orders 2 or more: a single draw does not show its error"
        )
    if not 0 <= a.seed < 2**63:
        raise ValueError(f"--seed is {a.seed}; give an integer from 0 to 2**63 - 1")
    if a.per_token is not None and a.per_token.suffix != ".npz":
        raise ValueError(f"--per-token {a.per_token}: name a file that ends in .npz")
    if a.json is not None and a.json.suffix == ".md":
        raise ValueError(
            f"--json {a.json}: the Markdown table would take its place; name a file that ends in .json"
        )
    if a.json is not None and a.per_token is not None and a.json.resolve() == a.per_token.resolve():
        raise ValueError(f"--json and --per-token both name {a.json}; give each its own file")
    check_output(a.json, "--json")
    check_output(a.per_token, "--per-token")


def parse_order(text: str) -> OrderConfig:
    """The distribution that `kind` or `kind:setting=value,...` means."""
    kind, _, settings = text.partition(":")
    known = SETTINGS.get(kind, ())
    types = {name: hint for name, hint in get_type_hints(OrderConfig).items() if name in known}
    values = {}
    for setting in settings.split(",") if settings else ():
        name, _, value = setting.partition("=")
        if name not in types:
            possible = f"it has {', '.join(known)} (as in {known[0]}=1)" if known else "it has none"
            raise ValueError(f"--orders {text}: {name!r} is no setting of {kind}; {possible}")
        try:
            values[name] = types[name](value)
        except ValueError:
            kind_of_number = types[name].__name__
            raise ValueError(
                f"--orders {text}: {name} is {value!r}, not of type {kind_of_number}"
            ) from None
    try:
        return OrderConfig(kind, **values)
    except ValueError as error:
        raise ValueError(f"--orders {text}: {error}") from None


def choose_orders(a: Arguments, config) -> list[tuple[str, OrderConfig, tuple[int, ...]]]:
    """Orders by name, and the ensemble sizes of each; ValueError for what the model has no likelihood for."""
    encoder, blind = config.is_encoder, config.target == "none"
    possible = ("random",) if encoder else ("l2r",) if blind else ("l2r", "random")
    if a.orders is not None and not a.orders:
        raise ValueError("--orders names no order; give l2r, random, or another distribution")
    named = {text: parse_order(text) for text in a.orders or possible}
    sizes = tuple(sorted(set(a.ensemble)))
    reason = "is an encoder" if encoder else "is not told its target position"
    for text, order in named.items():
        if order.kind == "fixed_blockwise" and order.block > config.block_size:
            raise ValueError(
                f"--orders {text}: the model's block size is {config.block_size}; give a smaller block"
            )
        if blind and order.kind not in possible:
            raise ValueError(
                f"this model {reason} and has no {text!r} perplexity; give --orders {possible[0]}"
            )
    if blind and sizes != (1,):
        what = (
            "its predictions do not depend on the order of the context"
            if encoder
            else "it knows one order only"
        )
        raise ValueError(
            f"this model {reason}: {what}, so there is no ensemble of orders; leave out --ensemble"
        )
    cheap = a.ensemble_method == "cheap"
    if cheap and sizes != (1,) and all(order.kind != "random" for order in named.values()):
        raise ValueError(
            f"the cheap ensemble is for uniformly random orders, not for {', '.join(named)}; "
            "add random to --orders, or give --ensemble-method direct"
        )
    if cheap and a.per_token and 1 not in sizes:
        raise ValueError(
            "the cheap ensemble does not score every token, so --per-token has nothing to write; "
            "add 1 to --ensemble, or give --ensemble-method direct"
        )
    return [
        (text, order, sizes if order.kind == "random" or not cheap else (1,))
        for text, order in named.items()
    ]


@dataclass(frozen=True)
class Text:
    """A data set to score: `count` rows, its blocks and then, where nothing may be dropped, what is left after them."""

    name: str
    folder: Path
    split: str
    dataset: TokenDataset
    count: int

    def tokens(self, rows: range) -> Tensor:
        """(B, T), or (1, less than T) for the row after the last block."""
        return (
            self.dataset.tail()
            if rows.start == self.dataset.num_blocks
            else self.dataset.blocks(list(rows))
        )

    def lengths(self) -> Tensor:
        """(count,) tokens of every row."""
        lengths = torch.full((self.count,), self.dataset.block_size)
        if self.count > self.dataset.num_blocks:
            lengths[-1] = self.dataset.tail().shape[1]
        return lengths

    def facts(self) -> dict:
        """What a result must name for another to reproduce it."""
        meta = self.dataset.meta
        facts = {
            key: meta[key] for key in ("tokenizer", "protocol", "packing", "notes") if key in meta
        }
        return (
            facts
            | {"split": self.split, "block_size": self.dataset.block_size}
            | meta["splits"][self.split]
        )


def open_text(name: str, a: Arguments, loaded: checkpoint.Loaded) -> Text:
    folder = find_dataset(name)
    meta = load_meta(folder)
    if meta["tokenizer"] != loaded.tokenizer:
        raise ValueError(
            f"{folder} holds {meta['tokenizer']} tokens, but the model was trained on {loaded.tokenizer} tokens; "
            f"prepare the text again with --tokenizer {loaded.tokenizer}"
        )
    split = a.split or evaluation_split(meta)
    dataset = TokenDataset(
        folder, split, loaded.model.config.block_size, verify=True
    )  # results name its checksum
    rest = meta.get("protocol", "full") == "full" and dataset.tail().shape[1] > loaded.scored_from
    rows = dataset.num_blocks + rest
    return Text(Path(name).name, folder, split, dataset, min(rows, a.max_sequences or rows))


# ---- scoring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One text under one distribution of orders, for ensembles of these sizes."""

    loaded: checkpoint.Loaded
    text: Text
    name: str
    orders: OrderConfig
    sizes: tuple[int, ...]
    a: Arguments
    walker: Walker

    @property
    def larger(self) -> tuple[int, ...]:
        return tuple(size for size in self.sizes if size > 1)

    @property
    def method(self) -> str | None:
        return self.a.ensemble_method if self.larger else None

    @property
    def exact(self) -> bool:
        """A single order is scored, without randomness."""
        return self.method is None and self.orders.kind in (
            "l2r",
            "fixed_random",
            "fixed_blockwise",
        )

    @property
    def joint(self) -> bool:
        """The masks of a draw depend on one another: their rates are stratified over the sequences."""
        return self.loaded.model.config.is_encoder

    def weights(self) -> Tensor:
        """(N,) scored tokens of each row over their mean: the mean of weighted rows is the mean over tokens."""
        scored = (self.text.lengths() - self.loaded.scored_from).double()
        return scored / scored.mean()

    def contexts(self, draws: int) -> int:
        """Draws of the cheap ensemble's contexts that go with these draws of orders."""
        return max(min(draws, 2), -(-draws // ORDERS_PER_CONTEXT)) if self.method == "cheap" else 0


def score(job: Job) -> tuple[list[dict], dict[int, Tensor]]:
    """The results of a job, by ensemble size, and the loss of every token, {size: (N, T)}, if it is asked for.

    Rounds of one draw for every sequence go on until the target or the budget is reached. What is drawn follows from
    (seed, draw, row) alone, whatever the batches and the processes.
    """
    started = time.perf_counter()
    draws, gains, sums, stopped = [], [], 0.0, None
    while stopped is None:
        direct = job.method == "direct"
        nll = job.walker.rows(
            job, lambda tokens, rows: draw_nll(job, tokens, rows, len(draws)), direct
        )
        if job.a.per_token:
            sums = sums + nll
        draws.append(nll.nanmean(dim=1))
        while len(gains) < job.contexts(len(draws)):
            gains.append(
                job.walker.rows(
                    job, lambda tokens, rows: draw_gains(job, tokens, rows, len(gains)), True
                )
            )
        estimates = estimates_of(job, draws, gains)
        stopped = why_stop(job, [e for e, _ in estimates.values()], len(draws))
    seconds, lengths = time.perf_counter() - started, job.text.lengths()
    difference = precision(job)
    results = []
    for size, (value, gain) in estimates.items():
        forwards = forwards_of(job, size, len(draws), len(gains), lengths)
        counts = {
            "draws": len(draws),
            "contexts": len(gains) if size > 1 else 0,
            "stopped": stopped,
        }
        counts |= {
            "token_forwards": forwards,
            "seconds_of_all_sizes": seconds,
            "batch_size": job.walker.batch_size,
        }
        results.append(result_of(job, size, value, gain) | counts | difference)
    scored = (1, *job.larger) if job.method == "direct" else (1,)
    means = sums / len(draws) if job.a.per_token else None
    tokens = {
        size: means[..., i]
        for i, size in enumerate(scored)
        if size in job.sizes and job.a.per_token
    }
    return results, tokens


def draw_nll(job: Job, tokens: Tensor, rows: range, draw: int) -> Tensor:
    """One draw of the losses of some rows, (B, T, S), or (B, 1, S) their means where no more is asked for; S ensemble
    sizes from 1 on."""
    model, seed = job.loaded.model, job.a.seed
    if job.method == "direct":
        nll = direct_nll(model, tokens, job.orders, (1, *job.larger), seed, draw, rows)
    else:
        nll = token_nll(
            model, tokens, job.orders, seed, draw, rows, job.text.count, job.loaded.scored_from
        )[..., None]
    return nll if job.a.per_token else nll.nanmean(dim=1, keepdim=True)


def draw_gains(job: Job, tokens: Tensor, rows: range, draw: int) -> Tensor:
    return cheap_gains(
        job.loaded.model, tokens, job.larger, job.a.seed, draw, rows, job.walker.batch_size
    )


def estimates_of(
    job: Job, draws: list[Tensor], gains: list[Tensor]
) -> dict[int, tuple[Estimate, Estimate | None]]:
    """{ensemble size: (the loss, its gain over size 1)} from draws of (N, S) losses and of (N, S - 1) cheap gains."""
    nll, weights = torch.stack(draws, dim=1), {"weights": job.weights()}
    if job.exact:
        return {1: (estimate(nll[:, 0, 0], **weights), None)}
    found = {1: (estimate(nll[..., 0], joint=job.joint, **weights), None)}
    for i, size in enumerate(job.larger):
        if job.method == "cheap":
            gain = torch.stack(gains, dim=1)[..., i]
            found[size] = estimate(nll[..., 0], gain, **weights), estimate(gain, **weights)
        else:
            gain = nll[..., i + 1] - nll[..., 0]
            found[size] = estimate(nll[..., i + 1], **weights), estimate(gain, **weights)
    return {size: found[size] for size in job.sizes}


def why_stop(job: Job, estimates: list[Estimate], draws: int) -> str | None:
    """ "exact": nothing is random; "target": the Monte Carlo error is small enough; "budget"; None: go on."""
    if job.exact:
        return "exact"
    if job.a.target_se and draws >= (JOINT_DRAWS if job.joint else 2):
        if all(e.monte_carlo_error <= job.a.target_se for e in estimates):
            return "target"
    return "budget" if draws >= job.a.budget else None


def forwards_of(job: Job, size: int, draws: int, contexts: int, lengths: Tensor) -> int:
    """Inputs that the model must be fed for this size alone."""
    total = 0
    for length, count in zip(*lengths.unique(return_counts=True), strict=True):
        each = (
            draws
            if size == 1 or job.method == "cheap"
            else draws * passes("direct", size, int(length))
        )
        if size > 1 and job.method == "cheap":
            each += contexts * passes("cheap", size, int(length))
        total += int(length) * int(count) * each
    return total


def result_of(job: Job, size: int, value: Estimate, gain: Estimate | None) -> dict:
    result = {
        "dataset": job.text.name,
        "data": job.text.facts(),
        "orders": job.name,
        "ensemble": size,
    }
    result |= {"method": job.method if size > 1 else None}
    result |= {
        "nll": value.nll,
        "standard_error": value.standard_error,
        "monte_carlo_error": value.monte_carlo_error,
    }
    result |= {"perplexity": value.perplexity, "perplexity_95": value.interval()}
    result |= {
        "perplexity_95_given_data": value.interval(given_data=True),
        "bits_per_token": value.nll / math.log(2),
    }
    result |= {"gain": None, "gain_error": None}
    if gain is not None:
        result |= {"gain": -gain.nll, "gain_error": gain.standard_error}
    tokens = int((job.text.lengths() - job.loaded.scored_from).sum())
    return result | {
        "sequences": value.sequences,
        "tokens": tokens,
        "published": published(job, size),
    }


def precision(job: Job) -> dict:
    """In bfloat16: by how much the losses of a few blocks, nats per token, differ from float32's; no ensemble."""
    a, procs = job.a, job.walker.procs
    if (
        not procs.main
        or job.method == "direct"
        or pick_dtype(a.dtype, procs.device) == torch.float32
    ):
        return {}
    count, plain = (
        min(PRECISION_SAMPLE, job.text.dataset.num_blocks, job.text.count),
        replace(job, sizes=(1,)),
    )
    losses = {torch.bfloat16: [], torch.float32: []}
    for row in range(
        count
    ):  # one at a time: float32 needs more memory than the batches were made for
        rows = range(row, row + 1)
        for dtype, found in losses.items():
            with autocast(procs.device, dtype):
                found.append(
                    draw_nll(plain, job.text.tokens(rows).to(procs.device), rows, 0).nanmean()
                )
    gap = torch.stack(losses[torch.bfloat16]) - torch.stack(losses[torch.float32])
    found = {"sequences": count, "mean": float(gap.mean()), "largest": float(gap.abs().max())}
    return {"bfloat16_minus_float32": found}


class Walker:
    """Goes through the rows of this process in batches that fit the memory."""

    def __init__(self, procs: Processes, a: Arguments, batch_size: int):
        self.procs, self.dtype, self.given = procs, pick_dtype(a.dtype, procs.device), a.batch_size
        self.per_token = a.per_token is not None
        self.batch_size = a.batch_size or batch_size

    def rows(
        self, job: Job, work: Callable[[Tensor, range], Tensor], exact: bool = False
    ) -> Tensor:
        """work(tokens, rows) -> (B, ...) for all rows, every process its share; (N, ...) of all of them on each.

        exact: in float32 whatever --dtype says.

        Where the memory runs out, the batch is halved and tried again, unless its size was given.
        """
        share, blocks, parts = self.procs.share(job.text.count), job.text.dataset.num_blocks, []
        title, row = f"{job.text.name} {job.name}", share.start
        hidden = None if self.procs.main else True
        with tqdm(total=len(share), desc=title, unit="seq", disable=hidden, leave=False) as bar:
            while row < share.stop:
                end = min(row + self.batch_size, share.stop)
                rows = range(
                    row, min(end, blocks) if row < blocks else end
                )  # the rest after the blocks: on its own
                tokens = job.text.tokens(rows)
                try:
                    with autocast(self.procs.device, torch.float32 if exact else self.dtype):
                        part = work(tokens.to(self.procs.device), rows).cpu()
                except torch.OutOfMemoryError:
                    self.halve()
                    continue
                if self.per_token and part.dim() == 3:
                    part = F.pad(
                        part, (0, 0, 0, job.text.dataset.block_size - part.shape[1]), value=math.nan
                    )
                parts.append(part)
                row = rows.stop
                bar.update(len(rows))
        found = [
            part
            for part in self.procs.gather(torch.cat(parts) if parts else None)
            if part is not None
        ]
        return torch.cat(found)

    def halve(self) -> None:
        if self.given or self.batch_size == 1:
            raise ValueError(
                f"the device is out of memory at {self.batch_size} sequences a pass; "
                + (
                    "leave out --batch-size, or give a smaller one"
                    if self.given
                    else "use a device with more of it"
                )
            )
        self.batch_size //= 2
        if self.procs.device.type == "cuda":
            torch.cuda.empty_cache()


def starting_batch_size(config, device: torch.device) -> int:
    """Sequences that take about half of the memory by a rough count of activations, attention masks and logits."""
    length, largest = config.block_size, max(1, LARGEST_PASS[device.type] // config.block_size)
    each = length * 4 * (40 * config.n_embd + 2 * config.n_head * length + 3 * config.vocab_size)
    memory = available_memory(device)
    return largest if memory is None else max(1, min(largest, memory // 2 // each))


# ---- reporting -------------------------------------------------------------------------------------------------------


def ngram_table(folder: Path) -> dict[str, float]:
    """Unigram and bigram entropies, nats per token, of the training text (its first tokens, if it is long)."""
    meta = load_meta(folder)
    split = "train" if "train" in meta["splits"] else next(iter(meta["splits"]))
    unigram, bigram = ngram_entropies(read_tokens(folder, split)[:NGRAM_TOKENS], meta["vocab_size"])
    return {f"unigram entropy of {split}": unigram, f"bigram entropy of {split}": bigram}


def published(job: Job, size: int) -> float | None:
    """The published perplexity of the released model that this is, on this set under the same protocol, if any.

    Its layout and size tell which model it is. Whether its weights are the released ones, nobody has listed.
    """
    meta, config = job.text.dataset.meta, job.loaded.model.config
    table = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))
    name = meta.get("settings", {}).get("dataset")
    if (
        not job.loaded.system
        or job.a.weights == "raw"
        or meta.get("protocol") != "sedd"
        or meta.get("notes")
    ):
        return None
    if job.text.split != table["splits"].get(name) or job.text.count < job.text.dataset.num_blocks:
        return None
    scale = {(12, 768): "small", (24, 1024): "medium"}.get((config.n_layer, config.n_embd))
    system = job.loaded.system + (f", {size} orders" if size > 1 else "")
    figures = table.get(scale, {}).get(job.name, {}).get(system)
    return figures[table["datasets"].index(name)] if figures else None


def markdown(
    results: list[dict], entropies: dict, a: Arguments, loaded: checkpoint.Loaded, orders: list
) -> list[str]:
    """The results as a Markdown table with what is needed to read it."""
    names = {"l2r": "left to right", "random": "any order"}
    head = "text, orders, M, nats/token, std. error, Monte Carlo, bits/token, perplexity, 95% interval".split(
        ", "
    )
    gains, known = any(r["gain"] is not None for r in results), any(r["published"] for r in results)
    head += ["gain"] * gains + ["token-forwards"] + ["published"] * known
    rows = []
    for r in results:
        low, high = r["perplexity_95"]
        row = [
            r["dataset"],
            names.get(r["orders"], r["orders"]),
            str(r["ensemble"]),
            f"{r['nll']:.4f}",
        ]
        row += [
            number(r["standard_error"], 4),
            number(r["monte_carlo_error"], 5),
            f"{r['bits_per_token']:.4f}",
        ]
        row += [f"{r['perplexity']:.3f}", "" if math.isnan(low) else f"{low:.3f} to {high:.3f}"]
        row += [
            "" if r["gain"] is None else f"{r['gain']:.5f} +- {number(r['gain_error'], 5)}"
        ] * gains
        rows.append(row + [f"{r['token_forwards']:,}"] + [f"{r['published'] or ''}"] * known)
    for text, table in entropies.items():
        for name, nats in table.items():
            row = [
                text,
                name,
                "",
                f"{nats:.4f}",
                "",
                "",
                f"{nats / math.log(2):.4f}",
                f"{math.exp(nats):.3f}",
            ]
            rows.append(row + [""] * (len(head) - len(row)))
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    rows = [
        head,
        ["-" * (width - (i > 1)) + ":" * (i > 1) for i, width in enumerate(widths)],
        *rows,
    ]
    table = ["| " + " | ".join(aligned(row, widths)) + " |" for row in rows]
    return [f"{loaded.describe()}", "", *table, "", *notes(results, a, orders)]


def number(value: float, digits: int) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"


def aligned(row: list[str], widths: list[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    return [
        cell.ljust(w) if i < 2 else cell.rjust(w)
        for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    ]


def notes(results: list[dict], a: Arguments, orders: list) -> list[str]:
    lines = [
        f"{r['dataset']} ({r['data']['split']}): {r['sequences']:,} sequences, {r['tokens']:,} tokens"
        for i, r in enumerate(results)
        if r["dataset"] not in [earlier["dataset"] for earlier in results[:i]]
    ]
    told = set()
    for r in results:
        job, name = (
            (r["dataset"], r["orders"]),
            f"{r['dataset']} {r['orders']}, M = {r['ensemble']}",
        )
        if r["stopped"] != "exact" and a.target_se:
            reached = "reached" if r["stopped"] == "target" else "NOT reached"
            lines.append(f"{name}: --target-se {a.target_se} {reached} after {r['draws']} draws")
        found = r.get("bfloat16_minus_float32")
        if found and job not in told:
            mean, largest = (
                f"{found['mean']:+.5f} nats/token on average",
                f"{found['largest']:.5f} at most",
            )
            lines.append(
                f"{' '.join(job)}: bfloat16 - float32 on {found['sequences']} blocks: {mean}, {largest}"
            )
        told.add(job)
    if any(r["published"] for r in results):
        lines.append(
            "published: of the model whose layout and size this is; the others are measured here"
        )
    without = [name for name, _, sizes in orders if sizes == (1,) and set(a.ensemble) != {1}]
    if without:
        lines.append(
            f"no ensembles of {', '.join(without)}: the cheap ones are of uniform orders (random) only"
        )
    if a.per_token and a.ensemble_method == "cheap" and set(a.ensemble) != {1}:
        lines.append(
            f"{a.per_token} holds M = 1 only: the cheap ensemble does not score every token"
        )
    return lines


def write_report(
    a: Arguments, results, entropies: dict, lines: list[str], loaded, procs: Processes
) -> None:
    report = {
        "results": results,
        "entropies": entropies,
        "settings": dataclasses.asdict(a)
        | {"dtype": str(pick_dtype(a.dtype, procs.device)).removeprefix("torch.")},
        "checkpoint": {
            "path": loaded.path,
            "step": loaded.step,
            "weights": loaded.weights,
            "system": loaded.system,
        },
        "processes": procs.world_size,
        "device": str(procs.device),
        "versions": versions(),
    }
    text = to_json(report, indent=2) + "\n"
    checkpoint.write_atomically(a.json, lambda file: file.write(text.encode()))
    table = "\n".join(lines) + "\n"
    checkpoint.write_atomically(a.json.with_suffix(".md"), lambda file: file.write(table.encode()))


def write_tokens(path: Path, texts: list[Text], nll: dict[str, Tensor]) -> None:
    """Arrays TEXT/ORDERS/M/nll (N, T), TEXT/tokens (N, T) in sequence order, TEXT/blocks (N,). NaN: not scored."""
    arrays = {name: values.numpy() for name, values in nll.items()}
    for text in texts:
        blocks = min(text.count, text.dataset.num_blocks)
        tokens = text.tokens(range(blocks))
        if text.count > blocks:
            rest = text.dataset.tail()
            tokens = torch.cat(
                [tokens, F.pad(rest, (0, tokens.shape[1] - rest.shape[1]), value=-1)]
            )
        arrays |= {
            f"{text.name}/tokens": tokens.numpy(),
            f"{text.name}/blocks": np.arange(text.count),
        }
    checkpoint.write_atomically(path, lambda file: np.savez_compressed(file, **arrays))


if __name__ == "__main__":
    run_script(main)
