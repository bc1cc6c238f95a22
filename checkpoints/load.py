"""A model from wherever its weights are: run folders, checkpoints, exports, released weights.

released.py knows the layouts of released weights; convert.py at the root writes exports.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch

from checkpoints import on_disk, released, store
from checkpoints.errors import CheckpointError
from model import AOGPT, ModelConfig, Transformer

EXPORT_FORMAT = "aogpt-export-1"
EXPORTED = ("step", "weights", "tokenizer", "vocab_size", "scored_from")  # of `Loaded`
SUPPORTED = (
    "supported are run folders and checkpoints of train.py, folders that convert.py wrote, and the "
    "released weights of AO-GPT and sigma-GPT (.pt) and of GPT-2, RADD and SEDD (config.json with "
    "model.safetensors or pytorch_model.bin)"
)
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and where it came from."""

    model: Transformer
    path: str
    """The checkpoint, or the file of its weights."""
    step: int
    weights: str
    """"ema" or "raw"; raw also where averaged weights were asked for, but there is only one set."""
    tokenizer: str
    vocab_size: int
    """Of the tokenizer: ids that the model was trained on."""
    scored_from: int = 0
    """The first step, left to right, whose prediction means something: 1 for GPT-2, which has no
    start token."""
    system: str | None = None
    """The layout of released weights that it came from ("AO-GPT", "GPT-2", ...); None for a model
    trained here."""

    def describe(self) -> str:
        return f"{self.path} (step {self.step}, {self.weights} weights)"


def load(
    path: str | Path,
    weights: Literal["ema", "raw"] = "ema",
    device="cpu",
    block_size: int | None = None,
) -> Loaded:
    """Load a model, in eval mode; what lies at the path is told by its content.

    Args:
        path: a run folder (its newest checkpoint); a checkpoint, or a run's file `best`; a file of
            weights, or a folder with one and config.json; or, where there is none of these, a
            Hugging Face repo id "org/name".
        weights: "ema" for the averaged weights where there are any, "raw" for the last ones.
        block_size: of longer or shorter sequences than the model was trained on
            (`Transformer.set_block_size`).

    Raises CheckpointError that says what was found and what is supported.
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f"weights is {weights!r}; give 'ema' or 'raw'")
    path = Path(path) if Path(path).exists() else download(str(path))
    found = find_checkpoint(path)
    if found:
        file = found[0]
    else:
        file = weights_file(path) if path.is_dir() else path
    try:
        if found:
            config, tensors, origin = _trained(*found, weights)
        else:
            contents = read_file(file)
            # A container of released weights (a dict with "model" in it) holds its own settings.
            settings = {} if "model" in contents else _read_json(file.with_name("config.json"))
            read = _exported if settings.get("format") == EXPORT_FORMAT else _released
            config, tensors, origin = read(contents, settings, weights)
        model = AOGPT(config)
        copy_parameters(model, tensors)
        if block_size is not None:
            model.set_block_size(block_size)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{file} is incomplete: it lacks {error}; {SUPPORTED}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}; {SUPPORTED}") from error
    return Loaded(model.to(device).eval(), str(file), **origin)


def load_model(
    path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu"
) -> Transformer:
    """The model of `load`."""
    return load(path, weights, device).model


@torch.no_grad()
def copy_parameters(model: Transformer, weights: dict[str, torch.Tensor]) -> None:
    """Copy named weights into the model in place. Raises ValueError if names or shapes differ."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        odd = sorted(parameters.keys() ^ weights.keys())
        raise ValueError(
            f"the weights do not fit the model: {len(odd)} names differ, e.g. {odd[0]}"
        )
    for name, p in parameters.items():
        if p.shape != weights[name].shape:
            found, expected = tuple(weights[name].shape), tuple(p.shape)
            raise ValueError(f"{name} is {found} in the file, {expected} in the model")
        p.copy_(weights[name])


# ---- what lies at a path -------------------------------------------------------------------------


def find_checkpoint(path: Path) -> tuple[Path, dict] | None:
    """The checkpoint that a path means, and its values; None where it means something else."""
    if path.is_dir():
        is_checkpoint = (path / on_disk.STATE).is_file() or (path / "state.pt").is_file()
        if is_checkpoint or store.step_of(path) is not None:
            return path, on_disk.read_values(path)
        return store.read_newest(path)
    if path.name == "best" and (best := store.best_of(path.parent)):
        return best, on_disk.read_values(best)
    return None


