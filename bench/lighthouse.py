"""A lighthouse under the load of many agents: what do their heartbeats cost it, and how soon does everybody hear of
a death?

    python bench/lighthouse.py --agents 1000

Every agent is a gRPC stream over a connection of its own, with one group and a heartbeat a second; the lighthouse
is a process of its own. All agents live in this process and hardly look at what they hear, so that one core can
play them; unlike real ones they do not watch the job's events. A death is told by its agent; the time runs until
the last of the others has the new quorum, and so includes the reading of as many messages here, on the same cores.
What of it is the lighthouse's is told beside it: until it has given gRPC the message for each agent. After each death
the group comes back by a planned change.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from planaria.core.liveness import HEARTBEAT_SECONDS
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
    QuorumId,
    Ready,
    Report,
    Synced,
)
from planaria.lighthouse.client import OperatorClient
from planaria.wire import channel
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import decode_quorum_id
from planaria.wire.codec import encode_report
from planaria.wire.quorums import decode_quorum

ROOT = Path(__file__).resolve().parent.parent
RUN = "from bench.handed_over import run; run({!r}, {!r}, {!r})"
ATTEND = "/planaria.v1.Lighthouse/Attend"
PATIENCE = 120.0  # seconds for anything; a lighthouse that needs longer has failed


class BenchError(Exception):
    pass


class Agent:
    """One stream. What it hears is only kept, with the time of its arrival, until somebody asks."""

    def __init__(
        self, number: int, agents: int, address: str, news: asyncio.Event, quorums: dict[QuorumId, Quorum]
    ) -> None:
        self.member = Member(number, 0)
        self.heard: list[tuple[float, bytes]] = []
        self.beats = 0
        self.step = 0
        self.quorum: Quorum | None = None
        self._hello = Hello(f"agent {number}", "host", JobSpec("bench", agents))
        self._news = news
        self._quorums = quorums  # all that any agent was told of
        # Real agents have machines of their own. This process plays a thousand: under load it is too slow to see that
        # its pings were answered, and would hang up ("Internal error from Core"). They are sent all the same.
        patience = [("grpc.keepalive_timeout_ms", 60_000), ("grpc.http2.ping_timeout_ms", 60_000)]
        # Equal options would share one connection.
        options = [*channel._CLIENT, *patience, ("planaria.bench", number)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> None:
        self._call = self._channel.stream_stream(ATTEND)(wait_for_ready=True)
        self._tasks.append(asyncio.create_task(self._read()))
        await self.tell(self._hello, Synced())

    async def tell(self, *reports: Report) -> None:
        async with self._writing:
            for each in reports:
                await self._write(pb.AgentFrame(report=encode_report(each)).SerializeToString())

    async def connect_again(self) -> None:
        """To a new lighthouse at the same address: all is told that the old one knew."""
        assert self.quorum is not None
        self.heard.clear()
        await self._write_nothing()
        self._call = self._channel.stream_stream(ATTEND)(wait_for_ready=True)
        self._tasks.append(asyncio.create_task(self._read()))
        await self.tell(self._hello)
        await self.ready()
        await self.adopt()
        await self.tell(Synced())

    async def _write_nothing(self) -> None:
        """Until there is a lighthouse again nothing can be told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def ready(self) -> None:
        group = self.member.group
        await self.tell(Ready(self.member, f"host-{group}:29500", (("torch", "2.13"),), "start", 1 << 14, 1000))

    async def adopt(self) -> None:
        assert self.quorum is not None
        await self.tell(Adopted(self.member, self.quorum.id, self.step))

    def beat_every_second(self, offset: float) -> None:
        self._tasks.append(asyncio.create_task(self._beat(offset)))

    def published(self) -> tuple[float, Quorum] | None:
        """The first quorum heard of and not asked for yet, with the time when it came."""
        while self.heard:
            at, frame = self.heard.pop(0)
            order = pb.LighthouseFrame.FromString(frame).order
            if order.HasField("publish"):
                return at, self._read_once(order.publish.quorum)
        return None

    def _read_once(self, message: pb.Quorum) -> Quorum:
        """A thousand agents are told of the same quorum: to decode it for each would keep this process busy for
        seconds."""
        id = decode_quorum_id(message.id)
        if id not in self._quorums:
            self._quorums[id] = decode_quorum(message)
        return self._quorums[id]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _write(self, frame: bytes) -> None:
        try:
            await self._call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            why = f"{await self._call.code()}: {await self._call.details()}"
            raise BenchError(f"the stream of agent {self.member.group} ended: {why}") from None

    async def _read(self) -> None:
        async for frame in self._call:
            self.heard.append((time.monotonic(), frame))
            self._news.set()

    async def _beat(self, offset: float) -> None:
        due = time.monotonic() + offset
        while True:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += HEARTBEAT_SECONDS
            assert self.quorum is not None
            self.step += 1
            pulse = Pulse(self.member, Phase.COMPUTING, self.step, self.quorum.id, 0.5, 0.1, 1)
            await self.tell(Heartbeat((pulse,)))
            self.beats += 1


