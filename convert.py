"""Convert any supported weights to this project's format: python convert.py SRC DST"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
import tyro
from torch import Tensor

from aogpt.checkpoints import CheckpointError, load
from aogpt.checkpoints.load import EXPORT_FORMAT, EXPORTED, Loaded
from aogpt.checkpoints.store import digest, is_finite
from aogpt.data.tokenizers import FILES
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.files import clear_leftovers, staging, write_json


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    weights: Literal["ema", "raw"] = "ema",
    dtype: Literal["float32", "bfloat16"] = "float32",
    checkpoint: str = "last",
) -> None:
    """Convert any supported weights to this project's format: DST/model.safetensors and
    DST/config.json.

    Args:
        source: Run folder, checkpoint, released weights (file or folder), or Hugging
            Face repo id.
        destination: New folder; written completely or not at all.
        weights: ema: the averaged weights, if the source has them; raw: those of the
            last step.
        dtype: Type of the weights. bfloat16 takes half the space and rounds to 8
            significant bits; this project loads both as float32.
        checkpoint: Which one of a run: last, best (lowest validation loss) or the
            number of a step.
    """
    clear_leftovers(destination)
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination} exists already; give a new folder, or remove it"
        )
    loaded = load(source, weights, checkpoint=checkpoint)
    tensors = {name: p.detach() for name, p in loaded.model.named_parameters()}

    def write_settings(folder: Path, data: bytes) -> None:
        write_export(folder=folder, loaded=loaded, source=source, data=data)

    data = file_of(tensors, getattr(torch, dtype))
    write_folder(destination, data, write_settings)
    show(f"read {loaded.description}")
    written = f"model.safetensors ({description_of(tensors, loaded)})"
    show(f"wrote {destination}: {written} and config.json")


def description_of(tensors: dict[str, Tensor], loaded: Loaded) -> str:
    """Return the number of parameters that are written, in words. [None] is hidden from
    all steps but the first, which is not scored in released weights without a
    begin-of-text."""
    count = sum(tensor.numel() for tensor in tensors.values())
    description = f"{count:,} parameters"
    is_unread = loaded.model.config.start == "hidden" and loaded.scored_from > 0
    for name, tensor in tensors.items():
        if is_unread and name == "start":
            description += f", {tensor.numel()} of them [None], which no score reads"
    return description


def file_of(tensors: dict[str, Tensor], dtype: torch.dtype) -> bytes:
    """Return the bytes of a safetensors file. Raises CheckpointError for a number that
    is not finite."""
    cast = {}
    for name, tensor in tensors.items():
        cast[name] = tensor.to(dtype)
        if not is_finite(cast[name]):
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{name} is not finite as {kind}: choose another --dtype"
            )
    return safetensors.torch.save(cast, metadata={"format": "pt"})


def write_folder(
    destination: Path, data: bytes, write_settings: Callable[[Path, bytes], Any]
) -> None:
    """Write a folder with a file of weights, and with the files of `write_settings`,
    completely or not at all. Raises CheckpointError."""
    try:
        with staging(destination, replace=False) as folder:
            (folder / "model.safetensors").write_bytes(data)
            write_settings(folder, data)
    except OSError as error:
        if os.path.lexists(destination):
            raise CheckpointError(
                f"could not write {destination}: another process has made it; remove "
                "it, or give a new folder"
            ) from error
        raise CheckpointError(f"could not write {destination}: {error}") from error


def write_export(folder: Path, loaded: Loaded, source: str, data: bytes) -> None:
    """Write everything but the weights."""
    settings: dict[str, Any] = {"format": EXPORT_FORMAT}
    settings["model"] = asdict(loaded.model.config)
    for name in EXPORTED:
        settings[name] = getattr(loaded, name)
    if loaded.record_end is not None:
        settings["record_end"] = asdict(loaded.record_end)
    settings["source"] = source
    settings["files"] = {"model.safetensors": hashlib.sha256(data).hexdigest()}
    settings["sha256"] = digest(settings)
    if loaded.tokenizer in FILES:
        loaded.get_tokenizer().keep(folder)
    write_json(folder / "config.json", settings)


if __name__ == "__main__":
    run_script(lambda: tyro.cli(convert, prog="python convert.py"))
