"""A run under faults, from its start to its verdict. Owns every process that it starts and ends it in
every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from planaria.agent.parent import tied
from planaria.agent.proc import describe
from planaria.chaos.inject import Injected, Injector, Network, lighthouse_of
from planaria.chaos.schedule import Fault
from planaria.chaos.verify import Record, Verdict, judge, read_record, read_records
from planaria.chaos.watch import Watch, agent_pid
from planaria.core.messages import Event, Member
from planaria.engines.launch import directory_of
from planaria.errors import PlanariaError

# Often enough to strike within a fraction of the shortest step, seldom enough to leave the processor to the
# job.
POLL_SECONDS = 0.02
# After SIGINT a run lets its groups finish a step and leave; a tiny model needs a second, a large one has a
# minute.
LEAVE_SECONDS = 20.0
# Variables that tie a process to a run: a quiet reference must not join the one that it may be called from.
_TIES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Script:
    """What is trained. ``shards``: None for what the script says. ``device``: cpu, cuda, or None for what there is.
    ``nproc``: processes in a group."""

    path: Path
    args: tuple[str, ...] = ()
    groups: int = 4
    shards: int | None = None
    device: str | None = None
    nproc: int = 1

    def command(self) -> list[str]:
        return [sys.executable, str(self.path), *self.args]


class Deployment(Protocol):
    """How the groups of a run are brought up, and where its traces are."""

    @property
    def directories(self) -> Sequence[Path]: ...

    @property
    def log(self) -> Path: ...

    @property
    def network(self) -> Network | None: ...

    def start(self) -> None: ...

    def poll(self) -> int | None:
        """Look after what was started; the exit code once all of it has ended."""

    def lighthouse(self) -> tuple[int, int] | None: ...

    def stop(self) -> None:
        """End everything that is left. Safe to call at any time, and twice."""


class LocalRun:
    """One ``planaria run`` with all groups. Its output goes to ``run.log``."""

    network: Network | None = None

    def __init__(self, script: Script, directory: Path, options: Sequence[str] = ()) -> None:
        self._script = script
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def directories(self) -> Sequence[Path]:
        return (self._directory,)

    @property
    def log(self) -> Path:
        return self._directory / "run.log"

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = run_command(self._script, self._directory, self._options)
        self._process = spawn(command, dict(os.environ), self.log)

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def lighthouse(self) -> tuple[int, int] | None:
        agent = agent_pid(self._directory)
        return None if agent is None else lighthouse_of(agent)

    def stop(self) -> None:
        if self._process is not None:
            end(self._process)


def run_command(script: Script, directory: Path, options: Sequence[str]) -> list[str]:
    """The command line of ``planaria run`` for ``script``."""
    command = [
        sys.executable,
        "-m",
        "planaria",
        "run",
        "--groups",
        str(script.groups),
        "--log-dir",
        str(directory),
    ]
    if script.shards is not None:
        command += ["--shards", str(script.shards)]
    if script.device is not None:
        command += ["--device", script.device]
    if script.nproc > 1:
        command += ["--nproc-per-group", str(script.nproc)]
    return [*command, *options, str(script.path), *script.args]


def spawn(
    command: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, deaf to the terminal's Ctrl-C, with its output in ``log``. Whatever ends
    this process, even SIGKILL, ends the run, whose agent ends the rest."""
    with log.open("ab") as output:
        return subprocess.Popen(
            tied(command),
            env=with_home(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def with_home(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` in which a new interpreter finds this very Planaria, installed or not."""
    home = str(Path(__file__).resolve().parents[2])
    if Path(home).name in ("site-packages", "dist-packages"):
        return dict(env)  # found anyway; named here it would come before the standard library
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**env, "PYTHONPATH": os.pathsep.join([*paths, home] if home not in paths else paths)}


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask with SIGINT, as Ctrl-C does; after ``LEAVE_SECONDS`` do not ask any more."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Troubled:
    """What is left of a run under faults. Close ``watch`` when done."""

    exit_code: int
    seconds: float
    watch: Watch
    injected: tuple[Injected, ...]
    left: int  # faults that could not be done before the job ended
    caught: int = 0  # times that a group was named whose memory was wrong


Show = Callable[[Watch, Sequence[Injected], Sequence[Event]], None]


def trouble(run: Deployment, faults: Sequence[Fault], groups: int, show: Show) -> Troubled:
    """Run to the end under ``faults``. ``show`` is called about every ``POLL_SECONDS`` with what is new.

    However this ends, nothing that it started is left. Raises whatever ends it early (KeyboardInterrupt).
    """
    watch = Watch(*run.directories)
    injector = Injector(watch, faults, run.lighthouse, run.network)
    started = time.monotonic()
    caught: set[str] = set()  # every agent of a job hears of it

    def news() -> list[Event]:
        events = watch.events()
        caught.update(event.text for event in events if event.kind == "corrupt")
        return events

    try:
        run.start()
        began = False
        while (code := run.poll()) is None:
            watch.poll()
            if not began and len(watch.settled()) == groups:
                began = True
                injector.begin()
            injector.poll()
            show(watch, injector.done, news())
            # Pages and clocks bring no news by themselves: looking is all there is.
            time.sleep(POLL_SECONDS)
        watch.poll()
        show(watch, injector.done, news())
        return Troubled(code, time.monotonic() - started, watch, tuple(injector.done), injector.left, len(caught))
    except BaseException:
        watch.close()
        raise
    finally:
        try:
            injector.close()
        finally:
            run.stop()


def quiet_run(script: Script, shards: int, directory: Path, tick: Callable[[], None]) -> Record:
    """Train the same thing as one group, without any fault: alone, or, if a group has several processes, as a run of
    one, for its layout changes bits. ``tick`` is called while it runs.

    Raises PlanariaError with the end of its output if it fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_") and k not in _TIES}
    # As in the ranks of a run: the number of threads changes bits.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("OPENBLAS_NUM_THREADS", "1")
    log, record = directory / "run.log", directory
    if script.nproc == 1:
        command = script.command()
        env |= {"PLANARIA_SHARDS": str(shards), "PLANARIA_DIR": str(directory)}
        if script.device is not None:
            env["PLANARIA_DEVICE"] = script.device
    else:
        command = run_command(replace(script, groups=1, shards=shards), directory, ["--quiet"])
        record = directory_of(directory, Member(0, 0))
    process = spawn(command, env, log)
    try:
        while process.poll() is None:
            tick()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)  # only so often does ``tick`` need to draw
    finally:
        end(process)
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise PlanariaError(f"the quiet reference {describe(process.returncode)}; the end of {log}:\n{tail}")
    return read_record(record)


def verdict_of(troubled: Troubled, quiet: Record | None) -> Verdict:
    """Judge a run with what it left behind."""
    records = read_records(troubled.watch.directories)
    lives = list(troubled.watch.lives.values())
    return judge(records, lives, troubled.injected, shards_of(records.values()), quiet)


def shards_of(records: Iterable[Record]) -> int:
    """V, from what was committed at full strength; 0 if nothing was."""
    return max((line.shards for record in records for line in record.lines), default=0)
