"""What all benchmarks share: their options, the models' sizes, the machine and its rates, the
report."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model import AOGPT, ModelConfig
from runtime.devices import synchronize
from runtime.errors import UserError
from runtime.outputs import OutputOptions, Outputs
from runtime.reports import provenance
from runtime.validation import Count, NonNegative, check_values
from variants import build_model

SizeName = Literal["tiny", "bench", "small", "medium"]
GPT2 = {"vocab_size": 50304, "block_size": 1024}  # 50257 ids, padded
SIZES = {  # the model, and how many of its ids are tokens
    "tiny": (
        ModelConfig(vocab_size=512, block_size=128, n_layer=2, n_head=2, n_embd=64, cond_dim=16),
        500,
    ),
    "bench": (ModelConfig(**GPT2, n_layer=6, n_head=6, n_embd=384), 50257),
    "small": (ModelConfig(**GPT2, n_layer=12, n_head=12, n_embd=768), 50257),
    "medium": (ModelConfig(**GPT2, n_layer=24, n_head=16, n_embd=1024), 50257),
}
BANDWIDTH_BYTES = 2**29  # of the tensor whose sum is timed: larger than any processor's cache


@dataclass(frozen=True, kw_only=True)
class BenchOptions(OutputOptions):
    """Options that benchmarks share."""

    size: SizeName = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium 24/1024/16; random
    weights."""
    threads: Count | None = None
    """Threads of PyTorch on a CPU."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of matrix work; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    seed: NonNegative = 0
    json: Path | None = None
    """Write every figure, with settings, machine and versions."""
    markdown: Path | None = None
    """Write the table, with the command above it."""
    plot: Path | None = None
    """Draw the table as a PNG."""

    @functools.cached_property
    def outputs(self) -> Outputs:
        names = ("json", "markdown", "plot")
        return Outputs({f"--{n}": getattr(self, n) for n in names}, (), self.overwrite)

    def check(self) -> None:
        """Raise ValueError for values out of range, no systems, or files that cannot be written."""
        check_values(self)
        if not self.systems:
            raise UserError("--systems is empty; name at least one")
        self.outputs  # noqa: B018 - checks the files

    def use_threads(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def random_model(config: ModelConfig, seed: int, device: torch.device) -> AOGPT:
    torch.manual_seed(seed)
    with device:
        return build_model(config).eval()


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


# ---- the machine and its rates -------------------------------------------------------------------


def machine(device: torch.device) -> dict:
    """What the figures depend on besides the versions of libraries."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    threads = torch.get_num_threads()
    return {"type": device.type, "name": name, "threads": threads, "platform": platform.platform()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Rates:
    """What this machine reaches: operations per second of a matrix product, and bytes per second
    read from memory."""

    flops: float
    bandwidth: float


def measure_rates(
    config: ModelConfig, items: int, dtype: torch.dtype, device: torch.device
) -> Rates:
    """Time the product of `items` hidden states (at most 4096) with an MLP's first matrix, and the
    sum of a tensor larger than any cache."""
    rows, D = min(items, 4096), config.n_embd
    x = torch.randn(rows, D, device=device, dtype=dtype)
    weight = torch.randn(D, 4 * D, device=device, dtype=dtype)
    product = fastest(lambda: x @ weight, device)
    data = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    return Rates(2 * rows * D * 4 * D / product, BANDWIDTH_BYTES / fastest(data.sum, device))


def fastest(
    function: Callable, device: torch.device, rounds: int = 5, seconds: float = 0.05
) -> float:
    """Seconds of one call in the best of some rounds, each of which lasts about `seconds`."""

    def time_calls(calls: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - started) / calls

    time_calls(1)  # the first call may load kernels
    calls = max(1, round(seconds / time_calls(1)))
    return min(time_calls(calls) for _ in range(rounds))


# ---- the report ----------------------------------------------------------------------------------


def describe(options: BenchOptions, dtype: torch.dtype, device: torch.device, **more) -> dict:
    """Everything that the rows of a report depend on."""
    return provenance(options, dtype, device, machine=machine(device)) | more


def publish(
    options: BenchOptions, title: str, result: dict, report: str, plot: Callable[[], bytes]
) -> None:
    """Print the report; write the files that --json, --markdown and --plot name."""
    print(report)
    with options.outputs as outputs:
        outputs.write_json(options.json, result)
        outputs.write(options.markdown, f"# {title}\n\n    {result['command']}\n\n{report}")
        if options.plot:
            outputs.write(options.plot, plot())


def paragraphs(*parts: str) -> str:
    """Text with an empty line between its parts."""
    return "\n\n".join(part for part in parts if part) + "\n"


def machine_line(result: dict) -> str:
    """The machine, its threads and torch, as the reports begin."""
    m = result["machine"]
    return f"{m['name']}, {m['threads']} threads, torch {result['versions']['torch']}"


def ratios_only(result: dict) -> str:
    """What a report from a CPU says of its absolute times."""
    return "On a CPU only the ratios mean something." if result["machine"]["type"] == "cpu" else ""


def short(value: float) -> str:
    """Three digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_range(middle: float, low: float, high: float) -> str:
    """The middle, and the least and largest behind it."""
    return f"{short(middle)} ({short(low)} - {short(high)})"
