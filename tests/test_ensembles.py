"""Order ensembles against the exact one: every order of every context, every choice of the other members."""

import itertools

import pytest
import torch
from reference import all_sequences, enumerable_system, make_system, random_tokens

from evaluation import ensembles
from evaluation.ensembles import (
    cheap_gains,
    direct_nll,
    ensemble_log_probs,
    passes,
    permute_context,
    table,
)
from evaluation.estimates import estimate
from objectives import token_nll
from orders import OrderConfig, orders_at

N, V = 4, 3
SIZES = (2, 3)


def exact_loss(conditional, size, orders):
    """The loss of every sequence with ensembles of `size` along equally likely `orders`, nats per token: (V ** N,).

    Every step's context is taken as listed and with every tuple of `size` - 1 permutations of it.
    """
    total = 0
    for order in orders:
        for step, target in enumerate(order):
            listed = [
                conditional[context, target] for context in itertools.permutations(order[:step])
            ]
            others = itertools.product(listed, repeat=size - 1)
            members = [
                torch.stack([conditional[tuple(order[:step]), target], *rest]).mean(dim=0)
                for rest in others
            ]
            total = total - torch.stack(members).log().mean(dim=0)
    return total / (len(orders) * N)


@pytest.fixture(scope="module", params=["AO-GPT", "two_stream"])
def system(request):
    """A random decoder and {size: its exact loss under uniform orders}."""
    model, conditional = enumerable_system(request.param, seed=1, scale=2.0)
    every = list(itertools.permutations(range(N)))
    return model, {size: exact_loss(conditional, size, every) for size in (1, *SIZES)}


def z_score(draws, exact):
    """Distance of the mean of independent draws from the exact value in standard errors."""
    return float((draws.mean() - exact) / (draws.std() / len(draws) ** 0.5))


@pytest.mark.parametrize("seed", [0, 1])
def test_cheap_gains_have_the_gain_of_the_exact_ensemble_as_their_mean(system, seed):
    """8,000 contexts of each of three sequences; 4 standard errors for 6 fixed-seed numbers a system."""
    model, exact = system
    sequences = all_sequences(V, N)
    for row in (0, 40, 77):
        tokens = sequences[row].expand(8_000, N)
        gains = cheap_gains(model, tokens, SIZES, seed, 0, range(len(tokens)), 4_000)
        for s, size in enumerate(SIZES):
            gain = exact[size][row] - exact[1][row]
            assert gain < -1e-3, "an ensemble must gain something here, or nothing is tested"
            assert abs(z_score(gains[:, s], gain)) < 4


@pytest.mark.parametrize("seed", [0, 1])
def test_direct_losses_have_the_loss_of_the_exact_ensemble_as_their_mean(system, seed):
    model, exact = system
    sequences = all_sequences(V, N)
    for row in (0, 40, 77):
        tokens = sequences[row].expand(8_000, N)
        nll = direct_nll(
            model, tokens, OrderConfig("random"), (1, *SIZES), seed, 0, range(len(tokens))
        ).mean(dim=1)
        for s, size in enumerate((1, *SIZES)):
            assert abs(z_score(nll[:, s], exact[size][row])) < 4


def test_direct_ensembles_along_one_order_keep_its_contexts_among_the_members():
    """Left to right the original context is not as random as the others, and the exact loss differs from the uniform
    one by far more than the error."""
    model, conditional = enumerable_system("AO-GPT", seed=1)
    sequences = all_sequences(V, N)
    exact = exact_loss(conditional, 3, [tuple(range(N))])
    for row in (5, 60):
        tokens = sequences[row].expand(8_000, N)
        nll = direct_nll(model, tokens, OrderConfig("l2r"), (3,), 0, 0, range(len(tokens))).mean(
            dim=1
        )[:, 0]
        assert abs(z_score(nll, exact[row])) < 4
        assert nll.std() > 0


