"""Convert any supported weights to this project's format: python convert.py SRC DST"""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import hashlib
import os
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
    data = file_of(tensors, getattr(torch, dtype))
    try:
        with staging(destination, replace=False) as folder:
            (folder / "model.safetensors").write_bytes(data)
            write_settings(folder, loaded, source, data)
    except OSError as error:
        raise CheckpointError(f"could not write {destination}: {error}") from error
    count = sum(tensor.numel() for tensor in tensors.values())
    show(f"read {loaded.description}")
    show(
        f"wrote {destination}: model.safetensors ({count:,} parameters) and config.json"
    )


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


def write_settings(folder: Path, loaded: Loaded, source: str, data: bytes) -> None:
    """Write everything but the weights. data: their file."""
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
