"""Healing: the state of members that have it, copied to members that have not, striped over all that have it.

The state is a flat list of tensors and a manifest that says, in the caller's words, what they are. All
sources hold the same bits, so each sends an equal stripe of the bytes, in blocks, to every healer: of those in main
memory over gloo, as below, and of those on a device over NCCL (device_healing.py). Nothing that a peer sends is
executed: messages are sizes, checksums, the manifest and raw bytes.

A source stops training only for the copy of its stripe; the transfer runs beside the exchanges of the same
life. The healer receives into buffers that belong to this life (a source that was stopped and wakes late must
not write into live parameters) and hands them out when every block has matched its checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from planaria.errors import CommunicatorError, ProtocolError
from planaria.exchange.communicator import HEALING_TAGS, Communicator, Transfer, as_bytes, as_tensor
from planaria.exchange.device_healing import Receiving, Sending, room
from planaria.exchange.waiting import Pending

# Large enough that a block's round trip is nothing beside its transfer (NCCL reached a seventh of the
# bandwidth with 2 MB at a time), small enough that checksums are computed while other blocks travel.
BLOCK_BYTES = 32 << 20

# Every tensor begins at such an offset of the byte range, so that it can be viewed as any type and copied at
# full speed; and every stripe does, so that a block never shares a cache line with that of another source.
ALIGNMENT = 64

# A source's first message: bytes of the state, length of the description, digest of the description.
HEADER = struct.Struct("<qqQ")
CHECK = struct.Struct("<Q")
ITEM = struct.Struct("<q?")  # at least so much describes one tensor

HEADER_TAG, DESCRIPTION_TAG, BLOCK_TAGS = HEALING_TAGS, HEALING_TAGS + 1, HEALING_TAGS + 2


@dataclass(frozen=True, slots=True)
class HealedState:
    """What the sources sent, verified: the manifest, and each tensor's bytes (uint8, aligned for any type:
    ``bytes.view(dtype).reshape(shape)``). They are in main memory or on the device, as they were at the sources; if
    the device had no room beside what it holds, they are all in main memory."""

    manifest: bytes
    tensors: list[Tensor]


@dataclass(frozen=True, slots=True)
class Range:
    """The byte range in which tensors of one kind lie, and its division into stripes and blocks."""

    sizes: tuple[int, ...]  # bytes of each tensor

    def places(self) -> Iterator[tuple[int, int]]:
        """Each tensor's (start, stop)."""
        start = 0
        for size in self.sizes:
            yield start, start + size
            start += -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def total(self) -> int:
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes)

    def stripe(self, index: int, count: int) -> tuple[int, int]:
        """The bytes (start, stop) that source ``index`` of ``count`` sends; possibly none."""
        units = self.total // ALIGNMENT
        return units * index // count * ALIGNMENT, units * (index + 1) // count * ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a state consists of."""

    sizes: tuple[int, ...]  # bytes of each tensor
    on_device: tuple[bool, ...]
    manifest: bytes

    def span(self, on_device: bool) -> Range:
        return Range(tuple(size for size, kind in zip(self.sizes, self.on_device, strict=True) if kind == on_device))

    def pack(self) -> bytes:
        count = len(self.sizes)
        return struct.pack(f"<q{count}q{count}?", count, *self.sizes, *self.on_device) + self.manifest

    @staticmethod
    def unpack(packed: bytes) -> _Contents:
        """Raises ProtocolError for anything that ``pack`` did not make."""
        try:
            (count,) = struct.unpack_from("<q", packed)
            if not 0 <= count <= len(packed) // ITEM.size:
                raise ProtocolError(f"a state's description of {len(packed)} bytes speaks of {count} tensors")
            layout = struct.Struct(f"<q{count}q{count}?")
            _, *found = layout.unpack_from(packed)
        except struct.error as error:
            raise ProtocolError(f"a state's description is cut short ({error})") from None
        if any(size < 0 for size in found[:count]):
            raise ProtocolError("a state's description has a tensor of less than no bytes")
        return _Contents(tuple(found[:count]), tuple(found[count:]), packed[layout.size :])


def _blocks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK_BYTES, stop)) for low in range(start, stop, BLOCK_BYTES)]


