"""What a person sees while faults are done: the live view on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from planaria.chaos.inject import Injected
from planaria.chaos.report import sentence
from planaria.chaos.watch import Life, Watch
from planaria.cli.live import GroupLine, LiveView
from planaria.core.messages import Event, Quorum

# A line of progress where nothing is drawn.
LINE_SECONDS = 5.0
EVENTS_KEPT = 50
# Of all events, those that tell the story of a run under faults.
_TOLD = frozenset({"exit", "heal", "lighthouse", "link", "quorum", "recovered", "stop", "suspect"})


class View:
    """Use as a context manager; ``show`` fits ``session.trouble``."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._live: LiveView | None = None
        self._started = time.monotonic()
        self._next_line = 0.0
        self._faults = 0
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = LiveView(self._title, self._console)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.close()

    def show(self, watch: Watch, injected: Sequence[Injected], events: Sequence[Event]) -> None:
        """Take in what is new, and show it."""
        for one in injected[self._faults :]:
            fault = Event(time.time(), "fault", sentence(one), one.member.group)
            self._tell(watch.step, fault, style="bold red")
        self._faults = len(injected)
        for event in events:
            if event.kind in _TOLD and not any(event.text == told.text for told in self._newest()):
                self._tell(watch.step, event)
        if self._live is not None:
            lines = [_line(life) for life in watch.newest()]
            self._live.show(lines, _quorum(watch), tuple(self._events))
        elif time.monotonic() >= self._next_line and watch.step:
            self._next_line = time.monotonic() + LINE_SECONDS
            self._print(watch.step, Text(f"loss {_loss(watch):.4f}"))

    def _newest(self) -> list[Event]:
        """The last few events: with several agents, each of them writes down what the lighthouse says."""
        return list(self._events)[-8:]

    def _tell(self, step: int, event: Event, style: str = "") -> None:
        self._events.append(event)
        if self._live is None:
            self._print(step, Text(event.text, style=style))

    def _print(self, step: int, text: Text) -> None:
        elapsed = time.monotonic() - self._started
        line = Text.assemble((f"{elapsed:6.1f} s  step {step:>5}  ", "dim"), text)
        self._console.print(line, soft_wrap=True)


class Waiting:
    """One line that says how long something takes; nothing where nothing is drawn."""

    def __init__(self, console: Console, what: str) -> None:
        self._what = what
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._started = time.monotonic()

    def __enter__(self) -> Waiting:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self) -> None:
        if self._live is not None:
            line = f"{self._what}, {time.monotonic() - self._started:.0f} s"
            self._live.update(Text(line, style="dim"), refresh=True)


def _line(life: Life) -> GroupLine:
    view = life.view
    state = "dead" if not life.alive else "stopped" if life.stopped else view.phase.name.lower()
    quorum = str(view.quorum) if view.quorum.number else ""
    group, incarnation = life.member.group, life.member.incarnation
    return GroupLine(group, incarnation, state, view.step, quorum, view.loss, view.step_seconds, view.pid)


def _quorum(watch: Watch) -> Quorum | None:
    """The newest quorum, as far as the pages tell it: its members are those who work under it."""
    id = watch.quorum
    members = tuple(life.member for life in watch.newest() if life.alive and life.view.quorum == id)
    return Quorum(id, members, (), False, "") if id.number else None


def _loss(watch: Watch) -> float:
    """Of the newest commit of anybody."""
    views = [life.view for life in watch.lives.values() if life.view.committed_at_ns]
    return max(views, key=lambda view: view.committed_at_ns).loss if views else math.nan
