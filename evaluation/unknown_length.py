"""Gaps whose length is not known: a passage is filled at every length, and the fillings ranked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import get_args

from evaluation.infilling import Passages, rouge
from model import AOGPT
from sampling import gaps
from sampling.modes import Context

KNOWN = "known length"
LEAST_RIGHT = 8  # tokens after the longest middle, by which it is judged


def contexts_of_lengths(passages: Passages, number: int, lengths: range) -> list[Context]:
    """The context of a passage with a middle of each length, all with the same text after it: as
    much as leaves room for the longest."""
    row, start, end = (v[number].tolist() for v in (passages.tokens, passages.start, passages.end))
    left, right = row[:start], row[end : end + len(row) - start - lengths[-1]]
    return [[*left, *[None] * n, *right] for n in lengths]


def rank_lengths(
    model: AOGPT,
    passages: Passages,
    lengths: range,
    fill: Callable[[list[Context]], list[list[int]]],
    decode: Callable[[Sequence[int]], str],
) -> list[dict]:
    """A row for each way of ranking, and one for the known length: how often the true length is the
    best, or among the best three, how far the best is from it, in tokens, and ROUGE of the best."""
    ways = get_args(gaps.Ranking)
    found: dict[str, list] = {way: [] for way in (*ways, KNOWN)}
    for number, true in enumerate(passages.middle(passages.tokens)):
        contexts = contexts_of_lengths(passages, number, lengths)
        rows, start = fill(contexts), int(passages.start[number])
        scores = gaps.score_fillings(model, contexts, rows)
        ranking = {way: [lengths[i] for i in gaps.ranked(scores, way)] for way in ways}
        for way, order in (ranking | {KNOWN: [len(true)]}).items():
            row = rows[lengths.index(order[0])]
            pair = decode(row[start : start + order[0]]), decode(true)
            found[way].append((order.index(len(true)), abs(order[0] - len(true)), pair))
    table = []
    for way, entries in found.items():
        places, distances, pairs = zip(*entries, strict=True)
        row = {"ranked_by": way, "best": sum(place == 0 for place in places) / len(places)}
        row["best_three"] = sum(place < 3 for place in places) / len(places)
        table.append(row | {"distance": statistics.mean(distances)} | rouge(list(pairs)))
    return table
