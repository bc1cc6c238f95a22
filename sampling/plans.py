"""Plans of generation: which position is unmasked at which step.

In masked diffusion a position unmasks at a time that does not depend on the model, so drawing the
times first and evaluating the model only where something unmasks gives exactly the same
distribution (the paper, Lemma 4.1). The plan of a sample can therefore be drawn before the model
runs, and every way of generating is a plan:

    autoregressive        l2r_plan            identity order, one position a step
    group-wise (A3)       l2r_plan, random_plan with group=s
    masked diffusion      mdm_plan            exact: every position at its own time; even: in groups
    adaptive              adaptive_plan       where the model is most confident, or least uncertain;
                                              as many positions a step as it is sure enough of
    speculative           speculative_plan    drafted in groups, verified one by one: an exact joint
    infilling, prompting  any of them, with given positions; rows may differ in length and context

Shapes: B samples, T positions of the longest, G groups (a row's own steps that unmask something).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from orders import OrderConfig, inverse_permutation, orders_at
from runtime.errors import UserError
from runtime.validation import LARGEST, check_value

Schedule = Literal["linear", "cosine"]
Score = Literal["confidence", "entropy", "margin"]
UnmaskBy = Literal["order", Score]


@dataclass(frozen=True)
class Pace:
    """How many positions a step unmasks where the model decides that, too: the best ones that it is
    sure enough of, and always one at least.

    threshold: as long as the score allows it: confidence or margin is at least this, or the entropy
        (nats) at most (Fast-dLLM, arXiv 2505.22618).
    entropy_bound: as long as the entropies (nats) of the positions unmasked, but for the largest of
        them, add up to at most this (the EB-sampler, arXiv 2505.24857): a bound on what they could
        tell of each other.
    most: positions a step. Without the other two exactly so many.
    """

    threshold: float | None = None
    entropy_bound: float | None = None
    most: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None and not value >= (name == "most"):
                raise UserError(
                    f"{name} is {value}; give a number of at least {int(name == 'most')}"
                )


@dataclass(frozen=True)
class Rule:
    """How a model chooses its own order: by a score, so many positions a step (`pace`; None: a
    fixed number), in blocks of so many that are filled in one after the other."""

    score: Score
    pace: Pace | None = None
    block: int | None = None

    def __post_init__(self):
        if self.pace and self.pace.threshold is not None:
            check_threshold(self.score, self.pace.threshold)


def check_threshold(score: Score, threshold: float) -> None:
    """Raise ValueError for one that no position could reach."""
    if score != "entropy" and threshold > 1:
        raise UserError(
            f"the threshold is {threshold:g}, but {score} is a probability: give a number from 0 "
            "to 1"
        )


@dataclass
class Plan:
    """Which positions are unmasked at which step, for B samples of up to T positions.

    order: LongTensor (B, T), positions in the order in which they are unmasked, given ones first.
    step: LongTensor (B, T), the step at which ``order[b, i]`` is unmasked; -1 for given ones; never
        falling along i. Positions of equal step are predicted in parallel, from the positions of
        earlier steps only.
    length: LongTensor (B,), positions of each sample; its order holds 0..length-1, then those it
        does not have. None: all have T.
    unmask_by: "order"; or where only the number of positions of each step is fixed and the model
        chooses which they are: "confidence", those whose likeliest token has the highest
        probability; "entropy", whose distribution has the least; "margin", whose likeliest token is
        furthest above the second (Kim et al., arXiv 2502.06768).
    pace: not even that number is fixed. Positions of equal step are then those that the model
        chooses from next, in as many steps as it takes, before it goes on to the positions after
        them.
    draft: positions that are drafted and then verified one after the other; 0: no speculation. The
        steps are then those of the groups at best.
    draft_by: "model", in parallel; or "ngram", from the pairs of neighbours that are known.
    """

    order: Tensor
    step: Tensor
    length: Tensor | None = None
    unmask_by: UnmaskBy = "order"
    draft: int = 0
    pace: Pace | None = None
    draft_by: Literal["model", "ngram"] = "model"

    def __post_init__(self):
        if self.order.shape != self.step.shape or self.order.dim() != 2:
            order, step = tuple(self.order.shape), tuple(self.step.shape)
            raise UserError(f"order {order} and step {step} must both be (B, T)")
        B, T = self.order.shape
        if self.length is None:
            self.length = torch.full((B,), T)
        if self.length.shape != (B,) or ((self.length < 0) | (self.length > T)).any():
            raise UserError(f"a plan's length must be {B} numbers from 0 to {T}, one a sample")
        positions = torch.arange(T, device=self.order.device)
        if not torch.equal(self.order.sort(dim=1).values, positions.expand_as(self.order)):
            raise UserError(f"every row of a plan's order must be a permutation of 0..{T - 1}")
        if not torch.equal(self.order < self.length[:, None], self.valid()):
            raise UserError(
                "a plan's order must name the positions that a sample has before those it does not "
                "have"
            )
        falls = (self.step.diff(dim=1) < 0) & self.valid()[:, 1:]
        if (self.step < -1).any() or falls.any():
            raise UserError(
                "a plan's steps must be -1 (given) or more and must not fall along the order"
            )
        check_value(self.unmask_by, UnmaskBy, "a plan's unmask_by")
        if self.draft and (self.draft < 2 or self.unmask_by != "order"):
            raise UserError(
                f"a draft of {self.draft} positions (unmasked by {self.unmask_by!r}): draft at "
                "least 2, in order"
            )
        if self.pace and self.unmask_by == "order":
            raise UserError("a plan has a pace where the model chooses: set its unmask_by")

    def __getitem__(self, rows: slice) -> Plan:
        return dataclasses.replace(
            self, order=self.order[rows], step=self.step[rows], length=self.length[rows]
        )

    def __len__(self) -> int:
        return len(self.order)

    def valid(self) -> Tensor:
        """BoolTensor (B, T): the entries of `order` that name a position of their sample."""
        return torch.arange(self.order.shape[1], device=self.order.device) < self.length[:, None]

    def generated(self) -> Tensor:
        """BoolTensor (B, T): the entries of `order` whose tokens are generated."""
        return (self.step >= 0) & self.valid()

    def given_positions(self) -> Tensor:
        """BoolTensor (B, T), by position: those whose tokens come from the user."""
        given = (self.step < 0) & self.valid()
        return torch.empty_like(given).scatter_(1, self.order, given)


# ---- the kinds of plans --------------------------------------------------------------------------


def l2r_plan(
    batch_size: int, length: int | Tensor, given: Tensor | None = None, group: int = 1
) -> Plan:
    """Left to right, `group` positions a step.

    Args, here and below:
        length: T, or LongTensor (B,) of rows that differ.
        given: BoolTensor (B, T) of positions that are context, or None.
    """
    samples = _Samples(batch_size, length, given)
    return samples.in_groups(samples.position, group)


def random_plan(
    batch_size: int,
    length: int | Tensor,
    generator: torch.Generator,
    given: Tensor | None = None,
    group: int = 1,
) -> Plan:
    """A uniformly random order, `group` positions a step.

    generator: a CPU generator, here and below.
    """
    samples = _Samples(batch_size, length, given)
    return samples.in_groups(samples.uniforms(generator), group)


def order_plan(
    batch_size: int,
    length: int | Tensor,
    orders: OrderConfig,
    seed: int,
    given: Tensor | None = None,
    group: int = 1,
) -> Plan:
    """Orders drawn from a distribution, `group` positions a step, given positions first. The order
    of row b is `orders_at(orders, seed, 0, [b], its length)`."""
    samples = _Samples(batch_size, length, given)
    step_of, start = samples.position.clone(), 0  # by position; where a row has none, the identity
    for n, run in itertools.groupby(samples.length.tolist()):  # rows of equal length at once
        rows = range(start, start + len(list(run)))
        if n:
            drawn = orders_at(orders, seed, 0, rows, n)
            step_of[rows.start : rows.stop, :n] = inverse_permutation(drawn)
        start = rows.stop
    return samples.in_groups(step_of, group)


def mdm_plan(
    batch_size: int,
    length: int | Tensor,
    steps: int,
    generator: torch.Generator,
    given: Tensor | None = None,
    even: bool = False,
    schedule: Schedule = "linear",
) -> Plan:
    """Masked-diffusion sampling in `steps` steps of equal length (the paper, Lemma 4.1).

    Exact: every masked position unmasks at its own random time, so the number of positions differs
    from step to step and some steps have none. Even: a uniformly random order whose groups have the
    sizes expected, rounded.

    Args:
        schedule: share of masked positions at time t, which runs from 1 down to 0. linear: t; the
            groups of an even plan differ by at most one. cosine: sin(pi t / 2), few positions at
            first and many at the end (MaskGIT).
    """
    if not 1 <= steps <= LARGEST:
        raise UserError(f"steps is {steps}; sampling takes at least 1 and at most 2**31 steps")
    check_value(schedule, Schedule, "the schedule")
    samples = _Samples(batch_size, length, given)
    # Inverse CDF: a position unmasks when the share of unmasked positions (1 minus that of the
    # schedule) has risen to its uniform number. Sorting by these numbers gives a uniformly random
    # order, whatever the schedule.
    uniforms = samples.uniforms(generator)
    order, index = samples.order_by(uniforms)
    if not even:
        step = (_elapsed(uniforms.gather(1, order), schedule) * steps).long()
        return samples.plan(order, index, step.clamp(max=steps - 1))
    # Entry `index` of n unmasks where the share of unmasked positions is expected to pass it. More
    # steps than positions would leave some empty: a row takes n at most.
    n = (samples.length - samples.given.sum(dim=1))[:, None]
    row_steps = n.clamp(max=steps)
    if schedule == "linear":  # in integers, so that groups differ by at most one
        step = index * row_steps // n.clamp(min=1)
    else:
        middle = ((index + 0.5) / n.clamp(min=1)).clamp(0, 1)
        step = (_elapsed(middle.double(), schedule) * row_steps).long()
    return samples.plan(order, index, step.clamp(max=row_steps - 1))


def adaptive_plan(
    batch_size: int,
    length: int | Tensor,
    by: Score | Literal["random"],
    generator: torch.Generator,
    given: Tensor | None = None,
    group: int | None = 1,
    threshold: float | None = None,
    entropy_bound: float | None = None,
    block: int | None = None,
) -> Plan:
    """`group` positions a step, chosen by the model as it goes (A3's dynamic resampling), or at
    random.

    threshold, entropy_bound: see `Pace`; `group` is then the most positions of a step, None: any
        number.
    block: positions of blocks that are filled in one after the other (semi-autoregressive,
        as LLaDA, arXiv 2502.09992).
    """
    if threshold is None and entropy_bound is None and block is None:
        plan = random_plan(batch_size, length, generator, given, group)
        return plan if by == "random" else dataclasses.replace(plan, unmask_by=by)
    if by == "random":
        raise UserError(
            "threshold, entropy_bound and block are for positions chosen by the model; give a "
            "score to choose by"
        )
    samples = _Samples(batch_size, length, given)
    # The order within a block is random, as above: it decides between equals.
    number = samples.position // (block or max(samples.T, 1))
    order, index = samples.order_by(number + samples.uniforms(generator))
    plan = samples.plan(order, index, number.gather(1, order))
    return dataclasses.replace(plan, unmask_by=by, pace=Pace(threshold, entropy_bound, group))


def speculative_plan(
    batch_size: int,
    length: int | Tensor,
    draft: int,
    generator: torch.Generator | None = None,
    given: Tensor | None = None,
    draft_by: Literal["model", "ngram"] = "model",
) -> Plan:
    """Speculative decoding: `draft` positions guessed and verified in one causal pass. Left to
    right, or in a uniformly random order if a generator is given; either way the samples follow the
    joint distribution of one position a step.

    draft_by: the guesses are the model's own, in parallel, from another pass (self-speculation, Guo
        & Ermon 2025); or, without a pass, what most often follows the token on their left in the
        text known so far (ASSD, arXiv 2504.20456).
    """
    if generator is None:
        plan = l2r_plan(batch_size, length, given, group=draft)
    else:
        plan = random_plan(batch_size, length, generator, given, group=draft)
    return dataclasses.replace(plan, draft=draft, draft_by=draft_by)


# ---- what is made of plans -----------------------------------------------------------------------


def stack_plans(plans: list[Plan], length: int | None = None) -> Plan:
    """One plan of the rows of several of one kind, whose rows may differ in length.

    For rows that are planned one by one, each from a random generator of its own.

    length: positions of the plan; by default those of the longest row.
    """
    T = length or max(plan.order.shape[1] for plan in plans)
    orders, steps = [], []
    for plan in plans:
        extra = torch.arange(plan.order.shape[1], T).expand(len(plan), -1)
        orders.append(torch.cat([plan.order, extra], dim=1))
        steps.append(torch.cat([plan.step, torch.full_like(extra, -1)], dim=1))
    length = torch.cat([plan.length for plan in plans])
    return dataclasses.replace(
        plans[0], order=torch.cat(orders), step=torch.cat(steps), length=length
    )


def group_sizes(plan: Plan) -> Tensor:
    """Positions in each group of each row, LongTensor (B, G), empty groups at the end.

    Steps in which a row unmasks nothing are left out: groups of a row are its own non-empty steps,
    so the number of model calls is that of the row with most groups. An example, of a row whose
    first entry is given:

        step     -1  0  0  3  5  5
        starts       x     x  x
        group     0  1  1  2  3  3     sizes 2, 1, 2
    """
    generated = plan.generated()
    before = torch.full_like(plan.step[:, :1], -1)
    starts = (plan.step.diff(dim=1, prepend=before) > 0) & generated
    # Groups are counted from 1; what is given or absent falls into group 0, which is dropped.
    group = starts.cumsum(dim=1) * generated
    groups = int(group.max()) if group.numel() else 0
    sizes = torch.zeros(len(plan), groups + 1, dtype=torch.long)
    return sizes.scatter_add_(1, group, torch.ones_like(group))[:, 1:]


# ---- how plans are made --------------------------------------------------------------------------


def _elapsed(share: Tensor, schedule: Schedule) -> Tensor:
    """1 - t, where t is the time at which this share u of the positions is unmasked: u = 1 - t, or
    u = 1 - sin(pi t / 2) (cosine)."""
    return share if schedule == "linear" else (1 - share).acos() * (2 / math.pi)


class _Samples:
    """What the samples of a plan have: their lengths and given positions."""

    def __init__(self, batch_size: int, length: int | Tensor, given: Tensor | None):
        length = torch.as_tensor(length).cpu()
        if length.shape not in ((), (batch_size,)) or (length < 0).any():
            raise UserError(
                f"length must be a number >= 0, or {batch_size} of them, one a sample; it is "
                f"{length}"
            )
        self.length, self.B = length.expand(batch_size), batch_size
        self.T = int(length.max()) if length.numel() else 0
        if given is None:
            given = torch.zeros(self.B, self.T, dtype=torch.bool)
        if given.shape != (self.B, self.T):
            raise UserError(
                f"given is {tuple(given.shape)}, but the samples are {(self.B, self.T)}"
            )
        self.position = torch.arange(self.T).expand(self.B, self.T)
        self.valid = self.position < self.length[:, None]
        self.given = given.cpu() & self.valid

    def uniforms(self, generator: torch.Generator) -> Tensor:
        """A number in [0, 1) for each position, (B, T)."""
        return torch.rand(self.B, self.T, generator=generator, dtype=torch.float64)

    def order_by(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Order (B, T): given positions in ascending order, then the others by rising key, then
        those that a row does not have. And the index (B, T) of each entry among the others,
        negative for given ones.

        key: (B, T) by position, numbers from 0 to below T.
        """
        # Given positions take the keys from -T to -1: before all others, in ascending order.
        key = torch.where(self.given, self.position.to(key.dtype) - self.T, key)
        key = torch.where(self.valid, key, self.T)
        order = key.argsort(dim=1, stable=True)
        return order, self.position - self.given.sum(dim=1, keepdim=True)

    def plan(self, order: Tensor, index: Tensor, step: Tensor) -> Plan:
        """The plan of an order; the steps of given entries are ignored."""
        return Plan(order, step.where(index >= 0, -1), self.length)

    def in_groups(self, key: Tensor, group: int) -> Plan:
        """The positions by rising key, `group` in a step."""
        if group < 1:
            raise UserError(f"a group of {group} positions; unmask at least 1 in a step")
        order, index = self.order_by(key)
        return self.plan(order, index, index // group)
