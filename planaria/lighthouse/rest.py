"""JSON over HTTP(S) for the stores of electors: a few small calls a second, each with a limit. Blocking; no retries but
at the other addresses of the same store."""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from planaria.errors import UsageError
from planaria.lighthouse.elector import StoreAway

MAX_BODY = 8 << 20  # bytes of an answer; etcd and Kubernetes keep no value of more than 1.5 MB


class Rest:
    """``urls``: of the same store, without a path. ``context`` is asked for with every new connection, so that files
    which were replaced are taken up. Not for several threads at once."""

    def __init__(
        self,
        urls: Sequence[str],
        what: str,
        context: Callable[[], ssl.SSLContext],
        headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._urls = [(url, urlsplit(url)) for url in urls]
        self._what = what
        self._context = context
        self._headers = headers
        self._turn = 0  # of the URL that answered last
        self._connection: http.client.HTTPConnection | None = None

    def call(self, method: str, path: str, body: Any = None, *, patience: float) -> tuple[int, Any]:
        """(status, answer) within ``patience`` seconds in all. StoreAway if nobody answers."""
        until, why = time.monotonic() + patience, ""
        for left in range(len(self._urls), 0, -1):
            now = time.monotonic()
            if now >= until:
                break
            url = self._urls[self._turn][0]
            try:
                return self._call(method, path, body, now + (until - now) / left)
            except (OSError, http.client.HTTPException, ValueError, UsageError) as error:
                self.close()
                self._turn = (self._turn + 1) % len(self._urls)
                why = f"{url}: {error or type(error).__name__}"
        raise StoreAway(f"{self._what} does not answer ({why or 'no answer in time'})")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, method: str, path: str, body: Any, until: float) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self._headers()}
        data = None if body is None else json.dumps(body)
        kept = self._connection
        if kept is not None:
            # The other side may have closed it meanwhile, which is no reason to give up.
            with suppress(ConnectionError, http.client.HTTPException):
                return self._once(kept, method, path, data, headers, until)
            self.close()
        self._connection = self._open(_left(until))
        return self._once(self._connection, method, path, data, headers, until)

    def _open(self, seconds: float) -> http.client.HTTPConnection:
        _, url = self._urls[self._turn]
        host, port = url.hostname or "", url.port
        if url.scheme == "https":
            return http.client.HTTPSConnection(host, port or 443, timeout=seconds, context=self._context())
        return http.client.HTTPConnection(host, port or 80, timeout=seconds)

    @staticmethod
    def _once(
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        data: str | None,
        headers: Mapping[str, str],
        until: float,
    ) -> tuple[int, Any]:
        if connection.sock is not None:
            connection.sock.settimeout(_left(until))
        connection.request(method, path, data, dict(headers))
        connection.response_class = partial(_Answer, until=until)  # type: ignore[assignment]
        answer = connection.getresponse()
        text = answer.read(MAX_BODY)
        return answer.status, json.loads(text) if text.strip() else {}


class _Answer(http.client.HTTPResponse):
    """All of which must be there in time. A socket's own limit is begun anew by every byte."""

    def __init__(self, sock: socket.socket, *args: Any, until: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        whole, self.fp = self.fp, io.BufferedReader(_Until(sock, until))
        whole.close()


class _Until(io.RawIOBase):
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._socket, self._raw, self._until = sock, sock.makefile("rb", buffering=0), until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._until))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(until: float) -> float:
    """Seconds. TimeoutError if there are none."""
    if (seconds := until - time.monotonic()) <= 0:
        raise TimeoutError("no answer in time")
    return seconds


def check_urls(urls: Sequence[str], what: str) -> None:
    """UsageError if one is no http(s)://host[:port]."""
    for url in urls:
        parts = urlsplit(url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # a port that is none
            good = False
        if not good:
            raise UsageError(f"{what}: {url!r} is not of the form http(s)://host:port")
