"""The state of a run: new, or as its newest checkpoint left it; and saving it."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from checkpoints import on_disk, store
from checkpoints.background import BackgroundWriter
from checkpoints.errors import CheckpointError
from checkpoints.load import load_model
from model import AOGPT
from runtime.errors import UserError
from runtime.processes import Processes
from runtime.validation import read_bounded
from training import config as configuration
from training import parallel
from training.averages import EMA, local
from training.config import Config
from training.optimizers import MuonAdamW, empty_state, make_optimizer, named_state, restore_state
from training.warm_start import warm_start
from variants import build_model


@dataclass
class Progress:
    """Where the run stands; the rest that changes is in model, average and optimizer.

    A checkpoint holds every field under its name (checkpoints.on_disk.State lists them, too)."""

    step: int = 0
    best: dict | None = None
    """{"step", "loss"} of the best checkpoint that has been written; None before the first one."""
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """Everything that training changes. Data, orders and learning rate follow from the step."""

    model: AOGPT
    averages: list[EMA]
    """That of optim.ema_decay, which stands for the run, and those of optim.more_ema_decays."""
    optimizer: torch.optim.AdamW | MuonAdamW
    progress: Progress


# ---- beginning -----------------------------------------------------------------------------------


def start(config: Config, data_meta: dict, procs: Processes) -> State:
    """The run's state: new, started from other weights, or as its newest checkpoint left it.

    Raises ValueError if the run in the folder is another one; CheckpointError if there are
    checkpoints, but none that can be read."""
    torch.manual_seed(config.seed)
    share = slice(procs.rank, None, procs.world_size)  # every process checks some of the parts
    read = functools.partial(on_disk.read_values, share=share)
    checkpoint = store.read_newest(config.run_folder, read, procs)
    if checkpoint is None:
        return start_new(config, procs)
    return resume(config, data_meta, procs, *checkpoint)


def start_new(config: Config, procs: Processes) -> State:
    check_own_folder(config.run_folder)
    weights = None  # drawn at random
    if config.train.init_from:
        weights = initial_weights(config)
        procs.print0(f"started from the weights of {config.train.init_from}")
    state = new_state(config, parallel.build(config, procs, weights))
    if procs.main:
        store.remove_partial(config.run_folder)
    return state


def check_own_folder(folder: Path) -> None:
    """Raise ValueError if files that a run writes stand in a folder without checkpoints, and are
    none that a run which was stopped before its first checkpoint has left: it begins with
    config.toml, as `configuration.to_toml` writes it."""
    names = ("config.toml", "metrics.jsonl", "loss.png", "best")
    found = [name for name in names if (folder / name).exists()]
    if not found:
        return
    own = False
    with contextlib.suppress(ValueError, OSError):
        written = configuration.to_toml(configuration.load_toml(folder / "config.toml"))
        own = read_bounded(folder / "config.toml").decode() == written
    if not own:
        raise UserError(
            f"{folder} holds {found[0]}, but no checkpoint, and this version of train.py has not "
            "written it: choose another --name, or remove the file"
        )


def resume(config: Config, data_meta: dict, procs: Processes, path: Path, values: dict) -> State:
    """The state that the checkpoint at `path` holds; values: those of it that are no tensors."""
    check_same_run(config, data_meta, path, values, procs.print0)
    # empty: to draw weights that are then replaced would take minutes for a large model.
    state = new_state(config, parallel.build(config, procs, empty=True))
    if procs.main:
        store.remove_partial(config.run_folder)
    restore(state, path, values)
    if procs.main:  # what a kill right after this checkpoint has left undone
        store.settle(config.run_folder, values, config.checkpoint.keep)
    procs.print0(f"resumed from {path}")
    return state


def new_state(config: Config, model: AOGPT) -> State:
    decays = config.optim.ema_decay, *config.optim.more_ema_decays
    averages = [EMA(model, decay) for decay in decays]
    return State(model, averages, make_optimizer(model, config), Progress())


def initial_weights(config: Config) -> dict[str, Tensor]:
    """Weights of a new model that come from those of train.init_from, by name."""
    model = build_model(config.model)
    warm_start(model, load_model(config.train.init_from))
    return dict(model.named_parameters())


def check_same_run(
    config: Config, data_meta: dict, path: Path, values: dict, print0: Callable
) -> None:
    """Say what has changed since a checkpoint. Raises ValueError for what cannot change."""
    old = configuration.from_dict(values["config"], str(path))
    fixed = {"optim.kind": "optimizer", "optim.more_ema_decays": "list of averages"}
    for key, (before, after) in configuration.differences(old, config).items():
        if key.startswith("model.") or key in fixed:
            what = fixed.get(key, "architecture")
            raise UserError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it is {after!r}:"
                f" the {what} of a run cannot change; set it back, or start another run with --name"
            )
        print0(f"changed since {path}: {key} = {after!r} (was {before!r})")
    tokenizer, now = values["data"]["tokenizer"], data_meta["tokenizer"]
    if tokenizer != now:
        raise UserError(
            f"{config.run_folder} was trained on {tokenizer} tokens, but {config.data.folder} holds"
            f" {now} tokens; use the data it was trained on, or start another run with --name"
        )
    before = values["data"].get("splits", {})
    for split in ("train", "val"):
        if before.get(split, {}).get("sha256") != data_meta["splits"].get(split, {}).get("sha256"):
            print0(f"changed since {path}: the split {split} in {config.data.folder}")


# ---- a state as a checkpoint holds it, and back --------------------------------------------------


def named_tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a state, by their names in a checkpoint; themselves, not copies."""
    tensors = {}
    for name, p in state.model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
    for i, ema in enumerate(state.averages):
        prefix = f"ema{ema.decay:g}" if i else "ema"
        tensors |= {f"{prefix}.{name}": average for name, average in ema.weights.items()}
    for name, values in named_state(state.model, state.optimizer).items():
        for key, value in values.items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def plain_values(state: State, best: dict | None, config: Config, data_meta: dict) -> dict:
    """Everything else: values of JSON. The names are those of checkpoints.on_disk.State."""
    values = asdict(state.progress)
    values["best"] = best  # which progress has only once this checkpoint is written
    ema = state.averages[0]
    values["ema"] = {"updates": int(ema.updates), "decay": ema.decay}
    values["model_config"] = asdict(state.model.config)
    values["config"] = configuration.to_dict(config)
    values["data"] = data_meta
    return values


