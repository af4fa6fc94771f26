"""Folding in blocks: the bits of the plain definition, operands untouched, and a sharp eye for NaN."""

from __future__ import annotations

import pytest
import torch
from exchange_rank import gradient, node_sum
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.tree import fold_plan, maximal_nodes, root
from planaria.exchange import folding
from planaria.exchange.folding import Divisor, fold, fold_on_device, landing

owners = st.integers(1, 12).flatmap(
    lambda shards: st.lists(st.integers(0, 3), min_size=shards, max_size=shards).map(tuple)
)


@settings(deadline=None, max_examples=60)
@given(owners, st.integers(0, 100))
def test_bits_do_not_depend_on_who_computed_what(owner: tuple[int, ...], seed: int) -> None:
    shards, numel = len(owner), 53
    leaf = [gradient(seed, shard, numel) for shard in range(shards)]
    nodes = [node for who in range(4) for node in maximal_nodes([s for s, o in enumerate(owner) if o == who], shards)]
    operands = [node_sum(node, leaf.__getitem__) for node in nodes]
    before = [operand.clone() for operand in operands]
    out = torch.full((numel,), float("nan"))
    assert fold(operands, fold_plan(nodes, shards), shards, out)
    assert torch.equal(out, node_sum(root(shards), leaf.__getitem__) / shards)
    assert all(torch.equal(a, b) for a, b in zip(before, operands, strict=True))


@pytest.mark.parametrize("numel", [0, 1, 99, 100, 101, 250])
def test_blocks_do_not_change_the_bits(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = [gradient(1, i, numel) for i in range(5)]
    pairs = fold_plan([*maximal_nodes([0, 2], 5), *maximal_nodes([1, 3, 4], 5)], 5)
    whole, blocks = torch.empty(numel), torch.empty(numel)
    fold(operands, pairs, 5, whole)
    monkeypatch.setattr(folding, "BLOCK", 100)
    fold(operands, pairs, 5, blocks)
    assert torch.equal(whole, blocks)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 99, 100, 249])
def test_one_bad_element_is_seen(bad: float, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "BLOCK", 100)
    operands = [torch.ones(250), torch.ones(250)]
    operands[1][place] = bad
    assert not fold(operands, ((0, 1),), 2, torch.empty(250))


def test_large_finite_values_are_no_false_alarm() -> None:
    operand = torch.full((100,), 3e38)  # their sum overflows
    assert fold([operand], (), 1, torch.empty(100))


def test_opposite_infinities_do_not_hide_each_other() -> None:
    assert not fold([torch.tensor([float("inf"), -float("inf")])], (), 1, torch.empty(2))


def test_a_single_operand_is_copied_and_divided() -> None:
    operand, out = torch.tensor([3.0, 6.0]), torch.empty(2)
    assert fold([operand], (), 3, out)
    assert out.tolist() == [1.0, 2.0]
    assert operand.tolist() == [3.0, 6.0]


@settings(deadline=None, max_examples=60)
@given(owners, st.integers(0, 3), st.integers(0, 1))
def test_a_sum_that_lands_in_the_result_gives_the_same_bits(owner: tuple[int, ...], me: int, choice: int) -> None:
    shards, numel = len(owner), 19
    leaf = [gradient(4, shard, numel) for shard in range(shards)]
    held = [
        (who, node) for who in range(4) for node in maximal_nodes([s for s, o in enumerate(owner) if o == who], shards)
    ]
    nodes = [node for _, node in held]
    pairs = fold_plan(nodes, shards)
    received = tuple(p for p, (who, _) in enumerate(held) if who != me)
    places = [p for p in landing(pairs) if p in received]
    operands = [node_sum(node, leaf.__getitem__).clone() for node in nodes]
    before = [operand.clone() for operand in operands]
    out = torch.full((numel,), float("nan"))
    if places:
        place = places[choice % len(places)]
        out.copy_(operands[place])
        operands[place] = out
    fold(operands, pairs, shards, out, received)
    want = node_sum(root(shards), leaf.__getitem__)
    assert torch.equal(out, want / shards)
    assert all(torch.equal(operands[p], before[p]) for p in range(len(held)) if p not in received)


@given(st.integers(1, 1 << 20), st.integers(0, 1000))
def test_multiplying_by_a_power_of_two_has_the_bits_of_dividing(divisor: int, seed: int) -> None:
    values = gradient(seed, 0, 50) * torch.tensor(2.0) ** torch.arange(-140, -90)  # subnormal numbers too
    out = torch.empty(50)
    fold([values], (), divisor, out)
    assert torch.equal(out, values / divisor)


DEVICES = [
    "cpu",  # kernels are made of the same calls there
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 8, 12])
def test_kernels_give_the_same_bits(shards: int, device: str) -> None:
    numel, mine = 1003, 1
    leaf = [gradient(3, shard, numel) for shard in range(shards)]
    owned = [[s for s in range(shards) if s * 5 % 3 == who] for who in range(3)]
    nodes = [(node, who) for who in range(3) for node in maximal_nodes(owned[who], shards)]
    operands = [node_sum(node, leaf.__getitem__).clone().to(device) for node, _ in nodes]
    own = [i for i, (_, who) in enumerate(nodes) if who != mine]
    before = [operand.clone() for operand in operands]
    out, probe = torch.full((numel,), float("nan"), device=device), torch.empty((), device=device)
    pairs = fold_plan([node for node, _ in nodes], shards)
    divisor = Divisor(shards, torch.device(device))
    fold_on_device(operands, pairs, divisor, out, own, lambda _: torch.empty(numel, device=device), probe)
    assert torch.equal(out.cpu(), node_sum(root(shards), leaf.__getitem__) / shards)
    assert probe.isfinite()
    assert all(torch.equal(operands[i], before[i]) for i in range(len(nodes)) if i not in own)


def test_a_probe_shows_what_is_not_finite() -> None:
    probe = torch.empty(())
    for bad in (float("nan"), float("inf"), -float("inf")):
        operands = [torch.ones(250), torch.ones(250)]
        operands[1][249] = bad
        fold_on_device(operands, ((0, 1),), Divisor(2, torch.device("cpu")), torch.empty(250), (), torch.empty, probe)
        assert not probe.isfinite()