def serve(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    manifest: bytes,
    sources: Sequence[int],
    healers: Sequence[int],
) -> Pending[None]:
    """Send this member's stripe of the state to all ``healers``.

    ``tensors``: contiguous, of any type and shape, in main memory or on the communicator's device, the same bits on
    all ``sources``. ``sources`` and ``healers``: ranks, the same on every member that takes part, without a member in
    both. Returns when the stripe is copied: from then on the tensors may change, those on the device by work of the
    current stream. The pending ends when the stripe has left. Raises ValueError for a tensor that cannot be sent. Only
    one healing at a time in a communicator; on a device its members must ask for it before they begin another exchange.
    """
    what = "serving a state"
    index = _position(communicator, sources, healers, serving=True)
    flat = [_flat_bytes(tensor, communicator.device) for tensor in tensors]
    there = tuple(map(_on_device, tensors))
    contents = _Contents(tuple(each.numel() for each in flat), there, manifest)
    start, stop = contents.span(False).stripe(index, len(sources))
    stripe = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
    _copy_stripe(_of_kind(False, flat, there), contents.span(False), start, stripe)
    sending, enqueued = None, communicator.pending(what)
    if any(there):
        assert communicator.shelf is not None
        start, stop = contents.span(True).stripe(index, len(sources))
        device_stripe = room(communicator.shelf, stop - start)
        sending = Sending(communicator, device_stripe, healers)

    def work() -> None:
        _send(communicator, stripe, contents, healers, with_description=index == 0)
        enqueued.wait()
        if sending is not None:
            sending.finish()

    served = communicator.background(what, work)
    if sending is None:
        communicator.settle(enqueued, None)
        return served
    # Beside the first words, after which the healers get ready.
    _copy_stripe(_of_kind(True, flat, there), contents.span(True), start, device_stripe, sending.reached)
    sending.reached(device_stripe.numel())  # what is left is padding

    def enqueue() -> None:
        sending.enqueue()
        communicator.settle(enqueued, None)

    communicator.post(enqueue)
    return served


def receive(communicator: Communicator, sources: Sequence[int], healers: Sequence[int]) -> Pending[HealedState]:
    """Receive the state from all ``sources``. The pending raises CommunicatorError if one of them is lost,
    if they do not send the same state, or if bytes were corrupted on the way; the message names the rank.
    """
    _position(communicator, sources, healers, serving=False)
    user = None if communicator.link is None else torch.cuda.current_stream(communicator.device)
    return communicator.background("receiving a state", lambda: _receive(communicator, sources, user))


def _position(communicator: Communicator, sources: Sequence[int], healers: Sequence[int], *, serving: bool) -> int:
    everyone = [*sources, *healers]
    if len(set(everyone)) != len(everyone) or not all(0 <= rank < communicator.size for rank in everyone):
        raise ValueError(f"sources {list(sources)} and healers {list(healers)} are not distinct members")
    mine = sources if serving else healers
    if not sources or communicator.rank not in mine:
        raise ValueError(f"rank {communicator.rank} is not among {list(mine)}")
    return list(mine).index(communicator.rank)


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _of_kind(on_device: bool, flat: Sequence[Tensor], there: Sequence[bool]) -> list[Tensor]:
    return [each for each, kind in zip(flat, there, strict=True) if kind == on_device]


def _flat_bytes(tensor: Tensor, device: torch.device) -> Tensor:
    if (_on_device(tensor) and tensor.device != device) or not tensor.is_contiguous():
        raise ValueError(
            f"a state can only be sent from contiguous tensors in main memory or on {device}, "
            f"not from {tuple(tensor.shape)} on {tensor.device}"
        )
    if tensor.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # a view of nothing would keep the strides of something
    return tensor.detach().reshape(-1).view(torch.uint8)


def _copy_stripe(
    flat: Sequence[Tensor], span: Range, start: int, stripe: Tensor, reached: Callable[[int], None] = lambda _: None
) -> None:
    """Fill ``stripe``, which begins at byte ``start`` of the range. ``reached`` is told how many of its bytes are."""
    stop = start + stripe.numel()
    for source, (low, high) in zip(flat, span.places(), strict=True):
        first, last = max(low, start), min(high, stop)
        if first < last:
            stripe[first - start : last - start] = source[first - low : last - low]
            reached(last - start)


