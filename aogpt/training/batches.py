"""Asynchronous transfer of micro-batches to the device, and of losses back."""

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..data.loader import TokenDataset
from ..objectives import MicroBatch, masks_at
from ..orders import Roles, orders_at
from ..runtime.errors import UserError
from ..runtime.processes import Processes
from .config import Config

AHEAD = 4  # micro-batches that are prepared in advance, at least


def make_batch(
    tokens: Tensor,
    config: Config,
    step: int,
    batch_rows: range,
    roles: Roles | None = None,
    mean_predicted: float = 1.0,
) -> MicroBatch:
    """Return the sequences `batch_rows` (B, T) of the global batch of `step` with
    orders or masks: a pure function of the arguments.

    With prompts, mean_predicted: predicted tokens per sequence, averaged over the
    global batch, so that losses are means over predicted tokens."""
    length = tokens.shape[1]
    if not config.objective.definition.for_encoders:
        orders, group = config.stage(step)
        order = orders_at(orders, config.seed, step, batch_rows, length)
        if roles is None:
            return MicroBatch(tokens, order, group=group)
        order = roles.first_given(order)
        predicted = roles.predicted.gather(1, order)  # (B, T) in prediction order
        weight = predicted * (length / mean_predicted)
        prompt_lengths = roles.given.sum(dim=1)
        return MicroBatch(tokens, order, weight, prompt_lengths, group)
    masks = masks_at(
        config.objective,
        seed=config.seed,
        step=step,
        rows=batch_rows,
        total=config.train.batch_size,
        length=length,
        roles=roles,
    )
    if roles is not None:
        masks.weight = masks.weight * (length / mean_predicted)
    # [MASK] is the first id after the tokens.
    return MicroBatch(tokens, masks=masks, vocab=config.model.mask_token)


def roles_of(
    data: TokenDataset, config: Config, step: int, batch_rows: range
) -> tuple[Roles, float]:
    """Return `roles` and `mean_predicted` of `make_batch`, for data with prompts.
    Raises UserError for a prompt in the middle if the model reads from left to
    right."""
    size = config.train.batch_size
    blocks = data.indices(config.seed, step, range(size), size)
    roles = data.roles(blocks)
    of_batch = Roles.of(roles)
    prompt_lengths = of_batch.given.sum(dim=1, keepdim=True)
    starts = torch.arange(data.block_size) < prompt_lengths
    if config.model.l2r_only and not torch.equal(starts, of_batch.given):
        raise UserError(
            f"{config.data.folder} has prompts that are not the beginning of their "
            "sequence: set another model.target than 'none'"
        )
    mean_predicted = float(of_batch.predicted.sum()) / size
    return Roles.of(roles[batch_rows.start : batch_rows.stop]), mean_predicted


def micro_batches(
    data: TokenDataset, config: Config, procs: Processes, first_step: int
) -> Generator[MicroBatch, None, None]:
    """Yield this process's micro-batches on its device, from `first_step` on; a thread
    prepares the next ones until the iterator is closed. The sequences of a step do not
    depend on the number of processes: process r has the r-th part of every micro-batch
    of consecutive sequences."""
    micro_size = config.micro_batch_size(procs.world_size)
    micro_steps = config.train.batch_size // (micro_size * procs.world_size)
    device = procs.device

    def make(step: int, index: int) -> MicroBatch:
        """Return micro-batch `index` of a step, on the CPU."""
        first = (index * procs.world_size + procs.rank) * micro_size
        batch_rows = range(first, first + micro_size)
        tokens = data.batch(config.seed, step, batch_rows, config.train.batch_size)
        roles = None
        mean_predicted = 1.0
        if data.of_records:
            roles, mean_predicted = roles_of(data, config, step, batch_rows)
        batch = make_batch(
            tokens, config, step, batch_rows, roles=roles, mean_predicted=mean_predicted
        )
        if device.type == "cuda":
            batch = batch.map(torch.Tensor.pin_memory)
        return batch

    steps = range(first_step, config.train.steps)
    wanted = ((step, index) for step in steps for index in range(micro_steps))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as thread:
        # A step ahead: data that changes is found between two steps (`stop.agree`),
        # where the run can save.
        count = max(AHEAD, micro_steps)
        ahead: deque[Future[MicroBatch]] = deque()
        for step, index in itertools.islice(wanted, count):
            ahead.append(thread.submit(make, step, index))
        try:
            while ahead:
                batch = ahead.popleft().result()
                for step, index in itertools.islice(wanted, 1):
                    ahead.append(thread.submit(make, step, index))
                if device.type != "cpu":
                    batch = batch.map(lambda t: t.to(device, non_blocking=True))
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


class PendingLosses:
    """The losses and gradient norms of the last steps, copied from the device in the
    background: reading them at once would wait for the GPU."""

    def __init__(self) -> None:
        # (step, numbers on the CPU, CUDA event after which they are there, or None)
        self.pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        """Start to copy the loss and the gradient norm of a step, scalars."""
        numbers = torch.stack([loss.detach(), norm.detach()])
        # non_blocking: PyTorch copies to pinned memory.
        on_cpu = numbers.to("cpu", non_blocking=True)
        copied = None
        if loss.is_cuda:
            copied = torch.cuda.current_stream().record_event()
        self.pending.append((step, on_cpu, copied))

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, float, float]]:
        """Yield (step, loss, norm) for each step whose numbers have arrived; with
        `wait`, for all steps."""
        while self.pending:
            step, numbers, copied = self.pending[0]
            if copied is not None and not wait and not copied.query():
                return
            self.pending.popleft()
            if copied is not None:
                copied.synchronize()
            loss, norm = numbers.tolist()
            yield step, loss, norm
