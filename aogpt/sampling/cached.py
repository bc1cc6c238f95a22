"""Cached decoding: many targets predicted at once from the tokens that are known.

Words: place i is an index in the order, step i of model.py; slot i is where the key of
input i is cached; a sampling step (`Step`) is one pass, which may unmask many places.

Input i of a row holds the token of place i - 1 of its order and predicts place i; its
key and value go to slot i of the cache. Inputs 0 to `known` exist and are computed as
in training. Every later one is a copy of input `known`, the last known token, with a
target of its own; it sees the inputs before that one and itself, never another copy. So
each is predicted as in training under the order (known tokens, target). Example: the
order 4 1 5 0 2 3; the tokens of positions 4, 1 and 5 are known, those of 0 and 2 are
wanted next (cached = 0, known = 3, count = 5):

    input, slot  token         at position   predicts   sees slots
    0            [None]        0             4          0
    1            x4            5             1          0 1
    2            x1            2             5          0 1 2
    3            x5            6             0          0 1 2 3     first target
    4            x5            6             2          0 1 2   4   second: as input 3

Slots 0 to 3 hold true inputs and stay. Once x0 and x2 are drawn, the next pass computes
input 4 and the last target (cached = 4, known = 5, count = 2):

    4            x0            1             2          0 1 2 3 4
    5            x2            3             3          0 1 2 3 4 5

With queries that are a [MASK] (systems/mask_query.py), input i is the content of place
i where its token is known, and else the query of that place, whose key the content's
replaces later. It sees the same slots as above. The first of the two passes (cached =
0, known = 3, count = 5):

    input, slot  token         at position   predicts   sees slots
    0            x4            4             -          0
    1            x1            1             -          0 1
    2            x5            5             -          0 1 2
    3            [MASK]        0             0          0 1 2 3     first target
    4            [MASK]        2             2          0 1 2   4   second

Slots 0 to 2 stay (cached = 3, known = 5, count = 3 in the next pass). Speculation
verifies tokens whose contents are in the same pass: `Step.first`.

Shapes: B rows, T places, G steps; N inputs of all rows, flattened; W inputs of the
longest row."""

import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import (
    AOGPT,
    MLP,
    ModelConfig,
    Pass,
    attention,
    seen_by_copies,
    without_start,
)


@dataclass
class Step:
    """A pass of the model: the inputs that it computes, and what is drawn from it.

    Tensors (B,) on the device, by row, the rows of `rows`:

    cached: inputs in the cache
    known: tokens known, >= cached
    count: inputs that this pass computes, from `cached` on; 0 for a finished row
    candidates: places that it predicts
    size: places that it unmasks, fewer than the candidates only where the model chooses

    The integers are on the host and fix all shapes; they may be larger than needed."""

    rows: Tensor  # (5, B): cached, known, count, candidates, size
    inputs: int  # N >= count.sum()
    width: int  # W >= count.max()
    end: int  # cache slots that are read, >= (cached + count).max() where count > 0
    active: int  # rows with candidates: an encoder computes these alone
    all_candidates: int  # >= candidates.sum()
    all_size: int  # >= size.sum()
    unmask_by: str = "order"  # or a score, by which `size` of the candidates are chosen
    grouped: bool = True  # two streams: what is known but not cached is one group
    # Queries that are a [MASK]: the place of the first query of each row (B,), where
    # that is not `known`. The last `candidates` inputs of a row are queries then, each
    # of which sees the contents before it.
    first: Tensor | None = None

    def __post_init__(self):
        self.cached = self.rows[0]
        self.known = self.rows[1]
        self.count = self.rows[2]
        self.candidates = self.rows[3]
        self.size = self.rows[4]
        # Queries that are a [MASK]: the slots (B,) where they begin, behind contents.
        self.query_slot = self.known
        if self.first is not None:
            self.query_slot = self.cached + self.count - self.candidates


