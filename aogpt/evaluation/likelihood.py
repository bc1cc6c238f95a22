"""The likelihood of text under a model: an eval set is scored in rounds, each of which
draws the orders (or an encoder's masks) of every sequence once.

N sequences of a set, B in a batch, T tokens in a block, D Monte Carlo samples
(`draws`)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ..checkpoints import Loaded
from ..model import AOGPT, Transformer
from ..objectives import evaluation_masks, score_entropy
from ..orders import OrderConfig, Roles, orders_at
from ..runtime.command_line import visible
from ..runtime.devices import out_of_memory, release_memory, tf32
from ..runtime.processes import Processes
from ..runtime.randomness import SCORED_ORDERS
from ..sampling.engine import Engine
from ..sampling.modes import PlanFunction
from ..sampling.plans import Samples
from ..sampling.records import end_first
from ..scoring import group_starts, known_from, masked_log_probs, token_log_probs
from .ensembles import cheap_gains
from .estimates import Estimate, estimate
from .eval_sets import EvalSet

BATCH_TOKENS = {"cpu": 2**12, "cuda": 2**19}  # of a pass; more are not faster
ORDERS_PER_CONTEXT = 8  # gains vary far less than losses: they need fewer samples


class TokenNLL(NamedTuple):
    """-log p of every token of B sequences, in nats, in sequence order. Which tokens
    are scored is a mask: a NaN is a result of the model, and no mean leaves it out."""

    values: Tensor  # (B, T) float64; 0 where a token is not scored
    scored: Tensor  # BoolTensor (B, T)

    def means(self) -> Tensor:
        """Return the mean over the scored tokens of each sequence, (B,)."""
        return self.values.sum(dim=1) / self.scored.sum(dim=1)


def token_score_entropy(
    model: Transformer, tokens: Tensor, seed: int, draw: int, rows: range, total: int
) -> Tensor:
    """Return one Monte Carlo sample of SEDD's own bound on the negative log-likelihood
    in nats, the integral of score entropy over time: terms (B, T), float64, in sequence
    order, whose mean it is. (`token_nll` takes SEDD's outputs as probabilities instead:
    the scores, normalised.)"""
    masks = evaluation_masks(
        seed, draw, rows, total, tokens.shape[1], kind="score_entropy"
    )
    masks = masks.map(lambda tensor: tensor.to(tokens.device))
    vocab = model.config.mask_token
    assert vocab is not None
    return score_entropy(model, tokens, masks, vocab)


def token_nll(
    model: Transformer,
    tokens: Tensor,
    orders: OrderConfig,
    seed: int,
    draw: int,
    rows: range,
    total: int,
    scored_from: int = 0,
    group: int = 1,
    roles: Roles | None = None,
) -> TokenNLL:
    """Return one Monte Carlo sample of the negative log-likelihood of every token, a
    function of (seed, draw, row). It is scored along one order from `orders`, `group`
    steps at once. For an encoder, which needs a pass for every step, single steps of
    "random" orders give the ELBO, estimated with `evaluation_masks`: the mean of the
    terms of a sequence (0 where not masked).

    tokens: LongTensor (B, T), the sequences `rows` of the `total` that are scored;
    draw: which sample; scored_from: first step that counts, 1 for GPT-2; roles (on the
    CPU): the tokens of the prompt, which comes first in every order."""
    length = tokens.shape[1]
    device = tokens.device
    if model.config.is_encoder and orders.kind == "random" and group == 1:
        masks = evaluation_masks(seed, draw, rows, total, length, roles=roles)
        masks = masks.map(lambda tensor: tensor.to(device))
        log_probs = masked_log_probs(model, tokens, masks.masked, masks.lengths)
        nll = -masks.weight[:, None] * log_probs.double()
        scored = torch.ones_like(nll, dtype=torch.bool)
    else:
        order = orders_at(orders, seed, draw, rows, length, stream=SCORED_ORDERS)
        prompt_lengths = None
        lengths = None
        if roles is not None:
            order = roles.first_given(order)
            prompt_lengths = roles.given.sum(dim=1).to(device)
            lengths = roles.lengths.to(device)
        order = order.to(device)
        if roles is not None and model.config.l2r_only:
            # The prompt moves to the front: such a model reads a text as if it were
            # written so.
            identity = torch.arange(length, device=device).expand_as(order)
            log_probs = token_log_probs(model, tokens.gather(1, order), identity)
        else:
            known = None
            if group > 1 or model.config.is_encoder:
                known = group_starts(order, group, prompt_lengths)
            if known is not None and prompt_lengths is not None:
                # An encoder would take a pass for each step of the prompt.
                known = known_from(prompt_lengths[:, None], known)
            log_probs = token_log_probs(model, tokens, order, known, lengths)
        nll = -log_probs.double()
        # From prediction order to sequence order.
        nll = torch.empty_like(nll).scatter_(1, order, nll)
        scored = torch.ones_like(nll, dtype=torch.bool)
        scored.scatter_(1, order[:, :scored_from], False)
    if roles is not None:
        scored &= roles.predicted.to(device)
    return TokenNLL(nll.where(scored, 0.0), scored)


@dataclass(frozen=True)
class Scorer:
    """A kind of likelihood of text under a model: along each order drawn from a
    distribution (for encoders under uniform orders the any-order ELBO, from random
    masks), along the order in which the model itself would decode the text (a mode by a
    score: DUEL), or, without orders and mode, SEDD's own bound. (Along orders SEDD's
    outputs are taken as probabilities.)"""

    orders: OrderConfig | None = None
    mode: PlanFunction | None = None
    group: int = 1  # steps that are predicted at once
    ensembles: tuple[int, ...] = (1,)  # rising sizes, above 1 under uniform orders only
    weighted: bool = False  # the importance-weighted bound over all draws
    # The sequences of a draw depend on one another: masks are stratified over them.
    joint: bool = False

    @property
    def exact(self) -> bool:
        """Return whether nothing is random."""
        if self.mode is not None:
            return True
        return self.orders is not None and self.orders.is_fixed

    @property
    def larger_ensembles(self) -> list[int]:
        """Return the ensemble sizes above 1."""
        return [size for size in self.ensembles if size > 1]


def decoding_nll(
    model: AOGPT, tokens: Tensor, mode: PlanFunction, roles: Roles | None = None
) -> TokenNLL:
    """Return -log p of every token along the order in which the model would decode the
    text if it drew these tokens. Tokens that are not predicted are not scored.

    mode: `score_plan` with its arguments. The product along this order is a normalised
    likelihood: that of decoding at temperature 1 (DUEL, arXiv 2603.01367)."""
    B, T = tokens.shape
    length = torch.full((B,), T)
    given = None
    longest = T
    if roles is not None:
        length = roles.lengths
        longest = int(length.max())
        given = roles.given[:, :longest]
    # In place of random numbers, so that equals are taken from left to right.
    rising = torch.arange(longest, dtype=torch.float64) / longest
    plan = mode(Samples(B, length, rising.expand(B, longest), given=given))
    if roles is not None and roles.end is not None and roles.end.any():
        plan = end_first(plan)
    width = plan.order.shape[1]
    texts = tokens[:, :width].cpu()
    decoded = Engine(model).generate(plan, texts, forced=texts)
    nll = F.pad(-decoded.log_probs.double(), (0, T - width))
    predicted = F.pad(decoded.step >= 0, (0, T - width), value=False)
    return TokenNLL(nll.where(predicted, 0.0), predicted)


class Task(NamedTuple):
    """An eval set and how it is scored."""

    loaded: Loaded
    eval_set: EvalSet
    name: str  # of the orders, as the user wrote them
    scorer: Scorer

    def scored_tokens(self) -> Tensor:
        """Return how many tokens of each row are scored, (N,)."""
        skipped = self.loaded.scored_from
        rows = range(self.eval_set.count)
        roles = self.eval_set.roles(rows)
        if roles is None:
            return self.eval_set.lengths - skipped
        # The first step of an order is part of the prompt wherever there is one.
        has_prompt = roles.given.any(dim=1)
        predicted = roles.predicted.sum(dim=1)
        return predicted - skipped * ~has_prompt

    def bytes_per_token(self) -> float | None:
        """Return the mean UTF-8 bytes of text of each token that is scored."""
        first = 0  # random orders leave out every token equally often
        if self.scorer.orders is not None and self.scorer.orders.kind == "l2r":
            first = self.loaded.scored_from
        return self.eval_set.mean_bytes(first)


class BatchRunner:
    """A runner that computes results for the rows of an eval set in batches, a share of
    the rows on each process. Batches are large enough for a fast pass, and halved for
    good where memory runs out."""

    def __init__(self, procs: Processes, dtype: torch.dtype, block_size: int):
        self.procs = procs
        self.dtype = dtype
        most = BATCH_TOKENS.get(procs.device.type, BATCH_TOKENS["cuda"])
        self.batch_size = max(1, most // block_size)

    def run(
        self,
        task: Task,
        work: Callable[[Tensor, range], Tensor],
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the results of all rows, (N, ...), on the CPU of every process.

        work: a function of the tokens (B, T) and the row numbers of a batch that
        returns its results (B, ...). dtype: of this run alone."""
        eval_set = task.eval_set
        device = self.procs.device
        dtype = dtype or self.dtype
        share = self.procs.share(eval_set.count)
        progress = tqdm(
            total=len(share),
            desc=visible(f"{eval_set.name} {task.name}"),
            unit="seq",
            leave=False,
            disable=None if self.procs.main else True,
        )
        parts = []
        row = share.start
        with progress as bar, torch.no_grad():
            while row < share.stop:
                end = min(row + self.batch_size, share.stop)
                rows = eval_set.of_one_length(range(row, end))
                mixed = torch.autocast(
                    device.type, dtype, enabled=dtype == torch.bfloat16
                )
                try:
                    with mixed:
                        part = work(eval_set.tokens(rows).to(device), rows).cpu()
                except (MemoryError, RuntimeError) as error:
                    if self.batch_size == 1 or not out_of_memory(error):
                        raise
                    part = None
                if part is None:  # out here, where no error keeps tensors alive
                    self.batch_size //= 2
                    release_memory(device)
                    continue
                parts.append(part)
                row = rows.stop
                bar.update(len(rows))
        # A process has no part if there are fewer rows than processes.
        own = torch.cat(parts) if parts else None
        gathered = self.procs.gather(own)
        return torch.cat([part for part in gathered if part is not None])


