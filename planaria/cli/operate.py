"""The operators' commands: ``planaria status``, ``kill``, ``drain``, ``undrain``, ``migrate``, ``evict``, ``scale``."""

from __future__ import annotations

import json
import math
import os
import signal as signals
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.cli.logdir import lives, read_run, read_summary
from planaria.core.messages import NO_QUORUM, Event
from planaria.core.roster import GroupStatus, JobStatus
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient, Post
from planaria.lighthouse.http import plain
from planaria.wire.checks import MAX_GROUP, MAX_RANK

ENVIRONMENT = "PLANARIA_LIGHTHOUSE"
EVENTS_SHOWN = 8
LINKS_SHOWN = 12  # those between four groups; of a thousand groups the slowest are what one looks for
_COLUMNS = ("group", "incarnation", "state", "phase", "step", "loss", "step time", "pid", "agent", "last event")
_NUMBERS = frozenset({"group", "incarnation", "step", "loss", "step time", "pid"})
# Left out in this order where there is no room: state and phase are what people look for, and the events are
# below the table too.
_DISPENSABLE = ("agent", "last event", "pid", "step time", "incarnation")
_LEAST_EVENT = 24  # characters of a line of the last event, below which it cannot be read

JobOption = Annotated[str, typer.Option("--job", help="Which job, if the lighthouse has several.")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--lighthouse",
        help=f"host:port, or several with commas; else ${ENVIRONMENT}, else that of the newest run below here.",
    ),
]
LogDirOption = Annotated[
    Path | None, typer.Option("--log-dir", help="The --log-dir of the run, to find its lighthouse and job.")
]
NodeOption = Annotated[
    str | None, typer.Option("--node", metavar="NODE", help="An agent, as planaria status names it, or a host.")
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NODE:GPU", help="One GPU of a node, by its name in CUDA_VISIBLE_DEVICES."),
]
GroupArgument = Annotated[
    int, typer.Argument(metavar="GROUP", min=0, max=MAX_GROUP, help="Number of the replica group.")
]


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    job: str  # empty: the only one
    directory: Path | None = field(default=None, compare=False)  # of the run that named it


