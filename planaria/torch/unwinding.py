"""Taking FSDP2 and pipelines back to where they are between steps, after an error has ended a pass half-way.

Neither has such a call: they count on every pass being finished. What FSDP2's hooks keep between one another is listed
here, from torch 2.11 to 2.13; the tests of lost ranks fail if something is missing. Pipelines become what they were
before their first step, for that is where those of a new rank are: in their first step all stages talk about shapes.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from planaria.errors import PlanariaError

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


class Pipelines:
    """The stages and schedules of ``torch.distributed.pipelining`` in this process, as they are when this is made:
    before their first step."""

    def __init__(self) -> None:
        self._found = [(each, _kept(each)) for each in _pipelining()]

    def __len__(self) -> int:
        return len(self._found)

    def rewind(self) -> None:
        """Make them what they were. PlanariaError if there are others by now: nobody knows what those were."""
        known = {id(each) for each, _ in self._found}
        if any(id(each) not in known for each in _pipelining()):
            raise PlanariaError(
                "a pipeline was made after the first step.guard(), so that its other ranks would not know where it is; "
                "make all stages and schedules before the loop"
            )
        for each, kept in self._found:
            vars(each).clear()
            vars(each).update({name: _copy(value) for name, value in kept.items()})


def _pipelining() -> Iterator[Any]:
    """All stages and schedules of this process. They are found like this so that a script need not name them."""
    if "torch.distributed.pipelining" not in sys.modules:
        return
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from torch.distributed.pipelining.stage import _PipelineStageBase

    for each in gc.get_objects():
        # Not isinstance: it would ask proxies for the class that they pretend to be.
        if issubclass(type(each), (_PipelineSchedule, _PipelineStageBase)):
            yield each


def _kept(of: Any) -> dict[str, Any]:
    return {name: _copy(value) for name, value in vars(of).items()}


def _copy(value: Any) -> Any:
    """What is changed in place is copied; all else is replaced, if it changes at all."""
    changes = isinstance(value, (dict, list, set)) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    return copy.copy(value) if changes else value
