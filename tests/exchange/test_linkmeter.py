"""What the kernel tells of real connections, and to whom it is ascribed."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from planaria.exchange.linkmeter import _INFO, LEAST_SECONDS, LinkMeter, Traffic
from planaria.exchange.sockets import Address, Lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel must tell")


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket, Address]]:
    """Both ends of a connection, and the address to which it was made. The far end reads slowly, or not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as near:
            far, _ = server.accept()
            with far:
                yield near, far, address


def send(near: socket.socket, far: socket.socket, size: int) -> None:
    def read() -> None:
        left = size
        while left:
            left -= len(far.recv(min(left, 1 << 16)))

    reader = threading.Thread(target=read)
    reader.start()
    near.sendall(bytes(size))
    reader.join()


def test_a_connection_that_was_used_for_long_enough_has_a_rate() -> None:
    with connected() as (near, far, address):
        lines = Lines()
        lines.add_devices({address})
        meter = LinkMeter(lines, {address: 3})
        assert meter.read() == {}, "nothing was sent"
        begun = Traffic.of(near)
        assert begun is not None
        sent = 0
        while (now := Traffic.of(near)) is not None and now.seconds - begun.seconds < LEAST_SECONDS:
            send(near, far, 32 << 20)
            sent += 32 << 20
        while now is not None and now.acknowledged - begun.acknowledged < sent:
            now = Traffic.of(near)  # until then the clock of what is on its way goes on
        assert now is not None
        (link,) = meter.read().values()
        assert link.group == 3
        assert link.bits == pytest.approx(8 * (now.acknowledged - begun.acknowledged) / (now.seconds - begun.seconds))
        assert 0 < link.round_trip < 10 and 0 <= link.lost <= 1
        assert list(meter.read().values()) == [link], "nothing new was sent"


def test_the_time_in_which_the_peer_takes_nothing_is_not_the_lines() -> None:
    with connected() as (near, _, _):
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                near.send(bytes(1 << 20))
        begun, now = Traffic.of(near), Traffic.of(near)
        start = busy(near)
        while busy(near) - start < 4 * LEAST_SECONDS:
            now = Traffic.of(near)
        assert begun is not None and now is not None
        assert now.seconds - begun.seconds < 2 * LEAST_SECONDS


def busy(of: socket.socket) -> float:
    """Seconds in which anything was on its way, or waited for its way."""
    return float(_INFO.unpack(of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))[4]) / 1e6


def test_other_connections_are_nobodys() -> None:
    with connected() as (near, far, _), connected() as (_, _, address):
        lines = Lines()
        lines.add_devices({address})
        send(near, far, 1 << 20)
        seen = lines.traffic(Traffic.of)
        assert {remote for _, remote in seen if remote == address} == {address}
        assert (near.getsockname(), near.getpeername()) not in seen


def test_the_one_who_connected_is_known_by_its_host_if_it_is_the_only_one_there() -> None:
    def assigned(*remotes: Address, peers: dict[Address, int]) -> dict[int, int]:
        meter = LinkMeter(Lines(), peers)
        traffic = {(("10.0.0.1", 7), remote): Traffic(n, 1.0, 1, 0, 0.1) for n, remote in enumerate(remotes)}
        return {peer: found.acknowledged for peer, found in meter._assigned(traffic).items()}

    two, three, four = ("10.0.0.2", 5), ("10.0.0.3", 5), ("10.0.0.3", 6)
    assert assigned(two, ("10.0.0.3", 44), peers={two: 1, three: 2}) == {1: 0, 2: 1}
    assert assigned(three, ("10.0.0.3", 44), peers={three: 2, four: 3}) == {2: 0, 3: 1}
    assert assigned(("10.0.0.3", 44), ("10.0.0.3", 45), peers={three: 2, four: 3}) == {}
