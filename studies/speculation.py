"""Exact speculation in any order: tokens a pass, and what samples of the same cost are worth.

    python -m studies.speculation          # what is missing, then the page; an hour on one core
    python -m studies.speculation --quick  # does it run? Results go to out/speculation

Every row is one run of eval_gen.py on the books model, saved in results/speculation.runs.jsonl.
The model judges its own samples from left to right; the divergence of n-grams from held-out books
is beside it, since a judge alone rewards text that is too likely."""

import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from aogpt.checkpoints import load_model
from aogpt.data.loader import TokenDataset, find_dataset, spread
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import (
    write_atomically,
    write_jsonl,
    write_text,
)
from aogpt.runtime.outputs import commit, new_figure, png
from aogpt.scoring import masked_logits
from studies.runs import ROOT, rows_by, run_alone

MODEL = "results/books_model"
REFERENCE = "data/books_english"
LENGTH = 128
RESULTS = ROOT / "results"
TEMPLATE = ROOT / "studies" / "configs" / "speculation.md"

ONE_AT_A_TIME = "one token a pass, random order"
LEFT_TO_RIGHT = "one token a pass, left to right"
SLOTS = "one token a pass, slots of 8"
# By name: the words of eval_gen.py. Exact methods draw from the joint distribution of one token a
# pass along their order; the others are approximations.
EXACT = {
    ONE_AT_A_TIME: "--mode random",
    "speculative, draft 4": "--mode speculative --draft 4",
    "speculative, draft 8": "--mode speculative --draft 8",
    "speculative, draft 16": "--mode speculative --draft 16",
    "speculative, draft 32": "--mode speculative --draft 32",
    LEFT_TO_RIGHT: "--mode l2r",
    "speculative, left to right, draft 4": "--mode speculative --order l2r --draft 4",
    "speculative, left to right, draft 8": "--mode speculative --order l2r --draft 8",
    "speculative, left to right, draft 16": "--mode speculative --order l2r --draft 16",
    SLOTS: "--mode order --order slots:block=8",
    "speculative, slots of 8, draft 4": "--mode speculative --order slots:block=8 --draft 4",
    "speculative, slots of 8, draft 8": "--mode speculative --order slots:block=8 --draft 8",
    "speculative, slots of 8, draft 16": "--mode speculative --order slots:block=8 --draft 16",
}
APPROXIMATE = {
    "even, 8 steps": "--mode even --steps 8",
    "even, 16 steps": "--mode even --steps 16",
    "even, 32 steps": "--mode even --steps 32",
    "even, 64 steps": "--mode even --steps 64",
    "mdm, 8 steps": "--mode mdm --steps 8",
    "mdm, 16 steps": "--mode mdm --steps 16",
    "mdm, 32 steps": "--mode mdm --steps 32",
    "mdm, 64 steps": "--mode mdm --steps 64",
    "confidence above 0.5": "--mode confidence --threshold 0.5",
    "confidence above 0.9": "--mode confidence --threshold 0.9",
    "entropies up to 1 nat": "--mode entropy --entropy-bound 1",
    "entropies up to 4 nats": "--mode entropy --entropy-bound 4",
    "most confident first, one a pass": "--mode confidence",
}
# A3's table of selection rules: which positions are filled next, 1, 4 or 8 a pass. Rows that are
# in the tables above already are not run again.
SELECTION = {
    "random": {
        1: ONE_AT_A_TIME,
        4: "random, 4 a pass",
        8: "random, 8 a pass",
    },
    "confidence": {
        1: "most confident first, one a pass",
        4: "confidence, 4 a pass",
        8: "confidence, 8 a pass",
    },
    "entropy": {
        1: "entropy, one a pass",
        4: "entropy, 4 a pass",
        8: "entropy, 8 a pass",
    },
    "margin": {
        1: "margin, one a pass",
        4: "margin, 4 a pass",
        8: "margin, 8 a pass",
    },
}
RULES = {
    "random": "at random",
    "confidence": "with the largest probability of a token",
    "entropy": "with the least entropy",
    "margin": "whose first token leads the second the most",
}
# Colors and markers of the families of the figure.
FAMILIES = {
    "speculative, draft": ("#0072B2", "o"),
    "one token a pass, random order": ("#0072B2", "s"),
    "one token a pass, left to right": ("#000000", "s"),
    "speculative, left to right": ("#000000", "o"),
    "one token a pass, slots": ("#56B4E9", "s"),
    "speculative, slots": ("#56B4E9", "o"),
    "even": ("#D55E00", "^"),
    "mdm": ("#E69F00", "v"),
    "confidence above": ("#009E73", "D"),
    "entropies": ("#CC79A7", "P"),
    "most confident first": ("#009E73", "s"),
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    samples: int = 256
    """Samples of every row."""
    quick: bool = False
    """4 samples of a row, of 16 tokens."""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    folder = ROOT / "out" / "speculation" if a.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "speculation.runs.jsonl"
    rows = rows_by("name", file)
    samples = 4 if a.quick else a.samples
    length = 16 if a.quick else LENGTH
    for name, words in all_rows().items():
        if name in rows:
            continue
        rows[name] = measured(name, words, samples, length)
        write_jsonl(file, rows.values())
        show(f"{name}: {rows[name]['nfe']:.1f} passes", flush=True)
    if "acceptance" not in rows:
        rows["acceptance"] = acceptance_row(sequences=2 if a.quick else 64)
        write_jsonl(file, rows.values())
    image = figure(rows)
    write_atomically(folder / "speculation.png", lambda out: out.write(image))
    write_text(folder / "speculation.md", page(rows))
    show(f"wrote {folder}/speculation.md and its figure")


def all_rows() -> dict[str, str]:
    """Return the words of eval_gen.py for every row by its name."""
    rows = EXACT | APPROXIMATE
    for rule, names in SELECTION.items():
        for group_size, name in names.items():
            rows.setdefault(name, f"--mode {rule} --group-size {group_size}")
    return rows


def measured(name: str, words: str, samples: int, length: int) -> dict:
    """One row of eval_gen.py, without what it says of each sample. Raises UserError if it fails."""
    command = [
        "eval_gen.py",
        MODEL,
        *("--judge", MODEL),
        *("--reference", REFERENCE),
        *("--length", str(length)),
        *("--num-samples", str(samples)),
        *words.split(),
    ]
    with tempfile.TemporaryDirectory() as folder:
        json_file = Path(folder) / "rows.json"
        done = run_alone(*command, "--json", str(json_file))
        if done.returncode:
            raise UserError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        row = json.loads(json_file.read_text())["rows"][0]
    row.pop("per_sample")
    return {
        "name": name,
        "command": " ".join(["python", *command]),
        "commit": commit(),
        **row,
    }


# ---- why it works: what a draft loses by not knowing its neighbours ------------------------------


def acceptance_row(sequences: int) -> dict:
    """The probability that a drafted token is kept, by its distance from the nearest position that
    was drafted before it in the same pass.

    Text is held-out books. The context is a random half of the positions, the draft the next 16 of
    the order. A token is kept with probability 1 - TV(p, q): p is its distribution given the
    context alone, q that given the drafts before it too (here: the true text)."""
    model = load_model(MODEL)
    data = TokenDataset(find_dataset(REFERENCE), "test", LENGTH)
    tokens = data.blocks(spread(sequences, data.num_blocks))
    generator = torch.Generator().manual_seed(0)
    kept: dict[str, list[list[float]]] = {"random": [], "l2r": []}
    by_distance: dict[int, list[float]] = {}
    for row in tokens:
        for kind, values in kept.items():
            order = torch.randperm(LENGTH, generator=generator)
            if kind == "l2r":
                order = torch.arange(LENGTH)
            probabilities = kept_probabilities(
                model, row, order, LENGTH // 2, drafts=16
            )
            values.append(probabilities)
            if kind == "random":
                for distance, probability in zip(
                    distances(order, LENGTH // 2, drafts=16), probabilities, strict=True
                ):
                    by_distance.setdefault(distance, []).append(probability)
    return {
        "name": "acceptance",
        "commit": commit(),
        "sequences": sequences,
        "by_place": {
            kind: [list(mean_and_error(column)) for column in zip(*rows, strict=True)]
            for kind, rows in kept.items()
        },
        "by_distance": {
            str(distance): [len(values), *mean_and_error(values)]
            for distance, values in sorted(by_distance.items())
        },
    }


@torch.no_grad()
def kept_probabilities(model, tokens, order, known: int, drafts: int) -> list[float]:
    """1 - TV(p, q) of each draft along `order` (T,) after `known` tokens; of the first it is 1."""
    masked = torch.ones_like(order, dtype=torch.bool)
    masked[order[:known]] = False
    logits = masked_logits(model, tokens[None], masked[None], order[None])
    place = masked.cumsum(0) - 1  # of a masked position among all masked ones
    drafted = logits[place[order[known : known + drafts]]].double().softmax(-1)
    verified = model.logits(tokens[None], order[None])[0, known : known + drafts]
    verified = verified.double().softmax(-1)
    return torch.minimum(drafted, verified).sum(-1).tolist()


def distances(order, known: int, drafts: int) -> list[int]:
    """For each draft, the distance to the nearest position drafted before it; 0 for the first."""
    places = order[known : known + drafts].tolist()
    result = [0]
    for number in range(1, len(places)):
        nearest = min(abs(places[number] - other) for other in places[:number])
        result.append(nearest)
    return result


def mean_and_error(values) -> tuple[float, float]:
    """Mean and standard error."""
    error = (
        statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    )
    return statistics.fmean(values), error


# ---- the page ------------------------------------------------------------------------------------


def figure(rows: dict[str, dict]) -> bytes:
    """Perplexity and n-gram divergence against passes; the probability to keep a draft."""
    drawing, (left, middle, right) = new_figure(1, 3, size=(13, 4.2))
    for family, (color, marker) in FAMILIES.items():
        members = [row for name, row in rows.items() if name.startswith(family)]
        passes = [row["nfe"] for row in members]
        style = {"color": color, "marker": marker, "label": family, "markersize": 5}
        style["linestyle"] = "-" if len(members) > 1 else "none"
        lows = [row["perplexity"] - row["perplexity_low"] for row in members]
        highs = [row["perplexity_high"] - row["perplexity"] for row in members]
        perplexities = [row["perplexity"] for row in members]
        left.errorbar(
            passes,
            perplexities,
            yerr=[lows, highs],
            capsize=2,
            **style,
        )
        middle.plot(passes, [row["js_2"] for row in members], **style)
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"passes of the model for {LENGTH} tokens")
    left.axhline(rows[ONE_AT_A_TIME]["perplexity"], color="#0072B2", linewidth=0.7)
    left.axhline(rows[LEFT_TO_RIGHT]["perplexity"], color="#000000", linewidth=0.7)
    left.set_ylabel("perplexity of the samples, left to right (bars: 95%)")
    middle.set_ylabel("divergence of 2-grams from held-out books, nats")
    text = rows[ONE_AT_A_TIME]["js_2_text"]
    middle.axhline(
        text,
        color="grey",
        linestyle=":",
        label="other held-out text",
    )
    middle.legend(fontsize=6.5)
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


DISTANCES = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, LENGTH))


