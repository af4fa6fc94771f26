"""The stacks of a process that hangs, written by itself: an agent asks with a signal.

A thread answers that holds the interpreter lock meanwhile, so that no stack changes while it is read. Where it cannot
have the lock, because another thread keeps it in native code, a second signal (``insist``) is answered by
``faulthandler`` in its handler, in C: nothing in Python runs then, so nothing changes either. To ask for that at once
would be simpler, and now and then ends a process that does run (one of 167, as ranks were woken that had been stopped).
Only a process that is stopped, or waits in the kernel without letting itself be disturbed, writes nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

# Real-time signals: scripts and schedulers use SIGUSR1 and SIGUSR2 for words of their own.
SIGNAL = signal.SIGRTMAX - 3
INSISTING = signal.SIGRTMAX - 4
FILE = "stacks.txt"
# Within these a thread that can have the interpreter lock has had it.
ANSWER_SECONDS = 1.0

_open: list[IO[bytes]] = []
_calm: list[threading.Thread] = []


def answer_in(directory: Path) -> None:
    """From now on this process writes the stacks of all its threads to ``stacks.txt`` there if somebody insists."""
    try:
        file = (directory / FILE).open("ab", buffering=0)
    except OSError:
        return  # nowhere to write to: then there is nothing to answer
    faulthandler.register(INSISTING, file=file, all_threads=True, chain=False)
    for before in _open:
        before.close()
    _open[:] = [file]


def answer_on_a_thread() -> None:
    """And whenever it is asked. Before this a process is what an interpreter makes of a script, without a thread of
    ours. On the main thread: on another nothing changes. Threads that begin later take no notice of the signal."""
    if not _open or _calm:
        return
    with suppress(ValueError):  # not the main thread
        signal.signal(SIGNAL, lambda *_: None)  # should a script let it through, it does nothing
        signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
        _calm.append(threading.Thread(target=_answer, name="planaria-stacks", daemon=True))
        _calm[0].start()


def _answer() -> None:
    while True:
        signal.sigwait([SIGNAL])
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(_open[0], all_threads=True)


def ask(pid: int, insist: bool = False) -> bool:
    """Whether the process was asked: one that does not listen would end of the signal. It must be a child of this one,
    so that its number is not another's. ``insist``: it has not answered for ANSWER_SECONDS."""
    number = INSISTING if insist else SIGNAL
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        if not int(caught, 16) >> (number - 1) & 1:
            return False
        os.kill(pid, number)
    except (OSError, ValueError, IndexError):
        return False
    return True


def size(directory: Path) -> int:
    """Bytes that were written there before: what follows is the next answer."""
    try:
        return (directory / FILE).stat().st_size
    except OSError:
        return 0
