"""``planaria run --engine slurm``: a supervisor that keeps one job of Slurm for every group.

It needs no place of its own: a login node, or a job of one CPU. Whatever it knows it can learn again, so it may be
killed and started again (with the same --job and --log-dir) while training goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
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
from planaria.cli.logdir import held, move_aside, read_run, read_summary, usable
from planaria.cli.options import RunOptions
from planaria.cli.supervise import heeded, line_of
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED
from planaria.core.plan import Finish, PlanSpec, Suspend
from planaria.core.roster import JobStatus
from planaria.engines import memory as memories
from planaria.engines.desk import LighthouseDesk
from planaria.engines.keeper import HostAway, HostState, Keeper, Tick
from planaria.engines.slurm import commands, scripts
from planaria.engines.slurm.host import SlurmHost, jobs_before
from planaria.engines.slurm.steps import StepHost
from planaria.errors import UsageError
from planaria.lighthouse.server import refuse_strangers
from planaria.logs import LogFormat, json_of
from planaria.wire.channel import join_address, split_address, split_addresses
from planaria.wire.credentials import ENVIRONMENT as CREDENTIALS
from planaria.wire.token import ENVIRONMENT as TOKEN

LIGHTHOUSE = "lighthouse.addr"
MEMORY = "keeper.json"
BEFORE = "jobs_before.json"  # numbers of jobs of earlier runs of the same name
# The same for every group, or said by the supervisor.
_NOT_FOR_GROUPS = (
    *("first_group", "local_groups", "placed", "node_rank", "nnodes", "group_addr", "job", "log_dir", "lighthouse"),
    *("host", "http", "live", "tee", "credentials", "token_file"),
)
# The longest wait between two tries of a group that cannot live: as with groups of this machine.
_LONGEST_BACKOFF = 30.0
# A group whose agent is out of reach while the others go on: as long as its replacement takes where there is room.
_PATIENCE = 10.0


def run(options: RunOptions, ctx: typer.Context) -> int:
    """The exit code of the job; 0 for a whole allocation that was asked for."""
    template = _template(options, ctx)
    whole, allocation = ctx.params["single_allocation"], os.environ.get("SLURM_JOB_ID", "")
    outside = whole and not allocation
    if options.lighthouse is None and not outside:
        refuse_strangers(join_address(_host(options), 0), None)
    if outside or ctx.params["dry_run"]:
        texts = [scripts.whole(template, options.groups, _again(options, template, ctx))] if whole else []
        texts = texts or [scripts.render(template, group, 0) for group in range(options.groups)]
        if ctx.params["dry_run"]:
            print("\n".join(texts), end="")
            return 0
        commands.check_present()
        return asyncio.run(_submit(texts[0], options))
    commands.check_present()
    with held(options.log_dir):
        if not _goes_on(options):
            before = frozenset[str]() if whole else asyncio.run(_jobs_before(options))
            move_aside(options.log_dir)
            with usable(options.log_dir):
                for name in (MEMORY, LIGHTHOUSE):
                    (options.log_dir / name).unlink(missing_ok=True)
                (options.log_dir / BEFORE).write_text(json.dumps(sorted(before)))
        return asyncio.run(_Supervisor(options, template, allocation if whole else "").run())


async def _jobs_before(options: RunOptions) -> frozenset[str]:
    try:
        return await jobs_before(options.job)
    except HostAway as error:
        raise UsageError(f"--engine slurm: {error}; try again") from None


async def _submit(script: str, options: RunOptions) -> int:
    try:
        number = await commands.submit(script)
    except HostAway as error:
        raise UsageError(f"--engine slurm: {error}; try again") from None
    log = options.log_dir / "slurm.log"
    print(f"planaria: job {options.job} is asked for, as Slurm's job {number}; its output goes to {log}")
    return 0


def _again(options: RunOptions, template: scripts.Template, ctx: typer.Context) -> list[str]:
    """This very call, for inside of the allocation."""
    words = engines.words_of(ctx, ("job", "log_dir", "credentials", "token_file"))
    ours = ["--engine", "slurm", "--single-allocation", "--job", options.job, "--log-dir", str(options.log_dir)]
    return [*template.planaria, "run", *ours, *_credentials(), *words, *template.script]


def _host(options: RunOptions) -> str:
    """Where the other nodes reach this one."""
    return options.host or socket.getfqdn()


def _goes_on(options: RunOptions) -> bool:
    """Whether a supervisor of this very run was here before, and did not see its end."""
    run = read_run(options.log_dir / "run.json")
    return run is not None and run["job"] == options.job and read_summary(options.log_dir, options.job) is None


def _template(options: RunOptions, ctx: typer.Context) -> scripts.Template:
    words = engines.words_of(ctx, _NOT_FOR_GROUPS)
    if "--groups" not in words:
        words += ["--groups", str(options.groups)]
    words += _credentials()
    return scripts.Template(
        options.job,
        (sys.executable, "-m", "planaria"),
        tuple(words),
        (options.script, *options.args),
        options.log_dir,
        Path.cwd(),
        options.log_dir / LIGHTHOUSE,
        options.nnodes,
        scripts.options_given(ctx.params["sbatch"] or ()),
    )


def _credentials() -> list[str]:
    """By name, for a site may not pass the environment on."""
    given = (("--credentials", os.environ.get(CREDENTIALS)), ("--token-file", os.environ.get(TOKEN)))
    return [word for option, value in given if value for word in (option, value)]


class _Supervisor:
    def __init__(self, options: RunOptions, template: scripts.Template, allocation: str) -> None:
        """``allocation``: in whose steps groups run; empty: each has a job of its own."""
        self._options = options
        self._began = time.monotonic()
        with usable(options.log_dir):
            self._events = EventLog(options.log_dir / "events.jsonl")
        self._pump = LogPump()
        self._events.listen(lambda event: self._pump.say(line_of(event, options)))
        self._host: SlurmHost | StepHost
        if allocation:
            self._host = StepHost(template, allocation)
        else:
            self._host = SlurmHost(template, self._events.add, _read_before(options.log_dir / BEFORE))
        self._status: JobStatus | None = None
        self._followed: dict[int, Path] = {}  # by group

    async def run(self) -> int:
        """The exit code of the job. No job is left."""
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
            if isinstance(self._host, StepHost):
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
                self._events.add(
                    "stop", f"{name}: the jobs of all groups are cancelled; once more does not wait for them"
                )
                end = 128 + stopped_by, f"stopped by {name}"
                await keeper.end_all()
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
        else:  # whatever has not left by then is killed by Slurm, in its own time
            self._hurried.set()

    async def _ended(self, host: SlurmHost | StepHost) -> None:
        """Wait until no job is left: whoever leaves needs the lighthouse for that."""
        while not self._hurried.is_set():
            try:
                if all(each.state is HostState.ENDED for each in await host.list()):
                    return
            except HostAway:
                pass
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
        """After every look: nothing that was done may be forgotten, and new jobs have output to be shown."""
        self._status = tick.status or self._status
        memory, directory = self._keeper.memory, self._options.log_dir
        try:
            memories.write(directory / MEMORY, memory)
        except OSError as error:
            self._events.add("unwritten", f"{directory / MEMORY} cannot be written ({error.strerror})")
        if self._options.quiet:
            return
        for group, life in memory.lives.items():
            log = scripts.directory_of(directory, group, life.incarnation) / "slurm.log"
            if (shown := self._followed.get(group)) != log:
                if shown is not None:
                    self._pump.release(shown)
                self._followed[group] = log
                told = partial(json_of, job=self._options.job, group=group, incarnation=life.incarnation)
                rendered = told if self._options.log_format is LogFormat.JSON else None
                self._pump.follow(f"rg{group}-i{life.incarnation}", log, sys.stdout, rendered)

    def _lighthouse(self) -> LighthouseChild:
        """Where the one before it was, if that is possible: then nobody has to look for it."""
        host, options = _host(self._options), self._options
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
            "engine": "slurm",
            "groups": options.groups,
            "pid": os.getpid(),
            "started": time.time(),
            "script": options.script,
            "args": list(options.args),
        }
        for name, text in ((LIGHTHOUSE, address), ("run.json", json.dumps(run, indent=2))):
            draft = options.log_dir / f"{name}.partial"
            with usable(options.log_dir):
                draft.write_text(text + "\n")
                draft.rename(options.log_dir / name)


def _read_before(path: Path) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads(path.read_text())))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is not what a supervisor has written ({error}); give another --log-dir") from None


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
