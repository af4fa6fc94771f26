"""Low communication: how long the others wait for a group that is late at a sync.

A round ends for all groups together, so one that is much slower than it ever was would hold everybody up. Whoever is
later than its *grace window* is left out of that sync, as a lost group is, by an urgent quorum of the others: nothing
else could have all of them decide alike. It is not dead: it goes on to the end of its round, hears that it was left
out, takes the shared state and begins anew. (Decoupled DiLoCo has such a window at its syncer; here it follows from
what was seen of each group.)

The window is a multiple of the group's own longest round of late, so a group that always was slow has its time, and one
that has become slow for good is waited for once its window has grown: being late widens it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from planaria.core.liveness import EARLY_PASSES, HEARTBEAT_SECONDS, Rule, Silences
from planaria.core.messages import Member, Phase, QuorumId
from planaria.core.roster import Group

# Rounds are alike, but for evaluations, checkpoints and neighbours: three times the longest of the last two dozen or so
# (half of it after sixteen). Phases are seen once a second, so a floor of five heartbeats keeps four rounds of them
# between "a little late" and "left out". No ceiling: rounds may take hours.
ROUND = Rule(floor=5 * HEARTBEAT_SECONDS, factor=3.0, ceiling=math.inf, unseen=math.inf, half_life=16)


@dataclass(slots=True)
class _History:
    """Of one life of a group."""

    rounds: Silences = field(default_factory=lambda: Silences(ROUND))
    seen: bool = False  # at a round's beginning
    passes: int = 0  # whole rounds since; the first ones compile and fill caches: they are not judged
    arrived: int = -1  # the newest step at whose exchange it was seen


class Grace:
    """``look`` at every heartbeat's distance; all times are watched time, in seconds."""

    def __init__(self) -> None:
        self._known: dict[Member, _History] = {}
        self._step = -1
        self._quorum: QuorumId | None = None
        self._began = 0.0  # the round

    def look(self, at: float, step: int, quorum: QuorumId, views: Sequence[Group]) -> list[tuple[Group, str]]:
        """Of the members in force, ``step`` being the most that any has committed: those that the others wait for in
        vain, each with a sentence. At most half of them, and only if nobody else is still at work."""
        self._known = {v.member: self._known.get(v.member) or _History() for v in views}
        if step != self._step:
            rounds = max(1, step - self._step)  # several may have passed since the last look
            for view in views:
                history = self._known[view.member]
                history.passes += rounds if history.seen else 0
                history.seen = True
                if history.arrived < self._step:  # its end was not seen: it has lasted until now at most
                    self._learn(history, (at - self._began) / rounds)
        if (step, quorum) != (self._step, self._quorum):
            self._step, self._quorum, self._began = step, quorum, at
        waiting, late = 0, []
        for view in views:
            pulse, history = view.pulse, self._known[view.member]
            if pulse is None or pulse.step != step:
                return []  # its pulse is old, or it heals
            if pulse.phase is Phase.EXCHANGING:
                waiting += 1
                if history.arrived < step:
                    history.arrived = step
                    self._learn(history, at - self._began)
                continue
            judged = pulse.phase is Phase.COMPUTING and history.passes >= EARLY_PASSES
            if not judged or at - self._began <= history.rounds.limit:
                return []
            late.append((view, history))
        if not late or len(late) > waiting:
            return []
        found = []
        for view, history in late:
            seconds, told = at - self._began, history.rounds.describe()
            history.rounds.ended(seconds)
            found.append((view, f"late at sync {step}: still computing after {seconds:.1f} s ({told})"))
        return found

    @staticmethod
    def _learn(history: _History, seconds: float) -> None:
        if history.passes:
            history.rounds.ended(seconds)