def _send(
    communicator: Communicator,
    stripe: Tensor,
    contents: _Contents,
    healers: Sequence[int],
    *,
    with_description: bool,
) -> None:
    what = "serving a state"
    description = contents.pack()
    header = as_tensor(HEADER.pack(sum(contents.sizes), len(description), xxhash.xxh3_64_intdigest(description)))
    transfers = [communicator.send(header, healer, HEADER_TAG, what) for healer in healers]
    if with_description:
        body = as_tensor(description)
        transfers += [communicator.send(body, healer, DESCRIPTION_TAG, what) for healer in healers]
    for number, (low, high) in enumerate(_blocks(0, stripe.numel())):
        block = stripe[low:high]
        # The block leaves first, so that it travels while its checksum is computed.
        transfers += [communicator.send(block, healer, BLOCK_TAGS + 2 * number, what) for healer in healers]
        check = as_tensor(CHECK.pack(_checksum(block)))
        transfers += [communicator.send(check, healer, BLOCK_TAGS + 2 * number + 1, what) for healer in healers]
    for transfer in transfers:
        transfer.wait()


def _checksum(block: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(block.numpy().data)


@dataclass(frozen=True, slots=True)
class _Arrival:
    source: int
    block: Tensor
    check: Tensor
    transfers: tuple[Transfer, Transfer]


def _receive(communicator: Communicator, sources: Sequence[int], user: torch.cuda.Stream | None) -> HealedState:
    """``user``: the stream on which the state will be used."""
    what = "receiving a state"
    contents = _Contents.unpack(_receive_description(communicator, sources))
    there = contents.span(True)
    receiving, device_staging = None, torch.empty(0, dtype=torch.uint8, device="cpu")
    if there.total:
        if communicator.shelf is None or user is None:
            raise CommunicatorError(f"rank {sources[0]} serves a state on a device, and this rank has none")
        device_staging = room(communicator.shelf, there.total)
        if device_staging.device.type != "cpu":
            device_staging.record_stream(user)  # it is freed when ``user`` has been given the last copy, not done it
        stripes = [device_staging[slice(*there.stripe(i, len(sources)))] for i in range(len(sources))]
        receiving = Receiving(communicator, stripes, sources)
        enqueued = communicator.call(what, receiving.enqueue)
    here = contents.span(False)
    staging = _receive_host(communicator, sources, here)
    if receiving is not None:
        enqueued.wait()
        if odd := receiving.finish():
            raise communicator.trouble(what, odd[0], "a block does not match its checksum")
    places = {False: here.places(), True: there.places()}
    stagings = {False: staging, True: device_staging}
    return HealedState(contents.manifest, [stagings[kind][slice(*next(places[kind]))] for kind in contents.on_device])


def _receive_host(communicator: Communicator, sources: Sequence[int], span: Range) -> Tensor:
    what = "receiving a state"
    staging = torch.empty(span.total, dtype=torch.uint8, device="cpu")
    arrivals: list[_Arrival] = []
    for index, source in enumerate(sources):
        for number, (low, high) in enumerate(_blocks(*span.stripe(index, len(sources)))):
            block, check = staging[low:high], torch.empty(CHECK.size, dtype=torch.uint8, device="cpu")
            tag = BLOCK_TAGS + 2 * number
            transfers = (
                communicator.receive(block, source, tag, what),
                communicator.receive(check, source, tag + 1, what),
            )
            arrivals.append(_Arrival(source, block, check, transfers))
    for arrival in arrivals:
        for transfer in arrival.transfers:
            transfer.wait()
        if CHECK.unpack(as_bytes(arrival.check)) != (_checksum(arrival.block),):
            raise communicator.trouble(what, arrival.source, "a block does not match its checksum")
    return staging


def _receive_description(communicator: Communicator, sources: Sequence[int]) -> bytes:
    """The first source's description, once all sources have shown that theirs is the same."""
    what = "receiving a state"
    raw = {source: torch.empty(HEADER.size, dtype=torch.uint8, device="cpu") for source in sources}
    for transfer in [communicator.receive(raw[source], source, HEADER_TAG, what) for source in sources]:
        transfer.wait()
    headers = {source: as_bytes(each) for source, each in raw.items()}
    first = headers[sources[0]]
    odd = [source for source in sources if headers[source] != first]
    if odd:
        raise CommunicatorError(
            f"ranks {odd} serve another state than rank {sources[0]} in quorum {communicator.quorum_id}: "
            "sizes or manifests differ"
        )
    _, length, digest = HEADER.unpack(first)
    body = torch.empty(length, dtype=torch.uint8, device="cpu")
    communicator.receive(body, sources[0], DESCRIPTION_TAG, what).wait()
    description = as_bytes(body)
    if xxhash.xxh3_64_intdigest(description) != digest:
        raise communicator.trouble(what, sources[0], "the manifest does not match its checksum")
    return description
