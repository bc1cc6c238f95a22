"""The checkpoints of a run: when it saves, what it saves, and how it goes on exactly
(checkpoints/store.py writes and reads the files)."""

import math
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ..checkpoints import CheckpointError, store
from ..data.loader import ADVICE, TokenDataset
from ..data.tokenizers import other_tokenizer
from ..model import Transformer
from ..runtime.errors import UserError, reason_of
from ..runtime.files import sha256_file
from ..runtime.processes import Processes
from . import config as configuration
from . import parallel
from .config import Config
from .initial_weights import weights_to_start_from
from .muon import local
from .optimizers import EMA, allocate_state, make_optimizers, named_state
from .val_losses import validation_orders

# Keys and tables of the config and the data that cannot change when a run resumes.
# model.dropout can; docs/training.md says what a change of the others does.
REFUSED = (
    "model",
    "optim.kind",
    "data.tokenizer",
    "data.tokenizer_sha256",
    "data.vocab_size",
    "data.eot",
    "data.end",
)


@dataclass
class Progress:
    """The progress of a run. Its fields are keys of state.json."""

    step: int = 0
    sequences: int = 0  # trained on so far; the next batch starts there
    tokens: int = 0
    best: dict | None = None  # {"step", "loss"} of the best checkpoint that exists
    skipped: int = 0
    skipped_in_a_row: int = 0


@dataclass
class State:
    """The state that training changes; data, orders and learning rate depend on the
    step alone."""

    model: Transformer
    average: EMA  # of the weights
    optimizers: list[torch.optim.Optimizer]  # AdamW, and Muon if optim.kind says so
    progress: Progress


def start(config: Config, data_meta: Mapping[str, Any], procs: Processes) -> State:
    """Return the state of the newest checkpoint, or a new one, with the weights of
    train.init_from if set. Raises UserError for another run's folder, CheckpointError
    if no checkpoint can be read."""
    torch.manual_seed(config.seed)
    folder = config.run_folder
    newest = read_newest(folder, procs)
    weights = None  # random, or of the checkpoint
    if newest is None:
        check_new(folder)
        if config.train.init_from:
            weights = weights_to_start_from(config, data_meta, procs)
    else:
        path, values = newest
        check_same_run(config, data_meta, path, values, procs.print0)
        files = values["data"].get("files", {})
        check_same_files(files, data_meta.get("files", {}), procs)
        values["best"] = known_best(config, data_meta, path, values, procs.print0)
    # empty: drawing the weights of a large model, to be replaced, would take minutes
    model = parallel.build(config, procs, weights, empty=newest is not None)
    if config.data.end == "given":
        model.exclude(data_meta["vocab_size"], data_meta["eot"])
    state = State(
        model=model,
        average=EMA(model, config.optim.ema_decay),
        optimizers=make_optimizers(model, config),
        progress=Progress(),
    )
    if procs.main:
        store.remove_partial(folder)
    if newest is None:
        if procs.main:
            (folder / store.NONE_YET).mkdir(parents=True, exist_ok=True)
        return state
    restore(state, path, values)
    if procs.main:  # a kill may have prevented it
        store.settle(folder, values, config.checkpoint.keep)
    procs.print0(f"resumed from {path}")
    return state


def read_newest(folder: Path, procs: Processes) -> tuple[Path, dict] | None:
    """Return the newest checkpoint of this job's run that all processes can read, and
    its values; None if the run has none. Skips damaged ones with a warning."""
    paths = store.find(folder)
    if any(their_paths != paths for their_paths in procs.gather(paths)):
        raise UserError(
            f"the processes see different checkpoints in {folder}; put --out on a "
            "shared disk"
        )

    def read(path: Path) -> dict:
        """Return the values of a checkpoint, of whose files each process verifies
        some."""
        values = {}
        problem = None
        try:
            share = slice(procs.rank, None, procs.world_size)
            values = store.read_values(path, share=share)
        except CheckpointError as error:
            problem = str(error)
        for text in procs.gather(problem):
            if text:
                raise CheckpointError(text)
        return values

    return store.read_newest(folder, read, warn=procs.print0)


