"""The figures of findings and tasks: a grid of panels, each with curves or points. `entries` are
run configs by name, with the results of their seeds.
"""

import io
import re
import statistics
from collections.abc import Callable, Iterable, Sequence

from aogpt.evaluation.text_measures import mean_and_half_width
from aogpt.runtime.outputs import COLORS, new_figure, png
from studies.experiment import Experiment
from studies.pages import FEW, title_of, unit_of, value_of

Entries = dict[str, dict]
PALETTE = [*COLORS, "#882255", "#999999", "#332288", "#7A4A1E"]
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
}
MARKERS = "osD^v<>Ph*Xd"
BAR = "Large markers and bars: mean of the seeds and its 95% interval"
BAND = "Line and band: mean of the seeds and its 95% interval"
FEW_SEEDS = f" (of fewer than {FEW} seeds their range). "
DOTS = "Small dots: single seeds"


# ---- parts of all figures ------------------------------------------------------------------------


def styles_of(names: Iterable[str]) -> dict[str, dict]:
    """Return color, marker and line of each run config of a panel: of a system its color; of its
    variants, which are dashed, and of others a color that no system has."""
    places = {}
    for name in names:
        place = system_of(name)
        if place is not None and place not in places.values():
            places[name] = place
    free = [place for place in range(len(PALETTE)) if place not in SYSTEMS.values()]
    free += [place for place in range(len(PALETTE)) if place not in free]
    styles = {}
    for number, name in enumerate(names):
        if name in places:
            place = places[name]
        else:
            place = next(n for n in free if n not in places.values())
            places[name] = place
        is_variant = system_of(name) not in (None, place)
        styles[name] = {
            "color": PALETTE[place],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "--" if is_variant else "-",
        }
    return styles


def system_of(name: str) -> int | None:
    """Return the color of the system that a run config is a variant of, if of any."""
    stem = re.sub(r"_.*", "", name)
    for part in (name, "two_stream" if name.startswith("two_stream") else stem):
        if part in SYSTEMS:
            return SYSTEMS[part]
    return SYSTEMS.get(name.rpartition("_")[2])


def draw_panels(
    panels: dict[str, dict], draw: Callable, columns: int, caption: str, **options
) -> bytes:
    """Return a PNG with a panel for each title, which draw(axes, entries) fills, and a caption that
    says what bars and bands are."""
    rows = -(-len(panels) // columns)
    labels = max(map(len, panels.values()))
    height = 3.8 + 0.17 * labels
    size = (4.8 * columns, height * rows + 0.4)
    drawing, grid = new_figure(rows, columns, size, squeeze=False, **options)
    drawing.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    for axes, (title, entries) in zip(grid.flat, panels.items(), strict=False):
        draw(axes, entries)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelleft=True)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    return with_caption(drawing, caption, columns)


def with_caption(drawing, caption: str, columns: int) -> bytes:
    """Return a figure with a caption as a PNG with few colors."""
    from textwrap import fill

    from PIL import Image

    drawing.supxlabel(fill(caption, 72 * columns), fontsize=8)
    image = Image.open(io.BytesIO(png(drawing, dpi=120))).convert("RGB")
    small = io.BytesIO()  # a third of the size, as the colors are few
    coverage = Image.Quantize.MAXCOVERAGE
    image.quantize(method=coverage, dither=Image.Dither.NONE).save(
        small, "png", optimize=True
    )
    return small.getvalue()


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


def draw_mean(axes, x: float, values: list[float], label: str, style: dict) -> None:
    """Draw the mean of some seeds with its interval, and to the right of it each seed."""
    from matplotlib.transforms import ScaledTranslation

    mean = statistics.mean(values)
    low, high = interval_of(values)
    bars = [[mean - low], [high - mean]]
    axes.errorbar(x, mean, yerr=bars, capsize=2, label=label, markersize=5, **style)
    dots = {"marker": ".", "linestyle": "", "markersize": 3, "alpha": 0.7}
    aside = ScaledTranslation(0.07, 0, axes.figure.dpi_scale_trans)  # inches
    dots["transform"] = axes.transData + aside
    axes.update_datalim([(x, value) for value in values])  # such dots do not count
    axes.autoscale_view()
    axes.plot([x] * len(values), values, color=style["color"], **dots)


# ---- figures of findings -------------------------------------------------------------------------


def figure(experiment: Experiment, recipes: dict[str, Entries]) -> bytes:
    """Return a panel for each recipe and, if the experiment has families, for each family in it."""
    panels: dict[str, Entries] = {}
    for recipe, entries in recipes.items():
        for name, entry in entries.items():
            title = f"{experiment.name}, {title_of(recipe)}"
            if experiment.families:
                title += f",\n{title_of(name.split('_')[0])}"
            panels.setdefault(title, {})[name] = entry
    draw, caption = DRAWINGS[experiment.figure]
    # Other panels differ by nature, or not every recipe reaches the ends of a sweep.
    shared = experiment.figure in ("curves", "scatter") and not experiment.families
    return draw_panels(
        panels,
        lambda axes, entries: draw(experiment, axes, entries),
        columns=min(4, len(panels)),
        caption=caption,
        sharey=shared,
    )


