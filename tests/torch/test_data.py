"""A shard's samples depend on nothing but the job; streams give back exactly what was not committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from planaria.errors import ProtocolError, UsageError
from planaria.torch.data import ShardedDataset, ShardedSource, ShardedStream
from planaria.torch.random import seed_shard


class Numbers:
    """Sample i is i; remembers how it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def bound(length: int, shards: int, batch: int, **options: Any) -> ShardedDataset:
    data = ShardedDataset(Numbers(length), batch, **options)
    data.bind(shards, seed=5)
    return data


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30))


@given(SIZES, st.integers(1, 4))
def test_every_sample_exactly_once_an_epoch(sizes: tuple[int, int, int, int], epochs: int) -> None:
    shards, batch, micro, more = sizes
    length = shards * batch * micro + more
    data = bound(length, shards, batch, micro_batches=micro)
    steps = -(-epochs * length // (shards * batch * micro))
    row = [i for step in range(steps) for shard in range(shards) for i in data.sample_ids(step, shard)]
    for epoch in range(epochs):
        assert sorted(row[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(SIZES, st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), max_size=10))
def test_order_of_asking_does_not_matter(sizes: tuple[int, int, int, int], asked: list[tuple[int, int]]) -> None:
    shards, batch, micro, more = sizes
    data = bound(shards * batch * micro + more, shards, batch, micro_batches=micro)
    for step, shard in asked:
        fresh = bound(shards * batch * micro + more, shards, batch, micro_batches=micro)
        assert data.sample_ids(step, shard % shards) == fresh.sample_ids(step, shard % shards)


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    data = bound(64, 2, 32)
    epochs = [tuple(data.sample_ids(step, 0) + data.sample_ids(step, 1)) for step in range(4)]
    assert len(set(epochs)) == 4
    other = ShardedDataset(Numbers(64), 32, seed=6)
    other.bind(2, seed=5)
    assert other.sample_ids(0, 0) != data.sample_ids(0, 0)
    own = ShardedDataset(Numbers(64), 32, seed=5)
    own.bind(2, seed=99)
    assert own.seed == 5 and own.sample_ids(0, 0) == data.sample_ids(0, 0)


def test_a_seed_of_zero_is_a_seed() -> None:
    data = ShardedDataset(Numbers(64), 32, seed=0)
    data.bind(2, seed=5)
    assert data.seed == 0


def test_the_global_generator_is_left_alone_and_not_used() -> None:
    torch.manual_seed(0)
    first = bound(64, 2, 8).sample_ids(0, 1)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))
    assert bound(64, 2, 8).sample_ids(0, 1) == first


def test_without_shuffle_the_dataset_in_its_order() -> None:
    data = bound(10, 2, 2, shuffle=False)
    assert [data.sample_ids(step, shard) for step in range(3) for shard in range(2)] == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1],
    ]  # fmt: skip


def test_micro_batches_are_the_shard_in_pieces() -> None:
    data = bound(100, 3, 4, micro_batches=2)
    batches = list(data.batches(5, 1))
    assert [batch.tolist() for batch in batches] == [data.sample_ids(5, 1)[:4], data.sample_ids(5, 1)[4:]]
    assert data.samples_per_shard == 8 and data.micro_batches == 2


def test_collates_like_a_dataloader() -> None:
    data = ShardedDataset(TensorDataset(torch.arange(8.0), torch.arange(8)), 4, shuffle=False)
    data.bind(2)
    ((x, y),) = data.batches(0, 1)
    assert torch.equal(x, torch.arange(4.0, 8.0)) and torch.equal(y, torch.arange(4, 8))
    lists = ShardedDataset(Numbers(8), 4, collate_fn=list, shuffle=False)
    lists.bind(2)
    assert next(lists.batches(0, 0)) == [0, 1, 2, 3]


def test_many_items_at_once_where_the_dataset_can() -> None:
    class Fetches(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [100 + index for index in indices]

    data = ShardedDataset(Fetches(8), 4, collate_fn=list, shuffle=False)
    data.bind(2)
    assert next(data.batches(0, 0)) == [100, 101, 102, 103]


def test_augmentation_depends_on_the_place_only() -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(())

    def shard(step: int, number: int) -> torch.Tensor:
        data = ShardedDataset(Noisy(64), 4, micro_batches=2)
        data.bind(4)
        seed_shard(0, step, number)
        return torch.cat(list(data.batches(step, number)))

    first = shard(2, 1)
    shard(7, 3)
    assert torch.equal(shard(2, 1), first)
    assert not torch.equal(shard(2, 2), first)


def test_smaller_than_a_step() -> None:
    data = ShardedDataset(Numbers(15), 4, micro_batches=2)
    with pytest.raises(UsageError, match=r"has 15 samples but one step needs 16 \(2 shards of 2 batches of 4\)"):
        data.bind(2)


def test_bad_sizes_and_shards() -> None:
    with pytest.raises(UsageError, match="batch_size is 0"):
        ShardedDataset(Numbers(4), 0)
    with pytest.raises(UsageError, match="micro_batches is -1"):
        ShardedStream(count, 1, micro_batches=-1)
    with pytest.raises(ProtocolError, match="bound to 0 shards"):
        ShardedDataset(Numbers(4), 1).sample_ids(0, 0)


def test_both_kinds_are_sources() -> None:
    sources: list[ShardedSource] = [bound(8, 2, 2), ShardedStream(count, 2)]
    for source in sources:
        source.bind(2, seed=1)
        list(source.batches(0, 1))
        source.commit({1: source.cursor_after(1)})
        assert source.samples_per_shard == 2


# --- streams --------------------------------------------------------------------------------------------------


def count(shard: int, cursor: int) -> Iterator[tuple[int, int]]:
    """Shard v has the samples 1000 v, 1000 v + 1, …"""
    while True:
        yield 1000 * shard + cursor, cursor + 1
        cursor += 1


def upto(end: int) -> Any:
    def open_(shard: int, cursor: int) -> Iterator[tuple[int, int]]:
        return iter([(1000 * shard + at, at + 1) for at in range(cursor, end)])

    return open_


def stream(shards: int = 2, batch: int = 2, **options: Any) -> ShardedStream:
    made = ShardedStream(options.pop("open", count), batch, collate_fn=list, **options)
    made.bind(shards)
    return made


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), max_size=8))
def test_committed_samples_are_a_row_without_gaps(steps: list[list[tuple[int, int]]]) -> None:
    """Three groups read shards as they like, some twice, some in vain; one of the reads is committed."""
    groups = [stream(3) for _ in range(3)]
    seen: Counter[int] = Counter()
    for step, reads in enumerate(steps):
        cursors, samples = {}, {}
        for group, shard in reads:
            samples[shard] = [i for batch in groups[group].batches(step, shard) for i in batch]
            cursors[shard] = groups[group].cursor_after(shard)
        for group in groups:
            group.commit(cursors)
        for part in samples.values():
            seen.update(part)
    committed = groups[0].state_dict()["cursors"]
    assert all(group.state_dict()["cursors"] == committed for group in groups)
    expected = [1000 * shard + at for shard in range(3) for at in range(committed[shard])]
    assert seen == Counter(expected)


