"""Small things about Linux processes that the standard library does not offer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from planaria.agent.parent import prctl

_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 0x4  # of the kernel's task flags: since before 2.6, and what ps reads too
_FLAGS, _EXIT_CODE = 9 - 3, 52 - 3  # fields of /proc/PID/stat (proc(5)), counted from the third on


def become_subreaper() -> None:
    """Orphans below this process become its children, so that it can reap what it did not fork itself."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def thread_count(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, which is the state; empty if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The command name is in parentheses and may contain anything, parentheses and blanks included.
    return text[text.rindex(")") + 2 :].split()


STOPPED = ("T", "t")  # by a signal, or by a debugger: see `state_of`


def state_of(pid: int) -> str:
    """One letter: R, S, D, T (stopped), t (traced), Z (zombie); "" if there is no process."""
    return next(iter(_stat(pid)), "")


def is_exiting(pid: int) -> bool:
    """Whether the process has begun to end, or is gone. It may have much to give back before its parent hears of it."""
    fields = _stat(pid)
    return not fields or fields[0] in ("Z", "X") or bool(int(fields[_FLAGS]) & _PF_EXITING)


def ending(pid: int) -> int | None:
    """How a process will have ended that has begun to end, as in ``subprocess``: it runs no code of its own any more.
    None while it runs, and if there is none. 0 also if the kernel does not tell us (a process of another user)."""
    fields = _stat(pid)
    if not fields or not (fields[0] in ("Z", "X") or int(fields[_FLAGS]) & _PF_EXITING):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))


async def has_ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a child without blocking the event loop; its return code."""
    if process.poll() is None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return process.wait()


def children_of_self() -> list[int]:
    """Pids of all children of all threads of this process."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            found += [int(word) for word in Path(f"/proc/self/task/{task}/children").read_text().split()]
    return found


def kill_group(pgid: int, signum: int = signal.SIGKILL) -> None:
    """Signal a whole process group; nothing happens if it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def reap_group(pgid: int) -> bool:
    """Reap dead children that belong to the process group. True when none of our children is left in it."""
    try:
        while os.waitpid(-pgid, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return True
    return False


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe(returncode: int) -> str:
    """In words, how a process ended; ``returncode`` as in ``subprocess`` (negative: the signal)."""
    if returncode < 0:
        return f"killed by {signal_name(-returncode)}"
    return f"exited with code {returncode}"


def end_all_children(keep: Iterable[int] = ()) -> int:
    """Kill and reap every child of this process, also those that become children while others die, but ``keep``.

    For the end of a process that owns all its children. Returns how many were ended. It waits only for
    processes that it has sent SIGKILL.
    """
    spared, ended = set(keep), 0
    while rest := [pid for pid in children_of_self() if pid not in spared]:
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in rest:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
                ended += 1
    return ended


def launch_beside(module: str, words: Iterable[str], log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``python -m module`` with this process's pid and ``words`` as arguments. Returns it and the descriptor at
    which its standard output is read, which is the caller's to close; its standard error is added to ``log``. Raises
    OSError if it cannot be started."""
    told, tell = os.pipe()
    try:
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid()), *words],
                cwd=Path(__file__).resolve().parents[2],  # so that ``-m`` finds the package when it is not installed
                stdin=subprocess.DEVNULL,
                stdout=tell,
                stderr=file,
                start_new_session=True,  # the terminal's Ctrl-C is for the agent alone
            )
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)
    return process, told