class Fleet:
    """All agents together."""

    def __init__(self, count: int, address: str) -> None:
        self.news = asyncio.Event()
        quorums: dict[QuorumId, Quorum] = {}
        self.agents = [Agent(number, count, address, self.news, quorums) for number in range(count)]

    async def until_all_hear(self, agents: list[Agent], frames: int = 1) -> None:
        """Until each has ``frames`` messages that nobody has looked at yet."""
        try:
            async with asyncio.timeout(PATIENCE):
                while any(len(agent.heard) < frames for agent in agents):
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            deaf = sum(len(agent.heard) < frames for agent in agents)
            raise BenchError(f"{deaf} of {len(agents)} agents have heard nothing for {PATIENCE:.0f} s") from None

    async def next_quorum(self, agents: list[Agent]) -> tuple[list[float], Quorum]:
        """One quorum that all of ``agents`` are told of, and when each was. They know it from then on."""
        await self.until_all_hear(agents)
        times, quorums = [], {}
        for agent in agents:
            found = agent.published()
            if found is None:
                raise BenchError(f"{agent.member} was told something else than a quorum")
            times.append(found[0])
            agent.quorum = found[1]
            quorums[found[1].id] = found[1]
        if len(quorums) != 1:
            raise BenchError(f"one quorum was expected, not {sorted(quorums)}")
        return times, quorums.popitem()[1]


async def start(fleet: Fleet) -> None:
    """Everybody connects, is ready, and works under the first quorum."""
    for agent in fleet.agents:
        await agent.connect()
    await fleet.until_all_hear(fleet.agents, frames=2)  # Welcome, Desired
    for agent in fleet.agents:
        agent.heard.clear()
    for agent in fleet.agents:
        await agent.ready()
    await fleet.next_quorum(fleet.agents)
    for agent in fleet.agents:
        await agent.adopt()


async def quiet_phase(fleet: Fleet, process: psutil.Process, seconds: float) -> dict[str, float]:
    """Nothing but heartbeats."""
    began, used, beats = time.monotonic(), cpu_seconds(process), sum(a.beats for a in fleet.agents)
    await asyncio.sleep(seconds)
    wall, used = time.monotonic() - began, cpu_seconds(process) - used
    used = max(used, 0.01)  # less than a tick cannot be seen
    beats = sum(a.beats for a in fleet.agents) - beats
    return {"seconds": wall, "beats": beats, "cpu": used, "beats_per_second": beats / wall, "cores": used / wall}


async def one_death(fleet: Fleet, victim: Agent, lighthouse: Lighthouse) -> dict[str, float]:
    """Seconds from the report to the last of the others having the new quorum, and from their having taken it, with
    the next life of the victim ready, to all having the planned one. ``handed``: to the lighthouse's having given gRPC
    the quorum for 99 % of the others."""
    others = [agent for agent in fleet.agents if agent is not victim]
    began = time.monotonic()
    await victim.tell(Died(victim.member, "killed by SIGKILL"))
    times, quorum = await fleet.next_quorum(others)
    if victim.member in quorum.members or len(quorum.members) != len(others):
        raise BenchError(f"the quorum after the death of {victim.member} is {quorum}")
    handed = [at for at in lighthouse.handed_over() if at > began]
    if len(handed) != len(others):
        raise BenchError(f"{len(others)} agents have the quorum, and it was given to gRPC {len(handed)} times")
    for agent in others:
        await agent.adopt()
    victim.member = Member(victim.member.group, victim.member.incarnation + 1)
    back = time.monotonic()
    await victim.ready()
    planned, _ = await fleet.next_quorum(fleet.agents)
    for agent in fleet.agents:
        await agent.adopt()
    return {
        "first": min(times) - began,
        "p99": sorted(times)[int(0.99 * (len(times) - 1))] - began,
        "last": max(times) - began,
        "handed": sorted(handed)[int(0.99 * (len(handed) - 1))] - began,
        "planned": max(planned) - back,
    }


async def a_new_lighthouse(fleet: Fleet, again: Callable[[], None]) -> dict[str, float]:
    """It is killed, and another begins with its store. Seconds from its being started to all agents having told it
    everything, and to the last of them having the quorum that answers a death which is told at once."""
    began = time.monotonic()
    again()
    listening = time.monotonic() - began
    await asyncio.gather(*(agent.connect_again() for agent in fleet.agents))
    victim = fleet.agents[0]
    others = fleet.agents[1:]
    await victim.tell(Died(victim.member, "killed by SIGKILL"))
    told = time.monotonic() - began
    # Only of those that wait for it: whoever has it hears nothing more.
    while waiting := [a for a in others if a.quorum is None or victim.member in a.quorum.members]:
        await fleet.until_all_hear(waiting)
        for agent in waiting:
            found = agent.published()
            agent.quorum = found[1] if found is not None else agent.quorum
    return {"listening": listening, "told": told, "recovered": time.monotonic() - began}


