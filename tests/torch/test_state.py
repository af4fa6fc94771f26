"""A state taken from one group and put into another goes on to the same bits; one that does not fit changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch.data import ShardedStream
from planaria.torch.state import ProtectedState, tensor_specs


def mlp(seed: int = 0, width: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if isinstance(scheduler, lrs.ReduceLROnPlateau):
            scheduler.step(1.0 + step % 2)
        elif scheduler is not None:
            scheduler.step()


def staged(captured: tuple[bytes, list[Tensor]]) -> tuple[bytes, list[Tensor]]:
    """As a healer receives them: fresh contiguous buffers of the sizes that the manifest tells."""
    manifest, tensors = captured
    buffers = []
    for spec, tensor in zip(tensor_specs(manifest), tensors, strict=True):
        assert tensor.is_contiguous()
        buffers.append(torch.empty(spec.wire_shape, dtype=spec.dtype).copy_(tensor))
    return manifest, buffers


def moved(source: ProtectedState, target: ProtectedState) -> None:
    manifest, buffers = staged(source.capture())
    target.restore(manifest, buffers)
    for buffer in buffers:
        buffer.zero_()  # they belong to the receiver and may be used for anything afterwards


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 2])
def test_goes_on_to_the_same_bits(name: str, trained: int) -> None:
    """``trained``: steps that the target took before on its own, so that its lazy state is there, and wrong."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ProtectedState]:
        model = mlp(seed)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        return model, optimizer, ProtectedState(model=model, optimizer=optimizer)

    model, optimizer, source = make(0)
    train(model, optimizer, None, 0, 3)
    other, others_optimizer, target = make(1)
    train(other, others_optimizer, None, 10, 10 + trained)
    assert source.digest() != target.digest()
    moved(source, target)
    assert source.digest() == target.digest()
    train(model, optimizer, None, 3, 6)
    train(other, others_optimizer, None, 3, 6)
    assert source.digest() == target.digest()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 4]),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.StepLR(o, 2)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedules_go_on(name: str) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, ProtectedState]:
        model = mlp(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        return model, optimizer, scheduler, ProtectedState(model=model, opt=optimizer, scheduler=scheduler)

    *parts, source = make(0)
    train(*parts, 0, 3)
    *others, target = make(1)
    moved(source, target)
    assert source.digest() == target.digest()
    train(*parts, 3, 8)
    train(*others, 3, 8)
    assert source.digest() == target.digest()
    assert parts[1].param_groups[0]["lr"] == others[1].param_groups[0]["lr"]


def test_back_to_before_the_first_step() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    state = ProtectedState(model=model, optimizer=optimizer)
    before, manifest_and_tensors = state.digest(), staged(state.capture())
    train(model, optimizer, None, 0, 2)
    assert state.digest() != before
    state.restore(*manifest_and_tensors)
    assert state.digest() == before
    assert not optimizer.state


def test_written_in_place() -> None:
    model, other = mlp(0), mlp(1)
    optimizer, others = (torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1)) for m in (model, other))
    train(model, optimizer, None, 0, 1)
    train(other, others, None, 0, 2)
    target = ProtectedState(model=other, optimizer=others)
    addresses = [tensor.data_ptr() for tensor in target.capture()[1][:-1]]
    moved(ProtectedState(model=model, optimizer=optimizer), target)
    assert [tensor.data_ptr() for tensor in target.capture()[1][:-1]] == addresses


def test_capture_copies_nothing() -> None:
    model = mlp()
    _, tensors = ProtectedState(model=model).capture()
    assert {p.data_ptr() for p in model.parameters()} <= {tensor.data_ptr() for tensor in tensors}
    assert not any(tensor.requires_grad for tensor in tensors)


def test_state_keeps_its_dtype() -> None:
    """load_state_dict would cast it to the parameter's."""
    model = mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().double()
    fresh = mlp().to(torch.bfloat16)
    others = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    moved(ProtectedState(m=model, o=optimizer), ProtectedState(m=fresh, o=others))
    assert {item["master"].dtype for item in others.state.values()} == {torch.float64}


