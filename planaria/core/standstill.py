"""Everybody is there, and nobody gets on: all members wait for each other in one exchange, or in one healing.

A message can be lost though nobody died: on a network path that fails while the way to the lighthouse is whole, in a
switch, or by a mistake of ours. Then all wait for ever, and nothing that one of them sees tells that from a slow link
or a peer that computes for long. Who sees them all does. Such a wait is broken off by an urgent quorum of the same
members and begun anew: that costs the time of an exchange, and no result changes. If it stands still again and again,
two members cannot reach each other, and one of them is left out (``Lighthouse._leave_one_out``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planaria.core.latecomers import Latecomers
from planaria.core.liveness import GENEROUS, HEARTBEAT_SECONDS, Rule, Silences
from planaria.core.messages import NO_QUORUM, Phase, Pulse, QuorumId
from planaria.core.roster import LineageRecord, State

# What all wait for travels already, so an exchange takes as long as its slowest link needs, and much longer only if
# that has become much slower: five times the longest. A false alarm costs an exchange and doubles the limit, until that
# is forgotten within some hundred steps; the floor of twenty heartbeats keeps busy machines from raising any. Of the
# first exchange nothing is known, and of a later one that it is a part of its step. No ceiling: over slow links an
# exchange may take as long as it likes.
EXCHANGE = Rule(floor=20 * HEARTBEAT_SECONDS, factor=5.0, ceiling=math.inf, unseen=GENEROUS, half_life=200)
# A communicator forms, the roll is called, whole states travel: too seldom to be learnt from, and to be broken off
# costs more.
HEALING = Rule(floor=GENEROUS, factor=5.0, ceiling=math.inf, unseen=GENEROUS)
# A look is at all groups: there is none while steps follow each other.
LOOK_AFTER = 5 * HEARTBEAT_SECONDS

_WORDS = {Phase.EXCHANGING: "in the exchange of step {}", Phase.HEALING: "to form and heal at step {}"}


class Standstill:
    """Of one job. ``look`` at every heartbeat's distance; all times are watched time, in seconds."""

    def __init__(self) -> None:
        self._waits = {Phase.EXCHANGING: Silences(EXCHANGE), Phase.HEALING: Silences(HEALING)}
        self._where = (-1, NO_QUORUM)
        self._what: Phase | None = None  # all members were seen to wait for this, ...
        self._since = 0.0  # ... first at this time

    def look(
        self, at: float, step: int, quorum: QuorumId, step_seconds: float, waiting: Callable[[], Phase | None]
    ) -> str | None:
        """Why the work on ``step``, the most that anybody has committed, stands still, if it does.

        ``step_seconds``: what a step takes; 0 if that is not known. ``waiting``: what all members of ``quorum`` wait
        for, EXCHANGING or HEALING (forming is part of that), or None if somebody does not wait."""
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
        if what is Phase.EXCHANGING and waits.longest is None and step_seconds:
            waits.ended(step_seconds)
        if silence <= waits.limit:
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
    """``_break_off_what_stands_still`` at every heartbeat."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._standstill = Standstill()
        self._look_for_standstill_at = 0.0  # watched time
        self._stood_still = NO_QUORUM  # a quorum that is replaced because it stood still

    def _break_off_what_stands_still(self) -> None:
        if self.current is None or self.complete or self.seen.at < self._look_for_standstill_at:
            return
        self._look_for_standstill_at = self.seen.at + HEARTBEAT_SECONDS / 2
        seen, id = self.seen, self.current.id
        why = self._standstill.look(seen.at, seen.top_step, id, seen.slowest, self._all_wait_for)
        if why is not None and self._trouble_at is None:
            self._trouble_at, self._complained, self._stood_still, self._news = self.seen.at, set(), id, True
            self._event("trouble", f"quorum {id}: {why}: it is broken off and done again")

    def _all_wait_for(self) -> Phase | None:
        """What all members of the quorum in force wait for, if they are in reach and do wait for each other."""
        assert self.current is not None
        if self.seen.at < self.seen.progress_at + LOOK_AFTER or len(self.current.members) < 2:
            return None
        what = Phase.EXCHANGING
        for member in self.current.members:
            view = self.seen.of(member)
            if view is None or view.state not in (State.ACTIVE, State.READY) or not self.seen.connected(view):
                return None
            match view.pulse:
                case Pulse(phase=Phase.HEALING | Phase.FORMING):
                    what = Phase.HEALING
                case Pulse(phase=Phase.EXCHANGING, quorum=self.current.id):
                    pass  # of the newest step, or of the one before it, which the others have committed
                case _:
                    return None
        return what
