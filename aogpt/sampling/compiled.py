"""Compiled steps: few shapes, and CUDA graphs."""

import dataclasses
from collections.abc import Callable

import torch

from .cached import Step

MAX_SHAPES = (
    256  # beyond its default limit of shapes torch.compile would run a block uncompiled
)
LEAST_END = 256  # slots of the cache that a compiled step reads


def many_shapes():
    """A context in which torch.compile keeps up to MAX_SHAPES graphs of a block."""
    limits = {"recompile_limit": MAX_SHAPES, "accumulated_recompile_limit": MAX_SHAPES}
    return torch._dynamo.config.patch(limits)


def few_shapes(step: Step, length: int) -> Step:
    """The step with its numbers rounded up to powers of two, as each new shape costs a compilation.
    length: slots of the cache."""
    least = {
        "inputs": 8,
        "width": 8,
        "all_candidates": 8,
        "all_size": 8,
        "end": LEAST_END,
    }
    sizes = {
        k: max(n, 1 << (getattr(step, k) - 1).bit_length()) for k, n in least.items()
    }
    sizes |= {"end": min(length, sizes["end"]), "active": step.rows.shape[1]}
    return dataclasses.replace(step, **sizes)


class GraphRunner:
    """Calls functions of a step, each shape by a CUDA graph: the first step of a shape runs as it
    is, and its blocks are compiled meanwhile. The second is recorded, and from then on a step is a
    single launch instead of hundreds."""

    def __init__(self, device: torch.device):
        self.device = device
        self.run_once = set()
        self.graphs = {}
        self.rows = self.pool = self.stream = (
            None  # rows: where recorded graphs read their step
        )

    def __call__(self, function: Callable, step: Step, *more):
        """function(step) -> its result, which the next call with this shape overwrites. more: other
        hashable values that the function depends on; tensors must stay at their addresses."""
        numbers = (v for v in vars(step).values() if not torch.is_tensor(v))
        key = (function.__name__, *numbers, *more)
        if key not in self.run_once:
            self.run_once.add(key)
            return function(step)
        if self.rows is None:
            self.rows = step.rows.clone()
        self.rows.copy_(step.rows)
        if key not in self.graphs:
            self.graphs[key] = self.record(
                function, dataclasses.replace(step, rows=self.rows)
            )
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def record(
        self, function: Callable, step: Step
    ) -> tuple[torch.cuda.CUDAGraph, object]:
        if self.pool is None:
            # One graph runs at a time, so that all can use the same memory in passing. The stream
            # is of this device: by default all devices would share one, of the first of them.
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = function(step)
        return graph, result
