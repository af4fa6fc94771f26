"""Sums of gradients have the bits of the tree, whoever computes which shards in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planaria.core.tree import Node, children, fold_plan, leaves, maximal_nodes
from planaria.errors import ProtocolError, UsageError
from planaria.exchange.layout import Layout
from planaria.rank.records import unpack_presence
from planaria.torch.buckets import EAGER_NUMEL, local_numel
from planaria.torch.gradients import GradientStore, trainable


class Net(nn.Module):
    """Parameters on both sides of EAGER_NUMEL, one that only some inputs use, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.wide = nn.Linear(16, EAGER_NUMEL // 16)
        self.last = nn.Linear(EAGER_NUMEL // 16, 3)
        self.extra = nn.Linear(3, 3, bias=False)
        self.again = self.extra

    def forward(self, x: Tensor) -> Tensor:
        out = self.last(torch.tanh(self.wide(torch.tanh(self.first(x)))))
        return self.again(self.extra(out)) if x[0, 0] > 0 else out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def store_of(model: nn.Module, shards: int, bucket_bytes: int = 2048, **options: Any) -> GradientStore:
    named = list(model.named_parameters())
    layout = Layout([local_numel(p) for _, p in trainable(named)], bucket_bytes)
    return GradientStore(named, shards, layout, **options)


def inputs(shard: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * shard + micro)
    x = torch.randn(4, 8, generator=generator)
    x[0, 0] = 1.0 if shard % 3 else -1.0  # every third shard leaves `extra` without a gradient
    return x


def backward(model: nn.Module, shard: int, micro: int = 0) -> None:
    model(inputs(shard, micro)).square().sum().backward()


def compute(store: GradientStore, model: nn.Module, shard: int, micros: int = 1, on_bucket: Any = None) -> bytes:
    store.begin_shard(shard, on_bucket, micro_batches=micros)
    for micro in range(micros):
        backward(model, shard, micro)
        store.micro_batch_done()
    return store.end_shard()


def reference(shards: int, micros: int = 1) -> list[Tensor]:
    """Per parameter, the sum over the tree by plain recursion over plain gradients."""
    model = net()

    def leaf(shard: int) -> list[Tensor]:
        model.zero_grad()
        for micro in range(micros):
            backward(model, shard, micro)
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    def total(node: Node) -> list[Tensor]:
        if node.size == 1:
            return leaf(node.start)
        left, right = map(total, children(node))
        return [a + b for a, b in zip(left, right, strict=True)]

    return total(Node(0, shards))


def fold(stores: Sequence[GradientStore], shards: int) -> list[Tensor]:
    """What an exchange does: all parts of all groups, added by the fold plan, per bucket."""
    nodes = [node for store in stores for node in store.nodes]
    results = []
    for bucket in range(len(stores[0].bucket_numels)):
        sums = [part.clone() for store in stores for part in store.parts(bucket)]
        for into, add in fold_plan(nodes, shards):
            sums[into] += sums[add]
        results.append(sums[0])
    return results


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, second, strict=True))


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    shards = draw(st.integers(1, 7))
    order = draw(st.permutations(range(shards)))
    owner = draw(st.lists(st.integers(0, 2), min_size=shards, max_size=shards))
    groups = [[shard for shard in order if owner[shard] == group] for group in range(3)]
    return shards, [group for group in groups if group]


@settings(max_examples=30)
@given(schedules(), st.integers(1, 2), st.booleans(), st.booleans(), st.sampled_from([256, 2048, 1 << 20]))
def test_any_split_in_any_order_has_the_bits_of_the_tree(
    schedule: tuple[int, list[list[int]]], micros: int, overlap: bool, merge: bool, bucket_bytes: int
) -> None:
    shards, groups = schedule
    stores, model = [], net()
    for group in groups:
        store = store_of(model, shards, bucket_bytes, overlap=overlap, merge=merge)
        for shard in group:
            compute(store, model, shard, micros)
        assert store.have == frozenset(group)
        assert store.nodes == (maximal_nodes if merge else leaves)(group, shards)
        store.release()
        stores.append(store)
    last = stores[-1]
    last.assign(fold(stores, shards), [True] * len(last.parameters))
    assert same_bits(gradients(model), reference(shards, micros))


