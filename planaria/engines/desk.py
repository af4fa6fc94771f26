"""What a keeper of groups asks of the lighthouse: how it sees them, and to declare one dead or let one leave."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from contextlib import suppress
from typing import Protocol

from planaria.core.roster import JobStatus
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient

# Heartbeats come once a second: whoever looks more often sees nothing new.
LOOK_SECONDS = 1.0
# States, in the words of the command line, of a life that takes part no more.
GONE = frozenset({"dead", "refused", "finished", "drained"})


class Away(Exception):
    """The lighthouse cannot be asked now. Training goes on, and nothing is decided without it."""


class Desk(Protocol):
    async def look(self) -> JobStatus | None:
        """None: it knows no such job yet. Away if it does not answer."""

    async def changed(self) -> None:
        """Return when something that matters to `look` may have changed."""

    async def evict(self, group: int) -> str | None:
        """Declare it dead; why not, if it will not. Away if it does not answer."""

    async def drain(self, group: int) -> str | None:
        """Have it leave after a commit; why not, if it will not. Away if it does not answer."""


class LighthouseDesk:
    """Of one job, at one or several lighthouses (host:port, with commas). ``close`` it."""

    def __init__(self, addresses: str, job: str) -> None:
        self._client = OperatorClient(addresses)
        self._job = job
        self._seen: Hashable = None  # of the newest look; None: it did not answer

    def close(self) -> None:
        self._client.close()

    async def look(self) -> JobStatus | None:
        try:
            jobs = await asyncio.to_thread(self._client.statuses)
        except UsageError as error:
            self._seen = None
            raise Away(str(error)) from None
        status = next((job for job in jobs if job.job == self._job), None)
        self._seen = _gist(status)
        return status

    async def changed(self) -> None:
        before = self._seen
        while self._seen == before:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(Away):
                await self.look()

    async def evict(self, group: int) -> str | None:
        return await self._verb(self._client.evict, group)

    async def drain(self, group: int) -> str | None:
        return await self._verb(self._client.drain, group)

    async def scale(self, groups: int) -> str | None:
        """Have the job go to so many groups; why not, if it will not."""
        return await self._verb(self._client.scale, groups)

    async def _verb(self, verb: object, number: int) -> str | None:
        assert callable(verb)
        try:
            await asyncio.to_thread(verb, number, self._job)
        except UsageError as error:
            # A refusal is an answer, and so is nothing at all: which it was only asking again can tell.
            await self.look()
            return str(error)
        return None


def _gist(status: JobStatus | None) -> Hashable:
    """What of a status calls for action when it changes; steps and losses do not."""
    if status is None:
        return ()
    groups = tuple((g.member, g.state, g.agent, g.connected) for g in status.groups)
    members = status.quorum.members if status.quorum is not None else ()
    return groups, members, status.desired, status.scaled, status.complete
