"""Golden scenarios of the lighthouse: what operators ask for, and planned changes that fail."""

from __future__ import annotations

import pytest
from quorum_desk import working

from planaria.core.messages import Kill, Leaving, QuorumId
from planaria.core.quorum import REPLAN_DELAY
from planaria.core.roster import Send


def test_a_drained_group_leaves_by_a_planned_change_and_its_end_is_no_loss() -> None:
    desk = working()
    assert desk.lines(desk.lighthouse.drain(1, desk.now)) == [
        "a1: drain",
        "store 1.2 [0 2]",
        "a0: planned 1.2 [0 2]",
        "a1: planned 1.2 [0 2]",
        "a2: planned 1.2 [0 2]",
    ]
    assert desk.dies(1) == [], "it left before the others have said that they took the change"
    assert desk.adopts(0, 2) == []
    assert desk.adopts(2, 2) == []


def test_a_drained_group_that_died_too_early_is_a_loss() -> None:
    desk = working()
    desk.lighthouse.drain(1, desk.now)
    desk.dies(1)
    assert desk.trouble(0, 1)[0] == "store 1.3 [0 2]"


def test_a_group_whose_rank_moves_leaves_by_a_planned_change_and_comes_back() -> None:
    desk = working()
    assert desk.lines(desk.lighthouse.migrate(1, 0, desk.now)) == ["a1: migrate"]
    assert desk.tell(1, Leaving(desk.member(1))) == [
        "store 1.2 [0 2]",
        "a0: planned 1.2 [0 2]",
        "a1: planned 1.2 [0 2]",
        "a2: planned 1.2 [0 2]",
    ]
    assert desk.tell(1, Leaving(desk.member(1))) == [], "told again after a reconnect"
    assert desk.dies(1) == []
    assert desk.adopts(0, 2) == [] == desk.adopts(2, 2)
    assert desk.ready(1)[0] == "store 1.3 [0 1.1 2]", "it is not drained for good"


def test_a_group_that_moves_a_rank_leaves_by_a_planned_change_and_comes_back() -> None:
    desk = working()
    assert desk.tell(1, Leaving(desk.member(1)))[0] == "store 1.2 [0 2]"
    again = desk.connects(1, desk.report(1), Leaving(desk.member(1)))  # its agent's stream broke meanwhile
    assert again == ["a1: welcome", "a1: desired", "a1: planned 1.2 [0 2]"], "it is not drained"
    desk.adopts(0, 2)
    desk.adopts(2, 2)
    assert desk.dies(1) == []
    assert desk.ready(1)[0] == "store 1.3 [0 1.1 2]"


def test_a_move_that_a_loss_forestalled_is_void() -> None:
    desk = working()
    desk.tell(1, Leaving(desk.member(1)))
    assert desk.dies(2)[0] == "store 1.3 [0]"
    desk.adopts(0, 3)
    assert desk.ready(1, after=QuorumId(1, 3))[0] == "store 1.4 [0 1]", "nothing of it has left, so it comes back"
    desk.adopts(0, 4)
    desk.adopts(1, 4)
    assert desk.tell(1, Leaving(desk.member(1)))[0] == "store 1.5 [0]"


def test_the_last_group_cannot_be_drained_or_evicted() -> None:
    desk = working(1)
    with pytest.raises(ValueError, match="is the only one that works"):
        desk.lighthouse.drain(0, desk.now)
    with pytest.raises(ValueError, match="is the only one that holds the state"):
        desk.lighthouse.evict(0, desk.now)


def test_who_leaves_stays_until_a_joiner_has_healed() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)  # 1.3 is planned
    assert desk.lines(desk.lighthouse.drain(0, desk.now)) == ["a0: drain"]
    assert desk.adopts(0, 3, step=4) == []
    assert desk.adopts(1, 3, step=4)[0] == "store 1.4 [1.1]", "the joiner has healed"


def test_scaling_down_drains_the_highest_groups() -> None:
    desk = working(4)
    found = desk.lines(desk.lighthouse.scale(2, desk.now))
    assert found[:2] == ["a2: drain", "a3: drain"]
    assert "store 1.2 [0 1]" in found
    assert found.count("a0: desired") == 1


def test_more_groups_than_shards_cannot_work() -> None:
    with pytest.raises(ValueError, match="6 shards a step, so at most 6 groups"):
        working().lighthouse.scale(7, 100.0)


def test_a_kill_goes_to_the_group_s_agent() -> None:
    desk = working()
    effects = desk.lighthouse.kill(1, 15, desk.now)
    assert Send("a1", Kill(1, 15)) in effects


# --- planned changes that fail --------------------------------------------------------------------------------


def test_a_planned_change_that_cannot_be_built_is_proposed_again_later() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    assert desk.trouble(0, 3) == [], "withdrawn; the old quorum goes on"
    assert desk.wait(REPLAN_DELAY[0] - 0.01) == []
    assert desk.wait(0.02)[0] == "store 1.4 [0 1.1]"


def test_a_planned_change_that_was_taken_and_then_broke_is_replaced() -> None:
    """Group 0 has switched when the joiner dies: its trouble is with the quorum in force, not with a mere plan."""
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    desk.adopts(0, 3, step=2)
    desk.trouble(0, 3, step=2)
    assert desk.dies(1) == ["store 1.4 [0]", "a0: urgent 1.4 [0]"]


def test_a_planned_change_that_broke_before_it_was_known_to_be_taken_is_replaced() -> None:
    """The joiner's word that it could not heal comes before that of the others, who have switched."""
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    assert desk.trouble(1, 3, step=0) == [], "as far as is known it was never built"
    desk.adopts(0, 3, step=2)
    assert desk.wait(1.0)[0] == "store 1.4 [0 1.1]"


def test_a_joiner_that_dies_again_is_simply_forgotten() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    assert desk.dies(1) == []
    assert desk.ready(1)[0] == "store 1.4 [0 1.2]"


@pytest.mark.parametrize("early", [False, True])
def test_who_cannot_finish_the_step_before_a_planned_change_is_heard(early: bool) -> None:
    """Its complaint is about a quorum that the others have left behind, or will have in a moment."""
    desk = working(step=4)
    desk.lines(desk.lighthouse.drain(1, desk.now))
    assert desk.lighthouse.planned is not None
    if early:
        desk.trouble(2, 1, 5)
    desk.adopts(0, 2, 6)
    if not early:
        desk.trouble(2, 1, 5)
    desk.dies(1)
    assert "store 1.3 [0 2]" in desk.wait(1.0)
