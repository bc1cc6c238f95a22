"""Token choice: from logits and one uniform number to a token.

A categorical draw must not lose probability mass: Gumbel noise of float32 cannot reach improbable
tokens and silently lowers the temperature (Zheng et al. 2024). By default the noise has 53 bits: it
is hashed from the uniform number (`draw`). Shapes: N rows, each a position to draw, V vocabulary; B
samples of T positions."""

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

# What a token's uniform number is used for beyond its first use: salts of `fresh_uniforms`.
# and from `race.RACES` on: of `draw`
ACCEPTED = 1
CORRECTED = 2
REDRAWN = 3
REFINED = -1  # and two for each round below it: of `refine`


@dataclass(frozen=True)
class TokenChoice:
    """How a token is drawn from the model's distribution: against repetition and without
    banned words, at a temperature, then of the top k, of min-p, then of top-p. The fields
    are options of every script that decodes. Another truncation is a field here, and lines
    in `_truncated`."""

    temperature: Temperature = 1.0  # 0 takes the most probable token.
    top_p: Probability = 1.0
    """Draw from the most probable tokens that together have this probability."""
    top_k: Count | None = None  # Draw from this number of most probable tokens.
    noise: Noise = "float64"
    """float64: the exact draw. float32, bfloat16: Gumbel noise of that precision, which lowers the
    temperature."""
    crossing: Crossing = "keep"
    """The last token of the nucleus, with which its mass passes --top-p. drop: leave it out, as
    some published samplers do."""
    repetition_penalty: Annotated[float, Interval(ge=1, lt=math.inf)] = 1.0
    """Divide the logits of tokens that are in the sample already by this if they are positive, else
    multiply them (CTRL, Keskar et al. 2019); 1 changes nothing."""
    no_repeat_ngram: Count | None = None
    """Draw no token that would complete an n-gram of this size that is in the sample already,
    unless that leaves no token."""
    min_p: Probability = 0.0
    """Draw from the tokens with at least this share of the probability of the most probable
    one (arXiv 2407.01082); 0 changes nothing."""
    banned: Annotated[tuple[tuple[int, ...], ...], tyro.conf.Suppress] = ()
    """Sequences of ids, as of banned words. No token is drawn that completes one of them,
    unless that leaves no token. Tokens of one step do not see each other."""

    def __post_init__(self):
        check_values(self, name=str)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1

    @property
    def avoids_repeats(self) -> bool:
        """Whether logits depend on the tokens that are in the sample already."""
        return (
            self.repetition_penalty > 1
            or self.no_repeat_ngram is not None
            or len(self.banned) > 0
        )

    @property
    def is_exact(self) -> bool:
        """Whether tokens follow the model's own distribution."""
        return all(getattr(self, f.name) == f.default for f in fields(TokenChoice))


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: TokenChoice) -> Tensor:
    """Draw one token a row: logits (N, V), uniforms float64 (N,) in [0, 1) -> LongTensor (N,).

    Nothing is sorted: a token is drawn from all, and again from the nucleus if it is outside of it,
    with a hash of the first uniform number. P(i) + (1 - P(nucleus)) P(i) / P(nucleus) is P(i) /
    P(nucleus)."""
    if choice.greedy:
        return logits.argmax(dim=-1)
    probs = _truncated(logits, choice)
    if choice.noise != "float64":
        return _gumbel_argmax(
            _top_p(probs, choice), uniforms, getattr(torch, choice.noise)
        )
    if choice.crossing == "drop":
        return draw(_top_p(probs, choice), uniforms)
    drawn, total = race(probs, uniforms)
    if choice.top_p == 1:
        return drawn
    wanted = choice.top_p * total
    outside = _outside_nucleus(probs, drawn, wanted)
    again = fresh_uniforms(uniforms, REDRAWN)
    if not _may_branch(probs):  # all rows: finding those that need it would wait
        return torch.where(outside, draw(_nucleus(probs, wanted), again), drawn)
    if len(rows := outside.nonzero().flatten()):
        kept = [
            _nucleus_of_row(probs[row], drawn[row], wanted[row])
            for row in rows.tolist()
        ]
        drawn[rows] = draw(torch.stack(kept), again[rows])
    return drawn


def probabilities(logits: Tensor, choice: TokenChoice) -> Tensor:
    """The distribution that `choose_tokens` draws from: float64 (N, V), rows summing to 1."""
    if choice.greedy:
        certain = torch.zeros_like(logits, dtype=torch.float64)
        return certain.scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    probs = _top_p(_truncated(logits, choice), choice).double()
    return probs / probs.sum(dim=-1, keepdim=True)


def _may_branch(x: Tensor) -> bool:
    return x.device.type == "cpu"  # a GPU would wait for the values


