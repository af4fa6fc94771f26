"""Processes that need long to die, like those that use a GPU: their sockets are closed, and they are not gone.

Real ones: a tracer lets one of their threads (``tests.agent.scripts.held``) go as far as the kernel's exit code, and no
further until the test says so. Whatever the kernel shows of such a process is what it shows of a slow one.
"""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

import pytest

from tests.agent.scripts.held import NAME

_SEIZE, _INTERRUPT, _DETACH, _TRACE_EXIT, _WALL = 0x4206, 0x4207, 17, 0x40, 0x40000000  # ptrace(2), waitpid(2)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class SlowDeath:
    """Of the process ``pid``, whose thread is named in ``directory``. Must be used in one thread of the test."""

    def __init__(self, pid: int, directory: Path) -> None:
        self._thread = int((directory / NAME).read_text())
        self._pidfd = os.pidfd_open(pid)
        self._let_go = False
        if _libc.ptrace(_SEIZE, self._thread, None, _TRACE_EXIT) != 0:
            pytest.skip(f"processes cannot be traced here: {os.strerror(ctypes.get_errno())}")

    @property
    def over(self) -> bool:
        """Whether its parent can know that it is dead."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def let_go(self) -> None:
        if not self._let_go:
            self._let_go = True
            os.close(self._pidfd)
            # A tracer can leave a thread only while that is stopped: at its end, or because it was interrupted.
            _libc.ptrace(_INTERRUPT, self._thread, None, None)
            os.waitpid(self._thread, _WALL)
            assert _libc.ptrace(_DETACH, self._thread, None, None) == 0
