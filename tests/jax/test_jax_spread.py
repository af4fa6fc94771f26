"""Gradients that are spread over devices: taken apart for the exchange, put together for the update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from planaria.jax.gradients import Sums
from planaria.jax.spread import Spread

SPECS = [
    PartitionSpec("a", "b"),
    PartitionSpec("b", "a"),
    PartitionSpec(("a", "b"), None),
    PartitionSpec(("b", "a")),
    PartitionSpec(None, "b"),
    PartitionSpec("a"),
    PartitionSpec(),
]


def back(leaves: list[jax.Array], everywhere: Any) -> tuple[list[jax.Array], str]:
    """What the update is given of a gradient that is the only one, and the text of the program that does it."""
    spread = Spread(leaves, everywhere, [str(index) for index in range(len(leaves))])
    sums = Sums(spread.places, 1, True, torch.device("cpu"))
    sums.add(0, spread.like(leaves))
    flats = spread.flats(sums.layout, [sums.parts(bucket)[0] for bucket in range(len(sums.bucket_numels))])
    program = jax.jit(spread.cut)
    return program(flats), program.lower(flats).compile().as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_there_and_back(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind), devices=jax.devices()[:4])
    random = np.random.default_rng(0)
    values = [random.normal(size=(8, 12)).astype(np.float32) for _ in SPECS] + [np.array(3, np.float32)]
    leaves = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(values, [*SPECS, SPECS[-1]], strict=True)]
    leaves[1] = leaves[1].astype(jnp.bfloat16)
    found, program = back(leaves, NamedSharding(mesh, PartitionSpec()))
    for value, leaf, given in zip(values, leaves, found, strict=True):
        assert given.dtype == leaf.dtype
        assert given.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_array_equal(np.asarray(given), np.asarray(value, leaf.dtype))
    # Every device cuts what it was given: nothing is sent from one to another.
    assert not {"all-gather", "all-reduce", "collective-permute", "all-to-all"} & {*program.replace("(", " ").split()}


def test_large_leaves_fill_several_buckets() -> None:
    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])
    big = jnp.arange(1 << 20, dtype=jnp.float32)
    leaves = [jax.device_put(big + n, NamedSharding(mesh, PartitionSpec("a" if n % 2 else None))) for n in range(5)]
    found, _ = back(leaves, NamedSharding(mesh, PartitionSpec()))
    for leaf, given in zip(leaves, found, strict=True):
        np.testing.assert_array_equal(np.asarray(given), np.asarray(leaf))


def test_a_gradient_that_is_laid_out_otherwise_is_laid_out_like_the_first() -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    whole = jnp.arange(8.0)
    spread = Spread([jax.device_put(whole, NamedSharding(mesh, PartitionSpec("x")))], _everywhere(mesh), ["w"])
    for other in (whole, jax.device_put(whole, _everywhere(mesh))):
        (like,) = spread.like([other])
        assert like.sharding == NamedSharding(mesh, PartitionSpec("x"))
        assert like.tolist() == whole.tolist()


def test_one_device() -> None:
    leaves = [jnp.arange(6.0).reshape(2, 3), jnp.ones((), jnp.bfloat16)]
    found, _ = back(leaves, SingleDeviceSharding(jax.devices()[0]))
    assert [each.tolist() for each in found] == [each.tolist() for each in leaves]
    assert [each.dtype for each in found] == [each.dtype for each in leaves]


def _everywhere(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
