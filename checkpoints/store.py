"""Checkpoints: averaged weights, atomic writing, exact resume, and loading a model from wherever its weights are.

python convert.py SRC DST     # any supported weights -> DST/model.safetensors and DST/config.json

A run folder holds

    config.toml            the resolved configuration
    metrics.jsonl          a JSON object a line: training and validation losses
    checkpoints/step_00001000.pt, ...   the newest few; of a sharded run, folders step_00001000 (see sharded.py)
    best.pt                the one with the lowest validation loss; of a sharded run, the link best to its folder

A checkpoint is a dict of tensors and plain values. Files are read with `torch.load(weights_only=True)` or as
safetensors: neither runs code that a file brings along. released.py knows the layouts of released weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
import tyro

from checkpoints import released
from model import AOGPT, ModelConfig
from runtime.files import sync_folder, write_atomically
from training import optimizers as optim

FORMAT = "aogpt-checkpoint-2"
EXPORT_FORMAT = "aogpt-export-1"
FACTS = (
    "step",
    "weights",
    "tokenizer",
    "vocab_size",
    "scored_from",
)  # of `Loaded`, kept in an export
SUPPORTED = (
    "supported are run folders and checkpoints of train.py, folders that convert.py wrote, and the released "
    "weights of AO-GPT and sigma-GPT (.pt) and of GPT-2, RADD and SEDD (config.json with model.safetensors or "
    "pytorch_model.bin)"
)
STATE_KEYS = ("step", "model_config", "ema", "config", "data", "best")
TENSOR_KEYS = {".pt": ("model", "optimizer"), "": ("shapes",)}  # besides, in a file and in a folder


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read or used; the message says which, why and what to do."""


class EMA:
    """Exponential moving average of a model's parameters (the paper, section 3; evaluation and sampling use it).

    The decay is warmed up: decay_t = min(decay, (1 + t) / (10 + t)) after t updates. Of sharded weights, every process
    averages its part.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        device = next(model.parameters()).device  # which steps are skipped is the device's to know
        self.updates = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, model: torch.nn.Module, finite: torch.Tensor | float = 1.0) -> None:
        """Take in the model's weights, if `finite` is 1 and not 0; without waiting for the device."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.decay)
        share = (1 - decay) * finite
        self.updates += finite
        ours, theirs = (
            list(map(local, self.weights.values())),
            [local(p.detach()) for p in model.parameters()],
        )
        torch._foreach_lerp_(ours, theirs, [share.to(ours[0].dtype)] * len(ours))

    @contextlib.contextmanager
    def applied(self, model: torch.nn.Module):
        """The model with the averaged weights inside the block, with its own again after it."""
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        copy_parameters(model, self.weights)
        try:
            yield model
        finally:
            copy_parameters(model, own)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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


