"""Fill the gaps of a text file, and choose between spellings in a CSV file.

    python docs/examples/fill_and_rank.py MODEL --gaps letter.txt --spellings words.csv

A line of the text file with masks, "She[MASK:2-4] home.", is printed filled in. A row
of the CSV file has a sentence with alternatives, "He [lead|led] the horse.", in the
column `sentence`; the columns `best` and `share` are added and the rows printed."""

import argparse
import csv
import sys
from pathlib import Path

import aogpt
from aogpt.sampling.gaps import MASK


def fill_lines(model: aogpt.TextModel, path: Path, seed: int) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    places = [i for i, line in enumerate(lines) if MASK.search(line)]
    fillings = model.fill([lines[i] for i in places], seed=seed)
    for i, (best, *_) in zip(places, fillings, strict=True):
        lines[i] = best.text
    sys.stdout.write("\n".join(lines) + "\n")


def rank_rows(model: aogpt.TextModel, path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ranked = model.rank([row["sentence"] for row in rows])
    for row, (best, *_) in zip(rows, ranked, strict=True):
        row["best"] = best.text
        row["share"] = f"{best.share:.3f}"
    writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gaps", type=Path)
    parser.add_argument("--spellings", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    text_model = aogpt.load(options.model)
    if options.gaps:
        fill_lines(text_model, options.gaps, options.seed)
    if options.spellings:
        rank_rows(text_model, options.spellings)
