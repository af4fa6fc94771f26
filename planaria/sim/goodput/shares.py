"""How long a step takes when some groups are away, as ``core.assignment`` gives their shards to the others."""

from __future__ import annotations

from functools import lru_cache

from planaria.core.assignment import contiguous


@lru_cache(maxsize=4096)
def busiest(shards: int, members: int) -> int:
    """Shards of the member that has the most: all wait for it. Equal machines."""
    return max(len(run) for run in contiguous(shards, (1.0,) * members))


@lru_cache(maxsize=4096)
def taken_over(shards: int, members: int, lost: int) -> int:
    """Additional shards of the busiest survivor when the last ``lost`` of ``members`` go in the middle of a step and
    all others hold what is theirs. ``core.assignment.fill`` lets all finish as early as can be, which for equal
    machines is this (a test compares them); to ask it costs half a second at 10,000 shards."""
    missing = sum(len(run) for run in contiguous(shards, (1.0,) * members)[members - lost :])
    return -(-missing // (members - lost))
