"""The exchange in main memory, over gloo.

Messages go straight from and to the caller's and the result buffers, without staging copies. Buckets are cut into
pieces, of which a few are under way at a time, so that one piece is folded while others travel. Two members with one
node each could use gloo's all-reduce (a + b commutes), but that works in place, and the copy that keeps ``parts``
unchanged costs more than it would save.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.exchange.communicator import Communicator, Transfer
from planaria.exchange.engine import CONTROL_TAGS, Engine, read_tails
from planaria.exchange.exchange_plan import Announcement, ExchangeResult, Plan, Round
from planaria.exchange.folding import fold
from planaria.exchange.layout import Layout


@dataclass(slots=True)
class Flight:
    """A piece whose sums are on their way to this member. ``index``: which."""

    index: int
    tag: int
    arrivals: list[Transfer]
    operands: list[Tensor]


class HostEngine(Engine):
    """Owns the receive and result buffers (as large as all buckets, plus a few pieces), which no other life ever uses:
    a peer that was stopped and wakes late must not write into those of another."""

    def __init__(
        self, communicator: Communicator, layout: Layout, piece_bytes: int, window: int, grain: int | None = None
    ) -> None:
        super().__init__(communicator, layout, piece_bytes, grain)
        self._window = window
        self._results: list[Tensor] = []
        self._scratch: dict[tuple[int, int], Tensor] = {}  # by (slot in the window, position in the fold)
        self._sums: dict[int, Tensor] = {}  # "fast": own nodes added up, by bucket
        self._step: Round | None = None
        self._flights: deque[Flight] = deque()
        self._transfers: list[Transfer] = []
        self._finite = True

    def tag_count(self, plan: Plan) -> int:
        return CONTROL_TAGS + len(self._pieces) * tag_width(plan)

    def advance(self, step: Round) -> None:
        """Start what can be started; then, unless there is more to start, finish what is under way."""
        if step.pending.done:  # the life has ended
            return
        if step is not self._step:
            self._step, self._finite = step, True
            self._forget()
        self._agree(step)
        if not self._results:
            self._results = [torch.zeros(numel, dtype=torch.float32, device="cpu") for numel in self._layout.buckets]
        while True:
            if len(self._flights) < self._window and self._can_launch(step):
                self._launch(step)
            elif self._flights and (len(self._flights) >= self._window or self._communicator.idle):
                # Blocks until the peers have sent; a bucket that is submitted meanwhile could not travel
                # earlier anyway, because it is the peers that are late.
                self._land(step)
            else:
                break
        if step.launched == len(self._pieces) and not self._flights and self._all_submitted(step):
            self._complete(step)

    def outcome(self) -> list[Tensor]:
        """Copies of the newest results, one for each bucket, in as few bytes as they travelled in: see ``decoded``. The
        training thread, once the round is finished and before the next begins."""
        return [each.clone() for each in self._results]

    def _forget(self) -> None:
        """What is under way belongs to a round that was given up: nothing of it may arrive any more."""
        self._flights.clear()
        self._transfers.clear()

    def _own_sums(self, step: Round, bucket: int) -> tuple[Tensor, ...]:
        parts = step.submitted[bucket]
        if not step.plan.own_pairs:
            return parts
        total = self._sums.get(bucket)
        if total is None:
            numel = self._layout.buckets[bucket]
            total = self._sums[bucket] = torch.empty(numel, dtype=torch.float32, device="cpu")
        return (total,)

    def _launch(self, step: Round) -> None:
        index, piece, plan, mine = (
            step.launched,
            self._pieces[step.launched],
            step.plan,
            self._communicator.rank,
        )
        size, width = self._communicator.size, tag_width(plan)
        tag = step.first_tag + CONTROL_TAGS + index * width
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
        for peer in self._communicator.peers:
            theirs = piece.share(peer, size)
            if theirs.stop > theirs.start:
                self._transfers.append(self._communicator.receive(result[theirs], peer, tag + width - 1, what))
                for i, each in enumerate(sums):
                    self._transfers.append(self._communicator.send(each[theirs], peer, tag + i, what))
        self._flights.append(Flight(index, tag + width - 1, arrivals, operands))
        step.launched += 1

    def _scratch_for(self, slot: int, position: int) -> Tensor:
        found = self._scratch.get((slot, position))
        if found is None:
            size = self._communicator.size
            shares = (piece.share(self._communicator.rank, size) for piece in self._pieces)
            numel = max((share.stop - share.start for share in shares), default=0)
            found = torch.empty(numel, dtype=torch.float32, device="cpu")
            self._scratch[slot, position] = found
        return found

    def _land(self, step: Round) -> None:
        """Fold the oldest piece under way and send this member's share of the result to all."""
        flight = self._flights.popleft()
        for arrival in flight.arrivals:
            arrival.wait()
        piece = self._pieces[flight.index]
        share = self._results[piece.bucket][piece.share(self._communicator.rank, self._communicator.size)]
        if not share.numel():
            return
        self._finite &= fold(flight.operands, step.plan.pairs, step.plan.divisor, share, step.plan.received)
        for peer in self._communicator.peers:
            what = f"exchanging bucket {piece.bucket}"
            self._transfers.append(self._communicator.send(share, peer, flight.tag, what))

    def _complete(self, step: Round) -> None:
        """Exchange the tails, then wait for everything that is still on its way."""
        tails, transfers = self._send_tails(step, self._finite)
        for transfer in transfers:
            transfer.wait()
        payloads, finite = read_tails(tails)
        self._communicator.settle(step.announced, Announcement(self._results, payloads))
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()
        self._all_arrived()
        self._communicator.settle(step.pending, ExchangeResult(self._results, payloads, finite))

    def _all_arrived(self) -> None:
        """All messages of the round are there."""


def tag_width(plan: Plan) -> int:
    """Tags of a piece: one per sum that a member may send, and one for the results."""
    return max(plan.counts) + 1
