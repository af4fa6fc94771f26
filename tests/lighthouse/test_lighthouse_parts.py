"""The small parts by themselves: the bounded queue and the measuring of recoveries."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from planaria.core.messages import Adopted, Event, Member, Publish, Quorum, QuorumId
from planaria.core.roster import Record, Send
from planaria.lighthouse.outbox import Outbox
from planaria.lighthouse.recovery import RecoveryWatch


async def test_an_outbox_gives_in_order_and_waits() -> None:
    box: Outbox[int] = Outbox(10)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    assert not taking.done()
    assert all(box.offer(number) for number in range(3))
    assert [await taking, await box.take(), await box.take()] == [0, 1, 2]


async def test_an_outbox_that_is_full_is_closed_for_good() -> None:
    box: Outbox[int] = Outbox(2)
    assert [box.offer(number) for number in range(4)] == [True, True, False, False]
    assert "too slow: 2 messages" in box.verdict
    assert await box.take() is None
    assert not box.offer(9)


async def test_closing_wakes_the_taker_and_the_first_verdict_stays() -> None:
    box: Outbox[int] = Outbox(2)
    taking = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.close("first")
    box.close("second")
    assert await taking is None and box.verdict == "first"


A, B, C = Member(0, 0), Member(1, 0), Member(2, 0)


def quorum(number: int, *members: Member, urgent: bool = True, founding: bool = False) -> Quorum:
    return Quorum(QuorumId(1, number), members, ("h:1",) * len(members), urgent, "l", "", founding)


def publish(watch: RecoveryWatch, chosen: Quorum, now: float) -> None:
    for member in chosen.members:
        watch.effect(Send("agent", Publish(member, chosen)), now)


def lost(group: int, kind: str = "lost") -> Record:
    return Record(Event(0.0, kind, "gone", group))


@pytest.fixture
def watch() -> RecoveryWatch:
    """Of a job that has begun with A, B and C."""
    watch = RecoveryWatch()
    publish(watch, quorum(1, A, B, C, founding=True), 0.0)
    # a start, no loss
    assert [watch.adopted(Adopted(m, QuorumId(1, 1), 0), 5.0) for m in (A, B, C)] == [None] * 3
    return watch


def test_a_recovery_lasts_from_the_loss_until_everybody_has_the_new_quorum(watch: RecoveryWatch) -> None:
    watch.effect(lost(2), 10.0)
    publish(watch, quorum(2, A, B), 10.25)
    assert watch.adopted(Adopted(A, QuorumId(1, 2), 9), 10.5) is None
    assert watch.adopted(Adopted(B, QuorumId(1, 1), 9), 10.6) is None  # late word of the old one
    assert watch.adopted(Adopted(B, QuorumId(1, 2), 9), 11.0) == 1.0
    assert watch.adopted(Adopted(B, QuorumId(1, 2), 9), 12.0) is None  # said again after a reconnect


def test_a_second_loss_prolongs_the_first_recovery(watch: RecoveryWatch) -> None:
    watch.effect(lost(2), 10.0)
    publish(watch, quorum(2, A, B), 10.0)
    watch.adopted(Adopted(A, QuorumId(1, 2), 9), 10.5)
    watch.effect(lost(1), 10.6)
    publish(watch, quorum(3, A), 10.7)
    assert watch.adopted(Adopted(A, QuorumId(1, 3), 9), 12.0) == 2.0


@pytest.mark.parametrize("kind", ["lost", "suspect", "evict"])
def test_each_kind_of_loss_counts(watch: RecoveryWatch, kind: str) -> None:
    watch.effect(lost(1, kind), 1.0)
    publish(watch, quorum(2, A), 2.0)
    assert watch.adopted(Adopted(A, QuorumId(1, 2), 9), 4.0) == 3.0


def test_a_broken_communicator_counts_from_the_new_quorum(watch: RecoveryWatch) -> None:
    publish(watch, quorum(2, A, B, C), 3.0)
    assert [watch.adopted(Adopted(m, QuorumId(1, 2), 9), 3.5) for m in (A, B, C)] == [None, None, 0.5]


def test_the_death_of_a_joiner_is_no_recovery(watch: RecoveryWatch) -> None:
    watch.effect(lost(7), 1.0)
    publish(watch, quorum(2, A, B, C), 50.0)
    assert [watch.adopted(Adopted(m, QuorumId(1, 2), 9), 51.0) for m in (A, B, C)] == [None, None, 1.0]


def test_planned_changes_are_no_recoveries_but_change_who_counts(watch: RecoveryWatch) -> None:
    joiner = Member(7, 0)
    publish(watch, quorum(2, A, B, C, joiner, urgent=False), 1.0)
    for member in (A, B, C, joiner):
        assert watch.adopted(Adopted(member, QuorumId(1, 2), 9), 2.0) is None
    watch.effect(lost(7), 20.0)
    publish(watch, quorum(3, A, B, C), 20.0)
    assert [watch.adopted(Adopted(m, QuorumId(1, 3), 9), 21.0) for m in (A, B, C)] == [None, None, 1.0]


def test_a_quorum_of_a_later_epoch_counts_as_newer(watch: RecoveryWatch) -> None:
    watch.effect(lost(2), 1.0)
    later = replace(quorum(1, A, B), id=QuorumId(2, 1))
    publish(watch, later, 2.0)
    assert watch.adopted(Adopted(A, later.id, 9), 3.0) is None
    assert watch.adopted(Adopted(B, later.id, 9), 3.0) == 2.0
