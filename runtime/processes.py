"""What a script needs around the model: processes and devices, precision, peak speed, clean errors, versions."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

# Dense bfloat16 peak, floating-point operations per second, from the makers' data sheets, by the exact device name:
# a longer or shorter name is another product.
PEAK_BF16_FLOPS = {
    "NVIDIA B200": 2250e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA A10": 125e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "AMD Instinct MI300X": 1307.4e12,
}

MEETING_SECONDS = 300.0  # for the processes of a job to find each other: some import PyTorch from a slow disk
TOO_LATE = r"(?i)timed out (waiting|after)|timeout"  # in an error of gloo, of NCCL or of the store
CUT_OFF = r"Connection (closed|reset) by peer|Connection refused|Broken pipe|ncclRemoteError|failed to recv"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of the device at this precision; None where it is not known, never a guess."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return PEAK_BF16_FLOPS.get(torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class Processes:
    """This process among those of the job (one alone, or as many as torchrun started) and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, total: int) -> range:
        """The contiguous part of range(total) that this process works on; parts differ by at most one."""
        return range(total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size)

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
    """Join the job that torchrun started (gloo on CPU, nccl on GPU), or stand alone; yields `Processes`.

    Args:
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N". Raises ValueError for one that is not there.
        timeout: seconds that a message between processes may take; then the waiting process ends with an error.
        group: make a process group also for a process alone.

    Raises ConnectionError in a process that waits for another one in vain, because that one hangs or has ended.
    """
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(device, local_rank)
    if world_size == 1 and not group:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    rank, backend = int(os.environ.get("RANK", 0)), "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    seconds = datetime.timedelta(seconds=timeout)
    try:
        store = dist.HashStore() if world_size == 1 else fresh_store(max(timeout, MEETING_SECONDS))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds)
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
    """What to tell a user if an error means that another process has ended or does not answer; else None."""
    text = " ".join(str(error).split())
    if not isinstance(error, RuntimeError) or not re.search(rf"{TOO_LATE}|{CUT_OFF}", text):
        return None
    if re.search(CUT_OFF, text):
        what = "the connection to another process was cut: that one was killed, or ended with an error"
    else:
        within = f" within {timeout:g} seconds (train.timeout)" if timeout else ""
        what = f"another process did not answer{within}: it hangs, or its machine cannot be reached"
    text = re.sub(r"^\[\S+:\d+\] ", "", text)  # a line of gloo's source
    return f"{what}; see the messages of the others. PyTorch says: {text[:120]}"


def fresh_store(timeout: float) -> dist.Store:
    """torchrun's store under a prefix that only the processes of this attempt know.

    After a restart torchrun hands out the store of the attempt before, with addresses of dead processes in it (as of
    PyTorch 2.13), and no number of the attempt that all nodes agree on. So every process leaves a name of its own, and
    process 0 makes prefixes for the names it finds until all have found their own name among them.
    """
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))))
    own, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"name/{rank}", own)
    all_names = [f"name/{other}" for other in range(world_size)]
    offer = ""
    while time.monotonic() < deadline:
        if rank == 0:
            names = [store.get(name).decode() for name in all_names] if store.check(all_names) else []
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
    raise ConnectionError(f"the {world_size} processes of the job did not all start within {timeout:g} seconds")


def pick_device(device: str, local_rank: int = 0) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not known; give auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if chosen.index is None else chosen.index
        if index >= count:
            raise ValueError(f"device {device!r}: PyTorch sees {count} GPUs here; use --device cpu or fewer processes")
        chosen = torch.device("cuda", index)
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU that has it and float32 elsewhere; "float32" and "bfloat16" are taken as given."""
    if dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]


def available_memory(device: torch.device) -> int | None:
    """Bytes that new tensors can have on the device; None where that cannot be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:  # a container may have less than its machine
        limit, used, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat"))
        cached = int(dict(line.split() for line in stat.splitlines())["inactive_file"])
        return min(free, int(limit) - int(used) + cached)
    except (OSError, KeyError, ValueError):  # no limit is written as "max"
        return free


def autocast(device: torch.device, dtype: torch.dtype):
    """Mixed precision for matrix work when dtype is bfloat16; nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16)


def versions() -> dict[str, str]:
    """Versions that a reported number depends on."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}


def to_json(value, indent: int | None = None) -> str:
    """JSON text of plain values; NaN and infinities, which JSON does not have, become null, paths strings."""

    def plain(v):
        if isinstance(v, dict):
            return {str(key): plain(item) for key, item in v.items()}
        if isinstance(v, list | tuple):
            return [plain(item) for item in v]
        return None if isinstance(v, float) and not math.isfinite(v) else v

    return json.dumps(plain(value), indent=indent, default=str)


def check_output(path: Path | None, option: str) -> None:
    """Raise ValueError before the work begins if a result file could not be written after it."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file")
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")


def _out_of_memory(error: Exception) -> bool:
    """Of the device, of Python, or of PyTorch's CPU allocator, which raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit. A ValueError, an OSError or too little memory is the user's to mend: its
    message, exit status 2, no traceback (set AOGPT_TRACEBACK=1 to see it)."""
    try:
        status = main() or 0
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        full = _out_of_memory(error)
        if isinstance(error, RuntimeError) and not full:
            raise
        if os.environ.get("AOGPT_TRACEBACK"):
            traceback.print_exc()
        rank = os.environ.get("RANK")
        advice = "out of memory; ask for less at once, such as a smaller batch size or fewer samples: " if full else ""
        print(f"error{f' (rank {rank})' if rank else ''}: {advice}{error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    sys.exit(status)
