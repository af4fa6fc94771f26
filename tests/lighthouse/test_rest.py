"""Calls of a store that answers late: whoever leads must not wait for it beyond its patience."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator

import pytest

from planaria.lighthouse.elector import StoreAway
from planaria.lighthouse.rest import Rest

WHOLE = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"good": 1}'
PATIENCE = 1.0


class Dribbling:
    """A server that answers whole until ``slow_after`` bytes of an answer have been sent, then a byte every 0.5 s."""

    def __init__(self) -> None:
        self.slow_after = len(WHOLE)
        self.connections = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._ends = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ends.set()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while connection.recv(4096):
                connection.sendall(WHOLE[: self.slow_after])
                for byte in WHOLE[self.slow_after :]:
                    if self._ends.wait(0.5):
                        return
                    try:
                        connection.sendall(bytes([byte]))
                    except OSError:
                        return


@pytest.fixture
def server() -> Iterator[Dribbling]:
    made = Dribbling()
    yield made
    made.close()


@pytest.mark.parametrize("slow_after", [0, 5, 40, len(WHOLE) - 11], ids=["at once", "status", "headers", "body"])
def test_an_answer_in_drops_is_waited_for_as_long_as_any_other(server: Dribbling, slow_after: int) -> None:
    rest = Rest([server.url], "etcd", ssl.create_default_context)
    assert rest.call("POST", "/x", {}, patience=60) == (200, {"good": 1})
    assert rest.call("POST", "/x", {}, patience=60) == (200, {"good": 1})
    assert server.connections == 1
    server.slow_after = slow_after
    began = time.monotonic()
    with pytest.raises(StoreAway, match="etcd does not answer"):
        rest.call("POST", "/x", {}, patience=PATIENCE)
    assert PATIENCE <= time.monotonic() - began < 5 * PATIENCE  # all of it takes 5.5 s and more
    server.slow_after = len(WHOLE)
    assert rest.call("POST", "/x", {}, patience=60) == (200, {"good": 1})
    rest.close()
