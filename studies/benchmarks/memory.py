"""bench.py memory: what decoding takes beside the weights, by length and batch.

Each measurement is a process of its own: the peak of its memory (resident on a CPU, allocated on a
GPU) while it decodes, less that before. A decoder keeps keys and values of all tokens, and adaLN a
row of modulations for every position; an encoder keeps nothing, but feeds all tokens at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch

from model import AOGPT
from runtime.devices import pick_device, pick_dtype
from runtime.errors import UserError
from runtime.reports import log_x, markdown_table, new_figure, png
from runtime.validation import Count
from sampling.cached import KVCache
from sampling.engine import Engine, bytes_per_sample
from sampling.packed import packed
from sampling.passes import keeps_modulations, modulation_bytes
from sampling.plans import random_plan
from sampling.token_choice import TokenChoice
from studies.benchmarks import common
from studies.benchmarks.common import SIZES, BenchOptions
from studies.benchmarks.decode import other_config
from studies.benchmarks.lengths import slope

System = Literal["decoder", "rotary", "encoder"]
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(BenchOptions):
    """Measure the memory that decoding takes, beside its estimate."""

    lengths: tuple[Count, ...] = (1024, 2048, 4096, 8192)
    batch_sizes: tuple[Count, ...] = (1, 8)
    group: Count = 16
    """Tokens a step."""
    repeats: Count = 1
    """Processes for each system, batch size and length; the median counts."""
    systems: tuple[System, ...] = ("decoder", "rotary", "encoder")
    """decoder: AO-GPT. rotary: relative attention that tells targets by rotation, which has no
    adaLN. encoder: of the same size."""


def bench_memory(options: MemoryOptions) -> None:
    """Run the benchmark and report. Raises ValueError for settings that cannot be run."""
    options.check()
    if len(set(options.lengths)) < 2 or not options.batch_sizes:
        raise UserError("give --lengths at least two lengths, and --batch-sizes one size")
    device = pick_device(options.device)
    if device.type == "cpu" and not Path("/proc/self/status").exists():
        raise UserError("the memory of a process on a CPU can be told on Linux only")
    rows = []
    for system in dict.fromkeys(options.systems):
        for batch_size in sorted(set(options.batch_sizes)):
            for length in sorted(set(options.lengths)):
                rows.append(measure_alone(options, system, batch_size, length))
    dtype = pick_dtype(options.dtype, device)
    fits = {
        f"{system}_{batch_size}": [growth(own, repeat) for repeat in range(options.repeats)]
        for (system, batch_size), own in by_system(rows).items()
    }
    result = common.describe(options, dtype, device, rows=rows, exponents=fits)
    plot = functools.partial(plot_memory, rows, common.machine_line(result))
    common.publish(options, "Memory of decoding", result, report(result), plot)


def measure_alone(options: MemoryOptions, system: System, batch_size: int, length: int) -> dict:
    """The measurement of the median peak, with the peaks of all repeats: a new process each, for
    the peak of one never falls."""
    found = []
    for _ in range(options.repeats):
        with without_reserves(), ProcessPoolExecutor(1, get_context("spawn")) as alone:
            found.append(alone.submit(measure, options, system, batch_size, length).result())
    peaks = [row["peak_bytes"] for row in found]
    median = sorted(peaks)[(len(peaks) - 1) // 2]
    return found[0] | {"peak_bytes": median, "all_peak_bytes": peaks}


@contextlib.contextmanager
def without_reserves() -> Iterator[None]:
    """Have processes that begin here give freed memory back at once, whatever glibc was told
    before: what they keep in reserve would hide what they take next."""
    before = dict(os.environ)
    for key in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.pop(key, None)
    # From so many bytes on memory is taken from the system, and goes back to it. Where the number
    # is not given, it grows by itself.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(options: MemoryOptions, system: System, batch_size: int, length: int) -> dict:
    """Bytes that decoding takes at its peak beside the weights, and what is planned of them."""
    options.use_threads()
    device = pick_device(options.device)
    model, vocab_size = model_of(options, system, length, device)

    def decode(batch_size: int, length: int) -> int:
        """Bytes held at most, from when the engine stands."""
        # To an encoder all steps are alike, so that it takes two; the cache of a decoder fills up.
        given = torch.zeros(batch_size, length, dtype=torch.bool)
        if system == "encoder":
            given[:, 2 * options.group :] = True
        plan = random_plan(batch_size, length, common.seeded(options.seed), given, options.group)
        engine = Engine(model, batch_size, length, TokenChoice(), vocab_size)
        forget_peak(device)
        engine.generate(plan, torch.zeros_like(plan.order), generator=common.seeded(options.seed))
        return peak(device)

    decode(1, min(length, 2 * options.group))  # what libraries load and take once is not counted
    laid_out = packed(model)  # nor is the copy of the weights that an engine makes
    before = forget_peak(device)
    del laid_out
    most = decode(batch_size, length)
    return {
        "system": system,
        "batch_size": batch_size,
        "length": length,
        "peak_bytes": most - before,
        "planned_bytes": planned(model, batch_size, length),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


def model_of(
    options: MemoryOptions, system: System, length: int, device: torch.device
) -> tuple[AOGPT, int]:
    config, vocab_size = SIZES[options.size]
    config = dataclasses.replace(config, block_size=max(config.block_size, length))
    if system != "decoder":
        config = other_config(system, config, vocab_size)
    dtype = pick_dtype(options.dtype, device)
    return common.random_model(config, options.seed, device).to(dtype), vocab_size


def forget_peak(device: torch.device) -> int:
    """Bytes that this process holds now, from which on its peak is measured anew: what making the
    model took for a moment does not count."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    """Bytes that this process has held at most since `forget_peak`: of the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident("VmHWM")


