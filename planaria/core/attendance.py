"""Who is there: what the lighthouse knows of agents and groups, and what their silence means.

Silence alone condemns nobody. A member is certainly gone only if the process table said so; it is given up if its own
agent sees it stand still, or if its agent is silent *and* the others cannot go on either: every exchange needs all
members, so progress anywhere proves that all of them live.

A heartbeat costs the same whatever the number of agents and groups: nothing here looks at all of them for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from planaria.core.liveness import HEARTBEAT_SECONDS, HeartbeatWatch, WatchedClock
from planaria.core.messages import NO_QUORUM, Member, Pulse
from planaria.core.roster import CERTAINLY_GONE, Agent, Group, State

# Progress is seen through heartbeats, one a second: three without a step are a stall, not a coarse clock.
STALL_BEATS = 3.0
# Agents out of reach that may stay without a look at which of them nobody needs. Every start of an agent is another
# one, so that in a job of weeks whose nodes are replaced they would become thousands.
AWAY_KEPT = 256


class Attendance:
    """``now`` is the caller's clock at the last event. All waits are measured in watched time, ``at``: a lighthouse
    that was stopped or whose clock jumped has not seen anybody be silent, so it must not condemn anybody for it."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.groups: dict[int, Group] = {}
        self.buried: set[Member] = set()  # never heard of, and declared dead by an operator
        self.now = 0.0
        self.at = 0.0
        self.top_step = -1  # the most steps that anybody is known to have committed
        self.progress_at = 0.0  # when that last rose, or could first be seen again
        self.news = False  # since the owner reset it: somebody came, was lost, came back, or has another agent
        self.look_at = math.inf  # watched time before which nobody's silence can be too long
        self._clock = WatchedClock(HEARTBEAT_SECONDS)
        self._away: set[str] = set()  # agents out of reach
        self._away_kept = AWAY_KEPT
        self._hosted: dict[str, dict[int, None]] = {}  # by agent: groups that it has, or has had, in order
        self._slowest: float | None = None  # the longest step seconds of any group; None: to be looked up again

    # --- events ----------------------------------------------------------------------------------------------

    def look(self, now: float) -> list[tuple[str, str]]:
        """Time has passed. Returns the agents that have been silent for too long, each with a sentence."""
        self.now, self.at = now, self._clock.look(now)
        if self.at < self.look_at:
            return []
        silent = []
        self.look_at = math.inf
        for name, agent in self.agents.items():
            if not agent.connected:
                continue
            if (why := agent.beats.overdue(now)) is not None:
                silent.append((name, why))
            else:
                self.look_at = min(self.look_at, agent.beats.due)
        return silent

    def heard(self, name: str) -> Agent:
        agent = self.agents.get(name)
        if agent is None:
            agent = self.agents[name] = Agent(HeartbeatWatch(self._clock))
            self.news = True
        if not agent.connected:
            self.progress_at = max(self.progress_at, self.at)  # who just came back has not been seen to stand still
            self._away.discard(name)
            agent.connected = self.news = True
        agent.beats.observe(self.now)
        self.look_at = min(self.look_at, agent.beats.due)
        return agent

    def lost(self, name: str) -> bool:
        """Out of reach. Returns whether that is news."""
        agent = self.agents.get(name)
        if agent is None or not agent.connected:
            return False
        agent.connected, agent.lost_at, self.news = False, self.at, True
        self._away.add(name)
        return True

    def forget(self, needed: Collection[str]) -> list[str]:
        """Let go of agents out of reach that have no groups, but for ``needed``, once they may be many: should one come
        back, it says all that it knows, as if it were new. Returns which."""
        if len(self._away) <= self._away_kept:
            return []
        gone = [name for name in self._away if name not in needed and not self.of_agent(name)]
        for name in gone:
            self._away.discard(name)
            del self.agents[name]
            self._hosted.pop(name, None)
        self._away_kept = max(AWAY_KEPT, 2 * len(self._away))  # those that stay are not looked through for every agent
        return gone

    def owner(self, name: str, member: Member) -> str | None:
        """The other agent, in reach, that has this group alive: two runs of one name must not speak for each other."""
        view = self.groups.get(member.group)
        if view is None or view.agent == name or view.state in CERTAINLY_GONE:
            return None
        return view.agent if self.agents[view.agent].connected else None

    def view(self, name: str, member: Member) -> Group | None:
        """The group's entry, made new for a new incarnation; None for a message of an incarnation that is over, or of
        an agent to which the group does not belong."""
        if self.owner(name, member) is not None:
            return None
        view = self.groups.get(member.group)
        if view is not None and view.member.incarnation > member.incarnation:
            return None
        if view is None or view.member.incarnation < member.incarnation:
            view = self.groups[member.group] = Group(member, name)
            self.news, self._slowest = True, None
        if view.agent != name:
            view.agent, self.news = name, True
        self._hosted.setdefault(name, {})[member.group] = None
        self.agents[name].told.add(member)
        return view

    def pulse(self, name: str, pulse: Pulse) -> None:
        view = self.view(name, pulse.member)
        if view is None:
            return
        if view.pulse is None or view.pulse.step_seconds != pulse.step_seconds:
            self._slowest = None
        view.pulse = pulse
        if view.state is State.ACTIVE:
            view.step = max(view.step, pulse.step)
            self.progressed(pulse.step)

    def progressed(self, step: int) -> None:
        if step > self.top_step:
            self.top_step, self.progress_at = step, self.at

    def untold(self, name: str) -> list[Group]:
        """Groups that the agent, having told everything, did not mention: it was started again, and they ended
        with its former life."""
        told = self.agents[name].told
        mine = self.of_agent(name)
        return [g for g in mine if g.ready is not None and g.member not in told and g.state not in CERTAINLY_GONE]

    def next_stall(self) -> float | None:
        """When the groups of an agent that is out of reach may be given up; watched time."""
        stalls = (self.stalled_at(self.agents[name]) for name in self._away)
        return min((at for at in stalls if at > self.at), default=None)

    # --- questions -------------------------------------------------------------------------------------------

    def of(self, member: Member) -> Group | None:
        """The entry of this very incarnation."""
        view = self.groups.get(member.group)
        return view if view is not None and view.member == member else None

    def of_agent(self, name: str) -> list[Group]:
        """The groups of an agent. Asked for every agent that comes or goes, and so not at the cost of all groups."""
        views = (self.groups.get(number) for number in self._hosted.get(name, ()))
        return [view for view in views if view is not None and view.agent == name]

    def connected(self, view: Group) -> bool:
        """Whether its agent is in reach and has told everything, so that it can be told everything in order."""
        agent = self.agents[view.agent]
        return agent.connected and agent.synced

    def works(self, view: Group) -> bool:
        return view.state in (State.READY, State.ACTIVE) and view.ready is not None

    def tellable(self) -> list[Group]:
        """Groups that can work and can be told so."""
        return [g for g in self.groups.values() if self.works(g) and self.connected(g)]

    def over(self, member: Member) -> bool:
        """Whether a member can certainly take part no more."""
        view = self.groups.get(member.group)
        if view is None:
            return member in self.buried
        if view.member == member:
            return view.state in CERTAINLY_GONE
        return view.member.incarnation > member.incarnation  # an earlier one says nothing of it

    def certain(self, member: Member) -> bool:
        """Whether a member's silence needs no majority: it is dead, or its own agent keeps it out."""
        view = self.of(member)
        return self.over(member) or (view is not None and view.state is State.SUSPECT and self.connected(view))

    def suspect(self, member: Member) -> bool:
        view = self.of(member)
        return view is not None and view.state is State.SUSPECT

    def veterans(self) -> list[Group]:
        """Members, there or not, that once held a settled state and may hold it still, if perhaps fenced."""
        return [g for g in self.groups.values() if g.adopted != NO_QUORUM and g.state not in CERTAINLY_GONE]

    def gone(self, member: Member, trouble: bool) -> bool:
        """Whether a member of the quorum in force must be replaced. ``trouble``: others say that it is broken."""
        view = self.of(member)
        if view is None or view.state in (State.DEAD, State.REFUSED, State.SUSPECT):
            return True
        if view.state is State.FINISHED:
            return False
        agent = self.agents[view.agent]
        return not agent.connected and (trouble or self.at >= self.stalled_at(agent))

    def stalled_at(self, agent: Agent) -> float:
        """When a silent agent's groups are given up if nobody makes progress until then; watched time."""
        return max(agent.lost_at, self.progress_at) + STALL_BEATS * (HEARTBEAT_SECONDS + self.slowest)

    @property
    def slowest(self) -> float:
        """The longest step seconds of any group; 0 if none is known."""
        if self._slowest is None:
            self._slowest = max((g.pulse.step_seconds for g in self.groups.values() if g.pulse), default=0.0)
        return self._slowest
