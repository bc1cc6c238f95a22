"""Checkpoints that all processes of a run write together, each its part, while training goes on."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from checkpoints.errors import CheckpointError
from checkpoints.on_disk import reason_of
from runtime.processes import lost_process

# else it logs how long every step of a save took
logging.getLogger("torch.distributed.checkpoint").setLevel(logging.WARNING)


class PartsWriter(dcp.HuggingFaceStorageWriter):
    """Writes every process's part into a folder; then the main process completes the checkpoint."""

    def __init__(self, folder: Path, complete: Callable[[], None]):
        super().__init__(str(folder), save_distributed=True)
        self.complete = complete

    def finish(self, metadata, results) -> None:
        # Called in the background, by the main process alone, when all have written their parts.
        # An error here reaches every process, as one in writing a part does.
        self.complete()


class BackgroundWriter:
    """Writes one checkpoint at a time. Every process of the run has one and calls it alike."""

    def __init__(self, timeout: float):
        """timeout: seconds that the processes wait for one another."""
        # Messages of the background must not come between those of training: a group of its own.
        # With torch's default timeout a lost process would keep the others for half an hour.
        limit = datetime.timedelta(seconds=timeout)
        self.group = dist.new_group(backend="gloo", timeout=limit)
        self.running = None

    def start(
        self, temporary: Path, tensors: dict[str, Tensor], complete: Callable[[], None]
    ) -> None:
        """Copy the tensors, which change with the next step, and begin to write them.

        temporary: the folder for the parts. complete: called by the main process when all of them
        are on the disk. `wait` must have ended the checkpoint before."""
        # All options off: plain copies in CPU memory, made before this returns.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        writer = PartsWriter(temporary, complete)
        future = dcp.async_save(
            tensors, storage_writer=writer, async_stager=stager, process_group=self.group
        )
        self.running = future, stager

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises CheckpointError, on every process, if the checkpoint could not be written or
        completed, and the error of the connection if another process was lost meanwhile."""
        if self.running is None:
            return
        (future, stager), self.running = self.running, None
        try:
            future.result()
        except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
            if lost_process(error):
                raise
            raise CheckpointError(reason_of(error)) from error
        finally:
            stager.close()
