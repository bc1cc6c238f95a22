"""The figures of findings: a grid of panels, each with curves or points.
`entries` are run configs by name, with the results of their seeds.
"""

import io
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from studies.drawing import COLORS, new_figure, png
from studies.experiment import Experiment
from studies.measures import mean_and_half_width
from studies.pages import FEW, title_of, token_of, unit_of, value_of

Entries = dict[str, dict]
PALETTE = [*COLORS, "#882255", "#999999", "#7A4A1E", "#332288"]
PALETTE += ["#44AA99", "#BBAA33", "#AA4499", "#661100"]
# Places in PALETTE, the same for a system in all figures.
SYSTEMS = {
    "aogpt": 0,
    "ours": 0,
    "random": 0,
    "uniform": 0,
    "any": 0,
    "l2r0": 0,
    "rotary": 0,
    "gpt": 1,
    "l2r": 1,
    "time": 1,
    "encoder": 2,
    "two_stream": 3,
    "fixed": 4,
    "adaln": 5,
    "l2r10": 6,
    "mask_query": 8,
}
MARKERS = "osD^v<>Ph*Xd"
BAR = "Large markers and bars: mean of the seeds and its 95% interval"
BAND = "Line and band: mean of the seeds and its 95% interval"
FEW_SEEDS = f" (of fewer than {FEW} seeds their range). "
DOTS = "Small dots: single seeds"


# ---- parts of all figures ------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    color: str
    marker: str
    line: str


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return the style of each run config of a panel: a system has its color; its
    variants, which are dashed, and others have colors that no system has, as long as
    there are some."""
    places: dict[str, int] = {}
    for name in names:
        place = system_of(name)
        if place is not None and place not in places.values():
            places[name] = place
    taken = set(SYSTEMS.values())
    free = [place for place in range(len(PALETTE)) if place not in taken]
    free += sorted(taken)
    styles = {}
    for number, name in enumerate(names):
        line = "-"
        if name not in places:
            places[name] = next(n for n in free if n not in places.values())
            if system_of(name) is not None:
                line = "--"
        color = PALETTE[places[name]]
        styles[name] = Style(color, MARKERS[number % len(MARKERS)], line)
    return styles


def system_of(name: str) -> int | None:
    """Return the color of the system that a run config is a variant of, if of any."""
    if name in SYSTEMS:
        return SYSTEMS[name]
    for system in ("two_stream", "mask_query"):
        if name.startswith(system):
            return SYSTEMS[system]
    parts = name.split("_")
    return SYSTEMS.get(parts[0], SYSTEMS.get(parts[-1]))


@dataclass(frozen=True)
class Panel:
    """The run configs of a recipe that are drawn together."""

    experiment: Experiment
    recipe: str
    entries: Entries

    @property
    def loss_unit(self) -> str:
        return f"nats per {token_of(self.experiment, self.recipe, self.entries)}"

    def unit_of(self, kind: str) -> str:
        return unit_of(kind, self.experiment, self.recipe, self.entries)


def draw_panels(
    panels: dict[str, Panel], draw: Callable, columns: int, caption: str, sharey: bool
) -> bytes:
    """Return a PNG with a panel for each title, which draw(axes, panel) fills, and a
    caption that says what bars and bands are."""
    rows = -(-len(panels) // columns)
    labels = max(len(panel.entries) for panel in panels.values())
    height = 3.8 + 0.17 * labels
    drawing, grid = new_figure(
        rows,
        columns,
        size=(4.8 * columns, height * rows + 0.4),
        squeeze=False,
        sharey=sharey,
    )
    drawing.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    places = list(grid.flat)
    for axes, (title, panel) in zip(places, panels.items(), strict=False):
        draw(axes, panel)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelleft=True)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axes in places[len(panels) :]:
        axes.remove()
    return with_caption(drawing, caption, columns)


def with_caption(drawing, caption: str, columns: int) -> bytes:
    """Return a figure with a caption as a PNG, with a palette, which is a third of the
    size."""
    from PIL import Image

    wrapped = textwrap.fill(caption, 72 * columns)
    drawing.supxlabel(wrapped, fontsize=8)
    image = Image.open(io.BytesIO(png(drawing, dpi=120)))
    palette = image.convert("RGB").quantize(
        method=Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE
    )
    file = io.BytesIO()
    palette.save(file, format="png", optimize=True)
    return file.getvalue()


def label_of(name: str, entry: dict) -> str:
    return entry["description"] or title_of(name)


def values_of(entry: dict, kind: str) -> list[float]:
    """Return a loss or measure of the seeds that have it."""
    values = [value_of(row, kind) for row in entry["runs"]]
    return [value for value in values if value is not None]


def interval_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95% interval of a mean, or of few values their range."""
    if len(values) < FEW:
        return min(values), max(values)
    mean, half_width = mean_and_half_width(values)
    return mean - half_width, mean + half_width


