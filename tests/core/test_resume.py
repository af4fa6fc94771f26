"""When every group is lost and there is a durable checkpoint: golden scenarios of the lighthouse and of a member."""

from __future__ import annotations

import pytest
from quorum_desk import LAST, Desk, line, working
from test_stepper import member, quorum, under

from planaria.core.actions import Compute, Finish, Heal
from planaria.core.founding import FOUNDING_GRACE, RESUMES
from planaria.core.ledger import LAST_WORD_WINDOW
from planaria.core.messages import NO_QUORUM, Member, Policy, QuorumId, Ready, Saved, Standing
from planaria.core.roster import LineageRecord, Record, lineage_after
from planaria.core.stepper import Stepper


def saved(desk: Desk, step: int, trouble: str = "") -> None:
    assert desk.tell(0, Saved(desk.member(0), step, 0.5, trouble)) == []


def saving(groups: int = 2, step: int = 4) -> Desk:
    """All groups work under quorum 1.1 and write checkpoints."""
    desk = Desk(groups)
    for group in range(groups):
        desk.ready(group, saves=True)
    for group in range(groups):
        desk.adopts(group, 1, step)
    return desk


def all_die(desk: Desk, groups: int = 2) -> list[str]:
    found: list[str] = []
    for group in range(groups):
        found = desk.dies(group)
    return found


def looks(desk: Desk, group: int, step: int, run: int = 3) -> list[str]:
    """The group was started after the job began again with record 1.``run``, and found a checkpoint."""
    return desk.ready(group, step=step, saves=True, looked=QuorumId(1, run))


# --- the lighthouse -------------------------------------------------------------------------------------------


def test_all_lost_starts_again_from_the_newest_checkpoint_in_the_same_line_of_numbers() -> None:
    desk = saving()
    saved(desk, 4)
    assert all_die(desk) == ["store 1.3 []", "a0: resume", "a1: resume"]
    assert "(last commit seen: step 4); the job starts again from the checkpoint of step 4" in desk.events()[-1]
    looks(desk, 0, 4)
    assert looks(desk, 1, 4) == ["store 1.4 [0.1 1.1]", "a0: founding 1.4 [0.1 1.1]", "a1: founding 1.4 [0.1 1.1]"]


def test_a_checkpoint_of_which_nobody_lived_to_tell_is_found_on_the_disk() -> None:
    desk = saving()
    assert all_die(desk)[0] == "store 1.3 []"
    looks(desk, 0, 4)
    assert looks(desk, 1, 4)[0] == "store 1.4 [0.1 1.1]"
    assert desk.lighthouse.durable == 4


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    desk.ready(0, step=2, saves=True, looked=QuorumId(1, 3), damaged=4)
    found = desk.ready(1, step=2, saves=True, looked=QuorumId(1, 3), damaged=4)
    assert found == ["store 1.4 [0.1 1.1]", "a0: founding 1.4 [0.1 1.1]", "a1: founding 1.4 [0.1 1.1]"]
    assert "the checkpoint of step 4 is damaged; the newest that is whole is that of step 2" in desk.events()[-2]
    assert desk.lighthouse.durable == 2


def test_whoever_sees_it_whole_is_right() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    desk.ready(0, step=2, saves=True, looked=QuorumId(1, 3), damaged=4)
    assert looks(desk, 1, 4)[0] == "store 1.4 [0.1 1.1]"
    assert "group 0 (incarnation 1) sees step 2, but there is a checkpoint of step 4" in desk.events()[-2]
    assert desk.lighthouse.durable == 4


def test_an_older_damaged_one_explains_nothing() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    desk.ready(0, step=1, saves=True, looked=QuorumId(1, 3), damaged=2)
    found = desk.ready(1, step=1, saves=True, looked=QuorumId(1, 3), damaged=2)
    assert "refuse" in " ".join(found) and desk.lighthouse.durable == 4


def test_before_the_first_checkpoint_the_job_starts_again_from_the_beginning() -> None:
    desk = saving()
    assert "the job starts again from the beginning" in (all_die(desk) and desk.events()[-1])
    looks(desk, 0, 0)
    assert looks(desk, 1, 0)[0] == "store 1.4 [0.1 1.1]"


def test_a_job_without_checkpoints_is_lost() -> None:
    desk = working(2, step=4)
    assert "a0: stop: job job: every group that held the state is lost" in all_die(desk)[1]


def test_what_an_old_member_still_says_counts_for_nothing() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    old = desk.incarnations
    desk.incarnations = {0: 0, 1: 0}
    assert desk.ready(0) == desk.adopts(1, 2, step=9) == []
    desk.incarnations = old
    assert desk.lighthouse.current is None and not desk.lighthouse.stopped


