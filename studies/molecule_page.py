"""The page results/molecules.md, made of the rows of `studies.molecules measure`. No
number on it is written by hand, except the published ones. Shares have intervals over
molecules, as there is one seed of each system; so has a claim's difference."""

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aogpt.evaluation.estimates import t_quantile
from aogpt.runtime.files import write_atomically, write_text
from aogpt.runtime.outputs import markdown_table
from aogpt.systems import flops_per_token
from studies.drawing import COLORS, new_figure, png
from studies.molecule_measures import system_of
from studies.molecule_runs import (
    ENCODERS,
    OUT,
    RECIPE,
    RESULTS,
    Claim,
    load_runs,
    systems_of,
)
from studies.moses import read_molecule
from studies.runs import rows_by
from studies.verdicts import with_verdicts

PAGE = RESULTS.parent / "molecules.md"
NOT_RUN = "not run yet"
DRAWN = 4  # fillings of a drawing
DRAWN_ROWS = ("CharRNN", "NGram")  # published ones, in the figure
FIGURE = "valid.png"
# In plain words, of the rows: to be read again when they change.
ANSWER = (
    "After a quarter of an epoch left to right writes molecules, and any order does "
    "not yet. A GPT of the same size, after as many letters, needs fewer nats, and "
    "nearly all that it writes is valid. AO-GPT and the encoder seldom write a valid "
    "molecule: with a [MASK] as the query, and in the encoder, most often most "
    "confident first, with adaLN or rotated queries as often left to right, in all of "
    "them least often in a random order. None of these orders repairs it.\n\nGiven "
    "both sides of a hole, no difference in validity shows between AO-GPT with a "
    "[MASK], left to right, and a GPT that draws eight fillings and takes one by what "
    "follows; most confident first AO-GPT is ahead, and the encoder ahead of both, in "
    "this one seed. Of these leads only that of the encoder over the GPT is clear of "
    "what claim 3 allows for other seeds (all fill the same holes, which the test does "
    "not use). In giving back the molecule itself the GPT is ahead of AO-GPT left to "
    "right in this seed, not clear of an allowance of that size, and most confident "
    "first no difference shows. "
    "Around a given scaffold, or for a missing ring system, more than half of what "
    "the [MASK] model and the encoder fill in is a molecule, most confident first; "
    "resampling a GPT was not tried there. adaLN and rotated queries need more nats "
    "than a [MASK] and make fewer valid molecules after as many letters; a [MASK] "
    "takes 1.8 times the operations of rotated queries, a GPT or the encoder, and "
    "2.0 times adaLN's; equal operations were not run. adaLN, which has tables of "
    "positions alone, is ahead of rotated queries in nats and in holes, which is not "
    "clear of such an allowance either; for rotated queries the largest rate that was "
    "tried was taken, by less than the noise of tuning."
)
FINDING = "A GPT writes molecules; the others, so far, only fill holes in them"
COLUMNS = {
    "valid": "valid",
    "unique": "unique",
    "FCD test": "FCD",
    "FCD scaffolds": "FCD sf",
    "SNN test": "SNN",
    "SNN scaffolds": "SNN sf",
    "Frag test": "Frag",
    "Scaf test": "Scaf",
    "Scaf scaffolds": "Scaf sf",
    "IntDiv": "IntDiv",
    "filters": "filters",
    "novelty": "novelty",
}
"""Of the table of MOSES, by the names of `moses.measures`."""
# arXiv 1811.12823: means of three runs, 30,000 samples each.
PUBLISHED = """
training molecules|1.0 1.0 0.008 0.4755 0.6419 0.5859 1.0 0.9907 0.0 0.8567 1.0
CharRNN|0.9748 0.9994 0.0732 0.5204 0.6015 0.5649 0.9998 0.9242 0.1101 0.8562 0.9943 0.8419
VAE|0.9767 0.9984 0.099 0.567 0.6257 0.5783 0.9994 0.9386 0.0588 0.8558 0.997 0.6949
AAE|0.9368 0.9973 0.5555 1.0572 0.6081 0.5677 0.991 0.9022 0.0789 0.8557 0.996 0.7931
JTN-VAE|1.0 0.9996 0.3954 0.9382 0.5477 0.5194 0.9965 0.8964 0.1009 0.8551 0.976 0.9143
LatentGAN|0.8966 0.9968 0.2968 0.8281 0.5371 0.5132 0.9986 0.8867 0.1072 0.8565 0.9735 0.9498
NGram|0.2376 0.9217 5.5069 6.2306 0.5209 0.4997 0.9846 0.5302 0.0977 0.8738 0.9582 0.9694
"""  # noqa: E501
# From the settings in the package; those of the other rows are not counted.
SIZES = {"CharRNN": ("11.9M", "80"), "training molecules": ("", "")}
MODES = {
    "l2r": "left to right",
    "random": "random order",
    "confidence": "most confident first",
    "speculative": "random order, speculative",
    "resampled": "eight drawn, one resampled",
    "one": "one drawn",
}
HOLES = {
    "hole": "a hole of 3 to 8 letters in the middle",
    "scaffold": "all but the scaffold",
    "ring": "the largest ring system",
}
COMPARABLE = (
    "All but *valid* is of the valid molecules. FCD and Scaf depend on how many there "
    "are, so in these two only the GPT's row can be set beside published ones, and "
    "roughly: our measures of 30,000 training molecules differ from the published row "
    "there, too: their FCD is 0.042 above the published one, the GPT's 0.039 above "
    "VAE's."
)
SETTING = (
    "4 layers of width 128, 0.81M parameters, blocks of 58 letters, Muon with linear "
    "decay, batches of 64; 6,170 steps, a quarter of an epoch, 14.2M letters (14.6M "
    "with the ends that the GPT predicts). The others know the length of a molecule "
    'beforehand (`data.end = "given"`), and their numbers hold its probability. '
    "Muon's rate is tuned for each system on seed 100, in runs of 440 steps, until the "
    "best value has both neighbours; only the best one for rotated queries is the "
    "largest tried, level with its half. The encoder's loss is tuned so, too. One seed "
    "each (300), as a run takes most of an hour of a core: intervals are over "
    "molecules, and say nothing of other seeds. A claim's difference therefore counts "
    "only after an allowance for seeds, fixed beforehand, is taken off it (points: "
    "percentage points); its p is that of a normal distribution. Letters are drawn at "
    "temperature 1. Batches mix molecules of all lengths. Claim 3 is of holes that "
    "AO-GPT fills left to right."
)
NOT_SHOWN = (
    "Equal operations; half and whole epochs; other seeds; 30,000 samples of AO-GPT "
    "and the encoder; SELFIES in place of SMILES; orders that are learned or that take "
    "rings first; samples below temperature 1; a GPT's best of eight fillings; speeds "
    "on an idle machine (seconds are of one core beside other work)."
)

