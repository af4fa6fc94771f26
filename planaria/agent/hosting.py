"""Groups of other agents that move here: their next life is started, and joins when the old one has left.

Until then nobody is told of it but by ``Prepared``: for the lighthouse the group is where it was.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from planaria.core.messages import Host, Member, Prepared, Ready
from planaria.core.plan import GroupState
from planaria.engines.base import Started

if TYPE_CHECKING:
    from planaria.agent.agent import Agent
    from planaria.agent.lives import Life


class Hosting:
    """Does what ``Host`` orders, for ``agent``."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.groups: set[int] = set()  # that this agent has beside those that it began with
        self._held: dict[Member, Ready | None] = {}  # that must not join yet, and what they have said

    def obey(self, order: Host) -> None:
        agent, member = self._agent, order.member
        if order.joins:
            if (ready := self._held.pop(member, None)) is not None:
                agent.events.add("move", f"{member} joins here", member.group)
                agent.told.record(ready)
                agent.link.tell(ready)
            elif (life := agent.lives.of(member)) is not None and not life.alive:
                # It ended while this was on its way. It is at home here now, so it is started again, as any is.
                self.groups.add(member.group)
                life.state = GroupState.DEAD
                agent.wake()
        elif order.off:
            if self.holds(member):
                agent.engine.delete(member.group, member.incarnation, signal.SIGKILL)
        elif not self.holds(member):
            self._start(member)

    def joined(self) -> tuple[int, ...]:
        """Groups that have come here from other agents, and joined."""
        return tuple(sorted(self.groups - {member.group for member in self._held}))

    def holds(self, member: Member) -> bool:
        return member in self._held

    def ready(self, report: Ready) -> None:
        """One that is held waits to be taken into a quorum."""
        self._held[report.member] = report
        self._say(Prepared(report.member))

    def ended(self, life: Life) -> None:
        """No process of it is left."""
        if self._held.pop(life.member, self) is not self:
            self.groups.discard(life.member.group)
            life.state = GroupState.DRAINED
            self._say(Prepared(life.member, f"its process on node {self._agent.name} has ended; see its log there"))

    def _start(self, member: Member) -> None:
        agent = self._agent
        standby = agent.standbys.take(0) if agent.assignment.ranks == 1 else None
        before = agent.lives.groups.get(member.group)
        if agent.ending or agent.closing.node or (before is not None and before.alive):
            self._say(Prepared(member, f"node {agent.name} can take no group now"))
        elif standby is None and not agent.engine.has_place(member.group):
            self._say(Prepared(member, f"no GPU of node {agent.name} is free for it"))
        else:
            self.groups.add(member.group)
            self._held[member] = None
            agent.events.add("move", f"{member} is prepared here", member.group)
            if standby is None:
                agent.start(member, time.monotonic())
                return
            agent.engine.regroup(Member(member.group, member.incarnation - 1), member, 0, standby.number)
            agent.begin(member, time.monotonic()).joins = True
            agent.standbys.taken(standby, member, 0)
            agent.started(Started(member, standby.pid, 0))

    def _say(self, report: Prepared) -> None:
        self._agent.told.record(report)
        self._agent.link.tell(report)
