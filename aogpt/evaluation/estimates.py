"""How certain a mean over sequences is: standard errors and 95% intervals.

Standard error over sequences: the uncertainty from which texts and which random orders
were sampled, if sequences were independent. Blocks of one document are not: the error
by document takes documents as clusters. Monte Carlo error: the part from which orders,
masks or contexts were sampled for *these texts*, which falls with their number.

N sequences, D Monte Carlo samples."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences, in nats per token, and its errors. An error that the data
    cannot show is None; NaN is always a result of the model."""

    nll: float
    standard_error: float | None  # over sequences; None for one sequence
    sequences: int
    monte_carlo_error: float | None = 0.0  # given the texts; None for a single sample
    documents: int = 1  # that the sequences come from
    document_error: float | None = None  # over documents; None for one document

    @property
    def perplexity(self) -> float:
        """Return exp of the mean."""
        return exp(self.nll)

    @property
    def half_width(self) -> float | None:
        """Return half the width of the 95% interval of the mean, over texts and
        samples: by sequence or, where that is wider and there are several documents, by
        document. None for one sequence."""
        if self.standard_error is None:
            return None
        half = t_quantile(self.sequences - 1) * self.standard_error
        if self.document_error is not None:
            by_document = t_quantile(self.documents - 1) * self.document_error
            half = max(half, by_document)
        return half

    def interval(self) -> tuple[float | None, float | None]:
        """Return the ends of the 95% interval of the perplexity; None for one
        sequence."""
        half = self.half_width
        if half is None:
            return None, None
        return exp(self.nll - half), exp(self.nll + half)

    @property
    def p_value(self) -> float | None:
        """Return the two-sided p-value of a t test of a mean of 0: by document where
        there are several, else over sequences. None for one sequence."""
        error = self.standard_error
        count = self.sequences
        if self.document_error is not None:
            error = self.document_error
            count = self.documents
        if error is None:
            return None
        if self.nll == 0 or error == 0:  # all are the same
            return float(self.nll == 0)
        from scipy import stats  # takes two thirds of a second

        statistic = abs(self.nll) / error
        one_sided = stats.t.sf(statistic, count - 1)
        return float(2 * one_sided)


def estimate(
    *parts: Tensor,
    joint: bool = False,
    weights: Tensor | None = None,
    documents: Tensor | None = None,
) -> Estimate:
    """Return the mean over N sequences of a sum of parts, and its standard errors.

    parts: each (N,), known exactly, or (N, D), D samples of an estimate of it; D may
    differ. weights: (N,) of mean 1, where sequences count by their tokens. joint: the N
    numbers of a sample depend on one another, as stratified masks do, which makes
    standard_error rather too large. documents: (N,), the number of the document of each
    sequence; by default one for all."""
    N = len(parts[0])
    # The spread of the N independent means holds that of the texts and that of the
    # samples.
    means = 0.0
    for part in parts:
        samples = part.double().reshape(N, -1)
        means = means + samples.mean(dim=1)
    if weights is None:
        weights = torch.ones_like(means)
    nll = float((weights * means).mean())
    # A mean by tokens is a ratio of two sums; this is the linear approximation of its
    # error.
    deviations = weights * (means - nll)
    error = None
    if N > 1:
        error = float(deviations.std()) / N**0.5
    document_error = None
    clusters = 1
    if documents is not None:
        _, cluster = documents.unique(return_inverse=True)
        clusters = int(cluster.max()) + 1
        sums = deviations.new_zeros(clusters)
        sums.index_add_(0, cluster, deviations)
        if clusters > 1:
            document_error = float(sums.std()) * clusters**0.5 / N

    sampled = [part for part in parts if part.dim() == 2]
    monte_carlo_error = None
    if all(part.shape[1] > 1 for part in sampled):
        variance = 0.0
        for part in sampled:
            variance += _monte_carlo(weights[:, None] * part.double(), joint)
        monte_carlo_error = variance**0.5
    return Estimate(
        nll=nll,
        standard_error=error,
        sequences=N,
        monte_carlo_error=monte_carlo_error,
        documents=clusters,
        document_error=document_error,
    )


def exp(value: float) -> float:
    """Return exp(value), infinite where that is too large, not an OverflowError."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _monte_carlo(samples: Tensor, joint: bool) -> float:
    """Return the variance of the mean of (N, D) samples given the data."""
    N, D = samples.shape
    if joint:
        means = samples.mean(dim=0)
        return float(means.var() / D)
    variances = samples.var(dim=1)
    return float(variances.mean() / (N * D))


def t_quantile(degrees: float) -> float:
    """Return the quantile of Student's t for a 95% interval. degrees: of freedom, above
    0."""
    from scipy import stats

    return float(stats.t.ppf(0.975, degrees))
