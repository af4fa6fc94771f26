"""Does a process grow with what happens to it? Samples over time, and a test of their slope.

What a process holds goes up and down, and rises once while it warms up; a leak goes on. So the first third of a
process's samples is left out, the rest is cut into equal spans of events, and of the spans' medians Kendall's test says
whether they rise by chance (M. G. Kendall, 1938; exact for so few), and Theil and Sen's estimator by how much an event
(P. K. Sen, 1968). Both stand a few wild samples.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SPANS = 12
# Of spans that do not rise, so many are said to; some hundred tests are made of a long run.
CHANCE = 1e-4
WARM = 1 / 3  # of a process's samples
# The allocators' arenas of a rank fill for longer than that: over fewer events a rise of memory is shown, and no more.
MEMORY_EVENTS = 100
# An event that costs less does not matter in a month with one a minute (43,200): 860 files, 860 MB.
ALLOWED = {"files": 0.02, "sockets": 0.02, "threads": 0.02, "memory": 20.0, "shared": 0.02}  # memory in KiB


@dataclass(frozen=True, slots=True)
class Sample:
    """``events``: how many things had gone wrong by then."""

    events: int
    files: int
    sockets: int
    threads: int
    memory: int  # KiB that are this process's own
    shared: int  # pieces of shared memory


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one quantity of one process. ``slope``: per event. ``chance`` of as much of a rise if there is none."""

    what: str
    first: float
    last: float
    events: int
    slope: float
    chance: float

    @property
    def leaks(self) -> bool:
        enough = self.what != "memory" or self.events >= MEMORY_EVENTS
        return enough and self.chance < CHANCE and self.slope > ALLOWED[self.what]


def sample(pid: int, events: int) -> Sample | None:
    """None if there is no such process any more."""
    try:
        facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        links = [_link(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if "RssAnon" not in facts:
        return None  # it is ending: its memory is gone
    shared = sum("/dev/shm/" in line or "/memfd:" in line for line in maps)
    memory = int(facts["RssAnon"].split()[0])
    sockets = sum(link.startswith("socket:") for link in links)
    return Sample(events, len(links), sockets, int(facts["Threads"]), memory, shared)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # closed since it was listed


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Of every quantity; empty if there is too little to tell."""
    kept = list(samples)[int(len(samples) * WARM) :]
    spans = _spans(kept)
    if len(spans) < SPANS:
        return []
    found = []
    for what in ALLOWED:
        xs = [statistics.fmean(each.events for each in span) for span in spans]
        ys = [statistics.median(getattr(each, what) for each in span) for span in spans]
        events = kept[-1].events - kept[0].events
        found.append(Growth(what, ys[0], ys[-1], events, sen_slope(xs, ys), kendall_chance(ys)))
    return found


def _spans(samples: Sequence[Sample]) -> list[list[Sample]]:
    """As many samples in each, and each with events of its own."""
    if len(samples) < 2 * SPANS or samples[-1].events - samples[0].events < SPANS:
        return []
    edges = [round(number * len(samples) / SPANS) for number in range(SPANS + 1)]
    return [list(samples[low:high]) for low, high in itertools.pairwise(edges)]


def sen_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points."""
    pairs = itertools.combinations(zip(xs, ys, strict=True), 2)
    return statistics.median([(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairs if x1 != x0] or [0.0])


def kendall_chance(ys: Sequence[float]) -> float:
    """How likely values in random order rise at least as clearly as these. Equal ones count for neither side, which
    makes it greater than it is."""
    pairs = itertools.combinations(ys, 2)
    rises = sum((late > early) - (late < early) for early, late in pairs)
    n = len(ys)
    inversions = (n * (n - 1) // 2 - rises) // 2  # of an order with so many more rises than falls
    orders = _orders(n)
    return sum(orders[: inversions + 1]) / sum(orders)


@cache
def _orders(n: int) -> tuple[int, ...]:
    """How many orders of ``n`` things have 0, 1, 2, … inversions (MacMahon)."""
    counts = [1]
    for size in range(2, n + 1):
        longer = [0] * (len(counts) + size - 1)
        for at, count in enumerate(counts):
            for more in range(size):
                longer[at + more] += count
        counts = longer
    return tuple(counts)
