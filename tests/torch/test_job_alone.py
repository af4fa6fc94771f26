"""A script without `planaria run`: a job of one group that behaves in every way but the company."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planaria.torch as pt
from planaria.errors import NonFiniteError, UsageError
from planaria.wire.page import ProgressPage
from tests.interruptions import interrupt

POINTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOCKET", "DIR", "GROUPS", "SHARDS", "POLICY", "REDUCTION", "JOB", "GROUP"):
        monkeypatch.delenv(f"PLANARIA_{name}", raising=False)


def parts(shards: int = 4, **more: Any) -> tuple[pt.Job, nn.Module, torch.optim.Optimizer, pt.ShardedDataset]:
    job = pt.init(shards=shards, seed=1, **more)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return job, model, optimizer, pt.ShardedDataset(list(POINTS), batch_size=2)


def test_what_the_script_makes_by_default_is_its_own_business() -> None:
    def weights(odd: bool) -> list[torch.Tensor]:
        job, model, _, data = parts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        job.protect(model=model, optimizer=optimizer)
        if odd:
            torch.set_default_dtype(torch.bfloat16)
            torch.set_default_device("meta")
        for step in job.steps(3):
            for batch in step.batches(data):
                model(batch).pow(2).mean().backward()
            job.clip_grad_norm_(0.1)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    try:
        odd = weights(True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, odd, weights(False)))


def train(job: pt.Job, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, steps: int) -> list[float]:
    losses = []
    for step in job.steps(steps):
        for batch in step.batches(data):
            loss = model(batch).pow(2).mean()
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
        losses.append(step.metrics["loss"])
    return losses


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("agreed", [False, True])
def test_an_exchange_that_is_complete_counts_whatever_comes_then(monkeypatch: pytest.MonkeyPatch, agreed: bool) -> None:
    results = []
    for interrupted in (False, True):
        with monkeypatch.context() as patch:
            complete = interrupt(patch, agreed) if interrupted else []
            job, model, optimizer, data = parts()
            job.protect(model=model, optimizer=optimizer)
            train(job, model, optimizer, data, 4)
            results.append(weights(model))
            assert complete[:2] == [True] * 2 * interrupted and sum(complete) == 4 * interrupted
    assert all(map(torch.equal, *results))


def test_two_runs_have_the_same_bits_and_learn() -> None:
    results = []
    for _ in range(2):
        job, model, optimizer, data = parts()
        job.protect(model=model, optimizer=optimizer)
        losses = train(job, model, optimizer, data, 20)
        results.append((losses, weights(model)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    assert results[0][0][-1] < results[0][0][0]


def test_gradients_are_the_mean_over_all_shards() -> None:
    job, model, optimizer, data = parts(shards=4)
    model[2].p = 0.0  # no dropout, so that plain autograd gives the same
    job.protect(model=model, optimizer=optimizer)
    seen: list[torch.Tensor] = []
    for step in job.steps(1):
        for batch in step.batches(data):
            seen.append(batch)
            model(batch).pow(2).mean().backward()
        ours = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        for batch in seen:
            (model(batch).pow(2).mean() / 4).backward()
        for mine, theirs in zip(ours, model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.grad)
    assert len(seen) == 4


@pytest.mark.parametrize("named", [list, tuple, lambda parts: dict(zip("ab", parts, strict=True))])
def test_models_in_lists_and_dictionaries_are_trained_like_others(named: Any) -> None:
    digests = []
    for apart in (False, True):
        job, model, optimizer, data = parts()
        if apart:
            job.protect(body=model[:1], heads=named([model[1:3], model[3:]]), optimizer=optimizer)
        else:
            job.protect(model=model, optimizer=optimizer)
        train(job, model, optimizer, data, 4)
        digests.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*digests, strict=True))


def test_micro_batches_accumulate_within_a_shard() -> None:
    job, model, optimizer, _ = parts(shards=2)
    data = pt.ShardedDataset(list(POINTS), batch_size=2, micro_batches=3)
    job.protect(model=model, optimizer=optimizer)
    counts = []
    for step in job.steps(2):
        counts.append(sum(1 for batch in step.batches(data) if model(batch).sum().backward() is None))
        optimizer.step()
    assert counts == [6, 6]


def test_traces_in_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_DIR", str(tmp_path / "rank"))
    job, model, optimizer, data = parts()
    job.protect(model=model, optimizer=optimizer)
    losses = train(job, model, optimizer, data, 5)
    lines = [json.loads(line) for line in (tmp_path / "rank" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["shards"], line["loss"]) for line in lines] == [(s, 4, x) for s, x in enumerate(losses)]
    result = json.loads((tmp_path / "rank" / "result.json").read_text())
    assert result["step"] == 5 and len(result["digest"]) == 32
    page = ProgressPage.open(tmp_path / "rank" / "progress")
    assert [step for step, _ in page.commits()] == [1, 2, 3, 4, 5]
    page.close()


def test_random_numbers_do_not_depend_on_the_scripts_own_draws() -> None:
    results = []
    for extra in (0, 3):
        job, model, optimizer, data = parts()
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(4):
            for batch in step.batches(data):
                model(batch).sum().backward()
                torch.rand(extra)  # what a group draws in one shard must not reach the next
            optimizer.step()
        results.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- what the script does wrong -------------------------------------------------------------------------------


def test_steps_without_protect() -> None:
    job, *_ = parts()
    with pytest.raises(UsageError, match=r"job.protect\(model=...\)"):
        next(iter(job.steps(1)))


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps(steps: int) -> None:
    job, model, *_ = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="at least one step"):
        next(iter(job.steps(steps)))


def test_steps_twice() -> None:
    job, model, optimizer, data = parts()
    job.protect(model=model, optimizer=optimizer)
    train(job, model, optimizer, data, 1)
    with pytest.raises(UsageError, match="called once"):
        next(iter(job.steps(1)))


def test_protect_after_the_start_and_a_taken_name() -> None:
    job, model, optimizer, data = parts()
    with pytest.raises(UsageError, match="name is taken"):
        job.protect(planaria=model)
    job.protect(model=model, optimizer=optimizer)
    train(job, model, optimizer, data, 1)
    with pytest.raises(UsageError, match=r"before job\.steps"):
        job.protect(late={})


def test_a_body_that_does_not_use_the_batches() -> None:
    job, model, *_ = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match=r"step.batches\(data\)"):
        for _ in job.steps(2):
            pass


def test_a_body_that_leaves_the_batches_early() -> None:
    job, model, _, data = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match=r"step.batches\(data\)"):
        for step in job.steps(2):
            for batch in step.batches(data):
                model(batch).sum().backward()
                break


def test_frozen_models_have_nothing_to_train() -> None:
    job, model, *_ = parts()
    job.protect(model=model.requires_grad_(False))
    with pytest.raises(UsageError, match="no parameters that need gradients"):
        next(iter(job.steps(1)))


def test_buffers_that_forward_changes() -> None:
    job, _, _, data = parts()
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    job.protect(model=model)
    with pytest.raises(UsageError, match=r"buffer model.1.* changed in the forward pass"):
        for step in job.steps(1):
            for batch in step.batches(data):
                model(batch).sum().backward()


def test_a_loss_that_is_not_a_number_names_step_and_shard() -> None:
    job, model, optimizer, data = parts()
    job.protect(model=model, optimizer=optimizer)
    before: list[torch.Tensor] = []
    with pytest.raises(NonFiniteError, match=r"step 2: .* from shard 1\."):
        for step in job.steps(5):
            for index, batch in enumerate(step.batches(data)):
                bad = step.index == 2 and index == 1
                loss = model(batch).sum() * (math.nan if bad else 1.0)
                loss.backward()
                step.record(loss=loss)
            optimizer.step()
            before = weights(model)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_gradients_that_are_not_finite_though_nothing_was_recorded() -> None:
    job, model, _, data = parts(shards=1)
    job.protect(model=model)
    with pytest.raises(NonFiniteError, match=r"step 0: .* from shard 0\."):
        for step in job.steps(1):
            for batch in step.batches(data):
                (model(batch).sum() * math.inf).backward()


@pytest.mark.parametrize("allowed", [False, True])
def test_gradients_in_some_shards_only(allowed: bool) -> None:
    job, _, _, data = parts()
    used, other = nn.Linear(4, 1), nn.Linear(4, 1)
    job.protect(used=used, other=other, allow_unused=allowed)

    def run() -> None:
        for step in job.steps(1):
            for index, batch in enumerate(step.batches(data)):
                out = used(batch) if index % 2 else used(batch) + other(batch)
                out.sum().backward()
            assert other.weight.grad is not None

    if allowed:
        run()
    else:
        with pytest.raises(UsageError, match=r"other.weight got a gradient .* none in shards \[1, 3\]"):
            run()


def test_a_parameter_that_no_shard_uses_has_no_gradient() -> None:
    job, _, _, data = parts()
    used, other = nn.Linear(4, 1), nn.Linear(4, 1)
    job.protect(used=used, other=other)
    for step in job.steps(1):
        for batch in step.batches(data):
            used(batch).sum().backward()
        assert used.weight.grad is not None and other.weight.grad is None


def test_two_backwards_for_a_batch() -> None:
    for overlap in (True, False):
        job, model, _, data = parts()
        job.protect(model=model, overlap=overlap)

        def run(job: pt.Job = job, model: nn.Module = model, data: Any = data) -> None:
            for step in job.steps(1):
                for batch in step.batches(data):
                    model(batch).sum().backward()
                    model(batch).pow(2).sum().backward()

        if overlap:
            with pytest.raises(UsageError, match="overlap=False"):
                run()
        else:
            run()


def test_other_metrics_than_before() -> None:
    job, model, _, data = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="record the same names"):
        for step in job.steps(1):
            for index, batch in enumerate(step.batches(data)):
                model(batch).sum().backward()
                step.record(**{f"loss{index}": 1.0})


def test_too_many_metrics() -> None:
    job, model, _, data = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="at most 8 metrics"):
        for step in job.steps(1):
            for batch in step.batches(data):
                model(batch).sum().backward()
                step.record(**{f"metric{i}": 1.0 for i in range(9)})


def stream(shard: int, cursor: int) -> Iterator[tuple[torch.Tensor, int]]:
    for position in range(cursor, 1000):
        yield POINTS[(7 * shard + position) % 64], position + 1


def test_streams_must_be_protected_and_then_keep_their_place() -> None:
    job, model, _, _ = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="data=data"):
        for step in job.steps(1):
            next(step.batches(pt.ShardedStream(stream, batch_size=2)))
    job, model, optimizer, _ = parts()
    data = pt.ShardedStream(stream, batch_size=2)
    job.protect(model=model, optimizer=optimizer, data=data)
    train(job, model, optimizer, data, 3)
    assert data.state_dict() == {"cursors": [6, 6, 6, 6]}


def test_one_job_reads_one_dataset() -> None:
    job, model, _, data = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="one dataset"):
        for step in job.steps(2):
            for batch in step.batches(data if step.index == 0 else pt.ShardedDataset(list(POINTS), batch_size=2)):
                model(batch).sum().backward()


def test_a_dataset_smaller_than_a_step() -> None:
    job, model, *_ = parts(shards=64)
    job.protect(model=model)
    with pytest.raises(UsageError, match="64 samples but one step needs 128"):
        for step in job.steps(1):
            for _ in step.batches(pt.ShardedDataset(list(POINTS), batch_size=2)):
                pass


def test_a_buffer_that_forward_replaces() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            self.seen = 0.9 * self.seen + out.detach().mean()
            return out

    job, _, _, data = parts()
    model = Average()
    job.protect(model=model)
    with pytest.raises(UsageError, match=r"buffer model.seen changed in the forward pass"):
        for step in job.steps(1):
            for batch in step.batches(data):
                model(batch).sum().backward()


def test_parameters_that_are_unfrozen_later() -> None:
    job, model, optimizer, data = parts()
    model[0].requires_grad_(False)
    job.protect(model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match=r"step 1: requires_grad of model.0.weight was False .* True now"):
        for step in job.steps(3):
            for batch in step.batches(data):
                model(batch).sum().backward()
            model[0].requires_grad_(True)


def test_batches_twice_in_a_step() -> None:
    job, model, _, data = parts()
    job.protect(model=model)
    with pytest.raises(UsageError, match="gone through once"):
        for step in job.steps(1):
            for _ in range(2):
                for batch in step.batches(data):
                    model(batch).sum().backward()
