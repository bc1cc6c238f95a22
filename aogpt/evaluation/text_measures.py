"""Measures of generated text that need no model, and averages over samples of those
that do. A measure of a sample that does not exist is None, and no average counts it. To
add one: a function, and a row of
`MEASURES`."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .estimates import estimate


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
    title: str | None = None  # of its column in the table; None: it has none
    form: str = ".3f"  # how the table writes it
    meaning: str = ""  # its entry in the legend below the table


# By their names in the JSON file.
MEASURES = {
    "entropy": Measure(
        unigram_entropy,
        title="entropy",
        meaning="of a sample's histogram of tokens, nats",
    ),
    "distinct_1": Measure(lambda tokens: distinct(tokens, 1)),
    "distinct_2": Measure(
        lambda tokens: distinct(tokens, 2),
        title="distinct-2",
        meaning="different pairs / pairs",
    ),
    "distinct_3": Measure(lambda tokens: distinct(tokens, 3)),
    "repetition_4": Measure(
        repetition,
        title="repeated",
        meaning="the share of 4-grams that occurred before",
    ),
}


def ngrams(samples: Iterable[Sequence[int]], n: int) -> Counter:
    """Count how often each n-gram occurs within samples."""
    counts = Counter()
    for tokens in samples:
        shifted = [tokens[start:] for start in range(n)]
        counts.update(zip(*shifted, strict=False))
    return counts


BLEU_NGRAMS = 4
BLEU_EPSILON = 0.1  # matches of an n-gram order that has none


def self_bleu(samples: Sequence[Sequence[int]]) -> list[float]:
    """Return the self-BLEU of each sample: its BLEU-4 with all other samples as
    references (Texygen, arXiv 1802.01886), 1 where another one is equal.

    It is smoothed as NLTK's `method1`: equal samples of fewer than 4 tokens have less
    than 1, as they have no 4-grams; 0 for a sample that shares no token with another
    one, NaN where there is no other or it is empty."""
    if len(samples) < 2:
        return [math.nan] * len(samples)
    lengths = Counter(len(tokens) for tokens in samples)
    scores = [_brevity_penalty(len(tokens), lengths) for tokens in samples]
    for n in range(1, BLEU_NGRAMS + 1):
        counts = [ngrams([tokens], n) for tokens in samples]
        largest = _two_largest(counts)
        for number, own in enumerate(counts):
            matches = _clipped_matches(own, largest)
            if n == 1 and matches == 0 and own:
                scores[number] = 0.0
            total = max(1, own.total())
            precision = (matches or BLEU_EPSILON) / total
            scores[number] *= precision ** (1 / BLEU_NGRAMS)
    return scores


def _two_largest(counts: Sequence[Counter]) -> dict[tuple, tuple[int, int]]:
    """Return the largest and second largest count of each n-gram in one sample."""
    largest: dict[tuple, tuple[int, int]] = {}
    for own in counts:
        for ngram, count in own.items():
            first, second = largest.get(ngram, (0, 0))
            if count > first:
                largest[ngram] = (count, first)
            elif count > second:
                largest[ngram] = (first, count)
    return largest


def _clipped_matches(own: Counter, largest: dict[tuple, tuple[int, int]]) -> int:
    """Return the number of a sample's n-grams that are in the others, each clipped by
    its largest count in one of the others: the second largest of all for the sample
    that has the largest."""
    matches = 0
    for ngram, count in own.items():
        first, second = largest[ngram]
        in_others = second if count == first else first
        matches += min(count, in_others)
    return matches


def _brevity_penalty(length: int, lengths: Counter) -> float:
    """Return BLEU's penalty of a sample that is shorter than the other one whose length
    is nearest, the shorter of two. lengths: how many samples, this one too, have
    each."""
    if length == 0:
        return math.nan
    if lengths[length] > 1:
        nearest = length
    else:
        other_lengths = [other for other in lengths if other != length]
        nearest = min(other_lengths, key=lambda other: (abs(other - length), other))
    if length > nearest:
        return 1.0
    return math.exp(1 - nearest / length)


def jensen_shannon(one: Counter, other: Counter) -> float:
    """Return the Jensen-Shannon divergence of two distributions of counts in nats, 0 to
    log 2; NaN if one is empty."""
    one_total = one.total()
    other_total = other.total()
    if one_total == 0 or other_total == 0:
        return math.nan
    divergence = 0.0
    for key in one.keys() | other.keys():
        p = one[key] / one_total
        q = other[key] / other_total
        term = 0.0
        if p > 0:
            term += p * math.log(2 * p / (p + q))
        if q > 0:
            term += q * math.log(2 * q / (p + q))
        divergence += term / 2
    return divergence


def corpus_perplexity(
    totals: Sequence[float], counts: Sequence[int]
) -> dict[str, float]:
    """Return exp(all nats / all scored tokens), its 95% interval over samples, and both
    as nats, from the -log p of each sample and its scored tokens."""
    nats = torch.tensor(totals, dtype=torch.float64)
    tokens = torch.tensor(counts, dtype=torch.float64)
    is_scored = tokens > 0
    nats = nats[is_scored]
    tokens = tokens[is_scored]
    nll = math.nan
    error = math.nan
    half = math.nan
    if len(tokens) > 0:
        mean = estimate(nats / tokens, weights=tokens / tokens.mean())
        nll = mean.nll
        error = mean.standard_error
        half = mean.half_width
    return {
        "nll": nll,
        "standard_error": error,
        "perplexity": exp(nll),
        "perplexity_low": exp(nll - half),
        "perplexity_high": exp(nll + half),
    }


def exp(value: float) -> float:
    """Return exp(value), infinite where that is too large, not an OverflowError."""
    exponent = torch.tensor(value, dtype=torch.float64)
    return float(exponent.exp())


def mean_and_error(values: Sequence[float | None]) -> tuple[float, float]:
    """Return the mean and standard error over the values that exist."""
    numbers = [value for value in values if value is not None]
    N = len(numbers)
    sample = torch.tensor(numbers, dtype=torch.float64)
    mean = math.nan
    error = math.nan
    if N > 0:
        mean = float(sample.mean())
    if N > 1:
        error = float(sample.std() / N**0.5)
    return mean, error