# What the results of two models on one text share.
SHARED = "dataset data orders group bound blocks tokens draws".split()


class Losses(NamedTuple):
    """The losses of a task: D Monte Carlo samples for each of N sequences."""

    nll: Tensor  # (N, D) float64, nats per token that is scored
    # (N, fewer samples, ensemble sizes above 1), nats per token: the loss of the
    # ensemble minus that of size 1, so below 0 where it is better
    gains: Tensor | None = None


def losses_of(task: Task, runner: BatchRunner, seed: int, draws: int) -> Losses:
    """Return the losses of every sequence, with this number of Monte Carlo samples, one
    where the task is exact. Random numbers are a function of (seed, number of the
    sample, row), whatever the batches, the processes and the model."""
    scorer = task.scorer
    eval_set = task.eval_set
    sizes = scorer.larger_ensembles
    losses = []
    gains = []

    def loss(tokens: Tensor, rows: range, draw: int) -> Tensor:
        """Return the loss of each row of a batch, (B,)."""
        loaded = task.loaded
        roles = eval_set.roles(rows)
        if scorer.mode is not None:
            return decoding_nll(loaded.model, tokens, scorer.mode, roles).means()
        if scorer.orders is None:
            assert roles is None, "a prompt has no part in score entropy"
            terms = token_score_entropy(
                loaded.model, tokens, seed, draw, rows, eval_set.count
            )
            return terms.mean(dim=1)
        nll = token_nll(
            loaded.model,
            tokens,
            scorer.orders,
            seed=seed,
            draw=draw,
            rows=rows,
            total=eval_set.count,
            scored_from=loaded.scored_from,
            group=scorer.group,
            roles=roles,
        )
        return nll.means()

    def gain(tokens: Tensor, rows: range, draw: int) -> Tensor:
        """Return the gains of ensembles for each row of a batch, (B, S)."""
        return cheap_gains(
            task.loaded.model,
            tokens,
            sizes=tuple(sizes),
            seed=seed,
            draw=draw,
            rows=rows,
            batch_size=runner.batch_size,
            roles=eval_set.roles(rows),
        )

    for draw in range(1 if scorer.exact else draws):
        losses.append(runner.run(task, partial(loss, draw=draw)))
    if not sizes:
        return Losses(torch.stack(losses, dim=1))
    # Two contexts at least if there are two draws: a single one does not show its
    # error.
    contexts = math.ceil(draws / ORDERS_PER_CONTEXT)
    contexts = max(min(draws, 2), contexts)
    for draw in range(contexts):
        # In float32 (or TF32): averaging the independent rounding of bfloat16 looks
        # like a gain.
        with tf32(runner.procs.device, enabled=runner.dtype != torch.float32):
            work = partial(gain, draw=draw)
            gains.append(runner.run(task, work, dtype=torch.float32))
    return Losses(nll=torch.stack(losses, dim=1), gains=torch.stack(gains, dim=1))


