"""Golden scenarios of the lighthouse: the end of a job, and what people see."""

from __future__ import annotations

from quorum_desk import working

from planaria.core.messages import (
    Finished,
    Hello,
    JobSpec,
    Phase,
    Welcome,
)
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Send


def test_when_one_has_finished_nobody_joins_any_more() -> None:
    desk = working(2)
    desk.dies(1)
    desk.tell(0, Finished(desk.member(0), 10, "d"))
    assert desk.ready(1) == []
    assert desk.lighthouse.snapshot().complete


def test_a_member_that_missed_the_farewell_gets_a_quorum_of_its_own() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "d"))
    desk.trouble(1, 1, step=10)
    assert desk.wait(0.1) == ["store 1.2 [1]", "a1: urgent 1.2 [1]"]


def test_different_ends_are_shouted_about() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "one"))
    desk.tell(1, Finished(desk.member(1), 10, "two"))
    assert "finished groups hold different states" in desk.events()[-1]


def test_the_status_shows_every_group() -> None:
    desk = working()
    desk.beat(1, 5, seconds=0.25)
    desk.lighthouse.drain(2, desk.now)
    rows = {row.member.group: row for row in desk.lighthouse.snapshot().groups}
    assert [rows[g].state for g in range(3)] == ["active", "active", "draining"]
    assert (rows[1].step, rows[1].step_seconds, rows[1].phase) == (5, 0.25, Phase.COMPUTING)


def test_a_welcome_names_the_epoch() -> None:
    effects = Lighthouse("job", 3).handle("a", Hello("a", "host", JobSpec("job", 1)), 0.0)
    assert Send("a", Welcome(3)) in effects
