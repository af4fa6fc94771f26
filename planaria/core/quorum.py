"""The lighthouse's decisions for one job, as a pure state machine.

Events go in through ``handle``, ``agent_lost``, ``tick`` and the operator's verbs, each with the caller's clock;
effects come out in the order in which they must be done. No I/O, no clock, no threads: the real service and the
simulator drive this very class.

Two kinds of quorum leave it. An *urgent* one replaces a membership that is broken (a member died, hangs, or a
communicator failed) and takes force when it is published. A *planned* one (join, leave, drain) takes force when a
member reports that it was adopted; until then the job goes on under the old one, and if it never is, nothing is lost.
"""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Iterator

from planaria.core.fingerprint import drift, misfit
from planaria.core.links import LinkWatch
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Corrupted,
    Died,
    Drain,
    Finished,
    Heartbeat,
    Hello,
    Kill,
    Leaving,
    Member,
    Prepared,
    Ready,
    Refuse,
    Report,
    Saved,
    Stop,
    Suspected,
    Synced,
    Trouble,
    Welcome,
)
from planaria.core.replacing import Replacements
from planaria.core.roster import CERTAINLY_GONE, Effect, Group, LineageRecord, State, named
from planaria.core.standstill import REPLAN_DELAY

# A death at a member's own node is reported milliseconds after its peers see the broken connection. Waiting that
# long avoids a quorum that still holds the dead member; the bounds keep one odd observation from mattering.
TROUBLE_WINDOW = (0.02, 0.5)
# Rounding must not make a wake-up the present moment, at which nothing is due yet.
SHORTEST_WAIT = 0.001


