"""Codes of eight bits: unbiased, within a step of the number, the same wherever they are made."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.core.tree import fold_plan, leaves
from planaria.exchange.codes import BLOCK, CODECS, Coded, Coder, coded_bytes, mean_key, part_key
from planaria.exchange.folding import fold
from planaria.exchange.noise import NOISE, ROW, Noise, key_of, row_words

CPU = torch.device("cpu")
codecs = pytest.mark.parametrize("codec", CODECS)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def encoded(values: Tensor, codec: str, key: int = 1, first: int = 0, chunk: int | None = None) -> Coded:
    wire = torch.zeros(coded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    made = Coded.within(wire, values.numel(), codec)
    Coder(codec, values.device, chunk=chunk).encode(values, made, key, first)
    return made


def through(values: Tensor, codec: str, key: int = 1, first: int = 0, chunk: int | None = None) -> Tensor:
    out = torch.empty_like(values)
    Coder(codec, values.device, chunk=chunk).decode(encoded(values, codec, key, first, chunk), out)
    return out


def steps(values: Tensor, codec: str) -> Tensor:
    """The distance of the two codes around each number, in float64, by the definition."""
    found = torch.empty(values.numel(), dtype=torch.float64)
    for start in range(0, values.numel(), BLOCK):
        block = values[start : start + BLOCK].double()
        scale = max(float(block.abs().max()) / CODECS[codec][1], 2.0**-126)
        if codec == "int8":
            found[start : start + BLOCK] = scale
        else:
            exponent = torch.frexp(block / scale)[1] - 1
            found[start : start + BLOCK] = scale * 2.0 ** (exponent.clamp(min=-6) - 3)
    return found


def wild(seed: int, numel: int, spread: float) -> Tensor:
    """Numbers of all magnitudes, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    return torch.where(torch.rand(numel, generator=generator) < 0.1, 0.0, values)


# --- noise ----------------------------------------------------------------------------------------------------


def plain_noise(key: int, row: int) -> list[int]:
    """The definition, in Python's integers."""

    def splitmix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    golden, found = 0x9E3779B97F4A7C15, []
    word = splitmix((key + (row + 1) * golden) % 2**64)
    for number in range(1, ROW // 2 + 1):
        mixed = (word % 2**32 ^ splitmix(number * golden % 2**64) >> 32) * 0x7FEB352D % 2**32
        mixed = ((mixed ^ mixed >> 15) + (word >> 32)) * 0x846CA68B % 2**32
        mixed ^= mixed >> 16
        for half in (mixed % 2**16, mixed >> 16):
            found.append((half - 2**16 if half >= 2**15 else half) | 1)
    return found


def noise(key: int, first: int, rows: int, width: int = ROW, device: str = "cpu") -> Tensor:
    words, spare = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    made = Noise(rows * ROW, torch.device(device), lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device))
    out = torch.empty(rows, width, device=device)
    return made.fill(out, row_words(key, first, words, spare)).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", [0, 1, key_of(3, 4), (1 << 64) - 1])
def test_noise_is_that_of_the_definition(key: int, device: str) -> None:
    for first in (0, 1, 12345, 1 << 33):
        want = [plain_noise(key, first + row) for row in range(3)]
        assert noise(key, first, 3, device=device).tolist() == want
        assert noise(key, first, 3, width=7, device=device).tolist() == [row[:7] for row in want]


def test_noise_is_even_and_knows_nothing_of_its_neighbours() -> None:
    rows = 1024
    values = noise(key_of(5, 6), 0, rows).double() * NOISE
    count = values.numel()
    assert float(values.abs().max()) < 0.5
    assert abs(float(values.mean())) < 5 * math.sqrt(1 / 12 / count)
    counts = torch.histc(values.float(), 256, -0.5, 0.5)
    assert abs(float(((counts - count / 256) ** 2 / (count / 256)).sum()) - 255) < 6 * math.sqrt(2 * 255)
    flat = values.flatten()
    others = [noise(key_of(5, 7), 0, rows), noise(key_of(6, 5), 0, rows)]  # other steps
    for first, second in [
        *((flat[:-lag], flat[lag:]) for lag in (1, 2, 127, 128, 255, 256, 257, 1024)),
        *((flat, other.double().flatten() * NOISE) for other in others),
    ]:
        assert abs(float((first * second).mean()) * 12) < 5 / math.sqrt(first.numel())


def test_keys_differ_in_every_word_and_its_place() -> None:
    keys = [key_of(*words) for words in [(), (0,), (0, 0), (1, 0), (0, 1), (1, 1), (-1, 0), (0, 1 << 63)]]
    assert len(set(keys)) == len(keys) and all(0 <= key < 1 << 64 for key in keys)


# --- codes ----------------------------------------------------------------------------------------------------


@codecs
@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    numel=st.sampled_from([0, 1, 2, 255, 256, 257, 700, 1024]),
    exponent=st.integers(-140, 120),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)
def test_every_number_becomes_one_of_the_two_codes_around_it(
    codec: str, seed: int, numel: int, exponent: int, spread: float
) -> None:
    values = wild(seed, numel, spread) * 2.0**exponent
    values = values.clamp(-3e38, 3e38)
    out = through(values, codec, key=seed)
    assert bool(out.isfinite().all())
    off = (out.double() - values.double()).abs()
    assert bool((off <= steps(values, codec) * (1 + 2**-12)).all())
    assert bool((out[values == 0] == 0).all())


