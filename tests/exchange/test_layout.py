"""Packing parameters into buckets: nothing lost, nothing overlapping, the last parameter first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.exchange.layout import BUCKET_BYTES, Layout, Slot

numels = st.lists(st.integers(0, 300), max_size=40)
sizes = st.integers(1, 2000)


@given(numels, sizes, sizes)
def test_every_parameter_has_a_place_of_its_own(numels: list[int], bucket: int, first: int) -> None:
    layout = Layout(numels, bucket, first)
    taken = [[False] * size for size in layout.buckets]
    for numel, slot in zip(numels, layout.slots, strict=True):
        assert slot.numel == numel
        for i in range(slot.offset, slot.offset + numel):
            assert not taken[slot.bucket][i]
            taken[slot.bucket][i] = True
    assert all(all(bucket) for bucket in taken)  # and no room is left over


@given(numels, sizes, sizes)
def test_buckets_are_full_but_for_the_last(numels: list[int], bucket: int, first: int) -> None:
    layout = Layout(numels, bucket, first)
    for index, numel in enumerate(layout.buckets[:-1]):
        limit = bucket if index else min(bucket, first)
        assert numel * 4 >= limit
        last = layout.members_of(index)[-1]
        assert (numel - numels[last]) * 4 < limit


@given(numels, sizes)
def test_parameters_come_in_reverse_order_of_registration(numels: list[int], bucket: int) -> None:
    layout = Layout(numels, bucket)
    assert [i for b in range(len(layout.buckets)) for i in layout.members_of(b)] == list(reversed(range(len(numels))))


def test_a_small_example() -> None:
    layout = Layout([10, 20, 30], bucket_bytes=200, first_bucket_bytes=100)
    assert layout.buckets == (30, 30)
    assert layout.slots == (Slot(1, 20, 10), Slot(1, 0, 20), Slot(0, 0, 30))


def test_a_large_parameter_makes_a_large_bucket() -> None:
    assert Layout([5, BUCKET_BYTES, 5]).buckets == (5 + BUCKET_BYTES, 5)


def test_no_parameters_no_buckets() -> None:
    assert Layout([]).buckets == ()
    assert Layout([]).slots == ()


def test_empty_parameters_keep_their_place() -> None:
    assert Layout([0, 0]).buckets == (0,)
    assert Layout([0]).slots == (Slot(0, 0, 0),)


@pytest.mark.parametrize("arguments", [([1], 0, 1), ([1], 1, 0), ([-1], 1, 1)])
def test_nonsense_is_refused(arguments: tuple[list[int], int, int]) -> None:
    with pytest.raises(ValueError):
        Layout(*arguments)