def test_all_ensembles_of_one_member_are_the_model_itself():
    model = make_system("AO-GPT")
    tokens, rows = random_tokens(8, 6, 8, seed=0), range(3, 9)
    for config in (OrderConfig("random"), OrderConfig("fixed_blockwise", block=3)):
        expected = token_nll(model, tokens, config, 7, 2, rows, 9)
        torch.testing.assert_close(
            direct_nll(model, tokens, config, (1,), 7, 2, rows)[..., 0], expected
        )
    assert cheap_gains(model, tokens, (1,), 7, 2, rows, 4).abs().max() == 0


@pytest.mark.parametrize("system_name", ["AO-GPT", "sigma-GPT", "two_stream"])
def test_no_cheap_gain_is_a_loss_and_larger_ensembles_gain_more_on_average(system_name):
    model = make_system(system_name, scale=2.0)
    tokens = random_tokens(8, 400, 8, seed=0)
    gains = cheap_gains(model, tokens, (2, 4, 8, 16), 0, 0, range(400), 64)
    assert gains.max() < 1e-12  # float64 rounding
    assert (gains.mean(dim=0).diff() < 0).all() and gains.mean(dim=0)[0] < -1e-3


def test_members_score_the_remaining_positions_from_the_same_set():
    """A gain computed by hand from `masked_log_probs`-like calls, one member and one target at a time."""
    model, T, rows = make_system("AO-GPT"), 8, range(4, 9)
    tokens = random_tokens(8, len(rows), T, seed=3)
    order = orders_at(OrderConfig("random"), 5, table(2, 1), rows, T)
    got, seen = cheap_gains(model, tokens, (3,), 5, 2, rows, 2)[:, 0], set()
    for b, row in enumerate(rows):
        candidates = []
        for known in range(T):
            members = [order[b]]
            for j in (1, 2):
                number = table(2, 1, j)
                members.append(
                    permute_context(order[b : b + 1], known, 5, number, range(row, row + 1))[0]
                )
                assert sorted(members[-1][:known].tolist()) == sorted(order[b, :known].tolist())
                assert members[-1][known:].tolist() == order[b, known:].tolist()
            gaps = []
            for target in order[b, known:].tolist():
                rest = [p for p in range(T) if p != target and p not in order[b, :known].tolist()]
                listed = torch.stack(
                    [torch.tensor([*m[:known].tolist(), target, *rest]) for m in members]
                )
                log_p = model.token_log_probs(tokens[b].expand(3, T), listed)[:, known]
                gaps.append(float(log_p.mean() - log_p.exp().mean().log()))
            candidates.append(sum(gaps) / len(gaps))
        closest = min(range(T), key=lambda known: abs(candidates[known] - float(got[b])))
        assert abs(candidates[closest] - float(got[b])) < 1e-12
        seen.add(closest)
    assert len(seen) > 2  # contexts of several lengths


def test_context_lengths_are_uniform_and_permutations_too(monkeypatch):
    """Lengths of 40,000 rows and the orders of a context of 3, by their frequencies: 5 standard deviations."""
    lengths = []

    def watch(order, known, seed, number, rows):
        lengths.append(known.flatten())
        return permute_context(order, known, seed, number, rows)

    monkeypatch.setattr(ensembles, "permute_context", watch)
    model, rows = make_system("AO-GPT", tokens=3, block_size=4), range(40_000)
    cheap_gains(model, torch.zeros(len(rows), 4, dtype=torch.long), (2,), 0, 0, rows, 40_000)
    share = torch.bincount(lengths[0], minlength=4) / len(rows)
    assert len(share) == 4 and (share - 1 / 4).abs().max() < 5 * (3 / 16 / len(rows)) ** 0.5
    permuted = permute_context(torch.arange(5).expand(len(rows), 5), 3, 1, 9, rows)
    assert (permuted[:, 3:] == torch.tensor([3, 4])).all()
    code = permuted[:, 0] * 3 + permuted[:, 1]
    share = torch.bincount(code)[torch.tensor([1, 2, 3, 5, 6, 7])] / len(rows)
    assert (share - 1 / 6).abs().max() < 5 * (5 / 36 / len(rows)) ** 0.5


