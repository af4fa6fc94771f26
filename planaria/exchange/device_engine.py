"""The exchange in a device's memory, over NCCL, as kernels on the two streams of the life.

The life's thread only enqueues, in an order that is the same on all members. A piece travels in two launches of NCCL:
the sums to the members that fold them, and, two pieces later and in one launch with the sums of that piece, the results
to all. So the fold of a piece runs while others travel. Receive buffers are used by every other piece, for when their
turn comes again the fold that read them is done. Not more than a device takes is enqueued: a thread that waits for room
in a device's queue would not hear of the end of the life.

The tails travel by sockets when a member has enqueued everything, while the devices still work: who dies before that
is noticed, nobody waits for a device that waits for what will never come, and what the tails say is dealt with before
the result is there. A round is over when the thread knows that the device has done it; until then the stream of the
caller is given nothing that depends on it. A life that ends earlier aborts NCCL's kernels, which leaves anything in the
results.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from planaria.exchange.communicator import Communicator
from planaria.exchange.device import DeviceLink
from planaria.exchange.engine import Engine, read_tails
from planaria.exchange.exchange_plan import Announcement, ExchangeResult, Round
from planaria.exchange.folding import Divisor, fold_on_device
from planaria.exchange.layout import ITEM_BYTES, Layout

# As a rule a bucket is one piece: launches are few. Only very large ones are cut, to fold while others travel. 3.2 GB
# in buckets of 100 MB took 18.2, 15.9 and 14.7 ms in pieces of 32, 64 and 128 MB (2 H200, NCCL 2.28.9).
DEVICE_PIECE_BYTES = 128 << 20

SLOTS = 2  # receive buffers: for the piece that travels and the one that is folded
AHEAD = 64  # pieces that may be enqueued and not done: at some five launches each, a third of what a queue takes
ALIGNMENT = 16 * ITEM_BYTES  # of pieces, for the widest loads


class DeviceEngine(Engine):
    """Holds, beyond what is submitted, results as large as all buckets, which lives hand on to each other, and receive
    buffers: as a rule two for each sum that comes from a peer, as large as this member's share of the largest piece."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int, grain: int | None = None) -> None:
        super().__init__(communicator, layout, -(-piece_bytes // ALIGNMENT) * ALIGNMENT, grain)
        assert communicator.link is not None and communicator.shelf is not None
        self._link: DeviceLink = communicator.link
        self._shelf = communicator.shelf
        self._shares = [
            [piece.share(rank, self._link.size) for rank in range(self._link.size)] for piece in self._pieces
        ]
        self._scratch: dict[tuple[int, int], Tensor] = {}  # by (slot, position in the fold)
        self._probes = self._shelf.empty(len(self._pieces))  # of this member's share of each piece
        self._flags = self._shelf.empty(self._link.size)  # of all members: what is finite only if its share is
        self._told = torch.empty(
            self._link.size, dtype=torch.float32, device="cpu", pin_memory=True
        )  # the same, written by the device
        self._divisor = 0, Divisor(1, self._link.device)
        self._step: Round | None = None
        self._results: list[Tensor] = []  # taken from the shelf for the round
        self._marked = -1  # the newest bucket that the wire has waited for
        self._done: list[torch.cuda.Event] = []  # by piece: it is folded, or reduced
        self._whole: torch.cuda.Event | None = None  # all of the round is done
        communicator.when_quiet(self._release)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._link.device.index))
        return event

    def advance(self, step: Round) -> None:
        if step.pending.done:  # the life has ended
            return
        self._agree(step)
        if step is not self._step:
            self._start(step)
        while self._can_launch(step):
            index = step.launched
            ahead = self._ahead(step)
            if index >= ahead:
                self._link.wait(self._done[index - ahead])
            if step.plan.reduction == "fast":
                self._reduce(step, index)
            else:
                self._travel(step, [index], [index - SLOTS] if index >= SLOTS else [])
            step.launched += 1
        if self._whole is None and step.launched == len(self._pieces):
            self._launch_last(step)
        if self._whole is not None and self._all_submitted(step):
            self._complete(step, self._whole)

    def _start(self, step: Round) -> None:
        if not self._results:
            self._results = self._shelf.take_results(self._layout.buckets)
        self._step, self._whole = step, None
        self._marked = -1
        self._done.clear()
        if self._divisor[0] != step.plan.divisor:
            self._divisor = step.plan.divisor, Divisor(step.plan.divisor, self._link.device)
        for stream in (self._link.wire, self._link.work):
            assert step.begun is not None
            stream.wait_event(step.begun)  # from here on the results of the last round may be written

    def _ahead(self, step: Round) -> int:
        """How many pieces may be enqueued and not done."""
        return AHEAD

    # --- tree -----------------------------------------------------------------------------------------------

    def _travel(self, step: Round, scatter: list[int], gather: list[int], flags: Tensor | None = None) -> None:
        """Send the sums of the pieces ``scatter`` to those who fold them and the results of the pieces ``gather`` to
        all, with each member's of ``flags``, and fold what arrives."""
        link, operands = self._link, []
        for index in gather:
            link.wire.wait_event(self._done[index])
        for index in scatter:
            self._prepare(step, index)
        with link.nccl.group() if link.size > 1 else contextlib.nullcontext():
            for index in scatter:
                operands.append(self._scatter(step, index))
            for index in gather:
                self._gather(index)
            if flags is not None:
                for peer in self._communicator.peers:
                    link.nccl.send(flags[link.rank], peer, link.wire)
                    link.nccl.receive(flags[peer], peer, link.wire)
        self._gathered(gather)
        for index, each in zip(scatter, operands, strict=True):
            link.work.wait_event(link.wire.record_event())
            self._fold(step, index, each)

    def _prepare(self, step: Round, index: int) -> None:
        """On the wire's stream: what is to be sent of a piece is there."""
        self._await_parts(step, self._pieces[index].bucket)

    def _gathered(self, gather: list[int]) -> None:
        """The wire's stream has the results of some pieces."""

    def _scatter(self, step: Round, index: int) -> list[Tensor]:
        """Inside a group: this member's share of all members' sums, in the order of the fold."""
        piece, link, mine = self._pieces[index], self._link, self._link.rank
        sums = step.submitted[piece.bucket]
        share = self._shares[index][mine]
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
            theirs = self._shares[index][peer]
            if theirs.stop > theirs.start:
                for each in sums:
                    link.nccl.send(each[theirs], peer, link.wire)
        return operands

    def _gather(self, index: int) -> None:
        """Inside a group: all shares of the results."""
        link, result = self._link, self._results[self._pieces[index].bucket]
        mine = result[self._shares[index][link.rank]]
        for peer in self._communicator.peers:
            theirs = result[self._shares[index][peer]]
            if mine.numel():
                link.nccl.send(mine, peer, link.wire)
            if theirs.numel():
                link.nccl.receive(theirs, peer, link.wire)

    def _fold(self, step: Round, index: int, operands: list[Tensor]) -> None:
        plan, share = step.plan, self._share(index)
        fold_on_device(
            operands,
            plan.pairs,
            self._divisor[1],
            share,
            plan.received,
            lambda position: self._scratch_for(index % SLOTS, position)[: share.numel()],
            self._probes[index],
        )
        self._done.append(self._link.work.record_event())

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
        # As a rule there is a shard for each member: then NCCL divides, and nobody goes over the memory once more.
        mean = step.plan.divisor == link.size
        if link.size > 1:
            with link.nccl.group():
                link.nccl.all_reduce(sums[0], result, link.wire, mean)
        link.work.wait_event(link.wire.record_event())
        if not mean:
            self._divisor[1].divide(result)
        torch.sum(self._share(index), 0, out=self._probes[index])
        self._done.append(link.work.record_event())

    # --- both -----------------------------------------------------------------------------------------------

    def _await_parts(self, step: Round, bucket: int) -> None:
        if bucket != self._marked:
            event = step.ready[bucket]
            assert event is not None
            self._link.wire.wait_event(event)
            self._marked = bucket

    def _share(self, index: int) -> Tensor:
        """Of the result of a piece, what this member folds."""
        return self._results[self._pieces[index].bucket][self._shares[index][self._link.rank]]

    def _scratch_for(self, slot: int, position: int) -> Tensor:
        found = self._scratch.get((slot, position))
        if found is None:
            mine = (shares[self._link.rank] for shares in self._shares)
            found = self._shelf.empty(max((share.stop - share.start for share in mine), default=0))
            self._scratch[slot, position] = found
        return found

    def _launch_last(self, step: Round) -> None:
        """The last results, and word of whether they are finite."""
        link, last = self._link, range(max(len(self._pieces) - SLOTS, 0), len(self._pieces))
        torch.sum(self._probes, 0, out=self._flags[link.rank])
        link.wire.wait_event(link.work.record_event())
        self._travel(step, [], [] if step.plan.reduction == "fast" else list(last), self._flags)
        link.work.wait_event(link.wire.record_event())
        self._told.copy_(self._flags, non_blocking=True)
        self._whole = link.work.record_event()

    def _complete(self, step: Round, done: torch.cuda.Event) -> None:
        """Exchange the tails, then wait for the device."""
        link = self._link
        tails, transfers = self._send_tails(step, True)
        for transfer in transfers:
            transfer.wait()
        payloads, _ = read_tails(tails)
        self._communicator.settle(step.announced, Announcement(self._results, payloads))
        for event in step.ready.values():
            assert event is not None
            link.wait(event)
        link.wait(done, soon=True)
        finite = all(map(math.isfinite, self._told.tolist())) or self._look_closely()
        results, self._results, self._step = self._results, [], None
        self._shelf.put_results(results)
        self._communicator.settle(step.pending, ExchangeResult(results, payloads, finite))

    def _look_closely(self) -> bool:
        """A sum of finite numbers may overflow: ask each of them. All members do, of all shares, so they agree."""
        return all(bool(result.isfinite().all()) for result in self._results)

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