Rows = dict[str, dict[str, dict]]
"""By system and measure."""


def reported_rows(file: Path) -> Rows:
    """Return the rows of the runs of molecules.toml; those of other runs, such as
    pilots, are in no table."""
    experiment, _ = load_runs()
    steps = experiment.base["train"]["steps"]
    rows: Rows = {}
    for row in rows_by("key", file).values():
        of_experiment = Path(row["run"]).parent == OUT / RECIPE
        is_reported = row["run"].endswith(f"_s{experiment.first_seed}")
        if of_experiment and is_reported and row["step"] == steps:
            rows.setdefault(row["system"], {})[row["measure"]] = row
    return rows


def titles_of(rows: Rows) -> dict[str, str]:
    """Return what each system is, by its name in rows; of the encoder the one that was
    trained."""
    experiment, _ = load_runs()
    titles = {}
    for name in systems_of(experiment):
        run_config = experiment.recipes[RECIPE][name]
        config = experiment.config(RECIPE, run_config, 0, run_config.untuned)
        titles.setdefault(system_of(config.model), run_config.description)
    titles[ENCODERS[0]] = "encoder, best of three losses"
    for system, measures in rows.items():
        name, _ = name_and_rate(next(iter(measures.values())))
        titles[system] = experiment.recipes[RECIPE][name].description
    return titles


