"""A model from wherever its weights are: run folders, checkpoints, exports, released weights.

released.py knows the layouts of released weights; convert.py at the root writes exports.
"""

from __future__ import annotations

import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeVar

import safetensors.torch
import torch
from typing_extensions import TypedDict  # pydantic takes Python's own from 3.12 on

from checkpoints import on_disk, released, store
from checkpoints.errors import CheckpointError
from model import AOGPT, ModelConfig
from runtime.devices import out_of_memory
from runtime.errors import UserError
from runtime.files import sha256_file
from runtime.validation import (
    Count,
    FileError,
    FileName,
    NonNegative,
    from_values,
    read_json,
    schema,
    short,
    too_deep,
)
from variants import build_model, set_block_size

EXPORT_FORMAT = "aogpt-export-2"
EXPORTED = ("step", "weights", "tokenizer", "vocab_size", "scored_from")  # of `Loaded`
SUPPORTED = (
    "supported are run folders and checkpoints of train.py, folders that convert.py wrote, and the "
    "released weights of AO-GPT and sigma-GPT (.pt) and of GPT-2, RADD and SEDD (config.json with "
    "model.safetensors or pytorch_model.bin)"
)
WEIGHTS_FILES = ("model.safetensors", "pytorch_model.bin")

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, and where it came from."""

    model: AOGPT
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
            (`AOGPT.set_block_size`).

    Raises CheckpointError that says what was found and what is supported.
    """
    if weights not in ("ema", "raw"):
        raise UserError(f"weights is {weights!r}; give 'ema' or 'raw'")
    path = Path(path) if Path(path).exists() else download(str(path))
    file = path
    try:
        if found := find_checkpoint(path, partial(_from_checkpoint, weights=weights)):
            file, (model, origin) = found
        else:
            file = weights_file(path) if path.is_dir() else path
            model, origin = _from_file(file, weights)
    except FileError as error:
        raise CheckpointError(str(error)) from error
    except KeyError as error:
        raise CheckpointError(f"{file} is incomplete: it lacks {error}; {SUPPORTED}") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a file can hold that nobody has thought of
        if out_of_memory(error):
            raise
        reason = on_disk.reason_of(error) if not isinstance(error, ValueError) else error
        raise CheckpointError(f"{file} cannot be used: {reason}; {SUPPORTED}") from error
    if block_size is not None:
        set_block_size(model, block_size)
    return Loaded(model.to(device).eval(), str(file), **origin)


def load_model(path: str | Path, weights: Literal["ema", "raw"] = "ema", device="cpu") -> AOGPT:
    """The model of `load`."""
    return load(path, weights, device).model


def make_model(config: ModelConfig, weights: dict[str, torch.Tensor], copy: bool = True) -> AOGPT:
    """The model of these weights, which are taken out of `weights` one by one. No memory is taken
    before their names, shapes and dtypes are seen to fit. Raises ValueError where they do not, and
    for weights that are not finite.

    copy: the weights may be a file that is mapped into memory, and changes."""
    shapes = released.parameter_shapes(config, len(weights))
    if shapes.keys() != weights.keys():
        odd = sorted(shapes.keys() ^ weights.keys())
        raise UserError(f"the weights do not fit the model: {len(odd)} names differ, e.g. {odd[0]}")
    for name, shape in shapes.items():
        if (found := tuple(weights[name].shape)) != shape:
            raise UserError(f"{name} is {found} in the file, {shape} in the model")
        released.check_tensor(name, weights[name])
    with torch.device("meta"):
        model = build_model(config)
    for name in shapes:
        plain = torch.contiguous_format
        value = weights.pop(name).to(torch.float32, copy=copy, memory_format=plain)
        if not on_disk.is_finite(value):
            raise UserError(f"{name} holds numbers that are not finite")
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(value))
    if config.tied_head:
        model.head.weight = model.wte.weight
    model.make_angles(torch.device("cpu"))
    return model


# ---- what lies at a path -------------------------------------------------------------------------


def find_checkpoint(path: Path, read: Callable[[Path], T]) -> tuple[Path, T] | None:
    """The checkpoint that a path means, and what `read` makes of it; None where it means something
    else."""
    if path.is_dir():
        is_checkpoint = (path / on_disk.STATE).is_file() or (path / "state.pt").is_file()
        if is_checkpoint or store.step_of(path) is not None:
            return path, read(path)
        return store.read_newest(path, read)
    if path.name == "best" and (best := store.best_of(path.parent)):
        return best, read(best)
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


def _from_checkpoint(path: Path, weights: str) -> tuple[AOGPT, dict]:
    """The model of a checkpoint, and the other fields of Loaded."""
    prefix = "ema." if weights == "ema" else "model."
    with on_disk.read_model(path, prefix) as (values, tensors):
        data = values["data"]
        origin = {"tokenizer": data["tokenizer"], "vocab_size": data["vocab_size"]}
        origin |= {"step": values["step"], "weights": weights}
        config = from_values(values["model_config"], ModelConfig, str(path))
        return make_model(config, tensors, copy=False), origin


