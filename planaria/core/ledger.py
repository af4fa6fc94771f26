"""The quorums of one job: which is in force, which are offered, how they follow from each other, and what is said.

The lower half of the lighthouse's state machine (``core.quorum`` decides): it keeps the record and collects effects.
"""

from __future__ import annotations

import math
import signal as signals
from dataclasses import replace

from planaria.core.attendance import Attendance
from planaria.core.liveness import HEARTBEAT
from planaria.core.messages import (
    NO_QUORUM,
    Corrupted,
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
    named,
    status_of,
)

# Agents reconnect within tens of milliseconds of a lighthouse coming back and beat once a second, so three beats
# are enough to hear from every agent that can be heard at all.
REBUILD_WINDOW = 3.0
# To say that a job is lost cannot be taken back, so it waits for those too who hear late that there is another
# lighthouse: they are cut off, or still attend one that was deposed. An agent is silent for so long at most before
# it is given up.
LAST_WORD_WINDOW = HEARTBEAT.ceiling
EVENTS_KEPT = 200
# A decision looks at every group, which takes about so many seconds for each. In a large job the next one rests for as
# long as that: else a thousand agents that come at once, or a rack that is lost, would cost a thousand decisions, and
# as many quorums. What happens after a pause is decided upon at once.
DECISION_SECONDS = 20e-6
LARGE = 64  # groups; below, a rest would be shorter than a message takes


# Damages of one group after which people are told that its hardware may be broken: as many wrong gradients in a row end
# it (planaria.torch.rechecks).
REPEATED = 3