class Lighthouse(Replacements):
    """Membership of one job. ``last`` is the newest lineage record of an earlier life of the lighthouse."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._trouble_window = TROUBLE_WINDOW[0]
        self._before = NO_QUORUM  # in force until the planned one was taken that is now
        self._digests: dict[str, Group] = {}  # of finished groups: the first of each
        self._links = LinkWatch()
        self._unbuilt: Trouble | None = None  # the newest complaint about a quorum that was planned
        self._waits = False  # a quorum is to be replaced and cannot be yet: everything may matter

    # --- events ----------------------------------------------------------------------------------------------

    def handle(self, agent: str, report: Report, now: float) -> list[Effect]:
        """One report of an agent (or of a member, passed on by its agent)."""
        self._begin(now, news=not isinstance(report, (Heartbeat, Adopted)))
        view = self.seen.heard(agent)
        match report:
            case Hello():
                view.synced = view.dismissed = False
                view.told.clear()
                view.host, view.devices = report.host, report.devices
                self.spec = self.spec or report.spec
                self._send(agent, Welcome(self.epoch, self._lives() if report.fresh else ()))
                self._introduced(agent, report)
                if self.stopped:
                    self._send(agent, Stop(self.stopped))
            case Synced():
                view.synced = True
                for group in self.seen.untold(agent):
                    self._gone_for_good(group, "its agent was started again")
                    self._begun_again(agent, group)
                self._tell_again(agent)
            case Heartbeat():
                view.warm, view.nodes = report.warm, dict(report.nodes)
                for pulse in report.pulses:
                    self.seen.pulse(agent, pulse)
                    for text in self._links.observe(pulse.member.group, pulse.links):
                        self._event("slow-link", text, pulse.member.group)
                self._leave_out_who_is_late()
                self._break_off_what_stands_still()
                self._withdraw_what_never_forms()
            case Ready():
                self._ready(agent, report)
            case Adopted():
                self._adopted(agent, report)
            case Trouble():
                self._trouble(report)
            case Finished():
                self._finished(agent, report)
            case Died():
                self._died(agent, report)
            case Suspected():
                self._suspected(report)
            case Prepared():
                self._prepared(agent, report)
            case Leaving():
                self._leave_for_now(agent, report)
            case Saved():
                self._saved(report)
            case Corrupted():
                self._corrupted(report)
        return self._end()

    def agent_lost(self, agent: str, now: float) -> list[Effect]:
        """The agent's stream broke. Its groups may well be training: silence alone condemns nobody."""
        self._begin(now)
        if agent in self.seen.agents:
            self.seen.agents[agent].synced = False
        self._disconnect(agent, "its stream broke")
        return self._end()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed: call it at ``next_wakeup`` at the latest, earlier does no harm."""
        self._begin(now, news=False)
        return self._end()

    def next_wakeup(self) -> float | None:
        """When ``tick`` must be called at the latest, on the clock of the events. None: nothing is waited for."""
        due = min(self._decide_at, self.seen.look_at)
        if due == math.inf:
            return None
        # Watched time passes only as fast as somebody looks.
        return self.seen.now + min(max(due - self.seen.at, SHORTEST_WAIT), HEARTBEAT_SECONDS)

    def _due(self) -> list[float]:
        due: list[float] = [self._replan_at]
        if self._rebuild_until is not None:
            due.append(self._rebuild_until)
        if self._last_word_at is not None:
            due.append(self._last_word_at)
        if self._trouble_at is not None:
            due.append(self._trouble_at + self._trouble_window)
        if self._spare_until is not None:
            due.append(self._spare_until)
        if self.current is None and self._first_ready_at is not None:
            due.append(self._first_ready_at + self._founding_grace())
        if (stall := self.seen.next_stall()) is not None:
            # Heartbeats move it, in both directions: look again after each round of them.
            due.append(min(stall, self.seen.at + HEARTBEAT_SECONDS))
        return due

    # --- what a report changes -------------------------------------------------------------------------------

    def _ready(self, agent: str, report: Ready) -> None:
        if (owner := self.seen.owner(agent, report.member)) is not None:
            group = report.member.group
            if self._homes.get(group) == owner:  # it has moved, and its former agent was started again since
                self._send(agent, Drain(report.member, moved=True))
                return
            reason = f"job {self.job} runs already: group {group} belongs to agent {owner}; choose another --job"
            if not self._settle(owner, agent, group):
                self._send(agent, Refuse(report.member, reason))
                return
        view = self._view(agent, report.member)
        if view is not None and view.evicted:
            self._send(agent, Kill(report.member.group, int(signals.SIGKILL)))  # it is not dead after all
        if view is None or view.state in CERTAINLY_GONE:
            return
        in_force = self._in_force(report.member)
        if self.complete and not in_force:
            return  # nobody is left to heal from: its agent is dismissed, or ends late joiners by itself
        before = view.ready
        if view.state is State.ACTIVE and before is not None and in_force and report.after <= view.fenced:
            return  # said again after a reconnect
        if view.ready is not None and report.after > view.ready.after:
            view.moving = False  # it was left out at once: nothing of it has left, and its agent will say it again
        view.ready, view.state, view.fenced = report, State.READY, max(view.fenced, report.after)
        self._leaves_with_its_node(view)
        if self.current is not None and in_force and report.after == self.current.id:
            self._nobody_settled(self.current)
        self._may_begin(report)
        if self.founded and (reason := misfit(report, self._at_work(report.member))):
            self._refuse(view, reason)
        elif before is None or report.looked > before.looked:
            source = "checkpoint" if report.kept == NO_QUORUM else "copy"
            start = f", from the {source} of step {report.step}" if report.step else ""
            self._event("ready", f"{report.member} is ready{start}", report.member.group)
            if self.founded and not in_force:
                self._drifts([report], self._at_work(report.member))

    def _adopted(self, agent: str, report: Adopted) -> None:
        self._news = self._news or self._waits or not self.founded
        self.founded = True
        view = self._view(agent, report.member)
        if view is not None and view.evicted:
            self._throws_away(view, view.step, report.step, "comes back after it was evicted")
            view.step = max(view.step, report.step)
        if view is None or view.state in CERTAINLY_GONE:
            return
        view.adopted, view.step = max(view.adopted, report.quorum), max(view.step, report.step)
        self._leaves_with_its_node(view)
        self.seen.progressed(report.step)
        if (offered := self._offered.get(report.quorum)) is not None:
            # Taken by one is taken by all, even if it was withdrawn here meanwhile: they decided at the same commit.
            self._before = self._current_id
            self._take(offered)
            self._offered = {id: q for id, q in self._offered.items() if id > offered.id}
            self.planned = self.planned if self.planned is not None and self.planned.id > offered.id else None
            self._replan_delay, self._replan_at = REPLAN_DELAY[0], 0.0
            if not self._complained & self._awaited:  # else they cannot finish the step after which it was taken
                self._trouble_at = None
            if self._unbuilt is not None and self._unbuilt.quorum == offered.id:
                self._trouble(self._unbuilt)  # it was taken before it broke, and is only heard of now
        if view.state is State.SUSPECT:
            view.state = State.READY  # its training thread said so, after its agent had seen it stand still
            self._news = True
        if self.current is None or report.quorum != self.current.id or not self._in_force(report.member):
            self._news = True
            return  # it works under a quorum that was replaced meanwhile, or was fenced
        view.state = State.ACTIVE
        self._awaited.discard(report.member)
        self._news = self._news or not self._awaited  # one of many that take it is no news, the last one is
        if report.step > self._strike_step:
            self._strikes = 0

    def _trouble(self, report: Trouble) -> None:
        if self.planned is not None and report.quorum == self.planned.id:
            # As far as is known. No one can have adopted what one member could not build.
            self._unbuilt = report
            self._withdraw(f"{report.member}: planned quorum {report.quorum}: {report.text}", report.member.group)
        elif self._in_force(report.member) and (report.quorum == self._current_id or self._holds_up(report)):
            if self._trouble_at is None:
                self._trouble_at, self._complained = self.seen.at, set()
            self._complained.add(report.member)
            self._event("trouble", f"{report.member} at step {report.step}: {report.text}", report.member.group)

    def _holds_up(self, report: Trouble) -> bool:
        """Whether it is about the quorum before a planned one that others have taken: who complains cannot finish the
        step after which they did, and they wait for it."""
        current = self.current is not None and not self.current.urgent
        return current and report.quorum == self._before and report.member in self._awaited

    def _finished(self, agent: str, report: Finished) -> None:
        view = self._view(agent, report.member)
        if view is None or view.state is State.FINISHED:
            return
        view.state, view.step, view.digest = State.FINISHED, report.step, report.digest
        self.founded = self.complete = True
        self.seen.progressed(report.step)
        self._event("finish", f"{report.member} finished at step {report.step}", report.member.group)
        if not report.digest:
            return
        self._digests.setdefault(report.digest, view)
        other = next((g for digest, g in self._digests.items() if digest != report.digest), None)
        if other is None:
            return
        text = f"finished groups hold different states: {other.member} {other.digest}, {report.member} {report.digest}"
        told = drift(view.ready, [other.ready]) if view.ready is not None and other.ready is not None else ""
        # With hardware or versions that may differ, equal bits were not promised.
        self._event("drift" if told else "mismatch", text, report.member.group)

    def _died(self, agent: str, report: Died) -> None:
        view = self._view(agent, report.member)
        if view is not None:
            view.evicted = False  # whatever an operator said of it, now it is true
            self._spared(view, report)
            view.draining = view.draining or report.moved
        if view is None or view.state in CERTAINLY_GONE:
            return
        if self._trouble_at is not None:
            seen = 2 * (self.seen.at - self._trouble_at)  # twice what it took this time
            self._trouble_window = min(max(seen, TROUBLE_WINDOW[0]), TROUBLE_WINDOW[1])
        self._gone_for_good(view, report.cause)

    def _gone_for_good(self, view: Group, cause: str) -> None:
        view.state, view.note = State.DEAD, cause
        self._strikes, self._replan_at = 0, 0.0  # what broke before has found its cause
        facts = (("incarnation", str(view.member.incarnation)), ("cause", cause))
        self._event("drain" if view.leaving else "lost", f"{view.member} is gone: {cause}", view.member.group, facts)

    def _suspected(self, report: Suspected) -> None:
        view = self.seen.of(report.member)
        if view is None or view.state not in (State.ACTIVE, State.READY):
            return
        view.state, view.note = State.SUSPECT, report.why
        self._event("suspect", f"{report.member} is suspected: {report.why}", report.member.group)

    def _leave_for_now(self, agent: str, report: Leaving) -> None:
        view = self._view(agent, report.member)
        if view is not None and view.state not in CERTAINLY_GONE and not view.leaving:
            view.moving = True
            text = f"{view.member} leaves after the next commit, and comes back when one of its ranks has moved"
            self._event("move", text, view.member.group)

    def _view(self, agent: str, member: Member) -> Group | None:
        view = self.seen.view(agent, member)
        if view is not None and self._last is not None and member not in self._last_members:
            view.fenced = max(view.fenced, self._last.id)  # by an earlier life of the lighthouse
        return view

    # --- decisions -------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        self._waits = False
        if self.stopped or self._rebuilding():
            return
        if self.complete:
            self._dismiss()
            self._seal()
        if self._sealed:
            return
        if not self.complete:
            self._carry_on()
        current = self.current
        if current is None:
            self._found()
            return
        if strangers := self._strangers():
            self._send_home(current, strangers)
            return
        trouble = self._trouble_at is not None and self.seen.at >= self._trouble_at + self._trouble_window
        trouble = trouble or self._unheard(current)
        gone = [m for m in current.members if self._gone(m, trouble) and not self._leaving(m)]
        if self._stateless != current.id and self._waits_for_spares(current, gone):
            return
        if gone or trouble or self._stateless == current.id:
            number = self._number
            self._replace(current, gone)
            self._waits = self._number == number
        elif self._trouble_at is None and self.seen.at >= self._replan_at:
            self._plan()

    def _plan(self) -> None:
        """Joins and leaves, taken by everybody after the same commit."""
        if self.complete:
            return
        usable = self._without_late([g for g in self.seen.groups.values() if self._usable(g)])
        want = [g for g in usable if not g.leaving]
        if not any(g.settled and self._in_force(g.member) for g in want):  # whoever leaves stays until one has healed
            want = [g for g in usable if not g.leaving or self._in_force(g.member)]
        members = {g.member for g in want}
        if self.planned is not None and not set(self.planned.members) <= {g.member for g in usable}:
            self.planned = None  # a joiner is gone again: it can never be built, and the old quorum simply goes on
        # One change at a time: a joiner that still forms or heals could not tell whether to drop it for the next one.
        if want and not self._awaited and self.planned is None and members != self._members:
            joining, leaving = members - self._members, self._members - members
            why = [f"{named(m)} {verb}" for m, verb in ((joining, "joining"), (leaving, "leaving")) if m]
            self._publish(want, False, "; ".join(why), founding=not self.founded)

    # --- small questions -------------------------------------------------------------------------------------

    def _at_work(self, besides: Member) -> Iterator[Ready]:
        """One is enough for most, so nobody looks at all of them."""
        views = self.seen.groups.values()
        return (v.ready for v in views if v.ready and v.state is State.ACTIVE and v.member != besides)
