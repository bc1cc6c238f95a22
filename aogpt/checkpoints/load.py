"""Load a model from a run folder, a checkpoint, an export of convert.py or released weights."""

import pickle
import re
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from ..data.tokenizers import HUB, OWN, RECORDED, Tokenizer, get_tokenizer
from ..model import AOGPT, ModelConfig
from ..runtime.errors import UserError, reason_of
from ..runtime.files import sha256_file
from ..runtime.validation import (
    Count,
    NonNegative,
    expand_home,
    from_values,
    read_json,
    schema,
)
from ..systems import build_model, set_block_size
from . import pretrained, released, store
from .store import CheckpointError

Weights = Literal["ema", "raw"]  # averaged or last
EXPORT_FORMAT = "aogpt-export-2"
EXPORTED = ("step", "weights", *RECORDED, "scored_from", "system")  # of `Loaded`
SUPPORTED = (
    "supported are run folders, checkpoints, folders of convert.py, and released weights: AO-GPT, "
    "sigma-GPT (.pt), GPT-2, RADD, SEDD (config.json, model.safetensors or pytorch_model.bin), "
    "Llama, Mistral, Qwen2, Qwen3 (config.json, tokenizer.json, *.safetensors)"
)
INDEX = "model.safetensors.index.json"  # of weights in several files
WEIGHTS_FILES = ("model.safetensors", INDEX, "pytorch_model.bin")


