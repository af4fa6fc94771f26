"""Buddy copies: each rank's state in another rank's memory, for the day when no other group has it.

After every ``every`` commits each rank copies its part of the state to host memory, which is the only pause; a thread
sends that to the rank's *buddy* and takes what it is to keep for its *ward*. A copy counts when all ranks have said
that they hold both; until then the one before is kept. When a rank is lost its buddy has its part, but all parts must
be of one step, so the living ones go back to their own copies of it (Zheng, Shi and Kalé, FTC-Charm++, 2004: double
in-memory checkpointing).
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from planaria.core.messages import QuorumId
from planaria.errors import PlanariaError, UsageError
from planaria.exchange.healing import BLOCK_BYTES, Range
from planaria.rank.settings import Settings
from planaria.rank.stuck import ended
from planaria.torch.state import ProtectedState, tensor_specs
from planaria.torch.world import GroupWorld
from planaria.wire.page import Copies, ProgressPage

# What a state is: the step and the quorum of its newest commit. Equal keys mean equal states.
Key = tuple[int, QuorumId]
# Each rank holds copies of itself and of its ward, the newest whole ones and those under way.
HELD = 2
_SIZES, _CHECK = struct.Struct("<qq"), struct.Struct("<Q")
_LIMITS = Path("/sys/fs/cgroup")  # of this process's control group, where it has one


def read_every(environ: Mapping[str, str] = os.environ) -> int:
    """What ``planaria run --buddy`` says; 0 for nothing. UsageError if it is no number of steps."""
    text = environ.get("PLANARIA_BUDDY") or "0"
    if not text.isdecimal():
        raise UsageError(f"PLANARIA_BUDDY must be a number of steps, not {text!r}")
    return int(text)


def buddy_of(rank: int, size: int, per_node: int) -> int:
    """Who keeps the copies of ``rank``: the rank in the same place of the next node, so that a node takes no state with
    its copy; on a single node the next rank."""
    return (rank + (per_node if per_node < size else 1)) % size


def newest_whole(held: Sequence[tuple[frozenset[Key], frozenset[Key]]], buddies: Sequence[int]) -> Key | None:
    """The newest state of which the parts of all ranks are there, with the rank itself or with its buddy. ``held``: by
    rank, the copies of itself and those of its ward; ``buddies``: by rank, its buddy."""
    there = [own | held[buddy][1] for (own, _), buddy in zip(held, buddies, strict=True)]
    return max(frozenset.intersection(*there), default=None)


@dataclass(frozen=True, slots=True)
class Copy:
    """A rank's part of a state. ``data``: its tensors, flat bytes in host memory, one after the other."""

    manifest: bytes
    data: Tensor

    def tensors(self) -> list[Tensor]:
        """As they are on the wire. ProtocolError if the manifest is none."""
        specs = tensor_specs(self.manifest)
        places = Range(tuple(math.prod(spec.wire_shape) * spec.dtype.itemsize for spec in specs)).places()
        return [
            self.data[start:stop].view(spec.dtype).reshape(spec.wire_shape)
            for spec, (start, stop) in zip(specs, places, strict=True)
        ]


