"""What one step of generation asks of the model: how many inputs it feeds, and what they predict.

A decoder remembers what it was fed, in a KV cache; an encoder is fed everything anew. `Engine` does
the rest, alike for both, with a hidden state for every position that a step may unmask.

Shapes: B samples in flight, T positions, G groups, N items (inputs of a pass), D width.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model import AOGPT, ModelConfig
from sampling.cached import KVCache, ParallelPass, cached_hidden, modulation_tables
from sampling.plans import Plan, group_sizes
from variants import Encoder, log_linear_noise


def triton_kernels(device: torch.device):
    """`sampling.kernels` on a GPU with Triton, else None: they do the same in fewer launches."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from sampling import kernels

    return kernels


class Step(NamedTuple):
    """What every row does in a step: LongTensors (B,), or (G, B) for all steps of a plan."""

    cached: Tensor
    """Inputs in the cache before the step."""
    known: Tensor
    """Tokens known before the step."""
    count: Tensor
    """Inputs fed; 0 for a row that is finished."""
    size: Tensor
    """Positions unmasked."""


class StepShape(NamedTuple):
    """Numbers that fix the shapes of a step's tensors. They are known on the host before the step,
    so that nothing waits for the device."""

    items: int
    """Inputs fed, all rows together."""
    width: int
    """Inputs of the row that has most."""
    unmasked: int
    """Positions unmasked, all rows together."""
    candidates: int
    """Positions that could be, where the model chooses among all that are left; else 0."""


def modulation_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of adaLN's modulations of all positions (`AOGPT.modulations`)."""
    return config.block_size * (6 * config.n_layer + 2) * config.n_embd * dtype.itemsize


def keeps_modulations(config: ModelConfig, cache: KVCache, dtype: torch.dtype) -> bool:
    """Whether decoding computes the modulations of all positions once and keeps them. For a few
    short samples they are more than the whole cache: then each pass computes those of the positions
    that it predicts."""
    return modulation_bytes(config, dtype) <= cache.nbytes


