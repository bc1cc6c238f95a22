"""Tensors of files of weights, read one at a time; no code in a file is run."""

import zipfile
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import safe_open
from torch import Tensor

from ..runtime.errors import UserError, reason_of
from ..runtime.validation import (
    FileName,
    check_value,
    open_regular,
    parse_json,
    read_json,
)
from .store import CheckpointError

INDEX = "model.safetensors.index.json"  # of weights in several files
SUPPORTED = (
    "supported are run folders, checkpoints, folders of convert.py, and released "
    "weights: AO-GPT, sigma-GPT (.pt), GPT-2, RADD, SEDD (config.json, "
    "model.safetensors or pytorch_model.bin), Llama, Mistral, Qwen2, Qwen3 "
    "(config.json, tokenizer.json, *.safetensors)"
)


class LazyTensors(UserDict):
    """Tensors by name, each read when it is looked up: it is in memory only while it is
    used. `data` holds a function without arguments for each name."""

    def __getitem__(self, name: str) -> Tensor:
        """Read the tensor of this name."""
        return super().__getitem__(name)()


class Index(TypedDict):
    """The contents of an index of several files of weights."""

    weight_map: dict[str, FileName]  # file by tensor name


def read_weights(path: Path) -> LazyTensors | dict:
    """Return the tensors of a safetensors file or of the files of an index, which are
    read when they are looked up, or the contents of a PyTorch file. Raises
    CheckpointError for a file that cannot be read."""
    if path.name != INDEX:
        return read_file(path)
    files = read_json(path, Index, "get it again")["weight_map"]
    contents = {name: read_file(path.parent / name) for name in set(files.values())}
    for file, tensors in contents.items():
        mapped = {name for name, place in files.items() if place == file}
        if odd := sorted(mapped ^ set(tensors)):
            raise CheckpointError(
                f"{path} and {file} disagree: {odd[0]} is in only one of them"
            )
    return LazyTensors(
        {
            name: partial(contents[file].__getitem__, name)
            for name, file in files.items()
        }
    )


def read_file(path: Path) -> LazyTensors | dict:
    """Return the tensors of one file, as `read_weights` does."""
    with open_regular(path) as file:
        magic = file.read(9)
    try:
        # safetensors: the length of the header in 8 bytes, then its JSON.
        if magic[8:] == b"{":
            check_names(path)
            with safe_open(path, "pt") as file:
                names = list(file.keys())
            return LazyTensors(
                {name: partial(read_tensor, path, name) for name in names}
            )
        is_zip = magic.startswith(b"PK")
        if is_zip:  # of torch.save; torch.load checks no checksums
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged:
                raise zipfile.BadZipFile(f"checksum of {damaged}")
        # weights_only: otherwise a pickle can call any function of Python
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        check_value(contents, dict, "its object")
        return contents
    except Exception as error:  # torch raises many kinds for damaged and foreign files
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: truncated, not a file of weights, "
            f"or a pickle of more than tensors and plain values, which can run code "
            f"({reason_of(error)}); {SUPPORTED}"
        ) from error


def renamed(tensors: Mapping, rename: Callable[[str], str]) -> dict[str, Any]:
    """Return the tensors under the names that `rename` gives. Raises UserError if two
    tensors get one name."""
    by_name = {}
    for name, tensor in tensors.items():
        new_name = rename(str(name))
        if new_name in by_name:
            raise UserError(f"it has two tensors of the name {new_name}; get it again")
        by_name[new_name] = tensor
    return by_name


def described(value: Any) -> str:
    """Return what a value in a file of weights is."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a safetensors file, mapped into memory until it is dropped."""
    # Opened for each tensor: a mapping stays as long as the file is open.
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def check_names(path: Path) -> None:
    """Raise ValueError for a safetensors file with two tensors of one name."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        parse_json(file.read(min(size, path.stat().st_size)))
