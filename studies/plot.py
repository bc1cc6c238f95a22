"""Plot the losses and gradient norms of runs in one figure.

python -m studies.plot out/one out/other --out compare.png"""

from aogpt.runtime import environment  # noqa: F401  # says if packages are missing

# isort: split
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from aogpt.runtime.command_line import run_script, show, visible, with_help
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import OutputOptions, Outputs
from aogpt.training.metrics import ORDER_TITLES
from aogpt.training.val_losses import read_metrics
from studies.drawing import new_figure, png

STYLES = ("-", "--")
COLUMNS = 3  # panels side by side


@dataclass(frozen=True, kw_only=True)
class PlotOptions(OutputOptions):
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders, such as out/NAME
    out: Path = Path("out/compare.png")  # the PNG to write


def main() -> None:
    o = tyro.cli(
        with_help(PlotOptions), prog="python -m studies.plot", description=__doc__
    )
    if not o.runs or o.out.suffix != ".png":
        raise UserError(
            "give run folders, such as out/NAME, and with --out a file NAME.png"
        )
    o.out.parent.mkdir(parents=True, exist_ok=True)
    with Outputs({"--out": o.out}, o.runs, o.overwrite) as outputs:
        outputs.write(o.out, plot_runs(list(o.runs)))
    show(f"wrote {o.out}")


def plot_runs(folders: list[Path]) -> bytes:
    """Return a PNG of the panels that at least one of the run folders has values
    for."""
    from matplotlib.ticker import EngFormatter

    runs = {str(folder): read_metrics(folder / "metrics.jsonl") for folder in folders}
    panels = panels_of(runs)
    columns = min(COLUMNS, len(panels))
    if len(panels) == 4:  # two lines of two leave no place empty
        columns = 2
    lines = -(-len(panels) // columns)  # rounded up
    figure, grid = new_figure(
        lines, columns, (5.2 * columns, 3.8 * lines + 0.6), squeeze=False
    )
    for axes, (title, keys) in zip(grid.flat, panels.items(), strict=False):
        draw_runs(axes, runs, keys)
        unit = "norm of all gradients" if "grad_norm" in keys else "nats per token"
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="tokens", ylabel=unit)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 12M, not 1.2 and 1e7
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    first_axes = figure.axes[0]
    for i, run in enumerate(runs):
        first_axes.plot([], [], color=f"C{i}", label=literal(run))
    figure.legend(loc="outside lower center", ncols=min(4, len(runs)))
    return png(figure, dpi=130)


def all_panels() -> dict[str, tuple[str, ...]]:
    """Return the keys of metrics.jsonl that each panel draws, solid and dashed, by the
    panel's title."""
    panels: dict[str, tuple[str, ...]] = {}
    panels["training loss (the run's objective), smoothed; pale: as it is"] = ("loss",)
    for kind, orders in ORDER_TITLES.items():
        title = f"validation, {orders} (averaged weights; dashed: of the last step)"
        panels[title] = (f"val_loss_{kind}", f"val_loss_{kind}_raw")
    panels["gradient norm, smoothed; pale: as it is"] = ("grad_norm",)
    return panels


def panels_of(runs: dict[str, list[dict]]) -> dict[str, tuple[str, ...]]:
    """Return the panels that at least one run has values for. Raises UserError for a
    run that has none.

    runs: the rows of metrics.jsonl, by folder."""
    panels = all_panels()
    all_keys = set()
    panel_keys: set[str] = set()
    for keys in panels.values():
        panel_keys.update(keys)
    for run, rows in runs.items():
        run_keys: set[str] = set()
        for row in rows:
            run_keys.update(row)
        if run_keys.isdisjoint(panel_keys):
            raise UserError(
                f"cannot plot {run}: it has no metrics.jsonl with losses; "
                "give run folders"
            )
        all_keys |= run_keys
    return {
        title: keys for title, keys in panels.items() if not all_keys.isdisjoint(keys)
    }


def draw_runs(axes, runs: dict[str, list[dict]], keys: tuple[str, ...]) -> None:
    """Draw a panel of all runs. It names those that have no values, such as a GPT in
    any order."""
    absent = []
    for i, (run, rows) in enumerate(runs.items()):
        if any(numbers(rows, key) for key in keys):
            draw(axes, rows, keys, color=f"C{i}")
        else:
            absent.append(Path(run).name)
    if absent:
        note = literal(f"no values: {', '.join(absent)}")
        axes.text(0.98, 0.96, note, ha="right", va="top", transform=axes.transAxes)


def literal(text: str) -> str:
    """Return text that matplotlib draws as it stands: $x$ would be typeset as
    mathematics. Control characters are escaped."""
    return visible(text).replace("$", r"\$")


def draw(axes, rows: list[dict], keys: tuple[str, ...], color: str) -> None:
    """Draw the values of one run in a panel, over tokens where they are known."""
    from matplotlib.ticker import LogLocator

    for key, style in zip(keys, STYLES, strict=False):
        values = numbers(rows, key)
        if not values:
            continue
        x = np.array(list(values.keys()), dtype=float)
        y = np.array(list(values.values()), dtype=float)
        tokens = sorted(numbers(rows, "tokens").items())
        if tokens:  # interpolated between the rows that have them
            points = np.array([(0, 0), *tokens], dtype=float)
            x = np.interp(x, points[:, 0], points[:, 1])
        if key.startswith("val_loss"):
            axes.plot(x, y, style, color=color, marker="o", markersize=2.5)
        else:
            axes.plot(x, y, color=color, linewidth=0.5, alpha=0.25)
            axes.plot(x, smoothed(y), color=color)
        if key == "grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
            axes.yaxis.set_major_formatter("{x:g}")  # 0.5, not 5 times 10 to the -1
            axes.yaxis.set_minor_formatter("{x:g}")


def numbers(rows: list[dict], key: str) -> dict[int, float]:
    """Return {step: value} of the rows that have a number under this key."""
    values = {}
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float):
            values[row["step"]] = value
    return values


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the exponential moving average over a fiftieth of the values, without bias
    at its start."""
    count = len(values)
    keep = 1 - 1 / max(1.0, count / 50)
    averages = []
    average = 0.0
    for value in values:
        average = keep * average + (1 - keep) * value
        averages.append(average)
    steps = np.arange(1, count + 1)
    bias = 1 - keep**steps
    return np.array(averages) / bias


if __name__ == "__main__":
    run_script(main)
