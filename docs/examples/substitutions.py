"""Scan all single substitutions of a sequence, then the pairs of the best places.

    python docs/examples/substitutions.py MODEL MKTAYIAKQR ACDEFGHIKLMNPQRSTVWY

MODEL has a token per character (prepare.py --tokenizer alphabet:LETTERS). A score is
log p(new letters | rest) - log p(old letters | rest), in nats: for two places it is
exact, and no sum. Two letters that are likely only together are not among the best
single ones: for two places of your own, `model.pairs` has all their combinations."""

import itertools
import math
import sys

import aogpt


def main(path: str, old: str, letters: str, best: int = 5) -> None:
    """Print the best substitution of the best places, and their pairs."""
    model = aogpt.load(path)
    singles = {}
    for place, letter in enumerate(old):
        masked = f"{old[:place]}[MASK]{old[place + 1 :]}"
        ((likely,),) = model.blanks([masked], top=10**6)
        p = {one.text: one.probability for one in likely}
        unknown = {letter, *letters} - set(p)
        if unknown:
            raise aogpt.UserError(f"the model has no token for {sorted(unknown)}")
        for new in letters.replace(letter, ""):
            singles[place, new] = math.log(p[new] / p[letter])
    best_letters = {}
    for place, new in sorted(singles, key=singles.get, reverse=True):
        best_letters.setdefault(place, new)
    ranked = list(best_letters.items())[:best]
    for place, new in ranked:
        print(f"{singles[place, new]:8.3f}  {old[place]}{place + 1}{new}")
    for (i, a), (j, b) in itertools.combinations(sorted(ranked), 2):
        mutant = old[:i] + a + old[i + 1 : j] + b + old[j + 1 :]
        before, after = model.score([old, mutant], predict=[(i, i + 1), (j, j + 1)])
        exact = after.log_prob - before.log_prob
        total = singles[i, a] + singles[j, b]
        print(f"{exact:8.3f}  {old[i]}{i + 1}{a} {old[j]}{j + 1}{b}, sum {total:.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: substitutions.py MODEL SEQUENCE LETTERS")
    try:
        main(*sys.argv[1:])
    except (aogpt.UserError, OSError) as error:
        sys.exit(f"error: {error}")
