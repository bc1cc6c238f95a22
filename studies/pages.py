"""The tables of an experiment and its part of results/findings.md, made from its JSON."""

import functools
import re
import statistics
from collections import Counter

from evaluation.text_measures import mean_and_reach
from runtime.outputs import markdown_table
from runtime.validation import read_results, read_toml
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.runs import ROOT
from studies.verdicts import figure_of

RESULTS = ROOT / "results" / "findings"
AFTER = "(asked after the runs)"  # at the end of such a claim


@functools.cache
def titles() -> dict[str, dict[str, str]]:
    return read_toml(ROOT / "studies" / "configs" / "findings" / "titles.toml")


def title_of(kind: str) -> str:
    """A loss or figure in words: eval_random_m8 -> any order, 8 orders. A name without a known
    part, such as that of a run config, stays as it is."""

    def words_of(part: str) -> str:
        for pattern, words in titles()["parts"].items():
            if match := re.fullmatch(pattern, part):
                return words.format(*match.groups())
        return part

    parts = kind.split("_")
    words = [words_of(part) for part in parts]
    by_parts = kind if words == parts else ", ".join(filter(None, words))
    return titles()["names"].get(kind, by_parts)


def tables(experiment: Experiment, found: dict) -> list[str]:
    """For each recipe the losses of the run configs, the verdicts, and the ratios."""
    lines = []
    for recipe, entries in found["recipes"].items():
        description = experiment.descriptions.get(recipe)
        lines += [f"**{recipe}**" + (f": {description}." if description else ""), ""]
        lines += [*losses_table(experiment, entries), ""]
        lines += [*claims_table(found["claims"][recipe]), ""]
        for ratio in found["ratios"][recipe]:
            lines += [f"{ratio['says']}: {mean_cell(ratio['values'])}", ""]
    return lines


def losses_table(experiment: Experiment, entries: dict[str, dict]) -> list[str]:
    """A line for each run config: losses and measures, means over seeds with the half-width of
    their 95% CI."""
    main, goal = experiment.kind, experiment.goal
    rows = [row for entry in entries.values() for row in entry["runs"]]
    kinds = [main] * any(main in row["losses"] for row in rows) + experiment.shown
    columns = {kind: title_of(kind) for kind in kinds}
    if any("excess" in row["measured"] for row in rows):
        columns["excess"] = "above the entropy"
    head = ["run config", *columns.values(), *[f"tokens to {goal}"] * (goal is not None)]
    head += ["parameters", "tuned"] * (not experiment.bench)
    lines = []
    for name, entry in entries.items():
        cells = [mean_cell([value_of(row, kind) for row in entry["runs"]]) for kind in columns]
        if goal is not None:
            cells.append(reached_cell(entry["runs"], main, goal))
        if not experiment.bench:
            cells += [f"{entry['parameters']:,}", tuned_cell(entry)]
        lines.append([name, *cells, entry["description"]])
    return markdown_table([*head, "description"], lines)


def reached_cell(rows: list[dict], kind: str, goal: float) -> str:
    """After how many tokens a loss reaches the goal, mean over the runs; a dash if one never
    does."""
    reached = mean_tokens_to(goal, rows, kind)
    if reached is None:
        return "-"
    # Below it at the first evaluation already: nobody knows since when.
    early = any(row["losses"][kind][0] <= goal for row in rows)
    return "at most " * early + f"{reached / 1e6:.2f}M"


def mean_tokens_to(goal: float, rows: list[dict], kind: str) -> float | None:
    """Mean over runs; None if one of them does not reach it."""
    reached = [tokens_to(goal, row, kind) for row in rows]
    return None if None in reached else statistics.mean(reached)


def tokens_to(goal: float, row: dict, kind: str) -> float | None:
    """Tokens at which a loss first reaches the goal, interpolated between two evaluations; None if
    it never does."""
    points = list(zip(row["tokens"], row["losses"].get(kind, ()), strict=False))
    for (tokens, loss), (before, higher) in zip(points, points[:1] + points, strict=False):
        if loss <= goal:
            share = (higher - goal) / (higher - loss) if higher > goal else 0
            return before + share * (tokens - before)
    return None


def value_of(row: dict, kind: str) -> float | None:
    found = figure_of(row, kind)
    return found.value if found else None


def mean_cell(values: list[float | None], form: str = ".4f") -> str:
    """A mean over seeds with the half-width of its 95% CI; a dash if a value is missing."""
    if not values or None in values:
        return "-"
    mean, half_width = mean_and_reach(values)
    return f"{mean:{form}}" + f" ± {half_width:{form}}" * (len(values) > 1)


def tuned_cell(entry: dict) -> str:
    """{"optim.lr": 0.001} -> "lr 0.001", and whether that is at the boundary of the grid."""
    words = ", ".join(f"{k.rpartition('.')[2]} {v:g}" for k, v in entry["tuned"].items())
    return words + " (boundary)" * entry["at_boundary"]


def claims_table(claims: list[dict]) -> list[str]:
    """A line for each claim. The difference is shown without the margin that its verdict allows."""
    lines = []
    for c in claims:
        mean = "-" if c["mean"] is None else f"{round(c['mean'] - c['margin'], 4) + 0.0:+.4f}"
        error = f"{c['error']:.4f}" if "error" in c else "-"
        monte_carlo, seeds = f"{c['monte_carlo_error']:.4f}", str(len(c["differences"]))
        lines.append([c["says"], c["verdict"], mean, error, monte_carlo, seeds])
    head = ["claim", "verdict", "mean difference", "standard error", "Monte Carlo error", "seeds"]
    return markdown_table(head, lines, left=2)


def page() -> str:
    """All experiments that have been run."""
    rows, sections, missing = [], [], []
    for name in experiment_names():
        file = RESULTS / f"{name}.json"
        if file.exists():
            experiment, found = load_experiment(name), read_results(file, "make it again")
            rows.append(overview(experiment, found))
            sections += section(experiment, found)
        else:
            missing.append(name)
    if missing:
        sections.append(f"Not run yet: {', '.join(missing)}.")
    table = markdown_table(["", "what is tested", "claims made before the runs"], rows, left=3)
    return "\n".join([(CONFIGS / "page.md").read_text(), *table, "", *sections]).rstrip() + "\n"


def overview(experiment: Experiment, found: dict) -> list[str]:
    """The cells of an experiment: the verdicts on the claims made before its runs, by recipe."""
    cells = []
    for recipe, claims in found["claims"].items():
        verdicts = Counter(c["verdict"] for c in claims if AFTER not in c["says"])
        counts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
        cells += [f"{recipe}: {counts}"] * bool(counts)
    # The anchor is as GitHub makes it from a heading.
    anchor = re.sub(r"[^\w -]", "", heading_of(experiment).lower()).replace(" ", "-")
    return [f"[{experiment.name}](#{anchor})", experiment.title, "; ".join(cells)]


def heading_of(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.title}"


def section(experiment: Experiment, found: dict) -> list[str]:
    origin = f"Commit {found['commit']}, torch {found['torch']}."
    figure = f"![{experiment.name}](findings/{experiment.name}.png)"
    lines = [f"## {heading_of(experiment)}", "", f"*Claim*: {experiment.source}", ""]
    lines += [f"*Setting*: {experiment.setting} {origin}", "", figure, ""]
    return [*lines, *tables(experiment, found), experiment.meaning.strip(), ""]
