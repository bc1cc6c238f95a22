"""Muon: momentum whose update is made orthogonal, for the matrices of the blocks.

Keller Jordan et al., 2024, kellerjordan.github.io/posts/muon. torch.optim.Muon does the same for
one process; here queries, keys and values are orthogonalised apart, a step whose gradients are not
finite is left out without waiting for the device, and processes share the work.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.averages import local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that Newton-Schulz iterates
STEPS = 5
STACK_ELEMENTS = 2**26  # orthogonalised at once: bounds the memory of the iteration


class Muon(torch.optim.Optimizer):
    """For a weight W (rows, columns) with gradient G, momentum mu, rate lr and decay wd:

        M <- mu M + (1 - mu) G
        U <- orthogonal(mu M + (1 - mu) G)                          Nesterov's form
        W <- (1 - lr wd) W - lr sqrt(max(1, rows / columns)) U

    U turns a vector without making it longer, whatever the size of W, and the factor keeps the
    typical change of an output the same where there are more outputs than inputs. So does a rate
    keep its meaning from width to width.

    With several processes, the iteration, which is most of the work, is made once for every matrix,
    by its owner. Replicas (DDP) have all of G and M each, and gather the results. Shards (FSDP2)
    are sent to the owner, whose result goes back in shards. Everything else is done element by
    element where a weight lies, and so is M, the only state: what a checkpoint holds does not
    depend on the owners.

    `found_inf`, a tensor on the device or None: 1 leaves out the step, as in fused AdamW.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        fused: Iterable[Tensor] = (),
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ):
        """matrices: weights (rows, columns). fused: weights (3 D, D) of queries, keys and values,
        three matrices in one."""
        common = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        groups = [{"params": list(matrices), "parts": 1}, {"params": list(fused), "parts": 3}]
        super().__init__([group for group in groups if group["params"]], common)
        self.found_inf = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights by their gradients."""
        weights = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not weights:
            return
        finite = None if self.found_inf is None else self.found_inf == 0
        updates = [self._momentum(p, group["momentum"], finite) for p, group in weights]
        updates = orthogonal_updates(updates, [group["parts"] for _, group in weights])
        for (p, group), update in zip(weights, updates, strict=True):
            rows, columns = len(p) // group["parts"], p.shape[1]
            scale = max(1, rows / columns) ** 0.5
            go = 1.0 if finite is None else finite.to(p.dtype)  # 0: this step changes nothing
            local(p).mul_(1 - go * group["lr"] * group["weight_decay"])
            local(p).sub_(update * (go * group["lr"] * scale))

    def _momentum(self, p: Tensor, momentum: float, finite: Tensor | None) -> Tensor:
        """Let this process's part of a gradient into its average; return Nesterov's update, with
        the shape and placement of p."""
        state, gradient = self.state[p], local(p.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        average, share = local(state["momentum_buffer"]), 1 - momentum
        if finite is not None:
            # NaN times 0 is NaN, so what is not finite has to go before it is multiplied.
            gradient = gradient.where(finite, torch.zeros_like(gradient))
            share = share * finite.to(gradient.dtype)
        average.lerp_(gradient, share)
        update = gradient.lerp(average, momentum)
        if isinstance(p, DTensor):
            update = DTensor.from_local(
                update, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        return update


# ---- orthogonal matrices -------------------------------------------------------------------------


def orthogonalise(matrices: list[Tensor], parts: list[int]) -> list[Tensor]:
    """Each matrix (rows, columns) with its singular values moved close to 1; parts: how many
    matrices, one below the other, it is made of. On a GPU in bfloat16."""
    pieces = [piece for m, n in zip(matrices, parts, strict=True) for piece in m.chunk(n)]
    # Matrices of one shape are one batch, and a tall one is wide on its side.
    shapes: dict[tuple[int, int], list[int]] = {}
    for i, piece in enumerate(pieces):
        shapes.setdefault(tuple(sorted(piece.shape)), []).append(i)
    for (rows, columns), members in shapes.items():
        size = max(1, STACK_ELEMENTS // (rows * columns))
        for some in (members[i : i + size] for i in range(0, len(members), size)):
            wide = [pieces[i] if len(pieces[i]) == rows else pieces[i].T for i in some]
            for i, result in zip(some, newton_schulz(torch.stack(wide)), strict=True):
                pieces[i] = result if len(pieces[i]) == rows else result.T
    remaining = iter(pieces)
    return [torch.cat([next(remaining) for _ in range(n)]) for n in parts]


def newton_schulz(x: Tensor) -> Tensor:
    """(N, rows, columns) with rows <= columns -> the same shape: singular values of about 0.7 to
    1.2, in the same directions (Jordan et al., 2024)."""
    a, b, c = COEFFICIENTS
    dtype = x.dtype
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)  # no singular value is larger than this norm
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram gram
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.to(dtype)


# ---- several processes ---------------------------------------------------------------------------


def orthogonal_updates(updates: list[Tensor], parts: list[int]) -> list[Tensor]:
    """`orthogonalise`, shared among the processes: of DTensors, cut by rows, the local parts."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return orthogonalise([local(u) for u in updates], parts)
    owners = assign([u.numel() * min(u.shape) for u in updates], world)
    exchange = _through_owners if isinstance(updates[0], DTensor) else _gather_from_owners
    return exchange(updates, parts, owners, world)


