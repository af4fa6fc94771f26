"""Recorded values on their way to the host, for which nobody waits before they are needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from planaria.errors import UsageError
from planaria.rank.records import METRICS


class Scalar:
    """A number that a GPU may still have to compute. It is copied at once, in the order of the current stream, so
    that asking for it waits for what was enqueued before it was recorded, and for nothing after."""

    __slots__ = ("_copied", "_there")

    def __init__(self, value: Tensor) -> None:
        self._there = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
        self._there.copy_(value.detach().reshape(()), non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._there)


def recorded(value: Any) -> Any:
    """What to keep of a recorded value until ``float`` makes a number of it. Does not wait for a device."""
    if not isinstance(value, Tensor):
        return value
    if value.is_cuda and value.numel() == 1 and not isinstance(value, DTensor):
        return Scalar(value)
    return value.detach()


def check_names(got: list[str], known: list[str], where: str) -> None:
    """A shard's record has the names that all others have, both sorted. Raises UsageError."""
    if got != known:
        raise UsageError(
            f"{where}: step.record got {got} in this shard but {known} before; record the same names for every batch"
        )
    if len(known) > METRICS:
        raise UsageError(f"{where}: at most {METRICS} metrics can be recorded, not {len(known)}")
