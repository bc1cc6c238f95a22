"""data/generators.py: texts whose entropy is known are what they are said to be."""

import collections
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers import prepared, run_script
from reference import LEVEL, chi_square_p

from data import generators
from data.generators import latin5, polya, polya_entropy, reduced_squares
from data.loader import TokenDataset
from data.prepare import Prepare, prepare


def urn_probability(sequence, letters, weight):
    """Draw by draw: (how often it has been drawn + weight) / (draws so far + all weights)."""
    counts, p = collections.Counter(), Fraction(1)
    for i, letter in enumerate(sequence):
        p *= (counts[letter] + weight) / (i + letters * weight)
        counts[letter] += 1
    return p


@pytest.mark.parametrize("letters, weight, length", [(2, 0.5, 8), (3, 0.1, 6), (4, 2.0, 4)])
def test_the_entropy_of_an_urn_is_that_of_all_its_sequences(letters, weight, length):
    """1e-10: sums of some hundred float64 terms."""
    weight = Fraction(weight).limit_denominator(100)
    probabilities = [
        float(urn_probability(s, letters, weight))
        for s in itertools.product(range(letters), repeat=length)
    ]
    assert sum(probabilities) == pytest.approx(1, abs=1e-12)
    expected = -sum(p * math.log(p) for p in probabilities)
    assert polya_entropy(letters, float(weight), length) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("text", ["a" * 63, "ponm" * 3, "abca", "h", ""])
def test_the_least_loss_on_draws_from_the_urn_is_their_probability(text):
    letters = [generators.LETTERS.index(letter) for letter in text]
    expected = -math.log(urn_probability(letters, 16, Fraction(1, 10)))
    assert generators.polya_nats(text) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_draws_from_the_urn_have_their_probabilities(seed):
    """How many different letters the first four draws have, and the entropy of whole sequences."""
    generator = np.random.default_rng(seed)
    drawn = [polya(generator) for _ in range(4000)]
    weight = Fraction(1, 10)
    expected = collections.Counter()
    for s in itertools.product(range(4), repeat=4):  # first letters in order of appearance
        if all(s[i] <= max(s[:i], default=-1) + 1 for i in range(4)):
            different = len(set(s))
            ways = math.perm(16, different)
            expected[different] += float(ways * urn_probability(s, 16, weight))
    counts = collections.Counter(len(set(s[:4])) for s in drawn)
    both = [[table[n] for n in range(1, 5)] for table in (counts, expected)]
    observed, chances = torch.tensor(both[0]).double(), torch.tensor(both[1]).double()
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert chi_square_p(observed, chances * len(drawn)) > LEVEL
    log_p = np.array([-math.log(urn_probability(s, 16, weight)) for s in drawn])
    assert {len(s) for s in drawn} == {63}
    assert abs(log_p.mean() - polya_entropy()) < 4.5 * log_p.std() / math.sqrt(len(drawn))


def test_latin_squares_are_uniform_over_all_of_them():
    """161,280 of size 5 and 56 reduced ones; counted by one row and column: 12,000 squares fall
    evenly on the 120 first rows, and on the 56 reduced squares."""
    assert len(reduced_squares(3)) == 1 and len(reduced_squares(4)) == 4
    assert len(reduced_squares()) == 56
    assert generators.latin5_entropy() == pytest.approx(math.log(161_280))
    assert generators.latin5_entropy() / 25 == pytest.approx(0.480, abs=5e-4)
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
        assert chi_square_p(observed, torch.full((number,), 12_000 / number).double()) > LEVEL


def test_every_document_fills_a_block_with_its_end_of_text(tmp_path):
    latin = prepare(Prepare("latin5", out=tmp_path / "latin5", limit=40))
    urns = prepare(Prepare("polya", out=tmp_path / "polya", limit=40))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox, naïve as it is, jumps over the lazy dog. " * 30)
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(text.read_text())
    shuffled = prepared("shuffled", tmp_path / "shuffled", text, val=(held_out,))
    for folder, length in ((latin, 25), (urns, 63), (shuffled, 63)):
        for split in ("train", "val"):
            data = TokenDataset(folder, split, length + 1)
            blocks = data.blocks(range(data.num_blocks))
            assert len(blocks) >= 20
            assert (blocks[:, -1] == 256).all() and (blocks[:, :-1] < 128).all()
    train, val = (TokenDataset(latin, split, 26).blocks(range(20)) for split in ("train", "val"))
    assert not torch.equal(train, val)  # splits have random numbers of their own
    ascii_text = text.read_text().replace("ï", "")
    letters = collections.Counter(ascii_text[: len(ascii_text) // 63 * 63].encode())
    blocks = TokenDataset(shuffled, "train", 64).blocks(range(len(ascii_text) // 63))
    assert collections.Counter(blocks[:, :-1].flatten().tolist()) == letters
    assert bytes(blocks[0, :-1].tolist()).decode() != ascii_text[:63]


def test_the_same_documents_are_made_again(tmp_path):
    """As a user would, in a process of its own."""
    for name in ("a", "b"):
        run_script("data/prepare.py", "polya", "--limit", 30, "--out", tmp_path / name)
    assert (tmp_path / "a" / "train.bin").read_bytes() == (
        tmp_path / "b" / "train.bin"
    ).read_bytes()


def test_made_texts_have_splits_of_their_own(tmp_path):
    for changes in ({"val_fraction": 0.1}, {"split": "train"}):
        with pytest.raises(ValueError, match="made in splits of its own"):
            prepare(Prepare("polya", out=tmp_path / "o", **changes))
