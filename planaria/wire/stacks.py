"""The stacks of a process that hangs, written by itself: an agent asks with a signal, and ``faulthandler`` answers.

It answers in the handler, in C: also while a thread keeps the interpreter lock in native code, where nothing written in
Python would run any more. Only a process that is stopped, or waits in the kernel without letting itself be disturbed,
writes nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import IO

# A real-time signal: scripts and schedulers use SIGUSR1 and SIGUSR2 for words of their own.
SIGNAL = signal.SIGRTMAX - 3
FILE = "stacks.txt"

_open: list[IO[bytes]] = []  # faulthandler keeps the descriptor alone


def answer_in(directory: Path) -> None:
    """From now on this process writes the stacks of all its threads to ``stacks.txt`` there whenever it is asked."""
    try:
        file = (directory / FILE).open("ab", buffering=0)
    except OSError:
        return  # nowhere to write to: then there is nothing to answer
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    for before in _open:
        before.close()
    _open[:] = [file]


def ask(pid: int) -> bool:
    """Whether the process was asked: one that does not listen would end of the signal. It must be a child of this one,
    so that its number is not another's."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
        if not int(caught, 16) >> (SIGNAL - 1) & 1:
            return False
        os.kill(pid, SIGNAL)
    except (OSError, ValueError, IndexError):
        return False
    return True


def size(directory: Path) -> int:
    """Bytes that were written there before: what follows is the next answer."""
    try:
        return (directory / FILE).stat().st_size
    except OSError:
        return 0
