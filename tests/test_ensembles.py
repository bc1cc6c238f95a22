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
        for step, target in enumerate(order[given:], given):
            listed = [
                conditional[(*order[:given], *context), target]
                for context in itertools.permutations(order[given:step])
            ]
            own = conditional[tuple(order[:step]), target]
            others = itertools.product(listed, repeat=size - 1)
            members = [torch.stack([own, *rest]).mean(dim=0) for rest in others]
            total = total - torch.stack(members).log().mean(dim=0)
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
            assert gain < -1e-3, (
                "an ensemble must gain something here, or nothing is tested"
            )
            assert abs(z_score(gains[:, s], gain)) < 4
        assert gains.max() < 1e-12  # float64 rounding: no gain is a loss


def test_cheap_gains_are_of_contexts_that_begin_with_the_prompt(system):
    """The order is 2, then 0 1 3 in any order; and what comes after the text does not
    count."""
    model, conditional, _ = system
    orders = [(2, *rest) for rest in itertools.permutations((0, 1, 3))]
    exact = {size: exact_loss(conditional, size, orders, given=1) for size in (1, 3)}
    tokens = all_sequences(V, N)[40].expand(8_000, N)
    for roles in ([0, 0, 1, 0], [0, 0, 0, 2]):
        of = Roles.of(torch.tensor(roles).expand(8_000, N))
        gains = cheap_gains(model, tokens, (3,), 0, 0, range(8_000), 4_000, of)[:, 0]
        if roles[3] == 0:
            assert abs(z_score(gains, exact[3][40] - exact[1][40])) < 4
    other = torch.cat([tokens[:, :3], (tokens[:, 3:] + 1) % V], dim=1)
    same = cheap_gains(model, other, (3,), 0, 0, range(8_000), 4_000, of)[:, 0]
    assert torch.equal(gains, same) and gains.min() < -1e-3


def test_the_direct_way_that_checks_others_has_the_loss_of_the_exact_ensemble_as_its_mean(
    system,
):
    """`reference.direct_nll`, which trained models are checked with."""
    model, conditional, exact = system
    sequences = all_sequences(V, N)
    along = {"random": exact[3], "l2r": exact_loss(conditional, 3, [tuple(range(N))])}
    for kind, expected in along.items():
        tokens = sequences[60].expand(8_000, N)
        draws = direct_nll(
            model, tokens, OrderConfig(kind), (3,), 0, 0, range(len(tokens))
        )
        assert abs(z_score(draws.mean(dim=1)[:, 0], expected[60])) < 4


def test_draws_uses_and_members_have_random_numbers_of_their_own():
    streams = [
        RandomStream(d, u, m) for d in range(5) for u in range(5) for m in range(5)
    ]
    assert len({stream.index for stream in streams}) == 125
    assert RandomStream(MAX_DRAWS - 1, 2**24 - 1, MAX_MEMBERS - 1).index == 2**64 - 1
