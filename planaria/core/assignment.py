"""Which member computes which shards.

Every member computes these functions on its own from the same roll call and acts on the result, so they must
give the same answer everywhere: weights become small integers first, and from there on only integers and
fractions are compared. Ties go to the lower rank, and nothing depends on the order of a hash table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from planaria.core.tree import Node, children, maximal_nodes, root

Shards = frozenset[int]

# Speeds are told apart to one part in a thousand of the fastest: finer than any step time can be measured.
RESOLUTION = 1000

# Step times of equal machines scatter by several per cent. Within an eighth of the usual speed members count
# as equal: below eight shards a member it could not move a whole one anyway, and shards that move back and
# forth with the noise cost buffers every time.
SAME_SPEED = 1.125

_MISSING = -1  # nobody holds the node
_MIXED = -2  # no single member holds the node


def contiguous(shards: int, weights: Sequence[float]) -> tuple[Shards, ...]:
    """One contiguous run of shards for each member, by rank, proportional to its weight.

    ``weights[r]`` is the number of shards that rank r computes per unit of time, in any unit common to all.
    One that is no measurement (zero, negative, infinite, NaN) counts as the median of the others: a newcomer
    has none yet. Largest remainders decide the rounding; every member gets at least one shard if there are
    enough.
    """
    return _contiguous(shards, _speeds(weights))


@lru_cache(maxsize=64)  # asked for after every step, and the answer rarely changes
def _contiguous(shards: int, speeds: tuple[int, ...]) -> tuple[Shards, ...]:
    # Which of the members with equal remainders get one more is free. Giving it to the first or to the last
    # of them finds the split into whole subtrees if an even one exists: apart from 1 and 2, only one of two
    # successive counts can be a power of two, and subtrees of other sizes exist only at the end.
    splits = [_runs(_shares(shards, speeds, last_first)) for last_first in (False, True)]
    return min(splits, key=lambda runs: sum(len(maximal_nodes(run, shards)) for run in runs))


def weights_of(seconds_per_shard: Sequence[float]) -> tuple[float, ...]:
    """Weights for ``contiguous`` and ``fill`` from measured times; 0.0 (unknown) where there is none."""
    speeds = [_inverse(seconds) for seconds in seconds_per_shard]
    known = sorted(speed for speed in speeds if speed)
    if not known:
        return tuple(speeds)
    usual = known[(len(known) - 1) // 2]
    return tuple(usual if usual / SAME_SPEED <= speed <= usual * SAME_SPEED else speed for speed in speeds)


def paced(steps: int, least: int, seconds: Sequence[float], rank: int, before: int) -> int:
    """Low communication: how many of the ``steps`` inner steps of a round a member makes, so that all take as long as
    the fastest needs for all of them. ``seconds``: that each member needs for a whole round (0: not known), ``before``:
    how many it makes now. At least ``least``.

    Whoever is about as fast as the fastest makes all, and a small difference from ``before`` changes nothing."""
    known = [each for each in seconds if _inverse(each)]
    if not known or not _inverse(seconds[rank]):
        return before
    share = min(known) / seconds[rank]
    wanted = steps if share * SAME_SPEED >= 1 else max(least, int(steps * share))
    near = wanted != steps and abs(wanted - before) * 8 <= before
    return before if near else wanted


def slots(shards: int, groups: int) -> dict[int, Shards]:
    """For policy ``shrink``: the shards of each group id below ``groups``, whoever else is there."""
    return dict(enumerate(contiguous(shards, (1.0,) * groups)))


def dedupe(shards: int, have: Sequence[Shards]) -> tuple[Shards, ...]:
    """What each member's holdings count for if some shards are held twice.

    That happens when a member that was away comes back with work that another has done in its place. Members
    hold sums of whole subtrees (``maximal_nodes`` of their shards), and a sum cannot be taken apart again; so
    of two nodes of which one lies in the other, the larger counts, and of two equal ones the lower rank's.
    """
    _check_range(shards, have)
    pieces = [(-node.size, rank, node) for rank, own in enumerate(have) for node in maximal_nodes(own, shards)]
    taken: set[int] = set()
    kept: list[set[int]] = [set() for _ in have]
    for _, rank, node in sorted(pieces):
        if node.start not in taken:  # two subtrees are apart or nested, and the larger came first
            kept[rank].update(range(node.start, node.stop))
            taken.update(range(node.start, node.stop))
    return tuple(frozenset(own) for own in kept)


def fill(shards: int, have: Sequence[Shards], weights: Sequence[float]) -> tuple[Shards, ...]:
    """The additional shards of each member, by rank, so that every missing one is computed exactly once.

    What is held is done, so only the additional work counts: the last member finishes as early as the weights
    (see ``contiguous``) allow. Among such choices, few and large subtrees at the end are preferred, because
    each costs a buffer and a message: a missing sibling of something held goes to its holder, the rest in
    whole subtrees.
    """
    if len(have) != len(weights):
        raise ValueError(f"there are holdings of {len(have)} members but weights of {len(weights)}")
    held = dedupe(shards, have)
    room = _Room(shards - sum(len(own) for own in held), _speeds(weights))
    given: list[set[int]] = [set() for _ in have]
    state = {Node(shard, shard + 1): _MISSING for shard in range(shards)}
    for rank, own in enumerate(held):
        state.update({Node(shard, shard + 1): rank for shard in own})

    def give(rank: int, node: Node) -> None:
        room.take(rank, node.size)
        given[rank].update(range(node.start, node.stop))
        state[node] = rank

    # Smallest first: each merge saves one node, whatever it costs in work.
    inner = _inner_nodes(shards)
    for node in sorted(inner, key=lambda each: (each.size, each.start)):
        left, right = children(node)
        for holder, missing in ((left, right), (right, left)):
            rank = state[holder]
            if rank >= 0 and state[missing] == _MISSING and room.of(rank) >= missing.size:
                give(rank, missing)
        state[node] = state[left] if state[left] == state[right] else _MIXED

    # Largest first, split only when nobody has room for the whole.
    queue = [(-node.size, node) for node in _tops(root(shards), state)]
    heapq.heapify(queue)
    while queue:
        _, node = heapq.heappop(queue)
        fitting = [rank for rank in range(len(have)) if room.of(rank) >= node.size]
        if fitting:
            give(min(fitting, key=lambda rank: (room.of(rank), rank)), node)
        else:
            for child in children(node):
                heapq.heappush(queue, (-child.size, child))
    return tuple(frozenset(own) for own in given)


class _Room:
    """How many more shards each member may be given so that all finish as early as possible together."""

    def __init__(self, missing: int, speeds: Sequence[int]) -> None:
        # One shard after another to whoever would finish it first: optimal for equal pieces of work.
        ends = [(Fraction(1, speed), rank) for rank, speed in enumerate(speeds)]
        heapq.heapify(ends)
        finish = Fraction(0)
        for _ in range(missing):
            finish, rank = ends[0]
            heapq.heapreplace(ends, (finish + Fraction(1, speeds[rank]), rank))
        # Work that ends before the common finish is given in any case; of the pieces that end exactly with
        # it, ``extras`` are needed, and it is free which of the members ``tied`` take one each.
        self._room = [max(0, math.ceil(finish * speed) - 1) for speed in speeds]
        self._tied = [missing > 0 and (finish * speed).denominator == 1 for speed in speeds]
        self._extras = missing - sum(self._room)

    def of(self, rank: int) -> int:
        return self._room[rank] + (1 if self._tied[rank] and self._extras else 0)

    def take(self, rank: int, count: int) -> None:
        self._room[rank] -= count
        if self._room[rank] < 0:
            self._room[rank] = 0
            self._tied[rank] = False
            self._extras -= 1


def _inner_nodes(shards: int) -> list[Node]:
    found: list[Node] = []
    stack = [root(shards)]
    while stack:
        node = stack.pop()
        if node.size > 1:
            found.append(node)
            stack.extend(children(node))
    return found


def _tops(node: Node, state: dict[Node, int]) -> list[Node]:
    """The largest subtrees that are missing as a whole."""
    if state[node] == _MISSING:
        return [node]
    if state[node] != _MIXED:
        return []
    return [top for child in children(node) for top in _tops(child, state)]


def _inverse(seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds > 0):
        return 0.0
    speed = 1.0 / seconds
    return speed if math.isfinite(speed) else 0.0


def _speeds(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as integers in 1..RESOLUTION, the same on every machine that was told the same weights."""
    if not weights:
        raise ValueError("there is no member to give shards to")
    if weights.count(weights[0]) == len(weights):  # almost always: machines are alike, or nothing is known of them
        return (RESOLUTION,) * len(weights)
    known = sorted(Fraction(weight) for weight in weights if math.isfinite(weight) and weight > 0)
    middle = known[(len(known) - 1) // 2] if known else Fraction(1)
    exact = [Fraction(weight) if math.isfinite(weight) and weight > 0 else middle for weight in weights]
    top = max(exact)
    return tuple(max(1, round(weight * RESOLUTION / top)) for weight in exact)


def _shares(shards: int, speeds: Sequence[int], last_first: bool) -> list[int]:
    """How many shards each member gets; of equal remainders the first (or else the last) ranks win."""
    root(shards)  # at least one shard
    counts = [0] * len(speeds)
    rest, members = shards, list(range(len(speeds)))
    total = sum(speeds)
    while shards >= len(speeds):  # whoever would get less than one gets one, which leaves less for the others
        small = [rank for rank in members if rest * speeds[rank] < total]
        if not small:
            break
        for rank in small:
            counts[rank] = 1
        rest -= len(small)
        members = [rank for rank in members if counts[rank] == 0]
        total = sum(speeds[rank] for rank in members)
    for rank in members:
        counts[rank] = rest * speeds[rank] // total
    over = shards - sum(counts)
    by_remainder = sorted(members, key=lambda rank: (-(rest * speeds[rank] % total), -rank if last_first else rank))
    for rank in by_remainder[:over]:
        counts[rank] += 1
    return counts


def _runs(counts: Sequence[int]) -> tuple[Shards, ...]:
    runs: list[Shards] = []
    start = 0
    for count in counts:
        runs.append(frozenset(range(start, start + count)))
        start += count
    return tuple(runs)


def _check_range(shards: int, have: Sequence[Shards]) -> None:
    for rank, own in enumerate(have):
        wrong = sorted(shard for shard in own if not 0 <= shard < shards)
        if wrong:
            raise ValueError(f"rank {rank} says it holds shard {wrong[0]}, but the job has only 0..{shards - 1}")
