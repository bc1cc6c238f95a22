"""The choice of tokens on a GPU as a Triton kernel: one launch instead of some seventy.

`aogpt.sampling.token_choice` is the reference. One program draws the token of one row
as `choose_tokens` does, but counts probability in integers, w_i = round(2^44
exp((logit_i - largest logit) / temperature)), whose sums are exact in any order. All
tokens of weight 0, V <= 2^18, have less than 2^-27 of the probability of the likeliest,
as much as the rounding of float32 logits moves anyway.

Every truncation keeps a prefix of the ranking by falling probability, the lower id
first among equals: all tokens whose bits are above a limit, and of those at the limit
the first few (`ties`). Bits are those of exp((logit - largest) / temperature) as a
float32, 0 to 0x3F800000, whose order is that of the numbers.

A row is read six times at most, where top-p alone truncates: for the largest logit, the
sums, a draw, and, where the token drawn is outside of the nucleus, to find that out, to
copy the likeliest tokens, and for a second draw.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from .race import BLOCK, FIRST_FACTOR, INCREMENT, RACES, SECOND_FACTOR
from .token_choice import REDRAWN, TokenChoice

LARGEST_VOCABULARY = 2**18  # of which a sum of weights fits into 62 bits
TILE = 4096  # logits that a program holds at once
WARPS = 8  # with four, registers would not suffice
# Tokens that may be copied; among more of them a limit is found without a copy.
CANDIDATES = 4096
# Fields of `TokenChoice` that the kernel reads. It declines a choice with any other
# field that is not at its default.
READ_FIELDS = {"temperature", "top_p", "top_k"}

# What kernels read must be constants of Triton's.
_ONE = tl.constexpr(2.0**44)
_LEAST = tl.constexpr(2.0**-53)
_ALL = tl.constexpr(2**53)
_INCREMENT = tl.constexpr(INCREMENT)
_REDRAWN = tl.constexpr(REDRAWN)
_BLOCK = tl.constexpr(BLOCK)
_RACES = tl.constexpr(RACES)
_FIRST = tl.constexpr(FIRST_FACTOR)
_SECOND = tl.constexpr(SECOND_FACTOR)
# Bits of 2^-4, 2^-8, 2^-12 and 2^-20 of the largest probability.
_CUT_4 = tl.constexpr(0x3D800000)
_CUT_8 = tl.constexpr(0x3B800000)
_CUT_12 = tl.constexpr(0x39800000)
_CUT_20 = tl.constexpr(0x35800000)


def can_choose(logits: Tensor, choice: TokenChoice) -> bool:
    """Return whether `choose` draws what the reference would."""
    if logits.dtype == torch.float64:
        return False
    for field in dataclasses.fields(TokenChoice):
        if field.name in READ_FIELDS:
            continue
        if getattr(choice, field.name) != field.default:
            return False
    return logits.shape[1] <= LARGEST_VOCABULARY


def choose(
    logits: Tensor,
    uniforms: Tensor,
    choice: TokenChoice,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: logits (N, V), rows contiguous, uniforms float64 (N,) in
    [0, 1) -> tokens, LongTensor (N,), and their log-probabilities before temperature
    and truncation, float32."""
    N, V = logits.shape
    device = logits.device
    tokens = torch.empty(N, dtype=torch.long, device=device)
    log_probs = torch.empty(N, dtype=torch.float, device=device)
    if N == 0:
        return tokens, log_probs
    top_k = 0  # nothing is cut off
    if choice.top_k is not None and choice.top_k < V:
        top_k = choice.top_k
    truncates = top_k > 0 or choice.top_p < 1
    most = CANDIDATES if truncates and not choice.greedy else 1
    # The bits of each row's likeliest tokens, where something is cut off.
    candidates = torch.empty(
        N,
        most,
        dtype=torch.int32,
        device=device,
    )
    _choose[(N,)](
        logits,
        uniforms,
        tokens,
        log_probs,
        candidates,
        logits.stride(0),
        V,
        0.0 if choice.greedy else choice.temperature,
        round(choice.top_p * 2**53),  # exact, where Triton would round it to 24 bits
        top_k,
        float_bits(0.0),
        DROP=False,
        TILE=TILE,
        MOST=most,
        num_warps=WARPS,
    )
    return tokens, log_probs


