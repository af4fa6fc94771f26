"""An elector in a directory, for lighthouses of one machine or with a shared disk, that knows no locks.

A lock outlives a process that stands still: a leader that is stopped, or whose machine is paused, while it holds one
would keep every other from leading. So nothing here is changed, only added: whoever may make the next number decides
what follows from the state before, and to make it twice is what a file system refuses (link, with which NFS is content
too).

::

    0000000000000012     a whole state: who leads, the epoch, the newest quorum of every job; the highest number counts
    beat-NAME            rewritten with every renewal by the one that leads, and proof of nothing

A lease lapses when others have seen the beat unchanged for its length, each on its own clock.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.roster import LineageRecord
from planaria.errors import UsageError
from planaria.files import sync_directory
from planaria.lighthouse.elector import PATIENCE, Deposed, StoreAway, epoch_above, record_from_json, record_to_json

_DIGITS = 16
# States that stay for whoever is reading one that was the newest just now.
_KEPT = 16
# Of so many jobs none is forgotten, though it may have ended: every state holds all jobs.
_ENDED = 256


# What no patience mends.
_FOR_GOOD = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}
_FOR_GOOD |= {errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True, slots=True)
class _State:
    number: int = 0  # 0: there was none yet
    holder: str = ""  # the life of a lighthouse that leads; empty: nobody
    address: str = ""
    seconds: float = math.inf
    epoch: int = 0
    jobs: dict[str, str] = field(default_factory=dict)  # the newest quorum of each; changed last is last


class FileElector:
    def __init__(self, path: Path, seconds: float, name: str) -> None:
        """UsageError if the directory cannot be used."""
        self._path, self._seconds, self._name = path, seconds, name
        self._lock = threading.Lock()
        self._mine = _State()  # the newest that this one has made
        self._file: os.stat_result | None = None  # that holds it
        self._seen = 0  # the highest number
        self._beat = 0
        self._draft = path / f"draft-{name}"
        self._prepared = False
        if path.exists() and not path.is_dir():
            raise UsageError(f"--elector file:{path}: that is a file; give a directory of its own")
        try:
            self._prepare()
        except OSError as error:
            if error.errno in _FOR_GOOD:
                raise UsageError(f"--elector file:{path} cannot be used: {error.strerror}") from None
            # A disk that is full, or away, may be there when it is this one's turn to lead.

    @property
    def epoch(self) -> int:
        return self._mine.epoch

    def acquire(self, address: str, floor: int, over: str) -> Granted | Held:
        with self._using():
            self._prepare()
            now = self._newest()
            if now.holder not in ("", self._name):
                stamp = f"{now.number} {self._beat_of(now.holder)}"
                if stamp != over:
                    return Held(now.address, stamp, now.seconds)
            epoch = epoch_above(now.epoch, self._mine.epoch, floor)
            mine = replace(now, holder=self._name, address=address, seconds=self._seconds, epoch=epoch)
            if not self._follow(now, mine):
                return Held("", "", math.inf)  # somebody was faster: the next look says who
            if now.holder not in ("", self._name):  # it will not do so itself
                self._remove(f"beat-{now.holder}", f"draft-{now.holder}")
            return Granted(epoch)

    def renew(self) -> Renewed | Lost:
        """The beat first: who looked before it saw a lease that had lapsed, and ours then has lapsed for us too."""
        with self._using():
            self._write_beat()
            if self._leads():
                return Renewed()
            self._remove(f"beat-{self._name}")
            return Lost(str(self._deposed()))

    def release(self) -> None:
        with self._using():
            self._change(holder="")

    def append(self, record: LineageRecord) -> None:
        with self._using():
            jobs = {job: text for job, text in self._mine.jobs.items() if job != record.job}
            self._change(jobs=_without_old(jobs | {record.job: record_to_json(record)}))

    def last(self, job: str) -> LineageRecord | None:
        with self._using():
            if not self._leads():
                raise self._deposed()
            text = self._mine.jobs.get(job)
            return None if text is None else record_from_json(job, text)

    def bump_epoch(self) -> int:
        with self._using():
            self._change(epoch=epoch_above(self._mine.epoch))
            return self._mine.epoch

    def close(self) -> None:
        """Nothing is open; this life's own names are not needed any more."""
        self._remove(f"beat-{self._name}", self._draft.name)

    # --- states ----------------------------------------------------------------------------------------------

    def _change(self, **fields: object) -> None:
        """Deposed if another one leads: the number that follows ours is taken then, and stays so."""
        if not self._leads() or not self._follow(self._mine, replace(self._mine, **fields)):  # type: ignore[arg-type]
            raise self._deposed()

    def _follow(self, before: _State, state: _State) -> bool:
        """Make ``state`` the one that follows ``before``, on the disk when this returns. False if another one does."""
        state = replace(state, number=before.number + 1)
        path = self._state_path(state.number)
        # What stayed here when it could not be removed may be a state by now, which must not be written to.
        self._draft.unlink(missing_ok=True)
        content = {"holder": state.holder, "address": state.address, "seconds": state.seconds, "epoch": state.epoch}
        try:
            with self._draft.open("x") as file:
                json.dump(content | {"jobs": state.jobs}, file)
                file.flush()
                os.fsync(file.fileno())
                draft = os.fstat(file.fileno())
            with suppress(FileExistsError):  # or it was made at the first try, whose answer was lost on the way (NFS)
                os.link(self._draft, path)
            made = os.path.samestat(os.stat(path), draft)
        finally:
            self._remove(self._draft.name)
        # A number so old that it has been cleared away can be made once more, by one that slept: nobody will read it.
        numbers = self._numbers()
        if not made or numbers[-1] != state.number:
            return False
        sync_directory(self._path)
        self._mine, self._file = state, draft
        old = [number for number in numbers if number <= state.number - _KEPT]
        self._remove(*(self._state_path(number).name for number in old))
        return True

    def _newest(self) -> _State:
        numbers = self._numbers()
        if not numbers:
            return _State()
        try:
            found = json.loads(self._state_path(numbers[-1]).read_text())
            jobs = {str(job): str(text) for job, text in found["jobs"].items()}
            holder, address = str(found["holder"]), str(found["address"])
            return _State(numbers[-1], holder, address, float(found["seconds"]), int(found["epoch"]), jobs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreAway(f"{self._state_path(numbers[-1])} is unreadable ({error!r}); restore it") from None

    def _numbers(self) -> list[int]:
        """Of all states, in their order. StoreAway if some that were there are not there any more: another directory
        may have taken this one's place."""
        names = os.listdir(self._path)
        numbers = sorted(int(name) for name in names if len(name) == _DIGITS and name.isdecimal())
        newest = numbers[-1] if numbers else 0
        if newest < self._seen:
            raise StoreAway(f"{self._path} was replaced by an older one; start the lighthouse again")
        self._seen = newest
        return numbers

    def _leads(self) -> bool:
        """Whether the newest state is ours, and not one with its number in another directory that came in its place."""
        numbers = self._numbers()
        if not self._mine.holder or self._file is None or not numbers or numbers[-1] != self._mine.number:
            return False
        return os.path.samestat(os.stat(self._state_path(numbers[-1])), self._file)

    def _state_path(self, number: int) -> Path:
        return self._path / f"{number:0{_DIGITS}}"

    # --- beats -----------------------------------------------------------------------------------------------

    def _write_beat(self) -> None:
        """In its place: a name that changes what it stands for is seen late on some shared disks."""
        self._beat += 1
        file = os.open(self._beat_path(self._name), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, f"{self._beat:020}".encode(), 0)
        finally:
            os.close(file)

    def _beat_of(self, holder: str) -> str:
        try:
            return self._beat_path(holder).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _beat_path(self, holder: str) -> Path:
        return self._path / f"beat-{holder}"

    # --- the rest --------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Once: make the directory, and see that it takes links."""
        if self._prepared:
            return
        made = [path for path in (self._path, *self._path.parents) if not path.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_directory(path.parent)
        probe = self._path / f"probe-{self._name}"
        try:
            self._draft.touch()
            os.link(self._draft, probe)
        finally:
            self._remove(self._draft.name, probe.name)
        self._prepared = True

    def _remove(self, *names: str) -> None:
        """What can be removed; whatever stays does no harm."""
        for name in names:
            with suppress(OSError):
                (self._path / name).unlink(missing_ok=True)

    def _deposed(self) -> Deposed:
        return Deposed(f"{self._path} holds that another lighthouse leads")

    @contextmanager
    def _using(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=PATIENCE * self._seconds):
            raise StoreAway(f"{self._path} does not answer")  # the disk is silent, in a call of another thread
        try:
            yield
        except OSError as error:
            raise StoreAway(f"{self._path} cannot be used ({error})") from None
        finally:
            self._lock.release()


def _without_old(jobs: dict[str, str]) -> dict[str, str]:
    old = {job for job in list(jobs)[:-_ENDED] if _ended(record_from_json(job, jobs[job]))}
    return {job: text for job, text in jobs.items() if job not in old}


def _ended(record: LineageRecord) -> bool:
    return not record.members and record.run != record.id
