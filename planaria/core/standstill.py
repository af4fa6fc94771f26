"""Everybody is there, and nobody gets on: all members wait for each other in one exchange, or in one healing. Or they
get on, and what was planned never comes.

A message can be lost though nobody died: on a network path that fails while the way to the lighthouse is whole, in a
switch, or by a mistake of ours. Then all wait for ever, and nothing that one of them sees tells that from a slow link
or a peer that computes for long. Who sees them all does. Such a wait is broken off by an urgent quorum of the same
members and begun anew: that costs the time of an exchange, and no result changes. Slow is not dead, so each time the
limit doubles; two members that cannot reach each other show when they form again, and one of them is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planaria.core.latecomers import Latecomers
from planaria.core.liveness import GENEROUS, HEARTBEAT_SECONDS, Rule, Silences
from planaria.core.messages import NO_QUORUM, Member, Phase, Pulse, QuorumId
from planaria.core.roster import CERTAINLY_GONE, LineageRecord, State

# What all wait for travels already, so an exchange takes as long as its slowest link needs, and much longer only if
# that has become much slower: five times the longest. A false alarm costs an exchange and doubles the limit, until that
# is forgotten within some hundred steps; the floor of twenty heartbeats keeps busy machines from raising any. Of the
# first exchange nothing is known, and of a later one that it is a part of its step. No ceiling: over slow links an
# exchange may take as long as it likes.
EXCHANGE = Rule(floor=20 * HEARTBEAT_SECONDS, factor=5.0, ceiling=math.inf, unseen=GENEROUS, half_life=200)
# An exchange that is hidden behind a step's computation is seen when it has to be done again with nothing to hide it.
STEPS = 2.0
# A communicator forms and the roll is called, too seldom to be learnt from. Whole states travel when members heal: ten
# minutes are 75 GB at a Gbit/s, and to be broken off costs all of it.
FORMING = Rule(floor=GENEROUS, factor=5.0, ceiling=math.inf, unseen=GENEROUS)
HEALING = Rule(floor=3 * GENEROUS, factor=5.0, ceiling=math.inf, unseen=3 * GENEROUS)
# So many standstills in a row are put down to slowness; from then on they count as communicators that break.
IN_A_ROW = 2
# A planned change that failed to form is proposed again after this long, doubled each time: the joiner is likely
# to be on its way out, and its agent will say so.
REPLAN_DELAY = (0.25, 8.0)
# A look is at all groups: there is none while steps follow each other.
LOOK_AFTER = 5 * HEARTBEAT_SECONDS

_WORDS = {
    Phase.EXCHANGING: "in the exchange of step {}",
    Phase.FORMING: "to form at step {}",
    Phase.HEALING: "for a healing at step {}",
}


class Standstill:
    """Of one job. ``look`` at every heartbeat's distance; all times are watched time, in seconds."""

    def __init__(self) -> None:
        rules = {Phase.EXCHANGING: EXCHANGE, Phase.FORMING: FORMING, Phase.HEALING: HEALING}
        self._waits = {phase: Silences(rule) for phase, rule in rules.items()}
        self._where = (-1, NO_QUORUM)
        self._what: Phase | None = None  # all members were seen to wait for this, ...
        self._since = 0.0  # ... first at this time

    def look(
        self, at: float, step: int, quorum: QuorumId, step_seconds: float, waiting: Callable[[], Phase | None]
    ) -> str | None:
        """Why the work on ``step``, the most that anybody has committed, stands still, if it does.

        ``step_seconds``: what a step takes; 0 if that is not known. ``waiting``: what all members of ``quorum`` wait
        for, EXCHANGING, FORMING or HEALING, or None if somebody does not wait."""
        exchanges = self._waits[Phase.EXCHANGING]
        if exchanges.longest is None and step_seconds:
            exchanges.ended(step_seconds)
        before, self._where = self._where, (step, quorum)
        if before != self._where:
            if 0 <= before[0] < step:
                self._learn(at)
            self._what = None
        what = waiting()
        if what != self._what:
            self._what, self._since = what, at
        if what is None:
            return None
        waits, silence = self._waits[what], at - self._since
        if silence <= max(waits.limit, STEPS * step_seconds if what is Phase.EXCHANGING else 0.0):
            return None
        told = f"{silence:.1f} s ({waits.describe()})"
        self._learn(at)  # as far as is known it is slow and not dead
        self._what = None
        return f"all members have waited {_WORDS[what].format(step)} for {told}"

    def _learn(self, at: float) -> None:
        """The wait is over, or there was none that anybody saw."""
        if self._what is None:
            self._waits[Phase.EXCHANGING].ended(0.0)
        else:
            self._waits[self._what].ended(at - self._since)


