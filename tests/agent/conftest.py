"""Real processes for the tests of the agent: engines in this process, whole runs beside it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from planaria.agent.proc import state_of
from planaria.chaos.netns import inside
from planaria.core.messages import Member
from planaria.engines.base import Change
from planaria.engines.devices import Gpus
from planaria.engines.launch import Launch, directory_of
from planaria.engines.local import LocalEngine
from planaria.wire.credentials import ENVIRONMENT
from tests.ports import free_address

# Of a broken test only: processes end by themselves, and a loaded machine takes many times as long as a quiet one.
PATIENCE = 150.0
SCRIPTS = Path(__file__).parent / "scripts"
HOME = Path(__file__).resolve().parents[2]


def plain_environ(**more: str) -> dict[str, str]:
    """An environment in which ranks import nothing slow, and no outer run shines through."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PLANARIA_") or key == ENVIRONMENT}
    return {**kept, "PLANARIA_PRELOAD": "", "PYTHONPATH": str(HOME), **more}


def running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


class Engine:
    """A local engine and the changes that it told."""

    def __init__(self, launch: Launch, gpus: Gpus | None = None) -> None:
        self.launch = launch
        self.engine = LocalEngine(launch, gpus)
        self.changes: asyncio.Queue[Change] = asyncio.Queue()
        self.engine.watch(self.changes.put_nowait)

    async def next(self) -> Change:
        return await self.changes.get()

    def log(self, group: int = 0, incarnation: int = 0, name: str = "stdout.log") -> str:
        return (self.launch.directory / f"rg{group}" / f"i{incarnation}" / name).read_text()


@pytest.fixture
async def make_engine(tmp_path: Path) -> AsyncIterator[Callable[..., Engine]]:
    """Makes engines for a script, given by its text or by its path; ends them after the test."""
    made: list[Engine] = []

    def make(
        script: str | Path,
        *args: str,
        environ: dict[str, str] | None = None,
        gpus: Gpus | None = None,
        **more: Any,
    ) -> Engine:
        if isinstance(script, str) and not more.get("module"):
            path = tmp_path / "script.py"
            path.write_text(script)
            script = path
        directory = tmp_path / f"run{len(made)}"
        launch = Launch(
            job="test",
            groups=2,
            target=str(script),
            args=args,
            directory=directory,
            socket=tmp_path / "no-socket",
            environ=environ or plain_environ(),
            **more,
        )
        made.append(Engine(launch, gpus))
        return made[-1]

    yield make
    for engine in made:
        await engine.engine.close()


@pytest.fixture
def address() -> str:
    """A free one, on loopback."""
    return free_address()


class Run:
    """A ``planaria run`` in a process of its own; its output goes to files."""

    def __init__(
        self,
        directory: Path,
        *args: str,
        environ: dict[str, str] | None = None,
        namespace: str | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """``files``: what is to lie where it is started."""
        self.directory = directory
        self.logs = directory / "logs"
        directory.mkdir(exist_ok=True)
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        self.out, self.err = directory / "out.txt", directory / "err.txt"
        command = [sys.executable, "-m", "planaria", "run", "--log-dir", str(self.logs), *args]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command if namespace is None else inside(namespace, command),
                env=environ or plain_environ(),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def release(self) -> None:
        """Let ranks that were told to ``hold`` make the second half of their steps."""
        (self.directory / "release").touch()

    def end(self) -> int:
        """Release them, and wait."""
        self.release()
        return self.wait()

    def interrupt(self, signum: int = signal.SIGINT) -> None:
        self.process.send_signal(signum)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        try:
            lines = (self.logs / "events.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines if line.endswith("\n")]  # one may be half written
        return [event for event in events if kind is None or event["kind"] == kind]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for a condition that the run will bring about; fails if the run ends before."""
        while not (value := condition()):
            if self.process.poll() is not None and not condition():
                pytest.fail(f"the run ended with {self.process.returncode}: {self.err.read_text()}")
            time.sleep(0.02)
        return value

    def pid_of(self, group: int, incarnation: int = 0, rank: int = 0) -> int:
        def find() -> int | None:
            for event in self.events("start"):
                facts = event["data"]
                if (event["group"], facts["incarnation"], facts["rank"]) == (group, incarnation, rank):
                    return int(facts["pid"])
            return None

        return int(self.until(find))

    def step_of(self, group: int, incarnation: int = 0, rank: int = 0) -> int:
        from planaria.wire.page import ProgressPage

        with suppress(FileNotFoundError):
            page = ProgressPage.open(directory_of(self.logs, Member(group, incarnation), rank) / "progress")
            return page.read().step
        return -1

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def command_of(self, pid: int) -> str:
        with suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_text()
        return ""

    def child_named(self, word: str) -> int | None:
        return next((pid for pid in self.children() if word in self.command_of(pid)), None)

    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.logs / "summary.json").read_text())
        return content


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs; kills what is left of them after the test and checks that nothing was left by one that ended."""
    runs: list[Run] = []

    def start(*args: str, **more: Any) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", *args, **more))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
