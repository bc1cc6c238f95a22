"""bench decode --lengths ... --memory ...: the peak memory of decoding, without the weights.

Each measurement is a process of its own, since the peak of a process never falls.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from model import AOGPT
from runtime.devices import pick_device, pick_dtype
from runtime.errors import UserError
from runtime.reports import markdown_table
from sampling import Engine, TokenChoice, random_plan
from studies import bench_common as common
from studies.decoding_speed import (
    OTHER_MODELS,
    SYSTEMS,
    DecodeOptions,
    exponents,
    exponents_table,
    load_decoder,
    other_config,
)


def bench_memory(o: DecodeOptions) -> dict:
    """Run the benchmark, report, and return what --json holds."""
    o.check()
    device = pick_device(o.device)
    if unknown := set(o.systems) - {"ours", *OTHER_MODELS}:
        raise UserError(f"--memory knows no {', '.join(unknown)}: give --systems ours encoder")
    if device.type == "cpu" and not Path("/proc/self/status").exists():
        raise UserError("on a CPU the memory of a process is known on Linux only")
    # Freed memory that glibc keeps in reserve would hide what a process takes next.
    for key in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"):
        os.environ.pop(key, None)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # if not fixed, it grows
    rows = []
    for system in dict.fromkeys(o.systems):
        for batch_size in sorted(set(o.memory)):
            for length in sorted(set(o.lengths)):
                found = []
                for _ in range(o.repeats):
                    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                        found.append(alone.submit(measure, o, system, batch_size, length).result())
                peak, planned = zip(*found, strict=True)
                row = {"name": f"{system}_{batch_size}", "length": length}
                row["description"] = f"{SYSTEMS[system]}, {batch_size} at a time"
                rows.append(row | {"by_repeat": {"peak": peak, "planned": planned}})
    figures = {"rows": rows, "exponents": exponents(rows)}
    dtype = pick_dtype(o.dtype, device)
    return common.publish(o, dtype, device, "Memory of decoding", figures, report)


def measure(o: DecodeOptions, system: str, batch_size: int, length: int) -> tuple[float, float]:
    """MiB of decoding at its peak, and what is planned of them."""
    if o.threads is not None:
        torch.set_num_threads(o.threads)
    device = pick_device(o.device)
    model, vocab_size = load_decoder(dataclasses.replace(o, length=length), device)
    if system in OTHER_MODELS:
        config = other_config(system, model.config, vocab_size)
        model = common.random_model(config, o.seed, device)
    model.to(pick_dtype(o.dtype, device))

    def decode(batch_size: int, length: int) -> Engine:
        given = torch.zeros(batch_size, length, dtype=torch.bool)
        if system == "encoder":  # all its steps are alike: two are enough
            given[:, 2 * o.group :] = True
        plan = random_plan(batch_size, length, common.seeded(o.seed), given, o.group)
        engine = Engine(model, batch_size, length, TokenChoice(), vocab_size)
        in_use(device, reset_peak=True)
        engine.generate(plan, torch.zeros_like(plan.order), generator=common.seeded(o.seed))
        return engine

    # A small engine first: libraries allocate memory once, and it has a copy of the weights, too.
    engine = decode(1, min(length, 2 * o.group))
    before = in_use(device, reset_peak=True)
    del engine
    decode(batch_size, length)
    return (peak(device) - before) / 2**20, planned_bytes(model, batch_size, length) / 2**20


def in_use(device: torch.device, reset_peak: bool) -> int:
    """Bytes in use now; `peak` counts from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def planned_bytes(model: AOGPT, batch_size: int, length: int) -> int:
    """Keys and values of a decoder, and adaLN's modulations of all positions, which decoding keeps
    if they are not larger."""
    c, itemsize = model.config, model.wte.weight.itemsize
    if c.is_encoder:
        return 0
    cache = 2 * c.n_layer * batch_size * length * c.n_embd * itemsize
    modulations = c.block_size * (6 * c.n_layer + 2) * c.n_embd * itemsize
    return cache + (modulations if c.has_adaln and modulations <= cache else 0)


def report(result: dict) -> str:
    lengths = sorted({row["length"] for row in result["rows"]})
    lines: dict[str, list[str]] = {}
    for row in result["rows"]:
        peak, planned = (statistics.median(values) for values in row["by_repeat"].values())
        cell = f"{common.short(peak)} ({common.short(planned)})"
        lines.setdefault(row["name"], [row["name"]]).append(cell)
    head = ["system_batch", *(f"{length} tokens" for length in lengths)]
    s = result["settings"]
    return common.paragraphs(
        result,
        f"{s['group']} tokens a step, {s['dtype']}.",
        "\n".join(markdown_table(head, list(lines.values()))),
        "MiB at the peak without the weights; in brackets those planned: keys and values, and "
        "adaLN's modulations.",
        exponents_table(result),
    )
