"""The likelihood of text under a model: an eval set is scored in rounds, each of which draws the
orders (or an encoder's masks) of every sequence once.

N sequences of a set, B in a batch, T tokens in a block, D Monte Carlo samples (`draws`)."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..checkpoints import Loaded
from ..model import AOGPT
from ..objectives import token_nll, token_score_entropy
from ..orders import OrderConfig, Roles
from ..runtime.command_line import visible
from ..runtime.devices import autocast, out_of_memory, release_memory, tf32
from ..runtime.processes import Processes
from ..sampling.engine import generate
from ..sampling.plans import Pace, Rule, l2r_plan
from .ensembles import cheap_gains
from .estimates import Estimate, estimate
from .eval_sets import EvalSet

ORDERS_PER_CONTEXT = 8  # gains vary far less than losses: they need fewer samples


@dataclass(frozen=True)
class Scorer:
    """One kind of likelihood of text under a model: along each order drawn from a distribution (for
    encoders under uniform orders the any-order ELBO, from random masks), along the order in which
    the model itself would decode the text (a rule: DUEL), or without both SEDD's own bound. (Along
    orders SEDD's outputs are taken as probabilities.)"""

    orders: OrderConfig | None = None
    rule: Rule | None = None
    group: int = 1  # steps that are predicted at once
    ensembles: tuple[int, ...] = (1,)  # rising sizes, above 1 under uniform orders only
    weighted: bool = False  # the importance-weighted bound over all draws
    joint: bool = (
        False  # stratified, as masks are: the sequences of a draw depend on one another
    )

    @property
    def exact(self) -> bool:  # nothing is random
        return self.rule is not None or self.orders is not None and self.orders.is_fixed

    def nll(
        self, loaded: Loaded, tokens: Tensor, draw: tuple, roles: Roles | None
    ) -> Tensor:
        """-log p of every token, (B, T) float64, in sequence order, NaN where none is scored. draw:
        (seed, number of the draw, rows, total of rows)."""
        if self.rule is not None:
            return decoding_nll(loaded.model, tokens, self.rule, self.group, roles)
        if self.orders is not None:
            how = loaded.scored_from, self.group, roles
            return token_nll(loaded.model, tokens, self.orders, *draw, *how)
        assert roles is None, "a prompt has no part in score entropy"
        return token_score_entropy(loaded.model, tokens, *draw)


def decoding_nll(
    model: AOGPT, tokens: Tensor, rule: Rule, group: int, roles: Roles | None = None
) -> Tensor:
    """-log p of every token along the order in which the model would decode the text if it drew
    these tokens: (B, T) float64, in sequence order, NaN where a token is not predicted. The rule
    picks the next positions, `group` of them if it has no pace. The product along this order is a
    normalised likelihood: that of decoding at temperature 1 (DUEL, arXiv 2603.01367)."""
    B, T = tokens.shape
    length = torch.full((B,), T) if roles is None else roles.lengths
    given = None if roles is None else roles.given[:, : int(length.max())]
    plan = l2r_plan(B, length, given, group)  # equals are taken from left to right
    pace = rule.pace or (Pace(most=group) if rule.block else None)
    plan = replace(plan, pace=pace, block=rule.block, unmask_by=rule.score)
    texts = tokens[:, : plan.order.shape[1]].cpu()
    got = generate(model, plan, texts, forced=texts)
    nll = (-got.log_probs.double()).where(got.step >= 0, math.nan)
    return F.pad(nll, (0, T - nll.shape[1]), value=math.nan)


