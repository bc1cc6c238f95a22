"""Compiled steps, for `Engine(compile=True)`: few shapes on a CPU, CUDA graphs of a
fixed ladder of sizes on a GPU. A graph takes the place of `predict`, `prefer` or
`unmask` of a `Batch`.

Shapes: B samples, T positions, N inputs of a pass, D width."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..model import AOGPT
from ..runtime import devices
from ..runtime.command_line import show
from .batch import Batch, CachedBatch, EncoderBatch
from .cached import Step, shared_copy
from .plans import Plan, group_sizes

MAX_SHAPES = 256  # beyond its default limit torch.compile would run a block uncompiled
LEAST_END = 256  # slots of the cache that a compiled step reads
LARGEST_GRAPH = 4096  # inputs: a larger step is bound by arithmetic, not by launches
SMALLEST_GRAPH = 8  # inputs, and what all sizes are multiples of
GROWTH = 1.25  # of a size of the ladder over the one before, at most, from 32 on


def many_shapes():
    """Return a context in which torch.compile keeps up to MAX_SHAPES graphs of a
    block."""
    limits = {"recompile_limit": MAX_SHAPES, "accumulated_recompile_limit": MAX_SHAPES}
    return torch._dynamo.config.patch(limits)


def few_shapes(step: Step, length: int) -> Step:
    """Return the step with its numbers rounded up to powers of two, as each new shape
    costs a compilation. length: slots of the cache."""
    end = round_up(step.end, LEAST_END)
    return dataclasses.replace(
        step,
        inputs=round_up(step.inputs, 8),
        width=round_up(step.width, 8),
        end=min(length, end),
        active=step.rows.shape[1],
        all_candidates=round_up(step.all_candidates, 8),
        all_size=round_up(step.all_size, 8),
    )


def round_up(number: int, least: int) -> int:
    """Return the number or `least`, up to a power of two."""
    return max(least, 1 << (number - 1).bit_length())


@functools.cache
def ladder(largest: int) -> list[int]:
    """Return the sizes of graphs for up to `largest` inputs, or up to LARGEST_GRAPH.
    The last one is at least that."""
    sizes = [SMALLEST_GRAPH]
    while sizes[-1] < min(largest, LARGEST_GRAPH):
        grown = int(sizes[-1] * GROWTH) // SMALLEST_GRAPH * SMALLEST_GRAPH
        sizes.append(max(grown, sizes[-1] + SMALLEST_GRAPH))
    return sizes


def compiled_copy(model: AOGPT) -> AOGPT:
    """Return a copy of the model that shares all parameters, with compiled blocks."""
    # With graphs the code serves any number of inputs: they are recorded with many.
    weight = model.wte.weight
    many_sizes = devices.can_run_triton(weight.device) and not model.config.is_encoder
    model = shared_copy(model)
    for block in model.blocks:  # they differ in weights alone: a graph serves all
        block.compile(dynamic=None if many_sizes else False)
    return model


def batch_class_for(model: AOGPT) -> type[Batch]:
    """Return the class of samples that a compiled model has in flight."""
    has_graphs = devices.can_run_triton(model.wte.weight.device)
    if model.config.is_encoder:
        return GraphedEncoderBatch if has_graphs else EncoderOfFewShapes
    return GraphedCachedBatch if has_graphs else CachedOfFewShapes


class CachedOfFewShapes(CachedBatch):
    """Samples whose passes have few shapes."""

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        return super().predict(few_shapes(step, self.cache.unused_slot))


class EncoderOfFewShapes(EncoderBatch):
    """Samples of an encoder whose passes have few shapes."""

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        return super().predict(few_shapes(step, self.T))


class Key(NamedTuple):
    """What a graph is of."""

    method: str
    variant: object  # beside the size: another value, another graph
    size: int  # of the ladder


class Graphed(Batch):
    """Samples whose steps are replayed from CUDA graphs: a single launch instead of
    hundreds.

    A graph serves all steps up to its size, as it reads the numbers of the rows on the
    device. Graphs are recorded before a plan begins alone; steps that have none run as
    they are, uncompiled. A graph reads hidden states and index from buffers, and its
    result is overwritten by the next step of its size."""

    def __init__(self, model: AOGPT, size: int, length: int, *settings: Any):
        super().__init__(model, size, length, *settings)
        self.rows = torch.zeros(5, size, dtype=torch.long, device=self.device)
        longest = ladder(size * (length + 1))[-1]
        hidden = torch.zeros(
            longest,
            model.config.n_embd,
            dtype=model.wte.weight.dtype,
            device=self.device,
        )
        self.buffers = (hidden, torch.zeros_like(self.order))
        self.graphs: dict[Key, tuple] = {}
        self.is_recorded = True  # False: measures what graphs are worth
        self.recording_seconds = 0.0  # compilation included
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None

    def begin(
        self, plan: Plan, tokens: Tensor, uniforms: Tensor, forced: Tensor | None
    ) -> None:
        super().begin(plan, tokens, uniforms, forced)
        if self.is_recorded and forced is None:  # at another address in each batch
            self.record_all(plan)

    def predict(self, step: Step) -> tuple[Tensor, Tensor]:
        # that of a CachedBatch or an EncoderBatch
        predict = super().predict  # type: ignore[safe-super]
        return self.replay("predict", predict, step, self.pass_size(step))

    def prefer(
        self, step: Step, hidden: Tensor, index: Tensor, by: Sequence[str] | None = None
    ) -> tuple[Tensor, Tensor]:
        function = super().prefer
        if by is not None:
            return function(step, hidden, index, by)
        size = step.all_candidates
        return self.replay("prefer", function, step, size, hidden, index)

    def unmask(self, step: Step, hidden: Tensor, index: Tensor) -> None:
        self.replay("unmask", super().unmask, step, step.all_size, hidden, index)

    def pass_size(self, step: Step) -> int:
        """Return what the shapes of a pass follow from."""
        return step.inputs

    def key(self, method: str, step: Step, size: int) -> Key:
        """Return the key of the graph that serves a step, or would."""
        variant = step.unmask_by if method == "prefer" else None
        return Key(method, variant, ladder(size)[-1])

    def replay(
        self, method: str, function: Callable, step: Step, size: int, *tensors: Tensor
    ) -> Any:
        """Return the result of a method, from its graph where there is one."""
        key = self.key(method, step, size)
        recorded = self.graphs.get(key)
        fits = key.size >= size and self.forced is None and step.first is None
        for buffer, tensor in zip(self.buffers, tensors, strict=False):
            fits = fits and len(tensor) <= len(buffer)
        if recorded is None or not fits:
            with torch.compiler.set_stance("force_eager"):
                return function(step, *tensors)
        self.rows.copy_(step.rows)
        for buffer, tensor in zip(self.buffers, tensors, strict=False):
            buffer[: len(tensor)].copy_(tensor)
        graph, result = recorded
        graph.replay()
        return result

    # ---- recording -------------------------------------------------------------------

    def record_all(self, plan: Plan) -> None:
        """Record what the steps of a plan may need, so that none has to wait. Its first
        step, which also computes what is given, runs without a graph if it is larger
        than others."""
        sizes = group_sizes(plan).sum(dim=0)  # (G,) positions that each step unmasks
        left = int(sizes.sum())
        largest = int(sizes.max()) if left else 0
        is_chosen = plan.pace is not None or plan.unmask_by != "order"
        # Those unmasked before, computed again with their targets, and the next.
        inputs = 2 * largest
        if is_chosen:  # every position that is left is a candidate
            inputs = left + self.B
        needed = {"predict": self.largest_pass(inputs)}
        if plan.pace is None and not plan.draft:
            needed["unmask"] = largest
            if is_chosen:
                needed["prefer"] = left
        missing = []
        for method, most in needed.items():
            for size in ladder(most) if most else []:
                step = self.step_of(size, plan.unmask_by)
                if self.key(method, step, size) not in self.graphs:
                    missing.append((method, step, size))
        if not missing:
            return
        started = time.perf_counter()
        for method, step, size in tqdm(missing, "recording CUDA graphs", leave=False):
            self.record(method, step, size)
        seconds = time.perf_counter() - started
        self.recording_seconds += seconds
        show(
            f"recorded {len(missing)} CUDA graphs in {seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    def largest_pass(self, inputs: int) -> int:
        """Return the largest size of a pass of up to these inputs, 0 if none can be
        recorded."""
        return inputs

    def step_of(self, size: int, unmask_by: str) -> Step:
        """Return a step of no inputs: all of its entries are padding, which no sample
        reads."""
        return Step(
            rows=self.rows,
            inputs=size,
            width=0,
            end=0,
            active=self.B,
            all_candidates=size,
            all_size=size,
            unmask_by=unmask_by,
        )

    def record(self, method: str, step: Step, size: int) -> None:
        """Record the graph of a method, of the class that this one replays."""
        self.rows.zero_()
        function = getattr(super(), method)
        tensors = () if method == "predict" else self.buffers
        function(step, *tensors)  # compiles blocks, loads kernels
        self.graphs[self.key(method, step, size)] = self.capture(
            function, step, tensors
        )

    def capture(
        self, function: Callable, step: Step, tensors: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the graph of function(step, *tensors), and its result."""
        if self.pool is None:
            # One graph runs at a time, so that all can use the same memory in passing.
            # The stream is of this device: by default all devices would share that of
            # the first.
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = function(step, *tensors)
        return graph, result


class GraphedCachedBatch(Graphed, CachedBatch):
    """Samples of a decoder whose steps are CUDA graphs, with ragged attention."""

    def __init__(self, model: AOGPT, size: int, length: int, *settings: Any):
        super().__init__(model, size, length, *settings)
        self.kernel = attention_kernel_for(model)

    def largest_pass(self, inputs: int) -> int:
        return inputs if self.kernel is not None else 0  # masks differ in their shapes


class GraphedEncoderBatch(Graphed, EncoderBatch):
    """Samples of an encoder whose steps are CUDA graphs."""

    def pass_size(self, step: Step) -> int:
        return 1  # a graph computes all rows

    def largest_pass(self, inputs: int) -> int:
        return 1

    def key(self, method: str, step: Step, size: int) -> Key:
        key = super().key(method, step, size)
        return key._replace(variant=self.padded) if method == "predict" else key


def attention_kernel_for(model: AOGPT) -> ModuleType | None:
    """Return the kernel of a model's ragged attention on a GPU; None: it attends under
    masks."""
    if model.config.is_encoder or model.separate_queries:
        return None
    from . import attention_kernel  # which imports Triton

    if not attention_kernel.can_attend(model.config.head_dim, model.wte.weight.dtype):
        return None
    return attention_kernel