def _truncated(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Probabilities (N, V) at the temperature, float32 or float64, 0 outside the top k; not
    normalised again. Everything but top-p, for which `choose_tokens` has a faster way."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if choice.temperature != 1:
        logits = logits / choice.temperature
    probs = logits.softmax(dim=-1)
    if choice.top_k is not None and choice.top_k < probs.shape[-1]:
        least = probs.topk(choice.top_k, dim=-1).values[:, -1:]
        ties = choice.top_k - (probs > least).sum(dim=-1, keepdim=True)
        probs = _from(probs, least, ties)
    if choice.min_p > 0:
        least = choice.min_p * probs.amax(dim=-1, keepdim=True)
        probs = probs.where(probs >= least, 0)
    return probs


def _from(probs: Tensor, least: Tensor, ties: Tensor) -> Tensor:
    """Keep what is above `least` (N, 1), and of what equals it the first `ties` (N, 1)."""
    equal = probs == least
    kept = (probs > least) | (equal & (equal.cumsum(dim=-1) <= ties))
    return torch.where(kept, probs, 0)


# The nucleus has one rule, "a token is kept if less than `wanted` is ranked before it, the lower id
# first among equals", in three forms here; change all: `_nucleus`, `_outside_nucleus`,
# `_nucleus_of_row`. kernels.py has it in integers; it declines new fields of `TokenChoice`.


def _top_p(probs: Tensor, choice: TokenChoice) -> Tensor:
    if choice.top_p == 1:
        return probs
    wanted = choice.top_p * probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = _nucleus(probs, wanted)
    return kept if choice.crossing == "keep" else _without_crossing(kept, wanted)


def _without_crossing(kept: Tensor, wanted: Tensor) -> Tensor:
    """The nucleus without its last token where that takes it above `wanted`, unless it is alone."""
    least = kept.where(kept > 0, torch.inf).amin(dim=-1, keepdim=True)
    ids = torch.arange(kept.shape[-1], device=kept.device)
    last = ids.where(kept == least, -1).amax(dim=-1, keepdim=True)
    crosses = kept.sum(dim=-1, keepdim=True, dtype=torch.float64) > wanted
    alone = (kept > 0).sum(dim=-1, keepdim=True) == 1
    return torch.where((ids == last) & crosses & ~alone, 0, kept)


def _nucleus(probs: Tensor, wanted: Tensor) -> Tensor:
    """Zero outside the nucleus: the tokens before which, ranked by falling probability, less than
    `wanted` (N, 1) is reached. The least probability kept is found by bisection: bits of floats
    that are not negative are ordered as the floats are, so 31 (float32) or 63 halvings end at the
    exact value, without a sort and for all rows alike."""
    integer = torch.int32
    halvings = 31
    if probs.dtype == torch.float64:
        integer = torch.int64
        halvings = 63
    # The mass above `high` stays below `wanted`, the mass above `low` does not. No float has the
    # bits -1: they stand for "below zero". `middle` is rounded up, so that it is never -1.
    high = probs.amax(dim=-1, keepdim=True).view(integer)
    low = torch.full_like(high, -1)
    for _ in range(halvings):
        middle = low + (high - low + 1) // 2
        below = _mass_above(probs, middle.view(probs.dtype)) < wanted
        high = torch.where(below, middle, high)
        low = torch.where(below, low, middle)
    least = high.view(
        probs.dtype
    )  # of the tokens exactly as probable, some may be too many
    return _from(probs, least, _ties_kept(probs, least, wanted))


def _ties_kept(probs: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
    """How many tokens of probability `least` the nucleus holds beside the more probable ones; 0 or
    less where those alone reach `wanted`."""
    return ((wanted - _mass_above(probs, least)) / least.double()).ceil()


def _mass_above(probs: Tensor, least: Tensor) -> Tensor:
    """Mass (N, 1), float64, of the tokens more probable than `least` (N, 1)."""
    above = _compare(torch.gt, probs, least, probs)
    return above.mul_(probs).sum(dim=-1, keepdim=True, dtype=torch.float64)


def _compare(relation, a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    # As 0.0 and 1.0: a CPU multiplies by these several times faster than it selects by booleans.
    return relation(a, b, out=torch.empty_like(like))


def _outside_nucleus(probs: Tensor, token: Tensor, wanted: Tensor) -> Tensor:
    """BoolTensor (N,): whether the mass ranked before the token of each row reaches `wanted`."""
    p = probs.gather(1, token[:, None])
    ties = _ties_kept(probs, p, wanted)
    equal = _compare(torch.eq, probs, p, probs)
    if _may_branch(probs) and float(equal.sum()) == len(
        probs
    ):  # each is equal to itself alone
        return (ties <= 0).squeeze(1)
    # Count the equals with lower ids. Ids are exact as float32 up to 2**24.
    ids = torch.arange(probs.shape[-1], device=probs.device, dtype=probs.dtype)
    earlier = _compare(torch.lt, ids, token[:, None].to(probs.dtype), probs)
    return (earlier.mul_(equal).sum(dim=-1, keepdim=True) >= ties).squeeze(1)


def _nucleus_of_row(probs: Tensor, rejected: Tensor, wanted: Tensor) -> Tensor:
    """Zero outside the nucleus of one row (V,). A token outside it is known, so only what is at
    least as probable, a small part of the vocabulary, has to be sorted."""
    ids = (probs >= probs[rejected]).nonzero().squeeze(1)
    ranked, place = probs[ids].sort(descending=True, stable=True)
    mass_before = ranked.double().cumsum(dim=0) - ranked
    kept = torch.where(mass_before < wanted, ranked, 0)
    return torch.zeros_like(probs).scatter_(0, ids[place], kept)


def _gumbel_argmax(weights: Tensor, uniforms: Tensor, dtype: torch.dtype) -> Tensor:
    """The index of the largest log weight plus Gumbel noise, all rounded to `dtype`."""
    salt = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    bits = {torch.float32: 24, torch.bfloat16: 8}[
        dtype
    ]  # what torch.rand draws in these types
    noise = (fresh_uniforms(uniforms[:, None], salt) * 2**bits).floor() * 2.0**-bits
    noise = -(-noise.to(dtype).log()).log()
    # A uniform of 0 gives minus infinity, which is to mean "cut off" and nothing else.
    noise = noise.clamp(min=torch.finfo(dtype).min)
    return (weights.log().to(dtype) + noise).argmax(dim=-1)


def known_text(tokens: Tensor, order: Tensor, known: Tensor) -> Tensor:
    """Tokens by position (B, T), -1 where not known. tokens, order: (B, T + 1) by slot, the last of
    which is not used; known: (B,) slots."""
    tokens = tokens[:, :-1]
    order = order[:, :-1]
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.empty_like(tokens).scatter_(
        1, order, tokens.where(slots < known[:, None], -1)
    )


def without_repeats(
    logits: Tensor, text: Tensor, position: Tensor, choice: TokenChoice
) -> Tensor:
    """The logits (N, V) of `position` (N,), which is not known, in `text` (N, T), -1 where not
    known, with the choice's repetition penalty and bans of n-grams and words."""
    text = text.to(logits.device)
    V = logits.shape[1]
    if choice.repetition_penalty > 1:
        present = _marked(text.where(text >= 0, V), V)
        penalty = choice.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = penalised.where(present, logits)
    if choice.no_repeat_ngram is not None and choice.no_repeat_ngram <= text.shape[1]:
        banned = _completing(
            text, position.to(logits.device), choice.no_repeat_ngram, V
        )
        logits = _without(logits, banned)
    if choice.banned:
        banned = _completing_words(text, position.to(logits.device), choice.banned, V)
        logits = _without(logits, banned)
    return logits


def _without(logits: Tensor, banned: Tensor) -> Tensor:
    """Logits (N, V) without the banned ids, BoolTensor (N, V), where others are left."""
    free = (~banned & (logits > -torch.inf)).any(dim=1, keepdim=True)
    return logits.masked_fill(banned & free, -torch.inf)


def _completing_words(
    text: Tensor, position: Tensor, words: tuple[tuple[int, ...], ...], V: int
) -> Tensor:
    """BoolTensor (N, V): the tokens that complete, at `position` (N,), one of the words in
    the text (N, T)."""
    longest = max(len(word) for word in words)
    padded = F.pad(text, (longest, longest), value=-1)
    row = torch.arange(len(text), device=text.device)
    banned = torch.zeros(len(text), V, dtype=torch.bool, device=text.device)
    for word in words:
        for place, token in enumerate(word):  # that the position has in the word
            match = torch.ones_like(row, dtype=torch.bool)
            for other, wanted in enumerate(word):
                if other != place:
                    column = position + longest + other - place
                    match &= padded[row, column] == wanted
            banned[:, token] |= match
    return banned


def _completing(text: Tensor, position: Tensor, n: int, V: int) -> Tensor:
    """BoolTensor (N, V): the tokens that complete, at `position`, an n-gram that is in the text."""
    ngrams = F.pad(text, (n - 1, n - 1), value=-1).unfold(1, n, 1)  # (N, windows, n)
    known = ngrams >= 0
    banned = torch.zeros(len(text), V, dtype=torch.bool, device=text.device)
    row = torch.arange(len(text), device=text.device)
    for place in range(n):  # that the position has in the n-gram; all others must match
        window = ngrams[row, position - place + n - 1][:, None]
        match = (ngrams == window) & known
        match[..., place] = known[..., place]
        banned |= _marked(ngrams[..., place].where(match.all(dim=-1), V), V)
    return banned


def _marked(tokens: Tensor, V: int) -> Tensor:
    """BoolTensor (N, V): the ids among the tokens (N, any); V counts as none."""
    marked = torch.zeros(len(tokens), V + 1, dtype=torch.bool, device=tokens.device)
    return marked.scatter_(1, tokens, True)[:, :V]
