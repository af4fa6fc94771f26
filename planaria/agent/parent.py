"""A process that ends when its parent does, however that ends. Runs as a script by itself: ``tied``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """The kernel sends ``signum`` to this process when its parent ends. Ends it now if the parent is not
    ``parent`` any more: the parent may have died before this call."""
    prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def tied(command: Sequence[str]) -> list[str]:
    """``command`` for a child that is killed when this process ends. The child's pid is the command's.

    Not subprocess's preexec_fn: with one a child is forked with the handlers that libraries have registered for that,
    and gRPC's now and then abort the child of a process whose other threads are just talking.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *command]


def _become(parent: str, *command: str) -> None:
    """Nothing of what an interpreter does to its own process is left to the command."""
    die_with_parent(int(parent))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/environ", "rb") as file:  # as it was given
        if not any(each.startswith(b"LC_CTYPE=") for each in file.read().split(b"\0")):
            os.environ.pop("LC_CTYPE", None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    _become(*sys.argv[1:])
