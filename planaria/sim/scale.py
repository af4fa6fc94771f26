"""What a job of many agents costs its lighthouse: the real state machine, and agents that say what agents say.

Every agent has one group. A virtual clock drives them; what is counted is the processor's time in the state machine,
what it keeps, and the messages. Costs are given for each agent, for those must not grow with the number of agents.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import (
    Adopted,
    Died,
    Finished,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Phase,
    Publish,
    Pulse,
    Quorum,
    Ready,
    Report,
    Synced,
)
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, LineageRecord, Persist, Send

BEATS = 5  # rounds of heartbeats that are looked at
SHARE = 0.01  # of the agents that fail at once
DELAY = 0.001  # virtual seconds from one message to the next that is not of the same instant
LONGEST = 120.0  # virtual seconds in which anything must have come of anything


@dataclass(slots=True)
class Cost:
    """Of one phase. ``seconds``: of the processor; ``virtual``: on the clock of the job."""

    name: str
    seconds: float = 0.0
    virtual: float = 0.0
    heard: int = 0
    sent: int = 0
    quorums: int = 0


@dataclass(slots=True)
class Agent:
    name: str
    member: Member
    told: Quorum | None = None
    step: int = 0


@dataclass(slots=True)
class Figures:
    agents: int
    kib: float = 0.0  # kept by the lighthouse, for each agent
    costs: list[Cost] = field(default_factory=list)


class Stuck(Exception):
    """The lighthouse does not do what it must: a bug."""


class Fleet:
    """``run`` has everything happen once. ``clock`` says what the machine's work costs: seconds of the processor."""

    def __init__(self, count: int, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self.figures = Figures(count)
        self._agents = {f"agent {n}": Agent(f"agent {n}", Member(n, 0)) for n in range(count)}
        self._spec = JobSpec("scale", count)
        self._now, self._end = 0.0, LONGEST
        self._last: LineageRecord | None = None
        self._machine = Lighthouse("scale", 1)
        self._cost = Cost("")

    def run(self) -> Figures:
        everybody = list(self._agents.values())
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        with self._phase("start"):
            self._come(everybody)
            self._until_taken(everybody)
        gc.collect()
        self.figures.kib = (tracemalloc.get_traced_memory()[0] - before) / 1024 / len(everybody)
        tracemalloc.stop()
        with self._phase("heartbeats"):
            for _ in range(BEATS):
                self._beat(everybody)
        lost = everybody[:: max(1, round(1 / SHARE))]
        rest = [agent for agent in everybody if agent not in lost]
        with self._phase("1 % die at once"):
            for agent in lost:
                self._say(agent, Died(agent.member, "killed by SIGKILL"))
            self._until_taken(rest)
        with self._phase("they come back"):
            for agent in lost:
                agent.member = Member(agent.member.group, agent.member.incarnation + 1)
                self._say(agent, self._ready(agent))
            self._until_taken(everybody)
        with self._phase("a new lighthouse"):
            self._machine = Lighthouse("scale", 2, self._last)
            self._come(everybody)
            self._beat(everybody)
        with self._phase("1 % out of reach"):
            for agent in lost:
                self._do(self._timed(lambda agent=agent: self._machine.agent_lost(agent.name, self._now)))  # type: ignore[misc]
            for agent in lost:
                self._say(agent, self._hello(), Synced())
        with self._phase("the end"):
            for agent in everybody:
                self._say(agent, Finished(agent.member, 1000, "d"))
            while self._last is None or self._last.members:  # the end of a job is a quorum of nobody
                self._pass_time(self._machine.next_wakeup())
        return self.figures

    # --- what agents say -----------------------------------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello("", "host", self._spec)

    def _ready(self, agent: Agent) -> Ready:
        return Ready(agent.member, f"host-{agent.member.group}:29500", (("torch", "2.13"),), "start", 1 << 14, 1000)

    def _come(self, agents: Iterable[Agent]) -> None:
        for agent in agents:
            again: list[Report] = [self._ready(agent)]
            if agent.told is not None:
                again.append(Adopted(agent.member, agent.told.id, agent.step))
            self._say(agent, self._hello(), *again, Synced())

    def _beat(self, agents: list[Agent]) -> None:
        pause = HEARTBEAT_SECONDS / len(agents)
        for agent in agents:
            agent.step += 1
            assert agent.told is not None
            pulse = Pulse(agent.member, Phase.COMPUTING, agent.step, agent.told.id, 0.5, 0.1, 1)
            self._now += pause
            self._say(agent, Heartbeat((pulse,)))

    def _until_taken(self, agents: list[Agent]) -> None:
        """Until there is a quorum of just these, and all of them have said that they work under it."""
        wanted = {agent.member for agent in agents}
        adopted: dict[str, Quorum] = {}
        while True:
            fresh = [a for a in agents if a.told is not None and adopted.get(a.name) is not a.told]
            for agent in fresh:
                assert agent.told is not None
                adopted[agent.name] = agent.told
                self._say(agent, Adopted(agent.member, agent.told.id, agent.step))
            current = self._machine.current
            if not fresh and current is not None and set(current.members) == wanted:
                return
            self._pass_time(None if fresh else self._machine.next_wakeup())

    def _pass_time(self, due: float | None) -> None:
        if self._now > self._end:
            raise Stuck(f"nothing comes of it within {LONGEST:.0f} s")
        self._now = max(self._now + DELAY, due or 0.0)
        self._do(self._timed(lambda: self._machine.tick(self._now)))

    # --- to the lighthouse and back --------------------------------------------------------------------------------

    def _say(self, agent: Agent, *reports: Report) -> None:
        for report in reports:
            self._cost.heard += 1
            self._do(self._timed(lambda report=report: self._machine.handle(agent.name, report, self._now)))  # type: ignore[misc]

    def _timed(self, act: Callable[[], list[Effect]]) -> list[Effect]:
        began = self._clock()
        effects = act()
        took = self._clock() - began
        self._cost.seconds += took
        self._now += took  # what is said meanwhile waits: that is the load that counts
        return effects

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(name, order):
                    self._cost.sent += 1
                    if isinstance(order, Publish) and name in self._agents:
                        self._agents[name].told = order.quorum
                case Persist(record):
                    self._cost.quorums += 1
                    self._last = record

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._cost = Cost(name)
        began, self._end = self._now, self._now + LONGEST
        yield
        self._cost.virtual = self._now - began
        self.figures.costs.append(self._cost)


def table(found: list[Figures]) -> list[str]:
    """One line for each phase, and within it all sizes side by side."""
    head = f"{'agents':18}" + "".join(f"{each.agents:>40,}" for each in found)
    unit = f"{'':18}" + "".join(f"{'us/agent':>12}{'sent/agent':>12}{'quorums':>8}{'s':>8}" for _ in found)
    lines = [head, unit]
    for at, first in enumerate(found[0].costs):
        line = f"{first.name:18}"
        for each in found:
            cost = each.costs[at]
            line += f"{cost.seconds / each.agents * 1e6:>12.1f}{cost.sent / each.agents:>12.2f}"
            line += f"{cost.quorums:>8}{cost.virtual:>8.2f}"
        lines.append(line)
    lines.append(f"{'KiB/agent':18}" + "".join(f"{each.kib:>40.2f}" for each in found))
    return lines