def draw_mean(axes, x: float, values: list[float], label: str, style: Style) -> None:
    """Draw the mean of some seeds with its interval, and to the right of it each
    seed."""
    from matplotlib.transforms import ScaledTranslation

    mean = statistics.mean(values)
    low, high = interval_of(values)
    axes.errorbar(
        x,
        mean,
        yerr=[[mean - low], [high - mean]],
        label=label,
        color=style.color,
        marker=style.marker,
        markersize=5,
        linestyle="",
        capsize=2,
    )
    aside = ScaledTranslation(0.07, 0, axes.figure.dpi_scale_trans)  # inches
    axes.plot(
        [x] * len(values),
        values,
        ".",
        color=style.color,
        markersize=3,
        alpha=0.7,
        transform=axes.transData + aside,
    )
    axes.update_datalim([(x, value) for value in values])  # such dots do not count
    axes.autoscale_view()


# ---- figures of findings -------------------------------------------------------------


def figure(experiment: Experiment, recipes: dict[str, Entries]) -> bytes:
    """Return a panel for each recipe and, if the experiment has families, for each
    family in it."""
    panels: dict[str, Panel] = {}
    for recipe, entries in recipes.items():
        for name, entry in entries.items():
            title = f"{experiment.name}, {title_of(recipe)}"
            if experiment.families:
                title += f",\n{title_of(name.split('_')[0])}"
            panel = panels.setdefault(title, Panel(experiment, recipe, entries={}))
            panel.entries[name] = entry
    draw, caption = DRAWINGS[experiment.figure]
    if experiment.figure_top is not None:
        caption += f" Losses above {experiment.figure_top} are cut off."
    # Other panels differ by nature, or not every recipe reaches the ends of a sweep.
    is_comparable = experiment.figure in ("curves", "scatter")
    shares_axis = is_comparable and experiment.figure_shares_axis
    return draw_panels(
        panels,
        draw,
        columns=min(4, len(panels)),
        caption=caption,
        sharey=shares_axis and not experiment.families,
    )


def draw_curves(axes, panel: Panel) -> None:
    """Draw the loss over tokens, and at the end that of each seed; dotted, the least
    possible one, if known. Where all run configs draw another loss than the compared
    one, the axis names it, and else their labels do."""
    experiment = panel.experiment
    entries = panel.entries
    kind = re.sub("^(lowest|eval)_", "", experiment.kind)
    kinds = [experiment.figure_losses.get(name, kind) for name in entries]
    if len(set(kinds)) == 1:
        kind = kinds[0]
    # A run config has one colour in all panels.
    names: dict[str, None] = {}
    for run_configs in experiment.recipes.values():
        names.update(dict.fromkeys(run_configs))
    names.update(dict.fromkeys(entries))
    styles = styles_of(names)
    for number, (name, entry) in enumerate(entries.items()):
        rows = [row for row in entry["runs"] if row["tokens"]]
        if kind not in rows[0]["losses"]:
            kind = "training"
        label = label_of(name, entry)
        drawn = experiment.figure_losses.get(name, kind)
        if drawn != kind:
            label += f": {title_of(drawn)}"
        draw_curve(axes, rows, drawn, label, styles[name], number)
    first = rows[0]
    excess = first["measured"].get("excess")
    if excess:
        axes.axhline(
            first["losses"]["training"][-1] - excess[0],
            label="entropy: the least loss possible",
            linestyle=":",
            color="black",
            linewidth=0.8,
        )
    axes.set_xlabel("tokens to predict, millions")
    axes.set_ylabel(f"loss, {title_of(kind)}, {panel.loss_unit}")
    if experiment.figure_top is not None:
        axes.set_ylim(top=experiment.figure_top)


