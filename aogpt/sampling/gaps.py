"""Texts with gaps, some of unknown length: read, filled at every length, and ranked.

[MASK:3] is three tokens, [MASK] one, [MASK:2-12] two to twelve. Fillings
of different lengths are ranked by the log-probability per token of the known text after them, given
all that is before it. The filling's own probability falls with every token.

Shapes: N fillings, T positions of the longest."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizers import Tokenizer
from ..model import AOGPT
from ..runtime.errors import UserError
from ..systems import group_log_probs
from .modes import Context

MASK = re.compile(r"(\[MASK\b[^\]]*\]?)")
MOST_LENGTHS = 512  # combinations of the lengths of all gaps of a text


class TooLong(UserError):
    """A text that leaves no room in a block."""


def read_gaps(text: str) -> list[str | range]:
    """Text and the lengths of gaps, in turn; UserError for a mask that is not written correctly."""
    parts: list[str | range] = []
    for number, part in enumerate(MASK.split(text)):
        if number % 2 == 0:
            parts.append(part)
        elif mask := re.fullmatch(
            r"\[MASK(?::0*([1-9]\d{0,8})(?:-0*([1-9]\d{0,8}))?)?\]", part
        ):
            shortest = int(mask[1] or 1)
            parts.append(range(shortest, int(mask[2] or shortest) + 1))
            if not parts[-1]:
                raise UserError(f"{part} has no length; write the shorter one first")
        else:
            advice = "write [MASK:n] for n tokens, [MASK:n-m] for n to m, n at least 1"
            raise UserError(f"{part[:40]!r} is not a mask; {advice}")
    if len(parts) == 1:
        raise UserError("there is no mask; write [MASK:n] for n new tokens")
    return parts


def contexts(text: str, tokenizer: Tokenizer, block_size: int) -> list[Context]:
    """The tokens of a text, None in its gaps, for every combination of lengths. Raises UserError if
    the shortest does not fit into a block; longer ones that do not are left out."""
    parts = read_gaps(text)
    first, *others = parts[::2]
    known = [tokenizer.encode(first), *map(tokenizer.encode_after, others)]
    gaps = parts[1::2]
    total = sum(map(len, known))
    if total + sum(gap[0] for gap in gaps) > block_size:
        raise TooLong(
            f"text and masks exceed the block size, {block_size} tokens; shorten them"
        )
    if (count := math.prod(map(len, gaps))) > MOST_LENGTHS:
        what = f"its masks have {count:,} combinations of lengths, more than {MOST_LENGTHS}"
        raise UserError(f"{what}; give narrower ranges")
    if count > 1 and not known[-1]:
        raise UserError(
            "a mask of unknown length needs text after the last mask to be judged by"
        )
    found = []
    for lengths in itertools.product(*gaps):
        if total + sum(lengths) <= block_size:
            blanks = [[None] * length for length in lengths]
            pairs = itertools.zip_longest(known, blanks, fillvalue=[])
            found.append([token for pair in pairs for part in pair for token in part])
    return found


@dataclass(frozen=True)
class Scores:
    """The log-probabilities that rank a filling, nats per token."""

    right: (
        float  # the known text after the first gap, given all that is before each token
    )
    joint: float  # that text and the filling, in the same way
    filling: float  # the filling, given the known text on all sides


@torch.no_grad()
def score_fillings(
    model: AOGPT,
    given: Sequence[Context],
    tokens: Sequence[list[int]],
    batch_size: int = 16,
) -> list[Scores]:
    """given: the context of each of N fillings; tokens: the whole text of each. NaN: `right`
    without known text after the first gap, `filling` of a model that can only continue a text."""
    scores = []
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        scores += _score(model, given[rows], tokens[rows])
    return scores


def _score(model: AOGPT, given, tokens) -> list[Scores]:
    lengths = torch.tensor([len(row) for row in tokens])
    x = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
    known = [torch.tensor([token is not None for token in row]) for row in given]
    blank = ~pad_sequence(known, batch_first=True, padding_value=True)
    position = torch.arange(x.shape[1]).expand_as(x)
    padding = position >= lengths[:, None]
    first = torch.where(blank, position, x.shape[1]).amin(dim=1, keepdim=True)
    after = (position >= first) & ~padding
    along = log_probs_along(model, x, position, lengths, first.squeeze(1))
    filling = torch.full((len(x),), math.nan, dtype=torch.float64)
    if not model.config.l2r_only:
        order = (blank + 2 * padding).argsort(dim=1, stable=True)
        before = (~blank & ~padding).sum(dim=1)
        last = log_probs_along(model, x, order, lengths, before)
        filling = _mean(last, blank.gather(1, order))
    sums = (_mean(along, after & ~blank), _mean(along, after), filling)
    return [Scores(*row) for row in zip(*(v.tolist() for v in sums), strict=True)]


def log_probs_along(
    model: AOGPT, x: Tensor, order: Tensor, lengths: Tensor, start: Tensor
) -> Tensor:
    """log p of every token along an order, float64 (N, T) in its steps, from step `start` (N,) on:
    a pass for a decoder, one a step for an encoder. Orders end with the padding."""
    device = model.wte.weight.device
    more = (
        {"prompt_lengths": start, "lengths": lengths} if model.config.is_encoder else {}
    )
    more = {name: value.to(device) for name, value in more.items()}
    return (
        group_log_probs(model, x.to(device), order.to(device), 1, **more).cpu().double()
    )


def _mean(log_probs: Tensor, where: Tensor) -> Tensor:
    return (log_probs * where).sum(dim=1) / where.sum(dim=1)  # NaN where there are none


def ranked(scores: Sequence[Scores]) -> list[int]:
    """The numbers of the fillings, the best first; without text to the right by `joint`."""
    keys = [score.joint if math.isnan(score.right) else score.right for score in scores]
    return sorted(range(len(keys)), key=lambda i: -keys[i])


def best_fillings(model: AOGPT, given, tokens, most: int) -> list[tuple[int, Scores]]:
    """Numbers and scores of at most `most` fillings with different tokens, the best first."""
    distinct = list({tuple(row): i for i, row in enumerate(tokens)}.values())
    found = score_fillings(
        model, [given[i] for i in distinct], [tokens[i] for i in distinct]
    )
    return [(distinct[i], found[i]) for i in ranked(found)[:most]]
