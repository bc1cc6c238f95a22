"""Orders are permutations from the stated distributions, and pure functions of (seed, step,
row)."""

import itertools
import math

import pytest
import torch
from reference import chi_square_p

from orders import OrderConfig, inverse_permutation, orders_at, sample_orders
from runtime.randomness import philox_bits

KINDS = ("l2r", "random", "mixture", "fixed_random", "fixed_blockwise")
LEVEL = 1e-4  # of each chi-square test; seeds are fixed, so an accepted test stays accepted


def counts_of(orders):
    """How often each of the T! permutations occurs, (T!,), in lexicographic order of the
    permutations."""
    length = orders.shape[1]
    index = {perm: i for i, perm in enumerate(itertools.permutations(range(length)))}
    codes = torch.tensor(
        [index[tuple(row)] for row in orders.tolist()]
    )  # KeyError unless every row is a permutation
    return codes.bincount(minlength=math.factorial(length))


def uniform_counts(orders, cells):
    return torch.full((cells,), len(orders) / cells, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_a_permutation(kind, length):
    order = orders_at(OrderConfig(kind=kind, block=5, l2r_prob=0.3), 3, 9, range(50), length)
    assert order.shape == (50, length) and order.dtype == torch.int64
    assert torch.equal(order.sort(dim=1).values, torch.arange(length).expand(50, length))


def test_left_to_right_is_the_identity():
    assert torch.equal(
        orders_at(OrderConfig(kind="l2r"), 0, 0, range(3), 6), torch.arange(6).expand(3, 6)
    )


@pytest.mark.parametrize(
    "length", [4, 7, 8, 33]
)  # length + 1 numbers a row: with and without a remainder by four
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_drawn_with_it(kind, length):
    config = OrderConfig(kind=kind, block=3, l2r_prob=0.3)
    together = orders_at(config, 5, 7, range(12), length)
    apart = torch.cat([orders_at(config, 5, 7, range(r, r + 1), length) for r in range(12)])
    shards = torch.cat([orders_at(config, 5, 7, range(r, r + 4), length) for r in (0, 4, 8)])
    prefix = orders_at(config, 5, 7, range(5), length)
    assert torch.equal(together, apart)
    assert torch.equal(together, shards)
    assert torch.equal(together[:5], prefix)
    assert torch.equal(
        together, orders_at(config, 5, 7, range(12), length)
    )  # no hidden state between calls


@pytest.mark.parametrize("kind", ["random", "mixture"])
def test_seed_step_and_row_all_matter(kind):
    """Orders of 64 positions collide with probability below 1e-80, so all that are not
    left-to-right must differ."""
    config = OrderConfig(kind=kind, l2r_prob=0.0)
    tables = [(seed, step) for seed in range(4) for step in range(4)] + [(2**62 - 1, 0), (0, 10**6)]
    rows = torch.cat([orders_at(config, seed, step, range(6), 64) for seed, step in tables])
    assert len({tuple(row) for row in rows.tolist()}) == len(rows) == 6 * len(tables)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_random_orders_are_uniform_over_all_permutations(length, seed):
    order = orders_at(OrderConfig(kind="random"), seed, 0, range(12_000), length)
    assert chi_square_p(counts_of(order), uniform_counts(order, math.factorial(length))) > LEVEL


@pytest.mark.parametrize("row", [0, 5])
def test_random_orders_are_uniform_across_steps_and_across_seeds(row):
    config, rows = OrderConfig(kind="random"), range(row, row + 1)
    for tables in ([(3, step) for step in range(4000)], [(seed, 3) for seed in range(4000)]):
        order = torch.cat([orders_at(config, seed, step, rows, 4) for seed, step in tables])
        assert chi_square_p(counts_of(order), uniform_counts(order, 24)) > LEVEL


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbouring_rows_are_independent(seed):
    order = orders_at(OrderConfig(kind="random"), seed, 0, range(20_000), 3)
    place = {perm: i for i, perm in enumerate(itertools.permutations(range(3)))}
    code = torch.tensor([place[tuple(row)] for row in order.tolist()])
    pairs = (code[0::2] * 6 + code[1::2]).bincount(minlength=36)
    assert chi_square_p(pairs, uniform_counts(code[0::2], 36)) > LEVEL


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("prob", [0.1, 0.5])
def test_mixture_share_of_left_to_right(prob, seed):
    """20,000 rows; the share deviates from p by 4.5 standard deviations with probability 7e-6
    (binomial, normal tail). With 10 positions a uniform order is left-to-right by chance once in
    3.6 million rows, which is negligible."""
    n = 20_000
    order = orders_at(OrderConfig(kind="mixture", l2r_prob=prob), seed, 1, range(n), 10)
    share = float((order == torch.arange(10)).all(dim=1).double().mean())
    assert abs(share - prob) < 4.5 * math.sqrt(prob * (1 - prob) / n)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_mixture_is_uniform_besides_its_left_to_right_share(seed):
    order = orders_at(OrderConfig(kind="mixture", l2r_prob=0.25), seed, 0, range(12_000), 4)
    expected = uniform_counts(order, 24) * 0.75
    expected[0] += 0.25 * len(order)  # the identity comes first in lexicographic order
    assert chi_square_p(counts_of(order), expected) > LEVEL


def test_mixture_at_its_ends_is_left_to_right_or_random():
    ends = [
        orders_at(OrderConfig(kind="mixture", l2r_prob=p), 4, 4, range(200), 12) for p in (0.0, 1.0)
    ]
    identity = torch.arange(12)
    assert not (ends[0] == identity).all(dim=1).any()
    assert (ends[1] == identity).all()


def test_fixed_random_is_one_permutation_for_the_run_and_differs_by_its_seed():
    runs = []
    for seed in range(3):
        config = OrderConfig(kind="fixed_random", seed=seed)
        runs.append(
            torch.cat(
                [orders_at(config, *table, range(4), 32) for table in ((0, 0), (0, 5), (9, 1))]
            )
        )
    for run in runs:
        assert (run == run[0]).all()
        assert not torch.equal(run[0], torch.arange(32))
    assert len({tuple(run[0].tolist()) for run in runs}) == 3


def test_fixed_random_is_uniform_over_its_seeds():
    order = torch.cat(
        [
            orders_at(OrderConfig(kind="fixed_random", seed=s), 0, 0, range(1), 4)
            for s in range(4000)
        ]
    )
    assert chi_square_p(counts_of(order), uniform_counts(order, 24)) > LEVEL


@pytest.mark.parametrize("length, block", [(12, 4), (14, 4), (13, 4), (3, 5), (5, 1)])
def test_fixed_blockwise_keeps_blocks_left_to_right_and_permutes_each_alike(length, block):
    for seed in range(5):
        config = OrderConfig(kind="fixed_blockwise", block=block, seed=seed)
        order = orders_at(config, 1, 2, range(3), length)
        assert (order == order[0]).all()
        assert torch.equal(order, orders_at(config, 8, 9, range(3), length))
        order = order[0]
        assert torch.equal(
            order // block, torch.arange(length) // block
        )  # blocks from left to right
        whole = orders_at(config, 1, 2, range(1), block)[0].tolist()
        for start in range(0, length, block):
            inside = (order[start : start + block] - start).tolist()
            assert inside == [p for p in whole if start + p < length]


def test_fixed_blockwise_does_permute_and_differs_by_its_seed():
    orders = [
        orders_at(OrderConfig(kind="fixed_blockwise", block=16, seed=s), 0, 0, range(1), 48)[0]
        for s in range(3)
    ]
    rows = {tuple(order.tolist()) for order in orders} | {tuple(range(48))}
    assert len(rows) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_sample_orders_is_reproducible_and_advances_its_generator(kind):
    config = OrderConfig(kind=kind, l2r_prob=0.0, block=32)
    generator, again = torch.Generator().manual_seed(11), torch.Generator().manual_seed(11)
    first, second = sample_orders(config, 4, 32, generator), sample_orders(config, 4, 32, generator)
    assert torch.equal(first, sample_orders(config, 4, 32, again))
    assert not torch.equal(generator.get_state(), again.get_state())
    assert torch.equal(second, sample_orders(config, 4, 32, again))
    assert torch.equal(generator.get_state(), again.get_state())
    assert first.shape == (4, 32) and first.dtype == torch.int64
    assert torch.equal(first, second) == (kind not in ("random", "mixture"))


def test_sample_orders_uses_no_other_randomness():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sample_orders(OrderConfig(kind="random"), 4, 8, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("seed", [0, 1])
def test_sample_orders_is_uniform_over_calls(seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat(
        [sample_orders(OrderConfig(kind="random"), 2, 3, generator) for _ in range(3000)]
    )
    assert chi_square_p(counts_of(order), uniform_counts(order, 6)) > LEVEL


def test_inverse_permutation_gives_the_step_of_each_position():
    order = orders_at(OrderConfig(kind="random"), 0, 0, range(20), 9)
    inverse = inverse_permutation(order)
    for row, back in zip(order.tolist(), inverse.tolist(), strict=True):
        assert [back[position] for position in row] == list(range(9))


@pytest.mark.parametrize("width", [1, 3, 4, 5, 9])
def test_philox_rows_are_windows_of_one_table(width):
    table = philox_bits(2, 3, range(20), width)
    assert table.shape == (20, width)
    for start, stop in ((0, 1), (7, 8), (3, 20), (19, 20)):
        assert (philox_bits(2, 3, range(start, stop), width) == table[start:stop]).all()
    assert len(set(table.flatten().tolist())) == table.size  # no number is used twice


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: OrderConfig(l2r_prob=-0.1), "l2r_prob"),
        (lambda: OrderConfig(l2r_prob=1.1), "l2r_prob"),
        (lambda: OrderConfig(l2r_prob=float("nan")), "l2r_prob"),
        (lambda: OrderConfig(block=0), "block"),
        (lambda: orders_at(OrderConfig(), -1, 0, range(1), 4), "seed"),
        (lambda: orders_at(OrderConfig(), 0, -1, range(1), 4), "step"),
        (lambda: orders_at(OrderConfig(), 0, 0, range(1), 0), "length"),
        (lambda: sample_orders(OrderConfig(kind="l2r"), 1, 0, torch.Generator()), "length"),
    ],
)
def test_impossible_settings_are_value_errors_that_name_the_setting(make, word):
    with pytest.raises(ValueError, match=word):
        make()
