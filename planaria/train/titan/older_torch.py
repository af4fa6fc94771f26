"""What torchtitan 0.3 needs of a torch that is older than the nightly it was written for.

On torch 2.13 it does not run by itself, on any device. Each patch says why. They go when 2.13 is no longer supported.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

OLDER = not hasattr(dist, "set_timeout")
# torchtitan's default, "spmd_types", gives plain tensors to fully_shard(dp_mesh_dims=…); 2.13 takes DTensors only.
SPMD_BACKEND = "partial_dtensor" if OLDER else "spmd_types"


def patch() -> None:
    """Patch torch as far as this torch needs it. Safe to call twice."""
    if OLDER:
        # torchtitan tightens timeouts after the first step. 2.13 has the function under its old, private name.
        dist.set_timeout = _set_timeout  # type: ignore[attr-defined]


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    c10d._set_pg_timeout(timeout, group)
