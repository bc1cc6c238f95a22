"""Plans of generation: which position is unmasked at which step, drawn before the model
runs. Times of masked diffusion do not depend on the model, so this is exact (the paper,
Lemma 4.1). Every way of generating is a plan; with given positions it is prompting or
infilling.

A mode is a function that plans `Samples`, and its name in `MODES`. Its arguments are
those of the mode on the command line, `--mode mdm:steps=64`, with the types, bounds and
defaults of its signature; the first sentence of its docstring is its help.

Shapes: B samples, T positions of the longest, G groups (a row's own steps that unmask
something)."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..orders import inverse_permutation, orders_at, parse_order
from ..runtime.errors import UserError
from ..runtime.validation import Amount, Count, check_values
from .scores import ALL_SCORES, ScoreName

# The tokens of a sample, None where they are to be generated.
Context = list[int | None]
Schedule = Literal["linear", "cosine"]
UnmaskBy = Literal["order", ScoreName]


@dataclass(frozen=True)
class Pace:
    """The number of positions that a step unmasks where the model decides that: the
    best ones within these limits, and always one at least.

    threshold: confidence or margin at least, entropy (nats) at most this (Fast-dLLM,
    arXiv 2505.22618). entropy_bound: entropies (nats) of a step, without the largest,
    add up to at most this: it bounds what they tell of each other (EB-sampler, arXiv
    2505.24857). most: positions a step; without the other two exactly this many."""

    threshold: Amount | None = None
    entropy_bound: Amount | None = None
    most: Count | None = None

    def __post_init__(self):
        check_values(self, name=str)


def check_threshold(score: str, threshold: float) -> None:
    """Raise UserError for a threshold that no position can pass."""
    largest = ALL_SCORES[score].largest_threshold
    if threshold > largest:
        raise UserError(
            f"the threshold is {threshold:g}: for {score} give a number from 0 to "
            f"{largest:g}"
        )


@dataclass
class Plan:
    """The positions that are unmasked at each step, for B samples of up to T positions.

    order: LongTensor (B, T), positions in the order in which they are unmasked, given
        ones first, last those that a shorter sample does not have.
    step: LongTensor (B, T), the step at which order[b, i] is unmasked, never falling;
        -1: given. Positions of equal step are predicted in parallel, from those of
        earlier steps.
    length: LongTensor (B,), positions of each sample; None: all have T.
    unmask_by: a score: only the number of positions of each step is fixed, and the
        model chooses which: of the likeliest token the highest probability, or the
        least entropy, or the widest margin to the second token (Kim et al., arXiv
        2502.06768).
    draft: positions that are drafted, then verified one after the other; the steps are
        then those of the groups at best.
    pace: the number is not fixed either; steps only say what is given.
    block: positions of blocks that are filled in one after the other (pace).

    Attributes that follow from these, BoolTensor (B, T): valid, the entries of `order`
    that name a position of their sample; generated, those whose tokens are generated;
    given, by position: the tokens come from the user."""

    order: Tensor
    step: Tensor
    length: Tensor = None  # type: ignore[assignment]
    unmask_by: UnmaskBy = "order"
    draft: int = 0
    pace: Pace | None = None
    block: int | None = None

    def __post_init__(self):
        B, T = self.order.shape
        if self.length is None:
            self.length = torch.full((B,), T)
        is_outside = (self.length < 0) | (self.length > T)
        if self.length.shape != (B,) or is_outside.any():
            raise UserError(
                f"a plan's length must be {B} numbers from 0 to {T}, one a sample"
            )
        positions = torch.arange(T, device=self.order.device)
        self.valid = positions < self.length[:, None]
        valid = self.valid
        sorted_order = self.order.sort(dim=1).values
        is_permutation = torch.equal(sorted_order, positions.expand(B, T))
        exists = self.order < self.length[:, None]
        if not is_permutation or not torch.equal(exists, valid):
            raise UserError(
                f"every row of a plan's order must be a permutation of 0..{T - 1}, its "
                "sample's positions before those it does not have"
            )
        falls = (self.step.diff(dim=1) < 0) & valid[:, 1:]
        is_below = self.step < -1
        if is_below.any() or falls.any():
            raise UserError(
                "a plan's steps must be -1 (given) or more and must not fall"
            )
        if self.unmask_by not in ("order", *ALL_SCORES):
            raise UserError(
                f"a plan's unmask_by is {self.unmask_by!r}; it must be one of 'order', "
                f"{', '.join(map(repr, ALL_SCORES))}"
            )
        is_scored = self.unmask_by != "order"
        if (
            (self.pace and not is_scored)
            or (self.block and not self.pace)
            or (self.draft and is_scored)
        ):
            raise UserError(
                "a plan with a pace needs unmask_by, a score; one with a block needs a "
                "pace; one with a draft takes neither"
            )
        self.generated = valid & (self.step >= 0)
        given = valid & (self.step < 0)
        self.given = torch.empty_like(given).scatter_(1, self.order, given)

    def __getitem__(self, rows: slice) -> "Plan":
        return replace(
            self, order=self.order[rows], step=self.step[rows], length=self.length[rows]
        )

    def __len__(self) -> int:
        return len(self.order)


class Samples:
    """The samples that a plan is made for, and the random numbers that it may use.

    length: LongTensor (B,), positions of each sample
    position: (B, T), 0 to T - 1
    valid, given: BoolTensor (B, T), positions that a sample has, and those that are
        context
    missing: LongTensor (B,), positions to generate
    uniforms: float64 (B, T) in [0, 1), by position; a row's plan depends on its own
        numbers alone"""

    def __init__(
        self,
        batch_size: int,
        length: int | Tensor,
        uniforms: torch.Generator | Tensor | None = None,
        given: Tensor | None = None,
    ):
        """length: T, or LongTensor (B,) of samples that differ. uniforms: these
        numbers, or a CPU generator of them."""
        length = torch.as_tensor(length).cpu()
        self.length = length.expand(batch_size)
        self.B = batch_size
        self.T = int(length.max()) if length.numel() else 0
        if given is None:
            given = torch.zeros(self.B, self.T, dtype=torch.bool)
        if given.dtype != torch.bool:
            raise UserError(f"given is {given.dtype}; give a boolean tensor")
        positions = torch.arange(self.T)
        self.position = positions.expand(self.B, self.T)
        self.valid = self.position < self.length[:, None]
        self.given = given.cpu() & self.valid
        self.missing = self.length - self.given.sum(dim=1)
        self._source = uniforms

    @functools.cached_property
    def uniforms(self) -> Tensor:
        if isinstance(self._source, Tensor):
            return self._source
        return torch.rand(self.B, self.T, generator=self._source, dtype=torch.float64)

    def keys_of(self, order: str) -> Tensor:
        """Return numbers (B, T), by position, that rise along an order of each sample.
        order: KIND or KIND:setting=value, as `parse_order` reads it."""
        if order == "random":
            return self.uniforms
        if order == "l2r":
            return self.position
        config = parse_order(order, "order")
        keys = torch.zeros(self.B, self.T, dtype=torch.long)
        for row, length in enumerate(self.length.tolist()):
            if length == 0:
                continue
            # Orders follow from a seed: the first random number of the sample.
            seed = int(self.uniforms[row, 0] * 2**53)
            positions = orders_at(config, seed, step=0, rows=range(1), length=length)
            keys[row, :length] = inverse_permutation(positions)[0]
        return keys

    def order_by(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order (B, T): given positions in ascending order, then the others
        by rising key (B, T), ties from left to right, then those that a row does not
        have. And the index (B, T) of each entry among the others, negative for given
        ones."""
        rank = key.argsort(dim=1, stable=True).argsort(dim=1)  # 0 to T - 1
        rank = torch.where(self.given, self.position - self.T, rank)
        rank = rank.masked_fill(~self.valid, self.T)
        order = rank.argsort(dim=1, stable=True)
        number_given = self.given.sum(dim=1, keepdim=True)
        index = self.position - number_given
        return order, index

    def in_groups(self, key: Tensor, group: int) -> Plan:
        """Return the plan of the positions by rising key (B, T), any numbers, `group`
        in a step."""
        if group < 1:
            raise UserError(f"group is {group}; give at least 1")
        order, index = self.order_by(key)
        step = index // group
        return Plan(order, step.where(index >= 0, -1), self.length)

    def steps_of(self, steps: int | None) -> Tensor:
        """Return the steps of each sample, (B, 1): by default one for each position to
        generate."""
        if steps is None:
            return self.missing.clamp(min=1)[:, None]
        if steps < 1:
            raise UserError(f"steps is {steps}; give at least 1")
        return torch.full((self.B, 1), steps)


