"""The checkpoints of a run: where they are, which is the best, and which are kept.

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


def path_of(run_folder: Path, step: int) -> Path:
    return Path(run_folder) / "checkpoints" / f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint; None for other names."""
    found = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(found[1]) if found else None


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; up_to: the last step."""
    paths = {step_of(p): p for p in (Path(run_folder) / "checkpoints").glob("step_*") if p.is_dir()}
    paths.pop(None, None)
    return [paths[step] for step in sorted(paths) if up_to is None or step <= up_to]


# ---- writing -------------------------------------------------------------------------------------


def temporary_of(path: Path) -> Path:
    """Where a checkpoint is while it is being written or removed."""
    return path.with_name(f".{path.name}.tmp")


def write(run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int) -> Path:
    """Write a checkpoint from this process alone.

    values: everything but the tensors, see on_disk.State. keep: how many of the newest to keep,
    besides the best. Raises OSError or SafetensorError if it cannot be written."""
    path = path_of(run_folder, values["step"])
    shutil.rmtree(temporary_of(path), ignore_errors=True)
    temporary_of(path).mkdir(parents=True)
    on_disk.write_tensors(temporary_of(path), tensors)
    finish(run_folder, values, tensors, keep)
    return path


def finish(run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int) -> None:
    """Turn written tensors into the newest checkpoint of a run."""
    path = path_of(run_folder, values["step"])
    on_disk.complete(temporary_of(path), path, values, tensors)
    settle(run_folder, values, keep)


def settle(run_folder: Path, values: dict, keep: int) -> None:
    """Update `best` and drop old checkpoints, as the values of the newest one say.

    Called again when a run resumes, as a kill may have prevented it; the second call does nothing.
    """
    if values["best"] is not None:  # first, so that it never names a checkpoint that was dropped
        best = path_of(run_folder, values["best"]["step"])
        if best.is_dir() and best_of(run_folder) != best:
            write_text(Path(run_folder) / "best", best.name + "\n")
    for old in find(run_folder, up_to=values["step"])[:-keep]:
        if old != best_of(run_folder):
            # Renamed first: a folder that is half removed must not look like a checkpoint.
            shutil.rmtree(temporary_of(old), ignore_errors=True)
            os.rename(old, temporary_of(old))
            shutil.rmtree(temporary_of(old), ignore_errors=True)


def best_of(run_folder: Path) -> Path | None:
    """The checkpoint that the run's file `best` names; None without such a file."""
    pointer = Path(run_folder) / "best"
    if not pointer.is_file():
        return None
    name = pointer.read_bytes()[:100].decode(errors="replace").strip()
    if "/" in name or step_of(Path(name)) is None:
        raise CheckpointError(f"{pointer} does not hold the name of a checkpoint (step_N)")
    return Path(run_folder) / "checkpoints" / name


def remove_partial(run_folder: Path) -> None:
    """Remove what a killed process left half written or half removed."""
    for path in (Path(run_folder) / "checkpoints").glob(".step_*.tmp"):
        if step_of(Path(path.name[1:-4])) is not None:
            shutil.rmtree(path, ignore_errors=True)
    for path in Path(run_folder).glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name):  # see runtime.files
            path.unlink()


# ---- reading -------------------------------------------------------------------------------------


def read_newest(
    run_folder: Path,
    read: Callable[[Path], T] = on_disk.read_values,
    procs: Processes | None = None,
) -> tuple[Path, T] | None:
    """The newest checkpoint that can be read, and read(path); None if the run has none.

    A damaged checkpoint is passed over with a warning. procs: the processes of a run; all must call
    and get the same checkpoint.

    Raises CheckpointError if all checkpoints are damaged, UserError if the processes see different
    files."""
    main, gather = (procs.main, procs.gather) if procs else (True, lambda value: [value])
    paths = find(run_folder)
    if any(others != paths for others in gather(paths)):
        raise UserError(
            f"the processes see different checkpoints in {run_folder}; put --out on a shared disk"
        )
    for path in reversed(paths):
        found, problem = None, None
        try:
            found = read(path)
        except CheckpointError as error:
            problem = str(error)
        problems = [text for text in gather(problem) if text]  # of any process
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
