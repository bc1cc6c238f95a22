"""Triton kernels of decoding on a GPU: the choice of tokens, and attention over the cache.

The token choice is one launch instead of some seventy. `sampling.token_choice` says what is drawn
and is the reference: one program draws the token of one row as `choose_tokens` does, but counts
probability in integers. A weight is

    w_i = round(2^44 exp((logit_i - largest logit) / temperature))

so sums are exact and the same in whatever order they are added, which float sums are not. A token
of weight 0 has less than 2^-45 of the probability of the likeliest, and all V of them together,
V <= 2^18, less than 2^-27 of it: what the rounding of float32 logits moves anyway.

Attention has no mask in memory: what an item of a parallel pass sees follows from three numbers of
its row (`AOGPT.parallel_hidden`). The masked form in `model.Attention` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from sampling.token_choice import FIRST_FACTOR, INCREMENT, REDRAWN, SECOND_FACTOR, TokenChoice

LARGEST_VOCABULARY = 2**18  # of which a sum of weights fits into 62 bits
TILE = 4096

# ---- token choice --------------------------------------------------------------------------------

# What kernels read must be constants of Triton's.
_ONE, _LEAST = tl.constexpr(2.0**44), tl.constexpr(2.0**-53)
_INCREMENT, _FIRST, _SECOND = (
    tl.constexpr(INCREMENT),
    tl.constexpr(FIRST_FACTOR),
    tl.constexpr(SECOND_FACTOR),
)
_REDRAWN = tl.constexpr(REDRAWN)


def can_choose(logits: Tensor, choice: TokenChoice) -> bool:
    """Whether `choose` draws what the reference would."""
    return (
        choice.noise == "float64"
        and choice.top_k is None
        and choice.crossing == "keep"
        and logits.dtype != torch.float64
        and logits.shape[1] <= LARGEST_VOCABULARY
    )


def choose(logits: Tensor, uniforms: Tensor, choice: TokenChoice) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: (N, V), the last dimension contiguous. uniforms: float64 (N,) in [0, 1).

    Returns: tokens, LongTensor (N,), and their log-probabilities before temperature and top-p,
    float32 (N,).
    """
    N, V = logits.shape
    tokens = torch.empty(N, dtype=torch.long, device=logits.device)
    log_probs = torch.empty(N, dtype=torch.float, device=logits.device)
    if N:
        _choose[(N,)](
            logits,
            uniforms,
            tokens,
            log_probs,
            logits.stride(0),
            V,
            1.0 if choice.greedy else choice.temperature,
            round(choice.top_p * 2**53),  # exact, where Triton would round a float to 24 bits
            GREEDY=choice.greedy,
            NUCLEUS=choice.top_p < 1,
            TILE=TILE,
        )
    return tokens, log_probs


@triton.jit(do_not_specialize=["top_p"])  # an integer of 1 would become a constant, without a type
def _choose(
    logits_at,
    uniforms_at,
    tokens_at,
    log_probs_at,
    stride,
    V,
    temperature,
    top_p,
    GREEDY: tl.constexpr,
    NUCLEUS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_at += row * stride
    # 1. The largest logit and the first token that has it.
    largest, token = _largest(logits_at, V, TILE)
    # 2. The sum of all exponentials, and of all weights.
    exponentials, total = _sums(logits_at, V, largest, temperature, TILE)
    if not GREEDY:
        # 3. A token drawn from all.
        uniform = tl.load(uniforms_at + row)
        bound = tl.full((), -1, tl.int32)
        token = _draw(logits_at, V, largest, temperature, _point(uniform, total), bound, 0, TILE)
        if NUCLEUS:
            share = top_p.to(tl.float64) * _LEAST
            wanted = tl.maximum(tl.math.ceil(total.to(tl.float64) * share).to(tl.int64), 1)
            logit = tl.load(logits_at + token).to(tl.float32)
            bits, weight = _bits_and_weight(logit, largest, temperature)
            above, ties = _ranked_before(logits_at, V, largest, temperature, bits, token, TILE)
            # 4. If it lies outside of the nucleus, one drawn again from the nucleus proper.
            if above + ties * weight >= wanted:
                least, above = _least_kept(logits_at, V, largest, temperature, wanted, TILE)
                weight = _weight(least)
                kept = (wanted - above + weight - 1) // tl.maximum(weight, 1)
                point = _point(_fresh(uniform, _REDRAWN), above + kept * weight)
                token = _draw(logits_at, V, largest, temperature, point, least, kept, TILE)
    tl.store(tokens_at + row, token)
    logit = tl.load(logits_at + token).to(tl.float32)
    tl.store(log_probs_at + row, logit - largest - tl.log(exponentials))


@triton.jit
def _load_tile(logits_at, start, V, TILE: tl.constexpr):
    """The ids of a tile and their logits; of ids from V on minus infinity, whose weight is 0."""
    ids = start + tl.arange(0, TILE)
    return ids, tl.load(logits_at + ids, mask=ids < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _largest(logits_at, V, TILE: tl.constexpr):
    """The largest logit, and the first token that has it; token 0 where none is a number."""
    largest, token = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits_at, start, V, TILE)
        here = tl.max(x, axis=0)
        first = tl.min(tl.where(x == here, ids, V), axis=0).to(tl.int64)
        token = tl.where(here > largest, first, token)
        largest = tl.maximum(largest, here)
    return largest, tl.minimum(token, V - 1)


@triton.jit
def _sums(logits_at, V, largest, temperature, TILE: tl.constexpr):
    exponentials, total = tl.full((), 0, tl.float32), tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        _, x = _load_tile(logits_at, start, V, TILE)
        exponentials += tl.sum(tl.exp(x - largest), axis=0)
        _, weights = _bits_and_weight(x, largest, temperature)
        total += tl.sum(weights, axis=0)
    return exponentials, total


@triton.jit
def _bits_and_weight(logits, largest, temperature):
    """Of each token exp((logit - largest) / temperature), as the bits of a float, whose order is
    that of the numbers, and as a weight."""
    e = tl.exp((logits - largest) / temperature)
    bits = e.to(tl.int32, bitcast=True)
    return bits, _weight(bits)


@triton.jit
def _weight(bits):
    e = bits.to(tl.float32, bitcast=True)
    return (e.to(tl.float64) * _ONE + 0.5).to(tl.int64)


@triton.jit
def _point(uniform, total):
    """Where a uniform number falls in a sum of weights: 0 to total - 1."""
    point = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(point, total - 1), 0)


