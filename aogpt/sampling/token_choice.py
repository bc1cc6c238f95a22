"""Token choice: from logits and one uniform number to a token.

A categorical draw must not lose probability mass: Gumbel noise of float32 cannot reach
improbable tokens and silently lowers the temperature (Zheng et al. 2024). By default
the noise has 53 bits: it is hashed from the uniform number (`draw`).

Shapes: N rows, each a position to draw, V vocabulary; B samples of T positions."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import tyro
from annotated_types import Ge, Interval
from torch import Tensor

from ..runtime.validation import Count, Probability, check_values
from .race import draw, fresh_uniforms, race

Temperature = Annotated[float, Ge(0)]
Noise = Literal["float64", "float32", "bfloat16"]
Crossing = Literal["keep", "drop"]

GREEDY_BELOW = 1e-10  # a temperature so low that logits divided by it could overflow

# What a token's uniform number is used for beyond its first use: salts of
# `fresh_uniforms`. From `race.RACES` on they are those of `draw`.
ACCEPTED = 1
CORRECTED = 2
REDRAWN = 3

# What torch.rand draws in these types.
GUMBEL_BITS = {torch.float32: 24, torch.bfloat16: 8}


@dataclass(frozen=True)
class TokenChoice:
    """The way in which a token is drawn from the model's distribution: against
    repetition and without banned words, at a temperature, then of the top k, of min-p,
    then of top-p.
    The fields are options of every script that decodes. Another truncation is a field
    here, and lines in `_truncated`."""

    temperature: Temperature = 1.0  # 0 takes the most probable token.
    top_p: Probability = 1.0
    """Draw from the most probable tokens that together have this probability."""
    top_k: Count | None = None  # Draw from this number of most probable tokens.
    noise: Noise = "float64"
    """float64: the exact draw. float32, bfloat16: Gumbel noise of that precision, which
    lowers the temperature."""
    crossing: Crossing = "keep"
    """The last token of the nucleus, with which its mass passes --top-p. drop: leave it
    out, as some published samplers do."""
    repetition_penalty: Annotated[float, Interval(ge=1, lt=math.inf)] = 1.0
    """Divide the logits of tokens that are in the sample already by this if they are
    positive, else multiply them (CTRL, Keskar et al. 2019); 1 changes nothing."""
    no_repeat_ngram: Count | None = None
    """Draw no token that would complete an n-gram of this size that is in the sample
    already, unless that leaves no token."""
    min_p: Probability = 0.0
    """Draw from the tokens with at least this share of the probability of the most
    probable one (arXiv 2407.01082); 0 changes nothing."""
    banned: Annotated[tuple[tuple[int, ...], ...], tyro.conf.Suppress] = ()
    """Sequences of ids, as of banned words. No token is drawn that completes one of
    them, unless that leaves no token. Tokens of one step do not see each other."""

    def __post_init__(self):
        check_values(self, name=str)

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is always drawn, which every rule
        keeps."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    @property
    def avoids_repeats(self) -> bool:
        """Return whether logits depend on the tokens that are in the sample already."""
        return (
            self.repetition_penalty > 1
            or self.no_repeat_ngram is not None
            or len(self.banned) > 0
        )

    @property
    def is_exact(self) -> bool:
        """Return whether tokens follow the model's own distribution."""
        for field in fields(TokenChoice):
            if getattr(self, field.name) != field.default:
                return False
        return True


def choose_tokens(
    logits: Tensor,
    uniforms: Tensor,
    choice: TokenChoice,
) -> Tensor:
    """Draw one token a row: logits (N, V), uniforms float64 (N,) in [0, 1) ->
    LongTensor (N,).

    Nothing is sorted: a token is drawn from all, and again from the nucleus if it is
    outside of it, with a hash of the first uniform number. P(i) + (1 - P(nucleus)) P(i)
    / P(nucleus) is P(i) / P(nucleus)."""
    if choice.greedy:
        return logits.argmax(dim=-1)
    probs = _truncated(logits, choice)
    if choice.noise != "float64":
        dtype = getattr(torch, choice.noise)
        return _gumbel_argmax(_top_p(probs, choice), uniforms, dtype)
    if choice.crossing == "drop":
        return draw(_top_p(probs, choice), uniforms)
    drawn, total = race(probs, uniforms)
    if choice.top_p == 1:
        return drawn
    wanted = choice.top_p * total
    is_outside = _outside_nucleus(probs, drawn, wanted)
    again = fresh_uniforms(uniforms, REDRAWN)
    if not _may_branch(probs):  # all rows: finding those that need it would wait
        redrawn = draw(_nucleus(probs, wanted), again)
        return torch.where(is_outside, redrawn, drawn)
    rows = is_outside.nonzero().flatten()
    if len(rows) == 0:
        return drawn
    nuclei = []
    for row in rows.tolist():
        nucleus = _nucleus_of_row(probs[row], drawn[row], wanted[row])
        nuclei.append(nucleus)
    drawn[rows], _ = race(torch.stack(nuclei), again[rows])
    return drawn


