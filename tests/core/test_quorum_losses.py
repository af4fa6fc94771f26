"""Golden scenarios of the lighthouse: deaths, broken communicators, suspects, and what silence means."""

from __future__ import annotations

import pytest
from quorum_desk import Desk, working

from planaria.core.messages import (
    Adopted,
    Corrupted,
    Heartbeat,
    Hello,
    JobSpec,
    Leaving,
    Member,
    Phase,
    Pulse,
    QuorumId,
    Synced,
)
from planaria.core.roster import LineageRecord, lineage_after


def test_a_death_is_answered_at_once() -> None:
    desk = working()
    assert desk.dies(1) == ["store 1.2 [0 2]", "a0: urgent 1.2 [0 2]", "a2: urgent 1.2 [0 2]"]


def test_a_restarted_group_joins_by_a_planned_change() -> None:
    desk = working()
    desk.dies(1)
    desk.ready(1)
    desk.adopts(0, 2)
    assert desk.adopts(2, 2)[0] == "store 1.3 [0 1.1 2]"


def test_a_broken_communicator_waits_a_moment_for_a_death_to_be_told() -> None:
    desk = working()
    assert desk.trouble(0, 1) == []
    assert desk.wait(0.01) == []
    assert desk.dies(1)[0] == "store 1.2 [0 2]"
    assert desk.wait(1.0) == []


def test_a_broken_communicator_without_a_death_is_formed_again() -> None:
    desk = working()
    desk.trouble(0, 1)
    assert desk.wait(0.1)[0] == "store 1.2 [0 1 2]"
    assert desk.trouble(1, 1) == [] and desk.wait(1.0) == [], "the other members' trouble with the old one is old news"


def test_two_members_that_cannot_reach_each_other_are_parted() -> None:
    desk = working()
    stored = []
    for number in (1, 2, 3, 4):
        desk.trouble(0, number)
        stored.append(desk.wait(1.0)[0])
    assert stored == ["store 1.2 [0 1 2]", "store 1.3 [0 1 2]", "store 1.4 [0 1]", "store 1.5 [0 2]"]


def test_one_that_dies_slowly_is_left_out_before_those_who_complain() -> None:
    desk = working(4)
    stored = []
    for number in (1, 2, 3):
        for survivor in (0, 2, 3):
            desk.trouble(survivor, number)
        stored.append(desk.wait(1.0)[0])
    assert stored == ["store 1.2 [0 1 2 3]", "store 1.3 [0 1 2 3]", "store 1.4 [0 2 3]"]
    for survivor in (0, 2, 3):
        desk.adopts(survivor, 4)
    assert desk.dies(1) == [], "nobody misses it any more"


def test_progress_makes_an_end_of_strikes() -> None:
    desk = working()
    for number in (1, 2):
        desk.trouble(0, number)
        desk.wait(1.0)
    for group in range(3):
        desk.adopts(group, 3, step=5)
    desk.trouble(0, 3, step=5)
    assert desk.wait(1.0)[0] == "store 1.4 [0 1 2]"


def test_a_suspect_is_fenced_and_comes_back() -> None:
    desk = working()
    assert desk.suspects(1) == [
        "store 1.2 [0 2]",
        "a0: urgent 1.2 [0 2]",
        "a1: urgent 1.2 [0 2]",
        "a2: urgent 1.2 [0 2]",
    ], "the fenced one is told as well"
    desk.adopts(0, 2)
    desk.adopts(2, 2)
    assert desk.ready(1, after=QuorumId(1, 2))[0] == "store 1.3 [0 1 2]"


def test_the_only_holder_is_waited_for_while_it_is_only_suspected() -> None:
    desk = working(1)
    assert desk.suspects(0) == []
    assert desk.wait(5.0) == []
    assert desk.ready(0) == [], "its agent sees it go on: nothing has changed"
    assert not desk.lighthouse.stopped


def test_all_lost_ends_the_job_with_a_reason() -> None:
    desk = working(2, step=4)
    desk.dies(0)
    found = desk.dies(1)
    assert [text.split(":")[0] for text in found] == ["store 1.3 []", "a0", "a1"], "only who is not deposed may say so"
    assert "every group that held the state is lost (last commit seen: step 4)" in found[1]
    assert desk.connects(0)[1].startswith("a0: stop"), "an agent that comes later hears it too"


