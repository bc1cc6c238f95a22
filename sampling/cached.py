"""Cached decoding: many targets predicted at once from the tokens that are known.

An item is one step i of one row; its key and value go to slot i of the cache. Inputs 0 to `known`
exist, as input i holds the token of step i - 1: those steps are computed as in training. Every
later step takes a copy of input `known`, the last known token, with a target of its own; it sees
the inputs before that one and itself, never another copy. So each is predicted as in training under
the order (known tokens, target). Example: the order 4 1 5 0 2 3; the tokens of positions 4, 1 and 5
are known, those of 0 and 2 are wanted next (cached = 0, known = 3, count = 5):

    step, slot   input token   at position   predicts   sees slots
    0            [None]        0             4          0
    1            x4            5             1          0 1
    2            x1            2             5          0 1 2
    3            x5            6             0          0 1 2 3     first target
    4            x5            6             2          0 1 2   4   second: a copy of input 3

Slots 0 to 3 hold true inputs and stay. Once x0 and x2 are drawn, the next pass computes input 4 and
the last target (cached = 4, known = 5, count = 2):

    4            x0            1             2          0 1 2 3 4
    5            x2            3             3          0 1 2 3 4 5

Shapes: B rows, T steps, N items of all rows one after the other, W items of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import AOGPT, ModelConfig, Pass, attention
from variants.scoring import without_start


@dataclass
class ParallelPass:
    """The steps that one pass computes: of every row `count` steps from `cached` on. Tensors are on
    the device; the three numbers, on the host, fix all shapes and may be larger than needed."""

    cached: Tensor  # (B,) inputs that the cache holds
    known: Tensor  # (B,) tokens that are known, >= cached; steps from `known` on predict the others
    count: Tensor  # (B,) steps computed; 0 for a row that is finished
    items: int  # N >= count.sum()
    width: int  # W >= count.max()
    length: int  # cache slots that are read, >= (cached + count).max()
    grouped: bool = (
        False  # two streams: what is known but not cached is one group, see `CachedPass`
    )


class KVCache:
    """Keys and values, allocated once: of every layer a tensor (B, length + 1, H, D/H) each. Slot i
    belongs to step i of a sequence; the last slot takes what nobody reads."""

    def __init__(self, config: ModelConfig, batch_size: int, length: int, device=None, dtype=None):
        self.unused_slot = length
        shape = (batch_size, length + 1, config.n_head, config.head_dim)
        # A tensor for each layer: compiled code would copy all of one that it writes a part of.
        layers = range(config.n_layer)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.kernel: Callable | None = None  # reads the cache without a mask; not for two streams

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.keys + self.values)


class CachedPass(Pass):
    """Items in rows of different lengths, which attend over the cache."""

    def __init__(
        self,
        model: AOGPT,
        order: Tensor,
        steps: ParallelPass,
        cache: KVCache,
        tables: list[Tensor] | None,
    ):
        super().__init__(model.config, None, None if tables else model.condition())
        self.steps, self.cache, self.tables = steps, cache, tables
        self.row, self.column, valid = ragged(steps.count, steps.items)
        # Items too many go to the unused slot.
        self.slot = torch.where(valid, steps.cached[self.row] + self.column, cache.unused_slot)
        self.targets = order[self.row, self.slot.clamp(max=order.shape[1] - 1)]  # (N,)
        self.target_angles = None
        starts = steps.count.cumsum(0) - steps.count
        columns = torch.arange(steps.width, device=order.device)
        # (B, W) the item of each cell of a rectangle, for attention; what is past a row's end
        # repeats another item, and is not read.
        self.item = (starts[:, None] + columns).clamp(max=steps.items - 1)
        if cache.kernel is None:
            self.mask, self.query_mask = self._masks(model.config, columns)

    def _masks(self, config: ModelConfig, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """What inputs, and the queries of two streams, see of the first slots (B, 1, W, length)."""
        cached, known = (v.view(-1, 1, 1) for v in (self.steps.cached, self.steps.known))
        slots = cached + columns[:, None]  # (B, W, 1)
        source = torch.minimum(slots, known)  # the input that a step is, or is a copy of
        keys = torch.arange(self.steps.length, device=cached.device)
        seen = (keys < source) | (keys == slots)
        if config.target != "two_stream":
            return without_start(seen, slots, config).unsqueeze(1), None
        if self.steps.grouped and config.group_attention:  # inputs of a group see all of it
            seen |= (cached > 0) & (slots <= known) & (keys <= known)
        # A query has no key of its own. It reads the true inputs, 0 to `source`.
        asked = without_start(keys <= source, source, config).unsqueeze(1)
        return without_start(seen, slots, config).unsqueeze(1), asked

    def enter(self, layer: int) -> None:
        if layer < len(self.cache.keys):
            self.keys, self.values = self.cache.keys[layer], self.cache.values[layer]
        self.table = self.tables[layer] if self.tables else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(N, H, D/H) each -> (N, D)."""
        self.keys[self.row, self.slot] = k.to(self.keys.dtype)
        self.values[self.row, self.slot] = v.to(self.values.dtype)
        if self.cache.kernel is None:
            return self._attend_cache(q, self.mask)
        s, q = self.steps, q.to(self.keys.dtype)
        rows = s.cached, s.known, s.count
        return self.cache.kernel(
            q, self.keys, self.values, *rows, s.width, self.hide_start
        ).flatten(1)

    def attend_queries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend_cache(q, self.query_mask)  # of two streams: k and v are cached already

    def _attend_cache(self, q: Tensor, mask: Tensor) -> Tensor:
        end = self.steps.length
        y = attention(q[self.item], self.keys[:, :end], self.values[:, :end], mask)
        return y[self.row, self.column]

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """From tables made once for a whole generation, else for these items alone if they are
        fewer than the positions."""
        if self.table is not None:
            return self.table[self.targets].chunk(parts, dim=-1)
        if len(self.targets) < len(self.condition):
            return linear(self.condition[self.targets]).chunk(parts, dim=-1)
        return linear(self.condition)[self.targets].chunk(parts, dim=-1)

    def lookup(self, table: Tensor) -> Tensor:
        return table[self.targets]


