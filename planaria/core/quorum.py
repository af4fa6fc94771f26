"""The lighthouse's decisions for one job, as a pure state machine.

Events go in through ``handle``, ``agent_lost``, ``tick`` and the operator's verbs, each with the caller's clock;
effects come out in the order in which they must be done. No I/O, no clock, no threads: the real service and the
simulator drive this very class.

Two kinds of quorum leave it. An *urgent* one replaces a membership that is broken (a member died, hangs, or a
communicator failed) and takes force when it is published. A *planned* one (join, leave, drain) takes force when a
member reports that it was adopted; until then the job goes on under the old one, and if it never is, nothing is lost.
"""

from __future__ import annotations

import signal as signals

from planaria.core.liveness import HEARTBEAT_SECONDS, HeartbeatWatch, WatchedClock
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Desired,
    Died,
    Drain,
    Event,
    Finished,
    Heartbeat,
    Hello,
    JobSpec,
    Kill,
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
    Welcome,
)
from planaria.core.roster import (
    CERTAINLY_GONE,
    Agent,
    Effect,
    Group,
    GroupStatus,
    JobStatus,
    LineageRecord,
    Persist,
    Record,
    Send,
    State,
    lineage_after,
)

__all__ = [
    "Effect",
    "GroupStatus",
    "JobStatus",
    "Lighthouse",
    "LineageRecord",
    "Persist",
    "Record",
    "Send",
]

# Agents reconnect within tens of milliseconds of a lighthouse coming back and beat once a second, so three beats
# are enough to hear from every agent that can be heard at all.
REBUILD_WINDOW = 3.0
# A death at a member's own node is reported milliseconds after its peers see the broken connection. Waiting that
# long avoids a quorum that still holds the dead member; the bounds keep one odd observation from mattering.
TROUBLE_WINDOW = (0.02, 0.5)
# The first groups to be ready wait for the others as long again as the first one took, at least this long
# (processes of one start come up within seconds of each other).
FOUNDING_GRACE = 10.0
# Progress is seen through heartbeats, one a second: three without a step are a stall, not a coarse clock.
STALL_BEATS = 3.0
# A planned change that failed to form is proposed again after this long, doubled each time: the joiner is likely
# to be on its way out, and its agent will say so.
REPLAN_DELAY = (0.25, 8.0)
# Rounding must not make a wake-up the present moment, at which nothing is due yet.
SHORTEST_WAIT = 0.001
EVENTS_KEPT = 200


