"""Order ensembles against the exact one, of every order and every choice of members."""

import itertools

import pytest
import torch
from reference import all_sequences, enumerable_system, exact_loss

from aogpt.evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS, cheap_gains, index_of
from aogpt.orders import Roles

N = 4
V = 3
SIZES = (2, 3)


@pytest.fixture(scope="module", params=["AO-GPT", "two_stream"])
def system(request):
    """Return a random decoder, its conditionals, and {size: its exact loss under
    uniform orders}."""
    model, conditional = enumerable_system(request.param, seed=1, scale=2.0)
    orders = list(itertools.permutations(range(N)))
    exact = {}
    for size in (1, *SIZES):
        exact[size] = exact_loss(conditional, orders, size)
    return model, conditional, exact


def z_score(draws, exact):
    """Return the distance of the mean of independent draws from the exact value, in
    standard errors."""
    standard_error = draws.std() / len(draws) ** 0.5
    return float((draws.mean() - exact) / standard_error)


def test_cheap_gains_have_the_gain_of_the_exact_ensemble_as_their_mean(system):
    model, _, exact = system
    sequences = all_sequences(V, N)
    for row in (0, 40, 77):
        tokens = sequences[row].expand(8_000, N)
        gains = cheap_gains(
            model,
            tokens,
            SIZES,
            seed=0,
            draw=0,
            rows=range(len(tokens)),
            batch_size=4_000,
        )
        for column, size in enumerate(SIZES):
            exact_gain = exact[size][row] - exact[1][row]
            assert exact_gain < -1e-3, "nothing is tested where nothing is gained"
            assert abs(z_score(gains[:, column], exact_gain)) < 4
        assert gains.max() < 1e-12  # float64 rounding: no gain is a loss


def test_cheap_gains_are_of_contexts_that_begin_with_the_prompt(system):
    """The order is 2, then 0 1 3 in any order. Tokens after the text do not count."""
    model, conditional, _ = system
    draws = 8_000
    tokens = all_sequences(V, N)[40].expand(draws, N)

    def gains_of(tokens, roles):
        roles = Roles.of(torch.tensor(roles).expand(draws, N))
        gains = cheap_gains(
            model,
            tokens,
            (3,),
            seed=0,
            draw=0,
            rows=range(draws),
            batch_size=4_000,
            roles=roles,
        )
        return gains[:, 0]

    orders = [(2, *rest) for rest in itertools.permutations((0, 1, 3))]
    loss_of_one = exact_loss(conditional, orders, given=1)
    loss_of_three = exact_loss(conditional, orders, size=3, given=1)
    exact_gain = loss_of_three[40] - loss_of_one[40]
    prompt_at_2 = [0, 0, 1, 0]
    gains = gains_of(tokens, prompt_at_2)
    assert abs(z_score(gains, exact_gain)) < 4

    text_of_3 = [0, 0, 0, 2]
    other_end = tokens.clone()
    other_end[:, 3] = (tokens[:, 3] + 1) % V
    gains = gains_of(tokens, text_of_3)
    assert torch.equal(gains, gains_of(other_end, text_of_3))
    assert gains.min() < -1e-3


def test_draws_and_members_have_random_numbers_of_their_own():
    indices = set()
    for draw, member in itertools.product([0, 1, MAX_DRAWS - 1], [0, 1, 5]):
        indices.add(index_of(draw, member))
    assert len(indices) == 9
    assert index_of(MAX_DRAWS - 1, MAX_MEMBERS - 1) < 2**64
