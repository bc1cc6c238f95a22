"""studies/ngrams.py: divergences by hand, and of text from itself."""

import math

import numpy as np
import pytest
from helpers import prepared
from scipy.spatial.distance import jensenshannon

from studies.ngrams import divergences, jensen_shannon, ngrams


def test_divergence_of_n_grams_is_scipys_and_lies_between_0_and_log_2():
    one = ngrams([[1, 2, 1, 2], [3]], 2)
    other = ngrams([[1, 2, 3]], 2)
    disjoint = ngrams([[8, 9]], 2)
    empty = ngrams([[8]], 2)
    assert one == {(1, 2): 2, (2, 1): 1}
    assert other == {(1, 2): 1, (2, 3): 1}
    expected = jensenshannon([2 / 3, 1 / 3, 0], [1 / 2, 0, 1 / 2]) ** 2
    assert jensen_shannon(one, other) == pytest.approx(expected)
    assert jensen_shannon(one, one) == 0
    assert jensen_shannon(one, disjoint) == pytest.approx(math.log(2))
    assert jensen_shannon(one, empty) is None


def test_pieces_of_the_text_are_near_to_it_and_repetition_is_not(tmp_path):
    source = tmp_path / "text.txt"
    letters = np.random.default_rng(0).choice(list("aaabbc"), 40_000)
    source.write_text(" ".join(letters))
    folder = str(prepared("text", tmp_path / "text", source, split="test"))
    pieces = [list(source.read_bytes()[start : start + 200]) for start in (0, 800)]
    near = divergences(pieces, folder)
    far = divergences([list(b"a a " * 100)], folder)
    assert near["js_2"] < 0.05 < far["js_2"] < math.log(2)
    assert near["js_2_text"] < 0.05
