"""Durable checkpoints: the directory, and how a group writes to it and starts from it.

A checkpoint counts when the parts of all ranks are on the disk and it has got its name. A death before leaves nothing
that anybody would take; a death after leaves one that nobody has told of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from planaria.core.messages import Saved
from planaria.sim.flips import State

if TYPE_CHECKING:
    from planaria.sim.trainer import Trainer

KEEP = 2  # checkpoints
RANKS = 2  # of a group, each with a part of its own
PART_TIME = (0.01, 0.25)  # seconds, until a part is on the disk
NAMING_TIME = (0.0, 0.02)  # from the last part to the name
TELLING_TIME = (0.0, 0.05)  # from the name to the report: old checkpoints are removed between
LOAD_TIME = (0.01, 0.3)


class Disk:
    """A directory for checkpoints."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}  # of the complete ones, by step

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint; 0: there is none."""
        return max(self.states, default=0)

    def put(self, step: int, state: State) -> None:
        self.states.setdefault(step, state)  # another group may have been first in the quorum at the same step

    def prune(self) -> None:
        for step in sorted(self.states)[:-KEEP]:
            del self.states[step]


class Saver:
    """What ``planaria.torch.checkpoints`` is to a real group."""

    def __init__(self, trainer: Trainer, disk: Disk, every: int) -> None:
        self.trainer = trainer
        self.disk = disk
        self.every = every
        self.saving = False
        self.newest = 0  # step of the newest save here, or of the checkpoint that this life began with

    def committed(self, step: int, first: bool) -> None:
        """``first``: the group is the first member of the quorum that made the commit."""
        if first and step % self.every == 0 and step < self.trainer.world.config.steps and not self.saving:
            self.save(step)

    def save(self, step: int) -> None:
        self.saving = True
        state, missing = self.trainer.state, set(range(RANKS))

        def written(rank: int) -> None:
            missing.discard(rank)
            self._say("part", "rank {} has written its part of step {}", rank, step)
            if not missing:
                self._after(NAMING_TIME, lambda: self._named(step, state))

        for rank in range(RANKS):
            self._after(PART_TIME, lambda rank=rank: written(rank))  # type: ignore[misc]

    def _named(self, step: int, state: State) -> None:
        self.disk.put(step, state)
        self.newest = step
        self._say("durable", "the checkpoint of step {} is complete", step)
        self._after(TELLING_TIME, lambda: self._done(step))

    def _done(self, step: int) -> None:
        self.disk.prune()
        self.saving = False
        self.trainer.tell(Saved(self.trainer.member, step, 0.1))
        self._say("saved", "step {}", step)
        self.trainer.notice()

    def look(self) -> None:
        """Begin with the newest checkpoint."""
        step = self.disk.newest
        self._say("look", "finds the checkpoint of step {}", step)
        self._after(LOAD_TIME, lambda: self._loaded(step))

    def _loaded(self, step: int) -> None:
        if step and step not in self.disk.states:
            self.look()  # it was old, and is gone
            return
        if step:
            self.newest, self.trainer.state = step, self.disk.states[step]
        self.trainer.present(step)

    def _after(self, seconds: tuple[float, float], action: Callable[[], None]) -> None:
        self.trainer.process.after(self.trainer.kernel.between(*seconds), action)

    def _say(self, name: str, text: str, *values: object) -> None:
        self.trainer.world.emit(name, self.trainer.member.group, text, *values)
