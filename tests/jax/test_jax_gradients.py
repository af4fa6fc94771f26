"""Sums of shards in the job's tree, whoever computes them; the buffers that an exchange may still read."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from planaria.core.tree import Node, fold_plan, maximal_nodes
from planaria.jax.gradients import Sums

SHAPES = [(3, 4), (), (5,)]
WHOLE = [[tuple((0, length) for length in shape)] for shape in SHAPES]  # of every leaf one piece, which is all of it
CPU = torch.device("cpu")


@cache
def gradient(shard: int) -> list[jax.Array]:
    random = np.random.default_rng(shard)
    return [jnp.asarray(random.normal(size=shape), jnp.float32) * 10.0 ** (shard % 5) for shape in SHAPES]


def total(sums: list[Sums], shards: int) -> bytes:
    nodes = [node for each in sums for node in each.nodes]
    parts = [part.clone() for each in sums for part in each.parts(0)]
    for into, add in fold_plan(nodes, shards):
        parts[into] += parts[add]
    return parts[0].numpy().tobytes()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.integers(0, n))))
def test_who_computes_what_changes_no_bit(split: tuple[list[int], int]) -> None:
    order, at = split
    whole, ours, theirs = (Sums(WHOLE, len(order), True, CPU) for _ in range(3))
    for shard in range(len(order)):
        whole.add(shard, gradient(shard))
    for shard in order:
        (ours if shard < at else theirs).add(shard, gradient(shard))
    assert ours.nodes == maximal_nodes(range(at), len(order))
    found = [each for each in (ours, theirs) if each.nodes]
    assert total(found, len(order)) == total([whole], len(order))


def test_what_was_handed_out_is_not_written_again() -> None:
    sums = Sums(WHOLE, 4, True, CPU)
    sums.add(0, gradient(0))
    lent = sums.parts(0)[0]
    before = lent.clone()
    sums.freeze()
    sums.add(1, gradient(1))  # merges with what was lent
    for _ in range(3):
        sums.begin_step()
        for shard in range(4):
            sums.add(shard, gradient(shard + 7))
    assert torch.equal(lent, before)


def test_a_sum_that_holds_a_lost_shard_is_given_up_whole() -> None:
    sums = Sums(WHOLE, 4, True, CPU)
    for shard in (0, 1, 3):
        sums.add(shard, gradient(shard))
    assert sums.keep(frozenset({0, 3})) == {3}
    assert sums.nodes == (Node(3, 4),)


def test_leaves_that_are_spread_over_devices() -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    whole = jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6)
    spread, same = NamedSharding(mesh, PartitionSpec(None, "x")), NamedSharding(mesh, PartitionSpec())
    with pytest.raises(ValueError):
        jax.device_put(whole, spread)  # XLA cuts into equal pieces only, so all devices hold the same shapes
    leaves = [jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x"))), jax.device_put(whole, same)]
    rows = [((row, row + 1), (0, 6)) for row in range(4)]
    sums = Sums([rows, [((0, 4), (0, 6))]], 2, True, CPU)
    sums.add(0, leaves)
    sums.add(1, leaves)
    # Of what is on every device one copy is held; leaves lie last one first, pieces of a leaf likewise.
    doubled = torch.arange(0, 48, 2.0).reshape(4, 6)
    assert torch.equal(sums.parts(0)[0], torch.cat([doubled.flatten(), doubled.flip(0).flatten()]))
