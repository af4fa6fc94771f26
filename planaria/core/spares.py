"""The policy ``spare``: when a member is lost whose place a standby takes, the others wait for it, up to a limit.

It is the agent that knows whether there is a standby, and says so with the death (``Died.spare``). Then the quorum that
is broken is replaced by one with the same groups, once, and every group goes on with the shards that it has. Nobody is
waited for if another member is lost without a standby, for then shards must be given to others anyway.
"""

from __future__ import annotations

from planaria.core.drains import Drains
from planaria.core.messages import Died, Member, Policy, Quorum
from planaria.core.roster import CERTAINLY_GONE, Group, LineageRecord, State


class Spares(Drains):
    """``_waits_for_spares`` is asked before a quorum that has lost members is replaced."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._spare_until: float | None = None  # watched time at which the present wait ends

    def _spared(self, view: Group, report: Died) -> None:
        """Said with the death, and once more if it has turned out otherwise."""
        self._news = self._news or view.spared != report.spare
        view.spared = report.spare

    def _waits_for_spares(self, current: Quorum, gone: list[Member]) -> bool:
        if self.spec is None or self.spec.policy is not Policy.SPARE or self.complete or not self.founded or not gone:
            return False
        held = any(v.settled and self._usable(v) for m in current.members if (v := self.seen.of(m)) is not None)
        if not held or not all(self._expected(member) for member in gone):
            return False
        if all(self._there(member) for member in gone):
            return False
        if self._spare_until is None:
            self._spare_until = self.seen.at + self.spec.spare_wait
            self._event(
                "spare", f"waiting up to {self.spec.spare_wait:g} s for standbys to take the places of the lost"
            )
        return self.seen.at < self._spare_until

    def _take(self, quorum: Quorum | None) -> None:
        super()._take(quorum)
        self._spare_until = None

    def _expected(self, lost: Member) -> bool:
        """Whether a standby has taken the place of ``lost``, or is about to."""
        view = self.seen.groups.get(lost.group)
        if view is None or not self.seen.connected(view):
            return False
        if view.state in CERTAINLY_GONE:
            return view.state is State.DEAD and view.spared
        return view.member > lost and view.state is not State.SUSPECT

    def _there(self, lost: Member) -> bool:
        view = self.seen.groups.get(lost.group)
        return view is not None and view.member > lost and view.state is State.READY
