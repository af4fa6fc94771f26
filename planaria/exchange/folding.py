"""Adding up the sums of subtrees in a given order, and telling whether the total is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

# Elements that are folded at a time: the result of this size stays in a core's cache from one pass to the next,
# and the cost of calling torch is still small beside that of the arithmetic (measured; half and twice are slower).
BLOCK = 1 << 18

Pairs = Sequence[tuple[int, int]]


def landing(pairs: Pairs) -> tuple[int, ...]:
    """The positions whose operand may be ``out`` itself in :func:`fold`: the two of the addition that ends there first.

    Receiving one of them straight into ``out`` saves a buffer and a pass over memory.
    """
    for into, add in pairs:
        if into == 0:
            return 0, add
    return (0,)


def fold(operands: Sequence[Tensor], pairs: Pairs, divisor: int, out: Tensor, own: Collection[int] = ()) -> bool:
    """``out`` = (the total of ``operands``) / ``divisor``; returns whether all of it is finite.

    ``pairs`` are (into, add) positions as of ``core.tree.fold_plan``: the total ends in position 0. All tensors are
    flat, contiguous, of one type and size. Operands at the positions ``own`` may be overwritten, the others are only
    read. One operand may be ``out`` itself: see :func:`landing`. Blocks do not change the bits: every element is
    added up for itself.
    """
    total = 0.0
    columns = [torch.split(operand, BLOCK) for operand in operands]
    for number, block in enumerate(torch.split(out, BLOCK)):
        _fold_block([column[number] for column in columns], pairs, block, own)
        _divide(block, divisor)
        total += float(block.sum())
    # A finite sum proves that every term is finite, in one pass over what is in the cache anyway. The converse fails
    # only where the sum overflows, so then each element is asked.
    return math.isfinite(total) or bool(out.isfinite().all())


def fold_on_device(
    operands: Sequence[Tensor],
    pairs: Pairs,
    divisor: Divisor,
    out: Tensor,
    own: Collection[int],
    spare: Callable[[int], Tensor],
    probe: Tensor,
) -> None:
    """The same as kernels on the current stream, with the same bits, waiting for none of them.

    ``probe`` (no dimensions) becomes a number that is finite only if all of ``out`` is. ``spare`` gives memory for the
    sum that takes the place of an operand which must not be overwritten, by its position.
    """
    _fold_block(list(operands), pairs, out, own, spare)
    divisor.divide(out)
    torch.sum(out, 0, out=probe)


class Divisor:
    """A number to divide by on a device, with the bits that a CPU gives."""

    def __init__(self, number: int, device: torch.device) -> None:
        self._number = number
        # By a number of Python, CUDA kernels would multiply with its reciprocal, which may be off by one bit.
        self._there = torch.tensor(float(number), dtype=torch.float32, device=device) if number & (number - 1) else None

    def divide(self, tensor: Tensor) -> None:
        if self._there is None:
            _divide(tensor, self._number)
        else:
            tensor.div_(self._there)


def _divide(block: Tensor, divisor: int) -> None:
    if divisor & (divisor - 1):
        block.div_(divisor)
    elif divisor > 1:
        block.mul_(1 / divisor)  # a power of two: the same bits, and several times faster


def _fold_block(
    sums: list[Tensor], pairs: Pairs, out: Tensor, own: Collection[int], spare: Callable[[int], Tensor] | None = None
) -> None:
    if not pairs and sums[0] is not out:
        out.copy_(sums[0])
    writable = set(own)
    for into, add in pairs:
        if into == 0:
            sums[0] = torch.add(sums[0], sums[add], out=out)
        elif into in writable:
            sums[into].add_(sums[add])
        else:
            sums[into] = torch.add(sums[into], sums[add], out=None if spare is None else spare(into))
            writable.add(into)
