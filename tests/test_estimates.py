"""Errors and intervals of estimates: by hand, and by how often they cover what is known
exactly."""

import itertools
import math

import pytest
import torch
from helpers import some_slow
from reference import all_sequences, enumerable_system, exact_loss

from aogpt.evaluation.estimates import estimate, t_quantile
from aogpt.evaluation.likelihood import importance_weighted, token_nll
from aogpt.orders import OrderConfig

# positions and tokens: 81 sequences, 24 orders
N = 4
V = 3


def test_estimate_is_mean_standard_error_and_spread_of_the_draws_of_each_sequence():
    """Means 2, 1, 3; variances 2, 2, 8 within three sequences of two draws: of all, 4 /
    6."""
    got = estimate(torch.tensor([[1.0, 3.0], [0.0, 2.0], [1.0, 5.0]]))
    assert got.sequences == 3
    assert got.nll == pytest.approx(2, abs=1e-14)
    assert got.perplexity == pytest.approx(math.exp(2), rel=1e-14)
    assert got.standard_error == pytest.approx(1 / math.sqrt(3), abs=1e-14)
    assert got.monte_carlo_error == pytest.approx(math.sqrt(4 / 6))
    # as one: the two means are 1 and 3, their mean varies by 2 / 2
    draws = torch.tensor([[1.0, 3.0], [0.0, 4.0], [2.0, 2.0]])
    assert estimate(draws, joint=True).monte_carlo_error == pytest.approx(1.0)
    assert estimate(draws).standard_error == 0  # their means agree


@pytest.mark.parametrize("draws", [2, 8, 32])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_the_error_of_a_weighted_bound_is_its_spread_over_draws(spread, draws):
    """Also where probabilities along orders differ by many nats, so that one of them
    makes up their mean: as in real text, where the delta method says a quarter."""
    repeats = 4000
    log_p = spread * torch.randn(repeats, draws, dtype=torch.float64).sort().values
    tokens = torch.full((1,), 100.0, dtype=torch.float64)
    bounds = [importance_weighted(-row[None] / 100, tokens) for row in log_p]
    means = torch.tensor([bound.nll for bound in bounds])
    errors = torch.tensor([bound.monte_carlo_error for bound in bounds])
    assert errors.square().mean().sqrt() == pytest.approx(means.std().item(), rel=0.25)
    pair = importance_weighted(-log_p[:2] / 100, tokens.expand(2))
    both = errors[:2].double().square().sum().sqrt() / 2
    assert pair.monte_carlo_error == pytest.approx(both.item(), rel=1e-6)


def test_a_nan_of_the_model_is_every_number_of_its_estimate():
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan], [2.0, 2.0]])
    got = estimate(values, documents=torch.tensor([0, 0, 1]))
    numbers = [got.nll, got.standard_error, got.monte_carlo_error, got.document_error]
    numbers += [got.perplexity, got.half_width, *got.interval(), got.p_value]
    assert all(math.isnan(number) for number in numbers)


def test_parts_add_up():
    first = torch.tensor([[1.0, 3.0], [0.0, 4.0], [2.0, 5.0]])
    second = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    both = estimate(first, second)
    one = estimate(first)
    two = estimate(second)
    assert both.nll == pytest.approx(one.nll + two.nll)
    assert both.standard_error == pytest.approx(one.standard_error)
    error = math.hypot(one.monte_carlo_error, two.monte_carlo_error)
    assert both.monte_carlo_error == pytest.approx(error)


def test_documents_are_clusters():
    """Means 1, 1, 4, 4, 5 around 3 in two documents: sums -4 and 4, whose mean varies
    by 16."""
    values = torch.tensor([1.0, 1, 4, 4, 5])
    documents = torch.tensor([7, 7, 9, 9, 9])
    got = estimate(values, documents=documents)
    assert got.documents == 2
    assert got.document_error == pytest.approx(math.sqrt(2 * 2 * 16) / 5)
    assert got.standard_error == pytest.approx(float(values.std()) / math.sqrt(5))
    half = 12.70620 * got.document_error
    interval = (math.exp(3 - half), math.exp(3 + half))
    assert got.interval() == pytest.approx(interval, rel=1e-4)
    assert estimate(values).document_error is None


ORDERS = list(itertools.permutations(range(N)))
REPEATS = 200
TEXTS = 12


def coverage(estimates, exact, degrees=None):
    """Return the share of 95% intervals that cover a value: over texts, or given
    degrees of freedom."""
    covered = 0
    for one in estimates:
        low, high = one.interval()
        if degrees is not None:
            half_width = t_quantile(degrees) * one.monte_carlo_error
            low = math.exp(one.nll - half_width)
            high = math.exp(one.nll + half_width)
        if low <= math.exp(exact) <= high:
            covered += 1
    return covered / len(estimates)


def losses_of(model, tokens, draws, seed=0):
    """Return the estimates of the loss of every sequence, (rows, draws)."""
    rows = range(len(tokens))
    random = OrderConfig("random")
    losses = []
    for draw in range(draws):
        of_tokens = token_nll(
            model, tokens, random, seed=seed, draw=draw, rows=rows, total=len(rows)
        )
        losses.append(of_tokens.means())
    return torch.stack(losses, dim=1)


@pytest.mark.parametrize("given_data", [True, False])
@pytest.mark.parametrize("draws", [2, 5])
def test_95_percent_intervals_of_the_any_order_loss_cover_the_exact_value(
    draws, given_data
):
    """200 intervals that cover with 95% do so 180 to 198 times but once in a
    thousand."""
    model, conditional = enumerable_system("AO-GPT", seed=0)
    exact = exact_loss(conditional, ORDERS)
    generator = torch.Generator().manual_seed(0)
    choices = REPEATS
    if given_data:
        choices = 1
    index = torch.randint(V**N, (choices, TEXTS), generator=generator)
    index = index.expand(REPEATS, TEXTS)
    tokens = all_sequences(V, N)[index.flatten()]
    samples = losses_of(model, tokens, draws).view(REPEATS, TEXTS, draws)
    estimates = [estimate(sample) for sample in samples]
    if given_data:
        target = float(exact[index[0]].mean())
        covered = coverage(estimates, target, degrees=TEXTS * (draws - 1))
    else:
        covered = coverage(estimates, float(exact.mean()))
    assert 0.90 <= covered <= 0.99


@pytest.mark.parametrize(
    "system",
    some_slow(
        [("encoder AO-GPT",), ("RADD",)],
        lambda system: system == "RADD",
        "another encoder",
    ),
)
def test_95_percent_intervals_of_an_encoders_elbo_cover_its_exact_any_order_loss(
    system,
):
    """Its masks are stratified over the texts, so that only whole draws are
    independent."""
    model, conditional = enumerable_system(system, seed=0)
    index = torch.randint(V**N, (TEXTS,), generator=torch.Generator().manual_seed(0))
    tokens = all_sequences(V, N)[index]
    exact = float(exact_loss(conditional, ORDERS)[index].mean())
    estimates = []
    for seed in range(REPEATS):
        losses = losses_of(model, tokens, 6, seed)
        estimates.append(estimate(losses, joint=True))
    assert 0.90 <= coverage(estimates, exact, degrees=5) <= 0.99
    values = torch.tensor([one.nll for one in estimates], dtype=torch.float64)
    assert abs(values.mean() - exact) < 4 * values.std() / REPEATS**0.5
