"""``planaria run --engine slurm`` on a cluster, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planaria.core.roster import JobStatus
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from tests.e2e.harness import TRAIN
from tests.slurm.cluster import Cluster

# Hangs are what these tests look for: far beyond what anything here takes on a loaded machine.
PATIENCE = 240.0


def planaria(cluster: Cluster, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The whole of a short call."""
    env = cluster.env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path][1:])}
    env |= {"PATH": path} if path else {}
    command = [sys.executable, "-m", "planaria", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)


class Supervised:
    """Use as a context. ``start`` it, perhaps again."""

    def __init__(self, cluster: Cluster, directory: Path, job: str, *args: str, options: tuple[str, ...] = ()) -> None:
        self.cluster, self.directory, self.job = cluster, directory, job
        self._release = directory.parent / f"{job}-release"
        script = [str(TRAIN), *args, "--hold", str(self._release)]
        more = ["--host", "127.0.0.1", "--job", job, "--log-dir", str(directory), *options]
        self._words = ["run", "--engine", "slurm", *more, *script]
        self._out = directory.parent / f"{job}.out"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for name, number in self.cluster.jobs().items():
            if name.startswith(f"{self.job}-"):
                self.cluster.run("scancel", "--signal=KILL", "--full", number)
        self.until(lambda: not self.jobs(), "all jobs are gone")

    def start(self) -> None:
        env = self.cluster.env | {"OMP_NUM_THREADS": "1"}
        with self._out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planaria", *self._words], env=env, stdout=out, stderr=out
            )

    def end(self) -> int:
        """Let the job come to its end; the exit code."""
        self._release.touch()
        assert self.process is not None
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def interrupt(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(PATIENCE)

    # --- looking ---------------------------------------------------------------------------------------------

    def jobs(self) -> dict[str, str]:
        """Ours that have not ended, and their numbers."""
        return {name: id for name, id in self.cluster.jobs().items() if name.startswith(f"{self.job}-")}

    def job_of(self, group: int, least: int = 0) -> tuple[str, str]:
        """(name, number) of the job of a group, of this life or a later one."""

        def found() -> tuple[str, str] | None:
            for name, number in self.jobs().items():
                group_there, life = name.removeprefix(f"{self.job}-rg").split("-i")
                if int(group_there) == group and int(life) >= least:
                    return name, number
            return None

        each: tuple[str, str] = self.until(found, f"a job of group {group}")
        return each

    def agent(self, name: str) -> int:
        """The pid of the agent in a job."""
        path = self.directory / name.removeprefix(f"{self.job}-") / "run.json"
        return int(json.loads(path.read_text())["pid"])

    def status(self) -> JobStatus | None:
        try:
            with OperatorClient(f"@{self.directory / 'lighthouse.addr'}") as client:
                return client.status(self.job)
        except UsageError:
            return None

    def quorum(self, groups: set[int], but: tuple[tuple[int, int], ...] = ()) -> None:
        """Wait for a quorum of these groups, without the lives ``but``, under which all of them work."""

        def met() -> bool:
            status = self.status()
            if status is None or status.quorum is None:
                return False
            members = {(m.group, m.incarnation) for m in status.quorum.members}
            working = {g.member.group for g in status.groups if g.state == "active" and g.quorum == status.quorum.id}
            return {group for group, _ in members} == groups == working & groups and not members & set(but)

        self.until(met, f"a quorum of groups {groups}")

    def member(self, group: int) -> tuple[int, int]:
        """The group's life in the quorum."""
        status = self.status()
        assert status is not None and status.quorum is not None
        return next((m.group, m.incarnation) for m in status.quorum.members if m.group == group)

    def said(self, words: str) -> None:
        self.until(lambda: words in self.log(), f"the words {words!r}")

    def until(self, met: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := met()):
            over = self.process is not None and self.process.poll() not in (None, -signal.SIGKILL)
            assert not over or what == "all jobs are gone", f"the supervisor ended before {what}:\n{self.log()}"
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.log()}"
            time.sleep(0.1)
        return found

    def log(self) -> str:
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def digests(self) -> set[str]:
        return {json.loads(f.read_text())["digest"] for f in self.directory.glob("rg*-i*/rg*/i*/result.json")}
