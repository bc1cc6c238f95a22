"""Measures of generated text that need no model, and averages over samples of those
that do. A measure of a sample that does not exist is None, and no average counts it; an
average of nothing is None, too. To add a measure: a function, and a row of
`MEASURES`."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .estimates import Estimate, estimate


def unigram_entropy(tokens: Sequence[int]) -> float | None:
    """Return the entropy of the histogram of a sample's tokens, in nats."""
    if not tokens:
        return None
    terms = []
    for count in Counter(tokens).values():
        share = count / len(tokens)
        terms.append(share * math.log(share))
    return -math.fsum(terms) + 0.0  # 0.0, not -0.0


def distinct(tokens: Sequence[int], n: int) -> float | None:
    """Return distinct-n: different n-grams / n-grams of a sample."""
    total = len(tokens) - n + 1
    if total < 1:
        return None
    different = set()
    for start in range(total):
        ngram = tuple(tokens[start : start + n])
        different.add(ngram)
    return len(different) / total


def repetition(tokens: Sequence[int]) -> float | None:
    """Return the share of a sample's 4-grams that occurred before in it."""
    different = distinct(tokens, 4)
    if different is None:
        return None
    return 1 - different


@dataclass(frozen=True)
class Measure:
    """A number of one sample, of which eval_gen.py reports the mean over samples."""

    function: Callable[[Sequence[int]], float | None]  # of the sample's tokens
    title: str  # of its column in the table


# By their names in the JSON file.
MEASURES = {
    "entropy": Measure(unigram_entropy, title="entropy"),
    "distinct_2": Measure(lambda tokens: distinct(tokens, 2), title="distinct-2"),
    "repetition_4": Measure(repetition, title="repeated"),
}


def corpus_perplexity(
    totals: Sequence[float], counts: Sequence[int], prompts: Sequence[int] | None = None
) -> dict[str, float | None]:
    """Return exp(all nats / all scored tokens), its 95% interval, and both as nats,
    from the -log p of each sample and its scored tokens. Perplexity is None where no
    token is scored, and its errors are None for one sample.

    prompts: the number of each sample's prompt, if known. Samples of one depend on one
    another: errors are over prompts where there are several and that is wider."""
    nats = torch.tensor(totals, dtype=torch.float64)
    tokens = torch.tensor(counts, dtype=torch.float64)
    is_scored = tokens > 0
    keys = ("nll", "standard_error", "perplexity", "perplexity_low", "perplexity_high")
    if not is_scored.any():
        return dict.fromkeys(keys)
    nats = nats[is_scored]
    tokens = tokens[is_scored]
    documents = None
    if prompts is not None:
        documents = torch.tensor(prompts)[is_scored]
    weights = tokens / tokens.mean()
    mean = estimate(nats / tokens, weights=weights, documents=documents)
    values = (mean.nll, larger_error(mean), mean.perplexity, *mean.interval())
    return dict(zip(keys, values, strict=True))


def mean_and_error(
    values: Sequence[float | None], prompts: Sequence[int] | None = None
) -> tuple[float | None, float | None]:
    """Return the mean and standard error over the values that exist; None where there
    are too few. prompts: as in `corpus_perplexity`."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None, None
    documents = None
    if prompts is not None:
        exist = [value is not None for value in values]
        documents = torch.tensor(prompts)[torch.tensor(exist)]
    mean = estimate(torch.tensor(numbers, dtype=torch.float64), documents=documents)
    return mean.nll, larger_error(mean)


def larger_error(mean: Estimate) -> float | None:
    """Return the standard error over samples, or over their prompts where it is
    larger."""
    if mean.document_error is None:
        return mean.standard_error
    return max(mean.standard_error, mean.document_error)
