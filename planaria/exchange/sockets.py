"""Ending a communicator at once: by shutting down its sockets.

Gloo has no abort: its ``abort()`` leaves a pending operation waiting, and its destructor waits for pending
operations (both seen on torch 2.13). What does end them, within a millisecond and at both ends, is the end of
the connection. So every life of a communicator knows its own sockets, and ``shutdown(2)`` on them is its
abort: pending operations raise, the destructor has nothing to wait for, peers notice, and a peer that was
stopped finds on waking that its connection is gone and so cannot write into buffers that were in use long
ago.

Only reading is shut down: gloo finds the end of the stream and closes the socket. Were writing shut down too, gloo
might first read a peer's go-ahead for a message and fail to write it, and then the operation would be on none of the
lists that it goes through when the connection ends: it would wait for ever (seen, once in some ten runs of the tests).
The same becomes of a message that is half on its way; its thread is left behind.

Gloo does not show its file descriptors. They are found in the process's table by address: a connection
belongs to a life if one of its ends is a listening address of one of that life's gloo devices, which are
never shared.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
Address = tuple[str, int]
Ends = tuple[Address, Address]  # own, remote

TABLE = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"


# One scan at a time, so that none sees the duplicates that another has made for a moment.
_scanning = threading.Lock()


@contextlib.contextmanager
def _sockets() -> Iterator[list[socket.socket]]:
    """Duplicates of all TCP sockets of this process, for a moment."""
    with _scanning, contextlib.ExitStack() as opened:
        found: list[socket.socket] = []
        numbers: set[int] = set()  # of our duplicates: they can take a number that the listing shows
        for name in os.listdir(TABLE):
            if int(name) in numbers:
                continue
            with contextlib.suppress(OSError):  # closed since the listing
                number = os.dup(int(name))
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.close(number)
                    continue
                each = opened.enter_context(socket.socket(fileno=number))
                numbers.add(number)
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    found.append(each)
        yield found


def _address(raw: tuple[object, ...]) -> Address:
    host, port = str(raw[0]), raw[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port  # an IPv4 connection of an IPv6 socket


def _ends(each: socket.socket) -> Ends | None:
    try:
        return _address(each.getsockname()), _address(each.getpeername())
    except OSError:  # not connected: a listening socket, or one whose peer is gone
        return None


def listening() -> set[Address]:
    """The addresses on which this process accepts connections."""
    with _sockets() as sockets:
        return {
            _address(each.getsockname()) for each in sockets if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        }


def connections_to(remote: Address) -> set[Ends]:
    """This process's connections to ``remote``."""
    with _sockets() as sockets:
        return {ends for each in sockets if (ends := _ends(each)) is not None and ends[1] == remote}


class Lines:
    """The connections of one life of a communicator, and the scissors. Methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: set[Ends] = set()
        self._devices: set[Address] = set()
        self._cut = False
        self.peers: dict[Address, int] = {}  # rank of each peer, by the listening address of its gloo device

    @property
    def is_cut(self) -> bool:
        return self._cut

    def add(self, ends: set[Ends]) -> None:
        """Tell single connections of this life. They end at once if it is over already."""
        self._tell(ends, set())

    def add_devices(self, devices: set[Address]) -> None:
        """Tell the listening addresses of the life's gloo devices, own and peers', before they connect: all
        connections between them, which do not exist yet, belong to this life."""
        self._tell(set(), devices)

    def _tell(self, ends: set[Ends], devices: set[Address]) -> None:
        with self._lock:
            self._ends |= ends
            self._devices |= devices
            over = self._cut
        if over:
            self._shut()

    def cut(self) -> None:
        """End all connections, see above. Never waits for anything: a few system calls for every open file."""
        with self._lock:
            self._cut = True
        self._shut()

    def count(self) -> int:
        """How many connections of this life there are."""
        with _sockets() as sockets:
            return len({ends for each in sockets if (ends := _ends(each)) is not None and self._has(ends)})

    def traffic(self, read: Callable[[socket.socket], T]) -> dict[Ends, T]:
        """What ``read`` makes of each connection between the life's gloo devices."""
        with self._lock:
            devices = set(self._devices)
        with _sockets() as sockets:
            known = [(ends, each) for each in sockets if (ends := _ends(each)) is not None]
            return {ends: read(each) for ends, each in known if ends[0] in devices or ends[1] in devices}

    def _has(self, ends: Ends) -> bool:
        return ends in self._ends or ends[0] in self._devices or ends[1] in self._devices

    def _shut(self) -> None:
        if not self._ends and not self._devices:
            return  # a life that never had any: nothing to look for
        with _sockets() as sockets:
            for each in sockets:
                ends = _ends(each)
                if ends is not None and self._has(ends):
                    with contextlib.suppress(OSError):  # the other end may have gone first
                        each.shutdown(socket.SHUT_RD)
