"""Frames over the Unix socket between a rank and its agent: four bytes of length (big-endian), then a
message.

Ranks send Reports and receive Orders; the agent does the reverse. No grpc here: ranks are forked.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary

from planaria.core.messages import Order, Report
from planaria.errors import ProtocolError
from planaria.wire.checks import MAX_MESSAGE_BYTES
from planaria.wire.codec import encode_order, encode_report, order_from_bytes, report_from_bytes

HEADER_BYTES = 4
T = TypeVar("T")

_locks: WeakKeyDictionary[socket.socket, threading.Lock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def frame(message: Report | Order) -> bytes:
    """``message`` as it goes over the socket. Raises ProtocolError if it breaks a limit."""
    form = encode_order(message) if isinstance(message, Order) else encode_report(message)
    body = form.SerializeToString()
    return _length(len(body)).to_bytes(HEADER_BYTES, "big") + body


def send_frame(sock: socket.socket, message: Report | Order) -> None:
    """Send one message, blocking. Threads may share the socket: frames never interleave. OSError if the peer
    is gone."""
    data = frame(message)
    with _lock_of(sock):
        sock.sendall(data)


class Source(Protocol):
    """What a FrameReader needs of a socket."""

    def recv(self, size: int, /) -> bytes: ...
    def fileno(self) -> int: ...


class FrameReader(Generic[T]):
    """Blocking iterator over the messages of a socket: Orders unless told otherwise.

    It ends when the peer has closed or died (also inside a frame: it was killed while it wrote), or when
    another thread shuts the socket down (``sock.shutdown(SHUT_RDWR)``; a plain close does not wake a reader).
    A frame that is too long or senseless raises ProtocolError, and the stream cannot be used after that.
    """

    @overload
    def __init__(self: FrameReader[Order], sock: Source) -> None: ...
    @overload
    def __init__(self, sock: Source, decode: Callable[[bytes], T]) -> None: ...
    def __init__(self, sock: Source, decode: Callable[[bytes], object] = order_from_bytes) -> None:
        self._sock = sock
        self._decode = decode

    def __iter__(self) -> Iterator[T]:
        while (body := self._body()) is not None:
            yield self._decode(body)  # type: ignore[misc]

    def _body(self) -> bytes | None:
        header = self._exactly(HEADER_BYTES)
        return None if header is None else self._exactly(_length(int.from_bytes(header, "big")))

    def _exactly(self, size: int) -> bytes | None:
        """``size`` bytes, or None if the stream ends before."""
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(size - len(data))
            except ConnectionResetError:
                return None  # an end as well: the peer was killed with bytes of ours unread
            except OSError:
                if self._sock.fileno() == -1:
                    return None  # closed by this process
                raise
            if not part:
                return None
            data += part
        return bytes(data)


async def read_frame(reader: asyncio.StreamReader) -> Report | None:
    """The next Report of a rank, None at the end of the stream. ProtocolError as in FrameReader."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        body = await reader.readexactly(_length(int.from_bytes(header, "big")))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None  # closed or killed, perhaps while it wrote: the process table says which
    return report_from_bytes(body)


def write_frame(writer: asyncio.StreamWriter, message: Report | Order) -> None:
    """Queue one message; await ``writer.drain()`` afterwards where a slow reader must slow the writer
    down."""
    writer.write(frame(message))


def _length(size: int) -> int:
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a frame of {size} bytes, more than {MAX_MESSAGE_BYTES}; does the peer send frames?")
    return size


def _lock_of(sock: socket.socket) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(sock, threading.Lock())
