"""Convert any supported weights to this project's format: python convert.py SRC DST"""

import hashlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
import tyro

from checkpoints import CheckpointError, load
from checkpoints.hub import push_folder, write_hub_files
from checkpoints.load import EXPORT_FORMAT, EXPORTED
from checkpoints.store import digest, is_finite
from data.tokenizers import FILES
from runtime.command_line import run_script, show
from runtime.errors import UserError
from runtime.files import staging, write_json
from variants import parameter_counts


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
        weights: The averaged weights, where the source has them, or the last ones.
        dtype: Of the file. bfloat16 is half as large and rounds weights to 8 bits; models that are
            loaded from it are float32 all the same.
        checkpoint: Of a run folder: last, best (the lowest validation loss) or a step's number.
        hub: Write a folder that transformers.AutoModel loads without this project, with its
            tokenizer, code and a model card.
        push: With --hub: also upload the folder to this Hugging Face repository, NAME/MODEL, which
            is private if it is new."""
    if push and not hub:
        raise UserError("--push uploads what --hub writes: add --hub")
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists already; give a new folder, or remove it")
    loaded = load(source, weights, checkpoint=checkpoint)
    settings = {"format": EXPORT_FORMAT, "model": asdict(loaded.model.config)}
    settings |= {name: getattr(loaded, name) for name in EXPORTED} | {"source": source}
    parameters = loaded.model.named_parameters()
    prefix = "model." if hub else ""
    tensors = {prefix + name: p.detach().to(getattr(torch, dtype)) for name, p in parameters}
    if wrong := next((name for name, tensor in tensors.items() if not is_finite(tensor)), None):
        raise CheckpointError(f"{wrong} is not finite as {dtype}: choose another --dtype")
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    try:
        with staging(destination, replace=False) as folder:
            (folder / "model.safetensors").write_bytes(data)
            # transformers writes weights again, and would leave an old checksum
            sums = {} if hub else {"model.safetensors": hashlib.sha256(data).hexdigest()}
            settings["files"] = sums
            settings["sha256"] = digest(settings)
            if hub:
                from training.metrics import read_metrics  # and all of training with it

                rows = read_metrics(Path(loaded.path).parent.parent / "metrics.jsonl")
                write_hub_files(folder, loaded, settings, dtype, rows)
            else:
                if loaded.tokenizer in FILES:
                    loaded.get_tokenizer().keep(folder)
                write_json(folder / "config.json", settings)
    except OSError as error:
        made = os.path.lexists(destination) and "another process has made it meanwhile"
        raise CheckpointError(f"could not write {destination}: {made or error}") from error
    show(f"read {loaded.describe()}")
    count = sum(parameter_counts(loaded.model).values())
    others = "what transformers needs" if hub else "config.json"
    show(f"wrote {destination}: model.safetensors ({count:,} parameters) and {others}")
    if push:
        show(f"uploaded to {push_folder(destination, push)}")


if __name__ == "__main__":
    run_script(lambda: tyro.cli(convert))
