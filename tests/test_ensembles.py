"""Order ensembles against the exact one, of every order and every choice of members."""

import itertools

import pytest
import torch
from reference import all_sequences, direct_nll, enumerable_system

from aogpt.evaluation.ensembles import MAX_DRAWS, MAX_MEMBERS, RandomStream, cheap_gains
from aogpt.orders import OrderConfig, Roles

N = 4
V = 3
SIZES = (2, 3)


def exact_loss(conditional, size, orders, given=0):
    """Nats per token of every sequence, (V ** N,), over all contexts, orders and other
    members; the first `given` steps of every order are the prompt."""
    total = 0
    for order in orders:
        prompt = order[:given]
        for step in range(given, N):
            target = order[step]
            own = conditional[tuple(order[:step]), target]
            # p(target) after every order of the same context, of which members are
            # drawn.
            listed = []
            for context in itertools.permutations(order[given:step]):
                listed.append(conditional[(*prompt, *context), target])
            means = []
            for further_orders in itertools.product(listed, repeat=size - 1):
                means.append(torch.stack([own, *further_orders]).mean(dim=0))
            total = total - torch.stack(means).log().mean(dim=0)
    return total / (len(orders) * (N - given))


@pytest.fixture(scope="module", params=["AO-GPT", "two_stream"])
def system(request):
    """A random decoder, its conditionals, and {size: its exact loss under uniform
    orders}."""
    model, conditional = enumerable_system(request.param, seed=1, scale=2.0)
    every = list(itertools.permutations(range(N)))
    exact = {size: exact_loss(conditional, size, every) for size in (1, *SIZES)}
    return model, conditional, exact


def z_score(draws, exact):
    """Distance of the mean of independent draws from the exact value in standard
    errors."""
    return float((draws.mean() - exact) / (draws.std() / len(draws) ** 0.5))


@pytest.mark.parametrize("seed", [0, 1])
def test_cheap_gains_have_the_gain_of_the_exact_ensemble_as_their_mean(system, seed):
    model, _, exact = system
    sequences = all_sequences(V, N)
    for row in (0, 40, 77):
        tokens = sequences[row].expand(8_000, N)
        gains = cheap_gains(model, tokens, SIZES, seed, 0, range(len(tokens)), 4_000)
        for s, size in enumerate(SIZES):
            gain = exact[size][row] - exact[1][row]
            assert gain < -1e-3, "nothing is tested where an ensemble gains nothing"
            assert abs(z_score(gains[:, s], gain)) < 4
        assert gains.max() < 1e-12  # float64 rounding: no gain is a loss


def test_cheap_gains_are_of_contexts_that_begin_with_the_prompt(system):
    """The order is 2, then 0 1 3 in any order; and what comes after the text does not
    count."""
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
    one = exact_loss(conditional, 1, orders, given=1)
    three = exact_loss(conditional, 3, orders, given=1)
    gains = gains_of(tokens, roles=[0, 0, 1, 0])
    assert abs(z_score(gains, three[40] - one[40])) < 4

    other = tokens.clone()
    other[:, 3] = (tokens[:, 3] + 1) % V
    gains = gains_of(tokens, roles=[0, 0, 0, 2])
    assert torch.equal(gains, gains_of(other, roles=[0, 0, 0, 2]))
    assert gains.min() < -1e-3


def test_the_mean_loss_of_the_direct_way_is_that_of_the_exact_ensemble(
    system,
):
    """`reference.direct_nll`, which trained models are checked with."""
    model, conditional, exact = system
    left_to_right = exact_loss(conditional, 3, [tuple(range(N))])
    tokens = all_sequences(V, N)[60].expand(8_000, N)
    for kind, expected in (("random", exact[3]), ("l2r", left_to_right)):
        orders = OrderConfig(kind)
        draws = direct_nll(model, tokens, orders, (3,), 0, 0, range(len(tokens)))
        assert abs(z_score(draws.mean(dim=1)[:, 0], expected[60])) < 4


def test_draws_uses_and_members_have_random_numbers_of_their_own():
    indices = set()
    for numbers in itertools.product(range(5), repeat=3):
        indices.add(RandomStream(*numbers).index)
    assert len(indices) == 125
    assert RandomStream(MAX_DRAWS - 1, 2**24 - 1, MAX_MEMBERS - 1).index == 2**64 - 1
