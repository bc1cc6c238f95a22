"""What all benchmarks share: options, the models' sizes, the machine and its rates, the
report."""

import dataclasses
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.utils.benchmark import Timer

from aogpt.model import AOGPT, ModelConfig
from aogpt.runtime.command_line import show
from aogpt.runtime.outputs import OutputOptions, Outputs, provenance
from aogpt.runtime.validation import Count, check_values
from aogpt.systems import build_model

TINY = ModelConfig(
    vocab_size=512, block_size=128, n_layer=2, n_head=2, n_embd=64, cond_dim=16
)
BENCH = ModelConfig(n_layer=6, n_head=6, n_embd=384)
SMALL = ModelConfig()
MEDIUM = ModelConfig(n_layer=24, n_head=16, n_embd=1024)
# The model, and how many of its ids are tokens: GPT-2's are padded.
SIZES = {
    "tiny": (TINY, 500),
    "bench": (BENCH, 50257),
    "small": (SMALL, 50257),
    "medium": (MEDIUM, 50257),
}
# The sum of a tensor of this size is timed: larger than any processor's cache.
BANDWIDTH_BYTES = 2**29


@dataclass(frozen=True, kw_only=True)
class BenchOptions(OutputOptions):
    size: Literal["tiny", "bench", "small", "medium"] = "bench"
    """Layers/width/heads: tiny 2/64/2, bench 6/384/6, small 12/768/12, medium
    24/1024/16; random weights."""
    threads: Count | None = None
    """Threads of PyTorch on a CPU."""
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    json: Path | None = None
    """Write every figure, with settings, machine and versions."""

    def check(self, files: dict[str, Path | None] | None = None) -> Outputs:
        """Return the files to write, --json and more by option. Raises UserError for
        values out of range, or files that cannot be written."""
        check_values(self)
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        written = {"--json": self.json}
        if files:
            written.update(files)
        return Outputs(written, (), self.overwrite)


def config_of(system: str, size: str, length: int) -> ModelConfig:
    """Return the model of a system, for samples of this length: AO-GPT, or another one
    of the same size."""
    config, ids = SIZES[size]
    block_size = max(config.block_size, length)
    config = dataclasses.replace(config, block_size=block_size)
    match system:
        case "gpt":
            return dataclasses.replace(config, target="none")
        case "rotary":
            return dataclasses.replace(config, position="rotary", target="rotary")
        case "adaln-rotary":
            return dataclasses.replace(config, position="rotary")
        case "two-stream":
            return dataclasses.replace(config, position="rotary", target="two_stream")
        case "mask-query":
            return dataclasses.replace(config, position="rotary", target="mask_query")
        case "encoder":
            return dataclasses.replace(
                config,
                attention="full",
                target="none",
                tied_head=False,
                mask_token=ids,  # after the tokens
                vocab_size=max(config.vocab_size, ids + 1),
            )
    return config


def random_model(config: ModelConfig, device: torch.device) -> AOGPT:
    torch.manual_seed(0)
    with device:
        return build_model(config).eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tell(text: str, end: str = "\n") -> None:
    """Print progress, unbuffered, to stderr."""
    show(text, end=end, file=sys.stderr, flush=True)


def machine(device: torch.device) -> dict:
    name = cpu_name()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "type": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure_rates(
    config: ModelConfig, inputs: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Return flops, the operations per second in the product of `inputs` hidden states
    (at most 4096) with an MLP's first matrix, and bandwidth, the bytes per second in
    the sum of a tensor larger than any cache."""
    rows = min(inputs, 4096)
    D = config.n_embd
    threads = torch.get_num_threads()
    x = torch.randn(rows, D, device=device, dtype=dtype)
    weight = torch.randn(D, 4 * D, device=device, dtype=dtype)
    data = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    values = {"x": x, "weight": weight, "data": data}
    seconds = {}
    for work in ("x @ weight", "data.sum()"):
        timer = Timer(work, globals=values, num_threads=threads)
        seconds[work] = min(timer.blocked_autorange().times)
    return {
        "flops": 2 * rows * D * 4 * D / seconds["x @ weight"],
        "bandwidth": BANDWIDTH_BYTES / seconds["data.sum()"],
    }


def publish(
    o: BenchOptions, outputs: Outputs, dtype, device, figures, report: Callable
) -> dict:
    """Write the figures, then print the report, so that an error in it loses
    nothing."""
    result = provenance(o, dtype, device, machine=machine(device))
    result.update(figures)
    with outputs:
        outputs.write_json(o.json, result)
        m = result["machine"]
        version = result["versions"]["torch"]
        show(f"{m['name']}, {m['threads']} threads, torch {version}.")
        if m["type"] == "cpu":
            show("On a CPU only the ratios mean something.\n")
        show("\n".join(report(result)))
    return result


def listed(names: dict[str, str]) -> str:
    return ". ".join(f"{name}: {description}" for name, description in names.items())


def short(value: float) -> str:
    """Return a number with three digits, without an exponent if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread_of(values: list[float]) -> str:
    """Return the median, and the least and largest behind it."""
    median = short(statistics.median(values))
    least = short(min(values))
    largest = short(max(values))
    return f"{median} ({least} - {largest})"


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
