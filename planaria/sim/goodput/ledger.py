"""Where the time of a run went. All parts together are the time that passed."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Ledger:
    """Seconds of the whole job. Work that was taken back is moved from ``kept`` to ``redone``."""

    kept: float = 0.0  # what the work that counts would have taken without failures, at full strength
    overhead: float = 0.0  # of the healthy step
    absent: float = 0.0  # groups that were away
    uneven: float = 0.0  # shards that do not divide by the groups that were there: some wait for others
    stalled: float = 0.0  # noticing, and forming anew
    healing: float = 0.0  # waiting for one that takes the state
    redone: float = 0.0  # work done twice
    saving: float = 0.0  # checkpoints
    restarting: float = 0.0  # of the whole job
    waiting: float = 0.0  # for machines

    @property
    def total(self) -> float:
        return sum(float(getattr(self, each.name)) for each in fields(self))

    def shares(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) / self.total for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Outcome:
    ledger: Ledger
    steps: float  # committed, and not taken back
    discarded: int  # attempts at a step that were thrown away
    failures: int  # that hit a group
    share: float  # of all GPUs, those at work at full strength
    keeps_batch: bool

    @property
    def effective(self) -> float:
        """Effective training time: samples that counted, over what the same groups make without failures."""
        return self.ledger.kept / self.ledger.total

    @property
    def of_all(self) -> float:
        """The same, over what all GPUs would make, spares too."""
        return self.effective * self.share

    @property
    def samples_lost(self) -> float:
        """Share of the committed steps' samples that were not in them."""
        lost = 0.0 if self.keeps_batch else self.ledger.absent
        return lost / (self.ledger.kept + lost) if lost else 0.0

    @property
    def steps_kept(self) -> float:
        """Of all attempts at a step, those that were committed."""
        return self.steps / (self.steps + self.discarded) if self.steps else 0.0
