"""A group moves to another node: prepared there, left here, joined there; and what goes wrong in between."""

from __future__ import annotations

import pytest
from quorum_desk import LAST, Desk, working

from planaria.core.messages import Died, Drain, Heartbeat, Host, Member, Prepared
from planaria.core.roster import Effect, Record, Send

NEWER = Member(1, 1)
LEFT = Died(Member(1, 0), "left")


def sent(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Record)]


def orders(desk: Desk, group: int, report: Prepared) -> list[Effect]:
    return sent(desk.lighthouse.handle(f"a{group}", report, desk.now))


def moving() -> Desk:
    """Group 1 of three is to move to the agent of group 2."""
    desk = working()
    assert sent(desk.lighthouse.move(1, "a2", desk.now)) == [Send("a2", Host(NEWER))]
    return desk


def test_prepared_there_then_left_here_then_joined_there() -> None:
    desk = moving()
    said = orders(desk, 2, Prepared(NEWER))
    assert said[0] == Send("a1", Drain(Member(1, 0), moved=True))
    assert next(line for line in desk.lines(said) if "planned" in line) == "a0: planned 1.2 [0 2]"
    for group in (0, 2):
        desk.adopts(group, 2, 5)
    desk.incarnations[1] = 0
    assert sent(desk.lighthouse.handle("a1", LEFT, desk.now)) == [Send("a2", Host(NEWER, joins=True))]
    effects = desk.lighthouse.handle("a2", desk.report(1, member=NEWER), desk.now)
    assert desk.lines(effects)[0] == "store 1.3 [0 1.1 2]"
    assert desk.lighthouse.groups[1].agent == "a2"


def test_what_could_not_be_prepared_stays_where_it_is() -> None:
    desk = moving()
    assert orders(desk, 2, Prepared(NEWER, "no GPU is free")) == []
    assert "group 1 does not move: no GPU is free" in desk.events()
    assert sent(desk.lighthouse.move(1, "a0", desk.now)) == [Send("a0", Host(NEWER))], "it can be tried again"


def test_one_whose_new_life_ends_when_the_old_one_is_told_to_leave_is_started_there_again() -> None:
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    assert orders(desk, 2, Prepared(NEWER, "its process has ended")) == []
    for group in (0, 2):
        desk.adopts(group, 2, 5)
    desk.incarnations[1] = 0
    assert sent(desk.lighthouse.handle("a1", LEFT, desk.now)) == [Send("a2", Host(NEWER, joins=True))]
    assert not any("does not move" in text for text in desk.events())


def test_one_that_died_meanwhile_is_started_again_where_it_was() -> None:
    desk = moving()
    assert "a2: host" in desk.dies(1), "what is prepared is not needed any more"
    assert "group 1 does not move: it was started again meanwhile" in desk.events()
    assert orders(desk, 2, Prepared(NEWER))[0] == Send("a2", Host(NEWER, off=True)), "said before it heard of that"


def test_an_agent_that_is_lost_prepares_nothing() -> None:
    desk = moving()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    assert "group 1 does not move: node a2 is out of reach" in desk.events()


def test_a_lighthouse_that_was_restarted_goes_on_with_it() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in (0, 2):
        again = [Prepared(NEWER)] if group == 2 else []
        desk.connects(group, desk.report(group), *again)
    assert not any("host" in line for line in desk.wait(2.0)), "the old life may be at work"
    said = desk.connects(1, desk.report(1))
    assert "a1: drain" in said and not any("host" in line for line in said)
    desk.incarnations[1] = 0
    assert "a2: host" in desk.dies(1)


def test_one_that_left_while_there_was_no_lighthouse() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in (0, 2):
        desk.connects(group, desk.report(group), *([Prepared(NEWER)] if group == 2 else []))
    assert "a2: host" in desk.connects(1, desk.report(1), Died(Member(1, 0), "left", moved=True))
    assert "group 1 does not move: it was started again meanwhile" not in desk.events()


def test_its_former_agent_is_told_where_it_is_when_it_is_started_again() -> None:
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    desk.lines(desk.lighthouse.handle("a1", LEFT, desk.now))
    desk.lines(desk.lighthouse.handle("a2", desk.report(1, member=NEWER), desk.now))
    said = sent(desk.lighthouse.handle("a1", desk.report(1, member=NEWER), desk.now))
    assert said == [Send("a1", Drain(NEWER, moved=True))]


def test_its_former_agent_that_starts_it_once_more_in_the_middle_lets_go_of_it() -> None:
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    desk.lines(desk.lighthouse.handle("a1", LEFT, desk.now))
    desk.lines(desk.lighthouse.handle("a1", desk.report(1, member=NEWER), desk.now))
    said = sent(desk.lighthouse.handle("a2", desk.report(1, member=NEWER), desk.now))
    assert said[0] == Send("a1", Drain(NEWER, moved=True))
    assert desk.lighthouse.groups[1].agent == "a2"


def test_groups_of_a_drained_node_move_to_standbys_elsewhere_as_far_as_there_are_any() -> None:
    desk = Desk(4, ready=False)
    for group in range(4):
        desk.connects(group)
        desk.ready(group)
    for group in range(4):
        desk.adopts(group, 1)
    desk.tell(0, Heartbeat((), warm=1))
    desk.tell(3, Heartbeat((), warm=1))
    assert sent(desk.lighthouse.drain_node("a1", "", desk.now))[1:] == [Send("a0", Host(NEWER))]
    assert sent(desk.lighthouse.drain_node("a2", "", desk.now))[1:] == [Send("a3", Host(Member(2, 1)))]
    said = desk.lines(orders(desk, 0, Prepared(NEWER, "it died")))
    assert said[0] == "a1: drain", "then it leaves without a new place"


