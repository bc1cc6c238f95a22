"""metrics.jsonl of a run: what is measured while it trains, written, read back and drawn.

A training line, every train.log_interval steps, holds

    step, loss, lr, grad_norm, tokens, tokens_per_second, mfu, memory_bytes, skipped_steps; with Muon muon_lr

and an evaluation line, every eval.interval steps,

    step
    val_loss_KIND        nats per token of the averaged weights; KIND: l2r, random (any order), fixed (the run's own)
    val_loss_KIND_raw    of the last weights
    val_curve_KIND       of the averaged weights, how hard step i of n is: a list of P = min(64, n) means over sequences
                         and over the steps i with floor(i P / n) = 0, 1, .. P - 1. An encoder, which has no steps:
                         the mean over its masked tokens where i others are known; null where no sequence has as many
    grad_norm, tokens, memory_bytes, skipped_steps    as above
    tokens_per_second    of the last training line

tokens are those seen since the run began, and memory_bytes is the peak of the main process: allocated on its GPU, or
resident on a CPU.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data.loader import batch_lengths
from model import AOGPT
from runtime.devices import peak_flops, pick_dtype
from runtime.files import to_json, write_atomically
from runtime.processes import Processes
from training.config import Config

PANELS = (  # of plot_runs: title, label of the y axis, keys; what the second key of a panel holds is drawn dashed
    ("training loss, smoothed", "nats per token", ("loss",)),
    (
        "validation, left to right (dashed: last weights)",
        "nats per token",
        ("val_loss_l2r", "val_loss_l2r_raw"),
    ),
    (
        "validation, any order (dashed: last weights)",
        "nats per token",
        ("val_loss_random", "val_loss_random_raw"),
    ),
    (
        "validation, the run's fixed order (dashed: last weights)",
        "nats per token",
        ("val_loss_fixed", "val_loss_fixed_raw"),
    ),
    ("gradient norm, smoothed", "", ("grad_norm",)),
    (
        "last evaluation, by step, any order (dashed: left to right)",
        "nats per token",
        ("val_curve_random", "val_curve_l2r"),
    ),
)


class Log:
    """metrics.jsonl, the progress bar and Weights & Biases, on the main process only."""

    def __init__(self, config: Config, procs: Processes, model: AOGPT, progress):
        """progress: train.Progress; its step and count of skipped steps are read as they change."""
        self.config, self.procs, self.progress, self.active = config, procs, progress, procs.main
        self.path = config.run_folder / "metrics.jsonl"
        self.flops_per_token = model.flops_per_token
        self.peak = peak_flops(procs.device, pick_dtype(config.train.dtype, procs.device))
        self.wandb, self.warned = None, False
        self.tokens = tokens_of(config, range(progress.step))
        self.norm = self.speed = None
        self.restart_clock()
        if not self.active:
            return
        drop_later_lines(self.path, progress.step)
        if config.wandb.mode != "disabled":
            self.wandb = start_wandb(config)
        self.bar = tqdm(
            total=config.train.steps,
            initial=progress.step,
            unit="step",
            disable=None,
            dynamic_ncols=True,
        )

    def training(self, step: int, loss: float, norm: float, rates: dict[str, float]) -> None:
        """A step that has come to its end: its loss, gradient norm and learning rates."""
        t = self.config.train
        if not self.active:
            return
        self.norm = norm
        new = tokens_of(self.config, range(step - 1, step))
        self.tokens += new
        self.clock_tokens += new
        self.clock_flops += new * self.flops_per_token(new // t.batch_size)
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        if step % t.log_interval and step != t.steps and math.isfinite(loss + norm):
            return
        seconds = time.perf_counter() - self.clock
        self.speed = self.clock_tokens / seconds
        mfu = (
            self.clock_flops / seconds / (self.peak * self.procs.world_size)
            if self.peak
            else "unknown"
        )
        speed = {"tokens": self.tokens, "tokens_per_second": self.speed, "mfu": mfu}
        self._write(
            {"step": step, "loss": loss, **rates, "grad_norm": norm, **speed, **self._costs()}
        )
        if not sys.stderr.isatty():
            percent = mfu if mfu == "unknown" else f"{mfu:.1%}"
            print(
                f"step {step}: loss {loss:.4f}, {self.speed:,.0f} tokens/s, MFU {percent}",
                flush=True,
            )
        self.restart_clock()

    def validation(
        self, averaged: dict[str, tuple[float, list]], raw: dict[str, tuple[float, list]]
    ) -> None:
        """An evaluation: (loss, curve) of every kind of order, of the averaged and of the last weights."""
        if self.active:
            text = ", ".join(f"{kind} {loss:.4f}" for kind, (loss, _) in averaged.items())
            self._say(
                f"step {self.progress.step}: validation {text} nats per token (averaged weights)"
            )
            values = {f"val_loss_{kind}": loss for kind, (loss, _) in averaged.items()}
            values |= {f"val_loss_{kind}_raw": loss for kind, (loss, _) in raw.items()}
            values |= {
                "grad_norm": self.norm,
                "tokens": self.tokens,
                "tokens_per_second": self.speed,
            }
            curves = {f"val_curve_{kind}": curve for kind, (_, curve) in averaged.items()}
            self._write({"step": self.progress.step} | values | self._costs() | curves)
        self.restart_clock()

    def _costs(self) -> dict:
        return {
            "memory_bytes": peak_memory(self.procs.device),
            "skipped_steps": self.progress.skipped,
        }

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}", file=sys.stderr)

    def close(self) -> None:
        if self.active:
            self.bar.close()
            if self.wandb:
                self.wandb.finish()

    def _say(self, text: str, file=None) -> None:
        tqdm.write(text, file=file or sys.stdout)
        sys.stdout.flush()

    def restart_clock(self) -> None:
        self.clock, self.clock_tokens, self.clock_flops = time.perf_counter(), 0, 0.0

    def _write(self, values: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(to_json(values) + "\n")
        except OSError as error:
            if not self.warned:
                self.warn(f"cannot write {self.path}: {error}; training goes on without it")
            self.warned = True
        if self.wandb:
            numbers = {
                k: v for k, v in values.items() if k != "step" and isinstance(v, int | float)
            }
            self.wandb.log(numbers, step=values["step"])


def tokens_of(config: Config, steps: range) -> int:
    """Tokens in the global batches of these steps."""
    lengths = batch_lengths(
        config.seed, steps, config.model.block_size, config.data.random_length_prob
    )
    return config.train.batch_size * int(lengths.sum())


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the most that was allocated on this GPU, or that this process had resident; None where it is not told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl, without any that a kill or a full disk cut short."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def drop_later_lines(path: Path, step: int) -> None:
    """Keep the lines of metrics.jsonl up to `step`: the steps after the checkpoint are about to be run again."""
    kept = [to_json(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    if path.exists():
        write_atomically(path, lambda file: file.write("".join(kept).encode()))


def start_wandb(config: Config):
    """Start or continue the Weights & Biases run of this run folder: one id across resumes."""
    try:
        import wandb
    except ImportError:
        raise ValueError(
            "wandb.mode is set but wandb is not installed; pip install wandb, or leave it out"
        ) from None
    id_file = config.run_folder / "wandb_id"
    if not id_file.exists():
        write_atomically(id_file, lambda f: f.write(secrets.token_hex(4).encode()))
    try:
        return wandb.init(
            project=config.wandb.project,
            name=config.name,
            id=id_file.read_text(),
            resume="allow",
            mode=config.wandb.mode,
            dir=str(config.run_folder),
            config=asdict(config),
        )
    except wandb.errors.Error as error:
        raise ValueError(
            f"Weights & Biases did not start: {error}; log in, or pass --wandb.mode offline"
        ) from error


# ---- drawing ---------------------------------------------------------------------------------------------------------


def plot_losses(folder: Path) -> None:
    """Draw metrics.jsonl as loss.png: training loss, and validation loss in every order."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = read_metrics(folder / "metrics.jsonl")
    if not lines:
        return
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    labels = {
        "loss": "training, the run's own orders",
        "val_loss_l2r": "validation, left to right",
        "val_loss_random": "validation, random order",
        "val_loss_fixed": "validation, the run's fixed order",
    }
    for key, label in labels.items():
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            style = (
                {"linewidth": 0.8, "alpha": 0.6}
                if key == "loss"
                else {"marker": "o", "markersize": 3}
            )
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = folder / ".loss.png.tmp"
    figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
    os.replace(temporary, folder / "loss.png")


