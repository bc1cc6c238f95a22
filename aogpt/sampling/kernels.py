"""The choice of tokens on a GPU as a Triton kernel: one launch instead of some seventy.

`sampling.token_choice` is the reference: one program draws the token of one row as `choose_tokens`
does, but counts probability in integers, w_i = round(2^44 exp((logit_i - largest logit) /
temperature)), whose sums are exact in any order. All tokens of weight 0, V <= 2^18, have less than
2^-27 of the probability of the likeliest, as much as the rounding of float32 logits moves anyway.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from .race import BLOCK, FIRST_FACTOR, INCREMENT, RACES, SECOND_FACTOR
from .token_choice import REDRAWN, TokenChoice

LARGEST_VOCABULARY = 2**18  # of which a sum of weights fits into 62 bits
TILE = 4096
KNOWN_FIELDS = {
    "temperature",
    "top_p",
    "top_k",
    "noise",
    "crossing",
}  # of `TokenChoice`

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


def can_choose(logits: Tensor, choice: TokenChoice) -> bool:
    """Whether `choose` draws what the reference would: it must know all fields that are used."""
    others = {field.name: field.default for field in dataclasses.fields(choice)}
    new = vars(choice).keys() - KNOWN_FIELDS
    exact = (
        choice.noise == "float64" and choice.top_k is None and choice.crossing == "keep"
    )
    fits = logits.dtype != torch.float64 and logits.shape[1] <= LARGEST_VOCABULARY
    return exact and fits and all(getattr(choice, name) == others[name] for name in new)


def choose(
    logits: Tensor, uniforms: Tensor, choice: TokenChoice
) -> tuple[Tensor, Tensor]:
    """Draw one token a row: logits (N, V), rows contiguous, uniforms float64 (N,) in [0, 1) ->
    tokens, LongTensor (N,), and their log-probabilities before temperature and top-p, float32."""
    N, V = logits.shape
    tokens = torch.empty(N, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(N, dtype=torch.float, device=logits.device)
    if N:
        # top_p as an exact integer, where Triton would round a float to 24 bits.
        settings = (
            0.0 if choice.greedy else choice.temperature,
            round(choice.top_p * 2**53),
        )
        row = logits.stride(0), V, *settings
        _choose[(N,)](logits, uniforms, tokens, log_probs, *row, TILE=TILE)
    return tokens, log_probs


@triton.jit(
    do_not_specialize=["top_p"]
)  # an integer of 1 would become a constant, without a type
def _choose(
    logits,
    uniforms,
    tokens,
    log_probs,
    stride,
    V,
    temperature,
    top_p,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest, token = _largest(logits, V, TILE)
    heat = tl.where(temperature == 0, 1.0, temperature).to(tl.float32)
    exponentials, total = _sums(logits, V, largest, heat, TILE)
    if temperature > 0:
        # 1. A token drawn from all.
        uniform = tl.load(uniforms + row)
        bound = tl.full((), -1, tl.int32)
        token = _draw(logits, V, largest, heat, uniform, bound, 0, TILE)
        if top_p < _ALL:
            share = top_p.to(tl.float64) * _LEAST
            wanted = tl.maximum(
                tl.math.ceil(total.to(tl.float64) * share).to(tl.int64), 1
            )
            logit = tl.load(logits + token).to(tl.float32)
            bits, weight = _bits_and_weight(logit, largest, heat)
            above, ties = _above(logits, V, largest, heat, bits, token, TILE)
            # 2. If it lies outside of the nucleus, one drawn again from the nucleus.
            if above + ties * weight >= wanted:
                least, above = _least_kept(logits, V, largest, heat, wanted, TILE)
                weight = _weight(least)
                kept = (wanted - above + weight - 1) // tl.maximum(weight, 1)
                again = _hash(uniform, _REDRAWN).to(tl.float64) * _LEAST
                token = _draw(logits, V, largest, heat, again, least, kept, TILE)
    tl.store(tokens + row, token)
    logit = tl.load(logits + token).to(tl.float32)
    tl.store(log_probs + row, logit - largest - tl.log(exponentials))


@triton.jit
def _load_tile(logits, start, V, TILE: tl.constexpr):
    ids = start + tl.arange(0, TILE)
    return ids, tl.load(logits + ids, mask=ids < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _largest(logits, V, TILE: tl.constexpr):
    """The largest logit, and the first token that has it; token 0 where none is a number."""
    largest = tl.full((), -float("inf"), tl.float32)
    token = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        here = tl.max(x, axis=0)
        first = tl.min(tl.where(x == here, ids, V), axis=0).to(tl.int64)
        token = tl.where(here > largest, first, token)
        largest = tl.maximum(largest, here)
    return largest, tl.minimum(token, V - 1)


@triton.jit
def _sums(logits, V, largest, heat, TILE: tl.constexpr):
    exponentials = tl.full((), 0, tl.float32)
    total = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        _, x = _load_tile(logits, start, V, TILE)
        exponentials += tl.sum(tl.exp(x - largest), axis=0)
        _, weights = _bits_and_weight(x, largest, heat)
        total += tl.sum(weights, axis=0)
    return exponentials, total


@triton.jit
def _bits_and_weight(logits, largest, heat):
    """exp((logit - largest) / temperature) as the bits of a float, whose order is that of the
    numbers, and as a weight."""
    bits = tl.exp((logits - largest) / heat).to(tl.int32, bitcast=True)
    return bits, _weight(bits)


@triton.jit
def _weight(bits):
    return (bits.to(tl.float32, bitcast=True).to(tl.float64) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _draw(logits, V, largest, heat, uniform, least, ties, TILE: tl.constexpr):
    """`token_choice.draw`: of all tokens whose bits are above `least`, and of those whose bits
    equal it the first `ties`."""
    token = tl.full((), 0, tl.int64)
    ties_before = tl.full((), 0, tl.int64)
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
        found = (
            start + first * _BLOCK + tl.sum(tl.where(row == first, column, 0), axis=0)
        )
        token = tl.where(here > best, found.to(tl.int64), token)
        best = tl.maximum(best, here)
        ties_before += tl.sum(equal, axis=0)
    return tl.minimum(token, V - 1)


@triton.jit
def _noise(uniform, salt):
    """Minus an exponential number for each salt, as `token_choice.draw` has them."""
    return tl.log((_hash(uniform, salt) | 1).to(tl.float64) * _LEAST)


@triton.jit
def _over(noise, weights):
    """noise / weights, minus infinity where the weight is 0."""
    quotient = noise / tl.where(weights == 0, 1, weights).to(tl.float64)
    return tl.where(weights == 0, -float("inf"), quotient)


@triton.jit
def _above(logits, V, largest, heat, bits, token, TILE: tl.constexpr):
    """The weight of the tokens with larger bits, and how many of equal bits have lower ids."""
    above = tl.full((), 0, tl.int64)
    ties = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits, start, V, TILE)
        others, weights = _bits_and_weight(x, largest, heat)
        above += tl.sum(tl.where(others > bits, weights, 0), axis=0)
        ties += tl.sum(((others == bits) & (ids < token)).to(tl.int64), axis=0)
    return above, ties


@triton.jit
def _least_kept(logits, V, largest, heat, wanted, TILE: tl.constexpr):
    """The bits of the least probable token in the nucleus, the least above which less than `wanted`
    lies, and the weight above it; by bisection: floats of 0 to 1 have the bits 0 to 0x3F800000."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0x3F800000, tl.int32)
    above_high = tl.full((), 0, tl.int64)
    for _ in range(30):
        middle = low + (high - low + 1) // 2
        above, _ties = _above(logits, V, largest, heat, middle, 0, TILE)
        below = above < wanted
        above_high = tl.where(below, above, above_high)
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
    return high, above_high


@triton.jit
def _hash(uniform, salt):
    """`token_choice._hash` of one number."""
    z = uniform.to(tl.int64, bitcast=True) * _INCREMENT + salt
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11)


@triton.jit
def _shift_right(z, bits: tl.constexpr):
    return (z.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)
