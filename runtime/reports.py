"""What a script reports: tables, pictures, and what is needed to make a number again."""

import dataclasses
import io
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def versions() -> dict[str, str]:
    """Versions that a reported number depends on."""
    numpy = {"numpy": np.__version__}
    return {"python": platform.python_version(), "torch": str(torch.__version__)} | numpy


def commit() -> str:
    """The commit of this code, "-dirty" after it where files other than results have changed."""

    def git(*words: str) -> str:
        root = Path(__file__).resolve().parents[1]
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout

    changed = git("diff", "HEAD", "--name-only", "--", ".", ":!results")
    return (git("describe", "--always").strip() or "unknown") + "-dirty" * bool(changed)


def command() -> str:
    """This command, as it would be typed at the top of the repository."""
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def provenance(
    arguments: Any, dtype: torch.dtype, device: torch.device, processes: int = 1, **more
) -> dict:
    """What numbers depend on, for their JSON. arguments: the script's options, a dataclass. dtype:
    what --dtype auto has become. more: whatever else, such as the checkpoint."""
    settings = dataclasses.asdict(arguments) | {"dtype": str(dtype).removeprefix("torch.")}
    settings.pop("overwrite", None)  # nothing depends on it
    origin = {"command": command(), "settings": settings, "device": str(device)}
    return origin | {"processes": processes, "versions": versions()} | more


def markdown_table(
    head: list[str], rows: list[list[str]], left: int = 1, least: list[int] | None = None
) -> list[str]:
    """The lines of a Markdown table that also reads well as plain text: `left` columns of names,
    then numbers. least: minimal widths of the columns."""
    columns = zip(least or [3] * len(head), head, *rows, strict=True)
    widths = [max(width, *map(len, cells)) for width, *cells in columns]
    rule = ["-" * (width - (i >= left)) + ":" * (i >= left) for i, width in enumerate(widths)]
    return [table_line(cells, widths, left) for cells in (head, rule, *rows)]


def table_line(cells: list[str], widths: list[int], left: int = 1) -> str:
    """One line of such a table: names left-aligned, numbers right-aligned."""
    pairs = enumerate(zip(cells, widths, strict=True))
    return "| " + " | ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in pairs) + " |"


def new_figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = (7, 4.5), **options):
    """A matplotlib figure that needs no screen, and its axes. size: in inches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", **options)


def log_x(axes, values) -> None:
    """A logarithmic x axis with a tick at each of these values and nowhere else."""
    axes.set_xscale("log")
    ticks = sorted(set(values))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def png(figure, dpi: int = 150) -> bytes:
    """A matplotlib figure as a PNG; closes it."""
    import matplotlib.pyplot as plt

    image = io.BytesIO()
    figure.savefig(image, dpi=dpi, format="png")
    plt.close(figure)
    return image.getvalue()
