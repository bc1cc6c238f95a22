"""When a run stops and when it saves, and the writing of its checkpoints."""

import contextlib
import datetime
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ..checkpoints import CheckpointError, store
from ..data.loader import TokenDataset
from ..runtime.errors import UserError, reason_of
from ..runtime.processes import Processes
from .config import Config
from .state import Progress, State, named_tensors, not_finite, plain_values
from .val_losses import saved_losses

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
            raise KeyboardInterrupt
        self.signalled = True

    def agree(
        self, config: Config, progress: Progress, datasets: Iterable[TokenDataset]
    ) -> None:
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
            raise UserError(not_finite_message(config, progress, skipped))


@dataclass
class Writing:
    """A checkpoint that is being written, or has been."""

    future: Future | None  # None: it has been
    error: str | None  # why it could not be written
    state: State
    best: dict | None  # progress.best once it is written
    path: Path
    step: int


class Saver:
    """The writer of checkpoints, one at a time, which decides when a run saves. Under
    ddp the main process writes while the others wait; under fsdp every process writes
    its shards in the background."""

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
        self.group = None  # for the background, apart from the messages of training
        if config.train.parallel == "fsdp":
            limit = datetime.timedelta(seconds=config.train.timeout)
            self.group = dist.new_group(backend="gloo", timeout=limit)
        self.writing: Writing | None = None
        # The path of the last checkpoint; None if it could not be written.
        self.written: Path | None = None
        self.unsaved = False  # whether a checkpoint was due that is not written yet

    def note_due(self, progress: Progress, stop: StopRequest) -> bool:
        """Note and return whether a checkpoint is due: by the number of the step, at
        the end, or since an earlier step that was skipped."""
        by_step = progress.step % self.config.checkpoint.interval == 0
        is_last = progress.step == self.config.train.steps
        if by_step or is_last or stop.requested:
            self.unsaved = True
        return self.unsaved

    def should_save(
        self, progress: Progress, stop: StopRequest, best: dict | None
    ) -> bool:
        """Return whether to save now: a checkpoint is due, or `best` is better than the
        best checkpoint. Call after `finish_writing`. The state before a skipped step
        may be its cause: except at the end, only states after a step that counted are
        saved."""
        is_last = progress.step == self.config.train.steps or stop.requested
        if progress.skipped_in_a_row and not is_last:
            return False
        return self.unsaved or best != progress.best

    def save(self, state: State, best: dict | None) -> None:
        """Write the state, or start to; best: {"step", "loss"}, progress.best once it
        is written. All processes must call, after `finish_writing`; all raise UserError
        if the state is not finite."""
        config = self.config
        tensors = named_tensors(state)
        for name in self.procs.gather(not_finite(tensors)):
            if name is not None:
                raise UserError(not_finite_message(config, state.progress, name))
        values = plain_values(state, best, config, self.data_meta)
        step = state.progress.step
        path = store.path_of(config.run_folder, step)
        keep = config.checkpoint.keep
        if self.group is not None:
            # `finish` reads only dtypes and shapes of `tensors`: training goes on
            # changing values.
            finish = functools.partial(
                store.finish, config.run_folder, values, tensors, keep
            )
            temporary = store.temporary_of(path)
            future = store.start_writing_shards(temporary, tensors, finish, self.group)
            self.writing = Writing(
                future=future, error=None, state=state, best=best, path=path, step=step
            )
        else:
            error = None
            if self.procs.main:
                try:
                    store.write(config.run_folder, values, tensors, keep)
                except (OSError, SafetensorError) as failure:
                    error = reason_of(failure)
            error = self.procs.gather(error)[0]
            self.writing = Writing(
                future=None, error=error, state=state, best=best, path=path, step=step
            )
            self.finish_writing()
        self.unsaved = False

    def finish_writing(self) -> Path | None:
        """Wait until nothing is being written; what has been written may become
        progress.best. Returns the last checkpoint; None, after a warning, if it could
        not be written."""
        writing = self.writing
        if writing is None:
            return self.written
        self.writing = None
        error = writing.error
        if writing.future is not None:
            from torch.distributed.checkpoint import CheckpointException

            try:
                writing.future.result()
            except CheckpointException as failure:  # the same on every process
                cause, _ = next(iter(failure.failures.values()))
                if not isinstance(cause, OSError):
                    raise cause from failure
                error = reason_of(cause)
        path = writing.path
        if error is None:
            self.written = path
            writing.state.progress.best = writing.best
            return path
        self.written = None
        if self.procs.main:
            # This frees its space.
            shutil.rmtree(store.temporary_of(path), ignore_errors=True)
            last = "there is no earlier checkpoint"
            good_path = last_good(self.config, writing.step - 1)
            if good_path is not None:
                last = f"the last good checkpoint is {good_path}"
            self.warn(f"could not write {path}: {error}; {last}. Is the disk full?")
        return None

    close = finish_writing  # for contextlib.closing


def last_good(config: Config, step: int) -> Path | None:
    """Return the path of the last checkpoint up to a step that was saved without a
    skipped step pending; None without one."""
    for path in reversed(store.find(config.run_folder, up_to=step)):
        with contextlib.suppress(CheckpointError):
            values = store.read_values(path, share=slice(0))
            if not values["skipped_in_a_row"]:  # there may be some at a stop
                return path
    return None


def not_finite_message(config: Config, progress: Progress, name: str) -> str:
    """Return why a run ends whose `name`, a tensor or losses, is not finite, and what
    to do."""
    path = last_good(config, progress.step - progress.skipped_in_a_row)
    if path is None:
        return (
            f"{name} is not finite at step {progress.step}; there is no earlier "
            "checkpoint. Lower --optim.lr and start again; "
            f"move {config.run_folder} away"
        )
    return (
        f"{name} is not finite at step {progress.step}; the last good checkpoint is "
        f"{path}. Lower --optim.lr and start again; if no "
        "loss after that checkpoint is finite, remove it and all later ones"
    )


def newest_and_best(config: Config, progress: Progress) -> str:
    """Return the validation losses of the newest and the best checkpoint, for the end
    of a run."""
    best = progress.best
    losses = saved_losses(config)
    loss = "not validated"
    if progress.step in losses:
        value = losses[progress.step]
        loss = "validation loss not finite"
        if value is not None:
            loss = f"validation loss {value:.4f}"
    newest = f"step {progress.step} ({loss})"
    if best is None and not losses:
        return "no checkpoint has been validated yet (--eval.interval)"
    if best is None:
        return f"newest checkpoint: {newest}; none has been chosen as the best"
    if best["step"] == progress.step:
        return f"the newest checkpoint, {newest}, is the best"
    return (
        f"newest checkpoint: {newest}, which scripts use; best: step {best['step']} "
        f"(validation loss {best['loss']:.4f}), --checkpoint best"
    )
