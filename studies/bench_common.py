"""What all benchmarks share: options, the models' sizes, the machine and its rates, the report."""

import functools
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model import AOGPT, ModelConfig
from runtime.devices import synchronize
from runtime.errors import UserError
from runtime.outputs import OutputOptions, Outputs, provenance
from runtime.validation import Count, NonNegative, check_values
from variants import build_model

TINY = ModelConfig(vocab_size=512, block_size=128, n_layer=2, n_head=2, n_embd=64, cond_dim=16)
SIZES = {  # the model, and how many of its ids are tokens: GPT-2's are padded
    "tiny": (TINY, 500),
    "bench": (ModelConfig(n_layer=6, n_head=6, n_embd=384), 50257),
    "small": (ModelConfig(), 50257),
    "medium": (ModelConfig(n_layer=24, n_head=16, n_embd=1024), 50257),
}
BANDWIDTH_BYTES = 2**29  # of the tensor whose sum is timed: larger than any processor's cache


@dataclass(frozen=True, kw_only=True)
class BenchOptions(OutputOptions):
    size: Literal["tiny", "bench", "small", "medium"] = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium 24/1024/16; random
    weights."""
    threads: Count | None = None
    """Threads of PyTorch on a CPU."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    seed: NonNegative = 0
    json: Path | None = None
    """Write every figure, with settings, machine and versions."""
    markdown: Path | None = None
    """Write the table with the command above it."""

    @functools.cached_property
    def outputs(self) -> Outputs:
        files = {"--json": self.json, "--markdown": self.markdown}
        return Outputs(files, (), self.overwrite)

    def check(self) -> None:
        """Raise UserError for values out of range, or files that cannot be written."""
        check_values(self)
        if not self.systems:
            raise UserError("--systems is empty; name at least one")
        self.outputs  # noqa: B018 - checks the files
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def random_model(config: ModelConfig, seed: int, device: torch.device) -> AOGPT:
    torch.manual_seed(seed)
    with device:
        return build_model(config).eval()


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def machine(device: torch.device) -> dict:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    return {"type": device.type, "name": name, "threads": threads, "platform": platform.platform()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure_rates(
    config: ModelConfig, inputs: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """flops: operations per second in the product of `inputs` hidden states (at most 4096) with an
    MLP's first matrix. bandwidth: bytes per second in the sum of a tensor larger than any cache."""
    rows, D = min(inputs, 4096), config.n_embd
    x = torch.randn(rows, D, device=device, dtype=dtype)
    weight = torch.randn(D, 4 * D, device=device, dtype=dtype)
    data = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    product, total = fastest(lambda: x @ weight, device), fastest(data.sum, device)
    return {"flops": 2 * rows * D * 4 * D / product, "bandwidth": BANDWIDTH_BYTES / total}


def fastest(function: Callable, device: torch.device) -> float:
    """Seconds of the fastest of 20 calls."""
    seconds = []
    for _ in range(20):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def publish(
    options: BenchOptions,
    dtype: torch.dtype,
    device: torch.device,
    title: str,
    figures: dict,
    report: Callable[[dict], str],
) -> dict:
    """Write the figures, then print the report, so that an error in it loses nothing."""
    result = provenance(options, dtype, device, machine=machine(device)) | figures
    with options.outputs as outputs:
        outputs.write_json(options.json, result)
        text = report(result)
        print(text)
        outputs.write(options.markdown, f"# {title}\n\n    {result['command']}\n\n{text}")
    return result


def paragraphs(result: dict, *parts: str) -> str:
    """The machine and these parts, with an empty line between them, and a warning about absolute
    times on a CPU."""
    m = result["machine"]
    parts = f"{m['name']}, {m['threads']} threads, torch {result['versions']['torch']}.", *parts
    parts += ("On a CPU only the ratios mean something.",) * (m["type"] == "cpu")
    return "\n\n".join(part for part in parts if part) + "\n"


def listed(names: dict[str, str]) -> str:
    return ". ".join(f"{name}: {description}" for name, description in names.items())


def short(value: float) -> str:
    """Three digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread_of(values: list[float]) -> str:
    """The median, and the least and largest behind it."""
    return f"{short(statistics.median(values))} ({short(min(values))} - {short(max(values))})"
