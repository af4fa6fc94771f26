"""Processes that look like ranks from outside: real pages, real pids, no training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from planaria.core.messages import Member
from planaria.engines.launch import directory_of

RANK = Path(__file__).with_name("pretend_rank.py")


def until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for what must come; the limit only ends a test that has failed."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


class Cluster:
    """A run directory with pretend ranks in it. This process is their parent, so it is the agent."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(exist_ok=True)
        (directory / "run.json").write_text(json.dumps({"job": "pretend", "pid": os.getpid()}))

    def rank(
        self, group: int, incarnation: int = 0, *, commits: int = 3, phase: str = "computing", rank: int = 0
    ) -> subprocess.Popen[bytes]:
        """A rank that has committed ``commits`` steps under quorum 1.1 and stays in ``phase`` ("cycle":
        all phases of a step in turn)."""
        where = directory_of(self.directory, Member(group, incarnation), rank)
        where.mkdir(parents=True)
        command = [sys.executable, str(RANK), str(where), str(commits), phase]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
        self.processes.append(process)
        until((where / "up").exists)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
