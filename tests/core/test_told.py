"""What is told again to a lighthouse that has forgotten."""

from __future__ import annotations

from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    Died,
    Finished,
    Heartbeat,
    Leaving,
    Member,
    QuorumId,
    Ready,
    Report,
    Saved,
    Suspected,
    Synced,
    Trouble,
)
from planaria.core.told import Told

A, B = Member(0, 0), Member(1, 0)


def ready(member: Member, after: QuorumId = NO_QUORUM) -> Ready:
    return Ready(member, "a:1", (), "d", 8, 100, after)


def after(*reports: Report) -> list[Report]:
    told = Told()
    for report in reports:
        told.record(report)
    return told.again()


def test_newest_of_each_kind() -> None:
    assert after(ready(A), Adopted(A, QuorumId(1, 1), 0), Adopted(A, QuorumId(1, 2), 5)) == [
        ready(A),
        Adopted(A, QuorumId(1, 2), 5),
    ]


def test_members_in_order_and_nothing_else() -> None:
    assert after(ready(B), Heartbeat(()), ready(A), Synced()) == [ready(A), ready(B)]


def test_fenced_member_is_ready_again() -> None:
    assert after(
        ready(A),
        Adopted(A, QuorumId(1, 1), 3),
        Suspected(A, "stopped"),
        Trouble(A, QuorumId(1, 1), 3, "x"),
        ready(A, QuorumId(1, 2)),
    ) == [ready(A, QuorumId(1, 2)), Adopted(A, QuorumId(1, 1), 3)]


def test_a_member_that_was_fenced_before_it_could_leave_has_not_left() -> None:
    assert after(ready(A), Leaving(A), ready(A)) == [ready(A), Leaving(A)]
    fenced = ready(A, QuorumId(1, 2))
    assert after(ready(A), Leaving(A), fenced) == [fenced]


def test_suspicion_stays_until_life_is_shown() -> None:
    suspicion = Suspected(A, "stopped")
    assert after(ready(A), suspicion) == [ready(A), suspicion]
    assert suspicion not in after(ready(A), suspicion, Adopted(A, QuorumId(1, 2), 1))


def test_trouble_counts_until_a_newer_quorum() -> None:
    trouble = Trouble(A, QuorumId(1, 2), 4, "broke")
    assert trouble in after(Adopted(A, QuorumId(1, 2), 4), trouble)
    assert trouble in after(Adopted(A, QuorumId(1, 2), 4), trouble, Adopted(A, QuorumId(1, 2), 4))
    assert trouble not in after(Adopted(A, QuorumId(1, 2), 4), trouble, Adopted(A, QuorumId(1, 3), 4))


def test_being_ready_again_does_not_mend_a_newer_quorum() -> None:
    """It takes a suspicion back, or its roll call found nobody settled: the planned quorum that broke is still broken,
    and a lighthouse that has only been told of it here would wait for it for ever."""
    trouble = Trouble(A, QuorumId(1, 3), 4, "broke")
    for again in (ready(A), ready(A, QuorumId(1, 2))):
        assert trouble in after(ready(A), Adopted(A, QuorumId(1, 2), 4), trouble, again)
    assert trouble not in after(ready(A), Adopted(A, QuorumId(1, 2), 4), trouble, ready(A, QuorumId(1, 3)))


def test_the_newest_ready_takes_a_suspicion_back() -> None:
    told = Told()
    assert told.ready(A) is None
    for report in (ready(A), ready(A, QuorumId(1, 2)), Suspected(A, "stopped")):
        told.record(report)
    again = told.ready(A)
    assert again == ready(A, QuorumId(1, 2))
    told.record(again)
    assert told.again() == [again]


def test_the_dead_are_only_dead() -> None:
    assert after(ready(A), Adopted(A, QuorumId(1, 1), 3), Died(A, "killed")) == [Died(A, "killed")]


def test_one_that_finished_before_it_ended() -> None:
    assert after(ready(A), Finished(A, 9, "d"), Died(A, "exited")) == [Finished(A, 9, "d"), Died(A, "exited")]


def test_the_newest_checkpoint_outlives_its_member() -> None:
    old, new, failed = Saved(A, 10, 0.5), Saved(B, 20, 0.5), Saved(A, 30, 0.5, "no space left")
    assert after(old, new, failed, Died(B, "killed")) == [new, Died(B, "killed")]


def test_only_the_newest_death_of_a_group_matters() -> None:
    later = Member(0, 1)
    assert after(Died(A, "one"), ready(later), Died(later, "two"), Died(B, "three")) == [
        Died(later, "two"),
        Died(B, "three"),
    ]


def test_a_finish_of_an_earlier_life_is_kept() -> None:
    later = Member(0, 1)
    assert Finished(A, 9, "d") in after(Finished(A, 9, "d"), Died(A, "exit"), Died(later, "exit"))


def test_a_move_is_told_again_until_it_is_made() -> None:
    leaving = Leaving(A)
    assert after(ready(A), Adopted(A, QuorumId(1, 1), 3), leaving) == [ready(A), Adopted(A, QuorumId(1, 1), 3), leaving]
    assert leaving not in after(ready(A), leaving, Died(A, "it has left"))
