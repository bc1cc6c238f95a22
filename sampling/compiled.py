"""Compiled steps: few shapes, and CUDA graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sampling.cached import Step

MAX_SHAPES = 256  # beyond its default limit of shapes torch.compile would run a block uncompiled
LEAST_END = 256  # slots of the cache that a compiled step reads


def many_shapes():
    """A context in which torch.compile keeps up to MAX_SHAPES graphs of a block."""
    limits = {"recompile_limit": MAX_SHAPES, "accumulated_recompile_limit": MAX_SHAPES}
    return torch._dynamo.config.patch(limits)


def few_shapes(step: Step, length: int, reads_all: bool) -> Step:
    """The step with its numbers rounded up to powers of two, as each new shape costs a compilation.
    length: slots of the cache; reads_all: by a kernel, which itself reads no more than it must."""
    names = "inputs", "width", "all_candidates", "all_size"
    sizes = {name: max(8, _power_of_two(getattr(step, name))) for name in names}
    end = length if reads_all else min(length, max(LEAST_END, _power_of_two(step.end)))
    return dataclasses.replace(step, end=end, active=step.rows.shape[1], **sizes)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


class GraphRunner:
    """Calls functions of a step; on a GPU each shape is recorded as a CUDA graph.

    The first step of a shape runs as it is, and its blocks are compiled meanwhile. The second is
    recorded, and from then on a step is a single launch instead of hundreds."""

    def __init__(self, device: torch.device):
        self.run_once, self.graphs = set(), {}
        self.rows = None  # where recorded graphs read their step
        # One graph runs at a time, so that all can use the same memory in passing. The stream is of
        # this device: by default all devices would share one, of the first of them.
        self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, function: Callable, step: Step, *more):
        """function(step) -> its result, which the next call with this shape overwrites. more: what
        else decides what the function does, beside tensors that stay where they are."""
        key = (function.__name__, *step.numbers(), *more)
        if key not in self.run_once:
            self.run_once.add(key)
            return function(step)
        if self.rows is None:
            self.rows = step.rows.clone()
        self.rows.copy_(step.rows)
        if key not in self.graphs:
            recorded = dataclasses.replace(step, rows=self.rows)
            self.graphs[key] = self.record(function, recorded)
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def record(self, function: Callable, step: Step) -> tuple[torch.cuda.CUDAGraph, object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = function(step)
        return graph, result