@dataclass(frozen=True)
class Loaded:
    """A model and where it came from."""

    model: AOGPT
    path: str  # the checkpoint, or the file of weights
    step: int
    weights: str  # "ema" or "raw"; raw where the source has no averaged weights
    tokenizer: str
    vocab_size: int  # of the tokenizer: ids that the model was trained on
    scored_from: int = (
        0  # the first left-to-right step that is scored: GPT-2 has no start token
    )
    system: str | None = (
        None  # the layout of released weights; None for a model trained here
    )
    tokenizer_sha256: str | None = (
        None  # of its vocabulary; None where nothing records it
    )

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; its file is read here. Raises UserError if it has changed."""
        return get_tokenizer(self.tokenizer, self.tokenizer_sha256, Path(self.path))

    def describe(self) -> str:
        return f"{self.path} (step {self.step}, {self.weights} weights)"


def load(
    path: str | Path,
    weights: Weights = "ema",
    device="cpu",
    block_size: int | None = None,
    checkpoint: str = "last",
) -> Loaded:
    """Load a model in eval mode. Raises CheckpointError.

    Args:
        path: a run folder; a checkpoint, or a run's file `best`; a file of weights, or a folder
            with one and config.json; or a Hugging Face repo id "org/name".
        weights: "ema" for the averaged weights where there are any, "raw" for the last ones.
        block_size: another sequence length than the model was trained with.
        checkpoint: of a run folder: "last", "best" or the number of a step."""
    if weights not in ("ema", "raw"):
        raise UserError(f"weights is {weights!r}; give 'ema' or 'raw'")
    path = expand_home(path) if expand_home(path).exists() else download(str(path))
    read = partial(_from_checkpoint, weights=weights)
    if path.name == "best" and path.is_file() and checkpoint == "last":
        path = path.parent
        checkpoint = "best"
    file = path
    try:
        if checkpoint != "last" and not (path / "checkpoints").is_dir():
            raise CheckpointError(
                f"--checkpoint {checkpoint}: {path} is not a run folder"
            )
        if (
            (path / store.STATE).is_file()
            or path.is_dir()
            and store.step_of(path) is not None
        ):
            model, origin = read(path)
        elif path.is_dir() and (
            found := store.read_newest(path, read, which=checkpoint)
        ):
            file, (model, origin) = found
        else:
            file = weights_file(path) if path.is_dir() else path
            model, origin = _from_file(file, weights)
    except CheckpointError:
        raise
    except UserError as error:
        raise CheckpointError(f"{file} cannot be used: {error}; {SUPPORTED}") from error
    limit = model.config.mask_token or model.config.vocab_size
    count = origin["vocab_size"]
    if count > limit:
        raise CheckpointError(
            f"{file} has a vocabulary of {count}, but its model {limit} tokens"
        )
    if block_size is not None:
        set_block_size(model, block_size)
    return Loaded(model.to(device).eval(), str(file), **origin)


def config_of(path: str | Path) -> ModelConfig:
    """The configuration of the model of `load`; of pretrained decoders without their weights."""
    folder = (
        expand_home(path) if expand_home(path).exists() else download(str(path), ())
    )
    if (place := folder / "config.json").is_file():
        settings = read_json(place, dict[str, Any], "get it again")
        if pretrained.is_pretrained(settings):
            return pretrained.config_of(
                settings, bool(get_tokenizer(HUB, folder=folder).starts)
            )
    return load(path).model.config


def load_model(path: str | Path, weights: Weights = "ema", device="cpu") -> AOGPT:
    """The model of `load`."""
    return load(path, weights, device).model


def weights_file(folder: Path) -> Path:
    """The file of weights in a folder."""
    files = [folder / name for name in WEIGHTS_FILES if (folder / name).is_file()]
    files = files[:1] or sorted(folder.glob("*.pt"))
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {', '.join(f.name for f in files)}; give one's path"
        )
    if not files:
        what = "holds no checkpoints/step_N (has its run trained?) and no weights"
        raise CheckpointError(f"{folder} {what}; {SUPPORTED}")
    return files[0]


def download(repo: str, weights: tuple[str, ...] = (*WEIGHTS_FILES, "*.pt")) -> Path:
    """The local folder with a Hugging Face repo's settings and the first of the `weights` files
    that it has, downloaded or cached."""
    is_file = (
        repo.endswith((".pt", ".bin", ".safetensors")) or Path(repo).parent.is_dir()
    )
    if is_file or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        advice = "give a run folder (out/NAME) or a checkpoint, weights, or a Hugging Face repo id"
        raise CheckpointError(f"there is no {repo}; {advice}")
    try:
        import huggingface_hub

        for name in weights or ("config.json",):
            patterns = ["config.json", HUB, OWN, name]
            patterns += ["model-*-of-*.safetensors"] * (name == INDEX)
            local = Path(
                huggingface_hub.snapshot_download(repo, allow_patterns=patterns)
            )
            if any(local.glob(name)):
                break
    except Exception as error:  # not installed, no network, no such repo, no access
        what = f"there is no {repo} here or on Hugging Face"
        raise CheckpointError(f"{what}: {reason_of(error)}") from error
    return local


def _from_checkpoint(path: Path, weights: str) -> tuple[AOGPT, dict]:
    prefix = "ema." if weights == "ema" else "model."
    values = store.read_values(path, prefix=prefix)
    config = from_values(values["model_config"], ModelConfig, str(path))
    model = make_model(config, store.read_all(path, values, prefix))
    origin = {key: values["data"].get(key) for key in RECORDED}
    return model, origin | {"step": values["step"], "weights": weights}


def _from_file(file: Path, weights: str) -> tuple[AOGPT, dict]:
    place = file.with_name("config.json")
    settings = None
    contents = read_shards(file) if file.name == INDEX else read_file(file)
    # A container of released weights, a dict with the key "model", has its own settings.
    if place.exists() and "model" not in contents:
        settings = read_json(place, dict[str, Any], "get it again")
    if is_hub := (settings or {}).get("model_type") == "aogpt":  # of convert.py --hub
        settings = settings.get("aogpt")
        contents = {
            name.removeprefix("model."): tensor for name, tensor in contents.items()
        }
    if settings and pretrained.is_pretrained(settings):
        tokenizer = get_tokenizer(HUB, folder=file.parent)
        config, tensors = pretrained.read(settings, contents, tokenizer)
        origin = {"step": 0, "weights": "raw", "system": settings["architectures"][0]}
        origin |= {"tokenizer": HUB, "tokenizer_sha256": tokenizer.sha256}
        origin |= {
            "vocab_size": tokenizer.vocab_size,
            "scored_from": int(not tokenizer.starts),
        }
        return make_model(config, tensors), origin
    if not str((settings or {}).get("format")).startswith("aogpt-export-"):
        config, tensors, origin = released.read(contents, settings, weights)
        return make_model(config, tensors), origin
    if settings.get("sha256") != store.digest(settings):
        raise CheckpointError(f"{place} is damaged (checksum); copy the export again")
    if (found := settings["format"]) != EXPORT_FORMAT:
        raise CheckpointError(
            f"{place} is of format {found}; this version reads {EXPORT_FORMAT}"
        )
    settings = from_values(settings, Export, str(place), "convert its source again")
    if not is_hub and settings["files"].get(file.name) != sha256_file(file):
        raise CheckpointError(f"{file} is damaged (checksum); copy the export again")
    if weights == "raw" and settings["weights"] != "raw":
        raise UserError(
            "it holds the ema weights only; convert its source with --weights raw"
        )
    return make_model(settings["model"], contents), {
        name: settings.get(name) for name in EXPORTED
    }


def read_shards(index: Path) -> dict:
    """The tensors of the files that an index names."""
    files = read_json(index, dict[str, dict[str, Any]], "get it again").get(
        "weight_map", {}
    )
    parts = [read_file(index.parent / str(name)) for name in set(files.values())]
    return {name: tensor for part in parts for name, tensor in part.items()}


def read_file(path: Path) -> dict:
    """The contents of a PyTorch or safetensors file; code in it is not run."""
    try:
        with open(path, "rb") as file:
            magic = file.read(9)
        if (
            magic[8:] == b"{"
        ):  # safetensors: the length of the header in 8 bytes, then its JSON
            return load_file(path)
        if is_zip := magic.startswith(
            b"PK"
        ):  # of torch.save; torch.load checks no checksums
            with zipfile.ZipFile(path) as archive:
                if name := archive.testzip():
                    raise CheckpointError(
                        f"{path} is damaged (checksum of {name}); get it again"
                    )
        # weights_only: otherwise a pickle can call any function of Python
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # torch raises many kinds for damaged and foreign files
        reason = f"truncated, or not a file of weights ({' '.join(str(error).split())[:100]})"
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is refused: a pickle of more than tensors and plain values can run code"
        what = f"{path} cannot be read as a checkpoint"
        raise CheckpointError(f"{what}: {reason}; {SUPPORTED}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(
            f"{path} holds a {type(contents).__name__}, not a dict; {SUPPORTED}"
        )
    return contents


@schema
class Export(TypedDict):
    """The contents of an export's config.json."""

    model: ModelConfig
    step: NonNegative
    weights: Weights
    tokenizer: str
    tokenizer_sha256: NotRequired[str | None]
    vocab_size: Count
    scored_from: Literal[0, 1]
    system: str | None
    files: dict[str, str]  # sha256 by file


