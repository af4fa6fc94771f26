"""When every group is lost and there is a durable checkpoint: golden scenarios of the lighthouse and of a member."""

from __future__ import annotations

import pytest
from quorum_desk import LAST, Desk, line, working
from test_stepper import member, quorum, under

from planaria.core.ledger import LAST_WORD_WINDOW
from planaria.core.messages import Member, Policy, QuorumId, Ready, Saved, Standing
from planaria.core.quorum import FOUNDING_GRACE, RESUMES
from planaria.core.roster import Record
from planaria.core.stepper import Compute, Finish, Heal, Stepper


def saved(desk: Desk, step: int, trouble: str = "") -> None:
    assert desk.tell(0, Saved(desk.member(0), step, 0.5, trouble)) == []


def all_die(desk: Desk, groups: int = 2) -> list[str]:
    found: list[str] = []
    for group in range(groups):
        found = desk.dies(group)
    return found


# --- the lighthouse -------------------------------------------------------------------------------------------


def test_all_lost_starts_again_from_the_newest_checkpoint_in_the_same_line_of_numbers() -> None:
    desk = working(2, step=4)
    saved(desk, 4)
    assert all_die(desk) == ["store 1.3 []", "a0: resume", "a1: resume"]
    assert "(last commit seen: step 4); the job starts again from the checkpoint of step 4" in desk.events()[-1]
    desk.ready(0, step=4)
    assert desk.ready(1, step=4) == ["store 1.4 [0.1 1.1]", "a0: founding 1.4 [0.1 1.1]", "a1: founding 1.4 [0.1 1.1]"]


def test_what_an_old_member_still_says_counts_for_nothing() -> None:
    desk = working(2, step=4)
    saved(desk, 4)
    all_die(desk)
    old = desk.incarnations
    desk.incarnations = {0: 0, 1: 0}
    assert desk.ready(0) == desk.adopts(1, 2, step=9) == []
    desk.incarnations = old
    assert desk.lighthouse.current is None and not desk.lighthouse.stopped


def test_a_group_that_did_not_look_at_the_checkpoint_makes_way() -> None:
    desk = working(2, step=4)
    saved(desk, 4)
    desk.dies(0)
    desk.adopts(1, 2, step=5)
    desk.ready(0, initial="")  # to heal from group 1, by a planned quorum
    assert desk.dies(1)[-2:] == ["store 1.4 [0.1]", "a0: urgent 1.4 [0.1]"], "it may have healed"
    assert desk.ready(0, initial="", after=QuorumId(1, 4)) == ["store 1.5 []", "a0: resume", "a1: resume", "a0: resume"]
    assert desk.wait(2.0) == [], "once is enough"
    desk.dies(0)
    desk.ready(0, step=4)
    assert desk.ready(1, step=4)[0] == "store 1.6 [0.2 1.1]"


def test_one_that_looked_before_the_last_was_lost_is_kept() -> None:
    desk = working(2, step=4)
    saved(desk, 4)
    desk.dies(0)
    assert desk.ready(0, step=4) == [], "group 1 has not taken its new quorum yet"
    assert desk.dies(1) == ["store 1.3 []", "a0: resume", "a1: resume"]
    assert desk.wait(FOUNDING_GRACE / 2) == []
    assert desk.wait(FOUNDING_GRACE)[0] == "store 1.4 [0.1]", "nor is the other one waited for for ever"


def test_a_failed_save_is_told_and_does_not_count() -> None:
    desk = working(2, step=4)
    saved(desk, 4, "no space left on device")
    assert "no space left on device" in desk.events()[-1]
    assert "a0: stop: job job: every group that held the state is lost" in all_die(desk)[1]


def test_a_start_before_a_known_checkpoint_is_refused() -> None:
    """Its directory was emptied, or is another one: steps must not be made twice in silence."""
    desk = working(2, step=4)
    saved(desk, 4)
    all_die(desk)
    desk.ready(0, step=4)
    (text,) = desk.ready(1, step=0)
    assert "group 1 (incarnation 1) starts at step 0, but there is a checkpoint of step 4" in text


def test_at_the_start_the_newest_checkpoint_wins() -> None:
    desk = Desk(3)
    desk.ready(0), desk.ready(1)
    found = desk.ready(2, step=120, initial="later")
    assert [text[:10] for text in found] == ["a0: refuse", "a1: refuse"]
    assert "starts at step 0, but there is a checkpoint of step 120" in found[0]


def test_the_same_step_with_other_contents_is_refused() -> None:
    desk = Desk(2)
    desk.ready(0, step=120)
    (text,) = desk.ready(1, step=120, initial="other")
    assert "group 1 (incarnation 0) differs from group 0 in the protected state" in text


def test_a_job_that_never_gets_to_the_next_checkpoint_is_given_up() -> None:
    desk = working(1, step=4)
    saved(desk, 4)
    for turn in range(RESUMES):
        assert "a0: resume" in desk.dies(0), turn
        desk.ready(0, step=4)
        desk.adopts(0, 3 + 2 * turn, step=5)
    found = desk.dies(0)
    assert "did not get from the checkpoint of step 4 to the next one" in found[1]


def test_a_new_checkpoint_makes_the_count_begin_again() -> None:
    desk = working(1, step=4)
    for turn in range(2 * RESUMES):
        saved(desk, 4 + turn)
        assert "a0: resume" in desk.dies(0), turn
        desk.ready(0, step=4 + turn)
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


def test_with_a_checkpoint_the_operator_may_give_the_last_holder_up() -> None:
    desk = working(2, step=4)
    desk.suspects(0)
    desk.adopts(1, 2, step=5)
    desk.dies(1)
    with pytest.raises(ValueError, match="only one that holds the state"):
        desk.lighthouse.evict(0, desk.now)
    saved(desk, 4)
    assert "a0: resume" in desk.lines(desk.lighthouse.evict(0, desk.now))


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