def float_bits(number: float) -> int:
    """Return the bits of a float32, as an integer."""
    return int(torch.tensor(number, dtype=torch.float32).view(torch.int32))


# An integer of 1 would become a constant, without a type. min_p: the bits of a float.
@triton.jit(do_not_specialize=["top_p", "top_k", "min_p"])
def _choose(
    logits,
    uniforms,
    tokens,
    log_probs,
    candidates,
    stride,
    V,
    temperature,
    top_p,
    top_k,
    min_p,
    DROP: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    candidates += row * MOST
    largest, token = _largest(logits, V, TILE)
    heat = tl.where(temperature == 0, 1.0, temperature).to(tl.float32)
    exponentials, total, weights, counts = _sums(
        logits, V, largest, heat, TILE, MOST > 1
    )
    if temperature > 0:
        uniform = tl.load(uniforms + row)
        # 1. The limit of min-p, which keeps all of its equals, and that of top-k.
        limit = tl.full((), -1, tl.int32)
        ties = _zero()
        if min_p > 0:
            limit = tl.full((), 0, tl.int32) + min_p
            ties += V
        if MOST > 1:
            if top_k > 0:
                least, above = _limit(
                    logits,
                    candidates,
                    V,
                    largest,
                    heat,
                    counts,
                    counts,
                    top_k,
                    -1,
                    True,
                    TILE,
                    MOST,
                )
                if least >= limit:
                    limit = least
                    ties = top_k - above
        if limit >= 0:
            above, equal = _above(
                logits,
                V,
                largest,
                heat,
                limit,
                V,
                TILE,
            )
            total = above + tl.minimum(ties, equal) * _weight(limit)
        wanted = total
        floor = total
        if top_p < _ALL:
            mass = total.to(tl.float64) * (top_p.to(tl.float64) * _LEAST)
            wanted = tl.maximum(tl.math.ceil(mass).to(tl.int64), 1)
            floor = mass.to(tl.int64)
        # 2. A token drawn from all that these leave. top-p is then looked at only where
        #    the token is outside of the nucleus, and one is drawn again from the
        #    nucleus. But without the token that crosses top-p, the first draw is
        #    already from the rest.
        outside = top_p < _ALL
        if not DROP:
            token = _draw(
                logits,
                V,
                largest,
                heat,
                uniform,
                limit,
                ties,
                TILE,
            )
            if outside:
                logit = tl.load(logits + token).to(tl.float32)
                bits, weight = _bits_and_weight(logit, largest, heat)
                above, equal = _above(
                    logits,
                    V,
                    largest,
                    heat,
                    bits,
                    token,
                    TILE,
                )
                outside = above + equal * weight >= wanted
            uniform = _hash(uniform, _REDRAWN).to(tl.float64) * _LEAST
        if MOST > 1:
            if outside:
                limit, above = _limit(
                    logits,
                    candidates,
                    V,
                    largest,
                    heat,
                    weights,
                    counts,
                    wanted,
                    limit - 1,
                    False,
                    TILE,
                    MOST,
                )
                weight = _weight(limit)
                ties = (wanted - above + weight - 1) // tl.maximum(weight, 1)
                if DROP:
                    crosses = above + ties * weight > floor
                    ties -= (crosses & (above + ties > 1)).to(tl.int64)
        if DROP or outside:
            token = _draw(
                logits,
                V,
                largest,
                heat,
                uniform,
                limit,
                ties,
                TILE,
            )
    tl.store(tokens + row, token)
    logit = tl.load(logits + token).to(tl.float32)
    tl.store(log_probs + row, logit - largest - tl.log(exponentials))


@triton.jit
def _load_tile(
    logits,
    start,
    V,
    TILE: tl.constexpr,
):
    ids = start + tl.arange(0, TILE)
    return ids, tl.load(
        logits + ids,
        mask=ids < V,
        other=-float("inf"),
    ).to(tl.float32)


@triton.jit
def _largest(
    logits,
    V,
    TILE: tl.constexpr,
):
    """Return the largest logit, and the first token that has it; token 0 where none is
    a number."""
    largest = tl.full((), -float("inf"), tl.float32)
    token = _zero()
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        here = tl.max(x, axis=0)
        first = tl.min(tl.where(x == here, ids, V), axis=0).to(tl.int64)
        token = tl.where(here > largest, first, token)
        largest = tl.maximum(largest, here)
    return largest, tl.minimum(token, V - 1)


@triton.jit
def _sums(
    logits,
    V,
    largest,
    heat,
    TILE: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Return the sums of exponentials at temperature 1 and of weights; and, for
    `_limit`, weight and number of the tokens above each cut."""
    exponentials = tl.full((), 0, tl.float32)
    total = _zero()
    weights_above = _zero(), _zero(), _zero(), _zero()
    counts_above = _zero(), _zero(), _zero(), _zero()
    for start in range(0, V, TILE):
        _, x = _load_tile(logits, start, V, TILE)
        exponentials += tl.sum(tl.exp(x - largest), axis=0)
        bits, weights = _bits_and_weight(x, largest, heat)
        total += tl.sum(weights, axis=0)
        if CUTS:
            weights_above = _add_above(weights_above, bits, weights)
            counts_above = _add_above(counts_above, bits, 1)
    return exponentials, total, weights_above, counts_above


@triton.jit
def _zero():
    return tl.full((), 0, tl.int64)


@triton.jit
def _add_above(
    sums,
    bits,
    weights,
):
    return (
        sums[0] + _sum_above(bits, weights, _CUT_4),
        sums[1] + _sum_above(bits, weights, _CUT_8),
        sums[2] + _sum_above(bits, weights, _CUT_12),
        sums[3] + _sum_above(bits, weights, _CUT_20),
    )


@triton.jit
def _sum_above(
    bits,
    weights,
    cut,
):
    return tl.sum(tl.where(bits > cut, weights, 0).to(tl.int64), axis=0)


@triton.jit
def _bits_and_weight(
    logits,
    largest,
    heat,
):
    """Return exp((logit - largest) / temperature) as the bits of a float, whose order
    is that of the numbers, and as a weight."""
    bits = tl.exp((logits - largest) / heat).to(tl.int32, bitcast=True)
    return bits, _weight(bits)


@triton.jit
def _weight(bits):
    return (bits.to(tl.float32, bitcast=True).to(tl.float64) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _draw(
    logits,
    V,
    largest,
    heat,
    uniform,
    least,
    ties,
    TILE: tl.constexpr,
):
    """Draw as `race.draw` does, from all tokens whose bits are above `least`, and the
    first `ties` of those whose bits equal it."""
    token = _zero()
    ties_before = _zero()
    best = tl.full((), -float("inf"), tl.float64)
    of_column = _noise(uniform, _RACES + tl.arange(0, _BLOCK))
    row = tl.arange(0, TILE // _BLOCK)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        bits, weights = _bits_and_weight(x, largest, heat)
        equal = ((bits == least) & (ids < V)).to(tl.int64)
        rank = ties_before + tl.cumsum(equal, axis=0)
        weights = tl.where((bits > least) | ((equal > 0) & (rank <= ties)), weights, 0)
        weights = tl.reshape(weights, (TILE // _BLOCK, _BLOCK))
        of_block = _noise(uniform, _RACES + _BLOCK + start // _BLOCK + row)
        noise = _over(of_block, tl.sum(weights, axis=1))
        column = tl.argmax(_over(tl.expand_dims(of_column, 0), weights), axis=1)
        here = tl.max(noise, axis=0)
        first = tl.argmax(noise, axis=0)
        candidate = (
            start + first * _BLOCK + tl.sum(tl.where(row == first, column, 0), axis=0)
        )
        token = tl.where(here > best, candidate.to(tl.int64), token)
        best = tl.maximum(best, here)
        ties_before += tl.sum(equal, axis=0)
    return tl.minimum(token, V - 1)


@triton.jit
def _noise(uniform, salt):
    """Return minus an exponential number for each salt, as in `race.race`."""
    return tl.log((_hash(uniform, salt) | 1).to(tl.float64) * _LEAST)


@triton.jit
def _over(noise, weights):
    """Return noise / weights, minus infinity where the weight is 0."""
    quotient = noise / tl.where(weights == 0, 1, weights).to(tl.float64)
    return tl.where(weights == 0, -float("inf"), quotient)


@triton.jit
def _above(
    logits,
    V,
    largest,
    heat,
    bits,
    token,
    TILE: tl.constexpr,
):
    """Return the weight of the tokens with larger bits, and how many of equal bits have
    lower ids."""
    above = _zero()
    ties = _zero()
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        other_bits, weights = _bits_and_weight(x, largest, heat)
        above += tl.sum(tl.where(other_bits > bits, weights, 0), axis=0)
        ties += tl.sum(((other_bits == bits) & (ids < token)).to(tl.int64), axis=0)
    return above, ties


@triton.jit
def _limit(
    logits,
    candidates,
    V,
    largest,
    heat,
    sums,
    counts,
    wanted,
    floor,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Return the least bits above which less than `wanted` of the weight lies, and that
    weight. It is known to be more than `floor`. COUNT: of the number of tokens instead
    of their weight.

    sums: what lies above the four cuts; they say between which two the limit is. What
    lies above the lower one is copied, and the bisection reads the copy, if it fits."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0x3F800000, tl.int32)  # 1: the likeliest token
    above_high = _zero()
    number = _zero() + V
    if sums[0] >= wanted:
        low = tl.full((), _CUT_4, tl.int32)
        number = counts[0]
    elif sums[1] >= wanted:
        low = tl.full((), _CUT_8, tl.int32)
        high = tl.full((), _CUT_4, tl.int32)
        above_high = sums[0]
        number = counts[1]
    elif sums[2] >= wanted:
        low = tl.full((), _CUT_12, tl.int32)
        high = tl.full((), _CUT_8, tl.int32)
        above_high = sums[1]
        number = counts[2]
    elif sums[3] >= wanted:
        low = tl.full((), _CUT_20, tl.int32)
        high = tl.full((), _CUT_12, tl.int32)
        above_high = sums[2]
        number = counts[3]
    else:
        high = tl.full((), _CUT_20, tl.int32)
        above_high = sums[3]
    low = tl.maximum(low, floor)
    copies = number <= MOST
    place = tl.arange(0, MOST)
    bits = tl.full((MOST,), -1, tl.int32)
    weights = tl.zeros((MOST,), tl.int64)
    if copies:
        copied = _copy_above(
            logits,
            candidates,
            V,
            largest,
            heat,
            low,
            TILE,
        )
        tl.debug_barrier()  # a thread reads what others have written
        bits = tl.load(candidates + place, mask=place < copied, other=-1)
        weights = _weight(tl.maximum(bits, 0))
        if COUNT:
            weights = tl.full((MOST,), 1, tl.int64)
    while high - low > 1:
        middle = low + (high - low) // 2
        if copies:
            above = tl.sum(tl.where(bits > middle, weights, 0), axis=0)
        else:
            above = _all_above(
                logits,
                V,
                largest,
                heat,
                middle,
                COUNT,
                TILE,
            )
        below = above < wanted
        above_high = tl.where(below, above, above_high)
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
    return high, above_high


@triton.jit
def _copy_above(
    logits,
    candidates,
    V,
    largest,
    heat,
    low,
    TILE: tl.constexpr,
):
    """Copy the bits of the tokens above `low`. Return how many these are."""
    copied = tl.full((), 0, tl.int32)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        bits, _weights = _bits_and_weight(x, largest, heat)
        chosen = ((bits > low) & (ids < V)).to(tl.int32)
        place = copied + tl.cumsum(chosen, axis=0) - 1
        tl.store(candidates + place, bits, mask=chosen > 0)
        copied += tl.sum(chosen, axis=0)
    return copied


@triton.jit
def _all_above(
    logits,
    V,
    largest,
    heat,
    limit,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
):
    above = _zero()
    for start in range(0, V, TILE):
        _, x = _load_tile(logits, start, V, TILE)
        bits, weights = _bits_and_weight(x, largest, heat)
        if COUNT:
            above += _sum_above(bits, 1, limit)
        else:
            above += _sum_above(bits, weights, limit)
    return above


@triton.jit
def _hash(uniform, salt):
    """Return `race._hash` of one number."""
    z = uniform.to(tl.int64, bitcast=True) * _INCREMENT + salt
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11)


@triton.jit
def _shift_right(z, bits: tl.constexpr):
    return (z.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)
