"""A leak is told from noise, from a warm-up and from ups and downs."""

from __future__ import annotations

import random
from collections.abc import Callable

from bench.growth import Sample, growth, kendall_chance, sen_slope


def leaking(files: Callable[[int, random.Random], float], samples: int = 300) -> set[str]:
    rng = random.Random(1)
    made = [Sample(at, round(files(at, rng)), 5, 7, 1000 + rng.randrange(50), 0) for at in range(samples)]
    return {each.what for each in growth(made) if each.leaks}


def test_what_leaks_and_what_does_not() -> None:
    assert leaking(lambda at, _: 20 + at // 10) == {"files"}
    assert leaking(lambda at, rng: 20 + at / 10 + rng.randrange(12)) == {"files"}  # under noise
    assert leaking(lambda at, rng: 20 + rng.randrange(12)) == set()
    assert leaking(lambda at, _: 20 + min(at, 60)) == set()  # it warms up
    assert leaking(lambda at, _: 20 + at % 9) == set()  # it is cleared now and then
    assert leaking(lambda at, _: 20 + at // 10, samples=20) == set()  # too little to tell


def test_the_statistics() -> None:
    assert kendall_chance([1, 2, 3, 4]) == 1 / 24
    assert kendall_chance([4, 3, 2, 1]) == 1.0
    assert sen_slope([0, 1, 2, 3], [0, 2, 4, 100]) < 40
    assert sen_slope([0, 1, 2], [5, 7, 9]) == 2
