"""Muon: momentum with orthogonalised updates, for the matrices of the blocks.

Keller Jordan et al., 2024, kellerjordan.github.io/posts/muon. Unlike torch.optim.Muon,
it treats queries, keys and values as three matrices, skips steps on the device, and
divides the work among processes."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..model import Matrices

# of Newton-Schulz
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(torch.optim.Optimizer):
    """The optimizer Muon. For a weight W (rows, columns) with gradient G, momentum mu,
    rate lr and decay wd:

        M <- mu M + (1 - mu) G
        U <- sqrt(max(1, rows / columns)) orthogonal(mu M + (1 - mu) G)   (Nesterov)
        W <- (1 - lr wd) W - lr U

    The factor lets one rate serve several widths. M, the only state, is sharded like W.
    found_inf, a tensor on the device or None: 1 skips the step, as in fused AdamW."""

    def __init__(
        self, matrices: Matrices, lr: float, weight_decay: float, momentum: float
    ):
        """Make the optimizer. matrices: weights (rows, columns), with the rows of each
        part that is a matrix of its own (queries, keys, values), or of the whole."""
        defaults = {
            "lr": lr,
            "peak_lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
        }
        in_order = sorted(matrices, key=lambda matrix: len(matrix[1]))
        super().__init__([p for p, _ in in_order], defaults)
        self.rows_of_parts = dict(matrices)
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no caller passes a closure
        """Update all weights from their gradients."""
        finite = None
        if self.found_inf is not None:
            finite = self.found_inf == 0
        weights = []
        updates = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update = self._momentum(p, p.grad, group["momentum"], finite)
                    weights.append((p, group))
                    updates.append(update)
        if not weights:
            return
        sizes = [self.rows_of_parts[p] for p, _ in weights]
        if dist.is_initialized() and dist.get_world_size() > 1:
            updates = orthogonal_updates(updates, sizes)
        else:
            updates = orthogonalise([local(update) for update in updates], sizes)
        for (p, group), update in zip(weights, updates, strict=True):
            rate = group["lr"]
            if finite is not None:
                rate = finite.to(p.dtype) * rate  # 0: this step changes nothing
            weight = local(p)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.sub_(update * rate)

    def _momentum(
        self, p: Tensor, gradient: Tensor, momentum: float, finite: Tensor | None
    ) -> Tensor:
        """Add the gradient to the average. Returns Nesterov's update, sharded like
        p."""
        state = self.state[p]
        gradient = local(gradient)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average = local(state["momentum_buffer"])
        share: Tensor | float = 1 - momentum
        if finite is not None:
            # NaN times 0 is NaN.
            gradient = gradient.where(finite, torch.zeros_like(gradient))
            share = share * finite.to(gradient.dtype)
        average.lerp_(gradient, share)
        update = gradient.lerp(average, momentum)
        if not hasattr(p, "to_local"):
            return update
        from torch.distributed.tensor import DTensor

        assert isinstance(p, DTensor)
        return DTensor.from_local(
            update, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, without copying it. A DTensor is told
    without importing its class."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def orthogonalise(matrices: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """Return the matrices with their parts (rows, columns), `sizes` rows each,
    orthogonalised to singular values near sqrt(max(1, rows / columns))."""
    parts: list[Tensor] = []
    for matrix, rows in zip(matrices, sizes, strict=True):
        parts += matrix.split(rows)
    # Matrices of one shape, or transposed to it, are one batch.
    numbers_by_shape: dict[tuple[int, int], list[int]] = {}
    for number, part in enumerate(parts):
        shape = (min(part.shape), max(part.shape))
        numbers_by_shape.setdefault(shape, []).append(number)
    for numbers in numbers_by_shape.values():
        wide = []
        for number in numbers:
            part = parts[number]
            wide.append(part.T if part.shape[0] > part.shape[1] else part)
        results = newton_schulz(torch.stack(wide))
        for number, result in zip(numbers, results, strict=True):
            rows_of_part, columns = parts[number].shape
            if rows_of_part > columns:
                result = result.T
            parts[number] = result * max(1, rows_of_part / columns) ** 0.5
    whole = []
    first = 0
    for rows in sizes:
        end = first + len(rows)
        whole.append(torch.cat(parts[first:end]))
        first = end
    return whole


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices (N, rows, columns), rows <= columns, with singular values of
    about 0.7 to 1.2 in the same directions (Jordan et al., 2024)."""
    a, b, c = COEFFICIENTS
    dtype = x.dtype
    # No singular value is larger than this norm.
    norm = x.norm(dim=(1, 2), keepdim=True)
    x = x / (norm + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(STEPS):
        gram = x @ x.mT
        # b gram + c gram gram
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(dtype)


def orthogonal_updates(updates: list[Tensor], sizes: list[list[int]]) -> list[Tensor]:
    """Return the result of `orthogonalise` on several processes: each matrix on one,
    its owner, which sends the result to all. Rows of DTensors are gathered first, and
    every process keeps its own."""
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    costs = [update.numel() * min(update.shape) for update in updates]
    owners = assign(costs, world_size)
    own: dict[int, Tensor] = {}
    for i, update in enumerate(updates):
        whole = update.full_tensor() if hasattr(update, "full_tensor") else update
        if owners[i] == rank:
            own[i] = whole
    own_sizes = [sizes[i] for i in own]
    orthogonal = orthogonalise(list(own.values()), own_sizes)
    own = dict(zip(own, orthogonal, strict=True))
    results = []
    for i, update in enumerate(updates):
        if i in own:
            result = own[i].contiguous()
        else:
            result = local(update).new_empty(update.shape)
        dist.broadcast(result, src=owners[i])
        if hasattr(update, "to_local"):  # FSDP2 divides rows as torch.chunk does
            chunks = result.chunk(world_size)
            result = chunks[rank] if rank < len(chunks) else result[:0]
        results.append(result)
    return results


def assign(costs: list[int], world_size: int) -> list[int]:
    """Return the process for each piece of work: costliest first, each to the least
    loaded process."""
    loads = [0] * world_size
    owners = [0] * len(costs)
    costliest_first = sorted(range(len(costs)), key=lambda i: -costs[i])
    for i in costliest_first:
        owner = min(range(world_size), key=loads.__getitem__)
        owners[i] = owner
        loads[owner] += costs[i]
    return owners