async def caught_up(fleet: Fleet, address: str) -> None:
    """BenchError if the lighthouse does not show the last heartbeat but one of every group."""
    wanted = {agent.member.group: agent.step for agent in fleet.agents}
    client = OperatorClient(address, PATIENCE)
    try:
        status = await asyncio.to_thread(client.status, "bench")
    finally:
        client.close()
    late = [g.member.group for g in status.groups if g.step < wanted[g.member.group] - 1]
    if late or len(status.groups) != len(fleet.agents):
        raise BenchError(f"the lighthouse lags behind: {len(late)} of {len(fleet.agents)} groups are shown late")


def cpu_seconds(process: psutil.Process) -> float:
    """Counted in ticks of a hundredth of a second."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Lighthouse:
    """A process. ``start`` and ``kill`` it as often as you like: it keeps its store and its address."""

    def __init__(self, directory: Path) -> None:
        self.address = "127.0.0.1:0"
        self._store, self.log = directory / "store.db", (directory / "log").open("w+")
        self._times = directory / "handed-over"
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-c", RUN.format(self.address, str(self._store), str(self._times))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, cwd=ROOT, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise BenchError(f"the lighthouse did not start: {self.log.read()}")
        self.address = str(json.loads(line)["address"])

    def handed_over(self) -> list[float]:
        """When it gave gRPC messages for agents, in this life, on the clock of time.monotonic."""
        return [at for (at,) in struct.iter_unpack("d", self._times.read_bytes())]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def again(self) -> None:
        self.kill()
        self.start()


@asynccontextmanager
async def running(agents: int) -> AsyncIterator[tuple[Fleet, Lighthouse]]:
    with tempfile.TemporaryDirectory() as directory:
        lighthouse = Lighthouse(Path(directory))
        log = lighthouse.log
        fleet: Fleet | None = None
        try:
            lighthouse.start()
            fleet = Fleet(agents, lighthouse.address)
            yield fleet, lighthouse
        except BenchError:
            log.seek(0)
            print(log.read()[-3000:], file=sys.stderr)
            raise
        finally:
            lighthouse.kill()
            log.close()
            if fleet is not None:
                await asyncio.gather(*(agent.close() for agent in fleet.agents))


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    async with running(args.agents) as (fleet, lighthouse):
        process, address = psutil.Process(lighthouse.pid), lighthouse.address
        watch = report.LoadWatch()
        began = time.monotonic()
        await start(fleet)
        started = time.monotonic() - began
        for agent in fleet.agents:
            agent.beat_every_second(rng.uniform(0.0, HEARTBEAT_SECONDS))
        await asyncio.sleep(2 * HEARTBEAT_SECONDS)
        quiet = await quiet_phase(fleet, process, args.seconds)
        await caught_up(fleet, address)
        deaths = []
        for _ in range(args.deaths):
            deaths.append(await one_death(fleet, rng.choice(fleet.agents), lighthouse))
            await asyncio.sleep(HEARTBEAT_SECONDS)
        memory = process.memory_info().rss / 2**20
        return {
            "restart": await a_new_lighthouse(fleet, lighthouse.again),
            "agents": args.agents,
            "start": started,
            "quiet": quiet,
            "deaths": deaths,
            "memory_mib": memory,
            "others": watch.others(),
        }


def lines(found: dict[str, Any]) -> list[str]:
    quiet, deaths, restart = found["quiet"], found["deaths"], found["restart"]

    def of(key: str) -> str:
        return report.spread([d[key] for d in deaths]).text(0, 1e3)

    return [
        f"agents: {found['agents']}, each a stream over a connection of its own",
        f"start to the first quorum taken by all: {found['start']:.1f} s",
        f"reports/s: {quiet['beats_per_second']:.0f} for {quiet['seconds']:.0f} s, "
        f"at {quiet['cores']:.2f} cores of the lighthouse ({quiet['cpu'] / quiet['beats'] * 1e6:.0f} us a report)",
        f"one core would take {quiet['beats'] / quiet['cpu']:.0f} reports/s",
        f"Died to Publish, first agent: {of('first')} ms; p99: {of('p99')} ms; all agents: {of('last')} ms",
        f"Died to gRPC's having the quorum for 99 % of the agents: {of('handed')} ms",
        f"Adopted by all and Ready to the planned Publish at all agents: {of('planned')} ms",
        f"a new lighthouse: listens after {restart['listening']:.2f} s, all have told it everything after "
        f"{restart['told']:.2f} s, and have its answer to a death after {restart['recovered']:.2f} s",
        f"memory of the lighthouse: {found['memory_mib']:.0f} MiB; CPU of others: {found['others']:.0%}",
    ]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--agents", type=int, default=1000)
    p.add_argument("--seconds", type=float, default=15.0, help="of heartbeats alone (default: %(default)s)")
    p.add_argument("--deaths", type=int, default=5)
    p.add_argument("--seed", type=int, default=0, help="of the choice of victims and moments")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    args = p.parse_args()
    environment = report.environment()
    print(report.header(environment), flush=True)
    found = asyncio.run(measure(args))
    print("\n" + "\n".join(lines(found)))
    if args.json:
        report.write_json(args.json, {"environment": environment, "arguments": vars(args), **found})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
