"""Orders are permutations from the stated distributions, pure functions of (seed, step,
row)."""

import collections
import itertools
import os

import numpy as np
import pytest
import torch
from helpers import some_slow
from reference import LEVEL, chi_square_p
from scipy.stats import binomtest, chisquare

from aogpt.orders import (
    ORDER_KINDS,
    OrderConfig,
    inverse_permutation,
    orders_at,
    parse_order,
)
from aogpt.runtime.randomness import ORDERS, SHUFFLE, philox_bits

# Kinds of which every row draws its own order, besides random and mixtures.
DRAWN_PER_ROW = ("random_blockwise", "slots", "context_l2r", "infill")
KINDS = (
    "l2r",
    "r2l",
    "random",
    "mixture",
    "fixed_random",
    "fixed_blockwise",
    *DRAWN_PER_ROW,
)


def draw(config, rows, length, seed=0, step=0):
    return orders_at(config, seed, step, range(rows), length)


def test_a_mixture_of_one_kind_alone_is_of_that_kind():
    left_to_right = OrderConfig("mixture", l2r_prob=1.0)
    assert left_to_right.is_fixed
    assert not left_to_right.is_any_order
    assert OrderConfig("mixture", l2r_prob=0.5).is_any_order
    assert OrderConfig("mixture", l2r_prob=1.0, mixed="random").is_any_order


def test_every_kind_is_tested_here():
    untested = ORDER_KINDS.keys() - {*KINDS, "file"}
    assert not untested, f"add {untested} to DRAWN_PER_ROW, or to KINDS alone"


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_a_permutation_and_its_inverse_tells_the_step_of_each_position(
    kind, length
):
    order = draw(OrderConfig(kind, block=5, l2r_prob=0.3), 50, length, seed=3, step=9)
    identity = torch.arange(length).expand(50, length)
    assert order.shape == (50, length)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort(dim=1).values, identity)
    assert torch.equal(inverse_permutation(order).gather(1, order), identity)
    if kind == "l2r":
        assert torch.equal(order, identity)
    if kind == "r2l":
        assert torch.equal(order, identity.flip(1))


@pytest.mark.parametrize("length", [4, 7, 33])  # philox draws four numbers at once
@pytest.mark.parametrize("kind", [*KINDS, "file"])
def test_a_row_does_not_depend_on_the_rows_drawn_with_it(kind, length, tmp_path):
    file = tmp_path / "orders.npy"
    permutations = [np.random.permutation(33) for _ in range(64)]
    np.save(file, np.stack(permutations))
    config = OrderConfig(kind, block=3, l2r_prob=0.3, file=str(file))
    whole = draw(config, 60, length, seed=5, step=7)
    for size in (1, 4, 60):  # 60: nothing is kept between calls
        parts = []
        for start in range(0, 60, size):
            rows = range(start, start + size)
            parts.append(orders_at(config, seed=5, step=7, rows=rows, length=length))
        assert torch.equal(torch.cat(parts), whole)
    if kind == "file":
        for seed, step in ((6, 7), (5, 8)):
            assert not torch.equal(draw(config, 60, length, seed, step), whole)


@pytest.mark.parametrize("kind", ["random", "mixture", *DRAWN_PER_ROW])
def test_seed_step_and_row_all_matter(kind):
    """By chance orders of 64 positions, and sets of context_l2r, collide once in 10^14.
    There are few gaps (infill), some 400,000 of 1,024 positions."""
    length = 1024 if kind == "infill" else 64
    block = 64 if kind == "random_blockwise" else 2
    config = OrderConfig(kind, l2r_prob=0.0, block=block)
    tables = [*itertools.product(range(4), range(4)), (2**62 - 1, 0), (0, 10**6)]
    different = set()
    for seed, step in tables:
        orders = draw(config, 6, length, seed, step)
        different.update(map(tuple, orders.tolist()))
    assert len(different) == 6 * len(tables)


@pytest.mark.parametrize(
    "mixed", ["l2r", "r2l", "fixed_random", "slots", "infill", "context_l2r"]
)
def test_a_mixture_has_a_share_of_another_kind_and_is_random_otherwise(mixed):
    config = OrderConfig("mixture", l2r_prob=0.3, mixed=mixed, block=4, seed=7)
    orders = draw(config, 4000, 12)
    other = draw(OrderConfig(mixed, block=4, seed=7), 4000, 12)
    random = draw(OrderConfig("random"), 4000, 12)
    taken = (orders == other).all(1)
    assert torch.equal(orders, other.where(taken[:, None], random))
    assert binomtest(int(taken.sum()), 4000, 0.3).pvalue > LEVEL
    text = f"mixture:l2r_prob=0.3,mixed={mixed},block=4,seed=7"
    assert parse_order(text, "--order") == config


