"""The processes of a job: who they are, how they find one another, how they agree to stop, and what
to tell the user when one of them is lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import secrets
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.devices import pick_device
from runtime.startup import interrupt

# How long the processes of a job may take to find each other: some import PyTorch from a slow disk.
MEETING_SECONDS = 300.0

# What errors of gloo, of NCCL and of the store say when another process does not answer in time ...
TOO_LATE = r"(?i)timed out (waiting|after)|timeout"
# ... and when it has ended.
CUT_OFF = (
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError"
    r"|failed to recv"
)


@dataclass(frozen=True)
class Processes:
    """This process among those of the job (one alone, or as many as torchrun started), and its
    device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that prints, logs and writes what one process writes."""
        return self.rank == 0

    def print0(self, *values, **options) -> None:
        """Print, on the main process only."""
        if self.main:
            print(*values, **options)

    def share(self, total: int) -> range:
        """The contiguous part of range(total) that this process works on; parts differ by at most
        one."""
        first = total * self.rank // self.world_size
        end = total * (self.rank + 1) // self.world_size
        return range(first, end)

    def gather(self, value) -> list:
        """Every process's `value`, in rank order, on every process; all must call."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of every process's tensor, in place, on every process; all must call."""
        if self.world_size > 1:
            dist.all_reduce(value)
            value /= self.world_size
        return value


# ---- joining and leaving -------------------------------------------------------------------------


@contextlib.contextmanager
def processes(device: str = "auto", timeout: float = 1800.0, group: bool = False):
    """Join the job that torchrun started (gloo on CPU, nccl on GPU), or stand alone; yields
    `Processes`.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        timeout: seconds that a message between processes may take; then the waiting process ends
            with an error.
        group: make a process group also for a process alone, as FSDP needs it.

    Raises ValueError for a device that is not there, and ConnectionError in a process that waits in
    vain for another one, because that one hangs or has ended.
    """
    # torchrun tells a process its place in these variables.
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # among the processes of this machine
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    chosen = pick_device(device, local_rank)
    if world_size == 1 and not group:
        yield Processes(0, 1, chosen)
        return

    # Tensors on a GPU travel by NCCL, small messages between the CPUs by gloo: the latter wait for
    # no GPU.
    on_gpu = chosen.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    ended_well = False
    try:
        store = dist.HashStore() if world_size == 1 else fresh_store(max(timeout, MEETING_SECONDS))
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=limit
        )
        yield Processes(rank, world_size, chosen)
        # Leave together: the connections of a process that leaves first break under the others, and
        # these can abort in their own teardown.
        dist.barrier()
        ended_well = True
    except RuntimeError as error:
        if reason := lost_process(error, timeout):
            raise ConnectionError(reason) from error
        raise
    finally:
        # After an error NCCL's part of the group is left to the end of the process: taking it down
        # would wait for messages that are under way, and no other process may ever answer them.
        if dist.is_initialized() and (ended_well or not on_gpu):
            dist.destroy_process_group()


def fresh_store(timeout: float) -> dist.Store:
    """torchrun's key-value store, under a prefix that only the processes of this attempt know.

    When torchrun restarts a job, it hands out the store of the attempt before, with addresses of
    dead processes in it (as of PyTorch 2.13), and there is no number of the attempt that all nodes
    agree on. So the processes make one up: each leaves a random name, process 0 invites the names
    it finds under a random prefix, and each takes the first invitation that has its own name. Names
    may be left over from dead processes: an invitation counts once all who are named have accepted,
    and process 0 invites anew whenever a name has changed.

    Raises ConnectionError if the processes have not all come within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    rendezvous = dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))
    store, rank, world_size = next(iter(rendezvous))
    ranks = range(world_size)

    own_name = secrets.token_hex(8)
    store.set(f"name/{rank}", own_name)
    invitation = ""
    while time.monotonic() < deadline:
        if rank == 0 and store.check([f"name/{other}" for other in ranks]):
            names = [store.get(f"name/{other}").decode() for other in ranks]
            if invitation.split()[1:] != names:
                invitation = " ".join([secrets.token_hex(8), *names])
                store.set("invitation", invitation)
        elif rank != 0 and store.check(["invitation"]):
            invitation = store.get("invitation").decode()
        prefix, *names = invitation.split() or [""]
        if len(names) == world_size and names[rank] == own_name:
            store.set(f"{prefix}/accepted/{rank}", "")
            if store.check([f"{prefix}/accepted/{other}" for other in ranks]):
                return dist.PrefixStore(prefix, store)
        time.sleep(0.01)
    raise ConnectionError(
        f"the {world_size} processes of the job did not all start within {timeout:g} seconds"
    )


def lost_process(error: BaseException, timeout: float | None = None) -> str | None:
    """What to tell a user if an error means that another process has ended or does not answer; else
    None. PyTorch has no class of its own for this, so the text decides."""
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError):
        return None
    if re.search(CUT_OFF, text):
        what = (
            "the connection to another process was cut: that one was killed, or ended with an error"
        )
    elif re.search(TOO_LATE, text):
        within = f" within {timeout:g} seconds (train.timeout)" if timeout else ""
        what = f"another process did not answer{within}: it hangs, or its machine cannot be reached"
    else:
        return None
    text = re.sub(r"^\[\S+:\d+\] ", "", text)  # a line of gloo's source
    return f"{what}; see the messages of the others. PyTorch says: {text[:120]}"


# ---- stopping ------------------------------------------------------------------------------------


class StopRequest:
    """SIGTERM or Ctrl-C to any process, agreed on by all, so that all stop after the same step.

    Were a process to stop when it hears the signal, the others would wait in the next step for its
    gradients. So a signal is only noted, and every step ends with `agree`.
    """

    def __init__(self, procs: Processes):
        self.procs = procs
        self.signalled = False  # this process
        self.requested = False  # any process was asked to stop: all know, since `agree`
        self.failed = False  # any process has failed: all know, since `agree`
        self.launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number, frame) -> None:
        if self.signalled and number == signal.SIGINT:
            interrupt(number, frame)  # the second Ctrl-C does not wait for the step
        self.signalled = True

    def agree(self, failed: bool = False) -> None:
        """Set `requested` if any process was asked to stop, and `failed` if any has failed.

        One small message between the CPUs (gloo), which waits for no GPU.

        Raises ChildProcessError if torchrun was killed: a job that nobody watches would train on
        beside the one that is started in its place.
        """
        if self.launcher and os.getppid() != self.launcher:
            raise ChildProcessError("torchrun, which started this process, has ended")
        self.requested, self.failed = self.signalled, failed
        if self.procs.world_size > 1:
            flags = torch.tensor([float(self.signalled), float(failed)])
            dist.all_reduce(flags)
            self.requested, self.failed = (flags > 0).tolist()
