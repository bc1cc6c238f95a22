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
from tqdm import tqdm

from ..data.loader import TokenDataset
from ..runtime.command_line import visible
from ..runtime.errors import UserError, reason_of
from ..runtime.files import to_json, write_jsonl, write_text
from ..runtime.processes import Processes
from ..systems import flops_per_token
from .checkpoint import Progress
from .config import Config
from .optimizers import learning_rates
from .val_losses import Losses, read_metrics

ORDER_TITLES = {
    "l2r": "left to right",
    "random": "any order",
    "fixed": "the run's fixed order",
    "own": "the run's orders",
}
CPU_SPEED = 5e10  # operations per second, of the quickstart on two cores
SLOW = 5e14  # operations: three hours of such a CPU
MANY_EPOCHS = 50
FIRST_STEP_SECONDS = 10  # between two lines of the first step
Units = tuple[tuple[float, str], ...]  # largest first
TIME: Units = (
    (86400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "µs"),
)


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


def in_units(value: float, units: Units, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, in the largest unit that leaves
    at least 1."""
    size, unit = next((pair for pair in units if value >= pair[0]), units[-1])
    amount = value / size
    decimals = max(0, digits - 1 - math.floor(math.log10(amount))) if amount else 0
    return f"{amount:,.{decimals}f} {unit}"


def size_notes(config: Config, epochs: float, device: torch.device) -> list[str]:
    """Return notes for a run that would take days on a CPU, or that repeats its text
    very often. epochs: passes over the training data from its first step to its
    last."""
    t = config.train
    notes = []
    tokens = t.steps * t.batch_size * config.model.block_size
    operations = tokens * flops_per_token(config.model, config.model.block_size)
    if device.type == "cpu" and operations > SLOW:
        seconds = in_units(operations / CPU_SPEED, TIME, digits=2)
        of_step = in_units(operations / t.steps / CPU_SPEED, TIME, digits=2)
        notes.append(
            f"note: about {of_step} a step and {seconds} in all on a CPU of "
            f"{CPU_SPEED:.0e} operations a second; smaller: configs/quickstart.toml, "
            "or --model.n-layer, --model.n-embd, --train.batch-size, --train.steps"
        )
    if epochs > MANY_EPOCHS:
        notes.append(
            f"note: each text is read {epochs:,.0f} times, and validation may get "
            "worse; lower --train.steps, or take a smaller model or more text"
        )
    return notes


def notes_on_records(config: Config, data: TokenDataset) -> list[str]:
    """Return notes for a run on records: on ends that other orders than left to right
    do not learn, and on a model that cannot see where a record begins."""
    m = config.model
    notes = []
    orders, _ = config.last_stage()
    has_ends = "lengths" in data.meta["splits"][data.split]
    if has_ends and not data.end_given and not m.l2r_only and not orders.is_l2r:
        notes.append(
            "note: samples of this run end from left to right alone (--until-end); set "
            "data.end = 'given' to have records that end in any order"
        )
    hides_beginning = m.is_encoder or m.target == "mask_query" or m.start == "hidden"
    if has_ends and m.position == "rotary" and hides_beginning:
        notes.append(
            "note: with rotary positions alone this model knows distances between "
            "tokens, not where a record begins: set model.position = 'both'"
        )
    return notes


class Log:
    """The log of a run on the main process: metrics.jsonl, progress on the terminal,
    and Weights & Biases."""

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
        # Predicted tokens of a step; None where steps differ.
        self.tokens_per_step: int | None = None
        if not data.of_records:
            self.tokens_per_step = config.train.batch_size * data.block_size
        if progress.step and not progress.tokens:  # in a checkpoint of an older version
            batch_size = progress.sequences / progress.step
            share = batch_size / config.train.batch_size
            tokens = self.count_tokens(range(progress.step))
            progress.tokens = round(tokens * share)
        self.norm: float | None = None
        self.tokens_per_second: float | None = None
        self.losses: list[float] = []  # since the last row
        # measured from the end of that step
        self.first_step = progress.step + 1
        self.started = 0.0
        self.restart_clock()
        self.last_line = self.clock
        self.wandb = None
        if procs.main:
            drop_later_rows(self.path, progress.step)
            if config.wandb.mode != "disabled":
                self.wandb = start_wandb(config)
        self.bar = tqdm(
            total=config.train.steps,
            initial=progress.step,
            unit="step",
            disable=not (procs.main and can_show_bar()),
        )

    def count_and_log(self, losses: Iterator[tuple[int, float, float]]) -> None:
        """Count and log finished steps, from 1: (step, loss, gradient norm). Sequences,
        tokens and skipped steps are counted in `progress`."""
        t = self.config.train
        for step, loss, norm in losses:
            finite = math.isfinite(loss + norm)
            tokens = self.tokens_per_step
            if tokens is None:
                tokens = self.count_tokens(range(step - 1, step))
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
            self.bar.update()
            if step == self.first_step:  # includes compilation
                self.started = time.perf_counter()
            has_row = step % t.log_interval == 0 or step in (1, t.steps)
            if has_row or not finite:
                self._training_row(step)

    def first_micro_steps(self, done: int, count: int) -> None:
        """Print now and then how far the first step is, which can take minutes. done:
        of its `count` micro-batches."""
        now = time.perf_counter()
        if now - self.last_line > FIRST_STEP_SECONDS:
            self.last_line = now
            self._print(f"step {self.first_step}: {done} of {count} micro-batches done")

    def _training_row(self, step: int) -> None:
        """Write a row of the steps since the last one, and print it."""
        loss = sum(self.losses) / len(self.losses)
        self.losses = []
        seconds = time.perf_counter() - self.clock
        self.tokens_per_second = self.clock_tokens / seconds
        rates = learning_rates(step - 1, self.config)  # schedules count steps from 0
        text = f"loss {loss:.4f}  {self.tokens_per_second:,.0f} tokens/s"
        mfu = None
        if self.peak_flops:
            mfu = self._flops_per_second(seconds) / self.peak_flops
            text += f"  MFU {mfu:.1%}"
        text += f"  gradient norm {self.norm:#.3g}"
        for name, rate in rates.items():
            text += f"  {name} {rate:.3g}"
        self.bar.set_postfix_str(text)
        if self.bar.disable:
            steps = self.config.train.steps
            self._print(f"step {step}/{steps}  {text}{self.time_left(step)}")
        row: dict[str, float | None] = {"step": step, "loss": loss}
        row.update(rates)
        row["mfu"] = mfu
        self._write(row)
        self.restart_clock()

    def _flops_per_second(self, seconds: float) -> float:
        """Return the operations of each process in the last steps, which took so
        long."""
        size = self.data.block_size
        tokens = self.clock_tokens
        if self.data.of_records:  # with prompts and padding
            tokens = self.config.train.batch_size * size * self.clock_steps
        flops = tokens * flops_per_token(self.config.model, size)
        return flops / seconds / self.procs.world_size

    def validation(self, losses: dict[str, Losses], num_blocks: int) -> None:
        """Log the result of `evaluate`. num_blocks: of the whole split."""
        step = self.progress.step
        averaged = losses[""]
        text = ", ".join(
            f"{ORDER_TITLES[kind]} {loss.mean:.4f}" for kind, loss in averaged.items()
        )
        blocks = min(self.config.eval.sequences, num_blocks)
        self._print(
            f"step {step}/{self.config.train.steps}  validation loss of the averaged "
            f"weights on {blocks:,} of {num_blocks:,} blocks, nats per token: {text}"
        )
        row: dict[str, float] = {"step": step}
        for weights, of_weights in losses.items():
            for kind, loss in of_weights.items():
                row[f"val_loss_{kind}{weights}"] = loss.mean
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

    def count_tokens(self, steps: range) -> int:
        """Count the tokens that are predicted in these steps, from 0."""
        seed = self.config.seed
        batch_size = self.config.train.batch_size
        if self.data.of_records:
            return sum(self.data.predicted(seed, step, batch_size) for step in steps)
        return len(steps) * batch_size * self.data.block_size

    def time_left(self, step: int) -> str:
        """Return the time left in the run, with validations; "" if unknown or none."""
        done = step - self.first_step
        left = self.config.train.steps - step
        if not done or not left:
            return ""
        seconds = left * (time.perf_counter() - self.started) / done
        return f"  {in_units(seconds, TIME[:4], digits=2)} left"

    def close(self) -> None:
        """Close the progress bar and Weights & Biases."""
        self.bar.close()
        if self.wandb:
            self.wandb.finish()

    def _print(self, text: str, file=None) -> None:
        if not self.procs.main:
            return
        with contextlib.suppress(OSError):  # training outlives its terminal
            tqdm.write(visible(text), file=file or sys.stdout)  # above the progress bar
            sys.stdout.flush()

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
            numbers = {}
            for key, value in row.items():
                if isinstance(value, int | float):
                    numbers[key] = value
            self.wandb.log(numbers)


def can_show_bar() -> bool:
    """Return whether stderr is a terminal with rows, which some do not have."""
    return sys.stderr.isatty() and 0 not in os.get_terminal_size(2)


def peak_memory(device: torch.device) -> int:
    """Return the bytes that the process has had at most on the GPU, or without one in
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def drop_later_rows(path: Path, step: int) -> None:
    """Remove the rows after `step`, as later steps will run again."""
    if path.exists():
        write_jsonl(path, [row for row in read_metrics(path) if row["step"] <= step])


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
    except ValueError as error:  # of its settings, which it also takes from variables
        names = [name for name in os.environ if name.startswith("WANDB_")]
        raise UserError(
            f"wandb: {reason_of(error)}; check {', '.join(names) or 'wandb.project'}"
        ) from error
    except wandb.errors.Error as error:
        raise UserError(
            f"wandb: {error}; log in, or pass --wandb.mode offline"
        ) from error
    # As a plain value: W&B drops rows whose step is not above its own count, as after a
    # kill.
    run.define_metric("*", step_metric="step")
    return run