@pytest.mark.parametrize("kind, block", [("fixed_random", 32), ("fixed_blockwise", 16)])
def test_a_fixed_order_is_one_permutation_for_the_run_and_differs_by_its_seed(
    kind, block
):
    different = set()
    for order_seed in range(3):
        config = OrderConfig(kind, block=block, seed=order_seed)
        first = draw(config, 1, 48)
        for seed, step in ((0, 0), (0, 5), (9, 1)):
            orders = draw(config, 4, 48, seed, step)
            assert torch.equal(orders, first.expand(4, 48))
        different.add(tuple(first[0].tolist()))
    assert len(different) == 3


def of_blockwise(positions, block, **_):
    """Blocks left to right, each in every order."""
    blocks = [positions[i : i + block] for i in range(0, len(positions), block)]
    ways = [itertools.permutations(block_positions) for block_positions in blocks]
    for ordered_blocks in itertools.product(*ways):
        yield tuple(itertools.chain(*ordered_blocks)), 1.0


def of_fixed_blockwise(positions, block, **_):
    """Blocks left to right, each in the same order, never from left to right."""
    size = min(block, len(positions))
    for chosen in itertools.permutations(range(size)):
        if chosen != tuple(range(size)):
            starts = range(0, len(positions), size)
            order = [start + p for start in starts for p in chosen]
            yield tuple(p for p in order if p < len(positions)), 1.0


def of_slots(positions, block, **_):
    """Blocks in every order, each left to right."""
    blocks = [positions[i : i + block] for i in range(0, len(positions), block)]
    for ordered_blocks in itertools.permutations(blocks):
        yield tuple(itertools.chain(*ordered_blocks)), 1.0


def of_uniform(positions, **_):
    for order in itertools.permutations(positions):
        yield order, 1.0


def of_context(positions, share, **_):
    """Each position is in the first set with probability `share`."""
    for chosen in itertools.product((False, True), repeat=len(positions)):
        first = [p for p in positions if chosen[p]]
        rest = [p for p in positions if not chosen[p]]
        probability = share ** len(first) * (1 - share) ** len(rest)
        yield (*first, *rest), probability


def of_infill(positions, share, **_):
    """The length of the gap is uniform, then its place."""
    length = len(positions)
    longest = max(1, int((1 - share) * length))
    for size in range(1, longest + 1):
        places = length - size + 1
        for start in range(places):
            gap = positions[start : start + size]
            context = [p for p in positions if p not in gap]
            yield (*context, *gap), 1 / (longest * places)


DEFINITIONS = {
    "random": of_uniform,
    "fixed_random": of_uniform,
    "fixed_blockwise": of_fixed_blockwise,
    "random_blockwise": of_blockwise,
    "slots": of_slots,
    "context_l2r": of_context,
    "infill": of_infill,
}


def chances(kind, length, **settings):
    """Return the probability of each permutation by definition, for those that have
    any."""
    weights = collections.Counter()
    definition = DEFINITIONS[kind]
    for order, weight in definition(list(range(length)), **settings):
        weights[order] += weight
    total = sum(weights.values())
    return {order: weight / total for order, weight in weights.items() if weight}


# seed, block, share
SETTINGS = [(0, 2, 0.3), (1, 2, 0.3), (2, 1, 0.0), (3, 9, 1.0)]
ENUMERATED_KINDS = ["random", "fixed_random", "fixed_blockwise", *DRAWN_PER_ROW]
# The most positions with the usual settings, and each bound of the settings.
QUICK_LENGTHS = {0: 5, 2: 4, 3: 3}  # seed: length


