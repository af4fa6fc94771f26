"""Ports for servers that have to be told one before they begin to listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

# Those which the kernel gives to whoever asks for any: between the moment in which such a one was seen to be free and
# that in which a server has started, any other test may be given it.
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Below are well-known services; above are ports that this project's own defaults and tests name.
_LEAST, _MOST = 10_000, 29_000


def free_ports(count: int) -> list[int]:
    """So many of loopback, which nobody listens on, and which the kernel gives nobody."""
    first, last = (int(word) for word in _GIVEN.read_text().split())
    ours = [port for port in range(_LEAST, _MOST) if not first <= port <= last] or [0]
    # Not the generator that tests seed: two of them would ask for the same ports.
    chance, found = random.SystemRandom(), list[int]()
    with ExitStack() as held:
        while len(found) < count:
            each = held.enter_context(socket.socket())
            try:
                each.bind(("127.0.0.1", chance.choice(ours)))
            except OSError:
                continue
            found.append(each.getsockname()[1])
    return found


def free_address() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"