def plot_runs(folders: list[Path], file: Path, over: str = "tokens") -> None:
    """Draw runs against each other into one PNG: those of PANELS that at least one of them has numbers for.

    Args:
        folders: run folders. Raises ValueError for one without metrics.
        over: what stands on the x axis, "tokens" or "steps".
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if file.suffix != ".png" or file.is_dir():
        raise ValueError(f"cannot draw to {file}: the plot is a PNG; name a file that ends in .png")
    runs = {folder: metrics_of(folder) for folder in dict.fromkeys(folders)}
    known = {key for lines in runs.values() for line in lines for key in line}
    panels = [panel for panel in PANELS if known & set(panel[2])]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (5.2 * columns, 3.8 * rows + 0.6)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    colors = (
        plt.get_cmap("tab10").colors
        if len(runs) <= 10
        else plt.get_cmap("turbo")(np.linspace(0, 1, len(runs)))
    )
    for axes, (title, unit, keys) in zip(grid.flat, panels, strict=False):
        for lines, color in zip(runs.values(), colors, strict=False):
            draw_panel(axes, lines, keys, color, over)
        by_step = keys[0].startswith("val_curve")
        axes.set_xlabel("share of the tokens that are known" if by_step else over)
        axes.set_ylabel(unit)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    handles = [
        plt.Line2D([], [], color=color, linewidth=2) for _, color in zip(runs, colors, strict=False)
    ]
    figure.legend(
        handles, run_labels(list(runs)), loc="outside lower center", ncols=min(4, len(runs))
    )
    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    plt.close(figure)
    write_atomically(file, lambda f: f.write(image.getvalue()))


def draw_panel(axes, lines: list[dict], keys: tuple[str, ...], color, over: str) -> None:
    """Draw what one run's lines hold under these keys."""
    from matplotlib.ticker import LogFormatter

    for key, style in zip(keys, ("-", "--"), strict=False):
        values = {line["step"]: line[key] for line in lines if line.get(key) is not None}
        if not values:
            continue
        if key.startswith("val_curve"):
            curve = values[max(values)]
            share = (np.arange(len(curve)) + 0.5) / len(curve)
            axes.plot(
                share,
                [np.nan if y is None else y for y in curve],
                style,
                color=color,
                linewidth=1.2,
            )
            continue
        x, y = x_axis(lines, list(values), over), np.array(list(values.values()), dtype=float)
        if key.startswith("val_loss"):
            width = 1.5 if style == "-" else 1.0
            axes.plot(x, y, style, color=color, linewidth=width, marker="o", markersize=2.5)
        else:
            axes.plot(x, y, color=color, linewidth=0.5, alpha=0.25)
            axes.plot(x, smoothed(y), color=color, linewidth=1.5)
        if key == "grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(LogFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def metrics_of(folder: Path) -> list[dict]:
    """The lines of a run folder's metrics.jsonl. Raises ValueError where there are none to draw."""
    path = folder / "metrics.jsonl"
    lines = read_metrics(path)
    keys = {key for _, _, panel_keys in PANELS for key in panel_keys}
    if any(key in keys and value is not None for line in lines for key, value in line.items()):
        return lines
    found = "its metrics.jsonl holds no losses" if lines else "its metrics.jsonl has no whole line"
    if not path.exists():
        found = "it has no metrics.jsonl" if folder.is_dir() else "there is no such folder"
    raise ValueError(
        f"cannot draw {folder}: {found}; give folders of runs that have trained, as out/NAME"
    )


def run_labels(folders: list[Path]) -> list[str]:
    """What the legend calls the runs: their names, or their paths where names are alike."""
    names = [folder.resolve().name for folder in folders]
    labels = [
        str(f) if names.count(name) > 1 else name for f, name in zip(folders, names, strict=True)
    ]
    return [label.replace("$", r"\$") for label in labels]  # to matplotlib dollars are mathematics


def x_axis(lines: list[dict], steps: list[int], over: str) -> np.ndarray:
    """The steps, or the tokens seen by then: between the lines that tell them, in proportion."""
    seen = {line["step"]: line["tokens"] for line in lines if "tokens" in line}
    if over == "steps" or not seen:
        return np.array(steps, dtype=float)
    known = [0, *sorted(seen)]
    return np.interp(steps, known, [0, *(seen[step] for step in known[1:])])


def smoothed(values: np.ndarray) -> np.ndarray:
    """Exponential moving average over a fiftieth of the values, unbiased at its start."""
    keep, total, weight, result = 1 - 1 / max(1.0, len(values) / 50), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(total / weight)
    return np.array(result)
