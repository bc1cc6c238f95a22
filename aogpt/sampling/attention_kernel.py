"""Attention of cached decoding as a Triton kernel: of the cache a row reads only what
it knows.

The reference is `aogpt.sampling.cached.CachedPass` with a mask. Input i of row b is at
slot s, which is cached[b] + i. It sees the slots before min(s, known[b]), without slot
0 where [None] is hidden, and itself. Its own key starts the online softmax, so there is
no mask besides the end of the loop, and neither queries nor outputs are padded to the
longest row.

A program computes one tile: some inputs of one row, with all query heads that share a
key head. It reads all keys or, where there are too few programs for a GPU, a part (a
split).

Shapes: B rows, N inputs of all rows, H query heads, Hk key heads, D width of a head.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cached import Step

WIDEST_HEAD = 128  # wider ones would need more registers than there are
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE_K = 64  # keys of one iteration
PROGRAMS = 264  # two for each multiprocessor of an H100
KEYS_OF_A_SPLIT = 128  # at least: shorter parts would cost more than they save
NO_SCORE = tl.constexpr(-1e30)  # finite, so that the difference of two is a number
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass
class Tiles:
    """The tiles into which the inputs of a pass are cut. The padding after the last
    input is a row of its own, number B, in which every input sees itself alone."""

    rows: Tensor  # (3, B + 1): cached, known, count
    starts: Tensor  # (B + 1,) inputs before each row
    ends: Tensor  # (B + 1,) tiles up to the end of each row


def can_attend(head_width: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel computes what the reference does."""
    return head_width <= WIDEST_HEAD and dtype in DTYPES


