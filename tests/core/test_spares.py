"""The policy spare: for whom the others wait, how long, and when they do not wait at all."""

from __future__ import annotations

import pytest
from quorum_desk import Desk

from planaria.core.messages import Died, Hello, JobSpec, Policy, Synced

LIMIT = 4.0


def waiting(groups: int = 3, policy: Policy = Policy.SPARE) -> Desk:
    """All groups work under quorum 1.1, by the policy spare."""
    desk = Desk(groups, ready=False)
    for group in range(groups):
        desk.tell(group, Hello(f"a{group}", "host", JobSpec("job", groups, policy=policy, spare_wait=LIMIT)))
        desk.tell(group, Synced())
        desk.ready(group)
    for group in range(groups):
        desk.adopts(group, 1, 3)
    return desk


def loses(desk: Desk, group: int, spare: bool = True) -> list[str]:
    said = desk.tell(group, Died(desk.member(group), "signal 9", spare))
    desk.incarnations[group] += spare  # else it is said again, perhaps
    return said


def first(said: list[str]) -> str:
    return said[0] if said else ""


def test_one_quorum_with_the_standby_in_the_lost_ones_place() -> None:
    desk = waiting()
    assert loses(desk, 1) == []
    assert desk.trouble(0, 1, 3) == [] and desk.wait(LIMIT / 2) == [], "that the exchange broke is no news"
    assert desk.ready(1) == ["store 1.2 [0 1.1 2]", *[f"a{group}: urgent 1.2 [0 1.1 2]" for group in range(3)]]
    assert "waiting up to 4 s for standbys to take the places of the lost" in desk.events()


def test_up_to_the_limit_and_then_the_others_go_on() -> None:
    desk = waiting()
    loses(desk, 1)
    assert desk.wait(LIMIT - 0.01) == []
    assert first(desk.wait(0.02)) == "store 1.2 [0 2]"
    desk.adopts(0, 2, 3)
    desk.adopts(2, 2, 3)
    assert first(desk.ready(1)) == "store 1.3 [0 1.1 2]", "it joins by a planned change, as any other that is back"


@pytest.mark.parametrize("policy", [Policy.REDISTRIBUTE, Policy.SHRINK])
def test_other_policies_wait_for_nobody(policy: Policy) -> None:
    assert first(loses(waiting(policy=policy), 1)) == "store 1.2 [0 2]"


def test_without_a_standby_nobody_waits() -> None:
    assert first(loses(waiting(), 1, spare=False)) == "store 1.2 [0 2]"


def test_a_standby_that_is_not_there_after_all() -> None:
    desk = waiting()
    loses(desk, 1)
    desk.incarnations[1] = 0
    assert first(loses(desk, 1, spare=False)) == "store 1.2 [0 2]"


def test_a_standby_that_dies_as_it_takes_the_place() -> None:
    desk = waiting()
    loses(desk, 1)
    assert first(loses(desk, 1, spare=False)) == "store 1.2 [0 2]"


def test_another_standby_takes_the_place_of_one_that_dies_within_the_same_limit() -> None:
    desk = waiting()
    loses(desk, 1)
    assert desk.wait(LIMIT - 1.0) == []
    assert loses(desk, 1) == [] and desk.wait(0.9) == []
    assert first(desk.wait(0.2)) == "store 1.2 [0 2]"


def test_two_lost_and_two_standbys() -> None:
    desk = waiting(4)
    loses(desk, 1)
    assert loses(desk, 2) == []
    assert desk.ready(2) == []
    assert first(desk.ready(1)) == "store 1.2 [0 1.1 2.1 3]"


def test_two_lost_and_one_standby() -> None:
    desk = waiting(4)
    loses(desk, 1)
    assert first(loses(desk, 2, spare=False)) == "store 1.2 [0 3]", "shards go to others anyway"


def test_nobody_waits_for_the_standby_of_an_agent_that_is_out_of_reach() -> None:
    desk = waiting()
    loses(desk, 1)
    assert first(desk.lines(desk.lighthouse.agent_lost("a1", desk.now))) == "store 1.2 [0 2]"


def test_nobody_waits_when_none_is_left_who_could_give_it_the_state() -> None:
    desk = waiting(2)
    loses(desk, 1, spare=False)
    desk.adopts(0, 2, 4)
    desk.ready(1)
    assert desk.lighthouse.current is not None
    loses(desk, 0)
    assert not any("waiting up to" in text for text in desk.events())
