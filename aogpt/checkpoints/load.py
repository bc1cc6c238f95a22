"""Load a model from a run folder, a checkpoint, an export of convert.py or released
weights."""

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..data.record_end import RecordEnd
from ..data.tokenizers import (
    HUB,
    HUB_SETTINGS,
    OWN,
    RECORDED,
    HubTokenizer,
    Tokenizer,
    get_tokenizer,
    is_gpt2s,
    is_gpt2s_vocabulary,
)
from ..model import ModelConfig, Transformer
from ..runtime.errors import UserError, reason_of
from ..runtime.files import sha256_file
from ..runtime.validation import (
    Count,
    NonNegative,
    check_value,
    expand_home,
    from_values,
    read_json,
)
from ..systems import build_on_meta, set_block_size
from . import pretrained, released, store
from .store import CheckpointError
from .tensors import INDEX, SUPPORTED, LazyTensors, described, read_weights, renamed

Weights = Literal["ema", "raw"]  # averaged or last
EXPORT_FORMAT = "aogpt-export-2"
# Fields of `Loaded`.
EXPORTED = (
    "step",
    "weights",
    *RECORDED,
    "scored_from",
    "system",
    "window",
    "record_end",
)
WEIGHTS_FILES = ("model.safetensors", INDEX, "pytorch_model.bin")
ADVICE = "get it again"
VOCABULARY = "vocab.json"
# The generation_config.json may name the end of a text.
SETTINGS_FILES = ["config.json", "generation_config.json", VOCABULARY]
SETTINGS_FILES += [HUB, OWN, HUB_SETTINGS]


@dataclass(frozen=True)
class Loaded:
    """A model and where it came from."""

    model: Transformer
    path: str  # the checkpoint, or the file of weights
    step: int
    weights: str  # "ema" or "raw"; raw where the source has no averaged weights
    tokenizer: str
    vocab_size: int  # of the tokenizer: ids that the model was trained on
    # The first left-to-right step that is scored: GPT-2 has no start token.
    scored_from: int = 0
    # Of a run on records whose end is given (data.end); None for others.
    record_end: RecordEnd | None = None
    # The layout of released weights; None for a model trained here.
    system: str | None = None
    tokens: int | None = None  # that a run has trained on; None: not recorded
    # Tokens that its attention looked back over where it was trained, if not all: our
    # model looks back over all, and takes no longer sequences.
    window: int | None = None
    tokenizer_sha256: str | None = None  # of its vocabulary; None: not recorded
    description: str = ""  # the source, its step and the kind of its weights

    def get_tokenizer(self) -> Tokenizer:
        """Read its tokenizer. Raises UserError if the file has changed."""
        return get_tokenizer(self.tokenizer, self.tokenizer_sha256, Path(self.path))

    def origin(self) -> dict[str, Any]:
        """Return the entries on the source in a JSON report."""
        return {
            "path": self.path,
            "step": self.step,
            "weights": self.weights,
            "system": self.system,
        }


