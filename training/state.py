"""The state of a run: new, or resumed from its newest checkpoint; and saving it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from checkpoints import CheckpointError, load_model, store
from data.tokenizers import is_same
from model import AOGPT
from runtime.errors import UserError
from runtime.processes import Processes
from training import config as configuration
from training import parallel
from training.config import Config
from training.optimizers import EMA, MuonAdamW, allocate_state, make_optimizer, named_state
from variants import build_model

# What a model shares with the one that its weights come from.
SHARED = ("attention", "n_head", "position", "norm", "norm_bias", "qk_norm", "gelu", "tied_head")
SHARED += ("start", "value_residual")


@dataclass
class Progress:
    """Where a run is. Its fields are keys of checkpoints.store.State."""

    step: int = 0
    best: dict | None = None  # {"step", "loss"} of the best checkpoint that exists
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """Everything that training changes. Data, orders and learning rate follow from the step."""

    model: AOGPT
    averages: list[EMA]  # of optim.ema_decay, and of optim.more_ema_decays
    optimizer: torch.optim.AdamW | MuonAdamW
    progress: Progress


# ---- starting ------------------------------------------------------------------------------------


def start(config: Config, data_meta: dict, procs: Processes) -> State:
    """The run's state: new, with the weights of train.init_from, or from its newest checkpoint.

    Raises UserError if the run in the folder is another one, CheckpointError if none of its
    checkpoints can be read."""
    torch.manual_seed(config.seed)
    share = slice(procs.rank, None, procs.world_size)  # each process verifies some of the files
    read = functools.partial(store.read_values, share=share)
    folder, weights = config.run_folder, None  # None: random
    found = store.read_newest(folder, read, procs)
    if found:
        check_same_run(config, data_meta, *found, procs.print0)
    else:
        names = ("config.toml", "metrics.jsonl", "best")
        held, own = [name for name in names if (folder / name).exists()], False
        with contextlib.suppress(ValueError, OSError):  # what an earlier start of the run wrote
            text = configuration.to_toml(configuration.load_toml(folder / "config.toml"))
            own = text == (folder / "config.toml").read_text()
        if held and not own:
            raise UserError(
                f"{folder} holds {held[0]}, but no checkpoint, and this version of train.py has "
                "not written it: choose another --name, or remove the file"
            )
        if config.train.init_from:
            initial = build_model(config.model)
            warm_start(initial, load_model(config.train.init_from))
            weights = dict(initial.named_parameters())
            procs.print0(f"started from the weights of {config.train.init_from}")
    # empty: drawing the weights of a large model, to be replaced, would take minutes
    model = parallel.build(config, procs, weights, empty=found is not None)
    decays = config.optim.ema_decay, *config.optim.more_ema_decays
    averages = [EMA(model, decay) for decay in decays]
    state = State(model, averages, make_optimizer(model, config), Progress())
    if procs.main:
        store.remove_partial(folder)
    if found:
        restore(state, *found)
        if procs.main:  # a kill may have prevented it
            store.settle(folder, found[1], config.checkpoint.keep)
        procs.print0(f"resumed from {found[0]}")
    return state


def check_same_run(config: Config, meta: dict, path: Path, values: dict, print0: Callable) -> None:
    """Print what has changed since a checkpoint. Raises UserError for what cannot change."""
    old = configuration.from_dict(values["config"], str(path))
    changes = configuration.differences(old, config)
    changes["data.tokenizer"] = values["data"]["tokenizer"], meta["tokenizer"]
    if not is_same(values["data"], meta) and len(set(changes["data.tokenizer"])) == 1:
        hashes = [data["tokenizer_sha256"][:12] for data in (values["data"], meta)]
        changes["data.tokenizer"] = tuple(f"{meta['tokenizer']} (sha256 {h})" for h in hashes)
    for split in ("train", "val"):
        files = [data.get("splits", {}).get(split, {}) for data in (values["data"], meta)]
        key = f"the split {split} in {config.data.folder}"
        changes[key] = tuple(file.get("sha256") for file in files)
    fixed = {"optim.kind": "optimizer", "optim.more_ema_decays": "list of averages"}
    fixed["data.tokenizer"] = "tokenizer"
    for key, (before, after) in changes.items():
        if before != after and (key.startswith("model.") or key in fixed):
            raise UserError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it is {after!r}:"
                f" the {fixed.get(key, 'architecture')} of a run cannot change; set it back, or "
                "start another run with --name"
            )
        if before != after:
            print0(f"changed since {path}: {key} = {after!r} (was {before!r})")


@torch.no_grad()
def warm_start(model: AOGPT, source: AOGPT) -> None:
    """Start `model` from the weights of `source`, e.g. an adaLN decoder from GPT-2.

    A new adaLN starts as the identity (shift 0, scale 0, gate 1) and other new tables of target
    positions at 0, so the model first computes what the source does. Exceptions: two streams, whose
    queries are new, and a plain GPT with rotary positions, in which all distances grow by one.
    Raises CheckpointError if a weight of the source has no place in the model."""
    for name in SHARED:
        theirs, ours = getattr(source.config, name), getattr(model.config, name)
        if theirs != ours:
            raise CheckpointError(
                f"cannot start from these weights: set model.{name} = {theirs!r} (it is {ours!r})"
            )
    weights, own = dict(source.named_parameters()), dict(model.named_parameters())
    for name, weight in weights.items():
        found = tuple(own[name].shape) if name in own else "no such weight"
        if found != tuple(weight.shape):
            raise CheckpointError(
                f"cannot start from these weights: {name} is {tuple(weight.shape)} in the "
                f"source, {found} in the model; give it the source's shape: {source.config}"
            )
        own[name].copy_(weight)
    for name in own.keys() - weights.keys():
        if "adaln" in name or (name.endswith("wtpe.weight") and model.config.target != "adaln"):
            own[name].zero_()
        if name.endswith("adaln.bias"):
            width = model.config.n_embd  # shift1, scale1, gate1, shift2, scale2, gate2
            own[name][2 * width : 3 * width] = own[name][5 * width :] = 1


# ---- to and from checkpoints ---------------------------------------------------------------------


def named_tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state, not copied, by their names in a checkpoint."""
    tensors = {f"model.{name}": p.detach() for name, p in state.model.named_parameters()}
    for i, ema in enumerate(state.averages):
        prefix = f"ema{ema.decay:g}" if i else "ema"
        tensors |= {f"{prefix}.{name}": average for name, average in ema.weights.items()}
    for name, values in named_state(state.model, state.optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return tensors


def plain_values(state: State, best: dict | None, config: Config, data_meta: dict) -> dict:
    """Everything else, as JSON values: keys of checkpoints.store.State."""
    ema = state.averages[0]
    return asdict(state.progress) | {
        "best": best,
        "ema": {"updates": int(ema.updates), "decay": ema.decay},
        "model_config": asdict(state.model.config),
        "config": asdict(config),
        "data": data_meta,
    }


@torch.no_grad()
def restore(state: State, path: Path, values: dict) -> None:
    """Fill a state from a checkpoint, whatever number of processes wrote it."""
    allocate_state(state.optimizer)
    tensors = named_tensors(state)
    if odd := sorted(values["tensors"].keys() - tensors.keys()):
        raise CheckpointError(f"{path} holds {odd[0]}, which the run has no place for")
    store.read_tensors(path, values, tensors)
    if name := not_finite(tensors):
        raise CheckpointError(f"{path}: {name} is not finite; remove it to resume from another")
    for ema in state.averages:
        ema.updates.fill_(values["ema"]["updates"])
    for field in fields(Progress):
        setattr(state.progress, field.name, values[field.name])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor whose shard on this process has a number that is not finite."""
    finite = [store.is_finite(parallel.local(tensor)) for tensor in tensors.values()]
    return next((name for name, ok in zip(tensors, finite, strict=True) if not ok), None)


# ---- saving --------------------------------------------------------------------------------------


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Under ddp the main process writes while the others wait; under fsdp every process writes its
    shards in the background."""

    def __init__(self, config: Config, procs: Processes, data_meta: dict, warn: Callable):
        self.config, self.procs, self.data_meta, self.warn = config, procs, data_meta, warn
        self.group = None  # of the background, as its messages must not mix with those of training
        if config.train.parallel == "fsdp":
            limit = datetime.timedelta(seconds=config.train.timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self.pending = None  # (future, error, state, best, path) of the checkpoint under way
        self.written = None  # the path of the last one; None if it could not be written

    def save(self, state: State, best: dict | None) -> None:
        """Write the state, or start to. All processes must call, after `wait`.

        best: {"step", "loss"} of the best checkpoint, maybe this one; progress.best is set once
        this one has been written. Raises UserError, on every process, if the state is not finite.
        """
        config = self.config
        tensors = named_tensors(state)
        if name := next(filter(None, self.procs.gather(not_finite(tensors))), None):
            raise UserError(not_finite_message(config, state.progress.step, name))
        values = plain_values(state, best, config, self.data_meta)
        path = store.path_of(config.run_folder, state.progress.step)
        arguments = config.run_folder, values, tensors, config.checkpoint.keep
        if self.group:
            # only dtypes and shapes of `tensors` are read later: their values will have changed
            finish = functools.partial(store.finish, *arguments)
            temporary = store.temporary_of(path)
            future = store.start_writing_shards(temporary, tensors, finish, self.group)
            self.pending = future, None, state, best, path
            return
        error = None
        if self.procs.main:
            try:
                store.write(*arguments)
            except (OSError, SafetensorError) as failure:
                error = store.reason_of(failure)
        self.pending = None, self.procs.gather(error)[0], state, best, path
        self.wait()

    def wait(self) -> Path | None:
        """Wait until nothing is being written. Returns the last checkpoint; None, after a warning,
        if it could not be written."""
        if not self.pending:
            return self.written
        (future, error, state, best, path), self.pending = self.pending, None
        try:
            if future:
                future.result()
        except CheckpointException as failure:  # the same on every process
            cause = next(iter(failure.failures.values()))[0]
            if not isinstance(cause, OSError):
                raise cause from failure
            error = store.reason_of(cause)
        self.written = None if error else path
        if error is None:
            state.progress.best = best
        elif self.procs.main:
            shutil.rmtree(store.temporary_of(path), ignore_errors=True)  # frees its space
            last = last_good(self.config, store.step_of(path) - 1)
            self.warn(f"could not write {path}: {error}; {last}. Is the disk full?")
        return self.written

    close = wait  # for contextlib.closing


def last_good(config: Config, step: int) -> str:
    paths = store.find(config.run_folder, up_to=step)
    return f"the last good checkpoint is {paths[-1]}" if paths else "there is no earlier checkpoint"


def not_finite_message(config: Config, step: int, what: str) -> str:
    """Why a run ends whose numbers are no longer finite."""
    return (
        f"{what} is not finite at step {step}; {last_good(config, step)}. Lower --optim.lr, or set "
        "--optim.grad-clip, and start again"
    )
