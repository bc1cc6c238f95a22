"""Accuracy on puzzles: eval_tasks.py with its options, and the judges of puzzles.py,
which know which answers are right where several are, what parallel decoding can reach,
and boards.

    python -m studies.puzzle_answers out/sudoku6 --tasks sudoku6 --mode confidence
    --html FILE"""

from aogpt.runtime.command_line import run_script
from studies import eval_tasks
from studies.puzzles import TASKS


def main() -> None:
    eval_tasks.main(TASKS)


if __name__ == "__main__":
    run_script(main)
