"""An agent that starts real ranks and tells them exactly the quorums that a test wants."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from planaria.core.messages import Member, Publish, Quorum, QuorumId, Ready, Report
from planaria.wire.codec import report_from_bytes
from planaria.wire.frames import FrameReader, send_frame

SCRIPTS = Path(__file__).parent / "scripts"
HOME = Path(__file__).resolve().parents[2]
PATIENCE = 60.0  # only a hang lasts so long
R = TypeVar("R")


class PretendAgent:
    def __init__(self, script: str, groups: int, shards: int, directory: Path) -> None:
        self.script = SCRIPTS / script
        self.groups, self.shards, self.directory = groups, shards, directory
        self.reports: list[Report] = []
        self.ready: dict[Member, Ready] = {}
        self._processes: dict[Member, subprocess.Popen[str]] = {}
        self._sockets: dict[Member, socket.socket] = {}
        self._news = threading.Condition()
        self._number = 0

    def __enter__(self) -> PretendAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for sock in self._sockets.values():
            sock.close()

    def start(self, group: int, incarnation: int = 0, **env: str) -> Member:
        member = Member(group, incarnation)
        path = self.directory / f"s{group}.{incarnation}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(1)
        environ = self._environ() | {
            "PLANARIA_SOCKET": str(path),
            "PLANARIA_GROUP": str(group),
            "PLANARIA_INCARNATION": str(incarnation),
            "PLANARIA_DIR": str(self.directory / f"rg{group}i{incarnation}"),
            **env,
        }
        command = [sys.executable, str(self.script)]
        self._processes[member] = subprocess.Popen(command, env=environ, text=True)
        threading.Thread(target=self._listen, args=(member, listener), daemon=True).start()
        return member

    def quiet(self) -> str:
        """The digest of the same script alone."""
        directory = self.directory / "quiet"
        environ = self._environ() | {"PLANARIA_DIR": str(directory)}
        subprocess.run([sys.executable, str(self.script)], env=environ, check=True, timeout=PATIENCE)
        return str(json.loads((directory / "result.json").read_text())["digest"])

    def _environ(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")}
        return kept | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(HOME),
            "PLANARIA_JOB": "pretend",
            "PLANARIA_GROUPS": str(self.groups),
            "PLANARIA_SHARDS": str(self.shards),
        }

    def _listen(self, member: Member, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        listener.close()
        self._sockets[member] = connection
        for report in FrameReader(connection, report_from_bytes):
            with self._news:
                self.reports.append(report)
                if isinstance(report, Ready):
                    self.ready[report.member] = report
                self._news.notify_all()

    def publish(
        self,
        members: Sequence[Member],
        *,
        urgent: bool = True,
        founding: bool = False,
        to: Sequence[Member] | None = None,
        epoch: int = 1,
    ) -> Quorum:
        """A new quorum of ``members``; ``to``: who hears of it, if not all of them."""
        self._number += 1
        addresses = tuple(self.ready[m].address for m in members)
        id = QuorumId(epoch, self._number)
        quorum = Quorum(id, tuple(members), addresses, urgent, str(id), "", founding)
        for member in members if to is None else to:
            send_frame(self._sockets[member], Publish(member, quorum))
        return quorum

    def told(self, kind: type[R], **fields: Any) -> list[R]:
        """Reports of a kind so far, with these values."""
        return [r for r in self.reports if isinstance(r, kind) and all(getattr(r, k) == v for k, v in fields.items())]

    def until(self, met: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(met, PATIENCE), [str(r) for r in self.reports]
