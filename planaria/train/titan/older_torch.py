"""What torchtitan 0.3 needs of a torch that is older than the nightly it was written for.

On torch 2.13 it does not run by itself, on any device. Each patch says why, and does nothing where torch has what it is
for. They go when 2.13 is no longer supported.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def adapt(config: Any) -> None:
    """Patch torch, and change defaults in ``config``, as far as this torch needs it."""
    if hasattr(dist, "set_timeout"):
        return
    # torchtitan tightens timeouts after the first step. 2.13 has the function under its old, private name.
    dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    # The default, "spmd_types", gives plain tensors to fully_shard(dp_mesh_dims=…), which takes only DTensors in 2.13.
    config.parallelism = replace(config.parallelism, spmd_backend="partial_dtensor")


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    c10d._set_pg_timeout(timeout, group)
