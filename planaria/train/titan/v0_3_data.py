"""torchtitan 0.3's data loaders, read by shard.

To its data, a job of V shards is data parallelism of degree V: shard ``v`` of a step is what torchtitan's loader of
data rank ``v`` gives next. Whoever reads it, the position is committed with the step as one integer, the *cursor*.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import default_collate
from torchtitan.config import Configurable
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader, HuggingFaceTextDataset

from planaria.errors import UsageError
from planaria.torch import ShardedStream

Batches = Iterator[tuple[Any, int]]  # torchtitan's (inputs by name, labels), with the cursor behind it


class ShardedLoader(ShardedStream, Configurable):
    """What torchtitan's Trainer gets for its data loader. A batch is a list of as many of torchtitan's as one
    forward and backward takes (several under pipeline parallelism)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        inner: Configurable.Config  # of torchtitan's data loader
        shards: int

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **kwargs: Any) -> None:
        super().__init__(self._stream, batch_size=1, collate_fn=list)
        self.seconds: list[float] = []  # spent reading, for each batch
        self._inner = config.inner
        self._shards = config.shards
        self._ranks, self._rank = dp_world_size, dp_rank  # in this group
        self._arguments = {**kwargs, "snapshot_every_n_steps": None}
        self._text: HuggingFaceTextDataset | None = None
        # Worker processes read ahead, and do not tell how far they are.
        if isinstance(config.inner, HuggingFaceTextDataLoader.Config) and config.inner.num_workers == 0:
            self._text = self.loader(0, 1).dataset

    def bind(self, shards: int, seed: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        """Every rank reads a stream of its own, so there are no batches to be parted."""
        super().bind(shards, seed)

    def loader(self, rank: int, world: int) -> Any:
        """torchtitan's own, for one data rank of ``world``."""
        return self._inner.build(dp_rank=rank, dp_world_size=world, **self._arguments)

    def _stream(self, shard: int, cursor: int) -> Batches:
        place = shard * self._ranks + self._rank, self._shards * self._ranks
        if self._text is not None:
            batches = TextShard(self._text, *place).read(cursor, self._arguments["local_batch_size"])
        else:
            batches = islice(zip(self.loader(*place), count(1), strict=False), cursor, None)
        while True:
            started = time.perf_counter()
            found = next(batches, None)
            if found is None:
                return
            self.seconds.append(time.perf_counter() - started)
            yield found


class TextShard(HuggingFaceTextDataset):
    """A shard's part of a text dataset, which can be opened at any cursor without tokenizing what lies before.

    A cursor says how many documents of the epoch were read and how many tokens of the last one are left over.
    """

    LEFT, DOCUMENTS, EPOCH = 24, 31, 8  # bits of each, 63 together

    def __init__(self, whole: HuggingFaceTextDataset, rank: int, world: int) -> None:
        self.__dict__.update(whole.__dict__)  # and no super().__init__: it would load the dataset again
        everything = whole._original_data
        if isinstance(everything, Dataset) and len(everything) < world:
            raise UsageError(f"{len(everything)} documents are too few for {world} shards, each of which needs its own")
        self._data: Any = split_dataset_by_node(everything, rank, world)
        self._original_data = self._data
        self._inputs_buffer: list[int] = []
        self._labels_buffer: list[int] = []
        self._positions_buffer: list[int] = []
        self._rest: Iterator[Any] | None = None  # of the epoch in which the shard was opened

    def read(self, cursor: int, size: int) -> Batches:
        """Batches of ``size`` samples from ``cursor`` on."""
        self._seek(cursor)
        samples = iter(self)
        while len(batch := list(islice(samples, size))) == size:
            yield default_collate(batch), self._cursor()

    def _cursor(self) -> int:
        # A sample ends in the document that was read last: nothing else can be left over.
        parts = (self._epoch, self.EPOCH), (self._sample_idx, self.DOCUMENTS), (len(self._inputs_buffer), self.LEFT)
        cursor = 0
        for value, bits in parts:
            if value >> bits:
                raise UsageError(
                    f"a shard of {self.dataset_name} has come to epoch {self._epoch}, document {self._sample_idx} and "
                    f"{len(self._inputs_buffer)} tokens left of it; a position holds {self.EPOCH}, {self.DOCUMENTS} "
                    f"and {self.LEFT} bits of these. Use more shards, or shorter documents"
                )
            cursor = cursor << bits | value
        return cursor

    def _seek(self, cursor: int) -> None:
        left = cursor & (1 << self.LEFT) - 1
        documents = cursor >> self.LEFT & (1 << self.DOCUMENTS) - 1
        epoch = cursor >> self.LEFT + self.DOCUMENTS
        before = max(documents - 1, 0)
        if isinstance(self._data, Dataset):
            buffers: dict[str, Any] = {"inputs_buffer": [], "labels_buffer": [], "positions_buffer": []}
            self.load_state_dict({**buffers, "sample_idx": documents, "epoch": epoch})  # shuffles as for that epoch
            rest = iter(self._data.skip(before))
        else:
            self._data.set_epoch(epoch)
            # Read and dropped: skip() of a stream counts before it is split among shards.
            rest = islice(iter(self._data), before, None)
        self._epoch, self._sample_idx = epoch, documents
        if documents:
            last, self._rest = self._text_processor(next(rest)), rest
            tokens = self._tokenizer.encode(last, add_bos=True, add_eos=True)
            start = len(tokens) - 1 - left
            self._inputs_buffer = tokens[start:-1]
            self._labels_buffer = tokens[start + 1 :]
            self._positions_buffer = list(range(start, len(tokens) - 1))

    def _get_data_iter(self) -> Iterator[Any]:
        rest, self._rest = self._rest, None
        found: Iterator[Any] = super()._get_data_iter() if rest is None else rest
        return found
