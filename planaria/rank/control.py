"""The control thread of a rank: the only thread that listens to the agent.

It never runs user code and never waits for the training thread, so news arrives whatever that one is doing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from planaria.core.exits import EXIT_FAILED
from planaria.core.messages import Order, Report
from planaria.errors import UsageError
from planaria.wire import stacks
from planaria.wire.frames import FrameReader, send_frame
from planaria.wire.page import ProgressPage

# How often the thread shows on the progress page that it lives when there is no news. The agent's limits are
# multiples of what it observes, so this only sets how fine they can be.
BEAT_SECONDS = 0.05


class Control:
    """Connects to the agent's socket; ``on_order`` is called on the control thread for every order.

    If the agent is gone, so is this rank's supervision: the process ends, for nobody would notice its death or
    start it again, and a group that nobody counts must not go on.

    ``collectives`` says how many this rank has begun with the others of its group. Called on the control thread.
    """

    def __init__(
        self,
        path: Path,
        page: ProgressPage | None,
        on_order: Callable[[Order], None],
        where: str,
        collectives: Callable[[], int] = lambda: 0,
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            raise UsageError(
                f"{where}: no agent listens at {path} ({error.strerror}); start the script with `planaria run`"
            ) from None
        self._page = page
        self._collectives = collectives
        self._on_order = on_order
        self._where = where
        self._closing = False
        stacks.answer_on_a_thread()
        self._thread = threading.Thread(target=self._run, name="planaria-control", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        """Tell the agent (and through it the lighthouse). If the agent is gone the control thread ends the rank."""
        try:
            send_frame(self._socket, report)
        except OSError:
            if not self._closing:
                self._agent_gone()

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):  # the agent closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            for order in FrameReader(_Beating(self._socket, self._page, self._collectives)):
                self._on_order(order)
        except Exception as error:  # a rank that hears nothing any more must not go on
            self._die(f"{self._where}: the control thread failed: {error}")
        if not self._closing:
            self._agent_gone()

    def _agent_gone(self) -> None:
        self._die(f"{self._where}: the agent is gone, so this rank ends")

    def _die(self, sentence: str) -> None:
        sys.stderr.write(sentence + "\n")
        sys.stderr.flush()
        # Not SystemExit: this is not the main thread, which may be deep in a kernel or a wait.
        os._exit(EXIT_FAILED)


class _Beating:
    """A socket that shows life on the progress page while it waits for bytes."""

    def __init__(self, sock: socket.socket, page: ProgressPage | None, collectives: Callable[[], int]) -> None:
        self._collectives = collectives
        self._sock = sock
        self._page = page

    def recv(self, size: int) -> bytes:
        if self._page is None:
            return self._sock.recv(size)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            self._page.control_beat(self._collectives())
            if poll.poll(BEAT_SECONDS * 1000):
                return self._sock.recv(size)

    def fileno(self) -> int:
        return self._sock.fileno()
