"""Cached decoding: many targets predicted at once from the tokens that are known.

Input i of a row holds the token of place i - 1 of its order and predicts place i; its key and value
go to slot i of the cache. Inputs 0 to `known` exist and are computed as in training. Every later
one is a copy of input `known`, the last known token, with a target of its own; it sees the inputs
before that one and itself, never another copy. So each is predicted as in training under the order
(known tokens, target). Example: the order 4 1 5 0 2 3; the tokens of positions 4, 1 and 5 are
known, those of 0 and 2 are wanted next (cached = 0, known = 3, count = 5):

    input, slot  token         at position   predicts   sees slots
    0            [None]        0             4          0
    1            x4            5             1          0 1
    2            x1            2             5          0 1 2
    3            x5            6             0          0 1 2 3     first target
    4            x5            6             2          0 1 2   4   second: a copy of input 3

Slots 0 to 3 hold true inputs and stay. Once x0 and x2 are drawn, the next pass computes input 4 and
the last target (cached = 4, known = 5, count = 2):

    4            x0            1             2          0 1 2 3 4
    5            x2            3             3          0 1 2 3 4 5

With queries that are a [MASK] (systems/mask_query.py), input i is the content of place i where its
token is known, and else the query of that place, whose key the content's replaces later. It sees
the same slots as above. The first of the two passes (cached = 0, known = 3, count = 5):

    input, slot  token         at position   predicts   sees slots
    0            x4            4             -          0
    1            x1            1             -          0 1
    2            x5            5             -          0 1 2
    3            [MASK]        0             0          0 1 2 3     first target
    4            [MASK]        2             2          0 1 2   4   second

Slots 0 to 2 stay (cached = 3, known = 5, count = 3 in the next pass). Speculation verifies tokens
whose contents are in the same pass: `Step.first`.

Words: place i is an index in the order, step i of model.py; slot i is where the key of input i is
cached; a sampling step (`Step`) is one pass, which may unmask many places.

Shapes: B rows, T places, G steps; N inputs of all rows, flattened; W inputs of the longest row."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import AOGPT, MLP, ModelConfig, Pass, attention
from ..scoring import without_start


@dataclass
class Step:
    """What one pass computes, and what is drawn from it. Tensors (B,) on the device, by row:

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
    # mask_query: the place of the first query of each row (B,), where that is not `known`. The last
    # `candidates` inputs of a row are queries then, each of which sees the contents before it.
    first: Tensor | None = None

    def __post_init__(self):
        self.cached, self.known, self.count, self.candidates, self.size = self.rows


def make_steps(
    cached,
    known,
    count,
    candidates,
    size,
    device,
    **more,
) -> list[Step]:
    """Steps of LongTensors (G, B) on the host, which go to the device in one piece."""
    ends = (cached + count) * (count > 0)  # rows that are finished read nothing
    sums = count.sum(1), count.amax(1), ends.amax(1), (candidates > 0).sum(1)
    numbers = torch.stack([*sums, candidates.sum(1), size.sum(1)], dim=1).tolist()
    rows = torch.stack([cached, known, count, candidates, size], dim=1).to(device)
    return [Step(r, *n, **more) for r, n in zip(rows, numbers, strict=True)]


def single_step(
    cached: int,
    known: int,
    count: int,
    size: int,
    device,
) -> Step:
    """The pass over one sequence that computes `count` inputs from `cached` on and unmasks
    `size` places after the `known` ones."""
    numbers = [[cached], [known], [count], [size], [size]]
    return Step(
        rows=torch.tensor(numbers, device=device),
        inputs=count,
        width=count,
        end=cached + count,
        active=1,
        all_candidates=size,
        all_size=size,
    )


