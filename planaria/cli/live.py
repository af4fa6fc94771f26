"""A view of a running job on the terminal: groups, quorum, step, loss, the newest events."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from planaria.core.messages import Event, Quorum

if TYPE_CHECKING:
    from planaria.agent.agent import Agent

_EVENTS_SHOWN = 8
_REFRESH_SECONDS = 0.25
# A terminal that is paused blocks the drawing thread in a write; the program must be able to end all the same.
_CLOSE_SECONDS = 1.0
_STYLES = {
    "computing": "green",
    "exchanging": "green",
    "applying": "green",
    "forming": "yellow",
    "healing": "cyan",
    "loading": "cyan",
    "starting": "dim",
    "parked": "dim",
    "finished": "blue",
    "suspected": "bold yellow",
    "dead": "bold red",
    "refused": "bold red",
    "drained": "dim",
}


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One group as it is shown. ``state``: a phase in lower case, or suspected, dead, refused, drained, finished."""

    group: int
    incarnation: int
    state: str
    step: int
    quorum: str
    loss: float
    step_seconds: float
    pid: int
    note: str = ""


def lines_of(agent: Agent) -> tuple[GroupLine, ...]:
    """What an agent's groups are doing."""
    lines = []
    for group, life in sorted(agent.lives.groups.items()):
        state = life.phase.name.lower() if life.alive else life.state.value
        if life.alive and life.suspected_since is not None:
            state = "suspected"
        pulse = life.pulse()
        quorum = str(pulse.quorum) if pulse.quorum.number else ""
        note = life.suspicion or life.message
        member = life.member
        lines.append(
            GroupLine(
                group, member.incarnation, state, pulse.step, quorum, pulse.loss, pulse.step_seconds, life.pid, note
            )
        )
    return tuple(lines)


class LiveView:
    """Draws on a thread of its own: a terminal may block, and whoever calls ``show`` never waits for it.

    Owner: whoever calls ``close``, which draws the last state once more.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._title = title
        self._console = console or Console(stderr=True)
        self._content: RenderableType = ""
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planaria-view", daemon=True)
        self._thread.start()

    def show(self, groups: Sequence[GroupLine], quorum: Quorum | None, events: Sequence[Event]) -> None:
        """Draw this from now on."""
        self._content = self.render(groups, quorum, events)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_SECONDS)

    def render(self, groups: Sequence[GroupLine], quorum: Quorum | None, events: Sequence[Event]) -> RenderableType:
        """The view as something that rich can print."""
        step = max((line.step for line in groups), default=0)
        members = (
            "none yet"
            if quorum is None
            else f"{quorum.id}: groups " + ", ".join(str(member.group) for member in quorum.members)
        )
        seconds = time.monotonic() - self._began
        table = Table(title=f"{self._title}   step {step}   quorum {members}   {seconds:.0f} s", title_justify="left")
        for name in ("group", "state", "step", "quorum", "loss", "s/step", "pid", "note"):
            table.add_column(name, justify="right" if name in ("step", "loss", "s/step", "pid") else "left")
        for line in groups:
            table.add_row(*_cells(line), style=_STYLES.get(line.state, ""))
        newest = [
            f"{time.strftime('%H:%M:%S', time.localtime(event.at))} {event.kind:<9} {event.text}"
            for event in list(events)[-_EVENTS_SHOWN:]
        ]
        return Group(table, *(escape(text) for text in newest))

    def _run(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            while not self._stop.wait(_REFRESH_SECONDS):
                live.update(self._content, refresh=True)
            live.update(self._content, refresh=True)


def _cells(line: GroupLine) -> tuple[str, ...]:
    return (
        f"{line.group}" + (f" (life {line.incarnation + 1})" if line.incarnation else ""),
        line.state,
        str(line.step),
        line.quorum,
        "" if math.isnan(line.loss) else f"{line.loss:.4f}",
        f"{line.step_seconds:.3f}" if line.step_seconds else "",
        str(line.pid or ""),
        escape(line.note[:60]),
    )
