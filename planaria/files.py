"""Files that are there whole or not at all, whoever reads them and whatever dies meanwhile."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
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
