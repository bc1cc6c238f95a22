"""How certain a mean over sequences is: standard errors and 95% intervals.

Two questions have two errors. What would *other text* of the same kind, and other random draws,
change? That is the spread of the sequences. What would other random draws (of orders, masks or
contexts) change for *this very text*? That is the Monte Carlo error: the spread of several draws of
the same sequence, which more draws make as small as one likes.

Shapes: N sequences, D draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences, in nats per token, and how uncertain it is."""

    nll: float
    standard_error: float
    """Over sequences: what other text and other draws would change. NaN for one sequence."""
    sequences: int
    monte_carlo_error: float = 0.0
    """Given the text: what other draws would change. NaN where a single draw does not tell."""
    degrees: float = math.inf
    """Degrees of freedom of monte_carlo_error."""

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll))

    def interval(self, given_data: bool = False) -> tuple[float, float]:
        """95% interval of the perplexity, from Student's t: over texts and draws, or, given the
        data, over draws for this very text."""
        if given_data:
            error, degrees = self.monte_carlo_error, self.degrees
        else:
            error, degrees = self.standard_error, self.sequences - 1
        reach = t_quantile(degrees) * error if error else 0.0
        return float(np.exp(self.nll - reach)), float(np.exp(self.nll + reach))


def estimate(*parts: Tensor, joint: bool = False, weights: Tensor | None = None) -> Estimate:
    """The mean over N sequences of a sum of parts, and its standard errors.

    A part is (N,), known exactly, or (N, D), D draws of an estimate of it; parts may differ in D.

    Args:
        joint: the N numbers of a draw depend on one another, as masks that are stratified over the
            sequences do. Then only the D means of the draws are independent: they tell the Monte
            Carlo error, with D - 1 degrees of freedom; and standard_error, which ignores the
            stratification, is too large rather than too small.
        weights: (N,) of mean 1, where sequences of different lengths count by their tokens.
    """
    # The draws of a sequence share its text, so they are averaged first. The N means are
    # independent, and their spread holds that of the text and that of the draws.
    means = sum(part.double().reshape(len(part), -1).mean(dim=1) for part in parts)
    n = len(means)
    weights = torch.ones_like(means) if weights is None else weights
    nll = float((weights * means).mean())
    # weights * (means - nll), not weights * means - nll: a mean by tokens is a ratio of two sums,
    # and this is the linear approximation of its error
    deviation = float((weights * (means - nll)).std()) if n > 1 else math.nan

    drawn = [weights[:, None] * part.double() for part in parts if part.dim() == 2]
    spreads = [_monte_carlo(part, joint) for part in drawn]
    variance = sum(v for v, _ in spreads)
    degrees = math.inf
    if variance > 0:  # of a sum of variances, each with degrees of its own: Welch and Satterthwaite
        degrees = variance**2 / sum(v**2 / df for v, df in spreads if v > 0)
    return Estimate(nll, deviation / n**0.5, n, variance**0.5, degrees)


def _monte_carlo(draws: Tensor, joint: bool) -> tuple[float, float]:
    """Variance of the mean of (N, D) draws given the data, and its degrees of freedom; NaN for
    D = 1."""
    n, count = draws.shape
    if count == 1:
        return math.nan, math.nan
    if joint:
        return float(draws.mean(dim=0).var() / count), count - 1
    spread = draws.var(dim=1)
    # Every sequence tells its own variance with D - 1 degrees of freedom. If they all vary alike,
    # that makes N (D - 1) in all; if a few vary far more than the others, only these count. This is
    # Satterthwaite's formula with its bias removed, which is between the two.
    fourth = float(spread.square().sum())
    degrees = n * (count - 1)
    if fourth:
        degrees = max(count - 1, (count + 1) * float(spread.sum()) ** 2 / fourth - 2)
    return float(spread.mean() / (n * count)), degrees


def t_quantile(degrees: float, probability: float = 0.975) -> float:
    """Quantile of Student's t, by default the one of a 95% interval; NaN for no degrees."""
    return float(stats.t.ppf(probability, degrees))
