"""A model from wherever its weights are: run folders, checkpoints, exports, released weights, Hugging Face repos.

released.py knows the layouts of released weights; export.py wrote the exports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from checkpoints import released, sharded
from checkpoints.errors import CheckpointError
from checkpoints.store import FORMAT, SUPPORTED, read, read_file, read_newest
from model import AOGPT, ModelConfig

EXPORT_FORMAT = "aogpt-export-1"
FACTS = (
    "step",
    "weights",
    "tokenizer",
    "vocab_size",
    "scored_from",
)  # of `Loaded`, kept in an export


# ---- loading a model -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and where it came from."""

    model: AOGPT
    path: str
    """The file of its weights."""
    step: int
    weights: str
    """"ema" or "raw"; raw also where averaged weights were asked for, but the file has only one set of weights."""
    tokenizer: str
    vocab_size: int
    """Of the tokenizer: ids that the model was trained on."""
    scored_from: int = 0
    """The first step, left to right, whose prediction means something: 1 for GPT-2, which has no start token."""
    system: str | None = None
    """The layout of released weights that it came from ("AO-GPT", "GPT-2", ...); None for a model trained here."""

    def describe(self) -> str:
        return f"{self.path} (step {self.step}, {self.weights} weights)"


def load(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> Loaded:
    """Load a model, in eval mode; what lies at the path is told by its content.

    Args:
        path: a run folder (its newest checkpoint); a file; a folder with weights and config.json; or, where there is
            none of these, a Hugging Face repo id "org/name".
        weights: "ema" for the averaged weights where there are any, "raw" for the last ones.

    Raises CheckpointError that says what was found and what is supported.
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f"weights is {weights!r}; give 'ema' or 'raw'")
    path = Path(path) if Path(path).exists() else download(str(path))
    if path.is_dir() and (path / "state.pt").is_file():
        file, contents = path, read(path)
    elif path.is_dir() and (found := read_newest(path)):
        file, contents = found
    else:
        file = weights_file(path) if path.is_dir() else path
        contents = read_file(file)
    try:
        settings = (
            {}
            if "model" in contents or file.is_dir()
            else _read_json(file.with_name("config.json"))
        )
        if contents.get("format") == FORMAT:
            config, tensors, facts = _trained(file, contents, weights)
        elif settings.get("format") == EXPORT_FORMAT:
            config, tensors, facts = _exported(contents, settings, weights)
        else:
            config, tensors, facts = _released(contents, settings, weights)
        model = AOGPT(config)
        copy_parameters(model, tensors)
    except KeyError as error:
        raise CheckpointError(f"{file} is incomplete: it lacks {error}; {SUPPORTED}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}; {SUPPORTED}") from error
    return Loaded(model.to(device).eval(), str(file), **facts)


def load_model(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> AOGPT:
    """The model of `load`."""
    return load(path, weights, device).model


def weights_file(folder: Path) -> Path:
    """The file of weights in a folder that is not that of a run."""
    files = [
        path
        for name in ("model.safetensors", "pytorch_model.bin")
        if (path := folder / name).is_file()
    ]
    files = files[:1] or sorted(folder.glob("*.pt"))
    if len(files) == 1:
        return files[0]
    if files:
        raise CheckpointError(
            f"{folder} holds {', '.join(path.name for path in files)}; give the path of one of them"
        )
    raise CheckpointError(
        f"{folder} holds no checkpoints/step_*.pt (has its run trained?), model.safetensors or pytorch_model.bin; "
        f"{SUPPORTED}"
    )


def download(repo: str) -> Path:
    """The folder of a Hugging Face repo's weights, from the network or from Hugging Face's cache."""
    path = Path(repo)
    is_file = path.suffix in (".pt", ".bin", ".safetensors")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo) or is_file or path.parent.is_dir():
        raise CheckpointError(
            f"there is no {repo}; give a run folder (out/NAME) or a checkpoint file (.pt), a folder of released "
            "weights, or a Hugging Face repo id (org/name)"
        )
    try:
        import huggingface_hub

        for name in (
            "model.safetensors",
            "pytorch_model.bin",
            "*.pt",
        ):  # whichever the repo has first
            folder = Path(
                huggingface_hub.snapshot_download(repo, allow_patterns=["config.json", name])
            )
            if any(folder.glob(name)):
                break
    except ImportError as error:
        raise CheckpointError(
            f"there is no {repo} here; Hugging Face repos need: pip install huggingface_hub"
        ) from error
    except (
        Exception
    ) as error:  # no network, no such repo, no access: the library has a class for each
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"there is no {repo} here, and it could not be had from Hugging Face: {type(error).__name__}: {reason}"
        ) from error
    return folder


def _trained(path: Path, state: dict, weights: str) -> tuple[ModelConfig, dict, dict]:
    if path.is_dir():
        tensors = sharded.read_all(path, "ema." if weights == "ema" else "model.")
    else:
        tensors = state["ema"]["weights"] if weights == "ema" else state["model"]
    facts = {"step": state["step"], "weights": weights}
    facts |= {name: state["data"][name] for name in ("tokenizer", "vocab_size")}
    return ModelConfig(**state["model_config"]), tensors, facts


def _exported(tensors: dict, settings: dict, weights: str) -> tuple[ModelConfig, dict, dict]:
    facts = {name: settings[name] for name in FACTS} | {"system": settings.get("system")}
    if weights == "raw" and facts["weights"] != "raw":
        raise CheckpointError(
            f"it holds the {facts['weights']} weights only; convert its source with --weights raw"
        )
    return ModelConfig(**settings["model"]), tensors, facts


def _released(contents: dict, settings: dict, weights: str) -> tuple[ModelConfig, dict, dict]:
    """AO-GPT and sigma-GPT come as a dict around two state dicts, the others as a state dict beside a config.json."""
    state, average = contents, None
    if isinstance(contents.get("model"), dict):
        state, settings, average = (
            contents["model"],
            contents.get("model_args"),
            contents.get("ema_model"),
        )
    config, tensors = released.translate(state, settings)
    used = "raw"
    if weights == "ema" and average is not None:
        used = "ema"
        config, tensors = released.translate(
            released.averaged(state, average["shadow_params"]), settings
        )
    facts = {"step": int(contents.get("iter_num", 0)), "weights": used, "tokenizer": "gpt2"}
    facts["vocab_size"] = min(50257, config.mask_token or config.vocab_size)
    system = released.layout(state)
    return config, tensors, facts | {"scored_from": int(system == "GPT-2"), "system": system}


def _read_json(path: Path) -> dict:
    """The object in a JSON file; an empty one if there is no such file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} holds a {type(settings).__name__}, not an object")
    return settings


@torch.no_grad()
def copy_parameters(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy named weights into the model in place. Raises CheckpointError if names or shapes differ."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != weights.keys():
        odd = sorted(parameters.keys() ^ weights.keys())
        raise CheckpointError(
            f"the weights do not fit the model: {len(odd)} names differ, e.g. {odd[0]}"
        )
    for name, p in parameters.items():
        if p.shape != weights[name].shape:
            raise CheckpointError(
                f"{name} is {tuple(weights[name].shape)} in the file, {tuple(p.shape)} in the model"
            )
        p.copy_(weights[name])
