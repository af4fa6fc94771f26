"""Status pages over HTTP for people, monitors and Prometheus: a fixed set of pages and files.

Written by hand because this is all of HTTP that it needs: one GET per connection, bounded in size, time and
number; for the web pages a stream that says how things are (``streams``), and for operators a POST (``actions``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from planaria.errors import UsageError
from planaria.lighthouse import actions
from planaria.lighthouse.actions import Action
from planaria.lighthouse.assets import assets
from planaria.lighthouse.metrics import exposition
from planaria.lighthouse.seat import Seat, who_leads
from planaria.lighthouse.streams import Streams
from planaria.wire.channel import join_address, split_address
from planaria.wire.credentials import Credentials, demand_for, is_loopback

MAX_HEAD = 8192  # bytes of request line and headers; browsers and Prometheus send a tenth of it
MAX_CONNECTIONS = 64  # a page takes milliseconds, so this many at once is a flood
# Prometheus gives up on a scrape after ten seconds unless told otherwise: nobody is still waiting after that.
TIMEOUT = 10.0

_LIVE = "/live/"  # of a job by its name; of all jobs without one
# Nothing but our own files is loaded, nothing is asked of anybody else, and no page shows this one within itself. Text
# becomes markup by templates alone (Trusted Types), so that no name or message of a job can become a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types lit-html"
)
_FOR_PAGES = {
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Stream:
    """Asked for instead of a page. ``job``: None for all."""

    job: str | None


class StatusPages:
    """GET /status.json, /metrics, /healthz (it lives) and /readyz (it leads), and the web pages: / and /jobs/NAME."""

    def __init__(self, seat: Seat, credentials: Credentials | None) -> None:
        """With ``credentials`` they are served by TLS, to holders of certificates of any role."""
        self.address = ""
        self._credentials = credentials
        self._seat = seat
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._streams = Streams(seat)

    async def start(self, bind: str) -> None:
        """UsageError if the address is taken or senseless."""
        host, port = split_address(bind, "--http")
        demand_for(host, "the status pages", self._credentials)
        context = self._credentials.serving() if self._credentials is not None else None
        try:
            patience = TIMEOUT if context is not None else None
            self._server = await asyncio.start_server(
                self._serve, host, port, limit=MAX_HEAD, ssl=context, ssl_handshake_timeout=patience
            )
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
        # Whoever waits for ``drain`` waits until all was handed on: what is closed below has no more to say. (Not 0,
        # which an empty buffer reaches too under TLS.)
        writer.transport.set_write_buffer_limits(high=1, low=0)
        try:
            async with asyncio.timeout(TIMEOUT):
                stream = await self._converse(reader, writer)
            if stream is not None:
                await self._streams.serve(stream.job, reader, writer)
        except TimeoutError:
            writer.transport.abort()  # close would wait for whoever does not read, for ever
        except (OSError, asyncio.IncompleteReadError):
            pass  # whatever is wrong with a connection ends that connection
        finally:
            self._open.discard(writer)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Stream | None:
        """Answer one request. What it asks to be told from now on, if it does."""
        try:
            caller = writer.get_extra_info("ssl_object")
            answer = self._answer(await reader.readuntil(b"\r\n\r\n"), caller)
            if isinstance(answer, Action):
                answer = self._act(answer, await reader.readexactly(answer.length))
        except asyncio.LimitOverrunError:
            answer = _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "too long")
        writer.write(answer if isinstance(answer, bytes) else _STREAM_HEAD)
        await writer.drain()
        return answer if isinstance(answer, Stream) else None

    def _act(self, action: Action, body: bytes) -> bytes:
        try:
            return _json({"text": actions.perform(action, body, self._seat)})
        except actions.Refused as error:
            return _json({"text": str(error)}, error.status)

    def _answer(self, head: bytes, caller: ssl.SSLObject | None = None) -> bytes | Stream | Action:
        line, *lines = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request")
        method, path = words[0], words[1].split("?", 1)[0]
        parted = (each.partition(":") for each in lines if each)
        headers = {name.strip().lower(): value.strip() for name, _, value in parted}
        if method == "POST":
            try:
                return actions.asked(path, headers, caller)
            except actions.Refused as error:
                return _json({"text": str(error)}, error.status)
        if method not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        if self._credentials is None and not _asks_this_machine(headers):
            # A web page whose name is made to lead to this machine (DNS rebinding) would be told.
            return _text(HTTPStatus.MISDIRECTED_REQUEST, "the Host is not this machine")
        if _from_another_page(headers):
            return _text(HTTPStatus.FORBIDDEN, "another site's page asks")
        if path.startswith(_LIVE) and method == "GET":
            if self._streams.full:
                return _text(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
            return Stream(unquote(path[len(_LIVE) :]) or None)
        if path == "/verbs":
            return _json(actions.verbs_for(caller, headers))
        answer = self._asset(path, headers) or _reply(*self._page(path))
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _asset(self, path: str, headers: Mapping[str, str]) -> bytes | None:
        """A file of the web pages, if ``path`` is one. / is the page for browsers, and the status for all others."""
        if path.startswith("/jobs/") or (path == "/" and "text/html" in headers.get("accept", "")):
            path = "/web/index.html"
        asset = assets().get(path.removeprefix("/web/")) if path.startswith("/web/") else None
        if asset is None:
            return None
        more = {"ETag": asset.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding", **_FOR_PAGES}
        if headers.get("if-none-match") == asset.tag:
            return _reply(HTTPStatus.NOT_MODIFIED, asset.kind, b"", more)
        if "gzip" in headers.get("accept-encoding", ""):
            return _reply(HTTPStatus.OK, asset.kind, asset.packed, {**more, "Content-Encoding": "gzip"})
        return _reply(HTTPStatus.OK, asset.kind, asset.body, more)

    def _page(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        match path:
            case "/healthz":
                return HTTPStatus.OK, "text/plain", b"ok\n"
            case "/readyz":
                seat = self._seat.status()
                if seat.leads:
                    return HTTPStatus.OK, "text/plain", b"leads\n"
                return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"stands by: {who_leads(seat)}\n".encode()
            case "/metrics":
                return HTTPStatus.OK, *exposition(self._seat)
            case "/" | "/status.json":
                known = self._seat.jobs.all() if self._seat.jobs is not None else []
                whole = {**plain(self._seat.status()), "jobs": [plain(job.status()) for job in known]}
                return HTTPStatus.OK, "application/json", json.dumps(whole, allow_nan=False).encode()
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b"there are /status.json, /metrics, /healthz and /readyz\n"


def _asks_this_machine(headers: Mapping[str, str]) -> bool:
    """Whether the Host, if there is one, is loopback; a browser always names the one that it shows."""
    if "host" not in headers:
        return True
    host = re.sub(r":\d+$", "", headers["host"])
    return is_loopback(host.removeprefix("[").removesuffix("]").lower())


def _from_another_page(headers: Mapping[str, str]) -> bool:
    """Whether a page of somebody else has its browser ask; following a link to here is another thing. Browsers say so
    (Fetch Metadata), other programs need not."""
    strange = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    return strange and headers.get("sec-fetch-mode") != "navigate"


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


def _reply(status: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] = MappingProxyType({})) -> bytes:
    headers = {
        "Content-Type": kind,
        "Content-Length": str(len(body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **more,
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> bytes:
    return _reply(status, "application/json", json.dumps(value).encode())


def _text(status: HTTPStatus, text: str) -> bytes:
    return _reply(status, "text/plain", f"{text}\n".encode())


# The end of the connection is the end of the stream: it has no length.
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
)