def status(
    job: JobOption = "",
    lighthouse: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Show what a job's groups are doing."""
    target = find(job, lighthouse, log_dir)
    try:
        with OperatorClient(target.address) as client:
            posts = client.posts() if len(client.addresses) > 1 else []
            try:
                seen = client.status(target.job)
            except UsageError:
                if posts and not as_json:
                    show_posts(Console(), posts)
                raise
    except UsageError:
        if (summary := summary_of(target)) is None:
            raise
        typer.echo(json.dumps(summary) if as_json else ended(summary))
        return
    if as_json:
        more = {"lighthouses": plain(posts)} if posts else {}
        typer.echo(json.dumps({**plain(seen), **more}, allow_nan=False))
    else:
        show_posts(Console(), posts)
        show(Console(), seen)


def kill(
    group: GroupArgument,
    signal: Annotated[str, typer.Option(help="Name or number, for instance KILL, TERM, STOP, CONT.")] = "KILL",
    rank: Annotated[int | None, typer.Option(min=0, max=MAX_RANK, help="Only this rank of the group.")] = None,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Send a signal to the processes of a group, or to one of them, to see how the job takes it."""
    number = signal_number(signal)
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.kill(group, number, name, rank))


def drain(
    group: Annotated[
        int | None, typer.Argument(metavar="[GROUP]", min=0, max=MAX_GROUP, help="Number of the replica group.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=0, max=MAX_RANK, help="Only this rank of it: another process takes its place.")
    ] = None,
    node: NodeOption = None,
    gpu: GpuOption = None,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Have a group, a node, a GPU or a rank leave in order: the others go on without a pause.

    Nothing is started on a node or a GPU again before planaria undrain."""
    if (group is not None) + (node is not None) + (gpu is not None) != 1:
        raise UsageError(
            "say what is to be drained: a GROUP (with --rank, a rank of it), --node NODE or --gpu NODE:GPU"
        )
    if rank is not None and group is None:
        raise UsageError(f"--rank {rank}: say of which GROUP")
    with _connect(job, lighthouse, log_dir) as (client, name):
        if group is None:
            typer.echo(client.drain_node(*_place(node, gpu), name))
        elif rank is not None:
            typer.echo(client.migrate(group, rank, name, drains=True))
        else:
            typer.echo(client.drain(group, name))


def undrain(
    node: NodeOption = None,
    gpu: GpuOption = None,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Use a drained node, or a drained GPU, again: the groups that left come back."""
    if (node is not None) + (gpu is not None) != 1:
        raise UsageError("say what is to be used again: --node NODE or --gpu NODE:GPU")
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.drain_node(*_place(node, gpu), name, undrain=True))


def migrate(
    group: GroupArgument,
    rank: Annotated[int | None, typer.Option(min=0, max=MAX_RANK, help="Which of the group's processes.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="NODE", help="Where to: for all of the group another agent or host; for a rank a node."
        ),
    ] = None,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Have a standby take the place of a process of a group, or (--to alone) all of the group go on at another agent.
    Nothing is lost, and the others go on without a pause."""
    if to == "":
        raise UsageError("--to: the node's name is empty; give one as planaria status names it, or a host")
    if rank is None and to is None:
        rank = 0
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.migrate(group, rank, name, to=to or ""))


def evict(
    group: GroupArgument,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Declare a group dead that nobody can reach, so that the others need not wait for it."""
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.evict(group, name))


def scale(
    groups: Annotated[int, typer.Argument(metavar="N", min=1, help="How many groups the job is to have.")],
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Change the number of groups while the job runs."""
    if groups > MAX_GROUP:
        raise UsageError(f"a job can have at most {MAX_GROUP} groups, not {groups}")
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.scale(groups, name))


def _place(node: str | None, gpu: str | None) -> tuple[str, str]:
    """(node, GPU of it or nothing)."""
    if node == "":
        raise UsageError("--node: its name is empty; give an agent as planaria status names it, or a host")
    if gpu is None:
        return node or "", ""
    place, _, device = gpu.rpartition(":")
    if not place or not device:
        raise UsageError(f"--gpu {gpu}: give NODE:GPU, as planaria status names nodes")
    return place, device


# --- finding the lighthouse ---------------------------------------------------------------------------------


@contextmanager
def _connect(job: str, lighthouse: str | None, log_dir: Path | None) -> Iterator[tuple[OperatorClient, str]]:
    """For one verb. UsageError in the words of the run itself if it has ended."""
    target = find(job, lighthouse, log_dir)
    try:
        with OperatorClient(target.address) as client:
            yield client, target.job
    except UsageError:
        if (summary := summary_of(target)) is None:
            raise
        raise UsageError(ended(summary)) from None


def find(job: str, lighthouse: str | None, log_dir: Path | None) -> Target:
    """Where the lighthouse is: as said, else of the run in ``log_dir``, else from the environment, else that
    of the newest run below ./planaria_logs. UsageError if nobody says."""
    if lighthouse:
        return Target(lighthouse, job)
    if log_dir is not None:
        return _of_run(log_dir / "run.json", job)
    if os.environ.get(ENVIRONMENT):
        return Target(os.environ[ENVIRONMENT], job)
    return _of_run(_likeliest(job), job)


def _likeliest(job: str) -> Path:
    """The run below here that is meant: the one that lives, else the newest."""
    runs = _runs()
    if not runs:
        raise UsageError(
            f"no lighthouse is known: give --lighthouse host:port or --log-dir, set {ENVIRONMENT}, "
            "or call this where a run has made ./planaria_logs"
        )
    living = []
    for path in runs:
        with suppress(UsageError):  # one that cannot be read is looked at only if there is no other
            if (run := read_run(path)) is not None and lives(path.parent, run):
                living.append((path, str(run["job"])))
    living = [(path, name) for path, name in living if name == job] or living
    if len({name for _, name in living}) > 1:
        known = ", ".join(f"{path.parent} (job {name})" for path, name in living)
        raise UsageError(f"several runs live below here; say which with --log-dir: {known}")
    return living[-1][0] if living else runs[-1]


def _runs() -> list[Path]:
    """The run.json files below here, the newest last."""
    found = []
    for path in Path("planaria_logs").glob("*/run.json"):
        with suppress(OSError):  # removed in this moment
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def _of_run(path: Path, job: str) -> Target:
    run = read_run(path)
    if run is None:
        raise UsageError(f"there is no {path}; is that the --log-dir of a run?")
    return Target(str(run["lighthouse"]), job or str(run["job"]), path.parent)


def summary_of(target: Target) -> dict[str, Any] | None:
    """The last words of the run that the target was read from."""
    return read_summary(target.directory, target.job) if target.directory is not None else None


def ended(summary: dict[str, Any]) -> str:
    """A sentence about a run that has ended."""
    facts = f"exit code {summary.get('exit_code')}, {summary.get('step')} steps committed"
    return f"job {summary.get('job')} has ended: {summary.get('reason')} ({facts})"


def signal_number(text: str) -> int:
    """9 for "9", "KILL" or "SIGKILL"; UsageError for what is no signal."""
    if text.lstrip("-").isdecimal():
        number = int(text)
        if number not in signals.valid_signals():
            raise UsageError(f"there is no signal {number}; give one of 1 to {max(signals.valid_signals())}, or a name")
        return number
    try:
        return int(signals.Signals["SIG" + text.upper().removeprefix("SIG")])
    except KeyError:
        raise UsageError(f"{text!r} is no signal; give a name such as KILL, TERM or STOP, or a number") from None


# --- the table ----------------------------------------------------------------------------------------------


def show_posts(console: Console, posts: list[Post]) -> None:
    """A line for each of several lighthouses."""
    for post in posts:
        epoch = f", epoch {post.epoch}" if post.epoch else ""
        console.print(f"lighthouse {post.address}  {escape(post.state)}{epoch}", highlight=False)


def show(console: Console, job: JobStatus) -> None:
    """Print one job: a headline, a line per group, the last events."""
    console.print(f"job [bold]{escape(job.job)}[/bold]  {escape(headline(job))}")
    last = {event.group: event for event in job.events}
    rows = [row(group, last.get(group.member.group)) for group in job.groups]
    console.print(_table(rows, console.width))
    if text := links(job):
        console.print(escape(text), highlight=False)
    for event in job.events[-EVENTS_SHOWN:]:
        console.print(escape(event_line(event)), style="dim", highlight=False)


def _table(rows: list[list[str]], width: int) -> Table:
    """The groups, without the columns for which a terminal of ``width`` characters has no room."""
    widths = [max(len(cell) for cell in column) for column in zip(_COLUMNS, *rows, strict=True)]
    widths[-1] = min(widths[-1], _LEAST_EVENT)  # it may be broken into lines
    shown = list(range(len(_COLUMNS)))
    for name in _DISPENSABLE:
        if sum(widths[index] + 2 for index in shown) - 2 > width:  # two blanks between columns
            shown.remove(_COLUMNS.index(name))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index in shown:
        column = _COLUMNS[index]
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=column != "last event")
    for cells in rows:
        table.add_row(*(escape(cells[index]) for index in shown))
    return table


def headline(job: JobStatus) -> str:
    quorum = "no quorum yet"
    if job.quorum is not None:
        members = ", ".join(str(member.group) for member in job.quorum.members)
        quorum = f"quorum {job.quorum.id} of groups {members}"
    planned = f", {job.planned.id} planned ({job.planned.reason})" if job.planned is not None else ""
    end = f", drained: {', '.join(job.drained)}" if job.drained else ""
    end += ", complete" if job.complete else ""
    return f"epoch {job.epoch}, {quorum}{planned}, {job.desired} groups wanted{end}"


def links(job: JobStatus) -> str:
    """A line about the connections between groups, the slowest first; empty if nothing is known."""
    found = sorted((link.bits, group.member.group, link) for group in job.groups for link in group.links)
    told = []
    for bits, start, link in found[:LINKS_SHOWN]:
        lost = f", {link.lost:.1%} sent again" if link.lost >= 0.001 else ""
        told.append(f"{start} to {link.group} {bits / 1e6:.3g} Mbit/s, {1e3 * link.round_trip:.3g} ms{lost}")
    more = f"; and {len(found) - LINKS_SHOWN} faster" if len(found) > LINKS_SHOWN else ""
    return f"links: {'; '.join(told)}{more}" if told else ""


def row(group: GroupStatus, last: Event | None) -> list[str]:
    """The cells of one group."""
    state = group.state if group.connected else f"{group.state}, out of reach"
    working = group.quorum != NO_QUORUM
    return [
        str(group.member.group),
        str(group.member.incarnation),
        state,
        group.phase.name.lower(),
        str(group.step) if working or group.step else "-",
        "-" if math.isnan(group.loss) else f"{group.loss:.4g}",
        f"{group.step_seconds:.3f} s" if group.step_seconds else "-",
        str(group.pid or "-"),
        group.agent,
        last.text if last is not None else group.note,
    ]


def event_line(event: Event) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(event.at))}  {event.kind:<8}  {event.text}"
