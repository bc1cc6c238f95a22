"""Tasks in which order matters, or does not: their records, what is right, and what is possible.

    sudoku6     a 6x6 Sudoku with boxes of 2 rows and 3 columns, and its only solution
    star        a path in a star of 3 arms, from its centre to the end of one: the first step is a
                guess for who goes left to right, but from the end all steps are forced (Bachmann &
                Nagarajan, arXiv 2403.06963)
    addition    two numbers of 5 digits and their sum, its most significant digit first: carries
                come from the other end
    reversal    facts A:B, asked for A given B (Berglund et al., arXiv 2309.12288); the answers to
                the facts that are asked were never trained on in this direction
    mirror      letters, and the same ones backwards: every order is as good
    parity      bits, and the parity of each and all before it: left to right, a step a bit
    colouring   a map of 8 countries, and one of 3 colours for each; any that fit are right
    copy, replace, shuffle
                letters; and the same, or the same with one of them replaced, or all of them in
                another order. What positions drawn in parallel cannot agree on is known exactly
                (`Task.limit`; ParallelBench, arXiv 2510.04767)

Every record of a task has the same length, a block, and no end-of-text. A record is made of a
*key*, such as the solution of a Sudoku, and its split follows from a hash of the key: no key is in
two splits, whatever their sizes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.records import given
from data.sources import Corpus, Piece

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEST_SHARE = VAL_SHARE = 1 / 16  # of the keys


@dataclass(frozen=True)
class Task:
    """A task: how its records are made, and which answers to them are right."""

    name: str
    length: int
    """Characters of a record, which are its tokens (bytes)."""
    draw: Callable[[np.random.Generator], str]
    """A random key."""
    record: Callable[[str, np.random.Generator], str]
    """The record of a key, with what is given in marks; see data/records.py."""
    documents: int
    """Records of the training split."""
    keys: int | None = None
    """Of the validation split and of the test split, where these are few: each is drawn once."""
    split: Callable[[str], str] = None
    """The split of a key; by default of its hash."""
    is_right: Callable[[str, str], bool] = str.__eq__
    """(record filled in, record as it was made), without marks -> whether it is an answer."""
    limit: Callable[[Sequence[int]], float] | None = None
    """(sizes of the groups of positions drawn in parallel, one after the other) -> the share of
    right answers of a model whose every conditional is exact, at temperature 1."""
    board: tuple[int, int, int, int] | None = None
    """Of records that are boards, one after the other: rows and columns of a board, and of the
    boxes that it is made of."""

    @property
    def temperature(self) -> float:
        """Of answers: 0, the likeliest tokens; 1 where the limit is that of samples."""
        return 1.0 if self.limit else 0.0

    def split_of(self, key: str) -> str:
        return (self.split or split_by_hash)(key)


class TaskRecords(Corpus):
    """The records of one split of a task."""

    def __init__(self, task: Task, split: str, seed: list[int], documents: int):
        self.task, self.split, self.seed, self.total = task, split, seed, documents

    def describe(self) -> list[dict]:
        return [{"task": self.task.name, "seed": self.seed, "documents": self.total}]

    def pieces(self) -> Iterator[Piece]:
        generator, drawn = np.random.default_rng(self.seed), set()
        for number in range(self.total):
            key = self.task.draw(generator)
            while self.task.split_of(key) != self.split or key in drawn:
                key = self.task.draw(generator)
            self.position = number + 1
            if self.task.keys and self.split != "train":
                drawn.add(key)
            yield self.task.record(key, generator), True


def split_by_hash(key: str) -> str:
    """test or val for a sixteenth of all keys each, else train."""
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") / 2**64
    if share < TEST_SHARE:
        return "test"
    return "val" if share < TEST_SHARE + VAL_SHARE else "train"


def letters(generator: np.random.Generator, count: int) -> str:
    """So many different ones, in random order."""
    return "".join(LETTERS[i] for i in generator.permutation(len(LETTERS))[:count])


def first_pairs(text: str, count: int) -> list[str]:
    """Its first pairs of letters, each an edge of a graph."""
    return [text[i : i + 2] for i in range(0, 2 * count, 2)]


# ---- Sudoku --------------------------------------------------------------------------------------

SIDE, BOX_ROWS, BOX_COLUMNS = 6, 2, 3
CLUES = range(12, 21)  # before those that make a Sudoku have one solution only

ROW = [cell // SIDE for cell in range(SIDE**2)]
COLUMN = [cell % SIDE for cell in range(SIDE**2)]
BOX = [r // BOX_ROWS * BOX_ROWS + c // BOX_COLUMNS for r, c in zip(ROW, COLUMN, strict=True)]


def solutions(cells: Sequence[int]) -> Iterator[list[int]]:
    """All ways to fill the empty cells (0) of a board of 36; those filled in must not clash."""
    board, used = list(cells), ([0] * SIDE, [0] * SIDE, [0] * SIDE)  # bits of digits
    rows, columns, boxes = used
    for cell, digit in enumerate(board):
        if digit:
            rows[ROW[cell]] |= 1 << digit
            columns[COLUMN[cell]] |= 1 << digit
            boxes[BOX[cell]] |= 1 << digit
    empty = [cell for cell, digit in enumerate(board) if not digit]

    def free(cell: int) -> int:
        return ~(rows[ROW[cell]] | columns[COLUMN[cell]] | boxes[BOX[cell]]) & 0b1111110

    def search() -> Iterator[list[int]]:
        if not empty:
            yield board.copy()
            return
        place = min(range(len(empty)), key=lambda i: free(empty[i]).bit_count())
        cell = empty.pop(place)
        for digit in range(1, SIDE + 1):
            bit = 1 << digit
            if free(cell) & bit:
                board[cell] = digit
                for of_kind, index in zip(used, (ROW[cell], COLUMN[cell], BOX[cell]), strict=True):
                    of_kind[index] ^= bit
                yield from search()
                for of_kind, index in zip(used, (ROW[cell], COLUMN[cell], BOX[cell]), strict=True):
                    of_kind[index] ^= bit
        board[cell] = 0
        empty.insert(place, cell)

    return search()


@functools.cache
def first_row_in_order() -> list[tuple[int, ...]]:
    """All 39,168 boards whose first row is 1 2 3 4 5 6: every board is one of them with its digits
    renamed."""
    start = [*range(1, SIDE + 1), *[0] * (SIDE**2 - SIDE)]
    return [tuple(board) for board in solutions(start)]


def draw_board(generator: np.random.Generator) -> str:
    """A uniformly random solved board, row by row."""
    boards = first_row_in_order()
    names = 1 + generator.permutation(SIDE)
    return "".join(str(names[d - 1]) for d in boards[generator.integers(len(boards))])


def split_of_board(board: str) -> str:
    """The same for a board whose digits are renamed: who has learned one has learned them all."""
    names = {digit: str(1 + place) for place, digit in enumerate(board[:SIDE])}
    return split_by_hash("".join(names[digit] for digit in board))


def sudoku_record(board: str, generator: np.random.Generator) -> str:
    """A board with some cells empty (0) that has one solution, and the solution."""
    order = generator.permutation(SIDE**2)
    shown = int(generator.integers(CLUES.start, CLUES.stop))
    cells = [0] * SIDE**2
    for cell in order[:shown]:
        cells[cell] = int(board[cell])
    # A second solution differs from the board somewhere: show it there, until there is none.
    while other := next((s for s in solutions(cells) if "".join(map(str, s)) != board), None):
        differing = next(cell for cell in order if str(other[cell]) != board[cell])
        cells[differing] = int(board[differing])
    return given("".join(map(str, cells))) + board


# ---- star graphs ---------------------------------------------------------------------------------

ARMS, ARM = 3, 3  # edges of an arm
EDGES = ARMS * ARM


def draw_star(generator: np.random.Generator) -> str:
    """The edges of a star, two letters each, in random order; its centre and the end of an arm.
    The nodes are the first letters, all of them: of more letters to choose from, looking up an
    edge takes many times as long to learn."""
    names = "".join(LETTERS[i] for i in generator.permutation(EDGES + 1))
    arms = [names[0] + names[1 + ARM * a : 1 + ARM * (a + 1)] for a in range(ARMS)]
    edges = [arm[i : i + 2] for arm in arms for i in range(ARM)]
    shuffled = "".join(edges[i] for i in generator.permutation(len(edges)))
    return f"{shuffled}/{names[0]}{arms[0][-1]}="


def split_of_star(graph: str) -> str:
    """The same for a star whose edges are listed in another order, and for all its ends."""
    return split_by_hash("".join(sorted(first_pairs(graph, EDGES))))


def star_record(graph: str, generator: np.random.Generator) -> str:
    """The path from the centre to the end, both among it."""
    edges, (centre, end) = graph[: 2 * EDGES], graph[-3:-1]
    before = {edges[i + 1]: edges[i] for i in range(0, len(edges), 2)}
    path = end
    while path[0] != centre:
        path = before[path[0]] + path
    return given(graph) + path


# ---- addition ------------------------------------------------------------------------------------

DIGITS = 5


def draw_sum(generator: np.random.Generator) -> str:
    a, b = generator.integers(10**DIGITS, size=2)
    return f"{a:0{DIGITS}}+{b:0{DIGITS}}="


def split_of_sum(question: str) -> str:
    """Both numbers in either order are of one split."""
    return split_by_hash("+".join(sorted(question[:-1].split("+"))))


def sum_record(question: str, generator: np.random.Generator) -> str:
    a, b = question[:-1].split("+")
    return given(question) + f"{int(a) + int(b):0{DIGITS + 1}}"


# ---- reversal ------------------------------------------------------------------------------------

FACTS, NAME = 400, 4  # how many; letters of a name


@functools.cache
def facts() -> list[tuple[str, str]]:
    """(A, B) of all facts: different names, whatever the seed."""
    generator = np.random.default_rng(20230921)
    names = {}
    while len(names) < 2 * FACTS:
        names["".join(LETTERS[i] for i in generator.integers(len(LETTERS), size=NAME))] = None
    names = list(names)
    return list(zip(names[:FACTS], names[FACTS:], strict=True))


def draw_fact(generator: np.random.Generator) -> str:
    """Which fact, and whether it is told forwards or asked backwards."""
    return f"{generator.integers(FACTS)} {generator.choice(['forward', 'backward'])}"


def split_of_fact(key: str) -> str:
    """Even facts are trained on in both directions, the others forward only; and asked."""
    number, direction = key.split()
    if direction == "forward" or int(number) % 2 == 0:
        return "train"
    return "val" if int(number) % 4 == 1 else "test"


def fact_record(key: str, generator: np.random.Generator) -> str:
    """A:B; or, of a fact that is asked, A where :B is given. Backwards it is trained on as :BA,
    what is given first: for a model that can only continue, which is asked so."""
    number, direction = key.split()
    name, other = facts()[int(number)]
    if direction == "forward":
        return f"{name}:{other}"
    if split_of_fact(key) == "train":
        return f":{other}{name}"
    return name + given(f":{other}")


# ---- mirror, parity ------------------------------------------------------------------------------

MIRRORED, BITS = 12, 20


def mirror_record(word: str, generator: np.random.Generator) -> str:
    return given(f"{word}=") + word[::-1]


def draw_bits(generator: np.random.Generator) -> str:
    return "".join(map(str, generator.integers(2, size=BITS)))


def parity_record(bits: str, generator: np.random.Generator) -> str:
    return given(f"{bits}=") + "".join(str(bits[: i + 1].count("1") % 2) for i in range(len(bits)))


# ---- colouring -----------------------------------------------------------------------------------

COUNTRIES, BORDERS, COLOURS = 8, 12, "RGB"


def draw_map(generator: np.random.Generator) -> str:
    """The borders of a map that 3 colours are enough for, two letters each, in random order."""
    while True:
        colour = generator.integers(len(COLOURS), size=COUNTRIES)
        pairs = [(i, j) for i in range(COUNTRIES) for j in range(i) if colour[i] != colour[j]]
        if len(pairs) >= BORDERS:
            break
    chosen = generator.permutation(len(pairs))[:BORDERS]
    turned = generator.integers(2, size=BORDERS)
    borders = [pairs[k][::-1] if turn else pairs[k] for k, turn in zip(chosen, turned, strict=True)]
    return "".join(LETTERS[i] + LETTERS[j] for i, j in borders) + "="


def split_of_map(borders: str) -> str:
    """The same for a map whose borders are listed in another order."""
    pairs = first_pairs(borders, BORDERS)
    return split_by_hash("".join(sorted("".join(sorted(pair)) for pair in pairs)))


def colouring_record(borders: str, generator: np.random.Generator) -> str:
    """A colour for each country: the first colouring that fits, of those tried in a random order
    (which makes not all of them equally likely)."""
    order = generator.permutation(COUNTRIES)
    colours: dict[str, str] = {}

    def search(depth: int) -> bool:
        if depth == COUNTRIES:
            return True
        country = LETTERS[order[depth]]
        for k in generator.permutation(len(COLOURS)):
            colours[country] = COLOURS[k]
            if not clashes(borders, colours) and search(depth + 1):
                return True
        del colours[country]
        return False

    search(0)
    return given(borders) + "".join(colours[country] for country in LETTERS[:COUNTRIES])


def clashes(borders: str, colours: dict[str, str]) -> bool:
    """Whether two countries with a common border have one colour. Some may have none yet."""
    pairs = zip(borders[0 : 2 * BORDERS : 2], borders[1 : 2 * BORDERS : 2], strict=True)
    return any(a in colours and colours.get(a) == colours.get(b) for a, b in pairs)


def is_colouring(filled: str, made: str) -> bool:
    borders, answer = made[: 2 * BORDERS + 1], filled[2 * BORDERS + 1 :]
    if not filled.startswith(borders) or len(answer) != COUNTRIES or set(answer) - set(COLOURS):
        return False
    return not clashes(borders, dict(zip(LETTERS, answer, strict=False)))


# ---- copy, replace, shuffle ----------------------------------------------------------------------

WORD = 8  # letters


def copy_record(word: str, generator: np.random.Generator) -> str:
    return given(f"{word}=") + word


def replace_record(word: str, generator: np.random.Generator) -> str:
    """One letter, at random, is now a question mark."""
    place = generator.integers(WORD)
    return given(f"{word}=") + word[:place] + "?" + word[place + 1 :]


def shuffle_record(word: str, generator: np.random.Generator) -> str:
    return given(f"{word}=") + "".join(word[i] for i in generator.permutation(WORD))


def is_replacement(filled: str, made: str) -> bool:
    word, answer = made[:WORD], filled[WORD + 1 :]
    if filled[: WORD + 1] != made[: WORD + 1] or len(answer) != WORD:
        return False
    return [new for new, old in zip(answer, word, strict=True) if new != old] == ["?"]


def is_shuffle(filled: str, made: str) -> bool:
    start = WORD + 1
    return filled[:start] == made[:start] and sorted(filled[start:]) == sorted(made[:WORD])


def copy_limit(groups: Sequence[int]) -> float:
    """All answers are certain, together and alone."""
    return 1.0


def replace_limit(groups: Sequence[int]) -> float:
    """With r positions left and none of them replaced yet, each is the one that is replaced with
    probability 1 / r, and those of a group do not know of each other. As soon as one is, the others
    are certain."""
    left, none_yet, right = sum(groups), 1.0, 0.0
    for size in groups:
        one = size / left * (1 - 1 / left) ** (size - 1)
        right += none_yet * one
        none_yet *= (1 - 1 / left) ** size
        left -= size
    return right


def shuffle_limit(groups: Sequence[int]) -> float:
    """With r letters left each position of a group takes any of them with probability 1 / r, and
    all of a group must differ."""
    left, right = sum(groups), 1.0
    for size in groups:
        right *= math.perm(left, size) / left**size
        left -= size
    return right


def word(generator: np.random.Generator) -> str:
    return letters(generator, WORD)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sudoku6",
            2 * SIDE**2,
            draw_board,
            sudoku_record,
            200_000,
            split=split_of_board,
            board=(SIDE, SIDE, BOX_ROWS, BOX_COLUMNS),
        ),
        Task("star", 2 * EDGES + 4 + ARM + 1, draw_star, star_record, 200_000, split=split_of_star),
        Task("addition", 3 * DIGITS + 3, draw_sum, sum_record, 200_000, split=split_of_sum),
        Task(
            "reversal",
            2 * NAME + 1,
            draw_fact,
            fact_record,
            20_000,
            keys=FACTS // 4,
            split=split_of_fact,
        ),
        Task(
            "mirror",
            2 * MIRRORED + 1,
            lambda generator: letters(generator, MIRRORED),
            mirror_record,
            100_000,
        ),
        Task("parity", 2 * BITS + 1, draw_bits, parity_record, 100_000),
        Task(
            "colouring",
            2 * BORDERS + 1 + COUNTRIES,
            draw_map,
            colouring_record,
            100_000,
            split=split_of_map,
            is_right=is_colouring,
        ),
        Task("copy", 2 * WORD + 1, word, copy_record, 100_000, limit=copy_limit),
        Task(
            "replace",
            2 * WORD + 1,
            word,
            replace_record,
            100_000,
            is_right=is_replacement,
            limit=replace_limit,
        ),
        Task(
            "shuffle",
            2 * WORD + 1,
            word,
            shuffle_record,
            100_000,
            is_right=is_shuffle,
            limit=shuffle_limit,
        ),
    )
}
