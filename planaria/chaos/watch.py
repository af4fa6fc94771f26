"""A run seen from outside: the pages, logs and processes that its directory leads to. Reads only;
changes nothing."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planaria.agent.proc import STOPPED, state_of
from planaria.core.messages import Event, Member, Phase, QuorumId
from planaria.errors import ProtocolError
from planaria.wire.page import Commit, PageView, ProgressPage

# Phases of a member that works in a quorum, as opposed to one that starts, waits or heals.
WORKING = frozenset({Phase.FORMING, Phase.COMPUTING, Phase.EXCHANGING, Phase.APPLYING})
# Far more than the clock by which Linux stamps what changes in a directory stands still.
_TICK_NS = 100_000_000


@dataclass(slots=True)
class Process:
    """One rank of an incarnation."""

    page: ProgressPage
    pidfd: int  # -1: the process was gone, or not this one, when its page was found

    @property
    def pid(self) -> int:
        return self.page.pid

    @property
    def alive(self) -> bool:
        if self.pidfd < 0:
            return False
        waiter = select.poll()
        waiter.register(self.pidfd, select.POLLIN)  # readable as soon as the process is dead, reaped or not
        return not waiter.poll(0)

    @property
    def stopped(self) -> bool:
        return self.alive and state_of(self.pid) in STOPPED

    def signal(self, signum: int) -> None:
        """ProcessLookupError if it is dead."""
        signal.pidfd_send_signal(self.pidfd, signum)

    def close(self) -> None:
        self.page.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


@dataclass(slots=True)
class Life:
    """One incarnation. What it does is what its rank 0 does; ``commits`` has all that was ever seen on that one's
    page, oldest first."""

    member: Member
    directory: Path
    view: PageView
    processes: dict[int, Process]  # those that were found, by rank
    commits: list[Commit] = field(default_factory=list)
    over: bool = False  # rank 0 is dead, and its page has been read to the end
    found_ns: int = 0  # when it was found, if its rank 0 is that of the life before: until then the page tells of that

    @property
    def page(self) -> ProgressPage:
        return self.processes[0].page

    @property
    def alive(self) -> bool:
        """A group that has lost a rank is lost."""
        return all(process.alive for process in self.processes.values())

    @property
    def stopped(self) -> bool:
        return self.alive and any(process.stopped for process in self.processes.values())

    def look(self) -> PageView:
        """The page as it is now, with its new commits added to ``commits``."""
        if self.over:
            return self.view
        self.over = not self.processes[0].alive  # asked first: what it wrote before its death is read below
        self.view = self.page.read()
        last = self.commits[-1].at_ns if self.commits else 0
        self.commits += [commit for commit in self.page.history() if commit.at_ns > last]
        return self.view

    def close(self) -> None:
        for process in self.processes.values():
            process.close()


class Watch:
    """All incarnations of one run, dead ones too. Call ``poll`` at least once for every 256 commits of a
    group.

    ``directories``: the log directories of the run, one for each of its agents.
    """

    def __init__(self, *directories: Path) -> None:
        self.directories = directories
        self.lives: dict[Member, Life] = {}
        self.step = 0  # steps committed by the job
        self.quorum = QuorumId(0, 0)  # the newest that any member works under
        self._newest: dict[int, Life] = {}
        self._places: dict[Path, tuple[int, list[tuple[Member, Path]]]] = {}  # by group's directory, as of its time
        self._tails = {directory: _Tail(directory / "events.jsonl") for directory in directories}
        self._agents: dict[Path, int] = {}

    def poll(self) -> None:
        """Find new incarnations and new commits."""
        for directory in self.directories:
            agent = self._agents.get(directory) or agent_pid(directory)
            if agent is None:
                continue  # without its agent's pid a process cannot be told from a stranger
            self._agents[directory] = agent
            for group in _listed(directory, "rg"):
                for member, path in self._lives_in(group):
                    self._find(member, path, agent)
        for life in self.lives.values():
            if not life.over:
                view = life.look()
                self.step, self.quorum = max(self.step, view.step), max(self.quorum, view.quorum)

    def _lives_in(self, group: Path) -> Iterator[tuple[Member, Path]]:
        """Those that are not over: after hours there may be thousands of others."""
        changed, places = self._places.get(group, (0, []))
        at = _changed(group)
        # A directory may change twice within one tick of the clock that stamps it.
        if at != changed or time.time_ns() - at < _TICK_NS:
            places = [(member, path) for path in _listed(group, "i") if (member := _member_of(path)) is not None]
            self._places[group] = at, places
        return ((m, path) for m, path in places if (life := self.lives.get(m)) is None or not life.over)

    def _find(self, member: Member, path: Path, agent: int) -> None:
        life = self.lives.get(member)
        if life is None:
            if (found := _open(path / "progress", agent)) is None:
                return
            before = self._newest.get(member.group)
            since = time.monotonic_ns() if before is not None and found.pid == before.page.pid else 0
            life = self.lives[member] = Life(member, path, found.page.read(), {0: found}, found_ns=since)
            if before is None or before.member < member:
                self._newest[member.group] = life
        for place in _listed(path, "rank"):
            rank = int(place.name.removeprefix("rank"))
            if rank not in life.processes and (found := _open(place / "progress", agent)) is not None:
                life.processes[rank] = found

    def newest(self) -> list[Life]:
        """The newest incarnation of every group, by group."""
        return [life for _, life in sorted(self._newest.items())]

    def life(self, group: int) -> Life | None:
        return self._newest.get(group)

    def settled(self) -> list[Life]:
        """Incarnations that certainly hold the state of the job and are at work, by group.

        A member counts when it runs, works under the newest quorum, and has itself committed the newest
        step or the one before (peers may be one commit apart for a moment). One that has just healed counts
        from its first commit on: too late rather than too early, for whoever kills relies on it. So does one of which
        a single rank was replaced, whose page still shows what it was before.
        """
        top, quorum = self.step, self.quorum
        found = []
        for life in self.newest():
            view = life.view
            current = view.phase in WORKING and view.quorum == quorum
            last = life.commits[-1] if life.commits else None
            if not current or last is None or last.step < top - 1 or last.at_ns < life.found_ns:
                continue
            if life.alive and not life.stopped:
                found.append(life)
        return found

    def events(self) -> list[Event]:
        """Events written since the last call, of all agents, in the order of their time."""
        fresh = [event for tail in self._tails.values() for event in tail.read()]
        return sorted(fresh, key=lambda event: event.at)

    def close(self) -> None:
        for life in self.lives.values():
            life.close()


def _listed(directory: Path, prefix: str) -> list[Path]:
    """None if what an earlier run has left there is being moved aside: there is nothing of this one yet."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [directory / name for name in names if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()]


