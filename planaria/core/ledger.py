"""The quorums of one job: which is in force, which are offered, how they follow from each other, and what is said.

The lower half of the lighthouse's state machine (``core.quorum`` decides): it keeps the record and collects effects.
"""

from __future__ import annotations

import signal as signals

from planaria.core.attendance import Attendance
from planaria.core.messages import (
    NO_QUORUM,
    Desired,
    Drain,
    Event,
    JobSpec,
    Kill,
    Member,
    Order,
    Publish,
    Quorum,
    QuorumId,
    Refuse,
    Stop,
)
from planaria.core.roster import (
    CERTAINLY_GONE,
    Agent,
    Effect,
    Group,
    JobStatus,
    LineageRecord,
    Persist,
    Record,
    Send,
    State,
    lineage_after,
    status_of,
)

# Agents reconnect within tens of milliseconds of a lighthouse coming back and beat once a second, so three beats
# are enough to hear from every agent that can be heard at all.
REBUILD_WINDOW = 3.0
EVENTS_KEPT = 200


class Ledger:
    """``last`` is the newest lineage record of an earlier life of the lighthouse."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        self._lineage = last.lineage if last else ""
        if last is not None and not last.members:
            last = None  # that run has ended: this is a new one under the same name
        self._last = last
        self.job = job
        self.epoch = epoch
        self.spec: JobSpec | None = None
        self.seen = Attendance()
        self.current: Quorum | None = None  # in force
        self.planned: Quorum | None = None  # published, not adopted yet
        self.stopped = ""  # reason, once the job cannot go on
        self.durable = 0  # step of the newest durable checkpoint that is known of; 0: none
        # Some member holds, or held, a settled state. A founding record says that none did when it was made.
        self.founded = last is not None and last.step >= 0
        self._offered: dict[QuorumId, Quorum] = {}  # planned ones since the last change of force, withdrawn or not
        # Members of every quorum so far. Every exchange needs all members of its quorum, so while one of these has
        # adopted none, no step was ever committed, and whoever is left can start from the states of the scripts.
        self._untouched: set[Member] | None = None  # None: there was no quorum yet
        if last is not None:
            self._untouched = set() if self.founded else set(last.members)
        self._number = 0
        self._started_at: float | None = None
        self._rebuild_until: float | None = None
        self._trouble_at: float | None = None
        self._warned: tuple[QuorumId, str] = (NO_QUORUM, "")
        self._out: list[Effect] = []
        self._events: list[Event] = []
        if last is not None:
            self.current = Quorum(last.id, last.members, ("",) * len(last.members), True, last.lineage)

    @property
    def agents(self) -> dict[str, Agent]:
        return self.seen.agents

    @property
    def groups(self) -> dict[int, Group]:
        return self.seen.groups

    # --- every event begins and ends here --------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        silent = self.seen.look(now)
        if self._started_at is None:
            self._started_at = self.seen.progress_at = self.seen.at
            if self._last is not None:
                self._rebuild_until = self.seen.at + REBUILD_WINDOW
            self._event("epoch", f"lighthouse epoch {self.epoch} serves job {self.job}")
        for agent in silent:
            self._disconnect(agent)

    def _end(self) -> list[Effect]:
        self._decide()
        out, self._out = self._out, []
        return out

    def _decide(self) -> None:
        raise NotImplementedError

    # --- what is published -----------------------------------------------------------------------------------

    def _publish(self, chosen: list[Group], urgent: bool, reason: str, founding: bool) -> None:
        chosen = sorted(chosen, key=lambda g: g.member)
        members = tuple(g.member for g in chosen)
        id = self._store(members)
        addresses = tuple(g.ready.address if g.ready else "" for g in chosen)
        quorum = Quorum(id, members, addresses, urgent, self._lineage, reason, founding)
        told = set(members) | set(self.current.members if self.current else ())
        if urgent:
            # Whoever ever worked may believe that it still does, if an earlier life of the lighthouse fenced it.
            told |= set(self.planned.members if self.planned else ()) | {g.member for g in self.seen.veterans()}
            self.current, self.planned, self._offered, self._trouble_at = quorum, None, {}, None
            for view in self.seen.groups.values():
                if view.member not in members:
                    view.fenced = id
        else:
            self.planned = self._offered[id] = quorum
        self._untouched = set(members) & (set(members) if self._untouched is None else self._untouched)
        for member in sorted(told):
            known = self.seen.of(member)
            if known is not None and known.state not in CERTAINLY_GONE:
                self._send(known.agent, Publish(member, quorum))
        kind = "quorum" if urgent else "plan"
        self._event(kind, f"quorum {id}: groups {', '.join(str(m.group) for m in members)} ({reason})")

    def _store(self, members: tuple[Member, ...]) -> QuorumId:
        """Adds a quorum to the lineage. What follows is done only if the store takes it, and it refuses a lighthouse
        that was deposed."""
        self._number += 1
        id = QuorumId(self.epoch, self._number)
        self._lineage = lineage_after(self._lineage, id, members)
        step = max(self.seen.top_step, 0) if self.founded else -1
        self._out.append(Persist(LineageRecord(self.job, id.epoch, id.number, members, self._lineage, step)))
        return id

    def _tell_again(self, agent: str) -> None:
        """After a reconnect: what was published meanwhile, and standing wishes. Members ignore what they know."""
        if self.spec is not None:
            self._send(agent, Desired(self.spec.groups))
        for view in self.seen.groups.values():
            if view.agent != agent:
                continue
            if view.evicted:
                self._send(agent, Kill(view.member.group, int(signals.SIGKILL)))
            if view.ready is None or view.state in CERTAINLY_GONE:
                continue
            if view.draining:
                self._send(agent, Drain(view.member))
            for quorum in (self.current, self.planned):
                if quorum is not None and quorum.id > view.adopted and quorum.addresses[0]:
                    self._send(agent, Publish(view.member, quorum))

    # --- small deeds and questions ---------------------------------------------------------------------------

    def _disconnect(self, agent: str) -> None:
        if self.seen.lost(agent):
            self._event("agent", f"agent {agent} is out of reach")

    def _start_draining(self, view: Group) -> None:
        view.draining = True
        self._send(view.agent, Drain(view.member))
        self._event("drain", f"{view.member} leaves after the next commit", view.member.group)

    def _refuse(self, view: Group, reason: str) -> None:
        view.state, view.note = State.REFUSED, reason
        self._send(view.agent, Refuse(view.member, reason))
        self._event("refuse", reason, view.member.group)

    def _usable(self, view: Group) -> bool:
        return self.seen.usable(view, self.current)

    def _in_force(self, member: Member) -> bool:
        return self.current is not None and member in self.current.members

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._store(())  # the end of a job is a quorum of nobody: one that was deposed cannot end it
        self._event("stop", reason)
        for agent in self.seen.agents:
            self._send(agent, Stop(reason))

    def _warn(self, base: Quorum, text: str) -> None:
        """For people: the job waits, for whom, and what they can do. Once for each quorum and reason."""
        if self._warned != (base.id, text):
            self._warned = (base.id, text)
            self._event("majority", f"{text}; waiting for them (planaria evict GROUP declares one dead)")

    def _send(self, agent: str, order: Order) -> None:
        self._out.append(Send(agent, order))

    def _event(self, kind: str, text: str, group: int = -1) -> None:
        event = Event(self.seen.now, kind, text, group)
        self._events = [*self._events[-EVENTS_KEPT + 1 :], event]
        self._out.append(Record(event))

    def snapshot(self) -> JobStatus:
        """What ``planaria status`` shows."""
        return JobStatus(
            job=self.job,
            epoch=self.epoch,
            quorum=self.current,
            planned=self.planned,
            desired=self.spec.groups if self.spec else 0,
            complete=self.seen.finished(),
            groups=tuple(
                status_of(view, self.seen.connected(view))
                for view in sorted(self.seen.groups.values(), key=lambda g: g.member)
            ),
            events=tuple(self._events),
        )
