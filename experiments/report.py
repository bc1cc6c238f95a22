"""What an experiment found, as a table, a figure and its part of the page results/findings.md: all
from its JSON, so that they cannot say anything else."""

from __future__ import annotations

import json
import statistics

from evaluation.text_measures import mean_and_reach
from experiments.arms import ROOT, crossing
from experiments.suite import Experiment, load_experiment, names
from runtime.reports import markdown_table, new_figure, png

RESULTS = ROOT / "results" / "findings"
SHARES = (0.25, 0.5, 1.0)  # of the tokens, at which the table shows losses
TITLES = {"own": "own orders", "l2r": "left to right", "random": "any order"}


def title_of(kind: str) -> str:
    return TITLES.get(kind, kind)


# ---- the table -----------------------------------------------------------------------------------


def tables(experiment: Experiment, found: dict) -> list[str]:
    """Of each recipe: the losses of the arms, and the verdicts."""
    lines = []
    for recipe, arms in found["recipes"].items():
        lines += [f"**{recipe}**", "", *losses_table(experiment, arms), ""]
        lines += [*claims_table(found["claims"][recipe]), ""]
    return lines


def losses_table(experiment: Experiment, arms: dict[str, dict]) -> list[str]:
    """A line for each arm: its losses, means over seeds with half a 95% interval."""
    main, goal = experiment.kind, experiment.goal
    head = ["arm", *(f"{title_of(main)}, {share:.0%}" for share in SHARES)]
    head += [title_of(kind) for kind in experiment.shown]
    known = any(arm["entropy"] for arm in arms.values())
    head += [f"tokens to {goal:g}"] * (goal is not None) + ["above the entropy"] * known
    head += ["tuned", "what it is"]
    rows = []
    for name, arm in arms.items():
        cells = [
            name,
            *(mean_cell([at(run, main, share) for run in arm["runs"]]) for share in SHARES),
        ]
        cells += [mean_cell([at(run, kind) for run in arm["runs"]]) for kind in experiment.shown]
        if goal is not None:
            reached = [crossing(lines_of(run, main), main, goal) for run in arm["runs"]]
            missing = None in reached
            cells.append("-" if missing else f"{statistics.mean(reached) / 1e6:.2f}M")
        if known:
            ends, entropy = [at(run, main) for run in arm["runs"]], arm["entropy"]
            told = entropy and None not in ends
            cells.append(mean_cell([end - entropy for end in ends]) if told else "-")
        rows.append([*cells, tuned_cell(arm["tuned"]), arm["why"]])
    return markdown_table(head, rows)


def lines_of(run: dict, kind: str) -> list[dict]:
    """The evaluations of a run, as `crossing` wants them."""
    losses = run["losses"].get(kind, [])
    return [{"tokens": n, kind: v} for n, v in zip(run["tokens"], losses, strict=True)]


def at(run: dict, kind: str, share: float = 1.0) -> float | None:
    """A loss of a run after a share of its tokens: at the first evaluation from there on. None
    where there is none."""
    if not run["tokens"] or kind not in run["losses"]:
        return None
    wanted = share * run["tokens"][-1]
    place = next(i for i, tokens in enumerate(run["tokens"]) if tokens >= wanted)
    return run["losses"][kind][place]


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
    head = ["claim", "verdict", "mean difference", "standard error", "of Monte Carlo", "seeds"]
    rows = []
    for c in claims:
        mean = "-" if c["mean"] is None else f"{c['mean']:+.4f}"
        error = f"{c['error']:.4f}" if "error" in c else "-"
        monte_carlo, seeds = f"{c['monte_carlo_error']:.4f}", str(len(c["differences"]))
        rows.append([c["says"], c["verdict"], mean, error, monte_carlo, seeds])
    return markdown_table(head, rows, left=2)


# ---- figures -------------------------------------------------------------------------------------


