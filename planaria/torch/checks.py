"""What a script must not do although Python lets it: seen at the cost of a few comparisons a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from planaria.errors import UsageError
from planaria.rank.front import World
from planaria.rank.records import ShardRecord, unpack_presence
from planaria.torch.world import part_of


class BufferWatch:
    """Buffers, given as (name, module, attribute), must not change in the forward pass: what they would hold would
    depend on which group computed which shard, and in which order. A running mean over the shards of a step could be
    put together like gradients, but a layer's own formula cannot: each update rounds on top of the one before."""

    def __init__(self, buffers: Sequence[tuple[str, torch.nn.Module, str]]) -> None:
        self._buffers = buffers

    def now(self) -> list[tuple[int, int]]:
        """Which tensor each buffer is, and how often it was written."""
        tensors = (getattr(module, attribute) for _, module, attribute in self._buffers)
        return [(id(tensor), tensor._version) for tensor in tensors]

    def check(self, before: list[tuple[int, int]], where: str) -> None:
        for (name, _, _), then, now in zip(self._buffers, before, self.now(), strict=True):
            if now != then:
                raise UsageError(
                    f"{where}: the buffer {name} changed in the forward pass, so groups would come to differ. Running "
                    "statistics, SyncBatchNorm's too, cannot be kept: use GroupNorm or LayerNorm, or BatchNorm with "
                    "track_running_stats=False, or put that layer into eval mode while training (frozen statistics)"
                )


class TrainableWatch:
    """Which parameters are trained is settled when the steps begin: those are the ones that are exchanged."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._parameters = [(name, parameter, parameter.requires_grad) for name, parameter in parameters]

    def check(self, where: str, step: int) -> None:
        for name, parameter, needed in self._parameters:
            if parameter.requires_grad != needed:
                raise UsageError(
                    f"{where}, step {step}: requires_grad of {name} was {needed} when the steps began and is "
                    f"{not needed} now; which parameters are trained must be settled before job.steps"
                )


def check_spread(named: Sequence[tuple[str, torch.nn.Parameter]], world: World, where: str) -> None:
    """Ranks that share a batch must share its gradients: nobody but the group itself adds those up."""
    _, parts = world.part
    for name, parameter in named:
        ranks = parameter.device_mesh.mesh.flatten().tolist() if isinstance(parameter, DTensor) else [world.rank]
        if len({part_of(rank, world.shape)[0] for rank in ranks}) < parts:
            raise UsageError(
                f"{where}: the parameter {name} is not spread over the {parts} ranks that share every batch, so their "
                "copies of it would come to differ; use fully_shard(model, mesh=job.mesh[...]), or call dimensions "
                "of pt.init(mesh=...) tp, pp or cp if all along them need the same samples"
            )


def check_presence(records: Sequence[ShardRecord], names: Sequence[str], where: str) -> None:
    """A parameter has a gradient in all shards or in none."""
    if len({record.presence for record in records}) <= 1:
        return
    flags = {record.shard: unpack_presence(record.presence, len(names)) for record in records}
    for index, name in enumerate(names):
        without = [shard for shard, present in flags.items() if not present[index]]
        if without and len(without) < len(flags):
            raise UsageError(
                f"{where}: the parameter {name} got a gradient in some shards but none in shards {without}. If that is "
                "meant (conditional layers), say allow_unused=True to job.protect (or job.register): a missing "
                "gradient then is zero"
            )
