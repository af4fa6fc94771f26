"""How the members of a quorum find each other: the store that every rank hosts, and the forming of a gloo
group.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from planaria.core.messages import Quorum
from planaria.errors import CommunicatorError
from planaria.exchange.sockets import TABLE, Address, Lines, connections_to, listening

# An operation ends by its result, by the death of a peer or by being cut, never by a clock: how long a peer
# may compute before it joins an exchange is for the lighthouse to judge, which sees its progress. Gloo wants
# a number.
NEVER = timedelta(days=365)

# A store answers from a C++ thread that needs no lock of Python's: in milliseconds, or its process is stopped or dead.
# TCPStore goes on trying for twice this long, and nothing can end that.
CONNECT = timedelta(seconds=5)

# When all members are known they listen, and their connections are accepted by threads that need no lock of Python's.
# Only one that has gone meanwhile does not answer: gloo then tries on for so long, and nothing can end that. What it
# waits for is five times the timeout that it is given (seen); to reach one that listens takes no such time.
MEETING = timedelta(seconds=30)
GLOO_WAITS = 5

# Ranks of a group meet at the store of one that may only be starting: as long as PyTorch gives ranks to meet at first.
# Whoever is not there by then, though it lives, cannot be reached; then the group is started again as a whole.
STARTING = timedelta(minutes=10)
_RETRY = 0.01  # seconds between tries

gloo: Any = ProcessGroupGloo  # torch's stubs lack send, recv and _Options


class Group(Protocol):
    """What is used of a process group."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


# TCPStore asks the name server for the name of every address that it connects to, at both ends and only for its log.
# Where no answer comes, the resolver's default of twice five seconds would be a recovery's whole time (seen). It reads
# this variable when it is first used, which is after this import.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class RendezvousStore:
    """A key-value store served by this process for as long as it lives, on ``host`` only; at a free port unless one is
    given, which others may hold without listening there."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(port > 0))
                listener.bind((host, port))
            except OSError as error:
                raise CommunicatorError(
                    f"cannot serve the rendezvous store on {host!r}: {error}; "
                    "set PLANARIA_HOST to an address of this machine"
                ) from error
            listener.listen(512)
            port = listener.getsockname()[1]
            # Handing over a bound socket is the only way to make TCPStore listen on one address instead of on
            # all.
            self._store = TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> Address:
    """``host:port`` or ``[v6]:port`` as a pair."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_connecting: dict[Address, threading.Lock] = {}
_connecting_guard = threading.Lock()


def connect(address: str, timeout: timedelta, lines: Lines | None = None) -> Store:
    """A client of the store at ``address``; ``lines`` gets its socket. Raises CommunicatorError.

    ``timeout`` bounds each wait for a key.
    """
    host, port = split_address(address)
    with _connecting_guard:
        turn = _connecting.setdefault((host, port), threading.Lock())
    try:
        # A store is up before its address is told, so a refused connection means a dead process. TCPStore
        # would try again until its timeout; a plain socket says so at once (and gives the numeric address).
        with socket.create_connection((host, port), CONNECT.total_seconds()) as probe:
            numeric = probe.getpeername()[0].removeprefix("::ffff:"), port
        with turn:  # one at a time to an address: the socket that is new afterwards is ours
            before = connections_to(numeric)
            store = TCPStore(host, port, None, False, min(timeout, CONNECT), wait_for_workers=False)
            store.set_timeout(timeout)
            if lines is not None:
                lines.add(connections_to(numeric) - before)
    except (OSError, RuntimeError) as error:  # torch's DistError is a RuntimeError
        raise CommunicatorError(f"cannot reach the rendezvous store at {address}: {reason(error)}") from error
    return store


def reach(address: str, lines: Lines, cancelled: Callable[[], bool] = lambda: False) -> Store:
    """``connect`` to a store whose process may only be starting: try until it is there, ``cancelled`` or ``lines`` are
    cut. Raises CommunicatorError."""
    limit = time.monotonic() + STARTING.total_seconds()
    while True:
        try:
            return connect(address, STARTING, lines)
        except CommunicatorError:
            if cancelled() or lines.is_cut or time.monotonic() > limit:
                raise
            time.sleep(_RETRY)


