"""A lighthouse whose messages to agents are timed: in ``times``, a file, a double for each, when gRPC was given it."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from planaria.lighthouse import server


class _Timed:
    """An agent's stream, as the lighthouse writes to it."""

    def __init__(self, context: Any, file: int) -> None:
        self._context, self._file = context, file

    async def write(self, frame: bytes) -> None:
        # gRPC sends what it is given at once, if the connection is free. When it says so is of no use: by then most
        # agents have read it.
        os.write(self._file, struct.pack("d", time.monotonic()))  # a microsecond, of some fifty that a message costs
        await self._context.write(frame)


def run(bind: str, store: str, times: str) -> None:
    file = os.open(times, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o600)
    write = server._write

    def timed(job: Any, stream: Any, context: Any) -> Any:
        return write(job, stream, _Timed(context, file))  # type: ignore[arg-type]

    server._write = timed
    server.run(server.Options(bind, store))
