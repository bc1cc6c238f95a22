"""How far the likelihoods of the same texts differ from order to order.

One joint distribution would give a text the same probability along every order, by the chain rule.
A model learns each conditional by itself, so its orders disagree (chain-rule deviation, arXiv
2606.00997).

N sequences, D draws.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from evaluation.estimates import estimate
from runtime.reports import markdown_table

HEAD = ["text", "orders", "other orders", "difference", "std. error", "mean distance"]


def disagreements(dataset: str, losses: dict[str, Tensor], weights: Tensor) -> list[dict]:
    """A row for every pair of orders, and for two draws of the same ones, in nats per token.

    Args:
        losses: by the name of the orders, (N, D) of each sequence in each draw; exact
            likelihoods along orders, of which there are two at least.
        weights: (N,) of mean 1: sequences count by their tokens.
    """
    first = {name: nll[:, 0].double() for name, nll in losses.items()}
    pairs = [(a, b, first[a], first[b]) for a, b in itertools.combinations(losses, 2)]
    again = [
        (name, f"{name}, drawn again", nll[:, 0].double(), nll[:, 1].double())
        for name, nll in losses.items()
        if nll.shape[1] > 1
    ]
    rows = []
    for name, other, one, two in [*pairs, *again]:
        difference = estimate(one - two, weights=weights)
        rows.append(
            {
                "dataset": dataset,
                "orders": name,
                "other": other,
                "difference": difference.nll,
                "standard_error": difference.standard_error,
                "distance": float((weights * (one - two).abs()).mean()),
            }
        )
    return rows


def table(rows: list[dict]) -> list[str]:
    """Of what `disagreements` found, in Markdown."""
    keys = "difference", "standard_error", "distance"
    cells = [
        [r["dataset"], r["orders"], r["other"], *(f"{r[key]:.4f}" for key in keys)] for r in rows
    ]
    return [
        *markdown_table(HEAD, cells, left=3),
        "",
        "Difference, nats/token: of the first draws, orders minus other orders, mean over "
        "sequences; mean distance: of its size in a sequence. One distribution would have none.",
    ]
