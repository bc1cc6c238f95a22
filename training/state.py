"""The state of a run: made, restored from its newest checkpoint, and saved."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from checkpoints import sharded
from checkpoints import store as checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.load import copy_parameters, load_model
from model import AOGPT
from runtime.processes import Processes
from training import config as configuration
from training import optimizers as optim
from training import parallel
from training.averages import EMA
from training.config import Config
from training.warm_start import warm_start


@dataclass
class Progress:
    """Where the run stands; everything else that changes is in the model, the averaged weights and the optimizer."""

    step: int = 0
    best: dict = field(default_factory=lambda: {"step": None, "loss": math.inf})
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """What a checkpoint holds: everything that training changes."""

    model: AOGPT
    ema: EMA
    optimizer: torch.optim.AdamW | optim.MuonAdamW
    progress: Progress


def start(config: Config, data_meta: dict, procs: Processes, say) -> State:
    """The run's state: new, started from other weights, or as its newest checkpoint left it."""
    torch.manual_seed(config.seed)
    weights = None
    resumed = bool(checkpoint.find(config.run_folder))
    if config.train.init_from and not resumed:
        weights = weights_from(config)
        say(f"started from the weights of {config.train.init_from}")
    model = parallel.build(config, procs, weights, empty=resumed)
    state = State(
        model, EMA(model, config.optim.ema_decay), optim.make_optimizer(model, config), Progress()
    )
    resume(config, data_meta, state, procs, say)
    if len(set(procs.gather(state.progress.step))) > 1:
        raise ValueError(
            f"the processes see different checkpoints in {config.run_folder}; put --out on a disk that all share"
        )
    return state


def weights_from(config: Config) -> dict[str, torch.Tensor]:
    """Initial weights that come from those of train.init_from, by name."""
    model = AOGPT(config.model)
    warm_start(model, load_model(config.train.init_from))
    return dict(model.named_parameters())


def resume(config: Config, data_meta: dict, state: State, procs: Processes, say) -> None:
    """Load the run's newest readable checkpoint, if it has one, and say what has changed since."""
    found = checkpoint.read_newest(config.run_folder)
    if found is None:
        return
    path, saved = found
    check_same_run(config, data_meta, path, saved, say)
    settings = [
        {k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups
    ]
    restore(path, saved, state)
    for group, values in zip(state.optimizer.param_groups, settings, strict=True):
        group.update(values)  # the configuration rules, not the checkpoint
    if procs.main:
        checkpoint.finish_interrupted_save(config.run_folder, saved, path, config.checkpoint.keep)
    say(f"resumed from {path}")


def check_same_run(config: Config, data_meta: dict, path: Path, saved: dict, say) -> None:
    """Say what has changed since a checkpoint; ValueError for what cannot."""
    old = configuration.from_dict(saved["config"], str(path))
    for key, (before, after) in configuration.differences(old, config).items():
        if key.startswith("model.") or key == "optim.kind":
            what = "architecture" if key.startswith("model.") else "optimizer"
            raise ValueError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it is {after!r}: the {what} "
                "of a run cannot change; set it back, or start another run with --name"
            )
        say(f"changed since {path}: {key} = {after!r} (was {before!r})")
    if saved["data"]["tokenizer"] != data_meta["tokenizer"]:
        raise ValueError(
            f"{config.run_folder} was trained on {saved['data']['tokenizer']} tokens, but {config.data.folder} holds "
            f"{data_meta['tokenizer']} tokens; use the data it was trained on, or start another run with --name"
        )
    if saved["data"]["splits"]["train"]["sha256"] != data_meta["splits"]["train"]["sha256"]:
        say(f"changed since {path}: the training data in {config.data.folder}")


