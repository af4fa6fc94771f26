"""Finding and cutting the connections of this process: those that were told, and no others."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest

from planaria.errors import CommunicatorError
from planaria.exchange.rendezvous import RendezvousStore, connect, reason, split_address
from planaria.exchange.sockets import Lines, connections_to, listening


def pair() -> tuple[socket.socket, socket.socket, tuple[str, int]]:
    """Both ends of a TCP connection and the address to which it was made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        near = socket.create_connection(address)
        far, _ = server.accept()
    return near, far, address


def is_open(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True
    finally:
        end.setblocking(True)


def test_listening_addresses_are_found() -> None:
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening() - before == {server.getsockname()}
    assert listening() == before


def test_connections_are_found_by_where_they_lead() -> None:
    near, far, address = pair()
    with near, far:
        assert connections_to(address) == {(near.getsockname(), address)}


def test_looking_leaves_no_descriptor_behind() -> None:
    near, far, address = pair()
    with near, far:
        before = os.listdir("/proc/self/fd")
        for _ in range(20):
            connections_to(address)
            listening()
        assert os.listdir("/proc/self/fd") == before


def test_a_cut_is_the_end_of_the_stream_and_spares_others() -> None:
    near, far, address = pair()
    other_near, other_far, _ = pair()
    with near, far, other_near, other_far:
        lines = Lines()
        lines.add(connections_to(address))
        assert lines.count() == 1
        lines.cut()
        assert not is_open(near)
        near.close()  # what gloo and a store do when they find it
        assert not is_open(far)
        assert is_open(other_near)
        assert is_open(other_far)
        lines.cut()  # again: nothing is left to do


def test_connections_that_are_told_after_the_cut_are_cut_at_once() -> None:
    near, far, address = pair()
    with near, far:
        lines = Lines()
        lines.cut()
        assert is_open(near)
        lines.add_devices({address})
        assert not is_open(near)
        assert lines.is_cut


def test_a_store_listens_on_its_host_only_and_serves() -> None:
    before = listening()
    store = RendezvousStore("127.0.0.1")
    assert listening() - before == {split_address(store.address)}
    one, other = connect(store.address, timedelta(seconds=60)), connect(store.address, timedelta(seconds=60))
    one.set("key", "value")
    assert other.get("key") == b"value"


def test_a_wait_for_a_key_ends_when_its_connection_is_cut() -> None:
    import threading

    store, lines = RendezvousStore("127.0.0.1"), Lines()
    client = connect(store.address, timedelta(days=1), lines)
    assert lines.count() == 1
    threading.Timer(0.05, lines.cut).start()
    with pytest.raises(RuntimeError):
        client.get("a key that nobody sets")
    connect(store.address, timedelta(seconds=60)).set("the store", "is as good as before")


def test_a_dead_store_is_told_at_once() -> None:
    near, far, (host, port) = pair()
    near.close()
    far.close()
    with pytest.raises(CommunicatorError, match=f"cannot reach the rendezvous store at {host}:{port}: .*refused"):
        connect(f"{host}:{port}", timedelta(days=1))


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(CommunicatorError, match="set PLANARIA_HOST"):
        RendezvousStore("203.0.113.1")


@pytest.mark.parametrize(
    ("address", "pair"), [("10.0.0.1:80", ("10.0.0.1", 80)), ("[::1]:9", ("::1", 9)), ("node-3:1", ("node-3", 1))]
)
def test_addresses_are_split(address: str, pair: tuple[str, int]) -> None:
    assert split_address(address) == pair


def test_the_reason_is_the_sentence_for_people() -> None:
    raw = "[/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by a crash\nat x"
    assert reason(RuntimeError(raw)) == "Connection closed by peer [127.0.0.1]:1"
    assert reason(RuntimeError("")) == "RuntimeError"
