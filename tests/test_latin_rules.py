"""Rules of thumb for Latin squares: what they know, and what they do not."""

from itertools import product

import numpy as np
import pytest

from data.generators import latin5
from studies.experiments.latin_rules import CELLS, RULES, above_entropy, fitting, looking_ahead


@pytest.mark.parametrize("seed", range(20))
def test_no_rule_leaves_out_the_true_digit(seed):
    generator = np.random.default_rng(seed)
    square = dict(zip(CELLS, latin5(generator), strict=True))
    known = generator.permutation(len(CELLS))
    board = {}
    for place in known:
        possible = [rule(board, CELLS[place]) for rule in RULES.values()]
        assert all(square[CELLS[place]] in digits for digits in possible)
        assert set(possible[1]) <= set(possible[0])
        board[CELLS[place]] = square[CELLS[place]]


def test_looking_ahead_sees_that_a_digit_has_no_other_place():
    # The first row still wants c, d and e, and c stands in two of the three columns already.
    board = {(0, 0): "a", (0, 1): "b", (1, 3): "c", (2, 4): "c"}
    assert fitting(board, (0, 2)) == ["c", "d", "e"]
    assert looking_ahead(board, (0, 2)) == ["c"]


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_asks_for_more_than_left_to_right(seed):
    found = [
        above_entropy(rule, any_order, 100, seed)
        for rule, any_order in product(RULES.values(), (False, True))
    ]
    means, errors = zip(*found, strict=True)
    # They differ by many times their errors, of 0.005 at most.
    assert max(errors) < 0.006
    assert means[2] < 0.02 < means[3] < 0.08 < means[1]
    assert means[2] < 0.04 < means[0] < 0.08