def assign(costs: list[int], world: int) -> list[int]:
    """The owner of each piece of work: the costliest first, each to whom has the least so far."""
    loads, owners = [0] * world, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(world), key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners


def _gather_from_owners(
    updates: list[Tensor], parts: list[int], owners: list[int], world: int
) -> list[Tensor]:
    """Of replicas: every process makes its matrices orthogonal, and all get all of them."""
    owned = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(world)]
    mine = owned[dist.get_rank()]
    results = orthogonalise([updates[i] for i in mine], [parts[i] for i in mine])
    length = max(sum(updates[i].numel() for i in indices) for indices in owned)
    packed = updates[0].new_zeros(length)  # all_gather takes equal lengths
    if mine:
        flat = torch.cat([result.flatten() for result in results])
        packed[: len(flat)] = flat
    gathered = packed.new_empty(world * length)
    dist.all_gather_into_tensor(gathered, packed)
    every = [updates[0]] * len(updates)
    for rank, indices in enumerate(owned):
        sizes = [updates[i].numel() for i in indices]
        pieces = gathered[rank * length :][: sum(sizes)].split(sizes)
        for i, piece in zip(indices, pieces, strict=True):
            every[i] = piece.view(updates[i].shape)
    return every


def _through_owners(
    updates: list[DTensor], parts: list[int], owners: list[int], world: int
) -> list[Tensor]:
    """Of shards: every process sends its rows of each matrix to the owner and gets those of the
    result back."""
    rank, by_owner = dist.get_rank(), sorted(range(len(updates)), key=owners.__getitem__)
    mine = [i for i in by_owner if owners[i] == rank]

    def elements(i: int, holder: int) -> int:
        """Of matrix i, in the shard of a process: FSDP2 cuts rows as torch.chunk does."""
        size = -(-len(updates[i]) // world)
        return max(0, min(size, len(updates[i]) - holder * size)) * updates[i].shape[1]

    # What I send to every other process, and what every other process sends to me.
    sent = [sum(elements(i, rank) for i in by_owner if owners[i] == o) for o in range(world)]
    received = [sum(elements(i, holder) for i in mine) for holder in range(world)]
    shards = torch.cat([local(updates[i]).flatten() for i in by_owner])
    gathered = shards.new_empty(sum(received))
    dist.all_to_all_single(gathered, shards, received, sent)

    # gathered: of process 0 its rows of all my matrices, then those of process 1, and so on.
    pieces = [
        from_one.split([elements(i, holder) for i in mine])
        for holder, from_one in enumerate(gathered.split(received))
    ]
    whole = [
        torch.cat([of_one[k] for of_one in pieces]).view(updates[i].shape)
        for k, i in enumerate(mine)
    ]
    results = [m.flatten() for m in orthogonalise(whole, [parts[i] for i in mine])]
    cut = [
        result.split([elements(i, holder) for holder in range(world)])
        for result, i in zip(results, mine, strict=True)
    ]
    answers = [of_matrix[holder] for holder in range(world) for of_matrix in cut]
    answers = torch.cat(answers) if answers else gathered
    shards_back = torch.empty_like(shards)
    dist.all_to_all_single(shards_back, answers, sent, received)
    sizes = [elements(i, rank) for i in by_owner]
    back = dict(zip(by_owner, shards_back.split(sizes), strict=True))
    return [back[i].view(-1, u.shape[1]) for i, u in enumerate(updates)]
