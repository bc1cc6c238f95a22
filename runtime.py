"""What a script needs around the model: processes and devices, precision, peak speed, clean errors, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

# Dense bfloat16 peak of one device, floating-point operations per second, from the makers' data sheets.
PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 80GB HBM3": 989.4e12,
    "H100 SXM": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI300X": 1307.4e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of the device at this precision; None where it is not known, never a guess."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BF16_FLOPS.items() if key in name), None)


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

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(device: str = "auto"):
    """Join the job that torchrun started (gloo on CPU, nccl on GPU), or stand alone; yields `Processes`.

    device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N". Raises ValueError for a device that is not there.
    """
    world_size, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    chosen = pick_device(device, local_rank)
    if world_size == 1:
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), world_size, chosen)
    finally:
        dist.destroy_process_group()


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


def autocast(device: torch.device, dtype: torch.dtype):
    """Mixed precision for matrix work when dtype is bfloat16; nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16)


def versions() -> dict[str, str]:
    """Versions that a reported number depends on."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's main and exit. A ValueError or OSError is the user's to mend: its message, exit status 2, no
    traceback (set AOGPT_TRACEBACK=1 to see it)."""
    try:
        status = main() or 0
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    except (ValueError, OSError) as error:
        if os.environ.get("AOGPT_TRACEBACK"):
            traceback.print_exc()
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    sys.exit(status)