def name_and_rate(row: dict) -> tuple[str, str]:
    """Return the run config of a row's run, and Muon's rate."""
    name, _, rest = Path(row["run"]).name.partition("_muon_lr")
    return name, rest.partition("_")[0]


# ---- claims --------------------------------------------------------------------------


def figure_of(rows: Rows, term: str) -> dict[str, Any] | None:
    """Return {"mean", "variance" of the mean, "each"} of a figure of a claim; None if
    it is not measured."""
    system, _, name = term.partition(":")
    measures = rows.get(system, {})
    if name.startswith("nats_"):
        if name not in measures:
            return None
        each = measures[name]["each"]
        variance = statistics.variance(each) / len(each)
        return {"mean": statistics.mean(each), "variance": variance, "each": each}
    row = measures.get(name)
    count = "molecules"
    if name.startswith("valid_"):
        row = most_samples(measures, name.removeprefix("valid_"))
        count = "samples"
    if row is None:
        return None
    share = row["valid"]
    variance = share * (1 - share) / row[count]
    return {"mean": share, "variance": variance, "each": None}


def most_samples(measures: dict[str, dict], mode: str) -> dict | None:
    """Return the row of the most samples in a mode; None if there is none."""
    rows = [row for row in measures.values() if row.get("mode") == mode]
    return max(rows, key=lambda row: row["samples"], default=None)


def judged(claim: Claim, rows: Rows) -> dict | None:
    """Return a claim with its difference, higher - lower, and the p value of the
    difference + margin after the allowance; None if a figure is not measured."""
    higher = figure_of(rows, claim.higher)
    lower = figure_of(rows, claim.lower)
    if higher is None or lower is None:
        return None
    mean = higher["mean"] - lower["mean"]
    variance = higher["variance"] + lower["variance"]
    if higher["each"] and lower["each"]:  # of the same molecules
        pairs = zip(higher["each"], lower["each"], strict=True)
        variance = statistics.variance(a - b for a, b in pairs) / len(lower["each"])
    error = math.sqrt(variance)
    counts = max(abs(mean + claim.margin) - claim.allowance, 0.0)
    p = 1.0
    if counts > 0:
        p = math.erfc(counts / error / math.sqrt(2)) if error else 0.0
    return {
        "says": claim.says,
        "mean": mean,
        "half_width": 1.96 * error,
        "margin": claim.margin,
        "p": p,
        "p_rank": None,
        "ranks": False,
        "no_verdict": "",
        "verdict": "",
    }


def claim_lines(claims: Sequence[Claim], rows: Rows) -> list[str]:
    """Return a line for each claim, with its word."""
    all_judged = [judged(claim, rows) for claim in claims]
    with_verdicts([one for one in all_judged if one is not None], len(claims))
    lines = []
    for place, (claim, one) in enumerate(zip(claims, all_judged, strict=True), 1):
        words = NOT_RUN
        if one is not None:
            if ":nats" in claim.lower:
                number = f"{-one['mean']:+.2f} ± {one['half_width']:.2f} nats"
            else:
                number = f"{100 * one['mean']:+.1f} ± {100 * one['half_width']:.1f}"
                number += " points"
            words = f"{number}, **{one['verdict']}**"
        lines.append(f"- *Claim {place}*: {claim.says}: {words}.")
    return lines


# ---- tables --------------------------------------------------------------------------


def nats_cell(row: dict | None) -> str:
    if row is None:
        return NOT_RUN
    each = row["each"]
    half = t_quantile(len(each) - 1) * statistics.stdev(each) / math.sqrt(len(each))
    return f"{statistics.mean(each):.2f} ± {half:.2f}"


def half_width(share: float, count: int) -> float:
    """Return half the width of the normal 95% interval of a share of `count`."""
    return 1.96 * math.sqrt(share * (1 - share) / count)