def reason(error: BaseException) -> str:
    """The sentence for people in an exception of torch: without source positions and stack frames."""
    text = str(error).strip().split("\n")[0]
    if text.startswith("["):  # "[/path/pair.cc:553] Connection closed by peer […]. This is typically …"
        text = text.partition("] ")[2] or text
    return text.split(". This is typically")[0].split("Exception raised from")[0].strip() or type(error).__name__


def _device(host: str) -> tuple[Any, Address]:
    """A gloo device bound to ``host`` and the address on which it listens."""
    for _ in range(8):
        before = listening()
        # Not lazily: the connections must exist when the group is formed, so that they can be cut.
        device = gloo.create_device(hostname=host, lazy_init=False)
        new = listening() - before
        if len(new) == 1:
            return device, new.pop()
        # Another thread of this process opened a socket in the same instant: which one is gloo's cannot be
        # told.
    raise CommunicatorError(f"cannot tell on which port gloo listens on {host}")


def form_group(
    quorum: Quorum, rank: int, host: str, timeout: timedelta, lines: Lines, column: int = 0, kind: str = "cpu"
) -> Group:
    """Build the gloo group of ``quorum``, whose store is that of member 0. Blocks; ended early by
    ``lines.cut()``. All ranks of a group use that one store: ``column`` is the rank within its group, which
    meets the ranks of the same column only. ``kind`` of device must be the same everywhere.

    Raises CommunicatorError with the member or the store that is missing, if that is known.
    """
    store = PrefixStore(f"{quorum.id}/{column}", connect(quorum.addresses[0], timeout, lines))
    names = [str(member) for member in quorum.members]
    group: Group = gloo_group(store, rank, names, host, timeout, lines, kind)
    return group


def gloo_group(
    store: Store,
    rank: int,
    names: Sequence[str],
    host: str,
    timeout: timedelta,
    lines: Lines,
    kind: str = "cpu",
    threads: int = 1,
) -> Any:
    """The gloo group of those who meet in ``store``, over a gloo device of its own. ``names`` are for messages,
    ``lines`` gets the connections to the peers, ``threads`` work on collectives. Otherwise as ``form_group``."""
    size, missing = len(names), f"talking to the rendezvous store of {names[0]}"
    before = lines.count()
    try:
        device, (_, port) = _device(host)
        store.set(f"device/{rank}", f"{host} {port} {kind}")
        devices = {_numeric(host, port): rank}
        for peer in range(size):
            missing = f"waiting for {names[peer]}"
            told_host, told_port, told_kind = store.get(f"device/{peer}").decode().split(" ")
            devices[_numeric(told_host, int(told_port))] = peer
            if told_kind != kind:
                raise ValueError(f"its gradients are on {told_kind!r}, those of {names[rank]} on {kind!r}")
        lines.add_devices(set(devices))
        lines.peers = {address: peer for address, peer in devices.items() if peer != rank}
        missing = f"connecting {size} members"
        options = gloo._Options()
        options._timeout = min(timeout, MEETING) / GLOO_WAITS
        options._devices = [device]
        options._threads = threads  # send and receive, which is all that an exchange uses, run on the device's
        if lines.is_cut:
            raise CommunicatorError("no longer wanted")
        group: Any = gloo(PrefixStore("gloo", store), rank, size, options)
        group._set_default_timeout(NEVER)
    except (OSError, RuntimeError, ValueError) as error:
        raise CommunicatorError(f"{missing} failed: {reason(error)}") from error
    # What cannot be found could not be cut.
    if not lines.is_cut and (found := lines.count() - before) != size - 1:
        raise CommunicatorError(f"{found} of {size - 1} connections to peers were found in {TABLE}")
    return group


def _numeric(host: str, port: int) -> Address:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    return host, port
