"""Random numbers that depend on what is computed, not on who computes it.

Before every step, before each of its shards, and before the user's code that applies it, all global generators are
seeded from the job's seed and the place in the run. So dropout masks and augmentations of a shard are the same on
every group, in every life of it, and nothing about generators has to travel for the bits to be right.

Derivation, fixed for good (changing it changes every run)::

    seed = xxh3_64(little-endian (u64 job seed, i64 step, i64 shard, u64 purpose), seed=0)

``shard`` is -1 and ``purpose`` is 1 for the code between the exchange and the next step ("apply"); ``purpose`` is 0
for a shard, 3 (shard -1) for the code before a step's first shard, and 2 for an epoch's permutation
(:mod:`planaria.torch.data`, ``step`` being the epoch). Ranks of a group that have different parts of a shard's samples
draw different numbers: part k > 0 takes the seed of purpose 4 (``step`` being k) in place of the job's. Purpose 5
(shard -1) is for the noise of a coded exchange. torch and CUDA take the 64 bits, numpy the low 32 (it takes no more),
Python's ``random`` all 64.
"""

from __future__ import annotations

import random as _random
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import xxhash

_PLACE = struct.Struct("<QqqQ")
_U64 = (1 << 64) - 1
_SHARD, _APPLY, _EPOCH, _BEGIN, _PART, _NOISE = 0, 1, 2, 3, 4, 5


def shard_seed(seed: int, step: int, shard: int, part: int = 0) -> int:
    """Seed, 64 bits, of one shard's forward and backward; ``part``: of its samples, where the ranks share them."""
    own = seed if part == 0 else _derive(seed, part, -1, _PART)
    return _derive(own, step, shard, _SHARD)


def apply_seed(seed: int, step: int) -> int:
    """Seed, 64 bits, of the code between the exchange of ``step`` and the next step: the same on every group."""
    return _derive(seed, step, -1, _APPLY)


def epoch_seed(seed: int, epoch: int) -> int:
    """Seed, 64 bits, of the permutation of one epoch."""
    return _derive(seed, epoch, -1, _EPOCH)


def noise_key(seed: int, step: int) -> int:
    """Key, 64 bits, of the noise with which the exchange of a step rounds, if its reduction is a coded one."""
    return _derive(seed, step, -1, _NOISE)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (CPU, and CUDA if it is initialised), numpy (if imported) and Python.

    ``torch.manual_seed`` would do the same for torch but takes about 0.5 ms (it asks every device kind that torch
    knows); the generators taken one by one take 2 microseconds, which matters when a step has many shards.
    """
    seed &= _U64  # all that torch takes
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    _random.seed(seed)


@contextmanager
def aside(seed: int) -> Iterator[None]:
    """What runs meanwhile begins with generators seeded from ``seed``; then they go on where they were."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    generators = [torch.default_generator, *cuda]
    states = [generator.get_state() for generator in generators]
    python, array = _random.getstate(), numpy.random.get_state() if numpy is not None else None
    seed_all(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        _random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)


def seed_shard(seed: int, step: int, shard: int, part: int = 0) -> None:
    """Seed everything for one shard; call it right before the shard's data is read."""
    seed_all(shard_seed(seed, step, shard, part))


def seed_apply(seed: int, step: int) -> None:
    """Seed everything for the user's code that applies ``step``."""
    seed_all(apply_seed(seed, step))


def seed_begin(seed: int, step: int) -> None:
    """Seed everything for the user's code before the step's first shard: a group that has just healed draws what the
    others draw."""
    seed_all(_derive(seed, step, -1, _BEGIN))


def _derive(seed: int, step: int, shard: int, purpose: int) -> int:
    return xxhash.xxh3_64_intdigest(_PLACE.pack(seed & _U64, step, shard, purpose))
