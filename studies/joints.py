"""The exact joint probability of a phrase given the rest of its passage, beside the
sums that are used in its place.

    python -m studies.joints run --source test.jsonl.xz    # results/joints.json
    python -m studies.joints draw                          # docs/joints.png

A passage of held-out text has a phrase of neighboring words in its middle. Scores:

exact     log p(phrase | rest), the chain rule in the order as written
averaged  the same for the mean of the probability over orders of its tokens
sum       the sum of log p(token | rest), where all of the phrase is masked
pseudo    the sum of log p(token | rest and the other tokens of the phrase), the
          pseudo-likelihood"""

import json
import lzma
import math
import random
import statistics
from pathlib import Path

import tyro

import aogpt
from aogpt.runtime.command_line import run_script, show
from studies.drawing import COLORS, new_figure, png
from studies.runs import ROOT

RESULTS = ROOT / "results" / "joints.json"
FIGURE = ROOT / "docs" / "joints.png"
WORDS = 48  # of a passage
PHRASE = 3  # words of a phrase
ORDERS = 24  # over which probabilities are averaged


def passages(source: Path, count: int) -> list[str]:
    """Return passages of held-out documents, in turn, one of each at a time."""
    with lzma.open(source, "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"].split() for line in file]
    chosen = random.Random(0)
    texts = []
    while len(texts) < count:
        for words in documents:
            start = chosen.randrange(len(words) - WORDS)
            texts.append(" ".join(words[start : start + WORDS]))
    return texts[:count]


def scores_of(model: aogpt.TextModel, text: str) -> dict | None:
    """Return the scores of the phrase in the middle of a passage; None if the text
    around it has other tokens where the phrase is masked."""
    words = text.split()
    half = (WORDS - PHRASE) // 2
    before = " ".join(words[:half])
    phrase = " " + " ".join(words[half : half + PHRASE])
    after = text[len(before + phrase) :]
    span = (len(before), len(before + phrase))
    (exact,) = model.score([text], predict=[span])
    (averaged,) = model.score([text], predict=[span], orders=ORDERS)
    pieces = [
        piece
        for piece, value in zip(exact.pieces, exact.log_probs, strict=True)
        if value is not None
    ]
    if not all(pieces) or "".join(pieces) != phrase:  # parts of a character
        return None
    (blanks,) = model.blanks([f"{before}[MASK:{exact.scored}]{after}"], top=10**6)
    places = [n for n, value in enumerate(exact.log_probs) if value is not None]
    total = 0.0
    pseudo = 0.0
    start = len(before)
    for place, likely in zip(places, blanks, strict=True):
        (token,) = [one for one in likely if one.id == exact.ids[place]]
        total += math.log(token.probability)
        end = start + len(exact.pieces[place])
        (single,) = model.score([text], predict=[(start, end)])
        pseudo += single.log_prob
        start = end
    return {
        "phrase": phrase,
        "tokens": exact.scored,
        "exact": exact.log_prob,
        "averaged": averaged.log_prob,
        "averaged_error": averaged.standard_error,
        "sum": total,
        "pseudo": pseudo,
    }


def run(
    source: Path,
    model: str = "results/books_model",
    count: int = 200,
    out: Path = RESULTS,
) -> None:
    """Score phrases and write a row for each.

    Args:
        source: held-out texts, .jsonl.xz.
        model: a model of any order.
        count: how many phrases.
        out: the file to write."""
    text_model = aogpt.load(model, device="cpu")
    rows = []
    for text in passages(source, count):
        row = scores_of(text_model, text)
        if row is not None:
            rows.append(row)
    result = {"model": model, "source": source.name, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")
    for line in summary(rows):
        show(line)


def summary(rows: list[dict]) -> list[str]:
    """Return lines on how far the other scores are from the exact one."""
    lines = []
    for name in ("averaged", "sum", "pseudo"):
        gaps = [row[name] - row["exact"] for row in rows]
        mean = statistics.mean(gaps)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps))
        spread = statistics.mean(map(abs, gaps))
        largest = max(map(abs, gaps))
        lines.append(
            f"{name} - exact: {mean:+.3f} ± {1.96 * error:.3f} nats, {spread:.3f} "
            f"without sign, at most {largest:.2f}, {len(gaps)} phrases"
        )
    return lines


def draw(results: Path = RESULTS, out: Path = FIGURE) -> None:
    """Draw both sums against the exact joint.

    Args:
        results: the file of `run`.
        out: the figure to write."""
    rows = json.loads(results.read_text())["rows"]
    figure, axes = new_figure(columns=2, size=(9, 4.4), sharey=True)
    panels = {
        "sum": "sum of log p(token | rest),\nall of the phrase masked",
        "pseudo": "pseudo-likelihood: sum of\nlog p(token | rest and the phrase)",
    }
    exact = [row["exact"] for row in rows]
    lowest = min(min(row["exact"], row["sum"], row["pseudo"]) for row in rows)
    limits = (lowest - 1, 1)
    for axis, (name, label) in zip(axes, panels.items(), strict=True):
        gaps = [row[name] - row["exact"] for row in rows]
        axis.plot(limits, limits, color=COLORS[1], linewidth=0.8)
        values = [row[name] for row in rows]
        axis.scatter(exact, values, s=10, alpha=0.6, edgecolors="none")
        mean = statistics.mean(gaps)
        axis.set_title(
            f"{abs(mean):.1f} nats too {'low' if mean < 0 else 'high'} on average, "
            f"up to {max(map(abs, gaps)):.0f}",
            fontsize=11,
        )
        axis.set_xlabel("exact log p(phrase | rest), nats")
        axis.set_ylabel(label)
        axis.set_xlim(limits)
        axis.set_ylim(limits)
    figure.suptitle(
        f"Sums of single scores are far from the joint probability of a phrase "
        f"({len(rows)} phrases of {PHRASE} words)",
        fontsize=12,
    )
    out.write_bytes(png(figure))


def main() -> None:
    commands = {"run": run, "draw": draw}
    tyro.extras.subcommand_cli_from_dict(
        commands, prog="python -m studies.joints", description=__doc__
    )


if __name__ == "__main__":
    run_script(main)