def resident(key: str) -> int:
    """Bytes. Linux alone says it of a process without what its parent had taken."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def planned(model: AOGPT, batch_size: int, length: int) -> int:
    """Cache and buffers of all samples, and adaLN's modulations of every position of the model,
    where decoding keeps those."""
    config, weight = model.config, model.wte.weight
    modulations = 0
    if config.target == "adaln":
        cache = KVCache(config, batch_size, length, torch.device("meta"), weight.dtype)
        if keeps_modulations(config, cache, weight.dtype):
            modulations = modulation_bytes(config, weight.dtype)
    return batch_size * bytes_per_sample(model, length) + modulations


def report(result: dict) -> str:
    """The setting, peaks, estimates, and how they grow."""
    s, rows = result["settings"], result["rows"]
    setting = f"{s['group']} tokens a step, {s['dtype']}. {common.machine_line(result)}."
    lengths = sorted({row["length"] for row in rows})
    head = ["system", "batch", *(f"{n} tokens" for n in lengths), "exponent"]
    lines = []
    for (system, batch_size), own in by_system(rows).items():
        cells = [
            f"{common.short(row['peak_bytes'] / MIB)} ({common.short(row['planned_bytes'] / MIB)})"
            for row in own
        ]
        fit = statistics.mean(result["exponents"][f"{system}_{batch_size}"])
        lines.append([system, str(batch_size), *cells, f"{fit:.2f}"])
    return common.paragraphs(
        setting,
        "\n".join(markdown_table(head, lines)),
        "MiB at the peak beside the weights, and in brackets what is known before: the cache and "
        "the buffers of the samples, and adaLN's modulations. The rest is the working memory of a "
        "step.",
    )


def by_system(rows: list[dict]) -> dict[tuple[str, int], list[dict]]:
    """The rows of each system and batch size, the shortest samples first."""
    systems: dict[tuple[str, int], list[dict]] = {}
    for row in rows:
        systems.setdefault((row["system"], row["batch_size"]), []).append(row)
    return systems


def growth(rows: list[dict], repeat: int) -> float:
    """Slope of log peak over log length, of one repeat; no bytes count as one."""
    peaks = [max(1, row["all_peak_bytes"][repeat]) for row in rows]
    return slope([row["length"] for row in rows], peaks)


def plot_memory(rows: list[dict], title: str) -> bytes:
    """PNG of peaks over length, both logarithmic; dashed: what is planned."""
    figure, axes = new_figure()
    for (system, batch_size), own in by_system(rows).items():
        lengths = [row["length"] for row in own]
        (line,) = axes.plot(
            lengths,
            [row["peak_bytes"] / MIB for row in own],
            marker="o",
            label=f"{system}, batch {batch_size}",
        )
        planned_mib = [row["planned_bytes"] / MIB for row in own]
        axes.plot(lengths, planned_mib, "--", color=line.get_color())
    axes.set(yscale="log", xlabel="length", ylabel="MiB", title=title)
    log_x(axes, (row["length"] for row in rows))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return png(figure)
