"""The processes of a job: how they find one another, communicate and agree to stop."""

import contextlib
import datetime
import os
import re
import secrets
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .command_line import show
from .devices import pick_device
from .errors import UserError

# for the processes of a job to start: some import PyTorch from a slow disk
START_SECONDS = 300.0
# What gloo, NCCL and the store say when another process has ended, or does not answer
# in time.
CUT_OFF = (
    r"Connection (closed|reset|refused)|Broken pipe|ncclRemoteError|failed to recv"
)
TOO_LATE = r"(?i)timed out (waiting|after)|timeout"


@dataclass
class Processes:
    """This process among those of the job (one alone, or those that torchrun
    started)."""

    rank: int
    world_size: int
    device: torch.device

    def __post_init__(self):
        self.main = self.rank == 0  # the process that prints, logs and writes results

    def print0(self, *values, **options) -> None:
        """Print on the main process alone."""
        if self.main:
            show(*values, **options)

    def share(self, total: int) -> range:
        """Return this process's contiguous part of range(total); parts differ by at
        most one."""
        first, end = (
            total * rank // self.world_size for rank in (self.rank, self.rank + 1)
        )
        return range(first, end)

    def gather(self, value) -> list:
        """Return every process's `value`, in rank order, on every process; all must
        call."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of every process's tensor, in place, on every process; all
        must call."""
        if self.world_size > 1:
            dist.all_reduce(value)
            value /= self.world_size
        return value


@contextlib.contextmanager
def processes(device: str = "auto", timeout: float = 1800.0, group: bool = False):
    """Join the job that torchrun started, or run alone; yield `Processes`. timeout:
    seconds within which another process must answer. group: make a process group even
    for one process (FSDP needs it). Raises ConnectionError if another process hangs or
    has ended, UserError for variables of torchrun that cannot be right."""
    world_size, rank, local_rank = job_variables()
    procs = Processes(rank, world_size, pick_device(device, local_rank))
    if world_size == 1 and not group:
        yield procs
        return

    kind = procs.device.type
    backend = "gloo"
    ended_well = False
    if kind != "cpu":  # gloo for messages between CPUs, which wait for no GPU
        backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
    try:
        store: dist.Store = dist.HashStore()
        if world_size > 1:
            store = fresh_store(rank, world_size, max(timeout, START_SECONDS))
        dist.init_process_group(
            backend,
            timeout=datetime.timedelta(seconds=timeout),
            store=store,
            rank=rank,
            world_size=world_size,
        )
        yield procs
        # All leave together: others can abort when the first connection breaks.
        dist.barrier()
        ended_well = True
    except RuntimeError as error:
        if reason := lost_process(error, timeout):
            raise ConnectionError(reason) from error
        raise
    finally:
        # After an error, taking NCCL down would wait for messages that no process may
        # ever answer.
        if dist.is_initialized() and (ended_well or kind == "cpu"):
            dist.destroy_process_group()


def job_variables() -> tuple[int, int, int]:
    """Return WORLD_SIZE, RANK and LOCAL_RANK, which torchrun sets in the environment.
    Raises UserError for those that it cannot have set."""
    values = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name in values:
        values[name] = os.environ.get(name) or values[name]
    is_torchruns = all(re.fullmatch(r"\d{1,9}", text) for text in values.values())
    if is_torchruns:
        world_size, rank, local_rank = map(int, values.values())
        has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_torchruns = rank < world_size and (world_size == 1 or has_store)
    if not is_torchruns:
        text = ", ".join(f"{name} = {value}" for name, value in values.items())
        raise UserError(
            f"{text} in the environment, but torchrun did not start this process: for "
            "a single process unset these variables, which another job may have left "
            "in this shell; for several start them with torchrun"
        )
    return world_size, rank, local_rank


def fresh_store(rank: int, world_size: int, timeout: float) -> dist.Store:
    """Return torchrun's store, under a prefix of this attempt: a restarted job gets the
    old store, whose stale addresses make gloo fail (as of PyTorch 2.13). Each other
    rank leaves a random name in the store, under which rank 0 answers with the prefix.
    timeout: seconds. Raises ConnectionError."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout),
        wait_for_workers=False,
    )
    name = secrets.token_hex(8)
    if rank > 0:
        store.set(f"name/{rank}", name)
        prefix = store.get(f"prefix/{name}").decode()  # waits for rank 0
        store.set(f"{prefix}/joined/{rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = range(1, world_size)
    deadline = time.monotonic() + timeout
    while missing := [r for r in missing if not store.check([f"{name}/joined/{r}"])]:
        if time.monotonic() > deadline:
            raise ConnectionError(
                f"the job's processes did not all start in {timeout:g} seconds"
            )
        # Again and again, for the name may be that of a dead process.
        for other in missing:
            if store.check([f"name/{other}"]):
                store.set(f"prefix/{store.get(f'name/{other}').decode()}", name)
        time.sleep(0.01)
    return dist.PrefixStore(name, store)


def lost_process(error: BaseException, timeout: float | None = None) -> str | None:
    """Return the message for an error that means that another process has ended or
    hangs; else None."""
    # PyTorch has no class of its own for such errors.
    text = " ".join(str(error).split()) if isinstance(error, RuntimeError) else ""
    if re.search(CUT_OFF, text):
        problem = (
            "the connection to another process was cut: it was killed, or ended with "
            "an error"
        )
    elif re.search(TOO_LATE, text):
        within = f" within {timeout:g} seconds (train.timeout)" if timeout else ""
        problem = (
            f"another process did not answer{within}: it hangs, or its machine cannot "
            "be reached"
        )
    else:
        return None
    text = re.sub(r"^\[\S+:\d+\] ", "", text)[:120]  # without the line of gloo's source
    return f"{problem}; see the messages of the others. PyTorch says: {text}"
