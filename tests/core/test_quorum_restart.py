"""Golden scenarios of the lighthouse: what one that was started again knows, asks and leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from quorum_desk import LAST, MEMBERS, Desk, line, working

from planaria.core.ledger import LAST_WORD_WINDOW
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Died,
    Finished,
    Hello,
    JobSpec,
    Member,
    QuorumId,
    Synced,
    Welcome,
)
from planaria.core.roster import LineageRecord, Persist, Send, lineage_after


def test_a_restarted_lighthouse_learns_everything_and_changes_nothing() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in range(3):
        found = desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
        assert found == [f"a{group}: welcome", f"a{group}: desired"]
    assert desk.wait(20.0) == []
    assert desk.lighthouse.current is not None and desk.lighthouse.current.id == QuorumId(1, 4)


def lives_told(desk: Desk, agent: str, fresh: bool = True) -> tuple[Member, ...]:
    (order,) = [
        effect.order
        for effect in desk.lighthouse.handle(agent, Hello(agent, "host", JobSpec("job", 3), fresh), desk.now)
        if isinstance(effect, Send) and isinstance(effect.order, Welcome)
    ]
    return order.lives


def test_an_agent_that_was_started_again_begins_new_lives() -> None:
    desk = working()
    assert lives_told(desk, "new") == (), "all are in good hands"
    desk.dies(1)
    desk.ready(1)
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    assert lives_told(desk, "another", fresh=False) == (), "it knows its own"
    assert lives_told(desk, "another") == (Member(1, 1),)


def test_a_restarted_lighthouse_knows_the_lives_of_the_last_quorum() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    assert lives_told(desk, "new") == MEMBERS
    desk.connects(0, desk.report(0), Adopted(desk.member(0), QuorumId(1, 4), 7))
    assert lives_told(desk, "another") == MEMBERS[1:]


def test_a_new_life_does_not_speak_for_the_one_before() -> None:
    """Two groups, of which one is lost with its agent: the other is no majority, and would wait for it."""
    desk = working(2, step=4)
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    desk.trouble(0, 1, step=4)
    assert desk.wait(1.0) == [] and "out of reach: group 1" in desk.events()[-1]
    assert lives_told(desk, "new") == (Member(1, 0),)
    desk.lighthouse.handle("new", Synced(), desk.now)
    effects = desk.lighthouse.handle("new", replace(desk.report(1), member=Member(1, 1)), desk.now)
    assert desk.lines(effects)[:2] == ["store 1.2 [0 1.1]", "a0: urgent 1.2 [0 1.1]"], "the old one is gone for certain"


@pytest.mark.parametrize("restarted", [False, True])
def test_all_agents_are_started_again(restarted: bool) -> None:
    """The lighthouse has stayed, or was started again as well: the job goes on from its checkpoint, and needs no other
    name for that."""
    if restarted:
        desk = Desk(3, epoch=2, last=LAST, ready=False)
    else:
        desk = working(3, step=7)
        for group in range(3):
            desk.lines(desk.lighthouse.agent_lost(f"a{group}", desk.now))
    for group in range(3):
        assert Member(group, 0) in lives_told(desk, f"new{group}")
        desk.lighthouse.handle(f"new{group}", Synced(), desk.now)

    def ready(incarnation: int, looked: QuorumId = NO_QUORUM) -> list[str]:
        found = []
        for group in range(3):
            report = replace(desk.report(group, step=5), member=Member(group, incarnation), saves=True, looked=looked)
            found += desk.lines(desk.lighthouse.handle(f"new{group}", report, desk.now))
        return found + desk.wait(20.0)

    run = QuorumId(2, 1) if restarted else QuorumId(1, 2)
    first = ready(1)
    assert f"store {run} []" in first and {f"new{group}: resume" for group in range(3)} <= set(first)
    newer = QuorumId(run.epoch, run.number + 1)
    assert f"store {newer} [0.2 1.2 2.2]" in ready(2, looked=run) and not desk.lighthouse.stopped


def test_after_a_restart_quorums_have_the_new_epoch_and_the_old_lineage() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in range(3):
        desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
    effects = desk.lighthouse.handle("a1", Died(Member(1, 0), "signal 9"), desk.now)
    (record,) = [e.record for e in effects if isinstance(e, Persist)]
    assert record.id == QuorumId(2, 1)
    assert record.lineage == lineage_after(LAST.lineage, record.id, (Member(0, 0), Member(2, 0)))


def test_after_a_restart_nothing_is_decided_before_all_were_heard() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    for group in (0, 1):
        desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 4), 7))
    assert desk.trouble(0, 4) == [] and desk.wait(2.0) == []
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 4), 7))
    assert "store 2.1 [0 1 2]" in [*found, *desk.wait(0.1)]


def test_after_the_end_of_a_run_the_next_one_starts_afresh_and_the_lineage_goes_on() -> None:
    ended = replace(LAST, members=())
    desk = Desk(2, epoch=2, last=ended)
    desk.ready(0)
    effects = desk.lighthouse.handle("a1", desk.report(1), desk.now)
    (record,) = [e.record for e in effects if isinstance(e, Persist)]
    assert record.lineage == lineage_after(LAST.lineage, record.id, (Member(0, 0), Member(1, 0)))
    assert line(effects[-2]) == "a1: founding 2.1 [0 1]"


def test_a_quorum_that_was_stored_but_never_told_is_replaced() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    found = []
    for group in range(3):
        found += desk.connects(group, desk.report(group), Adopted(desk.member(group), QuorumId(1, 3), 7))
    assert "store 2.1 [0 1 2]" in found


def test_a_group_that_died_with_its_agent_is_missed_when_the_agent_is_back() -> None:
    desk = working()
    found = desk.connects(1)  # says hello, and nothing of the group that it had
    assert "store 1.2 [0 2]" in found


def test_what_was_published_during_a_broken_stream_is_told_again() -> None:
    desk = working(4)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    desk.dies(1)
    desk.trouble(0, 1)
    desk.wait(1.0)
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 1), 0))
    assert "a2: urgent 1.2 [0 3]" in found, "it was fenced meanwhile"
    assert found.index("a2: urgent 1.2 [0 3]") == len(found) - 1, "nothing newer was told before"


def lost_in_a_restart() -> Desk:
    """The only member of the last quorum died with its agent while there was no lighthouse; its next life is ready."""
    alone = (Member(1, 0),)
    desk = Desk(2, epoch=2, last=LineageRecord("job", 1, 4, alone, lineage_after("", QuorumId(1, 4), alone), 7))
    desk.incarnations[1] = 1
    desk.connects(1)
    assert desk.ready(1) == []
    return desk


def test_after_a_restart_a_job_is_lost_only_when_every_agent_that_lives_could_have_been_heard() -> None:
    desk = lost_in_a_restart()
    found = desk.wait(LAST_WORD_WINDOW - 0.1)
    assert found == [] and not desk.lighthouse.stopped
    assert "every group that held the state is lost" in desk.wait(0.2)[1]


def test_after_a_restart_a_fenced_holder_that_is_heard_late_saves_the_job() -> None:
    desk = lost_in_a_restart()
    desk.wait(LAST_WORD_WINDOW - 1.0)
    fenced = desk.report(0, after=QuorumId(1, 4))
    found = desk.connects(0, fenced, Adopted(desk.member(0), QuorumId(1, 3), 6))
    assert found[-2:] == ["a0: founding 2.1 [0 1.1]", "a1: founding 2.1 [0 1.1]"]


def test_after_a_complete_run_the_next_one_of_its_name_starts_afresh() -> None:
    """Also under a later life of the lighthouse, which knows the first run from the store alone."""
    desk = working(2)
    stored = [
        effect.record
        for group in range(2)
        for effect in desk.lighthouse.handle(f"a{group}", Finished(desk.member(group), 10, "d"), desk.now)
        if isinstance(effect, Persist)
    ]
    again = Desk(2, epoch=2, last=stored[-1])
    again.ready(0)
    assert again.ready(1)[-1] == "a1: founding 2.1 [0 1]"


def test_an_operator_may_declare_members_dead_that_the_lighthouse_has_not_heard_of_since_its_restart() -> None:
    desk = Desk(3, epoch=2, last=LAST, ready=False)
    desk.connects(0, desk.report(0), Adopted(desk.member(0), QuorumId(1, 4), 7))
    assert desk.wait(2 * LAST_WORD_WINDOW) == []
    with pytest.raises(ValueError, match="no running group 3"):
        desk.lighthouse.evict(3, desk.now)
    desk.trouble(0, 4)
    desk.lines(desk.lighthouse.evict(1, desk.now))
    assert "store 2.1 [0]" in [*desk.lines(desk.lighthouse.evict(2, desk.now)), *desk.wait(1.0)]


def two_lineages(ours: int) -> tuple[Desk, list[str]]:
    """Groups from ``ours`` on come from another lighthouse that served the same job, and got further."""
    desk = Desk(3, epoch=9, last=LAST, ready=False)
    found = []
    for group in range(3):
        id, step = (QuorumId(1, 4), 7) if group < ours else (QuorumId(5, 3), 12)
        found += desk.connects(group, desk.report(group), Adopted(desk.member(group), id, step))
    return desk, [*found, *desk.wait(5.0)]


def test_when_two_lineages_meet_that_of_the_store_wins_and_the_other_heals() -> None:
    desk, found = two_lineages(ours=2)
    assert found[-4:] == ["store 9.1 [0 1]", "a0: urgent 9.1 [0 1]", "a1: urgent 9.1 [0 1]", "a2: urgent 9.1 [0 1]"]
    told = [text for text in desk.events() if "another lineage of this job" in text]
    assert told == [
        "group 2 (incarnation 0) comes from another lineage of this job: up to 5 steps that it committed after step 7 "
        "are thrown away"
    ]
    desk.ready(2, after=QuorumId(9, 1))
    desk.adopts(0, 1, 7, epoch=9)
    found = desk.adopts(1, 1, 7, epoch=9)
    assert "a2: planned 9.2 [0 1 2]" in found, "it joins as one that has nothing"


def test_of_two_lineages_that_which_is_all_that_is_left_goes_on() -> None:
    desk, found = two_lineages(ours=0)
    assert "store 9.1 [0 1 2]" in found and not desk.lighthouse.stopped
    assert not [text for text in desk.events() if "thrown away" in text]


def test_a_minority_of_this_lineage_waits_for_the_others_and_throws_nothing_away_alone() -> None:
    desk = Desk(4, epoch=9, last=LAST, ready=False)
    desk.connects(0, desk.report(0), Adopted(desk.member(0), QuorumId(1, 4), 7))
    desk.connects(3, desk.report(3), Adopted(desk.member(3), QuorumId(5, 3), 12))
    assert desk.wait(20.0) == []
    assert "no majority" in desk.events()[-1]


def test_what_one_that_was_evicted_has_done_since_is_counted() -> None:
    desk = working(3, step=4)
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    assert "store 1.2 [0 1]" in desk.lines(desk.lighthouse.evict(2, desk.now))
    found = desk.connects(2, desk.report(2), Adopted(Member(2, 0), QuorumId(1, 1), 5))
    assert "a2: kill" in found
    assert any("up to 1 steps that it committed after step 4 are thrown away" in text for text in desk.events())


def test_a_group_that_has_moved_stays_where_it_is_whoever_leads_next() -> None:
    """Its former agent was started again, and has begun it anew before it heard of that."""
    members = (*MEMBERS[:2], Member(2, 1))
    last = replace(LAST, members=members, lineage=lineage_after("", LAST.id, members))
    desk = Desk(3, epoch=2, last=last, ready=False)
    desk.connects(1, desk.report(1), Adopted(desk.member(1), QuorumId(1, 4), 7))
    moved = replace(desk.report(2), member=Member(2, 1))
    hello = Hello("a0", "host", JobSpec("job", 3), hosted=(2,))
    mine = (desk.report(0), Adopted(Member(0, 0), QuorumId(1, 4), 7))
    for report in (hello, *mine, moved, Adopted(Member(2, 1), QuorumId(1, 4), 7), Synced()):
        desk.tell(0, report)
    desk.incarnations[2] = 2
    assert desk.connects(2, desk.report(2))[-2:] == ["a2: drain", "a2: desired"]
