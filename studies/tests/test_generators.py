"""studies/generators.py: texts whose entropy is known are what they are said to be."""

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from reference import LEVEL, chi_square_p
from study_data import prepared_study

from aogpt.data.loader import TokenDataset
from studies import generators
from studies.generators import latin5, polya, reduced_squares


def urn_probability(sequence, letters, weight):
    """Return the probability of a sequence, draw by draw: (how often the letter has
    been drawn + weight) / (draws so far + all weights)."""
    counts = collections.Counter()
    probability = Fraction(1)
    for i, letter in enumerate(sequence):
        total = i + letters * weight
        probability *= (counts[letter] + weight) / total
        counts[letter] += 1
    return probability


@pytest.mark.parametrize("text", ["a" * 63, "ponm" * 3, "abca", "h", ""])
def test_the_least_loss_on_draws_from_the_urn_is_their_probability(text):
    sequence = [generators.LETTERS.index(letter) for letter in text]
    probability = urn_probability(sequence, letters=16, weight=Fraction(1, 10))
    expected = -math.log(probability)
    assert generators.polya_nats(text) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_from_the_urn_have_their_probabilities(seed):
    """How many different letters the first four draws have."""
    generator = np.random.default_rng(seed)
    weight = Fraction(1, 10)
    chances = torch.zeros(4, dtype=torch.float64)  # of 1 to 4 different letters
    for draws in itertools.product(range(4), repeat=4):
        # Letters are numbered in the order in which they appear.
        letters = list(dict.fromkeys(draws))
        different = len(letters)
        if letters == list(range(different)):
            ways = math.perm(16, different)
            probability = urn_probability(draws, letters=16, weight=weight)
            chances[different - 1] += float(ways * probability)
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    observed = torch.zeros(4, dtype=torch.float64)
    for _ in range(4000):
        text = polya(generator)
        assert len(text) == 63
        different = len(set(text[:4]))
        observed[different - 1] += 1
    assert chi_square_p(observed, chances * 4000) > LEVEL


def test_latin_squares_are_uniform_over_all_of_them():
    """161,280 of size 5 and 56 reduced ones; counted by one row and column: 12,000
    squares fall evenly on the 120 first rows, and on the 56 reduced squares."""
    assert len(reduced_squares(3)) == 1
    assert len(reduced_squares(4)) == 4
    assert len(reduced_squares()) == 56
    entropy = generators.NATS_OF_TEXT["latin5"]("abcde" * 5)
    assert entropy == pytest.approx(math.log(161_280))

    generator = np.random.default_rng(0)
    first_rows = collections.Counter()
    reduced = collections.Counter()
    for number in range(12_000):
        square = np.array(list(latin5(generator))).reshape(5, 5)
        if number < 200:
            for line in (*square, *square.T):
                assert sorted(line) == list("abcde")
        first_rows["".join(square[0])] += 1
        by_column = square[:, square[0].argsort()]
        by_row = by_column[by_column[:, 0].argsort()]
        reduced["".join(by_row.flatten())] += 1
    for counts, number in ((first_rows, 120), (reduced, 56)):
        observed = torch.tensor([*counts.values()]).double()
        assert len(observed) == number
        even = torch.full_like(observed, 12_000 / number)
        assert chi_square_p(observed, even) > LEVEL


def test_every_document_fills_a_block_with_its_end_of_text(tmp_path):
    latin = prepared_study("latin5", tmp_path / "latin", limit=40)
    again = prepared_study("latin5", tmp_path / "again", limit=40)
    urns = prepared_study("polya", tmp_path / "urns", limit=40)
    assert (latin / "train.bin").read_bytes() == (again / "train.bin").read_bytes()
    text = tmp_path / "text.txt"
    held_out = tmp_path / "held_out.txt"
    sentence = "The quick brown fox, naïve as it is, jumps over the lazy dog. "
    text.write_text(sentence * 30)
    held_out.write_text(sentence * 31)
    shuffled = prepared_study("shuffled", tmp_path / "shuffled", text, val=(held_out,))
    for folder, length in ((latin, 25), (urns, 63), (shuffled, 63)):
        train = TokenDataset(folder, "train", length + 1)
        val = TokenDataset(folder, "val", length + 1)
        for data in (train, val):
            blocks = data.blocks(range(data.num_blocks))
            assert len(blocks) >= 20
            assert (blocks[:, -1] == 256).all()
            assert (blocks[:, :-1] < 128).all()
        # splits have random numbers of their own
        assert not torch.equal(train.blocks(range(20)), val.blocks(range(20)))
    ascii_text = text.read_text().replace("ï", "")
    letters = collections.Counter(ascii_text[: len(ascii_text) // 63 * 63].encode())
    blocks = TokenDataset(shuffled, "train", 64).blocks(range(len(ascii_text) // 63))
    assert collections.Counter(blocks[:, :-1].flatten().tolist()) == letters
    assert bytes(blocks[0, :-1].tolist()).decode() != ascii_text[:63]
