"""Texts with gaps, some of unknown length: read, filled at every length, and ranked.

[MASK:3] is three tokens, [MASK] one, [MASK:2-12] two to twelve. Fillings of one length
are ranked by their probability given the known text on both sides. That falls with
every token, so fillings of different lengths are ranked by the log-probability per
token of the known text after them, given all that is before it. A plain GPT has no
probability given both sides. For one text and one length the joint probability of the
filling and the text after it ranks in the same way.

Shapes: N fillings, T positions of the longest."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.tokenizers import AlphabetTokenizer, BytesTokenizer, Tokenizer
from ..model import AOGPT
from ..runtime.errors import UserError
from ..runtime.randomness import INFILL_SEEDS, philox_bits
from ..scoring import token_log_probs
from .modes import Context

MASK = re.compile(r"(\[MASK\b[^\]]*\]?)")
# The first length, and after a hyphen the last one, both without leading zeros.
LENGTHS = re.compile(r"\[MASK(?::0*([1-9]\d{0,8})(?:-0*([1-9]\d{0,8}))?)?\]")
SCORED_TOGETHER = 16  # fillings in a pass
MOST_LENGTHS = 512  # combinations of the lengths of all gaps of a text
RankBy = Literal["filling", "right", "joint"]  # a field of `Scores`


class TooLong(UserError):
    """A text that leaves no room in a block."""


def read_gaps(text: str) -> list[str | range]:
    """Return text and the lengths of gaps, in turn; masks with nothing between them are
    one gap. Raises UserError for a text without a mask, and for a mask that is not
    written correctly."""
    parts: list[str | range] = []
    for number, part in enumerate(MASK.split(text)):
        is_text = number % 2 == 0
        if is_text:
            parts.append(part)
            continue
        mask = LENGTHS.fullmatch(part)
        if mask is None:
            raise UserError(
                f"{part[:40]!r} is not a mask; write [MASK:n] for n tokens, "
                "[MASK:n-m] for n to m, n at least 1"
            )
        shortest = int(mask[1] or 1)
        longest = int(mask[2] or shortest)
        if longest < shortest:
            raise UserError(f"{part} has no length; write the shorter one first")
        follows_mask = parts[-1] == "" and len(parts) > 1
        if follows_mask:
            parts.pop()
            before = parts.pop()
            assert isinstance(before, range)
            shortest += before[0]
            longest += before[-1]
        parts.append(range(shortest, longest + 1))
    if len(parts) == 1:
        raise UserError("there is no mask; write [MASK:n] for n new tokens")
    return parts


def space_note(text: str, tokenizer: Tokenizer) -> str | None:
    """Return a note on a space before a mask, if the tokenizer's words begin with
    theirs, so that the space would be a token of its own."""
    is_of_characters = isinstance(tokenizer, BytesTokenizer | AlphabetTokenizer)
    if " [MASK" not in text or is_of_characters:
        return None
    return (
        "note: a mask after a space is filled as if the space were a word; leave the "
        'space out, as in "The[MASK] ran"'
    )


def refuse_masks(text: str, advice: str) -> None:
    """Raise UserError for a text that has a mask where none is allowed."""
    mask = MASK.search(text)
    if mask is not None:
        beginning = mask[0][:40]
        raise UserError(f"the text has a mask, {beginning}: {advice}")


@dataclass(frozen=True)
class Gapped:
    """A text with gaps: known tokens before, between and after them, and the gaps'
    lengths."""

    known: list[list[int]]  # one more than there are gaps; may be empty
    lengths: list[range]

    @property
    def combinations(self) -> int:
        """Return the number of combinations of lengths."""
        return math.prod(len(lengths) for lengths in self.lengths)

    @property
    def only_continues(self) -> bool:
        """Return whether one gap, at the end, is all there is to fill in."""
        return len(self.lengths) == 1 and not self.known[1]

    def context(self, lengths: Sequence[int]) -> Context:
        """Return the tokens, None in gaps of these lengths."""
        tokens: Context = list(self.known[0])
        for length, after in zip(lengths, self.known[1:], strict=True):
            tokens += [None] * length
            tokens += after
        return tokens

    def dropped_note(self, tried: int, block_size: int) -> str:
        """Return a note on lengths that do not fit into a block; "" where all do.
        tried: the number of `contexts`."""
        if tried == self.combinations:
            return ""
        return (
            f"note: {tried} of {self.combinations} lengths of the masks are tried, as "
            f"the others exceed the block size, {block_size}"
        )

    def contexts(self, block_size: int) -> list[Context]:
        """Return the context of every combination of lengths that fits into a block."""
        contexts = []
        for lengths in itertools.product(*self.lengths):
            context = self.context(lengths)
            if len(context) <= block_size:
                contexts.append(context)
        return contexts


def seed_of_request(seed: int, number: int) -> int:
    """Return the seed of a request of several that fill gaps. The first one, number 0,
    has the seed itself, as if it were alone; the others' are below 2**63."""
    if number == 0:
        return seed
    bits = philox_bits(seed, number, range(1), 1, INFILL_SEEDS)
    return int(bits[0, 0]) >> 1


