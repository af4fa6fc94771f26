"""How a checkpoint's files are written and read, for torch.distributed.checkpoint.

It plans who writes which part of a tensor, and who reads what into another layout. Its own files hold pickles, so the
writer and the reader are ours: reading makes numbers, strings and tensors, and runs nothing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from planaria.files import sync_directory
from planaria.rank.durable import MANIFEST, damaged, make_held, sweep, unreadable
from planaria.torch.checkpoint_files import Checkpoint, Stored, Whole, dtype_name

# What is hashed is written while it is still in the cache.
_SLICE = 1 << 20
# Names of dtypes in safetensors. Others are written as their bytes: we know better, and readers get what they can.
_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host."""
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


class _Output:
    """A new file that is on the disk when the context ends well."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self.size = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, data: bytes | memoryview) -> str:
        """Returns the checksum of ``data``."""
        hasher = xxhash.xxh3_128()
        rest = memoryview(data)
        while rest:
            part = rest[:_SLICE]
            hasher.update(part)
            while part:
                part = part[self._file.write(part) :]
            rest = rest[_SLICE:]
        self.size += len(data)
        return hasher.hexdigest()


class CheckpointWriter(StorageWriter):
    """One rank's part in one save. ``about`` is the checkpoint as far as it is known before: its path, and no files.

    Every rank of the group has one; rank 0, the coordinator, makes the directory and gives it its name.
    """

    def __init__(self, about: Checkpoint, owner: str, rank: int, plain_data: bytes) -> None:
        self._about = about
        self._partial = about.path.with_name(f"{about.path.name}.partial-{owner}")
        self._rank = rank
        self._plain_data = plain_data
        self._held = -1  # the directory, locked

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        sweep(self._partial.parent)
        self._held = make_held(self._partial)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = [*self._write_tensors(plan.items, planner), self._write_plain()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_tensors(self, items: Sequence[WriteItem], planner: SavePlanner) -> Iterable[WriteResult]:
        name = f"rank{self._rank}.safetensors"
        with _Output(self._partial / name) as file:
            header = _header(items)
            checksum = file.write(header)
            for item in items:
                start = file.size
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)  # all that our pieces ask to write
                yield WriteResult(item.index, tensor.nbytes, Stored(name, start, file.write(memory_of(tensor))))
            whole = Whole(file.size, len(header), checksum)
        yield WriteResult(MetadataIndex(name), whole.size, whole)

    def _write_plain(self) -> WriteResult:
        name = f"rank{self._rank}.json"
        with _Output(self._partial / name) as file:
            checksum = file.write(self._plain_data)
        return WriteResult(MetadataIndex(name), file.size, Whole(file.size, file.size, checksum))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files, stored = {}, {}
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, Whole):
                files[result.index.fqn] = result.storage_data
            else:
                stored[result.index] = result.storage_data
        tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        complete = replace(self._about, files=files, tensors=tensors, stored=stored)
        with _Output(self._partial / MANIFEST) as file:
            file.write(complete.encode())
        sync_directory(self._partial)
        if not complete.path.exists():  # two groups may have been first in the quorum at the same step
            self._partial.rename(complete.path)
            sync_directory(complete.path.parent)

    def close(self) -> None:
        """Let go of the directory, and remove it if it did not get its name. To be called in any case."""
        if self._held >= 0:
            shutil.rmtree(self._partial, ignore_errors=True)
            os.close(self._held)
            self._held = -1

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _header(items: Sequence[WriteItem]) -> bytes:
    """The safetensors header: eight bytes of length, then JSON with every tensor's dtype, shape and place."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for item in items:
        data = item.tensor_data
        assert data is not None
        shape, dtype = list(data.chunk.sizes), data.properties.dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        known = _SAFETENSORS.get(dtype_name(dtype))
        entries[item.index.fqn] = {
            "dtype": known or "U8",
            "shape": shape if known else [end - start],
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that tensors lie aligned
    return len(text).to_bytes(8, "little") + text


class CheckpointReader(StorageReader):
    """Reads the parts of tensors that a plan asks for. What is read is checked before it is used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self) -> Metadata:
        return Metadata(dict(self._checkpoint.tensors))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises UsageError naming the file, and the tensor, that is damaged."""
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for name in {self._checkpoint.stored[index].file for index in wanted}:
            self._checkpoint.head_of(name)
        for index, items in wanted.items():
            self._read(index, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, index: MetadataIndex, items: list[ReadItem], planner: LoadPlanner) -> None:
        meta = self._checkpoint.tensors[index.fqn]
        (chunk,) = (chunk for chunk in meta.chunks if chunk.offsets == index.offset)
        target = planner.resolve_tensor(items[0])
        straight = len(items) == 1 and target.shape == chunk.sizes and target.is_contiguous()
        read = target if straight else torch.empty(chunk.sizes, dtype=meta.properties.dtype, device="cpu")
        self._fill(memory_of(read), index)
        if not straight:
            for item in items:
                part = read
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(part)

    def _fill(self, memory: memoryview, index: MetadataIndex) -> None:
        stored = self._checkpoint.stored[index]
        path = self._checkpoint.path / stored.file
        hasher = xxhash.xxh3_128()
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(stored.start)
                while memory:
                    count = file.readinto(memory[:_SLICE])
                    if not count:
                        raise damaged(path, f"it ends in the middle of {index.fqn}")
                    hasher.update(memory[:count])
                    memory = memory[count:]
        except OSError as error:
            raise unreadable(path, error) from None
        if hasher.hexdigest() != stored.checksum:
            raise damaged(path, f"the checksum of {index.fqn} is not that of the manifest")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
