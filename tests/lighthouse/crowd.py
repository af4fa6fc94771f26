"""Many groups over a few real streams to a real lighthouse: what the pages show of a large job is fed by this."""

from __future__ import annotations

import asyncio
import math
import random
from types import TracebackType
from typing import Any

from planaria.core.messages import (
    Adopted,
    Died,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Phase,
    Pulse,
    Quorum,
    Ready,
    Report,
    Suspected,
    Synced,
)
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import open_channel
from planaria.wire.codec import encode_report
from planaria.wire.quorums import decode_quorum

ATTEND = "/planaria.v1.Lighthouse/Attend"
TOTAL = 20_000  # steps
PATIENCE = 60.0  # seconds


class Stream:
    """One agent's. Of what it hears only the newest quorum counts, and is decoded when it is asked for."""

    def __init__(self, address: str, job: str, name: str, groups: range, of: int) -> None:
        self.groups = groups
        self.quorum: pb.Quorum | None = None
        self._hello = Hello(name, "host", JobSpec(job, of))
        self._channel = open_channel(address)
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def connect(self) -> None:
        self._call = self._channel.stream_stream(ATTEND)(wait_for_ready=True)
        self._reading = asyncio.create_task(self._read())
        await self.tell(self._hello, Synced())

    async def tell(self, *reports: Report) -> None:
        for report in reports:
            await self._call.write(pb.AgentFrame(report=encode_report(report)).SerializeToString())

    async def newer(self, number: int) -> Quorum:
        """The first quorum heard of with at least this number."""
        async with asyncio.timeout(PATIENCE):
            while self.quorum is None or self.quorum.id.number < number:
                self._news.clear()
                await self._news.wait()
        return decode_quorum(self.quorum)

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close(None)

    async def _read(self) -> None:
        async for frame in self._call:
            order = pb.LighthouseFrame.FromString(frame).order
            if order.HasField("publish"):
                self.quorum = order.publish.quorum
                self._news.set()


class Crowd:
    """A job of ``groups`` groups on some agents, whose names may be anything. Use as an asynchronous context."""

    def __init__(self, address: str, job: str, groups: int, agents: tuple[str, ...]) -> None:
        share = math.ceil(groups / len(agents))
        self.streams = [
            Stream(address, job, name, range(first, min(first + share, groups)), groups)
            for name, first in zip(agents, range(0, groups, share), strict=False)
        ]
        self.lives = dict.fromkeys(range(groups), 0)
        self.step = 0
        self.number = 0  # of the quorum in force
        self._odd: dict[int, Phase] = {}  # groups that are not computing
        self._random = random.Random(0)

    async def __aenter__(self) -> Crowd:
        for stream in self.streams:
            await stream.connect()
        for stream in self.streams:
            await stream.tell(*(self._ready(group) for group in stream.groups))
        await self.take(1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for stream in self.streams:
            await stream.close()

    async def take(self, number: int) -> None:
        """All work under the quorum of that number, or a newer one."""
        quorum = await self.streams[0].newer(number)
        self.number = quorum.id.number
        for stream in self.streams:
            mine = (member for member in quorum.members if member.group in stream.groups)
            await stream.tell(*(Adopted(member, quorum.id, self.step) for member in mine))

    async def beat(self, steps: int, loss: float | None = None, phases: dict[int, Phase] | None = None) -> None:
        """All have made so many steps more. ``loss``: of all, else one that falls with some noise."""
        self.step += steps
        self._odd = phases if phases is not None else self._odd
        quorum = (await self.streams[0].newer(self.number)).id
        for stream in self.streams:
            pulses = []
            for group in stream.groups:
                own = 1.5 + 6 * math.exp(-self.step / 300) + self._random.gauss(0, 0.05) if loss is None else loss
                phase = self._odd.get(group, Phase.COMPUTING)
                member = Member(group, self.lives[group])
                pace = 0.21 * (3 if group % 331 == 7 else 1)
                pulses.append(Pulse(member, phase, self.step, quorum, own, pace, 1000 + group, shards=2))
            await stream.tell(Heartbeat(tuple(pulses)))

    async def die(self, groups: tuple[int, ...], cause: str) -> None:
        """The others have the next quorum at the end of it."""
        for group in groups:
            await self._of(group).tell(Died(Member(group, self.lives[group]), cause))
            await self.take(self.number + 1)

    async def hang(self, group: int, why: str) -> None:
        await self._of(group).tell(Suspected(Member(group, self.lives[group]), why))
        await self.take(self.number + 1)

    async def come_back(self, group: int) -> None:
        self.lives[group] += 1
        await self._of(group).tell(self._ready(group))
        await self.take(self.number + 1)

    def _ready(self, group: int) -> Ready:
        return Ready(Member(group, self.lives[group]), f"h:{group}", (("torch", "2"),), "d", 2 * len(self.lives), TOTAL)

    def _of(self, group: int) -> Stream:
        return next(stream for stream in self.streams if group in stream.groups)
