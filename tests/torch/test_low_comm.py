"""The methods of low communication beside the papers' formulas in plain PyTorch. One process; tests/e2e has kills."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planaria.torch as pt
from planaria.errors import NonFiniteError, UsageError
from planaria.torch.fragments import cut
from planaria.torch.low_comm import LowCommunication
from planaria.torch.low_comm_worker import LowCommWorker
from planaria.torch.sync_part import SyncPart

POINTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOCKET", "DIR", "GROUPS", "SHARDS", "POLICY", "REDUCTION", "JOB", "GROUP", "REPLAY"):
        monkeypatch.delenv(f"PLANARIA_{name}", raising=False)


def new(shards: int = 1, **more: Any) -> tuple[pt.Job, nn.Module, torch.optim.Optimizer, pt.ShardedDataset]:
    job = pt.init(shards=shards, seed=1, **more)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    return job, model, inner, pt.ShardedDataset(list(POINTS), batch_size=2)


def run(
    job: pt.Job, model: nn.Module, inner: torch.optim.Optimizer, data: Any, rounds: int, scheduler: Any = None
) -> None:
    for step in job.steps(rounds):
        for batch in step.batches(data):
            loss = model(batch).pow(2).mean()
            loss.backward()
            step.record(loss=loss)
            inner.step()
            inner.zero_grad()
            if scheduler is not None:
                scheduler.step()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def batches_of(shards: int, shard: int, steps: range) -> Iterator[Tensor]:
    data = pt.ShardedDataset(list(POINTS), batch_size=2)
    data.bind(shards, seed=1)
    for step in steps:
        yield from data.batches(step, shard)


def train_plainly(model: nn.Module, inner: torch.optim.Optimizer, batches: Iterator[Tensor]) -> None:
    for batch in batches:
        model(batch).pow(2).mean().backward()
        inner.step()
        inner.zero_grad()


@pytest.mark.parametrize("shards", [1, 4])
def test_diloco_is_the_papers(shards: int) -> None:
    every, rounds = 3, 5
    job, model, inner, data = new(shards)
    reference = copy.deepcopy(model)
    job.protect(sync=pt.DiLoCo(model, inner, every=every, exact=True))
    run(job, model, inner, data, rounds)

    outer = torch.optim.SGD(reference.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(rounds):
        steps = range(number * every, (number + 1) * every)
        replicas = [copy.deepcopy(reference) for _ in range(shards)]
        for shard, replica in enumerate(replicas):
            fresh = torch.optim.AdamW(replica.parameters(), lr=0.02)
            train_plainly(replica, fresh, batches_of(shards, shard, steps))
        for index, p in enumerate(reference.parameters()):
            deltas = [p.detach() - list(replica.parameters())[index].detach() for replica in replicas]
            total = (deltas[0] + deltas[1]) + (deltas[2] + deltas[3]) if shards == 4 else deltas[0]
            p.grad = total / shards
        outer.step()
    assert all(map(torch.equal, values(model), values(reference)))


def test_an_inner_optimizer_goes_on_over_rounds_unless_exact() -> None:
    job, model, inner, data = new()
    reference = copy.deepcopy(model)
    job.protect(sync=pt.LocalSGD(model, inner, every=4))
    run(job, model, inner, data, 5)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.02)
    train_plainly(reference, plain, batches_of(1, 0, range(20)))
    # One group's mean is its own, but for rounding: p - (p - q).
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(values(model), values(reference), strict=True)
    )


class Counting(torch.optim.Optimizer):
    """With state in attributes: its rate falls with every step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.made, self.sums = 0, [torch.zeros(1)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.made += 1
        self.sums[0] += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.made
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad


def test_an_inner_optimizer_with_state_in_attributes_begins_anew_too() -> None:
    results = []
    for shards in (1, 4):
        job, model, _, data = new(shards)
        inner = Counting(model.parameters(), 0.05)
        job.protect(sync=pt.DiLoCo(model, inner, every=3, exact=True))
        run(job, model, inner, data, 4)
        results.append((inner.made, float(inner.sums[0]), inner.param_groups[0]["lr"]))
    assert results == [(0, 0.0, 0.05 / 3)] * 2


def test_paced_groups_refuse_what_depends_on_how_many_steps_they_make() -> None:
    job, model, inner, data = new()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 18)
    job.protect(sync=pt.DiLoCo(model, inner, every=3, paced=True), scheduler=scheduler)
    with pytest.raises(UsageError, match="set learning rates from"):
        run(job, model, inner, data, 2, scheduler)


