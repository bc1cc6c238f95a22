"""Puzzles on which the order of prediction matters, or does not. All examples of a
puzzle have one length, a block, and no end-of-text. An example is made from a *key*,
such as a solved Sudoku. Splits are assigned by a hash of its canonical form: no puzzle
or trivial variant is in two; facts (`reversal`) are trained forwards."""

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from numpy.random import Generator, default_rng

from aogpt.data.prompts import as_prompt
from studies.generators import Made

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Task:
    """A puzzle: how its examples are made, and which answers are right. Subclasses have
    draw(rng), which returns a random key, and answer(key, rng), for the key as
    prompt."""

    name: str
    length: int  # characters (bytes) of an example
    start = 0  # of the answer, where only the answer is compared
    documents = 100_000  # of the training split
    # number of keys in val and in test, where they are few and each is drawn once
    keys: int | None = None
    board: tuple[int, int, int, int] | None = None  # rows and columns; those of a box
    # (sizes of the groups of positions drawn in parallel) -> accuracy at temperature 1
    # of a model with exact conditionals
    limit: Callable[[Sequence[int]], float] | None = None
    # of answers: 1 where the limit is that of samples, else 0
    temperature = property(lambda self: 1.0 if self.limit else 0.0)

    def example(self, key: str, rng: Generator) -> str:
        """Return the text made from a key, its prompt marked (prompts.py)."""
        return as_prompt(key) + self.answer(key, rng)

    def canonical(self, key: str) -> str:
        """Return a text that is equal for keys that are variants of each other."""
        return key.removesuffix("=")

    def split_of(self, key: str) -> str:
        text = self.canonical(key).encode()
        digest = hashlib.sha256(text).digest()
        sixteenth = digest[7] >> 4
        if sixteenth == 0:
            return "test"
        if sixteenth == 1:
            return "val"
        return "train"

    def is_right(self, filled: str, example: str) -> bool:
        """Return whether `filled`, an example completed by a model, is right;
        example: the original."""
        key = example[: self.start]
        if not filled.startswith(key):
            return False
        answer = filled[self.start :]
        return self.fits(answer, key, example[self.start :])

    def fits(self, answer: str, key: str, solution: str) -> bool:
        return answer == solution


@dataclass(frozen=True)
class Puzzles(Made):
    """The examples of a task; each fills a block."""

    task: Task | None = None
    protocol: str = "records"

    @property
    def origin(self) -> dict[str, str]:
        return {"task": self.task.name}

    def documents(self, split: str, rng: Generator, count: int) -> Iterator[str]:
        """Yield examples whose keys belong to a split."""
        task = self.task
        drawn = set()
        for _ in range(count):
            key = task.draw(rng)
            while task.split_of(key) != split or key in drawn:
                key = task.draw(rng)
            if task.keys and split != "train":
                drawn.add(key)
            yield task.example(key, rng)


def letters(rng: Generator, count: int, alphabet_size: int = len(LETTERS)) -> str:
    """Return different ones of the first `alphabet_size` letters, in random order."""
    places = rng.permutation(alphabet_size)[:count]
    return "".join(LETTERS[place] for place in places)


def pairs(text: str, count: int) -> list[str]:
    """Return the first pairs of letters, each an edge of a graph."""
    return [text[i : i + 2] for i in range(0, 2 * count, 2)]


SIDE = 6  # of a Sudoku
CELLS = SIDE * SIDE


def units_of(cell: int) -> set[int]:
    """Return the numbers of the row, the column and the box of a cell."""
    row, column = divmod(cell, SIDE)
    box = row // 2 * 2 + column // 3
    return {row, SIDE + column, 2 * SIDE + box}


def peers_of(cell: int) -> list[int]:
    """Return the cells whose digit must differ from that of a cell."""
    peers = []
    for other in range(CELLS):
        if other != cell and units_of(other) & units_of(cell):
            peers.append(other)
    return peers


PEERS = [peers_of(cell) for cell in range(CELLS)]


