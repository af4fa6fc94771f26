"""What torchtitan 0.3 needs of a torch that is older than the nightly it was written for.

On torch 2.13 it does not run by itself, on any device. Each patch says why. They go when 2.13 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

OLDER = not hasattr(dist, "set_timeout")
# torchtitan's default, "spmd_types", gives plain tensors to fully_shard(dp_mesh_dims=…); 2.13 takes DTensors only.
SPMD_BACKEND = "partial_dtensor" if OLDER else "spmd_types"


def patch() -> None:
    """Patch torch as far as this torch needs it. Safe to call twice."""
    if hasattr(dist, "set_timeout"):
        return
    # torchtitan tightens timeouts after the first step. 2.13 has the function under its old, private name.
    dist.set_timeout = _set_timeout  # type: ignore[attr-defined]
    # torchtitan gives a pipeline's schedule its micro-batches. 2.13 wants to split a batch itself.
    for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        kind.step = _taking_micro_batches(kind.step)  # type: ignore[method-assign]


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    c10d._set_pg_timeout(timeout, group)


def _taking_micro_batches(step: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(schedule: Any, *args: Any, kwarg_mbs: list[Any] | None = None, **kwargs: Any) -> Any:
        if kwarg_mbs is None:
            return step(schedule, *args, **kwargs)
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        return schedule._step_microbatches(kwargs.pop("arg_mbs"), kwarg_mbs, **kwargs)

    return wrapped