def cached_hidden(
    model: AOGPT,
    ordered: Tensor,
    order: Tensor,
    steps: ParallelPass,
    cache: KVCache,
    tables: list[Tensor] | None = None,
) -> Tensor:
    """(N, D) final hidden states, rows one after the other; the item of step i predicts order[i].

    ordered, order: (B, T) tokens and positions in prediction order; tokens from `known` on are
    ignored. Nothing waits for the device: shapes follow from the numbers of `steps` alone.
    """
    p = CachedPass(model, order, steps, cache, tables)
    source = torch.minimum(p.slot, steps.known[p.row])
    before = (source - 1).clamp(min=0)  # the step whose token that input holds
    in_positions = torch.where(source == 0, 0, order[p.row, before] + 1)
    return model.trunk(model.embed(ordered[p.row, before], in_positions), in_positions, p)


def modulation_tables(model: AOGPT) -> list[Tensor] | None:
    """adaLN's outputs for all positions, (block_size, 6 D) of each block and (block_size, 2 D) of
    the final norm; None without adaLN."""
    condition = model.condition()
    if condition is None:
        return None
    return [*(block.adaln(condition) for block in model.blocks), model.adaln_f(condition)]


def float32_logits(model: AOGPT, x: Tensor) -> Tensor:
    """Logits (n, V); on a GPU the sums of a bfloat16 product are not rounded to 8 bits, too few for
    an exact draw."""
    head = model.head
    if not (x.is_cuda and head.weight.dtype == torch.bfloat16):
        return model.head_logits(x)
    logits = torch.mm(x, head.weight.T, out_dtype=torch.float32)
    logits = logits if head.bias is None else logits.add_(head.bias)
    return logits[..., : model.config.mask_token] if model.config.is_encoder else logits


def ragged(counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lay rows of different lengths one after the other: row and column of `total` items, and
    whether they are valid. For counts 3 and 1 and a total of 5:

        row      0     0     0     1     1
        column   0     1     2     0     0
        valid    True  True  True  True  False    items past the last row

    counts: LongTensor (B,), items of each row. total: a host number >= counts.sum(), so that
    nothing waits for the device.
    """
    ends = counts.cumsum(0)
    starts = ends - counts
    item = torch.arange(total, device=counts.device)
    row = torch.searchsorted(ends, item, right=True).clamp(max=len(counts) - 1)
    valid = item < ends[-1]
    return row, (item - starts[row]) * valid, valid
