"""The figures of experiments."""

import math
import statistics

from evaluation.text_measures import mean_and_reach
from runtime.outputs import log_x, new_figure, png
from studies.experiment import Experiment
from studies.pages import title_of, value_of

Entries = dict[str, dict]


def figure(experiment: Experiment, found: dict) -> bytes:
    """PNG with a panel for each recipe; for families, run configs whose names begin alike, a row
    for each recipe and a panel for each family."""
    panels = {}
    for recipe, entries in found["recipes"].items():
        panels[recipe] = {"": entries}
        if experiment.figure == "families":
            split = [(name.split("_", 1), entry) for name, entry in entries.items()]
            families = dict.fromkeys(family for (family, _), _ in split)
            panels[recipe] = {f: {n: e for (g, n), e in split if g == f} for f in families}
    most = max(map(len, panels.values()))
    rows, columns = (len(panels), most) if most > 1 else (1, len(panels))
    # A sweep's ends are far apart, and not every recipe reaches them; families differ by nature.
    shared = experiment.figure not in ("sweep", "families")
    size = (5.2 * columns, 4.2) if rows == 1 else (3.6 * columns, 3.3 * rows)
    drawing, grid = new_figure(rows, columns, size, squeeze=False, sharey=shared)
    for place, (recipe, of_recipe) in enumerate(panels.items()):
        cells = grid[place] if most > 1 else grid[0][place : place + 1]
        for axes in cells[len(of_recipe) :]:
            axes.set_axis_off()
        for axes, (family, entries) in zip(cells, of_recipe.items(), strict=False):
            DRAWINGS[experiment.figure](axes, experiment, entries)
            title = f"{experiment.name}, {recipe}" + f", {family}" * bool(family)
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
            many = len(axes.get_legend_handles_labels()[0]) > 6
            axes.legend(fontsize=7 if many else 8, ncols=1 + many)
    return png(drawing, dpi=130)


def draw_range(axes, x: list, values: list[tuple], *style, label: str, alpha=0.2, **more) -> None:
    """The mean of each tuple over x, and the range that it spans."""
    (line,) = axes.plot(x, [statistics.mean(v) for v in values], *style, label=label, **more)
    low, high = ([f(v) for v in values] for f in (min, max))
    axes.fill_between(x, low, high, color=line.get_color(), alpha=alpha, linewidth=0)


def draw_means(axes, points: list[tuple[float, dict, str]], **style) -> tuple:
    """Means and 95% CIs over seeds of (x, entry, kind), where there are any; returns the means."""
    found = [(x, *means) for x, entry, kind in points if (means := mean_over_seeds(entry, kind))]
    if not found:
        return ()
    x, y, bars = zip(*found, strict=True)
    axes.errorbar(x, y, yerr=bars, capsize=2, **style)
    return y


def mean_over_seeds(entry: dict, kind: str) -> tuple[float, float] | None:
    """Mean and half-width of the 95% CI of a figure; None if a run lacks it."""
    values = [value_of(row, kind) for row in entry["runs"]]
    if not values or None in values:
        return None
    mean, half_width = mean_and_reach(values)
    return mean, half_width if len(values) > 1 else 0.0


def draw_curves(axes, experiment: Experiment, entries: Entries) -> None:
    """The loss over tokens, mean and range over seeds; dashed, the least possible one, if known."""
    for name, entry in entries.items():
        rows = [row for row in entry["runs"] if row["tokens"]]
        values = list(zip(*(row["losses"][experiment.kind] for row in rows), strict=True))
        draw_range(axes, rows[0]["tokens"], values, label=title_of(name))
    if "excess" in rows[0]["measured"]:
        least = rows[0]["losses"]["training"][-1] - rows[0]["measured"]["excess"][0]
        axes.axhline(least, linestyle="--", color="black", linewidth=0.8, label="entropy")
    axes.set(xlabel="tokens", ylabel=f"{title_of(experiment.kind)}, nats per token")


def draw_sweep(axes, experiment: Experiment, entries: Entries) -> None:
    """Final losses over the x of the run configs."""
    x = {name: experiment.x[name] for name in entries if name in experiment.x}
    for kind in experiment.shown:
        points = [(x[name], entries[name], kind) for name in sorted(x, key=x.get)]
        draw_means(axes, points, marker="o", markersize=3, label=title_of(kind))
    axes.set(xlabel=experiment.x_label, ylabel="nats per token")


