"""One checkpoint on the disk: a folder that is written whole or not at all, and checked when read.

    step_00001000/
        *.safetensors   the tensors (model.NAME, ema.NAME, optimizer.NAME.KEY), in three parts, or
                        in as many as processes wrote; safetensors and JSON hold no code, as a
                        pickle would
        state.json      everything that is no tensor, and the sha256 of all parts and of itself

The order of writing makes a kill harmless at every moment:

    1. The parts go to the disk, in a folder .step_00001000.tmp, which nobody takes for a
       checkpoint. Each is flushed (fsync): a name may reach the disk before the bytes it names.
    2. state.json is written last, as only then the checksums are known.
    3. The folder gets its name. A rename happens at once or not at all: there is no moment at which
       half a checkpoint has the name of a whole one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NotRequired

import safetensors
import safetensors.torch
import torch
from annotated_types import Interval
from torch import Tensor
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from checkpoints.errors import CheckpointError
from data.loader import Split
from runtime.files import sha256_file, sync_folder, write_text
from runtime.validation import (
    Count,
    FileError,
    FileName,
    NonNegative,
    Ratio,
    damaged,
    from_json,
    read_bounded,
    schema,
)

FORMAT = "aogpt-checkpoint-3"
OLD_FORMAT = (
    "of format aogpt-checkpoint-2, which an earlier version wrote; this version reads "
    f"{FORMAT}: convert it with the version that wrote it (python checkpoint.py convert SRC DST), "
    "then start a new run from the export with --train.init-from"
)
STATE = "state.json"
DTYPES = ("float16", "bfloat16", "float32", "float64")  # that weights and moments may have
ADVICE = "use another checkpoint of the run"
HEADER_BYTES = 100_000_000  # of a safetensors file, which has no larger ones
WRITE_ERRORS = (OSError, RuntimeError, safetensors.SafetensorError)  # of a disk that is full


@schema
class Average(TypedDict):
    updates: NonNegative
    decay: Ratio


@schema
class Best(TypedDict):
    step: NonNegative
    loss: Annotated[float, Interval(gt=-math.inf, lt=math.inf)]


@schema
class Data(TypedDict):
    """Of meta.json, what a model must know of the data it was trained on."""

    tokenizer: str
    vocab_size: Count
    splits: NotRequired[dict[str, Split]]


@schema
class State(TypedDict):
    """The contents of state.json.

    A checkpoint that lacks one of these keys is refused, so a new one makes all older checkpoints
    unreadable. If that is meant, raise FORMAT as well: then users read that the format has changed,
    rather than that a key is missing. If it is not, declare it as NotRequired."""

    step: NonNegative
    model_config: dict[str, Any]
    ema: Average
    config: dict[str, Any]
    data: Data
    best: Best | None
    skipped: NonNegative
    skipped_in_a_row: NonNegative
    tensors: dict[str, list[str | NonNegative]]
    """[dtype, *shape] by name."""
    parts: dict[FileName, str]
    """sha256 by file."""


# ---- writing -------------------------------------------------------------------------------------


def write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write all tensors, as a process alone does: weights, averages and moments as a part each, so
    that who wants one of them need not check the others.

    torch.distributed.checkpoint could do it, too, but copies all of them in memory on the way and
    takes three times as long."""
    kinds = {name.partition(".")[0] for name in tensors}
    for kind in sorted(kinds):
        path = folder / f"{kind}.safetensors"
        # save_file makes a file that only its owner can read. It is to have the permissions that
        # the user's umask gives to new files: those of an empty file, made first.
        path.touch()
        permissions = path.stat().st_mode
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{kind}.")}
        safetensors.torch.save_file(own, path)
        path.chmod(permissions)
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def complete(temporary: Path, path: Path, values: dict, tensors: dict[str, Tensor]) -> None:
    """Make a checkpoint of a folder in which all parts are written; `path` is to be its name.

    values: what is no tensor; see State. tensors: only their dtypes and shapes are taken here."""
    contents = values | {"format": FORMAT, "torch": str(torch.__version__)}
    contents["tensors"] = {name: entry_of(tensor) for name, tensor in tensors.items()}
    contents["parts"] = {file.name: sha256_file(file) for file in parts(temporary)}
    contents["sha256"] = digest(contents)
    write_text(temporary / STATE, json.dumps(contents, indent=1) + "\n")
    # What lies there already is damaged, or comes from a run that went back to an older checkpoint.
    shutil.rmtree(path, ignore_errors=True)
    os.rename(temporary, path)
    sync_folder(path.parent)


def entry_of(tensor: Tensor) -> list:
    """What state.json says of a tensor: [dtype, *shape]."""
    return [str(tensor.dtype).removeprefix("torch."), *tensor.shape]


