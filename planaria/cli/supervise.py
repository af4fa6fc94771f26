"""Puts the parts of ``planaria run`` together: lighthouse, local engine, agent, and what people see of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

from planaria.agent.agent import Agent, Assignment, Outcome
from planaria.agent.borrowing import Lender
from planaria.agent.events import EventLog
from planaria.agent.lighthouse import LighthouseChild
from planaria.agent.logs import LogPump
from planaria.agent.proc import end_all_children
from planaria.agent.summary import Summary
from planaria.cli.live import LiveView, lines_of
from planaria.cli.logdir import former_life, held, move_aside, usable
from planaria.cli.options import SPARE_WAIT, RunOptions, gpus_of, health_watch
from planaria.core.messages import Event, JobSpec, Member
from planaria.core.plan import PlanSpec
from planaria.engines.base import Engine
from planaria.engines.launch import Launch, directory_of
from planaria.engines.local import LocalEngine
from planaria.engines.spread import SpreadEngine, Terms
from planaria.files import write_whole
from planaria.logs import LogFormat, event_line, json_line
from planaria.wire.credentials import ENVIRONMENT as CREDENTIALS

# Of all that an agent records, what a person at the terminal wants to know at once.
SHOWN = frozenset(
    {
        "borrow",
        "exit",
        "health",
        "kill",
        "left",
        "lighthouse",
        "link",
        "node",
        "pages",
        "recovered",
        "refused",
        "resume",
        "signal",
        "stale",
        "stop",
        "suspect",
        "unprepared",
        "uncopied",
        "unwritten",
    }
)
# And of what the lighthouse records, which is about the whole job: the agent with group 0 shows it.
_SHOWN_OF_JOB = frozenset(
    {
        "diverged",
        "evict",
        "late",
        "majority",
        "mismatch",
        "quorum",
        "resume",
        "scale",
        "slow-link",
        "still",
        "unsaved",
        "unshared",
    }
)
# People read a changing view a few times a second.
_VIEW_SECONDS = 0.25
# Where the own lighthouse has its pages unless --http says otherwise: any port, out of reach for other machines.
PAGES = "127.0.0.1:0"
# Two attempts a minute for a group that cannot live: see PlanSpec.
_LONGEST_BACKOFF = 30.0


async def supervise(options: RunOptions) -> int:
    """Run the job; its exit code. Leaves no process behind. UsageError if another run uses the log directory."""
    with held(options.log_dir):
        # A lighthouse that lives on knows the agent and its groups.
        name, following = former_life(options.log_dir, options.job) if options.lighthouse else ("", {})
        move_aside(options.log_dir)
        return await _supervise(options, name, following if name else {})


async def _supervise(options: RunOptions, name: str, following: dict[int, int]) -> int:
    began = time.monotonic()
    with usable(options.log_dir):
        events = EventLog(options.log_dir / "events.jsonl")
    pump = LogPump()
    view = LiveView(options.job) if options.live and sys.stderr.isatty() else None
    if view is None:
        events.listen(lambda event: say(pump, options, event, SHOWN))
        if options.first_group == 0:
            events.listen(lambda event: say(pump, options, event, _SHOWN_OF_JOB), relayed=True)
    if not options.quiet and view is None:
        events.listen(lambda event: follow(pump, options, event))
    lighthouse = None
    if options.lighthouse is None:
        lighthouse = LighthouseChild(options.log_dir, options.http or PAGES, lambda kind, text: events.add(kind, text))
    agent = Agent(_assignment(options, name, following), lambda path: _engine(options, path, events), events)
    try:
        if isinstance(agent.engine, SpreadEngine):
            await _open(agent, agent.engine, options)
        address = options.lighthouse or (await lighthouse.start() if lighthouse is not None else "")
        if lighthouse is not None and lighthouse.http is not None:
            events.add("pages", f"watch it at {pages_of(lighthouse.http, options.job)}")
        _write_run(options, address, lighthouse, agent.name)
        outcome = await _run(agent, address, view)
    finally:
        if view is not None:
            view.close()
        await agent.close()
        if lighthouse is not None:
            await lighthouse.stop()
        # Orphans of ranks that left their process group, and whatever an error above has left.
        end_all_children()
        pump.close()
        events.close()
    return _conclude(options, outcome, time.monotonic() - began)


async def _run(agent: Agent, address: str, view: LiveView | None) -> Outcome:
    loop = asyncio.get_running_loop()
    handled = heeded()
    for signum in handled:
        loop.add_signal_handler(signum, agent.interrupt, signum)
    drawing = loop.create_task(_draw(agent, view)) if view is not None else None
    try:
        return await agent.run(address)
    finally:
        if drawing is not None and view is not None:
            drawing.cancel()
            view.show(lines_of(agent), agent.orders.quorum, tuple(agent.events.newest))
        for signum in handled:
            loop.remove_signal_handler(signum)


def heeded() -> list[signal.Signals]:
    """The signals that ask for an orderly end. Whoever starts this with one of them ignored (nohup; a shell's &) means
    that."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [signum for signum in asking if signal.getsignal(signum) is not signal.SIG_IGN]


async def _draw(agent: Agent, view: LiveView) -> None:
    while True:
        view.show(lines_of(agent), agent.orders.quorum, tuple(agent.events.newest))
        await asyncio.sleep(_VIEW_SECONDS)


def _assignment(options: RunOptions, name: str, following: dict[int, int]) -> Assignment:
    plan = PlanSpec(
        desired=options.local_groups,
        min_groups=min(options.min_groups, options.local_groups),
        budget=options.max_replacements,
        backoff_first=options.restart_backoff,
        backoff_max=max(options.restart_backoff, _LONGEST_BACKOFF),
    )
    wait = SPARE_WAIT if options.spare_wait is None else options.spare_wait
    spec = JobSpec(options.job, options.groups, options.min_groups, options.policy, options.ranks, wait)
    return Assignment(
        spec,
        plan,
        options.log_dir,
        options.first_group,
        ranks=options.ranks,
        copies=options.buddy is not None,
        lender=Lender(options.borrow, options.group_addr, options.nnodes) if options.borrow else None,
        name=name,
        following=following,
        health=health_watch(options),
        placed=options.placed,
    )


def launch_of(options: RunOptions, job: str, host: str, path: Path) -> Launch:
    """``path``: of the socket to which ranks of this node connect."""
    return Launch(
        job=job,
        groups=options.groups,
        target=options.script,
        args=options.args,
        directory=options.log_dir,
        socket=path,
        module=options.module,
        shards=options.shards,
        policy=options.policy,
        reduction=options.reduction,
        host=host,
        nproc=options.nproc_per_group,
        device=options.device,
        exact=options.exact,
        checkpoint=options.checkpoint,
        checkpoint_every=options.checkpoint_every,
        checkpoint_keep=options.checkpoint_keep,
        replay=options.replay,
        buddy=options.buddy,
        check_state=options.check_state,
        recheck=options.recheck,
        nnodes=options.nnodes,
        node=options.node_rank,
        spread=options.spread,
        master=options.master,
    )


def terms_of(options: RunOptions) -> Terms:
    groups = options.groups, options.first_group, options.local_groups
    return Terms(
        options.nnodes,
        options.nproc_per_group,
        *groups,
        buddy=options.buddy or 0,
        shards=options.shards,
        policy=options.policy.value,
        reduction=options.reduction,
        exact=options.exact,
        check_state=options.check_state,
        recheck=options.recheck,
        checkpoint=str(options.checkpoint) if options.checkpoint is not None else None,
        checkpoint_every=options.checkpoint_every,
        checkpoint_keep=options.checkpoint_keep,
        replay=str(options.replay) if options.replay is not None else None,
    )


def _engine(options: RunOptions, path: Path, events: EventLog) -> Engine:
    launch = launch_of(options, options.job, options.host or options.master, path)
    engine = LocalEngine(launch, gpus_of(options), options.standbys)
    engine.warm_up()  # beside the start of the lighthouse
    if not options.spread:
        return engine
    return SpreadEngine(engine, launch, terms_of(options), events.add)


async def _open(agent: Agent, engine: SpreadEngine, options: RunOptions) -> None:
    """Let the other nodes of the groups come."""

    def end(event: Event) -> None:
        if event.kind == "end":
            engine.parting = (int(dict(event.data)["exit_code"]), event.text)

    agent.events.listen(end)
    engine.asked_to_stop = agent.stop_in_order
    await engine.listen(options.group_addr)


def pages_of(http: str, job: str) -> str:
    """The URL of a job's page. ``http``: host:port."""
    return f"{'https' if os.environ.get(CREDENTIALS) else 'http'}://{http}/jobs/{quote(job, safe='')}"


def _write_run(options: RunOptions, address: str, lighthouse: LighthouseChild | None, agent: str) -> None:
    content = {
        "agent": agent,
        "job": options.job,
        "lighthouse": address,
        "http": lighthouse.http if lighthouse is not None else None,
        "groups": options.groups,
        "first_group": options.first_group,
        "local_groups": options.local_groups,
        "nproc_per_group": options.nproc_per_group,
        "nnodes": options.nnodes,
        "pid": os.getpid(),
        "started": time.time(),
        "script": options.script,
        "args": list(options.args),
    }
    write_whole(options.log_dir / "run.json", json.dumps(content, indent=2) + "\n", durable=False)


def follow(pump: LogPump, options: RunOptions, event: Event) -> None:
    """Show the output of ranks that start, and stop following those that ended."""
    facts = dict(event.data)
    if "incarnation" not in facts:
        return
    member = Member(event.group, int(facts["incarnation"]))
    if event.kind == "start":
        rank = int(facts["rank"])
        if not directory_of(options.log_dir, member, rank).exists():
            return  # it is shown on its own node
        directory = directory_of(options.log_dir, member, rank)
        for name, out in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
            shown = partial(_rank_line, options.job, member, rank, name.removesuffix(".log"))
            rendered = shown if options.log_format is LogFormat.JSON else None
            pump.follow(f"rg{member.group}:rank{rank}", _file(directory / name), out, rendered)
    elif event.kind == "exit":
        # On node 0 a group ends as a whole, or loses one rank; a helper knows of its own ranks only.
        whole = options.node_rank == 0 and "alone" not in facts
        for rank in range(options.ranks) if whole else [int(facts["rank"])]:
            for name in ("stdout.log", "stderr.log"):
                pump.release(_file(directory_of(options.log_dir, member, rank) / name))


def _rank_line(job: str, member: Member, rank: int, stream: str, text: str) -> str:
    return json_line(
        text, time.time(), job=job, group=member.group, incarnation=member.incarnation, rank=rank, stream=stream
    )


def _file(path: Path) -> Path:
    """By the one name that it has in all lives of its group."""
    return Path(os.path.realpath(path))


def say(pump: LogPump, options: RunOptions, event: Event, shown: Collection[str]) -> None:
    """What machines read is all there is: they choose for themselves."""
    wanted = event.kind in shown and dict(event.data).get("state") != "finished"
    if wanted or options.log_format is LogFormat.JSON:
        pump.say(line_of(event, options))


def line_of(event: Event, options: RunOptions) -> str:
    """As it is shown."""
    return event_line(event, options.job) if options.log_format is LogFormat.JSON else f"[planaria] {event.text}"


def _conclude(options: RunOptions, outcome: Outcome, seconds: float) -> int:
    summary = Summary(
        options.job,
        outcome.exit_code,
        outcome.reason,
        options.groups,
        outcome.step,
        outcome.replacements,
        seconds,
        options.log_dir,
        outcome.failures,
    )
    try:
        summary.write()
    except OSError as error:
        with suppress(OSError):
            print(f"planaria: cannot write {summary.path} ({error.strerror})", file=sys.stderr)
    with suppress(OSError):
        print(summary.shown(options.log_format), file=sys.stderr, flush=True)
    return outcome.exit_code
