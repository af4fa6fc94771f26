"""The supervisor of ``planaria run --engine``: keeps a place in a cluster for every group, and says how they fare.

It needs no place of its own. Whatever it knows it can learn again, so it may be killed and started again (with the same
--job and --log-dir) while training goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import typer

from planaria.agent.events import EventLog
from planaria.agent.lighthouse import LighthouseChild
from planaria.agent.logs import LogPump
from planaria.agent.summary import Summary
from planaria.cli import engine as engines
from planaria.cli.logdir import move_aside, read_run, read_summary, usable
from planaria.cli.options import RunOptions
from planaria.cli.supervise import heeded, line_of
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED
from planaria.core.plan import Finish, PlanSpec, Suspend
from planaria.core.roster import JobStatus
from planaria.engines import memory as memories
from planaria.engines import placing
from planaria.engines.desk import LighthouseDesk
from planaria.engines.keeper import GroupHost, HostAway, HostState, Keeper, Tick
from planaria.errors import UsageError
from planaria.files import write_whole
from planaria.logs import LogFormat, json_of
from planaria.wire.channel import join_address, split_address, split_addresses
from planaria.wire.credentials import ENVIRONMENT as CREDENTIALS
from planaria.wire.token import ENVIRONMENT as TOKEN

LIGHTHOUSE = "lighthouse.addr"
MEMORY = "keeper.json"
# The same for every group, or said by the supervisor.
_NOT_FOR_GROUPS = (
    *("first_group", "local_groups", "placed", "node_rank", "nnodes", "group_addr", "job", "log_dir", "lighthouse"),
    *("host", "http", "live", "tee", "credentials", "token_file"),
)
# The longest wait between two tries of a group that cannot live: as with groups of this machine.
_LONGEST_BACKOFF = 30.0
# A group whose agent is out of reach while the others go on: as long as its replacement takes where there is room.
_PATIENCE = 10.0


def template_of(options: RunOptions, ctx: typer.Context) -> placing.Template:
    """Of the call that this is."""
    words = engines.words_of(ctx, _NOT_FOR_GROUPS)
    if "--groups" not in words:
        words += ["--groups", str(options.groups)]
    return placing.Template(
        options.job,
        (sys.executable, "-m", "planaria"),
        (*words, *credentials()),
        (options.script, *options.args),
        options.log_dir,
        Path.cwd(),
        options.log_dir / LIGHTHOUSE,
        options.nnodes,
    )


def credentials() -> list[str]:
    """By name, for a cluster may not pass the environment on."""
    given = (("--credentials", os.environ.get(CREDENTIALS)), ("--token-file", os.environ.get(TOKEN)))
    return [word for option, value in given if value for word in (option, value)]


def goes_on(options: RunOptions) -> bool:
    """Whether a supervisor of this very run was here before, and did not see its end."""
    run = read_run(options.log_dir / "run.json")
    return run is not None and run["job"] == options.job and read_summary(options.log_dir, options.job) is None


def begin_anew(options: RunOptions) -> None:
    """Nothing of an earlier run is taken for this one's."""
    move_aside(options.log_dir)
    with usable(options.log_dir):
        for name in (MEMORY, LIGHTHOUSE):
            (options.log_dir / name).unlink(missing_ok=True)