def solutions(cells: str) -> Iterator[str]:
    """Yield all ways to fill the empty cells (0) of a board of 36 whose digits do not
    clash."""
    empty = []  # (number of digits that fit, cell, these digits)
    for cell, digit in enumerate(cells):
        if digit == "0":
            used = {cells[peer] for peer in PEERS[cell]}
            fit = set("123456") - used
            empty.append((len(fit), cell, fit))
    if not empty:
        yield cells
        return
    _, cell, fit = min(empty)
    before = cells[:cell]
    after = cells[cell + 1 :]
    for digit in sorted(fit):
        yield from solutions(before + digit + after)


@functools.cache
def first_row_in_order() -> list[str]:
    """Return all 39,168 boards whose first row is 1 to 6; every board is one of them,
    digits renamed."""
    return list(solutions("123456" + "0" * 30))


class Sudoku(Task):
    """A 6x6 Sudoku with boxes of 2 rows and 3 columns, and its only solution."""

    name = "sudoku6"
    length = 2 * SIDE**2
    documents = 200_000
    board = (SIDE, SIDE, 2, 3)

    def draw(self, rng):
        """Return a uniformly random solved board, row by row."""
        digits = 1 + rng.permutation(SIDE)
        names = "".join(map(str, digits))
        boards = first_row_in_order()
        board = boards[rng.integers(len(boards))]
        return board.translate(str.maketrans("123456", names))

    def canonical(self, key):
        """Return the board with digits renamed so that the first row is 1 to 6."""
        return key.translate(str.maketrans(key[:SIDE], "123456"))

    def example(self, key, rng):
        order = rng.permutation(SIDE**2)
        cells = ["0"] * SIDE**2
        count = int(rng.integers(12, 21))
        for cell in order[:count]:
            cells[cell] = key[cell]
        # Another solution differs from the key somewhere: show that cell, until there
        # is none.
        while other := other_solution("".join(cells), key):
            cell = next(cell for cell in order if other[cell] != key[cell])
            cells[cell] = key[cell]
        return as_prompt("".join(cells)) + key


def other_solution(cells: str, board: str) -> str | None:
    """Return a solution that is not this board, if there is one."""
    for solution in solutions(cells):
        if solution != board:
            return solution
    return None


# arms of a star, edges of an arm
ARMS = 3
ARM = 3
EDGES = ARMS * ARM
COUNTRIES = 8
BORDERS = 12
COLOURS = "RGB"


class Star(Task):
    """A path in a star of 3 arms, from its centre to the end of one: left to right the
    first step is a guess, from the end all steps are forced (Bachmann & Nagarajan,
    arXiv 2403.06963)."""

    name = "star"
    length = 2 * EDGES + 4 + ARM + 1
    documents = 200_000

    def draw(self, rng):
        """Return the edges, two letters each, in random order; the centre and the end
        of an arm."""
        # With more letters edges are looked up late.
        names = letters(rng, EDGES + 1, alphabet_size=EDGES + 1)
        centre = names[0]
        arms = []
        edges = []
        for start in range(1, EDGES + 1, ARM):
            arm = centre + names[start : start + ARM]
            arms.append(arm)
            for place in range(ARM):
                edges.append(arm[place : place + 2])
        order = rng.permutation(EDGES)
        shuffled = "".join(edges[place] for place in order)
        end = arms[0][-1]
        return f"{shuffled}/{centre}{end}="

    def canonical(self, key):
        return "".join(sorted(pairs(key, EDGES)))

    def answer(self, key, rng):
        before = {}
        for start, end in pairs(key, EDGES):
            before[end] = start
        centre = key[-3]
        path = key[-2]
        while path[0] != centre:
            path = before[path[0]] + path
        return path


