"""Peak speed and memory of GPUs, by the exact name that their driver gives."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GPU:
    name: str
    flops: float  # dense bfloat16 peak, operations per second, from the maker's data sheet
    memory_gib: float  # as drivers report it, rounded down


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
    GPU("NVIDIA GeForce RTX 4090", 165.2e12, 23),
    GPU("NVIDIA GeForce RTX 3090", 71e12, 23),
    GPU("AMD Instinct MI300X", 1307.4e12, 191),
)
GPUS = {gpu.name: gpu for gpu in _KNOWN}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations per second of a device at a precision; None where it is not known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    gpu = GPUS.get(torch.cuda.get_device_name(device))
    return gpu and gpu.flops