class Lighthouse:
    """Membership of one job. ``last`` is the newest lineage record of an earlier life of the lighthouse."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        self.job = job
        self.epoch = epoch
        self.spec: JobSpec | None = None
        self.agents: dict[str, Agent] = {}
        self.groups: dict[int, Group] = {}
        self.current: Quorum | None = None  # in force
        self.planned: Quorum | None = None  # published, not adopted yet
        self._offered: dict[QuorumId, Quorum] = {}  # planned ones since the last change of force, withdrawn or not
        # Some member holds, or held, a settled state. A founding record says that none did when it was made.
        self.founded = last is not None and last.step >= 0
        # Members of every quorum so far. Every exchange needs all members of its quorum, so while one of these has
        # adopted none, no step was ever committed, and whoever is left can start from the states of the scripts.
        self._untouched: set[Member] | None = set(last.members) if last is not None and not self.founded else None
        self.stopped = ""  # reason, once the job cannot go on
        self._last = last
        self._lineage = last.lineage if last else ""
        self._number = 0
        self._rebuild_until: float | None = None
        self._started_at: float | None = None
        self._first_ready_at: float | None = None
        self._trouble_at: float | None = None
        self._trouble_window = TROUBLE_WINDOW[0]
        self._strikes = 0  # urgent quorums in a row that broke although nobody died
        self._strike_step = -1
        self._replan_at = 0.0
        self._replan_delay = REPLAN_DELAY[0]
        self._top_step = -1
        self._progress_at = 0.0
        self._beats: dict[str, HeartbeatWatch] = {}
        self._majority_warned = NO_QUORUM
        # The caller's clock at the last event. All waits are measured in watched time instead: a lighthouse that was
        # stopped or whose clock jumped has not seen anybody be silent, so it must not condemn anybody for that.
        self._now = 0.0
        self._clock = WatchedClock(HEARTBEAT_SECONDS)
        self._out: list[Effect] = []
        self._events: list[Event] = []
        if last is not None:
            self.current = Quorum(last.id, last.members, ("",) * len(last.members), True, last.lineage)

    # --- events ----------------------------------------------------------------------------------------------

    def handle(self, agent: str, report: Report, now: float) -> list[Effect]:
        """One report of an agent (or of a member, passed on by its agent)."""
        at = self._begin(now)
        view = self.agents.setdefault(agent, Agent())
        view.connected = True
        self._beats.setdefault(agent, HeartbeatWatch()).observe(now)
        match report:
            case Hello():
                view.synced = False
                view.told.clear()
                self._progress_at = max(self._progress_at, at)  # whoever just came back has not been seen to stall
                self.spec = self.spec or report.spec
                self._send(agent, Welcome(self.epoch))
                if self.stopped:
                    self._send(agent, Stop(self.stopped))
            case Synced():
                view.synced = True
                self._forget_untold(agent, view)
                self._tell_again(agent)
            case Heartbeat():
                for pulse in report.pulses:
                    self._pulse(agent, pulse, at)
            case Ready():
                self._ready(agent, report, at)
            case Adopted():
                self._adopted(agent, report, at)
            case Trouble():
                self._trouble(report, at)
            case Finished():
                self._finished(agent, report, at)
            case Died():
                self._died(agent, report, at)
            case Suspected():
                self._suspected(report, at)
        return self._end(at)

    def agent_lost(self, agent: str, now: float) -> list[Effect]:
        """The agent's stream broke. Its groups may well be training: silence alone condemns nobody."""
        at = self._begin(now)
        self._disconnect(agent, at)
        return self._end(at)

    def tick(self, now: float) -> list[Effect]:
        at = self._begin(now)
        return self._end(at)

    def next_wakeup(self) -> float | None:
        """When ``tick`` must be called at the latest, on the clock of the events. None: nothing is waited for."""
        at, due = self._clock.watched, []
        if self._rebuild_until is not None:
            due.append(self._rebuild_until)
        if self._trouble_at is not None:
            due.append(self._trouble_at + self._trouble_window)
        if self.current is None and self._first_ready_at is not None:
            due.append(self._first_ready_at + self._founding_grace())
        if self.planned is None and self._replan_at:
            due.append(self._replan_at)
        due += [
            max(view.lost_at, self._progress_at) + self._stall_window()
            for view in self.agents.values()
            if not view.connected
        ]
        # Watched time passes only as fast as somebody looks.
        waits = [min(d - at, HEARTBEAT_SECONDS) for d in due if d > at]
        beats = [self._beats[name].deadline() for name, view in self.agents.items() if view.connected]
        waits += [deadline - self._now for deadline in beats if deadline is not None]
        return self._now + max(min(waits), SHORTEST_WAIT) if waits else None

    # --- the operator's verbs --------------------------------------------------------------------------------

    def drain(self, group: int, now: float) -> list[Effect]:
        """Leave ``group`` out from the next commit on. Raises ValueError with a sentence if that cannot be."""
        view = self._need(group)
        if not any(g.member.group != group and not g.draining and self._usable(g) for g in self.groups.values()):
            raise ValueError(f"group {group} is the only one that works; draining it would end the job")
        at = self._begin(now)
        self._start_draining(view, at)
        return self._end(at)

    def scale(self, groups: int, now: float) -> list[Effect]:
        """Ask for ``groups`` groups: the highest ones leave, or new ones are started by the agents."""
        if self.spec is None:
            raise ValueError("no agent has told this job's size yet; try again in a second")
        if groups < 1:
            raise ValueError(f"a job needs at least one group, not {groups}")
        shards = next((g.ready.shards for g in self.groups.values() if g.ready), None)
        if shards is not None and groups > shards:
            raise ValueError(f"the job has {shards} shards a step, so at most {shards} groups can work, not {groups}")
        at = self._begin(now)
        self.spec = JobSpec(self.spec.job, groups, min(self.spec.min_groups, groups), self.spec.policy)
        working = sorted(g for g, v in self.groups.items() if v.state not in CERTAINLY_GONE and not v.draining)
        for group in working[groups:]:
            self._start_draining(self.groups[group], at)
        for agent in self.agents:
            self._send(agent, Desired(groups))
        self._event("scale", f"{groups} groups wanted")
        return self._end(at)

    def evict(self, group: int, now: float) -> list[Effect]:
        """The operator says that ``group`` is dead, so no majority needs to wait for it. Raises ValueError with a
        sentence if no other group holds the job's state."""
        view = self._need(group)
        others = [g for g in self.groups.values() if g is not view and self._usable(g)]
        if self.current is not None and not self._holder_left(self.current, others):
            raise ValueError(f"group {group} is the only one that holds the state; evicting it would end the job")
        at = self._begin(now)
        view.state, view.note, view.evicted = State.DEAD, "evicted by an operator", True
        self._event("evict", f"group {group} was evicted by an operator", group)
        self._send(view.agent, Kill(group, int(signals.SIGKILL)))
        return self._end(at)

    def kill(self, group: int, signal: int, now: float) -> list[Effect]:
        """Have ``signal`` sent to the group's processes."""
        view = self._need(group)
        at = self._begin(now)
        self._event("kill", f"an operator sent signal {signal} to group {group}", group)
        self._send(view.agent, Kill(group, signal))
        return self._end(at)

    # --- what a report changes -------------------------------------------------------------------------------

    def _view(self, agent: str, member: Member) -> Group | None:
        """The group's entry, made new for a new incarnation; None for a message of an incarnation that is over."""
        view = self.groups.get(member.group)
        if view is not None and view.member.incarnation > member.incarnation:
            return None
        if view is None or view.member.incarnation < member.incarnation:
            view = self.groups[member.group] = Group(member, agent)
        view.agent = agent
        self.agents[agent].told.add(member)
        return view

    def _forget_untold(self, agent: str, view: Agent) -> None:
        """An agent that has told everything and did not mention a member of its node was started again after it."""
        for group in self.groups.values():
            if group.agent == agent and group.ready is not None and group.member not in view.told:
                if group.state not in CERTAINLY_GONE:
                    group.state, group.note = State.DEAD, "its agent was started again"
                    self._event("lost", f"{group.member} is gone: {group.note}", group.member.group)

    def _pulse(self, agent: str, pulse: Pulse, now: float) -> None:
        view = self._view(agent, pulse.member)
        if view is None:
            return
        view.pulse = pulse
        if view.state is State.ACTIVE:
            view.step = max(view.step, pulse.step)
            self._progress(pulse.step, now)

    def _progress(self, step: int, now: float) -> None:
        if step > self._top_step:
            self._top_step, self._progress_at = step, now

    def _ready(self, agent: str, report: Ready, now: float) -> None:
        view = self._view(agent, report.member)
        if view is None or view.state in CERTAINLY_GONE:
            return
        if self._finished_at_all() and not self._in_force(report.member):
            return  # the job is over: nobody is left to heal from, and the agent ends late joiners
        known = view.ready is not None
        if view.state is State.ACTIVE and known and self._in_force(report.member):
            return  # said again after a reconnect
        view.ready, view.state = report, State.READY
        if self._first_ready_at is None:
            self._first_ready_at = now
        if self.founded and (reason := self._misfit(report)):
            self._refuse(view, reason, now)
        elif not known:
            self._event("ready", f"{report.member} is ready", report.member.group)

    def _adopted(self, agent: str, report: Adopted, now: float) -> None:
        self.founded = True
        view = self._view(agent, report.member)
        if view is None or view.state in CERTAINLY_GONE:
            return
        view.adopted, view.step = max(view.adopted, report.quorum), max(view.step, report.step)
        self._progress(report.step, now)
        if (offered := self._offered.get(report.quorum)) is not None:
            # Taken by one is taken by all, even if it was withdrawn here meanwhile: they decided at the same commit.
            self.current = offered
            self._offered = {id: q for id, q in self._offered.items() if id > offered.id}
            self.planned = self.planned if self.planned is not None and self.planned.id > offered.id else None
            self._replan_delay, self._replan_at = REPLAN_DELAY[0], 0.0
            self._trouble_at = None
        in_force = self.current is not None and report.quorum == self.current.id
        if not in_force or report.member not in (self.current.members if self.current else ()):
            return  # it works under a quorum that was replaced meanwhile, or was fenced
        if view.state is not State.SUSPECT:
            view.state = State.ACTIVE
        if report.step > self._strike_step:
            self._strikes = 0

    def _trouble(self, report: Trouble, now: float) -> None:
        if self.planned is not None and report.quorum == self.planned.id:
            self.planned = None  # no one can have adopted what one member could not build
            self._replan_at = now + self._replan_delay
            self._replan_delay = min(2 * self._replan_delay, REPLAN_DELAY[1])
            self._event("trouble", f"{report.member}: planned quorum {report.quorum}: {report.text}")
        elif self.current is not None and report.quorum >= self.current.id and self._in_force(report.member):
            # The quorum in force, or a withdrawn planned one that the members took all the same.
            if self._trouble_at is None:
                self._trouble_at = now
            self._event("trouble", f"{report.member} at step {report.step}: {report.text}", report.member.group)

    def _finished(self, agent: str, report: Finished, now: float) -> None:
        view = self._view(agent, report.member)
        if view is None or view.state is State.FINISHED:
            return
        view.state, view.step, view.digest = State.FINISHED, report.step, report.digest
        self.founded = True
        self._progress(report.step, now)
        self._event("finish", f"{report.member} finished at step {report.step}", report.member.group)
        digests = {g.digest for g in self.groups.values() if g.state is State.FINISHED and g.digest}
        if len(digests) > 1:
            self._event("mismatch", f"finished groups hold different states: {sorted(digests)}")

    def _died(self, agent: str, report: Died, now: float) -> None:
        view = self._view(agent, report.member)
        if view is not None:
            view.evicted = False  # whatever an operator said of it, now it is true
        if view is None or view.state in CERTAINLY_GONE:
            return
        if self._trouble_at is not None:
            seen = 2 * (now - self._trouble_at)  # twice what it took this time
            self._trouble_window = min(max(seen, TROUBLE_WINDOW[0]), TROUBLE_WINDOW[1])
        view.state, view.note = State.DEAD, report.cause
        kind = "drain" if view.draining else "lost"
        self._event(kind, f"{report.member} is gone: {report.cause}", report.member.group)

    def _suspected(self, report: Suspected, now: float) -> None:
        view = self.groups.get(report.member.group)
        if view is None or view.member != report.member or view.state not in (State.ACTIVE, State.READY):
            return
        view.state, view.note = State.SUSPECT, report.why
        self._event("suspect", f"{report.member} is suspected: {report.why}", report.member.group)

    # --- decisions -------------------------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        if self.stopped or self._rebuilding(now):
            return
        if self.current is None:
            self._found(now)
            return
        gone = [m for m in self.current.members if self._gone(m, now) and not self._leaving(m)]
        trouble = self._trouble_at is not None and now >= self._trouble_at + self._trouble_window
        if gone or trouble:
            self._replace(self.current, gone, now)
        elif self._trouble_at is None and now >= self._replan_at:
            self._plan(self.current, now)

    def _rebuilding(self, now: float) -> bool:
        """After a restart: decide nothing until the members of the last quorum have been heard of, or cannot be."""
        if self._rebuild_until is None:
            return False
        members = self.current.members if self.current else ()
        known = all(
            (view := self.groups.get(m.group)) is not None and self.agents[view.agent].synced for m in members
        )
        if not known and now < self._rebuild_until:
            return True
        self._rebuild_until = None
        views = [v for m in members if (v := self.groups.get(m.group)) is not None and v.member == m]
        if self.current is not None and any(v.adopted != self.current.id for v in views):
            self._trouble_at = now - self._trouble_window  # it may never have reached them: make a new one
        return False

    def _found(self, now: float) -> None:
        """The first quorum: wait for the groups that were asked for, but not for ever."""
        ready = [g for g in self.groups.values() if g.state is State.READY and self._connected(g) and not g.draining]
        if self.spec is None or self._first_ready_at is None or not ready or self._finished_at_all():
            return
        if len(ready) < self.spec.groups:
            overdue = now >= self._first_ready_at + self._founding_grace()
            if not overdue or len(ready) < self.spec.min_groups:
                return
        if not self._refuse_misfits(ready, now):
            self._publish(ready, True, "the job starts", now)

    def _replace(self, base: Quorum, gone: list[Member], now: float) -> None:
        # Only members that can be told: one out of reach would stall the forming, and heals if it lives.
        live = [g for g in self.groups.values() if self._usable(g) and self._connected(g)]
        if any(not g.draining for g in live):
            live = [g for g in live if not g.draining]
        kept = [g for g in live if g.member in base.members]
        # A majority of those not known to be dead must be in reach; a drained one is left out, but can be told so.
        told = {g.member for g in self.groups.values() if self._usable(g) and self._connected(g)}
        uncertain = [m for m in base.members if not self._certain(m) and m not in told]
        if uncertain and len(told & set(base.members)) <= len(uncertain):
            self._warn_majority(base, uncertain, now)
            return
        if not self._holder_left(base, live):
            self._all_lost(uncertain, now)
            return
        if self._finished_at_all():
            live = kept  # the job is ending: nobody joins any more
        if not gone:
            live = self._leave_one_out(live)
        self._publish(live, True, self._why(gone), now)

    def _holder_left(self, base: Quorum, live: list[Group]) -> bool:
        """Whether somebody may hold a settled state (or none is needed yet, and somebody can start)."""
        if not self.founded:
            return bool(live)
        known = set(base.members) | set(self.planned.members if self.planned else ())
        return any(g.state is State.ACTIVE or g.member in known for g in live) or self._reviving(base, live)

    def _reviving(self, base: Quorum, live: list[Group]) -> bool:
        """Whether all that is left are states of members that were fenced: older, but whole, and so still right."""
        gone = all(self._certain(m) and not self._suspect(m) for m in base.members)
        return gone and any(g.adopted != NO_QUORUM for g in live)

    def _all_lost(self, uncertain: list[Member], now: float) -> None:
        veterans = [g for g in self.groups.values() if g.adopted != NO_QUORUM and g.state not in CERTAINLY_GONE]
        if uncertain or veterans or any(self._suspect(m) for m in self.current.members if self.current):
            return  # out of reach or stopped is not dead: they may come back with the state
        if not self.founded:
            self.current, self._first_ready_at = None, None  # nothing to lose yet: start afresh when they are back
            return
        if self._finished_at_all():
            return
        step = max((g.step for g in self.groups.values()), default=0)
        self._stop(
            f"job {self.job}: every group that held the state is lost (last commit seen: step {step}); "
            "without a durable checkpoint the job cannot go on. Start it again",
            now,
        )

    def _leave_one_out(self, live: list[Group]) -> list[Group]:
        """Communicators keep breaking though nobody died: two members cannot reach each other. Leave out another
        one each time until those who remain can work; the one left out may come back by a planned change."""
        self._strikes += 1
        self._strike_step = self._top_step
        if self._strikes <= 2 or len(live) < 2:
            return live
        odd = sorted(live, key=lambda g: -g.member.group)[(self._strikes - 3) % len(live)]
        self._replan_at = self._progress_at + REPLAN_DELAY[1]
        return [g for g in live if g is not odd]

    def _plan(self, current: Quorum, now: float) -> None:
        """Joins and leaves, taken by everybody after the same commit."""
        if self._finished_at_all():
            return
        want = [g for g in self.groups.values() if self._usable(g) and not g.draining]
        members = {g.member for g in want}
        if self.planned is not None and not set(self.planned.members) <= members:
            self.planned = None  # a joiner is gone again: it can never be built, and the old quorum simply goes on
        if want and self.planned is None and members != set(current.members):
            joins = ", ".join(str(m.group) for m in sorted(members - set(current.members)))
            leaves = ", ".join(str(m.group) for m in sorted(set(current.members) - members))
            why = "; ".join(x for x in (joins and f"group {joins} joins", leaves and f"group {leaves} leaves") if x)
            self._publish(want, False, why, now)

    def _publish(self, chosen: list[Group], urgent: bool, reason: str, now: float) -> None:
        chosen = sorted(chosen, key=lambda g: g.member)
        members = tuple(g.member for g in chosen)
        self._number += 1
        id = QuorumId(self.epoch, self._number)
        founding = self._founding(chosen)
        self._lineage = lineage_after(self._lineage, id, members)
        addresses = tuple(g.ready.address if g.ready else "" for g in chosen)
        quorum = Quorum(id, members, addresses, urgent, self._lineage, reason, founding)
        told = set(members) | set(self.current.members if self.current else ())
        if urgent:
            told |= set(self.planned.members if self.planned else ())
            self.current, self.planned, self._offered, self._trouble_at = quorum, None, {}, None
        else:
            self.planned = self._offered[id] = quorum
        self._untouched = set(members) & (set(members) if self._untouched is None else self._untouched)
        step = -1 if founding else max(self._top_step, 0)
        self._out.append(Persist(LineageRecord(self.job, id.epoch, id.number, members, self._lineage, step)))
        for member in sorted(told):
            view = self.groups.get(member.group)
            if view is not None and view.member == member and view.state not in CERTAINLY_GONE:
                self._send(view.agent, Publish(member, quorum))
        kind = "quorum" if urgent else "plan"
        self._event(kind, f"quorum {id}: groups {', '.join(str(m.group) for m in members)} ({reason})")

    def _founding(self, chosen: list[Group]) -> bool:
        untouched = self._untouched or set()
        if not self.founded or any(g.adopted == NO_QUORUM and g.member in untouched for g in chosen):
            return True
        return self.current is not None and self._reviving(self.current, chosen)

    # --- judging members -------------------------------------------------------------------------------------

    def _gone(self, member: Member, now: float) -> bool:
        """Whether a member of the quorum in force must be replaced."""
        view = self.groups.get(member.group)
        if view is None or view.member != member:
            return True
        if view.state in (State.DEAD, State.REFUSED, State.SUSPECT):
            return True
        if view.state is State.FINISHED:
            return False
        return not self._connected(view) and self._condemned(view.agent, now)

    def _suspect(self, member: Member) -> bool:
        view = self.groups.get(member.group)
        return view is not None and view.member == member and view.state is State.SUSPECT

    def _leaving(self, member: Member) -> bool:
        """Whether its end is expected: a planned quorum without it is out, and it was drained. If it went too early,
        the others cannot exchange without it, and they will say so."""
        view = self.groups.get(member.group)
        out = self.planned is not None and member not in self.planned.members
        return out and self._trouble_at is None and view is not None and view.member == member and view.draining

    def _certain(self, member: Member) -> bool:
        """Whether a member's silence needs no majority: it is dead, or its own agent keeps it out."""
        view = self.groups.get(member.group)
        if view is None:
            return False
        if view.member.incarnation > member.incarnation or view.state in CERTAINLY_GONE:
            return True
        return view.state is State.SUSPECT and self._connected(view)

    def _condemned(self, agent: str, now: float) -> bool:
        """A silent agent's groups are given up only if the others cannot go on either: every exchange needs all
        members, so progress elsewhere proves that they live."""
        if self._trouble_at is not None and now >= self._trouble_at + self._trouble_window:
            return True
        since = max(self.agents[agent].lost_at, self._progress_at)
        return now >= since + self._stall_window()

    def _stall_window(self) -> float:
        slowest = max((g.pulse.step_seconds for g in self.groups.values() if g.pulse), default=0.0)
        return STALL_BEATS + STALL_BEATS * slowest

    def _founding_grace(self) -> float:
        first = (self._first_ready_at or 0.0) - (self._started_at or 0.0)
        return max(FOUNDING_GRACE, first)

    def _usable(self, view: Group) -> bool:
        return view.state in (State.READY, State.ACTIVE) and view.ready is not None and self._reachable(view)

    def _reachable(self, view: Group) -> bool:
        """Connected, or silent but at work in the quorum in force (a silent one cannot be told of a new one)."""
        return self._connected(view) or self._in_force(view.member)

    def _connected(self, view: Group) -> bool:
        return self.agents[view.agent].connected

    def _in_force(self, member: Member) -> bool:
        return self.current is not None and member in self.current.members

    def _finished_at_all(self) -> bool:
        return any(g.state is State.FINISHED for g in self.groups.values())

    # --- fingerprints ----------------------------------------------------------------------------------------

    def _misfit(self, report: Ready) -> str:
        """Why a joiner's bits could not be those of the members at work; empty if they can."""
        for view in self.groups.values():
            if view.ready is None or view.state is not State.ACTIVE or view.member == report.member:
                continue
            keys = _differing(view.ready, report)
            if keys:
                return f"{report.member} differs from group {view.member.group} in {keys}"
            return ""
        return ""

    def _refuse_misfits(self, ready: list[Group], now: float) -> bool:
        """Before the first quorum: the most common fingerprint and start wins, the odd ones are named."""
        reports = [g.ready for g in sorted(ready, key=lambda g: g.member) if g.ready is not None]
        kinds: dict[object, int] = {}
        for r in reports:
            kinds[_kind(r)] = kinds.get(_kind(r), 0) + 1
        usual = max(kinds, key=lambda k: kinds[k])  # the first (lowest group) of the most common
        model = next(r for r in reports if _kind(r) == usual)
        refused = False
        for view in ready:
            if view.ready is None or _kind(view.ready) == usual:
                continue
            keys = _differing(model, view.ready)
            if not keys:
                keys = "the protected state at the start (parameters, buffers or optimizer): seed every group alike"
            self._refuse(view, f"{view.member} differs from group {model.member.group} in {keys}", now)
            refused = True
        return refused

    def _refuse(self, view: Group, reason: str, now: float) -> None:
        view.state, view.note = State.REFUSED, reason
        self._send(view.agent, Refuse(view.member, reason))
        self._event("refuse", reason, view.member.group)

    # --- small things ----------------------------------------------------------------------------------------

    def _begin(self, now: float) -> float:
        """Every event starts here. Returns the watched time, on which all waits are measured."""
        self._now, at = now, self._clock.look(now)
        if self._started_at is None:
            self._started_at = self._progress_at = at
            if self._last is not None:
                self._rebuild_until = at + REBUILD_WINDOW
            self._event("epoch", f"lighthouse epoch {self.epoch} serves job {self.job}")
        for name, view in self.agents.items():
            if view.connected and self._beats[name].overdue(now):
                self._disconnect(name, at)
        return at

    def _end(self, now: float) -> list[Effect]:
        self._decide(now)
        out, self._out = self._out, []
        return out

    def _disconnect(self, agent: str, now: float) -> None:
        view = self.agents.get(agent)
        if view is not None and view.connected:
            view.connected, view.synced, view.lost_at = False, False, now
            self._event("agent", f"agent {agent} is out of reach")

    def _start_draining(self, view: Group, now: float) -> None:
        view.draining = True
        self._send(view.agent, Drain(view.member))
        self._event("drain", f"{view.member} leaves after the next commit", view.member.group)

    def _tell_again(self, agent: str) -> None:
        """After a reconnect: what was published meanwhile, and standing wishes. Members ignore what they know."""
        if self.spec is not None:
            self._send(agent, Desired(self.spec.groups))
        for view in self.groups.values():
            if view.agent == agent and view.evicted:
                self._send(agent, Kill(view.member.group, int(signals.SIGKILL)))
            if view.agent != agent or view.ready is None or view.state in CERTAINLY_GONE:
                continue
            if view.draining:
                self._send(agent, Drain(view.member))
            for quorum in (self.current, self.planned):
                if quorum is not None and quorum.id > view.adopted and quorum.addresses[0]:
                    self._send(agent, Publish(view.member, quorum))

    def _stop(self, reason: str, now: float) -> None:
        self.stopped = reason
        self._event("stop", reason)
        for agent in self.agents:
            self._send(agent, Stop(reason))

    def _warn_majority(self, base: Quorum, uncertain: list[Member], now: float) -> None:
        if self._majority_warned != base.id:
            self._majority_warned = base.id
            names = ", ".join(str(m.group) for m in uncertain)
            self._event(
                "majority",
                f"groups {names} of quorum {base.id} are out of reach and the others are no majority of it; "
                "waiting for them (planaria evict GROUP declares one dead)",
            )

    def _why(self, gone: list[Member]) -> str:
        if not gone:
            return "a communicator broke"
        return "; ".join(f"group {m.group} lost" for m in gone)

    def _need(self, group: int) -> Group:
        view = self.groups.get(group)
        if view is None or view.state in CERTAINLY_GONE:
            known = ", ".join(str(g) for g in sorted(self.groups)) or "none"
            raise ValueError(f"job {self.job} has no running group {group} (known groups: {known})")
        return view

    def _send(self, agent: str, order: object) -> None:
        self._out.append(Send(agent, order))  # type: ignore[arg-type]

    def _event(self, kind: str, text: str, group: int = -1) -> None:
        event = Event(self._now, kind, text, group)
        self._events = [*self._events[-EVENTS_KEPT + 1 :], event]
        self._out.append(Record(event))

    def snapshot(self) -> JobStatus:
        """What ``planaria status`` shows."""
        rows = []
        for view in sorted(self.groups.values(), key=lambda g: g.member):
            pulse = view.pulse or Pulse(view.member, Phase.STARTING, view.step, view.adopted, float("nan"), 0.0)
            rows.append(
                GroupStatus(
                    member=view.member,
                    state="draining" if view.draining and view.state not in CERTAINLY_GONE else view.state.value,
                    step=max(view.step, pulse.step if view.state is State.ACTIVE else 0),
                    quorum=view.adopted,
                    phase=pulse.phase,
                    loss=pulse.loss,
                    step_seconds=pulse.step_seconds,
                    pid=pulse.pid,
                    agent=view.agent,
                    connected=self._connected(view),
                    note=view.note,
                )
            )
        return JobStatus(
            job=self.job,
            epoch=self.epoch,
            quorum=self.current,
            planned=self.planned,
            desired=self.spec.groups if self.spec else 0,
            complete=self._finished_at_all(),
            groups=tuple(rows),
            events=tuple(self._events),
        )


def _kind(report: Ready) -> object:
    return (report.fingerprint, report.initial, report.shards, report.total_steps)


def _differing(a: Ready, b: Ready) -> str:
    """Names and both values of the fingerprint entries in which two members differ."""
    left, right = dict(a.fingerprint), dict(b.fingerprint)
    left |= {"shards": str(a.shards), "steps": str(a.total_steps)}
    right |= {"shards": str(b.shards), "steps": str(b.total_steps)}
    keys = [k for k in sorted(left.keys() | right.keys()) if left.get(k) != right.get(k)]
    return ", ".join(f"{k} ({left.get(k, 'absent')} there, {right.get(k, 'absent')} here)" for k in keys)
