"""Fill the gaps of a text file, and choose between spellings in a CSV file.

    python docs/examples/fill_and_rank.py MODEL --gaps letter.txt --spellings words.csv

A line of the text file with masks, "She[MASK:3] home.", is printed filled in. A row
of the CSV file has a sentence with alternatives, "He [lead|led] the horse.", in the
column `sentence`; the columns `best` and `share` are added and the rows printed.
Columns are separated by commas, semicolons or tabs."""

import argparse
import csv
import io
import sys
from pathlib import Path

import aogpt


def fill_lines(model: aogpt.TextModel, file: Path, seed: int) -> None:
    """Print the lines of a text, with their gaps filled in."""
    text = file.read_text(encoding="utf-8-sig")
    for line in text.split("\n"):
        if "[MASK" in line:
            (filling,) = model.fill([line], seed=seed)
            line = filling.text
        print(line)


def rank_rows(model: aogpt.TextModel, file: Path) -> None:
    """Print a table with the most probable sentence of each row, and its share of the
    probability of all alternatives."""
    text = file.read_text(encoding="utf-8-sig")  # also from a spreadsheet, with a BOM
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    reader = csv.DictReader(io.StringIO(text), delimiter=separator)
    names = reader.fieldnames or []
    if "sentence" not in names:
        raise aogpt.UserError(f"{file} has no column 'sentence'; it has {names}")
    rows = list(reader)
    if any(None in row for row in rows):
        raise aogpt.UserError(
            f"{file} has a row of more cells than the header: put quotes around a "
            f"sentence that has a {separator!r}"
        )
    sentences = [row["sentence"] for row in rows]
    ranked = model.rank(sentences)  # a list of texts in, a list of answers out
    for row, alternatives in zip(rows, ranked, strict=True):
        best = alternatives[0]
        row["best"] = best.text
        row["share"] = f"{best.share:.3f}"
    names = [*names, "best", "share"]
    writer = csv.DictWriter(sys.stdout, names, delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gaps", type=Path)
    parser.add_argument("--spellings", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not (options.gaps or options.spellings):
        parser.error("give --gaps, --spellings or both")
    model = aogpt.load(options.model)
    if options.gaps:
        fill_lines(model, options.gaps, options.seed)
    if options.spellings:
        rank_rows(model, options.spellings)


if __name__ == "__main__":
    try:
        main()
    except (aogpt.UserError, OSError) as error:
        sys.exit(f"error: {error}")