def order_plan(samples: Samples, order: str = "random", group: Count = 1) -> Plan:
    """Take the next `group` positions of an order in each step. order: a distribution
    over orders, KIND or KIND:setting=value of orders.py, such as slots:block=8."""
    return samples.in_groups(samples.keys_of(order), group)


def mdm_plan(
    samples: Samples, steps: Count | None = None, schedule: Schedule = "linear"
) -> Plan:
    """Sample masked diffusion exactly, in `steps` steps of equal length: every position
    unmasks at a random time of its own.

    The number of positions differs from step to step (the paper, Lemma 4.1) and may be
    0. schedule: the share of masked positions at time t, which runs from 1 down to 0.
    linear: t. cosine: sin(pi t / 2), few positions at first and many at the end
    (MaskGIT). steps: by default one for each position to generate."""
    order, index = samples.order_by(samples.uniforms)
    row_steps = samples.steps_of(steps)
    # Inverse CDF: a position unmasks when the share of unmasked positions has risen to
    # its number.
    elapsed = elapsed_at(samples.uniforms.gather(1, order), schedule)
    step = (elapsed * row_steps).long()
    step = step.minimum(row_steps - 1)
    return Plan(order, step.where(index >= 0, -1), samples.length)


def even_plan(
    samples: Samples, steps: Count | None = None, schedule: Schedule = "linear"
) -> Plan:
    """Take a random order in groups of the sizes that mdm has on average, rounded."""
    order, index = samples.order_by(samples.uniforms)
    # Entry `index` of n unmasks where the share of unmasked positions is expected to
    # pass it. More steps than positions would leave some empty: a row takes n at most.
    n = samples.missing[:, None]
    row_steps = n.minimum(samples.steps_of(steps))
    divisor = n.clamp(min=1)
    if schedule == "linear":  # in integers, so that groups differ by at most one
        step = index * row_steps // divisor
    else:
        middle = (index + 0.5) / divisor
        middle = middle.clamp(0, 1).double()
        step = (elapsed_at(middle, schedule) * row_steps).long()
    step = step.clamp(max=row_steps - 1)
    return Plan(order, step.where(index >= 0, -1), samples.length)


