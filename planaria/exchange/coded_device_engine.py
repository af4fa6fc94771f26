"""The exchange of codes (codes.py) in a device's memory, over NCCL: as the one of sums, with codes on the way.

Parts are encoded on the wire's stream, just before they travel: so that stream alone writes and sends those codes, and
the fold of the piece before runs beside. What has arrived is decoded on the other stream. The kernels are torch's own,
a few dozen for a piece; links for which codes are worth it are so much slower that fusing them would gain nothing.

So a device's queue is full after a few pieces, and the life's thread waits for room most of the time. Meanwhile it
hears of a dead member from NCCL or from whoever ends the life, and not by the tails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.codes import BLOCK, DEVICE_CHUNK, Coded, Coder, coded_bytes, mean_key, part_key
from planaria.exchange.communicator import Communicator
from planaria.exchange.device_engine import SLOTS, DeviceEngine
from planaria.exchange.exchange_plan import Round
from planaria.exchange.folding import fold_on_device
from planaria.exchange.layout import ITEM_BYTES, Layout

PIECE_BYTES = DEVICE_CHUNK * ITEM_BYTES  # at most: a coder takes it at once
MEAN = -1  # in place of a position in the fold

# Launches of a coder for a piece, which takes it two turns if it ends with half a block, and how many of them may be
# enqueued: two thirds of what a queue takes.
TURNS, ENCODING, DECODING, ENQUEUED = 2, 48, 6, 680


class CodedDeviceEngine(DeviceEngine):
    """Holds, beyond what is submitted and the results, the codes of two pieces and what two coders need."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int, codec: str) -> None:
        super().__init__(communicator, layout, min(piece_bytes, PIECE_BYTES), BLOCK)
        self._codec = codec
        self._encoder = Coder(codec, self._link.device, self._shelf.empty)  # for the wire's stream
        self._coder = Coder(codec, self._link.device, self._shelf.empty)  # for the other
        self._wires: dict[tuple[int, int, bool], Tensor] = {}  # by (slot, position, is it of the whole piece)
        self._numbers: dict[int, Tensor] = {}  # decoded, by position

    def _ahead(self, step: Round) -> int:
        own, positions = len(step.plan.own_nodes), len(step.plan.positions)
        of_a_turn = ENCODING * (own + 1) + DECODING * (positions + 1) + positions
        return max(1, ENQUEUED // (TURNS * of_a_turn) - 1)

    def _prepare(self, step: Round, index: int) -> None:
        super()._prepare(step, index)
        piece = self._pieces[index]
        here = slice(piece.start, piece.stop)
        with torch.cuda.stream(self._link.wire):
            for i, position in enumerate(self._own(step)):
                part, coded = step.submitted[piece.bucket][i][here], self._codes(index, position)
                key = part_key(step.noise, piece.bucket, step.plan.own_nodes[i].start)
                self._encoder.encode(part, coded, key, piece.start)

    def _scatter(self, step: Round, index: int) -> list[Tensor]:
        mine = self._link.rank
        for position, (rank, _) in enumerate(step.plan.positions):
            if rank != mine:
                self._receive(self._codes(index, position, whole=False), rank)
        for peer in self._communicator.peers:
            for position in self._own(step):
                self._send(self._share_of(self._codes(index, position), index, peer), peer)
        return []

    def _gather(self, index: int) -> None:
        mean = self._codes(index, MEAN)
        for peer in self._communicator.peers:
            self._send(self._share_of(mean, index, self._link.rank), peer)
            self._receive(self._share_of(mean, index, peer), peer)

    def _gathered(self, gather: list[int]) -> None:
        self._link.work.wait_event(self._link.wire.record_event())
        for index in gather:
            piece = self._pieces[index]
            self._coder.decode(self._codes(index, MEAN), self._results[piece.bucket][piece.start : piece.stop])

    def _fold(self, step: Round, index: int, operands: list[Tensor]) -> None:
        plan, share, mine = step.plan, self._share(index), self._link.rank
        numbers = []
        for position, (rank, _) in enumerate(plan.positions):
            coded = self._codes(index, position, whole=rank == mine)
            numbers.append(self._decoded(self._share_of(coded, index, mine) if rank == mine else coded, position))
        own = range(len(numbers))
        fold_on_device(numbers, plan.pairs, self._divisor[1], share, own, _none, self._probes[index])
        bucket, mean = self._pieces[index].bucket, self._share_of(self._codes(index, MEAN), index, mine)
        self._coder.encode(share, mean, mean_key(step.noise, bucket), self._shares[index][mine].start)
        self._done.append(self._link.work.record_event())

    def _own(self, step: Round) -> list[int]:
        """The positions of this member's parts."""
        return [position for position, (rank, _) in enumerate(step.plan.positions) if rank == self._link.rank]

    def _send(self, coded: Coded, peer: int) -> None:
        for each in (coded.scales, coded.codes):
            if each.numel():
                self._link.nccl.send(each, peer, self._link.wire)

    def _receive(self, coded: Coded, peer: int) -> None:
        for each in (coded.scales, coded.codes):
            if each.numel():
                self._link.nccl.receive(each, peer, self._link.wire)

    def _decoded(self, coded: Coded, position: int) -> Tensor:
        if position not in self._numbers:
            self._numbers[position] = self._shelf.empty(self._largest(False))
        numbers = self._numbers[position][: len(coded)]
        self._coder.decode(coded, numbers)
        return numbers

    def _codes(self, index: int, position: int, whole: bool = True) -> Coded:
        """Of a part or of the mean: of a piece, or of this member's share of it."""
        key = index % SLOTS, position, whole
        if key not in self._wires:
            self._wires[key] = self._shelf.empty(coded_bytes(self._largest(whole)), torch.uint8)
        return Coded.within(self._wires[key], self._numel(index, whole), self._codec)

    def _share_of(self, coded: Coded, index: int, folder: int) -> Coded:
        start, share = self._pieces[index].start, self._shares[index][folder]
        return coded.part(share.start - start, share.stop - start)

    def _numel(self, index: int, whole: bool) -> int:
        return self._pieces[index].stop - self._pieces[index].start if whole else self._share(index).numel()

    def _largest(self, whole: bool) -> int:
        return max(self._numel(index, whole) for index in range(len(self._pieces)))

    def _release(self) -> None:
        super()._release()
        self._wires.clear()
        self._numbers.clear()


def _none(position: int) -> Tensor:
    raise AssertionError(f"position {position} may be overwritten")