def test_who_makes_fewer_steps_goes_through_their_numbers_in_larger_strides() -> None:
    _, model, inner, _ = new()
    sync = pt.DiLoCo(model, inner, every=10, paced=True)
    part = SyncPart("sync", sync)
    for steps in (10, 7, 3, 1):
        part.begin(2, steps)
        seen = []
        for _ in range(steps):
            seen.append(sync.inner_step)
            inner.step()
        assert seen[-1] == 29 and sync.inner_step == 30 and seen == sorted(set(seen)) and seen[0] >= 20


def test_streaming_is_the_papers() -> None:
    every, rounds, delay, mix = 6, 7, 1, 0.25
    job, model, inner, data = new()
    local = copy.deepcopy(model)
    fragments = [[model[0], model[4]], [model[2].weight], model[2].bias]
    sync = pt.StreamingDiLoCo(model, inner, every=every, fragments=fragments, delay=delay, mix=mix)
    job.protect(sync=sync)
    run(job, model, inner, data, rounds)

    members = [[0, 1, 4, 5], [2], [3]]
    shared = copy.deepcopy(local)
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    plain = torch.optim.AdamW(local.parameters(), lr=0.02)
    steps = every // len(members)
    for number in range(rounds):
        first = number * steps
        train_plainly(local, plain, batches_of(1, 0, range(first, first + steps - delay)))
        pairs = list(zip(shared.parameters(), local.parameters(), strict=True))
        chosen = [pairs[index] for index in members[number % len(members)]]
        for mine, theirs in chosen:
            mine.grad = mine.detach() - theirs.detach()
        train_plainly(local, plain, batches_of(1, 0, range(first + steps - delay, first + steps)))
        outer.step()
        outer.zero_grad()
        with torch.no_grad():
            for mine, theirs in chosen:
                theirs.copy_(mix * theirs + (1 - mix) * mine)
    # The result is what the groups share.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(values(model), values(shared), strict=True))


@pytest.mark.parametrize("tensor", [False, True])
def test_learning_rates_of_a_round_do_not_depend_on_how_many_shards_a_group_computes(tensor: bool) -> None:
    results = []
    for shards in (1, 4):
        job, model, inner, data = new(shards)
        if tensor:
            inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=13)
        job.protect(sync=pt.DiLoCo(model, inner, every=3, exact=True), scheduler=scheduler)
        run(job, model, inner, data, 4, scheduler)
        results.append((scheduler.last_epoch, float(inner.param_groups[0]["lr"]), inner.param_groups[0]["betas"]))
    assert results[0] == results[1]
    assert results[0][0] == 12


def test_a_group_without_a_shard_to_compute_changes_nothing_but_learning_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the loop's body all the same, and what that makes of the model is dropped."""
    end_shard = LowCommWorker._end_shard

    def and_forget(self: LowCommWorker, *arguments: Any) -> None:
        end_shard(self, *arguments)
        self._computed = False  # it is told that it has computed none, when all shards are done

    def outcome() -> tuple[list[Tensor], int]:
        bodies: list[None] = []
        job, model, inner, data = new(2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=13)
        stepped = inner.register_step_post_hook(lambda *_: bodies.append(None))
        job.protect(sync=pt.DiLoCo(model, inner, every=3, exact=True), scheduler=scheduler)
        run(job, model, inner, data, 4, scheduler)
        stepped.remove()
        return [*values(model), torch.tensor(inner.param_groups[0]["lr"])], len(bodies)

    expected, steps = outcome()
    monkeypatch.setattr(LowCommWorker, "_end_shard", and_forget)
    found, more = outcome()
    assert all(map(torch.equal, found, expected))
    assert (steps, more) == (24, 36)