def draw_averages(axes, experiment: Experiment, entries: Entries) -> None:
    """Averages of the weights minus the last weights, over tokens: below 0 they are better. A color
    for each average, a style for each run config."""
    raw = next(kind for kind in experiment.shown if kind.endswith("_raw"))
    main, kinds = raw.removesuffix("_raw"), {k: k for k in experiment.shown if k != raw}
    kinds[main] = f"{main}_ema{experiment.base['optim']['ema_decay']:g}"
    for style, (name, entry) in zip(("-", "--", ":"), entries.items(), strict=False):
        for number, (kind, named) in enumerate(kinds.items()):
            losses = [(row["losses"][kind], row["losses"][raw]) for row in entry["runs"]]
            gaps = [[a - b for a, b in zip(*pair, strict=True)] for pair in losses]
            values, tokens = list(zip(*gaps, strict=True)), entry["runs"][0]["tokens"]
            label = f"{name}, {title_of(named).partition(', ')[2]}"
            draw_range(axes, tokens, values, style, label=label, alpha=0.12, color=f"C{number}")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="tokens", ylabel="averaged - last weights, nats per token")


def draw_lines(axes, experiment: Experiment, entries: Entries) -> None:
    """Figures over their x, a line for each run config; dashed, figures of a second name
    (planned_1024 beside peak_1024)."""
    prefixes, least = list(dict.fromkeys(k.rpartition("_")[0] for k in experiment.x)), math.inf
    for number, (name, entry) in enumerate(entries.items()):
        # hollow markers of different forms: lines may coincide
        style = {"marker": "osD^v<>"[number % 7], "fillstyle": "none", "label": name}
        for prefix in prefixes:
            of = {k: x for k, x in experiment.x.items() if k.rpartition("_")[0] == prefix}
            points = [(x, entry, kind) for kind, x in of.items()]
            means = draw_means(axes, points, color=f"C{number}", **style)
            least = min(least, *means, math.inf) if "label" in style else least
            style = {"linestyle": "--"}
    axes.set(xlabel=experiment.x_label, ylabel=experiment.y_label)
    log_x(axes, experiment.x.values())
    if experiment.bench:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.6 * least if least < math.inf else None)


def draw_points(axes, experiment: Experiment, entries: Entries) -> None:
    """The figures of `x`, or those shown, side by side, a point for each run config."""
    kinds = list(experiment.x) or experiment.shown
    for number, (name, entry) in enumerate(entries.items()):
        shift = 0.6 * (number / max(1, len(entries) - 1) - 0.5)
        points = [(place + shift, entry, kind) for place, kind in enumerate(kinds)]
        draw_means(axes, points, fmt="o", markersize=4, label=name)
    labels = [title_of(kind) for kind in kinds]
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=20, ha="right")
    axes.set(ylabel=experiment.y_label)


def draw_frontier(axes, experiment: Experiment, entries: Entries) -> None:
    """The judge's loss over entropy: a curve for each run config and setting, a point for each
    number of steps, the last one larger; a line at the entropy of the text."""
    for number, (name, entry) in enumerate(entries.items()):
        curves: dict[str, list] = {}
        kinds = [kind for kind in entry["runs"][0]["measured"] if kind.startswith("judge_")]
        for setting in (kind.removeprefix("judge_") for kind in kinds):
            point = [mean_over_seeds(entry, f"{what}_{setting}") for what in ("entropy", "judge")]
            if None not in point:
                curve = curves.setdefault(setting.rpartition("_")[0], [])
                curve.append([mean for mean, _ in point])
        for place, (setting, points) in enumerate(curves.items()):
            x, y = zip(*points, strict=True)
            style = {"color": f"C{number}", "marker": "osD^"[place % 4]}
            axes.plot(x, y, markersize=3, label=f"{name}, {title_of(setting)}", **style)
            axes.plot(x[-1], y[-1], markersize=7, **style)
        entropy, _ = mean_over_seeds(entry, "entropy_of_text")
    axes.axvline(entropy, linestyle="--", color="black", linewidth=0.8, label="the text")
    axes.margins(y=0.3)  # room for the legend
    axes.set(xlabel="unigram entropy, nats", ylabel="judge, nats per token; large: most steps")


DRAWINGS = {
    "curves": draw_curves,
    "families": draw_curves,
    "sweep": draw_sweep,
    "averages": draw_averages,
    "lines": draw_lines,
    "points": draw_points,
    "frontier": draw_frontier,
}
