"""Token choice: from logits and one uniform number to a token.

A categorical draw must not lose probability mass: Gumbel noise of float32 cannot reach
improbable tokens and silently lowers the temperature (Zheng et al. 2024). Here the
noise has 53 bits: it is hashed from the uniform number.

The same sample shall come out of every batch, and batches round the weights
differently. A cumulative sum (inverse CDF) adds rounding up over all ids, and may then
draw another one. In a race every id has a time of its own, and the first one wins:
rounding changes only races that end in a tie up to rounding.

Shapes: N rows, each a position to draw, V vocabulary, K blocks of ids."""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor

from ..runtime.validation import Count, Probability, check_values

# At most so high that ids which are left out (model.IMPOSSIBLE) are never drawn.
Temperature = Annotated[float, Interval(ge=0, le=1e6)]

GREEDY_BELOW = 1e-10  # a temperature so low that logits divided by it could overflow

# What a token's uniform number is used for beyond its first use: salts of
# `fresh_uniforms`. From RACES on they are those of `race`.
ACCEPTED = 1
CORRECTED = 2
REDRAWN = 3
RACES = 4

BLOCK = 64  # ids whose weights are added up first

# splitmix64 (Steele et al. 2014): the increment, 2**64 over the golden ratio, and the
# factors of the two mixing steps; minus 2**64, because torch's integers are signed.
# Products wrap around.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class TokenChoice:
    """The way in which a token is drawn from the model's distribution: at a
    temperature, then of the top k, then of top-p.
    The fields are options of every script that decodes. Another truncation is a field
    here, and lines in `_truncated`."""

    temperature: Temperature = 1.0  # 0 takes the most probable token.
    top_p: Probability = 1.0
    """Draw from the most probable tokens that together have this probability."""
    top_k: Count | None = None  # Draw from this number of most probable tokens.

    def __post_init__(self):
        check_values(self, name=str)

    @property
    def greedy(self) -> bool:
        """Return whether the most probable token is always drawn, which every rule
        keeps."""
        return self.temperature < GREEDY_BELOW or self.top_p == 0 or self.top_k == 1


def choose_tokens(logits: Tensor, uniforms: Tensor, choice: TokenChoice) -> Tensor:
    """Draw one token a row: logits (N, V), uniforms float64 (N,) in [0, 1) ->
    LongTensor (N,).

    Nothing is sorted: a token is drawn from all, and again from the nucleus if it is
    outside of it, with a hash of the first uniform number. P(i) + (1 - P(nucleus)) P(i)
    / P(nucleus) is P(i) / P(nucleus)."""
    if choice.greedy:
        return logits.argmax(dim=-1)
    probs = _truncated(logits, choice)
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
    if choice.top_p < 1:
        total = probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
        probs = _nucleus(probs, choice.top_p * total)
    probs = probs.double()
    return probs / probs.sum(dim=-1, keepdim=True)


def _may_branch(x: Tensor) -> bool:
    """Return whether a branch on values costs nothing; a GPU would wait for them."""
    return x.device.type == "cpu"


def _truncated(logits: Tensor, choice: TokenChoice) -> Tensor:
    """Return probabilities (N, V) at the temperature, float32 or float64, 0 for tokens
    that top-k leaves out; not normalised again. Everything but top-p, for which
    `choose_tokens` has a faster way."""
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
    if probs is all_probs:
        return probs
    # A rule may leave nothing of a row; its most probable tokens stay.
    is_best = all_probs == all_probs.amax(dim=-1, keepdim=True)
    is_empty = probs.sum(dim=-1, keepdim=True) == 0
    return torch.where(is_best & is_empty, all_probs, probs)


def _from(probs: Tensor, least: Tensor, ties: Tensor) -> Tensor:
    """Return what is above `least` (N, 1) of the probabilities (N, V), and the first
    `ties` (N, 1) of those that equal it; else 0."""
    is_above = probs > least
    is_equal = probs == least
    is_first = is_equal.cumsum(dim=-1) <= ties
    is_kept = is_above | (is_equal & is_first)
    return torch.where(is_kept, probs, 0)


# ---- top-p ---------------------------------------------------------------------------


