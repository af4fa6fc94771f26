"""A member alone: everything works without peers and without gloo, and misuse is refused in plain words."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from exchange_rank import digest, expected, gradient

from planaria.core.messages import Member, Quorum, QuorumId
from planaria.core.tree import Node
from planaria.errors import CommunicatorError, ProtocolError
from planaria.exchange.communicator import Communicator, Communicators
from planaria.exchange.layout import Layout
from planaria.exchange.tree_exchange import TreeExchange
from planaria.exchange.waiting import Bell, Interrupted

ME = Member(3, 1)
NUMELS = (5, 700, 0, 1)
LAYOUT = Layout(NUMELS, bucket_bytes=4096, first_bucket_bytes=512)


class Alone:
    def __init__(self) -> None:
        self.bell = Bell()
        self.formed: list[tuple[QuorumId, str | None]] = []
        self.communicators = Communicators(ME, "127.0.0.1", self.bell, self.on_formed)

    def on_formed(self, quorum_id: QuorumId, error: str | None) -> None:
        self.formed.append((quorum_id, error))
        self.bell.ring()

    def communicator(self, number: int = 1) -> Communicator:
        quorum = Quorum(QuorumId(1, number), (ME,), ("127.0.0.1:1",), urgent=False, lineage="")
        self.communicators.form(quorum)
        self.bell.wait(lambda: any(formed == quorum.id for formed, _ in self.formed), lambda: False)
        found = self.communicators.get(quorum.id)
        assert found is not None
        return found


@pytest.fixture
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.communicators.close()


def begun(alone: Alone, **more: Any) -> TreeExchange:
    exchange = TreeExchange(alone.communicator(), LAYOUT)
    exchange.begin([[Node(0, 2), Node(2, 3)]], 3, 3, tail_bytes=10, **more)
    return exchange


def parts(numel: int) -> list[torch.Tensor]:
    leaf = [gradient(8, shard, numel) for shard in range(3)]
    return [leaf[0] + leaf[1], leaf[2]]


def submit_all(exchange: TreeExchange) -> None:
    for bucket, numel in enumerate(LAYOUT.buckets):
        exchange.submit(bucket, parts(numel))


@pytest.mark.parametrize("reduction", ["tree", "fast"])
def test_the_mean_over_all_shards(alone: Alone, reduction: str) -> None:
    exchange = begun(alone, reduction=reduction)
    submit_all(exchange)
    exchange.submit_tail(b"alone")
    result = exchange.finish()
    assert digest(result.buckets) == digest(expected(8, 3, NUMELS))
    assert result.tails == [b"alone"]
    assert result.finite


def test_the_tail_may_come_before_the_buckets(alone: Alone) -> None:
    exchange = begun(alone)
    exchange.submit_tail(b"early")
    submit_all(exchange)
    assert exchange.finish().tails == [b"early"]


def test_a_step_can_be_given_up_and_begun_anew(alone: Alone) -> None:
    exchange = begun(alone)
    exchange.submit(0, parts(LAYOUT.buckets[0]))
    exchange.begin([[Node(0, 3)]], 3, 3, tail_bytes=10)
    for bucket, numel in enumerate(LAYOUT.buckets):
        exchange.submit(bucket, [torch.ones(numel)])
    exchange.submit_tail(b"")
    assert exchange.finish().buckets[0][0].item() == pytest.approx(1 / 3)


def test_a_model_without_parameters_exchanges_tails_only(alone: Alone) -> None:
    exchange = TreeExchange(alone.communicator(), Layout([]))
    exchange.begin([[Node(0, 1)]], 1, 1, tail_bytes=3)
    exchange.submit_tail(b"abc")
    result = exchange.finish()
    assert (result.buckets, result.tails, result.finite) == ([], [b"abc"], True)


def test_misuse_is_refused_in_plain_words(alone: Alone) -> None:
    exchange = TreeExchange(alone.communicator(), LAYOUT)
    with pytest.raises(ValueError, match="no exchange has begun"):
        exchange.submit(0, [])
    with pytest.raises(ValueError, match="nodes of 2 members in a group of 1"):
        exchange.begin([[Node(0, 1)], []], 1, 1)
    with pytest.raises(ValueError, match="reduction='loud'"):
        exchange.begin([[Node(0, 1)]], 1, 1, "loud")
    with pytest.raises(ValueError, match="no node is present"):
        exchange.begin([[]], 1, 1)
    exchange.begin([[Node(0, 2), Node(2, 3)]], 3, 3, tail_bytes=10)
    good = parts(LAYOUT.buckets[0])
    with pytest.raises(ProtocolError, match=r"has the sums of \[Node.*agreed on"):
        exchange.check([Node(0, 1), Node(2, 3)])  # as many, but of other shards
    exchange.check([Node(0, 2), Node(2, 3)])
    with pytest.raises(ValueError, match="has 1 sums, but this member has 2 nodes"):
        exchange.submit(0, good[:1])
    with pytest.raises(ValueError, match="not a flat, contiguous fp32 tensor"):
        exchange.submit(0, [good[0], good[1].double()])
    with pytest.raises(ValueError, match="does not exist or was submitted before"):
        exchange.submit(99, good)
    exchange.submit(0, good)
    with pytest.raises(ValueError, match="does not exist or was submitted before"):
        exchange.submit(0, good)
    with pytest.raises(ValueError, match="11 bytes, more than the 10 agreed on"):
        exchange.submit_tail(b"x" * 11)
    with pytest.raises(ValueError, match="needs all buckets and the tail"):
        exchange.finish()


def test_dropping_ends_an_exchange_that_waits_for_a_bucket(alone: Alone) -> None:
    exchange = begun(alone)
    submit_all(exchange)
    alone.communicators.drop(QuorumId(1, 1))
    exchange.submit_tail(b"")
    with pytest.raises(CommunicatorError, match=r"the communicator of quorum 1\.1 has ended"):
        exchange.finish()


def test_gather_and_interruption(alone: Alone) -> None:
    communicator = alone.communicator()
    assert communicator.gather(b"me").wait() == [b"me"]
    never = communicator.pending("waiting for nobody")
    with pytest.raises(Interrupted, match=r"waiting for nobody in quorum 1\.1 was interrupted"):
        never.wait(lambda: True)
    alone.communicators.drop(QuorumId(1, 1))
    with pytest.raises(CommunicatorError, match="has ended"):
        never.wait()
    with pytest.raises(CommunicatorError, match="has ended"):
        communicator.gather(b"late").wait()


def test_a_job_that_fails_ends_the_life_with_its_name(alone: Alone) -> None:
    communicator = alone.communicator()
    pending = communicator.call("dividing", lambda: 1 // 0)
    with pytest.raises(CommunicatorError, match="ZeroDivisionError"):
        pending.wait()
    assert "ZeroDivisionError" in repr(communicator)


def test_several_lives_beside_each_other(alone: Alone) -> None:
    first, second = alone.communicator(1), alone.communicator(2)
    alone.communicators.drop(QuorumId(1, 1))
    assert first.error is not None
    assert second.gather(b"on").wait() == [b"on"]
    assert alone.communicators.get(QuorumId(1, 1)) is None
    assert alone.formed == [(QuorumId(1, 1), None), (QuorumId(1, 2), None)]
    alone.communicators.drop(QuorumId(7, 7))  # never heard of: nothing happens


def test_nothing_is_formed_after_close(alone: Alone) -> None:
    alone.communicators.close()
    with pytest.raises(CommunicatorError, match="are closed"):
        alone.communicator()


def test_tags_are_fresh_until_they_begin_again_below_those_of_healing(alone: Alone) -> None:
    communicator = alone.communicator()
    assert [communicator.tags(5), communicator.tags(1), communicator.tags(2)] == [0, 5, 6]
    communicator.tags((1 << 30) - 8)
    assert communicator.tags(3) == 0


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_life_that_ended_with_work_to_do_is_gone_without_a_collector(alone: Alone, when: str) -> None:
    """A job that is not run any more knows the life, whose queue knows the job. With the life stay gloo's threads and
    connections: in two hours of trouble a rank that nothing happened to came to have twice as many."""
    exchange = begun(alone)
    life = weakref.ref(exchange._communicator)
    go_on = threading.Event()
    if when == "while":
        exchange._communicator.post(lambda: (go_on.wait(), None)[1])
        submit_all(exchange)
    alone.communicators.drop(QuorumId(1, 1))
    if when == "before":
        submit_all(exchange)
    go_on.set()
    exchange.submit_tail(b"alone")
    with suppress(CommunicatorError):
        exchange.finish()
        pytest.fail("it went on")
    for thread in threading.enumerate():
        if thread.name.startswith("planaria-exchange"):
            thread.join()
    gc.disable()
    try:
        del exchange
        assert life() is None
    finally:
        gc.enable()
