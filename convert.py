"""Convert any supported weights to this project's format: model.safetensors and config.json.

Example:
    python convert.py SRC DST
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
import tyro

from checkpoints import CheckpointError, load
from checkpoints.load import EXPORT_FORMAT, EXPORTED
from checkpoints.store import digest, is_finite
from data.tokenizers import OWN
from runtime.command_line import run_script, show
from runtime.files import sha256_file, sync_folder, temporary_beside, write_atomically, write_json
from variants import parameter_counts


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    weights: Literal["ema", "raw"] = "ema",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Convert any supported weights to this project's format: DST/model.safetensors and
    DST/config.json.

    Args:
        source: Run folder, checkpoint, released weights (file or folder), or Hugging Face repo id.
        destination: New folder; written completely or not at all.
        weights: The averaged weights, where the source has them, or the last ones.
        dtype: Of the file. bfloat16 is half as large and rounds weights to 8 bits; models that are
            loaded from it are float32 all the same.
    """
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists already; give a new folder, or remove it")
    loaded = load(source, weights)
    settings = {"format": EXPORT_FORMAT, "model": asdict(loaded.model.config)}
    settings |= {name: getattr(loaded, name) for name in EXPORTED} | {"source": source}
    parameters = loaded.model.named_parameters()
    tensors = {name: p.detach().to(getattr(torch, dtype)) for name, p in parameters}
    if wrong := next((name for name, tensor in tensors.items() if not is_finite(tensor)), None):
        raise CheckpointError(f"{wrong} is not finite as {dtype}: choose another --dtype")
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    temporary = temporary_beside(destination)
    try:
        write_atomically(temporary / "model.safetensors", lambda file: file.write(data))
        settings["files"] = {"model.safetensors": sha256_file(temporary / "model.safetensors")}
        if loaded.tokenizer == OWN:
            loaded.get_tokenizer().keep(temporary)
        write_json(temporary / "config.json", settings | {"sha256": digest(settings)})
        os.rename(temporary, destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise CheckpointError(f"could not write {destination}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    show(f"read {loaded.describe()}")
    count = sum(parameter_counts(loaded.model).values())
    show(f"wrote {destination}: model.safetensors ({count:,} parameters) and config.json")


if __name__ == "__main__":
    run_script(lambda: tyro.cli(convert))
