"""The checkpoints of a run: written whole or not at all, and verified when they are
read.

    best                    the name of the checkpoint with the lowest validation loss
    checkpoints/
        step_00001000/      the newest few, and the best one
            *.safetensors   tensors model.NAME, ema.NAME, optimizer.NAME.KEY: a file for
                            each kind, or under fsdp for each process
            state.json      everything else, and the sha256 of each file and of itself

The files are written to .step_00001000.tmp and flushed, then the folder is renamed: a
kill leaves a whole checkpoint or none. No format here holds code."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import safetensors.torch
import torch
from torch import Tensor

from ..runtime.command_line import show, visible
from ..runtime.errors import UserError, reason_of
from ..runtime.files import sha256_file, sync, write_text
from ..runtime.validation import Count, NonNegative, from_values, read_json

FORMAT = "aogpt-checkpoint-3"
STATE = "state.json"
# an empty folder in a run's, until the first is finished
NONE_YET = ".no_checkpoint_yet"
ADVICE = "use another checkpoint of the run"

Average = TypedDict("Average", {"updates": NonNegative, "decay": float})  # noqa: UP013
Best = TypedDict("Best", {"step": NonNegative, "loss": float})  # noqa: UP013


class Data(TypedDict):
    """What is read again of the meta.json of a run's dataset."""

    tokenizer: str
    vocab_size: Count
    splits: NotRequired[dict[str, dict[str, Any]]]


class CheckpointError(UserError):
    """A checkpoint or file of weights that cannot be written, read or used."""


class StateFile(TypedDict):
    """The contents of state.json. A new key is NotRequired, or needs another FORMAT."""

    step: NonNegative
    model_config: dict[str, Any]
    ema: Average
    config: dict[str, Any]
    data: Data  # meta.json of the dataset
    best: Best | None
    skipped: NonNegative
    skipped_in_a_row: NonNegative
    sequences: NonNegative  # trained on so far
    tokens: NonNegative
    tensors: dict[str, list[Any]]  # [dtype without "torch.", *shape] by name
    parts: dict[str, str]  # sha256 by file


