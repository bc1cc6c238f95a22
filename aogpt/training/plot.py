"""Plot the losses and gradient norms of runs in one figure.

python -m aogpt.training.plot out/one out/other --out compare.png"""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import tyro

from ..runtime.command_line import run_script, show
from ..runtime.errors import UserError
from ..runtime.outputs import OutputOptions, Outputs, new_figure, png
from .metrics import ORDERS, read_metrics

PANELS = {"training loss (the run's objective), smoothed": ("loss",)}
PANELS |= {  # title: keys of metrics.jsonl, drawn solid and dashed
    f"validation, {orders} (dashed: last weights)": (
        f"val_loss_{kind}",
        f"val_loss_{kind}_raw",
    )
    for kind, orders in ORDERS.items()
}
PANELS |= {"gradient norm, smoothed": ("grad_norm",)}


@dataclass(frozen=True, kw_only=True)
class PlotOptions(OutputOptions):
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders, such as out/NAME
    out: Path = Path("out/compare.png")  # the PNG to write


def main() -> None:
    o = tyro.cli(PlotOptions, prog="python -m aogpt.training.plot", description=__doc__)
    if not o.runs or o.out.suffix != ".png":
        raise UserError(
            "give run folders, such as out/NAME, and with --out a file NAME.png"
        )
    o.out.parent.mkdir(parents=True, exist_ok=True)
    with Outputs({"--out": o.out}, o.runs, o.overwrite) as outputs:
        outputs.write(o.out, plot_runs(list(o.runs)))
    show(f"wrote {o.out}")


def plot_runs(folders: list[Path]) -> bytes:
    """A PNG of the panels that at least one of the run folders has values for."""
    runs = {str(folder): read_metrics(folder / "metrics.jsonl") for folder in folders}
    found = {run: {key for row in rows for key in row} for run, rows in runs.items()}
    panels = {
        k: v for k, v in PANELS.items() if any(keys & set(v) for keys in found.values())
    }
    for run, keys in found.items():
        if not any(keys & set(of_panel) for of_panel in PANELS.values()):
            raise UserError(
                f"cannot plot {run}: it has no metrics.jsonl with losses; give run folders"
            )
    lines = -(-len(panels) // 3)
    figure, grid = new_figure(lines, 3, (15.6, 3.8 * lines + 0.6), squeeze=False)
    for axes, (title, keys) in zip(grid.flat, panels.items(), strict=False):
        for i, rows in enumerate(runs.values()):
            draw(axes, rows, keys, f"C{i}")
        axes.set_title(title, fontsize=9)
        axes.set(
            xlabel="tokens", ylabel="" if "grad_norm" in keys else "nats per token"
        )
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for i, run in enumerate(runs):  # $x$ would be typeset as mathematics
        figure.axes[0].plot([], [], color=f"C{i}", label=run.replace("$", r"\$"))
    figure.legend(loc="outside lower center", ncols=min(4, len(runs)))
    return png(figure, dpi=130)


def draw(axes, rows: list[dict], keys: tuple[str, ...], color) -> None:
    for key, style in zip(keys, ("-", "--"), strict=False):
        values = numbers(rows, key)
        if not values:
            continue
        at, y = (np.array(list(v), dtype=float) for v in (values, values.values()))
        known = sorted(numbers(rows, "tokens").items())
        if known:  # interpolated between the rows that have them
            at = np.interp(at, *np.array([(0, 0), *known], dtype=float).T)
        if key.startswith("val_loss"):
            axes.plot(at, y, style, color=color, marker="o", markersize=2.5)
        else:
            axes.plot(at, y, color=color, linewidth=0.5, alpha=0.25)
            axes.plot(at, smoothed(y), color=color)
        if key == "grad_norm":
            axes.set_yscale("log")


def numbers(rows: list[dict], key: str) -> dict:
    """{step: value} of the rows that have a number under this key."""
    return {
        row["step"]: row[key] for row in rows if isinstance(row.get(key), int | float)
    }


def smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential moving average over a fiftieth of the values, without bias at its start."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    sums = accumulate(
        values, lambda total, value: keep * total + (1 - keep) * value, initial=0.0
    )
    return np.array([*sums][1:]) / (1 - keep ** np.arange(1, len(values) + 1))


if __name__ == "__main__":
    run_script(main)
