"""The flat buffers behind a gradient store: which parameters lie where, and whose turn it is to use which buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from planaria.core.tree import Merge, Node
from planaria.exchange.layout import Layout
from planaria.torch.parts import is_dense

# Gradients from this many elements on are put in place by their own hook, while they are warm in the cache; smaller
# ones by one call per bucket, because a call costs more (1.5 us) than moving 16 KB from memory (about 1 us).
EAGER_NUMEL = 4096


def local_numel(parameter: Tensor) -> int:
    """Elements that this rank holds of a parameter: of a DTensor its local part."""
    return local(parameter).numel()


def local(tensor: Tensor) -> Tensor:
    """The tensor itself, or of a DTensor the part that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Slab:
    """One flat buffer of a bucket. ``lent``: handed to an exchange, so never written again until the step is over.
    ``frozen``: the exchange was interrupted, somebody may read it for ever: never used again."""

    __slots__ = ("flat", "frozen", "lent", "small", "views")

    def __init__(self, flat: Tensor, views: list[Tensor], small: list[int]) -> None:
        self.flat = flat
        self.views = views  # in the shapes of the bucket's parameters
        self.small = [views[position] for position in small]
        self.lent = False
        self.frozen = False


class Bucket:
    """The fixed facts of one bucket: which parameters lie in it and where."""

    def __init__(self, index: int, layout: Layout, parameters: Sequence[Parameter]) -> None:
        self.index = index
        self.numel = layout.buckets[index]
        self.members = layout.members_of(index)  # indices of parameters
        self.offsets = [layout.slots[i].offset for i in self.members]
        self.parameters = [parameters[i] for i in self.members]
        self.small = [k for k, p in enumerate(self.parameters) if local_numel(p) < EAGER_NUMEL]
        self.small_parameters = [self.parameters[k] for k in self.small]
        self.free: list[Slab] = []
        self.retired: list[Slab] = []  # lent, and merged into another since
        self.sums: dict[Node, Slab] = {}

    def views(self, flat: Tensor) -> list[Tensor]:
        return [shaped(flat, at, p) for at, p in zip(self.offsets, self.parameters, strict=True)]

    def take(self) -> Slab:
        """A slab nobody uses. Its contents are arbitrary."""
        if self.free:
            return self.free.pop()
        flat = torch.empty(self.numel, dtype=torch.float32, device=local(self.parameters[0]).device)
        return Slab(flat, self.views(flat), self.small)

    def reset(self, recycle: bool) -> None:
        for slab in (*self.sums.values(), *self.retired):
            if not slab.frozen and (recycle or not slab.lent):
                slab.lent = False
                self.free.append(slab)
        self.sums.clear()
        self.retired.clear()

    def merge(self, slab: Slab, leaf: Node, merges: Sequence[Merge]) -> None:
        """Add finished siblings to the sum ``slab`` of ``leaf``, upwards, and keep the result."""
        node = leaf
        for merge in merges:
            sibling = self.sums.pop(merge.right if node == merge.left else merge.left)
            slab.flat.add_(sibling.flat)  # which operand is left changes no bits
            (self.retired if sibling.lent else self.free).append(sibling)
            node = merge.parent
        self.sums[node] = slab


def shaped(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """The parameter's place in a flat buffer, with the parameter's own memory order where it is dense, so that
    copies and optimizers walk through both alike."""
    own = local(parameter)
    part = flat[offset : offset + own.numel()]
    if is_dense(own.shape, own.stride()):
        return part.as_strided(own.shape, own.stride())
    return part.view(own.shape)
