"""``planaria run --engine`` with an engine that places groups in a cluster, watched from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planaria.core.roster import JobStatus
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from tests.e2e.harness import TRAIN

# Hangs are what these tests look for: far beyond what anything here takes on a loaded machine.
PATIENCE = 240.0


def planaria(env: Mapping[str, str], *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The whole of a short call."""
    whole = {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path][1:])}
    whole |= {"PATH": path} if path else {}
    command = [sys.executable, "-m", "planaria", *words]
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=PATIENCE)


class Placed:
    """Use as a context. ``start`` it, perhaps again."""

    def __init__(
        self,
        env: Mapping[str, str],
        directory: Path,
        job: str,
        *args: str,
        options: tuple[str, ...] = (),
        script: Path = TRAIN,
    ) -> None:
        """``args``: of the script; ``options``: of ``planaria run``, the engine's name among them."""
        self.directory, self.job = directory, job
        self._env = {**env, "OMP_NUM_THREADS": "1"}
        self._release = directory.parent / f"{job}-release"
        what = [str(script), *args, "--hold", str(self._release)]
        self._words = ["run", "--job", job, "--log-dir", str(directory), *options, *what]
        self._out = directory.parent / f"{job}.out"
        self.process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def start(self) -> None:
        with self._out.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planaria", *self._words], env=self._env, stdout=out, stderr=out
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

    def agent(self, life: str) -> int:
        """The pid of the agent in a life such as "rg1-i0"."""
        path = self.directory / life / "run.json"
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
