"""Durable checkpoints: when one is due, who writes it, and what is said of it. What is in one is the front's.

At a due commit the first member of the quorum in force takes a copy of its state, which is the only pause, and writes
it from a thread of its own. No other group takes part.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from planaria.core.fingerprint import SOFT
from planaria.core.messages import Member, Saved
from planaria.errors import PlanariaError, UsageError
from planaria.rank.durable import Schedule, checkpoints_in, prepare_directory, prune, step_directory
from planaria.rank.front import World
from planaria.rank.settings import Settings


class Saver(ABC):
    """One per rank, made by all ranks of the group together. Raises UsageError if the directory cannot be one for
    checkpoints.

    ``member``: the life that the group is at now; ``gather`` gives every rank's payload; ``tell`` hears, on another
    thread, of every save of this group, at rank 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        settings: Settings,
        world: World,
        total: int,
        member: Callable[[], Member],
        gather: Callable[[bytes], list[bytes]],
        tell: Callable[[Saved], None],
    ) -> None:
        self.schedule = schedule
        self._settings = settings
        self._rank = world.rank
        self._total = total
        self._member = member
        self.prints: tuple[tuple[str, str], ...] = ()  # the group's fingerprint, once it is known
        self._gather = gather
        self._tell = tell
        self._newest = 0  # step of the newest complete save here, or of the one that this life began with
        self._saving = 0  # step of the newest save
        self._thread: threading.Thread | None = None
        prepare_directory(schedule.directory)

    @abstractmethod
    def _take(self, path: Path, step: int) -> Callable[[], None]:
        """Take a copy of the state; what is returned writes it to ``path``, on another thread. The ranks of a group do
        it alike. Raises PlanariaError, with a sentence, if there is no room for it."""

    def committed(self, step: int, first: bool) -> None:
        """``step`` steps are committed; ``first``: this group was the first member of their quorum."""
        if first and step < self._total and step % self.schedule.every == 0:
            self._save(step)

    def end(self, step: int, first: bool) -> None:
        """The job ends in order after ``step`` steps, its last or not: nothing of them shall be lost."""
        self.wait()
        if first and step > self._newest:
            self._save(step)
            self.wait()

    def wait(self) -> None:
        """Until the save under way, if there is one, is complete. Also before connections are renewed that were cut, or
        else it would go on with the new ones."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def joined(self) -> None:
        """The group has a new rank, which knows of no save: all of them count from what all know."""
        self._newest = min(int(each) for each in self._gather(b"%d" % self._newest))

    def _found(self) -> list[Path]:
        """The checkpoints, newest first, the same for all ranks of the group."""
        found = "\n".join(path.name for path in checkpoints_in(self.schedule.directory))
        names = self._gather(found.encode())[0].decode().split()
        return [self.schedule.directory / name for name in names]

    def _save(self, step: int) -> None:
        if why := self._any(self._busy()):
            self._warn(f"the checkpoint of step {step} is left out: {why}")
            return
        began = time.monotonic()
        path = step_directory(self.schedule.directory, step)
        try:
            write = self._take(path, step)
        except PlanariaError as error:
            self._failed(step, began, f"the checkpoint of step {step} could not be taken: {error}")
            return
        self._saving = step
        self._thread = threading.Thread(
            target=self._write, args=(write, path, step, began), name="planaria-checkpoint", daemon=True
        )
        self._thread.start()

    def _any(self, why: str) -> str:
        """The first rank's reason, if any has one, not to go on: all ranks of the group must do the same."""
        return next(filter(None, (each.decode() for each in self._gather(why.encode()))), "")

    def _busy(self) -> str:
        if self._thread is not None and self._thread.is_alive():
            return f"that of step {self._saving} is still being written; save less often"
        return ""

    def _owner(self) -> str:
        member = self._member()
        return f"rg{member.group}i{member.incarnation}"

    def _write(self, write: Callable[[], None], path: Path, step: int, began: float) -> None:
        """On the thread of the save."""
        try:
            write()
        except Exception as error:
            self._failed(step, began, f"the checkpoint {path} could not be written: {cause(error)}")
            return
        self._newest = step
        if self._rank == 0:
            try:
                prune(self.schedule.directory, self.schedule.keep)
            except OSError as error:
                self._warn(f"old checkpoints in {self.schedule.directory} cannot be removed: {cause(error)}")
            self._tell(Saved(self._member(), step, time.monotonic() - began))

    def _failed(self, step: int, began: float, trouble: str) -> None:
        self._warn(f"{trouble}. Training goes on; the next one is due at step {step + self.schedule.every}")
        if self._rank == 0:
            self._tell(Saved(self._member(), step, time.monotonic() - began, trouble))

    def _warn(self, sentence: str) -> None:
        """Once for a group."""
        if self._rank == 0:
            sys.stderr.write(f"{self._settings.where}: {sentence}\n")
            sys.stderr.flush()

    def _compare(
        self,
        path: Path,
        step: int,
        seed: int,
        shards: int,
        there: tuple[tuple[str, str], ...],
        known: Callable[[str], bool],
    ) -> None:
        """With what a checkpoint says of its job. Raises UsageError for another one's; tells what may change bits, but
        for the entries of the fingerprint that are ``known`` to be compared elsewhere."""
        ours = self._settings
        for name, here, theirs in (("seed", ours.seed, seed), ("number of shards", ours.shards, shards)):
            if here != theirs:
                raise UsageError(
                    f"the checkpoint {path} is of another job: its {name} is {theirs}, here it is {here}; make them "
                    "alike, or give another directory"
                )
        if step > self._total:  # its state would be given out for that of the step that the script asks for
            raise UsageError(
                f"the checkpoint {path} is of a longer job: {step} steps are committed in it, and job.steps asks for "
                f"{self._total}; ask for {step} or more, or give another directory"
            )
        was = {key.removeprefix(SOFT): value for key, value in there}
        hard = {key: value for key, value in self.prints if not key.startswith(SOFT) and not known(key)}
        differ = [f"{key} ({was.get(key, 'absent')} there, {v} here)" for key, v in hard.items() if was.get(key) != v]
        if differ:
            self._warn(
                f"the checkpoint {path} was written under other conditions, so the bits may come to differ from those "
                f"of a run that never stopped: {', '.join(differ)}"
            )


def cause(error: BaseException) -> str:
    """Why something could not be written or read, in words."""
    if isinstance(error, PlanariaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