def make_model(config: ModelConfig, weights: dict[str, Tensor]) -> AOGPT:
    """The model of these weights, which are removed from `weights` one by one to save memory."""
    with torch.device("meta"):  # without memory
        model = build_model(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = shapes.keys() - weights.keys()
    unknown = weights.keys() - shapes.keys()
    if missing or unknown:
        problems = [f"it lacks {released.listed(sorted(missing))}"] * bool(missing)
        odd = f"the model has no place for {released.listed(sorted(unknown))}"
        raise UserError(", and ".join([*problems, *[odd] * bool(unknown)]))
    for name, shape in shapes.items():
        value = weights.pop(name)
        if tuple(value.shape) != shape:
            raise UserError(
                f"{name} is {tuple(value.shape)} in the file, {shape} in the model"
            )
        if not value.is_floating_point() or value.layout != torch.strided:
            raise UserError(
                f"{name} holds {value.dtype} ({value.layout}), not plain numbers"
            )
        # a copy: the file, which is mapped into memory, may change
        value = value.to(
            torch.float32, copy=True, memory_format=torch.contiguous_format
        )
        if not store.is_finite(value):
            raise UserError(f"{name} holds numbers that are not finite")
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(value))
    if config.tied_head:
        model.head.weight = model.wte.weight
    model.make_angles(torch.device("cpu"))
    return model
