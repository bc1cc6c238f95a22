"""Pictures of metrics.jsonl: the losses of one run, and runs drawn against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from runtime.errors import UserError
from runtime.files import write_atomically
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import new_figure, png
from training.metrics import read_metrics


class Panel(NamedTuple):
    """One pair of axes of `plot_runs`."""

    title: str
    kind: Literal["training", "validation", "curve"]
    """Noisy values of every step, values of every evaluation, or the list of the last one."""
    keys: tuple[str, ...]
    """Of metrics.jsonl: the first is drawn solid, the second dashed."""
    unit: str = "nats per token"


PANELS = (
    Panel("training loss, smoothed", "training", ("loss",)),
    Panel("left to right", "validation", ("val_loss_l2r", "val_loss_l2r_raw")),
    Panel("any order", "validation", ("val_loss_random", "val_loss_random_raw")),
    Panel("the run's fixed order", "validation", ("val_loss_fixed", "val_loss_fixed_raw")),
    Panel("the run's own orders", "validation", ("val_loss_own", "val_loss_own_raw")),
    Panel("gradient norm, smoothed", "training", ("grad_norm",), unit=""),
    Panel("by step, any order", "curve", ("val_curve_random", "val_curve_l2r")),
)
TITLES = {
    "training": "{}",
    "validation": "validation, {} (dashed: last weights)",
    "curve": "last evaluation, {} (dashed: left to right)",
}


DEFAULT_PLOT = Path("out/compare.png")

# ---- one run -------------------------------------------------------------------------------------


def plot_losses(folder: Path, objective: str) -> None:
    """Draw metrics.jsonl as loss.png: training loss, and validation loss in every order.

    Args:
        objective: the run's objective.kind. Score entropy is a bound of its own (SEDD, section
            3.2), and not the normalised likelihood that it is validated by.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        return
    figure, axes = new_figure()
    labels = {
        "loss": "training, the run's own orders",
        "val_loss_l2r": "validation, left to right",
        "val_loss_random": "validation, random order",
        "val_loss_fixed": "validation, the run's fixed order",
        "val_loss_own": "validation, the run's own orders",
    }
    if objective == "score_entropy":
        labels |= {"loss": "training, score entropy", "val_loss_random": "validation, likelihood"}
    for key, label in labels.items():
        values = values_by_step(lines, key)
        if not values:
            continue
        style = {"marker": "o", "markersize": 3}
        if key == "loss":
            style = {"linewidth": 0.8, "alpha": 0.6}
        axes.plot(list(values), list(values.values()), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    image = png(figure)
    write_atomically(folder / "loss.png", lambda file: file.write(image))


# ---- many runs -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlotArguments(OutputOptions):
    plot: tuple[Path, ...]
    """Run folders to draw against each other."""
    plot_out: Path | None = None
    """The PNG to write; by default out/compare.png."""
    plot_x: Literal["tokens", "steps"] = "tokens"
    """What stands on the x axis."""


def plot_command(arguments: list[str]) -> int:
    """`train.py --plot RUN [RUN ...]`: draw runs against each other. Returns the exit status."""
    import tyro

    what = "Draw runs against each other."
    a = tyro.cli(PlotArguments, args=arguments, prog="train.py", description=what)
    if not a.plot:
        raise UserError("--plot needs run folders, e.g. python train.py --plot out/one out/other")
    file = a.plot_out or DEFAULT_PLOT
    file.parent.mkdir(parents=True, exist_ok=True)
    outputs = Outputs({"--plot-out": file}, a.plot, a.overwrite)
    with outputs:
        outputs.write(file, plot_runs(list(a.plot), file, a.plot_x))
    print(f"wrote {file}")
    return 0


def plot_runs(folders: list[Path], file: Path, over: str = "tokens") -> bytes:
    """Runs drawn against each other in one PNG, to be written to `file`: those of PANELS that at
    least one of them has numbers for.

    Args:
        folders: run folders. Raises ValueError for one without metrics.
        over: what stands on the x axis, "tokens" or "steps".
    """
    if file.suffix != ".png" or file.is_dir():
        raise UserError(f"cannot draw to {file}: the plot is a PNG; name a file that ends in .png")
    runs = {folder: lines_to_draw(folder) for folder in dict.fromkeys(folders)}
    measured = {key for lines in runs.values() for line in lines for key in line}
    panels = [panel for panel in PANELS if measured & set(panel.keys)]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (5.2 * columns, 3.8 * rows + 0.6)
    figure, grid = new_figure(rows, columns, size, squeeze=False)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    colors = colors_of(len(runs))
    for axes, panel in zip(grid.flat, panels, strict=False):
        for lines, color in zip(runs.values(), colors, strict=True):
            draw_panel(axes, lines, panel, color, over)
        axes.set_xlabel("share of the tokens that are known" if panel.kind == "curve" else over)
        axes.set_ylabel(panel.unit)
        axes.set_title(TITLES[panel.kind].format(panel.title), fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    draw_legend(figure, list(runs), colors)
    return png(figure, dpi=130)


def lines_to_draw(folder: Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl. Raises ValueError where there are none to draw."""
    path = folder / "metrics.jsonl"
    lines = read_metrics(path)
    keys = [key for panel in PANELS for key in panel.keys]
    if any(line.get(key) is not None for line in lines for key in keys):
        return lines
    if not folder.is_dir():
        found = "there is no such folder"
    elif not path.exists():
        found = "it has no metrics.jsonl"
    elif not lines:
        found = "its metrics.jsonl has no whole line"
    else:
        found = "its metrics.jsonl holds no losses"
    raise UserError(
        f"cannot draw {folder}: {found}; give folders of runs that have trained, as out/NAME"
    )


def draw_panel(axes, lines: list[dict], panel: Panel, color, over: str) -> None:
    """Draw what one run's lines hold for a panel. over: as in `plot_runs`."""
    for key, style in zip(panel.keys, ("-", "--"), strict=False):
        values = values_by_step(lines, key)
        if not values:
            continue
        if panel.kind == "curve":
            draw_curve(axes, values[max(values)], style, color)
            continue
        x, y = x_axis(lines, list(values), over), np.array(list(values.values()), dtype=float)
        if panel.kind == "validation":
            width = 1.5 if style == "-" else 1.0
            axes.plot(x, y, style, color=color, linewidth=width, marker="o", markersize=2.5)
        else:
            axes.plot(x, y, color=color, linewidth=0.5, alpha=0.25)
            axes.plot(x, smoothed(y), color=color, linewidth=1.5)
        if key == "grad_norm":
            use_log_scale(axes)


def draw_curve(axes, curve: list, style: str, color) -> None:
    """Losses over equal parts of the order, each at the middle of its part; where nothing was
    measured there is a gap."""
    share = (np.arange(len(curve)) + 0.5) / len(curve)
    losses = [np.nan if loss is None else loss for loss in curve]
    axes.plot(share, losses, style, color=color, linewidth=1.2)


def use_log_scale(axes) -> None:
    """A logarithmic y axis with plain numbers also between powers of ten, few of which are seen."""
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def draw_legend(figure, folders: list[Path], colors: list) -> None:
    import matplotlib.pyplot as plt

    handles = [plt.Line2D([], [], color=color, linewidth=2) for color in colors]
    columns = min(4, len(folders))
    figure.legend(handles, run_labels(folders), loc="outside lower center", ncols=columns)


def run_labels(folders: list[Path]) -> list[str]:
    """What the legend calls the runs: their names, or their paths where names are alike."""
    names = [folder.resolve().name for folder in folders]
    labels = [
        str(folder) if names.count(name) > 1 else name
        for folder, name in zip(folders, names, strict=True)
    ]
    return [label.replace("$", r"\$") for label in labels]  # to matplotlib dollars are mathematics


def colors_of(count: int) -> list:
    """As many colours: easy to tell apart up to ten, then evenly spaced in a colour map."""
    import matplotlib.pyplot as plt

    if count <= 10:
        return list(plt.get_cmap("tab10").colors[:count])
    return list(plt.get_cmap("turbo")(np.linspace(0, 1, count)))


# ---- numbers -------------------------------------------------------------------------------------


def values_by_step(lines: list[dict], key: str) -> dict:
    """{step: value} of the lines that have one; a step that was skipped has null."""
    return {line["step"]: line[key] for line in lines if line.get(key) is not None}


def x_axis(lines: list[dict], steps: list[int], over: str) -> np.ndarray:
    """The steps, or the tokens seen by then: between the lines that tell them, in proportion."""
    tokens = values_by_step(lines, "tokens")
    if over == "steps" or not tokens:
        return np.array(steps, dtype=float)
    known = sorted(tokens)
    return np.interp(steps, [0, *known], [0, *(tokens[step] for step in known)])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential moving average over a fiftieth of the values, unbiased at its start: divided by
    the weights so far, as Adam's averages are."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    total, weight, result = 0.0, 0.0, []
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(total / weight)
    return np.array(result)
