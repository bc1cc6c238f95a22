"""The figures of findings and tasks, drawn by one helper: a grid of panels, each with its curves or
points. `entries` are run configs by name, with the results of their seeds.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable

from aogpt.evaluation.text_measures import mean_and_half_width
from aogpt.runtime.outputs import COLORS, new_figure, png
from studies.experiment import Experiment
from studies.pages import FEW, title_of, unit_of, value_of

Entries = dict[str, dict]
# Places in COLORS, the same for a system everywhere: AO-GPT, GPT, encoder, two streams, and others.
SYSTEMS = {
    "aogpt": 0,
    "ours": 0,
    "random": 0,
    "uniform": 0,
    "any": 0,
    "l2r0": 0,
    "adaln": 0,
}
SYSTEMS |= {
    "gpt": 1,
    "l2r": 1,
    "time": 1,
    "encoder": 2,
    "two_stream": 3,
    "fixed": 4,
    "l2r10": 6,
}
LINES = ("-", "--", ":", "-.")
MARKERS = "osD^v<>Ph*"


def styles(experiment: Experiment, entries: Entries) -> dict[str, dict]:
    """By run config, the same in every panel of an experiment."""
    known = [name for recipe in experiment.recipes.values() for name in recipe]
    return styles_of(dict.fromkeys([*known, *entries]))


def styles_of(names: Iterable[str]) -> dict[str, dict]:
    """Color, line and marker of each run config: of a system its color, of its variants other lines
    and markers; of others the colors of no system."""
    systems = {}
    for name in names:
        parts = [part for part in (name, *re.split(r"\d*_", name)) if part in SYSTEMS]
        stem = re.sub(r"\d*(_.*)?$", "", name)
        systems[name] = parts[0] if parts else f"a kind of {stem}"  # l2r50 is not a GPT
    taken = {
        0,
        1,
        2,
        3,
        *(SYSTEMS[system] for system in systems.values() if system in SYSTEMS),
    }
    left = itertools.cycle([n for n in range(len(COLORS)) if n not in taken])
    numbers = dict(SYSTEMS)
    uses = Counter()
    styles = {}
    for name, system in systems.items():
        if system not in numbers:
            numbers[system] = next(left)
        color = numbers[system]
        use = uses[numbers[system]]
        uses[color] += 1
        marker = MARKERS[(color + use) % len(MARKERS)]
        styles[name] = {
            "color": COLORS[color],
            "linestyle": LINES[use % 4],
            "marker": marker,
        }
    return styles


def draw_panels(
    panels: dict[str, dict], draw: Callable, columns: int, **options
) -> bytes:
    """PNG: a panel for each title; draw(axes, entries) fills it."""
    rows = -(-len(panels) // columns)
    size = (
        4.8 * columns,
        (3.8 + 0.17 * max(map(len, panels.values()))) * rows,
    )  # a line a label
    drawing, grid = new_figure(rows, columns, size, squeeze=False, **options)
    for axes, (title, entries) in zip(grid.flat, panels.items(), strict=False):
        draw(axes, entries)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return png(drawing, dpi=120)


def figure(experiment: Experiment, recipes: dict[str, Entries]) -> bytes:
    """A panel for each recipe and, if the experiment has families, each family in it."""
    panels: dict[str, Entries] = {}
    for recipe, entries in recipes.items():
        for name, entry in entries.items():
            family = f", {name.split('_')[0]}" * experiment.families
            panels.setdefault(f"{experiment.name}, {title_of(recipe)}{family}", {})[
                name
            ] = entry

    draw = functools.partial(DRAWINGS[experiment.figure], experiment)
    # Other panels differ by nature, or not every recipe reaches the ends of a sweep.
    shared = experiment.figure in ("curves", "scatter") and not experiment.families
    return draw_panels(panels, draw, min(4, len(panels)), sharey=shared)


def label_of(name: str, entry: dict) -> str:
    return entry["description"] or title_of(name)


def draw_means(axes, points: list[tuple[float, dict, str]], **style) -> None:
    """Means and their bars at x of (x, entry, kind), where there are any."""
    found = [
        (x, *means)
        for x, entry, kind in points
        if (means := mean_and_bars(entry, kind))
    ]
    if found:
        x, y, below, above = zip(*found, strict=True)
        axes.errorbar(x, y, yerr=(below, above), capsize=2, **style)


def mean_and_bars(entry: dict, kind: str) -> tuple[float, float, float] | None:
    """Mean over seeds of a loss or measure and how far its 95% CI reaches below and above, or of
    few seeds their range; None if a run lacks it."""
    values = [value_of(row, kind) for row in entry["runs"]]
    if None in values:
        return None
    mean, half_width = mean_and_half_width(values)
    if len(values) < FEW:
        return mean, mean - min(values), max(values) - mean
    return mean, half_width, half_width


def draw_curves(experiment: Experiment, axes, entries: Entries) -> None:
    """The loss over tokens, mean and 95% CI over seeds, of few seeds the range; dashed, the least
    possible one, if known."""
    style_of = styles(experiment, entries)
    kind = re.sub("^(lowest|eval)_", "", experiment.kind)
    for name, entry in entries.items():
        rows = [row for row in entry["runs"] if row["tokens"]]
        of = kind if kind in rows[0]["losses"] else "training"
        means = []
        low = []
        high = []
        for values in zip(*(row["losses"][of] for row in rows), strict=True):
            mean, half = mean_and_half_width(values)
            few = len(values) < FEW
            means.append(mean)
            low.append(min(values) if few else mean - half)
            high.append(max(values) if few else mean + half)
        tokens = [n / 1e6 for n in rows[0]["tokens"]]
        style = style_of[name] | {"marker": ""}
        axes.plot(tokens, means, label=label_of(name, entry), **style)
        axes.fill_between(
            tokens, low, high, color=style["color"], alpha=0.2, linewidth=0
        )
    if "excess" in rows[0]["measured"]:
        least = rows[0]["losses"]["training"][-1] - rows[0]["measured"]["excess"][0]
        axes.axhline(
            least, linestyle="--", color="black", linewidth=0.8, label="entropy"
        )
    axes.set(xlabel="million tokens", ylabel=f"{title_of(of)}, nats per token")


def draw_lines(experiment: Experiment, axes, entries: Entries) -> None:
    """The losses shown over the `x` of the run configs, a line for each loss."""
    x = experiment.x
    titles = {kind: title_of(kind) for kind in experiment.shown}
    swept = sorted(x.keys() & entries.keys(), key=x.get)
    style_of = styles_of(titles.values())
    for kind, title in titles.items():  # hollow markers: lines may coincide
        points = [(x[name], entries[name], kind) for name in swept]
        draw_means(axes, points, fillstyle="none", label=title, **style_of[title])
    axes.set(xlabel=experiment.x_label, ylabel="nats per token")


def draw_points(experiment: Experiment, axes, entries: Entries) -> None:
    """The measures of `x`, or those shown, side by side, a point for each run config."""
    kinds = list(experiment.x) or experiment.shown
    style_of = styles(experiment, entries)
    for number, (name, entry) in enumerate(entries.items()):
        shift = 0.6 * (number / max(1, len(entries) - 1) - 0.5)
        points = [(place + shift, entry, kind) for place, kind in enumerate(kinds)]
        style = style_of[name] | {"linestyle": ""}
        draw_means(axes, points, markersize=4, label=label_of(name, entry), **style)
    labels = [title_of(kind) for kind in kinds]
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=20, ha="right")
    axes.set(ylabel="nats per token")


def draw_scatter(experiment: Experiment, axes, entries: Entries) -> None:
    """The first figure shown over the compared one, a point for each run config."""
    kinds = experiment.kind, experiment.shown[0]
    style_of = styles(experiment, entries)
    for name, entry in entries.items():
        style = style_of[name]
        (x, *x_bars), (y, *y_bars) = (mean_and_bars(entry, kind) for kind in kinds)
        style = style | {"linestyle": "", "capsize": 2, "label": label_of(name, entry)}
        axes.errorbar(
            x, y, xerr=[[b] for b in x_bars], yerr=[[b] for b in y_bars], **style
        )
    x, y = (f"{title_of(kind)}, nats per token" for kind in kinds)
    axes.set(xlabel=x, ylabel=y)


def draw_runs(experiment: Experiment, axes, entries: Entries) -> None:
    """The compared figure, a point for each run, since a mean says little of runs that succeed or
    fail."""
    style_of = styles(experiment, entries)
    for place, (name, entry) in enumerate(entries.items()):
        values = [value_of(row, experiment.kind) for row in entry["runs"]]
        values = sorted(value for value in values if value is not None)
        middle = (len(values) - 1) / 2
        places = [place + 0.6 * (n - middle) / len(values) for n in range(len(values))]
        style = style_of[name] | {"linestyle": "", "markersize": 4}
        axes.plot(places, values, label=label_of(name, entry), **style)
    axes.set_xticks(range(len(entries)), [""] * len(entries))
    title = title_of(experiment.kind)
    axes.set(
        xlabel="a point for each seed", ylabel=f"{title}, {unit_of(experiment.kind)}"
    )


DRAWINGS = {
    "curves": draw_curves,
    "lines": draw_lines,
    "points": draw_points,
    "scatter": draw_scatter,
    "runs": draw_runs,
}
