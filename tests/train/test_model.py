"""The sizes of the reference Llama, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from planaria.train.model import Llama, initialise, loss_of
from planaria.train.shapes import SHAPES, peak_of


@pytest.mark.parametrize(
    ("flavor", "parameters"), [("debug", 394_080), ("3M", 2_918_656), ("1B", 1_235_814_400), ("8B", 8_030_261_248)]
)
def test_sizes(flavor: str, parameters: int) -> None:
    """1B and 8B have as many parameters as Meta's."""
    shape = SHAPES[flavor] if SHAPES[flavor].vocab else replace(SHAPES[flavor], vocab=320)
    with torch.device("meta"):
        model = Llama(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters == parameters
    assert not list(model.buffers())


def test_a_token_of_8b_costs_what_the_formula_says() -> None:
    shape = SHAPES["8B"]
    assert shape.flops_per_token(8192) == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 8192
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12 and peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("") is None


def test_stages_are_the_model() -> None:
    """Two parts with the same seed are the whole model, one after the other."""
    shape = replace(SHAPES["debug"], vocab=320)
    whole, first, second = Llama(shape), Llama(shape, range(0, 3)), Llama(shape, range(3, 4))
    for part in (whole, first, second):
        initialise(part, shape, seed=7)
    tokens = torch.randint(320, (2, 16))
    assert torch.equal(second(first(tokens)), whole(tokens))
    assert {n for p in (first, second) for n, _ in p.named_parameters()} == {n for n, _ in whole.named_parameters()}


def test_weights_depend_on_seed_and_name() -> None:
    shape = replace(SHAPES["debug"], vocab=320)
    one, other = Llama(shape), Llama(shape)
    initialise(one, shape, seed=1)
    initialise(other, shape, seed=2)
    weights = [m.weight for m in one.modules() if isinstance(m, nn.Linear) and m.weight.shape == (96, 96)]
    assert not any(torch.equal(a, b) for a in weights for b in weights if a is not b)
    assert not torch.equal(one.head.weight, other.head.weight)
    assert loss_of(one(torch.zeros(1, 8, dtype=torch.long)), torch.zeros(1, 8, dtype=torch.long)).item() < 7


def test_what_follows_is_not_seen() -> None:
    shape = replace(SHAPES["debug"], vocab=320)
    model = Llama(shape)
    initialise(model, shape, seed=0)
    tokens = torch.randint(320, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 5
    assert torch.equal(model(tokens)[0, :10], model(changed)[0, :10])
    assert not torch.equal(model(tokens)[0, 10:], model(changed)[0, 10:])
