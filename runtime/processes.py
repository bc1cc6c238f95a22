"""The processes of a job: who they are, how they find one another, and what to say when one is
lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.devices import pick_device

MEETING_SECONDS = (
    300.0  # for the processes of a job to find each other: some import PyTorch from a slow disk
)
TOO_LATE = r"(?i)timed out (waiting|after)|timeout"  # in an error of gloo, of NCCL or of the store
CUT_OFF = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError|failed to recv"


@dataclass(frozen=True)
class Processes:
    """This process among those of the job (one alone, or as many as torchrun started) and its
    device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, total: int) -> range:
        """The contiguous part of range(total) that this process works on; parts differ by at most
        one."""
        return range(
            total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size
        )

    def gather(self, value) -> list:
        """Every process's `value`, in rank order, on every process."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of every process's tensor, on every process."""
        if self.world_size > 1:
            dist.all_reduce(value)
            value /= self.world_size
        return value


@contextlib.contextmanager
def processes(device: str = "auto", timeout: float = 1800.0, group: bool = False):
    """Join the job that torchrun started (gloo on CPU, nccl on GPU), or stand alone; yields
    `Processes`.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N". Raises ValueError for one
        that is not there. timeout: seconds that a message between processes may take; then the
        waiting process ends with an error. group: make a process group also for a process alone.

    Raises ConnectionError in a process that waits for another one in vain, because that one hangs
    or has ended."""
    world_size, local_rank = (
        int(os.environ.get("WORLD_SIZE", 1)),
        int(os.environ.get("LOCAL_RANK", 0)),
    )
    chosen = pick_device(device, local_rank)
    if world_size == 1 and not group:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    rank, backend = (
        int(os.environ.get("RANK", 0)),
        "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
    )
    seconds = datetime.timedelta(seconds=timeout)
    try:
        store = dist.HashStore() if world_size == 1 else fresh_store(max(timeout, MEETING_SECONDS))
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=seconds
        )
        yield Processes(dist.get_rank(), world_size, chosen)
        dist.barrier()  # leave together: a process that goes first can abort in the teardown of its connections
    except RuntimeError as error:
        if reason := lost_process(error, timeout):
            raise ConnectionError(reason) from error
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lost_process(error: BaseException, timeout: float | None = None) -> str | None:
    """What to tell a user if an error means that another process has ended or does not answer; else
    None."""
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError) or not re.search(rf"{TOO_LATE}|{CUT_OFF}", text):
        return None
    if re.search(CUT_OFF, text):
        what = (
            "the connection to another process was cut: that one was killed, or ended with an error"
        )
    else:
        within = f" within {timeout:g} seconds (train.timeout)" if timeout else ""
        what = f"another process did not answer{within}: it hangs, or its machine cannot be reached"
    text = re.sub(r"^\[\S+:\d+\] ", "", text)  # a line of gloo's source
    return f"{what}; see the messages of the others. PyTorch says: {text[:120]}"


def fresh_store(timeout: float) -> dist.Store:
    """torchrun's store under a prefix that only the processes of this attempt know.

    After a restart torchrun hands out the store of the attempt before, with addresses of dead
    processes in it (as of PyTorch 2.13), and no number of the attempt that all nodes agree on. So
    every process leaves a name of its own, and process 0 makes prefixes for the names it finds
    until all have found their own name among them."""
    store, rank, world_size = next(
        iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
    )
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"name/{rank}", own)
    all_names = [f"name/{other}" for other in range(world_size)]
    offer = ""
    while time.monotonic() < deadline:
        if rank == 0:
            names = (
                [store.get(name).decode() for name in all_names] if store.check(all_names) else []
            )
            if names and offer.split()[1:] != names:
                offer = " ".join([secrets.token_hex(8), *names])
                store.set("offer", offer)
        elif store.check(["offer"]):
            offer = store.get("offer").decode()
        prefix, *names = offer.split() or [""]
        if len(names) == world_size and names[rank] == own:
            store.set(f"{prefix}/seen/{rank}", "")
            if store.check([f"{prefix}/seen/{other}" for other in range(world_size)]):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.01)
    raise ConnectionError(
        f"the {world_size} processes of the job did not all start within {timeout:g} seconds"
    )
