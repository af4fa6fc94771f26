"""Measures recoveries: from the first sign of a loss until every member of the new quorum has adopted it."""

from __future__ import annotations

from planaria.core.messages import NO_QUORUM, Adopted, Member, Publish, QuorumId
from planaria.core.roster import Effect, Record, Send

_LOSSES = frozenset({"lost", "suspect", "late", "evict"})  # kinds of events that may break a membership


class RecoveryWatch:
    """Sees what goes in and what comes out of one job's state machine. Times are seconds of the caller's
    clock."""

    def __init__(self) -> None:
        self._hurt_at: float | None = None
        self._in_force = NO_QUORUM
        self._groups: dict[QuorumId, frozenset[int]] = {}  # of the quorum in force and of those offered since
        self._awaited: set[Member] = set()

    def effect(self, effect: Effect, now: float) -> None:
        match effect:
            case Record(event) if event.kind in _LOSSES and self._hurts(event.group):
                self._hurt_at = now if self._hurt_at is None else self._hurt_at
            case Send(_, Publish(_, quorum)) if quorum.id > self._in_force and quorum.id not in self._groups:
                self._groups[quorum.id] = frozenset(member.group for member in quorum.members)
                if quorum.urgent:
                    self._take(quorum.id)
                    if quorum.founding:  # a start is no recovery
                        self._awaited, self._hurt_at = set(), None
                    else:
                        self._awaited = set(quorum.members)
                        self._hurt_at = now if self._hurt_at is None else self._hurt_at
            case _:
                pass

    def adopted(self, report: Adopted, now: float) -> float | None:
        """The length of the recovery that this report ends, if it ends one."""
        if report.quorum > self._in_force and report.quorum in self._groups:  # a planned change was taken
            self._take(report.quorum)
            self._awaited, self._hurt_at = set(), None
        if report.quorum < self._in_force or not self._awaited:
            return None
        self._awaited.discard(report.member)
        if self._awaited or self._hurt_at is None:
            return None
        took, self._hurt_at = now - self._hurt_at, None
        return took

    def _hurts(self, group: int) -> bool:
        """A joiner that dies before it joined breaks nothing."""
        members = self._groups.get(self._in_force)
        return members is None or group in members

    def _take(self, id: QuorumId) -> None:
        self._in_force = id
        self._groups = {offered: groups for offered, groups in self._groups.items() if offered >= id}
