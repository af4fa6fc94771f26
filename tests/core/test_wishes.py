"""What operators ask for and cannot have: a sentence, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from quorum_desk import Desk, working

from planaria.core.messages import Drain, Finished, Hello, JobSpec, Kill, Migrate, Synced
from planaria.core.roster import Effect, Send

Verb = Callable[[Desk], list[Effect]]


def refused(desk: Desk, verb: Verb) -> str:
    before = str(desk.lighthouse.snapshot())
    with pytest.raises(ValueError) as caught:
        verb(desk)
    assert str(desk.lighthouse.snapshot()) == before
    assert desk.lines(desk.lighthouse.tick(desk.now)) == []
    return str(caught.value)


def of_ranks(ranks: int) -> Desk:
    """Two groups of ``ranks`` ranks, at work."""
    desk = Desk(2, ready=False)
    for group in range(2):
        desk.tell(group, Hello(f"a{group}", "host", JobSpec("job", 2, ranks=ranks)))
        desk.tell(group, Synced())
        desk.ready(group)
    for group in range(2):
        desk.adopts(group, 1)
    return desk


@pytest.mark.parametrize("group", [9, -1])
@pytest.mark.parametrize(
    "verb",
    [
        lambda desk, group: desk.lighthouse.kill(group, 9, desk.now),
        lambda desk, group: desk.lighthouse.drain(group, desk.now),
        lambda desk, group: desk.lighthouse.evict(group, desk.now),
    ],
)
def test_groups_that_are_not_there(verb: Callable[[Desk, int], list[Effect]], group: int) -> None:
    said = refused(working(), lambda desk: verb(desk, group))
    assert said == f"job job has no running group {group} (running: 0, 1, 2)"


def test_a_group_that_is_gone_is_named_with_its_state() -> None:
    desk = working()
    desk.dies(1)
    said = refused(desk, lambda desk: desk.lighthouse.kill(1, 9, desk.now))
    assert said == "job job has no running group 1, it is dead (running: 0, 2)"


@pytest.mark.parametrize(
    ("ranks", "rank", "known"),
    [(4, 4, "ranks 0 to 3"), (4, 99, "ranks 0 to 3"), (4, -1, "ranks 0 to 3"), (1, 1, "only rank 0")],
)
def test_ranks_that_are_not_there(ranks: int, rank: int, known: str) -> None:
    said = refused(of_ranks(ranks), lambda desk: desk.lighthouse.kill(1, 9, desk.now, rank))
    assert said == f"group 1 of job job has no rank {rank}; it has {known}"


def test_ranks_that_are_there() -> None:
    desk = of_ranks(4)
    for rank in (0, 3):
        assert Send("a1", Kill(1, 9, rank)) in desk.lighthouse.kill(1, 9, desk.now, rank)


def test_nobody_is_there_to_send_a_signal() -> None:
    desk = working()
    desk.lines(desk.lighthouse.agent_lost("a1", desk.now))
    said = refused(desk, lambda desk: desk.lighthouse.kill(1, 9, desk.now))
    assert said.startswith("group 1 cannot be sent a signal: its agent a1 is out of reach")


EVERY: list[Verb] = [
    lambda desk: desk.lighthouse.drain(0, desk.now),
    lambda desk: desk.lighthouse.scale(2, desk.now),
    lambda desk: desk.lighthouse.evict(0, desk.now),
    lambda desk: desk.lighthouse.kill(0, 9, desk.now),
]


@pytest.mark.parametrize("verb", EVERY)
def test_a_job_that_has_failed(verb: Verb) -> None:
    desk = working(2, step=4)
    desk.dies(0)
    desk.dies(1)
    assert desk.lighthouse.stopped
    assert refused(desk, verb).startswith("it is too late: job job: every group that held the state is lost")


@pytest.mark.parametrize("verb", EVERY[:2])
def test_a_job_that_is_complete(verb: Verb) -> None:
    desk = working(3)
    desk.tell(2, Finished(desk.member(2), 10, "d"))
    assert refused(desk, verb).startswith("job job is complete: all its steps are committed")


@pytest.mark.parametrize("groups", [0, -3])
def test_too_few_groups(groups: int) -> None:
    said = refused(working(), lambda desk: desk.lighthouse.scale(groups, desk.now))
    assert said == f"a job needs at least one group, not {groups}"


# --- groups that leave for their health -------------------------------------------------------------------------------


def test_a_share_of_the_groups_may_be_missing_at_once_and_no_more() -> None:
    desk = working(20)
    for group in (3, 7):
        assert Send(f"a{group}", Drain(desk.member(group))) in desk.lighthouse.drain(
            group, desk.now, "GPU 5 is hot", 0.1
        )
    assert "group 7 (incarnation 0) leaves after the next commit: GPU 5 is hot" in desk.events()
    said = refused(desk, lambda desk: desk.lighthouse.drain(9, desk.now, "", 0.1))
    assert said.startswith("2 of 20 groups are missing already, and at most 2 may be")
    desk.lighthouse.drain(9, desk.now)  # an operator may


def test_a_rank_that_moves_is_missed_with_its_group() -> None:
    desk = working(5)
    assert Send("a1", Migrate(1, 0)) in desk.lighthouse.migrate(1, 0, desk.now, "GPU 5 is hot", 0.1)
    assert "rank 0 of group 1 is to move: GPU 5 is hot" in desk.events()
    desk.dies(2)
    said = refused(desk, lambda desk: desk.lighthouse.migrate(1, 0, desk.now, "", 0.1))
    assert said.startswith("1 of 5 groups is missing already, and at most 1 may be")


def test_a_rank_moves_to_a_node_of_its_agent() -> None:
    desk = working(2)
    agent = desk.lighthouse.seen.agents["a1"]
    agent.nodes = {1: "tick-1f", 3: "tock-2f", 4: "tock-3f"}

    def moves(rank: int, to: str) -> list[Effect]:
        return desk.lighthouse.migrate(1, rank, desk.now, to=to)

    desk.lighthouse.spec = replace(desk.lighthouse.spec, ranks=4)
    for to, number in (("1", 1), ("tick-1f", 1), ("tick", 1), ("tock-3f", 4), ("a1", 0), ("0", 0)):
        assert Send("a1", Migrate(1, 2, node=number)) in moves(2, to)
    for rank, to, why in (
        (0, "1", "rank 0 of group 1 speaks for it and is where the others meet, so it stays on node 0"),
        (2, "a0", "which are 0 (a1), 1 (tick-1f), 3 (tock-2f), 4 (tock-3f); a0 is none of them"),
        (2, "tock", "several nodes are on tock; say which by its number"),
    ):
        assert why in refused(desk, lambda desk, rank=rank, to=to: moves(rank, to))  # type: ignore[misc]
    assert Send("a1", Migrate(1, 0, node=0)) in moves(0, "0")


def test_whatever_they_are_missing_for() -> None:
    desk = working(5)
    desk.dies(1)
    said = refused(desk, lambda desk: desk.lighthouse.drain(2, desk.now, "", 0.1))
    assert said.startswith("1 of 5 groups is missing already, and at most 1 may be")


def test_who_is_back_at_work_is_missing_no_more() -> None:
    desk = working(5)
    desk.lighthouse.drain(1, desk.now, "", 0.1)
    for group in (0, 2, 3, 4):
        desk.adopts(group, 2, 5)
    desk.dies(1)
    desk.ready(1)
    refused(desk, lambda desk: desk.lighthouse.drain(2, desk.now, "", 0.1))
    for group in range(5):
        desk.adopts(group, 3, 6)
    assert desk.lighthouse.drain(2, desk.now, "", 0.1)


def test_an_operator_says_how_many_the_job_is_to_have() -> None:
    desk = working(5)
    desk.lighthouse.drain(4, desk.now, "", 0.1)
    for group in range(4):
        desk.adopts(group, 2, 5)
    desk.lighthouse.scale(4, desk.now)
    assert desk.lighthouse.drain(2, desk.now, "", 0.1)


def test_neither_the_last_nor_one_of_the_fewest() -> None:
    desk = Desk(3, ready=False)
    for group in range(3):
        desk.tell(group, Hello(f"a{group}", "host", JobSpec("job", 3, min_groups=2)))
        desk.tell(group, Synced())
        desk.ready(group)
    for group in range(3):
        desk.adopts(group, 1)
    desk.lighthouse.drain(0, desk.now, "", 1.0)
    said = refused(desk, lambda desk: desk.lighthouse.drain(1, desk.now, "", 1.0))
    assert said == "without it fewer than 2 groups would be left, as --min-groups says"
    said = refused(working(1), lambda desk: desk.lighthouse.drain(0, desk.now, "", 1.0))
    assert said == "group 0 is the only one that works; draining it would end the job"


def test_how_often_a_number_of_groups_was_asked_for_is_told() -> None:
    """Who looks now and then sees by that that somebody asked, if for what was wanted before."""
    desk = working()
    for groups in (1, 2):
        desk.lighthouse.scale(groups, desk.now)
    status = desk.lighthouse.snapshot()
    assert (status.desired, status.scaled) == (2, 2)
