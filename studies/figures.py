"""The figures of findings and tasks, drawn by one helper: a grid of panels, each with its curves or
points. `entries` are run configs by name, with the results of their seeds.
"""

import functools
import statistics
from collections.abc import Callable

from evaluation.text_measures import mean_and_reach
from runtime.outputs import new_figure, png
from studies.experiment import Experiment
from studies.pages import title_of, value_of

Entries = dict[str, dict]


def draw_panels(panels: dict[str, dict], draw: Callable, columns: int, **options) -> bytes:
    """PNG: a panel for each title; draw(axes, entries) fills it."""
    rows = -(-len(panels) // columns)
    size = (4.8 * columns, 4.0 * rows)
    drawing, grid = new_figure(rows, columns, size, squeeze=False, **options)
    for axes, (title, entries) in zip(grid.flat, panels.items(), strict=False):
        draw(axes, entries)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        many = len(axes.get_legend_handles_labels()[0]) > 6
        axes.legend(fontsize=7, ncols=1 + many)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return png(drawing, dpi=120)


def figure(experiment: Experiment, found: dict) -> bytes:
    """A panel for each recipe and, if the experiment has families, each family in it."""
    panels: dict[str, Entries] = {}
    for recipe, entries in found["recipes"].items():
        for name, entry in entries.items():
            family = f", {name.split('_')[0]}" * experiment.families
            panels.setdefault(f"{experiment.name}, {recipe}{family}", {})[name] = entry

    draw = functools.partial(DRAWINGS[experiment.figure], experiment)
    # Panels of a line differ by nature, or not every recipe reaches the ends of a sweep.
    shared = experiment.figure != "lines" and not experiment.families
    return draw_panels(panels, draw, min(4, len(panels)), sharey=shared)


def draw_means(axes, points: list[tuple[float, dict, str]], **style) -> None:
    """Means and 95% CIs over seeds of (x, entry, kind), where there are any."""
    found = [(x, *means) for x, entry, kind in points if (means := mean_over_seeds(entry, kind))]
    if found:
        x, y, bars = zip(*found, strict=True)
        axes.errorbar(x, y, yerr=bars, capsize=2, **style)


def mean_over_seeds(entry: dict, kind: str) -> tuple[float, float] | None:
    """Mean and half-width of the 95% CI of a loss or measure; None if a run lacks it."""
    values = [value_of(row, kind) for row in entry["runs"]]
    if None in values:
        return None
    mean, half_width = mean_and_reach(values)
    return mean, half_width if len(values) > 1 else 0.0


def draw_curves(experiment: Experiment, axes, entries: Entries) -> None:
    """The loss over tokens, mean and range over seeds; dashed, the least possible one, if known."""
    for name, entry in entries.items():
        rows = [row for row in entry["runs"] if row["tokens"]]
        losses = list(zip(*(row["losses"][experiment.kind] for row in rows), strict=True))
        means, low, high = ([f(values) for values in losses] for f in (statistics.mean, min, max))
        (line,) = axes.plot(rows[0]["tokens"], means, label=title_of(name))
        axes.fill_between(rows[0]["tokens"], low, high, color=line.get_color(), alpha=0.2)
    if "excess" in rows[0]["measured"]:
        least = rows[0]["losses"]["training"][-1] - rows[0]["measured"]["excess"][0]
        axes.axhline(least, linestyle="--", color="black", linewidth=0.8, label="entropy")
    axes.set(xlabel="tokens", ylabel=f"{title_of(experiment.kind)}, nats per token")


def draw_lines(experiment: Experiment, axes, entries: Entries) -> None:
    """Over `x`: the losses of the run configs, a line for each loss; or measures, a line for each
    run config."""
    x = experiment.x
    if swept := sorted(x.keys() & entries.keys(), key=x.get):
        lines = {
            title_of(kind): [(x[name], entries[name], kind) for name in swept]
            for kind in experiment.shown
        }
    else:
        lines = {n: [(x[kind], entry, kind) for kind in x] for n, entry in entries.items()}
    for number, (label, points) in enumerate(lines.items()):  # hollow: lines may coincide
        draw_means(axes, points, marker="osD^v<>"[number % 7], fillstyle="none", label=label)
    axes.set(xlabel=experiment.x_label, ylabel=experiment.y_label)
    if experiment.bench:  # a tick at each value and nowhere else
        axes.set_xscale("log")
        ticks = sorted(set(x.values()))
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yscale("log")


def draw_points(experiment: Experiment, axes, entries: Entries) -> None:
    """The measures of `x`, or those shown, side by side, a point for each run config."""
    kinds = list(experiment.x) or experiment.shown
    for number, (name, entry) in enumerate(entries.items()):
        shift = 0.6 * (number / max(1, len(entries) - 1) - 0.5)
        points = [(place + shift, entry, kind) for place, kind in enumerate(kinds)]
        draw_means(axes, points, fmt="o", markersize=4, label=name)
    labels = [title_of(kind) for kind in kinds]
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=20, ha="right")
    axes.set(ylabel=experiment.y_label)


def draw_frontier(experiment: Experiment, axes, entries: Entries) -> None:
    """The judge's loss over entropy: a curve for each run config and setting, a point for each
    number of steps; a line at the entropy of the text."""
    for number, (name, entry) in enumerate(entries.items()):
        curves: dict[str, list] = {}
        for kind in entry["runs"][0]["measured"]:
            _, judge, setting = kind.rpartition("judge_")
            if judge:
                kinds = f"entropy_{setting}", kind
                point = [mean_over_seeds(entry, one)[0] for one in kinds]
                curves.setdefault(setting.rpartition("_")[0], []).append(point)
        for place, (setting, points) in enumerate(curves.items()):
            style = {"color": f"C{number}", "marker": "osD^"[place % 4], "markersize": 3}
            label = f"{name}, {title_of(setting)}"
            axes.plot(*zip(*points, strict=True), label=label, **style)
        entropy, _ = mean_over_seeds(entry, "entropy_of_text")
    axes.axvline(entropy, linestyle="--", color="black", linewidth=0.8, label="the text")
    axes.margins(y=0.3)  # room for the legend
    axes.set(xlabel="unigram entropy, nats", ylabel="judge, nats per token")


DRAWINGS = dict(curves=draw_curves, lines=draw_lines, points=draw_points, frontier=draw_frontier)