def encode_gaps(text: str, tokenizer: Tokenizer, block_size: int) -> Gapped:
    """Return the tokens and gaps of a text. Raises UserError if the shortest gaps do
    not fit into a block, and for gaps of unknown length that nothing can judge."""
    parts: list[Any] = read_gaps(text)
    texts = parts[0::2]
    lengths = parts[1::2]
    pieces = [tokenizer.encode(texts[0])]
    for part in texts[1:]:
        pieces.append(tokenizer.encode_after(part))
    gapped = Gapped(pieces, lengths)
    shortest = gapped.context([gap.start for gap in lengths])
    if len(shortest) > block_size:
        raise TooLong(
            f"text and masks exceed the block size, {block_size} tokens; shorten them"
        )
    if gapped.combinations > MOST_LENGTHS:
        raise UserError(
            f"its masks have {gapped.combinations:,} combinations of lengths, "
            f"more than {MOST_LENGTHS}; give narrower ranges"
        )
    if gapped.combinations > 1 and not pieces[-1]:
        raise UserError(
            "a mask of unknown length needs text after the last mask to be judged by"
        )
    return gapped


def gapped_of(context: Context) -> Gapped:
    """Return the known tokens and the gaps of a context."""
    pieces: list[list[int]] = [[]]
    lengths: list[range] = []
    before: int | None = 0
    for token in context:
        if token is not None:
            pieces[-1].append(token)
        elif before is None:
            length = lengths[-1].start + 1
            lengths[-1] = range(length, length + 1)
        else:
            lengths.append(range(1, 2))
            pieces.append([])
        before = token
    return Gapped(pieces, lengths)


@dataclass(frozen=True)
class Scores:
    """The log-probabilities that rank a filling, nats per token."""

    right: float  # the known text after the first gap, each token given all before it
    joint: float  # that text and the filling, in the same way
    filling: float  # the filling, given the known text on all sides


@torch.no_grad()
def score_fillings(
    model: AOGPT,
    given: Sequence[Context],
    tokens: Sequence[list[int]],
) -> list[Scores]:
    """Return the scores of N fillings. given: the context of each; tokens: the whole
    text of each. NaN: `right` without known text after the first gap, `filling` without
    a gap or of a plain GPT."""
    scores = []
    for start in range(0, len(tokens), SCORED_TOGETHER):
        rows = slice(start, start + SCORED_TOGETHER)
        scores += _score(model, given[rows], tokens[rows])
    return scores