def test_a_group_that_did_not_look_at_the_checkpoint_makes_way() -> None:
    desk = saving()
    saved(desk, 4)
    desk.dies(0)
    desk.adopts(1, 2, step=5)
    desk.ready(0, initial="")  # to heal from group 1, by a planned quorum
    assert desk.dies(1)[-2:] == ["store 1.4 [0.1]", "a0: urgent 1.4 [0.1]"], "it may have healed"
    assert desk.ready(0, initial="", after=QuorumId(1, 4)) == ["store 1.5 []", "a0: resume", "a1: resume"]
    assert desk.wait(2.0) == [], "once is enough"
    desk.dies(0)
    looks(desk, 0, 4, run=5)
    assert looks(desk, 1, 4, run=5)[0] == "store 1.6 [0.2 1.1]"


def test_one_that_looked_before_the_last_was_lost_looks_again() -> None:
    """Since it looked, a checkpoint may have become complete."""
    desk = saving()
    desk.dies(0)
    assert desk.ready(0, step=4, saves=True) == [], "group 1 has not taken its new quorum yet"
    assert desk.dies(1) == ["store 1.3 []", "a0: resume", "a1: resume"]
    assert desk.wait(2.0) == []
    desk.dies(0)
    looks(desk, 0, 8)
    assert desk.wait(FOUNDING_GRACE / 2) == []
    assert desk.wait(FOUNDING_GRACE)[0] == "store 1.4 [0.2]", "nor is the other one waited for for ever"


def test_a_failed_save_is_told_and_does_not_count() -> None:
    desk = saving()
    saved(desk, 4, "no space left on device")
    assert "no space left on device" in desk.events()[-1]
    assert desk.lighthouse.durable == 0


def test_who_sees_an_older_checkpoint_takes_the_state_from_who_sees_the_newest() -> None:
    """Two machines with a directory each. It must not cost the job one of them, but people should know."""
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    looks(desk, 0, 4)
    assert looks(desk, 1, 2)[0] == "store 1.4 [0.1 1.1]"
    assert "group 1 (incarnation 1) sees step 2, but there is a checkpoint of step 4" in " ".join(desk.events())


def test_who_sees_an_older_checkpoint_and_is_of_another_kind_is_refused() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    looks(desk, 0, 4)
    found = desk.ready(1, step=2, saves=True, looked=QuorumId(1, 3), fingerprint=(("torch", "2.12"),))
    assert found == ["a1: refuse: group 1 (incarnation 1) differs from group 0 in torch (2.13 there, 2.12 here)"]


def test_a_known_checkpoint_that_nobody_sees_is_waited_for_and_then_refused() -> None:
    """The directory was emptied, or is another one: steps must not be made twice in silence."""
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    looks(desk, 0, 0)
    assert desk.wait(2 * FOUNDING_GRACE) == [], "the other one may see it"
    assert "none of the groups that are there sees the checkpoint of step 4" in desk.events()[-1]
    found = looks(desk, 1, 2)
    assert [text[:10] for text in found] == ["a0: refuse", "a1: refuse"]
    assert "group 1 (incarnation 1) starts at step 2, but there is a checkpoint of step 4" in found[1]


def test_when_a_checkpoint_is_heard_of_late_all_look_again() -> None:
    desk = saving()
    all_die(desk)
    looks(desk, 0, 2)
    desk.tell(1, Saved(Member(1, 0), 4, 0.5))  # told again by an agent that was cut off
    assert looks(desk, 1, 2) == ["store 1.4 []", "a0: resume", "a1: resume"]
    all_die(desk)
    looks(desk, 0, 4, run=4)
    assert looks(desk, 1, 4, run=4)[0] == "store 1.5 [0.2 1.2]"


def test_a_founding_quorum_that_breaks_leaves_nobody_to_begin_with_who_has_not_looked() -> None:
    desk = saving()
    saved(desk, 4)
    all_die(desk)
    looks(desk, 0, 4), looks(desk, 1, 4)
    desk.dies(1)
    desk.ready(1, initial="", saves=True, looked=QuorumId(1, 3))  # its agent has heard of quorum 1.4
    assert desk.dies(0) == ["a1: resume"]
    desk.dies(1)
    looks(desk, 0, 4)
    assert looks(desk, 1, 4)[0] == "store 1.6 [0.2 1.3]"


def test_at_the_first_start_different_checkpoints_are_bad_input() -> None:
    desk = Desk(3)
    desk.ready(0), desk.ready(1)
    found = desk.ready(2, step=120, initial="later")
    assert [text[:10] for text in found] == ["a0: refuse", "a1: refuse"]
    assert "step 0, but there is a checkpoint of step 120; give all groups the same directory" in found[0]


def test_the_same_step_with_other_contents_is_refused() -> None:
    desk = Desk(2)
    desk.ready(0, step=120)
    (text,) = desk.ready(1, step=120, initial="other")
    assert "group 1 (incarnation 0) differs from group 0 in the protected state" in text


