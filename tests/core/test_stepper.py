"""Golden scenarios of a member: what it is told, what it does about it, and what it does next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.core.actions import (
    Compute,
    Drop,
    Exchange,
    Finish,
    Form,
    Heal,
    Leave,
    RollCall,
    Tell,
    Wait,
)
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    ControlWord,
    Finished,
    Member,
    Policy,
    Quorum,
    QuorumId,
    Ready,
    Standing,
    Trouble,
)
from planaria.core.stepper import Stepper

FRESH = Standing(0, False)


def member(group: int) -> Member:
    return Member(group, 0)


def id_of(number: int, epoch: int = 1) -> QuorumId:
    return QuorumId(epoch, number)


def quorum(number: int, *groups: int, urgent: bool = True, founding: bool = False, epoch: int = 1) -> Quorum:
    members = tuple(member(g) for g in groups)
    return Quorum(id_of(number, epoch), members, ("",) * len(groups), urgent, "lineage", "", founding)


def stepper(group: int = 0, shards: int = 6, total: int = 10, policy: Policy = Policy.REDISTRIBUTE) -> Stepper:
    ready = Ready(member(group), f"host{group}:1", (), "start", shards, total)
    return Stepper(ready, policy, groups=3)


def under(me: Stepper, new: Quorum, standings: list[Standing]) -> list[object]:
    """The member hears of ``new``, its communicator is formed and the roll is called. Returns the roll's effects."""
    me.hear(new)
    me.formed(new.id)
    action = me.next()
    assert isinstance(action, RollCall) and action.quorum == new.id
    standings = list(standings)
    standings[new.members.index(me.me)] = action.standing
    return list(me.rolled(new.id, standings))


def working(group: int = 0, **how: object) -> Stepper:
    """At work in a founding quorum of groups 0, 1 and 2."""
    me = stepper(group, **how)  # type: ignore[arg-type]
    under(me, quorum(1, 0, 1, 2, founding=True), [FRESH] * 3)
    return me


def compute(me: Stepper) -> list[int]:
    """Does what there is to compute. Returns the shards."""
    done: list[int] = []
    while isinstance(action := me.next(), Compute):
        me.shard_done(action.shard)
        done.append(action.shard)
    return done


def commit(me: Stepper, words: list[ControlWord] | None = None) -> list[object]:
    """Computes, exchanges and applies a step."""
    compute(me)
    action = me.next()
    assert isinstance(action, Exchange)
    own = me.word(0.1)
    me.exchanged(action.quorum, words if words is not None else [own] * len(action.owned))
    return list(me.applied())


# --- the start ------------------------------------------------------------------------------------------------


def test_nothing_to_do_before_a_quorum() -> None:
    assert stepper().next() == Wait(parked=True)


def test_a_quorum_is_formed_then_the_roll_is_called_then_there_is_work() -> None:
    me = stepper()
    first = quorum(1, 0, 1, 2, founding=True)
    assert me.hear(first) == [Form(first)]
    assert me.next() == Wait(parked=True)
    assert me.formed(first.id) == []
    assert me.next() == RollCall(first.id, FRESH)
    assert me.rolled(first.id, [FRESH] * 3) == [Tell(Adopted(member(0), first.id, 0))]
    assert me.next() == Compute(0, 0, last=False)
    me.shard_done(0)
    assert me.next() == Compute(0, 1, last=True)
    me.shard_done(1)
    owned = (frozenset({0, 1}), frozenset({2, 3}), frozenset({4, 5}))
    assert me.next() == Exchange(first.id, 0, owned)
    assert me.work() == Exchange(first.id, 0, owned)


def test_the_exchange_of_a_step_is_its_commit_and_the_next_needs_no_roll_call() -> None:
    me = working()
    assert commit(me) == []
    assert me.step == 1 and me.under == id_of(1)
    assert isinstance(me.next(), Compute)


def test_measured_speeds_move_shards() -> None:
    me = working()
    commit(me, [ControlWord(0, NO_QUORUM, s) for s in (0.1, 0.1, 1.0)])
    counts = [len(o) for o in me.work().owned]
    assert sum(counts) == 6 and counts[2] == 1


# --- fences ---------------------------------------------------------------------------------------------------


def test_what_is_older_than_the_newest_is_not_heard() -> None:
    me = working()
    me.hear(quorum(3, 0, 1))
    assert me.hear(quorum(2, 0, 1, 2)) == []
    assert me.hear(quorum(3, 0, 1)) == [], "told again after a reconnect"
    assert me.target is not None and me.target.id == id_of(3)


def test_a_new_epoch_is_newer_whatever_its_numbers() -> None:
    me = working()
    me.hear(quorum(9, 0, 1, 2))
    assert me.hear(quorum(1, 0, 1, epoch=2))[-1] == Form(quorum(1, 0, 1, epoch=2))
    assert me.hear(quorum(10, 0, 1, 2)) == []


def test_who_is_left_out_drops_everything_and_asks_to_join_again() -> None:
    me = working()
    effects = me.hear(quorum(2, 1, 2))
    assert effects[0] == Drop(id_of(1))
    assert isinstance(effects[1], Tell) and isinstance(effects[1].report, Ready)
    assert effects[1].report.after == id_of(2), "so that nobody takes it for an old message"
    assert not me.settled
    assert me.next() == Wait(parked=True)


def test_a_fenced_member_offers_nothing_in_the_roll_call() -> None:
    me = working()
    compute(me)
    me.hear(quorum(2, 1, 2))
    me.hear(quorum(3, 0, 1, 2))
    me.formed(id_of(3))
    action = me.next()
    assert isinstance(action, RollCall) and not action.standing.settled and action.standing.have == frozenset()


def test_whoever_was_slow_before_a_loss_gets_less_of_what_was_lost() -> None:
    me = working()
    commit(me, [ControlWord(0, NO_QUORUM, seconds) for seconds in (0.1, 0.3, 0.1)])
    compute(me)
    under(me, quorum(2, 0, 1), [FRESH, Standing(1, True, frozenset({3}), id_of(1), 0.3)])
    more = me.work().owned
    assert (len(more[0]), len(more[1])) == (5, 1)


# --- a loss in the middle of a step ---------------------------------------------------------------------------


def test_an_urgent_quorum_interrupts_and_what_was_computed_is_kept() -> None:
    me = working()
    compute(me)
    assert me.hear(quorum(2, 0, 1)) == [Drop(id_of(1)), Form(quorum(2, 0, 1))]
    me.formed(id_of(2))
    assert me.next() == RollCall(id_of(2), Standing(0, True, frozenset({0, 1})))


def test_the_lost_shards_are_inherited_and_only_they_are_computed() -> None:
    me = working()
    compute(me)
    under(me, quorum(2, 0, 1), [FRESH, Standing(0, True, frozenset({2, 3}))])
    owned = me.work().owned
    assert sorted(s for each in owned for s in each) == list(range(6))
    assert owned[0] >= {0, 1} and owned[1] >= {2, 3}
    assert set(compute(me)) == owned[0] - {0, 1}
    assert me.recomputed == len(owned[0]) - 2


def test_what_was_inherited_is_counted_in_later_steps_too() -> None:
    me = working()
    commit(me)
    before = me.given
    compute(me)
    under(me, quorum(2, 0, 1), [Standing(1, True, before, id_of(1)), Standing(1, True, frozenset({2, 3}), id_of(1))])
    assert before == {0, 1} and me.recomputed == len(me.given - before) > 0


def test_what_counts_for_another_is_given_up() -> None:
    """Both hold shards 0 and 1; the other's are part of a larger sum, which cannot be taken apart."""
    me = working()
    compute(me)
    under(me, quorum(2, 0, 1), [FRESH, Standing(0, True, frozenset({0, 1, 2, 3}))])
    assert me.have == set()
    assert me.work().owned[1] >= {0, 1, 2, 3}
    assert sorted(s for each in me.work().owned for s in each) == list(range(6))


def test_every_member_comes_to_the_same_shares() -> None:
    standings = [Standing(0, True, frozenset({0})), Standing(0, True, frozenset({2, 3})), Standing(0, True)]
    shares = []
    for group in range(3):
        me = working(group)
        me.have = set(standings[group].have)
        under(me, quorum(2, 0, 1, 2), standings)
        shares.append(me.work().owned)
    assert shares[0] == shares[1] == shares[2]


def test_an_exchange_that_ended_as_a_newer_quorum_was_heard_is_a_commit() -> None:
    me = working()
    compute(me)
    word = me.word(0.1)
    me.hear(quorum(2, 0, 1))
    me.exchanged(id_of(1), [word] * 3)
    me.applied()
    assert me.step == 1
    me.formed(id_of(2))
    assert me.next() == RollCall(id_of(2), Standing(1, True, frozenset(), id_of(1), 0.1))


def test_trouble_is_told_once_and_then_there_is_nothing_to_do() -> None:
    me = working()
    assert me.broken(id_of(1), "rank 1 is gone") == [Tell(Trouble(member(0), id_of(1), 0, "rank 1 is gone"))]
    assert me.broken(id_of(1), "rank 1 is gone") == []
    assert me.next() == Wait(parked=False)


def test_trouble_with_what_was_given_up_is_nobody_s_business() -> None:
    me = working()
    me.hear(quorum(2, 0, 1))
    assert me.broken(id_of(1), "given up") == []
    assert me.formed(id_of(1)) == [Drop(id_of(1))]
    assert me.rolled(id_of(1), [FRESH] * 3) == []


# --- healing --------------------------------------------------------------------------------------------------


def test_who_finished_the_step_is_right_and_the_others_heal() -> None:
    me = working()
    compute(me)
    ahead = Standing(1, True, under=id_of(1))
    assert under(me, quorum(2, 0, 1), [FRESH, ahead]) == [], "not adopted before it has healed"
    assert me.next() == Heal(id_of(2), 1, sources=(1,), healers=(0,), receive=True, under=id_of(1))
    assert me.healed(id_of(2)) == [Tell(Adopted(member(0), id_of(2), 1))]
    assert me.step == 1 and me.under == id_of(1) and me.have == set()
    assert isinstance(me.next(), Compute)


def test_a_source_is_adopted_at_once_and_goes_on_when_it_has_given() -> None:
    me = working()
    commit(me)
    effects = under(me, quorum(2, 0, 1), [FRESH, Standing(0, True)])
    assert effects == [Tell(Adopted(member(0), id_of(2), 1))]
    assert me.next() == Heal(id_of(2), 1, sources=(0,), healers=(1,), receive=False, under=id_of(1))
    assert me.healed(id_of(2)) == []
    assert isinstance(me.next(), Compute)


def test_a_joiner_counts_only_when_it_has_healed() -> None:
    me = stepper(2)
    under(me, quorum(4, 0, 1, 2), [Standing(5, True), Standing(5, True), FRESH])
    assert not me.settled
    assert me.next() == Heal(id_of(4), 5, sources=(0, 1), healers=(2,), receive=True)
    me.healed(id_of(4))
    assert me.settled and me.step == 5


def test_a_member_that_is_behind_keeps_its_state_until_the_new_one_is_complete() -> None:
    """Its only source dies while it heals. The older state is whole, so it counts again."""
    me = working()
    under(me, quorum(2, 0, 1), [FRESH, Standing(1, True, under=id_of(1))])
    assert isinstance(me.next(), Heal)
    me.broken(id_of(2), "rank 1 is gone")
    assert under(me, quorum(3, 0), [FRESH]) == [Tell(Adopted(member(0), id_of(3), 0))]
    assert isinstance(me.next(), Compute)


def test_a_state_that_arrived_as_a_newer_quorum_was_heard_is_the_member_s_state() -> None:
    me = working()
    under(me, quorum(2, 0, 1), [FRESH, Standing(3, True, under=id_of(1))])
    assert isinstance(me.next(), Heal)
    me.hear(quorum(3, 0, 1))  # while the last stripe is copied
    assert me.healed(id_of(2)) == [Tell(Adopted(member(0), id_of(2), 3))]
    me.formed(id_of(3))
    assert me.next() == RollCall(id_of(3), Standing(3, True, under=id_of(1)))


def test_a_state_that_arrived_as_the_member_was_fenced_does_not_count() -> None:
    me = stepper(2)
    under(me, quorum(4, 0, 1, 2), [Standing(5, True), Standing(5, True), FRESH])
    me.next()
    (asks,) = [effect for effect in me.hear(quorum(5, 0, 1)) if isinstance(effect, Tell)]
    # But it is told of, for it is whole, and may come to be all that is left.
    assert me.healed(id_of(4)) == [Tell(Adopted(member(2), id_of(4), 5)), asks]
    assert not me.settled and me.step == 5


def test_an_old_healing_changes_nothing() -> None:
    me = working()
    assert me.healed(id_of(1)) == []


# --- when nobody holds a settled state ------------------------------------------------------------------------


def test_if_nobody_in_the_roll_call_is_settled_all_ask_to_join_again() -> None:
    me = stepper(2)
    me.hear(quorum(4, 1, 2))
    me.formed(id_of(4))
    me.next()
    drop, tell = me.rolled(id_of(4), [FRESH, FRESH])
    assert drop == Drop(id_of(4))
    assert isinstance(tell, Tell) and isinstance(tell.report, Ready) and tell.report.after == id_of(4)
    assert me.next() == Wait(parked=True)


def test_the_newest_complete_state_counts_if_the_lighthouse_says_so() -> None:
    me = stepper(2)
    fenced = Standing(7, False, under=id_of(1))
    under(me, quorum(5, 1, 2, founding=True), [fenced, FRESH])
    assert me.next() == Heal(id_of(5), 7, sources=(0,), healers=(1,), receive=True, under=id_of(1))


def test_under_shrink_the_later_quorum_s_commit_of_a_step_is_right() -> None:
    """Member 0 committed step 0 under 1.1, was left out of 1.2 and has not heard of it."""
    me = working(policy=Policy.SHRINK)
    commit(me)
    under(me, quorum(3, 0, 1, 2), [FRESH, Standing(1, True, under=id_of(2)), Standing(1, True, under=id_of(2))])
    assert me.next() == Heal(id_of(3), 1, sources=(1, 2), healers=(0,), receive=True, under=id_of(2))


# --- planned changes ------------------------------------------------------------------------------------------

JOIN = quorum(2, 0, 1, 2, 3, urgent=False)
LEAVE = quorum(2, 1, 2, urgent=False)


def test_a_planned_change_is_built_beside_the_work() -> None:
    me = working()
    assert me.hear(JOIN) == [Form(JOIN)]
    assert isinstance(me.next(), Compute)
    assert me.word(0.1).planned == NO_QUORUM, "not built yet"
    me.formed(JOIN.id)
    assert me.word(0.1).planned == JOIN.id


def test_a_planned_change_is_taken_when_all_have_named_it() -> None:
    me = working()
    me.hear(JOIN)
    me.formed(JOIN.id)
    assert commit(me) == [Drop(id_of(1)), Tell(Adopted(member(0), JOIN.id, 1))]
    assert me.next() == RollCall(JOIN.id, Standing(1, True, under=id_of(1), seconds_per_shard=0.1))


def test_a_planned_change_waits_for_the_slowest_to_build_it() -> None:
    me = working()
    me.hear(JOIN)
    me.formed(JOIN.id)
    word = me.word(0.1)
    assert commit(me, [word, word, replace(word, planned=NO_QUORUM)]) == []
    assert me.next() == Compute(1, 0, last=False)
    assert commit(me)[0] == Drop(id_of(1)), "the next step it is taken"


def test_a_change_that_was_built_after_the_word_was_said_is_not_taken() -> None:
    me = working()
    me.hear(JOIN)
    compute(me)
    me.word(0.1)
    me.formed(JOIN.id)
    me.exchanged(id_of(1), [ControlWord(0, JOIN.id)] * 3)
    assert me.applied() == []


def exchange_naming(me: Stepper, named: QuorumId) -> None:
    """Computes and exchanges a step in which all ranks of all members have named what this stepper has not heard of."""
    compute(me)
    word = me.word(0.1, named)
    assert word.planned == named
    me.advertised(named)
    me.hear(JOIN)
    me.advertised(named)
    me.exchanged(id_of(1), [word] * 3)


def test_a_change_that_one_rank_alone_knew_of_is_taken_if_all_did() -> None:
    me = working()
    exchange_naming(me, JOIN.id)
    me.formed(JOIN.id)
    assert me.applied() == [Drop(id_of(1)), Tell(Adopted(member(0), JOIN.id, 1))]


def test_a_change_that_not_all_ranks_knew_of_is_not_taken() -> None:
    me = working()
    compute(me)
    word = me.word(0.1, JOIN.id)
    me.advertised(NO_QUORUM)  # as the round after the exchange has it
    me.hear(JOIN)
    me.exchanged(id_of(1), [word] * 3)
    assert me.applied() == []
    assert commit(me) == [], "not built yet"


def test_what_one_rank_alone_knew_of_is_kept_though_all_hear_of_a_newer_plan() -> None:
    me = working()
    newer = quorum(3, 0, 1, 2, 4, urgent=False)
    compute(me)
    word = me.word(0.1, JOIN.id)
    for heard in (JOIN, newer):
        assert me.hear(heard) == [Form(heard)]
        me.advertised(JOIN.id)
    me.exchanged(id_of(1), [word] * 3)
    assert me.applied()[-1] == Tell(Adopted(member(0), JOIN.id, 1))
    assert me.planned is not None and me.planned.id == newer.id


def test_a_newer_plan_replaces_one_that_was_not_named_yet() -> None:
    me = working()
    me.hear(JOIN)
    newer = quorum(3, 0, 1, 2, 4, urgent=False)
    assert me.hear(newer) == [Drop(JOIN.id), Form(newer)]


def test_a_plan_that_was_named_is_kept_until_the_outcome_is_known() -> None:
    me = working()
    me.hear(JOIN)
    me.formed(JOIN.id)
    compute(me)
    word = me.word(0.1)
    newer = quorum(3, 0, 1, 2, 4, urgent=False)
    assert me.hear(newer) == [Form(newer)]
    me.exchanged(id_of(1), [word] * 3)
    assert me.planned is not None and me.planned.id == newer.id


