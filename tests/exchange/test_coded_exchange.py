"""The exchange of codes between real processes: the bits of its definition, whoever computed what."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from exchange_rank import digest, expected, expected_coded
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree_exchange import NUMELS, cases, nodes_of, one_pool

from planaria.core.tree import Node
from planaria.exchange.codes import CODECS

codecs = pytest.mark.parametrize("codec", CODECS)


def leaves_of(owner: list[int], members: int) -> tuple[tuple[Node, ...], ...]:
    """Every shard as a node of its own, by the member that computed it."""
    return tuple(tuple(Node(s, s + 1) for s, who in enumerate(owner) if who == member) for member in range(members))


@settings(one_pool, max_examples=20)
@given(case=cases(), codec=st.sampled_from(sorted(CODECS)))
def test_leaves_give_the_same_bits_whoever_computed_them(cluster: Any, case: Any, codec: str) -> None:
    members, owner, numels, seed, piece_bytes = case
    members = min(members, cluster.most)
    owner = [who % members for who in owner]
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    results = cluster.everyone(
        ranks,
        "exchange",
        quorum_id=quorum_id,
        numels=numels,
        nodes=leaves_of(owner, members),
        shards=len(owner),
        seed=seed,
        reduction=codec,
        piece_bytes=piece_bytes * 8,
        noise=seed + 7,
    )
    want = expected_coded(seed, len(owner), numels, codec, seed + 7)
    assert [result["digest"] for result in results] == [digest(want)] * members
    assert all(result["finite"] for result in results)
    cluster.everyone(ranks, "drop", quorum_id=quorum_id)


@codecs
def test_steps_and_owners_may_change_and_other_reductions_come_between(cluster: Any, codec: str) -> None:
    ranks = cluster.some(3)
    quorum_id = cluster.form(ranks)
    for seed, owner in enumerate([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 2, 1]]):
        owner = [who % len(ranks) for who in owner]
        arguments = {"quorum_id": quorum_id, "numels": NUMELS, "shards": 5, "seed": seed}
        leaves, nodes = leaves_of(owner, len(ranks)), nodes_of(owner, len(ranks))
        results = cluster.everyone(
            ranks, "exchange", nodes=leaves, reduction=codec, piece_bytes=1024, noise=10, steps=3, **arguments
        )
        want = expected_coded(seed + 2, 5, NUMELS, codec, 12)
        assert {result["digest"] for result in results} == {digest(want)}
        results = cluster.everyone(ranks, "exchange", nodes=nodes, **arguments)
        assert {result["digest"] for result in results} == {digest(expected(seed, 5, NUMELS))}


@codecs
@pytest.mark.parametrize("members", [1, 2, 3])
def test_one_infinite_element_anywhere_is_seen_by_all(cluster: Any, members: int, codec: str) -> None:
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    nodes = leaves_of([shard % members for shard in range(6)], members)
    arguments = {"quorum_id": quorum_id, "numels": NUMELS, "nodes": nodes, "shards": 6, "seed": 4, "reduction": codec}
    for rank in ranks[:-1]:
        rank.tell("exchange", **arguments)
    ranks[-1].tell("exchange", poison=299, **arguments)
    assert not any(rank.answer()["finite"] for rank in ranks)


def test_what_would_not_be_the_same_everywhere_is_refused(cluster: Any) -> None:
    ranks = cluster.take(1)
    arguments = {"quorum_id": cluster.form(ranks), "numels": NUMELS, "seed": 4}
    ranks[0].tell("exchange", nodes=((Node(0, 2),),), shards=2, reduction="int8", **arguments)
    assert "each shard for itself" in ranks[0].failure()


def test_members_that_code_differently_are_told_so_and_stay_alive(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    for rank, reduction in zip(ranks, ["int8", "tree"], strict=True):
        nodes = leaves_of([0, 1], 2)
        rank.tell("exchange", quorum_id=quorum_id, numels=(1000,), nodes=nodes, shards=2, seed=0, reduction=reduction)
    failures = [rank.failure() for rank in ranks]
    assert any("do not agree on what to exchange" in failure for failure in failures), failures
    assert all(rank.alive for rank in ranks)


def test_a_member_that_dies_ends_the_exchange_and_the_next_has_the_same_bits(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    owner = [0, 1, 0, 1]
    arguments = {"numels": NUMELS, "shards": 4, "seed": 9, "reduction": "int8", "noise": 1, "piece_bytes": 1024}
    ranks[0].tell("exchange", quorum_id=quorum_id, nodes=leaves_of(owner, 2), **arguments)
    ranks[1].tell("exchange", quorum_id=quorum_id, nodes=leaves_of(owner, 2), withhold=True, **arguments)
    while not ranks[0].waits_for(1):
        pass
    ranks[1].signal(signal.SIGKILL)
    if cluster.kind == "cpu":
        assert "failed in quorum" in ranks[0].failure()
    else:  # it may be waiting for room in its device's queue, and not for what the dead one has to say
        ranks[0].news()
        ranks[0].failure()
        ranks[0].do("forget_news")
    ranks[0].do("drop", quorum_id=quorum_id)
    alone = cluster.form(ranks[:1])
    result = ranks[0].do("exchange", quorum_id=alone, nodes=leaves_of([0] * 4, 1), **arguments)
    assert result["digest"] == digest(expected_coded(9, 4, NUMELS, "int8", 1))