def test_inner_steps_that_are_made_again_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was left out has to go on from what it has if all others die meanwhile, and what it had computed
    does not count. Then its own state is that after the inner steps, not that before them."""
    end_shard = LowCommWorker._end_shard
    lost: list[int] = []

    def and_lose(self: LowCommWorker, *arguments: Any) -> None:
        end_shard(self, *arguments)
        if self.step == 2 and not lost:
            lost.append(self.step)
            self.session.stepper.have.clear()

    def outcome(anew: bool) -> list[Any]:
        job, model, inner, data = new()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=13)
        sync = pt.DiLoCo(model, inner, every=3)
        job.protect(sync=sync, scheduler=scheduler)
        for step in job.steps(4):
            assert sync.part is not None
            if anew and step.index == 2:
                sync.part.kept = None
            for batch in step.batches(data):
                model(batch).pow(2).mean().backward()
                inner.step()
                inner.zero_grad()
                scheduler.step()
        assert sync.part is not None
        return [*map(Tensor.tolist, values(model)), scheduler.last_epoch, sync.part.membership.changes]

    expected = outcome(anew=True)
    assert expected[-1] == [[0, [0], [0], [], []], [2, [0], [0], [], []]]
    monkeypatch.setattr(LowCommWorker, "_end_shard", and_lose)
    assert outcome(anew=False) == expected
    assert lost == [2]


def test_streams_go_on_where_the_round_before_ended() -> None:
    job, model, inner, _ = new(2)
    seen: dict[int, list[float]] = {0: [], 1: []}

    def lines(shard: int, cursor: int) -> Iterator[tuple[Tensor, int]]:
        for number in range(cursor, 100):
            seen[shard].append(number)
            yield POINTS[number % 64], number + 1

    data = pt.ShardedStream(lines, batch_size=2)
    job.protect(sync=pt.DiLoCo(model, inner, every=3, exact=True), data=data)
    run(job, model, inner, data, 4)
    assert seen == {0: list(range(24)), 1: list(range(24))}


def test_tokens_are_weights() -> None:
    every = 2
    job, model, inner, data = new(2)
    reference = copy.deepcopy(model)
    sync = pt.DiLoCo(model, inner, every=every, exact=True, outer=lambda p: torch.optim.SGD(p, lr=1.0))
    job.protect(sync=sync)
    heavy = next(batches_of(2, 1, range(0, every)))
    for step in job.steps(1):
        weight = 1.0
        for number, batch in enumerate(step.batches(data)):
            if number % every == 0:
                weight = 3.0 if torch.equal(batch, heavy) else 1.0
            model(batch).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
            sync.count(weight)
    replicas = [copy.deepcopy(reference) for _ in range(2)]
    for shard, replica in enumerate(replicas):
        train_plainly(replica, torch.optim.AdamW(replica.parameters(), lr=0.02), batches_of(2, shard, range(every)))
    for found, one, three in zip(values(model), values(replicas[0]), values(replicas[1]), strict=True):
        assert torch.allclose(found, (one + 3 * three) / 4, rtol=1e-5, atol=1e-6)


def test_what_fewer_steps_have_made_weighs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    job, model, inner, data = new(2)
    reference = copy.deepcopy(model)
    job.protect(sync=pt.DiLoCo(model, inner, every=4, exact=True, outer=lambda p: torch.optim.SGD(p, lr=1.0)))
    whole: list[float] = []

    def paced(self: LowCommWorker, step: int, shard: int) -> int:
        return (4, 2)[shard]

    end_shard = LowCommWorker._end_shard

    def and_ask(self: LowCommWorker, *arguments: Any) -> None:
        end_shard(self, *arguments)
        whole.append(self._whole(3.0))

    monkeypatch.setattr(LowCommWorker, "_steps_of", paced)
    monkeypatch.setattr(LowCommWorker, "_end_shard", and_ask)
    run(job, model, inner, data, 1)
    assert whole == [3.0, 6.0], "speeds are those of whole rounds, or the slow one's pace would go up and down"
    replicas = [copy.deepcopy(reference) for _ in range(2)]
    for shard, (replica, steps) in enumerate(zip(replicas, (4, 2), strict=True)):
        train_plainly(replica, torch.optim.AdamW(replica.parameters(), lr=0.02), batches_of(2, shard, range(steps)))
    for found, four, two in zip(values(model), values(replicas[0]), values(replicas[1]), strict=True):
        assert torch.allclose(found, (2 * four + two) / 3, rtol=1e-5, atol=1e-6)


def test_half_precision_parameters_have_shared_ones_that_add_up_small_changes() -> None:
    job = pt.init(seed=1)
    model = nn.Linear(4, 2).to(torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    sync = pt.DiLoCo(model, inner, every=2)
    job.protect(sync=sync)
    data = pt.ShardedDataset(list(POINTS.to(torch.bfloat16)), batch_size=2)
    run(job, model, inner, data, 3)
    assert sync.part is not None
    for (name, local), (same, shared) in zip(sync.part.trained, sync.part.shared_of(0), strict=True):
        assert name == same and local.dtype == torch.bfloat16 and shared.dtype == torch.float32
        assert torch.equal(local.detach(), shared.detach().to(torch.bfloat16))


def test_what_half_precision_rounds_away_is_no_change() -> None:
    model = nn.Linear(8, 8).to(torch.bfloat16)
    part = SyncPart("sync", pt.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), every=1))
    shared = part.shared_of(0)
    with torch.no_grad():
        for _, parameter in shared:
            parameter += torch.rand_like(parameter) * 1e-3  # between two numbers of half precision
    part.renew()
    part.begin(0, 1)
    assert all(not change.any() for change in part.changes(0))


def test_shared_parameters_can_be_looked_at_while_groups_have_their_own() -> None:
    job, model, inner, data = new()
    sync = pt.StreamingDiLoCo(model, inner, every=4, fragments=2, delay=0)
    job.protect(sync=sync)
    for step in job.steps(3):
        for batch in step.batches(data):
            model(batch).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
        own = values(model)
        with sync.shared():
            shared = values(model)
            assert sync.part is not None
            assert all(torch.equal(a, b) for a, b in zip(shared, sync_values(sync), strict=True))
        assert all(map(torch.equal, own, values(model)))
        assert not all(map(torch.equal, own, shared))
        assert sync.inner_step == 2 * (step.index + 1)


def sync_values(sync: LowCommunication) -> list[Tensor]:
    assert sync.part is not None
    named = dict(pair for number in range(len(sync.part.fragments)) for pair in sync.part.shared_of(number))
    return [named[name].detach() for name, _ in sync.part.trained]


def test_what_is_not_finite_everywhere_stops_the_job_and_names_the_sync() -> None:
    for exact, what in ((False, "sync 2: what groups 0"), (True, "step 2: .*shard 0")):
        job, model, inner, data = new()
        job.protect(sync=pt.DiLoCo(model, inner, every=2, exact=exact))
        before: list[Tensor] = []
        with pytest.raises(NonFiniteError, match=what):
            for step in job.steps(4):
                for number, batch in enumerate(step.batches(data)):
                    (model(batch).pow(2).mean() * (math.nan if step.index == 2 and number == 1 else 1)).backward()
                    inner.step()
                    inner.zero_grad()
                before = values(model)
        assert before and all(bool(v.isfinite().all()) for v in before)


def test_a_job_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Bit for bit where the inner state does not outlive a round."""

    def job_of(rounds: int, folder: str) -> list[Tensor]:
        job, model, inner, data = new(2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 18)
        job.protect(sync=pt.DiLoCo(model, inner, every=3, exact=True), scheduler=scheduler)
        job.checkpoint(tmp_path / folder, every=2)
        for step in job.steps(6):
            for batch in step.batches(data):
                model(batch).pow(2).mean().backward()
                inner.step()
                inner.zero_grad()
                scheduler.step()
            if step.index == rounds - 1 and rounds < 6:
                break
        return values(model)

    whole = job_of(6, "whole")
    job_of(5, "parts")
    assert all(map(torch.equal, job_of(6, "parts"), whole))


