"""How long the others needed to go on after a death, read from their progress pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planaria.core.messages import Adopted, Member, QuorumId


@dataclass(slots=True)
class _Open:
    died_ns: int
    quorum: QuorumId  # in force when it died
    first_step: dict[Member, int] = field(default_factory=dict)  # the first commit that counts, by survivor

    def survivor(self, report: Adopted) -> None:
        if report.quorum > self.quorum:
            self.first_step.setdefault(report.member, report.step + 1)


class RecoveryTimes:
    """A recovery ends with the first commit that a survivor makes under a newer quorum: a commit right after the death
    may have been as good as made before it."""

    def __init__(self) -> None:
        self._open: dict[Member, _Open] = {}
        self._newest: dict[Member, Adopted] = {}

    def died(self, member: Member, quorum: QuorumId, at_ns: int | None = None) -> None:
        """``at_ns``: when, on the monotonic clock; now if not given."""
        self._open[member] = _Open(time.monotonic_ns() if at_ns is None else at_ns, quorum)
        self._newest.pop(member, None)
        # The survivors' answer to the death may have come in before the death itself was looked into.
        for report in self._newest.values():
            self._open[member].survivor(report)

    def adopted(self, report: Adopted) -> None:
        self._newest[report.member] = report
        for recovery in self._open.values():
            recovery.survivor(report)

    def forget(self) -> None:
        """Nobody is left who could go on."""
        self._open.clear()

    def closed(self, commits: Callable[[Member], list[tuple[int, int]]]) -> list[tuple[Member, float, int]]:
        """(who had died, seconds until the commit, its step) of the recoveries that are over by now.

        ``commits`` gives (step, monotonic ns) of a member's recent commits.
        """
        over = []
        for dead, recovery in list(self._open.items()):
            found = [
                (at, step)
                for member, first in recovery.first_step.items()
                for step, at in commits(member)
                if step >= first and at > recovery.died_ns
            ]
            if found:
                at, step = min(found)
                del self._open[dead]
                over.append((dead, (at - recovery.died_ns) / 1e9, step))
        return over
