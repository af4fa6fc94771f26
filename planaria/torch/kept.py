"""Copies of a rank's part of the shared state, in memory that outlives its process (planaria/engines/keeping.py).

There are two files, of which the one with the older copy is written: whoever is killed in the middle of that leaves the
other whole. A copy begins with a head that says whose it is and of which state, and has checksums of all of it; what
does not match is no copy. What is read is plain data and bytes of tensors; nothing of it is executed.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from planaria.core.messages import NO_QUORUM, QuorumId
from planaria.errors import ProtocolError
from planaria.exchange.healing import Range
from planaria.torch import plain
from planaria.torch.buddies import Key, free_memory
from planaria.torch.parts import TensorSpec

_MAGIC = b"PLANKEPT"
# Magic, whose, step, quorum, bytes of the description and of the tensors, checksum of both.
_HEAD = struct.Struct("<8s16sqQQQQ16s")
_CHECK = struct.Struct("<Q")  # of the head
_BODY = 128  # where the description begins; the tensors begin at the next multiple of 64
_ALIGNMENT = 64


def read_paths(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The files of this rank's place, if there are any."""
    return [Path(each) for each in environ.get("PLANARIA_KEPT", "").split(":") if each]


def age(key: Key) -> tuple[QuorumId, int]:
    """By which states are ordered as they were made: of a branch that was given up there may be later steps."""
    return key[1], key[0]


class Kept:
    """``whose``: two ranks that say the same run the same job, and are the same rank of the same group. Methods are for
    one thread at a time. OSError if a file cannot be opened."""

    def __init__(self, paths: Sequence[Path], whose: bytes) -> None:
        self._whose = xxhash.xxh3_128_digest(whose)
        self._files = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        self._mapped: list[Tensor | None] = [None] * len(self._files)
        self._keys: list[Key | None] = [None] * len(self._files)  # as far as this process knows

    def whole(self) -> list[Key]:
        """Of the copies that are whole, and this rank's own."""
        self._keys = [self._key(index) for index in range(len(self._files))]
        return [key for key in self._keys if key is not None]

    def write(self, key: Key, body: Any, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> bool:
        """``tensors``: in wire form, of these ``specs``, in main memory. False if there is no room for them."""
        index = min(range(len(self._files)), key=self._worth)
        said = plain.dump({"body": body, "tensors": [spec.to_list() for spec in specs]})
        span, start = Range(tuple(each.nbytes for each in tensors)), _start(len(said))
        memory = self._room(index, start + span.total)
        if memory is None:
            return False
        self._keys[index] = None
        memory[:_BODY] = 0
        memory[_BODY : _BODY + len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        for each, (low, high) in zip(tensors, span.places(), strict=True):
            if each.numel():
                memory[start + low : start + high].copy_(each.detach().reshape(-1).view(torch.uint8))
        digest = _digest(memory, len(said), span.total)
        step, under = key
        numbers = (step, under.epoch, under.number, len(said), span.total)
        head = _HEAD.pack(_MAGIC, self._whose, *numbers, digest)
        head += _CHECK.pack(xxhash.xxh3_64_intdigest(head))
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._keys[index] = key
        return True

    def read(self, key: Key) -> tuple[Any, list[Tensor], list[TensorSpec]] | None:
        """Body, tensors (good until the next ``write``) and their specs; None if that copy is not there any more."""
        self.whole()
        if key not in self._keys:
            return None
        index = self._keys.index(key)
        memory = self._mapped[index]
        assert memory is not None
        length = _HEAD.unpack(memory[: _HEAD.size].numpy().tobytes())[5]
        try:
            said = plain.load(memory[_BODY : _BODY + length].numpy().tobytes())
            specs = [TensorSpec.from_list(item) for item in said["tensors"]]
        except (ProtocolError, KeyError, TypeError):
            return None
        data = memory[_start(length) :]
        places = Range(tuple(math.prod(spec.wire_shape) * spec.dtype.itemsize for spec in specs)).places()
        tensors = [
            data[a:b].view(spec.dtype).reshape(spec.wire_shape) for spec, (a, b) in zip(specs, places, strict=True)
        ]
        return said["body"], [spec.view(each) for spec, each in zip(specs, tensors, strict=True)], specs

    def _worth(self, index: int) -> tuple[QuorumId, int]:
        key = self._keys[index]
        return (NO_QUORUM, -1) if key is None else age(key)

    def _key(self, index: int) -> Key | None:
        size = os.fstat(self._files[index]).st_size
        memory = self._map(index, size) if size >= _BODY else None
        if memory is None:
            return None
        raw = memory[: _HEAD.size + _CHECK.size].numpy().tobytes()
        magic, whose, step, epoch, number, length, total, digest = _HEAD.unpack_from(raw)
        good = _CHECK.unpack_from(raw, _HEAD.size) == (xxhash.xxh3_64_intdigest(raw[: _HEAD.size]),)
        if not good or magic != _MAGIC or whose != self._whose or _start(length) + total > size:
            return None
        return (step, QuorumId(epoch, number)) if _digest(memory, length, total) == digest else None

    def _room(self, index: int, size: int) -> Tensor | None:
        there = os.fstat(self._files[index]).st_size
        if size > there:
            # Training needs some of what is free, and the other ranks of the node look at the same moment.
            if size - there > free_memory() // 2:
                return None
            try:
                os.ftruncate(self._files[index], size)
            except OSError:  # a limit on files
                return None
            self._mapped[index] = None
        return self._map(index, max(size, there))

    def _map(self, index: int, size: int) -> Tensor | None:
        known = self._mapped[index]
        if known is None or known.numel() != size:
            try:
                known = torch.frombuffer(mmap.mmap(self._files[index], size), dtype=torch.uint8)
            except OSError:  # a limit on addresses
                return None
            self._mapped[index] = known
        return known


def _start(length: int) -> int:
    return -(-(_BODY + length) // _ALIGNMENT) * _ALIGNMENT


def _digest(memory: Tensor, length: int, total: int) -> bytes:
    hasher = xxhash.xxh3_128(memory[_BODY : _BODY + length].numpy().data)
    hasher.update(memory[_start(length) : _start(length) + total].numpy().data)
    return hasher.digest()
