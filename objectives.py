"""Losses and likelihood estimates. Pure functions of (model, tokens, orders), in nats per token."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def sequence_nll(model, tokens: Tensor, order: Tensor) -> Tensor:
    """Mean negative log-likelihood of each sequence under its order: (B, T), (B, T) -> (B,) float64, nats per token."""
    return -model.token_log_probs(tokens, order).double().mean(dim=1)


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences and its standard error, in nats per token."""

    nll: float
    standard_error: float
    sequences: int

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.nll, dtype=torch.float64).exp())


def estimate(sequence_nlls: Tensor) -> Estimate:
    """Mean and standard error over sequences of (N,) or (N, M) negative log-likelihoods (M orders each).

    The M orders of a sequence are averaged first, since they are not independent of one another given the data: the
    standard error, sample deviation / sqrt(N), then holds the spread of both the data and the orders. It is NaN for
    N = 1.
    """
    per_sequence = sequence_nlls.double().reshape(len(sequence_nlls), -1).mean(dim=1)
    n = len(per_sequence)
    deviation = per_sequence.std() if n > 1 else torch.tensor(float("nan"))
    return Estimate(float(per_sequence.mean()), float(deviation / n**0.5), n)
