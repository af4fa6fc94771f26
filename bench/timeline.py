"""From the workers' logs to figures: pure functions over lives, and the reader that follows the files.

All times are seconds of CLOCK_MONOTONIC. A **life** is one process of one group, from its start to its end.
The rules are the same for every contestant and use nothing that a library says about itself except "this
attempt was committed" and "I took part".
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Commit:
    step: int
    at: float
    samples: int  # that went into the update, from the reduced gradient of workload.Counted
    took_part: bool


@dataclass
class Life:
    group: int
    pid: int = 0
    started: float = 0.0
    commits: list[Commit] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)  # when the next attempt began
    crashed: float | None = None
    error: str = ""
    _open: bool = False  # an attempt is under way

    def feed(self, line: str) -> None:
        """Take in one complete line of the log (written by workload.CommitLog)."""
        kind, first, rest = line.split(" ", 2)
        if kind == "start":
            self.pid, self.started = int(first), int(rest) / 1e9
        elif kind == "attempt":
            if self._open:
                self.discarded.append(int(rest) / 1e9)
            self._open = True
        elif kind == "commit":
            at, samples, took_part = rest.split()
            if self.commits and int(first) <= self.commits[-1].step:
                self.discarded.append(int(at) / 1e9)  # a step taken back and done again
            self.commits.append(Commit(int(first), int(at) / 1e9, int(samples), took_part == "1"))
            self._open = False
        elif kind == "crash":
            stamp, error = rest.split(" ", 1)
            self.crashed, self.error = int(stamp) / 1e9, json.loads(error)
        else:
            raise ValueError(f"unknown line in a commit log: {line!r}")

    def until(self, at: float) -> int:
        """How many commits were made at ``at`` or before. A bisection: runs have 100,000 commits, and the benchmark
        that looks at them shares the cores with what it measures."""
        return bisect_right(self.commits, at, key=lambda c: c.at)

    def since(self, start: float, end: float = float("inf")) -> list[Commit]:
        return self.commits[self.until(start) : self.until(end)]


class Logs:
    """Follows the logs of one run as they grow; ``lives[group]`` is in order of birth."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lives: dict[int, list[Life]] = {}
        self._known: dict[str, tuple[Life, int]] = {}  # file name -> its life and how far it has been read

    def poll(self) -> None:
        for path in sorted(self.directory.glob("life.*"), key=lambda p: int(p.name.split(".")[2])):
            if path.name not in self._known:
                life = Life(int(path.name.split(".")[1]))
                self.lives.setdefault(life.group, []).append(life)
                self._known[path.name] = (life, 0)
            life, offset = self._known[path.name]
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            complete = text.rfind(b"\n") + 1  # a process killed in the middle of a line leaves a piece of it
            for line in text[:complete].decode().splitlines():
                life.feed(line)
            self._known[path.name] = (life, offset + complete)

    def newest(self, group: int) -> Life | None:
        lives = self.lives.get(group)
        return lives[-1] if lives else None

    def all(self) -> list[Life]:
        return [life for lives in self.lives.values() for life in lives]


def next_commit(commits: Sequence[float], at: float) -> float | None:
    """When the commit came that a loss at ``at`` held up, by a survivor's commit times; None if not known
    yet.

    The step in flight may be committed with the victim's contribution, when that was already on the wire;
    then it is the step after it that is held up. So of the first two gaps after the last commit before the
    loss, the longer one is taken: that never makes a contestant look better than it is.
    """
    before = [c for c in commits if c <= at]
    after = [c for c in commits if c > at][:2]
    if not before or len(after) < 2:
        return None
    last = [before[-1], *after]
    return max(pairwise(last), key=lambda gap: gap[1] - gap[0])[1]


@dataclass(frozen=True)
class Loss:
    """What one lost group cost. Seconds count from the kill."""

    first: float  # next commit by the fastest survivor
    slowest: float  # next commit by the slowest survivor; one that crashed counts from its next life
    crashed: int  # survivors that ended too
    discarded: int  # attempts of survivors that were thrown away until then, all survivors together
    samples_lost: int  # missing in the steps committed until full strength, plus those of the discarded attempts
    back: float  # until the killed group takes part in a commit again


def survivor_recovery(lives: Sequence[Life], at: float) -> float | None:
    """When this survivor was through the loss at ``at``, as a time; None if it is not yet."""
    living = [life for life in lives if life.started <= at]
    if living:
        here = living[-1].until(at)
        found = next_commit([c.at for c in living[-1].commits[max(0, here - 1) : here + 2]], at)
        if found is not None:
            return found
    return take_part_again(lives, at)


def take_part_again(lives: Sequence[Life], at: float) -> float | None:
    """When a group whose process was killed at ``at`` first took part in a commit again; None if it has not yet."""
    return next((c.at for life in lives if life.started > at for c in life.commits if c.took_part), None)


def loss(lives: dict[int, list[Life]], victim: int, at: float, full: int) -> Loss | None:
    """Judge the kill of ``victim`` at ``at``; ``full`` = samples of a step at full strength. None: not over
    yet."""
    back = take_part_again(lives[victim], at)
    survivors = {group: of for group, of in lives.items() if group != victim}
    through = [survivor_recovery(of, at) for of in survivors.values()]
    times = [t for t in through if t is not None]
    if back is None or not times or len(times) < len(through):
        return None
    everyone = [life for of in survivors.values() for life in of]
    crashed = sum(1 for of in survivors.values() if any(at < life.started for life in of))
    discarded = sum(1 for life in everyone for t in life.discarded if at < t <= max(times))
    # Not the lives begun since: a joiner's own first attempts belong to nobody's batch.
    share = full // len(lives)
    thrown = sum(share for life in everyone if life.started <= at for t in life.discarded if at < t <= back)
    lost = missing(everyone, at, back, full) + thrown
    return Loss(min(times) - at, max(times) - at, crashed, discarded, lost, back - at)


def once(lives: Iterable[Life], start: float, end: float) -> dict[int, int]:
    """Samples of each step committed in (start, end], each step counted once whoever committed it and however
    often.

    If a step was first committed before ``start`` it is not counted again.
    """
    everyone = list(lives)
    samples: dict[int, int] = {}
    for c in (c for life in everyone for c in life.since(start, end)):
        samples[c.step] = max(samples.get(c.step, 0), c.samples)
    lowest = min(samples, default=0)
    for life in everyone:
        for c in reversed(life.commits[: life.until(start)]):
            if c.step < lowest:
                break  # steps of a life rise, but for steps taken back
            samples.pop(c.step, None)
    return samples


def missing(lives: Iterable[Life], start: float, end: float, full: int) -> int:
    """Samples that the steps committed in (start, end] should have had and did not."""
    return sum(full - n for n in once(lives, start, end).values())


def samples_per_second(lives: Iterable[Life], start: float, end: float) -> float:
    return sum(once(lives, start, end).values()) / (end - start)


def step_seconds(lives: Iterable[Life], start: float, end: float) -> list[float]:
    """Seconds between commits one after the other, of all lives, inside (start, end]."""
    return [b.at - a.at for life in lives for a, b in pairwise(life.since(start, end))]


def steady(lives: dict[int, list[Life]], groups: int, since: float, commits: int, full: int) -> bool:
    """Whether every group has made ``commits`` commits at full strength since ``since``."""
    newest = [lives[group][-1] for group in range(groups) if lives.get(group)]
    return len(newest) == groups and all(
        sum(1 for c in life.since(since) if c.took_part and c.samples == full) >= commits for life in newest
    )