def training_state(
    step: int, model: AOGPT, ema: EMA, optimizer, config: dict, data_meta: dict, best: dict
) -> dict:
    """Everything that a run needs to go on exactly: data, orders and learning rate follow from the step."""
    return {
        "format": checkpoint.FORMAT,
        "step": step,
        "model_config": dataclasses.asdict(model.config),
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


@torch.no_grad()
def restore(path: Path, saved: dict, state: State) -> None:
    """Fill the state from a checkpoint of either form, whatever the processes were that wrote it and are now."""
    own = dict(state.model.named_parameters())
    if path.is_dir():
        moments = [
            name.removeprefix("optimizer.")
            for name in saved["shapes"]
            if name.startswith("optimizer.")
        ]
        kept: dict = {}
        for name, _, key in (entry.rpartition(".") for entry in moments):
            shape = torch.Size(saved["shapes"][f"optimizer.{name}.{key}"])
            new = torch.zeros_like(own[name]) if shape == own[name].shape else torch.zeros(shape)
            kept.setdefault(name, {})[key] = new
        tensors = {f"model.{name}": p.detach() for name, p in own.items()}
        tensors |= {f"ema.{name}": average for name, average in state.ema.weights.items()}
        tensors |= {
            f"optimizer.{name}.{key}": t
            for name, values in kept.items()
            for key, t in values.items()
        }
        sharded.read(path, tensors)
    else:
        copy_parameters(
            state.model, {n: parallel.like(t, own[n]) for n, t in saved["model"].items()}
        )
        for name, average in state.ema.weights.items():
            average.copy_(parallel.like(saved["ema"]["weights"][name], average))
        kept = {
            name: {key: parallel.like(t, own[name]) if t.dim() else t for key, t in values.items()}
            for name, values in saved["optimizer"].items()
        }
    optim.restore_state(state.model, state.optimizer, kept)
    state.ema.updates.fill_(saved["ema"]["updates"])
    state.progress = Progress(
        **{key: saved[key] for key in ("step", "best", "skipped", "skipped_in_a_row")}
    )


class Saver:
    """Writes the checkpoints of a run: one file, by the main process, or what all processes hold, in the background."""

    def __init__(
        self, config: Config, procs: Processes, data_meta: dict, warn: Callable[[str], None]
    ):
        self.config, self.procs, self.data_meta, self.warn = config, procs, data_meta, warn
        self.writer = None
        if config.train.parallel == "fsdp":
            self.writer = sharded.Writer(procs, config.train.timeout)
        self.failed, self.undo = False, lambda: None

    def save(self, state: State, best_before: dict) -> Path | None:
        """Save the state. Returns the path; None, after a warning, if it failed. `wait` must have ended the one before.

        best_before: what was the best until now; it is again, if this state is the best and is lost. A sharded
        checkpoint is only begun here: `poll` and `wait` end it.
        """
        progress, config = state.progress, self.config
        self.step = progress.step
        best, path = progress.best != best_before, None
        self.undo = functools.partial(setattr, progress, "best", best_before)
        if self.writer or self.procs.main:
            contents = training_state(
                progress.step,
                state.model,
                state.ema,
                state.optimizer,
                configuration.to_dict(config),
                self.data_meta,
                dict(progress.best),
            ) | {"skipped": progress.skipped, "skipped_in_a_row": progress.skipped_in_a_row}
            path = self._guarded(self._start if self.writer else self._write, contents, best)
        path = self.procs.gather(path)[0]
        if path is None:
            self.undo()
        return path

    def _write(self, contents: dict, best: bool) -> Path:
        return checkpoint.save(self.config.run_folder, contents, self.config.checkpoint.keep, best)

    def _start(self, contents: dict, best: bool) -> Path:
        folder, keep = self.config.run_folder, self.config.checkpoint.keep
        path = checkpoint.path_of(folder, contents["step"], sharded=True)

        def done(path: Path) -> None:
            if best:
                checkpoint.mark_best(path, folder)
            checkpoint.prune(folder, contents["step"], keep)

        self.writer.start(path, *split_state(contents), done)
        return path

    def poll(self) -> None:
        """End a checkpoint that has been written meanwhile."""
        if self.writer:
            self.failed |= self._guarded(lambda: self.writer.poll() or True) is None

    def close(self) -> None:
        """Wait until this process writes nothing any more."""
        if self.writer:
            self.failed |= self._guarded(lambda: self.writer.wait() or True) is None

    def wait(self) -> bool:
        """Wait for the last checkpoint; all processes must call. Returns, on all, whether it was written."""
        self.close()
        failed, self.failed = any(self.procs.gather(self.failed)), False
        if failed:
            self.undo()
        return not failed

    def _guarded(self, work, *arguments):
        """Call; a CheckpointError becomes a warning and None."""
        try:
            return work(*arguments)
        except CheckpointError as error:
            if self.procs.main:
                before = checkpoint.kept(self.config.run_folder, self.step)
                self.warn(f"{error}; {before}. Is the disk full?")
            return None
