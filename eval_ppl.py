"""Perplexity of a trained model on prepared text, left to right and in any order.

python eval_ppl.py out/quickstart --data data/pydocs
torchrun --nproc_per_node=8 eval_ppl.py out/aogpt_small --data data/openwebtext --num-orders 8 --json result.json
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from tqdm import tqdm

import checkpoint
from data.loader import TokenDataset, load_meta, ngram_entropies
from objectives import estimate, held_out_nll
from orders import OrderConfig
from runtime import Processes, autocast, check_output, pick_dtype, processes, run_script, to_json, versions

NGRAM_TOKENS = 10_000_000  # of the training split, for the entropies shown beside the model's


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder (out/NAME) or checkpoint file."""
    data: Path
    """Folder that data/prepare.py wrote."""
    split: str = "val"
    orders: tuple[Literal["l2r", "random"], ...] | None = None
    """Orders to score: left-to-right, and the mean over uniformly random orders (any-order; an encoder's ELBO). By
    default all that the model has."""
    num_orders: int = 1
    """Random orders drawn per sequence (Monte Carlo)."""
    max_sequences: int | None = None
    """Score only the first blocks of the split."""
    batch_size: int = 16
    seed: int = 0
    """Of the random orders."""
    json: Path | None = None
    """Write results, settings and versions to this file."""
    weights: Literal["ema", "raw"] = "ema"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with processes(arguments.device) as procs:
        evaluate(arguments, procs)


def evaluate(a: Arguments, procs: Processes) -> None:
    for name in ("num_orders", "batch_size", "max_sequences"):
        if getattr(a, name) is not None and getattr(a, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(a, name)}; give at least 1")
    if not 0 <= a.seed < 2**63:
        raise ValueError(f"--seed is {a.seed}; give an integer from 0 to 2**63 - 1")
    if a.orders is not None and not a.orders:
        raise ValueError("--orders names no order; give l2r, random or both")
    check_output(a.json, "--json")
    loaded = checkpoint.load(a.run, a.weights, procs.device)
    meta = load_meta(a.data)
    if meta["tokenizer"] != loaded.tokenizer:
        raise ValueError(
            f"{a.data} holds {meta['tokenizer']} tokens, but the model was trained on {loaded.tokenizer} tokens; "
            f"prepare the text again with --tokenizer {loaded.tokenizer}"
        )
    orders = choose_orders(a.orders, loaded.model.config)
    dataset = TokenDataset(a.data, a.split, loaded.model.config.block_size)
    count = min(dataset.num_blocks, a.max_sequences or dataset.num_blocks)
    results = {}
    for kind in orders:
        draws = a.num_orders if kind == "random" else 1
        results[kind] = estimate(
            score(loaded.model, dataset, OrderConfig(kind=kind), count, draws, a, procs, loaded.scored_from)
        )
    if procs.main:
        entropies = ngram_table(a.data, loaded.model.config.block_size)
        print_table(results, entropies, a, loaded, count)
        if a.json:
            write_json(a, results, entropies, loaded, meta, procs)


def choose_orders(orders: tuple[str, ...] | None, config) -> tuple[str, ...]:
    """The orders to score; ValueError for one that the model has no likelihood for."""
    encoder = config.attention == "full"
    possible = ("random",) if encoder else ("l2r",) if config.target == "none" else ("l2r", "random")
    for kind in orders or possible:
        if kind not in possible:
            reason = "is an encoder" if encoder else "is not told its target position"
            raise ValueError(f"this model {reason} and has no {kind!r} perplexity; give --orders {possible[0]}")
    return orders or possible


def score(
    model, dataset: TokenDataset, orders: OrderConfig, count: int, draws: int, a: Arguments, procs, scored_from: int = 0
):
    """Nats per token of the first `count` blocks under `draws` orders each, (count, draws), on every process.

    The orders of a block follow from (seed, draw, block) alone, whatever the batches and the processes.
    """
    share, parts = procs.share(count), []
    total = len(share) * draws
    with tqdm(total=total, desc=orders.kind, unit="pass", disable=None if procs.main else True, leave=False) as bar:
        for start in range(share.start, share.stop, a.batch_size):
            rows = range(start, min(start + a.batch_size, share.stop))
            tokens = dataset.blocks(list(rows)).to(procs.device)
            columns = []
            for draw in range(draws):
                with autocast(procs.device, pick_dtype(a.dtype, procs.device)):
                    columns.append(held_out_nll(model, tokens, orders, a.seed, draw, rows, count, scored_from).cpu())
                bar.update(len(rows))
            parts.append(torch.stack(columns, dim=1))
    own = torch.cat(parts) if parts else torch.zeros(0, draws, dtype=torch.float64)
    return torch.cat(procs.gather(own))


def ngram_table(folder: Path, block_size: int) -> dict[str, float]:
    """Unigram and bigram entropies, nats per token, of the training text (its first tokens, if it is long)."""
    meta = load_meta(folder)
    split = "train" if "train" in meta["splits"] else next(iter(meta["splits"]))
    tokens = TokenDataset(folder, split, 1).tokens[:NGRAM_TOKENS]
    unigram, bigram = ngram_entropies(tokens, meta["vocab_size"])
    return {f"unigram entropy of {split}": unigram, f"bigram entropy of {split}": bigram}


def print_table(results: dict, entropies: dict, a: Arguments, loaded: checkpoint.Loaded, count: int) -> None:
    tokens = count * loaded.model.config.block_size
    print(f"{loaded.describe()} on {a.data} ({a.split}): {count} blocks, {tokens:,} tokens")
    print(f"{'':34}{'nats/token':>11}{'std. error':>12}{'bits/token':>12}{'perplexity':>12}")
    names = {"l2r": "left to right", "random": f"any order ({a.num_orders} per block)"}
    for kind, r in results.items():
        bits = r.nll / math.log(2)
        print(f"{names[kind]:34}{r.nll:11.4f}{r.standard_error:12.4f}{bits:12.4f}{r.perplexity:12.3f}")
    for name, nats in entropies.items():
        print(f"{name:34}{nats:11.4f}{'':12}{nats / math.log(2):12.4f}{math.exp(nats):12.3f}")


def write_json(a: Arguments, results: dict, entropies: dict, loaded, meta: dict, procs: Processes) -> None:
    report = {
        "results": {kind: dataclasses.asdict(r) | {"perplexity": r.perplexity} for kind, r in results.items()},
        "entropies": entropies,
        "settings": dataclasses.asdict(a) | {"dtype": str(pick_dtype(a.dtype, procs.device)).removeprefix("torch.")},
        "checkpoint": {"path": loaded.path, "step": loaded.step, "weights": loaded.weights},
        "data": {"tokenizer": meta["tokenizer"], "split": a.split} | meta["splits"][a.split],
        "processes": procs.world_size,
        "device": str(procs.device),
        "versions": versions(),
    }
    text = to_json(report, indent=2) + "\n"
    checkpoint.write_atomically(a.json, lambda file: file.write(text.encode()))


if __name__ == "__main__":
    run_script(main)
