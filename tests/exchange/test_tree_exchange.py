"""The gradient exchange between real processes: the bits of a single process, whoever computed what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exchange_rank import digest, expected
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.core.tree import Node, maximal_nodes

NUMELS = (300, 7, 1, 0, 130, 1, 2000, 33)

one_pool = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


def nodes_of(owner: list[int], members: int) -> tuple[tuple[Node, ...], ...]:
    """The nodes of each member where ``owner[shard]`` computed the shard."""
    return tuple(
        maximal_nodes([s for s, who in enumerate(owner) if who == member], len(owner)) for member in range(members)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], tuple[int, ...], int, int]:
    members = draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, members - 1), min_size=1, max_size=9))
    numels = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 64, 129, 700, 1500]), min_size=1, max_size=6)))
    return members, owner, numels, draw(st.integers(0, 5)), draw(st.sampled_from([64, 256, 1000, 1 << 20]))


@one_pool
@given(case=cases())
def test_tree_has_the_bits_of_a_single_process(cluster: Any, case: Any) -> None:
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
        nodes=nodes_of(owner, members),
        shards=len(owner),
        seed=seed,
        piece_bytes=piece_bytes,
    )
    want = digest(expected(seed, len(owner), numels))
    assert [result["digest"] for result in results] == [want] * members
    assert all(result["finite"] for result in results)
    assert results[0]["tails"] == [b"tail of " + bytes([rank]) * rank for rank in range(members)]
    assert all(result["tails"] == results[0]["tails"] for result in results)
    cluster.everyone(ranks, "drop", quorum_id=quorum_id)


@settings(one_pool, max_examples=10)
@given(case=cases())
def test_fast_is_equal_everywhere_and_close_to_tree(cluster: Any, case: Any) -> None:
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
        nodes=nodes_of(owner, members),
        shards=len(owner),
        seed=seed,
        reduction="fast",
        piece_bytes=piece_bytes,
    )
    assert len({result["digest"] for result in results}) == 1
    for got, want in zip(results[0]["values"], expected(seed, len(owner), numels), strict=True):
        torch.testing.assert_close(torch.tensor(got), want, rtol=1e-4, atol=1e-2)
    cluster.everyone(ranks, "drop", quorum_id=quorum_id)


@pytest.mark.parametrize("members", [1, 2, 3, 4])
def test_many_steps_reuse_the_buffers_of_one_life(cluster: Any, members: int) -> None:
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    nodes = nodes_of([shard % members for shard in range(7)], members)
    results = cluster.everyone(
        ranks, "exchange", quorum_id=quorum_id, numels=NUMELS, nodes=nodes, shards=7, seed=50, steps=5
    )
    assert {result["digest"] for result in results} == {digest(expected(54, 7, NUMELS))}


def test_the_ownership_may_change_from_step_to_step_within_a_life(cluster: Any) -> None:
    ranks = cluster.take(3)
    quorum_id = cluster.form(ranks)
    for seed, owner in enumerate([[0, 1, 2, 2, 0], [0, 0, 0, 0, 0], [2, 1, 0, 2, 1]]):
        results = cluster.everyone(
            ranks, "exchange", quorum_id=quorum_id, numels=NUMELS, nodes=nodes_of(owner, 3), shards=5, seed=seed
        )
        assert {result["digest"] for result in results} == {digest(expected(seed, 5, NUMELS))}


def test_buckets_may_be_submitted_in_any_order(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    arguments = {"quorum_id": quorum_id, "numels": NUMELS, "nodes": nodes_of([0, 0, 1], 2), "shards": 3, "seed": 4}
    ranks[0].tell("exchange", order="backward", **arguments)
    ranks[1].tell("exchange", order="forward", **arguments)
    assert {rank.answer()["digest"] for rank in ranks} == {digest(expected(4, 3, NUMELS))}


@pytest.mark.gpu
@pytest.mark.parametrize("members", [1, 2])
def test_a_device_may_compute_what_was_submitted_later(cluster: Any, members: int) -> None:
    if cluster.kind == "cpu":
        pytest.skip("needs GPUs")
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    nodes = nodes_of([shard % members for shard in range(3)], members)
    arguments = {"quorum_id": quorum_id, "numels": NUMELS, "nodes": nodes, "shards": 3, "steps": 3}
    for seed, rank in enumerate(ranks):
        rank.tell("exchange", seed=4, late=seed == 0, **arguments)  # one of them, so that others wait
    assert {rank.answer()["digest"] for rank in ranks} == {digest(expected(6, 3, NUMELS))}


@pytest.mark.parametrize("reduction", ["tree", "fast"])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_one_infinite_element_anywhere_is_seen_by_all(cluster: Any, members: int, reduction: str) -> None:
    ranks = cluster.take(members)
    quorum_id = cluster.form(ranks)
    nodes = nodes_of([shard % members for shard in range(6)], members)
    arguments = {"quorum_id": quorum_id, "numels": NUMELS, "nodes": nodes, "shards": 6, "seed": 4}
    for rank in ranks[:-1]:
        rank.tell("exchange", reduction=reduction, **arguments)
    ranks[-1].tell("exchange", reduction=reduction, poison=299, **arguments)
    assert not any(rank.answer()["finite"] for rank in ranks)


def test_members_with_different_models_are_told_so_and_stay_alive(cluster: Any) -> None:
    ranks = cluster.take(2)
    quorum_id = cluster.form(ranks)
    nodes = nodes_of([0, 1], 2)
    for rank, numels in zip(ranks, [(1000,), (10,)], strict=True):
        rank.tell("exchange", quorum_id=quorum_id, numels=numels, nodes=nodes, shards=2, seed=0)
    failures = [rank.failure() for rank in ranks]
    assert any("do they train the same model?" in failure for failure in failures), failures
    assert all(rank.alive for rank in ranks)
