"""Where each parameter's gradient lies in the flat buckets that are exchanged. Knows numbers only, no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Gradients come roughly in reverse order of registration. The first bucket is small so that the exchange
# starts soon after backward does; later ones are large because each costs a round trip (the sizes of torch's
# DDP).
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
ITEM_BYTES = 4  # sums are fp32


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: ``numel`` elements of ``bucket`` from ``offset`` (both in elements)."""

    bucket: int
    offset: int
    numel: int


class Layout:
    """Packs parameters, last one first, into buckets of at least ``bucket_bytes`` (the last may be smaller).

    ``numels`` are the parameters' sizes in elements, in order of registration. ``slots[i]`` is parameter i's
    place, ``buckets[b]`` the number of elements of bucket b. A parameter is never split, so a bucket may be
    larger by less than one parameter. Equal arguments give equal layouts on every member.
    """

    def __init__(
        self,
        numels: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1 or first_bucket_bytes < 1:
            raise ValueError(f"buckets need at least one byte, not {first_bucket_bytes} and {bucket_bytes}")
        if any(numel < 0 for numel in numels):
            raise ValueError("a parameter has a negative number of elements")
        self.numels = tuple(numels)
        places: list[Slot] = []
        buckets: list[int] = []
        filled = 0
        for numel in reversed(self.numels):
            places.append(Slot(len(buckets), filled, numel))
            filled += numel
            limit = bucket_bytes if buckets else min(first_bucket_bytes, bucket_bytes)
            if filled * ITEM_BYTES >= limit:
                buckets.append(filled)
                filled = 0
        if filled or (places and places[-1].bucket == len(buckets)):
            buckets.append(filled)
        self.slots = tuple(reversed(places))
        self.buckets = tuple(buckets)

    def members_of(self, bucket: int) -> tuple[int, ...]:
        """The parameters in ``bucket``, in the order in which they lie there (the last registered first)."""
        return tuple(i for i in range(len(self.slots) - 1, -1, -1) if self.slots[i].bucket == bucket)
