"""Taking FSDP2 back to where it is between steps, after an error has ended a forward or backward pass half-way.

FSDP2 has no such call: its hooks count on every pass being finished. What they keep between one another is listed here,
from torch 2.11 to 2.13; the tests of lost ranks fail if something is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

# By name, the values of an idle module; absent ones are of another version.
_STATE = {"_training_state": TrainingState.IDLE}
_CONTEXT = {"post_backward_final_callback_queued": False, "iter_forward_root": None}
_COMMUNICATION = {"all_gather_state": None, "reduce_scatter_state": None}
_GROUP = {
    "_training_state": TrainingState.IDLE,
    "_all_gather_result": None,
    "_post_reduce_event": None,
    "_reshard_after_forward_event": None,
    "_partial_reduce_output": None,
    "_all_reduce_state": None,
}


def unwind(modules: Sequence[nn.Module]) -> None:
    """No pass of ``modules`` is under way any more, and their parameters are sharded."""
    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                _unwind(part._get_fsdp_state())


def _unwind(state: Any) -> None:
    _set(state, _STATE)
    _set(state._state_ctx, _CONTEXT)
    _set(state._comm_ctx, _COMMUNICATION)
    _clear(state, "_modules_to_run_forward")
    _clear(state._comm_ctx, "reduce_scatter_states")
    _clear(state._comm_ctx, "post_forward_order")
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is None:
            continue
        _set(group, _GROUP)
        _clear(group, "_post_forward_indices")
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                gathered.grad = None  # it would be added to that of the next backward pass
        group._to_sharded()


def _set(of: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(of, name):
            setattr(of, name, value)


def _clear(of: Any, name: str) -> None:
    if hasattr(of, name):
        getattr(of, name).clear()
