"""When every group is lost and ranks that live on keep copies in memory: golden scenarios of the lighthouse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from quorum_desk import Desk
from test_stepper import member, quorum

from planaria.core.actions import Heal
from planaria.core.founding import FOUNDING_GRACE, RESUMES
from planaria.core.messages import NO_QUORUM, Policy, QuorumId, Ready, Standing
from planaria.core.stepper import Stepper


def copying(groups: int = 2, saves: bool = False) -> Desk:
    """All groups work under quorum 1.1 and keep copies."""
    desk = Desk(groups)
    for group in range(groups):
        desk.ready(group, keeps=True, saves=saves)
    for group in range(groups):
        desk.adopts(group, 1, 4)
    return desk


def all_die(desk: Desk, groups: int = 2) -> list[str]:
    found: list[str] = []
    for group in range(groups):
        found = desk.dies(group)
    return found


def looks(desk: Desk, group: int, step: int, run: int = 3, saves: bool = False) -> list[str]:
    """Its ranks have looked after the job began again with record 1.``run``, and found a copy, or at step 0 none."""
    kept = QuorumId(1, 1) if step else NO_QUORUM
    return desk.ready(group, step=step, keeps=True, kept=kept, looked=QuorumId(1, run), saves=saves)


def test_the_newest_copy_counts() -> None:
    desk = copying()
    assert all_die(desk) == ["store 1.3 []", "a0: resume", "a1: resume"]
    assert "from the beginning, or from a newer copy in memory" in desk.events()[-1]
    assert desk.ready(0, initial="", keeps=True) == ["a0: resume"], "it came before it could hear of that"
    looks(desk, 0, 4)
    assert looks(desk, 1, 2)[0] == "store 1.4 [0.1 1.1]"


def test_who_has_lost_all_ranks_takes_the_state_from_a_group_with_copies() -> None:
    desk = copying()
    all_die(desk)
    looks(desk, 0, 0)
    desk.beat(1, 0)  # its ranks meet
    assert desk.wait(2 * FOUNDING_GRACE) == [], "it must not begin without the others"
    assert looks(desk, 1, 4)[0] == "store 1.4 [0.1 1.1]"


def test_without_any_copy_the_state_is_lost() -> None:
    desk = copying()
    all_die(desk)
    desk.ready(0, initial="", keeps=True)
    looks(desk, 1, 0)
    assert desk.wait(2 * FOUNDING_GRACE) == []
    assert "no whole copy of the state was found yet; waiting for group 0" in desk.events()[-1]
    desk.dies(0)
    assert "no whole copy of it is left in memory" in desk.events()[-1]
    assert "no whole copy of it is left in memory" in desk.lighthouse.stopped


def test_the_copies_of_a_group_whose_agent_is_out_of_reach_are_waited_for_until_it_is_evicted() -> None:
    desk = copying()
    all_die(desk)
    desk.lighthouse.agent_lost("a1", desk.now)  # it lost a rank, and others of it may live
    looks(desk, 0, 0)
    assert desk.wait(2 * FOUNDING_GRACE) == []
    assert "waiting for group 1 (planaria evict GROUP declares one dead)" in desk.events()[-1]
    with pytest.raises(ValueError, match="no running group 2"):
        desk.lighthouse.evict(2, desk.now)
    desk.lighthouse.evict(1, desk.now)
    assert "no whole copy of it is left in memory" in desk.lighthouse.stopped


def test_a_newer_copy_of_one_that_stands_still_is_waited_for() -> None:
    desk = copying(3)
    all_die(desk, 3)
    looks(desk, 0, 4, run=4)
    desk.suspects(0)
    looks(desk, 1, 0, run=4)
    assert looks(desk, 2, 2, run=4) == [] and desk.wait(2 * FOUNDING_GRACE) == []
    assert "a newer copy of the state than that of step 2 is held only by group 0" in desk.events()[-1]
    assert looks(desk, 0, 4, run=4)[0] == "store 1.5 [0.1 1.1 2.1]"


@pytest.mark.parametrize("copies", [(0, 0), (2, 2)])
def test_who_leaves_gives_the_newest_copy_and_is_not_waited_for_as_if_it_were_away(copies: tuple[int, int]) -> None:
    desk = copying(3)
    desk.lines(desk.lighthouse.drain_node("a1", "", desk.now))
    all_die(desk, 3)
    looks(desk, 1, 4, run=4)
    looks(desk, 0, copies[0], run=4)
    assert looks(desk, 2, copies[1], run=4)[0] == "store 1.5 [0.1 1.1 2.1]"
    assert desk.dies(2)[0] == "store 1.6 [0.1 1.1]", "nobody has adopted it"


def test_who_left_in_order_long_ago_took_no_copy_along() -> None:
    desk = copying(3)
    desk.lines(desk.lighthouse.scale(2, desk.now))
    desk.adopts(0, 2, 6)
    desk.adopts(1, 2, 6)
    desk.dies(2)
    desk.lighthouse.agent_lost("a2", desk.now)
    all_die(desk)
    for group in (0, 1):
        looks(desk, group, 0, run=desk.lighthouse._run.number)
    assert "no whole copy of it is left in memory" in desk.lighthouse.stopped


def test_a_copy_may_be_gone_with_the_next_process_and_a_checkpoint_may_not() -> None:
    desk = copying(saves=True)
    all_die(desk)
    looks(desk, 0, 8, saves=True)
    assert desk.lighthouse.durable == 0
    desk.dies(0)
    desk.ready(0, step=2, saves=True, keeps=True, looked=QuorumId(1, 3))
    assert looks(desk, 1, 0, saves=True)[0] == "store 1.4 [0.2 1.1]"
    assert desk.lighthouse.durable == 2


def test_who_leaves_stays_until_others_have_its_copy() -> None:
    desk = copying(3)
    desk.lines(desk.lighthouse.drain_node("a1", "", desk.now))
    all_die(desk, 3)
    looks(desk, 1, 4, run=4), looks(desk, 0, 0, run=4)
    assert looks(desk, 2, 0, run=4)[0] == "store 1.5 [0.1 1.1 2.1]"


def test_nothing_may_leave_before_the_newest_copy_is_shared() -> None:
    """Its agent would end it at once: it is in no quorum that it could leave in order."""
    desk = copying()
    all_die(desk)
    looks(desk, 1, 4)
    verbs = desk.lighthouse
    wishes: list[Callable[[], object]] = [
        lambda: verbs.drain(1, desk.now),
        lambda: verbs.drain_node("a1", "", desk.now),
        lambda: verbs.move(1, "a0", desk.now),
        lambda: verbs.scale(1, desk.now),
    ]
    for wish in wishes:
        with pytest.raises(ValueError, match="job job is about to start again from a copy in memory"):
            wish()
    assert looks(desk, 0, 0)[0] == "store 1.4 [0.1 1.1]"
    desk.adopts(1, 4, 4), desk.adopts(0, 4, 4)
    assert "a1: drain" in desk.lines(verbs.drain(1, desk.now))


def test_copies_of_one_step_from_different_runs_of_it() -> None:
    """They may differ where only the samples are promised: the later run of the step counts, and nobody is refused."""
    desk = copying()
    all_die(desk)
    desk.ready(0, step=4, initial="4 1.1", keeps=True, kept=QuorumId(1, 1), looked=QuorumId(1, 3))
    found = desk.ready(1, step=4, initial="4 1.2", keeps=True, kept=QuorumId(1, 2), looked=QuorumId(1, 3))
    assert found[0] == "store 1.4 [0.1 1.1]"


def test_the_roll_call_tells_copies_of_one_step_apart() -> None:
    ready = Ready(member(0), "a:1", (), "4 1.1", 4, 9, step=4, keeps=True, kept=QuorumId(1, 1), looked=QuorumId(1, 3))
    stepper = Stepper(ready, Policy.REDISTRIBUTE, 2)
    stale = quorum(2, 0, 1)
    assert stepper.hear(stale) == [], "of a run that is over"
    founding = quorum(4, 0, 1, founding=True)
    stepper.hear(founding)
    stepper.formed(founding.id)
    standings = [Standing(4, False, under=QuorumId(1, 1)), Standing(4, False, under=QuorumId(1, 2))]
    stepper.rolled(founding.id, standings)
    assert stepper.next() == Heal(founding.id, 4, (1,), (0,), receive=True, under=QuorumId(1, 2))


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_job_that_never_gets_to_the_next_copy_is_given_up(gets_on: bool) -> None:
    desk = copying(1)
    step = 4
    for turn in range(RESUMES + 1):
        assert "a0: resume" in desk.dies(0), turn
        looks(desk, 0, step, run=2 + 2 * turn)
        desk.adopts(0, 3 + 2 * turn, step=step)
        step += gets_on
    found = desk.dies(0)
    assert any("did not get from step 4 to the next" in text for text in found) is not gets_on
