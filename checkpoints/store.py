"""The checkpoints of a run: written whole or not at all, verified, found again, and dropped when newer ones are there.

A run folder holds

    config.toml            the resolved configuration
    metrics.jsonl          a JSON object a line: training and validation losses
    checkpoints/step_00001000.pt, ...   the newest few; of a sharded run, folders step_00001000 (see sharded.py)
    best.pt                the one with the lowest validation loss; of a sharded run, the link best to its folder

A checkpoint is a dict of tensors and plain values. Files are read with `torch.load(weights_only=True)` or as
safetensors: neither runs code that a file brings along.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import zipfile
from pathlib import Path

import safetensors.torch
import torch

from checkpoints import sharded
from checkpoints.errors import CheckpointError
from runtime.files import write_atomically

FORMAT = "aogpt-checkpoint-2"
SUPPORTED = (
    "supported are run folders and checkpoints of train.py, folders that convert.py wrote, and the released "
    "weights of AO-GPT and sigma-GPT (.pt) and of GPT-2, RADD and SEDD (config.json with model.safetensors or "
    "pytorch_model.bin)"
)
STATE_KEYS = ("step", "model_config", "ema", "config", "data", "best")
TENSOR_KEYS = {".pt": ("model", "optimizer"), "": ("shapes",)}  # besides, in a file and in a folder


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(run_folder: Path, state: dict, keep: int, best: bool) -> Path:
    """Write checkpoints/step_N.pt, mark it as the best one if it is, and drop all but the newest `keep`.

    Args:
        state: what `training_state` gives. Raises CheckpointError when it cannot be written; older ones stay.
    """
    path = path_of(run_folder, state["step"])
    try:
        write_atomically(path, lambda file: torch.save(state, file))
        if best:
            mark_best(path, run_folder)
    except (OSError, RuntimeError) as error:  # torch reports a failing write as RuntimeError
        reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        raise CheckpointError(f"could not write {path}: {reason}") from error
    prune(run_folder, state["step"], keep)
    return path


def path_of(run_folder: Path, step: int, sharded: bool = False) -> Path:
    return run_folder / "checkpoints" / (f"step_{step:08d}" + ("" if sharded else ".pt"))


def kept(run_folder: Path, step: int) -> str:
    """What there is before a checkpoint of a step that could not be written."""
    older = find(run_folder, up_to=step - 1)
    return f"the last good checkpoint is {older[-1]}" if older else "there is no earlier checkpoint"


def prune(run_folder: Path, step: int, keep: int) -> None:
    """Drop all but the newest `keep` checkpoints of steps <= step; of folders, not the best one."""
    best = (run_folder / "best").resolve()
    for old in find(run_folder, up_to=step)[:-keep]:
        if not old.is_dir():
            old.unlink(missing_ok=True)
        elif old.resolve() != best:
            rubbish = old.with_name(
                f".{old.name}.tmp"
            )  # a folder that is half removed must not pass for a checkpoint
            shutil.rmtree(rubbish, ignore_errors=True)
            os.rename(old, rubbish)
            shutil.rmtree(rubbish, ignore_errors=True)


def mark_best(source: Path, run_folder: Path) -> None:
    """Make best.pt a second name of the file `source` (or a copy, without links), or best a link to the folder."""
    target, other = run_folder / "best.pt", run_folder / "best"
    if source.is_dir():
        target, other = other, target
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        if source.is_dir():
            os.symlink(source.relative_to(run_folder), temporary)
        else:
            os.link(source, temporary)
    except OSError:  # a file system without links
        if source.is_dir():
            raise
        shutil.copyfile(source, temporary)
    for path in (
        target,
        other,
    ):  # a folder where a link was: the run has been copied by what follows links
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # renaming a file to another name of itself does nothing
    other.unlink(missing_ok=True)


# ---- reading ---------------------------------------------------------------------------------------------------------


def finish_interrupted_save(run_folder: Path, state: dict, path: Path, keep: int) -> None:
    """Do what a kill in the middle of saving has left undone: mark the best, drop old ones and partial files."""
    if state["best"]["step"] == state["step"]:
        mark_best(path, run_folder)
    prune(run_folder, state["step"], keep)
    for folder in (run_folder, run_folder / "checkpoints"):
        for path in folder.glob(".*.tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; only those of steps <= up_to, if it is given."""
    paths = (Path(run_folder) / "checkpoints").glob("step_*")
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted((path for path in steps if up_to is None or steps[path] <= up_to), key=steps.get)


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint tells; None for other files."""
    found = re.fullmatch(r"step_(\d{8,})(\.pt)?", path.name)
    return int(found[1]) if found else None


def read_file(path: Path, verify: bool = False) -> dict:
    """What a PyTorch or safetensors file holds, read without running any code of it.

    verify: check the checksum of every record first. Raises CheckpointError for whatever is not a dict.
    """
    try:
        if verify and (damaged := zipfile.ZipFile(path).testzip()):
            raise CheckpointError(f"{path} is damaged (checksum of {damaged})")
        with open(path, "rb") as file:
            magic = file.read(9)
        if magic[8:] == b"{":  # safetensors: the length of the header in 8 bytes, then its JSON
            return safetensors.torch.load_file(path)
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=magic.startswith(b"PK")
        )
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except (
        Exception
    ) as error:  # torch raises many kinds for files that are truncated, foreign or unsafe
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {_why_unreadable(error)}; {SUPPORTED}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dict; {SUPPORTED}")
    return state


def _why_unreadable(error: Exception) -> str:
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it is refused, because loading it would run code ({name[1]})"
    if isinstance(error, pickle.UnpicklingError):
        return "it is refused, because it is a pickle of more than tensors and plain values, which can run code"
    first_sentence = " ".join(str(error).split()).split(". ")[0]
    return f"truncated, or no file of weights ({type(error).__name__}: {first_sentence})"


def read(path: Path, verify: bool = False) -> dict:
    """Read one checkpoint that train.py wrote, as `read_file` does; of a sharded one, all but its tensors."""
    is_folder = path.is_dir()
    state = read_file(path / "state.pt" if is_folder else path, verify)
    if state.get("format") != FORMAT:
        found = state["format"] if "format" in state else f"keys {sorted(map(str, state))[:6]}"
        raise CheckpointError(
            f"{path} holds {found}; supported are checkpoints that train.py wrote ({FORMAT})"
        )
    if missing := [
        key for key in (*STATE_KEYS, *TENSOR_KEYS["" if is_folder else ".pt"]) if key not in state
    ]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}; it was not written by this train.py"
        )
    if is_folder:
        found = {name: list(shape) for name, (shape, _) in sharded.shapes(path).items()}
        if damaged := [name for name, shape in state["shapes"].items() if found.get(name) != shape]:
            raise CheckpointError(
                f"{path} lacks parts of {len(damaged)} tensors, e.g. {damaged[0]}: a file is missing"
            )
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