@settings(max_examples=20)
@given(schedules(), st.integers(0, 7))
def test_interruptions_change_no_bits_and_no_lent_buffer(schedule: tuple[int, list[list[int]]], when: int) -> None:
    """One group does its shards, hands them out, is interrupted, and inherits the others' shards one by one."""
    shards, groups = schedule
    model = net()
    store = store_of(model, shards)
    lent: list[tuple[Tensor, Tensor]] = []
    for number, shard in enumerate(shard for group in groups for shard in group):
        compute(store, model, shard)
        if number >= when:
            parts = [part for bucket in range(len(store.bucket_numels)) for part in store.parts(bucket)]
            lent += [(part, part.clone()) for part in parts]
            store.freeze()
    results = fold([store], shards)
    store.assign(results, [True] * len(store.parameters))
    assert same_bits(gradients(model), reference(shards))
    store.begin_step(recycle=True)
    for shard in range(shards):
        compute(store, model, shard)
    assert all(same_bits([part], [before]) for part, before in lent)


# --- buckets during backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_come_once_each_ascending_and_final(overlap: bool) -> None:
    model = net()
    store = store_of(model, 4, 256, overlap=overlap)
    for shard in (0, 3):
        compute(store, model, shard)
    given_: list[tuple[int, list[Tensor], list[Tensor]]] = []

    def on_bucket(bucket: int, parts: list[Tensor]) -> None:
        given_.append((bucket, parts, [part.clone() for part in parts]))

    compute(store, model, 2, on_bucket=on_bucket)
    assert store.nodes == (Node(0, 1), Node(2, 4))
    assert [bucket for bucket, _, _ in given_] == list(range(len(store.bucket_numels)))
    assert len(store.bucket_numels) > 2
    for bucket, parts, then in given_:
        assert all(a is b for a, b in zip(parts, store.parts(bucket), strict=True))
        assert same_bits(parts, then)


def test_buckets_come_while_backward_runs() -> None:
    model = net()
    store = store_of(model, 1, 256)
    during: list[int] = []
    store.begin_shard(0, lambda bucket, parts: during.append(bucket))
    model(inputs(1)).square().sum().backward()
    assert during == list(range(len(store.bucket_numels)))
    store.end_shard()
    assert during == list(range(len(store.bucket_numels)))


def test_a_bucket_without_gradients_holds_back_later_ones_until_the_end() -> None:
    model = net()
    store = store_of(model, 1, 16)  # `extra` is registered last, so it is in the first bucket
    order: list[int] = []
    store.begin_shard(0, lambda bucket, parts: order.append(bucket))
    backward(model, 0)
    assert order == []
    store.end_shard()
    assert order == list(range(len(store.bucket_numels)))


def test_errors_of_the_exchange_come_out_of_backward() -> None:
    class Broken(Exception):
        pass

    def on_bucket(bucket: int, parts: list[Tensor]) -> None:
        raise Broken

    model = net()
    store = store_of(model, 1)
    store.begin_shard(0, on_bucket)
    with pytest.raises(Broken):
        backward(model, 1)


def test_earlier_micro_batches_hand_out_nothing() -> None:
    model = net()
    store = store_of(model, 1, 256)
    order: list[int] = []
    store.begin_shard(0, lambda bucket, parts: order.append(bucket), micro_batches=2)
    backward(model, 1)
    store.micro_batch_done()
    assert order == []
    backward(model, 1, 1)
    assert len(order) == len(store.bucket_numels)


# --- presence and unusual gradients ---------------------------------------------------------------------------