def weights_file(path: Path) -> Path:
    """The file of weights in a folder that is not that of a run."""
    files = [path / name for name in WEIGHTS_FILES if (path / name).is_file()]
    files = files[:1] or sorted(path.glob("*.pt"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} holds {names}; give the path of one of them")
    raise CheckpointError(
        f"{path} holds no checkpoints/step_N (has its run trained?), model.safetensors or "
        f"pytorch_model.bin; {SUPPORTED}"
    )


def download(repo: str) -> Path:
    """The folder of a Hugging Face repo's weights, from the network or from Hugging Face's
    cache."""
    path = Path(repo)
    is_file = path.suffix in (".pt", ".bin", ".safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo) or is_file or path.parent.is_dir():
        raise CheckpointError(
            f"there is no {repo}; give a run folder (out/NAME) or a checkpoint, a file (.pt) or "
            "folder of released weights, or a Hugging Face repo id (org/name)"
        )
    try:
        import huggingface_hub

        for name in (*WEIGHTS_FILES, "*.pt"):  # the first that the repo has: not all of them
            patterns = ["config.json", name]
            local = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
            if any(local.glob(name)):
                break
    except ImportError as error:
        raise CheckpointError(
            f"there is no {repo} here; Hugging Face repos need: pip install huggingface_hub"
        ) from error
    except Exception as error:  # no network, no such repo, no access: each has a class of its own
        reason = on_disk.reason_of(error)
        raise CheckpointError(
            f"there is no {repo} here, and it could not be had from Hugging Face: {reason}"
        ) from error
    return local


def read_file(path: Path) -> dict:
    """What a PyTorch or safetensors file of released weights holds, without running code of it.

    Raises CheckpointError for whatever is not a dict, and for checkpoints of earlier versions."""
    try:
        with open(path, "rb") as file:
            magic = file.read(9)
        if magic[8:] == b"{":  # safetensors: the length of the header in 8 bytes, then its JSON
            return safetensors.torch.load_file(path)
        # weights_only: a pickle can call any function of Python, this reads tensors and plain
        # values
        is_zip = magic.startswith(b"PK")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch raises many kinds for files that are cut, foreign or unsafe
        reason = _why_unreadable(error)
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {reason}; {SUPPORTED}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dict; {SUPPORTED}")
    if str(state.get("format")).startswith("aogpt-checkpoint-"):
        raise CheckpointError(f"{path} is {on_disk.OLD_FORMAT}")
    return state


def _why_unreadable(error: Exception) -> str:
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it is refused, because loading it would run code ({name[1]})"
    if isinstance(error, pickle.UnpicklingError):
        return "it is refused: a pickle of more than tensors and plain values can run code"
    first_sentence = " ".join(str(error).split()).split(". ")[0]
    return f"truncated, or no file of weights ({type(error).__name__}: {first_sentence})"


def _read_json(path: Path) -> dict:
    """The object in a JSON file; an empty one if there is no such file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} holds a {type(settings).__name__}, not an object")
    return settings


# ---- their contents: (configuration, weights by name, the other fields of Loaded) ----------------

Contents = tuple[ModelConfig, dict[str, torch.Tensor], dict]


def _trained(path: Path, values: dict, weights: str) -> Contents:
    tensors = on_disk.read_all(path, values, "ema." if weights == "ema" else "model.")
    data = values["data"]
    origin = {"tokenizer": data["tokenizer"], "vocab_size": data["vocab_size"]}
    origin |= {"step": values["step"], "weights": weights}
    return ModelConfig(**values["model_config"]), tensors, origin


def _exported(tensors: dict, settings: dict, weights: str) -> Contents:
    origin = {name: settings[name] for name in EXPORTED} | {"system": settings.get("system")}
    if weights == "raw" and origin["weights"] != "raw":
        raise ValueError(
            f"it holds the {origin['weights']} weights only; convert its source with --weights raw"
        )
    return ModelConfig(**settings["model"]), tensors, origin


def _released(contents: dict, settings: dict, weights: str) -> Contents:
    """AO-GPT and sigma-GPT come as a dict around two state dicts, the others as a state dict beside
    a config.json."""
    state, average = contents, None
    if isinstance(contents.get("model"), dict):
        state, settings = contents["model"], contents.get("model_args")
        average = contents.get("ema_model")
    used = "ema" if weights == "ema" and average is not None else "raw"
    # Translated in any case, for the shapes of the last weights say whether the average fits.
    config, tensors = released.translate(state, settings)
    if used == "ema":
        state = released.averaged(state, average["shadow_params"])
        config, tensors = released.translate(state, settings)
    system = released.layout(state)
    origin = {"step": int(contents.get("iter_num", 0)), "weights": used, "system": system}
    # All of these models have GPT-2's tokens; the rows after them are [MASK] or padding.
    origin |= {
        "tokenizer": "gpt2",
        "vocab_size": min(50257, config.mask_token or config.vocab_size),
    }
    return config, tensors, origin | {"scored_from": int(system == "GPT-2")}