def load(
    path: str | Path,
    weights: Weights = "ema",
    device="cpu",
    block_size: int | None = None,
    checkpoint: str = "last",
) -> Loaded:
    """Load a model in eval mode. Raises CheckpointError.

    Args:
        path: a run folder; a checkpoint, or a run's file `best`; a file of weights, or
            a folder with one and config.json; or a Hugging Face repo id "org/name".
        weights: "ema" for the averaged weights where there are any, "raw" for the last
            ones.
        block_size: another sequence length than the model was trained with.
        checkpoint: which one of a run folder: "last", "best" or the number of a step.
    """
    check_value(weights, Weights, "weights")
    path = local_path(path)
    if path.name == "best" and path.is_file() and checkpoint == "last":
        path = path.parent
        checkpoint = "best"
    if checkpoint != "last" and not (path / "checkpoints").is_dir():
        raise CheckpointError(f"--checkpoint {checkpoint}: {path} is not a run folder")
    file = path
    try:
        newest = newest_checkpoint(path, weights, checkpoint)
        if newest is None:
            file = weights_file(path) if path.is_dir() else path
            loaded = from_file(file, weights)
        else:
            file, loaded = newest
        model = loaded.model
        if block_size is not None and block_size > model.config.block_size:
            pretrained.check_length(loaded.window, block_size)
    except CheckpointError:
        raise
    except (UserError, SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{file} cannot be used: {error}; {SUPPORTED}") from error
    limit = model.config.mask_token or model.config.vocab_size
    count = loaded.vocab_size
    if count > limit:
        raise CheckpointError(
            f"{file} has a vocabulary of {count}, but its model {limit} tokens"
        )
    description = f"{file} (step {loaded.step}, {loaded.weights} weights"
    if block_size is not None:
        own = model.config.block_size
        if block_size > own:
            description += f", in blocks of {block_size} tokens, not {own}"
        set_block_size(model, block_size)
    if loaded.record_end is not None:
        model.exclude(count, loaded.record_end.token)
    model.to(device).eval()
    return replace(loaded, description=f"{description})")


def load_model(path: str | Path, weights: Weights = "ema", device="cpu") -> Transformer:
    """Load a model without where it came from."""
    return load(path, weights, device).model


def config_of(path: str | Path) -> ModelConfig:
    """Read the configuration of a model; of pretrained decoders without their
    weights."""
    folder = local_path(path, weights=())
    place = folder / "config.json"
    if place.is_file():
        settings = read_json(place, dict[str, Any], ADVICE)
        if pretrained.is_pretrained(settings):
            tokenizer = get_tokenizer(HUB, folder=folder)
            return pretrained.config_of(settings, has_start=bool(tokenizer.starts))
    return load(path).model.config


def local_path(
    path: str | Path, weights: tuple[str, ...] = (*WEIGHTS_FILES, "*.pt")
) -> Path:
    """Return the path if it exists, else the local copy of the repo of this name."""
    local = expand_home(path)
    if local.exists():
        return local
    return download(str(path), weights)


def newest_checkpoint(
    path: Path, weights: str, checkpoint: str
) -> tuple[Path, Loaded] | None:
    """Read the newest usable checkpoint of a run folder, or the checkpoint at `path`.

    Returns its path and its model; None if there is none."""
    read = partial(from_checkpoint, weights=weights)
    if (path / store.STATE).is_file() or store.step_of(path) is not None:
        return path, read(path)
    if not path.is_dir():
        return None
    return store.read_newest(path, read, checkpoint=checkpoint)


def weights_file(folder: Path) -> Path:
    """Find the file of weights in a folder."""
    files = [folder / name for name in WEIGHTS_FILES if (folder / name).is_file()]
    files = files[:1] or sorted(folder.glob("*.pt"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(
            f"{folder} holds {names or 'no checkpoints/step_N and no weights'}; give "
            f"the path of one file or folder; {SUPPORTED}"
        )
    return files[0]


def download(repo: str, weights: tuple[str, ...]) -> Path:
    """Return the local folder of a Hugging Face repo, downloaded or cached, with its
    settings and the first of the `weights` files that it has."""
    is_file = repo.endswith((".pt", ".bin", ".safetensors"))
    is_file = is_file or Path(repo).parent.is_dir()
    reason = "its name is no repo id"
    if not is_file and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        try:
            import huggingface_hub

            for name in weights or ("config.json",):
                patterns = [*SETTINGS_FILES, name]
                if name == INDEX:
                    patterns.append("model-*-of-*.safetensors")
                local = Path(
                    huggingface_hub.snapshot_download(repo, allow_patterns=patterns)
                )
                if any(local.glob(name)):
                    break
            return local
        except Exception as error:  # no network, no such repo, no access
            reason = reason_of(error)
    raise CheckpointError(
        f"there is no {repo} here or on Hugging Face ({reason}); give a run folder "
        "(out/NAME) or a checkpoint, weights, or a Hugging Face repo id (without a "
        "network HF_HUB_OFFLINE=1 takes one that was downloaded before)"
    )


def from_checkpoint(path: Path, weights: str) -> Loaded:
    """Read the model of a checkpoint."""
    prefix = "ema." if weights == "ema" else "model."
    values = store.read_values(path, prefix=prefix)
    config = from_values(values["model_config"], ModelConfig, str(path))
    data = values["data"]
    record_end = None
    # Runs from before data.end have no such key.
    if values["config"].get("data", {}).get("end") == "given":
        record_end = RecordEnd.of(data, path)
    return Loaded(
        model=make_model(config, store.read_all(path, values, prefix)),
        path=str(path),
        step=values["step"],
        weights=weights,
        tokenizer=data["tokenizer"],
        tokenizer_sha256=data.get("tokenizer_sha256"),
        vocab_size=data["vocab_size"],
        record_end=record_end,
        tokens=values.get("tokens"),
    )


def from_file(file: Path, weights: str) -> Loaded:
    """Read the model of a file of weights."""
    place = file.with_name("config.json")
    contents = read_weights(file)
    # A container of released weights, a dict with the key "model", has its own
    # settings.
    if not place.exists() or "model" in contents:
        return from_release(contents, None, weights, file)
    settings = read_json(place, dict[str, Any], ADVICE)
    if pretrained.is_pretrained(settings):
        return from_pretrained(settings, contents, file)
    if settings.get("model_type") == "aogpt":  # of an earlier version's --hub
        export = from_values(settings.get("aogpt"), dict[str, Any], str(place), ADVICE)
        names = {name: name for name in contents}
        tensors = LazyTensors()
        for ours, name in renamed(names, lambda x: x.removeprefix("model.")).items():
            tensors.data[ours] = partial(contents.__getitem__, name)
        return from_export(export, tensors, file, weights, checked=False)
    if str(settings.get("format")).startswith("aogpt-export-"):
        return from_export(settings, contents, file, weights, checked=True)
    return from_release(contents, settings, weights, file)


def from_release(
    contents: dict, settings: dict | None, weights: str, file: Path
) -> Loaded:
    """Make the model of released weights; see `released.read`. A GPT-2 whose folder has
    another tokenizer.json than OpenAI's is read with that one; one that has another
    vocab.json alone is refused."""
    config, tensors, origin = released.read(contents, settings, weights)
    if origin["system"] == "GPT-2" and file.with_name(HUB).is_file():
        tokenizer = HubTokenizer(file.with_name(HUB))
        if not is_gpt2s(tokenizer):
            origin["tokenizer"] = HUB
            origin["tokenizer_sha256"] = tokenizer.sha256
            origin["vocab_size"] = tokenizer.vocab_size
    elif origin["system"] == "GPT-2" and file.with_name(VOCABULARY).is_file():
        ids = read_json(file.with_name(VOCABULARY), dict[str, int], ADVICE)
        if not is_gpt2s_vocabulary(ids):
            raise UserError(
                f"its {VOCABULARY} is not GPT-2's, and it has no {HUB}: write one with "
                "transformers, "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
    model = make_model(config, tensors)
    return Loaded(model, path=str(file), **origin)


def from_pretrained(settings: dict, contents: LazyTensors | dict, file: Path) -> Loaded:
    """Make the model of a decoder of `transformers`."""
    tokenizer = get_tokenizer(HUB, folder=file.parent)
    config, tensors = pretrained.read(settings, contents, tokenizer)
    return Loaded(
        model=make_model(config, tensors),
        path=str(file),
        step=0,
        weights="raw",
        tokenizer=HUB,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        scored_from=int(not tokenizer.starts),
        system=settings["architectures"][0],
        window=pretrained.window_of(settings),
    )


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
    window: NotRequired[Count | None]
    record_end: NotRequired[RecordEnd | None]
    files: dict[str, str]  # sha256 by file


def from_export(
    export: dict, contents: LazyTensors | dict, file: Path, weights: str, checked: bool
) -> Loaded:
    """Make the model of an export. checked: its settings hold the file's checksum."""
    place = file.with_name("config.json")
    if (
        export.get("sha256") != store.digest(export)
        or export.get("format") != EXPORT_FORMAT
    ):
        raise CheckpointError(
            f"{place} is damaged (checksum), or not of the format {EXPORT_FORMAT}; "
            "copy the export again"
        )
    export = from_values(export, Export, str(place), "convert its source again")
    if checked and export["files"].get(file.name) != sha256_file(file):
        raise CheckpointError(f"{file} is damaged (checksum); copy the export again")
    if weights == "raw" and export["weights"] != "raw":
        raise UserError(
            "it holds the ema weights only; convert its source with --weights raw"
        )
    origin = {name: export[name] for name in EXPORTED if name in export}
    model = make_model(export["model"], contents)
    return Loaded(model, path=str(file), **origin)


def make_model(
    config: ModelConfig, weights: MutableMapping[str, Tensor]
) -> Transformer:
    """Make the model of these weights, float32. They are removed from `weights` one by
    one, so that little more than the model is in memory. Raises UserError."""
    model = build_on_meta(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    missing = sorted(shapes.keys() - weights.keys())
    unknown = sorted(weights.keys() - shapes.keys())
    problems = []
    if missing:
        problems.append(f"it lacks {released.listed(missing)}")
    if unknown:
        problems.append(f"the model has no place for {released.listed(unknown)}")
    if problems:
        raise UserError(", and ".join(problems))
    for name, shape in shapes.items():
        value = checked_copy(name, weights.pop(name), shape)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, nn.Parameter(value))
    if config.tied_head:
        model.head.weight = model.wte.weight
    model.make_angles()
    return model


def checked_copy(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Copy a tensor to float32; the file behind it, mapped into memory, may change.
    Raises UserError for another shape or kind, and for numbers that are not finite."""
    is_plain = value.is_floating_point() and value.layout == torch.strided
    if tuple(value.shape) != shape or not is_plain:
        raise UserError(
            f"{name} is {described(value)} in the file, {shape} of plain numbers in "
            "the model"
        )
    value = value.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not store.is_finite(value):
        raise UserError(f"{name} holds numbers that are not finite")
    return value