def present(store: GradientStore, bitmap: bytes) -> set[str]:
    flags = unpack_presence(bitmap, len(store.parameters))
    return {name for name, flag in zip(store.names, flags, strict=True) if flag}


@pytest.mark.parametrize("overlap", [True, False])
def test_presence_names_the_parameters_with_gradients(overlap: bool) -> None:
    model = net()
    store = store_of(model, 2, overlap=overlap)
    assert present(store, compute(store, model, 1)) == set(store.names)
    assert present(store, compute(store, model, 0)) == set(store.names) - {"extra.weight"}


def test_a_gradient_of_an_early_micro_batch_only() -> None:
    model = net()
    store = store_of(model, 1)
    store.begin_shard(0, micro_batches=2)
    x, y = inputs(1), inputs(0)
    model(x).sum().backward()
    store.micro_batch_done()
    model(y).sum().backward()
    assert present(store, store.end_shard()) == set(store.names)
    plain = net()
    plain(x).sum().backward()
    plain(y).sum().backward()
    store.assign(fold([store], 1), [True] * len(store.parameters))
    assert same_bits(gradients(model), gradients(plain))


def test_gradients_set_by_hand_count() -> None:
    model = nn.Linear(2, 1, bias=False)
    store = store_of(model, 1)
    store.begin_shard(0)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert present(store, store.end_shard()) == {"weight"}
    assert store.parts(0)[0].tolist()[:2] == [3.0, 4.0]


def test_a_negative_zero_is_the_same_on_every_path() -> None:
    """-0.0 + 0.0 is 0.0: a missing gradient must be added even where the other shard's sum is there already."""
    totals = []
    for order in ([0, 1], [1, 0]):
        model = nn.Linear(1, 1, bias=False)
        store = store_of(model, 2)
        for shard in order:
            store.begin_shard(shard)
            if shard == 0:
                model.weight.grad = torch.tensor([[-0.0]])
            store.end_shard()
        totals.append(store.parts(0)[0].clone())
    assert same_bits([totals[0]], [totals[1]])


def test_tied_parameters_once() -> None:
    store = store_of(net(), 1)
    assert [name for name in store.names if "weight" in name] == [
        "first.weight", "wide.weight", "last.weight", "extra.weight",
    ]  # fmt: skip


def test_frozen_parameters_are_left_alone() -> None:
    model = net()
    model.first.requires_grad_(False)
    store = store_of(model, 2)
    assert not any(name.startswith("first") for name in store.names)
    compute(store, model, 1)
    assert model.first.weight.grad is None


def test_gradients_with_a_history() -> None:
    model = nn.Linear(2, 1, bias=False)
    store = store_of(model, 1)
    store.begin_shard(0)
    (model(torch.ones(1, 2)) ** 2).sum().backward(create_graph=True)
    store.end_shard()
    assert not store.parts(0)[0].requires_grad
    model.weight.grad = None


def test_half_precision_is_summed_in_fp32_and_given_back_in_half() -> None:
    model = nn.Linear(8, 3).to(torch.bfloat16)
    store = store_of(model, 2)
    leaves = []
    for shard in range(2):
        store.begin_shard(shard)
        model(inputs(shard).bfloat16()).square().sum().backward()
        assert model.weight.grad is not None
        leaves.append(model.weight.grad.float())
        store.end_shard()
    store.assign(fold([store], 2), [True, True])
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.weight.grad, (leaves[0] + leaves[1]).bfloat16())


def test_memory_orders_other_than_rows() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)).to(memory_format=torch.channels_last)
    model.register_parameter("odd", nn.Parameter(torch.ones(6, 4)[:, ::2]))  # has gaps
    x = torch.randn(2, 3, 7, 7)
    store = store_of(model, 1)
    store.begin_shard(0)
    (model(x).square().sum() + model.odd.square().sum()).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    store.end_shard()
    store.assign(fold([store], 1), [True] * len(store.parameters))
    for parameter, plain in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, plain)
        if parameter is not model.odd:
            assert parameter.grad.stride() == parameter.stride()