def _changed(directory: Path) -> int:
    try:
        return os.stat(directory).st_mtime_ns
    except FileNotFoundError:
        return 0


def _open(path: Path, agent: int) -> Process | None:
    try:
        page = ProgressPage.open(path)
    except (FileNotFoundError, ProtocolError):
        return None  # being replaced at this moment, or not ours
    return Process(page, open_child(page.pid, agent))


class _Tail:
    """Follows a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1  # the last line may be half written
        self._offset += whole
        return [event for line in data[:whole].splitlines() if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        raw: dict[str, Any] = json.loads(line)
        return Event(float(raw["at"]), str(raw["kind"]), str(raw["text"]), int(raw.get("group", -1)))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # events are for people: a line that cannot be read is left out


def _member_of(directory: Path) -> Member | None:
    try:
        return Member(int(directory.parent.name.removeprefix("rg")), int(directory.name.removeprefix("i")))
    except ValueError:
        return None


def read_run(directory: Path) -> dict[str, Any] | None:
    """``run.json`` of a run directory; None if it is not there yet."""
    with suppress(FileNotFoundError, ValueError):
        raw = json.loads((directory / "run.json").read_text())
        return raw if isinstance(raw, dict) else None
    return None


def agent_pid(directory: Path) -> int | None:
    """The pid of the agent that writes this run directory; None before it has said so."""
    raw = read_run(directory)
    return None if raw is None else int(raw.get("pid") or 0) or None


def parent_of(pid: int) -> int:
    """Parent of a process; 0 if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[1])


def open_child(pid: int, parent: int) -> int:
    """A pidfd of ``pid`` if it is a child of ``parent``, else -1.

    The pidfd stays with that very process: a signal sent through it cannot hit another that got the same
    number. The parent is asked after it was opened, so what it says is about the process behind it. Every
    rank is a child of its agent.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return -1
    if parent_of(pid) == parent:
        return descriptor
    os.close(descriptor)
    return -1


def children_of(pid: int) -> list[int]:
    """Pids of the children of another process."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):
                found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone."""
    try:
        return [word.decode(errors="replace") for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []
