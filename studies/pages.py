"""What an experiment found, as a table, a figure and its part of the page results/findings.md: all
from its JSON, so that they cannot say anything else."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter

from evaluation.text_measures import mean_and_reach
from runtime.reports import log_x, markdown_table, new_figure, png
from runtime.validation import damaged, read_results
from studies.experiments.arms import ROOT, crossing
from studies.experiments.suite import Experiment, load_experiment, names
from studies.experiments.verdicts import figure_of

RESULTS = ROOT / "results" / "findings"
SHARES = (0.25, 0.5, 1.0)  # of the tokens, at which the table shows losses
TITLES = {
    "seconds": "exponent of seconds",
    "forwards": "exponent of forwards",
    "peak": "exponent of the peak",
}
# What the parts of a name mean, between underscores: `title_of`.
PARTS = {
    "own": "own orders",
    "l2r": "left to right",
    "random": "any order",
    "fixed": "one random order",
    "raw": "last weights",
    "eval": "",
    r"ema(.+)": "average of {}",
    r"m(\d+)": "{} orders",
    r"g(\d+)": "groups of {}",
    r"t([\d.]+)": "T {}",
    r"p([\d.]+)": "top-p {}",
    r"mdm(\d+)": "{} steps",
    r"rouge(\d)": "ROUGE-{}",
    "rougel": "ROUGE-L",
    "nll": "loss",
    "passage": "last word",
    "low": "lower end over sentences",
    r"(\d+)": "{} tokens",
}


def title_of(kind: str) -> str:
    """A loss or figure in words: eval_random_m8 -> any order, 8 orders. What no part of is known,
    such as the name of an arm, stays as it is."""
    if kind in TITLES:
        return TITLES[kind]
    parts = kind.split("_")
    words = list(map(title_of_part, parts))
    return kind if words == parts else ", ".join(filter(None, words))


def title_of_part(part: str) -> str:
    for pattern, title in PARTS.items():
        if found := re.fullmatch(pattern, part):
            return title.format(*found.groups())
    return part


# ---- the table -----------------------------------------------------------------------------------


def tables(experiment: Experiment, found: dict) -> list[str]:
    """Of each recipe: the losses of the arms, the verdicts, and ratios."""
    lines = []
    for recipe, arms in found["recipes"].items():
        why = experiment.whys.get(recipe)
        lines += [f"**{recipe}**" + (f": {why}." if why else ""), ""]
        lines += [*losses_table(experiment, arms), ""]
        lines += [*claims_table(found["claims"][recipe]), ""]
        for ratio in found["ratios"][recipe]:
            values = ratio["values"]
            lines += [f"{ratio['says']}: {mean_cell(values)}", ""]
        for name, run in found["others"].get(recipe, {}).items():
            why = experiment.others(recipe)[name].why
            lines += [f"*{name}* ({why}): {loss_cells(run)}", ""]
    return lines


def loss_cells(run: dict) -> str:
    """The last losses of one run, left to right and in any order."""
    losses = {kind: at(run, kind) for kind in ("l2r", "random")}
    return ", ".join(f"{title_of(k)} {v:.4f}" for k, v in losses.items() if v is not None)


def losses_table(experiment: Experiment, arms: dict[str, dict]) -> list[str]:
    """A line for each arm: its losses and figures, means over seeds with half a 95% interval."""
    main, goal = experiment.kind, experiment.goal
    trained = any(main in run["losses"] for arm in arms.values() for run in arm["runs"])
    columns = {(main, share): f"{title_of(main)}, {share:.0%}" for share in SHARES if trained}
    columns |= {(kind, 1.0): title_of(kind) for kind in experiment.shown}
    known = any("excess" in run["measured"] for arm in arms.values() for run in arm["runs"])
    head = ["arm", *columns.values(), *[f"tokens to {goal}"] * (goal is not None)]
    head += ["above the entropy"] * known + ["parameters", "tuned"] * (not experiment.bench)
    head += ["what it is"]
    rows = []
    for name, arm in arms.items():
        if experiment.models and not any(m.is_of(name) for m in experiment.measures):
            continue  # an arm of the other experiment that this one does not ask about
        cells = [name]
        cells += [mean_cell([at(run, *column) for run in arm["runs"]]) for column in columns]
        if goal is not None:
            cells.append(reached_cell([lines_of(run, main) for run in arm["runs"]], main, goal))
        if known:
            cells.append(mean_cell([at(run, "excess") for run in arm["runs"]]))
        if not experiment.bench:
            edge = " (edge)" if arm["edge"] else ""
            cells += [f"{arm['parameters']:,}", tuned_cell(arm["tuned"]) + edge]
        rows.append([*cells, arm["why"]])
    return markdown_table(head, rows)


def reached_cell(runs: list[list[dict]], kind: str, goal: float) -> str:
    """After how many tokens a loss passes the goal, mean over the runs; a dash where one never
    does."""
    reached = [crossing(lines, kind, goal) for lines in runs]
    if None in reached:
        return "-"
    # Below it at the first evaluation already: when it came there nobody has seen.
    early = any(lines[0][kind] <= goal for lines in runs)
    return "at most " * early + f"{statistics.mean(reached) / 1e6:.2f}M"


def lines_of(run: dict, kind: str) -> list[dict]:
    """The evaluations of a run, as `crossing` wants them."""
    losses = run["losses"].get(kind, [])
    return [{"tokens": n, kind: v} for n, v in zip(run["tokens"], losses, strict=True)]


def at(run: dict, kind: str, share: float = 1.0) -> float | None:
    """The value of `figure_of`."""
    found = figure_of(run, kind, share)
    return found.value if found else None


def mean_cell(values: list[float | None]) -> str:
    """A mean over seeds with half its 95% interval; a dash where a value is missing."""
    if not values or None in values:
        return "-"
    mean, reach = mean_and_reach(values)
    return f"{mean:.4f}" if len(values) == 1 else f"{mean:.4f} +- {reach:.4f}"


def tuned_cell(tuned: dict) -> str:
    """What an arm was tuned to: {"optim.lr": 0.001} -> "lr 0.001"."""
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in tuned.items())


def claims_table(claims: list[dict]) -> list[str]:
    """A line for each claim. The difference is the one that was measured, without the margin that
    its verdict allows for."""
    head = ["claim", "verdict", "mean difference", "standard error", "of Monte Carlo", "seeds"]
    rows = []
    for c in claims:
        mean = "-" if c["mean"] is None else f"{round(c['mean'] - c['margin'], 4) + 0.0:+.4f}"
        error = f"{c['error']:.4f}" if "error" in c else "-"
        monte_carlo, seeds = f"{c['monte_carlo_error']:.4f}", str(len(c["differences"]))
        rows.append([c["says"], c["verdict"], mean, error, monte_carlo, seeds])
    return markdown_table(head, rows, left=2)


# ---- figures -------------------------------------------------------------------------------------


def figure(experiment: Experiment, found: dict) -> bytes:
    """PNG, a panel for each recipe, of what `experiment.figure` says; of families a row for each
    recipe, and in it a panel for each family."""
    recipes = found["recipes"]
    of_recipe = {recipe: families(experiment, arms) for recipe, arms in recipes.items()}
    most = max(map(len, of_recipe.values()))
    rows, columns = (len(recipes), most) if most > 1 else (1, len(recipes))
    # The ends of a sweep are far away, and not every recipe goes there; families differ by nature.
    shared = experiment.figure not in ("sweep", "families")
    size = (5.2 * columns if rows == 1 else 3.6 * columns, 4.2 if rows == 1 else 3.3 * rows)
    drawing, grid = new_figure(rows, columns, size, squeeze=False, sharey=shared)
    panels = []
    for recipe, of_family in of_recipe.items():
        title = f"{experiment.name}, {recipe}"
        panels += [(title + f", {name}" * bool(name), arms) for name, arms in of_family.items()]
        panels += [("", {})] * (most - len(of_family))
    for axes, (title, arms) in zip(grid.flat, panels, strict=True):
        if not arms:  # a recipe that has fewer families than others
            axes.set_axis_off()
            continue
        DRAWINGS[experiment.figure](axes, experiment, arms)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        many = len(axes.get_legend_handles_labels()[0]) > 6
        axes.legend(fontsize=7 if many else 8, ncols=1 + many)
    return png(drawing, dpi=130)


def families(experiment: Experiment, arms: dict[str, dict]) -> dict[str, dict]:
    """The arms of each panel of a recipe: all; of families those whose names begin alike."""
    if experiment.figure != "families":
        return {"": arms}
    found: dict[str, dict] = {}
    for name, arm in arms.items():
        family, _, rest = name.partition("_")
        found.setdefault(family, {})[rest] = arm
    return found


def draw_curves(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """The loss of each arm over tokens: mean of the seeds, and the range they span; dashed, the
    least that is possible, where it is known."""
    for name, arm in arms.items():
        runs = [run for run in arm["runs"] if run["tokens"]]
        tokens = runs[0]["tokens"]
        values = list(zip(*(run["losses"][experiment.kind] for run in runs), strict=True))
        (line,) = axes.plot(tokens, [statistics.mean(v) for v in values], label=title_of(name))
        low, high = ([f(v) for v in values] for f in (min, max))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if "excess" in runs[0]["measured"]:
        least = runs[0]["losses"]["own"][-1] - runs[0]["measured"]["excess"][0]
        axes.axhline(least, linestyle="--", color="black", linewidth=0.8, label="entropy")
    axes.set(xlabel="tokens", ylabel=f"{title_of(experiment.kind)}, nats per token")


def draw_sweep(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Losses at the end over the value that the arms have: mean, 95% interval over seeds."""
    names_of = [name for name in arms if name in experiment.x]
    for kind in experiment.shown:
        points = {experiment.x[name]: mean_over_seeds(arms[name], kind) for name in names_of}
        x = sorted(place for place, means in points.items() if means is not None)
        y, bars = zip(*(points[place] for place in x), strict=True)
        axes.errorbar(x, y, yerr=bars, marker="o", markersize=3, capsize=2, label=title_of(kind))
    axes.set(xlabel=experiment.x_label, ylabel="nats per token")