def test_uncommitted_reads_are_given_again() -> None:
    data = stream(micro_batches=2)
    assert list(data.batches(0, 1)) == [[1000, 1001], [1002, 1003]]
    assert list(data.batches(0, 1)) == [[1000, 1001], [1002, 1003]]
    data.commit({1: data.cursor_after(1)})
    assert list(data.batches(1, 1)) == [[1004, 1005], [1006, 1007]]


def test_a_shard_given_up_half_way_leaves_nothing() -> None:
    data = stream(micro_batches=2)
    iterator = data.batches(0, 0)
    next(iterator)
    with pytest.raises(ProtocolError, match="shard 0 were not read to their end"):
        data.cursor_after(0)
    assert list(data.batches(0, 0)) == [[0, 1], [2, 3]]


def test_the_cursor_is_known_with_the_last_batch() -> None:
    data = stream(micro_batches=2)
    iterator = data.batches(0, 0)
    next(iterator), next(iterator)
    assert data.cursor_after(0) == 4


def test_opened_once_while_the_shard_stays() -> None:
    opened: list[tuple[int, int]] = []

    def open_(shard: int, cursor: int) -> Iterator[tuple[int, int]]:
        opened.append((shard, cursor))
        return count(shard, cursor)

    data = stream(open=open_)
    for step in range(3):
        list(data.batches(step, 0))
        data.commit({0: data.cursor_after(0), 1: 2 * step + 2})  # another group reads shard 1
    list(data.batches(3, 1))  # inherited
    assert opened == [(0, 0), (1, 6)]


def test_a_shard_read_elsewhere_in_between_is_opened_anew() -> None:
    data = stream()
    list(data.batches(0, 0))
    data.commit({0: 10})
    assert list(data.batches(1, 0)) == [[10, 11]]


def test_state_goes_to_another_group() -> None:
    data, other = stream(), stream()
    list(data.batches(0, 0))
    list(other.batches(0, 0))
    data.commit({0: data.cursor_after(0)})
    other.load_state_dict(data.state_dict())
    assert list(other.batches(1, 0)) == list(data.batches(1, 0)) == [[2, 3]]
    fresh = ShardedStream(count, 2, collate_fn=list)
    fresh.load_state_dict(data.state_dict())
    fresh.bind(2)
    assert list(fresh.batches(1, 0)) == [[2, 3]]
    with pytest.raises(UsageError, match="2 shards but the job has 4"):
        fresh.bind(4)
    with pytest.raises(UsageError, match="3 shards but the job has 2"):
        fresh.load_state_dict({"cursors": [0, 0, 0]})


def test_the_end_of_a_stream() -> None:
    data = stream(open=upto(3))
    with pytest.raises(UsageError, match=r"step 4: the stream of shard 1 ended at cursor 3.*repeat=True"):
        data.commit({1: 2})
        list(data.batches(4, 1))
    again = stream(open=upto(3), repeat=True)
    again.commit({1: 2})
    assert list(again.batches(4, 1)) == [[1002, 1000]]
    assert again.cursor_after(1) == 1
    with pytest.raises(UsageError, match="has no samples"):
        list(stream(open=upto(0), repeat=True).batches(0, 0))


def test_an_error_while_reading_is_not_remembered() -> None:
    broken = [True]

    def open_(shard: int, cursor: int) -> Iterator[tuple[int, int]]:
        yield cursor, cursor + 1
        if broken[0]:
            raise OSError("disk")
        yield from count(shard, cursor + 1)

    data = stream(open=open_)
    with pytest.raises(OSError, match="disk"):
        list(data.batches(0, 0))
    broken[0] = False
    assert list(data.batches(0, 0)) == [[0, 1]]


def test_shards_that_are_not_there() -> None:
    with pytest.raises(ProtocolError, match="shard 2 was named but the data is bound to 2"):
        stream().commit({2: 1})
