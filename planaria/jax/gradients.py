"""Gradients of shards as flat fp32 sums of subtrees, as ``planaria.torch.gradients`` keeps them, of whole pytrees.

All outputs of one executable are there at the same moment, so a shard comes as a whole: its leaves are copied into one
set of buckets and merged with finished siblings (``core.tree``). Concatenating inside the program that computes
gradients cost 1.30 of a step on a CPU, copying what it gives 1.11 (15 MB), so it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jax import Array
from torch import Tensor

from planaria.core.tree import Node, merge_plan
from planaria.exchange.layout import Layout
from planaria.jax.views import Place, numel_of, pieces, settle, shape_of, view


@dataclass(slots=True, eq=False)
class Sum:
    """One subtree's. ``lent``: an exchange reads it, so it is not written again until the step is over. ``frozen``:
    that was interrupted, and somebody may read it for ever."""

    buckets: list[Tensor]
    lent: bool = False
    frozen: bool = False


class Sums:
    """Of the shards that this rank has computed for the current step. ``places``: of the pieces of each of a gradient's
    leaves that this process's devices hold, which are what is held here, and exchanged with the same rank of other
    groups. ``merge=False`` keeps every shard's apart, for reductions that encode each of them for itself."""

    def __init__(self, places: Sequence[Sequence[Place]], shards: int, merge: bool, device: torch.device) -> None:
        self.shards = shards
        self._places = [(index, place) for index, each in enumerate(places) for place in each]
        self._shapes = [shape_of(place) for _, place in self._places]
        self.layout = Layout([numel_of(place) for _, place in self._places])
        self._merge = merge
        self._device = device
        self._held: dict[Node, Sum] = {}
        self._free: list[Sum] = []
        self._retired: list[Sum] = []  # lent, and merged into another since

    @property
    def bucket_numels(self) -> Sequence[int]:
        return self.layout.buckets

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The subtrees whose sums are held, ascending."""
        return tuple(sorted(self._held))

    @property
    def have(self) -> frozenset[int]:
        """Shards whose gradients are held."""
        return frozenset(shard for node in self._held for shard in range(node.start, node.stop))

    def parts(self, bucket: int) -> list[Tensor]:
        """The sums of a bucket, in the order of ``nodes``: flat, fp32. Handing them out lends them."""
        for each in self._held.values():
            each.lent = True
        return [self._held[node].buckets[bucket] for node in self.nodes]

    def begin_step(self) -> None:
        """Forget all sums. What was lent is used again, for no exchange reads it any more, unless it is frozen."""
        for each in (*self._held.values(), *self._retired):
            if not each.frozen:
                each.lent = False
                self._free.append(each)
        self._held.clear()
        self._retired.clear()

    def add(self, shard: int, gradients: Sequence[Array]) -> None:
        """Hold those of ``shard``, which may still have to be computed: waits for them."""
        merges = merge_plan(self._held, shard, self.shards) if self._merge else ()
        own = self._free.pop() if self._free else self._new()
        found = [((index, place), data) for index, each in enumerate(gradients) for place, data in pieces(each)]
        for slot, shape, where, (place, data) in zip(self.layout.slots, self._shapes, self._places, found, strict=True):
            assert place == where
            own.buckets[slot.bucket][slot.offset : slot.offset + slot.numel].view(shape).copy_(view(data))
        settle(self._device)
        node = Node(shard, shard + 1)
        for merge in merges:
            sibling = self._held.pop(merge.right if node == merge.left else merge.left)
            for mine, theirs in zip(own.buckets, sibling.buckets, strict=True):
                mine.add_(theirs)  # which operand is left changes no bits
            (self._retired if sibling.lent else self._free).append(sibling)
            node = merge.parent
        self._held[node] = own

    def keep(self, shards: frozenset[int]) -> frozenset[int]:
        """Forget what is held of all other shards. A sum cannot be taken apart, so one that holds others too is
        forgotten whole. Returns the shards held then."""
        for node in [n for n in self._held if not shards.issuperset(range(n.start, n.stop))]:
            given_up = self._held.pop(node)
            (self._retired if given_up.lent else self._free).append(given_up)
        return self.have

    def freeze(self) -> None:
        """An exchange was interrupted: an old communicator may read what was handed out at any later time. Such buffers
        are never written again."""
        self._retired.clear()  # all lent, and of no more use
        for each in self._held.values():
            each.frozen = each.frozen or each.lent

    def _new(self) -> Sum:
        return Sum([torch.empty(n, dtype=torch.float32, device=self._device) for n in self.layout.buckets])
