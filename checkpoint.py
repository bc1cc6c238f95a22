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
STATE_KEYS = ("step", "model_config", "model", "ema", "optimizer", "config", "data", "best")


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
            mark_best(path, run_folder)
    except (OSError, RuntimeError) as error:  # torch reports a failing write as RuntimeError
        reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        older = find(run_folder, up_to=state["step"] - 1)
        kept = f"the last good checkpoint is {older[-1]}" if older else "there is no earlier checkpoint"
        raise CheckpointError(f"could not write {path}: {reason}; {kept}. Is the disk full?") from error
    prune(run_folder, state["step"], keep)
    return path


def prune(run_folder: Path, step: int, keep: int) -> None:
    """Drop all but the newest `keep` checkpoints of steps <= step."""
    for old in find(run_folder, up_to=step)[:-keep]:
        old.unlink(missing_ok=True)


def mark_best(source: Path, run_folder: Path) -> None:
    """Make best.pt the checkpoint `source`: a second name of the same file where that is possible, else a copy."""
    target = run_folder / "best.pt"
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # renaming a file to another name of itself does nothing


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


def finish_interrupted_save(run_folder: Path, state: dict, path: Path, keep: int) -> None:
    """Do what a kill in the middle of saving has left undone: mark the best, drop old ones and partial files."""
    if state["best"]["step"] == state["step"]:
        mark_best(path, run_folder)
    prune(run_folder, state["step"], keep)
    for folder in (run_folder, run_folder / "checkpoints"):
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; only those of steps <= up_to, if it is given."""
    names = (Path(run_folder) / "checkpoints").glob("step_*.pt")
    steps = {path: int(found[1]) for path in names if (found := re.fullmatch(r"step_(\d{8,})\.pt", path.name))}
    return sorted((path for path in steps if up_to is None or steps[path] <= up_to), key=steps.get)


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
            f"{path} cannot be read as a checkpoint (truncated, foreign, or a file that would run code): {first_line}; "
            f"supported are checkpoints that train.py wrote ({FORMAT})"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = f"keys {sorted(map(str, state))[:6]}" if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} holds {found}; supported are checkpoints that train.py wrote ({FORMAT})")
    if missing := [key for key in STATE_KEYS if key not in state]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}; it was not written by this train.py")
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
            if os.environ.get("RANK", "0") == "0":
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
    try:
        model = AOGPT(ModelConfig(**state["model_config"]))
    except TypeError as error:
        raise CheckpointError(f"{path} is of another version of this code: {error}") from None
    copy_parameters(model, state["ema"]["weights"] if weights == "ema" else state["model"])
    data = state["data"]
    return Loaded(model.to(device).eval(), str(path), state["step"], weights, data["tokenizer"], data["vocab_size"])


def load_model(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> AOGPT:
    """The model of `load`."""
    return load(path, weights, device).model