def is_finite(tensor: Tensor) -> Tensor | bool:
    """Whether all numbers of a tensor are finite; in one pass, without another tensor of its
    size."""
    return torch.stack(tensor.aminmax()).isfinite().all() if tensor.numel() else True


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def digest(contents: dict) -> str:
    """sha256 of what state.json holds, without the entry of that name."""
    rest = {key: value for key, value in contents.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# ---- reading -------------------------------------------------------------------------------------


def read_values(path: Path, share: slice = slice(None)) -> State:
    """What a checkpoint holds besides its tensors, after a look at the checksums of its parts.

    share: which of the parts to check, where several processes divide them among themselves.
    Raises CheckpointError for what is missing, damaged, or of another format."""
    try:
        contents = _read_state(path)
        _check_parts(path, list(contents["parts"].items())[share])
    except (FileError, OSError) as error:
        raise CheckpointError(str(error)) from error
    return contents


@contextlib.contextmanager
def read_model(path: Path, prefix: str) -> Iterator[tuple[State, dict[str, Tensor]]]:
    """`read_values`, and of the tensors those whose names begin with a prefix ("model." or "ema."),
    as `read_all` has them. Their checksums are made beside reading and what is done within this
    context, which takes as long, and waited for at its end."""
    try:
        contents = _read_state(path)
        sums = contents["parts"]
        # Parts that several processes wrote have other names, and may hold some of any tensor.
        own = {name: sums[name] for name in sums if name.startswith(prefix)} or sums
        with ThreadPoolExecutor(1) as beside:
            check = beside.submit(_check_parts, path, own.items())
            try:
                yield contents, read_all(path, contents, prefix)
            finally:
                check.result()  # rather than what a damaged file makes of reading
    except (FileError, OSError) as error:
        raise CheckpointError(str(error)) from error


def _check_parts(path: Path, parts: Iterable[tuple[str, str]]) -> None:
    for name, expected in parts:
        if sha256_file(path / name) != expected:
            raise CheckpointError(f"{path} is damaged (checksum of {name})")


def _read_state(path: Path) -> State:
    """The contents of state.json, of the right types, about the parts that are there."""
    if not (path / STATE).is_file():
        if (path / "state.pt").is_file():
            raise CheckpointError(f"{path} is {OLD_FORMAT}")
        raise CheckpointError(
            f"{path} lacks {STATE}: it is no checkpoint, or no longer a whole one"
        )
    with damaged(path / STATE, ADVICE):
        text = read_bounded(path / STATE)
        contents = json.loads(text)
        if contents.get("sha256") != digest(contents):
            raise CheckpointError(f"{path / STATE} is damaged (checksum); {ADVICE}")
        if (found := contents.get("format")) != FORMAT:
            raise CheckpointError(f"{path} is of format {found}; this train.py reads {FORMAT}")
        contents = from_json(text, State, str(path / STATE), ADVICE)

        # A file too many would be read as well, so names are compared in both directions.
        found = {file.name for file in parts(path)}
        if odd := sorted(found ^ contents["parts"].keys()):
            raise CheckpointError(
                f"{path} is damaged: {odd[0]} is {'not its own' if odd[0] in found else 'missing'}"
            )
        if odd := [file for file in parts(path) if not file.is_file()]:
            raise CheckpointError(f"{odd[0]} is no regular file")  # a FIFO would be waited for
        claimed = 0  # bytes: before memory is taken for tensors, they must be there
        for name, (dtype, *shape) in contents["tensors"].items():
            if dtype not in DTYPES or not all(isinstance(n, int) for n in shape):
                raise CheckpointError(f"{path}: {name} is {dtype} {shape}: no tensor of numbers")
            claimed += math.prod(shape) * getattr(torch, dtype).itemsize
        size = sum(file.stat().st_size for file in parts(path))
        if not claimed <= size <= claimed + HEADER_BYTES * len(contents["parts"]):
            than = "smaller" if size < claimed else "larger"
            raise CheckpointError(f"{path} is damaged: its files are {than} than its tensors")
    return contents


def read_tensors(path: Path, values: dict, targets: dict[str, Tensor]) -> None:
    """Fill tensors with what a checkpoint has under their names, whoever wrote it.

    A process alone fills whole tensors; one of several, whose tensors are cut among all (DTensor),
    reads its own part of each. No process waits for another one.

    Raises CheckpointError if a name is missing, a shape or dtype differs, or a file is not read."""
    # Imported here because it takes a second, which no script should wait for before it needs it.
    import torch.distributed.checkpoint as dcp

    for name, tensor in targets.items():
        if name not in values["tensors"]:
            raise CheckpointError(f"{path} lacks {name}")
        if values["tensors"][name] != (entry := entry_of(tensor)):
            found = values["tensors"][name]
            raise CheckpointError(f"{name} is {found} in {path}, {entry} in the model")
    try:
        for part in parts(path):  # torch would print a traceback of its own
            with safetensors.safe_open(part, "pt"):
                pass
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # it works alone
            reader = dcp.HuggingFaceStorageReader(str(path))
            dcp.load(targets, storage_reader=reader, no_dist=True)
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        reason = reason_of(error)
        raise CheckpointError(f"{path} cannot be read: {reason}") from error


def read_all(path: Path, values: dict, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, whole, by the rest of their names."""
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype))
        for name, (dtype, *shape) in values["tensors"].items()
        if name.startswith(prefix)
    }
    read_tensors(path, values, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def reason_of(error: BaseException) -> str:
    """What an error says, in a line; of torch.distributed.checkpoint, which gathers the errors of
    all processes, the first of them."""
    failures = getattr(error, "failures", None) or {}
    for first, _ in failures.values():
        error = first
        break
    return " ".join(f"{type(error).__name__}: {error}".split())
