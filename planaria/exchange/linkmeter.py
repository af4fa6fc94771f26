"""What the kernel knows of a life's connections: how fast they carry what is exchanged anyhow. Nothing is sent for it.

TCP counts the bytes that the peer has acknowledged and the time in which any were on their way (Linux, tcp(7), struct
tcp_info since 4.10). The time in which the peer took nothing, or nothing was given to send, is left out. So
the quotient is what the line carries, however long the groups compute in between.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from planaria.core.messages import Link
from planaria.exchange.sockets import Address, Ends, Lines

# rtt (us), total_retrans, bytes_acked, data_segs_out, busy_time, rwnd_limited, sndbuf_limited (us)
_INFO = struct.Struct("=68xI28xI16xQ28xI8xQQQ")
# The kernel counts time in ticks of up to 10 ms: less would be noise.
LEAST_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one connection, since it was made."""

    acknowledged: int  # bytes
    seconds: float
    packets: int
    again: int  # packets sent once more
    round_trip: float  # seconds, smoothed

    @staticmethod
    def of(each: socket.socket) -> Traffic | None:
        """None where the kernel does not say."""
        try:
            raw = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        except (AttributeError, OSError):
            return None
        if len(raw) < _INFO.size:
            return None
        rtt, again, acked, packets, busy, window, buffer = _INFO.unpack(raw)
        return Traffic(acked, max(0, busy - window - buffer) / 1e6, packets, again, rtt / 1e6)


class LinkMeter:
    """Of one life. ``peers``: the listening address of every peer's gloo device. For one thread."""

    def __init__(self, lines: Lines, peers: Mapping[Address, int]) -> None:
        self._lines = lines
        self._peers = peers
        self._from: dict[int, Traffic] = {}  # by peer: where the stretch being measured began
        self._links: dict[int, Link] = {}

    def read(self) -> dict[int, Link]:
        """By peer, of its newest stretch that was long enough to be measured. ``group`` is the peer's rank here.

        Of two on one host the one that was connected to does not know who has connected, if there are several."""
        for peer, now in self._assigned(self._lines.traffic(Traffic.of)).items():
            start = self._from.setdefault(peer, now)
            seconds = now.seconds - start.seconds
            if seconds < LEAST_SECONDS:
                continue
            bits = 8 * (now.acknowledged - start.acknowledged) / seconds
            lost = (now.again - start.again) / max(1, now.packets - start.packets)
            self._links[peer] = Link(peer, bits, now.round_trip, min(1.0, lost))
            self._from[peer] = now
        return self._links

    def _assigned(self, traffic: Mapping[Ends, Traffic | None]) -> dict[int, Traffic]:
        found = {self._peers[remote]: t for (_, remote), t in traffic.items() if remote in self._peers and t}
        accepted = [(remote[0], t) for (_, remote), t in traffic.items() if remote not in self._peers and t]
        for host, each in accepted:
            unknown = [rank for (at, _), rank in self._peers.items() if at == host and rank not in found]
            if len(unknown) == 1 and sum(other == host for other, _ in accepted) == 1:
                found[unknown[0]] = each
        return found
