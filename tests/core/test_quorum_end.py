"""Golden scenarios of the lighthouse: the end of a job, and what people see."""

from __future__ import annotations

from quorum_desk import Desk, working

from planaria.core.messages import (
    Finished,
    Hello,
    JobSpec,
    Member,
    Phase,
    Welcome,
)
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Send, named


def finishes(desk: Desk, group: int) -> list[str]:
    return desk.tell(group, Finished(desk.member(group), 10, "d"))


def told_of(desk: Desk) -> list[tuple[str, str]]:
    return [(event.kind, event.text) for event in desk.lighthouse.snapshot().events]


def test_when_one_has_finished_nobody_joins_any_more() -> None:
    desk = working(3)
    desk.dies(2)
    desk.adopts(0, 2)
    desk.adopts(1, 2)
    finishes(desk, 0)
    assert desk.ready(2) == []
    assert desk.lighthouse.snapshot().complete


def test_an_agent_that_waits_with_a_joiner_is_dismissed_when_the_job_is_complete() -> None:
    desk = working(3)
    desk.dies(2)
    desk.adopts(0, 2)
    desk.adopts(1, 2)
    assert "store 1.3 [0 1 2.1]" in desk.ready(2), "planned, and never taken"
    assert finishes(desk, 0) == ["a2: complete"], "group 1 has made the last step too, and will say so"
    assert desk.trouble(1, 2, step=10) == [] and desk.dies(0) == []
    assert finishes(desk, 1) == ["store 1.4 []"], "nobody who has finished is hurried"


def test_an_agent_that_comes_too_late_is_dismissed_as_soon_as_it_has_told_everything() -> None:
    desk = working(2)
    finishes(desk, 0)
    assert desk.connects(7) == ["a7: welcome", "a7: desired", "a7: complete"]
    assert desk.connects(7, desk.report(7))[-1] == "a7: complete", "on every stream"
    assert desk.ready(7) == [] and desk.beat(7, 0) == [], "once"


def test_an_agent_that_loses_its_last_member_of_the_farewell_is_dismissed() -> None:
    desk = working(2)
    finishes(desk, 0)
    assert desk.dies(1) == ["a1: complete", "store 1.2 []"]


def test_the_end_of_a_complete_run_is_stored_when_everybody_has_ended() -> None:
    desk = working(2)
    assert finishes(desk, 0) == []
    assert finishes(desk, 1) == ["store 1.2 []"]
    assert desk.dies(0) == [] and desk.dies(1) == [] and desk.wait(60.0) == []
    assert desk.lighthouse.current is not None, "the status shows the last one"


def test_a_member_that_missed_the_farewell_gets_a_quorum_of_its_own() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "d"))
    desk.trouble(1, 1, step=10)
    assert desk.wait(0.1) == ["store 1.2 [1]", "a1: urgent 1.2 [1]"]


def test_different_ends_are_shouted_about() -> None:
    desk = working(2)
    desk.tell(0, Finished(desk.member(0), 10, "one"))
    desk.tell(1, Finished(desk.member(1), 10, "two"))
    told = "finished groups hold different states: group 0 (incarnation 0) one, group 1 (incarnation 0) two"
    assert ("mismatch", told) in told_of(desk)


def test_different_ends_of_members_that_may_differ_break_no_promise() -> None:
    desk = Desk(2)
    for group, device in enumerate(("H100", "H200")):
        desk.ready(group, fingerprint=(("~device", device),))
    for group in range(2):
        desk.adopts(group, 1)
        desk.tell(group, Finished(desk.member(group), 10, f"of group {group}"))
    assert [kind for kind, text in told_of(desk) if "hold different states" in text] == ["drift"]


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


def test_a_sentence_names_some_groups_and_counts_the_rest() -> None:
    assert named([Member(3, 1)]) == "group 3"
    assert named([Member(3, 0), Member(0, 2)]) == "groups 0, 3"
    assert named(Member(g, 0) for g in range(1000)) == "groups 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, … and 988 more"
