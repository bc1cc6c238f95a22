"""The device of a process: which one, at what precision, how fast, and how much memory it has."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from runtime.errors import UserError


@dataclass(frozen=True)
class GPU:
    """A product, by the exact name that its driver gives: a longer or shorter one is another."""

    name: str
    flops: float
    """Dense bfloat16 peak, floating-point operations per second, from the maker's data sheet."""
    memory_gib: float
    """What drivers report as the GPU's own, rounded down."""


_KNOWN = (
    GPU("NVIDIA B200", 2250e12, 178),
    GPU("NVIDIA H200", 989.4e12, 139),
    GPU("NVIDIA H100 80GB HBM3", 989.4e12, 79),
    GPU("NVIDIA H100 NVL", 835e12, 93),
    GPU("NVIDIA H100 PCIe", 756e12, 79),
    GPU("NVIDIA A100-SXM4-40GB", 312e12, 39),
    GPU("NVIDIA A100-SXM4-80GB", 312e12, 79),
    GPU("NVIDIA A100-PCIE-40GB", 312e12, 39),
    GPU("NVIDIA A100 80GB PCIe", 312e12, 79),
    GPU("NVIDIA L40S", 362e12, 44),
    GPU("NVIDIA L4", 121e12, 22),
    GPU("NVIDIA A10G", 70e12, 22),
    GPU("NVIDIA A10", 125e12, 22),
    GPU("NVIDIA GeForce RTX 4090", 165.2e12, 23),
    GPU("NVIDIA GeForce RTX 3090", 71e12, 23),
    GPU("AMD Instinct MI300X", 1307.4e12, 191),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of the device at this precision; None where it is not known, never
    a guess."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    gpu = GPUS.get(torch.cuda.get_device_name(device))
    return gpu.flops if gpu else None


def pick_device(device: str, local_rank: int = 0) -> torch.device:
    """The device of that name; if it is a GPU, it becomes the current one, since what names no
    device (events, pinned memory) belongs to that."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not known; give auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if chosen.index is None else chosen.index
        if index >= count:
            raise UserError(
                f"device {device!r}: PyTorch sees {count} GPUs here; use --device cpu or "
                "fewer processes"
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen


def supports_float64(device: torch.device) -> bool:
    return device.type != "mps"


def current(device: torch.device):
    """A context in which a GPU is the current one, on which kernels of Triton run."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def attention_of_many_shapes():
    """A context in which attention takes kernels that need no plan for each shape. cuDNN's, which
    PyTorch prefers on some GPUs, take 23 to 440 ms to plan a shape, and almost every step of
    decoding has its own."""
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


@contextlib.contextmanager
def deterministic(enabled: bool):
    """A context in which a GPU, if enabled, does nothing whose rounding differs from run to run,
    such as adding up with atomics; an operation that has no other form is a RuntimeError (only
    warned of, it would run as it is, and attention with it). Enter it before the GPU is used."""
    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    flags = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), flags.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    flags.fill_uninitialized_memory = False  # for finding errors; it takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        flags.fill_uninitialized_memory = before[1]


@contextlib.contextmanager
def tf32(device: torch.device, enabled: bool):
    """A context in which an Nvidia GPU, if enabled, multiplies float32 matrices in TF32: several
    times as fast, and their factors rounded to 10 bits behind the point."""
    if not enabled or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU that has it and float32 elsewhere; "float32" and "bfloat16" are
    taken as given."""
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
        limit, used, stat = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        cached = int(dict(line.split() for line in stat.splitlines())["inactive_file"])
        return min(free, int(limit) - int(used) + cached)
    except (OSError, KeyError, ValueError):  # no limit is written as "max"
        return free


def autocast(device: torch.device, dtype: torch.dtype):
    """Mixed precision for matrix work when dtype is bfloat16; nothing for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16)


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory has run out: of the device, of Python, or of PyTorch's CPU
    allocator, which raises a plain RuntimeError."""
    return isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)


def release_memory(device: torch.device) -> None:
    """Give back what is no longer referred to: objects in reference cycles, then the allocator's
    unused blocks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was asked to; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))