def check_new(folder: Path) -> None:
    """Raise UserError for a folder without checkpoints that holds files of another run.
    A run that was killed before its first checkpoint may start again."""
    if (folder / store.NONE_YET).exists():
        return
    for name in ("config.toml", "metrics.jsonl", "best"):
        if (folder / name).exists():
            raise UserError(
                f"{folder} holds the {name} of another run, but no checkpoint: mount "
                f"its disk, choose another --name, or move {folder} away to start anew"
            )


def check_same_run(
    config: Config, meta: Mapping[str, Any], path: Path, values: dict, print0: Callable
) -> None:
    """Print what has changed since a checkpoint. Raises UserError for what cannot
    change."""
    old = configuration.from_dict(values["config"], str(path))
    changes = changes_of(old, config, values["data"], meta)
    for key, (before, after) in changes.items():
        table = key.partition(".")[0]
        if (key in REFUSED or table in REFUSED) and key != "model.dropout":
            raise UserError(
                f"{config.run_folder} was trained with {key} = {before!r}, but now it "
                f"is {after!r}, which cannot change; set it back, or start another run "
                "with --name"
            )
    for key, (before, after) in changes.items():
        print0(f"changed since {path}: {key} = {after!r} (was {before!r})")
    if changes:  # the change may be the cure of skipped steps
        values["skipped_in_a_row"] = 0


def changes_of(
    old: Config, config: Config, old_meta: Mapping[str, Any], meta: Mapping[str, Any]
) -> dict[str, tuple]:
    """Return {key: (before, after)} of keys of the config, the tokenizer and the splits
    of the data that have changed."""
    changes = configuration.differences(old, config)
    for key, pair in other_tokenizer(old_meta, meta).items():
        changes[f"data.{key}"] = pair
    ends = (old_meta.get("eot"), meta.get("eot"))
    if None not in ends and ends[0] != ends[1]:
        changes["data.eot"] = ends
    for split in ("train", "val"):
        before = checksums_of(old_meta, split)
        after = checksums_of(meta, split)
        if before != after:
            changes[f"the split {split} in {config.data.folder}"] = (before, after)
    return changes


def checksums_of(meta: Mapping[str, Any], split: str) -> str | None:
    """Return the SHA-256 of the tokens of a split, and of their roles: which of them
    are of a prompt. None for a split that does not exist."""
    entry = meta.get("splits", {}).get(split, {})
    checksum = entry.get("sha256")
    if roles := entry.get("roles"):
        checksum = f"{checksum}, of roles {roles['sha256']}"
    return checksum


def measure_of(config: Config, meta: Mapping[str, Any]) -> tuple:
    """Return everything that the validation losses of a run are measured with, for a
    comparison: also the SHA-256 of a file of orders."""
    orders, name = validation_orders(config)
    order_file = meta.get("files", {}).get(str(Path(config.order.file)), {})
    return (
        config.seed,
        config.eval.sequences,
        config.eval.draws,
        checksums_of(meta, "val"),
        orders,
        name,
        order_file.get("sha256"),
    )


def known_best(
    config: Config, meta: Mapping[str, Any], path: Path, values: dict, print0: Callable
) -> dict | None:
    """Return the best checkpoint, {"step", "loss"}, when a run resumes from the newest
    one at `path`. None, so that the next validation chooses one, if it is gone or was
    measured otherwise than the run validates now."""
    best = values["best"]
    if best is None:
        return None
    old = configuration.from_dict(values["config"], str(path))
    if measure_of(old, values["data"]) != measure_of(config, meta):
        reason = "was chosen by another measure"
    elif not store.path_of(path.parents[1], best["step"]).is_dir():
        reason = "is gone"
    else:
        return best
    print0(
        f"the best checkpoint (step {best['step']}, loss {best['loss']:.4f}) {reason}: "
        "it will be chosen again"
    )
    return None


