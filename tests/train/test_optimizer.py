"""The learning rate over the steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.train.config import Config, LrScheduler, Optimizer, Training
from planaria.train.optimizer import rate

KINDS = ["linear", "sqrt", "cosine"]


def config(steps: int, **keys: object) -> Config:
    return replace(
        Config(), training=Training(steps=steps), optimizer=Optimizer(lr=2.0), lr_scheduler=LrScheduler(**keys)
    )


@given(st.integers(1, 60), st.integers(0, 80), st.floats(0, 1), st.sampled_from(KINDS), st.floats(0, 1))
def test_it_rises_stays_and_falls(steps: int, warmup: int, decay: float, kind: str, least: float) -> None:
    made = config(steps, warmup_steps=warmup, decay_ratio=decay, decay_type=kind, min_lr_factor=least)
    rates = [rate(made, step) for step in range(steps)]
    assert all(0 < value <= 2.0 for value in rates)
    top = min(warmup, steps)
    assert all(a < b for a, b in pairwise(rates[:top]))
    assert all(a >= b >= 2.0 * least for a, b in pairwise(rates[top:]))
    falling = min(round(steps * decay), max(0, steps - warmup))
    assert all(value == 2.0 for value in rates[top : steps - falling])


def test_known_values() -> None:
    linear = config(10, warmup_steps=2, decay_type="linear")
    assert [rate(linear, step) for step in (0, 1, 2, 6, 9)] == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.25])
    cosine = config(8, warmup_steps=0, decay_type="cosine", min_lr_factor=0.5)
    assert [rate(cosine, step) for step in (0, 4)] == pytest.approx([2.0, 1.5])
    stable = config(10, warmup_steps=0, decay_ratio=0.4, decay_type="sqrt")
    assert [rate(stable, step) for step in (5, 6, 7)] == pytest.approx([2.0, 2.0, 2.0 * (1 - 0.25**0.5)])
