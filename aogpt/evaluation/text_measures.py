"""Measures of generated text that need no model, and averages over samples of those that do. What
does not exist is NaN. How to add one: scoring.py."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from .estimates import t_quantile


def unigram_entropy(tokens: Sequence[int]) -> float:
    """Entropy of the histogram of a sample's tokens, in nats."""
    if not tokens:
        return math.nan
    shares = [count / len(tokens) for count in Counter(tokens).values()]
    return (
        -math.fsum(share * math.log(share) for share in shares) + 0.0
    )  # 0.0, not -0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """distinct-n: different n-grams / n-grams of a sample."""
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else math.nan


def ngrams(samples: Iterable[Sequence[int]], n: int) -> Counter:
    """How often each n-gram occurs within samples."""
    found = Counter()
    for tokens in samples:
        found.update(zip(*(tokens[start:] for start in range(n)), strict=False))
    return found


BLEU_NGRAMS = 4
BLEU_EPSILON = 0.1  # matches of an n-gram order that has none


def self_bleu(samples: Sequence[Sequence[int]]) -> list[float]:
    """Self-BLEU of each sample: its BLEU-4 with all other samples as references (Texygen,
    arXiv 1802.01886), 1 where another one is equal. Smoothed as NLTK's `method1`; 0 for a
    sample that shares no token with another one, NaN where there is no other or it is
    empty."""
    if len(samples) < 2:
        return [math.nan] * len(samples)
    lengths = Counter(map(len, samples))
    scores = [_brevity_penalty(len(tokens), lengths) for tokens in samples]
    for n in range(1, BLEU_NGRAMS + 1):
        counts = [ngrams([tokens], n) for tokens in samples]
        # An n-gram's matches are clipped by its largest count in one of the others: the
        # second largest of all for the sample that has the largest.
        most: dict[tuple, list[int]] = {}
        for own in counts:
            for ngram, count in own.items():
                most[ngram] = sorted([*most.get(ngram, [0, 0]), count])[1:]
        for number, own in enumerate(counts):
            matches = 0
            for ngram, count in own.items():
                second, first = most[ngram]
                matches += min(count, second if count == first else first)
            if n == 1 and matches == 0 and own:
                scores[number] = 0.0
            precision = (matches or BLEU_EPSILON) / max(1, own.total())
            scores[number] *= precision ** (1 / BLEU_NGRAMS)
    return scores


def _brevity_penalty(length: int, lengths: Counter) -> float:
    """BLEU's penalty of a sample that is shorter than the other one whose length is nearest,
    the shorter of two. lengths: how many samples, this one too, have each."""
    if length == 0:
        return math.nan
    others = [other for other in lengths if other != length or lengths[other] > 1]
    nearest = min(others, key=lambda other: (abs(other - length), other))
    return 1.0 if length > nearest else math.exp(1 - nearest / length)


def jensen_shannon(one: Counter, other: Counter) -> float:
    """Jensen-Shannon divergence of two distributions of counts in nats, 0 to log 2; NaN if one is
    empty."""
    sums = one.total(), other.total()
    if not all(sums):
        return math.nan
    total = 0.0
    for key in one.keys() | other.keys():
        p = one[key] / sums[0]
        q = other[key] / sums[1]
        total += (
            sum(share * math.log(2 * share / (p + q)) for share in (p, q) if share) / 2
        )
    return total


def corpus_perplexity(
    totals: Sequence[float], counts: Sequence[int]
) -> dict[str, float]:
    """exp(all nats / all scored tokens), its 95% interval over samples, and both as nats, from the
    -log p of each sample and its scored tokens. The mean over tokens is a ratio of two sums, with
    the standard error sqrt(N / (N - 1) sum_i (total_i - mean count_i)^2) / sum_i count_i."""
    scored = [
        (total, count) for total, count in zip(totals, counts, strict=True) if count
    ]
    samples = len(scored)
    tokens = sum(count for _, count in scored)
    nll = math.fsum(total for total, _ in scored) / tokens if tokens else math.nan
    error = math.nan
    if samples > 1:
        squares = math.fsum((total - nll * count) ** 2 for total, count in scored)
        error = math.sqrt(squares * samples / (samples - 1)) / tokens
    half = t_quantile(samples - 1) * error
    return {
        "nll": nll,
        "standard_error": error,
        "perplexity": exp(nll),
        "perplexity_low": exp(nll - half),
        "perplexity_high": exp(nll + half),
    }


def exp(
    value: float,
) -> float:  # infinite where that is too large, not an OverflowError
    return float(torch.tensor(value, dtype=torch.float64).exp())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over the values that are not NaN."""
    known = torch.tensor(
        [value for value in values if not math.isnan(value)], dtype=torch.float64
    )
    mean = float(known.mean()) if len(known) else math.nan
    error = float(known.std() / len(known) ** 0.5) if len(known) > 1 else math.nan
    return mean, error


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval (Student's t)."""
    mean, error = mean_and_error(values)
    return mean, t_quantile(len(values) - 1) * error if len(values) > 1 else math.nan
