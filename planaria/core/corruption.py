"""Who is right when copies of the same thing differ: the rules by which all members come to the same answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def odd_ones(values: Sequence[int]) -> frozenset[int] | None:
    """Positions of the values that differ from the one that more than half have: none if all agree. None if there is
    no such value: two that differ, two against two, or all different."""
    if not values:
        return frozenset()
    common, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return None
    return frozenset(position for position, value in enumerate(values) if value != common)