@torch.no_grad()
def initialise(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2.

    Every weight of the source must have its place. Where the model has adaLN and the source has none, adaLN starts as
    the identity (shift 0, scale 0, gate 1), and other target-position tables start at 0, so that at first the model
    computes exactly what the source does (a two-stream decoder takes the weights, but asks a query stream instead).
    """
    for name in (
        "attention",
        "n_head",
        "position",
        "norm",
        "norm_bias",
        "qk_norm",
        "gelu",
        "tied_head",
        "start",
    ):
        theirs, ours = getattr(source.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(
                f"cannot start from these weights: set model.{name} = {theirs!r} (it is {ours!r})"
            )
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        if name not in own or own[name].shape != weight.shape:
            found = tuple(own[name].shape) if name in own else "no such weight"
            raise CheckpointError(
                f"cannot start from these weights: {name} is {tuple(weight.shape)} in the source, {found} in the "
                f"model; give it the source's shape: {source.config}"
            )
        own[name].copy_(weight)
    for name, weight in own.items():
        if name not in weights and (
            "adaln" in name or name.endswith("wtpe.weight") and model.config.target != "adaln"
        ):
            weight.zero_()
            if name.endswith("adaln.bias"):
                width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
                weight[2 * width : 3 * width] = weight[5 * width :] = 1


# ---- writing ---------------------------------------------------------------------------------------------------------


def save(run_folder: Path, state: dict, keep: int, best: bool) -> Path:
    """Write checkpoints/step_N.pt, mark it as the best one if it is, and drop all but the newest `keep`.

    Args:
        state: what `training_state` gives. Raises CheckpointError when it cannot be written; older ones stay.
    """
    path = path_of(run_folder, state["step"])
    try:
        write_atomically(path, lambda file: torch.save(state, file))
        if best:
            mark_best(path, run_folder)
    except (OSError, RuntimeError) as error:  # torch reports a failing write as RuntimeError
        reason = next((e for e in (error, error.__context__) if isinstance(e, OSError)), error)
        raise CheckpointError(
            f"could not write {path}: {reason}; {kept(path, run_folder)}. Is the disk full?"
        ) from error
    prune(run_folder, state["step"], keep)
    return path


def path_of(run_folder: Path, step: int, sharded: bool = False) -> Path:
    return run_folder / "checkpoints" / (f"step_{step:08d}" + ("" if sharded else ".pt"))


def kept(path: Path, run_folder: Path) -> str:
    """What there is before a checkpoint that could not be written."""
    older = find(run_folder, up_to=step_of(path) - 1)
    return f"the last good checkpoint is {older[-1]}" if older else "there is no earlier checkpoint"


def prune(run_folder: Path, step: int, keep: int) -> None:
    """Drop all but the newest `keep` checkpoints of steps <= step; of folders, not the best one."""
    best = (run_folder / "best").resolve()
    for old in find(run_folder, up_to=step)[:-keep]:
        if not old.is_dir():
            old.unlink(missing_ok=True)
        elif old.resolve() != best:
            rubbish = old.with_name(
                f".{old.name}.tmp"
            )  # a folder that is half removed must not pass for a checkpoint
            shutil.rmtree(rubbish, ignore_errors=True)
            os.rename(old, rubbish)
            shutil.rmtree(rubbish, ignore_errors=True)


def mark_best(source: Path, run_folder: Path) -> None:
    """Make best.pt a second name of the file `source` (or a copy, without links), or best a link to the folder."""
    target, other = run_folder / "best.pt", run_folder / "best"
    if source.is_dir():
        target, other = other, target
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        if source.is_dir():
            os.symlink(source.relative_to(run_folder), temporary)
        else:
            os.link(source, temporary)
    except OSError:  # a file system without links
        if source.is_dir():
            raise
        shutil.copyfile(source, temporary)
    for path in (
        target,
        other,
    ):  # a folder where a link was: the run has been copied by what follows links
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    os.replace(temporary, target)
    temporary.unlink(missing_ok=True)  # renaming a file to another name of itself does nothing
    other.unlink(missing_ok=True)


def training_state(
    step: int, model: AOGPT, ema: EMA, optimizer, config: dict, data_meta: dict, best: dict
) -> dict:
    """Everything that a run needs to go on exactly: data, orders and learning rate follow from the step."""
    return {
        "format": FORMAT,
        "step": step,
        "model_config": asdict(model.config),
        "model": {name: p.detach() for name, p in model.named_parameters()},
        "ema": {"weights": ema.weights, "updates": int(ema.updates), "decay": ema.decay},
        "optimizer": optim.named_state(model, optimizer),
        "config": config,
        "data": data_meta,
        "best": best,
        "torch": str(torch.__version__),
    }


def split_state(state: dict) -> tuple[dict, dict[str, torch.Tensor]]:
    """A training state as what a sharded checkpoint holds: what is no tensor, and the tensors by name."""
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in state["ema"]["weights"].items()}
    tensors |= {
        f"optimizer.{n}.{key}": t
        for n, values in state["optimizer"].items()
        for key, t in values.items()
    }
    plain = {key: value for key, value in state.items() if key not in ("model", "optimizer")}
    plain["ema"] = {key: value for key, value in state["ema"].items() if key != "weights"}
    return plain | {
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()}
    }, tensors


# ---- reading ---------------------------------------------------------------------------------------------------------


def finish_interrupted_save(run_folder: Path, state: dict, path: Path, keep: int) -> None:
    """Do what a kill in the middle of saving has left undone: mark the best, drop old ones and partial files."""
    if state["best"]["step"] == state["step"]:
        mark_best(path, run_folder)
    prune(run_folder, state["step"], keep)
    for folder in (run_folder, run_folder / "checkpoints"):
        for path in folder.glob(".*.tmp"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def find(run_folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; only those of steps <= up_to, if it is given."""
    paths = (Path(run_folder) / "checkpoints").glob("step_*")
    steps = {path: step for path in paths if (step := step_of(path)) is not None}
    return sorted((path for path in steps if up_to is None or steps[path] <= up_to), key=steps.get)


def step_of(path: Path) -> int | None:
    """The step that the name of a checkpoint tells; None for other files."""
    found = re.fullmatch(r"step_(\d{8,})(\.pt)?", path.name)
    return int(found[1]) if found else None


def read_file(path: Path, verify: bool = False) -> dict:
    """What a PyTorch or safetensors file holds, read without running any code of it.

    verify: check the checksum of every record first. Raises CheckpointError for whatever is not a dict.
    """
    try:
        if verify and (damaged := zipfile.ZipFile(path).testzip()):
            raise CheckpointError(f"{path} is damaged (checksum of {damaged})")
        with open(path, "rb") as file:
            magic = file.read(9)
        if magic[8:] == b"{":  # safetensors: the length of the header in 8 bytes, then its JSON
            return safetensors.torch.load_file(path)
        state = torch.load(
            path, map_location="cpu", weights_only=True, mmap=magic.startswith(b"PK")
        )
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    except (
        Exception
    ) as error:  # torch raises many kinds for files that are truncated, foreign or unsafe
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint: {_why_unreadable(error)}; {SUPPORTED}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a dict; {SUPPORTED}")
    return state


def _why_unreadable(error: Exception) -> str:
    if name := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it is refused, because loading it would run code ({name[1]})"
    if isinstance(error, pickle.UnpicklingError):
        return "it is refused, because it is a pickle of more than tensors and plain values, which can run code"
    first_sentence = " ".join(str(error).split()).split(". ")[0]
    return f"truncated, or no file of weights ({type(error).__name__}: {first_sentence})"


def read(path: Path, verify: bool = False) -> dict:
    """Read one checkpoint that train.py wrote, as `read_file` does; of a sharded one, all but its tensors."""
    sharded = path.is_dir()
    state = read_file(path / "state.pt" if sharded else path, verify)
    if state.get("format") != FORMAT:
        found = state["format"] if "format" in state else f"keys {sorted(map(str, state))[:6]}"
        raise CheckpointError(
            f"{path} holds {found}; supported are checkpoints that train.py wrote ({FORMAT})"
        )
    if missing := [
        key for key in (*STATE_KEYS, *TENSOR_KEYS["" if sharded else ".pt"]) if key not in state
    ]:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing)}; it was not written by this train.py"
        )
    if sharded:
        found = {name: list(shape) for name, (shape, _) in _sharded().shapes(path).items()}
        if damaged := [name for name, shape in state["shapes"].items() if found.get(name) != shape]:
            raise CheckpointError(
                f"{path} lacks parts of {len(damaged)} tensors, e.g. {damaged[0]}: a file is missing"
            )
    return state


