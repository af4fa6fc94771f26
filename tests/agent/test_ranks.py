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
    Present,
    Publish,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Regroup,
    Report,
    Saved,
    Stop,
    Trouble,
)
from planaria.wire.frames import FrameReader, send_frame

A, B = Member(0, 0), Member(1, 2)
Q = Quorum(QuorumId(1, 1), (A, B), ("a:1", "b:2"), True, "line")


def ready(member: Member) -> Ready:
    return Ready(member, "127.0.0.1:1", (("torch", "2"),), "d", 8, 100)


class Hub:
    def __init__(self, ranks: range = range(1)) -> None:
        self.alive = {A, B}
        self.heard: asyncio.Queue[Report] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.hub = RankHub(
            lambda member: member in self.alive, self.heard.put_nowait, self.refused.put_nowait, lambda member: ranks
        )

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


async def test_what_is_left_of_a_group_goes_on_as_its_next_incarnation() -> None:
    made = Hub(range(3))
    await made.hub.start()
    try:
        speaker, lost, third = await made.join(A), made.connect(), made.connect()
        for rank, connection in ((1, lost), (2, third)):
            send_frame(connection, Present(A, rank))
        assert made.hub.send(A, Publish(A, Q))
        for connection in (speaker, lost, third):
            assert await asyncio.to_thread(orders, connection, 1) == [Publish(A, Q)]
        newer = Member(0, 1)
        made.alive = {newer}
        made.hub.regroup(A, newer, 1, 4711)
        for connection in (speaker, third):
            assert await asyncio.to_thread(orders, connection, 1) == [Regroup(newer, 4711)]
        # What it said before it heard of that is void; that a checkpoint is on the disk stays true.
        saved = Saved(A, 7, 0.1)
        for report in (Adopted(A, Q.id, 3), saved, ready(newer)):
            send_frame(speaker, report)
        assert [await made.heard.get(), await made.heard.get()] == [saved, ready(newer)]
        replacement = made.connect()
        send_frame(replacement, Present(newer, 1))
        assert made.hub.connected() == (newer,) and made.hub.send(newer, Publish(newer, Q))
        for connection in (speaker, third, replacement):
            assert await asyncio.to_thread(orders, connection, 1) == [Publish(newer, Q)]
        assert not made.hub.send(A, Stop(""))
        send_frame(speaker, ready(Member(0, 2)))
        assert "spoke for group 0 (incarnation 2)" in await made.refused.get()
    finally:
        await made.hub.close()


async def test_the_rank_that_speaks_is_replaced() -> None:
    made = Hub(range(2))
    await made.hub.start()
    try:
        lost, other = await made.join(A), made.connect()
        send_frame(other, Present(A, 1))
        assert made.hub.send(A, Publish(A, Q))
        assert await asyncio.to_thread(orders, other, 1) == [Publish(A, Q)]  # it is known by now
        newer = Member(0, 1)
        made.alive = {newer}
        lost.close()
        while made.hub.connected():
            await asyncio.sleep(0.01)
        made.hub.regroup(A, newer, 0, 4711)
        assert await asyncio.to_thread(orders, other, 1) == [Regroup(newer, 4711)]
        speaker = made.connect()
        send_frame(speaker, Present(newer, 0))  # it speaks when it has met the others
        send_frame(speaker, ready(newer))
        assert await made.heard.get() == ready(newer)
        assert made.hub.stream_of(newer) is not None and made.hub.stream_of(A) is None
    finally:
        await made.hub.close()


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


# --- several ranks of a member -------------------------------------------------------------------------------------


@pytest.fixture
async def wide() -> AsyncIterator[Hub]:
    made = Hub(range(3))
    await made.hub.start()
    yield made
    await made.hub.close()


async def present(hub: Hub, member: Member, rank: int) -> socket.socket:
    connection = hub.connect()
    send_frame(connection, Present(member, rank))
    return connection


async def test_all_ranks_hear_the_same_however_late_they_come(wide: Hub) -> None:
    early = await present(wide, A, 1)
    assert not wide.hub.send(A, Drain(A)), "nobody speaks for it yet, so nobody is told"
    speaker = await wide.join(A)
    said = [Publish(A, Q), Drain(A), Stop("")]
    for order in said:
        assert wide.hub.send(A, order)
    late = await present(wide, A, 2)
    last = Refuse(A, "no")
    while not wide.hub._arrived[A] >= {2}:
        await asyncio.sleep(0.01)
    assert wide.hub.send(A, last)
    for rank in (early, speaker, late):
        assert await asyncio.to_thread(orders, rank, 4) == [*said, last]
    assert not wide.hub._said, "nobody is waited for any more"
    assert wide.hub.connected() == (A,)


async def test_a_present_rank_says_nothing_else(wide: Hub) -> None:
    rank = await present(wide, A, 1)
    send_frame(rank, Adopted(A, Q.id, 3))
    assert "rank 1, was cut off" in (sentence := await wide.refused.get()) and "rank 0 speaks" in sentence
    assert await asyncio.to_thread(rank.recv, 1) == b""
    assert wide.heard.empty()


@pytest.mark.parametrize(("member", "rank"), [(A, 3), (Member(5, 0), 1)])
async def test_who_is_not_a_rank_of_ours(wide: Hub, member: Member, rank: int) -> None:
    stranger = await present(wide, member, rank)
    assert "cut off" in await wide.refused.get()
    assert await asyncio.to_thread(stranger.recv, 1) == b""


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
