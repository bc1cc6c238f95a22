"""Asynchronous transfer of micro-batches to the device, and of losses back."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.loader import TokenDataset, batch_lengths
from ..objectives import DECODER_OBJECTIVES, Masks, masks_at
from ..orders import Roles, orders_at
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from .config import Config

# limits of the micro-batches that are prepared in advance
AHEAD = 4
MOST = 64


@dataclass
class Batch:
    tokens: Tensor  # LongTensor (B, T)
    order: Tensor | None = (
        None  # decoder: LongTensor (B, T), the position predicted at each step
    )
    weight: Tensor | None = (
        None  # decoder, with prompts (B, T): factor of the loss of each step
    )
    given: Tensor | None = None  # decoder, with prompts LongTensor (B,): prompt tokens
    masks: Masks | None = None  # encoder

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """A batch with `function` applied to every tensor."""
        tensors = self.tokens, self.order, self.weight, self.given
        masks = self.masks and self.masks.map(function)
        return Batch(*(None if t is None else function(t) for t in tensors), masks)


def make_batch(
    tokens: Tensor,
    config: Config,
    step: int,
    batch_rows: range,
    roles=None,
    mean_predicted=1.0,
) -> Batch:
    """Sequences `batch_rows` (B, T) of the global batch of `step` with orders or masks: a pure
    function of the arguments. With prompts, roles: Roles; mean_predicted: predicted tokens per
    sequence, averaged over the global batch, so that losses are means over predicted tokens."""
    length = tokens.shape[1]
    global_size = config.train.batch_size
    if config.objective.kind in DECODER_OBJECTIVES:
        orders, _ = config.stage(step)
        order = orders_at(orders, config.seed, step, batch_rows, length)
        if roles is None:
            return Batch(tokens, order)
        order = roles.first_given(order)
        weight = roles.predicted.gather(1, order) * (length / mean_predicted)
        return Batch(tokens, order, weight, given=roles.given.sum(dim=1))
    masks = masks_at(
        config.objective, config.seed, step, batch_rows, global_size, length, roles
    )
    if roles is not None:
        masks.weight = masks.weight * (length / mean_predicted)
    return Batch(tokens, masks=masks)


def roles_of(
    data: TokenDataset, config: Config, step: int, batch_rows: range
) -> tuple[Roles, float]:
    """`roles` and `mean_predicted` of `make_batch`, for data with prompts. Raises UserError for a
    prompt in the middle if the model reads from left to right."""
    size = config.train.batch_size
    of_batch = Roles.of(data.roles(data.indices(config.seed, step, range(size), size)))
    starts = torch.arange(data.block_size) < of_batch.given.sum(dim=1, keepdim=True)
    if config.model.l2r_only and not torch.equal(starts, of_batch.given):
        where = f"{config.data.folder} has prompts that are not the beginning of their sequence"
        raise UserError(f"{where}: set another model.target than 'none'")
    rows = slice(batch_rows.start, batch_rows.stop)
    roles = Roles(of_batch.predicted[rows], of_batch.given[rows])
    return roles, float(of_batch.predicted.sum()) / size


def micro_batches(
    data: TokenDataset, config: Config, procs: Processes, first_step: int
) -> Iterator[Batch]:
    """Yield this process's micro-batches on its device, from `first_step` on; a thread prepares the
    next ones until the iterator is closed. The sequences of a step do not depend on the number of
    processes: process r has the r-th part of every micro-batch of consecutive sequences."""
    micro_size = config.micro_batch_size(procs.world_size)
    device = procs.device
    block_size = data.block_size
    random_prob = config.data.random_length_prob

    def make(step: int, index: int) -> Batch:
        first = (index * procs.world_size + procs.rank) * micro_size
        batch_rows = range(first, first + micro_size)
        tokens = data.batch(config.seed, step, batch_rows, config.train.batch_size)
        length = batch_lengths(
            config.seed, range(step, step + 1), block_size, random_prob
        )[0]
        tokens = tokens[:, :length].contiguous()
        roles = roles_of(data, config, step, batch_rows) if data.of_records else ()
        batch = make_batch(tokens, config, step, batch_rows, *roles)
        return batch.map(torch.Tensor.pin_memory) if device.type == "cuda" else batch

    steps = range(first_step, config.train.steps)
    micro_steps = config.train.batch_size // (micro_size * procs.world_size)
    wanted = ((step, index) for step in steps for index in range(micro_steps))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        # A limit, as data is read here before `check_unchanged` runs for its step.
        first = itertools.islice(wanted, min(max(AHEAD, micro_steps), MOST))
        ahead = deque(thread.submit(make, *which) for which in first)
        try:
            while ahead:
                batch = ahead.popleft().result()
                ahead.extend(
                    thread.submit(make, *which) for which in itertools.islice(wanted, 1)
                )
                yield batch.map(lambda tensor: tensor.to(device, non_blocking=True))
        finally:
            thread.shutdown(cancel_futures=True)


class PendingLosses:
    """Losses and gradient norms, copied from the device in the background and read some steps
    later: reading them at once would wait for the GPU."""

    def __init__(self):
        self.pending: deque = deque()

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        # non_blocking: PyTorch copies to pinned memory.
        host = torch.stack([loss.detach(), norm.detach()]).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None
        self.pending.append((step, host, copied))

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, float, float]]:
        """Yield (step, loss, norm) of the steps that were copied; with `wait`, of all."""
        while self.pending and (
            wait or not self.pending[0][2] or self.pending[0][2].query()
        ):
            step, host, copied = self.pending.popleft()
            if copied:
                copied.synchronize()
            yield step, *host.tolist()
