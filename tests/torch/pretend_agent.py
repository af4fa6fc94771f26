"""An agent that starts real ranks and tells them exactly the quorums that a test wants."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from planaria.core.messages import Member, Publish, Quorum, QuorumId, Ready, Regroup, Report
from planaria.engines.local import hold_port
from planaria.wire.codec import report_from_bytes
from planaria.wire.frames import FrameReader, send_frame
from planaria.wire.page import ProgressPage

SCRIPTS = Path(__file__).parent / "scripts"
HOME = Path(__file__).resolve().parents[2]
PATIENCE = 150.0  # only a hang lasts so long, on however busy a machine
R = TypeVar("R")


class PretendAgent:
    """``words`` are the script's arguments, ``ranks`` how many processes a group has."""

    def __init__(
        self, script: str | Path, groups: int, shards: int, directory: Path, ranks: int = 1, words: Sequence[str] = ()
    ) -> None:
        self.script = SCRIPTS / script
        self.groups, self.shards, self.directory, self.ranks = groups, shards, directory, ranks
        self.words = tuple(words)
        self.reports: list[Report] = []
        self.ready: dict[Member, Ready] = {}
        self._processes: dict[tuple[Member, int], BaseProcess] = {}
        self._sockets: dict[tuple[Member, int], socket.socket] = {}
        self._present: set[tuple[Member, int]] = set()
        self._news = threading.Condition()
        self._number = 0

    def __enter__(self) -> PretendAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        for sock in self._sockets.values():
            sock.close()

    def start(self, group: int, incarnation: int = 0, **env: str) -> Member:
        member = Member(group, incarnation)
        world = _world(self.ranks)
        for rank in range(self.ranks):
            self._start(member, rank, world, **env)
        return member

    def _start(self, member: Member, rank: int, world: dict[str, str], **env: str) -> None:
        path = self.directory / f"s{member.group}.{member.incarnation}.{rank}"
        home = self.directory / f"rg{member.group}i{member.incarnation}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        environ = self._environ() | {
            "PLANARIA_SOCKET": str(path),
            "PLANARIA_GROUP": str(member.group),
            "PLANARIA_INCARNATION": str(member.incarnation),
            "PLANARIA_DIR": str(home if rank == 0 else home / f"rank{rank}"),
            **env,
        }
        self._processes[member, rank] = self._run(environ, rank, world)
        threading.Thread(target=self._listen, args=(member, rank, listener), daemon=True).start()

    def process(self, member: Member, rank: int) -> BaseProcess:
        return self._processes[member, rank]

    def kill(self, member: Member, rank: int | None = None) -> None:
        """One rank, or the whole group."""
        for number in range(self.ranks) if rank is None else (rank,):
            self._processes[member, number].kill()

    def replace(self, member: Member, rank: int, kill: bool = True) -> Member:
        """End one rank, and have a new process take its place in the next incarnation of its group."""
        if kill:
            self._processes[member, rank].kill()
        newer, world = Member(member.group, member.incarnation + 1), _world(self.ranks)
        for other in range(self.ranks):
            if other != rank:
                self._processes[newer, other] = self._processes[member, other]
                self._sockets[newer, other] = self._sockets[member, other]
                self._present.add((newer, other))
                send_frame(self._sockets[newer, other], Regroup(newer, int(world["MASTER_PORT"])))
        self._start(newer, rank, world, PLANARIA_JOINS="1", PLANARIA_RESUME="0")
        return newer

    def quiet(self, **env: str) -> str:
        """The digest of the same script alone."""
        return str(self.alone(**env)["digest"])

    def alone(self, **env: str) -> dict[str, Any]:
        """The result of the same script without an agent: a job of one group."""
        directory = self.directory / "quiet"
        world = _world(self.ranks)
        environ = self._environ() | env
        started = []
        for rank in range(self.ranks):
            own = environ | {"PLANARIA_DIR": str(directory if rank == 0 else directory / f"rank{rank}")}
            started.append(self._run(own | {"PLANARIA_GROUPS": "1"}, rank, world))
        for process in started:
            process.join(PATIENCE)
        assert [process.exitcode for process in started] == [0] * self.ranks
        return dict(json.loads((directory / "result.json").read_text()))

    def _run(self, environ: dict[str, str], rank: int, world: dict[str, str]) -> BaseProcess:
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        words = [str(self.script), *self.words]
        process = _forks().Process(target=_become_rank, args=(words, environ | world | numbers), daemon=True)
        process.start()
        return process

    def _environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")}
        return kept | {
            "PLANARIA_JOB": "pretend",
            "PLANARIA_GROUPS": str(self.groups),
            "PLANARIA_SHARDS": str(self.shards),
        }

    def _listen(self, member: Member, rank: int, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        listener.close()
        self._sockets[member, rank] = connection
        for report in FrameReader(connection, report_from_bytes):
            with self._news:
                self.reports.append(report)
                if isinstance(report, Ready):
                    self.ready[report.member] = report
                self._present.add((member, rank))
                self._news.notify_all()

    def wait_for(self, *members: Member) -> None:
        """Until all ranks of these groups are there."""
        whole = {(member, rank) for member in members for rank in range(self.ranks)}
        self.until(lambda: whole <= self._present and set(members) <= set(self.ready))

    def publish(
        self,
        members: Sequence[Member],
        *,
        urgent: bool = True,
        founding: bool = False,
        to: Sequence[Member] | None = None,
        epoch: int = 1,
        skew: Callable[[], None] | None = None,
    ) -> Quorum:
        """A new quorum of ``members``; ``to``: who hears of it, if not all of them. ``skew`` is called between the
        ranks: they hear in an order, and after times, that are its own."""
        self._number += 1
        addresses = tuple(self.ready[m].address for m in members)
        id = QuorumId(epoch, self._number)
        quorum = Quorum(id, tuple(members), addresses, urgent, str(id), "", founding)
        listeners = [(member, rank) for rank in range(self.ranks) for member in (members if to is None else to)]
        if skew is not None:
            random.shuffle(listeners)
        for member, rank in listeners:
            send_frame(self._sockets[member, rank], Publish(member, quorum))
            if skew is not None:
                skew()
        return quorum

    def wait_for_step(self, member: Member, step: int) -> None:
        """Until the group has committed so many."""
        page = ProgressPage.open(self.directory / f"rg{member.group}i{member.incarnation}" / "progress")
        deadline = time.monotonic() + PATIENCE
        while page.read().step < step:
            assert time.monotonic() < deadline, "\n".join(map(str, self.reports))
            time.sleep(0.005)
        page.close()

    def told(self, kind: type[R], **fields: Any) -> list[R]:
        """Reports of a kind so far, with these values."""
        return [r for r in self.reports if isinstance(r, kind) and all(getattr(r, k) == v for k, v in fields.items())]

    def until(self, met: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(met, PATIENCE), "\n".join(map(str, self.reports))


_ports: list[socket.socket] = []


def _world(ranks: int) -> dict[str, str]:
    """The environment of the ranks of a group, as torchrun has it. The port stays theirs while this process lives."""
    _ports.append(hold_port())
    return {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_ports[-1].getsockname()[1])}


@cache
def _forks() -> ForkServerContext:
    """Ranks are forked from a process that has imported what takes seconds."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH", "")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.torch.preload"])
    return context


def _become_rank(words: list[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
