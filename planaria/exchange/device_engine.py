"""The exchange in a device's memory, over NCCL, as kernels on the two streams of the life.

The life's thread only enqueues, in an order that is the same on all members. A piece travels in two launches of NCCL:
the sums to the members that fold them, and, two pieces later and in one launch with the sums of that piece, the results
to all. So the fold of a piece runs while others travel. Receive buffers are used by every other piece, for when their
turn comes again the fold that read them is done.

A round is over when the thread knows that the device has done it; until then the stream of the caller is given nothing
that depends on it. A life that ends earlier aborts NCCL's kernels, which leaves anything in the results.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from planaria.exchange.communicator import Communicator, as_tensor
from planaria.exchange.device import DeviceLink
from planaria.exchange.engine import UNDERWAY_TAG, Engine, read_tails
from planaria.exchange.exchange_plan import ExchangeResult, Round
from planaria.exchange.folding import Divisor, fold_on_device
from planaria.exchange.layout import ITEM_BYTES, Layout

# As a rule a bucket is one piece: launches are few. Only very large ones are cut, to fold while others travel.
DEVICE_PIECE_BYTES = 64 << 20

SLOTS = 2  # receive buffers: for the piece that travels and the one that is folded
ALIGNMENT = 16 * ITEM_BYTES  # of pieces, for the widest loads


class DeviceEngine(Engine):
    """``device_bytes``: what it holds of the device's memory, results included, beyond what is submitted."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int) -> None:
        super().__init__(communicator, layout, -(-piece_bytes // ALIGNMENT) * ALIGNMENT)
        assert communicator.link is not None and communicator.shelf is not None
        self._link: DeviceLink = communicator.link
        self._shelf = communicator.shelf
        self._scratch: dict[tuple[int, int], Tensor] = {}  # by (slot, position in the fold)
        self._probes = self._shelf.empty(len(self._pieces))  # of this member's share of each piece
        self._divisor = 0, Divisor(1, self._link.device)
        self._step: Round | None = None
        self._results: list[Tensor] = []  # taken from the shelf for the round
        self._marked = -1  # the newest bucket that the wire has waited for
        self._folded: list[torch.cuda.Event] = []  # by piece
        communicator.when_quiet(self._release)

    @property
    def device_bytes(self) -> int:
        held = [*self._results, *self._scratch.values(), self._probes]
        return sum(each.nbytes for each in held)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._link.device))
        return event

    def may_give_up(self, step: Round) -> bool:
        # Messages of NCCL have no tags: what has been sent for one round would be received for another.
        return self._communicator.size == 1 or not step.submitted

    def advance(self, step: Round) -> None:
        if step.pending.done:  # the life has ended
            return
        self._agree(step)
        if step is not self._step:
            self._start(step)
        while self._can_launch(step):
            if step.plan.reduction == "fast":
                self._reduce(step, step.launched)
            else:
                self._travel(step, step.launched, step.launched - SLOTS)
            step.launched += 1
        if step.launched == len(self._pieces) and self._all_submitted(step):
            self._complete(step)

    def _start(self, step: Round) -> None:
        if not self._results:
            self._results = self._shelf.take_results(self._layout.buckets)
        self._step = step
        self._marked = -1
        self._folded.clear()
        if self._divisor[0] != step.plan.divisor:
            with torch.cuda.stream(self._link.work):
                self._divisor = step.plan.divisor, Divisor(step.plan.divisor, self._link.device)
        for stream in (self._link.wire, self._link.work):
            assert step.begun is not None
            stream.wait_event(step.begun)  # from here on the results of the last round may be written

    # --- tree -----------------------------------------------------------------------------------------------

    def _travel(self, step: Round, scatter: int, gather: int) -> None:
        """Send the sums of piece ``scatter`` to those who fold them and the results of piece ``gather`` to all, as far
        as there are such pieces, and fold what arrives."""
        link, operands = self._link, []
        if gather >= 0:
            link.wire.wait_event(self._folded[gather])
        with link.nccl.group() if link.size > 1 else contextlib.nullcontext():
            if scatter < len(self._pieces):
                operands = self._scatter(step, scatter)
            if gather >= 0:
                self._gather(gather)
        if scatter < len(self._pieces):
            link.work.wait_event(link.wire.record_event())
            self._fold(step, scatter, operands)

    def _scatter(self, step: Round, index: int) -> list[Tensor]:
        """Inside a group: this member's share of all members' sums, in the order of the fold."""
        piece, link, mine = self._pieces[index], self._link, self._communicator.rank
        sums = step.submitted[piece.bucket]
        self._await_parts(step, piece.bucket)
        share = piece.share(mine, link.size)
        operands = []
        for position, (rank, i) in enumerate(step.plan.positions):
            if rank == mine:
                operands.append(sums[i][share])
                continue
            if position == step.plan.landing:
                operand = self._results[piece.bucket][share]
            else:
                operand = self._scratch_for(index % SLOTS, position)[: share.stop - share.start]
            operands.append(operand)
            if operand.numel():
                link.nccl.receive(operand, rank, link.wire)
        for peer in self._communicator.peers:
            theirs = piece.share(peer, link.size)
            if theirs.stop > theirs.start:
                for each in sums:
                    link.nccl.send(each[theirs], peer, link.wire)
        return operands

    def _gather(self, index: int) -> None:
        """Inside a group: all shares of the results."""
        piece, link = self._pieces[index], self._link
        result = self._results[piece.bucket]
        mine = result[piece.share(link.rank, link.size)]
        for peer in self._communicator.peers:
            theirs = result[piece.share(peer, link.size)]
            if mine.numel():
                link.nccl.send(mine, peer, link.wire)
            if theirs.numel():
                link.nccl.receive(theirs, peer, link.wire)

    def _fold(self, step: Round, index: int, operands: list[Tensor]) -> None:
        piece, link, plan = self._pieces[index], self._link, step.plan
        share = self._results[piece.bucket][piece.share(link.rank, link.size)]
        with torch.cuda.stream(link.work):
            fold_on_device(
                operands,
                plan.pairs,
                self._divisor[1],
                share,
                plan.received,
                lambda position: self._scratch_for(index % SLOTS, position)[: share.numel()],
                self._probes[index],
            )
        self._folded.append(link.work.record_event())

    # --- fast -----------------------------------------------------------------------------------------------

    def _reduce(self, step: Round, index: int) -> None:
        """All-reduce a piece into the results, and divide. Every member looks at its share only for NaN."""
        piece, link = self._pieces[index], self._link
        here = slice(piece.start, piece.stop)
        result = self._results[piece.bucket][here]
        sums = [part[here] for part in step.submitted[piece.bucket]]
        self._await_parts(step, piece.bucket)
        if len(sums) != 1 or link.size == 1:
            with torch.cuda.stream(link.wire):
                _add_up(sums, result)
            sums = [result]
        if link.size > 1:
            with link.nccl.group():
                link.nccl.all_reduce(sums[0], result, link.wire)
        link.work.wait_event(link.wire.record_event())
        with torch.cuda.stream(link.work):
            self._divisor[1].divide(result)
            share = self._results[piece.bucket][piece.share(link.rank, link.size)]
            torch.sum(share, 0, out=self._probes[index])

    # --- both -----------------------------------------------------------------------------------------------

    def _await_parts(self, step: Round, bucket: int) -> None:
        if bucket != self._marked:
            event = step.ready[bucket]
            assert event is not None
            self._link.wire.wait_event(event)
            self._marked = bucket

    def _scratch_for(self, slot: int, position: int) -> Tensor:
        found = self._scratch.get((slot, position))
        if found is None:
            shares = (piece.share(self._link.rank, self._link.size) for piece in self._pieces)
            found = self._shelf.empty(max((share.stop - share.start for share in shares), default=0))
            self._scratch[slot, position] = found
        return found

    def _complete(self, step: Round) -> None:
        """The last results; then the tails, once the device is known to have done everything."""
        link = self._link
        if step.plan.reduction == "tree":
            for last in range(max(len(self._pieces) - SLOTS, 0), len(self._pieces)):
                self._travel(step, len(self._pieces), last)
        with torch.cuda.stream(link.work):
            finite = self._probes.isfinite().all()
        link.work.wait_event(link.wire.record_event())
        done = link.work.record_event()
        self._meet(step)
        link.wait(done)
        with torch.cuda.stream(link.work):
            all_finite = bool(finite) or self._look_closely()
        tails, transfers = self._send_tails(step, all_finite)
        for transfer in transfers:
            transfer.wait()
        payloads, everywhere = read_tails(tails)
        results, self._results, self._step = self._results, [], None
        self._shelf.put_results(results)
        self._communicator.settle(step.pending, ExchangeResult(results, payloads, everywhere))

    def _meet(self, step: Round) -> None:
        """Wait, while the device works, until all members have enqueued their round: they are told by sockets when one
        dies before that, and nobody asks a device for what will never come."""
        what, tag, peers = "exchanging gradients", step.first_tag + UNDERWAY_TAG, self._communicator.peers
        word, words = as_tensor(b"!"), [as_tensor(b"?") for _ in peers]
        transfers = [self._communicator.receive(words[i], peer, tag, what) for i, peer in enumerate(peers)]
        transfers += [self._communicator.send(word, peer, tag, what) for peer in peers]
        for transfer in transfers:
            transfer.wait()

    def _look_closely(self) -> bool:
        """A sum of finite numbers may overflow: ask each of them."""
        rank, size = self._link.rank, self._link.size
        return all(bool(self._results[p.bucket][p.share(rank, size)].isfinite().all()) for p in self._pieces)

    def _release(self) -> None:
        """No kernel of this life runs any more."""
        if self._results:
            self._shelf.put_results(self._results)
        self._results, self._step = [], None
        self._scratch.clear()


def _add_up(sums: list[Tensor], out: Tensor) -> None:
    if len(sums) < 2:
        out.copy_(sums[0]) if sums else out.zero_()
        return
    torch.add(sums[0], sums[1], out=out)
    for each in sums[2:]:
        out.add_(each)