# The nucleus has one rule, "a token is kept if less than `wanted` is ranked before it,
# the lower id first among equals", in three forms here; change all: `_nucleus`,
# `_outside_nucleus`, `_nucleus_of_row`.


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


def _ties_kept(probs: Tensor, least: Tensor, wanted: Tensor) -> Tensor:
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
    return above.sum(dim=-1, keepdim=True, dtype=torch.float64)


def _outside_nucleus(probs: Tensor, token: Tensor, wanted: Tensor) -> Tensor:
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
    ids = torch.arange(V, device=probs.device, dtype=probs.dtype)
    earlier = torch.lt(ids, token.to(probs.dtype), out=torch.empty_like(probs))
    earlier.mul_(equal)
    rank = earlier.sum(dim=-1, keepdim=True)
    return (rank >= ties).squeeze(1)


def _nucleus_of_row(probs: Tensor, rejected: Tensor, wanted: Tensor) -> Tensor:
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


# ---- the draw ------------------------------------------------------------------------


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one index a row with probability proportional to its weight: (N, V) >= 0,
    (N,) -> LongTensor (N,).

    A race: id i arrives at the time E_i / weight, where E_i is exponential, a hash of
    the row's uniform number. The first one is drawn. (-log of the times are log weights
    with Gumbel noise.) Blocks race first, then the ids of the first block: V / 64 + 64
    numbers instead of V."""
    index, _ = race(weights, uniforms)
    return index


def fresh_uniforms(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Return other uniform numbers (53 bits), a hash of the bits of these and of
    `salt`, which broadcast: the output function of splitmix64."""
    bits = _hash(uniforms, salt)
    return bits.double() * 2.0**-53


def _hash(uniforms: Tensor, salt: Tensor | int) -> Tensor:
    """Return the 53 bits of `fresh_uniforms`."""
    bits = uniforms.view(torch.int64)
    z = bits * INCREMENT
    z = z + salt  # one copy for each salt
    # A shift of int64 copies the sign from the left: the masks keep the other bits.
    shifted = z >> 30
    shifted.bitwise_and_(2**34 - 1)
    z.bitwise_xor_(shifted)
    z.mul_(FIRST_FACTOR)
    shifted = z >> 27
    shifted.bitwise_and_(2**37 - 1)
    z.bitwise_xor_(shifted)
    z.mul_(SECOND_FACTOR)
    shifted = z >> 31
    shifted.bitwise_and_(2**33 - 1)
    z.bitwise_xor_(shifted)
    shifted = z >> 11
    return shifted.bitwise_and_(2**53 - 1)


def race(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index (N,) that `draw` draws, and the total weight (N, 1), float64."""
    V = weights.shape[1]
    missing = -V % BLOCK
    if missing:
        weights = F.pad(weights, (0, missing))
    blocks = weights.unflatten(1, (-1, BLOCK))  # (N, K, BLOCK)
    block_sums = blocks.sum(dim=-1, dtype=torch.float64)  # (N, K)
    K = blocks.shape[1]

    # 1. Minus an exponential number for each id of a block and for each block: the log
    #    of odd multiples of 2^-53, so that it is never 0, nor infinite.
    last = RACES + BLOCK + K
    salts = torch.arange(RACES, last, device=uniforms.device)
    noise = _hash(uniforms[:, None], salts)
    noise = noise.bitwise_or_(1)
    noise = noise.double()
    noise.mul_(2.0**-53)
    noise.log_()
    id_noise = noise[:, :BLOCK]
    block_noise = noise[:, BLOCK:]

    # 2. The first block.
    scores = block_noise / block_sums
    block = scores.argmax(dim=-1, keepdim=True)  # (N, 1)

    # 3. The first id of that block.
    index = block.unsqueeze(-1)
    index = index.expand(-1, 1, BLOCK)
    weights = blocks.gather(1, index)
    weights = weights.squeeze(1)  # (N, BLOCK)
    scores = id_noise / weights
    column = scores.argmax(dim=-1, keepdim=True)  # (N, 1)

    drawn = block * BLOCK + column
    drawn = drawn.squeeze(1)
    total = block_sums.sum(dim=-1, keepdim=True)
    return drawn, total
