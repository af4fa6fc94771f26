"""Standbys: processes of no group that wait, warm, for a rank to be lost.

Each of them has run the script up to its first step and tried that (see ``planaria.torch.rehearsal``), so imports,
devices, kernels and allocators are ready. The one that is taken becomes a rank, and another is prepared.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planaria.agent.ranklife import error_in
from planaria.core import plan as planning
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED
from planaria.core.fingerprint import unfit
from planaria.core.liveness import STARTING, Silences
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
    node: int = 0
    began: float = field(default_factory=time.monotonic)
    ended_for: str = ""  # why the agent ends it, in peace
    late: str = ""  # why it counts as one that hangs

    @property
    def member(self) -> Member:
        return Member(STANDBYS, self.number)

    def fits(self, rank: int) -> bool:
        """Whether it can be that rank of a group: the others meet where rank 0 is, so that one stays on its node."""
        return self.warm and not (self.ended_for or self.late) and (rank != 0 or self.node == 0)


class Standbys:
    """Keeps as many of them on every node as the engine says. On the event loop's thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._living: dict[int, Standby] = {}
        self._next = 0
        self._failures = 0  # in a row
        self._due = 0.0  # no earlier one is started
        self._tries = Silences(STARTING)  # how long it takes to get warm
        self.given_up = False  # the script cannot have any
        self._unfit: dict[int, str] = {}  # nodes whose standbys cannot be ranks of the groups here, by their names then

    def warm_for(self, rank: int, node: int | None = None) -> int:
        """How many could take the place of a rank of this number, on that node or any."""
        return sum(each.fits(rank) and node in (None, each.node) for each in self._living.values())

    def tick(self, now: float) -> None:
        """Start what is missing; but groups that come (or come back) are to train as soon as they can."""
        agent, lives = self._agent, self._agent.lives.alive()
        self._end_those_that_hang(now)
        if (
            self.given_up
            or agent.ending
            or agent.closing.node
            or now < self._due
            or not lives
            or not all(x.settled for x in lives)
        ):
            return
        nodes = agent.engine.nodes()
        wanted = {node: n for node, n in agent.engine.standbys().items() if node not in agent.borrowing.returned}
        # One that comes again may have become another; node 0 does not.
        wanted = {node: n for node, n in wanted.items() if self._unfit.get(node) != nodes.get(node, "")}
        for rank, node in agent.moves.waiting():
            if not any(count and (rank != 0 or at == 0) and node in (None, at) for at, count in wanted.items()):
                wanted[node or 0] = 1
        living = [each for each in self._living.values() if not (each.ended_for or each.late)]
        for node in {*wanted, *(each.node for each in living)}:
            there = [each for each in living if each.node == node]
            for each in there[wanted.get(node, 0) :]:
                each.ended_for = "nobody needs it any more"  # it was prepared for a move
                agent.engine.delete(STANDBYS, each.number, signal.SIGKILL)
            for _ in range(wanted.get(node, 0) - len(there)):
                self._prepare(node)

    def _prepare(self, node: int) -> None:
        agent, living = self._agent, self._living.values()
        if self._tries.longest is None:
            for life in agent.lives.alive():
                self._tries.ended(life.settle_seconds if life.settle_seconds > 0 else 0.0)
        tried = [each.rank for each in living if not (each.ended_for or each.late)]
        # On another node than node 0, none can be rank 0.
        ranks = range(1 if node and agent.assignment.ranks > 1 else 0, agent.assignment.ranks)
        rank = min(ranks, key=lambda rank: (tried.count(rank), agent.engine.home_of(rank) != node, rank))
        if agent.engine.prepare(self._next, rank, node):
            self._living[self._next] = Standby(self._next, rank, node=node)
            self._next += 1
        else:
            where = f"node {node}" if node else "this node"
            agent.moves.give_up(f"there is no device for another process on {where} (see --standbys)", node)

    def _end_those_that_hang(self, now: float) -> None:
        """A try takes about as long as a group's start, or as tries before it. Moves may be waiting for it."""
        for each in self._living.values():
            if not (each.warm or each.late or each.ended_for) and now - each.began > self._tries.limit:
                each.late = f"is not warm after {now - each.began:.3g} s ({self._tries.describe()})"
                self._agent.engine.delete(STANDBYS, each.number, signal.SIGKILL)

    def take(self, rank: int, node: int | None = None) -> Standby | None:
        """A warm one for a lost ``rank``, the best there is: on ``node``, else where the rank's group began with it,
        else one that tried itself as this rank. The caller says ``taken`` if it is used."""
        home = self._agent.engine.home_of(rank) if node is None else node
        fit = [each for each in self._living.values() if each.fits(rank)]
        return min(fit, key=lambda each: (each.node != home, each.rank != rank, each.number), default=None)

    def taken(self, standby: Standby, member: Member, rank: int) -> None:
        """The engine knows it as ``rank`` of ``member`` now: tell it so, if it is on this node."""
        del self._living[standby.number]
        if standby.node == 0:
            environ = tuple(sorted(self._agent.engine.environ_of(member, rank).items()))
            self._agent.hub.cast(standby.member, Cast(member, rank, environ))

    # --- news ------------------------------------------------------------------------------------------------

    def knows(self, member: Member) -> bool:
        return member.group == STANDBYS and member.incarnation in self._living

    def started(self, change: Started) -> None:
        if (standby := self._living.get(change.member.incarnation)) is not None:
            standby.pid = change.pid
            facts = {"pid": change.pid, "rank": standby.rank, "node": standby.node}
            self._agent.events.add("standby", f"{standby.member} runs as pid {change.pid}", data=facts)

    def present(self, member: Member, fingerprint: tuple[tuple[str, str], ...] = ()) -> None:
        if (standby := self._living.get(member.incarnation)) is not None and not self._refused(standby, fingerprint):
            standby.warm, self._failures = True, 0
            self._tries.ended(time.monotonic() - standby.began)
            self._agent.beat_soon()  # others may want to move here
            where = f" on node {standby.node}" if standby.node else ""
            text = f"{member} is warm{where}; it tried itself as rank {standby.rank}"
            facts = {"pid": standby.pid, "rank": standby.rank, "node": standby.node}
            self._agent.events.add("standby", text, data=facts)
            self._agent.wake()

    def _refused(self, standby: Standby, fingerprint: tuple[tuple[str, str], ...]) -> bool:
        """Whether it is unlike the ranks at work, which would cost the group that takes it in all of its ranks."""
        agent = self._agent
        at_work = [ready for life in agent.lives.alive() if (ready := agent.told.ready(life.member)) is not None]
        if standby.ended_for or not at_work or not (why := unfit(fingerprint, at_work[0])):
            return False
        where = f"node {standby.node}" if standby.node else "this node"
        standby.ended_for = f"it differs from group {at_work[0].member.group} in {why}"
        text = f"{standby.member} cannot be a rank: {standby.ended_for}; no standbys are prepared on {where}"
        agent.events.add("unprepared", text, data={"node": standby.node})
        self._unfit[standby.node] = agent.engine.nodes().get(standby.node, "")
        agent.moves.give_up(f"a process on {where} {standby.ended_for.removeprefix('it ')}", standby.node)
        agent.engine.delete(STANDBYS, standby.number, signal.SIGKILL)
        return True

    def ended(self, change: Ended) -> None:
        agent, standby = self._agent, self._living.pop(change.member.incarnation, None)
        agent.hub.forget(change.member)
        agent.wake()
        if standby is None or agent.ending:
            return
        if standby.ended_for or (change.returncode is None and change.remains is None and standby.node):
            agent.events.add("standby", f"{standby.member} has ended: {standby.ended_for or change.cause}")
            return
        directory = directory_of(agent.assignment.directory, change.member)
        if change.remains is None:
            error, log = error_in(directory), directory / "stderr.log"
        else:
            error, log = change.remains.error, change.remains.log
        said = str(error.get("message") or "")
        # What is lost with its node, or has found none, is not the script's doing.
        if not standby.warm and change.returncode is not None:
            self._failures += 1
        # A node that has no device for it may have one later.
        tries = max(self._failures, 2) if change.returncode is None else self._failures
        self._due = time.monotonic() + planning.backoff(agent.assignment.plan, tries)
        # One that fails again and again is, and costs what trains as much as any other start.
        fails = change.returncode == EXIT_FAILED or bool(standby.late)
        again = fails and self._failures >= agent.assignment.plan.start_attempts
        self.given_up = change.returncode == EXIT_BAD_INPUT or again
        how = f"{standby.late}, and was killed" if standby.late else change.cause
        text = f"{change.member} {how}: {said}" if said else f"{change.member} {how}"
        if self.given_up:
            text += "; there will be no standbys"
            agent.moves.give_up("there are no standbys")
        agent.events.add("unprepared", text, data={"log": str(log)})

    def end(self, why: str) -> None:
        """The job is over, at least here."""
        for standby in self._living.values():
            standby.ended_for = standby.ended_for or why
            self._agent.engine.delete(STANDBYS, standby.number, signal.SIGKILL)