def estimates_of(
    task: Task, losses: Losses
) -> Iterator[tuple[int, Estimate, Estimate | None]]:
    """Yield the estimates of a task: the size of an ensemble, its loss and, above 1,
    the difference to size 1."""
    scorer = task.scorer
    documents = task.eval_set.documents
    mean = partial(estimate, weights=_weights(task), documents=documents)
    if scorer.weighted:
        scored = task.scored_tokens().double()
        yield 1, importance_weighted(losses.nll, scored, documents), None
    elif 1 in scorer.ensembles:
        nll = losses.nll[:, 0] if scorer.exact else losses.nll
        yield 1, mean(nll, joint=scorer.joint), None
    # The loss of an ensemble is that of size 1 plus the gain, estimated from other
    # contexts.
    for i, size in enumerate(scorer.larger_ensembles):
        gains = losses.gains[..., i]
        yield size, mean(losses.nll, gains), mean(gains)


def bits_per_byte(nats: float | None, bytes_per_token: float | None) -> float | None:
    """Return nats per token as bits per byte; None where one is unknown."""
    if nats is None or bytes_per_token is None:
        return None
    return nats / math.log(2) / bytes_per_token


def result_rows(task: Task, losses: Losses, draws: int) -> list[dict]:
    """Return the results of a task for the JSON report, one per ensemble size."""
    eval_set = task.eval_set
    bytes_per_token = task.bytes_per_token() or None  # an end of text has none
    of_task = {
        "model": task.loaded.path,
        "dataset": eval_set.name,
        "data": eval_set.description(),
        "orders": task.name,
        "group": task.scorer.group,
        "bound": "iw" if task.scorer.weighted else "mean",
        "bytes_per_token": bytes_per_token,
        "blocks": eval_set.dataset.num_blocks,
        "tokens": int(task.scored_tokens().sum()),
        "draws": 1 if task.scorer.exact else draws,
        "exact": task.scorer.exact,
    }
    rows = []
    for size, loss, change in estimates_of(task, losses):
        row = {
            **of_task,
            "ensemble": size,
            **vars(loss),  # the fields of Estimate
            "perplexity": loss.perplexity,
            "perplexity_95": loss.interval(),
            "bits_per_token": loss.nll / math.log(2),
            "bits_per_byte": bits_per_byte(loss.nll, bytes_per_token),
            "gain": -change.nll if change else None,
            "gain_error": change.standard_error if change else None,
            "nats_per_record": record_nats(task, loss.nll),
        }
        rows.append(row)
    return rows