def draw_curves(experiment: Experiment, axes, entries: Entries) -> None:
    """Draw the loss over tokens, and at the end that of each seed; dashed, the least possible one,
    if known."""
    styles = styles_of(entries)
    kind = re.sub("^(lowest|eval)_", "", experiment.kind)
    for name, entry in entries.items():
        rows = [row for row in entry["runs"] if row["tokens"]]
        if kind not in rows[0]["losses"]:
            kind = "training"
        means = []
        lows = []
        highs = []
        for values in zip(*(row["losses"][kind] for row in rows), strict=True):
            low, high = interval_of(values)
            means.append(statistics.mean(values))
            lows.append(low)
            highs.append(high)
        tokens = [count / 1e6 for count in rows[0]["tokens"]]
        color = styles[name]["color"]
        line = styles[name]["linestyle"]
        axes.plot(tokens, means, label=label_of(name, entry), color=color, ls=line)
        axes.fill_between(tokens, lows, highs, color=color, alpha=0.15, linewidth=0)
        ends = [row["losses"][kind][-1] for row in rows]
        after = tokens[-1] + 0.015 * (1 + len(axes.collections)) * tokens[-1]
        axes.plot([after] * len(ends), ends, ".", color=color, markersize=3)
    if "excess" in rows[0]["measured"]:
        least = rows[0]["losses"]["training"][-1] - rows[0]["measured"]["excess"][0]
        line = {"linestyle": ":", "color": "black", "linewidth": 0.8}
        axes.axhline(least, label="entropy: the least loss possible", **line)
    label = f"loss in {title_of(kind)}, nats per token"
    if kind.startswith("l2r"):
        label = f"loss {title_of(kind)}, nats per token"
    axes.set(xlabel="tokens, millions", ylabel=label)


def draw_lines(experiment: Experiment, axes, entries: Entries) -> None:
    """Draw the losses shown over the `x` of the run configs, a line for each loss."""
    places = experiment.x
    swept = sorted(places.keys() & entries.keys(), key=places.get)
    styles = styles_of(experiment.shown)
    for kind in experiment.shown:
        title = title_of(kind)
        means = [statistics.mean(values_of(entries[name], kind)) for name in swept]
        axes.plot([places[name] for name in swept], means, color=styles[kind]["color"])
        for number, name in enumerate(swept):
            label = "_" if number else title  # "_" is not in the legend
            values = values_of(entries[name], kind)
            draw_mean(axes, places[name], values, label, styles[kind])
    axes.set(xlabel=experiment.x_label, ylabel="loss, nats per token")


def draw_points(experiment: Experiment, axes, entries: Entries) -> None:
    """Draw the measures of `x`, or those shown, side by side, a mean for each run config."""
    kinds = list(experiment.x) or experiment.shown
    styles = styles_of(entries)
    for number, (name, entry) in enumerate(entries.items()):
        shift = 0.6 * (number / max(1, len(entries) - 1) - 0.5)
        style = styles[name] | {"linestyle": ""}
        label = label_of(name, entry)
        for place, kind in enumerate(kinds):
            values = values_of(entry, kind)
            if values:
                draw_mean(axes, place + shift, values, label, style)
                label = "_"
    axes.set_xticks(range(len(kinds)), [title_of(kind) for kind in kinds], fontsize=8)
    axes.set(xlim=(-0.5, len(kinds) - 0.5), ylabel="loss, nats per token")


def draw_scatter(experiment: Experiment, axes, entries: Entries) -> None:
    """Draw the first figure shown over the compared one, a mean for each run config."""
    kinds = [experiment.kind, experiment.shown[0]]
    styles = styles_of(entries)
    for name, entry in entries.items():
        x_values, y_values = (values_of(entry, kind) for kind in kinds)
        x = statistics.mean(x_values)
        y = statistics.mean(y_values)
        low, high = interval_of(x_values)
        style = styles[name] | {"linestyle": ""}
        axes.errorbar(x, y, xerr=[[x - low], [high - x]], capsize=2, **style)
        low, high = interval_of(y_values)
        label = label_of(name, entry)
        bars = [[y - low], [high - y]]
        axes.errorbar(x, y, yerr=bars, capsize=2, label=label, **style)
        axes.plot(x_values, y_values, ".", color=style["color"], markersize=3)
    x_label, y_label = (f"loss, {title_of(kind)}, nats per token" for kind in kinds)
    axes.set(xlabel=x_label, ylabel=y_label)


def draw_runs(experiment: Experiment, axes, entries: Entries) -> None:
    """Draw the compared figure, a point for each run, since a mean says little of runs that succeed
    or fail."""
    styles = styles_of(entries)
    for place, (name, entry) in enumerate(entries.items()):
        values = sorted(values_of(entry, experiment.kind))
        middle = (len(values) - 1) / 2
        places = [place + 0.6 * (n - middle) / len(values) for n in range(len(values))]
        style = styles[name] | {"linestyle": "", "markersize": 4}
        axes.plot(places, values, label=label_of(name, entry), **style)
    axes.set_xticks([])
    title = title_of(experiment.kind)
    axes.set(xlabel="run configs", ylabel=f"{title}, {unit_of(experiment.kind)}")


DRAWINGS = {
    "curves": (draw_curves, f"{BAND}{FEW_SEEDS}{DOTS} at the end."),
    "lines": (draw_lines, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "points": (draw_points, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "scatter": (draw_scatter, f"{BAR}{FEW_SEEDS}{DOTS}."),
    "runs": (draw_runs, "A point for each seed, in order of size."),
}
