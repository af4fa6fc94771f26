"""Random numbers without a state: each is a function of a key and of its place, so it does not matter who asks for
which of them, in what pieces, in what order, or on what device.

Counter-based as Random123 (Salmon et al., SC 2011), but made of the few integer operations that torch has on every
device: a *row* of numbers has a 64-bit word (splitmix64 of its key and index; Steele et al., OOPSLA 2014), and its
numbers are 32-bit mixes, in the manner of MurmurHash3, of that word and of a fixed table. Two numbers of 16 bits come
of each mix. Integer arithmetic wraps around and is exact, so all devices agree on every bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

ROW = 256  # numbers of a row
NOISE = 2.0**-16  # what the numbers are to be multiplied with, to lie between -1/2 and 1/2

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORDS = ROW // 2
_ALL = (1 << 64) - 1


def key_of(*words: int) -> int:
    """A 64-bit key of some integers, for example of (seed, step). The order counts."""
    key = len(words)
    for word in words:
        key = _mix((key ^ _mix(word & _ALL)) + _GOLDEN & _ALL)
    return key


def row_words(key: int, first: int, out: Tensor, spare: Tensor) -> Tensor:
    """The words of the rows ``first``, ``first`` + 1, ... of ``key``, one for each element of ``out``, which is int64,
    as ``spare`` is. Returns ``out`` as int32 of shape (rows, 2)."""
    torch.arange(first + 1, first + 1 + out.numel(), out=out)
    out.mul_(_signed(_GOLDEN)).add_(_signed(key))
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        torch.bitwise_right_shift(out, shift, out=spare).bitwise_and_((1 << 64 - shift) - 1)
        out.bitwise_xor_(spare)
        if factor is not None:
            out.mul_(_signed(factor))
    return out.view(torch.int32).view(-1, 2)


class Noise:
    """Makes up to ``numel`` numbers at a time. ``empty(numel, dtype)`` gives the memory."""

    def __init__(self, numel: int, device: torch.device, empty: Callable[[int, torch.dtype], Tensor]) -> None:
        self._mixed, self._shifted = (empty(-(-numel // ROW) * _WORDS, torch.int32) for _ in range(2))
        self._table = torch.tensor(_table(), dtype=torch.int32, device=device)

    def fill(self, out: Tensor, words: Tensor) -> Tensor:
        """Odd integers from -32767 to 32767, uniform: in each row of ``out`` (fp32; rows, at most ROW) the first of
        those that belong to the row's ``words`` (rows, 2). Returns ``out``.

        An odd number is never half a unit of what is rounded, so what needs no rounding stays what it is.
        """
        rows, width = out.shape
        mixed, shifted = (each[: rows * _WORDS].view(rows, _WORDS) for each in (self._mixed, self._shifted))
        torch.bitwise_xor(words[:, :1], self._table, out=mixed).mul_(0x7FEB352D)
        torch.bitwise_right_shift(mixed, 15, out=shifted).bitwise_and_(0x1FFFF)
        mixed.bitwise_xor_(shifted).add_(words[:, 1:]).mul_(_signed(0x846CA68B, 32))
        torch.bitwise_right_shift(mixed, 16, out=shifted).bitwise_and_(0xFFFF)
        mixed.bitwise_xor_(shifted).bitwise_or_(0x00010001)
        return out.copy_(mixed.view(torch.int16).view(rows, ROW)[:, :width])


@functools.cache
def _table() -> tuple[int, ...]:
    return tuple(_signed(_mix(number * _GOLDEN & _ALL) >> 32, 32) for number in range(1, _WORDS + 1))


def _mix(word: int) -> int:
    word = (word ^ word >> 30) * _FIRST & _ALL
    word = (word ^ word >> 27) * _SECOND & _ALL
    return word ^ word >> 31


def _signed(word: int, bits: int = 64) -> int:
    return word - (1 << bits) if word >> bits - 1 else word