def probabilities(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Return the distribution that `choose_tokens` draws from: float64 (N, V), rows
    summing to 1."""
    if choice.greedy:
        best = logits.argmax(dim=-1, keepdim=True)
        certain = torch.zeros_like(logits, dtype=torch.float64)
        return certain.scatter_(1, best, 1.0)
    probs = _truncated(logits, choice)
    probs = _top_p(probs, choice)
    probs = probs.double()
    return probs / probs.sum(dim=-1, keepdim=True)


def _may_branch(x: Tensor) -> bool:
    """Return whether a branch on values costs nothing; a GPU would wait for them."""
    return x.device.type == "cpu"


def _truncated(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Return probabilities (N, V) at the temperature, float32 or float64, 0 for tokens
    that top-k or min-p leave out; not normalised again. Everything but top-p, for which
    `choose_tokens` has a faster way. kernels.py declines fields of `TokenChoice` that
    it does not know."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if choice.temperature != 1:
        logits = logits / choice.temperature
    all_probs = logits.softmax(dim=-1)
    probs = all_probs
    V = probs.shape[-1]
    if choice.top_k is not None and choice.top_k < V:
        highest = probs.topk(choice.top_k, dim=-1).values
        least = highest[:, -1:]
        above = (probs > least).sum(dim=-1, keepdim=True)
        ties = choice.top_k - above
        probs = _from(probs, least, ties)
    if choice.min_p > 0:
        highest = probs.amax(dim=-1, keepdim=True)
        least = choice.min_p * highest
        probs = probs.where(probs >= least, 0)
    if probs is all_probs:
        return probs
    # A rule may leave nothing of a row; its most probable tokens stay.
    is_best = all_probs == all_probs.amax(dim=-1, keepdim=True)
    is_empty = probs.sum(dim=-1, keepdim=True) == 0
    return torch.where(is_best & is_empty, all_probs, probs)


def _from(
    probs: Tensor,
    least: Tensor,
    ties: Tensor,
) -> Tensor:
    """Return what is above `least` (N, 1) of the probabilities (N, V), and the first
    `ties` (N, 1) of those that equal it; else 0."""
    is_above = probs > least
    is_equal = probs == least
    is_first = is_equal.cumsum(dim=-1) <= ties
    is_kept = is_above | (is_equal & is_first)
    return torch.where(is_kept, probs, 0)


# The nucleus has one rule, "a token is kept if less than `wanted` is ranked before it,
# the lower id first among equals", in three forms here; change all: `_nucleus`,
# `_outside_nucleus`, `_nucleus_of_row`. kernels.py has it in integers; it declines new
# fields of `TokenChoice`.


def _top_p(probs: Tensor, choice: TokenChoice) -> Tensor:
    """Return probabilities (N, V), 0 outside the choice's nucleus."""
    if choice.top_p == 1:
        return probs
    total = probs.sum(
        dim=-1,
        keepdim=True,
        dtype=torch.float64,
    )
    wanted = choice.top_p * total
    nucleus = _nucleus(probs, wanted)
    if choice.crossing == "drop":
        return _without_crossing(nucleus, wanted)
    return nucleus


def _without_crossing(nucleus: Tensor, wanted: Tensor) -> Tensor:
    """Return the nucleus without its last token where that takes it above `wanted`,
    unless it is alone."""
    is_kept = nucleus > 0
    least = nucleus.where(is_kept, torch.inf).amin(dim=-1, keepdim=True)
    ids = torch.arange(nucleus.shape[-1], device=nucleus.device)
    last = ids.where(nucleus == least, -1).amax(dim=-1, keepdim=True)
    total = nucleus.sum(
        dim=-1,
        keepdim=True,
        dtype=torch.float64,
    )
    crosses = total > wanted
    is_alone = is_kept.sum(dim=-1, keepdim=True) == 1
    is_dropped = (ids == last) & crosses & ~is_alone
    return torch.where(is_dropped, 0, nucleus)


def _nucleus(probs: Tensor, wanted: Tensor) -> Tensor:
    """Return probabilities (N, V), 0 outside the nucleus: the tokens before which,
    ranked by falling probability, less than `wanted` (N, 1) is reached.

    The least probability kept is found by bisection: bits of floats that are not
    negative are ordered as the floats are, so 31 (float32) or 63 halvings end at the
    exact value, without a sort and for all rows alike."""
    integer = torch.int32
    halvings = 31
    if probs.dtype == torch.float64:
        integer = torch.int64
        halvings = 63
    # The mass above `high` stays below `wanted`, the mass above `low` does not. No
    # float has the bits -1: they stand for "below zero". `middle` is rounded up, so
    # that it is never -1.
    highest = probs.amax(dim=-1, keepdim=True)
    high = highest.view(integer)
    low = torch.full_like(high, -1)
    for _ in range(halvings):
        middle = low + (high - low + 1) // 2
        mass = _mass_above(probs, middle.view(probs.dtype))
        is_below = mass < wanted
        high = torch.where(is_below, middle, high)
        low = torch.where(is_below, low, middle)
    least = high.view(probs.dtype)
    # Some of the tokens that are exactly as probable may be too many.
    ties = _ties_kept(probs, least, wanted)
    return _from(probs, least, ties)


def _ties_kept(
    probs: Tensor,
    least: Tensor,
    wanted: Tensor,
) -> Tensor:
    """Return how many tokens of probability `least` the nucleus holds beside the more
    probable ones; 0 or less where those alone reach `wanted`."""
    missing = wanted - _mass_above(probs, least)
    ties = missing / least.double()
    return ties.ceil()


def _mass_above(probs: Tensor, least: Tensor) -> Tensor:
    """Return the mass (N, 1), float64, of the tokens more probable than `least`
    (N, 1)."""
    # 0.0 or 1.0: a CPU multiplies by these several times faster than it selects by
    # booleans.
    above = torch.gt(probs, least, out=torch.empty_like(probs))
    above.mul_(probs)
    return above.sum(
        dim=-1,
        keepdim=True,
        dtype=torch.float64,
    )


def _outside_nucleus(
    probs: Tensor,
    token: Tensor,
    wanted: Tensor,
) -> Tensor:
    """Return whether the mass ranked before the token of each row reaches `wanted`,
    BoolTensor (N,)."""
    token = token[:, None]
    p = probs.gather(1, token)
    ties = _ties_kept(probs, p, wanted)
    equal = torch.eq(probs, p, out=torch.empty_like(probs))  # 0.0 or 1.0, as above
    if _may_branch(probs):
        equals = float(equal.sum())
        if equals == len(probs):  # each is equal to itself alone
            return (ties <= 0).squeeze(1)
    # Count the equals with lower ids. Ids are exact as float32 up to 2**24.
    V = probs.shape[-1]
    ids = torch.arange(
        V,
        device=probs.device,
        dtype=probs.dtype,
    )
    earlier = torch.lt(ids, token.to(probs.dtype), out=torch.empty_like(probs))
    earlier.mul_(equal)
    rank = earlier.sum(dim=-1, keepdim=True)
    return (rank >= ties).squeeze(1)


def _nucleus_of_row(
    probs: Tensor,
    rejected: Tensor,
    wanted: Tensor,
) -> Tensor:
    """Return the probabilities (V,) of one row, 0 outside its nucleus. As the token
    `rejected` is outside, only what is at least as probable, a small part of the
    vocabulary, has to be sorted."""
    is_candidate = probs >= probs[rejected]
    ids = is_candidate.nonzero().squeeze(1)
    ranked, place = probs[ids].sort(descending=True, stable=True)
    mass = ranked.double().cumsum(dim=0)
    mass_before = mass - ranked
    truncated = torch.where(mass_before < wanted, ranked, 0)
    nucleus = torch.zeros_like(probs)
    return nucleus.scatter_(0, ids[place], truncated)


def _gumbel_argmax(
    weights: Tensor,
    uniforms: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the index (N,) of the largest log weight plus Gumbel noise, all rounded to
    `dtype`."""
    V = weights.shape[-1]
    salt = torch.arange(1, V + 1, device=weights.device)
    numbers = fresh_uniforms(uniforms[:, None], salt)  # (N, V)
    bits = GUMBEL_BITS[dtype]
    numbers = (numbers * 2**bits).floor()
    numbers = numbers * 2.0**-bits
    numbers = numbers.to(dtype)
    exponential = -numbers.log()
    noise = -exponential.log()
    # A uniform of 0 gives minus infinity, which is to mean "cut off" and nothing else.
    noise = noise.clamp(min=torch.finfo(dtype).min)
    scores = weights.log().to(dtype) + noise
    return scores.argmax(dim=-1)


def known_text(
    tokens: Tensor,
    order: Tensor,
    known: Tensor,
) -> Tensor:
    """Return tokens by position (B, T), -1 where not known.

    tokens, order: (B, T + 1) by place, the last of which is not used. known: (B,)
    places."""
    tokens = tokens[:, :-1]
    order = order[:, :-1]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    is_known = places < known[:, None]
    known_tokens = tokens.where(is_known, -1)
    text = torch.empty_like(tokens)
    return text.scatter_(1, order, known_tokens)


def without_repeats(
    logits: Tensor,
    text: Tensor,
    position: Tensor,
    choice: TokenChoice,
) -> Tensor:
    """Return the logits (N, V) with the choice's repetition penalty and bans of n-grams
    and words.

    text: (N, T), -1 where not known. position: (N,) of the logits, not known in the
    text."""
    text = text.to(logits.device)
    position = position.to(logits.device)
    T = text.shape[1]
    V = logits.shape[1]
    penalty = choice.repetition_penalty
    if penalty > 1:
        is_present = _marked(text.where(text >= 0, V), V)
        is_positive = logits > 0
        penalised = torch.where(is_positive, logits / penalty, logits * penalty)
        logits = penalised.where(is_present, logits)
    n = choice.no_repeat_ngram
    if n is not None and n <= T:
        is_banned = _completing(
            text,
            position,
            n,
            V,
        )
        logits = _without(logits, is_banned)
    if choice.banned:
        is_banned = _completing_words(
            text,
            position,
            choice.banned,
            V,
        )
        logits = _without(logits, is_banned)
    return logits


def _without(logits: Tensor, is_banned: Tensor) -> Tensor:
    """Return logits (N, V) without the banned ids, BoolTensor (N, V), where others are
    left."""
    is_possible = logits > -torch.inf
    is_free = ~is_banned & is_possible
    has_free = is_free.any(dim=1, keepdim=True)
    return logits.masked_fill(is_banned & has_free, -torch.inf)


def _completing_words(
    text: Tensor,
    position: Tensor,
    words: tuple[tuple[int, ...], ...],
    V: int,
) -> Tensor:
    """Return the tokens that complete, at `position` (N,), one of the words in the text
    (N, T): BoolTensor (N, V)."""
    N = len(text)
    longest = max(len(word) for word in words)
    padded = F.pad(text, (longest, longest), value=-1)
    row = torch.arange(N, device=text.device)
    is_banned = torch.zeros(
        N,
        V,
        dtype=torch.bool,
        device=text.device,
    )
    for word in words:
        for place, token in enumerate(word):  # that the position has in the word
            start = position + longest - place  # of the word, in the padded text
            completes = torch.ones_like(row, dtype=torch.bool)
            for other_place, other_token in enumerate(word):
                if other_place != place:
                    token_there = padded[row, start + other_place]
                    completes &= token_there == other_token
            is_banned[:, token] |= completes
    return is_banned


def _completing(
    text: Tensor,
    position: Tensor,
    n: int,
    V: int,
) -> Tensor:
    """Return the tokens that complete, at `position` (N,), an n-gram that is in the
    text (N, T): BoolTensor (N, V)."""
    N = len(text)
    margin = n - 1
    padded = F.pad(text, (margin, margin), value=-1)
    ngrams = padded.unfold(1, n, 1)  # (N, windows, n)
    is_known = ngrams >= 0
    row = torch.arange(N, device=text.device)
    is_banned = torch.zeros(
        N,
        V,
        dtype=torch.bool,
        device=text.device,
    )
    # The place of the position in the n-gram; tokens of all other places must match.
    for place in range(n):
        window = ngrams[row, position - place + margin]  # (N, n)
        is_match = (ngrams == window[:, None]) & is_known
        is_match[..., place] = is_known[..., place]
        repeats = is_match.all(dim=-1)  # (N, windows)
        completing = ngrams[..., place].where(repeats, V)
        is_banned |= _marked(completing, V)
    return is_banned


def _marked(tokens: Tensor, V: int) -> Tensor:
    """Return the ids among the tokens (N, any), BoolTensor (N, V); V counts as none."""
    N = len(tokens)
    marked = torch.zeros(
        N,
        V + 1,
        dtype=torch.bool,
        device=tokens.device,
    )
    marked.scatter_(1, tokens, True)
    return marked[:, :V]