class Task(NamedTuple):
    """An eval set and how it is scored."""

    loaded: Loaded
    eval_set: EvalSet
    name: str  # of the orders, as the user wrote them
    scorer: Scorer

    def scored_tokens(self) -> Tensor:
        """(N,) tokens of each row that are scored."""
        roles = self.eval_set.roles(range(self.eval_set.count))
        if roles is None:
            return self.eval_set.lengths - self.loaded.scored_from
        # The first step of an order is part of the prompt wherever there is one.
        return roles.predicted.sum(dim=1) - self.loaded.scored_from * ~roles.given.any(
            dim=1
        )

    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes of text of each token that is scored."""
        first = 0  # random orders leave out every token equally often
        if self.scorer.orders is not None and self.scorer.orders.kind == "l2r":
            first = self.loaded.scored_from
        return self.eval_set.mean_bytes(first)


class BatchRunner:
    """Takes the rows of an eval set through the model in batches, a share of them per process.

    batch_size: rows; None: enough for a fast pass, halved for good where memory runs out."""

    def __init__(
        self,
        procs: Processes,
        dtype: torch.dtype,
        block_size: int,
        batch_size: int | None = None,
    ):
        self.procs = procs
        self.dtype = dtype
        self.halves = batch_size is None
        most = (
            2**12 if procs.device.type == "cpu" else 2**19
        )  # tokens: more are not faster
        self.batch_size = batch_size or max(1, most // block_size)

    def run(
        self,
        task: Task,
        work: Callable[[Tensor, range], Tensor],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """work(tokens, rows) -> (B, ...) for all rows: (N, ...), on the CPU of every process."""
        eval_set = task.eval_set
        device = self.procs.device
        parts = []
        share = self.procs.share(eval_set.count)
        title = visible(f"{eval_set.name} {task.name}")
        quiet = None if self.procs.main else True
        row = share.start
        with tqdm(
            total=len(share), desc=title, unit="seq", leave=False, disable=quiet
        ) as bar:
            while row < share.stop:
                end = min(row + self.batch_size, share.stop)
                rows = eval_set.batch(range(row, end))
                part = None
                try:
                    with torch.no_grad(), autocast(device, dtype or self.dtype):
                        part = work(eval_set.tokens(rows).to(device), rows).cpu()
                except (MemoryError, RuntimeError) as error:
                    if (
                        not out_of_memory(error)
                        or not self.halves
                        or self.batch_size == 1
                    ):
                        raise
                if part is None:
                    self.batch_size //= 2
                    release_memory(
                        device
                    )  # out here, where no error keeps tensors alive
                    continue
                parts.append(part)
                row = rows.stop
                bar.update(len(rows))
        # A process has no part if there are fewer rows than processes.
        found = self.procs.gather(torch.cat(parts) if parts else None)
        return torch.cat([part for part in found if part is not None])


# By ensemble size: the loss, and for sizes above 1 its difference to size 1.
Scores = dict[int, tuple[Estimate, Estimate | None]]


class Losses(NamedTuple):
    """What a task costs: D Monte Carlo samples for each of N sequences."""

    nll: Tensor  # (N, D) float64, nats per token that is scored
    gains: Tensor | None = (
        None  # (N, fewer samples, ensemble sizes above 1), nats per token
    )


def losses_of(task: Task, runner: BatchRunner, seed: int, draws: int) -> Losses:
    """The losses of every sequence, with this number of Monte Carlo samples, one where the task is
    exact. What is random is a function of (seed, number of the sample, row), whatever the batches,
    the processes and the model."""
    scorer = task.scorer
    eval_set = task.eval_set
    larger = tuple(size for size in scorer.ensembles if size > 1)
    losses = []
    gains = []

    def loss(tokens: Tensor, rows: range) -> Tensor:
        draw = seed, len(losses), rows, eval_set.count
        return scorer.nll(task.loaded, tokens, draw, eval_set.roles(rows)).nanmean(
            dim=1
        )

    def gain(tokens: Tensor, rows: range) -> Tensor:
        how = seed, len(gains), rows, runner.batch_size, eval_set.roles(rows)
        return cheap_gains(task.loaded.model, tokens, larger, *how)

    for _ in range(1 if scorer.exact else draws):
        losses.append(runner.run(task, loss))
    # Two contexts at least if there are two draws: a single one does not show its error.
    for _ in range(
        max(min(draws, 2), math.ceil(draws / ORDERS_PER_CONTEXT)) if larger else 0
    ):
        # In float32 (or TF32): averaging the independent rounding of bfloat16 looks like a gain.
        with tf32(runner.procs.device, enabled=runner.dtype != torch.float32):
            gains.append(runner.run(task, gain, dtype=torch.float32))
    return Losses(
        torch.stack(losses, dim=1), torch.stack(gains, dim=1) if gains else None
    )


def scores_of(task: Task, losses: Losses) -> Scores:
    scorer = task.scorer
    scored = task.scored_tokens().double()
    of = _weighting(task)
    if scorer.weighted:
        return {
            1: (importance_weighted(losses.nll, scored, task.eval_set.documents), None)
        }
    found = {1: (estimate(_samples(task, losses.nll), joint=scorer.joint, **of), None)}
    # The loss of an ensemble is that of size 1 plus the gain, estimated from other contexts.
    for i, size in enumerate(size for size in scorer.ensembles if size > 1):
        gain = losses.gains[..., i]
        found[size] = estimate(losses.nll, gain, **of), estimate(gain, **of)
    return {size: found[size] for size in scorer.ensembles}


def difference(tasks: tuple[Task, Task], losses: tuple[Losses, Losses]) -> Estimate:
    """The mean loss of the first model minus that of the second one on the same text, nats per
    token, from the differences of every sequence and Monte Carlo sample."""
    gap = _samples(tasks[0], losses[0].nll - losses[1].nll)
    joint = any(task.scorer.joint for task in tasks)
    return estimate(gap, joint=joint, **_weighting(tasks[0]))


def _weighting(task: Task) -> dict[str, Tensor]:
    scored = task.scored_tokens().double()
    # The mean of the weighted rows is the mean over tokens.
    return {"weights": scored / scored.mean(), "documents": task.eval_set.documents}


def _samples(task: Task, nll: Tensor) -> Tensor:
    """(N, D), or (N,) where it is exact: for `estimate`, without Monte Carlo error."""
    return nll[:, 0] if task.scorer.exact else nll


def importance_weighted(
    nll: Tensor, scored: Tensor, documents: Tensor | None = None
) -> Estimate:
    """The importance-weighted bound over D orders of each sequence, -log mean_k p(x | order k)
    (Burda et al., arXiv 1509.00519), from losses (N, D), nats per token, and `scored` (N,) tokens.
    It falls with D, to -log of the mean of p over all orders. The Monte Carlo error is that of the
    log of a mean (delta method)."""
    D = nll.shape[1]
    log_p = -nll * scored[:, None]
    bound = (math.log(D) - log_p.logsumexp(dim=1)) / scored
    weights = scored / scored.mean()
    found = estimate(bound, weights=weights, documents=documents)
    share = (log_p - log_p.amax(dim=1, keepdim=True)).exp()  # p, up to a factor
    relative = (
        share.var(dim=1) / share.mean(dim=1).square() / D if D > 1 else bound * math.nan
    )
    variance = (weights / scored).square() * relative
    error = float(variance.sum().sqrt()) / len(nll)
    return replace(found, monte_carlo_error=error)
