"""What the benchmarks of bench.py share: sizes, the machine and its rates, tables."""

from __future__ import annotations

import io
import platform
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from checkpoints.store import write_atomically
from model import AOGPT, ModelConfig
from runtime.files import check_output, to_json

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
BANDWIDTH_BYTES = 2**29  # larger than any cache


def check_settings(a, lowest: dict[str, int]) -> None:
    """Raise ValueError for options below their lowest value, for no systems and for result files that cannot be."""
    for name, low in lowest.items():
        value = getattr(a, name)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {low}")
    if not a.systems:
        raise ValueError("--systems is empty; name at least one")
    for option in ("json", "markdown", "plot"):
        check_output(getattr(a, option), f"--{option}")


def random_model(config: ModelConfig, seed: int, device: torch.device) -> AOGPT:
    torch.manual_seed(seed)
    with device:
        return AOGPT(config).eval()


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict:
    """What the figures depend on besides the library versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Rates:
    """What this machine reaches: operations per second of a matrix product, bytes per second read from memory."""

    flops: float
    bandwidth: float


def measure_rates(
    config: ModelConfig, items: int, dtype: torch.dtype, device: torch.device
) -> Rates:
    """Time the product of `items` hidden states (at most 4096) with an MLP's first matrix, and the sum of a tensor
    larger than any cache."""
    rows, D = min(items, 4096), config.n_embd
    x, weight = (
        torch.randn(shape, device=device, dtype=dtype) for shape in ((rows, D), (D, 4 * D))
    )
    product = fastest(lambda: x @ weight, device)
    data = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    return Rates(2 * rows * D * 4 * D / product, BANDWIDTH_BYTES / fastest(data.sum, device))


def fastest(
    function: Callable, device: torch.device, rounds: int = 5, seconds: float = 0.05
) -> float:
    """Seconds of one call in the best of some rounds, each of which lasts about `seconds`."""

    def timed(calls: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - started) / calls

    timed(1)
    calls = max(1, round(seconds / timed(1)))
    return min(timed(calls) for _ in range(rounds))


# ---- results ---------------------------------------------------------------------------------------------------------


def command() -> str:
    return shlex.join(["python", "bench.py", *sys.argv[1:]])


def publish(a, title: str, result: dict, report: str, plot: Callable[[], bytes]) -> None:
    """Print the report; write the files that --json, --markdown and --plot name."""
    print(report)
    if a.json:
        write_atomically(
            a.json, lambda file: file.write(to_json(result, indent=2).encode() + b"\n")
        )
    if a.markdown:
        heading = f"# {title}\n\n    {result['command']}\n\n"
        write_atomically(a.markdown, lambda file: file.write((heading + report).encode()))
    if a.plot:
        image = plot()
        write_atomically(a.plot, lambda file: file.write(image))


def table(lines: list[list[str]]) -> list[str]:
    """Rows of cells, titles first, as a Markdown table that reads well as plain text too."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    padded = (map(aligned, line, widths, range(len(line))) for line in [lines[0], rule, *lines[1:]])
    return ["| " + " | ".join(cells) + " |" for cells in padded]


def short(value: float) -> str:
    """Three digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column else cell.ljust(width)


def png(figure) -> bytes:
    """A matplotlib figure as a PNG; closes it."""
    import matplotlib.pyplot as plt

    image = io.BytesIO()
    figure.savefig(image, dpi=150, format="png")
    plt.close(figure)
    return image.getvalue()
