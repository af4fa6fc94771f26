"""The exchange of codes (codes.py) in a device's memory, over NCCL: as the one of sums, with codes on the way.

Sums are encoded on the wire's stream, just before they travel: so that stream alone writes and reads what is sent, and
the fold of the piece before runs beside. Whatever has arrived is decoded on the other stream. The kernels are torch's
own, a few dozen for a piece; links for which codes are worth it are so much slower that fusing them gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.codes import BLOCK, Coded, Coder, coded_bytes, mean_key, part_key
from planaria.exchange.communicator import Communicator
from planaria.exchange.device_engine import SLOTS, DeviceEngine
from planaria.exchange.exchange_plan import Round
from planaria.exchange.folding import fold_on_device
from planaria.exchange.layout import Layout

CODED_PIECE_BYTES = 32 << 20  # of fp32: at most two chunks of the coder
ENCODING, DECODING = 40, 8  # launches for a stretch, at most
ENQUEUED = 340  # launches that may be enqueued and not done: a third of what a queue takes


class CodedDeviceEngine(DeviceEngine):
    """Holds, beyond what is submitted and the results, the codes of two pieces and what two coders need."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int, codec: str) -> None:
        super().__init__(communicator, layout, min(piece_bytes, CODED_PIECE_BYTES), BLOCK)
        self._codec = codec
        self._encoder = Coder(codec, self._link.device, self._shelf.empty)  # for the wire's stream
        self._coder = Coder(codec, self._link.device, self._shelf.empty)  # for the other
        self._wires: dict[tuple[int, int, int], Tensor] = {}  # by (slot, position or -1 for the mean, who folds)
        self._numbers: dict[int, Tensor] = {}  # decoded, by position
        self._probe = self._shelf.empty(1)

    def _ahead(self, step: Round) -> int:
        plan, size = step.plan, self._link.size
        stretches = 2 + CODED_PIECE_BYTES // 4 // self._coder.chunk // size  # of a share
        encoded, decoded = len(plan.own_nodes) * size + 1, len(plan.positions) + size + len(step.lost) * size
        return max(1, ENQUEUED // (stretches * (ENCODING * encoded + DECODING * decoded)))

    def _prepare(self, step: Round, index: int) -> None:
        super()._prepare(step, index)
        bucket, parts = self._pieces[index].bucket, step.submitted[self._pieces[index].bucket]
        with torch.cuda.stream(self._link.wire):
            for folder, share in enumerate(self._shares[index]):
                for i, position in enumerate(self._own(step)):
                    coded = self._coded(index, position, folder)
                    key = part_key(step.noise, bucket, step.plan.own_nodes[i].start)
                    self._encoder.encode(parts[i][share], coded, key, share.start)
                    if bucket in step.lost:
                        lost = step.lost[bucket][i][share]
                        self._encoder.decode(coded, lost)
                        torch.sub(parts[i][share], lost, out=lost)

    def _scatter(self, step: Round, index: int) -> list[Tensor]:
        link, mine, operands = self._link, self._link.rank, []
        for position, (rank, _) in enumerate(step.plan.positions):
            wire = self._wire(index, position, mine)
            operands.append(wire)
            if rank != mine and wire.numel():
                link.nccl.receive(wire, rank, link.wire)
        for peer in self._communicator.peers:
            for position in self._own(step):
                wire = self._wire(index, position, peer)
                if wire.numel():
                    link.nccl.send(wire, peer, link.wire)
        return operands

    def _gather(self, index: int) -> None:
        link = self._link
        mine = self._wire(index, MEAN, link.rank)
        for peer in self._communicator.peers:
            theirs = self._wire(index, MEAN, peer)
            if mine.numel():
                link.nccl.send(mine, peer, link.wire)
            if theirs.numel():
                link.nccl.receive(theirs, peer, link.wire)

    def _gathered(self, gather: list[int]) -> None:
        self._link.work.wait_event(self._link.wire.record_event())
        for index in gather:
            for peer in self._communicator.peers:
                result = self._results[self._pieces[index].bucket][self._shares[index][peer]]
                self._coder.decode(self._coded(index, MEAN, peer), result)

    def _fold(self, step: Round, index: int, operands: list[Tensor]) -> None:
        plan, share, mine = step.plan, self._share(index), self._link.rank
        sums = [self._coded(index, position, mine) for position in range(len(operands))]
        for start in range(0, share.numel(), self._coder.chunk):
            stop = min(start + self._coder.chunk, share.numel())
            numbers = [self._decoded(each.part(start, stop), position) for position, each in enumerate(sums)]
            own = range(len(numbers))
            fold_on_device(numbers, plan.pairs, self._divisor[1], share[start:stop], own, _none, self._probe[0])
        torch.sum(share, 0, out=self._probes[index])
        bucket, mean = self._pieces[index].bucket, self._coded(index, MEAN, mine)
        self._coder.encode(share, mean, mean_key(step.noise, bucket), self._shares[index][mine].start)
        self._coder.decode(mean, share)
        self._done.append(self._link.work.record_event())

    def _own(self, step: Round) -> list[int]:
        """The positions of this member's sums."""
        return [position for position, (rank, _) in enumerate(step.plan.positions) if rank == self._link.rank]

    def _decoded(self, coded: Coded, position: int) -> Tensor:
        if position not in self._numbers:
            self._numbers[position] = self._shelf.empty(self._coder.chunk)
        numbers = self._numbers[position][: len(coded)]
        self._coder.decode(coded, numbers)
        return numbers

    def _coded(self, index: int, position: int, folder: int) -> Coded:
        share = self._shares[index][folder]
        return Coded.within(self._wire(index, position, folder), share.stop - share.start, self._codec)

    def _wire(self, index: int, position: int, folder: int) -> Tensor:
        """The codes of a sum, or of the mean, of ``folder``'s share of a piece."""
        key = index % SLOTS, position, folder
        found = self._wires.get(key)
        if found is None:
            most = max(shares[folder].stop - shares[folder].start for shares in self._shares)
            found = self._wires[key] = self._shelf.empty(coded_bytes(most), torch.uint8)
        share = self._shares[index][folder]
        return found[: coded_bytes(share.stop - share.start)]

    def _release(self) -> None:
        super()._release()
        self._wires.clear()
        self._numbers.clear()


MEAN = -1  # in place of a position in the fold


def _none(position: int) -> Tensor:
    raise AssertionError(f"position {position} may be overwritten")
