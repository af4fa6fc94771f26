"""Who is there, and what silence means."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planaria.core.attendance import STALL_BEATS, Attendance
from planaria.core.messages import NO_QUORUM, Member, Phase, Pulse, QuorumId, Ready
from planaria.core.roster import State


def member(group: int, incarnation: int = 0) -> Member:
    return Member(group, incarnation)


def ready(who: Member) -> Ready:
    return Ready(who, "host:1", (), "start", 4, 10)


def attendance(*groups: int) -> Attendance:
    """Each group with an agent of its own, at work."""
    seen = Attendance()
    seen.look(0.0)
    for group in groups:
        seen.heard(f"a{group}").synced = True
        view = seen.view(f"a{group}", member(group))
        assert view is not None
        view.ready, view.state = ready(member(group)), State.ACTIVE
    return seen


def pass_time(seen: Attendance, until: float, *beating: int) -> list[str]:
    """Looks twice a second, while the agents of the groups ``beating`` are heard."""
    silent: list[str] = []
    while seen.now < until:
        silent += [name for name, _ in seen.look(seen.now + 0.5)]
        for group in beating:
            seen.heard(f"a{group}")
        for name in silent:
            seen.lost(name)
    return silent


def test_a_new_incarnation_replaces_the_old_and_the_old_is_not_heard_any_more() -> None:
    seen = attendance(0)
    new = seen.view("a0", member(0, 1))
    assert new is not None and new.state is State.STARTING
    assert seen.view("a0", member(0, 0)) is None
    assert seen.of(member(0, 0)) is None and seen.of(member(0, 1)) is new
    assert seen.certain(member(0, 0)), "it must be over"


def test_an_agent_that_falls_silent_is_named_once() -> None:
    seen = attendance(0, 1)
    assert pass_time(seen, 40.0, 0) == ["a1"]
    assert not seen.connected(seen.groups[1]) and seen.connected(seen.groups[0])


def test_one_that_is_heard_again_is_back() -> None:
    seen = attendance(0, 1)
    pass_time(seen, 40.0, 0)
    seen.heard("a1")
    assert seen.connected(seen.groups[1])


def test_until_an_agent_has_told_everything_its_groups_are_not_told_anything() -> None:
    seen = attendance(0)
    seen.agents["a0"].synced = False
    assert seen.tellable() == []
    seen.agents["a0"].synced = True
    assert [g.member for g in seen.tellable()] == [member(0)]


@pytest.mark.parametrize("state", [State.DEAD, State.REFUSED, State.SUSPECT])
def test_who_must_be_replaced(state: State) -> None:
    seen = attendance(0)
    assert not seen.gone(member(0), trouble=False)
    seen.groups[0].state = state
    assert seen.gone(member(0), trouble=False)
    assert seen.certain(member(0))


def test_a_finished_member_is_neither_gone_nor_waited_for() -> None:
    seen = attendance(0)
    seen.groups[0].state = State.FINISHED
    assert not seen.gone(member(0), trouble=True)
    assert seen.certain(member(0)) and seen.over(member(0))


def test_a_suspect_whose_agent_is_silent_is_not_certain() -> None:
    seen = attendance(0)
    seen.groups[0].state = State.SUSPECT
    seen.lost("a0")
    assert not seen.certain(member(0)), "nobody keeps it out any more"


def test_silence_condemns_nobody_while_there_is_progress_anywhere() -> None:
    seen = attendance(0, 1)
    seen.lost("a1")
    for step in range(20):
        pass_time(seen, seen.now + 1.0, 0)
        seen.pulse("a0", Pulse(member(0), Phase.COMPUTING, step, NO_QUORUM, 0.0, 0.1))
        assert not seen.gone(member(1), trouble=False)
    pass_time(seen, seen.now + STALL_BEATS * 1.1 + 1.0, 0)
    assert seen.gone(member(1), trouble=False)


def test_slow_steps_need_a_longer_silence() -> None:
    seen = attendance(0, 1)
    seen.pulse("a0", Pulse(member(0), Phase.COMPUTING, 1, NO_QUORUM, 0.0, 20.0))
    seen.lost("a1")
    pass_time(seen, seen.now + 30.0, 0)
    assert not seen.gone(member(1), trouble=False)
    assert seen.gone(member(1), trouble=True), "but if the others say that it is broken, it is"


def test_an_hour_of_sleep_is_no_silence() -> None:
    seen = attendance(0, 1)
    assert seen.look(3600.0) == []
    assert seen.at < 2.0


def test_who_an_agent_does_not_mention_after_its_hello_has_ended() -> None:
    seen = attendance(0)
    seen.view("a0", member(5))
    seen.groups[5].ready = ready(member(5))
    seen.agents["a0"].told.clear()
    seen.view("a0", member(0))
    assert [g.member for g in seen.untold("a0")] == [member(5)]


def test_veterans_are_those_who_held_a_state_and_live() -> None:
    seen = attendance(0, 1, 2)
    seen.groups[0].adopted = seen.groups[1].adopted = QuorumId(1, 1)
    seen.groups[1].state = State.DEAD
    assert [g.member for g in seen.veterans()] == [member(0)]
    seen.groups[0].fenced = QuorumId(1, 2)
    assert not seen.groups[0].settled and len(seen.veterans()) == 1


def test_nobody_is_looked_at_before_a_silence_can_be_too_long() -> None:
    assert Attendance().look_at == math.inf
    seen = attendance(0, 1)
    pass_time(seen, 8.0, 0, 1)  # both beat: now three beats missed are too long
    due = seen.look_at
    assert seen.at < due <= seen.at + 10.0
    pass_time(seen, 10.5, 0)
    assert seen.agents["a1"].connected, "three seconds are not over"
    assert pass_time(seen, 11.0, 0) == ["a1"]


def test_news_is_who_comes_is_lost_comes_back_or_has_another_agent() -> None:
    def news(seen: Attendance) -> bool:
        told, seen.news = seen.news, False
        return told

    seen = attendance(0)
    assert news(seen)
    pulse = Pulse(member(0), Phase.COMPUTING, 1, NO_QUORUM, 0.0, 0.1)
    seen.heard("a0")
    seen.pulse("a0", pulse)
    assert not news(seen), "a heartbeat of somebody known"
    seen.pulse("a0", replace(pulse, member=member(0, 1)))
    assert news(seen), "a new incarnation"
    seen.lost("a0")
    assert news(seen)
    seen.heard("a1")
    assert news(seen), "a new agent"
    seen.pulse("a1", replace(pulse, member=member(0, 1)))
    assert news(seen), "another agent has the group now"
    seen.heard("a0")
    assert news(seen), "it is back"


def test_a_stall_follows_the_slowest_step_as_it_is_now() -> None:
    seen = attendance(0, 1)
    seen.lost("a1")
    stalls = []
    for seconds in (1.0, 20.0, 1.0):
        seen.pulse("a0", Pulse(member(0), Phase.COMPUTING, 0, NO_QUORUM, 0.0, seconds))
        stalls.append(seen.next_stall())
    assert stalls[0] == stalls[2] and stalls[1] == pytest.approx(stalls[0] + STALL_BEATS * 19.0)
