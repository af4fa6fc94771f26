"""Seeds are a pure function of the place in the run, and reach every global generator."""

from __future__ import annotations

import random
from itertools import product

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.torch.random import apply_seed, epoch_seed, seed_all, seed_apply, seed_shard, shard_seed

U64 = st.integers(0, 2**64 - 1)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def test_same_place_same_numbers() -> None:
    seed_shard(7, 3, 2)
    first = draw()
    torch.rand(100), numpy.random.rand(3), random.random()
    seed_shard(7, 3, 2)
    assert draw() == first


def test_every_generator_differs_between_places() -> None:
    drawn = []
    for step, shard in product(range(4), range(4)):
        seed_shard(7, step, shard)
        drawn.append(draw())
    for one_generator in zip(*drawn, strict=True):
        assert len(set(one_generator)) == 16


def test_apply_is_the_same_whatever_shard_was_computed_before() -> None:
    drawn = []
    for shard in range(3):
        seed_shard(1, 5, shard)
        draw()
        seed_apply(1, 5)
        drawn.append(draw())
    assert len(set(drawn)) == 1


def test_purposes_do_not_share_seeds() -> None:
    shards = {shard_seed(0, step, shard) for step, shard in product(range(64), range(-1, 64))}
    applies = {apply_seed(0, step) for step in range(64)}
    epochs = {epoch_seed(0, epoch) for epoch in range(64)}
    assert len(shards | applies | epochs) == 64 * 65 + 64 + 64


@given(U64, st.integers(0, 2**40), st.integers(0, 2**20))
def test_seeds_are_64_bits_and_accepted_by_every_generator(seed: int, step: int, shard: int) -> None:
    derived = shard_seed(seed, step, shard)
    assert 0 <= derived < 2**64
    seed_all(derived)


def test_the_derivation_never_changes() -> None:
    # Written down: another value here means that every run of every user changes.
    assert shard_seed(0, 0, 0) == 11553746372678240669
    assert shard_seed(1234, 56, 7) == 8922088511047780591
    assert apply_seed(1234, 56) == 6187133166590994435
    assert epoch_seed(1234, 56) == 11747781093236651661


def test_negative_job_seeds_are_taken_modulo_64_bits() -> None:
    assert shard_seed(-1, 0, 0) == shard_seed(2**64 - 1, 0, 0)


def test_like_manual_seed_for_the_cpu() -> None:
    seed_all(12345)
    ours = torch.rand(8)
    torch.manual_seed(12345)
    assert torch.equal(ours, torch.rand(8))


def test_seeds_of_any_size_are_accepted() -> None:
    seed_all(2**70 + 3)
    drawn = draw()
    seed_all(3)
    assert draw() == drawn