# --- memory ---------------------------------------------------------------------------------------------------


def pointers(store: GradientStore) -> set[int]:
    return {part.data_ptr() for bucket in range(len(store.bucket_numels)) for part in store.parts(bucket)}


@pytest.mark.parametrize("shards", [[0], [0, 1], [1, 2, 4], [5, 1, 3]])
def test_steady_state_uses_the_same_buffers(shards: list[int]) -> None:
    model = net()
    store = store_of(model, 6)

    def one_step() -> set[int]:
        store.begin_step(recycle=True)
        for shard in shards:
            compute(store, model, shard)
        return pointers(store)

    used = one_step()
    for _ in range(4):
        used |= one_step()
    # As many as a tree walk needs at once: one per node in the end and the leaf in hand, at most.
    assert len(used) <= len(store.bucket_numels) * (len(store.nodes) + 1)


def test_without_recycling_lent_buffers_stay_as_they_are() -> None:
    model = net()
    store = store_of(model, 2)
    compute(store, model, 0)
    held = [(part, part.clone()) for bucket in range(len(store.bucket_numels)) for part in store.parts(bucket)]
    store.begin_step(recycle=False)
    compute(store, model, 1)
    assert all(same_bits([part], [before]) for part, before in held)


def test_a_shard_given_up_half_way() -> None:
    model = net()
    store = store_of(model, 2)
    compute(store, model, 0)
    store.begin_shard(1)
    backward(model, 1)
    store.begin_step(recycle=True)
    assert store.have == frozenset() and store.nodes == ()
    for shard in (0, 1):
        compute(store, model, shard)
    store.assign(fold([store], 2), [True] * len(store.parameters))
    assert same_bits(gradients(model), reference(2))


# --- results --------------------------------------------------------------------------------------------------


def test_results_are_views_and_made_once() -> None:
    model = net()
    store = store_of(model, 2)
    compute(store, model, 1)
    results = fold([store], 2)
    store.assign(results, [True] * len(store.parameters))
    first = [p.grad for p in store.parameters]
    bases = {result.data_ptr() // 4 for result in results}
    assert {p.grad.untyped_storage().data_ptr() // 4 for p in store.parameters if p.grad is not None} == bases
    compute_again = [p.grad for p in store.parameters]
    store.assign(results, [True] * len(store.parameters))
    assert all(a is b for a, b in zip(first, compute_again, strict=True))
    others = [result.clone() for result in results]
    store.assign(others, [True] * len(store.parameters))
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.untyped_storage().data_ptr() in {other.data_ptr() for other in others}


def test_gradients_that_are_promised_come_or_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64))
    names = list(model.named_parameters())
    store = GradientStore(names, 1, Layout([p.numel() for _, p in names]))
    results = [torch.zeros(numel) for numel in store.bucket_numels]
    store.expect(results, [True] * 4)
    for number, result in enumerate(results):
        result.fill_(number + 1)  # they arrive
    store.fulfil()
    got = {float(p.grad.min()) for p in model.parameters() if p.grad is not None}
    assert got == {number + 1.0 for number in range(len(results))}
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    store.expect(results, [True] * 4)
    store.withdraw()
    assert all(p.grad is None for p in model.parameters())


def test_no_gradient_where_no_shard_had_one() -> None:
    model = net()
    store = store_of(model, 1)
    bitmap = compute(store, model, 0)
    store.assign(fold([store], 1), unpack_presence(bitmap, len(store.parameters)))
    assert model.extra.weight.grad is None
    assert model.first.weight.grad is not None


def test_a_shard_begins_without_gradients() -> None:
    model = net()
    store = store_of(model, 2)
    compute(store, model, 1)
    store.begin_shard(0)
    assert all(p.grad is None for p in model.parameters())


# --- errors ---------------------------------------------------------------------------------------------------


