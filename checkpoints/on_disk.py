"""One checkpoint: a folder that is written completely or not at all, and verified when it is read.

    step_00001000/
        *.safetensors   the tensors (model.NAME, ema.NAME, optimizer.NAME.KEY): a file for each
                        kind, or under fsdp for each process
        state.json      everything else, and the sha256 of each file and of itself

The files are written to .step_00001000.tmp and flushed, state.json last, and the folder is renamed,
which is atomic: a kill at any moment leaves a whole checkpoint or none. No format here holds code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NotRequired

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from checkpoints.errors import CheckpointError
from runtime.errors import UserError
from runtime.files import sha256_file, sync_folder, write_text
from runtime.validation import Count, NonNegative, from_values, read_json, schema

FORMAT = "aogpt-checkpoint-3"
STATE = "state.json"
ADVICE = "use another checkpoint of the run"


SPLITS = NotRequired[dict[str, dict[str, Any]]]
Average = TypedDict("Average", {"updates": NonNegative, "decay": float})  # noqa: UP013
Best = TypedDict("Best", {"step": NonNegative, "loss": float})  # noqa: UP013
Data = schema(TypedDict("Data", {"tokenizer": str, "vocab_size": Count, "splits": SPLITS}))


@schema
class State(TypedDict):
    """The contents of state.json.

    Older checkpoints lack a key that is new here: declare it NotRequired, or raise FORMAT."""

    step: NonNegative
    model_config: dict[str, Any]
    ema: Average
    config: dict[str, Any]
    data: Data  # meta.json of the dataset
    best: Best | None
    skipped: NonNegative
    skipped_in_a_row: NonNegative
    tensors: dict[str, list[Any]]  # [dtype, *shape] by name
    parts: dict[str, str]  # sha256 by file


# ---- writing -------------------------------------------------------------------------------------


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write whole tensors, a file for each kind: the averages can be read without the rest."""
    for kind in sorted({name.partition(".")[0] for name in tensors}):
        path = folder / f"{kind}.safetensors"
        path.touch()
        permissions = path.stat().st_mode  # save_file makes files that only their owner can read
        of_kind = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}.")}
        safetensors.torch.save_file(of_kind, path)
        path.chmod(permissions)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def start_writing_shards(
    folder: Path, tensors: dict[str, Tensor], then: Callable[[], None], group: ProcessGroup
) -> Future:
    """Copy the shards of this process to CPU memory and start to write them in the background.

    All processes must call. then: called on process 0 when all have written. group: a gloo group
    without other traffic."""
    import torch.distributed.checkpoint as dcp  # takes a second

    # otherwise it logs the duration of every step
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.finish = lambda metadata, results: then()
    return dcp.async_save(tensors, storage_writer=writer, process_group=group)


def complete(temporary: Path, path: Path, values: dict, tensors: dict[str, Tensor]) -> None:
    """Turn a folder of written tensors into the checkpoint `path`.

    values: the other keys of State. tensors: only their dtypes and shapes are read."""
    contents = values | {"format": FORMAT, "torch": str(torch.__version__)}
    contents["tensors"] = {name: entry_of(tensor) for name, tensor in tensors.items()}
    contents["parts"] = {file.name: sha256_file(file) for file in parts(temporary)}
    contents["sha256"] = digest(contents)
    write_text(temporary / STATE, json.dumps(contents, indent=1) + "\n")
    shutil.rmtree(path, ignore_errors=True)  # damaged, or of a run that resumed from an older one
    os.rename(temporary, path)
    sync_folder(path.parent)


def entry_of(tensor: Tensor) -> list:
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def digest(contents: dict) -> str:
    """sha256 of a JSON object without its key "sha256"."""
    rest = {key: value for key, value in contents.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_finite(tensor: Tensor) -> Tensor | bool:
    """Whether all numbers of a tensor are finite, without another tensor of its size."""
    return torch.stack(tensor.aminmax()).isfinite().all() if tensor.numel() else True


# ---- reading -------------------------------------------------------------------------------------


def read_values(path: Path, share: slice = slice(None), prefix: str = "") -> State:
    """The contents of state.json, after its checksum and those of the files have been verified.

    share: of the files, where several processes divide them. prefix: of the tensors that will be
    read: files of other kinds are not verified. Raises CheckpointError."""
    file = path / STATE
    if not file.is_file():
        raise CheckpointError(f"{path} lacks {STATE}: it is not a checkpoint, or not a whole one")
    try:
        contents = read_json(file, dict[str, Any], ADVICE)
        if contents.get("sha256") != digest(contents):
            raise CheckpointError(f"{file} is damaged (checksum); {ADVICE}")
        if (found := contents.get("format")) != FORMAT:
            raise CheckpointError(f"{path} is of format {found}; this version reads {FORMAT}")
        contents = from_values(contents, State, str(file), ADVICE)
        sums = contents["parts"]
        if odd := sorted({part.name for part in parts(path)} ^ sums.keys()):
            raise CheckpointError(f"{path} is damaged: {odd[0]} is missing or not part of it")
        # Files written under fsdp are not named by kind and may hold shards of every tensor.
        names = [name for name in sorted(sums) if name.startswith(prefix)] or sorted(sums)
        for name in names[share]:
            if sha256_file(path / name) != sums[name]:
                raise CheckpointError(f"{path} is damaged (checksum of {name})")
    except (UserError, OSError) as error:
        raise CheckpointError(str(error)) from error
    return contents


def read_tensors(path: Path, values: State, targets: dict[str, Tensor]) -> None:
    """Fill tensors from a checkpoint, by name, whichever processes wrote it. Of a DTensor each
    process reads its own shard; no process waits for another.

    Raises CheckpointError for a missing name, another shape or dtype, or an unreadable file."""
    import torch.distributed.checkpoint as dcp

    for name, tensor in targets.items():
        found, expected = values["tensors"].get(name), entry_of(tensor)
        if found is None:
            raise CheckpointError(f"{path} lacks {name}")
        if found != expected:
            raise CheckpointError(f"{name} is {found} in {path}, but {expected} in the model")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # not needed here
            reader = dcp.HuggingFaceStorageReader(str(path))
            dcp.load(targets, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


def read_all(path: Path, values: State, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, whole, by the rest of their names."""
    import torch.distributed.checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if name.startswith(prefix)
    }
    read_tensors(path, values, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def reason_of(error: BaseException) -> str:
    """An error on one line; of torch.distributed.checkpoint, which collects those of all processes,
    the first."""
    for first, _ in getattr(error, "failures", {}).values():
        error = first
        break
    return " ".join(f"{type(error).__name__}: {error}".split())
