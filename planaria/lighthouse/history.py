"""What a job's past looks like from the lighthouse, in bounded memory: for weeks, and a thousand groups.

It begins with this life of the lighthouse, for nothing of it is stored. No clock is read here: ``at`` is unix seconds,
which people read, and ``now`` is seconds of a clock that never jumps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from planaria.core.messages import Event, Member, Pulse

T = TypeVar("T")

ROWS = 1024  # of a curve: more than a screen has pixels for
# The newest rows may still change: heartbeats of different groups come up to a second apart, and a step may take 10 ms.
OPEN = 128
MARKS = 2048  # on the timeline; the oldest are forgotten
COMMITS = 4096  # the newest, one by one; those before are seen in the curve of progress

# What an event means on the timeline. The others are read, not drawn.
LANES = {
    **dict.fromkeys(("late", "trouble", "still", "corrupt", "diverged"), "interrupt"),
    "quorum": "quorum",
    "plan": "plan",
    "resume": "resume",
    "saved": "checkpoint",
}


# A group that is lost interrupts the others if it was one of them. The next quorum says so: an agent that comes back to
# a new lighthouse tells of deaths that are long past, and a joiner may die before it has joined.
SIGNS = frozenset({"lost", "suspect", "evict", "refuse"})


@dataclass(slots=True)
class Row:
    """The values between one ``x`` and the next."""

    x: float  # of the first
    count: int
    total: float
    least: float
    most: float


class Curve:
    """Values over a rising ``x`` in at most ``limit`` rows. When they would be more, each becomes twice as wide."""

    def __init__(self, width: float, limit: int = ROWS) -> None:
        self.rows: list[Row] = []
        self.width = width
        self.version = 0  # changes when rows have changed that are not the newest
        self._limit = limit

    def add(self, x: float, value: float) -> None:
        """Values that are no numbers are left out, and so are those that come too late."""
        if not math.isfinite(value):
            return
        place = self._place(x)
        if place < len(self.rows) and self._key(self.rows[place].x) == self._key(x):
            row = self.rows[place]
            row.count, row.total = row.count + 1, row.total + value
            row.least, row.most = min(row.least, value), max(row.most, value)
        elif place >= len(self.rows) - OPEN // 2:
            self.rows.insert(place, Row(x, 1, value, value, value))
            while len(self.rows) > self._limit:  # of values that are far apart few may fall together
                self._widen()

    def cut(self, x: float) -> None:
        """What came at ``x`` and after it did not happen after all."""
        kept = [row for row in self.rows if row.x < x]
        if len(kept) < len(self.rows):
            self.rows, self.version = kept, self.version + 1

    def since(self, version: int, count: int) -> tuple[int, list[list[float]]]:
        """For somebody who has ``count`` rows of ``version``: from which row on they are to be replaced, and by what:
        [x, mean, least, most]."""
        start = max(0, min(count, len(self.rows)) - OPEN) if version == self.version else 0
        return start, [[row.x, _short(row.total / row.count), row.least, row.most] for row in self.rows[start:]]

    def _key(self, x: float) -> int:
        return math.floor(x / self.width)

    def _place(self, x: float) -> int:
        if not self.rows or self._key(x) > self._key(self.rows[-1].x):  # nearly always, and looked up for each pulse
            return len(self.rows)
        return bisect_left(self.rows, self._key(x), key=lambda row: self._key(row.x))

    def _widen(self) -> None:
        self.width, self.version = 2 * self.width, self.version + 1
        merged: list[Row] = []
        for row in self.rows:
            if merged and self._key(merged[-1].x) == self._key(row.x):
                last = merged[-1]
                last.count, last.total = last.count + row.count, last.total + row.total
                last.least, last.most = min(last.least, row.least), max(last.most, row.most)
            else:
                merged.append(row)
        self.rows = merged


@dataclass(frozen=True, slots=True)
class Mark:
    """On the timeline. ``until``: when it was over; None for what takes no time. ``step``: steps committed by then."""

    number: int
    lane: str
    at: float
    until: float | None
    group: int  # -1: none in particular
    step: int
    text: str


class History:
    """Of one job. Everything is O(1) for each report, but ``account``, which its caller asks for once a second."""

    def __init__(self, at: float) -> None:
        self.began = at
        self.loss = Curve(1.0)  # over steps
        self.progress = Curve(1.0)  # steps over seconds since ``began``
        self.marks: deque[Mark] = deque(maxlen=MARKS)
        self.marked = 0  # marks so far
        self.commits: deque[tuple[float, int]] = deque(maxlen=COMMITS)
        self.committed_count = 0
        self.group_seconds: defaultdict[str, float] = defaultdict(float)  # by condition
        self.losses = 0  # of groups at work
        self._accounted: float | None = None
        self._signs: dict[int, Event] = {}  # by group: the first, of a loss that the next quorum may tell of
        self._away: dict[int, float] = {}  # since when a group is lost

    def heard(self, pulses: Iterable[Pulse]) -> None:
        """A heartbeat."""
        for pulse in pulses:
            if pulse.step:
                self.loss.add(pulse.step, pulse.loss)

    def committed(self, step: int, at: float) -> None:
        """Nobody had got as far before."""
        self.commits.append((at, step))
        self.committed_count += 1
        self.progress.add(max(at - self.began, 0.0), step)

    def event(self, event: Event, step: int) -> None:
        """``step``: steps committed by then."""
        facts = dict(event.data)
        if event.kind in SIGNS:
            self._signs.setdefault(event.group, event)
        elif event.kind == "quorum":
            self._lost((int(group) for group in facts.get("lost", "").split(",") if group.isdecimal()), event, step)
        elif event.kind in ("resume", "stop"):
            self._lost(tuple(self._signs), event, step)
        if event.kind == "resume":
            self.loss.cut(step + 1)
        if (lane := LANES.get(event.kind)) is not None:
            self._mark(lane, event.at, None, event.group, step, event.text)

    def _lost(self, groups: Iterable[int], told: Event, step: int) -> None:
        for group in groups:
            sign = self._signs.pop(group, None)
            at, text = (
                (sign.at, sign.text) if sign is not None else (told.at, f"group {group} is left out: {told.text}")
            )
            self._mark("interrupt", at, None, group, step, text)
            self._away.setdefault(group, at)
            self.losses += 1

    def adopted(self, member: Member, at: float, step: int) -> None:
        """It works under the quorum in force."""
        self._signs.pop(member.group, None)
        since = self._away.pop(member.group, None)
        if since is not None:
            text = f"group {member.group} was away for {seconds_in_words(at - since)}, healed, and works again"
            self._mark("away", since, at, member.group, step, text)

    def recovered(self, seconds: float, members: int, at: float, step: int, text: str) -> None:
        """All members of a quorum work under it, ``seconds`` after the first sign of the loss that led to it."""
        self._mark("recovery", at - seconds, at, -1, step, text)
        # They were taken to be working meanwhile, and were not.
        lost = min(seconds * members, self.group_seconds["working"])
        self.group_seconds["working"] -= lost
        self.group_seconds["interrupted"] += lost

    def due(self, now: float) -> bool:
        """Whether it is time to ``account``."""
        return self._accounted is None or now - self._accounted >= 1.0

    def account(self, conditions: Mapping[str, int], now: float) -> None:
        """``conditions``: how many groups are in each, as they were since the last time."""
        if self._accounted is not None:
            passed = now - self._accounted
            for condition, groups in conditions.items():
                self.group_seconds[condition] += groups * passed
        self._accounted = now

    def marks_since(self, number: int) -> list[Mark]:
        """Those after the first ``number``, as far as they are kept."""
        return _newest(self.marks, self.marked - number)

    def commits_since(self, number: int) -> list[tuple[float, int]]:
        return _newest(self.commits, self.committed_count - number)

    def _mark(self, lane: str, at: float, until: float | None, group: int, step: int, text: str) -> None:
        self.marks.append(Mark(self.marked, lane, at, until, group, step, text))
        self.marked += 1


def _newest(kept: deque[T], wanted: int) -> list[T]:
    # From the end: what is new is little, and what is kept is much.
    wanted = min(max(wanted, 0), len(kept))
    return [kept[index] for index in range(-wanted, 0)]


def seconds_in_words(seconds: float) -> str:
    """Of recoveries, which take a fraction of a second, or many."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def _short(value: float) -> float:
    """Of a mean: more digits are noise, and travel every second."""
    return float(f"{value:.6g}")
