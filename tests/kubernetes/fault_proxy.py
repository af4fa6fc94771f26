"""What stands between an operator and its API server in bad times: refusals, answers that are lost, watches that break.

One request for each connection, so that whatever is cut is one request. It counts what went through."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.kubernetes.loopback import Loopback

# Of every request but watches, unless a test says otherwise; what a server in trouble does is all of these at once.
REFUSALS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}


@dataclass
class FaultProxy(Loopback):
    """The shares may be changed at any time."""

    upstream: str
    rng: random.Random
    context: ssl.SSLContext | None = None  # for the upstream, if it is https
    refused: float = 0.0  # share of requests that are answered with one of REFUSALS and go no further
    lost: float = 0.0  # share of those that are carried out, and whose answer never comes
    cut: float = 0.0  # share of watches that break within a second, in the middle of a line
    gone: float = 0.0  # share of watches that are told that their version is too old
    down: bool = False  # nobody listens behind it
    silent: bool = False  # whoever asks waits for an answer
    counts: Counter[str] = field(default_factory=Counter)  # method and kind, as asked for
    faults: Counter[str] = field(default_factory=Counter)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = [line for line in head.decode().split("\r\n") if line]
        method, target, _ = lines[0].split(" ", 2)
        fields = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        watch = "watch=1" in target
        self.counts[f"{'WATCH' if watch else method} {kind_of(target)}"] += 1
        if self.down:
            self.faults["down"] += 1
            return
        if self.silent and not watch:
            await reader.read()
            return
        if watch and self.rng.random() < self.gone:
            self.faults["410"] += 1
            _answer(writer, 200, {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})
            return
        if not watch and self.rng.random() < self.refused:
            code = self.rng.choice([*REFUSALS])
            self.faults[str(code)] += 1
            _answer(writer, code, {"kind": "Status", "reason": REFUSALS[code], "message": "a fault of the test's"})
            return
        where = urlsplit(self.upstream)
        there = await asyncio.open_connection(where.hostname, where.port, ssl=self.context)
        try:
            kept = [line for line in lines[1:] if line.split(":")[0].lower() not in ("connection", "host")]
            words = [lines[0], f"Host: {where.netloc}", "Connection: close", *kept]
            there[1].write("\r\n".join(words).encode() + b"\r\n\r\n" + body)
            await there[1].drain()
            if not watch and self.rng.random() < self.lost:
                await there[0].read()
                self.faults["lost answer"] += 1
            elif watch and self.rng.random() < self.cut:
                self.faults["cut watch"] += 1
                await asyncio.wait({asyncio.ensure_future(_pump(there[0], writer, 700))}, timeout=self.rng.random())
            else:
                await _pump(there[0], writer)
        finally:
            there[1].close()


def kind_of(target: str) -> str:
    """pods, of /api/v1/namespaces/n/pods/p; with /status."""
    words = target.split("?")[0].strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if not words:
        return "versions"
    words = words[2:] if words[0] == "namespaces" and len(words) > 2 else words
    return words[0] + "/status" * (words[-1] == "status")


def _answer(writer: asyncio.StreamWriter, code: int, body: object) -> None:
    data = json.dumps(body).encode() + b"\n"
    more = "Retry-After: 1\r\n" if code == 429 else ""
    head = f"HTTP/1.1 {code} x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(f"{head}{more}Connection: close\r\n\r\n".encode() + data)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int = -1) -> None:
    """To the end, or ``most`` bytes."""
    while most and (data := await reader.read(1 << 16 if most < 0 else most)):
        writer.write(data)
        await writer.drain()
        most -= len(data) if most > 0 else 0