def record_nats(task: Task, nll: float) -> float | None:
    """Return the mean nats of a record that ends given its prompt, from those of its
    tokens: where its end is given, with -log p(length | at least that of the prompt),
    as a sample that goes on with a text draws its length. None for other text."""
    eval_set = task.eval_set
    if "lengths" not in eval_set.dataset.meta["splits"][eval_set.dataset.split]:
        return None
    nats = nll * int(task.scored_tokens().sum()) / eval_set.count
    end = task.loaded.record_end
    if end is not None:
        lengths = eval_set.lengths.tolist()  # with the end
        prompts = eval_set.prompt_lengths.tolist()
        log_prob = 0.0
        for length, known in zip(lengths, prompts, strict=True):
            log_prob += end.log_prob(length - 1, least=known)
        nats -= log_prob / len(lengths)
    return nats


def difference_row(tasks: list[Task], losses: list[Losses], rows: list[dict]) -> dict:
    """Return the comparison of two models on one text, along one order, for the JSON
    report: the mean loss of the first minus that of the second, from the differences of
    every sequence and Monte Carlo sample. rows: their results."""
    task = tasks[0]
    first, second = losses
    differences = first.nll - second.nll
    gap = estimate(
        differences[:, 0] if task.scorer.exact else differences,
        joint=any(task.scorer.joint for task in tasks),
        weights=_weights(task),
        documents=task.eval_set.documents,
    )
    a, b = rows
    nats = {
        "a": a["nll"],
        "b": b["nll"],
        "difference": gap.nll,
        "half_width_95": gap.half_width,
    }
    bits = {
        key: bits_per_byte(value, a["bytes_per_token"]) for key, value in nats.items()
    }
    row = {key: a[key] for key in SHARED}
    row.update(vars(gap))
    row.update(
        nll=nats,
        bits_per_byte=bits,
        p=gap.p_value,
        p_by="document" if gap.documents > 1 else "sequence",
    )
    return row