@torch.no_grad()
def restore(state: State, path: Path, values: dict) -> None:
    """Fill a state from a checkpoint, whatever processes wrote it and there are now."""
    # An optimizer keeps nothing before its first step, after which every parameter has had a
    # gradient: it gets tensors that can be filled first.
    restore_state(state.model, state.optimizer, empty_state(state.model, state.optimizer))
    tensors = named_tensors(state)
    if odd := sorted(values["tensors"].keys() - tensors.keys()):
        raise CheckpointError(f"{path} holds {odd[0]}, for which the run has no place")
    on_disk.read_tensors(path, values, tensors)
    if name := not_finite(tensors):
        raise CheckpointError(f"{path}: {name} is not finite; remove it to go on from another")

    for ema in state.averages:
        ema.updates.fill_(values["ema"]["updates"])
    for field in fields(Progress):
        setattr(state.progress, field.name, values[field.name])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor whose part on this process has a number that is not finite."""
    finite = [on_disk.is_finite(local(tensor)) for tensor in tensors.values()]
    return next((name for name, ok in zip(tensors, finite, strict=True) if not ok), None)


# ---- saving --------------------------------------------------------------------------------------


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Under ddp every process holds the whole state: the main one writes it while the others wait.
    Under fsdp each writes its part in the background, while training goes on."""

    def __init__(
        self, config: Config, procs: Processes, data_meta: dict, warn: Callable[[str], None]
    ):
        self.config, self.procs, self.data_meta, self.warn = config, procs, data_meta, warn
        self.background = None
        if config.train.parallel == "fsdp":
            self.background = BackgroundWriter(config.train.timeout)
        self.unfinished = None  # (state, best, path) of a checkpoint that is being written
        self.written = None  # the path of the last one; None if it could not be written

    def save(self, state: State, best: dict | None) -> None:
        """Write the state, or begin to; `wait` must have ended the checkpoint before, and says
        whether this one was written. All processes must call.

        best: of which checkpoint the file `best` is to hold the name, as in Progress.best, which
        is set only once that checkpoint exists: a best one that was lost is not the best.

        Raises ValueError, on every process, for a state that is not finite, which nobody could go
        on from."""
        config = self.config
        tensors = named_tensors(state)
        if name := next(filter(None, self.procs.gather(not_finite(tensors))), None):
            raise UserError(not_finite_message(config, state.progress.step, name))
        values = plain_values(state, best, config, self.data_meta)
        path = store.path_of(config.run_folder, state.progress.step)
        self.unfinished = state, best, path
        arguments = config.run_folder, values, tensors, config.checkpoint.keep
        if self.background:
            # start copies the tensors before it returns, so that training may go on to change them.
            # let_count, called when the copies are written, asks them for dtypes and shapes alone.
            let_count = functools.partial(store.let_count, *arguments)
            self.background.start(store.temporary_of(path), tensors, let_count)
            return
        error = None
        if self.procs.main:
            try:
                store.write(*arguments)
            except CheckpointError as failure:
                error = str(failure)
        error_of_main = self.procs.gather(error)[0]  # which alone has tried to write
        self._end(error_of_main)

    def wait(self) -> Path | None:
        """Wait until nothing is being written. Returns the last checkpoint; None, after a warning,
        if it could not be written."""
        if self.background and self.unfinished:
            error = None
            try:
                self.background.wait()
            except CheckpointError as failure:  # the same on every process
                error = str(failure)
            self._end(error)
        return self.written

    close = wait  # for contextlib.closing: no run ends with a checkpoint half written

    def _end(self, error: str | None) -> None:
        state, best, path = self.unfinished
        self.unfinished = None
        if error is None:
            state.progress.best, self.written = best, path
            return
        self.written = None
        if self.procs.main:
            shutil.rmtree(store.temporary_of(path), ignore_errors=True)  # its room is needed
            older = store.find(self.config.run_folder, up_to=store.step_of(path) - 1)
            last = "there is no earlier checkpoint"
            if older:
                last = f"the last good checkpoint is {older[-1]}"
            self.warn(f"could not write {path}: {error}; {last}. Is the disk full?")


def not_finite_message(config: Config, step: int, what: str) -> str:
    """Why a run ends whose numbers are no longer finite."""
    good = store.find(config.run_folder, up_to=step)
    where = f"the last good checkpoint is {good[-1]}" if good else "there is no checkpoint yet"
    return (
        f"{what} is not finite at step {step}; {where}. Lower --optim.lr, or set "
        "--optim.grad-clip, and start again"
    )
