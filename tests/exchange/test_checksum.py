"""Checksums on a device: every change of a lane is seen, and within a block places matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.exchange.checksum import LANE, ROW, Checksum, lane_sums
from planaria.exchange.device_healing import blocks_of

# Around one and two rows of lanes: with and without a rest.
lanes = st.sampled_from([0, 1, 8, ROW - 1, ROW, ROW + 8, 2 * ROW, 2 * ROW + 5])


def checksum(data: torch.Tensor) -> torch.Tensor:
    return Checksum(max(data.numel(), 3 * ROW * LANE), data.device).of(data)


def block(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count * LANE,), generator=generator, dtype=torch.uint8)


@settings(deadline=None)
@given(lanes.filter(bool), st.integers(0, 10**6), st.integers(0, 7), st.integers(0, 100))
def test_one_flipped_bit_is_seen(count: int, place: int, bit: int, seed: int) -> None:
    data = block(count, seed)
    before = checksum(data)
    assert checksum(data.clone()) == before
    data[place % data.numel()] ^= 1 << bit
    assert checksum(data) != before


@settings(deadline=None)
@given(lanes.filter(lambda count: count > 1), st.data())
def test_lanes_that_changed_places_are_seen(count: int, draw: st.DataObject) -> None:
    data = block(count, 7)
    one, other = (draw.draw(st.integers(0, count - 1)) for _ in range(2))
    before = checksum(data)
    table = data.view(torch.int64)
    table[one], table[other] = table[other].clone(), table[one].clone()
    assert (checksum(data) != before) == (one != other)


def test_the_empty_block_and_the_blocks_of_a_stripe() -> None:
    assert checksum(block(0, 0)) == 0
    assert blocks_of(0) == []
    assert [stop - start for start, stop in blocks_of(600 << 20)] == [256 << 20, 256 << 20, 88 << 20]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_devices_and_hosts_agree() -> None:
    data = block(3 * ROW + 5, 3)
    assert checksum(data.cuda()).cpu() == checksum(data)


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool])


@settings(deadline=None)
@given(st.lists(st.tuples(dtypes, st.integers(0, 40)), min_size=1, max_size=5), st.data())
def test_one_flipped_bit_changes_the_sum_of_its_tensor_alone(
    shapes: list[tuple[torch.dtype, int]], draw: st.DataObject
) -> None:
    tensors = [torch.zeros(numel, dtype=dtype) for dtype, numel in shapes]
    before = lane_sums(tensors)
    there = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    if not there:
        return
    index = draw.draw(st.sampled_from(there))
    data = tensors[index].view(torch.uint8)
    data[draw.draw(st.integers(0, data.numel() - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    after = lane_sums(tensors)
    assert [place for place in range(len(tensors)) if before[place] != after[place]] == [index]


def test_sums_do_not_depend_on_where_a_tensor_lies() -> None:
    data = torch.arange(101, dtype=torch.bfloat16)
    shifted = torch.cat([torch.ones(1, dtype=torch.bfloat16), data])[1:]  # two bytes off the lanes
    assert lane_sums([data, torch.empty(0)]) == lane_sums([shifted, torch.empty(3, 0)])
    assert all(0 <= each < 1 << 64 for each in lane_sums([torch.full((3,), -1), data]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_sums_of_devices_and_hosts_agree() -> None:
    tensors = [torch.randn(4099), torch.randn(33, dtype=torch.bfloat16), torch.tensor(3.0)]
    assert lane_sums([each.cuda() for each in tensors]) == lane_sums(tensors)


def test_lazy_views_have_the_sum_of_their_values() -> None:
    numbers = torch.randn(9, dtype=torch.complex64)
    for view in (numbers.conj(), numbers.conj().imag, torch._neg_view(numbers.real.clone())):
        assert view.is_conj() or view.is_neg()
        assert lane_sums([view]) == lane_sums([view.clone().resolve_conj().resolve_neg().contiguous()])
        assert lane_sums([view]) != lane_sums([torch.zeros_like(view)])
