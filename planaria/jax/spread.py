"""How a gradient lies in the group: what of it this process holds, and how the mean comes back to where it belongs.

Every process exchanges the pieces that its devices hold, with the same rank of the other groups. So the mean comes as
flat buckets with the pieces of this process, and never as a whole leaf. Each device is given its own pieces in one flat
array; to the update's program these are the shards of one array over all devices of the group, from which it cuts the
leaves, device by device, without any communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import torch
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from torch import Tensor

from planaria.errors import UsageError
from planaria.exchange.layout import Layout, Slot
from planaria.jax.views import Place, in_memory, over, pieces, place_of, put


class Spread:
    """Of the first gradient, whose leaves are ``leaves``; all others are laid out like it. ``everywhere``: where what
    all devices of the group need lies; ``paths`` of the leaves, for messages. Raises UsageError."""

    def __init__(self, leaves: Sequence[Array], everywhere: Sharding, paths: Sequence[str]) -> None:
        self._everywhere = everywhere
        self._mesh = everywhere.mesh if isinstance(everywhere, NamedSharding) else None
        self._dtypes = [leaf.dtype for leaf in leaves]
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._shardings = [self._chosen(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        settled = self.like(leaves)
        # Of the pieces of each leaf that this process holds, replicas once: what it exchanges.
        self.places: list[tuple[Place, ...]] = [tuple(place for place, _ in pieces(leaf)) for leaf in settled]
        # Of what each device holds: the same on all, for XLA cuts arrays into equal pieces only.
        self._local = [
            sharding.shard_shape(shape) for sharding, shape in zip(self._shardings, self._shapes, strict=True)
        ]
        self._layout = Layout([int(np.prod(shape)) for shape in self._local])
        self._devices = list(everywhere.addressable_devices_indices_map(()))

    def _chosen(self, leaf: Array, path: str) -> Sharding:
        if self._mesh is None:
            return self._everywhere
        if leaf.is_fully_addressable and not self._everywhere.is_fully_addressable:
            raise UsageError(
                f"the gradient at {path or 'the root'} is this process's alone; the gradients of a group of several "
                "processes come from programs over all its devices: give step.grad's function the state, or arrays on "
                "its mesh"
            )
        named = isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == self._mesh
        # Not in the host's memory: sums are made where the devices compute.
        return in_memory(self._everywhere.memory_kind, leaf.sharding) if named else self._everywhere

    def like(self, leaves: Sequence[Array]) -> list[Array]:
        """Gradients, laid out as the first were."""
        both = zip(leaves, self._shardings, strict=True)
        return [
            leaf if leaf.sharding.is_equivalent_to(wanted, leaf.ndim) else put(leaf, wanted) for leaf, wanted in both
        ]

    def flats(self, layout: Layout, buckets: Sequence[Tensor]) -> list[Array]:
        """What ``cut`` takes, of flat fp32 ``buckets`` in which the pieces of ``places`` lie as ``layout`` says. May
        look at their memory: wait for what reads it before it is written again."""
        if self._mesh is None:
            return [jax.device_put(over(bucket), self._everywhere) for bucket in buckets]
        slots = iter(layout.slots)
        found = [{place: next(slots) for place in places} for places in self.places]
        by_device = [self._of_device(device, found, buckets) for device in self._devices]
        # One shard for each device, in the order of the mesh.
        along = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        count = self._mesh.size
        return [
            jax.make_array_from_single_device_arrays((count * numel,), along, [mine[bucket] for mine in by_device])
            for bucket, numel in enumerate(self._layout.buckets)
        ]

    def _of_device(self, device: jax.Device, found: list[dict[Place, Slot]], buckets: Sequence[Tensor]) -> list[Array]:
        if len(self._devices) == 1:  # whose pieces are those of the process
            return [jax.device_put(over(bucket), device) for bucket in buckets]
        parts: list[list[Tensor]] = [[] for _ in self._layout.buckets]
        for index in range(len(found) - 1, -1, -1):  # as layouts pack them
            here = self._shardings[index].addressable_devices_indices_map(self._shapes[index])[device]
            slot = found[index][place_of(here or (), self._shapes[index])]
            piece = buckets[slot.bucket][slot.offset : slot.offset + slot.numel]
            parts[self._layout.slots[index].bucket].append(piece)
        return [jax.device_put(over(torch.cat(each)), device) for each in parts]

    def cut(self, flats: Sequence[Array]) -> list[Array]:
        """The leaves of the mean gradient. In a program."""
        if self._mesh is None:
            return self._leaves(flats)
        specs = [each.spec if isinstance(each, NamedSharding) else PartitionSpec() for each in self._shardings]
        along = PartitionSpec(self._mesh.axis_names)
        # check_vma: that replicas are equal is for the exchange to know, not for the program to prove.
        cut = jax.shard_map(
            lambda *mine: self._leaves(mine), mesh=self._mesh, in_specs=along, out_specs=specs, check_vma=False
        )
        made: list[Array] = cut(*flats)
        return made

    def _leaves(self, flats: Sequence[Array]) -> list[Array]:
        return [
            flats[slot.bucket][slot.offset : slot.offset + slot.numel].reshape(shape).astype(dtype)
            for slot, shape, dtype in zip(self._layout.slots, self._local, self._dtypes, strict=True)
        ]