def test_two_backwards_for_one_batch() -> None:
    model = net()
    store = store_of(model, 1, 256)
    store.begin_shard(0)
    backward(model, 1)
    with pytest.raises(UsageError, match=r"parameter \S+ was completed twice in shard 0.*overlap=False"):
        backward(model, 1)


def test_two_backwards_without_overlap() -> None:
    model, plain = net(), net()
    store = store_of(model, 1, overlap=False)
    store.begin_shard(0)
    for micro in range(2):
        backward(model, 1, micro)
        backward(plain, 1, micro)
    store.end_shard()
    store.assign(fold([store], 1), [True] * len(store.parameters))
    assert same_bits(gradients(model), gradients(plain))


@pytest.mark.parametrize("width", [2, 64])
def test_gradients_taken_away_during_backward(width: int) -> None:
    """An optimizer that steps inside backward cannot work: the gradient of a shard is not that of the step."""
    model = nn.Linear(width, 64)

    def steal(parameter: Tensor) -> None:
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(steal) for parameter in model.parameters()]
    store = store_of(model, 1)
    store.begin_shard(0)
    with pytest.raises(UsageError, match="was taken away during backward"):
        model(torch.ones(1, width)).sum().backward()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("rows", [3, EAGER_NUMEL])
@pytest.mark.parametrize("overlap", [True, False])
def test_sparse_gradients_are_refused(rows: int, overlap: bool) -> None:
    model = nn.Embedding(rows, 2, sparse=True)
    store = store_of(model, 1, overlap=overlap)
    store.begin_shard(0)
    with pytest.raises(UsageError, match=r"parameter weight has a sparse gradient.*sparse=True"):
        model(torch.tensor([1])).sum().backward()
        store.end_shard()


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(UsageError, match="none of the model's 2 parameters needs gradients"):
        trainable(list(nn.Linear(1, 1).requires_grad_(False).named_parameters()))
    with pytest.raises(UsageError, match="parameter weight is complex"):
        trainable(list(nn.Linear(1, 1, dtype=torch.complex64).named_parameters()))
    halves = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    with pytest.raises(UsageError, match=r"parameter 1\.weight is on meta but 0\.weight is on cpu"):
        trainable(list(halves.named_parameters()))


def test_calls_out_of_order() -> None:
    model = net()
    store = store_of(model, 2)
    with pytest.raises(ProtocolError, match="ended that was not begun"):
        store.end_shard()
    compute(store, model, 0)
    with pytest.raises(ValueError, match="shard 0 is held already"):
        store.begin_shard(0)
    store.begin_shard(1)
    with pytest.raises(ProtocolError, match="shard 0 was begun before shard 1 ended"):
        store.begin_shard(0)


def test_a_layout_of_another_model() -> None:
    named = list(net().named_parameters())
    with pytest.raises(ProtocolError, match="a layout of 1 parameters was given for 7"):
        GradientStore(named, 1, Layout([8], 2048))
    with pytest.raises(ProtocolError, match="has 1 elements for parameter"):
        GradientStore(named, 1, Layout([1] * 7, 2048))


def test_backward_outside_a_shard_and_after_release() -> None:
    model = net()
    store = store_of(model, 1)
    backward(model, 1)
    backward(model, 1)  # nothing is collected, nothing is wrong
    store.begin_shard(0)
    store.release()
    backward(model, 1)
    backward(model, 1)


# --- parameters spread over ranks -----------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded_net(mesh: Any) -> tuple[nn.Module, Callable[[], None]]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=mesh)
    return model, lambda: backward(model, 1)


def test_fsdp_parameters(mesh: Any) -> None:
    model, run = sharded_net(mesh)
    store = store_of(model, 1)
    store.begin_shard(0)
    run()
    assert present(store, store.end_shard()) == set(store.names)
    store.assign(fold([store], 1), [True] * len(store.parameters))
    plain = net()
    backward(plain, 1)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(mine.grad) is type(mine.data)
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad.full_tensor(), other.grad)
    torch.optim.AdamW(model.parameters()).step()