class KVCache:
    """Keys and values, of every layer a tensor (B, length + 1, their heads, D/H) each. Slot i is
    that of input i; the last slot, `unused_slot`, is written to and never read."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        length: int,
        device=None,
        dtype=None,
    ):
        self.unused_slot = length
        shape = (batch_size, length + 1, config.kv_heads, config.head_dim)
        # A tensor for each layer: compiled code would copy all of one that it writes a part of.
        layers = range(config.n_layer)
        self.keys = [
            torch.zeros(
                shape,
                device=device,
                dtype=dtype,
            )
            for _ in layers
        ]
        self.values = [
            torch.zeros(
                shape,
                device=device,
                dtype=dtype,
            )
            for _ in layers
        ]

    def lengthen(self, length: int) -> None:
        """Make room for `length` inputs. What the cache holds is kept."""
        more = length - self.unused_slot
        if more > 0:
            self.keys = [F.pad(k, (0, 0, 0, 0, 0, more)) for k in self.keys]
            self.values = [F.pad(v, (0, 0, 0, 0, 0, more)) for v in self.values]
            self.unused_slot = length


class CachedPass(Pass):
    """Inputs of rows that differ in number, flattened, which attend over the cache."""

    def __init__(
        self,
        model: AOGPT,
        order: Tensor,
        step: Step,
        cache: KVCache,
        tables,
        kernel=None,
    ):
        """kernel: `aogpt.sampling.attention_kernel`, or None to attend under masks."""
        config = model.config
        super().__init__(config, None)
        self.step = step
        self.cache = cache
        self.tables = tables
        self.row, self.column, valid = ragged(step.count, step.inputs)
        # Padding goes to the unused slot.
        self.slot = torch.where(
            valid, step.cached[self.row] + self.column, cache.unused_slot
        )
        self.place = self.places(self.slot, self.row)
        # (N,) the position that each input predicts, or where it stands
        self.targets = order[self.row, self.place.clamp(max=order.shape[1] - 1)]
        self.target_angles = None
        self.kernel = kernel
        if step.first is not None:
            self.kernel = None  # it takes the place of an input from its slot
        if self.kernel is None:
            columns = torch.arange(step.width, device=order.device)
            # (B, W) where each row's inputs are; what is past a row's end is not read.
            starts = step.count.cumsum(0) - step.count
            self.index = (starts[:, None] + columns).clamp(max=step.inputs - 1)
            self.mask, self.query_mask = self._masks(config, columns)
        else:
            dtype = cache.keys[0].dtype
            self.tiles = kernel.make_tiles(step, config.n_head, config.kv_heads, dtype)
        self.per_input = step.inputs < config.block_size
        if tables is None and config.has_adaln:
            condition = model.condition()
            self.condition = condition[self.targets] if self.per_input else condition

    def places(self, slots: Tensor, row: Tensor) -> Tensor:
        """The places of the inputs that are in slots, each of a row of the batch."""
        first = self.step.first
        if first is None:
            return slots
        step = self.step
        # Contents end, and queries begin, at this slot.
        end = (step.cached + step.count - step.candidates)[row]
        return torch.where(slots < end, slots, first[row] + slots - end)

    def _masks(
        self, config: ModelConfig, columns: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What inputs, and the queries of two streams, see of the first slots (B, 1, W, end)."""
        cached, known = (v.view(-1, 1, 1) for v in (self.step.cached, self.step.known))
        slots = cached + columns[:, None]  # (B, W, 1)
        rows = torch.arange(len(cached), device=cached.device).view(-1, 1, 1)
        # The input that each is, or is a copy of; contents and queries see those before.
        source = torch.minimum(self.places(slots, rows), known)
        keys = torch.arange(self.step.end, device=cached.device)
        visible = (keys < source) | (keys == slots)
        if config.target != "two_stream":
            return without_start(visible, slots, config).unsqueeze(1), None
        if (
            self.step.grouped and config.group_attention
        ):  # inputs of a group see all of it
            visible |= (cached > 0) & (slots <= known) & (keys <= known)
        # A query has no key of its own. It reads the true inputs, 0 to `source`.
        of_query = without_start(keys <= source, source, config).unsqueeze(1)
        return without_start(visible, slots, config).unsqueeze(1), of_query

    def enter(self, layer: int) -> None:
        if layer < len(self.cache.keys):
            self.keys = self.cache.keys[layer]
            self.values = self.cache.values[layer]
        self.table = self.tables[layer] if self.tables else None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """(N, H, D/H) each -> (N, D)."""
        k = k.to(self.keys.dtype)
        v = v.to(self.values.dtype)
        self.keys[self.row, self.slot] = k
        self.values[self.row, self.slot] = v
        if self.kernel is None:
            return self._attend_cache(q, self.mask)
        q = q.to(v.dtype)
        return self.kernel.attend(
            q, k, v, self.keys, self.values, self.tiles, self.hide_start
        )

    def attend_queries(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        return self._attend_cache(
            q, self.query_mask
        )  # of two streams: k and v are cached already

    def _attend_cache(self, q: Tensor, mask: Tensor) -> Tensor:
        end = self.step.end
        y = attention(
            q[self.index], self.keys[:, :end], self.values[:, :end], mask
        )  # (B, W, D)
        return y[self.row, self.column]

    def modulation(self, linear: nn.Linear, parts: int) -> tuple[Tensor, ...]:
        """From a table made once; or of these inputs' targets; or of all positions, if fewer."""
        if self.table is not None:
            return self.table[self.targets].chunk(parts, dim=-1)
        outputs = linear(self.condition)
        return (outputs if self.per_input else outputs[self.targets]).chunk(
            parts, dim=-1
        )

    def lookup(self, table: Tensor) -> Tensor:
        return table[self.targets]


def cached_hidden(
    model: AOGPT,
    ordered: Tensor,
    order: Tensor,
    step: Step,
    cache: KVCache,
    tables=None,
    kernel=None,
) -> Tensor:
    """(N, D) final hidden states, rows one after the other. ordered, order: (B, T) tokens and
    positions in prediction order; tokens from `known` on are ignored. tables: `modulation_tables`.
    kernel: of `CachedPass`. Nothing waits for the device."""
    p = CachedPass(model, order, step, cache, tables, kernel)
    if model.config.target == "mask_query":
        is_query = p.slot >= step.known[p.row]
        if step.first is not None:
            is_query = p.slot >= (step.cached + step.count - step.candidates)[p.row]
        x = model.wte(ordered[p.row, p.place.clamp(max=order.shape[1] - 1)])
        x = torch.where(is_query.unsqueeze(1), model.query.to(x.dtype), x)
        return model.trunk(model.with_positions(x, p.targets), p.targets, p)
    source = torch.minimum(p.slot, step.known[p.row])
    before = (source - 1).clamp(min=0)  # the place whose token that input holds
    in_positions = torch.where(source == 0, 0, order[p.row, before] + 1)
    return model.trunk(
        model.embed(ordered[p.row, before], in_positions), in_positions, p
    )


def modulation_tables(model: AOGPT) -> list[Tensor] | None:
    """adaLN's outputs for all positions, (block_size, 6 D) of each block and (block_size, 2 D) of
    the final norm; None without adaLN."""
    if not model.config.has_adaln:
        return None
    condition = model.condition()
    return [
        *(block.adaln(condition) for block in model.blocks),
        model.adaln_f(condition),
    ]


def float32_logits(model: AOGPT, x: Tensor) -> Tensor:
    """Logits (n, V); on a GPU not rounded to the 8 bits of bfloat16, too few for an exact draw."""
    head = model.head
    if not (x.is_cuda and head.weight.dtype == torch.bfloat16):
        return model.head_logits(x)
    logits = torch.mm(x, head.weight.T, out_dtype=torch.float32)
    logits = logits if head.bias is None else logits.add_(head.bias)
    return logits[..., : model.config.mask_token] if model.config.is_encoder else logits


def ragged(counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten rows of `counts` (B,) entries: row, column and whether they are valid, of `total`
    entries, a host number >= counts.sum(). For counts 3 and 1 and a total of 5:

        row      0     0     0     1     1
        column   0     1     2     0     0
        valid    True  True  True  True  False"""
    ends = counts.cumsum(0)
    starts = ends - counts
    index = torch.arange(total, device=counts.device)
    row = torch.searchsorted(ends, index, right=True).clamp(max=len(counts) - 1)
    valid = index < ends[-1]
    return row, (index - starts[row]) * valid, valid


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU: for few rows 2 to 4 times as fast."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(
        self,
        x: Tensor,
        then: str = "none",
        variant: str = "",
    ) -> Tensor:
        """then: an activation that is applied to the output where it is computed."""
        x = x.to(self.weight.dtype)  # under autocast it may come in another
        return torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, then, [], variant
        )


class PackedMLP(nn.Module):
    def __init__(self, mlp: MLP):
        super().__init__()
        self.approximate = mlp.approximate
        self.fc = PackedLinear(mlp.fc)
        self.proj = PackedLinear(mlp.proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x, "gelu", self.approximate))


def decoding_copy(
    model: AOGPT,
    compile: bool,
    many_sizes: bool = False,
) -> AOGPT:
    """The model, sharing all parameters, with compiled blocks or (CPU, float32) packed layers.
    many_sizes: compile code that serves any number of inputs."""
    weight = model.wte.weight
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    # What would be converted in every pass.
    if model.angles is not None:
        model.angles = model.angles.to(torch.promote_types(weight.dtype, torch.float32))
    if compile:
        for block in (
            model.blocks
        ):  # they differ in weights alone: a graph of a shape serves all
            block.compile(dynamic=None if many_sizes else False)
    elif weight.device.type == "cpu" and weight.dtype == torch.float32:
        if torch.backends.mkldnn.is_available():
            for module in list(model.modules()):
                for name, child in list(module.named_children()):
                    if type(child) is MLP and child.gate is None:
                        setattr(module, name, PackedMLP(child))
                    elif isinstance(child, nn.Linear):
                        setattr(module, name, PackedLinear(child))
    return model
