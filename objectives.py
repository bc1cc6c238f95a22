"""Losses and likelihoods: pure functions of (model, tokens, orders or masks), in nats per token.

Shapes: B sequences, T positions.

All of them bound or equal one quantity, -log p(x) / T averaged over prediction orders (the paper,
section 3): along orders for decoders, over random sets of masked positions for encoders. The masked
diffusion objective and the any-order autoregressive one are equal in expectation, so the losses of
decoders and encoders can be compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from orders import OrderConfig, Roles, orders_at
from runtime.errors import UserError
from runtime.randomness import philox_bits, to_uniform
from runtime.validation import Count, Probability, Table, check_values
from variants import group_log_probs, group_starts, log_linear_noise

SMALLEST_RATE = 2.0**-53  # random numbers may be 0, and weights are 1 / rate

DECODER_OBJECTIVES = ("ar", "ao_ar", "groupwise")


@dataclass(frozen=True)
class ObjectiveConfig(Table):
    """What training minimises."""

    kind: Literal["ar", "ao_ar", "groupwise", "lambda_dce", "k_dce", "t_dce", "score_entropy"] = (
        "ao_ar"
    )
    """Decoders: ar (left to right), ao_ar (along the orders of [order]), groupwise (A3: every group
    of `group` steps from the groups before it). Encoders (RADD): lambda_dce (random mask rate,
    stratified over the batch), k_dce (random number of masked tokens), t_dce (time on the
    log-linear noise schedule); score_entropy (SEDD)."""
    group: Count = 4
    """Steps in a group (groupwise only)."""
    noise_eps: Annotated[float, Interval(gt=0, lt=1)] = 1e-3
    """The log-linear schedule masks at most 1 - noise_eps of the tokens (t_dce and score_entropy
    only)."""
    prefix_prob: Probability = 0.0
    """Share of the sequences whose unmasked positions are the first ones, as many as a random set
    has: an encoder's share of left to right (encoders only)."""

    def __post_init__(self):
        check_values(self, lambda field: f"objective.{field}")
        if self.prefix_prob and self.kind in DECODER_OBJECTIVES:
            raise UserError(
                f"objective.prefix_prob is of encoders, and objective.kind is {self.kind!r}; set "
                "it to 0, and order.kind = 'mixture' for a share of left-to-right sequences"
            )


# ---- decoders: along orders ----------------------------------------------------------------------


def ao_ar_loss(model, tokens: Tensor, order: Tensor, weight: Tensor | None = None) -> Tensor:
    """Any-order autoregressive loss: mean over steps of -log p(x[s_i] | x[s_<i]) (the paper,
    section 3, equation 2).

    Under the identity order it is the usual autoregressive loss; over uniform orders its
    expectation equals the masked diffusion objective divided by the length.

    Args:
        model: AOGPT, or a compiled or distributed wrapper of one.
        tokens, order: LongTensor (B, T).
        weight: (B, T), of every step of the order; None: all count alike.

    Returns: scalar, nats per token, differentiable.
    """
    return weighted_mean(model(tokens, order), weight)


def groupwise_loss(
    model, tokens: Tensor, order: Tensor, group: int, weight: Tensor | None = None, given=None
) -> Tensor:
    """Mean over steps of -log p(x[s_i] | tokens of the groups before i's) (A3); two-stream models.

    Arguments as in `ao_ar_loss`; group: steps in a group, 1 being the any-order loss; given: (B,)
    steps before the first group, which are given.
    """
    if group == 1:
        return ao_ar_loss(model, tokens, order, weight)
    return weighted_mean(model(tokens, order, group_starts(order, group, given)), weight)


def weighted_mean(nll: Tensor, weight: Tensor | None) -> Tensor:
    return nll.mean() if weight is None else (nll * weight).mean()


# ---- encoders: over masks ------------------------------------------------------------------------


