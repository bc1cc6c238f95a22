"""Texts of which everything is known: their entropy, and which orders they prefer.

Each document fills a block of its own together with the end-of-text that follows it, if
model.block_size is its length plus 1.

    polya       63 draws from an urn of 16 letters, each put back with another one like it: the
                order of the draws does not matter to their probability, so no order is better
    latin5      a Latin square of 5 rows and columns, row by row; all squares are equally probable
    shuffled    text in pieces of 63 characters, each in a random order of its own: what is left is
                a bag of letters, which no order prefers either
    infill      text in pieces of 128 characters, of which the words in the middle are predicted
                given both sides: a record each, see data/records.py
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from data.records import given
from data.sources import Corpus, Piece

LETTERS = "abcdefghijklmnop"  # of the urn; a square takes the first of them
POLYA_WEIGHT, POLYA_LENGTH = 0.1, 63
LATIN_SIZE = 5
PIECE = 63  # characters of a shuffled document
INFILL = 128  # of a record


class Generated(Corpus):
    """Documents that a function makes of random numbers."""

    def __init__(self, name: str, make: Callable[[np.random.Generator], str], seed, documents: int):
        self.name, self.make, self.seed, self.total = name, make, seed, documents

    def describe(self) -> list[dict]:
        return [{"generated": self.name, "seed": self.seed, "documents": self.total}]

    def pieces(self) -> Iterator[Piece]:
        generator = np.random.default_rng(self.seed)
        for number in range(self.total):
            self.position = number + 1
            yield self.make(generator), True


class Shuffled(Corpus):
    """The documents of another corpus, cut into pieces of PIECE characters (ASCII alone, a byte
    each), every piece a document with its characters in random order."""

    def __init__(self, inner: Corpus, seed: int):
        self.inner, self.seed = inner, seed
        self.unit, self.packages = inner.unit, inner.packages

    def describe(self) -> list[dict]:
        return [{"shuffled": PIECE, "seed": self.seed}, *self.inner.describe()]

    def pieces(self) -> Iterator[Piece]:
        generator, rest = np.random.default_rng(self.seed), ""
        for text, end in self.inner.pieces():
            self.total, self.position = self.inner.total, self.inner.position
            rest += "".join(character for character in text if character.isascii())
            while len(rest) >= PIECE:
                piece, rest = rest[:PIECE], rest[PIECE:]
                yield "".join(piece[i] for i in generator.permutation(PIECE)), True
            if end:
                rest = ""  # what is left of a document is too short


class Infill(Corpus):
    """The documents of another corpus, cut into pieces of INFILL characters (ASCII alone, a byte
    each), every piece a record of which all but the words in its middle third are given."""

    def __init__(self, inner: Corpus):
        self.inner, self.unit, self.packages = inner, inner.unit, inner.packages

    def describe(self) -> list[dict]:
        return [{"infill": INFILL}, *self.inner.describe()]

    def pieces(self) -> Iterator[Piece]:
        rest = ""
        for text, end in self.inner.pieces():
            self.total, self.position = self.inner.total, self.inner.position
            rest += "".join(c for c in text if c.isascii() and c not in "[]")  # no marks of records
            while len(rest) >= INFILL:
                piece, rest = rest[:INFILL], rest[INFILL:]
                start, stop = piece.find(" ", INFILL // 3), piece.rfind(" ", 0, 2 * INFILL // 3)
                if 0 < start < stop:
                    middle = piece[start:stop]
                    yield given(piece[:start]) + middle + given(piece[stop:]), True
            if end:
                rest = ""  # what is left of a document is too short


# ---- Polya's urn ---------------------------------------------------------------------------------


def polya(generator: np.random.Generator) -> str:
    """One sequence of draws. The urn holds POLYA_WEIGHT of each letter before them."""
    counts, drawn = np.full(len(LETTERS), POLYA_WEIGHT), []
    for uniform in generator.random(POLYA_LENGTH):
        cumulative = counts.cumsum()
        letter = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        counts[letter] += 1
        drawn.append(LETTERS[letter])
    return "".join(drawn)


def polya_entropy(
    letters: int = len(LETTERS), weight: float = POLYA_WEIGHT, length: int = POLYA_LENGTH
) -> float:
    """Entropy of a sequence, nats.

    With n_v draws of letter v of V, its probability is G(V a) / G(V a + n) prod_v G(n_v + a) / G(a)
    (Dirichlet and multinomial, G the gamma function). By symmetry the mean of its logarithm needs
    the distribution of one n_v alone, which is beta-binomial with a and (V - 1) a."""
    log_gamma, a, b = math.lgamma, weight, (letters - 1) * weight
    log_beta = log_gamma(a) + log_gamma(b) - log_gamma(a + b)
    mean = 0.0
    for n in range(length + 1):
        ways = log_gamma(length + 1) - log_gamma(n + 1) - log_gamma(length - n + 1)
        beta = log_gamma(n + a) + log_gamma(length - n + b) - log_gamma(length + a + b)
        mean += math.exp(ways + beta - log_beta) * (log_gamma(n + a) - log_gamma(a))
    return log_gamma(letters * a + length) - log_gamma(letters * a) - letters * mean


# ---- Latin squares -------------------------------------------------------------------------------


@functools.cache
def reduced_squares(size: int = LATIN_SIZE) -> list[np.ndarray]:
    """All Latin squares whose first row and first column are in order: 56 of size 5."""
    squares: list[list[tuple[int, ...]]] = [[tuple(range(size))]]
    for row in range(1, size):
        squares = [
            [*square, candidate]
            for square in squares
            for candidate in itertools.permutations(range(size))
            if candidate[0] == row
            and all(a != b for above in square for a, b in zip(above, candidate, strict=True))
        ]
    return [np.array(square) for square in squares]


def latin5(generator: np.random.Generator) -> str:
    """A uniformly random Latin square, row by row, in the letters a to e. Every square is one
    reduced square with its columns in one order and its rows but the first in one order."""
    squares = reduced_squares()
    square = squares[generator.integers(len(squares))][:, generator.permutation(LATIN_SIZE)]
    rows = [0, *(1 + generator.permutation(LATIN_SIZE - 1))]
    return "".join(LETTERS[cell] for cell in square[rows].flatten())


def latin5_entropy() -> float:
    """Entropy of a square, nats: all 56 5! 4! = 161,280 of them are equally probable."""
    count = len(reduced_squares()) * math.factorial(LATIN_SIZE) * math.factorial(LATIN_SIZE - 1)
    return math.log(count)


def polya_nats(text: str, weight: float = POLYA_WEIGHT) -> float:
    """-log probability of a sequence of draws (see `polya_entropy`)."""
    log_gamma, V, n = math.lgamma, len(LETTERS), len(text)
    log_p = log_gamma(V * weight) - log_gamma(V * weight + n)
    log_p += sum(log_gamma(text.count(v) + weight) - log_gamma(weight) for v in LETTERS)
    return -log_p


NATS_OF_TEXT: dict[str, Callable[[str], float]] = {
    "polya": polya_nats,
    "latin5": lambda square: latin5_entropy(),
}
"""-log probability of a document, without the end-of-text that follows it for certain: the least
loss that a model can have on it, but by luck."""
