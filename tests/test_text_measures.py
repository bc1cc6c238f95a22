"""aogpt/evaluation/text_measures.py: measures of samples by hand; errors and intervals
of corpus perplexity."""

import math

import pytest

from aogpt.evaluation.text_measures import (
    corpus_perplexity,
    distinct,
    mean_and_error,
    unigram_entropy,
)


@pytest.mark.parametrize(
    "tokens, expected",
    [([7, 7, 7, 7], 0), ([1, 2, 3, 4], math.log(4)), ([1, 1, 2, 3], 1.5 * math.log(2))],
)
def test_entropy_is_that_of_the_histogram_in_nats(tokens, expected):
    assert unigram_entropy(tokens) == pytest.approx(expected, rel=1e-15)


def test_distinct_counts_types_among_the_n_grams():
    tokens = [1, 2, 1, 2, 1, 3]
    assert distinct(tokens, 1) == 3 / 6
    assert distinct(tokens, 2) == 3 / 5  # 12 21 12 21 13
    assert distinct(tokens, 3) == 3 / 4  # 121 212 121 213
    twice = [1, 2, 3, 4, 1, 2, 3, 4]
    assert distinct(twice, 4) == 4 / 5  # 1234 2341 3412 4123 1234


def test_what_is_too_short_has_no_measure():
    assert unigram_entropy([]) is None
    assert distinct([1, 2], 3) is None


def test_corpus_perplexity_weighs_tokens_and_its_error_is_that_of_a_ratio():
    got = corpus_perplexity([2.0, 9.0], [1, 3])
    assert got["nll"] == 11 / 4
    assert got["perplexity"] == pytest.approx(math.exp(11 / 4), rel=1e-14)
    # residuals 2 - 11/4 and 9 - 33/4: squares 9/16 each; times N / (N - 1) = 2, under
    # the root, over 4 tokens
    error = math.sqrt(2 * 9 / 16 * 2) / 4
    assert got["standard_error"] == pytest.approx(error, rel=1e-14)
    # Student's t with one degree of freedom is Cauchy's distribution
    reach = math.tan(0.95 * math.pi / 2) * error
    assert got["perplexity_low"] == pytest.approx(math.exp(11 / 4 - reach), rel=1e-6)
    assert got["perplexity_high"] == pytest.approx(math.exp(11 / 4 + reach), rel=1e-6)


def test_samples_of_one_prompt_are_no_independent_samples():
    """Copies of a sample for each of two prompts have the error of two samples."""
    totals, counts, prompts = [2.0, 9.0], [1, 3], [0, 1]
    once = corpus_perplexity(totals, counts)
    often = corpus_perplexity(8 * totals, 8 * counts, 8 * prompts)
    assert often == pytest.approx(once)
    values = [0.5, 0.9]
    assert mean_and_error(8 * values, 8 * prompts) == pytest.approx(
        mean_and_error(values)
    )
    mean, error = mean_and_error([0.5, None, 0.9, 0.9], [0, 0, 1, 1])
    assert error > mean_and_error([0.5, 0.9, 0.9])[1]


def test_without_two_samples_there_is_no_error_and_without_any_no_perplexity():
    one = corpus_perplexity([3.0, 0.0], [2, 0])
    none = corpus_perplexity([0.0], [0])
    assert one["nll"] == 1.5
    assert one["standard_error"] is None
    assert one["perplexity_high"] is None
    assert none["perplexity"] is None
    assert none["nll"] is None
    assert corpus_perplexity([1e6, 1e6], [1, 1])["perplexity"] == math.inf
