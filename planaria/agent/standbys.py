"""Standbys: processes of no group that wait, warm, for a rank to be lost.

Each of them has run the script up to its first step and tried that (see ``planaria.torch.rehearsal``), so imports,
devices, kernels and allocators are ready. The one that is taken becomes a rank, and another is prepared.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.core import plan as planning
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED
from planaria.core.messages import STANDBYS, Cast, Member
from planaria.engines.base import Ended, Started
from planaria.engines.launch import directory_of

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


@dataclass(slots=True)
class Standby:
    number: int
    rank: int  # as which it tries itself: quickest where it takes this rank's place
    pid: int = 0
    warm: bool = False

    @property
    def member(self) -> Member:
        return Member(STANDBYS, self.number)


class Standbys:
    """Keeps ``agent.assignment.standbys`` of them. On the event loop's thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._living: dict[int, Standby] = {}
        self._next = 0
        self._failures = 0  # in a row
        self._due = 0.0  # no earlier one is started
        self.given_up = False  # the script cannot have any

    @property
    def warm(self) -> int:
        return sum(each.warm for each in self._living.values())

    def tick(self, now: float) -> None:
        """Start what is missing; but groups that come (or come back) are to train as soon as they can."""
        agent, lives = self._agent, self._agent.lives.alive()
        if (
            self.given_up
            or agent.ending
            or agent.closing.node
            or now < self._due
            or not lives
            or not all(x.settled for x in lives)
        ):
            return
        wanted = max(agent.assignment.standbys, min(agent.moves.waiting, 1))
        for number in sorted(self._living)[wanted:]:  # prepared for a move that nobody needs any more
            del self._living[number]
            agent.engine.delete(STANDBYS, number, signal.SIGKILL)
        while len(self._living) < wanted:
            tried = [each.rank for each in self._living.values()]
            rank = min(range(agent.assignment.ranks), key=lambda rank: (tried.count(rank), rank))
            if not agent.engine.prepare(self._next, rank):
                agent.moves.give_up("there is no device for another process on this node (see --standbys)")
                return
            self._living[self._next] = Standby(self._next, rank)
            self._next += 1

    def take(self, rank: int) -> Standby | None:
        """A warm one for a lost ``rank``, the best there is. The caller says ``taken`` if it is used."""
        warm = [each for each in self._living.values() if each.warm]
        return min(warm, key=lambda each: (each.rank != rank, each.number), default=None)

    def taken(self, standby: Standby, member: Member, rank: int) -> None:
        """The engine knows it as ``rank`` of ``member`` now: tell it so."""
        del self._living[standby.number]
        environ = tuple(sorted(self._agent.engine.environ_of(member, rank).items()))
        self._agent.hub.send(standby.member, Cast(member, rank, environ))
        self._agent.hub.forget(standby.member)

    # --- news ------------------------------------------------------------------------------------------------

    def knows(self, member: Member) -> bool:
        return member.group == STANDBYS and member.incarnation in self._living

    def started(self, change: Started) -> None:
        if (standby := self._living.get(change.member.incarnation)) is not None:
            standby.pid = change.pid
            facts = {"pid": change.pid, "rank": standby.rank}
            self._agent.events.add("standby", f"{standby.member} runs as pid {change.pid}", data=facts)

    def present(self, member: Member) -> None:
        if (standby := self._living.get(member.incarnation)) is not None:
            standby.warm, self._failures = True, 0
            self._agent.beat_soon()  # others may want to move here
            text = f"{member} is warm; it tried itself as rank {standby.rank}"
            self._agent.events.add("standby", text, data={"pid": standby.pid, "rank": standby.rank})

    def ended(self, change: Ended) -> None:
        agent, standby = self._agent, self._living.pop(change.member.incarnation, None)
        agent.hub.forget(change.member)
        if standby is None or agent.ending:
            return
        said = ""
        directory = directory_of(agent.assignment.directory, change.member)
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            said = str(json.loads((directory / "error.json").read_text())["message"])
        if not standby.warm:
            self._failures += 1
        self._due = time.monotonic() + planning.backoff(agent.assignment.plan, self._failures)
        # One that fails again and again is the script's doing, and costs what trains as much as any other start.
        again = change.returncode == EXIT_FAILED and self._failures >= agent.assignment.plan.start_attempts
        self.given_up = change.returncode == EXIT_BAD_INPUT or again
        text = f"{change.member} {change.cause}: {said}" if said else f"{change.member} {change.cause}"
        if self.given_up:
            text += "; there will be no standbys"
            agent.moves.give_up("there are no standbys")
        agent.events.add("unprepared", text, data={"log": str(directory / "stderr.log")})
        agent.wake()

    def end(self) -> None:
        """The job is over, at least here."""
        for standby in self._living.values():
            self._agent.engine.delete(STANDBYS, standby.number, signal.SIGKILL)