def share_cell(share: float, count: int) -> str:
    return f"{share:.1%} ± {half_width(share, count):.1%}"


def mflops_of(name: str) -> str:
    """Return the operations of a trained letter of a run config, forward and backward,
    without the tables and projections of adaLN."""
    experiment, _ = load_runs()
    run_config = experiment.recipes[RECIPE][name]
    model = experiment.config(RECIPE, run_config, 0, run_config.untuned).model
    return f"{flops_per_token(model, model.block_size) / 1e6:.2f}"


def likelihood_table(rows: Rows, titles: dict[str, str]) -> list[str]:
    """Return the nats a molecule of each system."""
    lines = []
    for system, title in titles.items():
        measures = rows.get(system, {})
        cells = [title, "", "", ""]
        if measures:
            row = next(iter(measures.values()))
            name, rate = name_and_rate(row)
            cells = [title, f"{row['parameters']:,}", mflops_of(name), rate]
        for name in ("test", "scaffolds"):
            for order in ("l2r", "random"):
                row = measures.get(f"nats_{name}_{order}")
                impossible = {"gpt": "random", ENCODERS[0]: "l2r"}.get(system)
                cells.append("" if order == impossible else nats_cell(row))
        lines.append(cells)
    head = ["nats a molecule", "parameters", "MFLOPs a letter", "Muon's rate"]
    head += ["test, left to right", "test, any order"]
    head += ["scaffolds, left to right", "scaffolds, any order"]
    return markdown_table(head, lines)


def published_rows() -> dict[str, list[str]]:
    """Return the published values in the order of COLUMNS, by name."""
    values = {}
    for line in PUBLISHED.strip().splitlines():
        name, _, words = line.partition("|")
        values[name] = words.split()
    return values