@pytest.mark.parametrize(
    "kind, length, settings",
    some_slow(
        itertools.product(ENUMERATED_KINDS, [3, 4, 5], SETTINGS),
        lambda kind, length, settings: QUICK_LENGTHS.get(settings[0]) == length,
        "other lengths and seeds",
    ),
)
def test_orders_have_the_probabilities_of_their_definition(kind, length, settings):
    """Over rows, and over steps; of a fixed order, over its seeds."""
    seed, block, share = settings
    if kind == "random_blockwise":
        block = max(block, 2)  # blocks of one position are refused
    if kind == "fixed_blockwise":
        block = min(block + 1, length)
    expected = chances(kind, length, block=block, share=share)

    def drawn(order_seed, step, rows):
        config = OrderConfig(kind, seed=order_seed, block=block, share=share)
        return draw(config, rows, length, seed, step)

    if kind.startswith("fixed"):
        seeds = range(3000 * seed, 3000 * (seed + 1))
        tables = [[drawn(order_seed, 0, 1) for order_seed in seeds]]
    else:
        over_steps = [drawn(0, step, 2) for step in range(1500)]
        tables = [[drawn(0, 0, 6000)], over_steps]
    for table in tables:
        orders = torch.cat(table).tolist()
        counts = collections.Counter(map(tuple, orders))
        assert counts.keys() <= expected.keys()
        if len(expected) == 1:
            continue
        observed = torch.tensor([counts[order] for order in expected]).double()
        probabilities = torch.tensor(list(expected.values())).double()
        assert chi_square_p(observed, probabilities * len(orders)) > LEVEL


def test_orders_of_a_file_are_all_as_frequent(tmp_path):
    path = tmp_path / "orders.npy"
    np.save(path, [[2, 0, 1], [0, 1, 2], [1, 2, 0]])
    config = OrderConfig("file", file=str(path))
    orders = draw(config, 3000, 3).tolist()
    counts = collections.Counter(map(tuple, orders))
    assert counts.keys() == {(2, 0, 1), (0, 1, 2), (1, 2, 0)}
    assert chisquare(list(counts.values())).pvalue > LEVEL
    shorter = draw(config, 100, 2)
    different = set(map(tuple, shorter.tolist()))
    assert different == {(0, 1), (1, 0)}  # the orders of their positions


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "cannot be read"),
        ("pipe", "not a regular one"),  # a read of one would wait for ever
        (b"no numpy", "cannot be read"),
        (np.array([[{}]]), "cannot be read"),  # a pickle, which could run code
        (np.zeros((2, 3)), "does not hold integers"),
        (np.array([[0, 1]]), "orders of 2, not 3 positions"),
        (np.array([[0, 1, 2], [0, 1, 1]]), "does not hold integers .* permutation"),
    ],
)
def test_files_without_orders_are_refused(tmp_path, content, says):
    path = tmp_path / "orders.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        os.mkfifo(path)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(ValueError, match=says):
        draw(OrderConfig("file", file=str(path)), 1, 3)
    with pytest.raises(ValueError, match="name a .npy file"):
        OrderConfig("file")


def test_random_bits_are_fixed_numbers():
    """Orders and shuffles of a run must survive a change of numpy's version."""
    orders = philox_bits(seed=1, index=2, rows=range(1), width=2, stream=ORDERS)
    shuffle = philox_bits(seed=1, index=2, rows=range(1), width=2, stream=SHUFFLE)
    assert orders.tolist() == [[5705853004827290377, 6584680345644299050]]
    assert shuffle.tolist() == [[10612419859462301991, 7774404274552179346]]


@pytest.mark.parametrize("width", [1, 3, 4, 5, 9])
def test_philox_rows_are_windows_of_one_table(width):
    table = philox_bits(2, 3, range(20), width)
    assert table.shape == (20, width)
    for start, stop in ((0, 1), (7, 8), (3, 20), (19, 20)):
        assert (philox_bits(2, 3, range(start, stop), width) == table[start:stop]).all()
    other_stream = philox_bits(seed=2, index=3, rows=range(20), width=width, stream=1)
    numbers = np.concatenate([table.flatten(), other_stream.flatten()])
    assert len(np.unique(numbers)) == 2 * table.size  # no number is used twice


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: OrderConfig("rnd"), "order.kind is 'rnd'"),
        (lambda: OrderConfig(l2r_prob=-0.1), "order.l2r_prob is -0.1"),
        (lambda: OrderConfig(block=0), "order.block is 0"),
        (lambda: OrderConfig("fixed_blockwise", block=1), "at least 2"),
        (lambda: draw(OrderConfig(), 1, length=0), "length"),
        (lambda: draw(OrderConfig(), 1, 4, seed=-1), "seed -1"),
        (lambda: draw(OrderConfig(), 1, 4, step=-1), "step -1"),
        (
            lambda: parse_order("slot", "--order"),
            "--order slot: order.kind is 'slot'.*'slots'",
        ),
    ],
)
def test_impossible_settings_are_value_errors_that_name_the_setting(make, word):
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_orders_are_what_their_option_says(kind):
    for config in (OrderConfig(kind), OrderConfig(kind, block=4, seed=7, share=0.25)):
        same = parse_order(config.option, "--order")
        assert torch.equal(draw(config, 8, 12), draw(same, 8, 12))