def _score(
    model: AOGPT,
    given: Sequence[Context],
    tokens: Sequence[list[int]],
) -> list[Scores]:
    """Return the scores of the N fillings of one batch."""
    texts = [torch.tensor(row) for row in tokens]
    lengths = torch.tensor([len(row) for row in tokens])
    x = pad_sequence(texts, batch_first=True)  # (N, T)
    N, T = x.shape
    blanks = [torch.tensor([token is None for token in row]) for row in given]
    is_blank = pad_sequence(blanks, batch_first=True, padding_value=False)
    position = torch.arange(T).expand(N, T)
    is_padding = position >= lengths[:, None]
    is_known = ~is_blank & ~is_padding

    # From left to right.
    first = torch.where(is_blank, position, T).amin(dim=1)
    is_after = (position >= first[:, None]) & ~is_padding
    l2r_log_probs = log_probs_along(
        model, x, order=position, lengths=lengths, start=first
    )
    right = _mean(l2r_log_probs, is_after & ~is_blank)
    joint = _mean(l2r_log_probs, is_after)

    # What is known first, then the gaps, then the padding.
    filling = torch.full((N,), math.nan, dtype=torch.float64)
    if not model.config.l2r_only:
        place = is_blank + 2 * is_padding
        order = place.argsort(dim=1, stable=True)
        start = is_known.sum(dim=1)
        log_probs = log_probs_along(
            model,
            x,
            order=order,
            lengths=lengths,
            start=start,
        )
        filling = _mean(log_probs, is_blank.gather(1, order))

    scores = []
    for n in range(N):
        score = Scores(
            right=float(right[n]),
            joint=float(joint[n]),
            filling=float(filling[n]),
        )
        scores.append(score)
    return scores


def log_probs_along(
    model: AOGPT, x: Tensor, order: Tensor, lengths: Tensor, start: Tensor
) -> Tensor:
    """Return log p of every token along an order, float64 (N, T) in its steps, from
    step `start` (N,) on: a pass for a decoder, one a step for an encoder. Orders end
    with the padding."""
    device = model.wte.weight.device
    log_probs = token_log_probs(
        model,
        x.to(device),
        order.to(device),
        prompt_lengths=start.to(device),
        lengths=lengths.to(device),
    )
    if log_probs.isnan().any():  # a ranking by NaN would be any order
        raise UserError(
            "the model's output is not finite: its weights overflowed or hold NaN"
        )
    return log_probs.cpu().double()


def _mean(log_probs: Tensor, where: Tensor) -> Tensor:
    """Return the mean over the places of a row that count, (N,); NaN if none does."""
    total = (log_probs * where).sum(dim=1)
    return total / where.sum(dim=1)


def rank_by(model: AOGPT, given: Sequence[Context]) -> RankBy:
    """Return the score that ranks fillings of these contexts: "right" for different
    lengths; for one length "filling", which is the probability given both sides, or a
    plain GPT's "joint"."""
    lengths = {context.count(None) for context in given}
    if len(lengths) > 1:
        return "right"
    if model.config.l2r_only:
        return "joint"
    return "filling"


def ranked(scores: Sequence[Scores], by: RankBy) -> list[int]:
    """Return the numbers of the fillings, the best first."""
    values = [getattr(score, by) for score in scores]
    return sorted(range(len(scores)), key=lambda number: -values[number])


def best_fillings(
    model: AOGPT,
    given: Sequence[Context],
    tokens: Sequence[list[int]],
    most: int,
    by: RankBy | None = None,
) -> list[tuple[int, Scores]]:
    """Return numbers and scores of at most `most` fillings with different tokens, the
    best first. by: the score that ranks them, `rank_by` if None."""
    # Equal tokens may be divided into gaps in several ways, with scores of their own.
    number_of = {}
    for number, row in enumerate(tokens):
        is_filled = tuple(token is None for token in given[number])
        number_of[tuple(row), is_filled] = number
    numbers = list(number_of.values())
    distinct_given = [given[number] for number in numbers]
    distinct_tokens = [tokens[number] for number in numbers]
    scores = score_fillings(model, distinct_given, distinct_tokens)
    if by is None:
        by = rank_by(model, distinct_given)
    best: dict[tuple[int, ...], tuple[int, Scores]] = {}
    for place in ranked(scores, by):
        best.setdefault(tuple(distinct_tokens[place]), (numbers[place], scores[place]))
    return list(best.values())[:most]