def test_what_a_void_body_has_left_moves_no_other_fragment() -> None:
    """A body that is void ends on zero gradients; with momentum even these would move parameters."""
    results = []
    for void in (False, True):
        job, model, inner, data = new()
        sync = pt.StreamingDiLoCo(model, inner, every=4, fragments=2, delay=0)
        job.protect(sync=sync)
        for step in job.steps(6):
            for batch in step.batches(data):
                if void and sync.part is not None:
                    for _, shared in sync.part.shared_of((step.index + 1) % 2):
                        shared.grad = torch.zeros_like(shared)
                model(batch).pow(2).mean().backward()
                inner.step()
                inner.zero_grad()
        results.append(values(model))
    assert all(map(torch.equal, *results))


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments", "sentence"),
    [
        (pt.DiLoCo, {"every": 0}, "every must be a whole number of at least 1, not 0"),
        (pt.LocalSGD, {"every": 2.5}, "every must be a whole number"),
        (pt.StreamingDiLoCo, {"every": 5, "fragments": 2}, "every=5 inner steps cannot be divided by 2"),
        (pt.StreamingDiLoCo, {"every": 4, "fragments": 0}, "fragments must be a whole number of at least 1"),
        (pt.StreamingDiLoCo, {"every": 4, "fragments": 2, "delay": 2}, "delay=2 must be less than the 2 inner steps"),
        (pt.StreamingDiLoCo, {"every": 4, "fragments": 2, "delay": -1}, "delay must be a whole number of at least 0"),
        (pt.StreamingDiLoCo, {"every": 4, "fragments": 2, "mix": 1.0}, "mix=1.0 must be at least 0 and below 1"),
        (pt.DiLoCo, {"every": 4, "outer_lr": 0.0}, "outer_lr=0.0"),
        (pt.DiLoCo, {"every": 4, "exact": True, "paced": True}, "rule each other out"),
    ],
)
def test_numbers_that_cannot_be(method: Any, arguments: dict[str, Any], sentence: str) -> None:
    _, model, inner, _ = new()
    with pytest.raises(UsageError, match=sentence):
        method(model, inner, **arguments)


