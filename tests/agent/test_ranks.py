"""The socket to the ranks: who may speak, for whom, and who hears what."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from planaria.agent.ranks import RankHub
from planaria.core.messages import (
    Adopted,
    Died,
    Drain,
    Finished,
    Member,
    Publish,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Report,
    Stop,
    Trouble,
)
from planaria.wire.frames import FrameReader, send_frame

A, B = Member(0, 0), Member(1, 2)
Q = Quorum(QuorumId(1, 1), (A, B), ("a:1", "b:2"), True, "line")


def ready(member: Member) -> Ready:
    return Ready(member, "127.0.0.1:1", (("torch", "2"),), "d", 8, 100)


class Hub:
    def __init__(self) -> None:
        self.alive = {A, B}
        self.heard: asyncio.Queue[Report] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.hub = RankHub(lambda member: member in self.alive, self.heard.put_nowait, self.refused.put_nowait)

    def connect(self) -> socket.socket:
        rank = socket.socket(socket.AF_UNIX)
        rank.connect(str(self.hub.path))
        return rank

    async def join(self, member: Member) -> socket.socket:
        rank = self.connect()
        send_frame(rank, ready(member))
        assert await self.heard.get() == ready(member)
        return rank


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    made = Hub()
    await made.hub.start()
    yield made
    await made.hub.close()


def orders(rank: socket.socket, count: int) -> list[object]:
    reader = iter(FrameReader(rank))
    return [next(reader) for _ in range(count)]


async def test_reports_come_in_order_and_orders_reach_their_member(hub: Hub) -> None:
    a, b = await hub.join(A), await hub.join(B)
    reports: list[Report] = [Adopted(A, Q.id, 3), Trouble(A, Q.id, 4, "broke"), Finished(A, 5, "d")]
    for report in reports:
        send_frame(a, report)
    assert [await hub.heard.get() for _ in reports] == reports
    assert hub.hub.send(B, Publish(B, Q)) and hub.hub.send(A, Drain(A)) and hub.hub.send(A, Stop(""))
    assert await asyncio.to_thread(orders, b, 1) == [Publish(B, Q)]
    assert await asyncio.to_thread(orders, a, 2) == [Drain(A), Stop("")]
    assert set(hub.hub.connected()) == {A, B}


async def test_nobody_is_there(hub: Hub) -> None:
    assert not hub.hub.send(A, Refuse(A, "no"))
    rank = await hub.join(A)
    rank.close()
    while hub.hub.connected():
        await asyncio.sleep(0.01)
    assert not hub.hub.send(A, Stop(""))


async def test_a_stranger_is_cut_off(hub: Hub) -> None:
    hub.alive = {B}
    rank = hub.connect()
    send_frame(rank, ready(A))
    assert "group 0 (incarnation 0) is not a running member" in await hub.refused.get()
    assert await asyncio.to_thread(rank.recv, 1) == b""
    assert hub.heard.empty()


async def test_nobody_speaks_for_another(hub: Hub) -> None:
    rank = await hub.join(A)
    send_frame(rank, Adopted(B, Q.id, 3))
    assert "spoke for group 1" in await hub.refused.get()
    assert await asyncio.to_thread(rank.recv, 1) == b""
    assert hub.heard.empty() and hub.hub.connected() == ()


async def test_only_agents_say_who_died(hub: Hub) -> None:
    rank = hub.connect()
    send_frame(rank, Died(A, "murder"))
    assert "only agents send" in await hub.refused.get()
    rank.close()


@pytest.mark.parametrize("bytes_", [b"\xff\xff\xff\xff", b"\0\0\0\4abcd", b"GET / HTTP/1.1\r\n\r\n"])
async def test_senseless_bytes_are_cut_off(hub: Hub, bytes_: bytes) -> None:
    rank = hub.connect()
    rank.sendall(bytes_)
    assert "cut off" in await hub.refused.get()
    rank.close()
    await hub.join(B)


async def test_a_second_connection_of_a_member_replaces_the_first(hub: Hub) -> None:
    first = await hub.join(A)
    second = await hub.join(A)
    assert await asyncio.to_thread(first.recv, 1) == b""
    hub.hub.send(A, Stop("x"))
    assert await asyncio.to_thread(orders, second, 1) == [Stop("x")]


async def test_a_rank_that_does_not_read_stops_nobody(hub: Hub) -> None:
    await hub.join(A)
    b = await hub.join(B)
    for number in range(3000):
        hub.hub.send(A, Refuse(A, f"{number} " + "x" * 200))
    hub.hub.send(B, Stop("done"))
    assert await asyncio.to_thread(orders, b, 1) == [Stop("done")]


async def test_closing_hangs_up_and_cleans_up() -> None:
    hub = Hub()
    await hub.hub.start()
    path = hub.hub.path
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700, "private"
    rank = await hub.join(A)
    await hub.hub.close()
    assert rank.recv(1) == b""
    assert not path.parent.exists()


async def test_a_long_temporary_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    hub = Hub()
    await hub.hub.start()
    await hub.join(A)
    await hub.hub.close()
    assert list(deep.iterdir()) == []


def test_what_killed_agents_left_is_swept(tmp_path: Path) -> None:
    from planaria.agent.ranks import _sweep

    def left(name: str, age: float, listening: bool = False) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(directory / "agent"))
        if listening:
            sock.listen()
            servers.append(sock)
        else:
            sock.close()
        os.utime(directory / "agent", (time.time() - age,) * 2)
        return directory

    servers: list[socket.socket] = []
    dead, live = left("planaria-dead", 3600), left("planaria-live", 3600, listening=True)
    young, other = left("planaria-young", 0), left("other-dead", 3600)
    full = left("planaria-full", 3600)
    (full / "mine").touch()
    (tmp_path / "planaria-file").mkdir()
    (tmp_path / "planaria-file" / "agent").touch()
    _sweep(tmp_path)
    assert not dead.exists()
    assert (live / "agent").exists() and young.exists() and other.exists() and (full / "mine").exists()
    assert (tmp_path / "planaria-file" / "agent").exists()
    servers[0].close()
