"""gRPC servers and channels: the one place where addresses, limits, keepalive and credentials are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from planaria.errors import UsageError
from planaria.wire.checks import MAX_MESSAGE_BYTES
from planaria.wire.credentials import Credentials, demand_for
from planaria.wire.roles import Role

# loopback: to be reached from other machines takes credentials
DEFAULT_BIND = "127.0.0.1:29510"

# In the trailing metadata of a refusal by a lighthouse that stands by: the address of the one that leads.
LEADER = "planaria-leader"

# Heartbeats come about once a second; after two seconds of silence an agent asks whether the lighthouse is there, which
# has two more to answer: of several it must soon find another one. Thus a dead node or a cut cable is noticed within
# four heartbeats. A killed process is noticed at once (the kernel closes its connection).
_PING_MS = 2_000
_PONG_MS = 2_000
# A lighthouse need not be so quick. It judges agents by their heartbeats, with what it has learnt of their silences,
# and an agent that cannot run for some seconds (a machine under load, a stopped process) would lose its stream and add
# to the load by connecting again (seen: "Internal error from Core" at a thousand agents at once). So this only frees
# what the dead have left.
_PATIENT_MS = 20_000
# How long one try to connect may take, with the handshakes of a slow line or of a busy machine: one heartbeat.
CONNECT_SECONDS = 1.0

_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def _keepalive(ping_ms: int, pong_ms: int) -> list[tuple[str, int]]:
    return [
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", pong_ms),
        # The one that counts (seen with gRPC 1.85): without it a stopped peer was noticed only after its default, a
        # minute.
        ("grpc.http2.ping_timeout_ms", pong_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # no limit: an agent whose ranks compute has nothing else to say
        ("grpc.http2.max_pings_without_data", 0),
    ]


_CLIENT = [
    *_LIMITS,
    *_keepalive(_PING_MS, _PONG_MS),
    ("grpc.enable_http_proxy", 0),  # a proxy meant for the web must not swallow a connection to loopback
    # Back-off of reconnecting. A lighthouse restarts in well under a second, so the first retry comes soon;
    # the longest pause is that of one heartbeat, for nobody waits for us and a thousand agents are no load.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
# Seconds for the handshakes of a caller: ten times what callers of ours wait for them. gRPC's own limit is two minutes,
# for which whoever says nothing would hold a connection.
HANDSHAKE_SECONDS = 10.0
_SERVER = [
    *_LIMITS,
    ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_SECONDS)),
    *_keepalive(_PATIENT_MS, _PATIENT_MS),
    ("grpc.so_reuseport", 0),  # a second lighthouse on the port must fail, not take half of the agents
    # Our own clients ping every _PING_MS, and gRPC adds pings of its own to measure the line. By default a
    # server counts such pings on a quiet stream as abuse and hangs up (seen: "too_many_pings").
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", _PING_MS // 2),
]


def split_address(address: str, what: str = "address") -> tuple[str, int]:
    """(host, port) of "host:port" or "[v6]:port". UsageError if it is neither."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{what} {address!r} is not of the form host:port, for instance {DEFAULT_BIND}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def split_addresses(addresses: str, what: str = "--lighthouse") -> tuple[str, ...]:
    """One or more of "host:port", separated by commas, or "@FILE" that holds them. UsageError if one is none, or is
    there twice, or the file cannot be read."""
    if addresses.startswith("@"):
        try:
            return split_addresses(Path(addresses[1:]).read_text("utf-8").strip().removeprefix("@"), what)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{what} {addresses}: cannot read an address there ({error})") from None
    found = tuple(address.strip() for address in addresses.split(","))
    for address in found:
        split_address(address, what)
    if len(set(found)) < len(found):
        raise UsageError(f"{what} {addresses!r} names an address twice")
    return found


def leader_in(error: grpc.RpcError) -> str:
    """Where a lighthouse that stands by says that another one leads; empty if it does not say."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return ""
    metadata: Any = error.trailing_metadata() or ()
    address = next((str(value) for key, value in metadata if key == LEADER), "")
    try:
        split_address(address)
    except UsageError:
        return ""
    return address


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_channel(address: str, *roles: Role, connect: float = CONNECT_SECONDS) -> grpc.aio.Channel:
    """An asyncio channel to a lighthouse, in the first of ``roles`` for which there are credentials, if there are any;
    it connects lazily and reconnects by itself, but with the files as they are now. The caller closes it. ``connect``:
    seconds for one try to connect, at least."""
    common = _client(connect)
    if (credentials := Credentials.given(roles or (Role.AGENT,))) is None:
        return grpc.aio.insecure_channel(_target(address), options=common)
    made, options = credentials.channel()
    return grpc.aio.secure_channel(_target(address), made, options=[*common, *options])


def open_sync_channel(address: str, *roles: Role) -> grpc.Channel:
    """The same as a blocking channel, for commands."""
    common = _client(CONNECT_SECONDS)
    if (credentials := Credentials.given(roles)) is None:
        return grpc.insecure_channel(_target(address), options=common)
    made, options = credentials.channel()
    return grpc.secure_channel(_target(address), made, options=[*common, *options])


def make_server() -> grpc.aio.Server:
    return grpc.aio.server(options=_SERVER)


def add_port(server: grpc.aio.Server, bind: str, credentials: Credentials | None, token: object | None = None) -> str:
    """Bind ``server``, port 0 meaning any; the address it is bound to. UsageError if that is impossible, or strangers
    could reach it."""
    host, _ = split_address(bind, "--bind")
    demand_for(host, "the lighthouse", credentials, token)
    try:
        if credentials is None:
            port = server.add_insecure_port(bind)
        else:
            port = server.add_secure_port(bind, credentials.server())
    except RuntimeError as error:
        raise UsageError(
            f"the lighthouse cannot listen on {bind}; does another one run? Choose another --bind ({error})"
        ) from error
    return join_address(host, port)


def _client(connect: float) -> list[tuple[str, int]]:
    # By its name a pause, to gRPC it is the time for one try to connect.
    return [*_CLIENT, ("grpc.min_reconnect_backoff_ms", round(1000 * connect))]


def _target(address: str) -> str:
    split_address(address, "the lighthouse's address")
    return address