class Standstills(Latecomers):
    """``_break_off_what_stands_still`` and ``_withdraw_what_never_forms`` at every heartbeat."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._standstill = Standstill()
        self._look_for_standstill_at = 0.0  # watched time
        self._stood_still = NO_QUORUM  # a quorum that is replaced because it stood still
        self._in_a_row = (-1, 0)  # the newest step at which something did, and how often
        self._replan_at = 0.0
        self._replan_delay = REPLAN_DELAY[0]
        self._proposed = (NO_QUORUM, 0.0, 0)  # the planned quorum, since when, and at which step

    def _break_off_what_stands_still(self) -> None:
        if self.current is None or self.seen.at < self._look_for_standstill_at:
            return
        self._look_for_standstill_at = self.seen.at + HEARTBEAT_SECONDS / 2
        seen, id = self.seen, self.current.id
        why = self._standstill.look(seen.at, seen.top_step, id, seen.slowest, self._all_wait_for)
        if why is not None and self._trouble_at is None:
            self._trouble_at, self._complained, self._stood_still, self._news = self.seen.at, set(), id, True
            step, times = self._in_a_row
            self._in_a_row = seen.top_step, times + 1 if step == seen.top_step else 1
            self._event("still", f"quorum {id}: {why}: it is broken off and done again")

    def _all_wait_for(self) -> Phase | None:
        """What all members of the quorum in force wait for, if they are in reach and do wait for each other."""
        assert self.current is not None
        if self.seen.at < self.seen.progress_at + LOOK_AFTER or len(self.current.members) < 2:
            return None
        found = {self._waits_for(member) for member in self.current.members} - {Phase.FINISHED}
        if None in found or not found:
            return None
        return next(phase for phase in (Phase.HEALING, Phase.FORMING, Phase.EXCHANGING) if phase in found)

    def _waits_for(self, member: Member) -> Phase | None:
        """What a member of the quorum in force waits for; None: it does not, as far as is known. FINISHED: nobody need
        wait for it."""
        view = self.seen.of(member)
        if (view is None or view.state in CERTAINLY_GONE) and self._leaving(member):
            return Phase.FINISHED  # it has left in order, and sent what others needed
        if view is not None and view.state is State.FINISHED and self.complete:
            return Phase.FINISHED
        if view is None or view.state not in (State.ACTIVE, State.READY) or not self.seen.connected(view):
            return None
        match view.pulse:
            case Pulse(phase=Phase.HEALING | Phase.FORMING as phase):
                return phase
            case Pulse(phase=Phase.PARKED) if view.state is State.READY:
                return Phase.FORMING  # taken in, and what it is to form does not stand yet
            case Pulse(phase=Phase.EXCHANGING, quorum=quorum):
                # Of this step, or of the one before, which the others have committed, perhaps for another quorum.
                return Phase.EXCHANGING if quorum == self._current_id else Phase.FORMING
        return None

    @property
    def _current_id(self) -> QuorumId:
        return self.current.id if self.current is not None else NO_QUORUM

    def _leaving(self, member: Member) -> bool:
        """Whether its end is expected: a planned quorum without it is out, and it was drained. If it went too early,
        the others cannot exchange without it, and they will say so. If it is late or stands still it never comes to the
        commit after which it would leave."""
        out = self.planned is not None and member not in self.planned.members
        view = self.seen.groups.get(member.group)
        if view is None or not out or self._trouble_at is not None or view.state is State.SUSPECT:
            return False
        return view.leaving if view.member == member else view.member > member  # it has left, and is coming back

    def _withdraw_what_never_forms(self) -> None:
        """Training goes on while a planned quorum forms, so nobody complains if a member never gets it to stand; but as
        long as it is planned, no other change is."""
        if self.planned is None:
            return
        id, at, step = self._proposed
        if id != self.planned.id:
            self._proposed = self.planned.id, self.seen.at, self.seen.top_step
        elif self.seen.at > at + FORMING.floor and self.seen.top_step > step + 1:
            steps, minutes = self.seen.top_step - step, (self.seen.at - at) / 60
            self._withdraw(
                f"planned quorum {id} does not stand at all members after {steps} steps in {minutes:.0f} min"
            )

    def _withdraw(self, why: str, group: int = -1) -> None:
        """The planned change is to be planned anew, after a while."""
        self.planned, self._news = None, True
        self._replan_at = self.seen.at + self._replan_delay
        self._replan_delay = min(2 * self._replan_delay, REPLAN_DELAY[1])
        self._event("trouble", why, group)