def path_of(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return Path(run_folder) / "checkpoints" / f"step_{step:08d}"


def temporary_of(path: Path) -> Path:
    """Return the path of a checkpoint while it is being written or removed."""
    return path.with_name(f".{path.name}.tmp")


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint; None for other names."""
    match = re.fullmatch(r"step_(\d{8,})", path.name)
    return int(match[1]) if match else None


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """Return the checkpoints of a run, oldest first; up_to: the last step."""
    paths = {}
    for path in (Path(run_folder) / "checkpoints").glob("step_*"):
        step = step_of(path)
        if step is not None and path.is_dir() and (up_to is None or step <= up_to):
            paths[step] = path
    return [paths[step] for step in sorted(paths)]


def best_of(run_folder: Path) -> Path | None:
    """Return the checkpoint that the run's file `best` names; None without such a
    file."""
    pointer = Path(run_folder) / "best"
    if not pointer.is_file():
        return None
    with open(pointer, "rb") as file:
        name = file.read(100).decode(errors="replace").strip()
    if "/" in name or step_of(Path(name)) is None:
        raise CheckpointError(
            f"{pointer} does not hold the name of a checkpoint (step_N)"
        )
    return Path(run_folder) / "checkpoints" / name


def candidates(run_folder: Path, checkpoint: str) -> list[Path]:
    """Return the checkpoint that "best" or a step means; for "last" all, as some may be
    damaged."""
    paths = find(run_folder)
    if checkpoint == "last":
        return paths
    choices = {}
    best = best_of(run_folder)
    if best is not None:
        choices["best"] = best
    for path in paths:
        choices[str(step_of(path))] = path
    if checkpoint not in choices:
        names = ", ".join(["last", *choices])
        raise CheckpointError(
            f"{run_folder} has no checkpoint {checkpoint!r}; it has {names}"
        )
    return [choices[checkpoint]]


def parts(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that hold tensors, by name."""
    return sorted(folder.glob("*.safetensors"))


def write(
    run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int
) -> Path:
    """Write a checkpoint from this process alone, a file for each kind of tensor.
    values: everything else, see `training.checkpoint.plain_values`. keep: how many of
    the newest checkpoints stay, besides the best. Raises OSError or SafetensorError."""
    folder = temporary_of(path_of(run_folder, values["step"]))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for kind in sorted({name.partition(".")[0] for name in tensors}):
        file = folder / f"{kind}.safetensors"
        file.touch()
        # save_file makes files that only their owner can read
        permissions = file.stat().st_mode
        of_kind = {
            name: tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{kind}.")
        }
        safetensors.torch.save_file(of_kind, file)
        file.chmod(permissions)
        sync(file)
    return finish(run_folder, values, tensors, keep)


def write_shards(run_folder: Path, step: int, tensors: dict[str, Tensor]) -> None:
    """Write the tensors of a checkpoint from all processes, a file for each; `finish`
    makes a checkpoint of them. All processes must call, all raise the error of one
    that fails."""
    import torch.distributed.checkpoint as dcp  # takes a second

    folder = temporary_of(path_of(run_folder, step))
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer)
    except dcp.CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def finish(
    run_folder: Path, values: dict, tensors: dict[str, Tensor], keep: int
) -> Path:
    """Turn a folder of written tensors into the newest checkpoint of a run."""
    path = path_of(run_folder, values["step"])
    contents = dict(values)
    contents["format"] = FORMAT
    contents["torch"] = str(torch.__version__)
    contents["tensors"] = {name: dtype_and_shape(t) for name, t in tensors.items()}
    files = parts(temporary_of(path))
    contents["parts"] = {file.name: sha256_file(file) for file in files}
    contents["sha256"] = digest(contents)
    write_text(temporary_of(path) / STATE, json.dumps(contents, indent=1) + "\n")
    # damaged, or of a run that resumed from an older one
    shutil.rmtree(path, ignore_errors=True)
    os.rename(temporary_of(path), path)
    sync(path.parent)
    shutil.rmtree(Path(run_folder) / NONE_YET, ignore_errors=True)
    settle(run_folder, values, keep)
    return path


def settle(run_folder: Path, values: dict, keep: int) -> None:
    """Update `best` and drop old checkpoints; a run that resumes does it again, after a
    kill."""
    best = path_of(run_folder, values["best"]["step"]) if values["best"] else None
    # first, so that it never names a checkpoint that was dropped
    if best and best.is_dir() and best_of(run_folder) != best:
        with only_warned(f"write {run_folder}/best"):
            write_text(Path(run_folder) / "best", best.name + "\n")
    for old in find(run_folder, up_to=values["step"])[:-keep]:
        if old not in (best, best_of(run_folder)):
            # Renamed first: a folder that is half removed must not look like a
            # checkpoint.
            shutil.rmtree(temporary_of(old), ignore_errors=True)
            with only_warned(f"remove the old checkpoint {old}"):
                os.rename(old, temporary_of(old))
            shutil.rmtree(temporary_of(old), ignore_errors=True)


@contextlib.contextmanager
def only_warned(action: str) -> Iterator[None]:
    """Turn an OSError into a warning: the newest checkpoint is complete without the
    block, and must not be called one that could not be written."""
    try:
        yield
    except OSError as error:
        show(f"warning: could not {action}: {reason_of(error)}", file=sys.stderr)


