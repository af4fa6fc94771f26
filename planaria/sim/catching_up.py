"""The syncs that a member can tell others of, and the copy on its node: what planaria.torch.catching_up is to a real
group. Every simulated job has them, whatever its policy: who follows must come to the state that it would be given. If
bits flip, in what it follows from or in what it is compared with, it has to notice."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from planaria.core.actions import Heal
from planaria.core.messages import NO_QUORUM, QuorumId, Standing
from planaria.sim.memory import Copied

if TYPE_CHECKING:
    from planaria.sim.flips import State
    from planaria.sim.trainer import Trainer

LOG = 3  # syncs that are kept: fewer than many miss
Missed = tuple[Copied, int]  # what it began with, and the sum that was exchanged


class CatchUp:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._place = trainer.node, trainer.member.group
        self._log: deque[Missed] = deque(maxlen=LOG)
        self._here: Copied | None = None

    def told(self, standing: Standing) -> Standing:
        base = self._here or self._trainer.world.kept.get(self._place)
        key = (base.step, base.under) if base is not None else (0, NO_QUORUM)
        leads = self._here is not None and (self._here.step, self._here.under) == (standing.step, standing.under)
        history = tuple(base.under for base, _ in reversed(self._log)) if leads else ()
        return replace(standing, base=key, history=history)

    def committed(self, total: int) -> None:
        """``total``: the sum that made what is there now."""
        if self._here is None:
            self._log.clear()
        else:
            self._log.append((self._here, total))
        self._has(self._trainer.stepper.step, self._trainer.stepper.under)

    def lost(self) -> None:
        """The state is none that was made under a quorum."""
        self._here = None
        self._log.clear()

    def missed(self, since: int | None) -> tuple[Missed, ...]:
        return tuple(each for each in self._log if since is not None and each[0].step >= since)

    def healed(self, order: Heal, missed: tuple[Missed, ...], before: State) -> bool:
        """The state of ``order`` is here; ``missed``: what it could be made of as well, with what was here ``before``,
        and must be the same. False if it is not, because a bit has flipped: then it counts for nothing."""
        trainer, base = self._trainer, self._here or self._trainer.world.kept.get(self._place)
        state = before if self._here is not None else None
        self.lost()
        if order.since is not None:
            assert base is not None
            state = base.state if state is None else state
            for began, total in missed:
                if began.step >= base.step:
                    state = state.applied(began.step, total)
                    self._log.append((began, total))
            if state != trainer.state:
                if trainer.checks:
                    trainer.world.kept.pop(self._place, None)
                    self._log.clear()
                    trainer.state = state  # it was made in place
                    return False
                trainer.world.checker.fail(f"{trainer.member} follows from step {base.step} to another state")
            trainer.world.emit("follows", trainer.member.group, "from step {}", base.step)
        self._has(order.step, order.under)
        return True

    def _has(self, step: int, under: QuorumId) -> None:
        self._here = self._trainer.world.kept[self._place] = Copied(step, under, self._trainer.state)
