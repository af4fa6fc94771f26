"""Who is right when copies of the same thing differ: the rules by which all members come to the same answer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planaria.core.messages import Standing


def odd_ones(values: Sequence[int]) -> frozenset[int] | None:
    """Positions of the values that differ from the one that more than half have: none if all agree. None if there is
    no such value: two that differ, two against two, or all different."""
    if not values:
        return frozenset()
    common, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return None
    return frozenset(position for position, value in enumerate(values) if value != common)


def signs(standing: Standing) -> bool:
    """Whether a roll call must say what the member holds: it counts, or it will if nobody holds anything newer. What a
    script began with is compared by the lighthouse."""
    return standing.settled or standing.step > 0


def compared(standings: Sequence[Standing]) -> list[int]:
    """Members whose states should be the same, by rank: those of the newest of the states that count. If none does,
    those of the newest there are."""
    ranks = [r for r, each in enumerate(standings) if each.settled] or [*range(len(standings))]
    newest = max(((standings[r].step, standings[r].under) for r in ranks), default=None)
    return [r for r in ranks if (standings[r].step, standings[r].under) == newest]


@dataclass(frozen=True, slots=True)
class Recheck:
    """Which shards are computed twice, and by whom. Everybody who knows the job's ``seed`` says the same."""

    share: float  # probability, for each shard of each step
    seed: int

    def chosen(self, step: int, shards: int) -> frozenset[int]:
        return _chosen(self.share, self.seed, step, shards)

    def checkers(self, step: int, owned: Sequence[frozenset[int]], attempt: int) -> tuple[frozenset[int], ...]:
        """For each member the shards of others that it computes as well. Who checks whom goes round with the steps, and
        with the attempts at a step. None of a member that is alone."""
        if len(owned) < 2:
            return ()
        chosen = self.chosen(step, sum(map(len, owned)))
        given: list[set[int]] = [set() for _ in owned]
        for owner, shards in enumerate(owned):
            checker = (owner + 1 + (step + attempt) % (len(owned) - 1)) % len(owned)
            given[checker] |= shards & chosen
        return tuple(map(frozenset, given)) if any(given) else ()


@lru_cache(maxsize=8)  # asked for every shard
def _chosen(share: float, seed: int, step: int, shards: int) -> frozenset[int]:
    draw = random.Random(f"planaria recheck {seed} {step}")
    return frozenset(shard for shard in range(shards) if draw.random() < share)
