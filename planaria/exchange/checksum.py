"""A checksum of a block of a device's memory, computed by the device at the speed of its memory."""

from __future__ import annotations

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
