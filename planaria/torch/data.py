"""Data whose batches belong to shards, not to groups.

What shard ``v`` of step ``s`` consists of depends on nothing but the job: any group can compute it, at any time,
again. So no sample is lost with a group, and none is used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from planaria.errors import ProtocolError, UsageError
from planaria.torch.random import epoch_seed


class MapDataset(Protocol):
    """Anything with a length and samples by index (torch calls it map-style)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShardedSource(Protocol):
    """What a step needs of its data; both classes below have it."""

    @property
    def micro_batches(self) -> int: ...

    @property
    def samples_per_shard(self) -> int: ...

    def bind(self, shards: int, seed: int = 0, part: tuple[int, int] = (0, 1)) -> None: ...

    def batches(self, step: int, shard: int, steps: int = 1) -> Iterator[Any]: ...

    def cursor_after(self, shard: int) -> int: ...

    def commit(self, cursors: Mapping[int, int]) -> None: ...


class ShardedDataset:
    """Batches of a map-style dataset as a pure function of (seed, step, shard).

    All samples of all epochs stand in one endless row: epoch ``e`` is a permutation of the dataset drawn from a
    ``torch.Generator`` seeded with ``epoch_seed(seed, e)`` (or the dataset's own order with ``shuffle=False``).
    Shard ``v`` of step ``s`` is the ``(s * shards + v)``-th run of ``samples_per_shard`` samples in that row, so
    every sample is used exactly once an epoch; a step may lie across the end of one.

    Args:
        dataset: ``__len__`` and ``__getitem__``; ``__getitems__(list of indices)`` is used where it exists.
        batch_size: samples in a micro-batch of a group. In a group of several ranks that share the data (FSDP), each
            is given its equal part of them.
        seed: None for the job's.
        micro_batches: batches in a shard, whose gradients are accumulated in order.
        collate_fn: list of samples to batch.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        seed: int | None = None,
        micro_batches: int = 1,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        shuffle: bool = True,
    ) -> None:
        _positive(batch_size=batch_size, micro_batches=micro_batches)
        self.dataset = dataset
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.shuffle = shuffle
        self._own_seed = seed
        self._seed = seed or 0
        self._collate = collate_fn
        self._shards = 0
        self._part = (0, 1)
        self._epochs: dict[int, Tensor] = {}  # the permutations in use: a shard can touch neighbours

    @property
    def samples_per_shard(self) -> int:
        return self.batch_size * self.micro_batches

    @property
    def seed(self) -> int:
        """The seed in use: the dataset's own, else the job's."""
        return self._seed

    def bind(self, shards: int, seed: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        """Tell the number of shards, the job's seed, and (index, count) of the part of every batch that this rank
        takes. Raises UsageError if the dataset is smaller than a step, or a batch cannot be parted."""
        _check_part(self.batch_size, part)
        needed = shards * self.samples_per_shard
        if len(self.dataset) < needed:
            raise UsageError(
                f"the dataset has {len(self.dataset)} samples but one step needs {needed} ({shards} shards of "
                f"{self.micro_batches} batches of {self.batch_size}); take smaller or fewer batches, or more data"
            )
        self._shards, self._part = shards, part
        self._seed = seed if self._own_seed is None else self._own_seed
        self._epochs.clear()

    def sample_ids(self, step: int, shard: int) -> list[int]:
        """Indices into the dataset of the shard's samples, in order; ``samples_per_shard`` of them."""
        if not 0 <= shard < self._shards:
            raise ProtocolError(f"shard {shard} was asked for but the data is bound to {self._shards} shards")
        first = (step * self._shards + shard) * self.samples_per_shard
        missing = self.samples_per_shard
        ids: list[int] = []
        while missing:
            epoch, offset = divmod(first, len(self.dataset))
            part: list[int] = self._permutation(epoch)[offset : offset + missing].tolist()
            ids += part
            first += len(part)
            missing -= len(part)
        return ids

    def batches(self, step: int, shard: int, steps: int = 1) -> Iterator[Any]:
        """The shard's ``micro_batches`` batches, of each of ``steps`` steps in a row. Samples are read when their batch
        is asked for, so random augmentations draw from generators seeded for the shard."""
        for each in range(step, step + steps):
            yield from self._batches_of(self.sample_ids(each, shard))

    def _batches_of(self, ids: list[int]) -> Iterator[Any]:
        fetch_many = getattr(self.dataset, "__getitems__", None)
        for start in range(0, len(ids), self.batch_size):
            chunk = _part_of(ids[start : start + self.batch_size], self._part)
            samples = fetch_many(chunk) if fetch_many else [self.dataset[index] for index in chunk]
            yield self._collate(samples)

    def cursor_after(self, shard: int) -> int:
        """Always 0: the position follows from the step."""
        return 0

    def commit(self, cursors: Mapping[int, int]) -> None:
        """Nothing to do: there is no position to keep."""

    def _permutation(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            # Two, because shards of one step can lie on both sides of an epoch's end.
            while len(self._epochs) >= 2:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._draw(epoch)
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset), device="cpu")
        # A generator on the CPU whatever torch.set_default_device says: the order must not depend on the device.
        generator = torch.Generator("cpu").manual_seed(epoch_seed(self._seed, epoch))
        return torch.randperm(len(self.dataset), generator=generator, device="cpu")


Opener = Callable[[int, int], Iterator[tuple[Any, int]]]


