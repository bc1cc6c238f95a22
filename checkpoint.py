"""Checkpoints: averaged weights, atomic writing, exact resume, and loading a model from a path.

A run folder holds

    config.toml            the resolved configuration
    metrics.jsonl          a JSON object a line: training and validation losses
    checkpoints/step_00001000.pt, ...   the newest few
    best.pt                the one with the lowest validation loss

A checkpoint is a dict of tensors and plain values. It is read with `torch.load(weights_only=True)`, which runs no code.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from model import AOGPT, ModelConfig

FORMAT = "aogpt-checkpoint-1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used; the message says which, why and what to do."""


class EMA:
    """Exponential moving average of a model's parameters (the paper, section 3; evaluation and sampling use it).

    The decay is warmed up: decay_t = min(decay, (1 + t) / (10 + t)) after t updates.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay, self.updates = decay, 0
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: torch.nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(list(self.weights.values()), [p.detach() for p in model.parameters()], 1 - decay)

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module):
        """The model with the averaged weights inside the block, with its own again after it."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        copy_parameters(model, self.weights)
        try:
            yield model
        finally:
            copy_parameters(model, own)


@torch.no_grad()
def copy_parameters(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy named weights into the model in place. Raises CheckpointError if names or shapes differ."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        odd = sorted(parameters.keys() ^ weights.keys())
        raise CheckpointError(f"the weights do not fit the model: {len(odd)} names differ, e.g. {odd[0]}")
    for name, p in parameters.items():
        if p.shape != weights[name].shape:
            raise CheckpointError(f"{name} is {tuple(weights[name].shape)} in the file, {tuple(p.shape)} in the model")
        p.copy_(weights[name])


@torch.no_grad()
def initialise(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2.

    Every weight of the source must have its place. Where the model has adaLN and the source has none, adaLN starts as
    the identity (shift 0, scale 0, gate 1), and other target-position tables start at 0, so that at first the model
    computes exactly what the source does.
    """
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        if name not in own or own[name].shape != weight.shape:
            found = tuple(own[name].shape) if name in own else "no such weight"
            raise CheckpointError(
                f"cannot start from these weights: {name} is {tuple(weight.shape)} in the source, {found} in the "
                f"model; give it the source's shape: {source.config}"
            )
        own[name].copy_(weight)
    for name, weight in own.items():
        if name not in weights and ("adaln" in name or name.endswith("wtpe.weight") and model.config.target != "adaln"):
            weight.zero_()
            if name.endswith("adaln.bias"):
                width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
                weight[2 * width : 3 * width] = weight[5 * width :] = 1
    if source.config.start != model.config.start:
        raise CheckpointError(f"set model.start = {source.config.start!r}: the source was trained with that")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, write) -> None:
    """Call write(file) on a temporary sibling, flush it to the disk and move it into place, or leave no trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(run_folder: Path, state: dict, keep: int, best: bool) -> Path:
    """Write checkpoints/step_N.pt, mark it as the best one if it is, and drop all but the newest `keep`.

    Args:
        state: what `training_state` gives. Raises CheckpointError when it cannot be written; older ones stay.
    """
    path = run_folder / "checkpoints" / f"step_{state['step']:08d}.pt"
    try:
        write_atomically(path, lambda file: torch.save(state, file))
        if best:
            _link(path, run_folder / "best.pt")
    except (OSError, RuntimeError) as error:  # torch reports a failing write as RuntimeError
        reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        older = find(run_folder)
        kept = f"the last good checkpoint is {older[-1]}" if older else "there is no earlier checkpoint"
        raise CheckpointError(f"could not write {path}: {reason}; {kept}. Is the disk full?") from error
    for old in find(run_folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _link(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def training_state(step: int, model: AOGPT, ema: EMA, optimizer, config: dict, data_meta: dict, best: dict) -> dict:
    """Everything that a run needs to go on exactly: data, orders and learning rate follow from the step."""
    return {
        "format": FORMAT,
        "step": step,
        "model_config": asdict(model.config),
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "ema": {"weights": ema.weights, "updates": ema.updates, "decay": ema.decay},
        "optimizer": optimizer.state_dict(),
        "config": config,
        "data": data_meta,
        "best": best,
        "torch": str(torch.__version__),
    }


# ---- reading ---------------------------------------------------------------------------------------------------------


def find(run_folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    names = (Path(run_folder) / "checkpoints").glob("step_*.pt")
    return sorted(path for path in names if re.fullmatch(r"step_\d{8,}\.pt", path.name))


def read(path: Path, verify: bool = False) -> dict:
    """Read one checkpoint file without running any code of it; verify: check the checksum of every record first."""
    try:
        if verify and (damaged := zipfile.ZipFile(path).testzip()):
            raise CheckpointError(f"{path} is damaged (checksum of {damaged})")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except Exception as error:  # torch raises many kinds for files that are truncated, foreign or unsafe
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint (truncated, foreign, or a file that would run code): {first_line}"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = f"keys {sorted(map(str, state))[:6]}" if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} holds {found}; supported are checkpoints that train.py wrote ({FORMAT})")
    return state


def read_newest(run_folder: Path) -> tuple[Path, dict] | None:
    """The newest checkpoint that can be read, checked in full; None if the run has none at all.

    A broken one is named on stderr and passed over. Raises CheckpointError if all are broken.
    """
    paths = find(run_folder)
    for path in reversed(paths):
        try:
            return path, read(path, verify=True)
        except CheckpointError as error:
            print(f"warning: {error}; trying the one before it", file=sys.stderr)
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {run_folder} can be read; move the folder away to start anew"
        )
    return None


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and where it came from."""

    model: AOGPT
    path: str
    step: int
    weights: str
    tokenizer: str
    vocab_size: int

    def describe(self) -> str:
        return f"{self.path} (step {self.step}, {self.weights} weights)"


def load(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> Loaded:
    """Load a model from a run folder (its newest checkpoint) or a checkpoint file, in eval mode.

    Args:
        path: run folder or .pt file.
        weights: "ema" for the averaged weights, "raw" for the last ones.

    Raises CheckpointError that says what was found and what is supported.
    """
    path = Path(path)
    if weights not in ("ema", "raw"):
        raise ValueError(f"weights is {weights!r}; give 'ema' or 'raw'")
    if not path.exists():
        raise CheckpointError(f"there is no {path}; give a run folder (out/NAME) or a checkpoint file (.pt)")
    if path.is_dir():
        found = read_newest(path)
        if found is None:
            raise CheckpointError(f"{path} holds no checkpoints/step_*.pt; is it the folder of a run that has trained?")
        path, state = found
    else:
        state = read(path)
    model = AOGPT(ModelConfig(**state["model_config"]))
    copy_parameters(model, state["ema"]["weights"] if weights == "ema" else state["model"])
    data = state["data"]
    return Loaded(model.to(device).eval(), str(path), state["step"], weights, data["tokenizer"], data["vocab_size"])


def load_model(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> AOGPT:
    """The model of `load`."""
    return load(path, weights, device).model
