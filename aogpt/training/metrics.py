"""The log of a run: metrics.jsonl, and the lines that it prints while it trains.

Every row has step, grad_norm, tokens (since the run began), tokens_per_second,
memory_bytes (the peak of the main process), skipped_steps. Tokens are those that are
predicted: no prompts, no padding. A training row, at step 1 and every
train.log_interval steps, also has loss (the objective, averaged over the steps since
the last row or resume; for SEDD this is not val_loss_random), lr, with Muon muon_lr,
and mfu (null unless the GPU's peak is known). A validation row, every eval.interval
steps:

    val_loss_KIND      nats per token of the averaged weights; KIND: l2r, random (any
                       order), fixed or own (the run's orders, in its groups)
    val_loss_KIND_raw  of the last weights
    val_error_KIND     standard error of val_loss_KIND over random orders, if
                       eval.draws > 1

Plots and studies read every key that begins with val_loss as such a loss."""

import contextlib
import math
import os
import resource
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from ..data.loader import TokenDataset
from ..runtime.command_line import visible
from ..runtime.errors import UserError, reason_of
from ..runtime.files import to_json, write_jsonl, write_text
from ..runtime.processes import Processes
from ..systems import flops_per_token
from .checkpoint import Progress
from .config import Config
from .optimizers import learning_rates
from .val_losses import LossByOrders, read_metrics

ORDER_TITLES = {
    "l2r": "left to right",
    "random": "any order",
    "fixed": "the run's fixed order",
    "own": "the run's orders",
}
# Dense bfloat16 peak, operations per second, from the maker's data sheet; by the exact
# name that the driver gives.
PEAK_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "AMD Instinct MI300X": 1307.4e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of a device at a precision; None where it
    is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device))


