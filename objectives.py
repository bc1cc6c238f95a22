"""Losses and likelihood estimates. Pure functions of (model, tokens, orders or masks), in nats per token.

B sequences, T positions. All of them bound or equal the same quantity, -log p(x) / T averaged over prediction orders
(the paper, section 2): along orders for decoders, over random sets of masked positions for encoders.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from model import log_linear_noise
from orders import OrderConfig, orders_at, philox_bits

ObjectiveKind = Literal["ar", "ao_ar", "groupwise", "lambda_dce", "k_dce", "t_dce", "score_entropy"]
DECODER_OBJECTIVES = ("ar", "ao_ar", "groupwise")


@dataclass(frozen=True)
class ObjectiveConfig:
    """What training minimises."""

    kind: ObjectiveKind = "ao_ar"
    """Decoders: ar (left to right), ao_ar (along the orders of [order]), groupwise (A3: every group of `group` steps
    from the groups before it). Encoders (RADD): lambda_dce (random mask rate, stratified over the batch), k_dce (random
    number of masked tokens), t_dce (time on the log-linear noise schedule); score_entropy (SEDD)."""
    group: int = 4
    """Steps in a group (groupwise only)."""
    noise_eps: float = 1e-3
    """The log-linear schedule masks at most 1 - noise_eps of the tokens (t_dce and score_entropy only)."""

    def __post_init__(self):
        if self.kind not in get_args(ObjectiveKind):
            raise ValueError(
                f"objective.kind is {self.kind!r}; it must be one of {get_args(ObjectiveKind)}"
            )
        if self.group < 1:
            raise ValueError(f"objective.group is {self.group}; a group has at least 1 step")
        if not 0 < self.noise_eps < 1:
            raise ValueError(
                f"objective.noise_eps is {self.noise_eps}; give a number between 0 and 1"
            )


# ---- decoders: along orders ------------------------------------------------------------------------------------------


def ao_ar_loss(model, tokens: Tensor, order: Tensor) -> Tensor:
    """Any-order autoregressive loss: mean over steps of -log p(x[s_i] | x[s_<i]) (the paper, section 2).

    Under the identity order it is the usual autoregressive loss; over uniform orders its expectation equals the masked
    diffusion objective divided by the length.

    Args:
        model: AOGPT, or a compiled or distributed wrapper of one.
        tokens, order: LongTensor (B, T).

    Returns: scalar, nats per token, differentiable.
    """
    return model(tokens, order).mean()


def groupwise_loss(model, tokens: Tensor, order: Tensor, group: int) -> Tensor:
    """Mean over steps of -log p(x[s_i] | tokens of the groups before i's), groups of `group` steps (A3); two-stream."""
    if group == 1:
        return ao_ar_loss(model, tokens, order)
    steps = torch.arange(order.shape[1], device=order.device)
    return model(tokens, order, (steps - steps % group).expand_as(order)).mean()


# ---- encoders: over masks --------------------------------------------------------------------------------------------


@dataclass
class Masks:
    """Masked positions of B sequences and what their losses weigh.

    masked: BoolTensor (B, T). weight: (B,) factor of the sum over masked positions. sigma: (B,) noise level.
    """

    masked: Tensor
    weight: Tensor
    sigma: Tensor

    def to(self, device) -> "Masks":
        return Masks(self.masked.to(device), self.weight.to(device), self.sigma.to(device))


def masks_at(
    config: ObjectiveConfig, seed: int, step: int, rows: range, total: int, length: int
) -> Masks:
    """Masks of the sequences `rows` of a global batch of `total`: a pure function of the arguments.

    lambda_dce: rate lambda, weight 1 / lambda; the rates of the batch lie one in each of `total` equal parts of (0, 1).
    k_dce: exactly k ~ U{1..T} positions, weight T / k. t_dce: time t ~ U(0, 1), rate (1 - eps) t, weight
    sigma'(t) / expm1(sigma(t)) = 1 / t. score_entropy: the same times, weight sigma'(t). (RADD, section 3; SEDD.)
    """
    uniform = (philox_bits(seed, step, rows, length + 1) >> np.uint64(11)) * 2.0**-53
    draw, keys = torch.from_numpy(uniform[:, 0]), torch.from_numpy(uniform[:, 1:])
    if config.kind == "k_dce":
        k = (draw * length).long() + 1
        masked = keys.argsort(dim=1).argsort(dim=1) < k[:, None]
        return Masks(masked, length / k, log_linear_noise(k / length, config.noise_eps))
    if config.kind == "lambda_dce":
        rate = stratified(seed, step, rows, total, length + 1).clamp(min=2.0**-53)
        return Masks(keys < rate[:, None], 1 / rate, log_linear_noise(rate, config.noise_eps))
    t = draw.clamp(min=2.0**-53)
    sigma = log_linear_noise(t, config.noise_eps)
    rate = (1 - config.noise_eps) * t
    speed = (1 - config.noise_eps) / (1 - rate)  # d sigma / dt
    return Masks(keys < rate[:, None], speed if config.kind == "score_entropy" else 1 / t, sigma)


def stratified(seed: int, step: int, rows: range, total: int, width: int) -> Tensor:
    """Uniform numbers, (len(rows),) float64, of which all `total` lie one in each of as many equal parts of (0, 1).

    They have one offset for the whole batch, from the row after its last in a table of random numbers `width` wide.
    """
    offset = (
        philox_bits(seed, step, range(total, total + 1), width)[0, 0] >> np.uint64(11)
    ) * 2.0**-53
    return (torch.arange(rows.start, rows.stop, dtype=torch.float64) / total + float(offset)) % 1.0


def evaluation_masks(seed: int, step: int, rows: range, total: int, length: int) -> Masks:
    """As `masks_at` for k_dce, but the numbers of masked positions k are stratified over the batch.

    Better for evaluation than lambda_dce, which is as stratified: its weight 1 / lambda has no bound, and its variance
    near lambda = 0 none either, so that errors estimated from a few draws are too small.
    """
    keys = torch.from_numpy(
        philox_bits(seed, step, rows, length + 1)[:, 1:] >> np.uint64(11)
    ).double()
    k = (stratified(seed, step, rows, total, length + 1) * length).long() + 1
    masked = keys.argsort(dim=1).argsort(dim=1) < k[:, None]
    return Masks(masked, length / k, log_linear_noise(k / length))


def masked_nll(model, tokens: Tensor, masks: Masks) -> Tensor:
    """weight * sum over masked positions of -log p(x_i | unmasked) / T of each sequence, (B,), differentiable.

    Its expectation over the masks is the masked diffusion objective, nats per token (the paper, section 2; RADD).
    """
    nll = model(tokens, masks.masked).double().sum(dim=1)
    return masks.weight * nll / tokens.shape[1]


def score_entropy(model, tokens: Tensor, masks: Masks, vocab: int) -> Tensor:
    """Denoising score entropy of each sequence per token, (B,), differentiable (SEDD, equation 8, absorbing graph).

    With N = `vocab` tokens besides [MASK] and the network's output o, the log-score of token y at a masked position is
    o_y - log expm1(sigma) - log N, and its target is the ratio r = 1 / expm1(sigma) at the true token, 0 elsewhere:
    sum_y s_y - r log s_x + r (log r - 1), which is 0 where s is the true ratio of a token that is certain.
    """
    normaliser, output = model(
        tokens, masks.masked, masks.sigma.to(torch.get_default_dtype())
    ).double()
    log_ratio = -masks.sigma.expm1().log()[:, None]
    shift, ratio = log_ratio - float(np.log(vocab)), log_ratio.exp()
    entropy = (normaliser + shift).exp() - ratio * (output + shift) + ratio * (log_ratio - 1)
    return masks.weight * (entropy * masks.masked).sum(dim=1) / tokens.shape[1]


# ---- evaluation ------------------------------------------------------------------------------------------------------


def token_nll(
    model,
    tokens: Tensor,
    orders: OrderConfig,
    seed: int,
    draw: int,
    rows: range,
    total: int,
    scored_from: int = 0,
) -> Tensor:
    """One estimate of the negative log-likelihood of every token, (B, T) float64, nats, in sequence order.

    A decoder is scored along one order drawn from `orders`. An encoder knows no order: its ELBO, the any-order value,
    is estimated with `evaluation_masks`, stratified over `total` sequences; the terms of a sequence (0 where not
    masked) have the ELBO as their mean. Either follows from (seed, draw, row) alone.

    Args:
        tokens: (B, T), the sequences `rows` of the `total` that are scored.
        scored_from: first step of an order that counts; 1 for GPT-2, which has no start token. NaN before it.
    """
    if model.config.is_encoder:
        if orders.kind != "random":
            raise ValueError(
                f"an encoder has an any-order likelihood only, not one for orders of kind {orders.kind!r}"
            )
        masks = evaluation_masks(seed, draw, rows, total, tokens.shape[1]).to(tokens.device)
        return -masks.weight[:, None] * model.masked_log_probs(tokens, masks.masked).double()
    order = orders_at(orders, seed, draw, rows, tokens.shape[1]).to(tokens.device)
    nll = -model.token_log_probs(tokens, order).double()
    nll[:, :scored_from] = torch.nan
    return torch.empty_like(nll).scatter_(1, order, nll)


def held_out_nll(
    model,
    tokens: Tensor,
    orders: OrderConfig,
    seed: int,
    draw: int,
    rows: range,
    total: int,
    scored_from: int = 0,
) -> Tensor:
    """Mean of `token_nll` over the scored tokens of each sequence, (B,) float64, nats per token."""
    return token_nll(model, tokens, orders, seed, draw, rows, total, scored_from).nanmean(dim=1)
