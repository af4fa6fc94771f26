"""Copies of a group's state in its ranks' memory: what is left of a group when it loses one rank.

A copy counts when all ranks have said that theirs is whole. With the next incarnation comes one new rank; the others
go on to hold what they held, and look at it when they are told that nobody has the state any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.core.messages import QuorumId
from planaria.sim.flips import State

if TYPE_CHECKING:
    from planaria.sim.trainer import Trainer

COPY_TIME = (0.005, 0.15)  # seconds, until all have said that theirs is whole


@dataclass(frozen=True, slots=True)
class Copied:
    """``under``: the quorum of the commit that made it."""

    step: int
    under: QuorumId
    state: State


class Memory:
    """What ``planaria.torch.buddies`` is to a real group."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.whole: Copied | None = None
        self._due = True
        self._busy = False

    def inherited(self) -> Memory:
        """As the next incarnation finds it, whose connections are new."""
        heir = Memory(self.every)
        heir.whole = self.whole
        return heir

    def committed(self, trainer: Trainer) -> None:
        step = trainer.stepper.step
        if self._busy or not (self._due or step % self.every == 0) or step >= trainer.world.config.steps:
            return
        self._due, self._busy = False, True
        made = Copied(step, trainer.stepper.under, trainer.state)

        def whole() -> None:
            self.whole, self._busy = made, False
            trainer.world.emit("copied", trainer.member.group, "step {}", step)

        trainer.process.after(trainer.kernel.between(*COPY_TIME), whole)
