"""metrics.jsonl of a run: what is measured while it trains, written and read back.

A training line, every train.log_interval steps, holds

    step, loss, lr, grad_norm, tokens, tokens_per_second, mfu, memory_bytes, skipped_steps; with
    Muon muon_lr

where loss is the objective's: of SEDD score entropy, a bound of its own, which is not the
normalised likelihood that val_loss_random is of

and an evaluation line, every eval.interval steps,

    step
    val_loss_KIND        nats per token of the averaged weights; KIND: l2r, random (any order),
                         fixed or own (the run's own orders, in its groups)
    val_loss_KIND_raw    of the last weights; val_loss_KIND_ema0.99 of those averaged with another
                         decay (optim.more_ema_decays)
    val_error_KIND       standard error of val_loss_KIND by its draws of orders, if eval.draws > 1
    val_curve_KIND       of the averaged weights, how hard step i of n is: a list of P = min(64, n)
                         means over sequences and over the steps i with floor(i P / n) = 0 .. P - 1.
                         An encoder, which has no steps: the mean over its masked tokens where i
                         others are known; null where no sequence has as many
    grad_norm, tokens, memory_bytes, skipped_steps    as above
    tokens_per_second    of the last training line

tokens are those seen since the run began, and memory_bytes is the peak of the main process:
allocated on its GPU, or resident on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from data.loader import batch_lengths
from model import AOGPT
from runtime.devices import peak_flops, pick_dtype
from runtime.errors import UserError
from runtime.files import read_lines, to_json, write_jsonl, write_text
from runtime.processes import Processes
from runtime.validation import FileError, NonNegative, from_json, read_bounded
from training.config import Config
from training.validation import Losses
from variants import flops_per_token


class Log:
    """metrics.jsonl, the progress bar and Weights & Biases, on the main process only; on the others
    its methods do nothing."""

    def __init__(self, config: Config, procs: Processes, model: AOGPT, progress, block_size: int):
        """progress: state.Progress; its step and count of skipped steps are read as they change.
        block_size: of the data, tokens."""
        self.config, self.procs, self.progress, self.active = config, procs, progress, procs.main
        self.block_size = block_size
        self.path = config.run_folder / "metrics.jsonl"
        self.flops_per_token = functools.partial(flops_per_token, model.config)
        self.peak_flops = peak_flops(procs.device, pick_dtype(config.train.dtype, procs.device))
        self.tokens = tokens_of(config, range(progress.step), block_size)
        self.norm = self.tokens_per_second = None  # of the last step and of the last training line
        self.wandb, self.unwritten = None, ""
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
        if not self.active:
            return
        t = self.config.train
        tokens = tokens_of(self.config, range(step - 1, step), self.block_size)
        self.norm = norm
        self.tokens += tokens
        self.clock_tokens += tokens
        self.clock_flops += tokens * self.flops_per_token(tokens // t.batch_size)
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        # A step that is not finite always gets its line.
        if step % t.log_interval == 0 or step == t.steps or not math.isfinite(loss + norm):
            self._training_line(step, loss, rates)

    def _training_line(self, step: int, loss: float, rates: dict[str, float]) -> None:
        seconds = time.perf_counter() - self.clock
        self.tokens_per_second = self.clock_tokens / seconds
        mfu = "unknown"
        if self.peak_flops:
            mfu = self.clock_flops / seconds / (self.peak_flops * self.procs.world_size)
        line = {"step": step, "loss": loss, **rates, "grad_norm": self.norm, "tokens": self.tokens}
        line |= {"tokens_per_second": self.tokens_per_second, "mfu": mfu}
        self._write(line | self._costs())
        if not sys.stderr.isatty():  # where there is no progress bar
            percent = mfu if mfu == "unknown" else f"{mfu:.1%}"
            speed = f"{self.tokens_per_second:,.0f} tokens/s, MFU {percent}"
            print(f"step {step}: loss {loss:.4f}, {speed}", flush=True)
        self.restart_clock()

    def validation(self, losses: dict[str, Losses]) -> None:
        """An evaluation: what `evaluate` returns."""
        if self.active:
            step, averaged = self.progress.step, losses[""]
            text = ", ".join(f"{kind} {loss.mean:.4f}" for kind, loss in averaged.items())
            self._print(f"step {step}: validation {text} nats per token (averaged weights)")
            line = {"step": step}
            for weights, of_kinds in losses.items():
                line |= {f"val_loss_{kind}{weights}": v.mean for kind, v in of_kinds.items()}
            known = averaged.items()
            line |= {f"val_error_{kind}": v.error for kind, v in known if v.error is not None}
            line |= {"grad_norm": self.norm, "tokens": self.tokens}
            line |= {"tokens_per_second": self.tokens_per_second} | self._costs()
            line |= {f"val_curve_{kind}": loss.curve for kind, loss in averaged.items()}
            self._write(line)
        self.restart_clock()

    def warn(self, message: str) -> None:
        self._print(f"warning: {message}", file=sys.stderr)

    def restart_clock(self) -> None:
        """Speed is measured from here: evaluations and checkpoints do not count."""
        self.clock, self.clock_tokens, self.clock_flops = time.perf_counter(), 0, 0.0

    def close(self) -> None:
        if self.active:
            if self.unwritten:
                with contextlib.suppress(OSError):  # of which the user has been warned
                    append(self.path, self.unwritten)
            self.bar.close()
            if self.wandb:
                self.wandb.finish()

    def _costs(self) -> dict:
        memory = peak_memory(self.procs.device)
        return {"memory_bytes": memory, "skipped_steps": self.progress.skipped}

    def _print(self, text: str, file=None) -> None:
        """A line above the progress bar, not through it."""
        tqdm.write(text, file=file or sys.stdout)
        sys.stdout.flush()

    def _write(self, line: dict) -> None:
        warned, self.unwritten = bool(self.unwritten), f"{self.unwritten}{to_json(line)}\n"
        try:
            append(self.path, self.unwritten)
            self.unwritten = ""
        except OSError as error:  # a full disk, say, is no reason to lose the run
            if not warned:
                self.warn(f"cannot write {self.path}: {error}; its lines wait until there is room")
        if self.wandb:
            numbers = {key: v for key, v in line.items() if isinstance(v, int | float)}
            step = numbers.pop("step")
            self.wandb.log(numbers, step=step)


def append(path: Path, text: str) -> None:
    """Add text to a file, or nothing: what a full disk has cut short is taken back."""
    with open(path, "ab", buffering=0) as file:
        size, rest = file.tell(), memoryview(text.encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            os.truncate(path, size)
            raise


# ---- what is counted -----------------------------------------------------------------------------


def tokens_of(config: Config, steps: range, block_size: int) -> int:
    """Tokens in the global batches of these steps. block_size: of the data."""
    lengths = batch_lengths(config.seed, steps, block_size, config.data.random_length_prob)
    return config.train.batch_size * int(lengths.sum())


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the most that was allocated on this GPU, or that this process had resident; None where
    it is not told."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


# ---- metrics.jsonl -------------------------------------------------------------------------------


Value = int | float | list[int | float | None] | Literal["unknown"] | None


class Line(TypedDict, extra_items=Value):
    """A line of metrics.jsonl: numbers, null where they are not finite, but for an unknown mfu and
    the lists of val_curve_KIND."""

    step: NonNegative


def read_metrics(path: Path) -> list[dict]:
    """The lines of metrics.jsonl, without any that a kill or a full disk cut short or that holds
    what no line does."""
    return [line for _, line in parsed_lines(path) if line is not None]


def parsed_lines(path: Path) -> Iterator[tuple[str, dict | None]]:
    """The place of each line of metrics.jsonl, and what it holds; None where that is no line."""
    for place, text in read_lines(path, "metrics") if path.is_file() else ():
        found = None
        with contextlib.suppress(FileError):
            line = from_json(text, Line, place)
            if all(fits(key, value) for key, value in line.items()):
                found = line
        yield place, found


def fits(key: str, value: Value) -> bool:
    """Whether a value is of the kind that its key has."""
    if isinstance(value, list) or key.startswith("val_curve_"):
        return isinstance(value, list) and key.startswith("val_curve_")
    if isinstance(value, int) and abs(value) >= 2**63:  # which NumPy has no number for
        return False
    return value != "unknown" or key == "mfu"


def drop_later_lines(path: Path, step: int) -> None:
    """Keep the lines of metrics.jsonl up to `step`: the steps after the checkpoint are about to be
    run again. Where others than the last, which a kill may have cut short, are no lines of a run,
    the file as it was is kept beside it, and named in a warning."""
    if not path.exists():
        return
    lines = list(parsed_lines(path))
    if odd := [place for place, line in lines[:-1] if line is None]:
        kept = path.with_name(f"{path.name}.damaged")
        shutil.copyfile(path, kept)
        print(f"warning: {odd[0]} is no line of a run; all is kept in {kept}", file=sys.stderr)
    write_jsonl(path, [line for _, line in lines if line is not None and line["step"] <= step])


# ---- Weights & Biases ----------------------------------------------------------------------------


def start_wandb(config: Config):
    """Start or continue the Weights & Biases run of this run folder: one id across resumes."""
    try:
        import wandb
    except ImportError:
        raise UserError(
            "wandb.mode is set but wandb is not installed; pip install wandb, or leave it out"
        ) from None
    id_file = config.run_folder / "wandb_id"
    if not id_file.exists():
        write_text(id_file, secrets.token_hex(4))
    try:
        return wandb.init(
            project=config.wandb.project,
            name=config.name,
            id=read_bounded(id_file, 100).decode(errors="replace").strip(),
            resume="allow",
            mode=config.wandb.mode,
            dir=str(config.run_folder),
            config=asdict(config),
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"Weights & Biases did not start: {error}; log in, or pass --wandb.mode offline"
        ) from error
