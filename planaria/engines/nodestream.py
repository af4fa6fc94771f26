"""The connection between the node that speaks for a group and another node that runs some of its ranks.

Four bytes of length (big-endian), then a JSON object. Both ends beat once a second, so that each notices when the other
is out of reach, with the limits that hold between an agent and the lighthouse. With credentials both ends show that
they are agents of the site, by TLS; without, node 0 listens on loopback alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from planaria.core.liveness import HEARTBEAT_SECONDS, HeartbeatWatch, WatchedClock
from planaria.errors import ProtocolError
from planaria.wire.checks import MAX_MESSAGE_BYTES
from planaria.wire.credentials import Credentials, demand_for
from planaria.wire.roles import AGENT_NAME, Role, roles_of

HEADER_BYTES = 4
# Loopback: other machines must be let in by will.
DEFAULT_ADDRESS = "127.0.0.1:29520"
Word = dict[str, Any]
_BEAT: Word = {"beat": 1}


async def listen(
    host: str, port: int, connected: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    """Have ``connected`` called for every agent that connects. UsageError if strangers could; OSError if it cannot."""
    credentials = Credentials.given((Role.AGENT,))
    demand_for(host, "node 0 of groups over several nodes", credentials)

    async def only_agents(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if credentials is not None and not _is_agent(writer):
            writer.transport.abort()
            return
        await connected(reader, writer)

    return await asyncio.start_server(only_agents, host, port, ssl=credentials and credentials.serving())


async def connect(host: str, port: int) -> NodeStream:
    """To node 0. OSError if that is not there, or is no agent of this site."""
    if (credentials := Credentials.given((Role.AGENT,))) is None:
        return NodeStream(*await asyncio.open_connection(host, port))
    context = credentials.context(serves=False)
    return NodeStream(*await asyncio.open_connection(host, port, ssl=context, server_hostname=AGENT_NAME))


def _is_agent(writer: asyncio.StreamWriter) -> bool:
    names = (writer.get_extra_info("peercert") or {}).get("subjectAltName", ())
    return Role.AGENT in roles_of(value.encode() for kind, value in names if kind == "URI")


class NodeStream:
    """Made on a running event loop; ``close`` it. ``why``: a sentence once it is over."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._watch = HeartbeatWatch(WatchedClock(HEARTBEAT_SECONDS))
        self._watch.observe(time.monotonic())
        self._beating = asyncio.get_running_loop().create_task(self._beat())
        self.why = ""

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, word: Word) -> None:
        """Queue it; never waits. What is sent to a peer that is gone is lost, and the end of ``words`` says so."""
        body = json.dumps(word).encode()
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def words(self) -> AsyncIterator[Word]:
        """What the peer says, until it is out of reach. ProtocolError if it says what is no word at all."""
        while (word := await self._next()) is not None:
            if word == _BEAT:
                self._watch.observe(time.monotonic())
            else:
                yield word

    async def close(self) -> None:
        """Send what is queued, as far as the peer takes it within a heartbeat, and hang up."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        self._writer.close()
        with suppress(OSError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), HEARTBEAT_SECONDS)
        self._writer.transport.abort()

    async def _next(self) -> Word | None:
        try:
            size = int.from_bytes(await self._reader.readexactly(HEADER_BYTES), "big")
            if size > MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"a message of {size} bytes, more than {MAX_MESSAGE_BYTES}; is it a node of planaria?"
                )
            body = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):
            self.why = self.why or "its connection was closed"
            return None
        try:
            word = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that is not JSON: {error}") from None
        if not isinstance(word, dict):
            raise ProtocolError("a message that is no JSON object")
        return word

    async def _beat(self) -> None:
        while True:
            self.send(_BEAT)
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if (why := self._watch.overdue(time.monotonic())) is not None:
                self.why = why
                self._writer.transport.abort()  # ``words`` ends
                return
