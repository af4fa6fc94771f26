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
from itertools import takewhile
from typing import TypeVar

from planaria.core.messages import Event, Member, Pulse

T = TypeVar("T")

ROWS = 1024  # of a curve: more than a screen has pixels for
# The newest rows may still change: heartbeats of different groups come up to a second apart, and a step may take 10 ms.
OPEN = 128
# On each lane of the timeline; the oldest are forgotten. Checkpoints, of which there are many, push no loss out.
MARKS = 512
TROUBLE_APART = 1.0  # seconds; of warnings that come closer together one is drawn
COMMITS = 4096  # the newest, one by one; those before are seen in the curve of progress
LARGEST = 1e200  # of values: sums of any number of them are finite, and beyond it no loss says anything
SAMPLES = 256  # of the time at work, one a second or more: longer than a recovery takes

# What an event means on the timeline. The others are read, not drawn. (What is lost is told by a quorum, see SIGNS.)
LANES = {
    **dict.fromkeys(("late", "trouble", "still", "corrupt", "diverged"), "trouble"),
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
        """Values that are no numbers are left out, and so are those that are absurd or come too late."""
        if not abs(value) <= LARGEST:
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
        return start, [[row.x, short(row.total / row.count), row.least, row.most] for row in self.rows[start:]]

    def _key(self, x: float) -> int:
        return math.floor(x / self.width)

    def _place(self, x: float) -> int:
        if not self.rows:
            return 0
        key, last = self._key(x), self._key(self.rows[-1].x)
        if key >= last:  # nearly always, and looked up for each pulse
            return len(self.rows) - (key == last)
        return bisect_left(self.rows, key, key=lambda row: self._key(row.x))

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

    number: int  # of all marks of the job, in the order in which they were made
    lane: str
    at: float
    until: float | None
    group: int  # -1: none in particular
    step: int
    text: str


class History:
    """Of one job. A report costs O(1) for each of its pulses, but for late ones, which look for their place in a curve,
    and for one in hundreds, which makes a curve coarser. ``account`` is asked for once a second."""

    def __init__(self, at: float, now: float) -> None:
        self.began = at
        self._began = now
        self.loss = Curve(1.0)  # over steps
        self.progress = Curve(1.0)  # steps over seconds since ``began``
        self.marked = 0  # marks so far
        self._lanes: defaultdict[str, deque[Mark]] = defaultdict(lambda: deque(maxlen=MARKS))
        self.commits: deque[tuple[float, int]] = deque(maxlen=COMMITS)
        self.committed_count = 0
        self.group_seconds: defaultdict[str, float] = defaultdict(float)  # by condition
        self.losses = 0  # of groups at work
        self._sampled: float | None = None
        self._conditions: Mapping[str, int] = {}  # at that time
        # When, and the seconds that groups had worked by then: what is found to be interrupted later is not taken away.
        self._worked: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._inside: set[int] = set()  # groups that take part in the quorum in force
        self._signs: dict[int, Event] = {}  # by group: the first, of a loss that the next quorum may tell of
        self._away: dict[int, float] = {}  # since when a group is lost

    def heard(self, pulses: Iterable[Pulse]) -> None:
        """A heartbeat."""
        for pulse in pulses:
            if pulse.step:
                self.loss.add(pulse.step, pulse.loss)

    def committed(self, step: int, at: float, now: float) -> None:
        """Nobody had got as far before, or since the job went back to a checkpoint."""
        self.commits.append((at, step))
        self.committed_count += 1
        self.progress.add(now - self._began, step)  # a clock that is set back would hide all until it has caught up

    def event(self, event: Event, step: int) -> None:
        """``step``: steps committed by then."""
        facts = dict(event.data)
        if event.kind in SIGNS:
            self._signs.setdefault(event.group, event)
        elif event.kind == "ready":  # its next life: what was said of the last one led to nothing
            self._signs.pop(event.group, None)
        elif event.kind == "quorum":
            lost = _numbers(facts.get("lost", ""))
            self._lost(lost, event, step)
            self._inside = (self._inside - lost) | _numbers(facts.get("joined", ""))
        elif event.kind == "plan":  # whoever joins by it says so (``adopted``)
            self._inside -= _numbers(facts.get("lost", ""))
        elif event.kind in ("resume", "stop"):
            self._lost(self._inside & self._signs.keys(), event, step)
            self._inside, self._signs = set(), {}
        if event.kind == "resume":
            self.loss.cut(step + 1)
        if (lane := LANES.get(event.kind)) is not None and not self._crowded(lane, event.at):
            self._mark(lane, event.at, None, event.group, step, event.text)

    def _crowded(self, lane: str, at: float) -> bool:
        """Whether a warning would be drawn on top of the one before."""
        return lane == "trouble" and bool(marks := self._lanes[lane]) and 0 <= at - marks[-1].at < TROUBLE_APART

    def _lost(self, groups: Iterable[int], told: Event, step: int) -> None:
        for group in sorted(groups):
            sign = self._signs.pop(group, None)
            at, text = (
                (sign.at, sign.text) if sign is not None else (told.at, f"group {group} is left out: {told.text}")
            )
            self._mark("interrupt", at, None, group, step, text)
            self._away.setdefault(group, at)
            self.losses += 1

    def adopted(self, member: Member, at: float, step: int) -> None:
        """It works under the quorum in force."""
        self._inside.add(member.group)
        self._signs.pop(member.group, None)
        since = self._away.pop(member.group, None)
        if since is not None:
            text = f"group {member.group} was away for {seconds_in_words(at - since)}, healed, and works again"
            self._mark("away", since, at, member.group, step, text)

    def recovered(self, seconds: float, members: int, now: float, at: float, step: int, text: str) -> None:
        """All members of a quorum work under it, ``seconds`` after the first sign of the loss that led to it."""
        self._mark("recovery", at - seconds, at, -1, step, text)
        self._book(now)
        # Where they were taken to be working meanwhile they were not. Where they were seen to form or heal, that stays.
        taken = self._worked[-1][1] - self._worked_by(now - seconds) if self._worked else 0.0
        lost = min(seconds * members, taken, self.group_seconds["working"])
        self.group_seconds["working"] -= lost
        self.group_seconds["interrupted"] += lost

    def due(self, now: float) -> bool:
        """Whether it is time to ``account``."""
        return self._sampled is None or now - self._sampled >= 1.0

    def account(self, conditions: Mapping[str, int], now: float) -> None:
        """``conditions``: how many groups are in each, from now on until the next time."""
        self._book(now)
        self._sampled, self._conditions = now, conditions

    def _book(self, now: float) -> None:
        """The time that has passed went into what was found at its beginning."""
        last, worked = self._worked[-1] if self._worked else (now, 0.0)
        for condition, groups in self._conditions.items():
            self.group_seconds[condition] += groups * (now - last)
        self._worked.append((now, worked + self._conditions.get("working", 0) * (now - last)))

    def _worked_by(self, then: float) -> float:
        """Between two samples all is even. What is older than the oldest counts as that."""
        after, worked = self._worked[-1]
        for before, less in reversed(self._worked):
            if before <= then:
                share = (then - before) / (after - before) if after > before else 0.0
                return less + share * (worked - less)
            after, worked = before, less
        return worked

    def marks_since(self, number: int) -> list[Mark]:
        """Those after the first ``number``, as far as they are kept."""
        found: list[Mark] = []
        for lane in self._lanes.values():
            found += takewhile(lambda mark: mark.number >= number, reversed(lane))
        return sorted(found, key=lambda mark: mark.number)

    def commits_since(self, number: int) -> list[tuple[float, int]]:
        return _newest(self.commits, self.committed_count - number)

    def _mark(self, lane: str, at: float, until: float | None, group: int, step: int, text: str) -> None:
        self._lanes[lane].append(Mark(self.marked, lane, at, until, group, step, text))
        self.marked += 1


def _newest(kept: deque[T], wanted: int) -> list[T]:
    # From the end: what is new is little, and what is kept is much.
    wanted = min(max(wanted, 0), len(kept))
    return [kept[index] for index in range(-wanted, 0)]


def seconds_in_words(seconds: float) -> str:
    """Of recoveries, which take a fraction of a second, or many."""
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


def short(value: float) -> float:
    """Of a mean: more digits are noise, and travel every second."""
    return float(f"{value:.6g}")


def _numbers(text: str) -> set[int]:
    """Groups in the facts of an event: "1,2"."""
    return {int(group) for group in text.split(",") if group.isdecimal()}
