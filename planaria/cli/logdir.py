"""The directory of a run: one run at a time, the traces of earlier ones out of the way, and runs found again."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from planaria.agent.proc import state_of
from planaria.errors import UsageError

_FILES = (
    "run.json",
    "events.jsonl",
    "summary.json",
    "lighthouse.log",
    "lighthouse.db",
    "lighthouse.db-journal",
    "lighthouse.db-shm",
    "lighthouse.db-wal",
    "forkserver.log",
)
_GROUP = re.compile(r"rg[0-9]+|standbys")
_LEFT = re.compile(r"rg[0-9]+(-i[0-9]+)?|standbys")  # by groups, here or in jobs of a scheduler
_EARLIER = re.compile(r"earlier-([0-9]+)")
_INCARNATION = re.compile(r"i([0-9]+)")


def directory_given(text: str) -> Path:
    """What ``--log-dir`` says. Raises UsageError for nothing at all, which a shell makes of an unset variable."""
    if not text.strip():
        raise UsageError("--log-dir is empty; give a directory, or leave the option out")
    return Path(text)


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep ``directory`` for this process. Raises UsageError if another run has it.

    The kernel lets go of it when this process ends, however that happens, so that nothing stale is ever in the way.
    """
    with usable(directory):
        file = (directory / "lock").open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            whose = file.read(20).strip()
            who = f"another run (pid {whose})" if whose else "another run"
            raise UsageError(f"{who} uses {directory}; give another --log-dir") from None
        except OSError:
            pass  # a file system without locks: nothing can be known of others
        with usable(directory):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


@contextmanager
def usable(directory: Path) -> Iterator[None]:
    """UsageError if what is done inside cannot be done: the run cannot even begin to write there."""
    try:
        yield
    except OSError as error:
        where = error.filename or directory
        raise UsageError(f"cannot write {where} ({error.strerror}); give another --log-dir") from None


def read_run(path: Path) -> dict[str, Any] | None:
    """What a ``run.json`` says; None if there is none. Raises UsageError if it does not describe a run."""
    try:
        run = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} does not describe a run ({error})") from None
    if not isinstance(run, dict) or not {"job", "lighthouse"} <= run.keys():
        raise UsageError(f"{path} does not describe a run of planaria")
    return run


def read_summary(directory: Path, job: str) -> dict[str, Any] | None:
    """The last words of the run in ``directory``; None while it has not ended, or if they are of another job."""
    with suppress(OSError, ValueError):
        summary = json.loads((directory / "summary.json").read_text())
        if isinstance(summary, dict) and summary.get("job") == job:
            return summary
    return None


def lives(directory: Path, run: dict[str, Any]) -> bool:
    """Whether the agent of a run still runs. One that has written its last words has ended: another process may have
    got its pid."""
    pid = run.get("pid")
    if not isinstance(pid, int) or read_summary(directory, str(run["job"])) is not None:
        return False
    return state_of(pid) not in ("", "Z")


def former_life(directory: Path, job: str) -> tuple[str, dict[int, int]]:
    """For an agent that is started again after a death, in the directory that it holds: its name, and the next
    incarnation of each of its groups. An empty name: no agent of the job died here."""
    run = read_run(directory / "run.json")
    if run is None or run["job"] != job or read_summary(directory, job) is not None:
        return "", {}
    following: dict[int, int] = {}
    for path in (*directory.glob("rg*/i*"), *directory.glob("earlier-*/rg*/i*")):
        if _GROUP.fullmatch(path.parent.name) and (match := _INCARNATION.fullmatch(path.name)):
            group = int(path.parent.name[2:])
            following[group] = max(following.get(group, 0), int(match[1]) + 1)
    return str(run.get("agent") or ""), following


def move_aside(directory: Path) -> None:
    """An earlier run's traces in ``directory`` are kept, where they cannot be taken for this run's. What is not a
    run's stays as it is; UsageError if a file that is not a run's would be overwritten."""
    try:
        run = read_run(directory / "run.json")
    except UsageError as error:
        raise UsageError(f"{error}, and a run would overwrite it; give another --log-dir") from None
    if run is None:
        return
    found = [path for name in _FILES if (path := directory / name).is_file()]
    _set_aside(directory, [*_groups(directory), *found])


def move_groups_aside(directory: Path) -> None:
    """The same for what the groups have left in ``directory`` only."""
    if groups := _groups(directory):
        _set_aside(directory, groups)


def _groups(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if _LEFT.fullmatch(path.name) and path.is_dir()]


def _set_aside(directory: Path, paths: list[Path]) -> None:
    taken = [int(match[1]) for path in directory.iterdir() if (match := _EARLIER.fullmatch(path.name))]
    aside = directory / f"earlier-{max(taken, default=0) + 1}"
    with usable(directory):
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)


def check_writable(path: Path, option: str) -> None:
    """Raise UsageError if no file can be written at ``path``: better now than after hours of work."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {parent}")
    if path.is_dir():
        raise UsageError(f"{option} {path}: that is a directory")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise UsageError(f"{option} {path}: cannot write there")
