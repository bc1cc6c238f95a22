"""Which of two sentences is more probable, and which of their words decides?

    python docs/examples/minimal_pairs.py MODEL pairs.tsv

A line of the file has the better sentence, a tab, and the worse one, such as
"The cats sleep." and "The cats sleeps.". Printed are log p of both sentences and of
the words that differ given all others, and at the end how many pairs are right."""

import difflib
import sys
from pathlib import Path

import aogpt


def spans_of(good: str, bad: str) -> list[tuple[int, int]]:
    """Return the span of what differs in each sentence."""
    same = difflib.SequenceMatcher(None, good, bad, autojunk=False)
    changed = [block for block in same.get_opcodes() if block[0] != "equal"]
    first, last = changed[0], changed[-1]
    return [(first[1], last[2]), (first[3], last[4])]


def main(path: str, file: str) -> None:
    """Score the pairs of a file."""
    model = aogpt.load(path)
    right = 0
    pairs = []
    lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, 1):
        pair = line.split("\t")
        if len(pair) != 2 or pair[0] == pair[1] or not all(pair):
            raise aogpt.UserError(
                f"{file} line {number}: write two different sentences, a tab between"
            )
        pairs.append(pair)
    for pair in pairs:
        whole = [-scored.nats for scored in model.score(pair)]
        right += whole[0] > whole[1]
        words = []
        for text, (start, end) in zip(pair, spans_of(*pair), strict=True):
            start = text.rfind(" ", 0, start) + 1  # whole words
            end = (text + " ").index(" ", max(start + 1, end))
            (joint,) = model.score([text], predict=[(start, end)])
            words.append(f"{text[start:end]!r} {joint.log_prob:.2f}")
        print(f"{whole[0]:9.2f} {whole[1]:9.2f}  {'  '.join(words)}")
    print(f"{right} of {len(pairs)} pairs right")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: minimal_pairs.py MODEL FILE")
    try:
        main(*sys.argv[1:])
    except (aogpt.UserError, UnicodeDecodeError, OSError) as error:
        sys.exit(f"error: {error}")
