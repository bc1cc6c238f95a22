"""Checkpoints that all processes of a run write together, in the background, and that any number of them can read.

A sharded checkpoint is a folder checkpoints/step_N:

    shard-*.safetensors   parts of tensors, written by each process: model.NAME, ema.NAME, optimizer.NAME.KEY
    state.pt              everything else, as in a checkpoint of one file (see store.py)

`torch.distributed.checkpoint` does the work, with the safetensors storage: its own storage keeps a pickle, which could
run code. A folder has its name once all of it is on the disk.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from checkpoints.errors import CheckpointError
from runtime.files import sync_folder
from runtime.processes import Processes, lost_process

STATE = "state.pt"


class Writer:
    """Writes one checkpoint at a time while training goes on."""

    def __init__(self, procs: Processes, timeout: float):
        """timeout: seconds that the processes wait for one another."""
        self.procs, self.pending = procs, None
        limit = datetime.timedelta(
            seconds=timeout
        )  # else torch lets no process end for half an hour
        self.group = dist.new_group(
            backend="gloo", timeout=limit
        )  # its own: training's messages may come between

    def start(
        self, path: Path, state: dict, tensors: dict[str, Tensor], done: Callable[[Path], None]
    ) -> None:
        """Copy the tensors and begin to write them. `wait` must have ended the one before.

        state: what is no tensor. done: called by the main process, in `poll` or `wait`, when `path` is complete.
        Raises CheckpointError on every process if the folder could not be made.
        """
        temporary = path.with_name(f".{path.name}.tmp")
        self._agree(self._begin, temporary, path, state)
        # Blocking copies in memory of its own: the tensors change with the next step.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        future = dcp.async_save(
            tensors, storage_writer=writer, async_stager=stager, process_group=self.group
        )
        self.pending = future, stager, temporary, path, done

    def _begin(self, temporary: Path, path: Path, state: dict) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with open(temporary / STATE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def _agree(self, work, temporary: Path, path: Path, *arguments) -> None:
        """Let the main process work; its OSError is everyone's CheckpointError."""
        reason = None
        if self.procs.main:
            try:
                work(temporary, path, *arguments)
            except (
                OSError,
                RuntimeError,
            ) as error:  # torch reports a failing write as RuntimeError
                shutil.rmtree(temporary, ignore_errors=True)
                reason = failure(path, error)
        if reason := self.procs.gather(reason)[0]:
            raise CheckpointError(reason)

    def poll(self) -> None:
        """Finish what has been written meanwhile; never waits. Raises CheckpointError if it could not be written."""
        if self.pending and self.pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises CheckpointError if it could not be: on all processes, or, if only
        the end of it failed, on the main one."""
        if not self.pending:
            return
        (future, stager, temporary, path, done), self.pending = self.pending, None
        try:
            future.result()
            if self.procs.main:  # it has heard from all others
                sync_folder(temporary)
                shutil.rmtree(
                    path, ignore_errors=True
                )  # what a run that went back to an older step had left
                os.rename(temporary, path)
                sync_folder(path.parent)
                done(path)
        except (
            Exception,
            CheckpointException,
        ) as error:  # the latter: what went wrong on any process
            if lost_process(error):
                raise
            if self.procs.main:  # make room
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(failure(path, error)) from error
        finally:
            stager.close()


def failure(path: Path, error: BaseException) -> str:
    return f"could not write {path}: {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """The first failure that torch.distributed.checkpoint gathered from the processes, or the error itself."""
    failures = getattr(error, "failures", None) or {}
    error = next(iter(failures.values()), (error, None))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def read(path: Path, targets: dict[str, Tensor], alone: bool = False) -> None:
    """Fill tensors, which may be cut among processes in any way, with what the checkpoint has under their names.

    alone: read in this process, whatever others do; else all must call. Raises CheckpointError.
    """
    names = shapes(path)
    for name, tensor in targets.items():
        if name not in names:
            raise CheckpointError(f"{path} lacks {name}: a file of it is missing or damaged")
        if names[name][0] != tensor.shape:
            found = tuple(names[name][0])
            raise CheckpointError(
                f"{name} is {found} in {path}, {tuple(tensor.shape)} in the model"
            )
    try:
        with warnings.catch_warnings():  # that this process reads alone
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)
    except (Exception, CheckpointException) as error:  # of safetensors, of torch, of the system
        if lost_process(error):
            raise
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


def read_all(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, in full, without it in their names."""
    tensors = {
        n: torch.empty(shape, dtype=dtype)
        for n, (shape, dtype) in shapes(path).items()
        if n.startswith(prefix)
    }
    read(path, tensors, alone=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of every tensor in a checkpoint.

    Raises CheckpointError if a file of it cannot be read, or if the parts of a tensor do not make a whole.
    """
    try:
        found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # safetensors has a class of its own for files that are damaged
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error
    parts = {
        name: sum(math.prod(chunk.sizes) for chunk in entry.chunks) for name, entry in found.items()
    }
    if damaged := [name for name, entry in found.items() if parts[name] != math.prod(entry.size)]:
        raise CheckpointError(
            f"{path} has too few or too many parts of {len(damaged)} tensors, e.g. {damaged[0]}: a file is missing, or "
            "one of another checkpoint is among its files"
        )
    return {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}


logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)