def make_steps(
    cached: Tensor,
    known: Tensor,
    count: Tensor,
    candidates: Tensor,
    size: Tensor,
    device: torch.device,
    unmask_by: str = "order",
    grouped: bool = True,
    first: Tensor | None = None,
) -> list[Step]:
    """Return G steps from LongTensors (G, B) on the host, which go to the device in one
    piece. The other arguments are fields of `Step`, the same for all."""
    ends = (cached + count) * (count > 0)  # rows that are finished read nothing
    # (G, 6): the integers of each step, in the order of the fields.
    numbers = torch.stack(
        [
            count.sum(1),
            count.amax(1),
            ends.amax(1),
            (candidates > 0).sum(1),
            candidates.sum(1),
            size.sum(1),
        ],
        dim=1,
    )
    rows = torch.stack([cached, known, count, candidates, size], dim=1).to(device)
    steps = []
    for step_rows, step_numbers in zip(rows, numbers.tolist(), strict=True):
        inputs, width, end, active, all_candidates, all_size = step_numbers
        step = Step(
            rows=step_rows,
            inputs=inputs,
            width=width,
            end=end,
            active=active,
            all_candidates=all_candidates,
            all_size=all_size,
            unmask_by=unmask_by,
            grouped=grouped,
            first=first,
        )
        steps.append(step)
    return steps