def test_a_job_that_never_gets_to_the_next_checkpoint_is_given_up() -> None:
    desk = saving(1)
    saved(desk, 4)
    for turn in range(RESUMES):
        assert "a0: resume" in desk.dies(0), turn
        looks(desk, 0, 4, run=2 + 2 * turn)
        desk.adopts(0, 3 + 2 * turn, step=5)
    found = desk.dies(0)
    assert "did not get from the checkpoint of step 4 to the next checkpoint" in found[1]


def test_a_new_checkpoint_makes_the_count_begin_again() -> None:
    desk = saving(1)
    for turn in range(2 * RESUMES):
        saved(desk, 4 + turn)
        assert "a0: resume" in desk.dies(0), turn
        looks(desk, 0, 4 + turn, run=2 + 2 * turn)
        desk.adopts(0, 3 + 2 * turn, step=5 + turn)


def test_a_restarted_lighthouse_hears_of_the_checkpoint_again() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    found = []
    for group in range(3):
        again = (Saved(Member(0, 0), 6, 0.5), desk.report(group))
        found = desk.connects(group, *again)
        found += desk.dies(group)
    assert "a2: resume" not in found, "a holder of the state may not have been heard of yet"
    assert "a2: resume" in desk.wait(LAST_WORD_WINDOW)
    effects = desk.lighthouse.tick(desk.now)
    assert not [line(e) for e in effects if not isinstance(e, Record)]


def test_a_restarted_lighthouse_that_hears_of_no_checkpoint_asks_the_next_group() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in range(3):
        desk.connects(group)
        desk.dies(group)
    assert desk.wait(2 * LAST_WORD_WINDOW) == []
    assert desk.ready(0, initial="", saves=True) == ["store 2.1 []", "a0: resume", "a1: resume", "a2: resume"]


def test_a_lighthouse_that_was_restarted_in_a_resume_goes_on_with_it() -> None:
    run = QuorumId(1, 5)
    began = LineageRecord("job", 1, 5, (), lineage_after("", run, ()), 7, run)
    desk = Desk(2, epoch=2, last=began, ready=False)
    assert desk.connects(0, desk.report(0, saves=True)) == ["a0: welcome", "a0: desired", "a0: resume"]
    assert desk.connects(1)[-1] == "a1: resume"
    desk.incarnations[0] = 1
    desk.ready(0, step=4, saves=True, looked=run)
    assert desk.ready(1, step=4, saves=True, looked=run)[0] == "store 2.1 [0.1 1]"


def test_the_end_of_a_job_is_no_beginning_of_another_run() -> None:
    ended = LineageRecord("job", 1, 5, (), lineage_after("", QuorumId(1, 5), ()), 7, QuorumId(1, 3))
    desk = Desk(2, epoch=2, last=ended, ready=False)
    assert desk.connects(0, desk.report(0)) == ["a0: welcome", "a0: desired"]
    desk.connects(1)
    assert desk.ready(1, looked=NO_QUORUM)[0] == "store 2.1 [0 1]"


def test_with_checkpoints_the_operator_may_give_the_last_holder_up() -> None:
    for desk in (working(2, step=4), saving()):
        desk.suspects(0)
        desk.adopts(1, 2, step=5)
        desk.dies(1)
        if desk.lighthouse.saves:
            assert "a0: resume" in desk.lines(desk.lighthouse.evict(0, desk.now))
        else:
            with pytest.raises(ValueError, match="only one that holds the state"):
                desk.lighthouse.evict(0, desk.now)


# --- a member -------------------------------------------------------------------------------------------------


def resumed(group: int = 0, step: int = 4, total: int = 10) -> Stepper:
    return Stepper(Ready(member(group), f"host{group}:1", (), "start", 6, total, step=step), Policy.REDISTRIBUTE, 3)


def test_the_first_step_is_that_of_the_checkpoint() -> None:
    me = resumed()
    under(me, quorum(1, 0, 1, founding=True), [Standing(4, False)] * 2)
    action = me.next()
    assert isinstance(action, Compute) and action.step == 4
    assert me.first == member(0)


def test_who_has_not_looked_at_the_checkpoint_heals_from_those_who_have() -> None:
    me = resumed(step=0)
    under(me, quorum(1, 0, 1, founding=True), [Standing(0, False), Standing(4, False)])
    action = me.next()
    assert isinstance(action, Heal) and action.receive and action.step == 4


def test_a_checkpoint_of_the_last_step_ends_the_job() -> None:
    me = resumed(step=10)
    under(me, quorum(1, 0, 1, founding=True), [Standing(10, False)] * 2)
    assert isinstance(me.next(), Finish)


def test_the_first_member_is_that_of_the_quorum_in_which_the_step_was_exchanged() -> None:
    """So all members know the same one at a commit, whatever they have heard of since."""
    me = resumed(group=1)
    under(me, quorum(1, 0, 1, founding=True), [Standing(4, False)] * 2)
    assert me.first == member(0)
    me.hear(quorum(2, 1))
    assert me.first == member(0)
    under(me, quorum(3, 1), [Standing(4, True)])
    assert me.first == member(1)
