"""Plans of generation: which position is revealed at which step.

In masked diffusion a position unmasks at a time that does not depend on the model, so drawing the times first and
evaluating the model only where something unmasks gives exactly the same distribution (the paper, Lemma 4.1). The plan
of a sample can therefore be drawn before the model runs, and every way of generating is a plan:

    autoregressive        l2r_plan            identity order, one position a step
    group-wise (A3)       l2r_plan, random_plan with group=s
    masked diffusion      mdm_plan            exact: every position at its own time; even: groups of equal size
    adaptive              adaptive_plan       the model's most confident, or least uncertain, positions first
    speculative           speculative_plan    drafted in groups, verified one by one: the exact joint of the order
    infilling, prompting  any of them, with given positions; rows may differ in length and in what is given

Shapes: B samples, T positions of the longest.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["linear", "cosine"]


@dataclass
class Plan:
    """Which positions are revealed at which step, for B samples of up to T positions.

    order: LongTensor (B, T), positions in the order in which they are revealed, given positions first.
    step: LongTensor (B, T), the step at which ``order[b, i]`` is revealed; -1 for given ones; never falling along i.
        Positions of equal step are predicted in parallel, from the positions of earlier steps only.
    length: LongTensor (B,), positions of each sample; its order holds 0..length-1, then those it does not have.
        None: all have T.
    reveal: "order"; or "confidence" or "entropy", where only the number of positions of each step is fixed and the
        model chooses which they are: those whose likeliest token has the highest probability, or whose distribution
        has the least entropy.
    draft: positions that are drafted in parallel and then verified one after the other; 0: no speculation. The steps
        are then those of the groups at best.
    """

    order: Tensor
    step: Tensor
    length: Tensor | None = None
    reveal: Literal["order", "confidence", "entropy"] = "order"
    draft: int = 0

    def __post_init__(self):
        if self.order.shape != self.step.shape or self.order.dim() != 2:
            raise ValueError(
                f"order {tuple(self.order.shape)} and step {tuple(self.step.shape)} must both be (B, T)"
            )
        B, T = self.order.shape
        if self.length is None:
            self.length = torch.full((B,), T)
        if (
            self.length.shape != (B,)
            or B
            and not 0 <= int(self.length.min()) <= int(self.length.max()) <= T
        ):
            raise ValueError(f"a plan's length must be {B} numbers from 0 to {T}, one a sample")
        positions = torch.arange(T, device=self.order.device)
        if not torch.equal(self.order.sort(dim=1).values, positions.expand_as(self.order)):
            raise ValueError(f"every row of a plan's order must be a permutation of 0..{T - 1}")
        if not torch.equal(self.order < self.length[:, None], self.exists()):
            raise ValueError(
                "a plan's order must name the positions that a sample has before those it does not have"
            )
        if (self.step < -1).any() or (self.step.diff(dim=1) < 0)[self.exists()[:, 1:]].any():
            raise ValueError(
                "a plan's steps must be -1 (given) or more and must not fall along the order"
            )
        if self.reveal not in ("order", "confidence", "entropy"):
            raise ValueError(
                f"a plan's reveal is {self.reveal!r}; it must be 'order', 'confidence' or 'entropy'"
            )
        if self.draft and (self.draft < 2 or self.reveal != "order"):
            raise ValueError(
                f"a draft of {self.draft} positions (reveal {self.reveal!r}): draft at least 2, in order"
            )

    def __getitem__(self, rows: slice) -> Plan:
        return dataclasses.replace(
            self, order=self.order[rows], step=self.step[rows], length=self.length[rows]
        )

    def __len__(self) -> int:
        return len(self.order)

    def exists(self) -> Tensor:
        """BoolTensor (B, T): the entries of `order` that name a position of their sample."""
        return torch.arange(self.order.shape[1], device=self.order.device) < self.length[:, None]

    def revealed(self) -> Tensor:
        """BoolTensor (B, T): the entries of `order` whose tokens are generated."""
        return (self.step >= 0) & self.exists()

    def given(self) -> Tensor:
        """BoolTensor (B, T) in sequence order: the positions whose tokens come from the user."""
        return torch.zeros_like(self.step, dtype=torch.bool).scatter_(
            1, self.order, (self.step < 0) & self.exists()
        )


def l2r_plan(
    batch_size: int, length: int | Tensor, given: Tensor | None = None, group: int = 1
) -> Plan:
    """Left to right, `group` positions a step.

    Args, here and below:
        length: T, or LongTensor (B,) of rows that differ.
        given: BoolTensor (B, T) of positions that are context, or None.
    """
    rows = _Rows(batch_size, length, given)
    return rows.in_groups(torch.arange(rows.T).expand(batch_size, -1), group)


def random_plan(
    batch_size: int,
    length: int | Tensor,
    generator: torch.Generator,
    given: Tensor | None = None,
    group: int = 1,
) -> Plan:
    """A uniformly random order, `group` positions a step. generator: a CPU generator, here and below."""
    rows = _Rows(batch_size, length, given)
    return rows.in_groups(rows.uniform(generator), group)


def mdm_plan(
    batch_size: int,
    length: int | Tensor,
    steps: int,
    generator: torch.Generator,
    given: Tensor | None = None,
    even: bool = False,
    schedule: Schedule = "linear",
) -> Plan:
    """Masked-diffusion sampling in `steps` steps of equal length (the paper, section 4.3).

    Exact: every masked position unmasks at its own random time, so the number revealed in a step varies and some steps
    reveal nothing. Even: a uniformly random order whose groups have the sizes expected, rounded.

    Args:
        schedule: share of masked positions at time t, which runs from 1 down to 0. linear: t; the groups of an even
            plan differ by at most one. cosine: sin(pi t / 2), few positions at first and many at the end (MaskGIT).
    """
    if not 1 <= steps <= 2**31:
        raise ValueError(f"steps is {steps}; sampling takes at least 1 and at most 2**31 steps")
    if schedule not in ("linear", "cosine"):
        raise ValueError(f"the schedule is {schedule!r}; it must be 'linear' or 'cosine'")
    rows = _Rows(batch_size, length, given)
    unmasked = rows.uniform(
        generator
    )  # the share of unmasked positions at which each position unmasks
    order, index = rows.order_by(unmasked)
    if not even:
        step = (_elapsed(unmasked.gather(1, order), schedule) * steps).long()
    else:
        total = (rows.length - rows.given.sum(dim=1))[:, None]
        steps = total.clamp(max=steps)
        if schedule == "linear":
            step = index * steps // total.clamp(min=1)
        else:
            share = ((index + 0.5) / total.clamp(min=1)).clamp(0, 1)
            step = (_elapsed(share.double(), schedule) * steps).long()
    return rows.plan(order, index, step.clamp(max=(steps - 1)))


def adaptive_plan(
    batch_size: int,
    length: int | Tensor,
    by: Literal["confidence", "entropy", "random"],
    generator: torch.Generator,
    given: Tensor | None = None,
    group: int = 1,
) -> Plan:
    """`group` positions a step, chosen by the model as it goes (A3's dynamic resampling), or at random."""
    plan = random_plan(batch_size, length, generator, given, group)
    return plan if by == "random" else dataclasses.replace(plan, reveal=by)


def speculative_plan(
    batch_size: int,
    length: int | Tensor,
    draft: int,
    generator: torch.Generator | None = None,
    given: Tensor | None = None,
) -> Plan:
    """Self-speculative decoding (Guo & Ermon 2025): `draft` positions guessed in parallel and verified in one causal
    pass. Left to right, or in a uniformly random order if a generator is given; either way the samples follow the
    joint distribution of one position a step."""
    if generator is None:
        plan = l2r_plan(batch_size, length, given, draft)
    else:
        plan = random_plan(batch_size, length, generator, given, draft)
    return dataclasses.replace(plan, draft=draft)


def group_sizes(plan: Plan) -> Tensor:
    """Positions in each group of each row, LongTensor (B, G), empty groups at the end.

    Steps in which a row reveals nothing are left out: groups of a row are its own non-empty steps, so the number of
    model calls is that of the longest row.
    """
    revealed = plan.revealed()
    starts = (plan.step.diff(dim=1, prepend=torch.full_like(plan.step[:, :1], -1)) > 0) & revealed
    index = (
        starts.cumsum(dim=1) * revealed
    )  # 1 for the first group, 0 for given and absent positions
    sizes = torch.zeros(len(index), int(index.max()) + 1 if index.numel() else 1, dtype=torch.long)
    return sizes.scatter_add_(1, index, torch.ones_like(index))[:, 1:]


def _elapsed(unmasked: Tensor, schedule: Schedule) -> Tensor:
    """1 - t at which this share of the positions is unmasked."""
    return unmasked if schedule == "linear" else (1 - unmasked).acos() * (2 / math.pi)


class _Rows:
    """What the samples of a plan have: their lengths and given positions."""

    def __init__(self, batch_size: int, length: int | Tensor, given: Tensor | None):
        length = torch.as_tensor(length).cpu()
        if length.shape not in ((), (batch_size,)) or length.numel() and int(length.min()) < 0:
            raise ValueError(
                f"length must be a number >= 0, or {batch_size} of them, one a sample; it is {length}"
            )
        self.length, self.B = length.expand(batch_size), batch_size
        self.T = int(length.max()) if length.numel() else 0
        if given is not None and given.shape != (self.B, self.T):
            raise ValueError(
                f"given is {tuple(given.shape)}, but the samples are {(self.B, self.T)}"
            )
        self.position = torch.arange(self.T).expand(self.B, self.T)
        exists = self.position < self.length[:, None]
        self.given = exists & (
            torch.zeros(self.B, self.T, dtype=torch.bool) if given is None else given.cpu()
        )

    def uniform(self, generator: torch.Generator) -> Tensor:
        return torch.rand(self.B, self.T, generator=generator, dtype=torch.float64)

    def order_by(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Order (B, T): the given positions in ascending order, then the others by rising key (from 0 to T), then those
        that a row does not have; and the index (B, T) of each entry among the others, negative for given ones."""
        key = torch.where(self.given, self.position.to(key.dtype) - self.T, key)
        key = torch.where(self.position < self.length[:, None], key, self.T)
        return key.argsort(dim=1, stable=True), self.position - self.given.sum(dim=1, keepdim=True)

    def plan(self, order: Tensor, index: Tensor, step: Tensor) -> Plan:
        return Plan(order, step.where(index >= 0, -1), self.length)

    def in_groups(self, key: Tensor, group: int) -> Plan:
        if group < 1:
            raise ValueError(f"a group of {group} positions; reveal at least 1 in a step")
        order, index = self.order_by(key)
        return self.plan(order, index, index // group)
