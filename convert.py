"""Convert any supported weights to this project's format: python convert.py SRC DST"""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
import tyro

from aogpt.checkpoints import CheckpointError, load
from aogpt.checkpoints.hub import push_folder, write_hub_files
from aogpt.checkpoints.load import EXPORT_FORMAT, EXPORTED
from aogpt.checkpoints.store import digest, is_finite
from aogpt.data.tokenizers import FILES
from aogpt.runtime.command_line import run_script, show
from aogpt.runtime.errors import UserError
from aogpt.runtime.files import staging, write_json
from aogpt.systems import parameter_counts


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    weights: Literal["ema", "raw"] = "ema",
    dtype: Literal["float32", "bfloat16"] = "float32",
    checkpoint: str = "last",
    hub: bool = False,
    push: Annotated[str | None, tyro.conf.arg(metavar="REPO")] = None,
) -> None:
    """Convert any supported weights to this project's format: DST/model.safetensors and
    DST/config.json.

    Args:
        source: Run folder, checkpoint, released weights (file or folder), or Hugging Face repo id.
        destination: New folder; written completely or not at all.
        weights: ema: the averaged weights, if the source has them; raw: those of the last step.
        dtype: Type of the weights. bfloat16 takes half the space and rounds to 8 significant bits;
            this project loads both as float32.
        checkpoint: Which one of a run: last, best (lowest validation loss) or the number of a step.
        hub: Write a folder that transformers.AutoModel loads without this project: with code,
            tokenizer and a model card.
        push: With --hub: also upload the folder to this Hugging Face repository, OWNER/NAME; a new
            repository is private."""
    if push and not hub:
        raise UserError("--push uploads the folder of --hub: add --hub")
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination} exists already; give a new folder, or remove it"
        )
    loaded = load(source, weights, checkpoint=checkpoint)
    settings = {"format": EXPORT_FORMAT, "model": asdict(loaded.model.config)}
    settings |= {name: getattr(loaded, name) for name in EXPORTED} | {"source": source}
    parameters = loaded.model.named_parameters()
    prefix = "model." if hub else ""
    tensors = {
        prefix + name: p.detach().to(getattr(torch, dtype)) for name, p in parameters
    }
    if wrong := next(
        (name for name, tensor in tensors.items() if not is_finite(tensor)), None
    ):
        raise CheckpointError(
            f"{wrong} is not finite as {dtype}: choose another --dtype"
        )
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    try:
        with staging(destination, replace=False) as folder:
            (folder / "model.safetensors").write_bytes(data)
            # no checksum: transformers may rewrite the weights and would keep it
            sums = (
                {} if hub else {"model.safetensors": hashlib.sha256(data).hexdigest()}
            )
            settings["files"] = sums
            settings["sha256"] = digest(settings)
            if hub:
                from aogpt.training.metrics import (
                    read_metrics,  # imports all of training
                )

                rows = read_metrics(Path(loaded.path).parent.parent / "metrics.jsonl")
                write_hub_files(folder, loaded, settings, dtype, rows)
            else:
                if loaded.tokenizer in FILES:
                    loaded.get_tokenizer().keep(folder)
                write_json(folder / "config.json", settings)
    except OSError as error:
        made = (
            os.path.lexists(destination)
            and "another process has made it; remove it, or give a new folder"
        )
        raise CheckpointError(
            f"could not write {destination}: {made or error}"
        ) from error
    show(f"read {loaded.describe()}")
    count = sum(parameter_counts(loaded.model).values())
    others = "what transformers needs" if hub else "config.json"
    show(f"wrote {destination}: model.safetensors ({count:,} parameters) and {others}")
    if push:
        show(f"uploaded to {push_folder(destination, push)}")


if __name__ == "__main__":
    run_script(lambda: tyro.cli(convert))
