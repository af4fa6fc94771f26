"""Real network namespaces, real TCP through them, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pretend import until

from planaria.chaos import netns
from planaria.chaos.netns import HUB_ADDRESS, PREFIX, Networks, inside
from planaria.errors import PlanariaError, UsageError


def possible() -> bool:
    try:
        netns.require(2)
    except UsageError:
        return False
    return True


needs_root = pytest.mark.skipif(not possible(), reason="network namespaces need root and iproute2")

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    while True:
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as connection:
    assert connection.recv(5) == b"hello"
"""


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks(2)
    made.make()
    yield made
    made.close()


@pytest.fixture
def server(networks: Networks) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(inside(networks.of(0), [sys.executable, "-c", SERVER, networks.address(0)])) as process:
        yield process
        process.kill()


def reaches(namespace: str, address: str, seconds: float) -> bool:
    command = inside(namespace, [sys.executable, "-c", CLIENT, address, str(seconds)])
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


@needs_root
def test_a_cut_group_is_out_of_reach_until_it_is_mended(networks: Networks, server: subprocess.Popen[bytes]) -> None:
    address = networks.address(0)
    for namespace in (networks.of(1), networks.hub):
        until(lambda namespace=namespace: reaches(namespace, address, 2))  # type: ignore[misc]
    networks.cut(0)
    assert not reaches(networks.of(1), address, 0.5)
    assert not reaches(networks.hub, address, 0.5)
    networks.mend(0)
    until(lambda: reaches(networks.of(1), address, 2))
    networks.cut(1)
    assert not reaches(networks.of(1), address, 0.5)
    until(lambda: reaches(networks.hub, address, 2))


@needs_root
def test_a_line_has_the_rate_that_it_was_given_last(networks: Networks, server: subprocess.Popen[bytes]) -> None:
    networks.limit(0, 100)
    networks.limit(0, 20)
    for place, device in ((networks.of(0), "eth0"), (networks.hub, "group0")):
        command = ["tc", "-n", place, "qdisc", "show", "dev", device]
        assert "rate 20Mbit" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    until(lambda: reaches(networks.of(1), networks.address(0), 2))


@needs_root
def test_the_hub_is_out_of_the_machines_own_network(networks: Networks) -> None:
    shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    assert HUB_ADDRESS not in shown


@needs_root
def test_closing_leaves_nothing_even_after_half_a_start() -> None:
    networks = Networks(3)
    subprocess.run(["ip", "netns", "add", networks.of(1)], check=True)
    with pytest.raises(PlanariaError, match=r"`ip netns add .*` failed"):
        networks.make()  # the second group's name is taken
    networks.close()
    networks.close()
    assert not [name for name in netns.namespaces() if f"-{os.getpid()}-" in f"-{name.removeprefix(PREFIX)}"]


@needs_root
def test_leftovers_of_the_dead_are_swept_and_those_of_the_living_are_not(networks: Networks) -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    leftover = f"{PREFIX}{dead.pid}-hub"
    subprocess.run(["ip", "netns", "add", leftover], check=True)
    netns.sweep()
    assert leftover not in netns.namespaces()
    assert networks.hub in netns.namespaces()


@needs_root
def test_ip_becomes_the_command(networks: Networks) -> None:
    with subprocess.Popen(inside(networks.of(0), ["cat"]), stdin=subprocess.PIPE) as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == "cat")
        process.kill()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="need root"):
        netns.require(2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="iproute2"):
        netns.require(2)


@needs_root
def test_too_many_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 200"):
        netns.require(201)