def figure(experiment: Experiment, found: dict) -> bytes:
    """PNG, a panel for each recipe, of what `experiment.figure` says."""
    recipes = found["recipes"]
    size = (5.2 * len(recipes), 4.2)
    drawing, grid = new_figure(1, len(recipes), size, squeeze=False, sharey=True)
    draw = {"curves": draw_curves, "sweep": draw_sweep, "averages": draw_averages}
    for axes, (recipe, arms) in zip(grid.flat, recipes.items(), strict=True):
        draw[experiment.figure](axes, experiment, arms)
        axes.set_title(f"{experiment.name}, {recipe}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return png(drawing, dpi=130)


def draw_curves(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """The loss of each arm over tokens: mean of the seeds, and the range they span."""
    for name, arm in arms.items():
        runs = [run for run in arm["runs"] if run["tokens"]]
        tokens = runs[0]["tokens"]
        values = list(zip(*(run["losses"][experiment.kind] for run in runs), strict=True))
        (line,) = axes.plot(tokens, [statistics.mean(v) for v in values], label=name)
        low, high = ([f(v) for v in values] for f in (min, max))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="tokens", ylabel=f"{title_of(experiment.kind)}, nats per token")


def draw_sweep(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Losses at the end over the value that the arms have: mean, 95% interval over seeds."""
    names_of = [name for name in arms if name in experiment.x]
    for kind in experiment.shown:
        x, y, bars = [], [], []
        for name in sorted(names_of, key=experiment.x.get):
            values = [at(run, kind) for run in arms[name]["runs"]]
            if None in values:
                continue
            mean, reach = mean_and_reach(values)
            x.append(experiment.x[name])
            y.append(mean)
            bars.append(reach if len(values) > 1 else 0)
        axes.errorbar(x, y, yerr=bars, marker="o", markersize=3, capsize=2, label=title_of(kind))
    axes.set(xlabel=experiment.x_label, ylabel="nats per token")


def draw_averages(axes, experiment: Experiment, arms: dict[str, dict]) -> None:
    """Averages of the weights against the last weights, over tokens: below 0 they are better."""
    for name, arm in arms.items():
        for kind in experiment.shown:
            runs = [run for run in arm["runs"] if kind in run["losses"]]
            raw = f"{kind.partition('_')[0]}_raw"
            gaps = [
                [a - b for a, b in zip(run["losses"][kind], run["losses"][raw], strict=True)]
                for run in runs
            ]
            means = [statistics.mean(values) for values in zip(*gaps, strict=True)]
            axes.plot(runs[0]["tokens"], means, label=f"{name}, {kind.partition('_')[2]}")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="tokens", ylabel="averaged - last weights, nats per token")


# ---- the page ------------------------------------------------------------------------------------

HEAD = """# Findings

What is claimed of any-order models, each claim tested by runs that two CPU cores make in minutes.

    python findings.py E1 --jobs 2     # train an experiment, or go on with it; write its part
    python findings.py page            # this page

**Rules.** A claim says that one loss is lower than another. Arms of a seed share batches and the
orders under which they are validated. *Reproduced*: the difference has the claimed sign with every
seed, and its mean is more than two standard errors (of seeds and of the Monte Carlo estimate
together) from 0. *Reversed*: the mirror image. Else *unresolved*. Every arm has its rate tuned,
over the same values as the others of its recipe, with seed 0 in runs of a quarter of the length.
Verdicts are computed; nobody writes them. Losses are in nats per token, of the averaged weights on
held-out text; `+-` is half a 95% interval.
"""


def section(experiment: Experiment, found: dict) -> list[str]:
    """The part of the page for an experiment."""
    return [
        f"## {experiment.name}: {experiment.title}",
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
    ]


def page() -> str:
    """All experiments that have been run, on one page."""
    lines, missing = [HEAD], []
    for name in names():
        file = RESULTS / f"{name}.json"
        if file.exists():
            lines += section(load_experiment(name), json.loads(file.read_text()))
        else:
            missing.append(name)
    if missing:
        lines.append(f"Not run yet: {', '.join(missing)}.")
    return "\n".join(lines).rstrip() + "\n"
