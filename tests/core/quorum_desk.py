"""Golden scenarios of the lighthouse: an event, and the effects that it must have, in order.

Every group has its own agent, ``a0``, ``a1``, … An effect reads ``store 1.2 [0 2]`` or ``a0: publish …``; lines for
people (``Record``) are left out unless a test is about them.
"""

from __future__ import annotations

from dataclasses import replace

from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Died,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Phase,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Report,
    Stop,
    Suspected,
    Synced,
    Trouble,
)
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, LineageRecord, Persist, Record, Send, lineage_after

MEMBERS = (Member(0, 0), Member(1, 0), Member(2, 0))
LAST = LineageRecord("job", 1, 4, MEMBERS, lineage_after("", QuorumId(1, 4), MEMBERS), 7)


def names(members: tuple[Member, ...]) -> str:
    return "[" + " ".join(str(m.group) if not m.incarnation else f"{m.group}.{m.incarnation}" for m in members) + "]"


def kind(quorum: Quorum) -> str:
    return "founding" if quorum.founding else "urgent" if quorum.urgent else "planned"


def line(effect: Effect) -> str:
    match effect:
        case Persist(record):
            return f"store {record.id} {names(record.members)}"
        case Send(agent, Publish(_, quorum)):
            return f"{agent}: {kind(quorum)} {quorum.id} {names(quorum.members)}"
        case Send(agent, Stop(reason)):
            return f"{agent}: stop: {reason}" if reason else f"{agent}: complete"
        case Send(agent, Refuse(_, reason)):
            return f"{agent}: refuse: {reason}"
        case Send(agent, order):
            return f"{agent}: {type(order).__name__.lower()}"
        case Record(event):
            return f"event {event.kind}: {event.text}"


class Desk:
    """A lighthouse and a clock, with words for what may happen."""

    def __init__(self, groups: int = 3, epoch: int = 1, last: LineageRecord | None = None, ready: bool = True) -> None:
        self.lighthouse = Lighthouse("job", epoch, last)
        self.now = 100.0
        self.groups = groups
        self.incarnations = dict.fromkeys(range(groups), 0)
        if ready:
            for group in range(groups):
                self.connects(group)

    def member(self, group: int) -> Member:
        return Member(group, self.incarnations.setdefault(group, 0))

    def tell(self, group: int, report: Report) -> list[str]:
        return self.lines(self.lighthouse.handle(f"a{group}", report, self.now))

    def lines(self, effects: list[Effect]) -> list[str]:
        return [line(e) for e in effects if not isinstance(e, Record)]

    def connects(self, group: int, *again: Report) -> list[str]:
        """A new stream: Hello, what is told again, Synced."""
        told = [Hello(f"a{group}", "host", JobSpec("job", self.groups)), *again, Synced()]
        return [text for report in told for text in self.tell(group, report)]

    def report(self, group: int, **changes: object) -> Ready:
        base = Ready(self.member(group), f"host{group}:1", (("torch", "2.13"),), "start", 6, 10)
        return replace(base, **changes)  # type: ignore[arg-type]

    def ready(self, group: int, **changes: object) -> list[str]:
        return self.tell(group, self.report(group, **changes))

    def adopts(self, group: int, number: int, step: int = 0, epoch: int = 1) -> list[str]:
        return self.tell(group, Adopted(self.member(group), QuorumId(epoch, number), step))

    def trouble(self, group: int, number: int, step: int = 0) -> list[str]:
        return self.tell(group, Trouble(self.member(group), QuorumId(1, number), step, "rank 1 is gone"))

    def dies(self, group: int) -> list[str]:
        effects = self.tell(group, Died(self.member(group), "signal 9"))
        self.incarnations[group] += 1  # the next life
        return effects

    def suspects(self, group: int) -> list[str]:
        return self.tell(group, Suspected(self.member(group), "stopped"))

    def beat(self, group: int, step: int, seconds: float = 0.1) -> list[str]:
        quorum = self.lighthouse.current.id if self.lighthouse.current else NO_QUORUM
        pulse = Pulse(self.member(group), Phase.COMPUTING, step, quorum, 0.0, seconds)
        return self.tell(group, Heartbeat((pulse,)))

    def wait(self, seconds: float) -> list[str]:
        """Time passes; the lighthouse is ticked whenever it wants to be, and agents in reach beat once a second."""
        end, found, beat = self.now + seconds, [], self.now + 1.0
        while True:
            wakeup = self.lighthouse.next_wakeup()
            due = min(beat, wakeup if wakeup is not None else beat)
            if due > end:
                break
            self.now = max(due, self.now)
            if due == beat:
                beat += 1.0
                for name in [n for n, agent in self.lighthouse.agents.items() if agent.connected]:
                    found += self.lines(self.lighthouse.handle(name, Heartbeat(()), self.now))
            found += self.lines(self.lighthouse.tick(self.now))
        self.now = end
        return found

    def events(self) -> list[str]:
        return [event.text for event in self.lighthouse.snapshot().events]


def working(groups: int = 3, step: int = 0) -> Desk:
    """All groups work under quorum 1.1."""
    desk = Desk(groups)
    for group in range(groups):
        desk.ready(group)
    for group in range(groups):
        desk.adopts(group, 1, step)
    return desk
