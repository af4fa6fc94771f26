"""The stream to the lighthouse, against the real service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from planaria.agent.lighthouse import LighthouseChild
from planaria.agent.link import Link
from planaria.core.liveness import HEARTBEAT
from planaria.core.messages import (
    Adopted,
    Desired,
    Died,
    Drain,
    Heartbeat,
    Hello,
    JobSpec,
    Kill,
    Member,
    Order,
    Publish,
    Quorum,
    QuorumId,
    Ready,
    Welcome,
)
from planaria.core.told import Told
from planaria.engines.desk import LighthouseDesk
from planaria.errors import UsageError
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import split_address, split_addresses
from planaria.wire.control_pb2_grpc import LighthouseServicer, add_LighthouseServicer_to_server
from tests.ports import free_address

A, B = Member(0, 0), Member(1, 0)
T = TypeVar("T")


def ready(member: Member) -> Ready:
    return Ready(member, f"127.0.0.1:{1000 + member.group}", (), "d", 8, 100)


class Agent:
    """A link with an agent's memory around it, and what came over it."""

    def __init__(self, address: str, groups: int = 2) -> None:
        self.told = Told()
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.notes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.refusals: asyncio.Queue[str] = asyncio.Queue()
        hello = Hello("agent", "here", JobSpec("job", groups))
        self.link = Link(
            lambda: hello,
            self.told.again,
            self.orders.put_nowait,
            lambda kind, text: self.notes.put_nowait((kind, text)),
            self.refusals.put_nowait,
        )
        self.task = asyncio.get_running_loop().create_task(self.link.run(address))

    def tell(self, report: Ready | Adopted | Died | Heartbeat) -> None:
        self.told.record(report)
        self.link.tell(report)

    async def order(self, kind: type[T]) -> T:
        while not isinstance(order := await self.orders.get(), kind):
            pass
        return order

    async def note(self, kind: str, part: str) -> None:
        while (note := await self.notes.get())[0] != kind or part not in note[1]:
            pass

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Connect = Callable[..., Agent]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[Agent] = []

    def start(address: str, **more: int) -> Agent:
        made.append(Agent(address, **more))
        return made[-1]

    yield start
    for agent in made:
        await agent.close()


async def serve(store: Path, bind: str = "127.0.0.1:0", floor: int = 0) -> Server:
    server = Server(Store.open(store, floor))
    await server.start(bind)
    return server


async def test_reports_go_up_and_orders_come_down(connect: Connect, tmp_path: Path) -> None:
    async with await serve(tmp_path / "db") as server:
        agent = connect(server.address)
        assert (await agent.order(Welcome)).epoch == 1
        assert (await agent.order(Desired)).groups == 2
        agent.tell(ready(A))
        agent.tell(ready(B))
        published = await agent.order(Publish)
        assert published.member == A and published.quorum.members == (A, B)
        agent.tell(Died(A, "killed by SIGKILL"))
        assert (await agent.order(Publish)).quorum.members == (A, B), "the second member's copy of the first"
        second = await agent.order(Publish)
        assert second.quorum.members == (B,) and second.quorum.urgent
        assert agent.link.up.is_set() and agent.link.epoch == 1


async def test_what_counts_is_told_again_after_a_restart(connect: Connect, tmp_path: Path) -> None:
    server = await serve(tmp_path / "db")
    agent = connect(server.address)
    agent.tell(ready(A))
    agent.tell(ready(B))
    quorum = (await agent.order(Publish)).quorum
    for member in (A, B):
        agent.tell(Adopted(member, quorum.id, 7))
    address = server.address
    await server.stop()
    await agent.note("link", "out of reach")
    assert not agent.link.up.is_set()
    agent.tell(Died(A, "killed while nobody listened"))
    async with await serve(tmp_path / "db", address):
        assert (await agent.order(Welcome)).epoch == 2
        replaced = (await agent.order(Publish)).quorum
        assert replaced.id.epoch == 2 and replaced.members == (B,), "it knows of A's death and of B's state"


async def test_a_lighthouse_that_comes_later(connect: Connect, tmp_path: Path) -> None:
    address = free_address()
    agent = connect(address)
    await agent.note("link", "refused")  # why
    async with await serve(tmp_path / "db", address):
        await agent.order(Welcome)


async def test_a_lighthouse_that_moved_is_found_by_the_file_that_says_where(connect: Connect, tmp_path: Path) -> None:
    where = tmp_path / "address"
    with pytest.raises(UsageError, match="cannot read an address there"):
        split_addresses(f"@{where}")
    async with await serve(tmp_path / "db") as server:
        where.write_text(server.address + "\n")
        agent = connect(f"@{where}")
        await agent.order(Welcome)
    async with await serve(tmp_path / "db") as server:
        where.write_text(server.address + "\n")
        assert (await agent.order(Welcome)).epoch == 2