class Buddies:
    """One per rank, made by all ranks of the group together. ``gather`` gives every rank's payload, ``calling`` is
    around calls of the script's functions, ``lost`` raises what it means that a rank is out of reach."""

    def __init__(
        self,
        every: int,
        settings: Settings,
        world: GroupWorld,
        state: ProtectedState,
        page: ProgressPage | None,
        gather: Callable[[bytes], list[bytes]],
        calling: Callable[[], AbstractContextManager[None]],
        lost: Callable[[Exception], NoReturn],
    ) -> None:
        self.every = every
        self._settings = settings
        self._world = world
        self._state = state
        self._page = page
        self._gather = gather
        self._calling = calling
        self._lost = lost
        self._per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or world.size)
        self._buddies = [buddy_of(rank, world.size, self._per_node) for rank in range(world.size)]
        self._buddy, self._ward = self._buddies[world.rank], self._buddies.index(world.rank)
        self._own: dict[Key, Copy] = {}
        self._wards: dict[Key, Copy] = {}
        self._spare: list[Tensor] = []  # kept: fresh memory would make every pause twice as long
        self._due = True  # the next commit is copied: there are none, or they are not where they should be
        self._given_up = False
        self._late = False  # people were told that copies take longer than the steps between them
        self._thread: threading.Thread | None = None
        self._lacking: list[int] = []  # ranks that do not have their part of what ``meet`` has found
        self._group = world.side_group()

    # --- making them -----------------------------------------------------------------------------------------

    def committed(self, step: int, under: QuorumId) -> None:
        """``step`` steps are committed, the last one under quorum ``under``. All ranks of the group call this
        together.

        Raises what ``gather`` raises."""
        if not (self._due or step % self.every == 0) or self._given_up or self._page is None or not self._page.guarded:
            return
        busy = self._thread is not None and self._thread.is_alive()
        with self._calling():
            manifest, tensors = (b"", []) if busy else self._state.capture()
        span = Range(tuple(tensor.nbytes for tensor in tensors))
        said = {"busy": busy, "sizes": [len(manifest), span.total], "free": free_memory()}
        said["room"] = sum(each.numel() for each in self._spare) + sum(
            copy.data.numel() for copies in (self._own, self._wards) for copy in copies.values()
        )
        table = [json.loads(each) for each in self._gather(json.dumps(said).encode())]
        if any(row["busy"] for row in table):
            if not self._late and not self._due:
                self._late = True
                self._warn(f"the copy of step {step} is left out: the one before is still on its way; copy less often")
            return
        self._due = False
        sizes = [tuple(row["sizes"]) for row in table]
        trouble = self._no_room(table) or self._stage(tensors, span, sizes[self._ward][1])
        if trouble := next(filter(None, (each.decode() for each in self._gather(trouble.encode()))), ""):
            self._give_up(f"there is no room for copies of the state in memory: {trouble}")
            return
        data, room = self._spare.pop(), self._spare.pop()
        key = (step, under)
        self._own[key] = Copy(manifest, data)
        self._thread = threading.Thread(
            target=self._exchange, args=(key, room, sizes[self._ward][0]), name="planaria-buddy", daemon=True
        )
        self._thread.start()

    def _no_room(self, table: list[dict[str, Any]]) -> str:
        """A sentence if the memory of this node cannot take what its ranks will hold."""
        here = range(self._world.rank // self._per_node * self._per_node, self._world.size)[: self._per_node]
        need = 0
        for rank in here:
            row, ward = table[rank], table[self._buddies.index(rank)]
            need += max(HELD * (row["sizes"][1] + ward["sizes"][1]) - row["room"], 0)
        free = min(table[rank]["free"] for rank in here)
        if need <= free:
            return ""
        return f"they take {need / 2**30:.2f} GiB more, and {free / 2**30:.2f} GiB are free"

    def _stage(self, tensors: Sequence[Tensor], span: Range, theirs: int) -> str:
        """Copy this rank's part to the last of the spare buffers, and have one before it for the ward's. A sentence if
        there is too little memory."""
        try:
            room = self._buffer(theirs, pinned=False)
            data = self._buffer(span.total, pinned=self._world.device.type == "cuda")
            for tensor, (start, stop) in zip(tensors, span.places(), strict=True):
                if tensor.numel():
                    data[start:stop].copy_(tensor.detach().reshape(-1).view(torch.uint8), non_blocking=True)
                if self._page is not None:
                    self._page.beat()
            if self._world.device.type == "cuda":
                torch.cuda.current_stream(self._world.device).synchronize()
        except (RuntimeError, MemoryError) as error:
            return str(error).partition("\n")[0] or "out of memory"
        self._spare = [room, data]  # others are of another size, and of no use any more
        return ""

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        for index, each in enumerate(self._spare):
            if each.numel() == size and each.is_pinned() == pinned:
                return self._spare.pop(index)
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _exchange(self, key: Key, room: Tensor, manifest_bytes: int) -> None:
        """On a thread of its own: send this rank's copy, take the ward's, and hear whether all have both."""
        try:
            whole = self._swap(key, room, manifest_bytes)
            flags = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._world.size)]
            dist.all_gather(flags, torch.full((1,), whole, dtype=torch.uint8), group=self._group)
        except RuntimeError:
            return  # a rank is lost: what is here by now counts when all that are left have said what they have
        if threading.current_thread() is not self._thread:
            return  # it was given up
        if all(bool(flag) for flag in flags):
            self._keep(key)
            self._show(Copies.WHOLE)
        else:
            self._warn(f"the copy of step {key[0]} was damaged on its way between ranks; the one before is kept")
            self._drop(key)

    def _swap(self, key: Key, room: Tensor, manifest_bytes: int) -> bool:
        copy = self._own[key]
        manifest = torch.empty(manifest_bytes, dtype=torch.uint8)
        sent = _send(copy, self._buddy, self._group)
        whole = _receive(manifest, room, self._ward, self._group)
        for each in sent:
            each.wait()
        if whole:
            self._wards[key] = Copy(manifest.numpy().tobytes(), room)
        else:
            self._spare.append(room)
        return whole

    # --- going back to them ----------------------------------------------------------------------------------

    def wait(self) -> None:
        """Until no copy is under way. Before connections are renewed that were cut, or else the thread would go on with
        the new ones. One that is stuck in an operation of the old ones will not, and is left alone (see `rank.stuck`):
        to wait for it would cost the state of which the copies are."""
        if self._thread is not None:
            ended(self._thread)
            self._thread = None

    def meet(self) -> Key | None:
        """The ranks of the group have met again, and one may be new: the newest state of which all parts are there.
        Copies of others are given up. All ranks call this together."""
        mine = json.dumps([[[k, u.epoch, u.number] for k, u in held] for held in (self._own, self._wards)])
        table = [json.loads(each) for each in self._gather(mine.encode())]
        held = [
            (frozenset((k, QuorumId(e, n)) for k, e, n in own), frozenset((k, QuorumId(e, n)) for k, e, n in wards))
            for own, wards in table
        ]
        best = newest_whole(held, self._buddies)
        self._lacking = [rank for rank, (own, _) in enumerate(held) if best not in own]
        self._keep(best)
        self._due = True
        if not self._given_up:
            self._show(Copies.WHOLE if best in self._own and best in self._wards else Copies.NONE)
        return best

    def take_back(self, key: Key) -> tuple[bytes, list[Tensor]]:
        """Manifest and tensors of this rank's part of the state that ``meet`` has found. Whoever is new has it from its
        buddy. All ranks call this together, right after it."""
        try:
            if self._ward in self._lacking:
                copy = self._wards[key]
                sizes = torch.frombuffer(
                    bytearray(_SIZES.pack(len(copy.manifest), copy.data.numel())), dtype=torch.uint8
                )
                dist.send(sizes, self._ward, self._group)
                for each in _send(copy, self._ward, self._group):
                    each.wait()
            if self._world.rank in self._lacking:
                self._own[key] = self._fetch()
        except RuntimeError as error:
            self._lost(error)
        copy = self._own[key]
        return copy.manifest, copy.tensors()

    def _fetch(self) -> Copy:
        sizes = torch.empty(_SIZES.size, dtype=torch.uint8)
        dist.recv(sizes, self._buddy, self._group)
        length, total = _SIZES.unpack(sizes.numpy().tobytes())
        manifest = torch.empty(length, dtype=torch.uint8)
        data = self._buffer(total, pinned=self._world.device.type == "cuda")
        if not _receive(manifest, data, self._buddy, self._group):
            raise PlanariaError(f"{self._settings.where}: its copy in the memory of rank {self._buddy} came damaged")
        return Copy(manifest.numpy().tobytes(), data)

    # --- small deeds -----------------------------------------------------------------------------------------

    def _keep(self, key: Key | None) -> None:
        """Only those of this state."""
        for held in (self._own, self._wards):
            for old in [each for each in held if each != key]:
                self._spare.append(held.pop(old).data)

    def _drop(self, key: Key) -> None:
        for held in (self._own, self._wards):
            if key in held:
                self._spare.append(held.pop(key).data)

    def _give_up(self, why: str) -> None:
        self._given_up = True
        for held in (self._own, self._wards):
            held.clear()
        self._spare.clear()
        self._show(Copies.NO_ROOM)
        self._warn(f"{why}. Training goes on without")

    def _show(self, copies: Copies) -> None:
        if self._page is not None:
            self._page.copies(copies)

    def _warn(self, sentence: str) -> None:
        """Once for a group."""
        if self._world.rank == 0:
            sys.stderr.write(f"{self._settings.where}: {sentence}\n")
            sys.stderr.flush()