def grouped(by_distance: dict[str, list]) -> list[tuple[str, float, float]]:
    """(label, mean, standard error) of the distances in each of DISTANCES."""
    groups = []
    for low, high in DISTANCES:
        inside = [v for d, v in by_distance.items() if low <= int(d) <= high]
        count = sum(number for number, _, _ in inside)
        if not count:
            continue
        mean = sum(number * value for number, value, _ in inside) / count
        squares = sum((number * error) ** 2 for number, _, error in inside)
        label = str(low) if low == high else f"{low} to {high}"
        if high == LENGTH:
            label = f"{low}+"
        if high == 0:
            label = "first"
        groups.append((label, mean, squares**0.5 / count))
    return groups


def sampler_table(rows: dict[str, dict]) -> str:
    """Return Markdown: a line for each exact and each approximate sampler."""
    lines = [
        "| sampler | exact | passes | tokens a pass | perplexity, 95% | entropy "
        "| 2-gram divergence | CPU s |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        if name not in EXACT and name not in APPROXIMATE:
            continue
        exact = "yes" if name in EXACT else "no"
        lines.append(
            f"| {name} | {exact} | {row['nfe']:.1f} | {tokens_a_pass(row):.2f} "
            f"| {quality_cells(row)} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def selection_table(rows: dict[str, dict]) -> str:
    """Return Markdown: a line for each rule and number of tokens a pass in SELECTION."""
    lines = [
        "| first is filled the position | tokens a pass | perplexity, 95% | entropy "
        "| 2-gram divergence |",
        "|---|---:|---|---:|---:|",
    ]
    for rule, names in SELECTION.items():
        for tokens, name in names.items():
            lines.append(f"| {RULES[rule]} | {tokens} | {quality_cells(rows[name])} |")
    return "\n".join(lines)


def quality_cells(row: dict) -> str:
    """Return the cells of both tables that say how good samples are."""
    interval = f"{row['perplexity_low']:.1f} to {row['perplexity_high']:.1f}"
    return (
        f"{row['perplexity']:.1f} ({interval}) | {row['entropy']:.2f} "
        f"| {row['js_2']:.3f}"
    )


def page(rows: dict[str, dict]) -> str:
    """The page: TEMPLATE with its tables and numbers filled in."""
    acceptance = rows["acceptance"]["by_place"]
    groups = grouped(rows["acceptance"]["by_distance"])
    one = rows[ONE_AT_A_TIME]
    random = rows["speculative, draft 16"]
    left_to_right = rows["speculative, left to right, draft 16"]
    even = rows["even, 32 steps"]
    values = {
        "TABLE": sampler_table(rows),
        "SELECTION": selection_table(rows),
        "PPL_CONFIDENCE_1": f"{rows[SELECTION['confidence'][1]]['perplexity']:.1f}",
        "PPL_CONFIDENCE_4": f"{rows[SELECTION['confidence'][4]]['perplexity']:.1f}",
        "PPL_ENTROPY_1": f"{rows[SELECTION['entropy'][1]]['perplexity']:.1f}",
        "PPL_MARGIN_1": f"{rows[SELECTION['margin'][1]]['perplexity']:.1f}",
        "PPL_ENTROPY_4": f"{rows[SELECTION['entropy'][4]]['perplexity']:.1f}",
        "PPL_MARGIN_4": f"{rows[SELECTION['margin'][4]]['perplexity']:.1f}",
        "PPL_RANDOM_4": f"{rows[SELECTION['random'][4]]['perplexity']:.1f}",
        "RATE_SLOTS": f"{tokens_a_pass(rows['speculative, slots of 8, draft 16']):.1f}",
        "PPL_SLOTS": f"{rows[SLOTS]['perplexity']:.1f}",
        "PPL_SLOTS_16": f"{rows['speculative, slots of 8, draft 16']['perplexity']:.1f}",
        "LENGTH": str(LENGTH),
        "SAMPLES": str(one["samples"]),
        "COMMIT": ", ".join(sorted({row["commit"] for row in rows.values()})),
        "COMMAND": random["command"],
        "RATE_RANDOM": f"{tokens_a_pass(random):.1f}",
        "RATE_L2R": f"{tokens_a_pass(left_to_right):.1f}",
        "PASSES_RANDOM": f"{random['nfe']:.0f}",
        "PASSES_EVEN": f"{even['nfe']:.0f}",
        "PPL_RANDOM": f"{random['perplexity']:.1f}",
        "PPL_ONE": f"{one['perplexity']:.1f}",
        "PPL_EVEN": f"{even['perplexity']:.1f}",
        "PPL_L2R": f"{rows[LEFT_TO_RIGHT]['perplexity']:.1f}",
        "SECONDS_ONE": f"{one['seconds']:.0f}",
        "SECONDS_DRAFT4": f"{rows['speculative, draft 4']['seconds']:.0f}",
        "SECONDS_DRAFT16": f"{random['seconds']:.0f}",
        "KEPT_RANDOM": f"{acceptance['random'][1][0]:.2f}",
        "KEPT_L2R": f"{acceptance['l2r'][1][0]:.2f}",
        "NEAR": f"{groups[1][1]:.2f}",
        "FAR": f"{groups[-1][1]:.2f}",
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def tokens_a_pass(row: dict) -> float:
    return row["tokens"] / row["samples"] / row["nfe"]


if __name__ == "__main__":
    run_script(main)
