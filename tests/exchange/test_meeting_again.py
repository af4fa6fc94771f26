"""Ranks of a group that meet again: who cannot be reached, though it lives, is not waited for without an end."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import pytest

from planaria.errors import CommunicatorError
from planaria.exchange.rendezvous import RendezvousStore, reach
from planaria.exchange.sockets import Lines


def test_a_store_that_is_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.exchange.rendezvous.STARTING", timedelta(seconds=0.5))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(CommunicatorError, match="cannot reach the rendezvous store"):
            reach(f"127.0.0.1:{nobody.getsockname()[1]}", Lines())


def test_a_rank_that_never_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "planaria.exchange.rendezvous.STARTING", timedelta(seconds=3)
    )  # in which one that is is reached
    served = RendezvousStore("127.0.0.1", 0)
    store = reach(served.address, Lines())
    began = time.monotonic()
    with pytest.raises(Exception, match=r"(?i)time"):
        store.get("device/1")
    assert time.monotonic() > began + 2.5