@triton.jit
def _draw(logits_at, V, largest, temperature, point, least, ties, TILE: tl.constexpr):
    """The first token at which the running sum of weights exceeds `point`: of all tokens whose bits
    are above `least`, and of those whose bits equal it the first `ties`."""
    token, sum_before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    ties_before = tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits_at, start, V, TILE)
        bits, weights = _bits_and_weight(x, largest, temperature)
        equal = ((bits == least) & (ids < V)).to(tl.int64)
        rank = ties_before + tl.cumsum(equal, axis=0)
        kept = (bits > least) | ((equal > 0) & (rank <= ties))
        running = sum_before + tl.cumsum(tl.where(kept, weights, 0), axis=0)
        # Tokens whose running sum is not beyond the point come before the one looked for.
        token += tl.sum(((running <= point) & (ids < V)).to(tl.int64), axis=0)
        sum_before += tl.sum(tl.where(kept, weights, 0), axis=0)
        ties_before += tl.sum(equal, axis=0)
    return tl.minimum(token, V - 1)


@triton.jit
def _ranked_before(logits_at, V, largest, temperature, bits, token, TILE: tl.constexpr):
    """The weight of the tokens more probable than one, and how many equal to it have lower ids."""
    above, ties = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, V, TILE):
        ids, x = _load_tile(logits_at, start, V, TILE)
        others, weights = _bits_and_weight(x, largest, temperature)
        above += tl.sum(tl.where(others > bits, weights, 0), axis=0)
        ties += tl.sum(((others == bits) & (ids < token)).to(tl.int64), axis=0)
    return above, ties


@triton.jit
def _least_kept(logits_at, V, largest, temperature, wanted, TILE: tl.constexpr):
    """The bits of the least probable token in the nucleus, and the weight above it: the least bits
    above which less than `wanted` lies. By bisection: floats of 0 to 1 have the bits 0 to
    0x3F800000, which 30 halvings tell apart."""
    low, high = tl.full((), -1, tl.int32), tl.full((), 0x3F800000, tl.int32)
    above_high = tl.full((), 0, tl.int64)
    for _ in range(30):
        middle = low + (high - low + 1) // 2
        above = tl.full((), 0, tl.int64)
        for start in range(0, V, TILE):
            ids, x = _load_tile(logits_at, start, V, TILE)
            bits, weights = _bits_and_weight(x, largest, temperature)
            above += tl.sum(tl.where(bits > middle, weights, 0), axis=0)
        below = above < wanted
        above_high = tl.where(below, above, above_high)
        high = tl.where(below, middle, high)
        low = tl.where(below, low, middle)
    return high, above_high


@triton.jit
def _fresh(uniform, salt):
    """`token_choice.fresh_uniforms` of one number."""
    z = uniform.to(tl.int64, bitcast=True) * _INCREMENT + salt
    z = (z ^ _shift_right(z, 30)) * _FIRST
    z = (z ^ _shift_right(z, 27)) * _SECOND
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).to(tl.float64) * _LEAST


