"""Losses and likelihoods: pure functions of (model, tokens, orders or masks), in nats
per token. `OBJECTIVES` lists what training can minimise.

All but masked_ce bound or equal one quantity, -log p(x) / T averaged over prediction
orders (the paper, section 3): along orders for decoders, over random sets of masked
positions for encoders. So the losses of decoders and encoders can be compared.

Shapes: B sequences, T positions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .orders import Roles
from .runtime.errors import UserError
from .runtime.randomness import ORDERS, SCORED_MASKS, philox_bits, to_uniform
from .runtime.validation import Count, Probability, check_values
from .scoring import group_starts
from .systems import NOISE_EPS, log_linear_noise

SMALLEST_RATE = 2.0**-53  # random numbers may be 0, and weights are 1 / rate
NEVER = 2.0  # in place of a random number, for positions that are never masked


@dataclass
class Masks:
    """The masked positions of B sequences, and the weights of their losses."""

    masked: Tensor  # BoolTensor (B, T)
    weight: Tensor  # (B,) factor of the sum over masked positions
    sigma: Tensor  # (B,) noise level
    lengths: Tensor | None = None  # (B,) of rows shorter than T; None: all have T

    def map(self, function: Callable[[Tensor], Tensor]) -> "Masks":
        """Return masks with `function` applied to every tensor."""
        lengths = None if self.lengths is None else function(self.lengths)
        return Masks(
            function(self.masked), function(self.weight), function(self.sigma), lengths
        )


@dataclass
class MicroBatch:
    """B sequences of T tokens, with the orders or masks of their loss."""

    tokens: Tensor  # LongTensor (B, T)
    # decoder: LongTensor (B, T), the position predicted at each step
    order: Tensor | None = None
    # decoder, with prompts (B, T): factor of the loss of each step
    weight: Tensor | None = None
    # decoder, with prompts LongTensor (B,): tokens of the prompt
    prompt_lengths: Tensor | None = None
    group: int = 1  # decoder, groupwise: steps that are predicted at once
    masks: Masks | None = None  # encoder
    vocab: int | None = None  # encoder: tokens besides [MASK]

    def map(self, function: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return a micro-batch with `function` applied to every tensor."""

        def optional(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        return MicroBatch(
            tokens=function(self.tokens),
            order=optional(self.order),
            weight=optional(self.weight),
            prompt_lengths=optional(self.prompt_lengths),
            group=self.group,
            masks=None if self.masks is None else self.masks.map(function),
            vocab=self.vocab,
        )


def ao_ar_loss(
    model: nn.Module,
    tokens: Tensor,
    order: Tensor,
    weight: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Return the any-order autoregressive loss: the mean over steps of
    -log p(x[s_i] | x[s_<i]) (the paper, section 3, equation 2), a differentiable
    scalar. Its mean over uniform orders is the masked diffusion objective / T. model:
    AOGPT, or a wrapper of it; tokens, order: LongTensor (B, T); weight: (B, T), of
    every step of the order; known: (B, T), of models with queries of their own, see
    `QueryDecoder.hidden`."""
    if known is None:
        nll = model(tokens, order)
    else:
        nll = model(tokens, order, known)
    return nll.mean() if weight is None else (nll * weight).mean()


def masked_nll(model: nn.Module, tokens: Tensor, masks: Masks) -> Tensor:
    """Return weight * sum over masked positions of -log p(x_i | unmasked) / T of each
    sequence, (B,): the masked diffusion objective in expectation (RADD, arXiv
    2406.03736)."""
    nll = model(tokens, masks.masked, lengths=masks.lengths).double().sum(dim=1)
    return masks.weight * nll / tokens.shape[1]


def score_entropy(model: nn.Module, tokens: Tensor, masks: Masks, vocab: int) -> Tensor:
    """Return the denoising score entropy, differentiable, (B, T), 0 at unmasked
    positions; its mean is per token (SEDD, equation 8, absorbing graph).

    With N = `vocab` tokens besides [MASK] and the network's output o, the log-score of
    token y at a masked position is log s_y = o_y - log expm1(sigma) - log N, and its
    target is the ratio r = 1 / expm1(sigma) at the true token x, 0 elsewhere:

        sum_y s_y - r log s_x + r (log r - 1)

    which is 0 where s is the true ratio of a token that is certain."""
    sigma = masks.sigma.to(torch.get_default_dtype())
    # The model gives log sum_y exp(o_y) and o_x, the terms of the sum above.
    normaliser, output = model(tokens, masks.masked, sigma, masks.lengths).double()
    log_ratio = -masks.sigma.expm1().log()[:, None]  # log r, (B, 1)
    # log s = o + shift
    shift = log_ratio - math.log(vocab)
    ratio = log_ratio.exp()
    entropy = (
        (normaliser + shift).exp() - ratio * (output + shift) + ratio * (log_ratio - 1)
    )
    return masks.weight[:, None] * entropy * masks.masked


# ---- the losses of OBJECTIVES: of a model and a micro-batch, mean nats per token -----


def order_loss(
    model: nn.Module, batch: MicroBatch, config: "ObjectiveConfig"
) -> Tensor:
    """Return the mean over steps of -log p(x[s_i] | tokens of the groups before i's), a
    scalar, in groups of `batch.group` steps (A3; 1: the paper)."""
    assert batch.order is not None
    known = None
    if batch.group > 1:
        known = group_starts(batch.order, batch.group, batch.prompt_lengths)
    return ao_ar_loss(model, batch.tokens, batch.order, batch.weight, known)


def mask_loss(model: nn.Module, batch: MicroBatch, config: "ObjectiveConfig") -> Tensor:
    """Return the mean weighted loss of an encoder at masked positions, a scalar."""
    assert batch.masks is not None
    return masked_nll(model, batch.tokens, batch.masks).mean()


def score_loss(
    model: nn.Module, batch: MicroBatch, config: "ObjectiveConfig"
) -> Tensor:
    """Return the mean score entropy of an encoder with noise, a scalar."""
    assert batch.masks is not None
    assert batch.vocab is not None
    losses = score_entropy(model, batch.tokens, batch.masks, batch.vocab)
    return losses.mean(dim=1).mean()


# ---- the masks of OBJECTIVES ---------------------------------------------------------
#
# Each function makes masks from uniform numbers, row_uniforms (B,) and
# position_uniforms (B, T), such that the weighted loss (of masked_ce alone not) has the
# masked diffusion objective as its expectation (RADD, section 3; SEDD). lengths (B,):
# tokens of the rows of data with prompts, without padding.
#
#     kind           masked                            weight
#     lambda_dce     at rate l ~ U(0, 1)               1 / l
#     masked_ce      as lambda_dce                     2: no bound, a mean over masks
#     k_dce          exactly k ~ U{1..n} positions     n / k
#     t_dce          at rate (1 - NOISE_EPS) t,        sigma'(t) / expm1(sigma(t)),
#                    t ~ U(0, 1)                       which is 1 / t
#     score_entropy  as t_dce                          sigma'(t)
#
# n is T, or the number of predicted tokens of a sequence with a prompt.


def masks_of_rate(
    row_uniforms: Tensor, position_uniforms: Tensor, lengths: Tensor | None
) -> Masks:
    """Return the masks of lambda_dce."""
    rate = row_uniforms.clamp(min=SMALLEST_RATE)
    masked = position_uniforms < rate[:, None]
    return Masks(masked, 1 / rate, log_linear_noise(rate), lengths)


def unweighted_masks(
    row_uniforms: Tensor, position_uniforms: Tensor, lengths: Tensor | None
) -> Masks:
    """Return the masks of masked_ce."""
    masks = masks_of_rate(row_uniforms, position_uniforms, lengths)
    masks.weight = torch.full_like(masks.weight, 2.0)
    return masks


def masks_of_count(
    row_uniforms: Tensor, position_uniforms: Tensor, lengths: Tensor | None
) -> Masks:
    """Return the masks of k_dce."""
    n = predicted_tokens(position_uniforms)
    k = (row_uniforms * n).long() + 1
    rank = position_uniforms.argsort(dim=1).argsort(dim=1)
    return Masks(rank < k[:, None], n / k, log_linear_noise(k / n), lengths)


def masks_of_time(
    row_uniforms: Tensor, position_uniforms: Tensor, lengths: Tensor | None
) -> Masks:
    """Return the masks of t_dce."""
    t = row_uniforms.clamp(min=SMALLEST_RATE)
    rate = (1 - NOISE_EPS) * t
    masked = position_uniforms < rate[:, None]
    return Masks(masked, 1 / t, log_linear_noise(t), lengths)


def masks_of_scores(
    row_uniforms: Tensor, position_uniforms: Tensor, lengths: Tensor | None
) -> Masks:
    """Return the masks of score_entropy."""
    masks = masks_of_time(row_uniforms, position_uniforms, lengths)
    t = row_uniforms.clamp(min=SMALLEST_RATE)
    if lengths is None:
        rate = (1 - NOISE_EPS) * t
        masks.weight = (1 - NOISE_EPS) / (1 - rate)
        return masks
    # The network gets the noise level of the masked share of all tokens, as when it
    # generates. Score entropy then weights a token by its ratio, 1 / expm1(sigma); this
    # makes it 1 / t.
    n = predicted_tokens(position_uniforms)
    masks.sigma = log_linear_noise(t * n / lengths)
    masks.weight = masks.sigma.expm1() / t
    return masks


def predicted_tokens(position_uniforms: Tensor) -> Tensor:
    """Return the number of tokens of each sequence that may be masked, (B,)."""
    return (position_uniforms < NEVER).sum(dim=1)


# ---- objectives ----------------------------------------------------------------------


class Objective(NamedTuple):
    """An objective: its loss, which may have settings of its own in `ObjectiveConfig`,
    and, for encoders, its masks. Whatever a run trains, it is validated by `token_nll`:
    a decoder along orders, an encoder by its ELBO."""

    loss: Callable[[nn.Module, MicroBatch, "ObjectiveConfig"], Tensor]
    # None: for decoders, along orders
    masks: Callable[[Tensor, Tensor, Tensor | None], Masks] | None = None
    in_groups: bool = False  # batches have groups of several steps
    of_scores: bool = False  # the outputs are scores, at a noise level
    # mask rates, or numbers of masked positions, over the sequences of a batch
    stratified: bool = False

    @property
    def for_encoders(self) -> bool:
        """Return whether this is an objective of encoders, else of decoders."""
        return self.masks is not None


OBJECTIVES = {
    "ar": Objective(order_loss),
    "ao_ar": Objective(order_loss),
    "groupwise": Objective(order_loss, in_groups=True),
    "lambda_dce": Objective(mask_loss, masks_of_rate, stratified=True),
    "masked_ce": Objective(mask_loss, unweighted_masks, stratified=True),
    "k_dce": Objective(mask_loss, masks_of_count, stratified=True),
    "t_dce": Objective(mask_loss, masks_of_time),
    "score_entropy": Objective(score_loss, masks_of_scores, of_scores=True),
}
ObjectiveKind = Literal[*OBJECTIVES]  # type: ignore[valid-type]


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss that training minimises."""

    # Decoders: ar (left to right), ao_ar (along the orders of [order]), groupwise (A3:
    # every group of steps from the groups before it). Encoders (RADD): lambda_dce
    # (random mask rate, stratified over the batch), masked_ce (the same, unweighted: no
    # bound, arXiv 2602.15014), k_dce (random number of masked tokens, stratified over
    # the batch), t_dce (time on the log-linear noise schedule); score_entropy (SEDD).
    kind: ObjectiveKind = "ao_ar"
    group: Count = 4  # steps in a group (groupwise only)
    # Share of the sequences whose unmasked positions are the first ones, which trains
    # an encoder from left to right, too (encoders only).
    prefix_prob: Probability = 0.0

    def __post_init__(self):
        check_values(self, name="objective.{}".format)
        if self.prefix_prob and not self.definition.for_encoders:
            raise UserError(
                f"objective.prefix_prob is for encoders, and objective.kind is "
                f"{self.kind!r}; set it to 0, and order.kind = 'mixture' instead"
            )

    @property
    def definition(self) -> Objective:
        """Return the row of OBJECTIVES."""
        return OBJECTIVES[self.kind]


def masks_at(
    config: ObjectiveConfig,
    seed: int,
    step: int,
    rows: range,
    total: int,
    length: int,
    roles: Roles | None = None,
) -> Masks:
    """Return the training masks of the sequences `rows` of a global batch of `total`, a
    pure function of the arguments. A prompt (in `roles`) is never masked."""
    row_uniforms, position_uniforms = _uniform(seed, step, rows, length, roles)
    if config.prefix_prob:
        row_uniforms, position_uniforms = _with_prefixes(
            config.prefix_prob, row_uniforms, position_uniforms
        )
    objective = config.definition
    if objective.stratified:
        row_uniforms = stratified(seed, step, rows, total, width=length + 1)
    assert objective.masks is not None, f"{config.kind} has no masks"
    lengths = None if roles is None else roles.lengths
    return objective.masks(row_uniforms, position_uniforms, lengths)


def evaluation_masks(
    seed: int,
    step: int,
    rows: range,
    total: int,
    length: int,
    roles: Roles | None = None,
    kind: str = "k_dce",
) -> Masks:
    """Return masks of an objective as `masks_at` does, with the numbers of masked
    positions, or the times, stratified over the batch. Not lambda_dce: its weight
    1 / lambda has infinite variance."""
    _, position_uniforms = _uniform(
        seed, step, rows, length, roles=roles, stream=SCORED_MASKS
    )
    row_uniforms = stratified(
        seed, step, rows, total, width=length + 1, stream=SCORED_MASKS
    )
    masks_of = OBJECTIVES[kind].masks
    assert masks_of is not None, f"{kind} has no masks"
    lengths = None if roles is None else roles.lengths
    return masks_of(row_uniforms, position_uniforms, lengths)


def _uniform(
    seed: int,
    step: int,
    rows: range,
    length: int,
    roles: Roles | None,
    stream: int = ORDERS,
) -> tuple[Tensor, Tensor]:
    """Return uniform numbers of sequences (B,) and positions (B, T), which are NEVER at
    tokens of the prompt."""
    bits = philox_bits(seed, step, rows, length + 1, stream)
    uniform = torch.from_numpy(to_uniform(bits))
    position_uniforms = uniform[:, 1:]
    if roles is not None:
        position_uniforms = position_uniforms.where(roles.predicted, NEVER)
    return uniform[:, 0], position_uniforms


def _with_prefixes(
    prob: float, row_uniforms: Tensor, position_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the uniform numbers of sequences (B,) and positions (B, T) such that in a
    share `prob` of the rows the latter fall from left to right."""
    heads = row_uniforms < prob  # there the unmasked positions are the first ones
    # Given the coin, its uniform number is uniform again on either side.
    left = torch.where(
        heads, row_uniforms / prob, (row_uniforms - prob) / max(1 - prob, SMALLEST_RATE)
    )
    predicted = position_uniforms < NEVER
    rising = position_uniforms.sort(dim=1).values
    # The first of n predicted positions gets the largest number, the last the smallest.
    after = (predicted.sum(dim=1, keepdim=True) - predicted.cumsum(dim=1)).clamp(min=0)
    falling = rising.gather(1, after).where(predicted, NEVER)
    return left, torch.where(heads[:, None], falling, position_uniforms)


def stratified(
    seed: int, step: int, rows: range, total: int, width: int, stream: int = ORDERS
) -> Tensor:
    """Return uniform numbers (len(rows),), float64, such that each of `total` equal
    parts of (0, 1) holds one of all `total` rows. width: of the table whose row `total`
    gives their random offset."""
    bits = philox_bits(seed, step, range(total, total + 1), width, stream)
    offset = float(to_uniform(bits)[0, 0])
    row = torch.arange(rows.start, rows.stop, dtype=torch.float64)
    return (row / total + offset) % 1.0