def remove_partial(run_folder: Path) -> None:
    """Remove files and folders that a killed process left half written or removed."""
    for path in (Path(run_folder) / "checkpoints").glob(".step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    eight_digits = "[0-9a-f]" * 8
    for path in Path(run_folder).glob(f".*.{eight_digits}.tmp"):  # see runtime.files
        path.unlink()


def dtype_and_shape(tensor: Tensor) -> list:
    """Return the entry of a tensor in state.json, such as ["float32", 8, 4]."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, *tensor.shape]


def digest(contents: dict) -> str:
    """Return the sha256 of a JSON object without its key "sha256"."""
    rest = {key: value for key, value in contents.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_finite(tensor: Tensor) -> Tensor | bool:
    """Return whether all numbers of a tensor are finite, without another tensor of its
    size."""
    if tensor.numel() == 0:
        return True
    extremes = torch.stack(tensor.aminmax())
    return extremes.isfinite().all()


def read_values(
    path: Path, share: slice = slice(None), prefix: str = ""
) -> dict[str, Any]:
    """Return the contents of state.json, after its checksum and those of the files have
    been verified. share: the files to verify, where several processes divide them.
    prefix: the beginning of the names of tensors that will be read; files of other
    kinds are not verified. Raises CheckpointError."""
    file = path / STATE
    try:
        contents = read_json(file, dict[str, Any], ADVICE)
        if (
            contents.get("sha256") != digest(contents)
            or contents.get("format") != FORMAT
        ):
            raise CheckpointError(
                f"{file} is damaged (checksum), or not of the format {FORMAT}; {ADVICE}"
            )
        contents = from_values(contents, StateFile, str(file), ADVICE)
        sums = contents["parts"]
        present = {part.name for part in parts(path)}
        damaged = sorted(present ^ sums.keys())
        names = [name for name in sorted(sums) if name.startswith(prefix)]
        if not names:
            # Under fsdp: not named by kind, they may hold shards of every tensor.
            names = sorted(sums)
        for name in present.intersection(names[share]):
            if sha256_file(path / name) != sums[name]:
                damaged.append(name)
        if damaged:
            raise CheckpointError(
                f"{path} is damaged: {damaged[0]} is missing, not a part of it, or has "
                "another checksum"
            )
    except (UserError, OSError) as error:
        raise CheckpointError(str(error)) from error
    return contents


def read_newest(
    run_folder: Path,
    read: Callable[[Path], Any],
    checkpoint: str = "last",
    warn: Callable[..., None] = show,
) -> tuple[Path, Any] | None:
    """Return the newest checkpoint that can be read, and read(path); None if the run
    has none. Skips damaged ones with a warning. checkpoint: see `candidates`. Raises
    CheckpointError if all are damaged."""
    if not (Path(run_folder) / "checkpoints").is_dir():
        return None
    problems = []
    for path in reversed(candidates(run_folder, checkpoint)):
        try:
            contents = read(path)
        except CheckpointError as error:
            problems.append(visible(error, one_line=True))
            continue
        for problem in problems:
            warn(f"warning: {problem}; trying the one before it", file=sys.stderr)
        return path, contents
    if problems:
        raise CheckpointError(
            f"none of the {len(problems)} checkpoints in {run_folder} can be read: "
            f"{problems[0]}"
        )
    return None


def read_tensors(path: Path, values: dict, targets: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, by name; of a DTensor this process's shard.
    Raises CheckpointError for a missing name, another shape or dtype, or an unreadable
    file."""
    import torch.distributed.checkpoint as dcp  # takes a second

    for name, tensor in targets.items():
        stored = values["tensors"].get(name, "missing")
        expected = dtype_and_shape(tensor)
        if stored != expected:
            raise CheckpointError(
                f"{name} is {stored} in {path}, but {expected} in the model"
            )
    with warnings.catch_warnings():
        # not needed here
        warnings.filterwarnings("ignore", message="torch.distributed is")
        reader = dcp.HuggingFaceStorageReader(str(path))
        with reading(path):
            dcp.load(targets, storage_reader=reader, no_dist=True)


def read_all(path: Path, values: dict, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, whole, by the rest of their
    names."""
    import torch.distributed.checkpoint as dcp  # takes a second

    # As the files have them; read_tensors compares that with state.json.
    with reading(path):
        reader = dcp.HuggingFaceStorageReader(str(path))
        metadata = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, entry in metadata.items():
        if name.startswith(prefix):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_tensors(path, values, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError if a file in the block is missing or damaged."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        # RuntimeError: of torch.load
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
