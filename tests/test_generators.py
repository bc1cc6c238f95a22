"""studies/generators.py: texts whose entropy is known are what they are said to be."""

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import prepared
from reference import LEVEL, chi_square_p

from aogpt.data.loader import TokenDataset
from studies import generators
from studies.generators import latin5, polya, reduced_squares


def urn_probability(sequence, letters, weight):
    """Draw by draw: (how often it has been drawn + weight) / (draws so far + all
    weights)."""
    counts = collections.Counter()
    p = Fraction(1)
    for i, letter in enumerate(sequence):
        p *= (counts[letter] + weight) / (i + letters * weight)
        counts[letter] += 1
    return p


@pytest.mark.parametrize("text", ["a" * 63, "ponm" * 3, "abca", "h", ""])
def test_the_least_loss_on_draws_from_the_urn_is_their_probability(text):
    letters = [generators.LETTERS.index(letter) for letter in text]
    expected = -math.log(urn_probability(letters, 16, Fraction(1, 10)))
    assert generators.polya_nats(text) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_from_the_urn_have_their_probabilities(seed):
    """How many different letters the first four draws have."""
    generator = np.random.default_rng(seed)
    drawn = [polya(generator) for _ in range(4000)]
    weight = Fraction(1, 10)
    expected = collections.Counter()
    for s in itertools.product(
        range(4), repeat=4
    ):  # first letters in order of appearance
        if all(s[i] <= max(s[:i], default=-1) + 1 for i in range(4)):
            different = len(set(s))
            ways = math.perm(16, different)
            expected[different] += float(ways * urn_probability(s, 16, weight))
    counts = collections.Counter(len(set(s[:4])) for s in drawn)
    both = [[table[n] for n in range(1, 5)] for table in (counts, expected)]
    observed = torch.tensor(both[0]).double()
    chances = torch.tensor(both[1]).double()
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert chi_square_p(observed, chances * len(drawn)) > LEVEL
    assert {len(s) for s in drawn} == {63}


def test_latin_squares_are_uniform_over_all_of_them():
    """161,280 of size 5 and 56 reduced ones; counted by one row and column: 12,000
    squares fall evenly on the 120 first rows, and on the 56 reduced squares."""
    assert len(reduced_squares(3)) == 1 and len(reduced_squares(4)) == 4
    assert len(reduced_squares()) == 56
    entropy = generators.NATS_OF_TEXT["latin5"]("abcde" * 5)
    assert entropy == pytest.approx(math.log(161_280))

    generator = np.random.default_rng(0)
    squares = [np.array(list(latin5(generator))).reshape(5, 5) for _ in range(12_000)]
    for square in squares[:200]:
        for line in (*square, *square.T):
            assert sorted(line) == list("abcde")
    first_rows = collections.Counter("".join(square[0]) for square in squares)
    reduced = collections.Counter()
    for square in squares:
        by_column = square[:, square[0].argsort()]
        reduced["".join(by_column[by_column[:, 0].argsort()].flatten())] += 1
    for counts, number in ((first_rows, 120), (reduced, 56)):
        observed = torch.tensor([*counts.values()]).double()
        assert len(observed) == number
        assert (
            chi_square_p(observed, torch.full((number,), 12_000 / number).double())
            > LEVEL
        )


def test_every_document_fills_a_block_with_its_end_of_text(tmp_path):
    latin, again, urns = (
        prepared(name, tmp_path / f"{name}{number}", limit=40)
        for name, number in (("latin5", 1), ("latin5", 2), ("polya", 1))
    )
    assert (latin / "train.bin").read_bytes() == (again / "train.bin").read_bytes()
    text = tmp_path / "text.txt"
    held_out = tmp_path / "held_out.txt"
    sentence = "The quick brown fox, naïve as it is, jumps over the lazy dog. "
    text.write_text(sentence * 30)
    held_out.write_text(sentence * 31)
    shuffled = prepared("shuffled", tmp_path / "shuffled", text, val=(held_out,))
    for folder, length in ((latin, 25), (urns, 63), (shuffled, 63)):
        train, val = (
            TokenDataset(folder, split, length + 1) for split in ("train", "val")
        )
        for data in (train, val):
            blocks = data.blocks(range(data.num_blocks))
            assert len(blocks) >= 20
            assert (blocks[:, -1] == 256).all() and (blocks[:, :-1] < 128).all()
        # splits have random numbers of their own
        assert not torch.equal(train.blocks(range(20)), val.blocks(range(20)))
    ascii_text = text.read_text().replace("ï", "")
    letters = collections.Counter(ascii_text[: len(ascii_text) // 63 * 63].encode())
    blocks = TokenDataset(shuffled, "train", 64).blocks(range(len(ascii_text) // 63))
    assert collections.Counter(blocks[:, :-1].flatten().tolist()) == letters
    assert bytes(blocks[0, :-1].tolist()).decode() != ascii_text[:63]