class Odd(nn.Module):
    """Buffers of all kinds, a tied parameter, memory that is not in rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("kept", torch.rand(3))
        self.register_buffer("passing", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("scalar", torch.tensor(seed))
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("wide", torch.rand(1, 4).expand(3, 4))
        self.register_buffer("gaps", torch.rand(6, 4)[:, ::2])
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.rand(2, 5).t())
        self.one = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
        self.two = self.one


def test_odd_modules() -> None:
    first, second = Odd(0), Odd(1)
    source, target = ProtectedState(m=first), ProtectedState(m=second)
    moved(source, target)
    for (name, mine), (_, other) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert torch.equal(mine, other), name
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride()
    assert source.digest() == target.digest()
    assert sum("one" in line or "two" in line for line in source.describe()) == 1


def test_lazy_state_keeps_its_memory_order() -> None:
    first, second = Odd(0), Odd(0)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (first, second)]
    first.conv(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizers[0].step()
    moved(ProtectedState(o=optimizers[0]), ProtectedState(o=optimizers[1]))
    mine, other = (o.state[m.conv.weight]["exp_avg"] for o, m in zip(optimizers, (first, second), strict=True))
    assert torch.equal(mine, other) and mine.stride() == other.stride() != torch.empty(4, 3, 3, 3).stride()


def test_a_module_with_buffers_only() -> None:
    first, second = nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, affine=False)
    first(torch.rand(4, 3))
    moved(ProtectedState(m=first), ProtectedState(m=second))
    assert second.num_batches_tracked == 1 and torch.equal(first.running_mean, second.running_mean)


class Scaler:
    """Like torch.amp.GradScaler, with a tensor too. ``refuses`` makes load_state_dict fail half-way."""

    def __init__(self) -> None:
        self.scale = 65536.0
        self.tracker = torch.zeros(2, dtype=torch.int32)
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        if self.refuses:
            self.refuses = False
            raise KeyError("growth")
        self.tracker = state["tracker"]


def test_objects_with_a_state_dict() -> None:
    mine, other = Scaler(), Scaler()
    mine.scale, mine.tracker = 3.0, torch.tensor([1, 2], dtype=torch.int32)
    real, others = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    moved(ProtectedState(a=mine, b=real), ProtectedState(a=other, b=others))
    assert other.scale == 3.0 and other.tracker.tolist() == [1, 2]
    assert others.get_scale() == 8.0


def test_plain_dictionaries_stay_the_same_object() -> None:
    mine: dict[str, Any] = {"best": 0.5, "seen": [1, (2, b"x")], 3: torch.ones(2)}
    other: dict[str, Any] = {"old": 1}
    alias = other
    moved(ProtectedState(user=mine), ProtectedState(user=other))
    assert alias is other and list(other) == ["best", "seen", 3]
    assert other["seen"] == [1, (2, b"x")] and other[3].tolist() == [1.0, 1.0]


def test_streams_are_state() -> None:
    def make() -> ShardedStream:
        made = ShardedStream(lambda shard, cursor: iter([(cursor, cursor + 1)]), 1)
        made.bind(2)
        return made

    mine, other = make(), make()
    mine.commit({0: 7})
    moved(ProtectedState(data=mine), ProtectedState(data=other))
    assert other.state_dict() == {"cursors": [7, 0]}


def test_lists_of_objects() -> None:
    models = [mlp(0), mlp(1)]
    others = [mlp(2), mlp(3)]
    moved(ProtectedState(models=models, nothing=None), ProtectedState(models=others))
    assert torch.equal(others[1][0].weight, models[1][0].weight)


def test_random_generators_are_no_part_of_the_state() -> None:
    # They are seeded anew before every piece of user code. In the middle of a step they stand elsewhere on every
    # group, and groups that serve a state together must serve the same.
    state = ProtectedState(model=nn.Linear(2, 2))
    before = state.capture()[0], state.digest()
    torch.rand(3), numpy.random.rand(), random.random()
    assert (state.capture()[0], state.digest()) == before


# --- what does not fit ----------------------------------------------------------------------------------------


def pair(**options: Any) -> tuple[Any, Any]:
    model = mlp(options.pop("seed", 0), **options)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, None, 0, 1)
    return model, optimizer


def refused(source: ProtectedState, target: ProtectedState, message: str) -> None:
    """The restore raises and the target is what it was, to the bit."""
    captured = staged(source.capture())
    before, tensors = target.digest(), [tensor.clone() for tensor in target.capture()[1]]
    with pytest.raises(UsageError, match=message):
        target.restore(*captured)
    assert target.digest() == before
    assert all(torch.equal(a, b) for a, b in zip(tensors, target.capture()[1], strict=True))


def test_other_shapes() -> None:
    model, optimizer = pair()
    wide, wides = pair(width=7)
    refused(
        ProtectedState(model=model, optimizer=optimizer),
        ProtectedState(model=wide, optimizer=wides),
        r"model\.0\.weight is torch\.float32 of shape \(7, 4\) here but torch\.float32 of shape \(5, 4\) there; "
        r"model\.0\.bias .* more\. Run the same script",
    )


def test_other_dtypes_and_names() -> None:
    refused(ProtectedState(m=mlp()), ProtectedState(m=mlp().double()), r"m\.0\.weight is torch\.float64")
    refused(
        ProtectedState(m=nn.Linear(2, 2)),
        ProtectedState(m=nn.Bilinear(2, 2, 2, bias=False)),
        r"m\.bias is missing here; m\.weight is torch.float32 of shape \(2, 2, 2\) here but .*\(2, 2\) there",
    )
    refused(ProtectedState(m=nn.Linear(2, 2, bias=False)), ProtectedState(m=nn.Linear(2, 2)), r"m\.bias is only here")


def test_other_objects() -> None:
    model, optimizer = pair()
    sgd = torch.optim.SGD(model.parameters())
    refused(
        ProtectedState(model=model, a={}),
        ProtectedState(model=model, b={}),
        r"protected object a is missing here; protected object b is only here",
    )
    refused(ProtectedState(o=optimizer), ProtectedState(o=sgd), "o is a SGD here but a AdamW there")


def test_other_param_groups() -> None:
    model, optimizer = pair()
    parts = [list(model.parameters())[:2], list(model.parameters())[2:]]
    split = torch.optim.AdamW([{"params": part} for part in parts])
    refused(ProtectedState(o=optimizer), ProtectedState(o=split), "o has 2 param_groups here but 1 there")
    fewer = torch.optim.AdamW(parts[0])
    refused(
        ProtectedState(o=optimizer), ProtectedState(o=fewer), r"param_groups\[0\] has 2 parameters here but 6 there"
    )
    scheduled = torch.optim.AdamW(model.parameters())
    lrs.StepLR(scheduled, 1)
    refused(ProtectedState(o=optimizer), ProtectedState(o=scheduled), r"param_groups\[0\]\.initial_lr is only here")


def test_other_optimizer_state_is_named_by_its_parameter() -> None:
    model, optimizer = pair()
    other, others = pair()
    others.state[other[3].weight]["exp_avg"] = torch.zeros(3)
    refused(
        ProtectedState(model=model, opt=optimizer),
        ProtectedState(model=other, opt=others),
        r"opt\.state\[model\.3\.weight\]\.exp_avg is torch.float32 of shape \(3,\) here",
    )


def test_an_object_that_fails_to_load_is_put_back() -> None:
    mine, other, last = Scaler(), Scaler(), Scaler()
    mine.scale = 1.0
    last.refuses = True
    target = ProtectedState(a=other, m=mlp(1), z=last)
    refused(ProtectedState(a=mine, m=mlp(0), z=mine), target, r"z cannot take over .*KeyError: 'growth'.*Nothing")
    assert other.scale == last.scale == 65536.0


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        ({"f": lambda: 0}, "f is a function, which cannot be protected"),
        ({"user": {"a": [object()]}}, r"user\.a\[0\] is an object"),
        ({"m": nn.Linear(1, 1, device="meta")}, r"m\.weight is on the meta device"),
    ],
)
def test_what_cannot_be_protected(objects: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ProtectedState(**objects).capture()


def test_state_in_an_optimizer_that_is_no_data() -> None:
    model, optimizer = pair()
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(UsageError, match=r"opt\.param_groups\[0\]\.hook is a builtin_function_or_method"):
        ProtectedState(opt=optimizer).capture()
    del optimizer.param_groups[0]["hook"]
    optimizer.state[model[0].bias]["x"] = {1}
    with pytest.raises(UsageError, match=r"opt\.state\[model\.0\.bias\]\.x is a set"):
        ProtectedState(model=model, opt=optimizer).digest()


def test_tensors_that_are_not_those_of_the_manifest() -> None:
    state = ProtectedState(m=mlp())
    manifest, tensors = staged(state.capture())
    for wrong in (tensors[:-1], [*tensors, tensors[0]], [tensors[0].double(), *tensors[1:]], tensors[::-1]):
        with pytest.raises(ProtocolError):
            state.restore(manifest, wrong)


MANIFEST, TENSORS = ProtectedState(m=nn.Linear(1, 1), o=torch.optim.SGD([torch.ones(1)]), user={}).capture()


@pytest.mark.parametrize("cut", range(0, len(MANIFEST), 97))
def test_torn_manifests(cut: int) -> None:
    state = ProtectedState(m=nn.Linear(1, 1), o=torch.optim.SGD([torch.ones(1)]), user={})
    with pytest.raises(ProtocolError):
        state.restore(MANIFEST[:cut], TENSORS)


def replaced(value: Any, path: tuple[int, ...], by: Any) -> Any:
    if not path:
        return by
    items = list(value.items()) if isinstance(value, dict) else list(value)
    at = path[0] % len(items) if items else None
    if at is None:
        return by
    if isinstance(value, dict):
        return {key: replaced(item, path[1:], by) if n == at else item for n, (key, item) in enumerate(items)}
    return [replaced(item, path[1:], by) if n == at else item for n, item in enumerate(items)]


@pytest.mark.parametrize("by", [None, -1, 10**9, "x", [], {}, {"tensor": 99}, {"dict": []}, [["m", 5]]])
@pytest.mark.parametrize("path", [(0,), (1,), (1, 0), (1, 0, 2), (1, 1, 2), (1, 1, 2, 0), (1, 2, 2), (2,), (2, 0, 1)])
def test_malformed_manifests_never_do_more_than_raise(path: tuple[int, ...], by: Any) -> None:
    state = ProtectedState(m=nn.Linear(1, 1), o=torch.optim.SGD([torch.ones(1)]), user={})
    broken = plain.dump(replaced(plain.load(MANIFEST), path, by))
    before = state.digest()
    try:
        state.restore(broken, TENSORS)
    except PlanariaError:
        assert state.digest() == before


def test_digests_tell_apart() -> None:
    digests = {
        ProtectedState(m=model).digest()
        for model in (mlp(0), mlp(1), mlp(0).double(), mlp(0).bfloat16(), nn.Sequential(mlp(0)), nn.Linear(1, 1))
    }
    assert len(digests) == 6
    assert ProtectedState(m=mlp(0)).digest() in digests
    assert ProtectedState(a={"x": 1}, b={}).digest() == ProtectedState(b={}, a={"x": 1}).digest()
    assert ProtectedState(a={"x": 1.0}).digest() != ProtectedState(a={"x": 1}).digest()
    assert len(ProtectedState().digest()) == 32


def test_negative_zero_is_another_state() -> None:
    assert ProtectedState(u={"x": torch.tensor(0.0)}).digest() != ProtectedState(u={"x": torch.tensor(-0.0)}).digest()


# --- parameters spread over ranks -----------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fsdp_state_is_local(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ProtectedState]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, ProtectedState(model=model, optimizer=optimizer)

    model, optimizer, source = make(0)
    train(model, optimizer, None, 0, 2)
    other, others, target = make(1)
    moved(source, target)
    assert source.digest() == target.digest()
    train(model, optimizer, None, 2, 4)
    train(other, others, None, 2, 4)
    assert source.digest() == target.digest()
    exp_avg = next(iter(others.state.values()))["exp_avg"]
    assert type(exp_avg) is type(next(iter(other.parameters())).data)


def test_parts_of_spread_tensors_take_the_place_of_their_like(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    class Average:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value.copy_(state["value"])  # mixed with a plain tensor, torch refuses

    def spread(value: float) -> torch.Tensor:
        return distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)])

    ours, theirs = {"a": [spread(1.0)]}, {"a": [spread(2.0)]}
    moved(ProtectedState(d=theirs, o=Average(spread(3.0))), ProtectedState(d=ours, o=(average := Average(spread(4.0)))))
    assert type(ours["a"][0]) is type(average.value) is type(spread(0.0))
    assert ours["a"][0].full_tensor()[0, 0] == 2 and average.value.full_tensor()[0, 0] == 3  # type: ignore[attr-defined]
    refused(
        ProtectedState(d=theirs),
        ProtectedState(d={"a": []}),
        r"d\.a\[0\] is spread over the ranks of its group there, but nothing is in its place here that says how",
    )


def test_a_buffer_that_is_a_lazy_view_travels_as_its_values() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turned", torch.tensor([1 + 2j, 3 - 4j]).conj())

    one, other = Turned(), Turned()
    plain = Turned()
    plain.turned = plain.turned.resolve_conj()
    states = [ProtectedState(model=each) for each in (one, other, plain)]
    assert one.turned.is_conj() and len({state.digest() for state in states}) == 1
    other.turned.zero_()
    manifest, tensors = states[0].capture()
    states[1].restore(manifest, [tensor.clone() for tensor in tensors])
    assert torch.equal(other.turned, plain.turned)
