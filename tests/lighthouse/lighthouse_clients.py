"""Real gRPC clients for the tests: an agent as small as one can be, and a lighthouse in a process of its
own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from planaria.agent.link import Link
from planaria.core.messages import (
    Adopted,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Order,
    Phase,
    Publish,
    Pulse,
    Quorum,
    Ready,
    Report,
    Synced,
    Welcome,
)
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import open_channel
from planaria.wire.codec import decode_order, encode_report
from planaria.wire.control_pb2_grpc import LighthouseStub

O = TypeVar("O", bound=Order)  # noqa: E741

# Seconds. Of a broken test only: on a crowded machine a process alone may need half a minute to start.
PATIENCE = 100.0

RUN = "import typer; from planaria.cli.lighthouse import lighthouse; typer.run(lighthouse)"
ROOT = Path(__file__).parents[2]


def link_that_notes(notes: asyncio.Queue[tuple[str, str]]) -> Link:
    """A real agent's link, of an agent without groups. What it would tell people goes to ``notes``."""
    return Link(
        lambda: Hello("a", "host", JobSpec("train", 1)),
        lambda: (),
        lambda order: None,
        lambda *note: notes.put_nowait(note),
        lambda why: notes.put_nowait(("refused", why)),
    )


class FakeAgent:
    """One agent's stream, driven by the test. The lighthouse cannot tell it from a real one."""

    def __init__(self, address: str, name: str, job: str = "train", groups: int = 2) -> None:
        self.name = name
        self.hello = Hello(name, "host", JobSpec(job, groups))
        self.orders: list[Order] = []
        self.ended: grpc.aio.AioRpcError | None = None
        self._news = asyncio.Condition()
        self._channel = open_channel(address)
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeAgent:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def connect(self, *again: Report) -> None:
        """Open a stream: Hello, what counts, Synced."""
        self.ended = None
        self._call = LighthouseStub(self._channel).Attend(wait_for_ready=True)
        self._reading = asyncio.create_task(self._read())
        await self.tell(self.hello, *again, Synced())

    async def tell(self, *reports: Report) -> None:
        for report in reports:
            await self._call.write(pb.AgentFrame(report=encode_report(report)))

    async def ready(self, *groups: int, incarnation: int = 0, shards: int = 4) -> None:
        await self.tell(*(self.parked(group, incarnation, shards) for group in groups))

    def parked(self, group: int, incarnation: int = 0, shards: int = 4) -> Ready:
        return Ready(Member(group, incarnation), f"h:{group}", (("torch", "2"),), "d", shards, 100)

    async def adopt(self, quorum: Quorum, step: int = 0, *groups: int) -> None:
        """Every member of ``quorum`` (or those in ``groups``) says that it works under it."""
        for member in quorum.members:
            if not groups or member.group in groups:
                await self.tell(Adopted(member, quorum.id, step))

    async def beat(self, *groups: int, step: int = 0, loss: float = 0.5) -> None:
        quorum = self.newest(Publish).quorum.id
        await self.tell(
            Heartbeat(tuple(Pulse(Member(g, 0), Phase.COMPUTING, step, quorum, loss, 0.1, 1000 + g) for g in groups))
        )

    async def wait_for(self, kind: type[O], where: Callable[[O], bool] = lambda _: True) -> O:
        """The first order of that kind for which ``where`` holds, past or to come."""
        found: list[O] = []

        def seen() -> bool:
            found.extend(order for order in self.orders if isinstance(order, kind) and where(order))
            return bool(found) or self.ended is not None

        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(seen)
        assert found, f"the stream ended: {self.ended}; orders: {self.orders}"
        return found[0]

    async def wait_for_end(self) -> grpc.aio.AioRpcError:
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: self.ended is not None)
        assert self.ended is not None
        return self.ended

    def newest(self, kind: type[O]) -> O:
        return [order for order in self.orders if isinstance(order, kind)][-1]

    async def epoch(self) -> int:
        return (await self.wait_for(Welcome)).epoch

    async def leave(self) -> None:
        """End the stream in order."""
        await self._call.done_writing()
        if self._reading is not None:
            await self._reading

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close(None)

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                async with self._news:
                    self.orders.append(decode_order(frame.order))
                    self._news.notify_all()
        except grpc.aio.AioRpcError as error:
            async with self._news:
                self.ended = error
                self._news.notify_all()


class Lighthouse:
    """``planaria lighthouse`` as a process of its own."""

    def __init__(self, store: Path, *options: str, bind: str = "127.0.0.1:0") -> None:
        command = [sys.executable, "-c", RUN, "--bind", bind, "--store", str(store), *options]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        # No pipe: it has a lot to say of many groups, and nobody reads while it runs.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()[1]
        self.listening: dict[str, Any] = json.loads(line)
        self.address = str(self.listening["address"])

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Signal it and wait: (exit status, what it logged)."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait()
        self._log.seek(0)
        return self.process.returncode, self._log.read()


async def eventually(holds: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait until ``holds()``: for states that nobody announces."""
    async with asyncio.timeout(PATIENCE):
        while True:
            verdict = holds()
            if verdict if isinstance(verdict, bool) else await verdict:
                return
            await asyncio.sleep(0.01)
