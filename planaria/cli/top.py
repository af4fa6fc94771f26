"""``planaria top``: a job at a glance, again and again, over any terminal; nothing but what the lighthouse says."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.cli.operate import AddressOption, JobOption, LogDirOption, ended, event_line, find, links, summary_of
from planaria.core.roster import GroupStatus, JobStatus, condition
from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse.client import OperatorClient

# Steps a second are those of the last half minute: long enough for slow steps, short enough to see a change.
RATE_SECONDS = 30.0
# One character for a group, so that a thousand fit into a screen; not by colour alone.
_SIGNS = {
    "working": ("█", "green"),
    "forming": ("▒", "yellow"),
    "healing": ("▓", "cyan"),
    "loading": ("▓", "blue"),
    "starting": ("░", "dim"),
    "ready": ("░", "yellow"),
    "draining": ("-", "yellow"),
    "moving": ("-", "cyan"),
    "suspect": ("?", "bold yellow"),
    "out of reach": ("?", "bold yellow"),
    "dead": ("x", "bold red"),
    "refused": ("x", "bold red"),
    "drained": ("-", "dim"),
    "finished": ("█", "blue"),
}
_CALM = frozenset({"working", "finished"})


def top(
    job: JobOption = "",
    lighthouse: AddressOption = None,
    every: Annotated[float, typer.Option("--every", "-n", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    log_dir: LogDirOption = None,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Watch a job: a character for each group, the groups that need a look, speed and events. Ctrl-C ends it."""
    target = find(job, lighthouse, log_dir)
    console = Console()
    with OperatorClient(target.address) as client:
        try:
            seen = client.status(target.job)
        except UsageError:
            if (summary := summary_of(target)) is None:
                raise
            typer.echo(ended(summary))
            return
        view = View()
        view.take(seen, time.monotonic())
        if once or not sys.stdout.isatty():
            console.print(view.render(console.width, None, time.monotonic()))
            return
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(view.render(console.width, console.height, time.monotonic()), refresh=True)
                    time.sleep(every)
                    view.look(client, seen.job)
        except KeyboardInterrupt:
            pass


class View:
    """What was seen of one job. All times are time.monotonic()."""

    def __init__(self) -> None:
        self._job: JobStatus | None = None
        self._steps: deque[tuple[float, int]] = deque()  # when, how many were committed
        self._heard = 0.0
        self._trouble = ""

    def look(self, client: OperatorClient, job: str) -> None:
        """Ask again. That nobody answers is shown, and what was seen last stays."""
        try:
            self.take(client.status(job), time.monotonic())
        except PlanariaError as error:
            self._trouble = str(error)

    def take(self, job: JobStatus, now: float) -> None:
        self._job, self._heard, self._trouble = job, now, ""
        if self._steps and _step(job) < self._steps[-1][1]:
            self._steps.clear()  # it went back to a checkpoint
        self._steps.append((now, _step(job)))
        while len(self._steps) > 2 and now - self._steps[1][0] >= RATE_SECONDS:
            self._steps.popleft()

    def rate(self) -> float | None:
        """Steps a second; None if too little was seen."""
        (began, before), (at, step) = self._steps[0], self._steps[-1]
        return (step - before) / (at - began) if at > began else None

    def render(self, width: int, height: int | None, now: float) -> RenderableType:
        """``height``: lines of the terminal; None: as many as it takes."""
        assert self._job is not None
        job = self._job
        parts: list[RenderableType] = [*self._headlines(job, now), _strip(job, width), _legend(job)]
        used = len(parts) - 1 + math.ceil(max(len(job.groups), 1) / width)
        if text := links(job):
            parts.append(Text(text, style="dim", overflow="ellipsis", no_wrap=True))
            used += 1
        room = None if height is None else max(height - used, 6)
        rows = len(job.groups) if room is None else min(len(job.groups), max(room * 2 // 3 - 1, 3))
        shown = sorted(job.groups, key=_urgency)[:rows]
        parts.append(_table(sorted(shown, key=lambda g: g.member)))
        left = 12 if room is None else max(room - rows - 1, 2)
        for event in job.events[-left:]:
            parts.append(Text(event_line(event), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    def _headlines(self, job: JobStatus, now: float) -> Iterator[Text]:
        working = len(job.quorum.members) if job.quorum is not None else 0
        losses = [group.loss for group in job.groups if not math.isnan(group.loss)]
        speed = self.rate()
        words = [
            f"step {_step(job)}",
            "" if speed is None else f"{speed:.3g} steps/s",
            f"loss {sum(losses) / len(losses):.4g}" if losses else "",
            f"{working} of {job.desired} groups at work",
            f"quorum {job.quorum.id}" if job.quorum is not None else "no quorum yet",
            f"{job.planned.id} planned ({job.planned.reason})" if job.planned is not None else "",
            f"drained: {', '.join(job.drained)}" if job.drained else "",
            "complete" if job.complete else "",
        ]
        yield Text.assemble((job.job, "bold"), "  ", "  ".join(word for word in words if word))
        if self._trouble:
            silent = f"no answer for {now - self._heard:.0f} s; what follows is older. {self._trouble}"
            yield Text(silent, style="bold yellow")


def _step(job: JobStatus) -> int:
    return max((group.step for group in job.groups), default=0)


def _urgency(group: GroupStatus) -> tuple[bool, float, int]:
    """Who is not at work comes first, then who is slow."""
    return condition(group) in _CALM, -group.step_seconds, group.member.group


def _strip(job: JobStatus, width: int) -> Text:
    strip = Text(no_wrap=False, overflow="fold")
    for number, group in enumerate(sorted(job.groups, key=lambda g: g.member)):
        sign, style = _SIGNS[condition(group)]
        strip.append(sign, style=style)
        if (number + 1) % width == 0:
            strip.append("\n")
    strip.rstrip()
    return strip


def _legend(job: JobStatus) -> Text:
    counts = Counter(condition(group) for group in job.groups)
    legend = Text()
    for name, (sign, style) in _SIGNS.items():
        if counts[name]:
            legend.append(f"{sign} ", style=style).append(f"{counts[name]} {name}   ")
    return legend


def _table(groups: list[GroupStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("group", "life", "is", "step", "s/step", "loss", "node"):
        table.add_column(name, justify="left" if name in ("is", "node") else "right", no_wrap=True)
    table.add_column("note", overflow="ellipsis", no_wrap=True)
    for group in groups:
        word = condition(group)
        phase = "" if word != "working" else group.phase.name.lower()
        table.add_row(
            str(group.member.group),
            str(group.member.incarnation),
            phase or word,
            str(group.step),
            f"{group.step_seconds:.3g}" if group.step_seconds else "-",
            "-" if math.isnan(group.loss) else f"{group.loss:.4g}",
            escape(group.agent),
            escape(group.note),
            style="" if word in _CALM else _SIGNS[word][1],
        )
    return table