def elapsed_at(share: Tensor, schedule: Schedule) -> Tensor:
    """Return 1 - t at the time t at which this share u of the positions is unmasked:
    t = 1 - u, or with cosine u = 1 - sin(pi t / 2)."""
    if schedule == "linear":
        return share
    if schedule == "cosine":
        return (1 - share).acos() * (2 / math.pi)
    raise UserError(f"the schedule is {schedule!r}; give 'linear' or 'cosine'")


def score_plan(
    samples: Samples,
    by: ScoreName = "confidence",
    group: Count | None = None,
    threshold: Amount | None = None,
    entropy_bound: Amount | None = None,
    block: Count | None = None,
) -> Plan:
    """Let the model choose the `group` positions of each step, by a score (A3's dynamic
    resampling).

    threshold, entropy_bound: see `Pace`; `group` is then the most of a step, by default
    any number, and else 1. block: positions of blocks that are filled in one after the
    other, counted from the beginning of a sample (semi-autoregressive, as LLaDA, arXiv
    2502.09992)."""
    if group is None and threshold is None and entropy_bound is None:
        group = 1
    if threshold is not None:
        check_threshold(by, threshold)
    # A random order, within blocks: it decides between equals.
    block_number = samples.position // (block or max(samples.T, 1))
    key = block_number + samples.uniforms
    if threshold is None and entropy_bound is None and block is None:
        return replace(samples.in_groups(key, group or 1), unmask_by=by)
    order, index = samples.order_by(key)
    return Plan(
        order=order,
        step=torch.where(index >= 0, 0, -1),
        length=samples.length,
        unmask_by=by,
        pace=Pace(threshold, entropy_bound, most=group),
        block=block,
    )


def speculative_plan(samples: Samples, draft: Count = 8, order: str = "random") -> Plan:
    """Draft `draft` positions of an order in parallel, then verify them in one causal
    pass: the joint distribution of one position a step.

    Self-speculation (Guo & Ermon 2025): the same model drafts and verifies. order: as
    of `order_plan`."""
    return replace(order_plan(samples, order, group=draft), draft=draft)


# To add a mode: a function, and a row here. Each score of scores.py and each kind of
# orders of orders.py is a mode as well, of `score_plan` and `order_plan`.
MODES: dict[str, Callable[..., Plan]] = {
    "mdm": mdm_plan,
    "even": even_plan,
    "speculative": speculative_plan,
}


def stack_plans(plans: list[Plan], length: int | None = None) -> Plan:
    """Return one plan of the rows of several of one kind, whose rows may differ in
    length. length: positions of the plan; by default those of the longest."""
    T = length or max(plan.order.shape[1] for plan in plans)
    orders = []
    steps = []
    lengths = []
    for plan in plans:
        absent = torch.arange(plan.order.shape[1], T)
        absent = absent.expand(len(plan.order), -1)
        no_step = torch.full_like(absent, -1)
        orders.append(torch.cat([plan.order, absent], dim=1))
        steps.append(torch.cat([plan.step, no_step], dim=1))
        lengths.append(plan.length)
    return replace(
        plans[0],
        order=torch.cat(orders),
        step=torch.cat(steps),
        length=torch.cat(lengths),
    )


def group_sizes(plan: Plan) -> Tensor:
    """Return the positions in each group of each row, LongTensor (B, G), empty groups
    at the end. Groups of a row are its steps that unmask something, as in this row,
    whose first entry is given:

        step     -1  0  0  3  5  5
        starts       x     x  x
        group     0  1  1  2  3  3     sizes 2, 1, 2"""
    generated = plan.generated
    before = torch.full_like(plan.step[:, :1], -1)
    rises = plan.step.diff(dim=1, prepend=before) > 0
    starts = rises & generated
    # Groups are counted from 1; what is given or absent falls into group 0, which is
    # dropped.
    group = starts.cumsum(dim=1) * generated
    groups = int(group.max()) if group.numel() else 0
    sizes = torch.zeros(len(plan.order), groups + 1, dtype=torch.long)
    sizes.scatter_add_(1, group, torch.ones_like(group))
    return sizes[:, 1:]
