"""The likelihood of text under a model: an eval set is scored in rounds, each of them one draw of
the orders (or of an encoder's masks) of every sequence, until the estimate is as good as asked.

N sequences of a set, B in a batch, T tokens in a block, D draws.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from checkpoints.load import Loaded
from evaluation.ensembles import cheap_gains
from evaluation.estimates import Estimate, estimate
from evaluation.eval_sets import EvalSet
from model import AOGPT
from objectives import token_nll, token_score_entropy
from orders import OrderConfig, Roles
from runtime.devices import autocast, out_of_memory, release_memory, tf32
from runtime.errors import UserError
from runtime.processes import Processes
from sampling.engine import generate
from sampling.plans import Pace, Rule, l2r_plan

LARGEST_PASS = {"cpu": 2**12, "cuda": 2**19}  # tokens: more do not make a pass faster
PRECISION_SAMPLE = 8  # blocks that are scored in both precisions
# Gains vary far less than losses (evaluation/ensembles.py): a context for every 8 orders costs
# little of the precision and saves most of the time.
ORDERS_PER_CONTEXT = 8
# Of an encoder's masks only whole draws are independent. Fewer than these show too little of their
# spread: a small error would often be luck, and a run that stops at a target would take its luck.
JOINT_DRAWS = 8


# ---- tasks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoringTask:
    """One eval set, under one distribution of orders, for ensembles of these sizes."""

    loaded: Loaded
    eval_set: EvalSet
    name: str
    """Of the orders, as the user wrote them."""
    orders: OrderConfig
    ensemble_sizes: tuple[int, ...]
    """Rising; 1 is no ensemble. Sizes above 1 are for uniformly random orders only."""
    seed: int
    max_draws: int
    target_se: float | None
    """Monte Carlo standard error, nats per token, that ends the draws early."""
    per_token: bool
    """Keep the loss of every token."""
    score_entropy: bool = False
    """SEDD's own bound instead of the likelihood of its outputs as probabilities."""
    group: int = 1
    """Steps of an order that are predicted at once."""
    rule: Rule | None = None
    """Instead of `orders`: those in which the model itself would decode (DUEL), without a pace
    `group` of positions a step."""
    bound: Literal["mean", "iw"] = "mean"
    """Of several orders: the mean of their losses, or the importance-weighted bound, which is
    -log of the mean of the probabilities that all draws give a sequence."""

    @property
    def true_ensembles(self) -> tuple[int, ...]:
        """Those of the sizes that are above 1."""
        return tuple(size for size in self.ensemble_sizes if size > 1)

    @property
    def exact(self) -> bool:
        """A single order is scored, without randomness."""
        return self.orders.is_fixed

    @property
    def importance_weighted(self) -> bool:
        return self.bound == "iw" and not self.exact

    @property
    def joint(self) -> bool:
        """The sequences of a draw depend on one another.

        What an encoder loses depends much on how many positions are masked. So a draw spreads these
        numbers evenly over the sequences (`objectives.evaluation_masks`: stratified), which takes
        most of that noise out of their mean; the price is that only whole draws are independent."""
        encoder = self.loaded.model.config.is_encoder
        return encoder and self.orders.kind == "random" and self.group == 1

    def passes(self, lengths: Tensor) -> Tensor | None:
        """Passes that a draw of the losses takes, for rows of these lengths, (N,); None where the
        model decides."""
        config = self.loaded.model.config
        if self.rule:
            return None
        at_once = config.target == "two_stream" or (
            self.group == 1 and (self.joint or not config.is_encoder)
        )
        return torch.ones_like(lengths) if at_once else -(-lengths // self.group)

    def scored_tokens(self) -> Tensor:
        """(N,) tokens of each row that count."""
        roles = self.eval_set.roles(range(self.eval_set.count))
        if roles is not None:
            # The first step of an order is given wherever anything is.
            missing = self.loaded.scored_from * ~roles.given.any(dim=1)
            return roles.predicted.sum(dim=1) - missing
        return self.eval_set.lengths() - self.loaded.scored_from

    def gain_draws(self, loss_draws: int) -> int:
        """How many draws of the ensembles' gains, each with a context of its own, so many draws of
        losses call for: two at least, if there are two of those, since a single one does not show
        its error."""
        if not self.true_ensembles:
            return 0
        return max(min(loss_draws, 2), math.ceil(loss_draws / ORDERS_PER_CONTEXT))


# ---- batches -------------------------------------------------------------------------------------


class BatchRunner:
    """Takes the rows of an eval set through the model in batches, every process its share of them.

    How much memory a batch takes is not estimated: the first one is as large as is of any use, and
    where memory runs out it is halved for good, unless its size was given.

    Attributes: procs; dtype; batch_size, in rows."""

    def __init__(
        self, procs: Processes, dtype: torch.dtype, block_size: int, batch_size: int | None = None
    ):
        self.procs, self.dtype, self.given = procs, dtype, batch_size is not None
        self.batch_size = batch_size or max(1, LARGEST_PASS[procs.device.type] // block_size)

    def run(
        self, task: ScoringTask, work: Callable[[Tensor, range], Tensor], float32: bool = False
    ) -> Tensor:
        """work(tokens, rows) -> (B, ...) for all rows: (N, ...), on every process.

        float32: whatever the dtype of the runner is."""
        eval_set, title = task.eval_set, f"{task.eval_set.name} {task.name}"
        dtype = torch.float32 if float32 else self.dtype
        share, blocks = self.procs.share(eval_set.count), eval_set.dataset.num_blocks
        parts, row = [], share.start
        # tqdm's disable=None: shown where there is a terminal.
        disable = None if self.procs.main else True
        with tqdm(total=len(share), desc=title, unit="seq", disable=disable, leave=False) as bar:
            while row < share.stop:
                end = min(row + self.batch_size, share.stop)
                if row < blocks:
                    end = min(end, blocks)  # the row after the blocks has another length
                rows = range(row, end)
                part = self._try_pass(task, work, rows, dtype)
                if part is None:  # memory ran out
                    self._halve()
                    continue
                parts.append(part)
                row = end
                bar.update(len(rows))
        # A process has no part if there are fewer rows than processes.
        found = self.procs.gather(torch.cat(parts) if parts else None)
        return torch.cat([part for part in found if part is not None])

    def _try_pass(
        self,
        task: ScoringTask,
        work: Callable[[Tensor, range], Tensor],
        rows: range,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """work(tokens, rows) on the CPU; None if memory ran out.

        A function of its own, since the error keeps tensors alive: when this has returned, both are
        gone, and their memory can be used again."""
        device = self.procs.device
        try:
            with torch.no_grad(), autocast(device, dtype):
                return work(task.eval_set.tokens(rows).to(device), rows).cpu()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return None

    def _halve(self) -> None:
        if self.given or self.batch_size == 1:
            advice = "use a device with more of it"
            if self.given:
                advice = "leave out --batch-size, or give a smaller one"
            raise UserError(
                f"the device is out of memory at {self.batch_size} sequences a pass; {advice}"
            )
        self.batch_size //= 2
        release_memory(self.procs.device)


# ---- scoring -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What came of a task."""

    estimates: dict[int, tuple[Estimate, Estimate | None]]
    """By ensemble size: the loss, and of true ensembles its change against size 1."""
    draws: int
    contexts: int
    stopped: str
    """exact: nothing is random; target: its error is small enough; budget: no draws are left."""
    seconds: float
    batch_size: int
    """Rows in a pass, after any halving."""
    precision_gap: dict | None
    """As of `_precision_gap`."""
    losses: Tensor
    """(N, D) nats per token of every sequence in every draw."""
    token_nll: Tensor | None
    """(N, T) the loss of every token, mean of the draws, NaN where none is scored; if asked for."""


def score(task: ScoringTask, runner: BatchRunner) -> Scores:
    """Score a task in rounds of one draw for every sequence.

    What is drawn follows from (seed, draw, row) alone, whatever the batches and the processes."""
    started = time.perf_counter()
    losses, gains, token_sums = [], [], 0.0
    stopped = None
    while stopped is None:
        # A round: one draw of the losses, then, now and then, one of the gains of ensembles.
        nll = _draw_losses(task, runner, draw=len(losses))
        losses.append(nll.nanmean(dim=1))
        if task.per_token:
            token_sums = token_sums + nll
        while len(gains) < task.gain_draws(len(losses)):
            gains.append(_draw_gains(task, runner, draw=len(gains)))
        estimates = _estimates(task, losses, gains)
        stopped = _why_stop(task, [loss for loss, _ in estimates.values()], len(losses))
    return Scores(
        estimates=estimates,
        draws=len(losses),
        contexts=len(gains),
        stopped=stopped,
        seconds=time.perf_counter() - started,
        batch_size=runner.batch_size,
        precision_gap=_precision_gap(task, runner),
        losses=torch.stack(losses, dim=1),
        token_nll=token_sums / len(losses) if task.per_token else None,
    )


def _draw_losses(task: ScoringTask, runner: BatchRunner, draw: int) -> Tensor:
    """One draw of the losses of all rows: (N, T) if the task asks for every token, else (N, 1)."""
    return runner.run(task, lambda tokens, rows: _losses(task, tokens, rows, draw))


def _losses(task: ScoringTask, tokens: Tensor, rows: range, draw: int) -> Tensor:
    """One draw of the losses of a batch, (B, T), or their means over the tokens, (B, 1), which is
    less to gather from the processes."""
    model, drawn = task.loaded.model, (task.seed, draw, rows, task.eval_set.count)
    if task.rule:
        nll = decoding_nll(model, tokens, task.rule, task.group, task.eval_set.roles(rows))
    elif task.score_entropy:
        nll = token_score_entropy(model, tokens, *drawn)
    else:
        how = task.loaded.scored_from, task.group
        nll = token_nll(model, tokens, task.orders, *drawn, *how, task.eval_set.roles(rows))
    if not task.per_token:
        return nll.nanmean(dim=1, keepdim=True)
    missing = task.eval_set.dataset.block_size - nll.shape[1]  # of the row after the blocks
    return F.pad(nll, (0, missing), value=math.nan)


def decoding_nll(
    model: AOGPT, tokens: Tensor, rule: Rule, group: int, roles: Roles | None = None
) -> Tensor:
    """-log p of every token along the order in which the model itself would decode the text, had it
    drawn these tokens: (B, T) float64, in sequence order, NaN where a token is not predicted.

    The rule takes the positions that the model is surest of next, without a pace `group` of them,
    so the order of a text follows from the model, and the product of the conditionals along it is a
    normalised likelihood: the exact one of what greedy order and temperature 1 draw (DUEL, arXiv
    2603.01367), over all ids of the model, as all likelihoods here are (samplers draw none that are
    not the tokenizer's, to which a trained model gives hardly anything)."""
    B, T = tokens.shape
    length = torch.full((B,), T) if roles is None else roles.lengths
    given = None if roles is None else roles.given[:, : int(length.max())]
    # Equals are taken from left to right: a rule must say which.
    plan = l2r_plan(B, length, given, group)
    pace = rule.pace or (Pace(most=group) if rule.block else None)
    plan = dataclasses.replace(plan, pace=pace, block=rule.block, unmask_by=rule.score)
    texts = tokens[:, : plan.order.shape[1]].cpu()
    got = generate(model, plan, texts, forced=texts)
    nll = (-got.log_probs.double()).where(got.step >= 0, math.nan)
    return F.pad(nll, (0, T - nll.shape[1]), value=math.nan)


def _draw_gains(task: ScoringTask, runner: BatchRunner, draw: int) -> Tensor:
    """One draw of the gains of the larger sizes over size 1, (N, sizes).

    Always in float32: bfloat16 rounds every member in another way, and the mean probability of
    predictions with independent noise looks like a gain. What TF32 makes of that was too little to
    measure (results/order_ensembles.md), so a GPU takes it unless float32 is asked for."""

    def work(tokens: Tensor, rows: range) -> Tensor:
        model, size = task.loaded.model, runner.batch_size
        return cheap_gains(model, tokens, task.true_ensembles, task.seed, draw, rows, size)

    with tf32(runner.procs.device, enabled=runner.dtype != torch.float32):
        return runner.run(task, work, float32=True)


def _estimates(
    task: ScoringTask, losses: list[Tensor], gains: list[Tensor]
) -> dict[int, tuple[Estimate, Estimate | None]]:
    """`Scores.estimates` from D draws of losses, (N,) each, and fewer of gains, (N, sizes) each."""
    scored = task.scored_tokens().double()
    weights = scored / scored.mean()  # the mean of the weighted rows is the mean over tokens
    nll = torch.stack(losses, dim=1)
    if task.importance_weighted:
        return {1: (importance_weighted(nll, scored), None)}
    if task.exact:
        nll = nll[:, 0]  # (N,) rather than (N, 1): for `estimate`, known without Monte Carlo error
    found = {1: (estimate(nll, joint=task.joint, weights=weights), None)}
    # The loss of an ensemble is that of size 1 plus the gain, estimated from other contexts:
    # estimate(nll, gain) is of the sum of its parts.
    for i, size in enumerate(task.true_ensembles):
        gain = torch.stack(gains, dim=1)[..., i]  # (N, draws of gains)
        found[size] = estimate(nll, gain, weights=weights), estimate(gain, weights=weights)
    return {size: found[size] for size in task.ensemble_sizes}


def importance_weighted(nll: Tensor, scored: Tensor) -> Estimate:
    """The importance-weighted bound over D orders of each sequence, -log mean_k p(x | order k)
    (Burda et al., arXiv 1509.00519), of losses (N, D) in nats per token, `scored` (N,) tokens each.

    Its mean over draws is at most the any-order loss, falls with D, and is never below -log of the
    mean of p over all orders. The Monte Carlo error is that of the logarithm of a mean, by the
    delta method."""
    D = nll.shape[1]
    log_p = -nll * scored[:, None]
    bound = (math.log(D) - log_p.logsumexp(dim=1)) / scored
    weights = scored / scored.mean()
    found = estimate(bound, weights=weights)
    share = (log_p - log_p.amax(dim=1, keepdim=True)).exp()  # p, up to a factor
    relative = share.var(dim=1) / share.mean(dim=1).square() / D if D > 1 else bound * math.nan
    variance = (weights / scored).square() * relative
    error = float(variance.sum().sqrt()) / len(nll)
    return dataclasses.replace(found, monte_carlo_error=error, degrees=max(D - 1, 1))


def _why_stop(task: ScoringTask, estimates: list[Estimate], draws: int) -> str | None:
    """As `Scores.stopped`; None: go on."""
    if task.exact:
        return "exact"
    if task.target_se and draws >= (JOINT_DRAWS if task.joint else 2):
        if all(e.monte_carlo_error <= task.target_se for e in estimates):
            return "target"
    return "budget" if draws >= task.max_draws else None


def _precision_gap(task: ScoringTask, runner: BatchRunner) -> dict | None:
    """By how much the losses of a few blocks in bfloat16, nats per token, differ from those in
    float32. On the main process; None elsewhere and where float32 is what is used."""
    if not runner.procs.main or runner.dtype == torch.float32:
        return None
    device, eval_set = runner.procs.device, task.eval_set
    count = min(PRECISION_SAMPLE, eval_set.dataset.num_blocks, eval_set.count)
    gaps = []
    for row in range(count):  # one at a time: float32 needs more memory than the batches have
        rows, losses = range(row, row + 1), {}
        for dtype in (torch.bfloat16, torch.float32):
            with autocast(device, dtype):
                nll = _losses(task, eval_set.tokens(rows).to(device), rows, draw=0)
            losses[dtype] = nll.nanmean()
        gaps.append(losses[torch.bfloat16] - losses[torch.float32])
    gap = torch.stack(gaps)
    return {"sequences": count, "mean": float(gap.mean()), "largest": float(gap.abs().max())}
