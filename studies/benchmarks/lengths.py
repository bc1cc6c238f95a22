"""bench.py lengths: how the cost of a sample grows with its length.

The systems of bench.py decode, at several lengths, with as many tokens a step at each: the steps
grow with the length, so that work which every step does anew grows with its square. Exponents are
slopes of the logarithm of seconds, or of token-forwards, over that of the length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np

from runtime.devices import pick_device, pick_dtype
from runtime.errors import UserError
from runtime.reports import log_x, markdown_table, new_figure, png
from runtime.validation import Count, NonNegative
from studies.benchmarks import common
from studies.benchmarks.common import BenchOptions
from studies.benchmarks.decode import DecodeBench, DecodeOptions, System


@dataclass(frozen=True, kw_only=True)
class LengthsOptions(BenchOptions):
    """Decode samples of several lengths with every system, and fit how seconds and token-forwards
    grow."""

    lengths: tuple[Count, ...] = (256, 512, 1024, 2048)
    group: Count = 4
    """Tokens a step, but of systems that take one after the other."""
    batch_size: Count = 4
    systems: tuple[System, ...] = (
        "ours",
        "cache-only",
        "no-cache",
        "encoder",
        "l2r",
        "speculative",
        "gpt",
        "rotary",
    )
    """As in bench.py decode."""
    repeats: Count = 3
    """Times every system is run at every length, in turn."""
    slow_calls: NonNegative = 8
    """As in bench.py decode."""
    longest_cache_only: Count = 2048
    """Above this length cache-only is left out: all its calls are run, and they take minutes."""


def bench_lengths(options: LengthsOptions) -> None:
    """Run the benchmark and report. Raises ValueError for settings that no system could run."""
    options.check()
    lengths = sorted(set(options.lengths))
    if len(lengths) < 2:
        raise UserError("--lengths names fewer than two lengths, which show no growth; give more")
    if "cache-only" in options.systems and lengths[1] > options.longest_cache_only:
        raise UserError(
            "fewer than two lengths are at most --longest-cache-only "
            f"{options.longest_cache_only}; raise it, or leave cache-only out of --systems"
        )
    options.use_threads()
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    shared = {f.name for f in dataclasses.fields(DecodeOptions)} & set(vars(options))
    settings = {name: getattr(options, name) for name in shared}
    rows = []
    for length in lengths:
        steps = math.ceil(length / options.group)
        systems = [
            s for s in options.systems if s != "cache-only" or length <= options.longest_cache_only
        ]
        of_length = DecodeOptions(
            **settings | {"length": length, "steps": (steps,), "systems": systems}
        )
        bench = DecodeBench(of_length, device, dtype)
        rows += [row | {"length": length} for row in bench.rows(steps, rates=None)]
    fits = {system: exponents(rows, system) for system in dict.fromkeys(options.systems)}
    result = common.describe(options, dtype, device, rows=rows, exponents=fits)
    plot = functools.partial(plot_lengths, rows, common.machine_line(result))
    common.publish(options, "Decoding, by length", result, report(result), plot)


def exponents(rows: list[dict], system: str) -> dict[str, list[float]]:
    """Slopes of log seconds and log token-forwards over log length, one a repeat."""
    own = [row for row in rows if row["system"] == system]
    lengths = [row["length"] for row in own]
    repeats = range(len(own[0]["all_seconds"]))
    forwards = slope(lengths, [row["token_forwards"] for row in own])
    seconds = [slope(lengths, [row["all_seconds"][r] for row in own]) for r in repeats]
    return {"seconds": seconds, "token_forwards": [forwards] * len(seconds)}


def slope(lengths: list[int], values: list[float]) -> float:
    """Of the straight line through the logarithms, by least squares."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def report(result: dict) -> str:
    """The setting, seconds and exponents."""
    s, rows = result["settings"], result["rows"]
    setting = (
        f"{s['batch_size']} samples, {s['group']} tokens a step, {s['dtype']}; median of "
        f"{s['repeats']}. {common.machine_line(result)}."
    )
    lengths = sorted({row["length"] for row in rows})
    by_key = {(row["system"], row["length"]): row for row in rows}
    head = ["system", *(f"{n} tokens" for n in lengths), "exponent", "of token-forwards"]
    lines = []
    for system, fit in result["exponents"].items():
        cells = []
        for length in lengths:
            row, ours = by_key.get((system, length)), by_key.get(("ours", length))
            if row is None:
                cells.append("-")
                continue
            ratio = f" ({row['seconds'] / ours['seconds']:.2f})" if ours else ""
            extrapolated = "~" if row["extrapolated"] else ""
            cells.append(f"{extrapolated}{common.short(row['seconds'])}{ratio}")
        slopes = fit["seconds"]
        spread = f"{np.median(slopes):.2f} ({min(slopes):.2f} - {max(slopes):.2f})"
        lines.append([system, *cells, spread, f"{fit['token_forwards'][0]:.2f}"])
    return common.paragraphs(
        setting,
        "\n".join(markdown_table(head, lines)),
        "Seconds, and in brackets those relative to `ours`; ~: a part of the calls was timed and "
        "scaled to all.",
        common.ratios_only(result),
    )


def plot_lengths(rows: list[dict], title: str) -> bytes:
    """PNG of seconds over length, a line per system, both logarithmic."""
    figure, axes = new_figure()
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        lengths, seconds = [row["length"] for row in own], [row["seconds"] for row in own]
        axes.plot(lengths, seconds, marker="o", label=system)
    axes.set(yscale="log", xlabel="length", ylabel="seconds", title=title)
    log_x(axes, (row["length"] for row in rows))
    axes.grid(alpha=0.3)
    axes.legend()
    return png(figure)
