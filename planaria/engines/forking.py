"""The agent's end of the fork server: keeps one alive and asks it for ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from planaria.agent.forkserver import ForkRequest, unpack
from planaria.agent.proc import children_of_self, describe

_MODULE = "planaria.agent.forkserver"
# A server that dies again and again before it is ready will not get better: the cause is in its log.
_MAX_FALSE_STARTS = 3


class ForkServerError(Exception):
    """The fork server cannot serve. The message is a sentence for people."""


class ForkServer:
    """A fork server process that is started again when it dies.

    ``env`` must hold what libraries read when they are loaded (OMP_NUM_THREADS): ranks inherit the loaded
    libraries. Its output goes to ``log``. ``broken`` is called once, with a sentence, if there is no hope.
    ``announced`` says which pids the owner knows.
    """

    def __init__(
        self,
        env: dict[str, str],
        log: Path,
        broken: Callable[[str], None],
        announced: Callable[[], set[int]],
    ) -> None:
        self._env = env
        self._log = log
        self._broken = broken
        self._announced = announced
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._ready = False
        self._false_starts = 0
        self._waiting: dict[int, tuple[ForkRequest, asyncio.Future[int]]] = {}
        self.failure: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process. Must be called on the event loop's thread, which must outlive the server: the kernel
        ties the child to the thread that made it."""
        ours, theirs = socket.socketpair()
        root = Path(__file__).resolve().parents[2]
        with theirs, open(self._log, "ab") as log:
            self._process = _popen(theirs, self._env, root, log)
        ours.setblocking(False)
        self._socket, self._ready = ours, False
        self._buffer.clear()
        # Requests wait in the socket until the imports are done.
        self._outgoing = bytearray(b"".join(request.encode() for request, _ in self._waiting.values()))
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._readable)
        self._flush()

    def fork(self, request: ForkRequest) -> asyncio.Future[int]:
        """The pid of a new child of this process that runs ``request``. Survives the death of the fork server.

        The future fails with ForkServerError if the rank could not be forked.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.failure is not None:
            future.set_exception(ForkServerError(self.failure))
            return future
        self._waiting[request.id] = (request, future)
        self._outgoing += request.encode()
        self._flush()
        return future

    async def close(self) -> None:
        """End the process. Waiting requests fail."""
        self.failure = self.failure or "the agent is stopping"
        self._disconnect()
        if self._waiting:
            self._end_unannounced()
        self._fail_waiting(self.failure)

    def _flush(self) -> None:
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        if self._outgoing:
            loop.add_writer(self._socket, self._flush)
        else:
            loop.remove_writer(self._socket)

    def _readable(self) -> None:
        assert self._socket is not None
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._lost()
            return
        self._buffer += chunk
        for message in unpack(self._buffer):
            self._heard(message)

    def _heard(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self._ready, self._false_starts = True, 0
        elif "failed" in message:
            self._give_up(str(message["failed"]))
        else:
            _, future = self._waiting.pop(int(message["id"]))
            if future.done():
                return
            if "pid" in message:
                future.set_result(int(message["pid"]))
            else:
                future.set_exception(ForkServerError(f"the fork server could not fork: {message['error']}"))

    def _lost(self) -> None:
        """The server's end of the socket is closed: it is dead. Living ranks are not its children and stay."""
        how = self._disconnect()
        if self.failure is not None:
            return
        self._false_starts += not self._ready
        if self._false_starts >= _MAX_FALSE_STARTS:
            self._give_up(f"the fork server {how} {self._false_starts} times before it was ready; see {self._log}")
            return
        if self._waiting:
            # A rank may have been forked whose pid was never told. It must not run beside the one forked instead.
            self._end_unannounced()
        self.start()

    def _end_unannounced(self) -> None:
        # Processes of the dead server that are not announced ranks: its forks bear its command line. Killing one
        # in the middle of the double fork gives us its child, so look until nothing is found.
        assert self._process is not None
        while found := [pid for pid in children_of_self() if pid not in self._announced() and _is_fork(pid)]:
            for pid in found:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _give_up(self, reason: str) -> None:
        self.failure = reason
        self._fail_waiting(reason)
        self._broken(reason)

    def _fail_waiting(self, reason: str) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(ForkServerError(reason))
        self._waiting.clear()

    def _disconnect(self) -> str:
        """Close the socket, end and reap the process; returns in words how it ended."""
        if self._socket is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is None:
            return ""
        with suppress(ProcessLookupError):
            self._process.kill()
        return describe(self._process.wait())  # short: it was sent SIGKILL


def _popen(theirs: socket.socket, env: dict[str, str], root: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    # Started in the directory that holds the package, so that `-m` finds it when it is not installed.
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(theirs.fileno()), str(os.getpid())],
        cwd=root,
        env=env,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # the terminal's Ctrl-C is for the agent alone
    )


def _is_fork(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return _MODULE.encode() in words
