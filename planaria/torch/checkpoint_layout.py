"""Which part of each tensor a rank saves in a checkpoint, and which it takes from one.

A checkpoint names tensors as the state does, ``model.layer.weight`` or ``optimizer.state[model.layer.weight].exp_avg``.
What all ranks of a group hold together (a DTensor over all of them) can be taken up in any other layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planaria.errors import ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch.checkpoint_files import Checkpoint
from planaria.torch.parts import TensorSpec, live
from planaria.torch.world import GroupWorld

Box = tuple[torch.Size, torch.Size]  # shape of the whole, and where in it the part begins


@dataclass(frozen=True, slots=True)
class Piece:
    """This rank's part of a tensor, in host memory, as torch.distributed.checkpoint takes it."""

    tensor: Tensor
    shape: torch.Size  # of the whole
    offsets: torch.Size

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(self.tensor.dtype)
        index = MetadataIndex(fqn, self.offsets)
        return [
            WriteItem(index, WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.shape))
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.tensor.numel() and self.shape.numel():
            return []  # there were fewer elements than ranks
        return [ChunkStorageMetadata(self.offsets, self.tensor.shape)]


class SavePlanner(DefaultSavePlanner):
    """For ``{"pieces": {key: Piece}}``: what is on top is logged piece by piece, at the cost of the training thread."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict["pieces"], storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].tensor


class LoadPlanner(DefaultLoadPlanner):
    """For ``{key: Piece}``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor: Tensor = self.state_dict[index.fqn].tensor
        return tensor


def box_of(tensor: Tensor) -> Box:
    local = live(tensor)
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(sizes) == tuple(local.shape):
            return tensor.shape, torch.Size(offsets)
    return local.shape, torch.Size([0] * local.dim())


def key_of(name: str, tensor: Tensor, world: GroupWorld) -> str:
    """The tensor's name in a checkpoint. Only what all ranks of the group hold together bears its name alone; of
    anything else the ranks are named that hold it (the stages of a pipeline may use one name for different tensors)."""
    if world.size == 1:
        return name
    ranks = [world.rank]
    if isinstance(tensor, DTensor) and box_of(tensor)[0] == tensor.shape:
        ranks = sorted(tensor.device_mesh.mesh.flatten().tolist())
    return name if len(ranks) == world.size else f"{name}@{'-'.join(map(str, ranks))}"


def plain_of(checkpoint: Checkpoint, world: GroupWorld) -> tuple[list[Any], list[tuple[str, str, TensorSpec]]]:
    """(objects, tensors) of this rank: the objects of a manifest; name, key and spec of each of their tensors."""
    same = checkpoint.ranks == world.size
    parsed = []
    for rank in (world.rank,) if same else range(checkpoint.ranks):
        content = plain.load(checkpoint.head_of(f"rank{rank}.json"))
        try:
            tensors = [(str(n), str(k), TensorSpec.from_list(spec)) for n, k, spec in content["tensors"]]
            parsed.append((content["objects"], tensors))
        except (KeyError, TypeError, ValueError):
            raise ProtocolError("the plain data of a rank is malformed") from None
    objects, tensors = parsed[0]
    if any((each, [t[0] for t in of]) != (objects, [t[0] for t in tensors]) for each, of in parsed):
        raise UsageError(
            f"the checkpoint {checkpoint.path} was written by groups of {checkpoint.ranks} ranks that do not all hold "
            f"the same objects, so {world.size} cannot take it up; start as many in a group"
        )
    return objects, tensors


def wanted(
    checkpoint: Checkpoint, name: str, key: str, theirs: TensorSpec, like: Tensor | None, world: GroupWorld
) -> tuple[str, TensorSpec, Box]:
    """What this rank reads of a tensor: the key, its form here, and the part. ``key`` is that of the rank whose plain
    data this one takes. The layout inside the group may be another than the one that was saved: that of the living
    tensor ``like`` counts (see Part.models)."""
    if like is not None and (source := _source(checkpoint, name, key_of(name, like, world), world)):
        here, (shape, offsets), meta = live(like), box_of(like), checkpoint.tensors[source]
        if meta.size == shape:
            stride = theirs.stride if theirs.shape == here.shape else None
            dtype, sharded = meta.properties.dtype, isinstance(like, DTensor)
            return source, TensorSpec(dtype, tuple(here.shape), stride, here.device.type, sharded), (shape, offsets)
    source = _source(checkpoint, name, key, world)
    if source is None:
        raise UsageError(
            f"the ranks of the group that wrote {checkpoint.path} held different tensors called {name}; start it with "
            "groups of the same layout"
        )
    meta = checkpoint.tensors[source]
    stride = theirs.stride if theirs.shape == meta.size else None
    spec = TensorSpec(meta.properties.dtype, tuple(meta.size), stride, theirs.device)
    return source, spec, (meta.size, torch.Size([0] * len(meta.size)))


def _source(checkpoint: Checkpoint, name: str, own: str, world: GroupWorld) -> str | None:
    """The key under which a tensor is found: this rank's own, or the one that all ranks have together, or, if several
    have each saved it and all alike, any of theirs."""
    for known in (own, name) if checkpoint.ranks == world.size else (name,):
        if known in checkpoint.tensors:
            return known
    copies = [each for each in checkpoint.tensors if each.startswith(f"{name}@")]
    contents = {
        tuple(sorted((*part.offsets, checkpoint.stored[MetadataIndex(each, part.offsets)].checksum) for part in chunks))
        for each in copies
        for chunks in (checkpoint.tensors[each].chunks,)
    }
    return copies[0] if len(contents) == 1 else None