def test_a_fenced_member_saves_the_job_when_the_others_die() -> None:
    """Its state is older, but whole: with the same bits as ever, the job goes on from there."""
    desk = working(2, step=4)
    desk.suspects(0)
    desk.adopts(1, 2, step=7)
    assert desk.dies(1) == [], "group 0 may come back"
    assert "a state is held only by group 0; waiting for them" in desk.events()[-1]
    assert desk.ready(0, after=QuorumId(1, 2)) == ["store 1.3 [0]", "a0: founding 1.3 [0]"]


def test_a_joiner_that_may_have_healed_is_asked_before_the_job_is_given_up() -> None:
    desk = working(2)
    desk.dies(1)
    desk.adopts(0, 2)
    desk.ready(1)
    desk.adopts(0, 3, step=5)  # the planned one, with the joiner in it, is in force
    assert desk.dies(0) == ["store 1.4 [1.1]", "a1: urgent 1.4 [1.1]"]
    found = desk.ready(1, after=QuorumId(1, 4))  # its roll call: nobody here holds a state
    assert "every group that held the state is lost" in found[1]


# --- silence --------------------------------------------------------------------------------------------------


def test_a_silent_agent_is_no_loss_while_the_others_make_progress() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    for second in range(30):
        assert desk.wait(1.0) == []
        assert desk.beat(0, second) == [] and desk.beat(1, second) == []


def test_a_silent_agent_is_given_up_when_nobody_makes_progress() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    found = []
    for _ in range(6):
        found += desk.wait(1.0)
        desk.beat(0, 3)
        desk.beat(1, 3)
    assert found[0] == "store 1.2 [0 1]"


def test_trouble_and_a_silent_agent_make_a_loss() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a2", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(0.1) == [
        "store 1.2 [0 1]",
        "a0: urgent 1.2 [0 1]",
        "a1: urgent 1.2 [0 1]",
        "a2: urgent 1.2 [0 1]",
    ]


