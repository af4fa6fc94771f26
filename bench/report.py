"""Figures and tables for people, and what one must know of the machine to believe them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over its repetitions."""

    n: int
    median: float
    low: float
    high: float

    def text(self, digits: int = 2, scale: float = 1.0) -> str:
        if not self.n:
            return "-"
        low, median, high = (f"{v * scale:.{digits}f}" for v in (self.low, self.median, self.high))
        return f"{median} ({low}..{high})"


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0, float("nan"), float("nan"), float("nan"))
    return Spread(len(values), statistics.median(values), min(values), max(values))


def paired_ratios(values: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Ratio to the base within each round that both have: what changes between rounds drops out."""
    return [values[r] / base[r] for r in sorted(values) if r in base]


def rank_mean(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per step, the mean over ranks. Ranks wait for each other in each step, so their means over a block
    agree; the slowest rank of each step would count the same delay twice when the ranks take turns at being
    late."""
    return [statistics.fmean(step) for step in zip(*per_rank, strict=True)]


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The order of a round: everybody is first once, so that no one always runs on a warm or a throttled
    machine."""
    shift = round_number % len(names) if names else 0
    return [*names[shift:], *names[:shift]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it can be read as it is."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)])


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def environment(peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What was measured where: recorded at the start of each benchmark. ``peers``: versions in torchft's
    venv."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "planaria")},
    }
    if peers:
        found["torchft"] = next((v for k, v in peers.items() if k.startswith("torchft")), "?")
        if peers.get("torch") != found["torch"]:
            found["torch_of_torchft"] = peers.get("torch", "?")
    return found


def header(found: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in found.items())


def busy_seconds() -> float:
    """CPU seconds used on this machine since boot by processes of normal priority (niced ones yield to us)."""
    times = psutil.cpu_times()
    parts = ("user", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in parts))


def own_seconds() -> float:
    """CPU seconds of this process and of all that it started, ended ones included if their parents waited for
    them."""
    me, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    total = me.ru_utime + me.ru_stime + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            total += sum(child.cpu_times()[:4])  # user, system, and those of the children it waited for
        except psutil.NoSuchProcess:
            continue
    return total


class LoadWatch:
    """The share of the machine that *others* used while we measured. Above a few per cent, believe nothing."""

    def __init__(self) -> None:
        self._busy, self._own, self._wall = busy_seconds(), own_seconds(), time.monotonic()

    def others(self) -> float:
        wall = (time.monotonic() - self._wall) * (os.cpu_count() or 1)
        used = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        return max(0.0, used) / wall if wall > 0 else 0.0


def write_json(path: str, value: Any) -> None:
    part = Path(path + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.rename(path)