def test_neither_the_batch_nor_the_other_sizes_nor_the_other_rows_change_a_result():
    model = make_system("AO-GPT")
    tokens, random = random_tokens(8, 9, 8, seed=0), OrderConfig("random")
    whole = cheap_gains(model, tokens, (2, 5), 3, 1, range(9), 100)
    direct = direct_nll(model, tokens, random, (2, 5), 3, 1, range(9))
    for batch_size in (1, 4):
        torch.testing.assert_close(
            cheap_gains(model, tokens, (2, 5), 3, 1, range(9), batch_size), whole
        )
    torch.testing.assert_close(
        cheap_gains(model, tokens[4:], (5,), 3, 1, range(4, 9), 3), whole[4:, 1:]
    )
    torch.testing.assert_close(
        direct_nll(model, tokens[4:], random, (5,), 3, 1, range(4, 9)), direct[4:, :, 1:]
    )


def test_draws_places_and_members_have_tables_of_their_own():
    numbers = {table(d, p, m) for d in range(5) for p in range(5) for m in range(5)}
    assert len(numbers) == 125
    assert table(2**24 - 1, 2**24 - 1, 2**16 - 1) == 2**64 - 1


def test_ensemble_log_probs_is_the_log_of_the_mean_probability():
    p = torch.rand(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = ensemble_log_probs(p.log(), (1, 3, 5))
    for s, size in enumerate((1, 3, 5)):
        torch.testing.assert_close(got[s], p[:size].mean(dim=0).log())


@pytest.mark.parametrize("size", [1, 2, 5])
def test_passes_is_what_the_model_is_fed(size, monkeypatch):
    model, fed = make_system("AO-GPT"), []
    embed = model._embed
    monkeypatch.setattr(
        model,
        "_embed",
        lambda tokens, positions: fed.append(tokens.numel()) or embed(tokens, positions),
    )
    tokens = random_tokens(8, 3, 8, seed=0)
    direct_nll(model, tokens, OrderConfig("random"), (size,), 0, 0, range(3))
    assert sum(fed) == tokens.numel() * passes("direct", size, 8)
    fed.clear()
    cheap_gains(model, tokens, (size,), 0, 0, range(3), 2)
    assert sum(fed) == tokens.numel() * passes("cheap", size, 8)


# ---- coverage: 200 evaluations of 12 texts with a few draws ----------------------------------------------------------

REPEATS, TEXTS, DRAWS = 200, 12, 4


def coverage(estimates, exact, given_data=True):
    intervals = [e.interval(given_data) for e in estimates]
    return sum(low <= float(exact.exp()) <= high for low, high in intervals) / len(intervals)


def repeated(values):
    """Draws (REPEATS * TEXTS,) each -> (REPEATS, TEXTS, DRAWS): every row has randomness of its own."""
    return torch.stack(values, dim=1).view(REPEATS, TEXTS, -1)


@pytest.mark.parametrize("given_data", [True, False])
@pytest.mark.parametrize("method", ["cheap", "direct"])
def test_95_percent_intervals_of_an_ensemble_cover_the_exact_value(system, method, given_data):
    """200 intervals that cover with 95% do so 180 to 198 times but once in a thousand. Given the data, the texts are
    the same every time; else they are drawn anew, all sequences being equally likely."""
    model, exact = system
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(V**N, (1 if given_data else REPEATS, TEXTS), generator=generator).expand(
        REPEATS, TEXTS
    )
    tokens, rows = all_sequences(V, N)[index.flatten()], range(REPEATS * TEXTS)
    target = exact[3][index[0]].mean() if given_data else exact[3].mean()
    random = OrderConfig("random")
    if method == "direct":
        nll = repeated(
            [
                direct_nll(model, tokens, random, (3,), 0, d, rows).mean(1)[:, 0]
                for d in range(DRAWS)
            ]
        )
        estimates = [estimate(draws) for draws in nll]
    else:
        nll = repeated(
            [token_nll(model, tokens, random, 0, d, rows, 0).mean(1) for d in range(DRAWS)]
        )
        gains = repeated(
            [cheap_gains(model, tokens, (3,), 0, d, rows, 4_000)[:, 0] for d in range(2)]
        )
        estimates = [estimate(*parts) for parts in zip(nll, gains, strict=True)]
    assert 0.90 <= coverage(estimates, target, given_data) <= 0.99
