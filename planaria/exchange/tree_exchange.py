"""The gradient exchange: sums of subtrees in, the same mean with the same bits out on every member.

Every member owns an equal share of each bucket. It receives from each peer that peer's subtree sums of the
share, adds them up with the brackets of the job's tree, divides, and sends the result to all. That is a
reduce-scatter and an all-gather, as in a ring all-reduce, with the same traffic, but with an order of
additions that does not depend on who computed what. Messages go straight from and to the caller's and the
result buffers, without staging copies.

All work is done by the communicator's thread. Buckets are cut into pieces, of which a few are under way at a
time, so that one piece is folded while others travel. Two members with one node each could use gloo's
all-reduce (a + b commutes), but that works in place, and the copy that keeps ``parts`` unchanged costs more
than it would save.

``fast`` adds a member's own nodes up first and then the members' sums in rank order: one message per peer and
piece however many nodes there are. Same samples, but the brackets depend on who computed what. It shares
everything else.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from planaria.core.messages import REDUCTIONS
from planaria.core.tree import Node, fold_plan
from planaria.errors import ProtocolError
from planaria.exchange.communicator import Communicator, Transfer, as_bytes, as_tensor
from planaria.exchange.folding import fold, landing
from planaria.exchange.layout import ITEM_BYTES, Layout
from planaria.exchange.waiting import Pending

# Large pieces cost the fewest messages, each of which wakes threads on both sides: on two loaded cores pieces of 4, 8,
# 16 and 25 MB took 1.27, 1.18, 1.14 and 1.12 times as long as a plain all-reduce of 120 MB (bench/exchange.py).
PIECE_BYTES = 25 << 20
WINDOW = 2  # pieces under way at a time: one travels while one is folded; more take more memory and no less time

TAIL = struct.Struct("<?I")  # is my share of the results finite; length of the payload


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
class _Plan:
    """What all members agreed on for a step: who sends how many sums, and how they are added up."""

    counts: tuple[int, ...]  # sums that each rank sends
    positions: tuple[tuple[int, int], ...]  # (rank, its how-manieth sum) in the order of the fold
    pairs: tuple[tuple[int, int], ...]
    received: tuple[int, ...]  # positions whose sums come from peers
    landing: int | None  # the one of them that is received straight into the result
    own_nodes: int  # parts to be submitted by this rank
    own_pairs: tuple[tuple[int, int], ...]  # "fast": how they become one sum
    divisor: int
    tail_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    bucket: int
    start: int
    stop: int

    def share(self, rank: int, size: int) -> slice:
        """The part of the bucket that ``rank`` folds: equal shares, on cache lines, the last ones shorter
        or empty.
        """
        each = -(-(self.stop - self.start) // size)
        each = -(-each // 16) * 16
        return slice(min(self.start + rank * each, self.stop), min(self.start + (rank + 1) * each, self.stop))


@dataclass(slots=True)
class _Flight:
    """A piece whose sums are on their way to this member."""

    piece: _Piece
    tag: int
    arrivals: list[Transfer]
    operands: list[Tensor]


@dataclass(slots=True, eq=False)
class _Round:
    """One step's exchange. The dictionaries are filled by the training thread; all else is the life's
    thread's.
    """

    plan: _Plan
    first_tag: int
    pending: Pending[ExchangeResult]
    submitted: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    tail: bytes | None = None
    agreed: bool = False
    launched: int = 0  # pieces
    flights: deque[_Flight] = field(default_factory=deque)
    transfers: list[Transfer] = field(default_factory=list)
    finite: bool = True


class TreeExchange:
    """The exchanges of one communicator life, one step after the other.

    Owns the receive and result buffers (as large as all buckets, plus a few pieces), which no other life ever
    uses. Methods are for one thread. Raises ValueError where the caller breaks the order begin, submit...,
    submit_tail, finish; failures of the communicator are raised by ``finish`` only.
    """

    def __init__(
        self, communicator: Communicator, layout: Layout, piece_bytes: int = PIECE_BYTES, window: int = WINDOW
    ) -> None:
        self._communicator = communicator
        self._layout = layout
        self._window = window
        self._peers = [  # every member starts with another peer, so that no one is asked by all at once
            (communicator.rank + step) % communicator.size for step in range(1, communicator.size)
        ]
        each = self._piece_items = max(1, piece_bytes // ITEM_BYTES)
        self._pieces = [
            _Piece(bucket, start, min(start + each, numel))
            for bucket, numel in enumerate(layout.buckets)
            for start in range(0, numel, each)
        ]
        self._results: list[Tensor] = []
        self._scratch: dict[tuple[int, int], Tensor] = {}  # by (slot in the window, position in the fold)
        self._sums: dict[int, Tensor] = {}  # "fast": own nodes added up, by bucket
        self._agreed: bytes | None = None  # digest of the plan that all members are known to share
        self._round: _Round | None = None
        self._terms: object = None  # the arguments of ``begin`` of which ``_plan`` was made
        self._plan: _Plan | None = None

    # --- the training thread --------------------------------------------------------------------------------

    def begin(
        self,
        nodes_by_rank: Sequence[Sequence[Node]],
        shards: int,
        divisor: int,
        reduction: str = "tree",
        tail_bytes: int = 1024,
    ) -> None:
        """Start a step's exchange. All arguments must be equal on all members; they are compared when they
        change.

        ``nodes_by_rank``: the subtrees whose sums each rank will submit, ascending. ``tail_bytes``: the most
        that any member will submit as its tail.
        """
        self._round = None  # of an earlier step, finished or given up
        terms = (tuple(map(tuple, nodes_by_rank)), shards, divisor, reduction, tail_bytes)
        if self._terms != terms:
            self._plan, self._terms = self._make_plan(*terms), terms
        plan = self._plan
        assert plan is not None
        width = max(plan.counts) + 1
        first_tag = self._communicator.tags(3 + len(self._pieces) * width)
        self._round = _Round(plan, first_tag, self._communicator.pending("exchanging gradients"))

    def submit(self, bucket: int, parts: Sequence[Tensor]) -> None:
        """This member's sums of one bucket: one flat fp32 tensor per node, in the order of ``nodes_by_rank``.

        They are read until ``finish`` returns, or until the life has ended, and never written. Never blocks.
        Buckets start to travel in the order of their index.
        """
        step = self._current()
        if not 0 <= bucket < len(self._layout.buckets) or bucket in step.submitted:
            raise ValueError(f"bucket {bucket} does not exist or was submitted before")
        if len(parts) != step.plan.own_nodes:
            raise ValueError(f"bucket {bucket} has {len(parts)} sums, but this member has {step.plan.own_nodes} nodes")
        numel = self._layout.buckets[bucket]
        for part in parts:
            if part.dtype != torch.float32 or part.shape != (numel,) or not part.is_contiguous():
                raise ValueError(f"a sum of bucket {bucket} is not a flat, contiguous fp32 tensor of {numel} elements")
        step.submitted[bucket] = tuple(part.detach() for part in parts)
        self._communicator.post(lambda: self._advance(step))

    def submit_tail(self, payload: bytes) -> None:
        """This member's words to all others, delivered after all buckets. Never blocks."""
        step = self._current()
        if step.tail is not None:
            raise ValueError("the tail of this step was submitted before")
        if len(payload) > step.plan.tail_bytes:
            raise ValueError(f"the tail has {len(payload)} bytes, more than the {step.plan.tail_bytes} agreed on")
        step.tail = payload
        self._communicator.post(lambda: self._advance(step))

    def finish(self, interrupted: Callable[[], bool] = lambda: False) -> ExchangeResult:
        """Wait for the result. Raises Interrupted or CommunicatorError; then the life must be dropped, and
        what was submitted is as it was.
        """
        step = self._current()
        if step.tail is None or len(step.submitted) < len(self._layout.buckets):
            raise ValueError("finish needs all buckets and the tail to be submitted")
        result = step.pending.wait(interrupted)
        self._round = None
        return result

    def _current(self) -> _Round:
        if self._round is None:
            raise ValueError("no exchange has begun")
        return self._round

    def _make_plan(
        self,
        nodes_by_rank: Sequence[Sequence[Node]],
        shards: int,
        divisor: int,
        reduction: str,
        tail_bytes: int,
    ) -> _Plan:
        if len(nodes_by_rank) != self._communicator.size:
            raise ValueError(f"nodes of {len(nodes_by_rank)} members in a group of {self._communicator.size}")
        if reduction not in REDUCTIONS or divisor < 1 or tail_bytes < 0:
            raise ValueError(f"cannot exchange with {reduction=}, {divisor=}, {tail_bytes=}")
        flat = [(node, rank, i) for rank, nodes in enumerate(nodes_by_rank) for i, node in enumerate(nodes)]
        pairs = fold_plan([node for node, _, _ in flat], shards)
        said = repr((self._layout.buckets, self._piece_items, flat, shards, divisor, reduction, tail_bytes))
        own = len(nodes_by_rank[self._communicator.rank])
        own_pairs: tuple[tuple[int, int], ...] = ()
        positions = tuple((rank, i) for _, rank, i in flat)
        if reduction == "fast":
            own_pairs = _in_a_row(own)
            positions = tuple((rank, 0) for rank, nodes in enumerate(nodes_by_rank) if nodes)
            pairs = _in_a_row(len(positions))
        senders = [rank for rank, _ in positions]
        received = tuple(p for p, sender in enumerate(senders) if sender != self._communicator.rank)
        return _Plan(
            counts=tuple(senders.count(rank) for rank in range(self._communicator.size)),
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

    # --- the life's thread ----------------------------------------------------------------------------------

    def _advance(self, step: _Round) -> None:
        """Start what can be started; then, unless there is more to start, finish what is under way."""
        if step.pending.done:  # the life has ended
            return
        self._agree(step)
        while True:
            if len(step.flights) < self._window and self._can_launch(step):
                self._launch(step)
            elif step.flights and (len(step.flights) >= self._window or self._communicator.idle):
                # Blocks until the peers have sent; a bucket that is submitted meanwhile could not travel
                # earlier anyway, because it is the peers that are late.
                self._land(step)
            else:
                break
        if step.launched == len(self._pieces) and not step.flights and self._all_submitted(step):
            self._complete(step)

    def _all_submitted(self, step: _Round) -> bool:
        return step.tail is not None and len(step.submitted) == len(self._layout.buckets)

    def _can_launch(self, step: _Round) -> bool:
        return step.launched < len(self._pieces) and self._pieces[step.launched].bucket in step.submitted

    def _agree(self, step: _Round) -> None:
        """Compare plans when they change: a message of unexpected size would end the process inside gloo."""
        if step.agreed:
            return
        step.agreed = True
        digest = step.plan.digest
        if self._agreed != digest:
            digests = self._communicator.gather_now(digest, step.first_tag)
            if set(digests) != {digest}:
                odd = [str(self._communicator.member(r)) for r, theirs in enumerate(digests) if theirs != digest]
                raise ProtocolError(
                    f"{', '.join(odd)} and {self._communicator.member(self._communicator.rank)} do not agree on what "
                    f"to exchange in quorum {self._communicator.quorum_id}: do they train the same model?"
                )
            self._agreed = digest
        if not self._results:
            self._results = [torch.zeros(numel) for numel in self._layout.buckets]

    def _own_sums(self, step: _Round, bucket: int) -> tuple[Tensor, ...]:
        parts = step.submitted[bucket]
        if not step.plan.own_pairs:
            return parts
        total = self._sums.get(bucket)
        if total is None:
            total = self._sums[bucket] = torch.empty(self._layout.buckets[bucket])
        return (total,)

    def _launch(self, step: _Round) -> None:
        index, piece, plan, mine = (
            step.launched,
            self._pieces[step.launched],
            step.plan,
            self._communicator.rank,
        )
        size, width = self._communicator.size, max(plan.counts) + 1
        tag = step.first_tag + 3 + index * width
        what = f"exchanging bucket {piece.bucket}"
        sums = self._own_sums(step, piece.bucket)
        if plan.own_pairs:
            here = slice(piece.start, piece.stop)
            fold([part[here] for part in step.submitted[piece.bucket]], plan.own_pairs, 1, sums[0][here])
        share = piece.share(mine, size)
        result = self._results[piece.bucket]
        arrivals, operands = [], []
        for position, (rank, i) in enumerate(plan.positions):
            if rank == mine:
                operands.append(sums[i][share])
                continue
            if position == plan.landing:
                operand = result[share]
            else:
                operand = self._scratch_for(index % self._window, position)[: share.stop - share.start]
            operands.append(operand)
            if operand.numel():
                arrivals.append(self._communicator.receive(operand, rank, tag + i, what))
        for peer in self._peers:
            theirs = piece.share(peer, size)
            if theirs.stop > theirs.start:
                step.transfers.append(self._communicator.receive(result[theirs], peer, tag + width - 1, what))
                for i, each in enumerate(sums):
                    step.transfers.append(self._communicator.send(each[theirs], peer, tag + i, what))
        step.flights.append(_Flight(piece, tag + width - 1, arrivals, operands))
        step.launched += 1

    def _scratch_for(self, slot: int, position: int) -> Tensor:
        found = self._scratch.get((slot, position))
        if found is None:
            size = self._communicator.size
            shares = (piece.share(self._communicator.rank, size) for piece in self._pieces)
            found = torch.empty(max((share.stop - share.start for share in shares), default=0))
            self._scratch[slot, position] = found
        return found

    def _land(self, step: _Round) -> None:
        """Fold the oldest piece under way and send this member's share of the result to all."""
        flight = step.flights.popleft()
        for arrival in flight.arrivals:
            arrival.wait()
        piece = flight.piece
        share = self._results[piece.bucket][piece.share(self._communicator.rank, self._communicator.size)]
        if not share.numel():
            return
        step.finite &= fold(flight.operands, step.plan.pairs, step.plan.divisor, share, step.plan.received)
        for peer in self._peers:
            what = f"exchanging bucket {piece.bucket}"
            step.transfers.append(self._communicator.send(share, peer, flight.tag, what))

    def _complete(self, step: _Round) -> None:
        """Exchange the tails, then wait for everything that is still on its way."""
        assert step.tail is not None
        tag, what = step.first_tag + 2, "exchanging control words"
        tail = TAIL.pack(step.finite, len(step.tail)) + step.tail
        mine = as_tensor(tail.ljust(TAIL.size + step.plan.tail_bytes, b"\0"))
        tails = [mine if peer not in self._peers else torch.empty_like(mine) for peer in range(self._communicator.size)]
        step.transfers += [self._communicator.receive(tails[peer], peer, tag, what) for peer in self._peers]
        step.transfers += [self._communicator.send(mine, peer, tag, what) for peer in self._peers]
        for transfer in step.transfers:
            transfer.wait()
        step.transfers.clear()
        finite, payloads = True, []
        for raw in map(as_bytes, tails):
            theirs, length = TAIL.unpack_from(raw)
            finite &= theirs
            payloads.append(raw[TAIL.size : TAIL.size + length])
        self._communicator.settle(step.pending, ExchangeResult(self._results, payloads, finite))


def _in_a_row(count: int) -> tuple[tuple[int, int], ...]:
    return tuple((0, add) for add in range(1, count))
