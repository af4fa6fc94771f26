"""The fixed binary tree over the job's shards in which gradients are summed.

Floating-point addition is not associative, so the bits of a sum depend on where the brackets are. Here they
are fixed by the number of shards alone: whoever computes which shards, and in whatever pieces the sums
travel, the brackets stay where they are. The shape (the left child is the largest power of two strictly below
the size) is that of Merkle trees in RFC 6962; it keeps left subtrees complete and aligned, so that contiguous
runs need few nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """A subtree, named by the shards below it: ``start`` up to and without ``stop``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"no shards are in the range {self.start}..{self.stop}: a node needs 0 <= start < stop")

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start},{self.stop})"


@dataclass(frozen=True, slots=True)
class Merge:
    """``parent`` = ``left`` + ``right``, in this order."""

    left: Node
    right: Node
    parent: Node


def root(shards: int) -> Node:
    """The whole tree over ``shards`` >= 1 shards."""
    if shards < 1:
        raise ValueError(f"a job needs at least one shard, not {shards}")
    return Node(0, shards)


def children(node: Node) -> tuple[Node, Node]:
    """Left and right child of a node of at least two shards."""
    if node.size < 2:
        raise ValueError(f"the leaf {node} has no children")
    middle = node.start + (1 << ((node.size - 1).bit_length() - 1))
    return Node(node.start, middle), Node(middle, node.stop)


def maximal_nodes(owned: Collection[int], shards: int) -> tuple[Node, ...]:
    """The fewest subtrees that cover exactly the shards ``owned``, ascending: what a group has to send."""
    marks = _ascending(owned, shards)
    found: list[Node] = []

    def visit(node: Node, low: int, high: int) -> None:  # marks[low:high] lie below node
        if high - low == node.size:
            found.append(node)
        elif low < high:
            left, right = children(node)
            middle = bisect_left(marks, right.start, low, high)
            visit(left, low, middle)
            visit(right, middle, high)

    visit(root(shards), 0, len(marks))
    return tuple(found)


def leaves(owned: Collection[int], shards: int) -> tuple[Node, ...]:
    """The shards ``owned`` as subtrees of one shard each, ascending: what a group has to send if nothing was merged."""
    return tuple(Node(shard, shard + 1) for shard in _ascending(owned, shards))


def merge_plan(held: Collection[Node], shard: int, shards: int) -> tuple[Merge, ...]:
    """The merges that follow when ``shard`` is finished by a group that holds the subtree sums ``held``.

    Applied in order after every shard they keep a group at ``maximal_nodes`` of what it has finished, so that
    its memory grows with the number of gaps and not with the number of shards. ``held`` does not contain the
    shard yet.
    """
    if not 0 <= shard < shards:
        raise ValueError(f"shard {shard} is not in this job, which has only 0..{shards - 1}")
    have = frozenset(held)
    if any(node.start <= shard < node.stop for node in have):
        raise ValueError(f"shard {shard} is held already: adding it again would count its samples twice")
    path: list[Merge] = []
    node = root(shards)
    while node.size > 1:
        left, right = children(node)
        path.append(Merge(left, right, node))
        node = left if shard < right.start else right
    merges: list[Merge] = []
    for merge in reversed(path):
        sibling = merge.right if node == merge.left else merge.left
        if sibling not in have:
            break
        merges.append(merge)
        node = merge.parent
    return tuple(merges)


def fold_plan(nodes: Sequence[Node], shards: int) -> tuple[tuple[int, int], ...]:
    """How to add up buffers that hold the sums of ``nodes``, with the brackets of the tree.

    Returns pairs ``(into, add)`` of positions in ``nodes``. Doing ``buf[into] += buf[add]`` for them in order
    leaves the total in ``buf[0]``; every other buffer is added exactly once. Each pair is one inner node of
    the tree.

    - ``nodes`` may come in any order (as members send them). ``into`` is the smaller position; in ascending
      order it is also the left operand. Which operand is left does not change the bits: IEEE 754 addition
      commutes (only the payload of a NaN may differ).
    - Shards that no node covers are left out: the parent of an absent and a present child is the present one.

    Raises ValueError if there are no nodes, if two overlap, or if one is not a subtree of this tree.
    """
    if not nodes:
        raise ValueError("there is nothing to add up: no node is present")
    order = sorted(range(len(nodes)), key=lambda position: nodes[position])
    ordered = [nodes[position] for position in order]
    starts = [node.start for node in ordered]
    _check_apart(ordered, shards)
    pairs: list[tuple[int, int]] = []

    def visit(node: Node, low: int, high: int) -> int | None:  # ordered[low:high] lie below node
        if low == high:
            return None
        if ordered[low] == node:
            return order[low]
        left, right = children(node)
        middle = bisect_left(starts, right.start, low, high)
        if middle > low and ordered[middle - 1].stop > left.stop:
            raise ValueError(f"{ordered[middle - 1]} is not a subtree of the tree over {shards} shards")
        first, second = visit(left, low, middle), visit(right, middle, high)
        if first is None or second is None:
            return second if first is None else first
        pairs.append((min(first, second), max(first, second)))
        return pairs[-1][0]

    visit(root(shards), 0, len(ordered))
    return tuple(pairs)


def _ascending(owned: Collection[int], shards: int) -> list[int]:
    marks = sorted(set(owned))
    if marks and not 0 <= marks[0] <= marks[-1] < shards:
        raise ValueError(f"shards {marks[0]}..{marks[-1]} are owned, but the job has only 0..{shards - 1}")
    return marks


def _check_apart(ordered: Sequence[Node], shards: int) -> None:
    for before, after in pairwise(ordered):
        if before.stop > after.start:
            raise ValueError(f"{before} and {after} overlap: the samples of shard {after.start} would count twice")
    if ordered[-1].stop > shards:
        raise ValueError(f"{ordered[-1]} reaches beyond the {shards} shards of this job")