def draw_averages(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Averages of the weights against the last weights, over tokens: below 0 they are better. Means
    of the seeds, and the ranges they span; a colour for each average, a style for each arm."""
    raw = next(kind for kind in experiment.shown if kind.endswith("_raw"))
    main = raw.removesuffix("_raw")
    kinds = [kind for kind in experiment.shown if kind != raw]
    for style, (name, arm) in zip(("-", "--", ":"), arms.items(), strict=False):
        tokens = arm["runs"][0]["tokens"]
        for number, kind in enumerate(kinds):
            losses = [(run["losses"][kind], run["losses"][raw]) for run in arm["runs"]]
            gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in losses]
            values = list(zip(*gaps, strict=True))
            of_main = f"{main}_ema{experiment.base['optim']['ema_decay']:g}"
            label = f"{name}, {title_of(of_main if kind == main else kind).partition(', ')[2]}"
            means = [statistics.mean(v) for v in values]
            axes.plot(tokens, means, style, color=f"C{number}", label=label)
            low, high = ([f(v) for v in values] for f in (min, max))
            axes.fill_between(tokens, low, high, color=f"C{number}", alpha=0.12, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="tokens", ylabel="averaged - last weights, nats per token")


def draw_lines(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Figures over the value that each of them has, a line for every arm; dashed, where figures of
    a second name have values (planned_1024 beside peak_1024)."""
    first, *second = dict.fromkeys(kind.rpartition("_")[0] for kind in experiment.x)
    least = math.inf
    for number, (name, arm) in enumerate(arms.items()):
        for of_name in (first, *second):
            points = {
                experiment.x[kind]: means
                for kind in experiment.x
                if kind.rpartition("_")[0] == of_name
                and (means := mean_over_seeds(arm, kind)) is not None
            }
            if not points:
                continue
            y, bars = zip(*points.values(), strict=True)
            style = {"linestyle": "--"}
            if of_name == first:
                # Hollow, and of different forms: lines may lie upon each other.
                style = {"marker": "osD^v<>"[number % 7], "fillstyle": "none", "label": name}
                least = min(least, *y)
            axes.errorbar([*points], y, yerr=bars, color=f"C{number}", capsize=2, **style)
    axes.set(xlabel=experiment.x_label, ylabel=experiment.y_label)
    log_x(axes, experiment.x.values())
    if experiment.bench:
        axes.set_yscale("log")
        if least < math.inf:
            axes.set_ylim(bottom=0.6 * least)


def draw_points(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """The figures shown, or those of `x`, one beside the other, a point for every arm that has
    them."""
    kinds = list(experiment.x) or experiment.shown
    for number, (name, arm) in enumerate(arms.items()):
        shift = 0.6 * (number / max(1, len(arms) - 1) - 0.5)
        points = {
            place: means
            for place, kind in enumerate(kinds)
            if (means := mean_over_seeds(arm, kind)) is not None
        }
        x, y = [place + shift for place in points], [mean for mean, _ in points.values()]
        bars = [reach for _, reach in points.values()]
        axes.errorbar(x, y, yerr=bars, fmt="o", markersize=4, capsize=2, label=name)
    labels = [title_of(kind) for kind in kinds]
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=20, ha="right")
    axes.set(ylabel=experiment.y_label)


def draw_frontier(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Perplexity under the judge over entropy: a curve of every arm and setting, a point for each
    number of steps, the last one the largest; a line where the text is."""
    for number, (name, arm) in enumerate(arms.items()):
        kinds = [kind for kind in arm["runs"][0]["measured"] if kind.startswith("judge_")]
        curves: dict[str, list] = {}
        for kind in kinds:
            setting = kind.removeprefix("judge_")
            point = [mean_over_seeds(arm, f"{what}_{setting}") for what in ("entropy", "judge")]
            if None not in point:
                curves.setdefault(setting.rpartition("_")[0], []).append(
                    [mean for mean, _ in point]
                )
        for place, (setting, points) in enumerate(curves.items()):
            x, y = zip(*points, strict=True)
            style = {"color": f"C{number}", "marker": "osD^"[place % 4]}
            axes.plot(x, y, markersize=3, label=f"{name}, {title_of(setting)}", **style)
            axes.plot(x[-1], y[-1], markersize=7, **style)
    of_text = (mean_over_seeds(arm, "entropy_of_text") for arm in arms.values())
    entropy, _ = next(filter(None, of_text))  # arms that are not measured have none
    axes.axvline(entropy, linestyle="--", color="black", linewidth=0.8, label="the text")
    axes.margins(y=0.3)  # room for the legend
    axes.set(xlabel="unigram entropy, nats", ylabel="judge, nats per token; large: most steps")


def mean_over_seeds(arm: dict, kind: str) -> tuple[float, float] | None:
    """Mean and half a 95% interval of a figure at the end of an arm's runs; None where one of them
    has none."""
    values = [at(run, kind) for run in arm["runs"]]
    if not values or None in values:
        return None
    mean, reach = mean_and_reach(values)
    return mean, reach if len(values) > 1 else 0.0


DRAWINGS = {
    "curves": draw_curves,
    "families": draw_curves,
    "sweep": draw_sweep,
    "averages": draw_averages,
    "lines": draw_lines,
    "points": draw_points,
    "frontier": draw_frontier,
}

# ---- the page ------------------------------------------------------------------------------------

HEAD = """# Findings

What is claimed of any-order models, each claim tested by runs of minutes on a CPU core.

    python -m studies.findings E1 --jobs 2     # train an experiment, or go on with it; write its part
    python -m studies.findings page            # this page

**Rules.** A claim says that one figure is lower than another, a loss if nothing else is said; it is
the paper's or one of our own. Arms of a seed share batches and the orders under which they are
validated; of a benchmark its repeats stand in place of seeds. *Mean difference*: the higher side
less the lower one, above 0 if it is as claimed. *Reproduced*: it is so with every seed, and the
mean is more than two standard errors (of seeds and of the Monte Carlo estimates together) from 0.
*Reversed*: the mirror image. Else *unresolved*; and so where neither loss has come a tenth of a nat
below the entropy of single tokens, *(plateau)*. Two standard errors of three seeds are less than a
95% interval, which takes 4.3: mind the error where a difference is only just beyond. That something
is *as good, within* a margin says that it is worse by less than that: the table shows the
difference, the verdict is of the difference and the margin together. Every arm has its rate tuned
by its runs with seed 0, over the same values as the others of its recipe: the middle one and its
two neighbours, then on for as long as the loss falls; *(edge)*: beyond them it might fall further.
The run with the rate that is chosen so is one of the seeds. Verdicts are computed; nobody writes
them. Losses are in nats per token, if nothing else is said, of the averaged weights on held-out
text, the same 256 blocks, or as many as a setting says, for all seeds: no interval tells what other
text would change. `+-` is half a 95% interval over seeds; *of Monte Carlo* the part of a standard
error that comes from the orders and masks that were drawn, as if those of two arms were
independent, and 0 where nothing was drawn or the error was not estimated (of last weights and of
other averages than the first).
"""


def heading_of(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.title}"


def section(experiment: Experiment, found: dict) -> list[str]:
    """The part of the page for an experiment."""
    return [
        f"## {heading_of(experiment)}",
        "",
        f"*Claim*: {experiment.source}",
        "",
        f"*Setting*: {experiment.setting} Commit {found['commit']}, torch {found['torch']}.",
        "",
        f"![{experiment.name}](findings/{experiment.name}.png)",
        "",
        *tables(experiment, found),
        experiment.meaning.strip(),
        "",
        f"*At the paper's scale*: {found['at_scale']}",
        "",
    ]


AFTER = "(asked after the runs)"  # ends what such a claim says


def overview(read: list[tuple[Experiment, dict]]) -> list[str]:
    """A line for each experiment: how many of the claims that were written before its runs came to
    which verdict, under each recipe."""
    rows = []
    for experiment, found in read:
        # As GitHub makes it of a heading.
        anchor = re.sub(r"[^\w -]", "", heading_of(experiment).lower()).replace(" ", "-")
        cells = []
        for recipe, claims in found["claims"].items():
            verdicts = Counter(c["verdict"] for c in claims if AFTER not in c["says"])
            counts = [f"{n} {verdict}" for verdict, n in sorted(verdicts.items())]
            cells += [f"{recipe}: {', '.join(counts)}"] * bool(counts)
        rows.append([f"[{experiment.name}](#{anchor})", experiment.title, "; ".join(cells)])
    head = ["", "what is tested", "claims written before the runs"]
    return [*markdown_table(head, rows, left=3), ""]


def page() -> str:
    """All experiments that have been run, on one page."""
    read, lines, missing = [], [], []
    for name in names():
        file = RESULTS / f"{name}.json"
        if file.exists():
            with damaged(file, f"make it again: python -m studies.findings {name}"):
                read.append((load_experiment(name), read_results(file, "make it again")))
                lines += section(*read[-1])
        else:
            missing.append(name)
    if missing:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join([HEAD, *overview(read), *lines]).rstrip() + "\n"
