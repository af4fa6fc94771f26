"""The live view: what it shows, and that it never holds anybody up."""

from __future__ import annotations

import io
import math
import threading
from pathlib import Path

import pytest
from rich.console import Console

from planaria.agent.agent import Agent, Assignment
from planaria.agent.events import EventLog
from planaria.cli.live import GroupLine, LiveView, lines_of
from planaria.core.messages import Event, JobSpec, Member, Phase, Quorum, QuorumId
from planaria.core.plan import GroupState, PlanSpec
from planaria.engines.base import Engine
from planaria.engines.launch import Launch
from planaria.engines.local import LocalEngine
from planaria.wire.page import ProgressPage

LINES = (
    GroupLine(0, 0, "computing", 41, "1.2", 3.25, 0.125, 4711),
    GroupLine(1, 2, "suspected", 40, "1.2", math.nan, 0.0, 0, "no [progress] for 12.0 s"),
)
QUORUM = Quorum(QuorumId(1, 2), (Member(0, 0), Member(1, 2)), ("a", "b"), True, "l")


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=140, force_terminal=True), out


def rendered(events: tuple[Event, ...] = (), quorum: Quorum | None = QUORUM) -> str:
    plain, out = Console(file=io.StringIO(), width=140), io.StringIO()
    view = LiveView("job-1", plain)
    content = view.render(LINES, quorum, events)
    view.close()
    Console(file=out, width=140).print(content)
    return out.getvalue()


def test_what_is_shown() -> None:
    text = rendered()
    for part in ("job-1", "step 41", "quorum 1.2: groups 0, 1", "computing", "3.2500", "0.125", "4711", "1 (life 3)"):
        assert part in text
    assert "no [progress] for 12.0 s" in text, "brackets in messages are text"
    assert "nan" not in text
    assert "none yet" in rendered(quorum=None)


def test_newest_events_come_last() -> None:
    events = tuple(Event(float(n), "kind", f"event number {n} [x]", -1) for n in range(20))
    text = rendered(events)
    assert "event number 19 [x]" in text and "event number 12" in text and "event number 11" not in text


def test_the_last_state_is_drawn_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.cli.live._CLOSE_SECONDS", 60.0)  # a loaded machine may take long to draw it
    target, out = console()
    view = LiveView("job-1", target)
    view.show(LINES, QUORUM, ())
    view.close()
    assert "computing" in out.getvalue() and not view._thread.is_alive()


def test_a_terminal_that_blocks_holds_nobody() -> None:
    release = threading.Event()

    class Paused(io.StringIO):
        def write(self, text: str) -> int:
            release.wait()
            return super().write(text)

    view = LiveView("job-1", Console(file=Paused(), force_terminal=True))
    view.show(LINES, QUORUM, ())
    view.close()
    assert view._thread.is_alive()
    release.set()
    view._thread.join()


async def test_lines_of_an_agent(tmp_path: Path) -> None:
    def engine(path: Path) -> Engine:
        return LocalEngine(Launch("job", 2, "x.py", (), tmp_path, path))

    events = EventLog(tmp_path / "events.jsonl")
    agent = Agent(Assignment(JobSpec("job", 3), PlanSpec(desired=3), tmp_path), engine, events)
    try:
        working = agent.lives.begin(Member(0, 0), [tmp_path / "a"], 0.0)
        (tmp_path / "a").mkdir()
        page = ProgressPage.create(tmp_path / "a" / "progress", 4711)
        page.committed(5, QuorumId(1, 1), 0.5, 1, 1, 0)
        page.set_phase(Phase.EXCHANGING)
        working.speaker.pid = 4711
        working.look(0.0)
        suspected = agent.lives.begin(Member(1, 3), [tmp_path / "b"], 0.0)
        suspected.suspected_since, suspected.suspicion = 1.0, "stopped"
        dead = agent.lives.begin(Member(2, 0), [tmp_path / "c"], 0.0)
        dead.state, dead.message = GroupState.DEAD, "boom"
        first, second, third = lines_of(agent)
        assert (first.state, first.step, first.quorum, first.loss, first.pid) == ("exchanging", 5, "1.1", 0.5, 4711)
        assert (second.group, second.incarnation, second.state, second.note) == (1, 3, "suspected", "stopped")
        assert (third.state, third.note, third.quorum) == ("dead", "boom", "")
    finally:
        await agent.close()
        events.close()