class Supervisor:
    def __init__(
        self,
        options: RunOptions,
        engine: str,
        address: str,
        log: str,
        host_of: Callable[[Callable[[str, str, int], None]], GroupHost],
    ) -> None:
        """``address``: where the other nodes reach this one. ``log``: name of the file with a life's output, in the
        directory of that life. ``host_of``: where groups run, given whom to tell (kind, sentence, group)."""
        self._options, self._engine, self._address, self._log = options, engine, address, log
        self._out = sys.stdout  # of groups; whoever calls may have another one for what a library says
        self._began = time.monotonic()
        with usable(options.log_dir):
            self._events = EventLog(options.log_dir / "events.jsonl")
        self._pump = LogPump()
        self._events.listen(lambda event: self._pump.say(line_of(event, options)))
        self._host = host_of(self._events.add)
        self._status: JobStatus | None = None
        self._followed: dict[int, Path] = {}  # by group
        self._written = ""  # of what the keeper remembers, the newest on the disk

    async def run(self) -> int:
        """The exit code of the job. No group is left."""
        options, memory = self._options, memories.read(self._options.log_dir / MEMORY)
        self._stopping: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._hurried = asyncio.Event()
        lighthouse = self._lighthouse() if options.lighthouse is None else None
        desk: LighthouseDesk | None = None
        try:
            address = options.lighthouse or (await lighthouse.start() if lighthouse is not None else "")
            self._publish(address, lighthouse)
            desk = LighthouseDesk(address, options.job)
            self._keeper = Keeper(self._host, desk, self._events.add, memory)
            code, reason = await self._keep()
            self._events.add("end", reason, data={"exit_code": code})
        finally:
            if desk is not None:
                desk.close()
            self._host.close()
            if lighthouse is not None:
                await lighthouse.stop()
            self._pump.close()
            self._events.close()
        step = max((g.step for g in self._status.groups), default=0) if self._status is not None else 0
        seconds, replaced = time.monotonic() - self._began, sum(life.incarnation for life in memory.lives.values())
        summary = Summary(options.job, code, reason, options.groups, step, replaced, seconds, options.log_dir)
        with suppress(OSError):
            summary.write()
            print(summary.shown(options.log_format), file=sys.stderr, flush=True)
        return code

    async def _keep(self) -> tuple[int, str]:
        """Until the job is over or somebody wants it to be: (exit code, reason)."""
        loop, keeper = asyncio.get_running_loop(), self._keeper
        handled = heeded()
        for signum in handled:
            loop.add_signal_handler(signum, self._stop, signum)
        keeping = loop.create_task(keeper.run(self._spec, self._looked))
        try:
            ends: list[asyncio.Future[Any]] = [keeping, self._stopping]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not keeping.done():
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                stopped_by = self._stopping.result()
                name = signal.Signals(stopped_by).name
                self._events.add("stop", f"{name}: all groups are asked to end; once more does not wait for them")
                end = 128 + stopped_by, f"stopped by {name}"
            else:
                end = self._outcome(keeping)
            await self._ended(self._host)
            return end
        finally:
            keeping.cancel()
            for signum in handled:
                loop.remove_signal_handler(signum)

    def _outcome(self, keeping: asyncio.Task[Finish | Suspend]) -> tuple[int, str]:
        try:
            outcome = keeping.result()
        except UsageError as error:  # before any group ran, so nothing is lost
            return EXIT_BAD_INPUT, str(error)
        if isinstance(outcome, Suspend):
            return EXIT_FAILED, f"suspended: {outcome.reason}"
        return outcome.exit_code, outcome.reason

    def _stop(self, signum: int) -> None:
        assert self._stopping is not None
        if not self._stopping.done():
            self._stopping.set_result(signum)
        else:  # whatever has not left by then is killed by the cluster, in its own time
            self._hurried.set()

    async def _ended(self, host: GroupHost) -> None:
        """Have whatever is there end, and wait until no group is left: whoever leaves needs the lighthouse for that."""
        away = ""
        while True:
            try:
                hosted = await host.list()
                if all(each.state is HostState.ENDED for each in hosted):
                    return
                await self._keeper.end_these(hosted)
            except HostAway as error:
                if away != str(error):
                    away = str(error)
                    self._events.add("away", away)
            if self._hurried.is_set():
                return
            loop = asyncio.get_running_loop()
            changed, hurried = loop.create_task(host.changed()), loop.create_task(self._wait_for_hurry())
            await asyncio.wait((changed, hurried), return_when=asyncio.FIRST_COMPLETED)
            for task in (changed, hurried):
                task.cancel()
            await asyncio.gather(changed, hurried, return_exceptions=True)

    async def _wait_for_hurry(self) -> None:
        await self._hurried.wait()

    def _spec(self, status: JobStatus | None) -> PlanSpec:
        options = self._options
        return PlanSpec(
            desired=(status.desired if status is not None else 0) or self._keeper.memory.desired or options.groups,
            min_groups=options.min_groups,
            budget=options.max_replacements,
            backoff_first=options.restart_backoff,
            backoff_max=max(options.restart_backoff, _LONGEST_BACKOFF),
            suspect_patience=_PATIENCE,
        )

    def _looked(self, tick: Tick) -> None:
        """After every look: nothing that was done may be forgotten, and new lives have output to be shown."""
        self._status = tick.status or self._status
        memory, directory = self._keeper.memory, self._options.log_dir
        try:
            self._written = memories.write(directory / MEMORY, memory, self._written)
        except OSError as error:
            self._events.add("unwritten", f"{directory / MEMORY} cannot be written ({error.strerror})")
        if self._options.quiet:
            return
        for group, life in memory.lives.items():
            log = placing.directory_of(directory, group, life.incarnation) / self._log
            if (shown := self._followed.get(group)) != log:
                if shown is not None:
                    self._pump.release(shown)
                self._followed[group] = log
                told = partial(json_of, job=self._options.job, group=group, incarnation=life.incarnation)
                rendered = told if self._options.log_format is LogFormat.JSON else None
                self._pump.follow(f"rg{group}-i{life.incarnation}", log, self._out, rendered)

    def _lighthouse(self) -> LighthouseChild:
        """Where the one before it was, if that is possible: then nobody has to look for it."""
        host, options = self._address, self._options
        bind = join_address(host, 0)
        with suppress(UsageError):
            (before,) = split_addresses(f"@{options.log_dir / LIGHTHOUSE}")
            if split_address(before)[0] == host and _is_free(*split_address(before)):
                bind = before
        return LighthouseChild(options.log_dir, options.http, self._events.add, bind)

    def _publish(self, address: str, lighthouse: LighthouseChild | None) -> None:
        """Tell agents where the lighthouse is, and ``planaria status`` too."""
        options = self._options
        run = {
            "job": options.job,
            "lighthouse": address,
            "http": lighthouse.http if lighthouse is not None else None,
            "engine": self._engine,
            "groups": options.groups,
            "pid": os.getpid(),
            "started": time.time(),
            "script": options.script,
            "args": list(options.args),
        }
        for name, text in ((LIGHTHOUSE, address), ("run.json", json.dumps(run, indent=2))):
            with usable(options.log_dir):
                write_whole(options.log_dir / name, text + "\n")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
