"""The machine that a benchmark runs on, and how its figures are shown."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def short(value: float) -> str:
    """Three digits, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_range(middle: float, low: float, high: float) -> str:
    """The middle, and the least and largest behind it."""
    return f"{short(middle)} ({short(low)} - {short(high)})"