async def test_a_lighthouse_that_moved_is_found_though_the_file_says_so_late(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC has long begun to wait for the old one again."""
    monkeypatch.setattr("planaria.agent.link.HEARTBEAT", replace(HEARTBEAT, ceiling=1.0))
    where = tmp_path / "address"
    async with await serve(tmp_path / "db") as server:
        where.write_text(server.address + "\n")
        agent = connect(f"@{where}")
        await agent.order(Welcome)
    await asyncio.sleep(0.5)
    async with await serve(tmp_path / "db") as server:
        where.write_text(server.address + "\n")
        assert (await agent.order(Welcome)).epoch == 2


async def test_of_several_one_that_answers_slowly_is_reached_all_the_same(connect: Connect, tmp_path: Path) -> None:
    """A line, or a machine, on which a connection takes longer than one that stands still is given."""
    late, waiting = 0.3, set[asyncio.Task[None]]()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(late)
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = split_address(server.address)
        there, on = await asyncio.open_connection(host, port)
        for each in (pass_on(reader, on), pass_on(there, writer)):
            waiting.add(asyncio.create_task(each))

    async with await serve(tmp_path / "db") as server:
        slow = await asyncio.start_server(relay, "127.0.0.1", 0)
        with socket.socket() as nobody:  # bound, and not listening
            nobody.bind(("127.0.0.1", 0))
            ports = nobody.getsockname()[1], slow.sockets[0].getsockname()[1]
            agent = connect(",".join(f"127.0.0.1:{port}" for port in ports))
            assert (await asyncio.wait_for(agent.order(Welcome), 120)).epoch == 1
        await agent.close()
        slow.close()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_silence_is_told_again_and_again_with_its_reason(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.agent.link._UNREACHABLE_AFTER", 0.05)
    monkeypatch.setattr("planaria.agent.link._REMIND_SECONDS", 0.05)

    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(web, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        agent = connect(f"127.0.0.1:{port}")
        for _ in range(3):
            kind, text = await agent.notes.get()
            assert kind == "link" and text.startswith(f"no lighthouse answers at 127.0.0.1:{port} yet (")
            assert text.endswith("); trying on") and "()" not in text
        await agent.close()


async def test_an_older_lighthouse_is_not_obeyed(connect: Connect, tmp_path: Path) -> None:
    server = await serve(tmp_path / "new", floor=10)
    agent = connect(server.address)
    assert (await agent.order(Welcome)).epoch == 11
    address = server.address
    await server.stop()
    stale = await serve(tmp_path / "old", address)
    await agent.note("stale", "epoch 1 is not obeyed: epoch 11")
    while not agent.orders.empty():
        assert not isinstance(agent.orders.get_nowait(), Welcome)
    await stale.stop()
    async with await serve(tmp_path / "new", address):
        assert (await agent.order(Welcome)).epoch == 12, "the right one is found again"


async def test_orders_are_fenced_by_epoch(connect: Connect) -> None:
    agent = connect("127.0.0.1:1")
    link = agent.link

    def publish(epoch: int) -> Publish:
        return Publish(A, Quorum(QuorumId(epoch, 1), (A,), ("a:1",), True, "l"))

    assert link._counts(Welcome(3), 3) and link._counts(publish(3), 3) and link._counts(Drain(A), 3)
    assert not link._counts(publish(2), 3), "an old quorum on a new stream"
    assert not link._counts(Kill(0, 9), 2), "anything on an old stream"
    assert link._counts(publish(4), 3), "a newer quorum counts and raises the fence"
    assert not link._counts(publish(3), 3)
    await agent.note("stale", "epoch 2")


async def test_a_refused_agent_is_told_why(connect: Connect, tmp_path: Path) -> None:
    async with await serve(tmp_path / "db") as server:
        agent = connect(server.address)
        await agent.order(Welcome)
        agent.link.tell(Hello("agent", "here", JobSpec("job", 2)))  # a second one breaks the protocol
        assert "second Hello" in await agent.refusals.get()


class Full(LighthouseServicer):
    """A lighthouse that cannot take anybody."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[None] = asyncio.Queue()

    async def Attend(self, requests: Any, context: Any) -> None:
        self.asked.put_nowait(None)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the disk is full")


async def test_what_is_refused_again_and_again_is_noted_once(connect: Connect) -> None:
    server, full = grpc.aio.server(), Full()
    add_LighthouseServicer_to_server(full, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    agent = connect(f"127.0.0.1:{port}")
    for _ in range(5):
        await full.asked.get()
    await agent.close()
    await server.stop(None)
    said = f"the lighthouse at 127.0.0.1:{port} refused the stream: "
    notes = [text for _ in range(agent.notes.qsize()) if said in (text := agent.notes.get_nowait()[1])]
    # Who writes while the stream is being ended is told of an internal error: gRPC hides the reason then.
    assert 1 <= len(notes) == len(set(notes)), "each reason once"


async def test_drain_and_events(connect: Connect, tmp_path: Path) -> None:
    async with await serve(tmp_path / "db") as server:
        agent = connect(server.address)
        agent.tell(ready(A))
        agent.tell(ready(B))
        quorum = (await agent.order(Publish)).quorum
        agent.tell(Adopted(A, quorum.id, 0))
        agent.tell(Adopted(B, quorum.id, 0))
        await agent.link.drain("job", 1)
        assert (await agent.order(Drain)).member == B
        await agent.link.drain("job", 77)  # that it cannot is no matter
        async for event in agent.link.events("job"):
            if event.kind == "drain":
                assert event.group == 1
                break


# --- the agent's own lighthouse --------------------------------------------------------------------------------


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[tuple[LighthouseChild, asyncio.Queue[str]]]:
    notes: asyncio.Queue[str] = asyncio.Queue()
    made = LighthouseChild(tmp_path, None, lambda kind, text: notes.put_nowait(text))
    yield made, notes
    await made.stop()


async def test_own_lighthouse_comes_back_at_its_address(
    child: tuple[LighthouseChild, asyncio.Queue[str]], connect: Connect
) -> None:
    lighthouse, notes = child
    address = await lighthouse.start()
    agent = connect(address)
    assert (await agent.order(Welcome)).epoch == 1
    first = lighthouse.pid
    assert lighthouse._process is not None
    lighthouse._process.kill()
    assert "killed by SIGKILL; it is started again" in await notes.get()
    assert (await agent.order(Welcome)).epoch == 2
    assert lighthouse.address == address and lighthouse.pid != first


async def test_own_lighthouse_that_cannot_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        http = f"127.0.0.1:{taken.getsockname()[1]}"
        lighthouse = LighthouseChild(tmp_path, http, lambda kind, text: None)
        with pytest.raises(UsageError, match=r"the lighthouse did not start: .*lighthouse\.log"):
            await lighthouse.start()
        await lighthouse.stop()


async def test_own_lighthouse_serves_pages_at_the_same_port(tmp_path: Path) -> None:
    lighthouse = LighthouseChild(tmp_path, "127.0.0.1:0", lambda kind, text: None)
    try:
        await lighthouse.start()
        assert lighthouse.http is not None
        host, port = split_address(lighthouse.http)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b"200" in await reader.readline()
        writer.close()
    finally:
        await lighthouse.stop()


async def test_whoever_leaves_is_content_with_a_lighthouse_that_knows_of_no_job() -> None:
    """Behind an address of several it may be one that stands by."""

    class StandsBy(LighthouseServicer):
        async def Status(self, request: Any, context: Any) -> Any:
            return pb.StatusReply()

    server = grpc.aio.server()
    add_LighthouseServicer_to_server(StandsBy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = Link(
        lambda: Hello("agent", "here", JobSpec("job", 1)), tuple, lambda _: None, lambda *_: None, lambda _: None
    )
    link.address, link._outbox = f"127.0.0.1:{port}", asyncio.Queue()
    link._gone.set()
    assert await link.leave("job") == ()
    await server.stop(None)


async def test_a_desk_hears_that_as_many_groups_are_asked_for_as_before(connect: Connect, tmp_path: Path) -> None:
    """By that those who were drained are missed again, and nothing else may change."""
    async with await serve(tmp_path / "db") as server:
        agent = connect(server.address)
        agent.tell(ready(A))
        agent.tell(ready(B))
        quorum = (await agent.order(Publish)).quorum
        for member in (A, B):
            agent.tell(Adopted(member, quorum.id, 1))
        desk = LighthouseDesk(server.address, "job")
        while (seen := await desk.look()) is None or not all(group.step == 1 for group in seen.groups):
            await asyncio.sleep(0.05)
        changed = asyncio.create_task(desk.changed())
        assert await desk.scale(2) is None
        for _ in range(15):
            agent.tell(Heartbeat(()))  # or its silence would be what has changed
            if (await asyncio.wait((changed,), timeout=1.0))[0]:
                break
        assert changed.done()
        found = await desk.look()
        assert found is not None and (found.desired, found.scaled) == (2, 1)
        desk.close()