class Colouring(Task):
    """A map of 8 countries, and one of 3 colours for each; any that fit are right."""

    name = "colouring"
    length = 2 * BORDERS + 1 + COUNTRIES
    start = 2 * BORDERS + 1

    def draw(self, rng):
        """Return the borders of a map that has a colouring, two letters each, in random
        order."""
        edges = []
        while len(edges) < BORDERS:
            colour = rng.integers(len(COLOURS), size=COUNTRIES)
            edges = []
            for i in range(COUNTRIES):
                for j in range(i):
                    if colour[i] != colour[j]:
                        edges.append((i, j))
        places = rng.permutation(len(edges))[:BORDERS]
        turns = rng.integers(2, size=BORDERS)
        key = ""
        for place, turn in zip(places, turns, strict=True):
            edge = edges[place]
            key += LETTERS[edge[turn]]
            key += LETTERS[edge[1 - turn]]
        return key + "="

    def canonical(self, key):
        edges = ["".join(sorted(pair)) for pair in pairs(key, BORDERS)]
        return "".join(sorted(edges))

    def answer(self, key, rng):
        """Return the first colouring that fits, tried in random order: not all are
        equally likely."""
        order = letters(rng, COUNTRIES, alphabet_size=COUNTRIES)

        def search(colours: dict[str, str]) -> dict[str, str] | None:
            if len(colours) == COUNTRIES:
                return colours
            country = order[len(colours)]
            for place in rng.permutation(len(COLOURS)):
                more = dict(colours)
                more[country] = COLOURS[place]
                if not self.clashes(key, more):
                    whole = search(more)
                    if whole:
                        return whole
            return None

        colours = search({})
        countries = LETTERS[:COUNTRIES]
        return "".join(colours[country] for country in countries)

    def fits(self, answer, key, solution):
        if len(answer) != COUNTRIES:
            return False
        if not set(answer) <= set(COLOURS):
            return False
        colours = dict(zip(LETTERS, answer, strict=False))
        return not self.clashes(key, colours)

    def clashes(self, key: str, colours: dict[str, str]) -> bool:
        """Return whether two neighbours have one colour; some may have none yet."""
        for a, b in pairs(key, BORDERS):
            if a in colours and colours[a] == colours.get(b):
                return True
        return False


DIGITS = 5
# number of facts, letters of a name
FACTS = 400
NAME = 4


class Addition(Task):
    """Two numbers and their sum, most significant digit first: carries come from the
    other end."""

    name = "addition"
    length = 3 * DIGITS + 3
    documents = 200_000

    def draw(self, rng):
        a, b = rng.integers(10**DIGITS, size=2)
        return f"{a:0{DIGITS}}+{b:0{DIGITS}}="

    def canonical(self, key):
        numbers = key[:-1].split("+")
        return "+".join(sorted(numbers))

    def answer(self, key, rng):
        a, b = key[:-1].split("+")
        return f"{int(a) + int(b):0{DIGITS + 1}}"


@functools.cache
def facts() -> list[tuple[str, str]]:
    """Return (A, B) of all facts: different names, the same for every seed."""
    rng = default_rng(20230921)
    names: list[str] = []
    while len(names) < 2 * FACTS:
        drawn = rng.integers(len(LETTERS), size=NAME)
        name = "".join(LETTERS[i] for i in drawn)
        if name not in names:
            names.append(name)
    firsts = names[:FACTS]
    seconds = names[FACTS:]
    return list(zip(firsts, seconds, strict=True))


class Reversal(Task):
    """Facts A:B, asked for A given B (Berglund et al., arXiv 2309.12288). Even facts
    are trained on in both directions, odd ones, which are asked, forward only."""

    name = "reversal"
    length = 2 * NAME + 1
    documents = 20_000
    keys = FACTS // 4

    def draw(self, rng):
        return f"{rng.integers(FACTS)} {rng.choice(['forward', 'backward'])}"

    def split_of(self, key):
        number, direction = key.split()
        if direction == "forward" or int(number) % 2 == 0:
            return "train"
        return "val" if int(number) % 4 == 1 else "test"

    def example(self, key, rng):
        """Return a:B forward; backward A with the prompt :B, in training :BA for
        left-to-right models."""
        number, direction = key.split()
        name, other = facts()[int(number)]
        if direction == "forward":
            return f"{name}:{other}"
        if self.split_of(key) == "train":
            return f":{other}{name}"
        return name + as_prompt(f":{other}")