class Ledger:
    """``last`` is the newest lineage record of an earlier life of the lighthouse."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        self._lineage = last.lineage if last else ""
        self._run = last.run if last is not None else NO_QUORUM  # the record with which the job began again last
        if last is not None and not last.members:
            if last.run != last.id:
                self._run = NO_QUORUM  # that run has ended: this is a new one under the same name
            last = None
        self._newest_before, self._step_before = (last.id, last.step) if last is not None else (NO_QUORUM, 0)
        self._last = last
        self._last_members = frozenset(last.members if last is not None else ())
        self.job = job
        self.epoch = epoch
        self.spec: JobSpec | None = None
        self.seen = Attendance()
        self.current: Quorum | None = None  # in force
        self.planned: Quorum | None = None  # published, not adopted yet
        self.stopped = ""  # reason, once the job cannot go on
        self.complete = False  # somebody committed the last step, and owes nobody anything
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
        self._sealed = False  # the job is complete, and the store knows
        self._rebuild_until: float | None = None
        self._last_word_at: float | None = None  # from then on every agent that lives has been heard
        self._trouble_at: float | None = None
        self._complained: set[Member] = set()  # who has said that the quorum in force is broken
        self._warned: tuple[QuorumId, str] = (NO_QUORUM, "")
        self._members: frozenset[Member] = frozenset()  # of the quorum in force
        self._corruptions: dict[int, list[int]] = {}  # ranks, by group, in the lighthouse's own life
        self._awaited: set[Member] = set()  # those of them that have not said that they work under it
        self._news = False  # something happened that may ask for a decision
        self._rests_until = -math.inf  # watched time; a large job has just been decided upon
        self._decide_at = math.inf  # watched time at which one may be due without news
        self._out: list[Effect] = []
        self._events: list[Event] = []
        self._scaled = 0  # as in JobStatus
        if last is not None:
            self._take(Quorum(last.id, last.members, ("",) * len(last.members), True, last.lineage))

    @property
    def agents(self) -> dict[str, Agent]:
        return self.seen.agents

    @property
    def groups(self) -> dict[int, Group]:
        return self.seen.groups

    # --- every event begins and ends here --------------------------------------------------------------------

    def _begin(self, now: float, news: bool = True) -> None:
        """``news``: whether the event may ask for a decision. With a thousand groups each takes milliseconds, and
        almost all that is heard are heartbeats."""
        silent = self.seen.look(now)
        self._news = self._news or news
        if self._started_at is None:
            self._started_at = self.seen.progress_at = self.seen.at
            if self._last is not None:
                self._rebuild_until = self.seen.at + REBUILD_WINDOW
                self._last_word_at = self.seen.at + LAST_WORD_WINDOW
            self._event("epoch", f"lighthouse epoch {self.epoch} serves job {self.job}")
        for agent, why in silent:
            self._disconnect(agent, why)

    def _end(self) -> list[Effect]:
        if self._news or self.seen.news or self.seen.at >= self._decide_at:
            if self.seen.at < self._rests_until:
                self._news, self._decide_at = True, self._rests_until
            else:
                self._news = self.seen.news = False
                self._decide()
                self._decide_at = min((at for at in self._due() if at > self.seen.at), default=math.inf)
                if (groups := len(self.seen.groups)) > LARGE:
                    self._rests_until = self.seen.at + groups * DECISION_SECONDS
        out, self._out = self._out, []
        return out

    def _decide(self) -> None:
        raise NotImplementedError

    def _due(self) -> list[float]:
        """Watched times at which time alone may change a decision."""
        raise NotImplementedError

    def _take(self, quorum: Quorum | None) -> None:
        """``quorum`` is in force from now on."""
        self.current, self._news = quorum, True
        self._members = frozenset(quorum.members if quorum is not None else ())
        views = {member: self.seen.of(member) for member in self._members}
        self._awaited = {m for m, v in views.items() if v is None or quorum is None or v.adopted != quorum.id}

    # --- after a restart of the lighthouse -------------------------------------------------------------------

    def _rebuilding(self) -> bool:
        """After a restart: decide nothing until the members of the last quorum have been heard of, or cannot be."""
        if self._rebuild_until is None:
            return False
        members = self.current.members if self.current else ()
        known = all(
            (view := self.seen.groups.get(m.group)) is not None and self.seen.agents[view.agent].synced for m in members
        )
        if not known and self.seen.at < self._rebuild_until:
            return True
        self._rebuild_until = None
        return False

    def _may_be_unheard(self) -> bool:
        """After a restart: whether an agent may live that has not found this lighthouse yet."""
        return self._last_word_at is not None and self.seen.at < self._last_word_at

    # --- what is published -----------------------------------------------------------------------------------

    def _publish(self, chosen: list[Group], urgent: bool, reason: str, founding: bool) -> None:
        chosen = sorted(chosen, key=lambda g: g.member)
        members = tuple(g.member for g in chosen)
        id = self._store(members)
        addresses = tuple(g.ready.address if g.ready else "" for g in chosen)
        quorum = Quorum(id, members, addresses, urgent, self._lineage, reason, founding)
        inside = set(members)
        before = frozenset(self._members)
        told = inside | before
        if urgent:
            # Whoever ever worked may believe that it still does, if an earlier life of the lighthouse fenced it.
            told |= set(self.planned.members if self.planned else ()) | {g.member for g in self.seen.veterans()}
            self._take(quorum)
            self.planned, self._offered, self._trouble_at = None, {}, None
            for view in self.seen.groups.values():
                if view.member not in inside:
                    view.fenced = id
        else:
            self.planned = self._offered[id] = quorum
        self._untouched = inside if self._untouched is None else inside & self._untouched
        self._news = True
        for member in sorted(told):
            known = self.seen.of(member)
            if known is not None and known.state not in CERTAINLY_GONE:
                if not urgent and member not in before:
                    self._fence(known)
                self._send(known.agent, Publish(member, quorum))
        kind = "quorum" if urgent else "plan"
        numbers = {"lost": before - inside, "joined": inside - before}
        groups = ((name, ",".join(str(m.group) for m in sorted(those))) for name, those in numbers.items())
        facts = (("quorum", str(id)), *groups, ("members", str(len(members))), ("founding", str(founding)))
        self._event(kind, f"quorum {id}: {named(members)} ({reason})", data=facts)

    def _fence(self, joiner: Group) -> None:
        """By an urgent quorum without it, which an earlier life of the lighthouse made and did not tell of: it would go
        on under the one before it, and not join."""
        if self.current is not None and joiner.ready is not None and joiner.adopted > joiner.ready.after:
            self._send(joiner.agent, Publish(joiner.member, replace(self.current, urgent=True)))

    def _store(self, members: tuple[Member, ...], begins: bool = False) -> QuorumId:
        """Adds a quorum to the lineage. What follows is done only if the store takes it, and it refuses a lighthouse
        that was deposed. ``begins``: it is the first record of a new run."""
        self._number += 1
        id = QuorumId(self.epoch, self._number)
        run = id if begins else self._run
        self._lineage = lineage_after(self._lineage, id, members)
        step = max(self.seen.top_step, 0) if self.founded else -1
        self._out.append(Persist(LineageRecord(self.job, id.epoch, id.number, members, self._lineage, step, run)))
        return id

    def _lives(self) -> tuple[Member, ...]:
        """The newest life of every group that no agent in reach has, as far as this or an earlier life of the
        lighthouse knows."""
        newest = {m.group: m for m in self._last_members}
        for view in self.seen.groups.values():
            newest[view.member.group] = max(newest.get(view.member.group, view.member), view.member)
            if self.seen.agents[view.agent].connected and view.state not in CERTAINLY_GONE:
                del newest[view.member.group]
        return tuple(sorted(newest.values()))

    def _tell_again(self, agent: str) -> None:
        """After a reconnect: what was published meanwhile, and standing wishes. Members ignore what they know."""
        if self.spec is not None:
            self._send(agent, Desired(self.spec.groups))
        for view in self.seen.of_agent(agent):
            if view.evicted:
                self._send(agent, Kill(view.member.group, int(signals.SIGKILL)))
            if view.ready is None or view.state in CERTAINLY_GONE:
                continue
            if view.draining:
                self._send(agent, Drain(view.member, view.moved))
            for quorum in (self.current, self.planned):
                if quorum is not None and quorum.id > view.adopted and quorum.addresses[0]:
                    self._send(agent, Publish(view.member, quorum))

    # --- the end of a complete job ---------------------------------------------------------------------------

    def _dismiss(self) -> None:
        """The job is complete: an agent none of whose groups has or had a part in its end would wait for ever."""
        now = self.current.id if self.current is not None else NO_QUORUM
        busy = {
            g.agent
            for g in self.seen.groups.values()
            if (g.state is State.FINISHED and g.member in self.seen.agents[g.agent].told)  # or it was started again
            or (g.state not in CERTAINLY_GONE and self._in_force(g.member) and g.fenced < now)
        }
        for name, agent in self.seen.agents.items():
            if agent.connected and agent.synced and not agent.dismissed and name not in busy:
                agent.dismissed = True
                self._send(name, Stop(""))

    def _seal(self) -> None:
        """When every member of the last quorum has finished or died, no other will follow. The store is told, or else
        a later life of the lighthouse would take the next run of this name for one that has lost its state."""
        if not self._sealed and self.current is not None and all(self.seen.over(m) for m in self.current.members):
            self._sealed = True
            self._store(())
            self._event("complete", "all steps are committed, and every group has ended")

    # --- small deeds and questions ---------------------------------------------------------------------------

    def _disconnect(self, agent: str, why: str) -> None:
        at_work = any(g.state not in CERTAINLY_GONE for g in self.seen.of_agent(agent))
        if self.seen.lost(agent) and at_work:  # one whose groups have all ended has just left
            self._event("agent", f"agent {agent} is out of reach: {why}")

    def _start_draining(self, view: Group, reason: str = "", moved: bool = False) -> None:
        view.draining, view.moved = True, moved
        self._send(view.agent, Drain(view.member, moved))
        self._event(
            "drain",
            f"{view.member} leaves after the next commit" + (f": {reason}" if reason else ""),
            view.member.group,
        )

    def _corrupted(self, report: Corrupted) -> None:
        """For people. A particle flips a bit once; a group of which it is said again and again, in whatever life, is on
        hardware that should not be used."""
        group = report.member.group
        self._event("corrupt", f"{report.member} at step {report.step}: {report.text}", group)
        ranks = self._corruptions.setdefault(group, [])
        ranks.append(report.rank)
        view, times = self.seen.groups.get(group), len(ranks)
        if view is None or times < REPEATED:
            return
        one = report.rank if set(ranks) == {report.rank} and self.spec is not None and self.spec.ranks > 1 else -1
        where = f", at rank {one}" if one >= 0 else ""
        view.note = f"damaged {times} times{where}: its hardware may be broken"
        if times == REPEATED:
            advice = f"planaria drain --node {view.agent} or planaria drain {group}"
            if one >= 0:
                advice = f"planaria drain {group} --rank {one}"
            told = f"group {group} was damaged {times} times{where}; if it is its hardware: {advice}"
            self._event("suspicious", told, group)

    def _refuse(self, view: Group, reason: str) -> None:
        view.state, view.note, self._news = State.REFUSED, reason, True
        self._send(view.agent, Refuse(view.member, reason))
        self._event("refuse", reason, view.member.group)

    def _usable(self, view: Group) -> bool:
        """Can work, and can be told of a change or is at work in the quorum in force: silence is no reason to go."""
        return self.seen.works(view) and (self.seen.connected(view) or self._in_force(view.member))

    def _in_force(self, member: Member) -> bool:
        return member in self._members

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._store(())  # the end of a job is a quorum of nobody: one that was deposed cannot end it
        self._event("stop", reason)
        for agent in self.seen.agents:
            self._send(agent, Stop(reason))

    def _warn(self, base: Quorum, text: str, advice: str = "planaria evict GROUP declares one dead") -> None:
        """For people: the job waits, for whom, and what they can do. Once for each quorum and reason."""
        if self._warned != (base.id, text):
            self._warned = (base.id, text)
            self._event("majority", f"{text}; waiting for them ({advice})")

    def _send(self, agent: str, order: Order) -> None:
        self._out.append(Send(agent, order))

    def _event(self, kind: str, text: str, group: int = -1, data: tuple[tuple[str, str], ...] = ()) -> None:
        event = Event(self.seen.now, kind, text, group, data)
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
            complete=self.complete,
            groups=tuple(
                status_of(view, self.seen.connected(view))
                for view in sorted(self.seen.groups.values(), key=lambda g: g.member)
            ),
            events=tuple(self._events),
            scaled=self._scaled,
        )
