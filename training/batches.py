"""What goes to the device and what comes back, without a wait for it: micro-batches, and losses.

B sequences in a micro-batch, T positions.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from data.loader import TokenDataset, batch_lengths
from objectives import DECODER_OBJECTIVES, Masks, masks_at
from orders import Roles, orders_at
from runtime.errors import UserError
from runtime.processes import Processes
from training.config import Config

RECORDS_AT_ONCE = 65_536  # whose roles are looked at together


@dataclass
class DecoderBatch:
    """Sequences, and the order in which the positions of each are predicted."""

    tokens: Tensor  # LongTensor (B, T)
    order: Tensor  # LongTensor (B, T)
    weight: Tensor | None = None  # of records (B, T), of the loss of every step of the order
    given: Tensor | None = None  # of records LongTensor (B,), the steps that are given, the first

    def map(self, function: Callable[[Tensor], Tensor]) -> DecoderBatch:
        values = self.tokens, self.order, self.weight, self.given
        return DecoderBatch(*(None if v is None else function(v) for v in values))


@dataclass
class EncoderBatch:
    """Sequences, and which positions of each are masked and predicted."""

    tokens: Tensor  # LongTensor (B, T)
    masks: Masks

    def map(self, function: Callable[[Tensor], Tensor]) -> EncoderBatch:
        return EncoderBatch(function(self.tokens), self.masks.map(function))


Batch = DecoderBatch | EncoderBatch
AHEAD = 4  # micro-batches made before they are wanted


def make_batch(
    tokens: Tensor,
    config: Config,
    step: int,
    batch_rows: range,
    roles: Roles | None = None,
    mean_predicted: float = 1.0,
) -> Batch:
    """The sequences `batch_rows` of the global batch of `step`, with their orders or masks: a pure
    function of the arguments and the run's seed, so a resumed run has no generator to restore.

    roles: of records. mean_predicted: how many tokens of a record of the global batch are
    predicted, in the mean: with it, the mean of the losses of micro-batches and processes is the
    mean over these tokens.
    """
    length, global_size = tokens.shape[1], config.train.batch_size
    if config.objective.kind in DECODER_OBJECTIVES:
        orders, _ = config.stage(step)
        order = orders_at(orders, config.seed, step, batch_rows, length)
        if roles is None:
            return DecoderBatch(tokens, order)
        order = roles.first_given(order)
        weight = roles.predicted.gather(1, order) * (length / mean_predicted)
        return DecoderBatch(tokens, order, weight, roles.given.sum(dim=1))
    masks = masks_at(config.objective, config.seed, step, batch_rows, global_size, length, roles)
    if roles is not None:
        masks.weight = masks.weight * (length / mean_predicted)
    return EncoderBatch(tokens, masks)


def roles_of(
    data: TokenDataset, config: Config, step: int, batch_rows: range
) -> tuple[Roles, float]:
    """The roles of a batch of records, and how many tokens of a record of the whole global batch
    are predicted, in the mean."""
    size = config.train.batch_size
    numbers = data.indices(config.seed, step, range(size), size)
    everything = Roles.of(data.roles(numbers))
    rows = slice(batch_rows.start, batch_rows.stop)
    roles = Roles(everything.predicted[rows], everything.given[rows])
    return roles, float(everything.predicted.sum()) / size


def check_given_first(data: TokenDataset, folder: str) -> None:
    """Raise ValueError for records in which what is given is not their beginning: a model that is
    not told its target could not be trained on them, as it reads from left to right."""
    places = torch.arange(data.block_size)
    for first in range(0, data.num_blocks, RECORDS_AT_ONCE):
        numbers = range(first, min(first + RECORDS_AT_ONCE, data.num_blocks))
        given = Roles.of(data.roles(numbers)).given
        starts = places < given.sum(dim=1, keepdim=True)
        if wrong := (starts != given).any(dim=1).nonzero().flatten().tolist():
            raise UserError(
                f"record {numbers[wrong[0]]} of {folder} has given tokens that do not stand at its "
                "beginning, and a model that is not told its target reads from left to right: set "
                "model.target, or give it records of a prompt and a text"
            )


def accumulation_steps(config: Config, procs: Processes) -> int:
    """Micro-batches of one process in an optimizer step."""
    return config.train.batch_size // (config.train.micro_batch_size * procs.world_size)


def micro_batches(
    data: TokenDataset, config: Config, procs: Processes, first_step: int
) -> Iterator[Batch]:
    """Yield this process's micro-batches on its device, those of `first_step` and of all steps
    after it, in order. Close it to end its thread.

    A thread makes the next ones while the device is at work on the one before, in pinned memory,
    from where a copy to the GPU needs no wait either. Several, since a slow read from a disk or
    a busy CPU must not leave the device without work.

    The global batch is cut into micro-batches first and among processes second: micro-batch m holds
    consecutive sequences, of which process r takes the r-th part. So which sequences and orders a
    step trains on does not depend on the number of processes.
    """
    micro_size, device = config.train.micro_batch_size, procs.device
    block_size, random_prob = data.block_size, config.data.random_length_prob
    micro_steps = accumulation_steps(config, procs)

    def make(step: int, index: int) -> Batch:
        first = (index * procs.world_size + procs.rank) * micro_size
        batch_rows = range(first, first + micro_size)
        tokens = data.batch(config.seed, step, batch_rows, config.train.batch_size)
        length = batch_lengths(config.seed, range(step, step + 1), block_size, random_prob)[0]
        tokens = tokens[:, :length].contiguous()
        roles = roles_of(data, config, step, batch_rows) if data.of_records else ()
        batch = make_batch(tokens, config, step, batch_rows, *roles)
        return batch.map(torch.Tensor.pin_memory) if device.type == "cuda" else batch

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        steps = range(first_step, config.train.steps)
        wanted = ((step, index) for step in steps for index in range(micro_steps))
        ahead = deque(thread.submit(make, *which) for which in itertools.islice(wanted, AHEAD))
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(thread.submit(make, *which) for which in itertools.islice(wanted, 1))
                yield batch.map(to_device)
        finally:  # of those that are not begun none is waited for
            thread.shutdown(cancel_futures=True)


class PendingLosses:
    """Losses and gradient norms on their way from the device.

    To read a number from a GPU at once would wait for all its work (a host sync), and the GPU would
    then wait for the next step. So every step's numbers are copied to the host in the background
    and read once they are there, some steps later.
    """

    def __init__(self):
        self.pending: deque = deque()

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        on_device = torch.stack([loss.detach(), norm.detach()])
        if on_device.is_cuda:
            host = torch.empty(2, pin_memory=True).copy_(on_device, non_blocking=True)
            copy_done = torch.cuda.Event()
            copy_done.record()
        else:
            host, copy_done = on_device, None  # there already
        self.pending.append((step, host, copy_done))

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, float, float]]:
        """Yield (step, loss, norm) of the steps whose numbers are here; with `wait`, of all."""
        while self.pending:
            step, host, copy_done = self.pending[0]
            if copy_done is not None:
                if not wait and not copy_done.query():
                    return
                copy_done.synchronize()
            self.pending.popleft()
            yield step, *host.tolist()
