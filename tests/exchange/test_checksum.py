"""The checksum of a block on a device: every change of a lane is seen, and places matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.exchange.checksum import LANE, ROW, Checksum
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
