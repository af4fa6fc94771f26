"""Numbers of eight bits with a scale for each block: a quarter of the bytes of fp32, for links that are slow.

A block is 256 neighbours of a bucket, counted from the bucket's start. Its scale is its largest magnitude divided by
the largest code (127 of int8, 448 of fp8, which is e4m3fn). Every number is rounded at random to one of the two codes
around it, the nearer one more often, so that its mean is the number itself: QSGD (arXiv 1610.02132, section 3), with
the largest magnitude in place of the norm; that outer gradients of DiLoCo stand far coarser codes is shown in
arXiv 2501.18512, section 3.3. The noise is a function of a key and of the number's place in its bucket (noise.py), so
equal numbers under equal keys have equal codes, whoever makes them, on whatever device.

- What is off by how much: at most one step, the distance of two codes (scale for int8; scale * 2^-9 up to scale * 32,
  by magnitude, for fp8). The mean is off by less than 2^-14 of a step.
- Zeros, and what lies on a code, stay what they are. Scales are at least 2^-126, so numbers far below that become 0 or
  a multiple of it, with the right mean. The largest finite numbers do not overflow.
- A block with NaN or an infinity has the scale NaN and decodes to NaN throughout: it cannot go unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.exchange.layout import ITEM_BYTES
from planaria.exchange.noise import NOISE, ROW, Noise, key_of, row_words

BLOCK = ROW  # numbers with one scale
CHUNK = 1 << 17  # numbers that are coded at a time on a CPU: the memory for it, some 2 MB, stays in a core's cache
DEVICE_CHUNK = 1 << 22  # on a device: a kernel takes longer than its launch, and the memory for it is some 70 MB

_ALIGNMENT = 16  # bytes: for the widest loads
_SMALLEST = 2.0**-126  # the smallest scale: the smallest number that divides without loss

# The code's type and its largest number.
CODECS: dict[str, tuple[torch.dtype, float]] = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}

# fp32 and e4m3fn have their exponents here. The least exponent of e4m3fn that is not subnormal is -6.
_MANTISSA, _BIAS = 23, 127
_EXPONENT = 0xFF << _MANTISSA
_LEAST = _BIAS - 6 << _MANTISSA
_FRACTION_BITS = 3


def part_key(noise: int, bucket: int, shard: int) -> int:
    """The key of the noise with which a shard's part is encoded. ``noise`` is that of the exchange."""
    return key_of(noise, bucket, shard)


def mean_key(noise: int, bucket: int) -> int:
    """The same for the mean, which is nobody's."""
    return key_of(noise, bucket, -1)


