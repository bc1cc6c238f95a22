"""How surprising is a word of each sentence, left to right and given the rest?

    python docs/examples/surprisal.py MODEL items.tsv > items.csv

A line of the file has a sentence, a tab, and a word that it has once. Surprisal is -log
p in nats, of all tokens of the word together: given the text before it, and given all
of the text around it and the number of its tokens."""

import csv
import sys
from pathlib import Path

import aogpt


def main(path: str, file: str) -> None:
    """Print a line of CSV for each sentence."""
    items = []
    lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, 1):
        sentence, _, word = line.partition("\t")
        if not word or sentence.count(word) != 1:
            raise aogpt.UserError(
                f"{file} line {number}: write a sentence, a tab, and a word that it "
                "has once"
            )
        items.append((sentence, word))
    model = aogpt.load(path)
    table = csv.writer(sys.stdout)
    table.writerow(["sentence", "word", "tokens", "left to right", "given the rest"])
    scores = model.score([sentence for sentence, _ in items])
    for (sentence, word), along in zip(items, scores, strict=True):
        start = sentence.index(word)
        (joint,) = model.score([sentence], predict=[(start, start + len(word))])
        of_word = []
        for given_rest, given_left in zip(
            joint.log_probs, along.log_probs, strict=True
        ):
            if given_rest is not None:
                of_word.append(given_left)
        left = "" if None in of_word else f"{-sum(of_word):.3f}"  # nothing before it
        table.writerow([sentence, word, joint.scored, left, f"{joint.nats:.3f}"])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: surprisal.py MODEL FILE")
    try:
        main(*sys.argv[1:])
    except (aogpt.UserError, UnicodeDecodeError, OSError) as error:
        sys.exit(f"error: {error}")
