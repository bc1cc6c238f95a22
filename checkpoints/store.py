"""The checkpoints of a run: where they are, which one is the best, and which are kept.

A run folder holds

    config.toml                 the resolved configuration
    metrics.jsonl               a JSON object a line: training and validation losses
    checkpoints/step_00001000   the newest few checkpoints (see on_disk.py), and the best one
    best                        the name of the one with the lowest validation loss, on one line
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from checkpoints import on_disk
from checkpoints.errors import CheckpointError
from runtime.errors import UserError
from runtime.files import write_text
from runtime.processes import Processes

T = TypeVar("T")
# Files of a run folder that are written beside their places first, and renamed.
OWN = ("best", "config.toml", "metrics.jsonl", "loss.png", "lock", "wandb_id", "commit")


def path_of(run_folder: Path, step: int) -> Path:
    return Path(run_folder) / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint tells; None for other names."""
    found = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(found[1]) if found else None


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; only those of steps <= up_to, if it is given."""
    found = []
    for path in (Path(run_folder) / "checkpoints").glob("step_*"):
        step = step_of(path)
        if step is not None and path.is_dir() and (up_to is None or step <= up_to):
            found.append((step, path))
    return [path for _, path in sorted(found)]


def refuse_old_format(run_folder: Path) -> None:
    """Raise CheckpointError for a run of an earlier version: it must not be started anew over."""
    if old := sorted((Path(run_folder) / "checkpoints").glob("step_*.pt")):
        raise CheckpointError(f"{old[-1]} is {on_disk.OLD_FORMAT}")


# ---- writing -------------------------------------------------------------------------------------


def write(run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int) -> Path:
    """Write a checkpoint, by this process alone.

    Args:
        values: what is no tensor; see on_disk.State.
        keep: how many of the newest to keep, besides the best one.

    Raises CheckpointError if it cannot be written; those before it stay as they were."""
    path = path_of(run_folder, values["step"])
    try:
        shutil.rmtree(temporary_of(path), ignore_errors=True)
        temporary_of(path).mkdir(parents=True)
        on_disk.write_tensors(temporary_of(path), tensors)
        let_count(run_folder, values, tensors, keep)
    except on_disk.WRITE_ERRORS as error:
        shutil.rmtree(temporary_of(path), ignore_errors=True)  # on a full disk, its room is needed
        raise CheckpointError(on_disk.reason_of(error)) from error
    return path


def temporary_of(path: Path) -> Path:
    """Where a checkpoint is written before it has its name, and goes before it is removed."""
    return path.with_name(f".{path.name}.tmp")


def let_count(run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int) -> None:
    """Make a checkpoint of the parts that have been written, and let it count as one of the run: it
    may be the best, and older ones go."""
    path = path_of(run_folder, values["step"])
    on_disk.complete(temporary_of(path), path, values, tensors)
    settle(run_folder, values, keep)


def settle(run_folder: Path, values: dict, keep: int) -> None:
    """Point to the best checkpoint and drop old ones, as the values of the newest one ask for.

    A kill just before or within this leaves a run whose newest checkpoint is complete but not
    settled. So it is called again when a run goes on; done twice, it does nothing the second time.
    The pointer moves first: what it points to is never dropped."""
    if values["best"] is not None:
        best = path_of(run_folder, values["best"]["step"])
        if best.is_dir() and best_of(run_folder) != best:
            write_text(Path(run_folder) / "best", best.name + "\n")
    oldest_first = find(run_folder, up_to=values["step"])
    for old in oldest_first[:-keep]:  # all but the newest `keep`
        if old != best_of(run_folder):
            # Renamed first: a folder that is half removed must not pass for a checkpoint.
            shutil.rmtree(temporary_of(old), ignore_errors=True)
            os.rename(old, temporary_of(old))
            shutil.rmtree(temporary_of(old), ignore_errors=True)


def best_of(run_folder: Path) -> Path | None:
    """The checkpoint that the run's file `best` names; None where there is no such file."""
    pointer = Path(run_folder) / "best"
    if not pointer.is_file():
        return None
    with open(pointer, "rb") as file:
        name = file.read(100).decode(errors="replace").strip()
    if "/" in name or step_of(Path(name)) is None:
        raise CheckpointError(f"{pointer} does not hold the name of a checkpoint (step_N)")
    return Path(run_folder) / "checkpoints" / name


def remove_partial(run_folder: Path) -> None:
    """Remove what a kill has left half written or half removed, and nothing that only looks so."""
    for path in (Path(run_folder) / "checkpoints").glob(".step_*.tmp"):
        if re.fullmatch(r"\.step_\d{8,}\.tmp", path.name):
            shutil.rmtree(path, ignore_errors=True)
    for path in Path(run_folder).glob(".*.tmp"):
        if re.fullmatch(rf"\.({'|'.join(OWN)})\.[0-9a-f]{{8}}\.tmp", path.name):
            path.unlink(missing_ok=True)


# ---- reading -------------------------------------------------------------------------------------


def read_newest(
    run_folder: Path,
    read: Callable[[Path], T] = on_disk.read_values,
    procs: Processes | None = None,
) -> tuple[Path, T] | None:
    """The newest checkpoint that can be read, and what `read` makes of it; None if the run has none
    at all. A checkpoint that is damaged is named on stderr and passed over.

    procs: the processes of a run. All must call, and get the same checkpoint.

    Raises CheckpointError if all are, or if the run is of an earlier version, and ValueError if the
    processes do not see the same files."""
    refuse_old_format(run_folder)
    main, gather = (procs.main, procs.gather) if procs else (True, lambda value: [value])
    paths = find(run_folder)
    if any(others != paths for others in gather(paths)):
        raise UserError(
            f"the processes see different checkpoints in {run_folder}; put --out on a disk that "
            "all share"
        )
    for path in reversed(paths):
        found, problem = None, None
        try:
            found = read(path)
        except CheckpointError as error:
            problem = str(error)
        # Damaged for one is damaged for all: they must go on from the same step.
        problems = [text for text in gather(problem) if text]
        if not problems:
            return path, found
        if main:
            print(f"warning: {problems[0]}; trying the one before it", file=sys.stderr)
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {run_folder} can be read; move the folder "
            "away to start anew"
        )
    return None
