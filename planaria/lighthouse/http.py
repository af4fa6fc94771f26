"""Status pages over HTTP for people, monitors and Prometheus: four fixed pages, read-only.

Written by hand because this is all of HTTP that it needs: one GET per connection, bounded in size, time and
number.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import re
from enum import Enum
from http import HTTPStatus
from typing import Any

from planaria.errors import UsageError
from planaria.lighthouse.metrics import exposition
from planaria.lighthouse.seat import Seat, who_leads
from planaria.wire.channel import join_address, split_address
from planaria.wire.credentials import Credentials, demand_for, is_loopback

MAX_HEAD = 8192  # bytes of request line and headers; browsers and Prometheus send a tenth of it
MAX_CONNECTIONS = 64  # a page takes milliseconds, so this many at once is a flood
# Prometheus gives up on a scrape after ten seconds unless told otherwise: nobody is still waiting after that.
TIMEOUT = 10.0


class StatusPages:
    """GET /status.json, /metrics, /healthz (it lives) and /readyz (it leads)."""

    def __init__(self, seat: Seat, credentials: Credentials | None) -> None:
        """With ``credentials`` they are served by TLS, to holders of certificates of any role."""
        self.address = ""
        self._credentials = credentials
        self._seat = seat
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, bind: str) -> None:
        """UsageError if the address is taken or senseless."""
        host, port = split_address(bind, "--http")
        demand_for(host, "the status pages", self._credentials)
        context = self._credentials.context() if self._credentials is not None else None
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD, ssl=context)
        except OSError as error:
            raise UsageError(
                f"the status pages cannot listen on {bind}: {error.strerror}; choose another --http"
            ) from None
        self.address = join_address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()  # its task ends by itself

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._open.add(writer)
        try:
            # Whatever is wrong with a connection ends that connection.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(TIMEOUT):
                    await self._converse(reader, writer)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
        except asyncio.LimitOverrunError:
            writer.write(_reply(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "text/plain", b"too long\n"))
        await writer.drain()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _reply(HTTPStatus.BAD_REQUEST, "text/plain", b"not an HTTP/1 request\n")
        method, path = words[0], words[1].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return _reply(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET\n")
        if self._credentials is None and not _asks_this_machine(head):
            # A web page whose name is made to lead to this machine (DNS rebinding) would be told.
            return _reply(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"the Host is not this machine\n")
        return _reply(*self._page(path), body_wanted=method == b"GET")

    def _page(self, path: bytes) -> tuple[HTTPStatus, str, bytes]:
        match path:
            case b"/healthz":
                return HTTPStatus.OK, "text/plain", b"ok\n"
            case b"/readyz":
                seat = self._seat.status()
                if seat.leads:
                    return HTTPStatus.OK, "text/plain", b"leads\n"
                return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"stands by: {who_leads(seat)}\n".encode()
            case b"/metrics":
                return HTTPStatus.OK, *exposition(self._seat)
            case b"/" | b"/status.json":
                known = self._seat.jobs.all() if self._seat.jobs is not None else []
                whole = {**plain(self._seat.status()), "jobs": [plain(job.status()) for job in known]}
                return HTTPStatus.OK, "application/json", json.dumps(whole, allow_nan=False).encode()
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b"there are /status.json, /metrics, /healthz and /readyz\n"


def _asks_this_machine(head: bytes) -> bool:
    """Whether the Host, if there is one, is loopback; a browser always names the one that it shows."""
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    for name, _, value in lines:
        if name.strip().lower() == b"host":
            host = re.sub(r":\d+$", "", value.strip().decode("latin-1"))
            if not is_loopback(host.removeprefix("[").removesuffix("]").lower()):
                return False
    return True


def plain(value: object) -> Any:
    """A message as JSON knows it: enums by name in lower case, tuples as lists, NaN and infinities as
    null."""
    if isinstance(value, Enum):
        return value.name.lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _reply(status: HTTPStatus, kind: str, body: bytes, body_wanted: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if body_wanted else b"")