def draw_curve(
    axes, rows: list[dict], kind: str, label: str, style: Style, number: int
) -> None:
    """Draw the mean loss of some runs and its band, and the runs beside the end;
    `number` is that of the run config."""
    means = []
    lows = []
    highs = []
    losses = [row["losses"][kind] for row in rows]
    for values in zip(*losses, strict=True):
        low, high = interval_of(values)
        means.append(statistics.mean(values))
        lows.append(low)
        highs.append(high)
    tokens = [count / 1e6 for count in rows[0]["tokens"]]
    axes.plot(tokens, means, label=label, color=style.color, linestyle=style.line)
    axes.fill_between(tokens, lows, highs, color=style.color, alpha=0.15, linewidth=0)
    ends = [row["losses"][kind][-1] for row in rows]
    beside = tokens[-1] * (1.03 + 0.015 * number)
    axes.plot([beside] * len(ends), ends, ".", color=style.color, markersize=3)


def draw_lines(axes, panel: Panel) -> None:
    """Draw the losses shown over the `x` of the run configs, a line for each loss."""
    experiment = panel.experiment
    entries = panel.entries
    places = experiment.x
    names = [name for name in places if name in entries]
    names.sort(key=places.get)
    styles = styles_of(experiment.shown)
    for kind in experiment.shown:
        label = title_of(kind)
        means = []
        for name in names:
            values = values_of(entries[name], kind)
            means.append(statistics.mean(values))
            draw_mean(axes, places[name], values, label, styles[kind])
            label = "_"  # not in the legend again
        xs = [places[name] for name in names]
        axes.plot(xs, means, color=styles[kind].color)
    axes.set_xlabel(experiment.x_label)
    axes.set_ylabel(f"loss, {panel.loss_unit}")


def draw_points(axes, panel: Panel) -> None:
    """Draw the measures of `x`, or those shown, side by side, a mean for each run
    config."""
    experiment = panel.experiment
    entries = panel.entries
    kinds = list(experiment.x) or experiment.shown
    styles = styles_of(entries)
    last = max(1, len(entries) - 1)
    for number, (name, entry) in enumerate(entries.items()):
        label = label_of(name, entry)
        for place, kind in enumerate(kinds):
            values = values_of(entry, kind)
            if values:
                x = place + 0.6 * (number / last - 0.5)
                draw_mean(axes, x, values, label, styles[name])
                label = "_"  # not in the legend again
    titles = [title_of(kind) for kind in kinds]
    axes.set_xticks(range(len(kinds)), titles, fontsize=8)
    axes.set_xlim(-0.5, len(kinds) - 0.5)
    axes.set_ylabel(f"loss, {panel.loss_unit}")


def draw_scatter(axes, panel: Panel) -> None:
    """Draw the first figure shown over the compared one, a mean for each run config."""
    experiment = panel.experiment
    entries = panel.entries
    styles = styles_of(entries)
    other = experiment.shown[0]
    for name, entry in entries.items():
        xs = values_of(entry, experiment.kind)
        ys = values_of(entry, other)
        x = statistics.mean(xs)
        y = statistics.mean(ys)
        left, right = interval_of(xs)
        low, high = interval_of(ys)
        axes.errorbar(
            x,
            y,
            xerr=[[x - left], [right - x]],
            yerr=[[y - low], [high - y]],
            label=label_of(name, entry),
            color=styles[name].color,
            marker=styles[name].marker,
            linestyle="",
            capsize=2,
        )
        axes.plot(xs, ys, ".", color=styles[name].color, markersize=3)
    axes.set_xlabel(axis_label(panel, experiment.kind))
    axes.set_ylabel(axis_label(panel, other))