class ShardedStream:
    """Batches of an iterable that every shard reads on its own, from a position that is committed with the step.

    Args:
        open: ``open(shard, cursor)`` returns an iterator of ``(sample, next_cursor)`` from the position ``cursor``
            on, 0 being the start. A cursor is any int that fits in 64 bits with sign: a line, a byte offset, a
            sample number. Opening at the ``next_cursor`` of a sample must go on with the sample after it.
        batch_size, micro_batches, collate_fn: as for :class:`ShardedDataset`.
        repeat: start at cursor 0 again when a shard's stream ends; without it that is a UsageError.

    Protect it (``job.protect(..., data=stream)``): the committed cursors of all shards are state. What was read
    but not committed is read again.
    """

    def __init__(
        self,
        open: Opener,
        batch_size: int,
        micro_batches: int = 1,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        repeat: bool = False,
    ) -> None:
        _positive(batch_size=batch_size, micro_batches=micro_batches)
        self.batch_size = batch_size
        self.micro_batches = micro_batches
        self.repeat = repeat
        self._open = open
        self._collate = collate_fn
        self._part = (0, 1)
        self._committed: list[int] = []
        self._read: dict[int, int] = {}  # cursor after the shard's last complete read, committed or not
        self._iterators: dict[int, Iterator[tuple[Any, int]]] = {}  # standing at that cursor

    @property
    def samples_per_shard(self) -> int:
        return self.batch_size * self.micro_batches

    def bind(self, shards: int, seed: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        """Tell the number of shards, and (index, count) of the part of every batch that this rank takes. Every stream
        starts at 0 unless a state was loaded before. The seed is not used: the order of a stream is that of
        ``open``."""
        _check_part(self.batch_size, part)
        self._part = part
        if not self._committed:
            self._committed = [0] * shards
        elif len(self._committed) != shards:
            raise UsageError(f"the stream's state has {len(self._committed)} shards but the job has {shards}")

    def batches(self, step: int, shard: int, steps: int = 1) -> Iterator[Any]:
        """The shard's batches of ``steps`` steps from its committed cursor on. ``step`` only names the place in
        errors."""
        cursor = self._cursor(shard)
        # The iterator is out of the cache while it is read: if reading fails or is given up, nothing is left over.
        iterator, read = self._iterators.pop(shard, None), self._read.pop(shard, None)
        if iterator is None or read != cursor:
            iterator = iter(self._open(shard, cursor))
        last = steps * self.micro_batches - 1
        for micro in range(last + 1):
            samples: list[Any] = []
            while len(samples) < self.batch_size:
                iterator, sample, cursor = self._next(iterator, step, shard, cursor)
                samples.append(sample)
            if micro == last:  # before the last yield: its consumer may not come back for more
                self._iterators[shard], self._read[shard] = iterator, cursor
            yield self._collate(_part_of(samples, self._part))

    def cursor_after(self, shard: int) -> int:
        """Where the shard's stream stands after its batches of this step. Raises ProtocolError if they were not all
        read."""
        if shard not in self._read:
            raise ProtocolError(f"the batches of shard {shard} were not read to their end")
        return self._read[shard]

    def commit(self, cursors: Mapping[int, int]) -> None:
        """Make the cursors of the step's shards, whoever read them, the state."""
        for shard, cursor in cursors.items():
            self._cursor(shard)
            self._committed[shard] = cursor
        for shard in [shard for shard, read in self._read.items() if read != self._committed[shard]]:
            del self._read[shard], self._iterators[shard]  # another group reads this shard now

    def state_dict(self) -> dict[str, Any]:
        """The committed cursor of every shard."""
        return {"cursors": list(self._committed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take committed cursors; open iterators elsewhere are dropped when their shard is read next."""
        cursors = list(state["cursors"])
        if self._committed and len(cursors) != len(self._committed):
            raise UsageError(f"the given state has {len(cursors)} shards but the job has {len(self._committed)}")
        self._committed = cursors

    def _cursor(self, shard: int) -> int:
        if not 0 <= shard < len(self._committed):
            raise ProtocolError(f"shard {shard} was named but the data is bound to {len(self._committed)} shards")
        return self._committed[shard]

    def _next(
        self, iterator: Iterator[tuple[Any, int]], step: int, shard: int, cursor: int
    ) -> tuple[Iterator[tuple[Any, int]], Any, int]:
        """(iterator, sample, cursor after it); the iterator is a new one where the stream began again."""
        item = next(iterator, None)
        if item is not None:
            return iterator, *item
        if not self.repeat:
            raise UsageError(
                f"step {step}: the stream of shard {shard} ended at cursor {cursor}; take fewer steps, give it more "
                "data, or use ShardedStream(..., repeat=True)"
            )
        iterator = iter(self._open(shard, 0))
        item = next(iterator, None)
        if item is not None:
            return iterator, *item
        raise UsageError(f"step {step}: the stream of shard {shard} has no samples")


def _check_part(batch_size: int, part: tuple[int, int]) -> None:
    if batch_size % part[1]:
        raise UsageError(
            f"a batch of {batch_size} samples cannot be shared equally by {part[1]} ranks of a group; take a multiple "
            f"of {part[1]}"
        )


def _part_of(batch: list[Any], part: tuple[int, int]) -> list[Any]:
    """A rank's part of a batch: a run of samples, so that the parts in order of ranks are the batch."""
    index, count = part
    size = len(batch) // count
    return batch[index * size : (index + 1) * size]


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
