"""Between JAX and the exchange, which works on torch tensors: views without a copy (dlpack), and copies out of them.

A view must be dropped before the array that it views is donated: donation then takes the memory away beneath it (on a
GPU XLA refuses, on a CPU it silently copies). What comes the other way is copied into memory of XLA's own, for
``device_put`` would keep looking at memory that others write again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax.sharding import Sharding
from torch import Tensor

# Both sides know them as such; of other types (int4, rare kinds of fp8) only the bytes travel, by way of the host.
SHARED = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    }
)

# One stretch per dimension: [start, stop).
Place = tuple[tuple[int, int], ...]


def pieces(array: Array) -> Iterator[tuple[Place, Array]]:
    """What the devices of this process hold of an array, replicas once: where in the array, and what. Ascending. The
    same places at the same rank of every group, for these lay their arrays out alike."""
    found: dict[Place, Array] = {}
    for shard in array.addressable_shards:
        found.setdefault(place_of(shard.index, array.shape), shard.data)
    return iter(sorted(found.items(), key=lambda item: item[0]))


def put(array: Array, where: Sharding) -> Array:
    """``array``, at ``where``. What a process has for itself is taken for what all processes of the group have, and to
    be whole everywhere: JAX would compare it first, by a collective."""
    if where.is_fully_addressable or not array.is_fully_addressable:
        return jax.device_put(array, where)
    mine = [jax.device_put(array, device) for device in where.addressable_devices_indices_map(array.shape)]
    return jax.make_array_from_single_device_arrays(array.shape, where, mine)


def in_memory(kind: str | None, where: Sharding) -> Sharding:
    """``where``, in memory of that kind."""
    return where if kind is None or kind == where.memory_kind else where.with_memory_kind(kind)


def place_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Place:
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def shape_of(place: Place) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in place)


def numel_of(place: Place) -> int:
    return math.prod(shape_of(place))


def view(array: Array) -> Tensor:
    """A tensor over the memory of an array on one device, which it waits for; contiguous. Not to be written."""
    if array.dtype.name in SHARED and _on_device(array):
        return torch.from_dlpack(array)  # type: ignore[attr-defined]
    return torch.from_numpy(np.asarray(array).reshape(-1).view(np.uint8).copy())


def _on_device(array: Array) -> bool:
    """Not in the host's memory beside it (``memory_kind="pinned_host"``), of which GPUs make no dlpack."""
    (device,) = array.devices()
    return array.sharding.memory_kind in (None, device.default_memory().kind)


def from_bytes(data: Tensor, dtype: np.dtype, shape: tuple[int, ...], where: Sharding) -> Array:
    """An array at ``where``, in memory of its own, of what ``data`` (uint8, aligned) holds."""
    # XLA makes no complex numbers of bytes, and nothing of no memory.
    if data.device.type == "cpu" or dtype.kind == "c" or not data.numel():
        host = data.cpu().numpy().view(dtype).reshape(shape)
        return jax.device_put(jnp.array(host, copy=True), where)
    return jax.device_put(_reinterpreted(jax.dlpack.from_dlpack(data), dtype, shape), where)


@partial(jax.jit, static_argnums=(1, 2))
def _reinterpreted(raw: Array, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
    if dtype == np.bool_:
        return raw.reshape(shape).astype(np.bool_)
    form = shape if dtype.itemsize == 1 else (*shape, dtype.itemsize)
    return jax.lax.bitcast_convert_type(raw.reshape(form), dtype)


def over(buffer: Tensor) -> Array:
    """An array over the memory of a flat tensor. Whoever writes that changes the array: wait for what reads it."""
    return jax.dlpack.from_dlpack(buffer)


def settle(device: torch.device) -> None:
    """Wait for what torch reads on its current stream. Before views are dropped, or what they view is donated: XLA
    knows nothing of that stream, and would give the memory to others while it is read."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
