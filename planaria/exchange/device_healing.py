"""Healing, the part that lies on devices: a stripe from memory of one device to that of another, over NCCL.

NCCL's messages have no tags, so they are enqueued by the life's thread in the order in which they were asked for, and
healing comes before the exchange in which the healed member takes part. Waiting for them is the business of others.

Every block has a checksum, which is computed on both devices at the speed of their memory while the next block travels.
The sums follow the blocks, and are compared where the state arrives.

Both ends need memory for what travels: the source, so that training goes on while it leaves, and the healer, so that
nothing unchecked gets into a live state. A device that has no room takes the host's, and one block of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planaria.exchange.checksum import Checksum
from planaria.exchange.communicator import Communicator
from planaria.exchange.device import DeviceLink, Shelf

# A transfer of this size takes devices some 0.7 ms, several times what enqueueing it and its checksum costs.
DEVICE_BLOCK_BYTES = 256 << 20


def blocks_of(length: int) -> list[tuple[int, int]]:
    """A stripe's blocks, (start, stop)."""
    return [(low, min(low + DEVICE_BLOCK_BYTES, length)) for low in range(0, length, DEVICE_BLOCK_BYTES)]


def room(shelf: Shelf, length: int) -> Tensor:
    """Bytes for a stripe or a state: on the device if it has them, else on the host."""
    try:
        return shelf.empty(length, torch.uint8)
    except torch.OutOfMemoryError:
        return torch.empty(length, dtype=torch.uint8, device="cpu")


class _Steps:
    """The parts of a transfer that are the same in both directions. ``passage``: a device's block for each stripe that
    lies on the host."""

    def __init__(self, communicator: Communicator, stripes: Sequence[Tensor]) -> None:
        assert communicator.link is not None and communicator.shelf is not None
        self.link: DeviceLink = communicator.link
        self.counts = [len(blocks_of(each.numel())) for each in stripes]
        self._checksum = Checksum(DEVICE_BLOCK_BYTES, self.link.device)
        weighed = torch.cuda.current_stream(self.link.device.index).record_event()
        self.link.work.wait_event(weighed)
        self.sums = [communicator.shelf.empty(count, torch.int64) for count in self.counts]
        self.passage: dict[int, Tensor] = {}
        for index, stripe in enumerate(stripes):
            if stripe.device.type == "cpu" and stripe.numel():
                self.passage[index] = communicator.shelf.empty(min(stripe.numel(), DEVICE_BLOCK_BYTES), torch.uint8)
        self.kept: list[Tensor] = [*stripes, *self.sums, *self.passage.values()]
        communicator.when_quiet(self.kept.clear)  # until then a kernel may read or write them

    def on_device(self, index: int, stripe: Tensor, number: int) -> Tensor:
        """Where a block of a stripe is, or passes through."""
        low, high = blocks_of(stripe.numel())[number]
        return self.passage[index][: high - low] if index in self.passage else stripe[low:high]

    def sum_up(self, index: int, number: int, block: Tensor) -> torch.cuda.Event:
        """Compute the checksum of a block that the wire has."""
        self.link.work.wait_event(self.link.wire.record_event())
        with torch.cuda.stream(self.link.work):
            self.sums[index][number] = self._checksum.of(block)
        summed: torch.cuda.Event = self.link.work.record_event()
        return summed


class Sending:
    """Of a source: its stripe, to all healers."""

    def __init__(self, communicator: Communicator, stripe: Tensor, healers: Sequence[int]) -> None:
        self._steps = _Steps(communicator, [stripe])
        self._stripe, self._healers = stripe, healers
        self._user = torch.cuda.current_stream(self._steps.link.device.index)
        self._copied: list[torch.cuda.Event] = []  # by block
        self._done: torch.cuda.Event | None = None

    def reached(self, filled: int) -> None:
        """The caller's thread, whose current stream fills the stripe: so many bytes of it."""
        ends = [stop for _, stop in blocks_of(self._stripe.numel())]
        while len(self._copied) < len(ends) and ends[len(self._copied)] <= filled:
            self._copied.append(self._user.record_event())

    def enqueue(self) -> None:
        """The life's thread."""
        steps, link = self._steps, self._steps.link
        for number, (low, high) in enumerate(blocks_of(self._stripe.numel())):
            link.wire.wait_event(self._copied[number])
            block = steps.on_device(0, self._stripe, number)
            if steps.passage:
                if self._done is not None:
                    link.wait(self._done)  # it has left
                with torch.cuda.stream(link.wire):
                    block.copy_(self._stripe[low:high])
            with link.nccl.group():
                for healer in self._healers:
                    link.nccl.send(block, healer, link.wire)
            self._done = steps.sum_up(0, number, block)
        if self._done is not None:
            link.wire.wait_event(self._done)
            with link.nccl.group():
                for healer in self._healers:
                    link.nccl.send(steps.sums[0], healer, link.wire)
            self._done = link.wire.record_event()

    def finish(self) -> None:
        """Any other thread, once it is enqueued: until the stripe has left."""
        if self._done is not None:
            self._steps.link.wait(self._done, beside=True)
        self._steps.kept.clear()


class Receiving:
    """Of a healer: the stripes of all sources, to where they belong."""

    def __init__(self, communicator: Communicator, stripes: Sequence[Tensor], sources: Sequence[int]) -> None:
        self._steps = _Steps(communicator, stripes)
        self._stripes, self._sources = stripes, sources
        assert communicator.shelf is not None
        self._told = [communicator.shelf.empty(count, torch.int64) for count in self._steps.counts]
        self._steps.kept += self._told
        self._done: torch.cuda.Event | None = None

    def enqueue(self) -> None:
        """The life's thread."""
        steps, link = self._steps, self._steps.link
        for number in range(max(steps.counts)):
            here = [index for index, count in enumerate(steps.counts) if number < count]
            blocks = [steps.on_device(index, self._stripes[index], number) for index in here]
            with link.nccl.group():
                for index, block in zip(here, blocks, strict=True):
                    link.nccl.receive(block, self._sources[index], link.wire)
            for index, block in zip(here, blocks, strict=True):
                self._done = steps.sum_up(index, number, block)
            if steps.passage and self._done is not None:
                link.wait(self._done)
                for index in here:
                    low, high = blocks_of(self._stripes[index].numel())[number]
                    with torch.cuda.stream(link.wire):
                        self._stripes[index][low:high] = steps.on_device(index, self._stripes[index], number)
        with link.nccl.group():
            for index, count in enumerate(steps.counts):
                if count:
                    link.nccl.receive(self._told[index], self._sources[index], link.wire)
        link.work.wait_event(link.wire.record_event())
        self._done = link.work.record_event()

    def finish(self) -> list[int]:
        """Any other thread, once it is enqueued: until everything is there. The sources of corrupted blocks."""
        link = self._steps.link
        if self._done is not None:
            link.wait(self._done, beside=True)
        with torch.cuda.stream(link.work):
            fine = [torch.equal(*pair) for pair in zip(self._told, self._steps.sums, strict=True)]
        self._steps.kept.clear()
        return [source for source, equal in zip(self._sources, fine, strict=True) if not equal]