def coded_bytes(numel: int) -> int:
    """Length of the codes of so many neighbours, of which the first begins a block."""
    return _codes_from(numel) + -(-numel // _ALIGNMENT) * _ALIGNMENT


def _codes_from(numel: int) -> int:
    """Where the codes begin, after the scales."""
    return -(-numel // (BLOCK * _ALIGNMENT // ITEM_BYTES)) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Coded:
    """Views of what is sent: an fp32 scale for each block, then a code for each number."""

    scales: Tensor
    codes: Tensor

    @staticmethod
    def within(wire: Tensor, numel: int, codec: str) -> Coded:
        """In the first ``coded_bytes(numel)`` bytes of ``wire`` (uint8, aligned)."""
        scales, start = -(-numel // BLOCK) * ITEM_BYTES, _codes_from(numel)
        return Coded(wire[:scales].view(torch.float32), wire[start : start + numel].view(CODECS[codec][0]))

    def __len__(self) -> int:
        return self.codes.numel()

    def part(self, start: int, stop: int) -> Coded:
        """Of some of the numbers; ``start`` begins a block, unless there are none."""
        return Coded(self.scales[-(-start // BLOCK) : -(-stop // BLOCK)], self.codes[start:stop])


class Coder:
    """Encodes and decodes, on one device, for one thread and stream. ``empty(numel, dtype)`` gives the memory."""

    def __init__(
        self,
        codec: str,
        device: torch.device,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
        chunk: int | None = None,
    ) -> None:
        make = empty or (lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device))
        self.codec = codec
        self.chunk = chunk or (CHUNK if device.type == "cpu" else DEVICE_CHUNK)
        self._largest = CODECS[codec][1]
        self._noise = Noise(self.chunk, device, make)
        self._work, self._random = (make(self.chunk, torch.float32) for _ in range(2))
        self._bits = make(self.chunk, torch.int32)
        blocks = self.chunk // BLOCK
        self._words, self._spare = (make(blocks, torch.int64) for _ in range(2))
        self._inverse = make(blocks, torch.float32)

    def encode(self, source: Tensor, coded: Coded, key: int, first: int) -> None:
        """``source`` (flat, contiguous, fp32), whose first number is number ``first`` of its bucket and begins a block,
        into ``coded``, which is as long. ``key``: of the noise."""
        for start, stop, width in self._stretches(len(coded)):
            part = coded.part(start, stop)
            words = self._words[: part.scales.numel()]
            row = row_words(key, (first + start) // BLOCK, words, self._spare[: words.numel()])
            self._encode(source[start:stop].view(-1, width), part, row)

    def decode(self, coded: Coded, out: Tensor) -> None:
        """``coded`` into ``out`` (flat, contiguous, fp32), which is as long."""
        for start, stop, width in self._stretches(len(coded)):
            part, here = coded.part(start, stop), out[start:stop]
            if self.codec == "int8":
                here.copy_(part.codes)
            else:
                # The bits of e4m3fn in those of fp32 make a number that is 2^120 times too small. That is exact, and
                # on a CPU several times faster than torch's conversion.
                bits = self._bits[: stop - start].copy_(part.codes.view(torch.int8))
                bits.bitwise_left_shift_(_MANTISSA - _FRACTION_BITS).bitwise_and_(0x07F00000 - (1 << 31))
                torch.mul(bits.view(torch.float32), 2.0**120, out=here)
            here.view(-1, width).mul_(part.scales[:, None])

    def _stretches(self, numel: int) -> list[tuple[int, int, int]]:
        """Start, stop and width of rows, so that all rows of a stretch are equally wide: BLOCK, or the last one."""
        whole = numel // BLOCK * BLOCK
        found = [(start, min(start + self.chunk, whole), BLOCK) for start in range(0, whole, self.chunk)]
        return [*found, (whole, numel, numel - whole)] if whole < numel else found

    def _encode(self, rows: Tensor, coded: Coded, words: Tensor) -> None:
        scales, numel = coded.scales, rows.numel()
        work, random = (each[:numel].view(rows.shape) for each in (self._work, self._random))
        inverse = self._inverse[: scales.numel()]
        torch.amax(torch.abs(rows, out=work), 1, out=scales)
        torch.sub(scales, scales, out=inverse)  # 0, or NaN if the block is not finite
        scales.mul_(1 / self._largest).clamp_(min=_SMALLEST).add_(inverse)
        torch.reciprocal(scales, out=inverse)
        torch.mul(rows, inverse[:, None], out=work).clamp_(-self._largest, self._largest)
        self._noise.fill(random, words)
        if self.codec == "int8":
            work.add_(random, alpha=NOISE).round_()
        else:
            self._round_to_fp8(work, random)
        coded.codes.view(rows.shape).copy_(work)

    def _round_to_fp8(self, work: Tensor, random: Tensor) -> None:
        """``work``, at most 448, to numbers that e4m3fn has. Multiplies with powers of two only, which is exact."""
        power = self._bits[: work.numel()].view(work.shape)
        torch.bitwise_and(work.view(torch.int32), _EXPONENT, out=power).clamp_(min=_LEAST)  # 2^e, as bits of fp32
        power.neg_().add_(2 * _BIAS << _MANTISSA)  # 2^-e
        work.mul_(power.view(torch.float32))  # from 1 to 2, or less
        unit = 1 << _FRACTION_BITS
        torch.add(random, work, alpha=unit / NOISE, out=work).mul_(NOISE).round_()
        power.neg_().add_(2 * _BIAS - _FRACTION_BITS << _MANTISSA)  # 2^(e-3)
        work.mul_(power.view(torch.float32))
