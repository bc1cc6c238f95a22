"""Muon: momentum with orthogonalised updates, for the matrices of the blocks.

Keller Jordan et al., 2024, kellerjordan.github.io/posts/muon. Unlike torch.optim.Muon, it treats
queries, keys and values as three matrices, skips steps on the device, and divides the work among
processes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .parallel import local

# of Newton-Schulz
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
STACK_ELEMENTS = 2**26  # orthogonalised at once: bounds the memory of the iteration


class Muon(torch.optim.Optimizer):
    """For a weight W (rows, columns) with gradient G, momentum mu, rate lr and decay wd:

        M <- mu M + (1 - mu) G
        U <- sqrt(max(1, rows / columns)) orthogonal(mu M + (1 - mu) G)      Nesterov's form
        W <- (1 - lr wd) W - lr U

    The factor lets one rate serve several widths. M, the only state, is sharded like W. found_inf,
    a tensor on the device or None: 1 skips the step, as in fused AdamW."""

    def __init__(
        self,
        matrices: list[tuple[nn.Parameter, list[int]]],
        lr: float,
        weight_decay: float,
        momentum: float,
    ):
        """matrices: weights (rows, columns), with the rows of each part that is a matrix of
        its own (queries, keys, values), or of the whole."""
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        in_order = sorted(matrices, key=lambda matrix: len(matrix[1]))
        super().__init__([p for p, _ in in_order], defaults)
        self.rows_of_parts = dict(matrices)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        weights = [
            (p, group)
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        if not weights:
            return
        finite = None if self.found_inf is None else self.found_inf == 0
        updates = [self._momentum(p, group["momentum"], finite) for p, group in weights]
        sizes = [self.rows_of_parts[p] for p, _ in weights]
        updates = orthogonal_updates(updates, sizes)
        for (p, group), update in zip(weights, updates, strict=True):
            go = (
                1.0 if finite is None else finite.to(p.dtype)
            )  # 0: this step changes nothing
            local(p).mul_(1 - go * group["lr"] * group["weight_decay"])
            local(p).sub_(update * (go * group["lr"]))

    def _momentum(self, p: Tensor, momentum: float, finite: Tensor | None) -> Tensor:
        """Add the gradient to the average; returns Nesterov's update, sharded like p."""
        state = self.state[p]
        gradient = local(p.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average = local(state["momentum_buffer"])
        share = 1 - momentum
        if finite is not None:
            gradient = gradient.where(
                finite, torch.zeros_like(gradient)
            )  # NaN times 0 is NaN
            share = share * finite.to(gradient.dtype)
        average.lerp_(gradient, share)
        update = gradient.lerp(average, momentum)
        if isinstance(p, DTensor):
            whole = {"shape": p.shape, "stride": p.stride()}
            return DTensor.from_local(update, p.device_mesh, p.placements, **whole)
        return update


def orthogonalise(matrices: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """Orthogonalise the parts (rows, columns) of each matrix, `sizes` rows each, to singular values
    near sqrt(max(1, rows / columns))."""
    pieces = [
        piece for m, s in zip(matrices, sizes, strict=True) for piece in m.split(s)
    ]
    scales = [max(1, len(piece) / piece.shape[1]) ** 0.5 for piece in pieces]
    # Matrices of one shape, or transposed to it, are one batch.
    shapes: dict[tuple[int, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        shapes.setdefault(tuple(sorted(piece.shape)), []).append(i)
    for (rows, columns), members in shapes.items():
        size = max(1, STACK_ELEMENTS // (rows * columns))
        for some in (members[i : i + size] for i in range(0, len(members), size)):
            wide = [pieces[i] if len(pieces[i]) == rows else pieces[i].T for i in some]
            for i, result in zip(some, newton_schulz(torch.stack(wide)), strict=True):
                pieces[i] = result if len(pieces[i]) == rows else result.T
    remaining = (piece * scale for piece, scale in zip(pieces, scales, strict=True))
    return [torch.cat([next(remaining) for _ in s]) for s in sizes]


def newton_schulz(x: Tensor) -> Tensor:
    """(N, rows, columns) with rows <= columns -> the same shape: singular values of about 0.7 to
    1.2, in the same directions (Jordan et al., 2024)."""
    a, b, c = COEFFICIENTS
    dtype = x.dtype
    x = x / (
        x.norm(dim=(1, 2), keepdim=True) + 1e-7
    )  # no singular value is larger than this norm
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(
            gram, gram, gram, beta=b, alpha=c
        )  # b gram + c gram gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(dtype)


def orthogonal_updates(updates: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """`orthogonalise` with each matrix on one process, its owner, which sends the result to all.
    Rows of DTensors are gathered first, and every process keeps its own."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return orthogonalise([local(u) for u in updates], sizes)
    owners = assign([u.numel() * min(u.shape) for u in updates], world)
    rank = dist.get_rank()
    mine = {}
    for i, update in enumerate(updates):
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        if owners[i] == rank:
            mine[i] = whole
    made = orthogonalise(list(mine.values()), [sizes[i] for i in mine])
    made = dict(zip(mine, made, strict=True))
    results = []
    for i, update in enumerate(updates):
        result = (
            made[i].contiguous() if i in made else local(update).new_empty(update.shape)
        )
        dist.broadcast(result, src=owners[i])
        if isinstance(update, DTensor):  # FSDP2 divides rows as torch.chunk does
            result = dict(enumerate(result.chunk(world))).get(rank, result[:0])
        results.append(result)
    return results


def assign(costs: list[int], world: int) -> list[int]:
    """The process for each piece of work: costliest first, each to the least loaded process."""
    loads = [0] * world
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(world), key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners
