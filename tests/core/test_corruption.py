"""Who is right when copies differ, and what a member does about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.actions import Compute, Disputed, Exchange, Heal, RollCall, Tell, Wait
from planaria.core.assignment import contiguous
from planaria.core.corruption import Recheck, compared, odd_ones, signs
from planaria.core.messages import NOTHING, Adopted, ControlWord, Policy, Ready, Standing, Trouble
from planaria.core.stepper import Stepper
from planaria.core.tree import maximal_nodes
from tests.core.test_stepper import commit, compute, id_of, member, quorum, stepper, under, working

values = st.lists(st.integers(0, 3), min_size=1, max_size=7)


@given(values)
def test_most_are_right_or_nobody_is(said: list[int]) -> None:
    odd = odd_ones(said)
    common, count = Counter(said).most_common(1)[0]
    if 2 * count > len(said):
        assert odd == {position for position, value in enumerate(said) if value != common}
    else:
        assert odd is None


@given(values, st.permutations(range(7)))
def test_who_is_odd_does_not_depend_on_the_order(said: list[int], order: list[int]) -> None:
    places = [place for place in order if place < len(said)]
    odd, moved = odd_ones(said), odd_ones([said[place] for place in places])
    assert (odd is None) == (moved is None)
    if odd is not None and moved is not None:
        assert {places[position] for position in moved} == odd


@given(st.integers(0, 50), st.integers(1, 5), st.integers(0, 12), st.integers(0, 4), st.floats(0, 1))
def test_every_watched_shard_is_computed_by_exactly_one_other_member(
    step: int, members: int, more: int, attempt: int, share: float
) -> None:
    shards = members + more
    recheck = Recheck(share, seed=5)
    owned = contiguous(shards, (1.0,) * members)
    given_out = recheck.checkers(step, owned, attempt)
    checked = sorted(shard for each in given_out for shard in each)
    assert checked == (sorted(recheck.chosen(step, shards)) if members > 1 else [])
    assert all(not own & twice for own, twice in zip(owned, given_out, strict=False))


def test_the_share_of_watched_shards_and_whose_turn_it_is() -> None:
    assert Recheck(1.0, 0).chosen(7, 5) == {0, 1, 2, 3, 4}
    assert Recheck(0.0, 0).chosen(7, 5) == frozenset()
    count = sum(len(Recheck(0.25, 3).chosen(step, 8)) for step in range(1000))
    assert 1800 < count < 2200
    owned = contiguous(3, (1.0,) * 3)
    pairs = {
        rank for step in range(2) for rank, twice in enumerate(Recheck(1.0, 0).checkers(step, owned, 0)) if 0 in twice
    }
    assert pairs == {1, 2}  # of shard 0, which is member 0's
    again = [Recheck(1.0, 0).checkers(4, owned, attempt) for attempt in range(2)]
    assert again[0] != again[1]  # another pair is asked the next time


@given(st.integers(1, 12), st.data())
def test_what_is_in_dispute_takes_with_it_what_its_sum_holds_besides(shards: int, data: st.DataObject) -> None:
    """A sum of siblings cannot be taken apart: what is left are sums that are held, and all of those without doubt."""
    me = stepper(0, shards=shards)
    me.have = set(data.draw(st.sets(st.integers(0, shards - 1))))
    held = maximal_nodes(me.have, shards)
    doubtful = frozenset(data.draw(st.sets(st.integers(0, shards - 1))))
    me.dispute(doubtful)
    left = [node for node in held if doubtful.isdisjoint(range(node.start, node.stop))]
    assert [*maximal_nodes(me.have, shards)] == left


# --- states that differ ---------------------------------------------------------------------------------------


def in_doubt(group: int = 0) -> Stepper:
    """At step 1 in a quorum of groups 0, 1 and 2, of which the control words showed different states."""
    me = working(group)
    commit(me)
    compute(me)
    assert isinstance(me.next(), Exchange)
    me.recount()
    return me


def standings(me: Stepper, *checksums: int) -> list[Standing]:
    action = me.next()
    assert isinstance(action, RollCall)
    mine = action.standing
    shares = contiguous(6, (1.0,) * 3)
    return [replace(mine, have=shares[rank], checksum=each) for rank, each in enumerate(checksums)]


def test_the_odd_one_heals_and_the_others_go_on_with_what_they_have() -> None:
    me = in_doubt(0)
    assert me.rolled(id_of(1), standings(me, 5, 9, 5)) == [Tell(Adopted(member(0), id_of(1), 1))]
    assert me.next() == Heal(id_of(1), 1, (0, 2), (1,), receive=False, checksum=5, under=id_of(1))
    me.healed(id_of(1))
    action = me.next()  # group 1's shards are to be computed anew, some of them by whoever is free
    assert me.have == {0, 1} and isinstance(action, Compute | Exchange)


def test_what_the_odd_one_has_computed_counts_no_more_and_its_state_neither() -> None:
    me = in_doubt(1)
    assert me.rolled(id_of(1), standings(me, 5, 9, 5)) == []
    assert me.next() == Heal(id_of(1), 1, (0, 2), (1,), receive=True, checksum=5, under=id_of(1))
    assert not me.settled and not me.have
    assert me.healed(id_of(1)) == [Tell(Adopted(member(1), id_of(1), 1))]
    assert me.settled and me.step == 1


def test_what_came_in_a_healing_and_is_not_what_was_agreed_on_does_not_count() -> None:
    me = in_doubt(1)
    me.rolled(id_of(1), standings(me, 5, 9, 5))
    assert isinstance(me.next(), Heal)
    (told,) = me.spoilt(id_of(1))
    assert isinstance(told, Tell) and isinstance(told.report, Trouble)  # the others are to call the roll again
    assert me.next() == Wait(parked=True) and not me.settled
    me.hear(quorum(2, 0, 1, 2))
    me.formed(id_of(2))
    me.rolled(id_of(2), [Standing(1, True, checksum=8), Standing(1, False), Standing(1, True, checksum=5)])
    assert isinstance(me.next(), Disputed)  # one of two has changed, and no third bears either out


def test_if_those_who_could_heal_it_die_its_own_state_is_not_taken_up_again() -> None:
    me = in_doubt(1)
    me.rolled(id_of(1), standings(me, 5, 9, 5))
    assert me.next() == Heal(id_of(1), 1, (0, 2), (1,), receive=True, checksum=5, under=id_of(1))
    effects = under(me, quorum(2, 1), [Standing(1, False)])
    assert any(isinstance(each, Tell) and isinstance(each.report, Ready) for each in effects)  # it asks to be healed


def known_to_be_wrong() -> Stepper:
    """Group 1, at step 1, could not be healed; the roll is called of a founding quorum, 3, of groups 0, 1 and 2."""
    me = in_doubt(1)
    me.rolled(id_of(1), standings(me, 5, 9, 5))
    under(me, quorum(2, 1), [Standing(1, False)])
    me.hear(quorum(3, 0, 1, 2, founding=True))  # the lighthouse knows of nobody else whose state counts
    me.formed(id_of(3))
    return me


def test_who_is_known_to_be_wrong_is_healed_when_the_job_goes_on_with_what_others_hold() -> None:
    """They were fenced, and what they hold is whole: also if there is only one of them, or theirs is older."""
    me = known_to_be_wrong()
    assert me.next() == RollCall(id_of(3), Standing(NOTHING, False, seconds_per_shard=0.1))
    for said in ([Standing(1, False, checksum=5)] * 2, [Standing(0, False), Standing(NOTHING, False)]):
        me = known_to_be_wrong()
        me.rolled(id_of(3), [said[0], Standing(NOTHING, False), said[1]])
        sources = tuple(rank for rank, each in ((0, said[0]), (2, said[1])) if each.step != NOTHING)
        action = me.next()
        assert isinstance(action, Heal) and action.receive and action.sources == sources
        me.healed(id_of(3))
        assert me.settled and me.step == said[0].step


def test_who_is_known_to_be_wrong_does_not_begin_the_job_anew_when_all_others_are_lost() -> None:
    me = known_to_be_wrong()
    me.rolled(id_of(3), [Standing(NOTHING, False)] * 3)
    assert me.next() == Disputed(1, (member(1),))


@pytest.mark.parametrize("checksums", [(5, 9), (5, 9, 7)])
def test_nobody_can_tell_who_is_right(checksums: tuple[int, ...]) -> None:
    me = in_doubt(0)
    said = [Standing(1, True, frozenset(), id_of(1), checksum=each) for each in checksums]
    me.rolled(id_of(1), [*said, Standing(0, False)][:3])
    assert isinstance(me.next(), Disputed)


def test_who_is_left_alone_with_the_doubt_does_not_go_on() -> None:
    me = in_doubt(0)
    under(me, quorum(2, 0, 1), [Standing(1, True), Standing(0, False)])  # group 1 comes back, group 2 is gone
    assert isinstance(me.next(), Disputed)


def test_a_doubt_is_not_forgotten_because_those_who_share_it_end_first() -> None:
    me = working(0)
    commit(me)
    under(me, quorum(2, 0, 1), [Standing(1, True, checksum=5), Standing(1, True, checksum=5)])
    me.hear(quorum(3, 0, 1))
    me.formed(id_of(3))
    me.hear(quorum(4, 0))  # group 1 has ended while the result of the roll call was on its way
    me.rolled(id_of(3), [Standing(1, True, checksum=5), Standing(1, True, checksum=9)])
    me.formed(id_of(4))
    action = me.next()
    assert isinstance(action, RollCall)
    me.rolled(id_of(4), [replace(action.standing, checksum=5)])
    assert isinstance(me.next(), Disputed)


def test_two_that_agree_have_no_doubt() -> None:
    me = in_doubt(0)
    me.hear(quorum(2, 0, 2))
    me.formed(id_of(2))
    action = me.next()
    assert isinstance(action, RollCall)
    me.rolled(id_of(2), [replace(action.standing, checksum=5)] * 2)
    assert isinstance(me.next(), Compute)


def test_one_that_differs_again_after_healing_ends_itself_alone() -> None:
    me, other = in_doubt(1), in_doubt(0)
    for each in (me, other):
        each.rolled(id_of(1), standings(each, 5, 9, 5))
        each.healed(id_of(1)) if isinstance(each.next(), Heal) else None
        compute(each)
        each.recount()
        each.rolled(id_of(1), standings(each, 5, 8, 5))
    assert me.next() == Disputed(1, (member(1),))
    assert isinstance(other.next(), Heal)


def test_another_one_that_differs_in_the_same_step_heals_as_the_first_did() -> None:
    me = in_doubt(2)
    me.rolled(id_of(1), standings(me, 5, 9, 5))
    me.healed(id_of(1))
    compute(me)
    me.recount()
    me.rolled(id_of(1), standings(me, 5, 5, 8))
    assert me.next() == Heal(id_of(1), 1, (0, 1), (2,), receive=True, checksum=5, under=id_of(1))


def test_however_many_differ_in_a_step_the_job_goes_on_as_long_as_more_than_half_agree() -> None:
    me = stepper(0)
    under(me, quorum(1, *range(5), founding=True), [Standing(0, False)] * 5)
    commit(me)
    shares = contiguous(6, (1.0,) * 5)
    for odd in (1, 2, 3, 4):  # one after the other
        compute(me)
        me.recount()
        action = me.next()
        assert isinstance(action, RollCall)
        sums = [9 if rank == odd else 5 for rank in range(5)]
        said = [replace(action.standing, have=shares[rank], checksum=each) for rank, each in enumerate(sums)]
        me.rolled(id_of(1), said)
        action = me.next()
        assert isinstance(action, Heal) and action.healers == (odd,)
        me.healed(id_of(1))


def test_states_that_the_job_begins_with_again_are_compared_but_not_those_that_scripts_made() -> None:
    assert signs(Standing(3, settled=False)) and signs(Standing(0, settled=True)) and not signs(Standing(0, False))
    old = [Standing(3, False, checksum=each) for each in (5, 5, 8)]
    assert compared(old) == [0, 1, 2] and compared([*old, Standing(4, False)]) == [3]
    assert compared([*old, Standing(2, True)]) == [3]  # one whose state counts is right, whatever its step
    me = stepper(2)
    under(me, quorum(1, 0, 1, 2, founding=True), old)
    assert me.next() == Heal(id_of(1), 3, (0, 1), (2,), receive=True, checksum=5)


def test_a_difference_that_no_roll_call_shows_does_not_go_on_for_ever() -> None:
    me = in_doubt(0)
    for _ in range(2):
        me.rolled(id_of(1), standings(me, 5, 5, 5))
        compute(me)
        me.recount()
    me.rolled(id_of(1), standings(me, 5, 5, 5))
    assert isinstance(me.next(), Disputed)


def test_who_heals_learns_how_often_the_step_was_counted() -> None:
    """Or it would have other shards computed twice than the others, and be patient when they are not."""
    back = stepper(1)
    said = [Standing(1, True, checksum=5, recounts=1), Standing(0, False)]
    under(back, quorum(2, 0, 1), said)
    assert back.next() == Heal(id_of(2), 1, (0,), (1,), receive=True, checksum=5)
    back.healed(id_of(2))
    back.recount()
    action = back.next()
    assert isinstance(action, RollCall) and action.standing.recounts == 2


# --- shards that are computed twice ---------------------------------------------------------------------------


def watching(group: int) -> Stepper:
    ready = Ready(member(group), f"host{group}:1", (), "start", 6, 10)
    me = Stepper(ready, Policy.REDISTRIBUTE, groups=3, recheck=Recheck(1.0, 0))
    under(me, quorum(1, 0, 1, 2, founding=True), [Standing(0, False)] * 3)
    return me


def test_others_shards_come_before_the_last_of_its_own() -> None:
    me = watching(0)
    order = []
    while isinstance(action := me.next(), Compute):
        order.append((action.shard, action.last, action.again))
        (me.shard_checked if action.again else me.shard_done)(action.shard)
    twice = sorted(Recheck(1.0, 0).checkers(0, contiguous(6, (1.0,) * 3), 0)[0])
    assert order == [(0, False, False), *((shard, False, True) for shard in twice), (1, True, False)]
    assert isinstance(action, Exchange) and action.twice[0] == set(twice) and me.have == {0, 1}


def test_a_disputed_shard_is_computed_again_by_two() -> None:
    members = [watching(group) for group in range(3)]
    for me in members:
        while isinstance(action := me.next(), Compute):
            (me.shard_checked if action.again else me.shard_done)(action.shard)
        me.dispute(frozenset({2}))
    called = [me.next() for me in members]
    said = [each.standing for each in called if isinstance(each, RollCall)]
    assert len(said) == 3 and said[1].have == frozenset()  # 3 was added to it
    computed: list[tuple[int, bool]] = []
    for me in members:
        me.rolled(id_of(1), said)
        while isinstance(action := me.next(), Compute):
            computed.append((action.shard, action.again))
            (me.shard_checked if action.again else me.shard_done)(action.shard)
    assert computed.count((2, False)) == 1 and computed.count((2, True)) == 1
    works = {me.work() for me in members}
    assert len(works) == 1  # all exchange alike


def test_words_carry_the_checksum() -> None:
    assert working().word(0.5, checksum=7) == ControlWord(0, seconds_per_shard=0.5, checksum=7)