class Log:
    """The log of a run on the main process: metrics.jsonl, lines on the terminal, and
    Weights & Biases."""

    def __init__(
        self, config: Config, procs: Processes, progress: Progress, data: TokenDataset
    ):
        """Open the log. progress: its counts of sequences, tokens and skipped steps
        grow as the run goes."""
        self.config = config
        self.procs = procs
        self.progress = progress
        self.data = data
        self.path = config.run_folder / "metrics.jsonl"
        self.peak_flops = peak_flops(procs.device, config.dtype_on(procs.device))
        self.norm: float | None = None
        self.tokens_per_second: float | None = None
        self.losses: list[float] = []  # since the last row
        # The time left is measured from the end of this step, which includes
        # compilation.
        self.first_step = progress.step + 1
        self.started = 0.0
        self.restart_clock()
        self.wandb = None
        if procs.main:
            drop_later_rows(self.path, progress.step)
            if config.wandb.mode != "disabled":
                self.wandb = start_wandb(config)

    def count_and_log(self, losses: Iterator[tuple[int, float, float]]) -> None:
        """Count and log finished steps, from 1: (step, loss, gradient norm). Sequences,
        tokens and skipped steps are counted in `progress`."""
        t = self.config.train
        for step, loss, norm in losses:
            finite = math.isfinite(loss + norm)
            tokens = t.batch_size * self.data.block_size
            if self.data.of_records:  # those that are predicted
                tokens = self.data.predicted(self.config.seed, step - 1, t.batch_size)
            progress = self.progress
            progress.sequences += t.batch_size
            progress.tokens += tokens
            if finite:
                progress.skipped_in_a_row = 0
            else:
                progress.skipped += 1
                progress.skipped_in_a_row += 1
            self.norm = norm
            self.clock_tokens += tokens
            self.clock_steps += 1
            self.losses.append(loss)
            if step == self.first_step:
                self.started = time.perf_counter()
            if step % t.log_interval == 0 or step in (1, t.steps) or not finite:
                self._training_row(step)

    def _training_row(self, step: int) -> None:
        """Write a row of the steps since the last one, and print it."""
        t = self.config.train
        loss = sum(self.losses) / len(self.losses)
        self.losses = []
        seconds = time.perf_counter() - self.clock
        self.tokens_per_second = self.clock_tokens / seconds
        rates = learning_rates(step - 1, self.config)  # schedules count steps from 0
        text = f"step {step}/{t.steps}  loss {loss:.4f}  "
        text += f"{self.tokens_per_second:,.0f} tokens/s"
        mfu = None
        if self.peak_flops:
            size = self.data.block_size
            tokens = self.clock_steps * t.batch_size * size  # with prompts and padding
            flops = tokens * flops_per_token(self.config.model, size)
            mfu = flops / seconds / self.procs.world_size / self.peak_flops
            text += f"  MFU {mfu:.1%}"
        text += f"  gradient norm {self.norm:#.3g}"
        for name, rate in rates.items():
            text += f"  {name} {rate:.3g}"
        done = step - self.first_step
        left = t.steps - step
        if done and left:
            minutes = left * (time.perf_counter() - self.started) / done / 60
            text += f"  {minutes:.1f} min left"
        self._print(text)
        self._write({"step": step, "loss": loss, **rates, "mfu": mfu})
        self.restart_clock()

    def validation(self, losses: dict[str, LossByOrders], num_blocks: int) -> None:
        """Log the result of `evaluate`. num_blocks: of the whole split."""
        step = self.progress.step
        averaged = losses["ema"]
        text = ", ".join(
            f"{ORDER_TITLES[kind]} {loss.mean:.4f}" for kind, loss in averaged.items()
        )
        blocks = min(self.config.eval.sequences, num_blocks)
        self._print(
            f"step {step}/{self.config.train.steps}  validation loss of the averaged "
            f"weights on {blocks:,} of {num_blocks:,} blocks, nats per token: {text}"
        )
        row: dict[str, float] = {"step": step}
        for kind, loss in averaged.items():
            row[f"val_loss_{kind}"] = loss.mean
        for kind, loss in losses["raw"].items():
            row[f"val_loss_{kind}_raw"] = loss.mean
        for kind, loss in averaged.items():
            if loss.error is not None:
                row[f"val_error_{kind}"] = loss.error
        self._write(row)
        self.restart_clock()

    def warn(self, message: str) -> None:
        """Print a warning on the standard error."""
        self._print(visible(f"warning: {message}", one_line=True), sys.stderr)

    def restart_clock(self) -> None:
        """Measure the speed from here on, so that it excludes validations and
        checkpoints."""
        self.clock = time.perf_counter()
        self.clock_tokens = 0
        self.clock_steps = 0

    def close(self) -> None:
        """Close Weights & Biases."""
        if self.wandb:
            self.wandb.finish()

    def _print(self, text: str, file=None) -> None:
        with contextlib.suppress(OSError):  # training outlives its terminal
            self.procs.print0(text, file=file, flush=True)

    def _write(self, row: dict) -> None:
        if not self.procs.main:
            return
        row["grad_norm"] = self.norm
        row["tokens"] = self.progress.tokens
        row["tokens_per_second"] = self.tokens_per_second
        row["skipped_steps"] = self.progress.skipped
        row["memory_bytes"] = peak_memory(self.procs.device)
        try:
            with open(self.path, "a") as file:
                file.write(to_json(row) + "\n")
        except OSError as error:  # a full disk must not end the run
            self.warn(f"a row of {self.path} is lost: {error}")
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None})


def peak_memory(device: torch.device) -> int:
    """Return the bytes that the process has had at most on the GPU, or without one in
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def drop_later_rows(path: Path, step: int) -> None:
    """Remove the rows after `step`, as later steps will run again; before the first
    step all, as its validation does, too."""
    if path.exists():
        rows = read_metrics(path) if step else []
        write_jsonl(path, [row for row in rows if row["step"] <= step])


def start_wandb(config: Config):
    """Start or resume the Weights & Biases run of this run folder."""
    try:
        import wandb
    except ImportError:
        raise UserError(
            "wandb.mode is set but wandb is not installed: pip install wandb"
        ) from None
    id_file = config.run_folder / "wandb_id"
    if not id_file.exists():
        write_text(id_file, secrets.token_hex(4))
    run_id = id_file.read_text(errors="replace").strip()
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "aogpt"),
            mode=config.wandb.mode,
            name=config.name,
            id=run_id,
            resume="allow",
            dir=str(config.run_folder),
            config=asdict(config),
        )
    except (ValueError, wandb.errors.Error) as error:
        names = [name for name in os.environ if name.startswith("WANDB_")]
        raise UserError(
            f"wandb: {reason_of(error)}; check {', '.join(names)}, log in, or pass "
            "--wandb.mode offline"
        ) from error
    # As a plain value: W&B drops rows whose step is not above its own count, as after a
    # kill.
    run.define_metric("*", step_metric="step")
    return run