def _weights(task: Task) -> Tensor:
    """Return the weights (N,) of rows under which their mean is that over tokens."""
    scored = task.scored_tokens().double()
    return scored / scored.mean()


def importance_weighted(
    nll: Tensor, scored: Tensor, documents: Tensor | None = None
) -> Estimate:
    """Return the importance-weighted bound over D orders of each sequence, -log mean_k
    p(x | order k) (Burda et al., arXiv 1509.00519), from losses (N, D), nats per token,
    and `scored` (N,) tokens.

    It falls with D, to -log of the mean of p over all orders. The Monte Carlo error is
    the jackknife's, which leaves out one order at a time: probabilities along orders
    differ by many nats, so that one or two of them make up the mean, and the error of a
    mean that is linear in them would be several times too small."""
    N, D = nll.shape
    log_p = -nll * scored[:, None]
    bound = (math.log(D) - log_p.logsumexp(dim=1)) / scored
    weights = scored / scored.mean()
    mean = estimate(bound, weights=weights, documents=documents)
    if D == 1:
        return replace(mean, monte_carlo_error=None)
    # The log of the sum of the others, for each order: of those before and those after.
    before = log_p.logcumsumexp(dim=1)
    after = log_p.flip(1).logcumsumexp(dim=1).flip(1)
    none = log_p.new_full((N, 1), -math.inf)
    before = torch.cat([none, before[:, :-1]], dim=1)
    after = torch.cat([after[:, 1:], none], dim=1)
    without_one = torch.logaddexp(before, after)  # (N, D)
    variance = without_one.var(dim=1) * (D - 1) ** 2 / D
    variance = (weights / scored).square() * variance
    error = float(variance.sum().sqrt()) / N
    if math.isnan(error) and not math.isnan(mean.nll):
        # Without one order nothing is left: losses are infinite.
        error = math.inf
    return replace(mean, monte_carlo_error=error)