def test_an_urgent_quorum_overrides_a_plan() -> None:
    me = working()
    me.hear(JOIN)
    me.formed(JOIN.id)
    urgent = quorum(3, 0, 1)
    assert me.hear(urgent) == [Drop(id_of(1)), Drop(JOIN.id), Form(urgent)]
    assert me.planned is None


def test_a_plan_that_cannot_be_built_is_told_and_the_work_goes_on() -> None:
    me = working()
    me.hear(JOIN)
    assert me.broken(JOIN.id, "timed out") == [Tell(Trouble(member(0), JOIN.id, 0, "timed out"))]
    assert isinstance(me.next(), Compute)


def test_who_leaves_does_so_with_the_others() -> None:
    me = working()
    assert me.hear(LEAVE) == [], "nothing to build"
    assert me.word(0.1).planned == LEAVE.id
    assert commit(me) == [Drop(id_of(1))]
    assert me.next() == Leave("group 0 was drained", drained=True)


def test_a_joiner_waits_in_the_roll_call_of_the_plan() -> None:
    me = stepper(3)
    assert me.hear(JOIN) == [Form(JOIN)]
    me.formed(JOIN.id)
    assert me.next() == RollCall(JOIN.id, FRESH)
    other = quorum(3, 0, 1, 3, urgent=False)
    assert me.hear(other) == [Drop(JOIN.id), Form(other)], "the first plan was withdrawn"
    assert me.next() == Wait(parked=True)


# --- policy shrink --------------------------------------------------------------------------------------------


def test_under_shrink_everybody_keeps_its_slot_and_lost_ones_are_left_out() -> None:
    me = working(policy=Policy.SHRINK)
    compute(me)
    under(me, quorum(2, 0, 2), [FRESH, Standing(0, True, frozenset({4, 5}))])
    action = me.next()
    assert isinstance(action, Exchange)
    assert action.owned == (frozenset({0, 1}), frozenset({4, 5}))
    assert action.present == 4


def test_under_shrink_groups_without_a_slot_share_all_if_nobody_else_is_left() -> None:
    me = stepper(7, policy=Policy.SHRINK)
    under(me, quorum(5, 7, founding=True), [FRESH])
    assert me.work().present == 6


# --- the end --------------------------------------------------------------------------------------------------


def test_after_the_last_step_the_roll_is_called_and_all_finish_together() -> None:
    me = working(total=1)
    commit(me)
    assert me.next() == RollCall(id_of(1), Standing(1, True, under=id_of(1), seconds_per_shard=0.1))
    there = Standing(1, True, under=id_of(1), seconds_per_shard=0.1)
    assert me.rolled(id_of(1), [there] * 3) == [Tell(Adopted(member(0), id_of(1), 1))]
    assert me.next() == Finish(1)
    assert me.finished("digest") == [Tell(Finished(member(0), 1, "digest"))]


def test_who_has_finished_first_stays_until_the_others_have_healed() -> None:
    me = working(total=1)
    commit(me)
    there = Standing(1, True, under=id_of(1), seconds_per_shard=0.1)
    under(me, quorum(2, 0, 1), [there, Standing(0, True)])
    assert me.next() == Heal(id_of(2), 1, sources=(0,), healers=(1,), receive=False, under=id_of(1))
    me.healed(id_of(2))
    assert me.next() == RollCall(id_of(2), there), "is everybody there now?"
    me.rolled(id_of(2), [there, there])
    assert me.next() == Finish(1)


def test_asked_to_stop_it_says_so_and_leaves_with_all_others_after_the_commit() -> None:
    me = working()
    me.stop()
    assert me.word(0.1).stop
    other = working(1)
    commit(other, [me.word(0.1), ControlWord(0), ControlWord(0)])
    assert other.next() == Leave("the job was asked to stop")


def test_asked_to_stop_outside_a_quorum_it_just_leaves() -> None:
    me = stepper()
    me.stop()
    assert me.next() == Leave("the job was asked to stop")


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 13])
def test_every_shard_has_one_owner_whatever_was_lost(shards: int) -> None:
    for held in range(shards + 1):
        me = working(shards=shards)
        me.have = set(me.work().owned[0])
        mine = frozenset(range(held)) - me.have
        under(me, quorum(2, 0, 1), [FRESH, Standing(0, True, mine)])
        counted = sorted(s for each in me.work().owned for s in each)
        assert counted == list(range(shards))
