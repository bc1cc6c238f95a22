"""The tables of an experiment and its part of results/findings.md, made from its JSON."""

import functools
import re
import statistics
from collections import Counter

from evaluation.text_measures import mean_and_reach
from runtime.outputs import markdown_table
from runtime.validation import damaged, read_results, read_toml
from studies.experiment import CONFIGS, Experiment, experiment_names, load_experiment
from studies.runs import ROOT
from studies.verdicts import figure_of

RESULTS = ROOT / "results" / "findings"
SHARES = (0.25, 0.5, 1.0)  # of the tokens, after which the table shows losses
AFTER = "(asked after the runs)"  # at the end of such a claim


@functools.cache
def titles() -> dict[str, dict[str, str]]:
    return read_toml(ROOT / "studies" / "configs" / "findings" / "titles.toml")


def title_of(kind: str) -> str:
    """A loss or figure in words: eval_random_m8 -> any order, 8 orders. A name without a known
    part, such as that of a run config, stays as it is."""

    def title_of_part(part: str) -> str:
        found = (
            (re.fullmatch(pattern, part), words) for pattern, words in titles()["parts"].items()
        )
        return next((words.format(*match.groups()) for match, words in found if match), part)

    words = [title_of_part(part) for part in kind.split("_")]
    by_parts = kind if words == kind.split("_") else ", ".join(filter(None, words))
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
        for name, row in found["helpers"].get(recipe, {}).items():
            losses = {kind: value_of(row, kind) for kind in ("l2r", "random")}
            cells = [f"{title_of(k)} {v:.4f}" for k, v in losses.items() if v is not None]
            described = experiment.helpers[recipe][name].description
            lines += [f"*{name}* ({described}): {', '.join(cells)}", ""]
    return lines


def losses_table(experiment: Experiment, entries: dict[str, dict]) -> list[str]:
    """A line for each run config: losses and figures, means over seeds with the half-width of their
    95% CI."""
    main, goal = experiment.kind, experiment.goal
    rows = [row for entry in entries.values() for row in entry["runs"]]
    shares = SHARES if any(main in row["losses"] for row in rows) else ()
    columns = {(main, share): f"{title_of(main)}, {share:.0%}" for share in shares}
    columns |= {(kind, 1.0): title_of(kind) for kind in experiment.shown}
    known = any("excess" in row["measured"] for row in rows)
    head = ["run config", *columns.values(), *[f"tokens to {goal}"] * (goal is not None)]
    head += ["above the entropy"] * known + ["parameters", "tuned"] * (not experiment.bench)
    lines = []
    for name, entry in entries.items():
        cells = [mean_cell([value_of(row, *kind) for row in entry["runs"]]) for kind in columns]
        if goal is not None:
            cells.append(reached_cell(entry["runs"], main, goal))
        if known:
            cells.append(mean_cell([value_of(row, "excess") for row in entry["runs"]]))
        if not experiment.bench:
            cells += [f"{entry['parameters']:,}", tuned_cell(entry)]
        lines.append([name, *cells, entry["description"]])
    return markdown_table([*head, "description"], lines)


def reached_cell(rows: list[dict], kind: str, goal: float) -> str:
    """After how many tokens a loss reaches the goal, mean over the runs; a dash if one never
    does."""
    reached = [tokens_to(goal, row, kind) for row in rows]
    if None in reached:
        return "-"
    # Below it at the first evaluation already: nobody knows since when.
    early = any(row["losses"][kind][0] <= goal for row in rows)
    return "at most " * early + f"{statistics.mean(reached) / 1e6:.2f}M"


def tokens_to(goal: float, row: dict, kind: str) -> float | None:
    """Tokens at which a loss first reaches the goal, interpolated between two evaluations; None if
    it never does."""
    before = None
    for tokens, loss in zip(row["tokens"], row["losses"].get(kind, ()), strict=False):
        if loss <= goal:
            if before is None:
                return tokens
            share = (before[1] - goal) / (before[1] - loss)
            return before[0] + share * (tokens - before[0])
        before = tokens, loss
    return None


def value_of(row: dict, kind: str, share: float = 1.0) -> float | None:
    found = figure_of(row, kind, share)
    return found.value if found else None


def mean_cell(values: list[float | None]) -> str:
    """A mean over seeds with the half-width of its 95% CI; a dash if a value is missing."""
    if not values or None in values:
        return "-"
    mean, half_width = mean_and_reach(values)
    return f"{mean:.4f}" if len(values) == 1 else f"{mean:.4f} ± {half_width:.4f}"


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
            with damaged(file, f"make it again: python -m studies.findings {name}"):
                experiment, found = load_experiment(name), read_results(file, "make it again")
                rows.append(overview(experiment, found))
                sections += section(experiment, found)
        else:
            missing.append(name)
    if missing:
        sections.append(f"Not run yet: {', '.join(missing)}.")
    head = ["", "what is tested", "claims made before the runs"]
    table = markdown_table(head, rows, left=3)
    return "\n".join([(CONFIGS / "page.md").read_text(), *table, "", *sections]).rstrip() + "\n"


def overview(experiment: Experiment, found: dict) -> list[str]:
    """The cells of an experiment: the verdicts on the claims made before its runs, by recipe."""
    cells = []
    for recipe, claims in found["claims"].items():
        verdicts = Counter(c["verdict"] for c in claims if AFTER not in c["says"])
        counts = [f"{n} {verdict}" for verdict, n in sorted(verdicts.items())]
        cells += [f"{recipe}: {', '.join(counts)}"] * bool(counts)
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
    lines += [*tables(experiment, found), experiment.meaning.strip(), ""]
    return [*lines, f"*At the paper's scale*: {found['at_scale']}", ""]