@triton.jit
def _shift_right(z, bits: tl.constexpr):
    """Shift in zeros."""
    return (z.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


# ---- attention over the cache --------------------------------------------------------------------


# Registered with PyTorch under a name of its own ("library::operator") and as changing none of its
# arguments: torch.compile takes it as one operation that only reads the cache, and makes no copy.
@torch.library.triton_op("aogpt::attend_cached", mutates_args=())
def attend_cached(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cached: Tensor,
    known: Tensor,
    count: Tensor,
    width: int,
    hide_start: bool,
) -> Tensor:
    """Attention of the items of a parallel pass over the cache of a layer.

    Args:
        q: (N, H, D/H), row after row. keys, values: (B, C, H, D/H), those of this pass in them.
        cached, known, count: LongTensors (B,), of the `ParallelPass`; width: its W.
        hide_start: slot 0 is seen by itself only.

    Returns: of the shape of q; 0 for items too many.
    """
    q = q.contiguous()
    out = torch.zeros_like(q)
    (B, _, H, size), rows = keys.shape, 16  # the least that a matrix product takes
    kernel = _attend_cached
    # wrap_triton shows torch.compile the kernel within the operator. In Triton's interpreter there
    # is none to show, but a plain function.
    if isinstance(kernel, JITFunction):
        kernel = torch.library.wrap_triton(kernel)
    kernel[(B, H, triton.cdiv(width, rows))](
        q,
        keys,
        values,
        out,
        cached,
        known,
        count,
        count.cumsum(0) - count,
        *q.stride()[:2],
        *keys.stride()[:3],
        size,
        size**-0.5,
        HIDE_START=hide_start,
        ROWS=rows,
        SLOTS=64,
        SIZE=max(16, triton.next_power_of_2(size)),
    )
    return out


@triton.jit
def _attend_cached(
    q_at,
    keys_at,
    values_at,
    out_at,
    cached_at,
    known_at,
    count_at,
    first_at,
    q_item,
    q_head,
    row_stride,
    slot_stride,
    head_stride,
    size,
    scale,
    HIDE_START: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """ROWS items of one row of the batch, one head: softmax over tiles of SLOTS slots (Milakov and
    Gimelshein, arXiv 1805.02867)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    scale = tl.full((), scale, tl.float32)  # torch.compile hands over numbers as float64
    count = tl.load(count_at + row)
    column = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid = column < count
    # 1. The queries, and how many true inputs each of them sees.
    d = tl.arange(0, SIZE)
    item = tl.load(first_at + row) + column
    places = item[:, None] * q_item + head * q_head + d[None, :]
    real = valid[:, None] & (d[None, :] < size)
    q = tl.load(q_at + places, mask=real, other=0.0)
    slot = tl.load(cached_at + row) + column
    bound = tl.minimum(slot, tl.load(known_at + row))
    # 2. Their keys, a tile at a time: the largest score, the sum of exponentials, the weighted sum.
    keys_at += row * row_stride + head * head_stride
    values_at += row * row_stride + head * head_stride
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total, mean = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, SIZE), tl.float32)
    end = tl.max(tl.where(valid, bound, 0), axis=0)
    for start in range(0, end, SLOTS):
        j = start + tl.arange(0, SLOTS)
        there = (j[:, None] < end) & (d[None, :] < size)
        tile = j[:, None] * slot_stride + d[None, :]
        k = tl.load(keys_at + tile, mask=there, other=0.0)
        v = tl.load(values_at + tile, mask=there, other=0.0)
        seen = j[None, :] < bound[:, None]
        if HIDE_START:
            seen = seen & ((j[None, :] > 0) | (slot[:, None] == 0))
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen, score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1))
        shift = tl.where(larger == -float("inf"), 0.0, larger)  # nothing seen yet
        weight = tl.exp(score - shift[:, None])
        before = tl.exp(largest - shift)
        total = total * before + tl.sum(weight, axis=1)
        mean = mean * before[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        largest = larger
    # 3. And its own key, which no other item sees.
    own = slot[:, None] * slot_stride + d[None, :]
    k = tl.load(keys_at + own, mask=real, other=0.0).to(tl.float32)
    v = tl.load(values_at + own, mask=real, other=0.0).to(tl.float32)
    score = tl.sum(q.to(tl.float32) * k, axis=1) * scale
    larger = tl.maximum(largest, score)
    before, weight = tl.exp(largest - larger), tl.exp(score - larger)
    total = total * before + weight
    mean = mean * before[:, None] + weight[:, None] * v
    mean = mean / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_at + places, mean.to(out_at.dtype.element_ty), mask=real)
