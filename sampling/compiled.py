"""Steps that are compiled: few shapes, blocks compiled once for all layers and, on a GPU, whole
steps recorded as CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from model import AOGPT
from sampling.passes import Step, StepShape

MAX_SHAPES = 256  # beyond its default limit of shapes torch.compile would run a block uncompiled


def with_compiled_blocks(model: AOGPT) -> AOGPT:
    """The model with compiled blocks, sharing all parameters.

    Blocks differ in their weights alone, so that one graph of a shape serves all of them, and the
    time to compile does not grow with the layers.
    """
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for block in model.blocks:
        block.compile(dynamic=False)
    return model


class StepRunner:
    """Runs steps whose model has compiled blocks; on a GPU each shape is recorded as a CUDA graph.

    The first step of a shape runs as it is, and its blocks are compiled meanwhile. The second is
    recorded, and from then on a step is a single launch instead of hundreds: a GPU is faster at the
    work of a step than a CPU at asking for it.
    """

    def __init__(self, device: torch.device, graphs: bool):
        self.records = graphs and device.type == "cuda"
        self.run_once: set = set()
        self.graphs: dict = {}
        self.step: Tensor | None = None  # where recorded graphs read their step
        if self.records:
            # One graph runs at a time, so that all can use the same memory in passing. The stream
            # is of this device: by default all devices would share one, of the first of them.
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(device)

    def __call__(self, function: Callable, step: Tensor, *shape):
        """function(Step, *shape) -> its result, which the next call with this shape overwrites.

        step: LongTensor (4, B), the fields of a `Step`. shape: what fixes the shapes of all
        tensors, and all else that is not in `step` or in tensors that stay where they are.
        """
        with torch._dynamo.config.patch(
            recompile_limit=MAX_SHAPES, accumulated_recompile_limit=MAX_SHAPES
        ):
            key = (function.__name__, *shape)
            if not self.records or key not in self.run_once:
                self.run_once.add(key)
                return function(Step(*step), *shape)
            if self.step is None:
                self.step = step.clone()
            self.step.copy_(step)
            if key not in self.graphs:
                self.graphs[key] = self._record(function, shape)
            graph, result = self.graphs[key]
            graph.replay()
            return result

    def _record(self, function: Callable, shape: tuple) -> tuple[torch.cuda.CUDAGraph, object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = function(Step(*self.step), *shape)
        return graph, result


class CompiledShapes:
    """The few shapes that compiled steps have.

    Groups of one plan differ in size, and each new shape costs a compilation: a step takes a shape
    that is there if it is large enough and not more than four times too large.
    """

    def __init__(self):
        self.made: list[StepShape] = []

    def prepare(self, needs: list[StepShape]) -> None:
        """Make the shapes that a list of steps will take: one for the largest and all down to a
        quarter of it, one for the largest of the rest, ..."""
        waiting = sorted(needs, key=max, reverse=True)
        while waiting := [need for need in waiting if self._find(need) is None]:
            largest = self._rounded(max(waiting[0]))
            level = [need for need in waiting if not self._too_large(largest, need)]
            columns = zip(*level, strict=True)
            self.made.append(StepShape(*(self._rounded(max(numbers)) for numbers in columns)))

    def fit(self, need: StepShape) -> StepShape:
        """The shape that a step takes."""
        if self._find(need) is None:
            self.prepare([need])
        return self._find(need)

    def _find(self, need: StepShape) -> StepShape | None:
        for shape in self.made:
            enough = all(n <= size for n, size in zip(need, shape, strict=True))
            if enough and not self._too_large(max(shape), need):
                return shape
        return None

    @staticmethod
    def _too_large(largest: int, need: StepShape) -> bool:
        """Whether a step should not take a shape whose largest number is this."""
        return largest > 4 * max(*need, 8)

    @staticmethod
    def _rounded(n: int) -> int:
        """Up to a multiple of 8, and to three significant bits: 8, 16, ..., 64, 80, 96, 112, 128,
        160, ..."""
        unit = 1 << max(n.bit_length() - 3, 3)
        return -(-n // unit) * unit