class Exchanged(Reversal):
    """The same facts, of which the odd ones are asked in a record of the other form,
    B:A. In the backward records above A and B keep the places that they have in
    training, so that any-order training answers the question itself (arXiv
    2602.02133)."""

    name = "exchanged"

    def example(self, key, rng):
        number, direction = key.split()
        name, other = facts()[int(number)]
        if direction == "forward":
            return f"{name}:{other}"
        start = f"{other}:"
        if self.split_of(key) != "train":
            start = as_prompt(start)
        return start + name


BITS = 20


class Parity(Task):
    """Bits, and the parity of each and all before it: left to right, a step a bit."""

    name = "parity"
    length = 2 * BITS + 1

    def draw(self, rng):
        bits = rng.integers(2, size=BITS)
        return "".join(map(str, bits)) + "="

    def answer(self, key, rng):
        parities = ""
        for place in range(BITS):
            ones = key[: place + 1].count("1")
            parities += str(ones % 2)
        return parities


class Letters(Task):
    """Letters, and what is made of them."""

    def __init__(self, name, size, change, fits=None, limit=None):
        self.name = name
        self.size = size
        self.change = change
        self.limit = limit
        self.length = 2 * size + 1
        self.start = size + 1
        self.fits = fits or self.fits

    def draw(self, rng):
        return letters(rng, self.size) + "="

    def answer(self, key, rng):
        return self.change(key[:-1], rng)


def one_replaced(word: str, rng: Generator) -> str:
    place = rng.integers(len(word))
    return word[:place] + "?" + word[place + 1 :]


def is_one_replaced(answer: str, key: str, solution: str) -> bool:
    if len(answer) != len(solution):
        return False
    changed = ""
    for letter, before in zip(answer, key, strict=False):
        if letter != before:
            changed += letter
    return changed == "?"


def replace_limit(groups: Sequence[int]) -> float:
    """Return the probability that one letter is replaced. With r positions left and
    none replaced yet, each is replaced with probability 1 / r, independently within a
    group; once one is, the others are certain."""
    left = sum(groups)
    none_yet = 1.0
    right = 0.0
    for size in groups:
        stays = 1 - 1 / left
        one = size / left * stays ** (size - 1)
        right += none_yet * one
        none_yet *= stays**size
        left -= size
    return right


def shuffle_limit(groups: Sequence[int]) -> float:
    """Return the probability that all letters differ. With r letters left each
    position of a group draws one of them."""
    left = sum(groups)
    right = 1.0
    for size in groups:
        right *= math.perm(left, size) / left**size
        left -= size
    return right


def mirrored(word: str, rng: Generator) -> str:
    return word[::-1]


def copied(word: str, rng: Generator) -> str:
    return word


def copy_limit(groups: Sequence[int]) -> float:
    return 1.0


def shuffled(word: str, rng: Generator) -> str:
    places = rng.permutation(len(word))
    return "".join(word[place] for place in places)


def is_shuffled(answer: str, key: str, solution: str) -> bool:
    return sorted(answer) == sorted(solution)


# The accuracy that parallel decoding can reach on the last three is known (arXiv
# 2510.04767).
ALL = (
    Sudoku(),
    Star(),
    Addition(),
    Reversal(),
    Exchanged(),
    Letters("mirror", 12, mirrored),  # every order is as good
    Parity(),
    Colouring(),
    Letters("copy", 8, copied, limit=copy_limit),
    Letters("replace", 8, one_replaced, is_one_replaced, replace_limit),
    Letters("shuffle", 8, shuffled, is_shuffled, shuffle_limit),
)
TASKS: dict[str, Task] = {task.name: task for task in ALL}
