"""The agent's own lighthouse, a child process that is started again at the same address whenever it dies."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from planaria.agent.proc import describe, has_ended, launch_beside
from planaria.errors import PlanariaError, UsageError

# One that dies at once again and again must not keep the machine busy; a second is one heartbeat.
_MAX_PAUSE = 1.0
# How long a lighthouse that was told to stop may take to end its streams: its own grace is two seconds.
_STOP_SECONDS = 3.0
_MODULE = "planaria.agent.lighthouse_main"


class LighthouseChild:
    """Started with ``start``, which gives its address; ended with ``stop``. ``on_note`` gets (kind, sentence).

    The kernel ends it when this process ends, however that may be.
    """

    def __init__(
        self,
        directory: Path,
        http: str | None,
        on_note: Callable[[str, str], None],
        bind: str = "127.0.0.1:0",
    ) -> None:
        self._bind = bind
        self._store = directory / "lighthouse.db"
        self._log = directory / "lighthouse.log"
        self._http = http
        self._on_note = on_note
        self._process: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.address = ""
        self.http: str | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> str:
        """Start it and wait until it listens. UsageError with its own words if it cannot."""
        if not await self._launch(self._bind):
            code = await self._ended()
            words = [w for w in self._log.read_text(errors="replace").splitlines() if w.strip()] or [describe(code)]
            sentence = f"the lighthouse did not start: {words[-1]} (see {self._log})"
            raise UsageError(sentence) if code == UsageError.exit_code else PlanariaError(sentence)
        self._watching = asyncio.get_running_loop().create_task(self._keep())
        return self.address

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._ended(), _STOP_SECONDS)
        except TimeoutError:
            self._process.kill()
            self._process.wait()

    async def _launch(self, bind: str) -> bool:
        """Start the process; True once it listens, False if it ended before."""
        words = [bind, str(self._store), *([self._http] if self._http else [])]
        self._process, told = launch_beside(_MODULE, words, self._log)
        line = await _first_line(told)
        if not line:
            return False
        said = json.loads(line)
        # From now on the same port, so that everybody finds the next one where this one was.
        self.address, self.http = str(said["address"]), said["http"]
        self._http = self.http
        return True

    async def _keep(self) -> None:
        pause = 0.0
        while True:
            code = await self._ended()
            self._on_note("lighthouse", f"the lighthouse {describe(code)}; it is started again, training goes on")
            await asyncio.sleep(pause)
            try:
                listens = await self._launch(self.address)
            except OSError as error:  # no memory for another process, no space for its log: perhaps later
                self._on_note("lighthouse", f"the lighthouse cannot be started ({error.strerror}); trying on")
                listens = False
            pause = 0.0 if listens else min(2 * pause + 0.1, _MAX_PAUSE)

    async def _ended(self) -> int:
        """Wait for the end of the process; its return code."""
        assert self._process is not None
        return await has_ended(self._process)


async def _first_line(descriptor: int) -> bytes:
    """The first line from a pipe, empty if it is closed before; closes the pipe."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    try:
        return await reader.readline()
    finally:
        transport.close()