def axis_label(panel: Panel, kind: str) -> str:
    """Return what an axis shows of a loss or another figure, with its unit if it has
    one."""
    unit = panel.unit_of(kind)
    words = [title_of(kind), unit]
    if unit == panel.loss_unit:
        words.insert(0, "loss")
    return ", ".join(filter(None, words))


def draw_runs(axes, panel: Panel) -> None:
    """Draw the compared figure, a point for each run, since a mean says little of runs
    that succeed or fail."""
    experiment = panel.experiment
    entries = panel.entries
    styles = styles_of(entries)
    for place, (name, entry) in enumerate(entries.items()):
        values = sorted(values_of(entry, experiment.kind))
        width = 0.6 / max(1, len(values))
        start = place - width * (len(values) - 1) / 2
        axes.plot(
            [start + width * number for number in range(len(values))],
            values,
            label=label_of(name, entry),
            color=styles[name].color,
            marker=styles[name].marker,
            markersize=4,
            linestyle="",
        )
    axes.set_xticks([])
    axes.set_xlabel("run configs")
    axes.set_ylabel(f"{title_of(experiment.kind)}, {panel.unit_of(experiment.kind)}")


TARGETS = {
    "rotary": "rotated queries",
    "adaln_11": "adaLN, vector 11",
    "adaln": "adaLN, vector 32",
    "adaln_rotary_11": "adaLN (11), rotated queries",
    "adaln_rotary": "adaLN (32), rotated queries",
    "two_stream": "two streams",
    "mask_query": "[MASK] as the query",
}
"""The decoders of `targets_figure`, of experiment E21, in words."""


def targets_figure(entries: Entries) -> bytes:
    """Return a PNG: of each decoder of TARGETS its loss beside the encoder's, and the
    gain of 64 context orders, with single seeds and intervals."""
    figure, (left, right) = new_figure(columns=2, size=(9, 3.6))
    kinds = {left: "eval_random", right: "gain_random_m64"}
    styles = styles_of(TARGETS)
    for axes, kind in kinds.items():
        for place, name in enumerate(reversed(TARGETS)):
            values = values_of(entries[name], kind)
            mean, half_width = mean_and_half_width(values)
            color = styles[name].color
            axes.plot(values, [place] * len(values), ".", color=color, markersize=4)
            axes.errorbar(mean, place, xerr=half_width, color=color, marker="o")
        axes.set_yticks(range(len(TARGETS)), [])
        axes.set_ylim(-0.6, len(TARGETS) - 0.4)
    left.set_yticks(range(len(TARGETS)), list(reversed(TARGETS.values())))
    encoder, half_width = mean_and_half_width(
        values_of(entries["encoder"], "eval_random")
    )
    color = PALETTE[SYSTEMS["encoder"]]
    left.axvspan(encoder - half_width, encoder + half_width, color=color, alpha=0.3)
    left.axvline(encoder, color=color)
    left.set_xlabel("loss in any order, nats a note (line: encoder)")
    right.axvline(0, color="black", linewidth=0.5)
    right.set_xlabel("gain of 64 context orders, nats a note")
    figure.suptitle("Chorales: loss by conditioning; 64 context orders gain little")
    return png(figure)


DRAWINGS = {
    "curves": (
        draw_curves,
        f"{BAND}{FEW_SEEDS}{DOTS} at the end. Curves are of validation data.",
    ),
    "lines": (draw_lines, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "points": (draw_points, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "scatter": (draw_scatter, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "runs": (draw_runs, "A point for each seed, in order of size."),
}
