"""Prepare the data of the studies, as data/prepare.py prepares text.

examples:
  python -m studies.prepare sudoku6
  python -m studies.prepare chorales --predict alto
  python -m studies.prepare shuffled --source books/*.txt --out data/shuffled"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from aogpt.data import prepare as library
from aogpt.data.catalogue import Dataset
from aogpt.data.prepare import Prepare, prepare
from aogpt.runtime.command_line import run_script
from aogpt.runtime.errors import UserError
from studies.chorales import CHORALES, VOICES
from studies.generators import Generated, Shuffled, latin5, polya
from studies.puzzles import TASKS, Puzzles

NAMES = f"""chorales: Bach's, in four voices; downloaded, or a local copy in --source.
{", ".join(TASKS)}: puzzles (puzzles.py).
polya, latin5: made of random numbers, with a known entropy (generators.py).
shuffled: your own files, in chunks of 63 characters in random order."""
CONFIGS = {"sudoku6": "studies/configs/sudoku6.toml"}  # run configs made for a task


def datasets() -> dict[str, Dataset]:
    by_name: dict[str, Dataset] = {
        "chorales": CHORALES,
        "polya": Generated((60_000, 4_000), make=polya),
        "latin5": Generated((150_000, 10_000), make=latin5),
        "shuffled": Shuffled(source="always", tokenizer="bytes", val_fraction=0.05),
    }
    for name, task in TASKS.items():
        keys = task.keys or 1000
        by_name[name] = Puzzles(
            (task.documents, keys, keys),
            task=task,
            block_size=task.length,
            config=CONFIGS.get(name),
        )
    return by_name


DATASETS = datasets()


@dataclass(frozen=True)
class PrepareStudy(Prepare):
    name: Annotated[str, tyro.conf.arg(help=NAMES)]
    predict: tuple[Literal[VOICES], ...] = ()
    """chorales: the voices to predict; the others are the prompt. By default all."""


def main() -> None:
    prepare_study(library.parse(PrepareStudy, "python -m studies.prepare", __doc__))


def prepare_study(args: PrepareStudy) -> Path:
    """Prepare a dataset, unless its folder holds it already. Returns the folder. With
    --predict its name has the voices, as chorales_alto."""
    if not args.predict:
        return prepare(args, DATASETS)
    if args.name != "chorales":
        raise UserError("--predict is for chorales; leave it out")
    name = "_".join(["chorales", *args.predict])
    dataset = replace(CHORALES, predict=args.predict)
    return prepare(replace(args, name=name), {name: dataset})


if __name__ == "__main__":
    run_script(main)