class DecoderPasses(nn.Module):
    """Passes of a decoder: a step feeds the tokens that are new since the last step, and a copy of
    the last known one for every position that it predicts (see `AOGPT.parallel_hidden`)."""

    def __init__(self, model: AOGPT, batch_size: int, length: int, kernels=None):
        super().__init__()
        weight = model.wte.weight
        self.model = model
        self.cache = KVCache(model.config, batch_size, length, weight.device, weight.dtype)
        self.two_stream = model.config.target == "two_stream"
        # Its sums are float32, and it knows neither groups nor queries without a key of their own.
        if kernels is not None and weight.dtype != torch.float64 and not self.two_stream:
            self.cache.kernel = kernels.attend_cached
        kept = keeps_modulations(model.config, self.cache, weight.dtype)
        self.modulations = modulation_tables(model) if kept else None

    def cached_and_count(self, plan: Plan, known: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """`cached` and `count` of all steps, (G, B); as in the example of
        `AOGPT.parallel_hidden`."""
        chosen = plan.unmask_by != "order"
        cached = torch.cat([torch.zeros_like(known[:1]), self.kept(known[:-1], chosen)])
        # Where the model chooses, every position left is a candidate.
        last = plan.length if chosen else known + size
        return cached, (size > 0) * self.fed(cached, last, plan.length)

    def fed(self, cached: Tensor, last: Tensor, length: Tensor) -> Tensor:
        """Inputs that a pass is fed which predicts the slots up to `last`."""
        return last - cached

    def kept(self, known: Tensor, chosen: bool) -> Tensor:
        """Inputs in the cache after a step that began with `known` tokens. chosen: by the model.

        The inputs of known tokens stay, and so does the first target of a step (slot 3 of the
        example): of its copies it alone is the true input of its slot. Where its target was yet to
        be chosen it stays in two_stream only, whose inputs are not told their targets."""
        return known + (not chosen or self.two_stream)

    def extents(self, steps: Step, length: int, compiled: bool) -> list[int]:
        """How much each step's pass covers, for a decoder: slots of the cache that are read.
        Compiled, a multiple of 256 or all (`length`), so that it seldom changes; and always all
        with a kernel, which itself reads no more of a row than it must."""
        if self.cache.kernel is not None:
            return [length] * len(steps.cached)
        slots = (steps.cached + steps.count).amax(dim=1).tolist()
        if compiled:
            return [min(length, -(-n // 256) * 256) for n in slots]
        return slots

    def predict(
        self,
        tokens: Tensor,
        order: Tensor,
        length: Tensor | None,
        step: Step,
        shape: StepShape,
        extent: int,
        grouped: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """One pass.

        Args:
            tokens, order: (B, T + 1), in prediction order; the last column means nothing.
            length: (B,) if some rows are shorter than T, else None.
            step, shape: what is fed; `shape` may be larger than needed.
            extent: as `extents` gives it.
            grouped: see `ParallelPass`.

        Returns: hidden states (N, D), and the item (B, T + 1) that predicts each entry of the
        order, which means something for those fed as targets.
        """
        one_pass = ParallelPass(
            *(step.cached, step.known, step.count, shape.items, shape.width, extent), grouped
        )
        hidden = cached_hidden(
            self.model, tokens, order[:, :-1], one_pass, self.cache, self.modulations
        )
        # Items stand row after row, those of a row in the order of their slots from `cached` on.
        slot = torch.arange(order.shape[1], device=order.device)
        row_start = step.count.cumsum(0) - step.count
        item = row_start[:, None] + (slot - step.cached[:, None])
        return hidden, item.clamp(0, shape.items - 1)


class EncoderPasses(nn.Module):
    """Passes of an encoder: full attention over all positions, [MASK] where a token is not known,
    of the rows that unmask something. Methods as those of `DecoderPasses`."""

    cache = None

    def __init__(self, model: Encoder, batch_size: int, length: int, kernels=None):
        super().__init__()
        self.model = model

    def cached_and_count(self, plan: Plan, known: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(known), (size > 0) * plan.length

    def fed(self, cached: Tensor, last: Tensor, length: Tensor) -> Tensor:
        return length

    def kept(self, known: Tensor, chosen: bool) -> Tensor:
        return torch.zeros_like(known)

    def extents(self, steps: Step, length: int, compiled: bool) -> list[int]:
        """For an encoder: rows that are fed, those that unmask something; compiled, all."""
        if compiled:
            return [steps.size.shape[1]] * len(steps.size)
        return (steps.size > 0).sum(dim=1).tolist()

    def predict(
        self, tokens, order, length, step, shape, extent, grouped=False
    ) -> tuple[Tensor, Tensor]:
        T = order.shape[1] - 1
        # 1. The tokens in sequence order, [MASK] where they are not known.
        known = torch.arange(T, device=order.device) < step.known[:, None]
        ordered = torch.where(known, tokens[:, :T], self.model.config.mask_token)
        sequence = torch.empty_like(ordered).scatter_(1, order[:, :T], ordered)
        # 2. The rows that unmask something, first of all rows.
        rows = (step.size == 0).to(torch.uint8).argsort(stable=True)[:extent]
        lengths = torch.full_like(rows, T) if length is None else length[rows]
        # 3. The noise level of the share of masked tokens. In float64: bfloat16 would round a share
        #    near 1 to an infinite level.
        sigma = None
        if self.model.config.noise:
            masked = 1 - step.known[rows].double() / lengths.clamp(min=1)
            sigma = log_linear_noise(masked)
        hidden = self.model.hidden(sequence[rows], sigma, None if length is None else lengths)
        # 4. The hidden state of position p of the i-th row fed is item i T + p.
        starts = torch.arange(len(rows), device=order.device) * T
        row_start = torch.zeros_like(step.known).scatter_(0, rows, starts)
        return hidden.flatten(0, 1), row_start[:, None] + order


Passes = DecoderPasses | EncoderPasses


def steps_of(plan: Plan, passes: Passes) -> Step:
    """All steps of a plan, (G, B), on the host."""
    size = group_sizes(plan).T
    given = plan.given_positions().sum(dim=1)
    known = given + size.cumsum(dim=0) - size
    cached, count = passes.cached_and_count(plan, known, size)
    return Step(cached, known, count, size)


def shapes_of(plan: Plan, steps: Step) -> list[StepShape]:
    """The shape that each step needs."""
    candidates = torch.zeros_like(steps.size)
    if plan.unmask_by != "order":
        candidates = (steps.size > 0) * (plan.length - steps.known)
    numbers = (
        steps.count.sum(dim=1),
        steps.count.amax(dim=1),
        steps.size.sum(dim=1),
        candidates.sum(dim=1),
    )
    return [StepShape(*shape) for shape in torch.stack(numbers, dim=1).tolist()]