def test_a_minority_waits_for_the_others_and_says_so() -> None:
    desk = working(4)
    for group in (1, 2, 3):
        desk.lines(desk.lighthouse.agent_lost(f"a{group}", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(60.0) == []
    warning = "out of reach: groups 1, 2, 3 of quorum 1.1, and the others are no majority of it; waiting for them"
    assert warning in desk.events()[-1]
    assert desk.connects(1, desk.report(1), Adopted(desk.member(1), QuorumId(1, 1), 0))[:1] == ["a1: welcome"]
    assert desk.wait(1.0) == [], "two of four are no majority either"
    found = desk.connects(2, desk.report(2), Adopted(desk.member(2), QuorumId(1, 1), 0))
    assert "store 1.2 [0 1 2]" in found


def test_an_operator_may_say_that_the_missing_are_dead() -> None:
    desk = working(3)
    for group in (1, 2):
        desk.lines(desk.lighthouse.agent_lost(f"a{group}", desk.now))
    desk.trouble(0, 1)
    assert desk.wait(60.0) == []
    assert desk.lines(desk.lighthouse.evict(1, desk.now))[0] == "a1: kill"
    assert desk.lines(desk.lighthouse.evict(2, desk.now))[1] == "store 1.2 [0]"


def test_an_evicted_group_that_turns_up_is_killed() -> None:
    desk = working(3)
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    desk.lighthouse.evict(1, desk.now)
    assert "a1: kill" in desk.connects(1, desk.report(1))


def test_a_lighthouse_that_was_stopped_condemns_nobody() -> None:
    desk = working()
    desk.now += 3600.0  # nobody called it for an hour
    assert desk.beat(0, 50) == []
    assert desk.wait(1.0) == []
    assert desk.beat(1, 51) == [] and desk.beat(2, 51) == []


def test_a_clock_that_goes_backwards_does_no_harm() -> None:
    desk = working()
    desk.now -= 50.0
    assert desk.dies(1)[0] == "store 1.2 [0 2]"


def test_a_group_that_is_damaged_again_and_again_is_named_in_the_status_whatever_its_life() -> None:
    desk = working()
    for number in range(4):
        desk.tell(1, Corrupted(desk.member(1), number, "its state is not that of the others (w)"))
        desk.tell(2, Corrupted(desk.member(2), number, "a particle")) if not number else None
        if not number:
            desk.dies(1)
            desk.ready(1)
    assert sum("at step" in text for text in desk.events()) == 5
    (advice,) = [text for text in desk.events() if "planaria drain --node a1" in text]
    assert "group 1 was damaged 3 times" in advice
    notes = {group.member.group: group.note for group in desk.lighthouse.snapshot().groups}
    assert notes == {0: "", 1: "damaged 4 times: its hardware may be broken", 2: ""}


def test_the_rank_that_is_damaged_again_and_again_is_named_if_it_is_always_the_same() -> None:
    for ranks, advice in (((1, 1, 1), "planaria drain 1 --rank 1"), ((1, 0, 1), "planaria drain --node a1 or")):
        desk = Desk(2, ready=False)
        for group in range(2):
            desk.tell(group, Hello(f"a{group}", "host", JobSpec("job", 2, ranks=2)))
            desk.tell(group, Synced())
            desk.ready(group)
        for number, rank in enumerate(ranks):
            desk.tell(1, Corrupted(desk.member(1), number, "its state is not that of the others (w)", rank))
        assert [text for text in desk.events() if "damaged 3 times" in text and advice in text]
        note = desk.lighthouse.snapshot().groups[1].note
        assert ("at rank 1" in note) == (set(ranks) == {1})


def shows(desk: Desk, step: int, *phases: Phase, quorum: int = 1) -> list[str]:
    """A second later."""
    desk.now += 1.0
    found: list[str] = []
    for group, phase in enumerate(phases):
        pulse = Pulse(desk.member(group), phase, step, QuorumId(1, quorum), 0.0, 1.0)
        found += desk.tell(group, Heartbeat((pulse,)))
    return found


def at_work(lenient: bool) -> Desk:
    """Six short rounds are over."""
    desk = Desk(3)
    for group in range(3):
        desk.ready(group, lenient=lenient, total_steps=100)
    for group in range(3):
        desk.adopts(group, 1)
    for step in range(6):
        assert shows(desk, step, *[Phase.COMPUTING] * 3) == []
        assert shows(desk, step, *[Phase.EXCHANGING] * 3) == []
    return desk


def test_a_sync_goes_without_a_group_that_is_late_and_it_joins_again() -> None:
    desk = at_work(lenient=True)
    waits = [shows(desk, 6, Phase.EXCHANGING, Phase.COMPUTING, Phase.EXCHANGING) for _ in range(8)]
    (told,) = [lines for lines in waits if lines]
    assert told == ["store 1.2 [0 2]", "a0: urgent 1.2 [0 2]", "a1: urgent 1.2 [0 2]", "a2: urgent 1.2 [0 2]"]
    assert any("group 1 (incarnation 0) is left out: late at sync 6" in text for text in desk.events())
    assert any("quorum 1.2: groups 0, 2 (group 1 late)" in text for text in desk.events())
    desk.adopts(0, 2, 6)
    desk.adopts(2, 2, 6)
    assert desk.ready(1, lenient=True, total_steps=100, after=QuorumId(1, 2))[0] == "store 1.3 [0 1 2]"
    (late,) = [group for group in desk.lighthouse.snapshot().groups if group.note]
    assert late.member.group == 1 and late.note.startswith("left out 1 time: late at sync 6")


@pytest.mark.parametrize("lenient", [True, False])
def test_whoever_waits_to_join_is_taken_in_in_mid_round_only_where_it_takes_over_shards(lenient: bool) -> None:
    """A second group dies while the first waits to come back. With rounds of its own it would hold up the others."""
    desk = at_work(lenient=lenient)
    desk.dies(1)
    for group in (0, 2):
        desk.adopts(group, 2, 6)
    again = desk.ready(1, lenient=lenient, total_steps=100)
    assert again[0] == "store 1.3 [0 1.1 2]" and "planned" in again[1]
    lost = desk.dies(2)
    if not lenient:
        assert lost[0] == "store 1.4 [0 1.1]"
        return
    assert lost[0] == "store 1.4 [0]"
    assert desk.ready(1, lenient=True, total_steps=100, after=QuorumId(1, 4)) == [], "one change after the other"
    assert desk.adopts(0, 4, 6)[0] == "store 1.5 [0 1.1]"


def test_nobody_is_late_while_somebody_has_not_taken_up_the_quorum() -> None:
    """The others wait for that one then, wherever the rest are."""
    desk = at_work(lenient=True)
    desk.trouble(0, 1, step=6)
    desk.wait(1.0)
    desk.adopts(0, 2, 6)
    desk.adopts(1, 2, 6)
    late = (Phase.EXCHANGING, Phase.COMPUTING, Phase.EXCHANGING)
    assert [shows(desk, 6, *late, quorum=2) for _ in range(8)] == [[]] * 8
    desk.adopts(2, 2, 6)
    assert any(shows(desk, 6, *late, quorum=2) for _ in range(30))


def test_where_nobody_may_be_left_out_the_others_wait() -> None:
    desk = at_work(lenient=False)
    for _ in range(30):
        assert shows(desk, 6, Phase.EXCHANGING, Phase.COMPUTING, Phase.EXCHANGING) == []


@pytest.mark.parametrize("moves", [False, True])
def test_one_that_is_to_leave_after_a_commit_that_it_is_late_for_is_left_out_at_once(moves: bool) -> None:
    """Or else the drain of a slow group would wait for the slowest of its rounds."""
    desk = at_work(lenient=True)
    if moves:
        assert desk.tell(1, Leaving(desk.member(1)))[0] == "store 1.2 [0 2]"
    else:
        assert desk.lines(desk.lighthouse.drain(1, desk.now))[:2] == ["a1: drain", "store 1.2 [0 2]"]
    waits = [shows(desk, 6, Phase.EXCHANGING, Phase.COMPUTING, Phase.EXCHANGING) for _ in range(12)]
    (told,) = [lines for lines in waits if lines]
    assert told == ["store 1.3 [0 2]", "a0: urgent 1.3 [0 2]", "a1: urgent 1.3 [0 2]", "a2: urgent 1.3 [0 2]"]
    desk.adopts(0, 3, 6)
    desk.adopts(2, 3, 6)
    again = desk.ready(1, lenient=True, total_steps=100, after=QuorumId(1, 3))
    assert again == ([] if not moves else ["store 1.4 [0 1 2]", *(f"a{g}: planned 1.4 [0 1 2]" for g in range(3))])


def test_a_lighthouse_that_starts_again_lets_a_late_group_end_its_round_before_it_joins() -> None:
    """The others would wait for that in their first roll call with it."""
    members = (Member(0, 0), Member(2, 0))
    desk = Desk(3, 2, LineageRecord("job", 1, 2, members, lineage_after("", QuorumId(1, 2), members), 6), ready=False)
    for group, number in ((0, 2), (1, 1), (2, 2)):
        adopted = Adopted(desk.member(group), QuorumId(1, number), 6)
        told = desk.connects(group, desk.report(group, lenient=True, total_steps=100), adopted)
        assert told == [f"a{group}: welcome", f"a{group}: desired"]
    for step in range(6, 12):
        assert shows(desk, step, Phase.EXCHANGING, Phase.COMPUTING, Phase.EXCHANGING) == []
    found = shows(desk, 12, Phase.COMPUTING, Phase.FORMING, Phase.COMPUTING)
    told = [f"a{group}: planned 2.1 [0 1 2]" for group in range(3)]
    told.insert(1, "a1: urgent 1.2 [0 2]")  # as far as is known it was never told that it is out
    assert found == ["store 2.1 [0 1 2]", *told]


def test_one_that_was_fenced_as_it_healed_is_known_to_hold_a_whole_state() -> None:
    """It is old, and all that is left when the others die."""
    desk = working(2)
    desk.incarnations[1] = 1
    desk.ready(1)
    desk.adopts(0, 2, 3)
    desk.suspects(1)  # it stands still in the middle of its healing, and the other goes on
    desk.ready(1, after=QuorumId(1, 3))
    desk.tell(1, Adopted(desk.member(1), QuorumId(1, 2), 3))
    desk.ready(1, after=QuorumId(1, 3))
    assert not desk.lighthouse.groups[1].settled
    found = desk.dies(0)
    assert found[-1] == "a1: founding 1.4 [1.1]" and not desk.lighthouse.stopped
