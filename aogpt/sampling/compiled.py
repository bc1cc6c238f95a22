"""Compiled steps: few shapes, and CUDA graphs of a fixed ladder of sizes."""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..runtime.command_line import show
from .cached import Step

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


@dataclass(eq=False)
class Stage:
    """A part of a step, which can be recorded as CUDA graphs."""

    # function(engine, step, *tensors): tensor code. It is not bound to the engine,
    # which would then refer to itself and keep its memory until a garbage collection.
    function: Callable
    size: Callable[[Step], int]  # of a step: what the shapes of the stage follow from
    # Where graphs read the tensors that come from the stage before.
    buffers: tuple[Tensor, ...] = ()
    # What the stage depends on beside sizes and tensors: another value, another graph.
    variant: object = None


class GraphRunner:
    """The CUDA graphs of the stages of a step: a single launch instead of hundreds.

    A graph belongs to a stage and a size of the ladder, and serves all steps up to that
    size: it reads the numbers of the rows on the device. Graphs are recorded by
    `record_all` alone, before a plan begins; steps that have none run as they are,
    uncompiled."""

    def __init__(self, rows: Tensor):
        """rows: (5, B), as in `Step`."""
        self.rows = torch.zeros_like(rows)
        self.graphs: dict[tuple[Stage, int, object], tuple] = {}
        self.seconds = 0.0  # that recording took so far, compilation included
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, engine: Any, stage: Stage, step: Step, *tensors: Tensor) -> Any:
        """Return the result of a stage. Where a graph is recorded, the next step of
        this size overwrites it; all tensors beside the arguments stay at their
        addresses."""
        size = stage.size(step)
        rung = ladder(size)[-1]
        graph = self.graphs.get((stage, rung, stage.variant))
        fits = rung >= size
        for buffer, tensor in zip(stage.buffers, tensors, strict=True):
            fits = fits and len(tensor) <= len(buffer)
        if graph is None or not fits:
            with torch.compiler.set_stance("force_eager"):
                return stage.function(engine, step, *tensors)
        self.rows.copy_(step.rows)
        for buffer, tensor in zip(stage.buffers, tensors, strict=True):
            buffer[: len(tensor)].copy_(tensor)
        recorded, result = graph
        recorded.replay()
        return result

    def record_all(
        self, engine: Any, stages: list[tuple[Stage, int]], unmask_by: str
    ) -> None:
        """Record the ladder of each stage, given with the largest size that will come,
        apart from what is recorded already. unmask_by: of all steps that will come."""
        missing = []
        for stage, largest in stages:
            for size in ladder(largest):
                if (stage, size, stage.variant) not in self.graphs:
                    missing.append((stage, size))
        if not missing:
            return
        started = time.perf_counter()
        for stage, size in tqdm(missing, "recording CUDA graphs", leave=False):
            self.record(engine, stage, size, unmask_by)
        seconds = time.perf_counter() - started
        self.seconds += seconds
        show(
            f"recorded {len(missing)} CUDA graphs in {seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )

    def record(
        self, engine: Any, stage: Stage, size: int, unmask_by: str = "order"
    ) -> None:
        """Record the graph of a stage. What is recorded is a step of no inputs: all of
        its entries are padding, which no sample reads."""
        self.rows.zero_()
        step = Step(
            rows=self.rows,
            inputs=size,
            width=0,
            end=0,
            active=self.rows.shape[1],
            all_candidates=size,
            all_size=size,
            unmask_by=unmask_by,
        )
        function = functools.partial(stage.function, engine)
        function(step, *stage.buffers)  # compiles blocks, loads kernels
        graph = self.capture(function, step, stage.buffers)
        self.graphs[stage, size, stage.variant] = graph

    def capture(
        self, function: Callable, step: Step, tensors: tuple[Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Return the graph of function(step, *tensors), and its result."""
        if self.pool is None:
            # One graph runs at a time, so that all can use the same memory in passing.
            # The stream is of this device: by default all devices would share that of
            # the first.
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream(self.rows.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = function(step, *tensors)
        return graph, result