def better_of(best: dict | None, step: int, loss: float) -> dict | None:
    """Return the best checkpoint, {"step", "loss"}, when that of `step` has this
    validation loss."""
    if math.isfinite(loss) and (best is None or loss < best["loss"]):
        return {"step": step, "loss": loss}
    return best


def check_same_files(
    before: Mapping[str, dict], now: Mapping[str, dict], procs: Processes
) -> None:
    """Print which files of the data hold other data than at a checkpoint; the main
    process reads those of other sizes or times. Raises UserError for one that does not
    match its checksum."""
    for path, recorded in now.items():
        old = before.get(path)
        if recorded == old or not procs.main:
            continue
        if sha256_file(Path(path)) != recorded["sha256"]:
            raise UserError(
                f"{path} has changed since the run last started: it does not match its "
                f"checksum; copy it, or {ADVICE}"
            )
        if old and recorded["sha256"] != old["sha256"]:
            procs.print0(f"{path} holds other data than when the run last started")


def named_tensors(state: State) -> dict[str, Tensor]:
    """Return the tensors of a state, not copied, by their names in a checkpoint."""
    tensors = {}
    for name, p in state.model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
    for name, average in state.average.weights.items():
        tensors[f"ema.{name}"] = average
    for name, values in named_state(state.model, state.optimizers).items():
        for key, value in values.items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def plain_values(
    state: State, best: dict | None, config: Config, data_meta: Mapping[str, Any]
) -> dict:
    """Return everything else, as JSON values: the contents of state.json."""
    ema = state.average
    values = asdict(state.progress)
    values["best"] = best
    values["ema"] = {"updates": int(ema.updates), "decay": ema.decay}
    values["model_config"] = asdict(state.model.config)
    values["config"] = asdict(config)
    values["data"] = data_meta
    return values