def _blocks(data: Tensor) -> list[Tensor]:
    return [data[low : low + BLOCK_BYTES] for low in range(0, data.numel(), BLOCK_BYTES)]


def _send(copy: Copy, peer: int, group: dist.ProcessGroup | None) -> list[Any]:
    """What waits for it to have left."""
    manifest = torch.frombuffer(bytearray(copy.manifest), dtype=torch.uint8)
    messages = [manifest, *_blocks(copy.data)]
    sums = torch.frombuffer(bytearray(b"".join(_CHECK.pack(_sum(each)) for each in messages)), dtype=torch.uint8)
    return [dist.isend(each, peer, group, tag) for tag, each in enumerate([sums, *messages])]


def _receive(manifest: Tensor, data: Tensor, peer: int, group: dist.ProcessGroup | None) -> bool:
    """Fill both. Whether they are what was sent."""
    messages = [manifest, *_blocks(data)]
    sums = torch.empty(_CHECK.size * len(messages), dtype=torch.uint8)
    coming: list[Any] = [dist.irecv(each, peer, group, tag) for tag, each in enumerate([sums, *messages])]
    for each in coming:
        each.wait()
    return sums.numpy().tobytes() == b"".join(_CHECK.pack(_sum(each)) for each in messages)


def _sum(block: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(block.numpy().data)


def free_memory() -> int:
    """Bytes that this machine, or the control group of this process, can still give."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((_LIMITS / name).read_text()) for name in ("memory.max", "memory.current"))
        facts = dict(line.split() for line in (_LIMITS / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(facts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return free  # no limit
