"""Texts with a known entropy. A document and its end-of-text fill a block if
model.block_size is its length plus 1.

polya       63 draws from an urn of 16 letters, each put back with another one like
            it: the probability does not depend on the order of the draws, so no order
            is better
latin5      a Latin square of 5 rows and columns, row by row; all squares are equally
            probable
shuffled    text in chunks of 63 characters in random order: a bag of letters"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, default_rng

from aogpt.data.catalogue import Dataset
from aogpt.data.prepare import Prepare
from aogpt.data.sources import Corpus, RowReader

LETTERS = "abcdefghijklmnop"  # of the urn; a square takes the first of them
POLYA_WEIGHT = 0.1
POLYA_LENGTH = 63
LATIN_SIZE = 5
SHUFFLED = 63  # characters of a chunk


@dataclass(frozen=True)
class Made(Dataset):
    """A dataset of random numbers; `numbers` are its documents in each split.
    Subclasses have documents(split, rng, count), which yields them, and `origin`, what
    is recorded of them."""

    tokenizer: str = "bytes"

    def corpora(self, args: Prepare, read_row: RowReader) -> dict[str, Corpus]:
        corpora = {}
        for place, split in enumerate(self.splits):
            count = self.numbers[place]
            seed = [place, count]
            rng = default_rng(seed)
            documents = self.documents(split, rng, count)
            facts = dict(self.origin)
            facts["seed"] = seed
            facts["documents"] = count
            corpora[split] = Corpus(documents, [facts])
        return corpora


Maker = Callable[[Generator], str]  # of a document


@dataclass(frozen=True)
class Generated(Made):
    """Documents that `make` draws, one by one."""

    make: Maker = lambda rng: ""
    splits: tuple[str, ...] = ("train", "val")

    @property
    def origin(self) -> dict[str, str]:
        return {"generated": self.make.__name__}

    def documents(self, split: str, rng: Generator, count: int) -> Iterator[str]:
        for _ in range(count):
            yield self.make(rng)


@dataclass(frozen=True)
class Shuffled(Dataset):
    """Text of the user's in chunks whose characters are in random order."""

    def corpora(self, args: Prepare, read_row: RowReader) -> dict[str, Corpus]:
        corpora = super().corpora(args, read_row)
        for seed, (split, corpus) in enumerate(corpora.items()):
            facts = {"shuffled": SHUFFLED, "seed": seed}
            chunks = shuffled_chunks(corpus, seed)
            description = [facts, *corpus.description]
            corpora[split] = Corpus(chunks, description)
        return corpora


def shuffled_chunks(corpus: Corpus, seed: int) -> Iterator[str]:
    """Yield the ASCII characters of each document, in chunks in random order; the rest
    is dropped."""
    rng = default_rng(seed)
    for text in corpus.documents:
        ascii_bytes = text.encode("ascii", errors="ignore")
        ascii_text = ascii_bytes.decode()
        last = len(ascii_text) - SHUFFLED
        for start in range(0, last + 1, SHUFFLED):
            chunk = ascii_text[start : start + SHUFFLED]
            places = rng.permutation(SHUFFLED)
            yield "".join(chunk[place] for place in places)


def polya(rng: Generator) -> str:
    """Return a sequence of draws. The urn holds POLYA_WEIGHT of each letter before
    them."""
    counts = np.full(len(LETTERS), POLYA_WEIGHT)
    drawn = []
    for uniform in rng.random(POLYA_LENGTH):
        cumulative = counts.cumsum()
        height = uniform * cumulative[-1]
        letter = np.searchsorted(cumulative, height, side="right")
        counts[letter] += 1
        drawn.append(LETTERS[letter])
    return "".join(drawn)


def polya_nats(text: str) -> float:
    """Return -log probability of a sequence of draws. With n_v draws of letter v of V
    and weight a, the probability is G(V a) / G(V a + n) prod_v G(n_v + a) / G(a),
    lgamma = log G."""
    nats = log_growth(len(LETTERS) * POLYA_WEIGHT, len(text))
    for letter in LETTERS:
        nats -= log_growth(POLYA_WEIGHT, text.count(letter))
    return nats


def log_growth(weight: float, count: int) -> float:
    """Return log G(weight + count) / G(weight)."""
    return math.lgamma(weight + count) - math.lgamma(weight)


@functools.cache
def reduced_squares(size: int = LATIN_SIZE) -> list[np.ndarray]:
    """Return all Latin squares whose first row and first column are in order: 56 of
    size 5."""
    squares = [[tuple(range(size))]]
    rows = list(itertools.permutations(range(size)))
    for first in range(1, size):
        longer = []
        for above, row in itertools.product(squares, rows):
            if row[0] == first and fits_below(row, above):
                longer.append([*above, row])
        squares = longer
    return [np.array(square) for square in squares]


Row = tuple[int, ...]  # of numbers of a Latin square


def fits_below(row: Row, above: list[Row]) -> bool:
    """Return whether no column of a square would have a number twice."""
    for column, number in enumerate(row):
        numbers = [other[column] for other in above]
        if number in numbers:
            return False
    return True


def latin5(rng: Generator) -> str:
    """Return a random Latin square: a reduced one, columns and then rows but the first
    shuffled."""
    squares = reduced_squares()
    square = squares[rng.integers(len(squares))]
    columns = rng.permutation(LATIN_SIZE)
    shuffled_symbols = 1 + rng.permutation(LATIN_SIZE - 1)
    rows = [0, *shuffled_symbols]
    shuffled = square[:, columns][rows]
    letters = [LETTERS[number] for number in shuffled.flatten()]
    return "".join(letters)


def latin5_nats(square: str) -> float:
    """Return -log probability of a Latin square: all are equally probable."""
    squares = len(reduced_squares())
    columns = math.factorial(LATIN_SIZE)
    rows = math.factorial(LATIN_SIZE - 1)
    return math.log(squares * columns * rows)


# -log probability of a document, without its end-of-text: the least expected loss on
# it.
NATS_OF_TEXT: dict[str, Callable[[str], float]] = {
    "polya": polya_nats,
    "latin5": latin5_nats,
}
