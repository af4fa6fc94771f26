"""Everybody waits for everybody: seen by who sees all of them, a heartbeat for each second."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.liveness import GENEROUS
from planaria.core.messages import NO_QUORUM, Finished, Heartbeat, Phase, Pulse, QuorumId
from planaria.core.standstill import EXCHANGE, HEALING, LOOK_AFTER, Standstill
from tests.core.quorum_desk import Desk, working

X, W, F, H = Phase.EXCHANGING, Phase.COMPUTING, Phase.FORMING, Phase.HEALING
SAME = ["store 1.2 [0 1 2]", "a0: urgent 1.2 [0 1 2]", "a1: urgent 1.2 [0 1 2]", "a2: urgent 1.2 [0 1 2]"]


def shows(desk: Desk, seconds: int, *seen: tuple[Phase, int], quorum: int = 1, takes: float = 0.0) -> list[str]:
    """What the lighthouse does while that is what heartbeats say of each group: its phase, and its step."""
    found: list[str] = []
    for _ in range(seconds):
        desk.now += 1.0
        for group, (phase, step) in enumerate(seen):
            id = QuorumId(1, quorum) if phase is not H else NO_QUORUM  # who heals has not taken it up yet
            found += desk.tell(group, Heartbeat((Pulse(desk.member(group), phase, step, id, 0.0, takes),)))
        found += desk.lines(desk.lighthouse.tick(desk.now))
    return found


def at_step(step: int = 3) -> Desk:
    desk = working()
    for each in range(step + 1):
        assert shows(desk, 1, *[(W, each)] * 3) == []
    return desk


def patience() -> int:
    return int(LOOK_AFTER + EXCHANGE.floor)


def test_an_exchange_in_which_all_wait_is_broken_off_and_done_again_by_the_same_members() -> None:
    desk = at_step()
    assert shows(desk, patience() - 2, *[(X, 3)] * 3) == []
    assert shows(desk, 4, *[(X, 3)] * 3) == SAME
    (told,) = [text for text in desk.events() if "broken off" in text]
    assert told.startswith("quorum 1.1: all members have waited in the exchange of step 3 for 2")
    assert any("quorum 1.2: groups 0, 1, 2 (it stood still)" in text for text in desk.events())


@pytest.mark.parametrize(
    "other",
    [(W, 3), (Phase.APPLYING, 3), (Phase.LOADING, 3), (Phase.PARKED, 3)],
    ids=["computes", "applies", "saves", "waits outside"],
)
def test_nothing_stands_still_while_somebody_has_something_else_to_do(other: tuple[Phase, int]) -> None:
    desk = at_step()
    assert shows(desk, 10 * patience(), (X, 3), other, (X, 3)) == []


def test_one_that_does_not_come_out_of_the_exchange_that_the_others_have_ended() -> None:
    desk = at_step()
    assert shows(desk, patience() - 2, (X, 3), (X, 2), (X, 3)) == []
    assert shows(desk, 4, (X, 3), (X, 2), (X, 3)) == SAME


def test_who_is_out_of_reach_may_be_at_work() -> None:
    desk = at_step()
    shows(desk, 1, *[(X, 3)] * 3, takes=60.0)
    desk.lighthouse.agent_lost("a1", desk.now)
    for second in range(170):  # until its silence lasts too long: that is another rule's
        desk.now += 1.0
        for group in (0, 2):
            pulse = Pulse(desk.member(group), X, 3, QuorumId(1, 1), 0.0, 5.0 if second > 30 else 60.0)
            assert desk.tell(group, Heartbeat((pulse,))) == []
    assert not any("broken off" in text for text in desk.events())


def test_an_exchange_that_computation_hides_is_given_time_when_nothing_hides_it() -> None:
    """As after a loss: low communication over slow links, rounds of ten minutes, one and a half for what travels."""
    desk = working()
    for step in range(4):
        assert shows(desk, 600, *[(W, step)] * 3, takes=600.0) == []
    assert shows(desk, 2900, *[(X, 3)] * 3, takes=600.0) == []
    assert shows(desk, 150, *[(X, 3)] * 3, takes=600.0) == SAME


def test_one_that_does_not_hear_of_a_planned_change_that_the_others_have_taken() -> None:
    desk = at_step()
    desk.lighthouse.drain(2, desk.now)
    desk.adopts(0, 2, 4)
    seen = [line for _ in range(int(GENEROUS)) for line in left_behind(desk)]
    assert seen == []
    again = [line for _ in range(20) for line in left_behind(desk)]
    assert again[0] == "store 1.3 [0 1]"


def left_behind(desk: Desk) -> list[str]:
    """A second: group 0 waits under the quorum that was planned, and group 1 under the old one."""
    desk.now += 1.0
    pulses = [(0, F, 4, QuorumId(1, 2)), (1, X, 3, QuorumId(1, 1))]
    found = [
        desk.tell(g, Heartbeat((Pulse(desk.member(g), phase, step, id, 0.0, 0.1),))) for g, phase, step, id in pulses
    ]
    return [line for lines in found for line in lines] + desk.lines(desk.lighthouse.tick(desk.now))


def test_the_last_roll_call_of_a_job_of_which_one_has_heard_nothing() -> None:
    desk = at_step()
    desk.tell(0, Finished(desk.member(0), 4, "x"))
    desk.tell(2, Finished(desk.member(2), 4, "x"))
    seen = [line for _ in range(int(GENEROUS)) for line in shows(desk, 1, (Phase.FINISHED, 4), (F, 3))]
    assert seen == []
    again = [line for _ in range(20) for line in shows(desk, 1, (Phase.FINISHED, 4), (F, 3))]
    assert again and again[0].startswith("store 1.2 ")


def test_of_the_first_exchange_of_a_job_nothing_is_known() -> None:
    desk = working()
    assert shows(desk, int(GENEROUS), *[(X, 0)] * 3) == []
    assert shows(desk, int(LOOK_AFTER) + 2, *[(X, 0)] * 3) == SAME


def test_what_a_step_takes_is_known_to_a_lighthouse_that_has_just_begun() -> None:
    """As it is of a job that has just begun."""
    desk = working()
    assert shows(desk, patience(), *[(X, 3)] * 3, takes=1.0) == []
    assert shows(desk, 4, *[(X, 3)] * 3, takes=1.0) == SAME
    desk = working()
    assert shows(desk, 150, *[(X, 3)] * 3, takes=30.0) == []
    assert shows(desk, 10, *[(X, 3)] * 3, takes=30.0) == SAME


def test_one_that_goes_on_by_itself_teaches_how_long_it_may_take() -> None:
    desk = at_step()
    assert shows(desk, 18, *[(X, 3)] * 3) == []  # of which 13 are seen: five times that
    shows(desk, 1, *[(X, 4)] * 3)
    assert shows(desk, 65, *[(X, 4)] * 3) == []
    assert shows(desk, 15, *[(X, 4)] * 3) == SAME


def test_a_link_that_has_become_slow_for_good_gets_longer_each_time_and_somebody_is_left_out_at_last() -> None:
    desk = at_step()
    waits, members = [], []
    for number in range(2, 7):
        began = desk.now
        while not (told := shows(desk, 1, *[(X, 3)] * 3, quorum=number - 1)):
            assert desk.now < began + 1000
        waits.append(desk.now - began)
        members.append({line.split("[")[1] for line in told})
        for group in range(3):
            desk.adopts(group, number, 3)
    assert members == [*[{"0 1 2]"}] * 4, {"0 1]"}]
    assert all(longer > 1.6 * wait for wait, longer in pairwise(waits))


def test_a_healing_in_which_nobody_gets_on_is_begun_again_but_has_much_longer() -> None:
    desk = at_step()
    seen = (X, 3), (X, 3), (H, 0)
    assert shows(desk, int(HEALING.floor), *seen) == []
    assert shows(desk, 10, *seen) == SAME
    desk = at_step()
    assert shows(desk, int(GENEROUS), *[(F, 3)] * 3) == []
    assert shows(desk, 10, *[(F, 3)] * 3) == SAME


def test_a_formation_that_never_ends_though_a_joiner_waits_in_it() -> None:
    """Who is not settled shows PARKED until its communicator stands; also where the job begins."""
    desk = working()
    desk.dies(2)
    for group in range(2):
        desk.adopts(group, 2, 3)
    desk.ready(2)
    desk.trouble(0, 2, 3)
    (told,) = [line for line in desk.wait(1.0) if line.startswith("store")]
    assert told == "store 1.4 [0 1 2.1]"
    seen = (F, 3), (F, 3), (Phase.PARKED, 0)
    assert shows(desk, int(GENEROUS), *seen, quorum=2) == []
    assert shows(desk, 10, *seen, quorum=2)[0] == "store 1.5 [0 1 2.1]"
    desk = Desk(2)
    assert desk.lines([]) == [] and desk.ready(0) == [] and desk.ready(1)[0] == "store 1.1 [0 1]"
    assert shows(desk, int(GENEROUS), *[(Phase.PARKED, 0)] * 2) == []
    assert shows(desk, 10, *[(Phase.PARKED, 0)] * 2)[0] == "store 1.2 [0 1]"


def test_a_planned_change_that_never_forms_is_withdrawn_and_planned_anew() -> None:
    desk = at_step()
    desk.dies(2)
    for group in range(2):
        desk.adopts(group, 2, 3)
    assert desk.ready(2)[0] == "store 1.3 [0 1 2.1]"
    seen = [line for step in range(4, 4 + int(GENEROUS)) for line in shows(desk, 1, (W, step), (W, step), (F, 0))]
    assert seen == []
    told = [line for step in range(700, 710) for line in shows(desk, 1, (W, step), (W, step), (F, 0))]
    assert told[:2] == ["store 1.4 [0 1 2.1]", "a0: planned 1.4 [0 1 2.1]"]
    assert any("planned quorum 1.3 does not stand at all members after" in text for text in desk.events())


def test_a_long_round_is_no_reason_to_withdraw_what_is_planned() -> None:
    desk = at_step()
    desk.dies(2)
    for group in range(2):
        desk.adopts(group, 2, 3)
    desk.ready(2)
    assert shows(desk, int(3 * GENEROUS), (W, 4), (W, 4), (F, 0)) == []


def test_a_job_that_is_alone_waits_for_nobody() -> None:
    desk = working(1)
    shows(desk, 1, (W, 0))
    shows(desk, 1, (W, 1))
    assert shows(desk, int(2 * GENEROUS), (X, 1)) == []


@given(st.lists(st.floats(0.1, 5000.0), min_size=1, max_size=12))
def test_no_exchange_is_broken_off_that_takes_less_than_five_times_the_longest(lengths: list[float]) -> None:
    """And one that never ends is, after its limit."""
    stand, at, longest = Standstill(), 0.0, 0.0
    assert stand.look(at, 0, QuorumId(1, 1), 0.0, lambda: None) is None
    for step, length in enumerate(lengths):
        limit = GENEROUS if not step else max(EXCHANGE.floor, 5 * longest)
        length = min(length, limit)
        for part in range(1, 5):
            assert stand.look(at + length * part / 5, step, QuorumId(1, 1), 0.0, lambda: X) is None
        at += length
        assert stand.look(at, step + 1, QuorumId(1, 1), 0.0, lambda: None) is None
        longest = max(longest, 0.8 * length)
    stand.look(at, len(lengths), QuorumId(1, 1), 0.0, lambda: X)
    over = at + max(EXCHANGE.floor, 5 * longest) * 1.001
    assert stand.look(over, len(lengths), QuorumId(1, 1), 0.0, lambda: X) is not None
