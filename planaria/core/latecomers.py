"""Low communication: a group that the others wait for much longer than ever before is left out of that sync.

``Grace`` says which. Such a group lives: it ends its round, hears that the others went on, and asks to be taken in.
"""

from __future__ import annotations

from planaria.core.grace import Grace
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import NO_QUORUM, Phase
from planaria.core.roster import Group, LineageRecord, State
from planaria.core.spares import Spares


class Latecomers(Spares):
    """``_leave_out_who_is_late`` at every heartbeat; ``_without_late`` before a planned change."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._grace = Grace()
        self._look_for_late_at = 0.0  # watched time; not at every heartbeat, for each look is at all groups
        self._held_back = False  # a group that could join, but for a round that it must end first

    def _leave_out_who_is_late(self) -> None:
        """Groups that the others wait for in vain, where a sync may go without them. Asked at every heartbeat."""
        self._news = self._news or self._held_back
        if self.current is None or self.complete or self.seen.at < self._look_for_late_at:
            return
        self._look_for_late_at = self.seen.at + HEARTBEAT_SECONDS / 2
        views = [v for m in self.current.members if (v := self.seen.of(m)) is not None]
        whole = len(views) == len(self.current.members) and not self._awaited and self._trouble_at is None
        if not whole or not all(v.state is State.ACTIVE and v.ready and v.ready.lenient for v in views):
            return
        if not all(self.seen.connected(v) for v in views):
            return
        for view, why in self._grace.look(self.seen.at, self.seen.top_step, self.current.id, views):
            view.late += 1
            view.state, self._news = State.SUSPECT, True
            view.note = f"left out {view.late} time{'s' if view.late > 1 else ''}: {why}"
            self._event("late", f"{view.member} is left out: {why}", view.member.group)

    def _without_late(self, usable: list[Group]) -> list[Group]:
        found = [view for view in usable if not self._ends_its_round(view)]
        self._held_back = len(found) < len(usable)
        return found

    def _ends_its_round(self, view: Group) -> bool:
        """Whether it was left out of a sync by an earlier life of the lighthouse, and is in that round still: in their
        first roll call with it the others would wait for its end."""
        if self._in_force(view.member) or view.ready is None or not view.ready.lenient or view.adopted == NO_QUORUM:
            return False
        computes = view.pulse is None or view.pulse.phase is Phase.COMPUTING
        return computes and view.ready.after < view.fenced
