"""Leaves in host memory, as they are stored: copies that are made beside the next step, in types that Orbax knows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from planaria.jax.state import Leaf


def stored_as(kind: Leaf) -> np.dtype | None:
    """As what a leaf is stored. Orbax has no small integers without a sign, no fp8 of some rare kinds, and nothing that
    is empty (None)."""
    import tensorstore

    if 0 in kind.shape:
        return None
    try:
        tensorstore.dtype(kind.dtype)
    except (TypeError, ValueError):
        return np.dtype(np.uint8)
    return jnp.dtype(kind.dtype)


def on_host(array: Array, form: np.dtype | None) -> Array | None:
    """A copy in host memory, in the making. The array may be donated meanwhile: XLA waits."""
    if form is None:
        return None
    stored = array if array.dtype == form else _carried(array)
    # Piece by piece: no process needs another for that.
    pieces = [
        jax.device_put(each.data, SingleDeviceSharding(each.device, memory_kind="pinned_host"), may_alias=False)
        for each in stored.addressable_shards
    ]
    there = stored.sharding.with_memory_kind("pinned_host")
    return jax.make_array_from_single_device_arrays(stored.shape, there, pieces)


def from_host(kind: Leaf, array: Array | None, sharding: Sharding) -> Array:
    """The leaf of which ``array`` was stored, laid out by ``sharding``."""
    dtype = jnp.dtype(kind.dtype)
    if array is None:
        return jax.jit(lambda: jnp.zeros(kind.shape, dtype), out_shardings=sharding)()
    return array if array.dtype == dtype else jax.device_put(_restored(array, dtype), sharding)


@jax.jit
def _carried(array: Array) -> Array:
    if jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(array, jnp.uint8)


@functools.partial(jax.jit, static_argnums=1)
def _restored(array: Array, dtype: np.dtype) -> Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return array.astype(dtype)
    return jax.lax.bitcast_convert_type(array, dtype)
