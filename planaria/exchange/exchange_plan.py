"""What a round of the exchange consists of: the plan that all members share, pieces, and how far it has got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from planaria.core.messages import CODED, REDUCTIONS
from planaria.core.tree import Node, fold_plan
from planaria.exchange.folding import landing
from planaria.exchange.layout import ITEM_BYTES, Layout
from planaria.exchange.waiting import Pending

CACHE_LINE = 16  # elements


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """``buckets``: the mean per bucket (flat fp32; valid until the next ``begin``, do not write into
    them). ``tails``: every member's payload in rank order. ``finite``: no element of any bucket is NaN or
    infinite.
    """

    buckets: list[Tensor]
    tails: list[bytes]
    finite: bool


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is known of a result before it is there. ``buckets``: where it will be, not to be read until then;
    ``tails`` as in the result.
    """

    buckets: list[Tensor]
    tails: list[bytes]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all members agreed on for a step: who sends how many sums, and how they are added up."""

    reduction: str
    counts: tuple[int, ...]  # sums that each rank sends
    positions: tuple[tuple[int, int], ...]  # (rank, its how-manieth sum) in the order of the fold
    pairs: tuple[tuple[int, int], ...]
    received: tuple[int, ...]  # positions whose sums come from peers
    landing: int | None  # the one of them that is received straight into the result
    own_nodes: tuple[Node, ...]  # whose sums are to be submitted by this rank
    own_pairs: tuple[tuple[int, int], ...]  # "fast": how they become one sum
    divisor: int
    tail_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bucket that travels as one. ``grain``: elements that are never parted."""

    bucket: int
    start: int
    stop: int
    grain: int = CACHE_LINE

    def share(self, rank: int, size: int) -> slice:
        """The part of the bucket that ``rank`` folds: equal shares of whole grains, the last ones shorter or empty."""
        each = -(-(self.stop - self.start) // size)
        each = -(-each // self.grain) * self.grain
        return slice(min(self.start + rank * each, self.stop), min(self.start + (rank + 1) * each, self.stop))


@dataclass(slots=True, eq=False)
class Round:
    """One step's exchange. What is submitted is filled in by the training thread; all else is the life's thread's."""

    plan: Plan
    first_tag: int
    announced: Pending[Announcement]
    pending: Pending[ExchangeResult]
    begun: torch.cuda.Event | None  # on a device: when the results of the step before are needed no more
    noise: int = 0  # coded: the key of the step's noise
    submitted: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    ready: dict[int, torch.cuda.Event | None] = field(default_factory=dict)  # on a device: when they have been computed
    tail: bytes | None = None
    agreed: bool = False
    launched: int = 0  # pieces


def cut(layout: Layout, piece_bytes: int, grain: int | None = None) -> list[Piece]:
    """All buckets as pieces of at most ``piece_bytes`` (of whole grains, at least one), in the order in which they
    travel."""
    each = max(1, piece_bytes // ITEM_BYTES)
    if grain is not None:
        each = max(1, each // grain) * grain
    return [
        Piece(bucket, start, min(start + each, numel), grain or CACHE_LINE)
        for bucket, numel in enumerate(layout.buckets)
        for start in range(0, numel, each)
    ]


def make_plan(
    rank: int,
    buckets: tuple[int, ...],
    piece_bytes: int,
    nodes_by_rank: Sequence[Sequence[Node]],
    shards: int,
    divisor: int,
    reduction: str,
    tail_bytes: int,
) -> Plan:
    """The plan of member ``rank``. Raises ValueError for arguments that make none."""
    if reduction not in REDUCTIONS or divisor < 1 or tail_bytes < 0:
        raise ValueError(f"cannot exchange with {reduction=}, {divisor=}, {tail_bytes=}")
    if reduction in CODED and any(node.size > 1 for nodes in nodes_by_rank for node in nodes):
        raise ValueError(f"{reduction} takes each shard for itself, or its bits would depend on who computed what")
    flat = [(node, rank, i) for rank, nodes in enumerate(nodes_by_rank) for i, node in enumerate(nodes)]
    pairs = fold_plan([node for node, _, _ in flat], shards)
    said = repr((buckets, piece_bytes // ITEM_BYTES, flat, shards, divisor, reduction, tail_bytes))
    own = tuple(nodes_by_rank[rank])
    own_pairs: tuple[tuple[int, int], ...] = ()
    positions = tuple((rank, i) for _, rank, i in flat)
    if reduction == "fast":
        own_pairs = _in_a_row(len(own))
        positions = tuple((rank, 0) for rank, nodes in enumerate(nodes_by_rank) if nodes)
        pairs = _in_a_row(len(positions))
    senders = [sender for sender, _ in positions]
    received = tuple(p for p, sender in enumerate(senders) if sender != rank)
    return Plan(
        reduction=reduction,
        counts=tuple(senders.count(each) for each in range(len(nodes_by_rank))),
        positions=positions,
        pairs=pairs,
        received=received,
        landing=next((p for p in landing(pairs) if p in received), None),
        own_nodes=own,
        own_pairs=own_pairs,
        divisor=divisor,
        tail_bytes=tail_bytes,
        digest=xxhash.xxh3_128_digest(said.encode()),
    )


def _in_a_row(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, add) for add in range(1, count))