@dataclass
class Masks:
    """Masked positions of B sequences and what their losses weigh."""

    masked: Tensor
    """BoolTensor (B, T)."""
    weight: Tensor
    """(B,) factor of the sum over masked positions."""
    sigma: Tensor
    """(B,) noise level."""
    lengths: Tensor | None = None
    """(B,) of rows that are shorter than T; None: all have T."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "Masks":
        lengths = None if self.lengths is None else function(self.lengths)
        return Masks(function(self.masked), function(self.weight), function(self.sigma), lengths)

    def to(self, device) -> "Masks":
        return self.map(lambda tensor: tensor.to(device))


def masks_at(
    config: ObjectiveConfig,
    seed: int,
    step: int,
    rows: range,
    total: int,
    length: int,
    roles: Roles | None = None,
) -> Masks:
    """Masks of the sequences `rows` of a global batch of `total`: a pure function of the arguments.

    Each kind masks at random such that the loss times its weight has the masked diffusion objective
    as its expectation (RADD, section 3; SEDD for the last):

        kind            masked                              weight
        lambda_dce      at rate l ~ U(0, 1)                 1 / l
        k_dce           exactly k ~ U{1..T} positions       T / k
        t_dce           at rate (1 - eps) t, t ~ U(0, 1)    sigma'(t) / expm1(sigma(t)) = 1 / t
        score_entropy   as t_dce                            sigma'(t)

    The rates of lambda_dce are stratified over the batch, which lowers the variance of its loss.

    roles: of records, whose given tokens are never masked; T is then the number of those that are
    predicted.
    """
    # Row r of the table: one number for the rate of sequence r, and one for each of its positions.
    uniform = torch.from_numpy(to_uniform(philox_bits(seed, step, rows, length + 1)))
    of_sequence, of_position = uniform[:, 0], only_predicted(uniform[:, 1:], roles)
    eps, lengths = config.noise_eps, roles and roles.lengths
    if config.prefix_prob:
        of_sequence, of_position = with_prefixes(config.prefix_prob, of_sequence, of_position)
    if config.kind == "k_dce":
        n = number_predicted(of_position)
        return masks_of_size((of_sequence * n).long() + 1, of_position, eps, lengths)
    if config.kind == "lambda_dce":
        rate = stratified(seed, step, rows, total, length + 1).clamp(min=SMALLEST_RATE)
        return Masks(of_position < rate[:, None], 1 / rate, log_linear_noise(rate, eps), lengths)
    t = of_sequence.clamp(min=SMALLEST_RATE)
    rate = (1 - eps) * t
    masked, sigma = of_position < rate[:, None], log_linear_noise(t, eps)
    if config.kind == "t_dce":
        return Masks(masked, 1 / t, sigma, lengths)
    if config.kind != "score_entropy":
        raise UserError(f"{config.kind} has no masks")
    if roles is None:
        return Masks(masked, (1 - eps) / (1 - rate), sigma)  # the weight is sigma'(t)
    # The network is told the noise level of what is masked among all tokens, as where it generates.
    # Score entropy then weighs a token by its ratio, 1 / expm1(sigma); the weight makes 1 / t of
    # it.
    sigma = log_linear_noise(t * number_predicted(of_position) / lengths, eps)
    return Masks(masked, sigma.expm1() / t, sigma, lengths)


NEVER = 2.0  # instead of a random number, of a position that is not to be masked


def only_predicted(uniform: Tensor, roles: Roles | None) -> Tensor:
    """Random numbers (B, T), NEVER where a token is not predicted."""
    return uniform if roles is None else uniform.where(roles.predicted, NEVER)


def number_predicted(uniform: Tensor) -> Tensor:
    """LongTensor (B,), of the rows of what `only_predicted` gives."""
    return (uniform < NEVER).sum(dim=1)


def with_prefixes(prob: float, of_sequence: Tensor, of_position: Tensor) -> tuple[Tensor, Tensor]:
    """Random numbers of sequences (B,) and positions (B, T) such that a share `prob` of the rows is
    unmasked from the left.

    Masked are the positions with the smallest numbers: where they fall from left to right, the
    last. What a coin leaves of its uniform number is uniform again on either side.
    """
    heads = of_sequence < prob
    left = torch.where(
        heads, of_sequence / prob, (of_sequence - prob) / max(1 - prob, SMALLEST_RATE)
    )
    predicted, rising = of_position < NEVER, of_position.sort(dim=1).values
    # The first of n positions that are predicted gets the largest number, the last the smallest.
    after = (number_predicted(of_position)[:, None] - predicted.cumsum(dim=1)).clamp(min=0)
    falling = rising.gather(1, after).where(predicted, NEVER)
    return left, torch.where(heads[:, None], falling, of_position)


def masks_of_size(
    k: Tensor, uniform: Tensor, eps: float = 1e-3, lengths: Tensor | None = None
) -> Masks:
    """Masks of exactly k (B,) positions each, those with the smallest of random numbers (B, T)."""
    n = number_predicted(uniform)
    rank = uniform.argsort(dim=1).argsort(dim=1)
    return Masks(rank < k[:, None], n / k, log_linear_noise(k / n, eps), lengths)


def stratified(seed: int, step: int, rows: range, total: int, width: int) -> Tensor:
    """Uniform numbers, (len(rows),) float64, of which all `total` lie one in each of as many equal
    parts of (0, 1).

    All have one random offset, from the row after the batch's last in its table of random numbers,
    which is `width` wide, so that any process can compute its own rows.
    """
    offset = float(to_uniform(philox_bits(seed, step, range(total, total + 1), width))[0, 0])
    return (torch.arange(rows.start, rows.stop, dtype=torch.float64) / total + offset) % 1.0


def evaluation_masks(
    seed: int, step: int, rows: range, total: int, length: int, roles: Roles | None = None
) -> Masks:
    """As `masks_at` for k_dce, but the numbers of masked positions k are stratified over the batch.

    Better for evaluation than lambda_dce, which is as stratified: its weight 1 / lambda is not
    bounded, and its variance is infinite, so that errors estimated from a few draws are too small.
    """
    uniform = torch.from_numpy(to_uniform(philox_bits(seed, step, rows, length + 1)))
    of_position = only_predicted(uniform[:, 1:], roles)
    share, n = stratified(seed, step, rows, total, length + 1), number_predicted(of_position)
    return masks_of_size((share * n).long() + 1, of_position, lengths=roles and roles.lengths)


def masked_nll(model, tokens: Tensor, masks: Masks) -> Tensor:
    """weight * sum over masked positions of -log p(x_i | unmasked) / T of each sequence, (B,),
    differentiable.

    Its expectation over the masks is the masked diffusion objective, nats per token (RADD,
    arXiv 2406.03736).
    """
    nll = model(tokens, masks.masked, lengths=masks.lengths).double().sum(dim=1)
    return masks.weight * nll / tokens.shape[1]


def score_entropy(model, tokens: Tensor, masks: Masks, vocab: int) -> Tensor:
    """Denoising score entropy of each sequence per token, (B,), differentiable (SEDD, equation 8,
    absorbing graph).

    With N = `vocab` tokens besides [MASK] and the network's output o, the log-score of token y at a
    masked position is log s_y = o_y - log expm1(sigma) - log N, and its target is the ratio
    r = 1 / expm1(sigma) at the true token x, 0 elsewhere:

        sum_y s_y - r log s_x + r (log r - 1)

    which is 0 where s is the true ratio of a token that is certain.
    """
    return score_entropy_terms(model, tokens, masks, vocab).mean(dim=1)


def score_entropy_terms(model, tokens: Tensor, masks: Masks, vocab: int) -> Tensor:
    """Those of `score_entropy`, (B, T), 0 at unmasked positions."""
    sigma = masks.sigma.to(torch.get_default_dtype())
    # The model gives log sum_y exp(o_y) and o_x, of which the sum above is made.
    normaliser, output = model(tokens, masks.masked, sigma, masks.lengths).double()
    log_ratio = -masks.sigma.expm1().log()[:, None]  # log r, (B, 1)
    shift, ratio = log_ratio - math.log(vocab), log_ratio.exp()  # log s = o + shift
    entropy = (normaliser + shift).exp() - ratio * (output + shift) + ratio * (log_ratio - 1)
    return masks.weight[:, None] * entropy * masks.masked


# ---- evaluation ----------------------------------------------------------------------------------


def token_score_entropy(
    model, tokens: Tensor, seed: int, draw: int, rows: range, total: int
) -> Tensor:
    """One estimate of SEDD's own bound on the negative log-likelihood, in nats: the integral of
    score entropy over time. Terms (B, T) float64, in sequence order, whose mean it is. The times
    are stratified over the sequences `rows` of `total`.

    It is what SEDD is trained on and published with. `token_nll` takes its outputs as
    probabilities instead, which a score that is not normalised is not.
    """
    length, eps = tokens.shape[1], ObjectiveConfig.noise_eps
    uniform = torch.from_numpy(to_uniform(philox_bits(seed, draw, rows, length + 1)))
    t = stratified(seed, draw, rows, total, length + 1).clamp(min=SMALLEST_RATE)
    rate = (1 - eps) * t
    masks = Masks(uniform[:, 1:] < rate[:, None], (1 - eps) / (1 - rate), log_linear_noise(t, eps))
    return score_entropy_terms(model, tokens, masks.to(tokens.device), model.config.mask_token)


def token_nll(
    model,
    tokens: Tensor,
    orders: OrderConfig,
    seed: int,
    draw: int,
    rows: range,
    total: int,
    scored_from: int = 0,
    group: int = 1,
    roles: Roles | None = None,
) -> Tensor:
    """One estimate of the negative log-likelihood of every token, in nats.

    It is scored along one order drawn from `orders`. But an encoder needs a pass for every step of
    an order, so its any-order value is the ELBO, estimated with `evaluation_masks`; the terms of a
    sequence (0 where not masked) have it as their mean. Either follows from (seed, draw, row)
    alone.

    Args:
        model: a decoder or an encoder.
        tokens: LongTensor (B, T), the sequences `rows` of the `total` that are scored.
        orders: the distribution of orders; of an encoder "random" means its ELBO.
        seed, draw: which draw of orders or masks.
        scored_from: first step of an order that counts; 1 for GPT-2, which has no start token.
            NaN before it.
        group: steps that are predicted at once (`AOGPT.group_log_probs`); above 1 an encoder, too,
            is scored along an order.
        roles: of records (on the CPU): what is given comes first in every order; NaN where a token
            is not predicted.

    Returns: (B, T) float64, in sequence order.
    """
    length, device, more = tokens.shape[1], tokens.device, {}
    if model.config.is_encoder and orders.kind == "random" and group == 1:
        masks = evaluation_masks(seed, draw, rows, total, length, roles).to(device)
        log_probs = model.masked_log_probs(tokens, masks.masked, masks.lengths).double()
        return unscored_as_nan(-masks.weight[:, None] * log_probs, roles)
    order = orders_at(orders, seed, draw, rows, length)
    if roles is not None:
        order, more["prompt_lengths"] = roles.first_given(order), roles.given.sum(dim=1).to(device)
        if model.config.is_encoder:
            more["lengths"] = roles.lengths.to(device)
    order = order.to(device)
    if roles is not None and model.config.l2r_only:
        # What is given is put in front: such a model reads a text as if it had been written so.
        ahead = torch.arange(length, device=device).expand_as(order)
        nll = -model.token_log_probs(tokens.gather(1, order), ahead).double()
    else:
        nll = -group_log_probs(model, tokens, order, group, **more).double()
    nll[:, :scored_from] = torch.nan
    nll = torch.empty_like(nll).scatter_(1, order, nll)  # from prediction to sequence order
    return unscored_as_nan(nll, roles)


def unscored_as_nan(nll: Tensor, roles: Roles | None) -> Tensor:
    """Losses (B, T) in sequence order, NaN where a token is not predicted."""
    return nll if roles is None else nll.where(roles.predicted.to(nll.device), torch.nan)
