"""What runs in a worker of Ray: an actor that starts the agent of a group on its node, and knows how it ended.

The agent ends when the actor's process does, however that happens, and its ranks end with the agent.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray

from planaria.engines.placing import Template, agent_words, directory_of
from planaria.wire.channel import join_address

LOG = "agent.log"
# From being asked to end to SIGKILL: as long as other schedulers give by default.
GRACE_SECONDS = 30.0
# Ray sets these for its own workers, each as the group's agent does for its ranks, or for a debugger of its own.
_RAYS = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs."""

    node: str  # Ray's name of it
    since: float  # seconds of the unix clock
    meeting: str  # host:port there at which the other nodes of its group find it


class NodeAgent:
    """One node of a life of a group. Every method may be called by any number of supervisors."""

    def __init__(
        self, template: Template, life: tuple[int, int], node: int, first: Any | None, environ: dict[str, str]
    ) -> None:
        """``first``: the actor of the group's node 0, if this is another one. ``environ``: what the supervisor says
        of the environment."""
        self._template, self._life, self._node, self._first = template, life, node, first
        self._environ = environ
        self._place: Future[Place] = Future()
        self._end: Future[int] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel tells a child when the thread ends that has started it, so this one stays as long as the child.
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    async def place(self) -> Place:
        """As soon as its agent is started."""
        # A call that is given up must not take it from all others.
        return await asyncio.shield(asyncio.wrap_future(self._place))

    async def end(self) -> int:
        """Wait for the agent's end; its exit code, negative for a signal."""
        return await asyncio.shield(asyncio.wrap_future(self._end))

    async def stop(self) -> None:
        """Have it leave after a commit, and end it if it has not within the grace."""
        await self.place()
        if self._process is not None:
            self._process.terminate()
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._process.kill)

    def _run(self) -> None:
        try:
            host = ray.util.get_node_ip_address()
            meeting = _free_address(host) if self._first is None else ray.get(self._first.place.remote()).meeting
            self._process = self._start(host, meeting)
            self._place.set_result(Place(_node_name(), time.time(), meeting))
            self._end.set_result(self._process.wait())
        except BaseException as error:
            for waiting in (self._place, self._end):
                if not waiting.done():
                    waiting.set_exception(error)

    def _start(self, host: str, meeting: str) -> subprocess.Popen[bytes]:
        template, (group, incarnation) = self._template, self._life
        ours = replace(template, planaria=(sys.executable, "-m", "planaria.cli.beneath", str(os.getpid())))
        words = [*agent_words(ours, group, incarnation), "--host", host]
        if template.nodes > 1:
            words += ["--nnodes", str(template.nodes), "--node-rank", str(self._node), "--group-addr", meeting]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_RUN_") and k not in _RAYS}
        directory = directory_of(template.directory, group, incarnation)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / LOG).open("ab") as log:
            return subprocess.Popen(
                [*words, *template.script],
                cwd=template.cwd,
                env=kept | self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def short_name(node: dict[str, Any]) -> str:
    """Of what ``ray.nodes`` says of a node: several may be on one machine, and one that comes back is another one."""
    return f"{node['NodeName']}/{node['NodeID'][:8]}"


def _node_name() -> str:
    own = ray.get_runtime_context().get_node_id()
    return next((short_name(node) for node in ray.nodes() if node["NodeID"] == own), own)


def _free_address(host: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return join_address(host, probe.getsockname()[1])