def _from_file(file: Path, weights: str) -> tuple[AOGPT, dict]:
    """The model of a file of weights, and the other fields of Loaded."""
    # Checksums are made beside the rest, which takes as long, and waited for at its end.
    with ThreadPoolExecutor(1) as beside:
        checks = [beside.submit(check_sum, file)]
        contents = read_file(file)
        # A container of released weights (a dict with "model" in it) holds its own settings.
        settings = {} if "model" in contents else _settings(file.with_name("config.json"))
        if str(settings.get("format")).startswith("aogpt-export-"):
            config, tensors, origin = _exported(file, contents, settings, weights)
            if "files" in settings:
                checks.append(beside.submit(check_export, file, settings["files"]))
        else:
            config, tensors, origin = _released(contents, settings, weights)
        model = make_model(config, tensors)
        for check in checks:
            check.result()
    return model, origin


def read_file(path: Path) -> dict:
    """What a PyTorch or safetensors file of released weights holds, without running code of it.

    Raises CheckpointError for whatever is not a dict, and for checkpoints of earlier versions."""
    try:
        if not path.is_file():  # a FIFO would be waited for
            raise UserError("it is no regular file")
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


def check_sum(path: Path) -> None:
    """Compare a file with the checksums that come with it, if any do: the name of its blob in
    Hugging Face's cache, or those in a zip file, as torch.save writes it, of everything in it.

    Raises CheckpointError where they differ; warns of a format that has none."""
    blob = path.resolve().name
    if not path.is_file():
        return  # which is said where it is read
    if re.fullmatch("[0-9a-f]{64}", blob):
        if sha256_file(path) != blob:
            raise CheckpointError(
                f"{path}: its sha256 is not its name in the cache: download it again"
            )
        return
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise CheckpointError(
                    f"{path} is packed, as torch.save packs nothing: unpacked it can be of any "
                    "size; save it with torch.save"
                )
            if name := archive.testzip():
                raise CheckpointError(f"{path} is damaged (checksum of {name} in it); get it again")
    elif path.suffix in (".pt", ".bin"):
        print(
            f"warning: {path} is of PyTorch's old format, which has no checksums: damage would go "
            "unnoticed",
            file=sys.stderr,
        )


def check_export(path: Path, sums: dict[str, str]) -> None:
    """Compare a file of an export with those that its config.json lists."""
    if sums.get(path.name) != sha256_file(path):
        raise CheckpointError(f"{path} is damaged (checksum); copy the export again")


# ---- their contents: (configuration, weights by name, the other fields of Loaded) ----------------

Contents = tuple[ModelConfig, dict[str, torch.Tensor], dict]


@schema
class Export(TypedDict):
    """The contents of an export's config.json; those of the first format lack the checksums."""

    format: Literal["aogpt-export-1", "aogpt-export-2"]
    model: ModelConfig
    step: NonNegative
    weights: Literal["ema", "raw"]
    tokenizer: str
    vocab_size: Count
    scored_from: Literal[0, 1]
    system: str | None
    files: NotRequired[dict[FileName, str]]
    """sha256 by file."""
    sha256: NotRequired[str]
    """Of all other keys."""


def _settings(path: Path) -> dict:
    """The contents of the config.json beside weights; none if there is no such file."""
    if not path.exists():
        return {}
    settings = read_json(path, dict[str, Any], "get it again")
    if too_deep(settings):
        raise CheckpointError(f"{path} is damaged: it is nested too deep; get it again")
    return settings


def _exported(file: Path, tensors: dict, settings: dict, weights: str) -> Contents:
    place = file.with_name("config.json")
    if "sha256" in settings or settings["format"] != "aogpt-export-1":
        if settings.get("sha256") != on_disk.digest(settings):
            raise CheckpointError(f"{place} is damaged (checksum); copy the export again")
        if "files" not in settings:
            raise CheckpointError(f"{place} lacks files; copy the export again")
    else:
        print(
            f"warning: {place} is of an earlier version and has no checksums: damage would go "
            "unnoticed; convert its source again",
            file=sys.stderr,
        )
    settings = from_values(settings, Export, str(place), "convert its source again")
    origin = {name: settings[name] for name in EXPORTED} | {"system": settings.get("system")}
    if weights == "raw" and origin["weights"] != "raw":
        raise UserError(
            f"it holds the {origin['weights']} weights only; convert its source with --weights raw"
        )
    return settings["model"], tensors, origin


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
    step = contents.get("iter_num", 0)
    if type(step) is not int or step < 0:
        raise UserError(f"iter_num is {short(step)}, but it must be a number of steps")
    origin = {"step": step, "weights": used, "system": system}
    # All of these models have GPT-2's tokens; the rows after them are [MASK] or padding.
    origin |= {
        "tokenizer": "gpt2",
        "vocab_size": min(50257, config.mask_token or config.vocab_size),
    }
    return config, tensors, origin | {"scored_from": int(system == "GPT-2")}
