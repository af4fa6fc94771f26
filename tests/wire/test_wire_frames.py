"""Frames over real Unix sockets, blocking and asyncio, with threads, cut streams and dead peers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import many, orders, patient, reports

from planaria.core.messages import (
    Adopted,
    Drain,
    Heartbeat,
    Member,
    Order,
    Phase,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Report,
    Stop,
    Synced,
    Trouble,
    Welcome,
)
from planaria.errors import ProtocolError
from planaria.wire.checks import MAX_MESSAGE_BYTES
from planaria.wire.codec import report_from_bytes
from planaria.wire.frames import FrameReader, frame, read_frame, send_frame, write_frame

MEMBER = Member(2, 1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right


def test_orders_arrive_in_order_and_the_end_is_clean(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    sent: list[Order] = [Welcome(3), Drain(MEMBER), Stop("nobody is left")]
    for order in sent:
        send_frame(agent, order)
    agent.close()
    assert list(FrameReader(rank)) == sent


@patient
@given(st.lists(orders | reports, max_size=5), st.integers(1, 7))
def test_frames_survive_any_fragmentation(messages: list[Report | Order], chunk: int) -> None:
    async def read_back(raw: bytes) -> list[Report | None]:
        reader = asyncio.StreamReader()
        seen: list[Report | None] = []

        async def feed() -> None:
            for at in range(0, len(raw), chunk):
                reader.feed_data(raw[at : at + chunk])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.ensure_future(feed())
        while (report := await read_frame(reader)) is not None:
            seen.append(report)
        await feeding
        return seen

    sent = [message for message in messages if not isinstance(message, Order)]
    raw = b"".join(frame(message) for message in sent)
    assert repr(asyncio.run(read_back(raw))) == repr(sent)


def test_threads_share_a_socket_without_mixing_frames(pair: tuple[socket.socket, socket.socket]) -> None:
    """The training thread and the control thread of a rank both report, and big frames do not fit the
    buffer."""
    rank, agent = pair
    text = "x" * 4000
    pulses = tuple(Pulse(MEMBER, Phase.COMPUTING, 1, QuorumId(1, 1), 0.5, 0.1) for _ in range(2000))

    def talk(number: int) -> None:
        for step in range(40):
            send_frame(rank, Trouble(Member(number, 0), QuorumId(1, 1), step, text))
        send_frame(rank, Heartbeat(pulses))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    reading = iter(FrameReader(agent, report_from_bytes))
    seen = [next(reading) for _ in range(4 * 41)]
    for thread in threads:
        thread.join()
    troubles = [report for report in seen if isinstance(report, Trouble)]
    for number in range(4):
        steps = [report.step for report in troubles if report.member.group == number]
        assert steps == list(range(40))
    assert all(report.text == text for report in troubles)
    assert seen.count(Heartbeat(pulses)) == 4


def test_a_frame_that_is_too_long_is_refused_without_reading_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    agent, rank = pair
    agent.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="does the peer send frames"):
        next(iter(FrameReader(rank)))


def test_text_instead_of_frames_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    agent, rank = pair
    agent.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError):
        next(iter(FrameReader(rank)))


@pytest.mark.parametrize("body", [b"", b"\xff\xff\xff", b"\x08"])
def test_a_senseless_frame_is_a_protocol_error(pair: tuple[socket.socket, socket.socket], body: bytes) -> None:
    agent, rank = pair
    agent.sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(ProtocolError):
        next(iter(FrameReader(rank)))


@many
@given(st.binary(max_size=64))
def test_any_bytes_end_cleanly_or_in_a_protocol_error(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.close()
        try:
            list(FrameReader(right))
        except ProtocolError as error:
            assert str(error)


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_a_peer_that_died_inside_a_frame_ends_the_stream(pair: tuple[socket.socket, socket.socket], cut: int) -> None:
    agent, rank = pair
    send_frame(agent, Welcome(1))
    agent.sendall(frame(Stop("a long enough reason"))[:cut])
    agent.close()
    assert list(FrameReader(rank)) == [Welcome(1)]


def test_another_thread_ends_the_reader_by_shutting_the_socket_down(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, rank = pair
    seen: list[Order] = []
    thread = threading.Thread(target=lambda: seen.extend(FrameReader(rank)))
    thread.start()
    rank.shutdown(socket.SHUT_RDWR)
    thread.join(timeout=10)
    assert not thread.is_alive() and seen == []


def test_a_closed_socket_ends_the_reader(pair: tuple[socket.socket, socket.socket]) -> None:
    _, rank = pair
    rank.close()
    assert list(FrameReader(rank)) == []


def test_sending_to_a_dead_peer_is_an_os_error(pair: tuple[socket.socket, socket.socket]) -> None:
    rank, agent = pair
    agent.close()
    with pytest.raises(OSError):
        send_frame(rank, Synced())


def test_a_killed_writer_ends_the_asyncio_stream(tmp_path: Path) -> None:
    """The agent's side, with a real process that is SIGKILLed between frames of its stream."""
    path = tmp_path / "s"
    script = (
        "import socket, sys\n"
        "from planaria.core.messages import Adopted, Member, QuorumId\n"
        "from planaria.wire.frames import send_frame, frame\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "for step in range(10): send_frame(s, Adopted(Member(0, 0), QuorumId(1, 1), step))\n"
        "s.sendall(frame(Adopted(Member(0, 0), QuorumId(1, 1), 10))[:6])\n"
        "s.recv(1)\n"
    )

    async def run() -> list[Report]:
        seen: list[Report] = []
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while (report := await read_frame(reader)) is not None:
                seen.append(report)
                if len(seen) == 10:
                    os.kill(process.pid, signal.SIGKILL)
            writer.close()
            ended.set()

        server = await asyncio.start_unix_server(serve, path)
        process = subprocess.Popen([sys.executable, "-c", script, str(path)])
        await ended.wait()
        server.close()
        assert process.wait() == -signal.SIGKILL
        return seen

    assert asyncio.run(run()) == [Adopted(Member(0, 0), QuorumId(1, 1), step) for step in range(10)]


def test_the_agent_writes_what_the_rank_reads(tmp_path: Path) -> None:
    quorum = Quorum(QuorumId(1, 2), (MEMBER,), ("h:1",), True, "l")
    sent: list[Order] = [Welcome(1), Publish(MEMBER, quorum)]

    async def run() -> list[Order]:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for order in sent:
                write_frame(writer, order)
            await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        with socket.socket(socket.AF_UNIX) as rank:
            await asyncio.to_thread(rank.connect, str(tmp_path / "s"))
            seen = await asyncio.to_thread(lambda: list(FrameReader(rank)))
        server.close()
        return seen

    assert asyncio.run(run()) == sent


def test_ranks_never_load_grpc_or_torch() -> None:
    """A forked process must not inherit grpc's threads and locks, so what ranks import must not pull it
    in."""
    script = "import sys, planaria.wire.frames, planaria.wire.page, planaria.wire.codec\nprint(sorted(sys.modules))\n"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert "google.protobuf" in out
    assert not re.search(r"'(grpc|torch|numpy)", out)
