"""The operators' commands: ``planaria status``, ``kill``, ``drain``, ``evict`` and ``scale``."""

from __future__ import annotations

import json
import math
import os
import signal as signals
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planaria.core.messages import NO_QUORUM, Event
from planaria.core.roster import GroupStatus, JobStatus
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.lighthouse.http import plain

ENVIRONMENT = "PLANARIA_LIGHTHOUSE"
EVENTS_SHOWN = 8

JobOption = Annotated[str, typer.Option("--job", help="Which job, if the lighthouse has several.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--lighthouse", help=f"host:port; else ${ENVIRONMENT}, else that of the newest run below here."),
]
LogDirOption = Annotated[
    Path | None, typer.Option("--log-dir", help="The --log-dir of the run, to find its lighthouse and job.")
]
GroupArgument = Annotated[int, typer.Argument(metavar="GROUP", min=0, help="Number of the replica group.")]


@dataclass(frozen=True, slots=True)
class Target:
    address: str
    job: str  # empty: the only one


def status(
    job: JobOption = "",
    lighthouse: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    log_dir: LogDirOption = None,
) -> None:
    """Show what a job's groups are doing."""
    with _connect(job, lighthouse, log_dir) as (client, name):
        seen = client.status(name)
    if as_json:
        typer.echo(json.dumps(plain(seen), allow_nan=False))
    else:
        show(Console(), seen)


def kill(
    group: GroupArgument,
    signal: Annotated[str, typer.Option(help="Name or number, for instance KILL, TERM, STOP, CONT.")] = "KILL",
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Send a signal to the processes of a group, to see how the job takes it."""
    number = signal_number(signal)
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.kill(group, number, name))


def drain(
    group: GroupArgument,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Have a group leave in order: the others go on without a pause."""
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.drain(group, name))


def evict(
    group: GroupArgument,
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Declare a group dead that nobody can reach, so that the others need not wait for it."""
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.evict(group, name))


def scale(
    groups: Annotated[int, typer.Argument(metavar="N", min=1, help="How many groups the job is to have.")],
    job: JobOption = "",
    lighthouse: AddressOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Change the number of groups while the job runs."""
    with _connect(job, lighthouse, log_dir) as (client, name):
        typer.echo(client.scale(groups, name))


# --- finding the lighthouse ---------------------------------------------------------------------------------


@contextmanager
def _connect(job: str, lighthouse: str | None, log_dir: Path | None) -> Iterator[tuple[OperatorClient, str]]:
    target = find(job, lighthouse, log_dir)
    with OperatorClient(target.address) as client:
        yield client, target.job


def find(job: str, lighthouse: str | None, log_dir: Path | None) -> Target:
    """Where the lighthouse is: as said, else of the run in ``log_dir``, else from the environment, else that
    of the newest run below ./planaria_logs. UsageError if nobody says."""
    if lighthouse:
        return Target(lighthouse, job)
    if log_dir is not None:
        return _of_run(log_dir / "run.json", job)
    if os.environ.get(ENVIRONMENT):
        return Target(os.environ[ENVIRONMENT], job)
    runs = sorted(Path("planaria_logs").glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise UsageError(
            f"no lighthouse is known: give --lighthouse host:port or --log-dir, set {ENVIRONMENT}, "
            "or call this where a run has made ./planaria_logs"
        )
    return _of_run(runs[-1], job)


def _of_run(path: Path, job: str) -> Target:
    try:
        run = json.loads(path.read_text())
        return Target(str(run["lighthouse"]), job or str(run["job"]))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); is that the --log-dir of a run?") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} does not describe a run ({type(error).__name__}: {error})") from None


def signal_number(text: str) -> int:
    """9 for "9", "KILL" or "SIGKILL"; UsageError for what is no signal."""
    if text.isdigit():
        return int(text)
    try:
        return int(signals.Signals["SIG" + text.upper().removeprefix("SIG")])
    except KeyError:
        raise UsageError(f"{text!r} is no signal; give a name such as KILL, TERM or STOP, or a number") from None


# --- the table ----------------------------------------------------------------------------------------------


def show(console: Console, job: JobStatus) -> None:
    """Print one job: a headline, a line per group, the last events."""
    console.print(f"job [bold]{escape(job.job)}[/bold]  {escape(headline(job))}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in (
        "group",
        "incarnation",
        "state",
        "phase",
        "step",
        "loss",
        "step time",
        "pid",
        "agent",
        "last event",
    ):
        right = column in ("group", "incarnation", "step", "loss", "step time", "pid")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "last event")
    last = {event.group: event for event in job.events}
    for group in job.groups:
        table.add_row(*(escape(cell) for cell in row(group, last.get(group.member.group))))
    console.print(table)
    for event in job.events[-EVENTS_SHOWN:]:
        console.print(escape(event_line(event)), style="dim", highlight=False)


def headline(job: JobStatus) -> str:
    quorum = "no quorum yet"
    if job.quorum is not None:
        members = ", ".join(str(member.group) for member in job.quorum.members)
        quorum = f"quorum {job.quorum.id} of groups {members}"
    planned = f", {job.planned.id} planned ({job.planned.reason})" if job.planned is not None else ""
    end = ", complete" if job.complete else ""
    return f"epoch {job.epoch}, {quorum}{planned}, {job.desired} groups wanted{end}"


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