class KVCache:
    """The keys and values of B rows.

    keys, values: for each layer a tensor (B, length + 1, heads of keys, D/H), where
    length is the number of inputs that it holds. Slot i is that of input i. The last
    slot, `unused_slot`, is written to and never read."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        length: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.unused_slot = length
        self.inputs = 0  # that `predict_next` has put in
        self.keys = []
        self.values = []
        shape = (batch_size, length + 1, config.kv_heads, config.head_dim)
        # A tensor for each layer: compiled code would copy all of one that it writes a
        # part of.
        for _ in range(config.n_layer):
            self.keys.append(torch.zeros(shape, device=device, dtype=dtype))
            self.values.append(torch.zeros(shape, device=device, dtype=dtype))

    def lengthen(self, length: int) -> None:
        """Make room for `length` inputs, and keep what the cache holds."""
        more = length - self.unused_slot
        if more > 0:
            padding = (0, 0, 0, 0, 0, more)
            self.keys = [F.pad(keys, padding) for keys in self.keys]
            self.values = [F.pad(values, padding) for values in self.values]
            self.unused_slot = length


class CachedPass(Pass):
    """A pass of inputs that attend over the cache: those of all rows, flattened, as
    rows differ in their number."""

    targets: Tensor  # (N,) the position that each input predicts, or where it stands

    def __init__(
        self,
        model: AOGPT,
        order: Tensor,
        step: Step,
        cache: KVCache,
        tables: list[Tensor] | None,
        kernel: ModuleType | None = None,
    ):
        """kernel: `aogpt.sampling.attention_kernel`, or None to attend under masks."""
        config = model.config
        self.step = step
        self.cache = cache
        self.tables = tables
        self.table: Tensor | None = None  # of the layer
        # (N,) the row of each input, its number in the row, and where its key goes.
        self.row, self.column, self.slot = ragged(
            step.cached, step.count, total=step.inputs, unused=cache.unused_slot
        )
        self.place = self.slot
        if step.first is not None:
            self.place = places(step, self.slot, self.row)
        last = order.shape[1] - 1
        self.own = self.place.clamp(max=last)  # the place of the token of its step
        own_positions = order[self.row, self.own]
        targets = None
        adaln_input = None
        # adaLN: of each input, or of all positions where there are fewer of these
        self.per_input = step.inputs < config.block_size
        if model.mask_queries:
            self.positions = own_positions
        else:
            targets = own_positions
            # the place of the token that each holds: that of the step before
            source = torch.minimum(self.slot, step.known[self.row])
            self.before = (source - 1).clamp(min=0)
            shifted = order[self.row, self.before] + 1
            self.positions = torch.where(source == 0, 0, shifted)
            if tables is None and model.adaln_f is not None:
                adaln_input = model.target_vectors()
                if self.per_input:
                    adaln_input = adaln_input[targets]
        super().__init__(model, self.positions, targets, adaln_input=adaln_input)
        if model.query_stream:
            # An input, which predicts nothing, attends from where it stands.
            self.target_angles = self.query_angles
            self.query_angles = self.key_angles
        self.kernel = kernel
        if step.first is not None:
            self.kernel = None  # it takes the place of an input from its slot
        if self.kernel is None:
            self.make_masks(model)
        else:
            self.tiles = self.kernel.make_tiles(
                step,
                heads=config.n_head,
                key_heads=config.kv_heads,
                dtype=cache.keys[0].dtype,
            )

    def make_masks(self, model: AOGPT) -> None:
        """Make the mask of what inputs see of the first slots, (B, 1, W, end), and for
        two streams that of queries."""
        step = self.step
        config = model.config
        device = step.count.device
        columns = torch.arange(step.width, device=device)
        # (B, W) where each row's inputs are among all. What is past a row's end is not
        # read.
        starts = step.count.cumsum(0) - step.count
        self.index = (starts[:, None] + columns).clamp(max=step.inputs - 1)
        cached = step.cached.view(-1, 1, 1)
        known = step.known.view(-1, 1, 1)
        slots = cached + columns[:, None]  # (B, W, 1)
        # The input that each is, or is a copy of. It sees those before that one, and
        # itself.
        place = slots
        if step.first is not None:
            rows = torch.arange(len(step.count), device=device).view(-1, 1, 1)
            place = places(step, slots, rows)
        source = torch.minimum(place, known)
        keys = torch.arange(step.end, device=device)
        visible = seen_by_copies(keys, slots, source)
        if model.query_stream:
            if step.grouped and config.group_attention:
                # Inputs of a group see all of it.
                visible |= (cached > 0) & (slots <= known) & (keys <= known)
            # A query has no key of its own. It reads the true inputs, 0 to `source`.
            read = without_start(keys <= source, source, config)
            self.query_mask = read.unsqueeze(1)
        if self.hide_start:
            visible = without_start(visible, slots, config)
        self.mask = visible.unsqueeze(1)

    def enter(self, layer: int) -> None:
        """Take the cache and the table of a layer; the last one is the final norm."""
        if layer < len(self.cache.keys):
            self.keys = self.cache.keys[layer]
            self.values = self.cache.values[layer]
        if self.tables is not None:
            self.table = self.tables[layer]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put keys and values into the cache, and return what the queries read there,
        (N, D). q: (N, H, D/H); k, v: (N, heads of keys, D/H)."""
        k = k.to(self.keys.dtype)
        v = v.to(self.values.dtype)
        self.keys[self.row, self.slot] = k
        self.values[self.row, self.slot] = v
        if self.kernel is None:
            return self.attend_cache(q, self.mask)
        return self.kernel.attend(
            q.to(v.dtype),
            k,
            v,
            keys=self.keys,
            values=self.values,
            tiles=self.tiles,
            hide_start=self.hide_start,
        )

    def attend_queries(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what the queries of two streams read, (N, D): k and v are in the cache
        already."""
        return self.attend_cache(q, self.query_mask)

    def attend_cache(self, q: Tensor, mask: Tensor) -> Tensor:
        """Return what queries (N, H, D/H) read in the cache under a mask
        (B, 1, W, end), (N, D)."""
        keys = self.keys[:, : self.step.end]
        values = self.values[:, : self.step.end]
        y = attention(q[self.index], keys, values, mask)  # (B, W, D)
        return y[self.row, self.column]

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """Return adaLN's shifts, scales and gates, `parts` tensors (N, D)."""
        if self.table is not None:
            outputs = self.table[self.targets]
        else:
            outputs = linear(self.adaln_input)
            if not self.per_input:
                outputs = outputs[self.targets]
        return outputs.chunk(parts, dim=-1)

    def lookup(self, table: Tensor) -> Tensor:
        """Return the row of each input's target in a table of positions, (N, D)."""
        return table[self.targets]


def places(step: Step, slots: Tensor, row: Tensor) -> Tensor:
    """Return the places of the inputs that are in slots, each of a row of the batch,
    where a step says which its first queries are."""
    assert step.first is not None
    start = step.query_slot[row]
    return torch.where(slots < start, slots, step.first[row] + slots - start)


def cached_hidden(
    model: AOGPT,
    ordered: Tensor,
    order: Tensor,
    step: Step,
    cache: KVCache,
    tables: list[Tensor] | None = None,
    kernel: ModuleType | None = None,
) -> Tensor:
    """Return final hidden states (N, D), rows one after the other. Nothing waits for
    the device.

    ordered, order: (B, T) tokens and positions in prediction order; tokens from `known`
    on are ignored. tables: `modulation_tables`. kernel: of `CachedPass`."""
    p = CachedPass(model, order, step, cache, tables, kernel)
    if model.mask_queries:
        is_query = p.slot >= step.query_slot[p.row]
        queries: Any = model  # of systems/mask_query.py
        x = model.wte(ordered[p.row, p.own])
        x = torch.where(is_query.unsqueeze(1), queries.query.to(x.dtype), x)
        return model.run_blocks(queries.with_positions(x, p.positions), p)
    x = model.embed(ordered[p.row, p.before], p.positions)
    return model.run_blocks(x, p)


def inputs_kept(
    model: AOGPT, known: int | Tensor, targets_fixed: bool = True
) -> Any:  # as `known`
    """Return how many inputs are in the cache after a pass with `known` tokens, a
    number or a tensor of them.

    The key of the last known token depends on its target, so it stays only if that
    target was fixed in the pass, not where the model has yet to choose it. Inputs of
    two streams do not depend on targets. Where queries are a [MASK], the contents of
    all known tokens stay."""
    if model.mask_queries:
        return known
    if targets_fixed or model.query_stream:
        return known + 1
    return known


def predict_next(
    model: AOGPT, ordered: Tensor, order: Tensor, known: int, size: int, cache: KVCache
) -> Tensor:
    """Return the logits, float64 (size, V), of the next `size` places of one sequence,
    each given the first `known` tokens. `cache.inputs` counts the inputs that stay.

    ordered, order: (T,) tokens and positions in prediction order."""
    cached = cache.inputs
    count = known + size - cached
    numbers = [[cached], [known], [count], [size], [size]]
    step = Step(
        rows=torch.tensor(numbers, device=order.device),
        inputs=count,
        width=count,
        end=known + size,
        active=1,
        all_candidates=size,
        all_size=size,
    )
    hidden = cached_hidden(model, ordered[None], order[None], step, cache)
    cache.inputs = inputs_kept(model, known)
    return model.head_logits(hidden[-size:]).double()


def modulation_tables(model: AOGPT) -> list[Tensor] | None:
    """Return adaLN's outputs for all positions: (block_size, 6 D) of each block and
    (block_size, 2 D) of the final norm. None without adaLN."""
    if model.adaln_f is None:
        return None
    vectors = model.target_vectors()
    layers: list[Any] = [block.adaln for block in model.blocks]
    layers.append(model.adaln_f)
    return [layer(vectors) for layer in layers]


def float32_logits(model: AOGPT, x: Tensor) -> Tensor:
    """Return logits (n, V); on a GPU not rounded to the 8 bits of bfloat16, too few for
    an exact draw."""
    head = model.head
    if not (x.is_cuda and head.weight.dtype == torch.bfloat16):
        return model.head_logits(x)
    logits = torch.mm(x, head.weight.T, out_dtype=torch.float32)
    if head.bias is not None:
        logits.add_(head.bias)
    if model.excluded is not None:
        logits = model.without_excluded(logits)
    if model.config.is_encoder:
        return logits[..., : model.config.mask_token]
    return logits


def ragged(
    first: Tensor, counts: Tensor, total: int, unused: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten the next slots of each row, `counts` (B,) from `first` (B,) on. Return
    the row, the number in the row and the slot of `total` entries, a host number >=
    counts.sum(); further entries are in the slot `unused`. For first = 5 and 0, counts
    = 3 and 1 and a total of 5:

        row      0  0  0  1  1
        column   0  1  2  0  0
        slot     5  6  7  0  unused"""
    ends = counts.cumsum(0)
    starts = ends - counts
    index = torch.arange(total, device=counts.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=len(counts) - 1)
    valid = index < ends[-1]
    column = (index - starts[row]) * valid
    slot = torch.where(valid, first[row] + column, unused)
    return row, column, slot


# ---- the copy of the model that decodes ----------------------------------------------


# Narrower models, and single samples, are faster without packed layers, by up to a
# quarter; a model of 768 with 4 to 16 samples is faster with them, by as much.
WIDE = 512


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU with a second, packed copy of its
    weights."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: Tensor, activation: str = "none", variant: str = "") -> Tensor:
        """Return the outputs of inputs (..., D). activation: what is applied to them in
        the same operation, in this variant."""
        x = x.to(self.weight.dtype)  # under autocast it may come in another
        return torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, activation, [], variant
        )


class PackedMLP(nn.Module):
    """An MLP of packed layers whose GELU is computed with the first one."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.approximate = mlp.approximate
        self.fc = PackedLinear(mlp.fc)
        self.proj = PackedLinear(mlp.proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x, "gelu", self.approximate))


def decoding_copy(model: AOGPT, batch_size: int) -> AOGPT:
    """Return the model, or for several samples of a wide model on a CPU in float32 a
    copy with packed layers that shares all parameters."""
    weight = model.wte.weight
    is_float32_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    is_faster = batch_size > 1 and model.config.n_embd >= WIDE
    if not (is_float32_cpu and is_faster and torch.backends.mkldnn.is_available()):
        return model
    model = shared_copy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is MLP and child.gate is None:
                setattr(module, name, PackedMLP(child))
            elif isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    return model


def shared_copy(model: AOGPT) -> AOGPT:
    """Return a copy of the model that shares all parameters."""
    shared = {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared)
