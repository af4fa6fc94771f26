"""Checksums of a device's memory, computed by the device at the speed of its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LANE = 8  # bytes that are added up as one number
ROW = 4096  # lanes
ROW_FACTOR, COLUMN_FACTOR = 0x278DDE6E5FD29F05, 0x30ACAB8F49F53AD3  # any odd numbers without pattern, below 2^62


class Checksum:
    """The weights of lanes for blocks of at most ``length`` bytes, on a device."""

    def __init__(self, length: int, device: torch.device) -> None:
        rows = length // LANE // ROW + 1
        self._down = torch.arange(rows, device=device) * (2 * ROW_FACTOR)
        self._across = torch.arange(ROW, device=device) * (2 * COLUMN_FACTOR) + 1

    def of(self, block: Tensor) -> Tensor:
        """One number (int64, no dimensions) for uint8 of a multiple of 8 bytes, aligned to 8.

        The sum of all lanes, each times the weight of its place, modulo 2 to the power of 64. All weights are odd, so
        a change of any one lane is noticed for certain, and they differ, so lanes that changed places are noticed too.
        Read twice and never copied: weights are those of a row plus those of a column, which are applied to sums.
        """
        lanes = block.view(torch.int64)
        rows = lanes.numel() // ROW
        table, rest = lanes[: rows * ROW].view(rows, ROW), lanes[rows * ROW :]
        total = (table.sum(1) * self._down[:rows]).sum() + (table.sum(0) * self._across).sum()
        if rest.numel():
            total += (rest * (self._across[: rest.numel()] + self._down[rows])).sum()
        return total


def lane_sums(tensors: Sequence[Tensor]) -> list[int]:
    """For each tensor the sum of its memory, as numbers of 64 bits, modulo 2 to the power of 64: contiguous, of any
    type and shape, on any device.

    Every memory is read once, by its own device. The host waits once for each device. A change of any one lane changes
    the sum for certain; changes of several cancel out by chance alone. (Lanes that change places are not noticed: that
    is not what memory does.)
    """
    there: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        there.setdefault(tensor.device, []).append((index, lane_sum(tensor)))
    sums = [0] * len(tensors)
    for found in there.values():
        values = torch.stack([each for _, each in found]).tolist()
        for (index, _), value in zip(found, values, strict=True):
            sums[index] = value % (1 << 64)
    return sums


def lane_sum(tensor: Tensor) -> Tensor:
    """Of one tensor, as a tensor without dimensions (int64) on its device; nobody waits for it."""
    values = tensor.detach().resolve_conj().resolve_neg()  # what they are, and not what a lazy view of them is made of
    data = values.reshape(-1).view(torch.uint8)
    if data.storage_offset() % LANE:
        data = data.clone()  # lanes must lie alike on all members
    whole = data.numel() // LANE * LANE
    total = data[:whole].view(torch.int64).sum()
    return total if whole == data.numel() else total + data[whole:].sum(dtype=torch.int64)
