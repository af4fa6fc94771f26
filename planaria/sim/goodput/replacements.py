"""When a group that was lost is started again: ``core.plan``'s back-off and budget, in virtual time."""

from __future__ import annotations

from bisect import insort

from planaria.core.plan import PlanSpec, backoff, quick_failures


class Replacements:
    """``core.plan.plan`` says the same of the same view (a test compares them); asking it for every group at every
    event would look at all groups each time."""

    def __init__(self, groups: int) -> None:
        self.spec = PlanSpec(desired=groups)
        self._started: list[float] = []  # ascending

    def start(self, now: float, failures: int) -> float:
        """When a group that died at ``now``, after so many quick failures in a row, is started again."""
        due = now + backoff(self.spec, failures)
        while self._started and self._started[0] + self.spec.budget_window <= now:
            del self._started[0]
        if len(self._started) >= self.spec.budget:
            due = max(due, self._started[-self.spec.budget] + self.spec.budget_window)
        insort(self._started, due)
        return due

    def died_starting(self, failures: int, lived: float) -> int:
        """The count for a group that died again before it held the state."""
        return quick_failures(self.spec, failures, lived, settled=False)
