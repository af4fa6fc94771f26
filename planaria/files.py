"""Files that are there whole or not at all, whoever reads them and whatever dies meanwhile."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_whole(path: Path, text: str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Put ``text`` in ``path``'s place; who reads finds what was there before, or all of it.

    ``mode``: who may read it (less the umask), at no moment more. ``durable``: it is on the disk when this returns, so
    that the machine may die too. One writer at a time. Raises OSError, and leaves what was there then."""
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.unlink(missing_ok=True)  # of one that died meanwhile, of whatever mode
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
    if durable:
        sync_directory(path.parent)


@contextmanager
def one_at_a_time(lock: Path, mode: int = 0o666) -> Iterator[None]:
    """Only one process of this machine inside; ``lock`` is a file for nothing else, which stays, and the lock goes with
    the process that holds it. Raises OSError if there can be no such file."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """A new name is on the disk only once its directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # what some network file systems say, which cannot do it
            raise
    finally:
        os.close(descriptor)