def _sharded():
    """The room of sharded checkpoints, which is built on this one and takes a while to import."""
    from checkpoints import sharded

    return sharded


def read_newest(run_folder: Path) -> tuple[Path, dict] | None:
    """The newest checkpoint that can be read, checked in full; None if the run has none at all.

    A broken one is named on stderr and passed over. Raises CheckpointError if all are broken.
    """
    paths = find(run_folder)
    for path in reversed(paths):
        try:
            return path, read(path, verify=True)
        except CheckpointError as error:
            if os.environ.get("RANK", "0") == "0":
                print(f"warning: {error}; trying the one before it", file=sys.stderr)
    if paths:
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints in {run_folder} can be read; move the folder away to start anew"
        )
    return None


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
        tensors = _sharded().read_all(path, "ema." if weights == "ema" else "model.")
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


# ---- our own format --------------------------------------------------------------------------------------------------


def convert(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    weights: Literal["ema", "raw"] = "ema",
) -> None:
    """Write any supported weights in this project's own format: DST/model.safetensors and DST/config.json.

    Args:
        source: Run folder, checkpoint file, folder of released weights, or Hugging Face repo id.
        destination: New folder; written completely, or not at all.
        weights: The averaged weights, where the source has them, or the last ones.
    """
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination} exists already; give a folder that does not, or remove it"
        )
    loaded = load(source, weights)
    facts = {name: getattr(loaded, name) for name in FACTS}
    settings = {"format": EXPORT_FORMAT, "model": asdict(loaded.model.config)} | facts
    settings |= {"system": loaded.system, "source": source}
    tensors = {name: p.detach() for name, p in loaded.model.named_parameters()}
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    temporary = destination.with_name(f".{destination.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        write_atomically(temporary / "model.safetensors", lambda file: file.write(data))
        text = json.dumps(settings, indent=2) + "\n"
        write_atomically(temporary / "config.json", lambda file: file.write(text.encode()))
        os.rename(temporary, destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise CheckpointError(f"could not write {destination}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    count = sum(loaded.model.num_params().values())
    print(f"read {loaded.describe()}")
    print(f"wrote {destination}: model.safetensors ({count:,} parameters) and config.json")