def test_protected_things_that_cannot_be() -> None:
    _, model, inner, _ = new()
    sync = pt.DiLoCo(model, inner, every=2)
    cases = {
        "the inner optimizer of sync": {"sync": sync, "optimizer": inner},
        "whose parameters are those of sync": {"sync": sync, "model": model},
        "one method of low communication": {"sync": sync, "other": pt.LocalSGD(model, inner, every=2)},
        "exactly the parameters": {
            "sync": pt.DiLoCo(model, inner, every=2, outer=lambda _: torch.optim.SGD(model.parameters(), lr=1.0))
        },
        "must make an optimizer": {"sync": pt.DiLoCo(model, inner, every=2, outer=list)},  # type: ignore[arg-type]
        "rules out": {"sync": pt.DiLoCo(model, inner, every=2, exact=True)},
    }
    for sentence, objects in cases.items():
        job = pt.init(seed=1, policy="shrink" if sentence == "rules out" else None)
        job.protect(**objects)
        with pytest.raises(UsageError, match=sentence):
            next(iter(job.steps(2)))


def test_the_inner_optimizer_is_not_stepped_after_the_batches() -> None:
    job, model, inner, data = new()
    job.protect(sync=pt.DiLoCo(model, inner, every=2))
    with pytest.raises(UsageError, match="was stepped after"):
        for step in job.steps(2):
            for batch in step.batches(data):
                model(batch).pow(2).mean().backward()
                inner.step()
            inner.step()


@pytest.mark.parametrize("calls", [0, 2])
def test_the_inner_optimizer_is_stepped_once_for_each_batch(calls: int) -> None:
    job, model, inner, data = new()
    job.protect(sync=pt.DiLoCo(model, inner, every=2))
    with pytest.raises(UsageError, match=f"has made {2 * calls} steps where 2 are due"):
        for step in job.steps(1):
            for batch in step.batches(data):
                model(batch).pow(2).mean().backward()
                for _ in range(calls):
                    inner.step()


def test_fragments_hold_every_parameter_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    named = list(model.named_parameters())
    assert cut(named, 2) == ((0, 1, 4, 5), (2, 3))  # block i goes to fragment i modulo 2
    assert cut(named, [model[2], [model[0], model[1].weight, model[1].bias]]) == ((4, 5), (0, 1, 2, 3))
    for fragments, sentence in (
        ([model[0], model[1]], "no fragment has the parameters 2.weight, 2.bias"),
        ([model, model[0].weight], "0.weight is in the fragments 0 and 1"),
        ([model, nn.Linear(2, 2)], "that is not in the model"),
        ([model, []], "fragment 1 has no parameters"),
        ([model, "0.weight"], "fragment 1 is a str"),
        (4, "make no 4 fragments"),
    ):
        with pytest.raises(UsageError, match=sentence):
            cut(named, fragments)  # type: ignore[arg-type]


def test_what_is_in_no_block_goes_to_the_smallest_fragment() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.norm = nn.RMSNorm(4)

    named = list(Model().named_parameters())
    names = [[named[index][0] for index in fragment] for fragment in cut(named, 2)]
    assert names[0] == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias", "norm.weight"]
    assert names[1] == ["embedding.weight", "layers.1.weight", "layers.1.bias"]
