"""Adding up the sums of subtrees in a given order, and telling whether the total is finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that are folded at a time: their operands and the result (1 MB each) stay in the cache from one
# pass to the next, and the cost of calling torch is still small beside that of the arithmetic.
BLOCK = 1 << 18

Pairs = Sequence[tuple[int, int]]


def fold(operands: Sequence[Tensor], pairs: Pairs, divisor: int, out: Tensor) -> bool:
    """``out`` = (the total of ``operands``) / ``divisor``; returns whether all of it is finite.

    ``pairs`` are (into, add) positions as of ``core.tree.fold_plan``: the total ends in position 0. All
    tensors are flat, contiguous, of one type and size. The operands are only read. Blocks do not change the
    bits: every element is added up for itself.
    """
    finite = True
    for start in range(0, out.numel(), BLOCK):
        block = out[start : start + BLOCK]
        _fold_block([each[start : start + BLOCK] for each in operands], pairs, block)
        if divisor != 1:
            block.div_(divisor)
        finite = finite and _is_finite(block)
    return finite


def _fold_block(sums: list[Tensor], pairs: Pairs, out: Tensor) -> None:
    if not pairs:
        out.copy_(sums[0])
    own = [False] * len(sums)  # whether sums[i] may be overwritten
    for into, add in pairs:
        if own[into]:
            sums[into].add_(sums[add])
        elif into == 0:
            sums[0] = torch.add(sums[0], sums[add], out=out)
        else:
            sums[into] = sums[into] + sums[add]
        own[into] = True


def _is_finite(block: Tensor) -> bool:
    # A finite sum proves that every term is finite, at the price of one pass. The converse fails only where
    # the sum overflows, so then each element is asked.
    if bool(block.sum().isfinite()):
        return True
    return bool(block.isfinite().all())