def sample_rows(
    rows: Rows, titles: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each system and mode, and its row of the most samples."""
    for system, title in titles.items():
        measures = rows.get(system, {})
        for mode in MODES:
            row = most_samples(measures, mode)
            if row is not None:
                yield name_of(title, mode), row


def samples_table(rows: Rows, titles: dict[str, str]) -> list[str]:
    """Return the table of MOSES: published rows, the ruler's and those of samples."""
    lines = []
    for name, values in published_rows().items():
        parameters, epochs = SIZES.get(name, ("not counted", "not counted"))
        missing = len(COLUMNS) - len(values)  # no training molecule is novel
        cells = [*values, *[""] * missing]
        lines.append([f"{name} (published)", parameters, epochs, "30,000", "", *cells])
    ruler = json.loads((RESULTS / "ruler.json").read_text())
    measured = [f"{ruler[key]:.4f}" for key in list(COLUMNS)[:-1]]
    lines.append(
        ["training molecules (our measures)", "", "", f"{ruler['molecules']:,}"]
        + [f"{ruler['molecules']:,}", *measured, ""]
    )
    for name, row in sample_rows(rows, titles):
        cells = [f"{row[key]:.4f}" if key in row else "-" for key in COLUMNS]
        parameters = f"{row['parameters'] / 1e6:.2f}M"
        count = row["samples"]
        valid = round(count * row["valid"])
        lines.append([name, parameters, "0.25", f"{count:,}", f"{valid:,}", *cells])
    head = ["", "parameters", "epochs", "made", "of these valid", *COLUMNS.values()]
    return [*markdown_table(head, lines), "", COMPARABLE]


def name_of(title: str, mode: str) -> str:
    """Return a system and how it was sampled: a GPT has one order."""
    words = MODES[mode]
    return title if title.endswith(words) else f"{title}, {words}"


def costs_table(rows: Rows, titles: dict[str, str]) -> list[str]:
    """Return validity, passes and seconds by system and mode."""
    lines = []
    for name, row in sample_rows(rows, titles):
        valid = share_cell(row["valid"], row["samples"])
        lines.append([name, valid, f"{row['passes']:.1f}", f"{row['seconds']:.3f}"])
    head = ["samples", "valid", "passes a molecule", "seconds a molecule"]
    return markdown_table(head, lines)


def fillings_table(rows: Rows, titles: dict[str, str]) -> list[str]:
    """Return the shares of fillings that are valid, and that are the molecule: a row of
    each system and mode, two columns of each kind of hole."""
    head = ["filled in by"]
    for kind in HOLES:
        head += [f"{kind}: valid", f"{kind}: the molecule"]
    meanings = {}
    lines = []
    for system, title in titles.items():
        measures = rows.get(system, {})
        for mode, words in MODES.items():
            cells = []
            for kind in HOLES:
                row = measures.get(f"{kind}_{mode}")
                if row is None:
                    cells += ["", ""]
                    continue
                count = row["molecules"]
                meanings[kind] = (
                    f"*{kind}*: of {count:,} molecules {HOLES[kind]} is missing"
                )
                cells.append(share_cell(row["valid"], count))
                cells.append(share_cell(row["equal"], count))
            if any(cells):
                lines.append([f"{title}, {words}", *cells])
    return [*markdown_table(head, lines), "", f"{'; '.join(meanings.values())}."]


def joints_table(rows: Rows, titles: dict[str, str]) -> list[str]:
    """Return how far sums of single scores are from the exact joint, by number of
    letters."""
    lines = []
    for system, title in titles.items():
        row = rows.get(system, {}).get("joints")
        scores = row["rows"] if row else []
        for size in sorted({score["size"] for score in scores}):
            of_size = [score for score in scores if score["size"] == size]
            cells = [f"{title}, {size}"]
            cells.append(f"{statistics.mean(one['exact'] for one in of_size):.2f}")
            for name in ("averaged", "sum", "pseudo"):
                gaps = [one[name] - one["exact"] for one in of_size]
                half = t_quantile(len(gaps) - 1) * statistics.stdev(gaps)
                half /= math.sqrt(len(gaps))
                most = max(map(abs, gaps))
                cells.append(
                    f"{statistics.mean(gaps):+.3f} ± {half:.3f}, at most {most:.1f}"
                )
            lines.append(cells)
    head = ["letters", "exact log p", "mean over orders, minus exact"]
    head += ["sum of single scores, minus exact", "pseudo-likelihood, minus exact"]
    return markdown_table(head, lines)


# ---- drawings ------------------------------------------------------------------------


def drawing(examples: Sequence[Sequence[str]]) -> str:
    """Return an SVG of molecules: each true one, and beside it what was filled in; a
    filling that is no molecule is left blank."""
    from rdkit import Chem
    from rdkit.Chem import Draw

    molecules = []
    legends = []
    for masked, filling, truth in examples:
        molecules += [read_molecule(truth), read_molecule(filling) or Chem.Mol()]
        legends += [masked, filling]
    return Draw.MolsToGridImage(
        molecules, molsPerRow=4, subImgSize=(260, 200), legends=legends, useSVG=True
    )


def write_drawings(rows: Rows, folder: Path) -> list[str]:
    """Write a drawing of each kind of filling by the system whose fillings are valid
    most often; return the lines that show them."""
    lines = []
    for kind, words in HOLES.items():
        candidates = []
        for measures in rows.values():
            for measure, row in measures.items():
                if measure.partition("_")[0] == kind and "examples" in row:
                    candidates.append(row)
        if candidates:
            best = max(candidates, key=lambda row: row["valid"])
            file = folder / f"{kind}.svg"
            write_text(file, drawing(best["examples"][:DRAWN]))
            mode = MODES[best["measure"].partition("_")[2]]
            lines += [
                f"![{words}, filled in]({folder.name}/{file.name})",
                "",
                f"Missing: {words}. The first {DRAWN} test molecules, and right of "
                f"each its filling ({best['system']}, {mode}); nothing where it is no "
                "molecule.",
                "",
            ]
    return lines


# ---- the figure ----------------------------------------------------------------------


def figure(rows: Rows, titles: dict[str, str]) -> bytes:
    """Return a PNG: the shares of samples, and of filled holes, that are valid, by
    system and mode, with 95% intervals."""
    panels, (left, right) = new_figure(columns=2, size=(11, 3.6), sharey=True)
    systems = [system for system in titles if system in rows]
    for row, system in enumerate(systems):
        measures = rows[system]
        for mode in MODES:
            samples = most_samples(measures, mode)
            if samples is not None:
                draw_share(left, row, mode, samples["valid"], samples["samples"])
            hole = measures.get(f"hole_{mode}")
            if hole is not None:
                draw_share(right, row, mode, hole["valid"], hole["molecules"])
    for name in DRAWN_ROWS:
        share = 100 * float(published_rows()[name][0])
        left.axvline(share, color=COLORS[1], linestyle="--", linewidth=1)
        words = f"{name}\n(published)"
        left.text(share - 1, len(systems) - 0.35, words, ha="right", fontsize=8)
    left.set_yticks(range(len(systems)), [titles[system] for system in systems])
    left.set_ylim(len(systems) - 0.25, -0.6)
    left.set_xlabel("samples that are valid molecules, %")
    right.set_xlabel("holes of 3 to 8 letters whose filling is valid, %")
    for axes in (left, right):
        axes.set_xlim(0, 101)
        axes.grid(axis="x", alpha=0.3)
    by_label = {}  # each mode once, of both panels
    for axes in (left, right):
        handles, labels = axes.get_legend_handles_labels()
        by_label.update(zip(labels, handles, strict=True))
    panels.legend(
        by_label.values(), by_label, loc="outside lower center", ncols=3, fontsize=9
    )
    panels.suptitle(FINDING, fontweight="bold")
    return png(panels)


def draw_share(axes, row: int, mode: str, share: float, count: int) -> None:
    """Draw a share of `count` in percent, with its interval."""
    place = list(MODES).index(mode)
    axes.errorbar(
        100 * share,
        row + 0.1 * (place - 2.5),
        xerr=100 * half_width(share, count),
        fmt="o",
        color=COLORS[place],
        capsize=3,
        label=MODES[mode],
    )


# ---- the page ------------------------------------------------------------------------


def page(
    file: Path = RESULTS / "rows.jsonl", out: Path = PAGE, folder: Path = RESULTS
) -> None:
    """Write the page and its drawings from the rows of runs that are measured."""
    _, claims = load_runs()
    rows = reported_rows(file)
    titles = titles_of(rows)
    lines = [
        "# Molecules: which order writes them, and what can left to right not do?",
        "",
        ANSWER,
        "",
        "Three claims were committed before the first run (*confirmed*, *opposite*, "
        "*undecided*); all other numbers are *observed*. Scale: 0.8M parameters, a "
        "quarter of an epoch of MOSES. The model in the clone is the one with a "
        "[MASK]; [what it takes and what not](molecules_model/README.md).",
        "",
        *claim_lines(claims, rows),
        "",
    ]
    missing = [title for system, title in titles.items() if system not in rows]
    if missing:
        lines += [f"**Not run yet.** {'; '.join(missing)}.", ""]
    if rows:
        write_atomically(
            folder / FIGURE, lambda image: image.write(figure(rows, titles))
        )
        lines += [f"![{FINDING}]({folder.name}/{FIGURE})", ""]
        sections = {
            "How likely are test molecules?": likelihood_table,
            "Which order makes molecules?": costs_table,
            "Beside the published rows of MOSES": samples_table,
            "Filling in": fillings_table,
            "Exact joints beside sums of single scores": joints_table,
        }
        for title, make in sections.items():
            lines += [f"## {title}", "", *make(rows, titles), ""]
        lines += write_drawings(rows, folder)
    lines += [
        "## Setting",
        "",
        SETTING,
        "",
        f"**Not shown here.** {NOT_SHOWN}",
        "",
        "Repeat it: `python -m studies.molecules prepare --wheel FILE`, `train`, "
        "`measure RUN --wheel FILE`, `page` "
        "([studies/README.md](../studies/README.md)).",
        "",
    ]
    write_text(out, "\n".join(lines))
