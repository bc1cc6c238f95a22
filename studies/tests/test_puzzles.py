"""Puzzles: examples are right, splits have nothing in common, limits are exact."""

import collections
import itertools
import re

import numpy as np
import pytest
from helpers import some_slow
from study_data import prepared_study

from aogpt.data.loader import TokenDataset
from aogpt.data.prompts import PROMPT, spans
from studies import puzzles
from studies.puzzles import TASKS


def examples_of(name, count, seed=0):
    """Yield (key, example, text without marks) of some examples."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        key = TASKS[name].draw(rng)
        example = TASKS[name].example(key, rng)
        parts = [part for part, _ in spans(example)]
        yield key, example, "".join(parts)


@pytest.mark.parametrize("name", TASKS)
def test_examples_fill_their_block_and_their_answer_is_right_and_hardly_any_other(name):
    task = TASKS[name]
    for _, example, text in examples_of(name, 20):
        assert len(text) == task.length
        assert text.isascii()
        assert task.is_right(text, text)
        at = 0
        for part, role in spans(example):
            changed = text[:at] + chr(ord(part[0]) ^ 1) + text[at + 1 :]
            if role == PROMPT and name not in ("sudoku6", "parity"):
                assert not task.is_right(changed, text)
            at += len(part)
        # Too short, as up to an early end-of-text, or too long.
        assert not task.is_right(text[:-1] + "!", text)
        assert not task.is_right(text[:-1], text)
        assert not task.is_right(text[: len(text) // 2], text)
        assert not task.is_right("", text)
        assert not task.is_right(text + text[-1], text)


# The first characters of an example tell its key, in a sudoku those after the 36th.
KEY_LENGTHS = {
    "sudoku6": 0,
    "star": 22,
    "addition": 12,
    "mirror": 12,
    "parity": 20,
    "colouring": 25,
    "copy": 8,
    "replace": 8,
    "shuffle": 8,
}


@pytest.mark.parametrize(
    "name",
    some_slow(
        [(name,) for name in KEY_LENGTHS],
        lambda name: name in ("sudoku6", "star", "copy"),
        "the others are prepared by the same code",
    ),
)
def test_prepared_splits_hold_the_records_of_their_keys(name, tmp_path):
    task = TASKS[name]
    keys = {}
    shares = collections.Counter(
        task.split_of(key) for key, *_ in examples_of(name, 400)
    )
    assert shares.keys() == {"train", "val", "test"}
    assert shares["train"] > 5 * shares["test"]
    folder = prepared_study(name, tmp_path / name, limit=300)
    for split in ("train", "val", "test"):
        data = TokenDataset(folder, split, task.length, verify=True)
        assert data.num_blocks == (300 if split == "train" else 1000)
        rows = [bytes(row.tolist()).decode() for row in data.blocks(range(300))]
        key_length = KEY_LENGTHS[name]
        if name == "sudoku6":
            keys[split] = {row[36:] for row in rows}
        else:
            keys[split] = {row[:key_length] for row in rows}
        assert {task.split_of(key) for key in keys[split]} == {split}
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["val"]
    if name == "mirror":
        for row in rows:
            assert row[:12] == row[:12:-1]
            assert row[12] == "="


def facts_by_split(name):
    """Return the examples of the training split, and those of the others, as sets."""
    trained = set()
    asked = set()
    for key, example, _ in examples_of(name, 12_000):
        if TASKS[name].split_of(key) == "train":
            trained.add(example)
        else:
            asked.add(example)
    return trained, asked


def test_each_fact_is_asked_once_and_told_forwards_only(tmp_path):
    folder = prepared_study("reversal", tmp_path / "facts", limit=50)
    task = TASKS["reversal"]
    for split in ("val", "test"):
        data = TokenDataset(folder, split, task.length)
        rows = {tuple(row) for row in data.blocks(range(data.num_blocks)).tolist()}
        assert len(rows) == data.num_blocks == 100
    trained, asked = facts_by_split("reversal")
    for example in asked:
        name = example[:4]
        other = example[-12:-8]
        assert example.endswith("[/GIVEN]")
        assert f"{name}:{other}" in trained
        assert f":{other}{name}" not in trained
    assert any(example[0] == ":" for example in trained)


def test_a_fact_is_asked_in_the_form_that_only_others_were_told_in():
    trained, asked = facts_by_split("exchanged")
    for example in asked:
        question = re.fullmatch(r"\[GIVEN\](\w{4}):\[/GIVEN\](\w{4})", example)
        other, name = question.groups()
        assert f"{name}:{other}" in trained
        assert f"{other}:{name}" not in trained
    pairs = {tuple(example.split(":")) for example in trained}
    assert any((b, a) in pairs for a, b in pairs)
    assert len(asked) == 200


VARIANTS = {
    "sudoku6": lambda key: key.translate(str.maketrans("123456", "351642")),
    "addition": lambda key: "+".join(reversed(key[:-1].split("+"))) + "=",
    # the other edges, each the other way round
    "colouring": lambda key: key[-2::-1] + "=",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_puzzle_are_in_one_split(name):
    split_of = TASKS[name].split_of
    keys = [key for key, *_ in examples_of(name, 60)]
    variants = [VARIANTS[name](key) for key in keys]
    assert variants != keys
    for key, variant in zip(keys, variants, strict=True):
        assert split_of(variant) == split_of(key)


def number_of_solutions(cells):
    """Return the number of solutions by trying every digit in the first empty cell:
    slow, and independent of `solutions`."""
    if "0" not in cells:
        return 1
    at = cells.index("0")
    row, column = divmod(at, 6)
    taken = set()
    for i, digit in enumerate(cells):
        other_row, other_column = divmod(i, 6)
        same_box = other_row // 2 == row // 2 and other_column // 3 == column // 3
        if other_row == row or other_column == column or same_box:
            taken.add(digit)
    number = 0
    for digit in "123456":
        if digit not in taken:
            filled = cells[:at] + digit + cells[at + 1 :]
            number += number_of_solutions(filled)
    return number


def test_a_sudoku_has_one_solution_and_keeps_the_rules():
    for _, example, _ in examples_of("sudoku6", 30):
        (shown, _), (board, _) = spans(example)
        cells = np.array(list(board)).reshape(6, 6)
        boxes = cells.reshape(3, 2, 2, 3).transpose(0, 2, 1, 3).reshape(6, 6)
        for line in (*cells, *cells.T, *boxes):
            assert "".join(sorted(line)) == "123456"
        for clue, digit in zip(shown, board, strict=True):
            assert clue in ("0", digit)
        assert number_of_solutions(shown) == 1
        assert list(puzzles.solutions(shown)) == [board]
        open_board = board.translate(str.maketrans("123", "000"))
        several = set(puzzles.solutions(open_board))
        assert board in several
        assert len(several) == number_of_solutions(open_board) > 1
    # of 28,200,960 boards, over 6!
    assert len(set(puzzles.first_row_in_order())) == 39_168


def test_a_star_has_one_path_and_arms_of_one_length():
    for _, example, _ in examples_of("star", 30):
        (graph, _), (path, _) = spans(example)
        edges = [graph[i : i + 2] for i in range(0, 18, 2)]
        centre, end = graph[19:21]
        assert path[0] == centre
        assert path[-1] == end
        assert len(path) == 4
        for start, stop in itertools.pairwise(path):
            assert start + stop in edges
        out = collections.Counter(edge[0] for edge in edges)
        assert out.pop(centre) == 3
        assert set(out.values()) == {1}
        assert len(set("".join(edges))) == 10
        again = "".join(edges[::-1]) + graph[18:20] + edges[0][1] + "="
        assert TASKS["star"].split_of(again) == TASKS["star"].split_of(graph)


def test_other_colourings_are_right_if_they_fit():
    for _, example, text in examples_of("colouring", 20):
        (borders, _), (colours, _) = spans(example)
        renamed = borders + colours.translate(str.maketrans("RGB", "GBR"))
        assert TASKS["colouring"].is_right(renamed, text)
        assert not TASKS["colouring"].is_right(borders + "R" * 8, text)


def answers_of(name, n):
    """Return all answers to one question of n letters, which are equally probable."""
    word = tuple(range(n))
    if name == "copy":
        return [word]
    if name == "shuffle":
        return list(itertools.permutations(word))
    return [(*word[:i], -1, *word[i + 1 :]) for i in word]  # "replace"


def exact_limit(name, groups):
    """Return the limit by its definition: the positions of a group are drawn
    independently from their conditionals given all before them; summed over everything
    that is drawn."""
    answers = answers_of(name, sum(groups))

    def right(prefix, rest):
        fitting = [a for a in answers if a[: len(prefix)] == prefix]
        if not fitting or not rest:
            return float(bool(fitting))
        positions = range(len(prefix), len(prefix) + rest[0])
        counts = []
        for position in positions:
            counts.append(collections.Counter(a[position] for a in fitting))
        total = 0.0
        for letters in itertools.product(*counts):
            probability = 1.0
            for count, letter in zip(counts, letters, strict=True):
                probability *= count[letter] / len(fitting)
            total += probability * right(prefix + letters, rest[1:])
        return total

    return right((), list(groups))


@pytest.mark.parametrize("name", ["copy", "replace", "shuffle"])
@pytest.mark.parametrize("groups", [[4], [1, 3], [3, 1], [1, 1, 1, 1], [2, 1, 1]])
def test_limits_are_those_of_independent_draws_from_exact_conditionals(name, groups):
    limit = TASKS[name].limit(groups)
    assert limit == pytest.approx(exact_limit(name, groups), abs=1e-12)
    if set(groups) == {1}:
        assert limit == pytest.approx(1)