@codecs
@pytest.mark.parametrize("magnitude", [1.0, 1e-37, 1e-42, 1e37])
def test_the_mean_is_the_number(codec: str, magnitude: float) -> None:
    row = torch.cat([torch.ones(1), torch.linspace(-1, 1, 155), 10 ** torch.linspace(-7, 0, 100)]) * magnitude
    rows, times = 4096, 10
    values = row.repeat(rows)
    off = torch.zeros(rows, BLOCK, dtype=torch.float64)
    for step in range(times):
        off += (through(values, codec, key_of(8, step)).double() - values.double()).view(rows, BLOCK)
    # A step times a coin with the right odds has at most half a step as its deviation.
    most = steps(row, codec) * (6 * 0.5 / math.sqrt(rows * times) + 2**-14)
    assert bool(((off.sum(0) / (rows * times)).abs() <= most).all())


@codecs
def test_numbers_that_are_codes_stay_what_they_are(codec: str) -> None:
    dtype, largest = CODECS[codec]
    codes = torch.arange(-128, 128).to(torch.int8).view(dtype)
    values = codes.float()[codes.float().abs() <= largest]  # without NaN and -128
    for scale in (1.0, 2.0**-100, 2.0**100):
        for key in range(20):
            assert torch.equal(through(values * scale, codec, key), values * scale)


@codecs
def test_a_number_half_way_between_codes_goes_either_way(codec: str) -> None:
    values = torch.full((20 * BLOCK,), 2.5 if codec == "int8" else 17.0)
    values[::BLOCK] = CODECS[codec][1]
    got = through(values, codec)[values < 20]
    low, high = (2.0, 3.0) if codec == "int8" else (16.0, 18.0)
    ups = int((got == high).sum())
    assert ups + int((got == low).sum()) == got.numel()
    assert abs(ups - got.numel() / 2) < 5 * math.sqrt(got.numel()) / 2


@codecs
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 5000])
def test_neither_pieces_nor_chunks_change_the_bits(codec: str, numel: int) -> None:
    values = wild(numel, numel, 2.0)
    whole = through(values, codec, key=9)
    assert torch.equal(through(values, codec, key=9, chunk=512), whole)
    for cut in range(BLOCK, numel, 3 * BLOCK):
        assert torch.equal(through(values[cut:].clone(), codec, key=9, first=cut), whole[cut:])
    assert not torch.equal(through(values, codec, key=10), whole) or numel == 1


@codecs
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_what_is_not_finite_spoils_its_block_and_no_other(codec: str, bad: float, place: int) -> None:
    values = wild(2, 600, 1.0)
    values[place] = bad
    out = through(values, codec)
    block = torch.arange(600) // BLOCK == place // BLOCK
    assert bool(out[block].isnan().all()) and bool(out[~block].isfinite().all())


@given(st.integers(0, 2**32 - 1), st.sets(st.integers(0, 3), min_size=1, max_size=3), st.sampled_from([0.0, 3.0, 30.0]))
@settings(max_examples=30, deadline=None)
@codecs
def test_a_shard_of_zeros_adds_nothing(codec: str, seed: int, there: set[int], spread: float) -> None:
    """A replay has zeros for the groups that were missing. fp8 has a zero with a sign, which must not show either."""
    parts = {shard: wild(seed + shard, 2 * BLOCK + 7, spread) for shard in there}

    def mean(shards: list[int]) -> Tensor:
        nothing, total = torch.zeros(2 * BLOCK + 7), torch.empty(2 * BLOCK + 7)
        decoded = [through(parts.get(shard, nothing), codec, part_key(seed, 0, shard)) for shard in shards]
        fold(decoded, fold_plan(leaves(frozenset(shards), 4), 4), 1, total, range(len(shards)))
        return through(total, codec, mean_key(seed, 0))

    assert torch.equal(mean(sorted(there)).view(torch.int32), mean([0, 1, 2, 3]).view(torch.int32))


@codecs
def test_the_largest_numbers_stay_finite(codec: str) -> None:
    values = torch.full((300,), torch.finfo(torch.float32).max)
    values[::2] *= -1
    torch.testing.assert_close(through(values, codec), values, rtol=1e-6, atol=0)


@codecs
def test_a_quarter_of_the_bytes(codec: str) -> None:
    assert coded_bytes(1 << 20) / (4 << 20) < 0.26
    made = encoded(wild(1, 1000, 1.0), codec)
    assert made.part(1000, 1000).scales.numel() == 0  # nothing has nothing, wherever it is
    assert made.scales.numel() == 4 and len(made) == 1000 and coded_bytes(1000) == 1024 >= 4 * 4 + 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@codecs
@pytest.mark.parametrize("spread", [0.0, 6.0, 30.0])
def test_devices_make_the_same_bytes(codec: str, spread: float) -> None:
    values = wild(3, (1 << 20) + 77, spread)
    values[5000], values[9000] = float("nan"), float("inf")
    here, there = encoded(values, codec), encoded(values.cuda(), codec)
    assert torch.equal(here.scales.view(torch.int32), there.scales.cpu().view(torch.int32)) or torch.equal(
        here.scales.nan_to_num(1.0), there.scales.cpu().nan_to_num(1.0)
    )
    good = here.scales.isfinite().repeat_interleave(BLOCK)[: values.numel()]
    assert torch.equal(here.codes.view(torch.int8)[good], there.codes.view(torch.int8).cpu()[good])
    torch.testing.assert_close(
        through(values, codec), through(values.cuda(), codec).cpu(), rtol=0, atol=0, equal_nan=True
    )
