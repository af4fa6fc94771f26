"""A job's past in bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.messages import NO_QUORUM, Event, Member, Phase, Policy, Pulse
from planaria.lighthouse import history, story
from planaria.lighthouse.history import Curve, History


def event(kind: str, text: str = "", group: int = -1, at: float = 0.0, **facts: str) -> Event:
    return Event(at, kind, text, group, tuple(facts.items()))


def pulse(group: int, step: int, loss: float) -> Pulse:
    return Pulse(Member(group, 0), Phase.COMPUTING, step, NO_QUORUM, loss, 0.1)


def test_a_curve_keeps_mean_and_extremes_of_each_step() -> None:
    curve = Curve(1.0)
    for group in range(4):
        curve.add(7, float(group))
    curve.add(8, 5.0)
    assert curve.since(curve.version, 0) == (0, [[7, 1.5, 0.0, 3.0], [8, 5.0, 5.0, 5.0]])


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(-1e6, 1e6)), max_size=300), st.integers(4, 50))
def test_a_curve_is_bounded_and_ascending_whatever_comes(values: list[tuple[int, float]], limit: int) -> None:
    curve = Curve(1.0, limit)
    for x, value in values:
        curve.add(x, value)
        assert len(curve.rows) <= limit
    assert all(one.x < other.x for one, other in pairwise(curve.rows))
    assert all(
        row.least <= row.total / row.count + 1e-6 and row.total / row.count <= row.most + 1e-6 for row in curve.rows
    )


def test_a_curve_of_weeks_becomes_coarser_and_loses_no_value() -> None:
    curve, steps = Curve(1.0, 64), 100_000
    for step in range(steps):
        curve.add(step, float(step))
    assert len(curve.rows) <= 64 and curve.rows[0].x == 0
    assert sum(row.count for row in curve.rows) == steps
    assert curve.rows[-1].most == steps - 1


def test_what_is_no_number_is_left_out() -> None:
    curve = Curve(1.0)
    for value in (math.nan, math.inf, -math.inf, 2.0, 1e308, 1e308, -1e308):
        curve.add(1, value)
    assert [row.total for row in curve.rows] == [2.0], "the sum of two of 1e308 is infinite, and no JSON"


def test_a_step_of_a_thousand_groups_looks_for_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    curve, asked, key = Curve(1.0), 0, Curve._key

    def counting(self: Curve, x: float) -> int:
        nonlocal asked
        asked += 1
        return key(self, x)

    for step in range(1000):
        curve.add(step, 1.0)
    monkeypatch.setattr(Curve, "_key", counting)
    for _ in range(1000):
        curve.add(1000, 1.0)
    assert curve.rows[-1].count == 1000 and asked <= 4 * 1000


def test_a_late_value_finds_its_place_and_a_very_late_one_none() -> None:
    curve = Curve(1.0)
    for step in (1, 2, 4, 5):
        curve.add(step, 1.0)
    curve.add(3, 9.0)
    assert [row.x for row in curve.rows] == [1, 2, 3, 4, 5]
    for step in range(7, 1000):
        curve.add(step, 1.0)
    before = len(curve.rows)
    curve.add(6, 1.0)
    assert len(curve.rows) == before, "what readers were told for good stays as it is"
    curve.add(5, 7.0)
    assert curve.rows[4].count == 2, "but a mean becomes better, for those who begin to read"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_a_reader_that_replaces_what_it_is_told_to_sees_the_curve(jumps: list[int], every: int) -> None:
    curve, step = Curve(1.0, 24), 0
    seen: list[list[float]] = []
    version = -1
    for number, jump in enumerate(jumps):
        step += 5 * jump
        curve.add(max(step - jump, 0), float(step))
        if number % 17 == 16:
            curve.cut(step / 2)
        if number % every == 0:
            start, rows = curve.since(version, len(seen))
            seen[start:] = rows
            version = curve.version
            assert seen == curve.since(-1, 0)[1]


def test_the_timeline_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    past = History(0.0, 0.0)
    for number in range(3 * history.MARKS):
        past.event(event("quorum", f"quorum {number}"), number)
        past.committed(number, float(number), float(number))
    assert past.marked == 3 * history.MARKS
    assert [mark.number for mark in past.marks_since(past.marked - 2)] == [past.marked - 2, past.marked - 1]
    assert len(past.marks_since(0)) == history.MARKS and past.marks_since(past.marked) == []
    assert past.commits_since(past.committed_count - 1) == [(past.committed_count - 1.0, past.committed_count - 1)]
    assert len(past.commits) <= history.COMMITS and len(past.progress.rows) <= history.ROWS


def lanes(past: History) -> list[str]:
    return [mark.lane for mark in past.marks_since(0)]


def test_what_there_is_much_of_pushes_no_loss_out() -> None:
    past = History(0.0, 0.0)
    past.event(event("quorum", "quorum 1.2", lost="1", at=1.0), 4)
    for number in range(2 * history.MARKS):
        past.event(event("saved", "a checkpoint", at=10.0 * number), number)
        past.event(event("trouble", "a rank complains", 0, at=10.0 * number), number)
    assert lanes(past).count("interrupt") == 1 and lanes(past).count("checkpoint") == history.MARKS
    told = past.marks_since(past.marked - 3)
    assert [mark.number for mark in told] == [past.marked - 3, past.marked - 2, past.marked - 1], "in their order"


def test_warnings_are_no_losses_and_a_flood_of_them_is_drawn_once() -> None:
    past = History(0.0, 0.0)
    for kind in ("late", "trouble", "still", "corrupt", "diverged"):
        past.event(event(kind, kind, 0, at=5.0), 3)
    assert lanes(past) == ["trouble"]
    past.event(event("trouble", "again", 0, at=6.5), 3)
    past.event(event("trouble", "the clock was set back", 0, at=1.0), 3)
    assert lanes(past) == 3 * ["trouble"] and past.losses == 0


def test_a_clock_that_is_set_back_hides_no_progress() -> None:
    past = History(1000.0, 7.0)
    past.committed(1, 1010.0, 17.0)
    for step in range(2, 6):
        past.committed(step, 400.0 + step, 17.0 + step)
    assert [row.most for row in past.progress.rows] == [1, 2, 3, 4, 5]
    assert past.progress.rows[0].x == 10.0


def test_a_loss_is_one_once_a_quorum_says_so() -> None:
    past = History(0.0, 0.0)
    past.event(event("lost", "group 1 (incarnation 0) is gone: killed by SIGKILL", 1, at=10.0), 4)
    assert past.losses == 0 and not past.marks_since(0)
    past.event(event("quorum", "quorum 1.2: group 0 (group 1 lost)", at=10.1, lost="1", joined=""), 4)
    assert past.losses == 1
    assert [(mark.lane, mark.at, mark.group) for mark in past.marks_since(0)] == [
        ("interrupt", 10.0, 1),
        ("quorum", 10.1, -1),
    ]
    past.adopted(Member(1, 1), 12.5, 9)
    assert past.marks_since(0)[-1].text == "group 1 was away for 2.50 s, healed, and works again"
    past.adopted(Member(1, 1), 13.0, 9)
    assert past.marked == 3, "it comes back once"


def test_a_death_that_is_long_past_is_none() -> None:
    past = History(0.0, 0.0)  # of a lighthouse that has just begun, and is told what its agents know
    past.event(event("lost", "group 1 (incarnation 0) is gone", 1), 40)
    past.adopted(Member(1, 1), 0.1, 40)
    past.event(event("quorum", "quorum 2.1", lost="0"), 40)
    assert past.losses == 1 and [mark.group for mark in past.marks_since(0) if mark.lane == "interrupt"] == [0]


def test_a_joiner_that_died_was_not_at_work() -> None:
    past = History(0.0, 0.0)
    past.event(event("quorum", "quorum 1.1", joined="0,1"), 0)
    past.event(event("lost", "group 1 is gone", 1, at=1.0), 4)
    past.event(event("quorum", "quorum 1.2", lost="1", at=1.1), 4)
    past.event(event("lost", "group 1 (incarnation 1) is gone", 1, at=5.0), 6)  # and never comes back
    past.event(event("lost", "group 0 is gone", 0, at=90.0), 9)
    past.event(event("resume", "all groups were lost", at=90.0), 4)
    assert past.losses == 2
    assert [mark.at for mark in past.marks_since(0) if mark.lane == "interrupt"] == [1.0, 90.0]
    past.event(event("quorum", "quorum 1.4", joined="0", at=95.0), 4)
    past.event(event("lost", "group 0 is gone", 0, at=100.0), 9)
    past.event(event("stop", "that was all", at=100.0), 9)
    assert past.losses == 3


def test_a_life_that_died_on_its_way_is_no_sign_of_a_later_loss() -> None:
    past = History(0.0, 0.0)
    past.event(event("quorum", "quorum 1.1", joined="0,1"), 0)
    past.event(event("quorum", "quorum 1.2", lost="1", at=1.1), 4)
    past.event(event("lost", "group 1 (incarnation 1) is gone", 1, at=5.0), 6)
    past.event(event("ready", "group 1 (incarnation 2) is ready", 1, at=7.0), 7)
    past.event(event("lost", "group 1 (incarnation 2) is gone", 1, at=40.0), 9)
    past.event(event("quorum", "quorum 1.4", lost="1", at=40.1), 9)
    assert [mark.at for mark in past.marks_since(0) if mark.lane == "interrupt"] == [1.1, 40.0]


def test_whoever_joined_by_a_plan_is_lost_with_all_others() -> None:
    past = History(0.0, 0.0)
    past.event(event("quorum", "quorum 1.1", joined="0,2"), 0)
    past.event(event("plan", "quorum 1.2", joined="1", lost="2"), 0)
    past.adopted(Member(1, 0), 3.0, 4)
    for group in range(3):
        past.event(event("lost", f"group {group} is gone", group, at=10.0), 9)
    past.event(event("resume", "all groups were lost", at=10.0), 4)
    assert past.losses == 2


def test_a_job_that_goes_back_forgets_the_losses_of_steps_that_are_made_again() -> None:
    past = History(0.0, 0.0)
    for step in range(1, 10):
        past.heard([pulse(0, step, 10.0 - step)])
    past.event(event("quorum", "quorum 1.1", joined="0"), 0)
    past.event(event("lost", "group 0 is gone", 0), 9)
    past.event(event("resume", "all groups were lost"), 4)
    assert [row.x for row in past.loss.rows] == [1, 2, 3, 4]
    assert lanes(past) == ["quorum", "interrupt", "resume"] and past.losses == 1


def test_where_the_time_of_the_groups_went() -> None:
    past = History(0.0, 0.0)
    assert past.due(100.0)
    past.account({"working": 3, "missing": 1}, 100.0)  # nothing has passed yet
    assert not past.due(100.5) and past.due(101.0)
    past.account({"working": 3, "dead": 1}, 102.0)
    assert dict(past.group_seconds) == {"working": 6.0, "missing": 2.0}, "a pause is of what was before it"
    past.recovered(0.5, 3, 102.5, 5.0, 8, "text")
    assert past.group_seconds["working"] == 6.0 and past.group_seconds["interrupted"] == 1.5
    past.account({"working": 4}, 103.0)
    assert dict(past.group_seconds) == {"working": 7.5, "missing": 2.0, "interrupted": 1.5, "dead": 1.0}
    past.recovered(100.0, 3, 103.0, 5.0, 8, "longer than anybody worked")
    assert past.group_seconds["working"] == 0.0 and sum(past.group_seconds.values()) == 12.0


def test_a_long_recovery_costs_its_time_once() -> None:
    past = History(0.0, 0.0)
    for second in range(100):
        past.account({"working": 10}, float(second))
    for second in range(100, 130):
        past.account({"forming": 10}, float(second))
    past.recovered(30.0, 10, 130.0, 130.0, 8, "text")
    past.account({"working": 10}, 130.0)
    assert dict(past.group_seconds) == {"working": 1000.0, "forming": 300.0, "interrupted": 0.0}


def test_of_a_recovery_counts_what_was_not_seen() -> None:
    past = History(0.0, 0.0)
    past.account({"working": 10}, 0.0)
    past.account({"forming": 10}, 10.0)
    past.account({"working": 10}, 11.0)
    past.recovered(1.75, 10, 11.5, 11.5, 8, "from 9.75 to 11.5, of which one second was seen")
    past.account({"working": 10}, 12.0)
    assert dict(past.group_seconds) == {"working": 102.5, "forming": 10.0, "interrupted": 7.5}
    past.recovered(0.25, 10, 12.0, 12.0, 8, "another")
    assert past.group_seconds["interrupted"] == 10.0


def lost(group: int) -> list[Event]:
    return [
        event("lost", f"group {group} (incarnation 0) is gone: killed by SIGKILL", group, cause="killed by SIGKILL"),
    ]


def test_a_recovery_in_a_sentence() -> None:
    one = [*lost(3), event("quorum", "quorum 1.2", lost="3")]
    assert story.recovery(one, 0.214, 2, Policy.REDISTRIBUTE) == (
        "group 3 lost (killed by SIGKILL), its shards went to the others, all 2 at work again after 0.21 s"
    )
    both = [*lost(1), *lost(2), event("quorum", "quorum 1.2", lost="1,2")]
    assert story.recovery(both, 0.034, 1, Policy.SHRINK) == (
        "group 1 lost (killed by SIGKILL); group 2 lost (killed by SIGKILL), their shards are left out, "
        "at work again after 34 ms"
    )
    rack = [one for group in range(40) for one in lost(group)]
    text = story.recovery([*rack, event("quorum", "q", lost=",".join(map(str, range(40))))], 1.0, 9, None)
    assert "and 37 more groups, all 9 at work again after 1.00 s" in text
    again = [*one, event("quorum", "quorum 1.3", lost="")]
    for nobody in ([], again):
        assert story.recovery(nobody, 1.0, 3, None) == ("the quorum was formed again, all 3 at work again after 1.00 s")


def test_a_recovery_is_told_of_the_group_that_was_lost() -> None:
    crashed = event("lost", "group 2 (incarnation 1) is gone", 2, cause="exit code 1 (joiner)", incarnation="1")
    known = [
        *lost(2),
        event("quorum", "quorum 1.2", lost="2"),
        event("start", "group 2 (incarnation 1) runs", 2, incarnation="1"),
        event("ready", "group 2 (incarnation 1) is ready", 2),
        event("plan", "quorum 1.3", joined="2"),
        crashed,
        *lost(1),
        event("quorum", "quorum 1.4", lost="1"),
    ]
    text = story.recovery(known, 0.3, 2, None)
    assert text == "group 1 lost (killed by SIGKILL), all 2 at work again after 0.30 s"
