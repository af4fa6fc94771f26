"""What the web pages hear while they are open: server-sent events (the HTML standard, section 9.2), once a second.

Nothing is queued for a reader. Each is told what there is at the time when it has read what it was told before, so one
that is slow gets fewer pictures and costs no memory, and one that has stopped to read is hung up on.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.errors import UsageError
from planaria.lighthouse.jobs import Job
from planaria.lighthouse.picture import Reader, line_of, picture_of, seat_of
from planaria.lighthouse.seat import Seat

# Half of the connections: whoever looks at pages must leave room for monitors and for the probes of an orchestrator.
MAX_STREAMS = 32
PATIENCE = 10.0  # seconds that a reader may take for one picture
_MANY = 200  # groups; of more a picture is drawn half as often, for it is tens of kilobytes


class Streams:
    """Of one lighthouse. All of them are told the same picture of a job."""

    def __init__(self, seat: Seat) -> None:
        self.open = 0
        self._seat = seat
        self._drawn: dict[str, tuple[float, bytes]] = {}  # by job: when, and what
        self._listing = asyncio.Lock()

    @property
    def full(self) -> bool:
        return self.open >= MAX_STREAMS

    async def serve(self, job: str | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell of a job, or of all if ``job`` is None, until the other side is gone. TimeoutError if it does not read.

        ``drain`` of ``writer`` is to wait until all was handed on."""
        self.open += 1
        gone = asyncio.ensure_future(reader.read(1))  # it has nothing to say: the end, or nonsense
        told = Reader()
        try:
            while not gone.done():
                writer.write(await (self._all() if job is None else self._one(job, told)))
                async with asyncio.timeout(PATIENCE):
                    await writer.drain()
                await asyncio.wait({gone}, timeout=self._pause(told))
        finally:
            self.open -= 1
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def _pause(self, told: Reader) -> float:
        many = told.job is not None and len(told.job.machine.seen.groups) > _MANY
        return 2 * HEARTBEAT_SECONDS if many else HEARTBEAT_SECONDS

    async def _all(self) -> bytes:
        async with self._listing:  # whoever comes meanwhile waits, and is told the same
            if (drawn := self._fresh("")) is not None:
                return drawn
            lines = []
            for job in self._seat.jobs.all() if self._seat.jobs is not None else []:
                lines.append(line_of(job))
                await asyncio.sleep(0)  # that took milliseconds if it is large, and what agents say comes first
            return self._draw("", {"seat": seat_of(self._seat), "jobs": lines})

    async def _one(self, name: str, told: Reader) -> bytes:
        jobs = self._seat.jobs
        try:
            job: Job | None = jobs.find(name) if jobs is not None else None
            missing = ""
        except UsageError as error:
            job, missing = None, str(error)
        if job is None:
            told.job = None
            return _event("picture", {"seat": seat_of(self._seat), "missing": missing})
        shared = self._fresh(name) or self._draw(name, {"seat": seat_of(self._seat), "job": picture_of(job)})
        if told.job is not job:
            await asyncio.sleep(0)  # the first news are long: not in one go with the picture
        return shared + _event("news", told.news(job))

    def _fresh(self, name: str) -> bytes | None:
        """What was drawn less than half a heartbeat ago, for somebody else."""
        now = time.monotonic()
        self._drawn = {key: kept for key, kept in self._drawn.items() if now - kept[0] < HEARTBEAT_SECONDS / 2}
        return self._drawn[name][1] if name in self._drawn else None

    def _draw(self, name: str, picture: dict[str, Any]) -> bytes:
        self._drawn[name] = time.monotonic(), _event("picture", picture)
        return self._drawn[name][1]


def _event(name: str, data: dict[str, Any]) -> bytes:
    # JSON has no line breaks, so one line of data is enough.
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()
