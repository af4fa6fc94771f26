"""Starting, feeding, killing and ending the contestants. Every process started here is ended here, by its
pid."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.peers import Peer
from bench.timeline import Logs
from bench.workload import Config
from planaria.agent.parent import tied

HERE = Path(__file__).resolve().parent
POLL = 0.02  # seconds between looks at files: all times are taken in the workers, so this only costs CPU

TORCHFT_LIGHTHOUSE = {  # command-line options of its lighthouse, in milliseconds
    "default": {},
    "readme": {"join_timeout_ms": 10000, "quorum_tick_ms": 100},
    "tuned": {"join_timeout_ms": 1000, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 1000},
    "aggressive": {"join_timeout_ms": 300, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 300},
}


class BenchError(Exception):
    """A contestant did not do what it should have; the message ends with what it wrote."""


def end_in_order() -> None:
    """Make SIGTERM end the benchmark as Ctrl-C does, through every ``finally``: contestants are stopped first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(done: Callable[[], bool], limit: float, what: str, each: Callable[[], None] | None = None) -> None:
    """Look every POLL seconds until ``done()``; call ``each`` before each look. Raises BenchError after
    ``limit``."""
    end = time.monotonic() + limit
    while True:
        if each:
            each()
        if done():
            return
        if time.monotonic() > end:
            raise BenchError(f"waited {limit:.0f} s for {what}")
        time.sleep(POLL)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it started, and wait until they are gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
        for member in [psutil.Process(process.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=10)
    process.wait()


class Contestant:
    """One library with one setting, running one worker per group. ``name`` is how tables call it."""

    worker: str

    def __init__(self, name: str, config: Config, python: str = sys.executable) -> None:
        self.name, self.python = name, python
        self.directory = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
        self.config = replace(config, directory=str(self.directory))
        self.logs = Logs(self.directory)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.keep = False  # the directory, for a look at what went wrong

    # --- processes

    def spawn(self, key: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "info", **(environment or {})}
        with open(self.directory / f"{key}.out", "ab") as out:
            # A session of its own: Ctrl-C reaches the benchmark only, which then ends everything in order.
            self.processes[key] = subprocess.Popen(
                tied(command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def worker_command(self) -> list[str]:
        return [self.python, str(HERE / self.worker), self.config.to_json()]

    def start(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Called in every wait: raise if the run is broken, restart what its supervisor would restart."""
        for key, process in self.processes.items():
            if process.poll():
                raise BenchError(f"{key} ended with {process.returncode}")

    def tail(self, key: str) -> str:
        text = (self.directory / f"{key}.out").read_text(errors="replace")
        return "\n".join(text.splitlines()[-15:])

    def stop(self) -> None:
        for process in self.processes.values():
            end_tree(process)
        self.processes.clear()
        if self.keep:
            print(f"{self.name}: what it left is in {self.directory}", file=sys.stderr)
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def wait(self, done: Callable[[], bool], limit: float, what: str) -> None:
        try:
            wait_for(done, limit, what, self.check)
        except BenchError as error:
            self.keep = True
            tails = "\n".join(f"--- {key}\n{self.tail(key)}" for key in self.processes)
            raise BenchError(f"{self.name}: {error}\n{tails}") from error

    # --- blocks

    def arrive(self, block: int, limit: float = 180.0) -> None:
        """Wait until all ranks stand before ``block``."""
        marks = [self.directory / f"at.{block}.{group}" for group in range(self.config.groups)]
        self.wait(lambda: all(m.exists() for m in marks), limit, f"all groups before block {block}")

    def run_block(self, block: int, limit: float = 300.0) -> list[list[float]]:
        """Let a block go; give the seconds of its timed steps, per rank."""
        results = [self.directory / f"block.{block}.{group}" for group in range(self.config.groups)]
        (self.directory / f"go.{block}").touch()
        self.wait(lambda: all(r.exists() for r in results), limit, f"block {block}")
        return [json.loads(r.read_text()) for r in results]

    def memory(self, block: int) -> list[dict[str, int]]:
        """What a block took of the GPUs, per rank: ``peak`` bytes in it, and ``held`` after it. Empty on CPUs."""
        found = [self.directory / f"memory.{block}.{group}" for group in range(self.config.groups)]
        return [json.loads(f.read_text()) for f in found if f.exists()]

    def trace(self) -> list[dict[str, Any]]:
        """Per rank, what ``Config.traced`` asked for, once that block is over. Empty on CPUs."""
        return [json.loads(f.read_text()) for f in sorted(self.directory.glob("trace.*[0-9]"))]

    # --- free mode

    def follow(self) -> None:
        """What a wait in free mode calls at each look."""
        self.logs.poll()

    def kill(self, group: int) -> float:
        """SIGKILL the newest process of a group; give the time just before."""
        self.logs.poll()
        life = self.logs.newest(group)
        if life is None or not life.pid:
            raise BenchError(f"{self.name}: group {group} has no process to kill")
        now = time.monotonic()
        os.kill(life.pid, signal.SIGKILL)
        return now


class Ddp(Contestant):
    worker = "worker_ddp.py"

    def start(self) -> None:
        port = str(free_port())
        for group in range(self.config.groups):
            env = {"REPLICA_GROUP_ID": str(group), "BENCH_PORT": port}
            self.spawn(f"group{group}", self.worker_command(), env)


class Torchft(Contestant):
    """Restarts ended workers itself after ``restart_after`` seconds, as a supervisor of torchft's choice
    would."""

    worker = "worker_torchft.py"

    def __init__(self, name: str, config: Config, peer: Peer, restart_after: float = 0.0) -> None:
        super().__init__(name, config, str(peer.python))
        self.peer, self.restart_after = peer, restart_after
        self.address = ""
        self.due: dict[str, float] = {}

    def start(self) -> None:
        settings = self.config.settings
        port = free_port()
        self.address = f"http://localhost:{port}"
        options = {"bind": f"[::]:{port}", "min_replicas": self.config.groups if self._blocks else 1}
        options |= TORCHFT_LIGHTHOUSE[settings]
        command = [str(self.peer.lighthouse), *(str(x) for k, v in options.items() for x in (f"--{k}", v))]
        self.spawn("lighthouse", command, self._quiet)
        self.wait(lambda: _listens(port), 30, "torchft's lighthouse to listen")
        for group in range(self.config.groups):
            self._start_group(group)

    @property
    def _blocks(self) -> bool:
        return self.config.mode == "blocks"

    @property
    def _quiet(self) -> dict[str, str]:
        """Its log lines of each step cost time: tuned settings leave them out, default ones keep them."""
        return {"RUST_LOG": "error"} if self.config.settings in ("tuned", "aggressive") else {}

    def _start_group(self, group: int) -> None:
        env = {"REPLICA_GROUP_ID": str(group), "TORCHFT_LIGHTHOUSE": self.address, **self._quiet}
        self.spawn(f"group{group}", self.worker_command(), env)

    def check(self) -> None:
        if self._blocks:
            super().check()
            return
        self.follow()
        for key, process in list(self.processes.items()):
            if process.poll() is None:
                continue
            if key == "lighthouse":
                raise BenchError("the lighthouse ended")
            if time.monotonic() >= self.due.setdefault(key, time.monotonic() + self.restart_after):
                del self.due[key]
                self._start_group(int(key.removeprefix("group")))


class Planaria(Contestant):
    """``planaria run`` supervises, so there is nothing to restart here."""

    worker = "worker_planaria.py"

    def __init__(self, name: str, config: Config, reduction: str) -> None:
        super().__init__(name, config)
        self.reduction = reduction
        self.run_directory = self.directory / "run"

    def start(self) -> None:
        shards = str(self.config.shard_count)
        options = ["--groups", str(self.config.groups), "--shards", shards, "--reduction", self.reduction]
        options += ["--log-dir", str(self.run_directory), "--device", self.config.device]
        worker = [str(HERE / self.worker), self.config.to_json()]
        home = str(HERE.parent)  # so that this very Planaria is measured, installed or not
        paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.spawn("agent", [self.python, "-m", "planaria", "run", *options, *worker], {"PYTHONPATH": paths})

    def check(self) -> None:
        super().check()
        if self.config.mode == "free":
            self.follow()

    def tail(self, key: str) -> str:
        errors = sorted(self.run_directory.glob("rg*/i*/stderr.log"))
        texts = [f"{e.parent.parent.name}/{e.parent.name}: {e.read_text(errors='replace')[-1500:]}" for e in errors]
        return "\n".join([super().tail(key), *(t for t in texts if not t.endswith(": "))])

    def stop(self) -> None:
        agent = self.processes.get("agent")
        if agent is not None and agent.poll() is None:
            family = psutil.Process(agent.pid).children(recursive=True)
            if self.config.mode == "free":  # in order: after the next commit; in blocks there may never be one
                agent.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(timeout=15)
            for member in family:  # whatever it left, if it was broken
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        super().stop()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 0.2):
        return True
    return False
