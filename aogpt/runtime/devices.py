"""The device of a process: its choice, precision and memory."""

import contextlib
import gc
import importlib.util
import os
import shutil

import torch

from .errors import UserError

# The least width of models that by default train in bfloat16 on a CPU. With
# avx512_bf16, forward and backward took 1 / 1.6 of the time at widths 256 to 512, whole
# SmolLM2 (width 576) 1 / 2.4; narrow models stay in float32, the same on every CPU.
WIDE = 512


def pick_device(device: str | torch.device, local_rank: int = 0) -> torch.device:
    """Return the device of this name, made current. local_rank: index of the GPU if the
    name has none."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        module = torch.get_device_module(chosen)
    except (RuntimeError, TypeError):
        raise UserError(
            f"device {device!r} is not known; give auto, cpu, cuda:N or mps"
        ) from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    chosen = torch.device(
        chosen.type, local_rank if chosen.index is None else chosen.index
    )
    count = module.device_count() if module.is_available() else 0
    if chosen.index >= count:
        raise UserError(
            f"device {device!r}: PyTorch sees {count} GPUs here; take the device cpu "
            "or fewer processes"
        )
    if hasattr(module, "set_device"):  # mps has one device only
        module.set_device(chosen)
    return chosen


def pick_dtype(dtype: str, device: torch.device, width: int = 0) -> torch.dtype:
    """Return the precision of matrix products.

    auto: bfloat16 on a CUDA GPU that has it, and in training on a CPU that has it, if
    the model's `width` is at least WIDE. bfloat16: if autocast supports it."""
    if dtype == "auto" and device.type == "cpu":
        fast = width >= WIDE and cpu_has_bfloat16()
    elif dtype == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
    else:
        fast = dtype == "bfloat16" and device.type in ("cpu", "cuda", "xpu")
    return torch.bfloat16 if fast else torch.float32


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies matrices of bfloat16 itself."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def autocast(device: torch.device, dtype: torch.dtype):
    """Return a context of mixed precision for matrix products in bfloat16, of no effect
    for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16)


def supports_float64(device: torch.device) -> bool:
    """Return whether tensors of float64 can be on the device."""
    return device.type != "mps"


def can_run_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels can run on the device."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def deterministic(enabled: bool):
    """Return a context in which, if enabled, a GPU computes the same bits in every run,
    or an operation raises RuntimeError. Enter it before the GPU is used."""
    if enabled:
        # read when cuBLAS starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
    # slow, for debugging
    torch.utils.deterministic.fill_uninitialized_memory = not enabled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@contextlib.contextmanager
def tf32(device: torch.device, enabled: bool):
    """Return a context in which, if enabled, an NVIDIA GPU multiplies float32 matrices
    in TF32."""
    on = enabled and device.type == "cuda"
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def release_memory(device: torch.device) -> None:
    """Free reference cycles and unused blocks of the allocator."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory, of the device or the CPU, has run
    out."""
    full = isinstance(error, MemoryError | torch.OutOfMemoryError)
    # a plain RuntimeError on the CPU
    return full or "can't allocate memory" in str(error)


def has_compiler() -> bool:
    """Return whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(map(shutil.which, ("c++", "g++", "clang++")))
