"""Exact speculation in any order: tokens a pass, and what samples of the same cost are
worth.

    python -m studies.speculation          # what is missing, then the page; an hour
    python -m studies.speculation --quick  # does it run? Results go to out/speculation

Every row is one run of sample.py on the books model, judged by eval_gen.py, saved in
results/speculation.runs.jsonl. The model judges its own samples from left to right; the
divergence of n-grams from held-out books is beside it, since a judge alone rewards text
that is too likely. The page names its numbers, as {speculative, draft 16: perplexity
.1f}.

The row `acceptance` was measured once, by this file at commit c636b8d: the probability
that a drafted token is kept, by its place in the draft ("by_place": mean, standard
error) and by its distance from the nearest position that was drafted before it in the
same pass ("by_distance": count, mean, standard error; 0 for the first). The context is
a random half of the positions of held-out books, the draft the next 16 of the order. A
token is kept with probability 1 - TV(p, q): p is its distribution given the context
alone, q that given the drafts before it too."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from aogpt.runtime.command_line import run_script, show, with_help
from aogpt.runtime.files import read_lines, write_atomically, write_jsonl, write_text
from aogpt.runtime.outputs import markdown_table
from aogpt.runtime.validation import from_json
from studies.drawing import new_figure, png
from studies.figures import PALETTE
from studies.ngrams import divergences
from studies.runs import ROOT, commit, report_of, rows_by, run_well

MODEL = "results/books_model"
REFERENCE = "data/books_english"
LENGTH = 128  # tokens of a sample
SAMPLES = 256  # of every row
ROWS = ROOT / "results" / "speculation.runs.jsonl"
TEMPLATE = ROOT / "studies" / "configs" / "speculation.md"

ONE_AT_A_TIME = "one token a pass, random order"
LEFT_TO_RIGHT = "one token a pass, left to right"
# Modes of sample.py, by name. Exact methods draw from the joint distribution of
# one token a pass along their order; the others are approximations.
EXACT = {
    ONE_AT_A_TIME: "random",
    "speculative, draft 4": "speculative:draft=4",
    "speculative, draft 8": "speculative:draft=8",
    "speculative, draft 16": "speculative:draft=16",
    "speculative, draft 32": "speculative:draft=32",
    LEFT_TO_RIGHT: "l2r",
    "speculative, left to right, draft 4": "speculative:order=l2r,draft=4",
    "speculative, left to right, draft 8": "speculative:order=l2r,draft=8",
    "speculative, left to right, draft 16": "speculative:order=l2r,draft=16",
    "one token a pass, slots of 8": "slots:block=8",
    "speculative, slots of 8, draft 4": "speculative:order=slots,block=8,draft=4",
    "speculative, slots of 8, draft 8": "speculative:order=slots,block=8,draft=8",
    "speculative, slots of 8, draft 16": "speculative:order=slots,block=8,draft=16",
}
APPROXIMATE = {
    "even, 8 steps": "even:steps=8",
    "even, 16 steps": "even:steps=16",
    "even, 32 steps": "even:steps=32",
    "even, 64 steps": "even:steps=64",
    "mdm, 8 steps": "mdm:steps=8",
    "mdm, 16 steps": "mdm:steps=16",
    "mdm, 32 steps": "mdm:steps=32",
    "mdm, 64 steps": "mdm:steps=64",
    "confidence above 0.5": "confidence:threshold=0.5",
    "confidence above 0.9": "confidence:threshold=0.9",
    "entropies up to 1 nat": "entropy:entropy_bound=1",
    "entropies up to 4 nats": "entropy:entropy_bound=4",
    "most confident first, one a pass": "confidence",
}
# Further rows of A3's table of selection rules.
GROUPS = {
    "random, 4 a pass": "random:group=4",
    "random, 8 a pass": "random:group=8",
    "confidence, 4 a pass": "confidence:group=4",
    "confidence, 8 a pass": "confidence:group=8",
    "entropy, one a pass": "entropy:group=1",
    "entropy, 4 a pass": "entropy:group=4",
    "entropy, 8 a pass": "entropy:group=8",
    "margin, one a pass": "margin:group=1",
    "margin, 4 a pass": "margin:group=4",
    "margin, 8 a pass": "margin:group=8",
}
# Which positions are filled next: the rows with 1, 4 and 8 a pass.
SELECTION = {
    "at random": (ONE_AT_A_TIME, "random, 4 a pass", "random, 8 a pass"),
    "with the largest probability of a token": (
        "most confident first, one a pass",
        "confidence, 4 a pass",
        "confidence, 8 a pass",
    ),
    "with the least entropy": (
        "entropy, one a pass",
        "entropy, 4 a pass",
        "entropy, 8 a pass",
    ),
    "whose first token leads the second the most": (
        "margin, one a pass",
        "margin, 4 a pass",
        "margin, 8 a pass",
    ),
}
# Markers and labels of the families of the figure, by how the names of their rows
# begin. Each has the color of its place.
FAMILIES = {
    "speculative, draft": ("o", "speculative, random order (exact)"),
    "one token a pass, left to right": ("s", "one token a pass, left to right"),
    "even": ("^", "even groups of a random order"),
    "confidence above": ("D", "all above a confidence"),
    "mdm": ("v", "masked diffusion (mdm)"),
    "entropies": ("P", "up to a sum of entropies"),
    "one token a pass, slots": ("s", "one token a pass, slots of 8"),
    "speculative, slots": ("o", "speculative, slots of 8 (exact)"),
    "one token a pass, random order": ("s", "one token a pass, random order"),
    "speculative, left to right": ("o", "speculative, left to right (exact)"),
    "most confident first": ("s", "most confident first, one a pass"),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    quick: bool = False
    """4 samples of a row, of 16 tokens."""


def main() -> None:
    """Measure what has no row, and write the page and the figure."""
    a = tyro.cli(with_help(Arguments), description=__doc__)
    folder = ROOT / "results"
    samples = SAMPLES
    length = LENGTH
    if a.quick:
        folder = ROOT / "out" / "speculation"
        samples = 4
        length = 16
    file = folder / ROWS.name
    rows = rows_by("name", file)
    modes = {**EXACT, **APPROXIMATE, **GROUPS}
    for name, mode in modes.items():
        if name not in rows:
            rows[name] = measured(name, mode, samples, length)
            write_jsonl(file, rows.values())
            show(f"{name}: {rows[name]['nfe']:.1f} passes", flush=True)
    rows["acceptance"] = rows_by("name", ROWS)["acceptance"]
    image = figure(rows)
    write_atomically(folder / "speculation.png", lambda out: out.write(image))
    write_text(folder / "speculation.md", page(rows))
    show(f"wrote {folder}/speculation.md and its figure")


def measured(name: str, mode: str, samples: int, length: int) -> dict:
    """Return the scores of samples of the model by itself, and their divergence from
    held-out text."""
    command = f"sample.py {MODEL} --length {length} --num-samples {samples}"
    command += f" --mode {mode}"
    row = {"name": name, "command": f"python {command}", "commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.jsonl"
        run_well(*command.split(), "--jsonl", str(file))
        report = report_of("eval_gen.py", str(file), "--judge", MODEL)
        tokens = []
        for place, line in read_lines(file):
            tokens.append(from_json(line, dict, place)["tokens"])
    row.update(report["rows"][0])
    row.update(divergences(tokens, REFERENCE))
    row.pop("per_sample")
    return row


# ---- the page ------------------------------------------------------------------------


def figure(rows: dict[str, dict]) -> bytes:
    """Draw perplexity and n-gram divergence against passes, and the probability to keep
    a draft."""
    drawing, (left, middle, right) = new_figure(1, 3, size=(13, 4.2))
    # Grey are lines that no family has.
    colors = [color for color in PALETTE if color != "#999999"]
    families = zip(FAMILIES.items(), colors, strict=False)
    for (family, (marker, label)), color in families:
        members = [row for name, row in rows.items() if name.startswith(family)]
        passes = [row["nfe"] for row in members]
        line = "-" if len(members) > 1 else "none"
        lows = [row["perplexity"] - row["perplexity_low"] for row in members]
        highs = [row["perplexity_high"] - row["perplexity"] for row in members]
        perplexities = [row["perplexity"] for row in members]
        left.errorbar(
            passes,
            perplexities,
            yerr=[lows, highs],
            capsize=2,
            color=color,
            marker=marker,
            markersize=5,
            linestyle=line,
        )
        middle.plot(
            passes,
            [row["js_2"] for row in members],
            color=color,
            marker=marker,
            markersize=5,
            linestyle=line,
            label=label,
        )
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"passes of the model for {LENGTH} tokens")
    for name, dashes in ((ONE_AT_A_TIME, "--"), (LEFT_TO_RIGHT, "-.")):
        left.axhline(
            rows[name]["perplexity"],
            color="grey",
            linewidth=0.7,
            linestyle=dashes,
            label=f"exact, as {name}",
        )
    left.legend(fontsize=6.5, loc="upper right")
    left.set_ylabel("perplexity of the samples, left to right (bars: 95%)")
    middle.set_ylabel("divergence of 2-grams from held-out books, nats")
    text = rows[ONE_AT_A_TIME]["js_2_text"]
    middle.axhline(text, color="grey", linestyle=":", label="other held-out text")
    middle.legend(fontsize=6.5, loc="center left")
    groups = grouped(rows["acceptance"]["by_distance"])
    right.errorbar(
        range(len(groups)),
        [mean for _, mean, _ in groups],
        yerr=[1.96 * error for _, _, error in groups],
        marker="o",
        color="#0072B2",
        capsize=2,
    )
    right.set_xticks(range(len(groups)), [label for label, _, _ in groups])
    right.set_xlabel("tokens to the nearest position of the same draft")
    right.set_ylabel("probability to keep a draft (bars: 95%)")
    right.set_ylim(0, 1)
    return png(drawing)


DISTANCES = {
    "first": (0, 0),
    "1": (1, 1),
    "2": (2, 2),
    "3 to 4": (3, 4),
    "5 to 8": (5, 8),
    "9 to 16": (9, 16),
    "17+": (17, LENGTH),
}


def grouped(by_distance: dict[str, list]) -> list[tuple[str, float, float]]:
    """Return (label, mean, standard error) of the distances in each of DISTANCES."""
    groups = []
    for label, (low, high) in DISTANCES.items():
        inside = [v for d, v in by_distance.items() if low <= int(d) <= high]
        count = sum(number for number, _, _ in inside)
        if count:
            mean = sum(number * value for number, value, _ in inside) / count
            squares = sum((number * error) ** 2 for number, _, error in inside)
            groups.append((label, mean, squares**0.5 / count))
    return groups


def sampler_table(rows: dict[str, dict]) -> list[str]:
    """Return a line for each exact and each approximate sampler."""
    lines = []
    for name, row in rows.items():
        if name in EXACT or name in APPROXIMATE:
            passes = [f"{row['nfe']:.1f}", f"{row['tokens_a_pass']:.2f}"]
            exact = "yes" if name in EXACT else "no"
            seconds = f"{row['seconds']:.0f}"
            lines.append([name, exact, *passes, *quality_cells(row), seconds])
    head = ["sampler", "exact", "passes", "tokens a pass", *QUALITY, "CPU s"]
    return markdown_table(head, lines, left=2)


def selection_table(rows: dict[str, dict]) -> list[str]:
    """Return a line for each rule and number of tokens a pass in SELECTION."""
    lines = []
    for rule, names in SELECTION.items():
        for count, name in zip("148", names, strict=True):
            lines.append([rule, count, *quality_cells(rows[name])])
    head = ["first is filled the position", "tokens a pass", *QUALITY]
    return markdown_table(head, lines)


QUALITY = ["perplexity, 95%", "entropy", "2-gram divergence"]


def quality_cells(row: dict) -> list[str]:
    interval = f"{row['perplexity_low']:.1f} to {row['perplexity_high']:.1f}"
    perplexity = f"{row['perplexity']:.1f} ({interval})"
    return [perplexity, f"{row['entropy']:.2f}", f"{row['js_2']:.3f}"]


def page(rows: dict[str, dict]) -> str:
    acceptance = rows["acceptance"]
    groups = grouped(acceptance["by_distance"])
    numbers = {
        "kept": {
            "random": acceptance["by_place"]["random"][1][0],
            "l2r": acceptance["by_place"]["l2r"][1][0],
            "near": groups[1][1],
            "far": groups[-1][1],
        }
    }
    commits = sorted({row["commit"] for row in rows.values()})
    for name, row in rows.items():
        if name != "acceptance":
            numbers[name] = dict(row)
            tokens = row["tokens"] / row["samples"]
            numbers[name]["tokens_a_pass"] = tokens / row["nfe"]
    tables = {
        "{TABLE}": "\n".join(sampler_table(numbers)),
        "{SELECTION}": "\n".join(selection_table(numbers)),
        "{COMMIT}": ", ".join(commits),
    }

    def number(match: re.Match) -> str:
        name, key, form = match.groups()
        return format(numbers[name][key], form)

    text = re.sub(r"\{([^{}:]+): (\w+) ?(\S*)\}", number, TEMPLATE.read_text())
    for name, content in tables.items():
        text = text.replace(name, content)
    return text


if __name__ == "__main__":
    run_script(main)
