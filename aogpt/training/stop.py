"""When a run stops before its last step."""

import os
import signal
from collections.abc import Iterable

import torch
import torch.distributed as dist

from ..data.loader import TokenDataset
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from .checkpoint import Progress, not_finite_message
from .config import Config

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
