"""The exchange of codes (codes.py) in main memory, over gloo.

Every shard's part is encoded for itself, a member's own too, and decoded by whoever folds it. The mean is encoded once,
and whoever does that decodes the same bytes as all others. So all members have the same bits, which do not depend on
who computed which shards, nor on how many members there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.exchange.codes import BLOCK, Coded, Coder, coded_bytes, mean_key, part_key
from planaria.exchange.communicator import Communicator, Transfer
from planaria.exchange.engine import CONTROL_TAGS
from planaria.exchange.exchange_plan import Round
from planaria.exchange.folding import fold
from planaria.exchange.host_engine import Flight, HostEngine, tag_width
from planaria.exchange.layout import Layout


class CodedHostEngine(HostEngine):
    """Holds results as large as all buckets in fp32 and once more as codes, and the codes of a few pieces."""

    def __init__(self, communicator: Communicator, layout: Layout, piece_bytes: int, window: int, codec: str) -> None:
        super().__init__(communicator, layout, piece_bytes, window, BLOCK)
        self._codec = codec
        self._coder = Coder(codec, communicator.device)
        size = communicator.size
        self._shares = [[piece.share(rank, size) for rank in range(size)] for piece in self._pieces]
        self._sums_wires: dict[tuple[int, int, int], Tensor] = {}  # by (slot in the window, position, who folds it)
        self._mean_wires: dict[tuple[int, int], Tensor] = {}  # by (piece, who has folded it)
        self._sent: dict[int, list[Transfer]] = {}  # this member's sums of a piece under way, by piece
        self._numbers: dict[int, Tensor] = {}  # decoded, by position

    def outcome(self) -> list[Tensor]:
        found = [torch.zeros(coded_bytes(numel), dtype=torch.uint8, device="cpu") for numel in self._layout.buckets]
        for index, piece in enumerate(self._pieces):
            whole = Coded.within(found[piece.bucket], self._layout.buckets[piece.bucket], self._codec)
            for folder, share in enumerate(self._shares[index]):
                if self._numel(index, folder):
                    coded = self._coded(self._mean_wire(index, folder), index, folder)
                    part = whole.part(share.start, share.stop)
                    part.scales.copy_(coded.scales)
                    part.codes.copy_(coded.codes)
        return found

    def _forget(self) -> None:
        super()._forget()
        self._sent.clear()

    def _launch(self, step: Round) -> None:
        index, plan, mine = step.launched, step.plan, self._communicator.rank
        width, bucket = tag_width(plan), self._pieces[index].bucket
        tag, what = step.first_tag + CONTROL_TAGS + index * width, f"exchanging bucket {bucket}"
        arrivals, sent = [], []
        if self._numel(index, mine):
            for position, (rank, i) in enumerate(plan.positions):
                if rank != mine:
                    wire = self._sum_wire(index, position, mine)
                    arrivals.append(self._communicator.receive(wire, rank, tag + i, what))
        for peer in self._communicator.peers:
            if self._numel(index, peer):
                wire = self._mean_wire(index, peer)
                self._transfers.append(self._communicator.receive(wire, peer, tag + width - 1, what))
        own = [position for position, (rank, _) in enumerate(plan.positions) if rank == mine]
        for folder in (*self._communicator.peers, mine):
            if self._numel(index, folder):
                for i, position in enumerate(own):
                    wire = self._encode(step, index, i, position, folder)
                    if folder != mine:
                        sent.append(self._communicator.send(wire, folder, tag + i, what))
        self._sent[index] = sent
        self._flights.append(Flight(index, tag + width - 1, arrivals, []))
        step.launched += 1

    def _encode(self, step: Round, index: int, i: int, position: int, folder: int) -> Tensor:
        """The member's ``i``-th sum of ``folder``'s share of a piece, as it travels."""
        bucket, share, node = self._pieces[index].bucket, self._shares[index][folder], step.plan.own_nodes[i]
        wire = self._sum_wire(index, position, folder)
        coded = self._coded(wire, index, folder)
        part = step.submitted[bucket][i][share]
        self._coder.encode(part, coded, part_key(step.noise, bucket, node.start), share.start)
        return wire

    def _land(self, step: Round) -> None:
        """Fold the oldest piece under way and send this member's share of the result to all."""
        flight = self._flights.popleft()
        for arrival in flight.arrivals:
            arrival.wait()
        index, mine, plan = flight.index, self._communicator.rank, step.plan
        if self._numel(index, mine):
            bucket, share = self._pieces[index].bucket, self._shares[index][mine]
            result, wire = self._results[bucket][share], self._mean_wire(index, mine)
            sums = [
                self._coded(self._sum_wire(index, position, mine), index, mine)
                for position in range(len(plan.positions))
            ]
            for start in range(0, result.numel(), self._coder.chunk):
                stop = min(start + self._coder.chunk, result.numel())
                numbers = [self._decoded(each.part(start, stop), position) for position, each in enumerate(sums)]
                self._finite &= fold(numbers, plan.pairs, plan.divisor, result[start:stop], range(len(numbers)))
            coded = self._coded(wire, index, mine)
            self._coder.encode(result, coded, mean_key(step.noise, bucket), share.start)
            for peer in self._communicator.peers:
                what = f"exchanging bucket {bucket}"
                self._transfers.append(self._communicator.send(wire, peer, flight.tag, what))
            self._coder.decode(coded, result)
        for transfer in self._sent.pop(index):  # then its wires may be written again
            transfer.wait()

    def _all_arrived(self) -> None:
        for index, piece in enumerate(self._pieces):
            for peer in self._communicator.peers:
                if self._numel(index, peer):
                    coded = self._coded(self._mean_wire(index, peer), index, peer)
                    self._coder.decode(coded, self._results[piece.bucket][self._shares[index][peer]])

    def _decoded(self, coded: Coded, position: int) -> Tensor:
        if position not in self._numbers:
            self._numbers[position] = torch.empty(self._coder.chunk, dtype=torch.float32, device="cpu")
        numbers = self._numbers[position][: len(coded)]
        self._coder.decode(coded, numbers)
        return numbers

    def _numel(self, index: int, folder: int) -> int:
        """Elements of a piece that a member folds."""
        share = self._shares[index][folder]
        return int(share.stop - share.start)

    def _coded(self, wire: Tensor, index: int, folder: int) -> Coded:
        return Coded.within(wire, self._numel(index, folder), self._codec)

    def _sum_wire(self, index: int, position: int, folder: int) -> Tensor:
        key = index % self._window, position, folder
        found = self._sums_wires.get(key)
        if found is None:
            most = max(self._numel(each, folder) for each in range(len(self._pieces)))
            found = self._sums_wires[key] = torch.empty(coded_bytes(most), dtype=torch.uint8, device="cpu")
        return found[: coded_bytes(self._numel(index, folder))]

    def _mean_wire(self, index: int, folder: int) -> Tensor:
        found = self._mean_wires.get((index, folder))
        if found is None:
            numel = self._numel(index, folder)
            found = self._mean_wires[index, folder] = torch.empty(coded_bytes(numel), dtype=torch.uint8, device="cpu")
        return found
