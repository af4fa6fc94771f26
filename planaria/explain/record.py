"""Reads what a run has written, however it ended: lines that are cut short or spoilt are counted and left out.

Everything is read as a stream, for a long run has millions of lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from planaria.errors import UsageError


@dataclass(slots=True)  # not frozen: that costs as much again as reading a line
class Entry:
    """A line of ``events.jsonl``. ``at``: unix seconds by the clock of whoever said it, so lines are kept in the order
    in which this node wrote them, and times are compared within a node alone."""

    at: float
    kind: str
    text: str
    group: int
    data: dict[str, Any]

    def number(self, name: str) -> int | None:
        try:
            return int(self.data[name])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    def numbers(self, name: str) -> tuple[int, ...]:
        words = str(self.data.get(name, "")).split(",")
        return tuple(int(word) for word in words if word.strip().isdecimal())


@dataclass(slots=True)
class Spoilt:
    """How many lines could not be read."""

    lines: int = 0


def entries(path: Path, spoilt: Spoilt) -> Iterator[Entry]:
    """Raises UsageError if there is no record at all."""
    with _opened(path) as file:
        yield from _entries(file, spoilt)


def follow(path: Path, spoilt: Spoilt) -> Iterator[Entry | None]:
    """Like ``entries``, and goes on when more is written: None says that for now there is no more. For ever."""
    rest = b""
    with _opened(path) as file:
        while True:
            *lines, rest = (rest + file.read(1 << 20)).split(b"\n")
            yield from _entries(iter(lines), spoilt)
            if not lines:
                yield None


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path.parent} is not the directory of a run: there is no {path.name} in it") from None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})") from None


def _entries(lines: Iterator[bytes] | Any, spoilt: Spoilt) -> Iterator[Entry]:
    for line in objects(lines, spoilt):
        at, kind, group, data = line.get("at"), line.get("kind"), line.get("group"), line.get("data")
        if not isinstance(at, (int, float)) or not isinstance(kind, str) or not isinstance(group, int):
            spoilt.lines += 1
            continue
        yield Entry(float(at), kind, str(line.get("text", "")), group, data if isinstance(data, dict) else {})


def objects(file: Iterator[bytes] | Any, spoilt: Spoilt) -> Iterator[dict[str, Any]]:
    for raw in file:
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            spoilt.lines += 1
            continue
        if isinstance(line, dict):
            yield line
        else:
            spoilt.lines += 1


@dataclass(slots=True)
class Turn:
    """What one group of this node did when a quorum came, by its own clock. None: it did not get so far, or its record
    says nothing of it. Of several ranks the last one counts, for all wait for it."""

    group: int
    heard: float | None = None
    formed: float | None = None
    rolled: float | None = None
    healed: float | None = None
    committed: float | None = None
    step: int | None = None  # that it worked on when the roll was called
    first: int | None = None  # the first commit under the quorum
    taken_over: tuple[int, ...] = ()
    received: bool = False  # it took the state in the healing
    broken: str = ""

    def take(self, line: dict[str, Any]) -> None:
        at, what = line.get("at"), line.get("what")
        if not isinstance(at, (int, float)):
            return
        match what:
            case "heard":
                self.heard = at if self.heard is None else min(self.heard, at)
            case "formed":
                self.formed = max(self.formed or at, at)
            case "rolled" if self.committed is None:  # at the end the roll is called once more
                self.rolled = max(self.rolled or at, at)
                more = line.get("taken_over")
                if isinstance(more, list):
                    self.taken_over = tuple(shard for shard in more if isinstance(shard, int))
                if isinstance(line.get("step"), int):
                    self.step = line["step"]
            case "healed" if self.committed is None:
                self.healed = max(self.healed or at, at)
                self.received = self.received or line.get("received") is True
                if isinstance(line.get("step"), int):
                    self.step = line["step"]
            case "committed":
                self.committed = at if self.committed is None else max(self.committed, at)
                if isinstance(line.get("step"), int):
                    self.first = line["step"]
            case "broken":
                self.broken = str(line.get("why", ""))
            case _:
                pass


@dataclass(slots=True)
class Turns:
    """Of all groups whose ranks ran on this node, by quorum."""

    by_quorum: dict[str, dict[tuple[int, str], Turn]] = field(default_factory=dict)

    def of(self, quorum: str) -> list[Turn]:
        return sorted(self.by_quorum.get(quorum, {}).values(), key=lambda turn: turn.group)


def turns(run: Path, spoilt: Spoilt) -> Turns:
    """From the ``quorums.jsonl`` of every rank. A file that is found twice, because a group's living ranks went on as
    its next incarnation, is read once."""
    found, seen = Turns(), set()
    for path in sorted([*run.glob("rg*/i*/quorums.jsonl"), *run.glob("rg*/i*/*/quorums.jsonl")]):
        group, life = path.relative_to(run).parts[:2]
        real = path.resolve()
        if real in seen or not group[2:].isdecimal():
            continue
        seen.add(real)
        try:
            with path.open("rb") as file:
                for line in objects(file, spoilt):
                    members = found.by_quorum.setdefault(str(line.get("quorum")), {})
                    members.setdefault((int(group[2:]), life), Turn(int(group[2:]))).take(line)
        except OSError:
            spoilt.lines += 1
    return found