@torch.no_grad()
def restore(state: State, path: Path, values: dict) -> None:
    """Fill a state from a checkpoint; any number of processes may have written it."""
    allocate_state(state.optimizers)
    tensors = named_tensors(state)
    unknown = sorted(values["tensors"].keys() - tensors.keys())
    if unknown:
        raise CheckpointError(
            f"{path} holds {unknown[0]}, which this run does not have; start another "
            "with --name"
        )
    store.read_tensors(path, values, tensors)
    state.average.updates.fill_(values["ema"]["updates"])
    for field in fields(Progress):
        setattr(state.progress, field.name, values[field.name])


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor whose shard on this process has a number that is not
    finite."""
    # All are asked before one is read, which waits for the device.
    finite = [store.is_finite(local(tensor)) for tensor in tensors.values()]
    for name, is_finite in zip(tensors, finite, strict=True):
        if not is_finite:
            return name
    return None


class Saver:
    """The writer of checkpoints, which decides when a run saves. Under ddp the main
    process writes, under fsdp every process its shards; all wait until it is done."""

    def __init__(
        self,
        config: Config,
        procs: Processes,
        data_meta: Mapping[str, Any],
        warn: Callable[[str], None],
    ):
        self.config = config
        self.procs = procs
        self.data_meta = data_meta
        self.warn = warn
        # The path of the last checkpoint; None if it could not be written.
        self.written: Path | None = None
        self.is_due = False  # whether a checkpoint was due that is not written yet

    def note_due(self, step: int, is_last: bool) -> bool:
        """Note and return whether a checkpoint is due: by the number of the step, at
        the end, or since an earlier step that was skipped."""
        if is_last or step % self.config.checkpoint.interval == 0:
            self.is_due = True
        return self.is_due

    def should_save(self, progress: Progress, best: dict | None, is_last: bool) -> bool:
        """Return whether to save now: a checkpoint is due, or `best` is better than the
        best checkpoint. The state before a skipped step may be its cause: except at the
        end, only states after a step that counted are saved."""
        if progress.skipped_in_a_row and not is_last:
            return False
        return self.is_due or best != progress.best

    def save(self, state: State, best: dict | None) -> None:
        """Write the state, after which `best` is progress.best, {"step", "loss"}. A
        checkpoint that cannot be written is a warning. All processes must call; all
        raise UserError if the state is not finite."""
        config = self.config
        progress = state.progress
        tensors = named_tensors(state)
        for name in self.procs.gather(not_finite(tensors)):
            if name is not None:
                raise UserError(not_finite_message(name, progress.step))
        values = plain_values(state, best, config, self.data_meta)
        keep = config.checkpoint.keep
        error = None
        try:
            if config.train.parallel == "fsdp":
                store.write_shards(config.run_folder, progress.step, tensors)
                if self.procs.main:
                    store.finish(config.run_folder, values, tensors, keep)
            elif self.procs.main:
                store.write(config.run_folder, values, tensors, keep)
        except (OSError, SafetensorError) as failure:
            error = reason_of(failure)
        error = self.procs.gather(error)[0]
        path = store.path_of(config.run_folder, progress.step)
        self.is_due = False
        if error is None:
            self.written = path
            progress.best = best
            return
        self.written = None
        if self.procs.main:
            # This frees its space.
            shutil.rmtree(store.temporary_of(path), ignore_errors=True)
            self.warn(f"could not write {path}: {error}. Is the disk full?")


def not_finite_message(name: str, step: int) -> str:
    """Return why a run ends whose `name`, a tensor or losses, is not finite, and what
    to do."""
    return (
        f"{name} is not finite at step {step}: resume with a lower --optim.lr; if that "
        "ends so too, remove the newest checkpoint first"
    )


# ---- when a run stops before its last step -------------------------------------------

MAX_SKIPPED_STEPS = 10  # a run stops after this many non-finite steps in a row


class StopRequest:
    """The request to stop a run: a process got SIGTERM or Ctrl-C, or its data has
    changed. `agree` after every step makes all processes stop after the same step;
    otherwise the rest would wait for gradients of one that has stopped."""

    def __init__(self, procs: Processes):
        self.procs = procs
        self.signalled = False  # this process
        # Why this process stops, if not by a signal; raised once a checkpoint is saved.
        self.error: Exception | None = None
        # True if true of any process at the last `agree`.
        self.requested = False
        # torchrun, if it started this process
        self.launcher: int | None = None
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self.launcher = os.getppid()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        # The second Ctrl-C does not wait.
        if self.signalled and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        self.signalled = True

    def agree(self, progress: Progress, datasets: Iterable[TokenDataset]) -> None:
        """Set `requested` after a step, the same on all processes. Data that has
        changed under the run stops it, too. Raises UserError after MAX_SKIPPED_STEPS
        steps in a row that were not finite, and ChildProcessError without torchrun."""
        # Without its launcher, another job may take the place of this one.
        if self.launcher and os.getppid() != self.launcher:
            raise ChildProcessError("torchrun, which started this process, has ended")
        try:
            for dataset in datasets:
                dataset.check_unchanged()
        except (UserError, OSError) as error:
            self.error = error
        requested = self.signalled or self.error is not None
        failed = progress.skipped_in_a_row >= MAX_SKIPPED_STEPS
        if self.procs.world_size > 1:
            flags = torch.tensor([requested, failed], dtype=torch.float32)
            dist.all_reduce(flags)  # between the CPUs: waits for no GPU
            requested, failed = (flags > 0).tolist()
        self.requested = requested
        if failed:
            skipped = f"loss or gradient of {progress.skipped_in_a_row} steps in a row"
            raise UserError(not_finite_message(skipped, progress.step))
