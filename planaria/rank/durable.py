"""Durable checkpoints, as far as both fronts have them alike: when one is due, and which directories count.

::

    DIRECTORY/step-00000120/                 complete: it gets this name when everything in it is on the disk
    DIRECTORY/step-00000240.partial-rg0i1/   being written by group 0's incarnation 1, or left by a death
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.errors import UsageError

EVERY = 100
KEEP = 3
MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step-([0-9]{8,18})")
# To remove a directory that was made just now takes a moment; whoever stands still while it does so is not waited for.
_SWEPT_SECONDS = 10.0
_PARTIAL = re.compile(r"step-[0-9]{8,18}\.partial-.+")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Save after every ``every`` steps, and after the last one; keep the ``keep`` newest."""

    directory: Path
    every: int
    keep: int


def read_schedule(
    directory: str | os.PathLike[str] | None,
    every: int | None,
    keep: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Schedule | None:
    """The script's arguments and those of ``planaria run``: the command line's directory wins, the script's numbers do.
    None if there is no directory. Raises UsageError naming the setting."""
    where = environ.get("PLANARIA_CHECKPOINT") or directory
    numbers = {
        "every": _number("every", every, environ.get("PLANARIA_CHECKPOINT_EVERY"), EVERY),
        "keep": _number("keep", keep, environ.get("PLANARIA_CHECKPOINT_KEEP"), KEEP),
    }
    try:
        return Schedule(Path(where).absolute(), **numbers) if where else None
    except TypeError:
        raise UsageError(f"checkpoints: the directory must be a path, not {where!r}") from None


def _number(name: str, given: int | None, text: str | None, default: int) -> int:
    value: object = given if given is not None else text or default
    try:
        number = -1 if isinstance(value, bool | float) else int(str(value))
    except ValueError:
        number = -1
    if number < 1:
        raise UsageError(f"checkpoints: {name} must be a whole number of at least 1, not {value!r}")
    return number


_ADVICE = "Move that checkpoint away to start from the one before it"


def damaged(path: Path, how: str) -> UsageError:
    return UsageError(f"{path} is damaged: {how}. {_ADVICE}")


def unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror}. {_ADVICE}")


# --- directories ----------------------------------------------------------------------------------------------


def prepare_directory(directory: Path) -> None:
    """Make it, if need be. Raises UsageError if it cannot be written, or holds other things than checkpoints."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = [name for name in os.listdir(directory) if not name.startswith(".") and name != "lost+found"]
    except OSError as error:
        raise UsageError(f"the checkpoint directory {directory} cannot be used: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"the checkpoint directory {directory} cannot be written")
    if names and not any(_STEP.fullmatch(name) or _PARTIAL.fullmatch(name) for name in names):
        shown = ", ".join(sorted(names)[:3]) + ("…" if len(names) > 3 else "")
        raise UsageError(f"{directory} holds no checkpoints but {shown}; give a directory for checkpoints alone")


def step_directory(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Of the directory of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def checkpoints_in(directory: Path) -> list[Path]:
    """The directories of checkpoints, newest first."""
    found = [(int(match[1]), name) for name in os.listdir(directory) if (match := _STEP.fullmatch(name))]
    return [directory / name for _, name in sorted(found, reverse=True)]


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest. Raises OSError."""
    ours = [path for path in checkpoints_in(directory) if (path / MANIFEST).exists()]
    for path in ours[keep:]:
        with suppress(FileNotFoundError):  # another group, which saves too, removes the same
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint. Raises OSError."""
    # A name that does not count any more first: a death in the middle must not leave half a checkpoint.
    going = path.with_name(f"{path.name}.partial-removed")
    path.rename(going)
    if going.is_symlink():  # somebody keeps it elsewhere
        going.unlink()
    else:
        shutil.rmtree(going)


def sweep(directory: Path) -> None:
    """Remove what earlier saves left behind that did not get to their end. One that is under way is locked."""
    for name in os.listdir(directory):
        if not _PARTIAL.fullmatch(name):
            continue
        with suppress(OSError):
            held = os.open(directory / name, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if _lock(held) and _is_at(held, directory / name):
                    shutil.rmtree(directory / name)
            finally:
                os.close(held)


def make_held(path: Path) -> int:
    """Make a directory that nobody sweeps away while the descriptor is open. Raises OSError."""
    path.mkdir()
    deadline = time.monotonic() + _SWEPT_SECONDS
    while time.monotonic() < deadline:
        # Until it is locked others take it for one that was left behind, and may be about to remove it.
        with suppress(FileNotFoundError):
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(held) and _is_at(held, path):
                return held
            os.close(held)
            time.sleep(0.01)
        with suppress(FileExistsError):
            path.mkdir()
    raise TimeoutError(errno.ETIMEDOUT, "another process removes it, and does not get to the end", str(path))


def _lock(descriptor: int) -> bool:
    """False if somebody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: nothing can be known of others
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether this is still the directory that has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
