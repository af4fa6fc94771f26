"""Who can be led to the newest state by the syncs that it missed: properties of the decision, and the roll call's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.core.actions import Heal
from planaria.core.catching_up import HISTORY, alike, way
from planaria.core.messages import NO_QUORUM, Member, Policy, Quorum, QuorumId, Ready, Standing
from planaria.core.stepper import Stepper

FRESH = Standing(0, False)
TOP = 20


def id_of(number: int) -> QuorumId:
    return QuorumId(1, number)


# Quorums only ever grow: that of the commit that made the state of each step.
lineages = st.lists(st.integers(1, 9), min_size=TOP, max_size=TOP).map(lambda numbers: [0, *sorted(numbers)])


@given(
    lineages,
    st.lists(st.integers(0, HISTORY), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, TOP), st.booleans()), min_size=1, max_size=3),
)
def test_whoever_is_led_has_a_state_of_the_lineage_and_is_given_all_that_follows(
    numbers: list[int], logs: list[int], bases: list[tuple[int, bool]]
) -> None:
    unders = [id_of(n) if n else NO_QUORUM for n in numbers]
    givers = [
        Standing(TOP, True, under=unders[TOP], history=tuple(unders[TOP - back] for back in range(1, most + 1)))
        for most in logs
    ]
    # A branch that nobody went on with has another quorum.
    healers = [Standing(step, False, base=(step, id_of(77) if odd else unders[step])) for step, odd in bases]
    sources, behind = range(len(givers)), range(len(givers), len(givers) + len(healers))
    since, chosen = way([*givers, *healers], sources, behind)
    whole = [rank for rank in sources if all(not odd and TOP - step <= logs[rank] for step, odd in bases)]
    if not whole or any(unders[step] == NO_QUORUM for step, _ in bases):
        assert (since, chosen) == (None, tuple(sources))
    else:
        assert (since, chosen) == (min(step for step, _ in bases), tuple(whole))


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2).map(id_of)), max_size=4), min_size=1, max_size=3)
)
def test_ranks_of_a_group_tell_what_all_of_them_have(told: list[list[tuple[int, QuorumId]]]) -> None:
    found = alike(told)
    assert all(each[: len(found)] == found for each in told)
    longer = {tuple(each[: len(found) + 1]) for each in told}
    assert len(longer) > 1 or longer == {tuple(found)}


def rolled(*standings: Standing) -> Heal:
    ready = Ready(Member(0, 0), "host:1", (), "start", 6, 30)
    me = Stepper(ready, Policy.SHRINK, groups=len(standings))
    members = tuple(Member(group, 0) for group in range(len(standings)))
    quorum = Quorum(id_of(9), members, ("",) * len(members), True, "lineage", "", False)
    me.hear(quorum)
    me.formed(quorum.id)
    me.rolled(quorum.id, list(standings))
    action = me.next()
    assert isinstance(action, Heal)
    return action


def test_only_who_has_all_of_the_missed_syncs_gives_them() -> None:
    back = Standing(0, False, base=(6, id_of(3)))
    newly = Standing(8, True, under=id_of(4), history=(id_of(4),))
    old = Standing(8, True, under=id_of(4), history=(id_of(4), id_of(3), id_of(3)))
    action = rolled(back, newly, old)
    assert (action.since, action.sources, action.healers) == (6, (2,), (0,))
    assert action.receive and (action.step, action.under) == (8, id_of(4))
    # The same step of a branch that was given up is another state; and who has none needs all of it.
    for other in (Standing(0, False, base=(6, id_of(2))), FRESH):
        action = rolled(other, newly, old)
        assert (action.since, action.sources) == (None, (1, 2))


def test_a_member_that_is_one_sync_behind_follows_from_what_it_has() -> None:
    behind = Standing(7, True, under=id_of(4), base=(7, id_of(4)))
    ahead = Standing(8, True, under=id_of(4), base=(8, id_of(4)), history=(id_of(4),))
    action = rolled(behind, ahead, ahead)
    assert (action.since, action.sources, action.receive) == (7, (1, 2), True)