def make_tiles(step: Step, heads: int, key_heads: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles of a step of a model with these heads and a cache of this
    type."""
    group = heads // key_heads
    queries = queries_of_tile(step.inputs, step.rows.shape[1], group, dtype)
    inputs = queries // group
    padding = (step.inputs - step.count.sum()).view(1)
    zero = torch.zeros_like(padding)
    cached = torch.cat([step.cached, zero])
    known = torch.cat([step.known, zero])
    counts = torch.cat([step.count, padding])
    return Tiles(
        rows=torch.stack([cached, known, counts]),
        starts=counts.cumsum(0) - counts,
        ends=((counts + inputs - 1) // inputs).cumsum(0),
    )


def queries_of_tile(inputs: int, rows: int, group: int, dtype: torch.dtype) -> int:
    """Return the queries of a tile: its inputs times the query heads of a key head
    (`group`), up to a power of two. Rows with many inputs take larger tiles, so that a
    key is read for more queries; not in float32, whose products take too many
    registers."""
    many = inputs * group > 32 * rows and dtype != torch.float32
    return max(64 if many else 16, triton.next_power_of_2(group))


def pick_tile(
    dtype: torch.dtype, width: int, queries: int
) -> tuple[int, int, int, str]:
    """Return the keys of an iteration, warps, stages of loads ahead and the precision
    of products, so that registers and shared memory of an A100 suffice."""
    if dtype == torch.float32:
        keys = TILE_K // 2 if width == 128 else TILE_K
        warps = 8 if width == 128 else 4
        return keys, warps, 2, "ieee"
    return TILE_K, 8 if queries * width > 4096 else 4, 3, "tf32"


def pick_splits(programs: int, length: int) -> int:
    """Return the number of parts of the keys, a power of two: up to PROGRAMS of them,
    each of KEYS_OF_A_SPLIT at least. programs: without splits; length: slots of the
    cache."""
    wanted = min(PROGRAMS // programs, length // KEYS_OF_A_SPLIT)
    return 1 << max(0, wanted.bit_length() - 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    hide_start: bool,
) -> Tensor:
    """Return the attention of all inputs, (N, H D). q (N, H, D), k and v (N, Hk, D) are
    of the inputs; keys and values (B, slots, Hk, D) are the cache and hold k and v
    already."""
    return ragged_attention(
        q,
        k,
        v,
        keys=keys,
        values=values,
        rows=tiles.rows,
        starts=tiles.starts,
        ends=tiles.ends,
        hide_start=hide_start,
    )


@torch.library.custom_op("aogpt::ragged_attention", mutates_args=())
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    starts: Tensor,
    ends: Tensor,
    hide_start: bool,
) -> Tensor:
    """Return what `attend` does, (N, H D), from the fields of `Tiles`. torch.compile
    keeps this operation whole."""
    N, H, D = q.shape
    B, slots, key_heads, _ = keys.shape
    group = H // key_heads
    queries = queries_of_tile(N, B, group, q.dtype)
    tiles = N // (queries // group) + B + 1  # at least ends[B]
    splits = pick_splits(B * key_heads, slots)
    width = max(16, triton.next_power_of_2(D))
    tile_k, warps, stages, precision = pick_tile(q.dtype, width, queries)
    out = torch.empty(N, H * D, dtype=v.dtype, device=q.device)
    if splits == 1:
        parts = out
        log_sums = out  # not written
    else:
        parts = torch.empty(splits, N, H, D, dtype=torch.float32, device=q.device)
        log_sums = torch.empty(splits, N, H, dtype=torch.float32, device=q.device)
    _attend[(tiles, key_heads, splits)](
        q,
        k,
        v,
        keys,
        values,
        parts,
        log_sums,
        rows,
        starts,
        ends,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        N,
        B,
        D**-0.5,
        HIDDEN=int(hide_start),
        HEADS=H,
        GROUP=group,
        D=D,
        WIDTH=width,
        TILE_Q=queries,
        TILE_K=tile_k,
        SPLITS=splits,
        ROWS=triton.next_power_of_2(B + 1),
        PRECISION=precision,
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        _merge[(N * H,)](parts, log_sums, out, N * H, D=D, WIDTH=width, SPLITS=splits)
    return out


@ragged_attention.register_fake
def _(q, k, v, keys, values, rows, starts, ends, hide_start):
    return v.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@triton.jit
def _attend(
    q,
    k,
    v,
    keys,
    values,
    out,
    log_sums,
    rows,
    starts,
    ends,
    q_input,
    q_head,
    k_input,
    k_head,
    v_input,
    v_head,
    cache_row,
    cache_slot,
    cache_head,
    N,
    B,
    scale,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    key_head = tl.program_id(1)
    split = tl.program_id(2)
    # 1. The row of this tile, and the first of its inputs. The last programs may have
    #    none.
    lanes = tl.arange(0, ROWS)
    end = tl.load(ends + lanes, mask=lanes <= B, other=0)
    over = (lanes <= B) & (end <= tile)
    row = tl.sum(over.to(tl.int32), axis=0)
    if row <= B:
        INPUTS: tl.constexpr = TILE_Q // GROUP
        first = (tile - tl.max(tl.where(over, end, 0), axis=0)) * INPUTS
        cached = tl.load(rows + row)
        known = tl.load(rows + B + 1 + row)
        count = tl.load(rows + 2 * (B + 1) + row)
        lane = tl.arange(0, TILE_Q)
        column = first + lane // GROUP  # the input in its row
        head = key_head * GROUP + lane % GROUP
        valid = (lane // GROUP < INPUTS) & (column < count)
        source = tl.minimum(cached + column, known)  # the slots before it are visible
        number = tl.load(starts + row) + column  # the input among all, int64
        d = tl.arange(0, WIDTH)
        in_head = d < D
        inside = valid[:, None] & in_head[None, :]
        # 2. What these inputs bring: queries, and their own keys and values.
        query = tl.load(
            q + number[:, None] * q_input + head[:, None] * q_head + d[None, :],
            inside,
            0.0,
        )
        key = tl.load(
            k + number[:, None] * k_input + key_head * k_head + d[None, :], inside, 0.0
        )
        value = tl.load(
            v + number[:, None] * v_input + key_head * v_head + d[None, :], inside, 0.0
        )
        factor = scale * LOG2_E
        if split == 0:
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)
            largest = score * factor
            total = tl.full((TILE_Q,), 1.0, tl.float32)
            mean = value.to(tl.float32)
        else:
            largest = tl.full((TILE_Q,), NO_SCORE, tl.float32)
            total = tl.zeros((TILE_Q,), tl.float32)
            mean = tl.zeros((TILE_Q, WIDTH), tl.float32)
        # 3. The slots of the cache, up to the last that one of them sees.
        last_input = tl.minimum(first + INPUTS, count) - 1
        last = tl.minimum(cached + last_input, known).to(tl.int32)
        key_tiles = tl.cdiv(last, TILE_K)
        share = tl.cdiv(key_tiles, SPLITS)
        row_of_cache = row.to(tl.int64) * cache_row + key_head * cache_head
        for key_tile in range(
            split * share, tl.minimum((split + 1) * share, key_tiles)
        ):
            slot = key_tile * TILE_K + tl.arange(0, TILE_K)
            exists = slot < last
            at = row_of_cache + slot.to(tl.int64) * cache_slot
            key_block = tl.load(
                keys + at[None, :] + d[:, None], exists[None, :] & in_head[:, None], 0.0
            )
            scores = tl.dot(query, key_block, input_precision=PRECISION) * factor
            seen = (slot[None, :] < source[:, None]) & (slot[None, :] >= HIDDEN)
            scores = tl.where(seen, scores, NO_SCORE)
            higher = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(largest - higher)
            value_block = tl.load(
                values + at[:, None] + d[None, :],
                exists[:, None] & in_head[None, :],
                0.0,
            )
            part = tl.dot(
                weights.to(value_block.dtype), value_block, input_precision=PRECISION
            )
            mean = mean * shrink[:, None] + part
            total = total * shrink + tl.sum(weights, axis=1)
            largest = higher
        # 4. The mean of the values, and for a part of the keys the logarithm of its
        #    weight.
        place = number * HEADS + head
        if SPLITS == 1:
            result = (mean / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + place[:, None] * D + d[None, :], result, inside)
        else:
            place += split.to(tl.int64) * N * HEADS
            safe = tl.where(total == 0, 1.0, total)
            tl.store(
                out + place[:, None] * D + d[None, :], mean / safe[:, None], inside
            )
            log_sum = tl.where(total == 0, NO_SCORE, largest + tl.log2(safe))
            tl.store(log_sums + place, log_sum, valid)


@triton.jit
def _merge(
    parts, log_sums, out, n, D: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Store the mean of the splits of one input and head, by their weights."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    log_sum = tl.load(log_sums + split * n + place)
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    at = (split * n + place)[:, None] * D + d[None, :]
    part = tl.load(parts + at, mask=(d < D)[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + place * D + d, mean.to(out.dtype.element_ty), mask=d < D)
