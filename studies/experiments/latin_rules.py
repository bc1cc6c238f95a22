"""How far above the entropy of Latin squares is who knows a rule of thumb, and in which order?

    python -m experiments.latin_rules

Square by square and cell by cell, a rule says which digits are possible, given the cells before;
who takes each of them for equally likely pays the log of how many they are. The rules never leave
out the true digit, so that what is paid beyond the entropy is what the rule does not see. Printed
is the mean over random squares with its standard error, nats a token, over blocks of 26 (a square
and its end), which is what experiment E9 measures.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from data.generators import latin5, latin5_entropy
from runtime.reports import markdown_table

SIZE, BLOCK = 5, 26
Cell = tuple[int, int]
Board = dict[Cell, str]
"""The digits that are known."""

CELLS = [(i, j) for i in range(SIZE) for j in range(SIZE)]
ROWS = [[(i, j) for j in range(SIZE)] for i in range(SIZE)]
COLUMNS = [[(i, j) for i in range(SIZE)] for j in range(SIZE)]
DIGITS = "abcde"


def fitting(board: Board, cell: Cell) -> list[str]:
    """Digits that stand neither in the cell's row nor in its column."""
    seen = {board.get(other) for other in ROWS[cell[0]] + COLUMNS[cell[1]]}
    return [digit for digit in DIGITS if digit not in seen]


def can_be_filled(board: Board, line: list[Cell]) -> bool:
    """Whether digits that fit, all different, can be found for what is left of a row or column."""
    options = [fitting(board, cell) for cell in line if cell not in board]

    def search(depth: int, used: frozenset) -> bool:
        return depth == len(options) or any(
            search(depth + 1, used | {digit}) for digit in options[depth] if digit not in used
        )

    return search(0, frozenset())


def looking_ahead(board: Board, cell: Cell) -> list[str]:
    """Digits that fit and after which every row and column can be filled, each by itself."""
    return [
        digit
        for digit in fitting(board, cell)
        if all(can_be_filled(board | {cell: digit}, line) for line in ROWS + COLUMNS)
    ]


RULES = {"digits that fit": fitting, "and leave no line without": looking_ahead}


def above_entropy(rule, any_order: bool, squares: int, seed: int) -> tuple[float, float]:
    """(mean, standard error) over random squares of what a rule pays beyond the entropy, nats a
    token; cells are asked for from left to right, or in a random order."""
    generator, paid = np.random.default_rng(seed), []
    for _ in range(squares):
        square = dict(zip(CELLS, latin5(generator), strict=True))
        order = generator.permutation(len(CELLS)) if any_order else range(len(CELLS))
        board, nats = {}, 0.0
        for place in order:
            cell = CELLS[place]
            nats += math.log(len(rule(board, cell)))
            board[cell] = square[cell]
        paid.append((nats - latin5_entropy()) / BLOCK)
    return statistics.mean(paid), statistics.stdev(paid) / math.sqrt(squares)


def main() -> None:
    rows = []
    for name, rule in RULES.items():
        found = [above_entropy(rule, any_order, 500, seed=0) for any_order in (False, True)]
        rows.append([name, *(f"{mean:.4f} +- {error:.4f}" for mean, error in found)])
    print("\n".join(markdown_table(["rule", "left to right", "any order"], rows)))


if __name__ == "__main__":
    main()
