"""A checkpoint on disk, and what its manifest says.

::

    step-00000120/
        rank0.safetensors           the tensors that rank 0 of the group wrote, in the safetensors format
        rank0.json                  rank 0's plain data, as in healing
        checkpoint.json             the manifest: sizes and checksums of all of it
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from planaria.errors import UsageError
from planaria.rank.durable import MANIFEST, damaged, unreadable

VERSION = 1
_FILE = re.compile(r"rank[0-9]{1,9}\.(safetensors|json)")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a part of a tensor lies in a checkpoint."""

    file: str
    start: int  # byte in the file
    checksum: str  # xxh3_128


@dataclass(frozen=True, slots=True)
class Whole:
    """A complete file of a checkpoint."""

    size: int
    head: int  # bytes at its beginning that are no tensors (they have checksums of their own): of plain data, all
    checksum: str  # xxh3_128 of these


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a manifest says. ``tensors``: dtype and shape, and the parts by their offsets in the whole."""

    path: Path
    job: str
    step: int
    seed: int
    shards: int
    ranks: int  # of the group that wrote it
    fingerprint: tuple[tuple[str, str], ...] = ()
    files: dict[str, Whole] = field(default_factory=dict)
    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    stored: dict[MetadataIndex, Stored] = field(default_factory=dict)

    def encode(self) -> bytes:
        tensors = {
            name: [
                dtype_name(meta.properties.dtype),
                list(meta.size),
                [[list(c.offsets), list(c.sizes), *self._place(name, c)] for c in meta.chunks],
            ]
            for name, meta in self.tensors.items()
        }
        body = {
            "version": VERSION,
            "job": self.job,
            "step": self.step,
            "seed": self.seed,
            "shards": self.shards,
            "ranks": self.ranks,
            "fingerprint": dict(self.fingerprint),
            "files": {name: [whole.size, whole.head, whole.checksum] for name, whole in self.files.items()},
            "tensors": tensors,
        }
        return _dump({"checksum": xxhash.xxh3_128_hexdigest(_dump(body)), "checkpoint": body})

    def _place(self, name: str, chunk: ChunkStorageMetadata) -> tuple[str, int, str]:
        stored = self.stored[MetadataIndex(name, chunk.offsets)]
        return stored.file, stored.start, stored.checksum

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """The checkpoint in the directory ``path``; its files are there and have their sizes. Raises UsageError."""
        manifest = path / MANIFEST
        try:
            found = _decode(path, manifest.read_bytes())
        except FileNotFoundError:
            raise UsageError(
                f"{path} has no {MANIFEST}, so it is no complete checkpoint of Planaria; move it away"
            ) from None
        except OSError as error:
            raise unreadable(manifest, error) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise damaged(manifest, "it does not hold what a manifest holds") from None
        for name, whole in found.files.items():
            try:
                size = (path / name).stat().st_size
            except OSError as error:
                raise unreadable(path / name, error) from None
            if size != whole.size:
                raise damaged(path / name, f"it has {size} bytes, its manifest says {whole.size}")
        return found

    def head_of(self, name: str) -> bytes:
        """The beginning of a file, up to its tensors if it has any. Raises UsageError if it is damaged."""
        try:
            with (self.path / name).open("rb") as file:
                data = file.read(self.files[name].head)
        except OSError as error:
            raise unreadable(self.path / name, error) from None
        if xxhash.xxh3_128_hexdigest(data) != self.files[name].checksum:
            raise damaged(self.path / name, "its checksum is not that of its manifest")
        return data


def _decode(path: Path, data: bytes) -> Checkpoint:
    """Raises ValueError and its like for anything that ``encode`` did not make."""
    outer = json.loads(data)
    body = outer["checkpoint"]
    if outer["checksum"] != xxhash.xxh3_128_hexdigest(_dump(body)):
        raise ValueError("checksum")
    if body["version"] != VERSION:
        raise UsageError(f"{path / MANIFEST} is of version {body['version']}, this release reads {VERSION}")
    files = {
        _file_name(name): Whole(_count(size), _count(head), str(checksum))
        for name, (size, head, checksum) in body["files"].items()
    }
    tensors, stored = {}, {}
    for name, (kind, shape, parts) in body["tensors"].items():
        dtype, chunks = dtype_named(kind), []
        for offsets, sizes, file, start, checksum in parts:
            chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
            if _count(start) + math.prod(sizes) * dtype.itemsize > files[file].size:
                raise ValueError("a part beyond the end of its file")
            chunks.append(chunk)
            stored[MetadataIndex(name, chunk.offsets)] = Stored(file, start, str(checksum))
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype), _size(shape), chunks)
    numbers = [_count(body[key]) for key in ("step", "seed", "shards", "ranks")]
    prints = tuple(sorted((str(key), str(value)) for key, value in body["fingerprint"].items()))
    if any(f"rank{rank}.json" not in files for rank in range(numbers[3])):
        raise ValueError("a rank without plain data")
    step, seed, shards, ranks = numbers
    return Checkpoint(path, str(body["job"]), step, seed, shards, ranks, prints, files, tensors, stored)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def _size(values: Any) -> torch.Size:
    return torch.Size([_count(value) for value in values])


def _file_name(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise ValueError(name)
    return name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    dtype = getattr(torch, name) if type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(name)
    return dtype
