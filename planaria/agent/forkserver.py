"""The fork server: a process that has imported the slow modules once and forks ranks on request.

It talks to its parent (the agent) over an inherited stream socket: 4-byte big-endian length, then JSON. It never
starts a thread and never runs a kernel, so that a fork of it is a sound copy. Nor does it touch a GPU, for no GPU's
state survives a fork: importing torch does not initialise CUDA, the first use does (and would start threads). So what a
rank is told of its own GPUs after the fork is the first that the driver hears.

A rank is forked twice: the process in the middle ends at once, and the kernel gives the rank to the nearest subreaper,
the agent. So the agent is the true parent: it learns of a death from the kernel, with the exit status, whether this
process lives or not.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from planaria.agent.parent import die_with_parent
from planaria.agent.proc import thread_count

# torch._dynamo is what constructing the first optimizer imports; it costs as much as torch itself.
DEFAULT_PRELOAD = "torch,torch.optim,torch.distributed,torch._dynamo,planaria.torch"
# Importing jax starts no thread either; its backend, which does, comes to be with the first array, in a rank.
JAX_PRELOAD = "torch,torch.distributed,jax,jax.numpy,planaria.jax"
PRELOAD_VARIABLE = "PLANARIA_PRELOAD"
_HEADER = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """All that makes a rank's process. Paths are absolute; ``env`` is the whole environment."""

    id: int
    parent: int  # pid of the agent: the rank ends when this is not, or no longer, its parent
    target: str  # a script's path as the user gave it (relative to cwd), or a module's name
    module: bool
    args: tuple[str, ...]
    cwd: str
    stdout: str
    stderr: str
    env: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return pack(asdict(self))

    @staticmethod
    def decode(raw: dict[str, Any]) -> ForkRequest:
        return ForkRequest(**{**raw, "args": tuple(raw["args"])})


def pack(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def unpack(buffer: bytearray) -> list[dict[str, Any]]:
    """Take all complete messages off the front of ``buffer``."""
    messages = []
    while len(buffer) >= _HEADER.size:
        end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        messages.append(json.loads(bytes(buffer[_HEADER.size : end])))
        del buffer[:end]
    return messages


def preload(names: str) -> str | None:
    """Import the comma-separated modules. Returns None, or a sentence that says what is wrong with one of them."""
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Only a module that is absent may be skipped: a broken one would fail in every rank, unexplained.
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                return f"cannot import {name} in the fork server: {error}"
        except Exception as error:
            return f"cannot import {name} in the fork server: {type(error).__name__}: {error}"
        if thread_count() != 1:
            return (
                f"importing {name} started a thread, so the fork server cannot fork safely; "
                f"leave it out of {PRELOAD_VARIABLE}, or set OPENBLAS_NUM_THREADS=1 if a BLAS library did it"
            )
    return None


def fork_rank(request: ForkRequest, path: list[str], keep: frozenset[int]) -> int:
    """Fork a rank and return its pid; by then it is a child of the agent. Never returns in the rank."""
    if thread_count() != 1:
        raise RuntimeError("the fork server is not single-threaded any more")
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        _middle(request, reader, writer, path, keep)
    os.close(writer)
    try:
        told = os.read(reader, _HEADER.size)
    finally:
        os.close(reader)
        # When the middle process is reaped, the rank has been given to the agent: only then is it announced.
        os.waitpid(middle, 0)
    if len(told) != _HEADER.size:
        raise OSError("the second fork failed: too many processes or too little memory")
    return int(_HEADER.unpack(told)[0])


def _middle(request: ForkRequest, reader: int, writer: int, path: list[str], keep: frozenset[int]) -> NoReturn:
    code = 1
    try:
        os.close(reader)
        myself = os.pidfd_open(os.getpid())  # opened before the fork: the rank could not be sure to find this pid
        if os.fork() == 0:
            # Announced only when it leads its process group, which is what the agent sends signals to.
            os.setsid()
            os.write(writer, _HEADER.pack(os.getpid()))
            from planaria.agent.rankmain import become_rank  # imported by main() before any fork

            become_rank(request, myself, path, keep)
        code = 0
    finally:
        os._exit(code)


def serve(server: socket.socket, path: list[str], keep: frozenset[int]) -> None:
    """Answer fork requests until the agent closes its end."""
    buffer = bytearray()
    while chunk := server.recv(1 << 16):
        buffer += chunk
        for raw in unpack(buffer):
            request = ForkRequest.decode(raw)
            try:
                answer: dict[str, Any] = {"id": request.id, "pid": fork_rank(request, path, keep)}
            except (OSError, RuntimeError) as error:
                answer = {"id": request.id, "error": str(error)}
            server.sendall(pack(answer))


def main(argv: list[str]) -> int:
    """``python -m planaria.agent.forkserver SOCKET_FD AGENT_PID``."""
    began = time.monotonic()
    descriptor, parent = int(argv[0]), int(argv[1])
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)
    server = socket.socket(fileno=descriptor)
    # `-m` put the directory that Planaria lives in first; a script's own directory takes that place in a rank.
    path = list(sys.path) if sys.flags.safe_path else sys.path[1:]
    ours = {int(name) for name in os.listdir("/proc/self/fd")}
    importlib.import_module("planaria.agent.rankmain")
    problem = preload(os.environ.get(PRELOAD_VARIABLE, DEFAULT_PRELOAD))
    if problem is not None:
        server.sendall(pack({"failed": problem}))
        return 1
    # Descriptors that imported libraries keep open belong to them, also in a rank; all others are closed there.
    keep = frozenset(int(name) for name in os.listdir("/proc/self/fd")) - ours
    gc.collect()
    gc.freeze()  # the collector in a rank then leaves these objects, and so the shared pages, alone
    server.sendall(pack({"ready": True, "seconds": time.monotonic() - began}))
    with suppress(ConnectionError):
        serve(server, path, keep)
    return 0


if __name__ == "__main__":
    # The functions must be those of the importable module: a rank replaces `__main__` by the user's script.
    from planaria.agent import forkserver

    sys.exit(forkserver.main(sys.argv[1:]))