def drained() -> Desk:
    """The node of group 1 is drained, and it is to move to the agent of group 2, which has a standby."""
    desk = working()
    desk.tell(2, Heartbeat((), warm=1))
    assert Send("a2", Host(NEWER)) in sent(desk.lighthouse.drain_node("a1", "", desk.now))
    return desk


def test_one_that_dies_on_a_drained_node_before_it_could_leave_moves_all_the_same() -> None:
    desk = drained()
    assert "a1: drain" in desk.dies(1), "nor does its agent start it again when the node is undrained"
    assert orders(desk, 2, Prepared(NEWER))[0] == Send("a2", Host(NEWER, joins=True))
    assert not any("does not move" in text for text in desk.events())


def test_if_there_are_to_be_fewer_groups_one_on_a_drained_node_is_not_kept() -> None:
    desk = drained()
    said = sent(desk.lighthouse.scale(2, desk.now))
    assert said[:2] == [Send("a2", Host(NEWER, off=True)), Send("a1", Drain(Member(1, 0)))]
    assert [each for each in said if isinstance(each, Send) and isinstance(each.order, Drain)] == [said[1]]


def test_one_that_is_to_leave_for_good_does_not_come_back_elsewhere() -> None:
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    said = sent(desk.lighthouse.drain(1, desk.now))
    assert said[:2] == [Send("a2", Host(NEWER, off=True)), Send("a1", Drain(Member(1, 0)))]
    for group in (0, 2):
        desk.adopts(group, 2, 5)
    assert not any("host" in text for text in desk.dies(1))


def test_a_group_whose_new_node_is_lost_before_it_came_is_prepared_on_a_third() -> None:
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    desk.tell(0, Heartbeat((), warm=1))
    desk.adopts(0, 2, 5)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    third = Member(1, 2)
    assert Send("a0", Host(third)) in sent(desk.lighthouse.handle("a1", LEFT, desk.now))
    assert Send("a0", Host(third, joins=True)) in orders(desk, 0, Prepared(third))
    desk = moving()
    orders(desk, 2, Prepared(NEWER))
    desk.tell(0, Heartbeat((), warm=1))
    desk.adopts(0, 2, 5)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    desk.lighthouse.handle("a1", LEFT, desk.now)
    desk.connects(2)  # it is back, and what it has prepared is not needed any more
    assert orders(desk, 2, Prepared(NEWER)) == [Send("a2", Host(NEWER, off=True))]
    assert Send("a0", Host(third, joins=True)) in orders(desk, 0, Prepared(third))


def lost() -> Desk:
    """The node of group 1 is cut off, and the others have gone on without it; group 2's agent has a standby."""
    desk = working()
    desk.tell(2, Heartbeat((), warm=1))
    assert desk.lines(desk.lighthouse.agent_lost("a1", desk.now)) == [], "silence alone condemns nobody"
    assert desk.trouble(0, 1, 4) == []
    said = desk.wait(1.0)
    assert said[0] == "store 1.2 [0 2]" and said[-1] == "a2: host"
    return desk


def test_a_standby_of_another_node_takes_the_place_of_a_group_that_is_lost_with_its_node() -> None:
    desk = lost()
    for group in (0, 2):
        desk.adopts(group, 2, 5)
    assert orders(desk, 2, Prepared(NEWER)) == [Send("a2", Host(NEWER, joins=True))]
    effects = desk.lighthouse.handle("a2", desk.report(1, member=NEWER), desk.now)
    assert desk.lines(effects)[0] == "store 1.3 [0 1.1 2]"
    desk.connects(1)
    assert desk.ready(1) == ["a1: drain"], "it lived on, out of reach, and its place is taken"


def test_an_agent_that_is_started_again_is_told_of_the_groups_that_had_moved_to_it() -> None:
    desk = lost()
    orders(desk, 2, Prepared(NEWER))
    desk.lines(desk.lighthouse.handle("a2", desk.report(1, member=NEWER), desk.now))
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    assert "a2: host" in desk.connects(2)
    assert Send("a2", Host(Member(1, 2), joins=True)) in orders(desk, 2, Prepared(Member(1, 2)))


def test_a_node_that_comes_back_first_keeps_its_group() -> None:
    desk = lost()
    desk.adopts(0, 2, 5)
    desk.adopts(2, 2, 5)
    assert "a2: host" in desk.connects(1, desk.report(1)), "it is not needed any more"
    assert "group 1 does not move: it was started again meanwhile" in desk.events()


@pytest.mark.parametrize(
    ("group", "node", "why"),
    [
        (1, "a7", r"has no node a7 \(nodes: a0, a1, a2\)"),
        (1, "a1", "group 1 is on node a1 already"),
        (9, "a1", "no running group 9"),
        (2, "a0", "group 2 is leaving already"),
        (1, "a2", "node a2 is drained"),
    ],
)
def test_what_cannot_move(group: int, node: str, why: str) -> None:
    desk = working()
    desk.lines(desk.lighthouse.drain_node("a2", "", desk.now))
    before = str(desk.lighthouse.snapshot())
    with pytest.raises(ValueError, match=why):
        desk.lighthouse.move(group, node, desk.now)
    assert str(desk.lighthouse.snapshot()) == before


def test_the_only_one_that_holds_the_state_cannot_move() -> None:
    desk = working(2)
    desk.dies(0)
    desk.adopts(1, 2, 3)
    with pytest.raises(ValueError, match="the only one that holds the state"):
        desk.lighthouse.move(1, "a0", desk.now)
