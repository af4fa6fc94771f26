"""The planner's simulation against what can be computed, what others have published, and the code that it asks."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from planaria.core.assignment import contiguous, fill
from planaria.core.plan import GroupState, Observed, ObservedGroup, PlanSpec, Start, next_wakeup, plan
from planaria.sim.goodput import closed_form
from planaria.sim.goodput.cluster import DAY, HOUR, Failure, Hazards, Layout, Sign
from planaria.sim.goodput.ledger import Outcome
from planaria.sim.goodput.replacements import Replacements
from planaria.sim.goodput.run import Costs, run
from planaria.sim.goodput.search import Question, answer
from planaria.sim.goodput.shares import busiest, taken_over
from planaria.sim.goodput.strategies import ALL, CHECKPOINT, DROP, REDISTRIBUTE, SHRINK, SPARE, SPARES, Strategy

SOFT = Hazards(hard=0.0, dark=0.0, hang=0.0)  # nothing has to be repaired, and all is seen at once
NEVER = Costs(every=1e12, save=0.0)


def died(at: float, hard: bool = False, repair: float = 1e12) -> Failure:
    return Failure(at, 0.0, hard, Sign.DEATH, repair=repair)


def mean(layout: Layout, strategy: Strategy, costs: Costs, hazards: Hazards, days: float, seeds: int) -> float:
    outcomes = [
        run(layout, strategy, costs, hazards.failures(layout.gpus, seed, days * DAY), days * DAY)
        for seed in range(seeds)
    ]
    return fmean(each.effective for each in outcomes)


# --- limits that can be computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL, ids=lambda each: each.name)
def test_without_failures_all_is_kept_but_overhead_and_checkpoints(strategy: Strategy) -> None:
    outcome = run(Layout(64, 8), strategy, Costs(every=95.0, save=5.0), [], DAY)
    assert outcome.effective == pytest.approx(0.95 / strategy.overhead)
    assert outcome.steps == pytest.approx(0.95 * DAY / 10 / strategy.overhead)
    assert outcome.discarded == 0 and outcome.samples_lost == 0


@pytest.mark.parametrize("mtbf_minutes", [18, 180])
def test_checkpoint_and_restart_is_dalys_model(mtbf_minutes: float) -> None:
    gpus, mtbf = 1024, mtbf_minutes * 60
    hazards = replace(SOFT, mtbf_gpu_hours=mtbf * gpus / HOUR)
    every = closed_form.young(5.0, mtbf)
    found = mean(Layout(gpus, 8), CHECKPOINT, Costs(every, 5.0), hazards, days=60, seeds=6)
    assert found == pytest.approx(closed_form.daly(every, 5.0, CHECKPOINT.restart, mtbf), abs=0.01)


def test_youngs_interval_is_about_the_best() -> None:
    layout, hazards = Layout(16_384, 128), replace(SOFT, mtbf_gpu_hours=50_000)
    every = closed_form.young(5.0, 50_000 * HOUR / 16_384)
    at, rare, often = (
        mean(layout, CHECKPOINT, Costs(each, 5.0), hazards, 60, 8) for each in (every, 5 * every, every / 5)
    )
    assert at > rare and at > often


def test_pauses_and_absence_are_those_of_the_closed_forms() -> None:
    layout = Layout(8_000, 8, shards_per_group=1)
    hazards = replace(SOFT, mtbf_gpu_hours=8_000 * 60 / HOUR)  # one a minute
    paused = replace(SHRINK, overhead=1.0, heal=False, soft_start=90.0)
    rate = 1 / 60
    found = mean(layout, replace(paused, stall=5.0), NEVER, hazards, days=2, seeds=4)
    absent = closed_form.absent(rate, 90.0, layout.groups)
    assert found == pytest.approx(closed_form.pauses(5.0, 60.0) * (1 - absent), abs=0.004)


def test_one_group_lost_for_ever() -> None:
    layout, losses = Layout(128, 8, shards_per_group=16), [died(0.0, hard=True)]
    shrink, drop = (run(layout, each, NEVER, losses, 100 * DAY) for each in (SHRINK, DROP))
    assert shrink.effective * SHRINK.overhead == pytest.approx(15 / 16, abs=1e-4)
    assert drop.effective * DROP.overhead == pytest.approx(15 / 16, abs=1e-4)
    assert shrink.samples_lost == pytest.approx(1 / 16, abs=1e-4)
    # 256 shards for 15 groups: somebody has 18, and the others wait for it.
    taken = run(layout, REDISTRIBUTE, NEVER, losses, 100 * DAY)
    assert taken.effective * REDISTRIBUTE.overhead == pytest.approx(16 / 18, abs=1e-4)
    assert taken.samples_lost == 0
    assert taken.ledger.absent / taken.ledger.total * REDISTRIBUTE.overhead == pytest.approx(1 / 16, abs=1e-4)
    # Who cannot do with fewer waits, for ever without a spare.
    assert run(layout, SPARES, NEVER, losses, DAY).ledger.waiting == pytest.approx(DAY)
    spare = replace(layout, gpus=136, spares=1)
    assert run(spare, SPARES, NEVER, losses, 100 * DAY).effective == pytest.approx(1.0, abs=1e-4)


def test_what_one_failure_costs() -> None:
    """In the middle of a step of 10 s with 16 shards per group; the group is back before long."""
    layout, at = Layout(128, 8, step_seconds=10.0), [died(1005.0)]
    bare = {"overhead": 1.0, "soft_start": 0.0}
    dropped = run(layout, replace(DROP, **bare), NEVER, at, DAY).ledger
    assert dropped.redone == pytest.approx(5.0) and dropped.stalled == pytest.approx(1.14)
    taken = run(layout, replace(REDISTRIBUTE, **bare), NEVER, at, DAY).ledger
    # Sixteen shards for fifteen survivors: one of them computes two more.
    assert taken.redone == pytest.approx(2 * 10 / 16) and taken.stalled == pytest.approx(0.13)
    swapped = run(layout, replace(SPARE, **bare), NEVER, at, DAY).ledger
    assert swapped.redone == pytest.approx(5.0) and swapped.stalled == pytest.approx(0.84)
    rewound = run(layout, CHECKPOINT, Costs(300.0, 0.0), at, DAY).ledger
    assert rewound.redone == pytest.approx(105.0) and rewound.restarting == 600.0


def test_when_all_groups_are_lost_the_job_goes_back_to_a_checkpoint() -> None:
    layout, failures = Layout(16, 8), [died(1000.0), died(1000.01)]
    ledger = run(layout, replace(REDISTRIBUTE, overhead=1.0), Costs(300.0, 0.0), failures, DAY).ledger
    assert ledger.restarting == 600.0 and ledger.redone == pytest.approx(100.0, abs=2)


@settings(max_examples=40, deadline=None)
@given(
    some.sampled_from(ALL),
    some.integers(0, 10**6),
    some.sampled_from([1, 2, 4, 8, 16, 32]),
    some.integers(0, 3),
    some.floats(1, 500),
)
def test_every_second_is_accounted_for(strategy: Strategy, seed: int, size: int, spares: int, minutes: float) -> None:
    layout = Layout(64, size, spares=spares)
    hazards = Hazards(mtbf_gpu_hours=minutes * 64 / 60, repair_hours=2.0)
    failures = list(hazards.failures(64, seed, 2 * DAY))
    outcome = run(layout, strategy, Costs(600.0, 5.0, 1.0), failures, 2 * DAY)
    assert outcome.ledger.total == pytest.approx(2 * DAY)
    assert all(share >= -1e-9 for share in outcome.ledger.shares().values())
    assert 0 <= outcome.effective <= 1 and 0 <= outcome.of_all <= outcome.effective + 1e-12
    assert outcome == run(layout, strategy, Costs(600.0, 5.0, 1.0), failures, 2 * DAY)


# --- what others have published (research: state of the art) --------------------------------------------------------


def test_llama_3() -> None:
    """419 interruptions in 54 days on 16,384 GPUs, and more than 90 % effective."""
    hazards = Hazards()
    counts = [sum(1 for _ in hazards.failures(16_384, seed, 54 * DAY)) for seed in range(20)]
    assert fmean(counts) == pytest.approx(419, abs=4 * math.sqrt(419 / 20))
    question = Question(16_384, 405e9, hazards, group_size=128, days=54, seeds=4)
    effective = answer(question, CHECKPOINT).mean(lambda each: each.effective)
    assert 0.88 < effective < 0.95


def _at_100_000(stall: float, seed: int, even: bool) -> Outcome:
    """One failure every 18 minutes, which stops all for ``stall`` seconds (FT-HSDP, arXiv:2602.00277)."""
    layout, horizon = Layout(100_000, 128, spares=4), 10 * DAY
    hazards = replace(SOFT, mtbf_gpu_hours=100_000 * 18 / 60)
    failures = (
        [died(at * 18 * 60.0) for at in range(1, 800)] if even else list(hazards.failures(100_000, seed, horizon))
    )
    if stall == 600:
        strategy = replace(CHECKPOINT, restart=stall)
        return run(layout, strategy, Costs(closed_form.young(5.0, 18 * 60), 5.0), failures, horizon)
    strategy = replace(DROP, stall=stall, overhead=1.0)
    return run(layout, strategy, Costs(3600, 5.0), failures, horizon)


def test_ft_hsdp() -> None:
    """44 % with 10 minutes for each failure; 80 % with 3. Evenly spaced failures never strike a restart: less is lost
    to those, and more to what came since the last checkpoint, than by Poisson's."""
    before = [_at_100_000(600, seed, even) for seed, even in ((0, True), (1, False), (2, False))]
    assert before[0].effective < 0.44 < fmean(each.effective for each in before[1:])
    after = [_at_100_000(180, seed, even) for seed, even in ((0, True), (1, False), (2, False))]
    assert all(each.effective == pytest.approx(0.80, abs=0.06) for each in after)


def test_torchft_at_one_failure_a_minute() -> None:
    """30 groups, 10.9 s a step on average with everything in it: 82.3 % of the steps kept (its own bound 83.3 %), and
    29.6 of 30 groups there, which is 81.2 % of the samples."""
    layout = Layout(300, 10, machine_gpus=10, step_seconds=10.9)
    failures, horizon = [died(60.0 * each) for each in range(1, 1101)], 1101 * 60.0
    strategy = replace(DROP, overhead=1.0, stall=0.0, soft_start=24.0)
    outcome = run(layout, strategy, NEVER, failures, horizon)
    assert outcome.steps_kept == pytest.approx(0.823, abs=0.015)
    assert outcome.steps_kept * (1 - outcome.samples_lost) == pytest.approx(0.812, abs=0.015)
    ours = run(layout, replace(REDISTRIBUTE, soft_start=24.0), NEVER, failures, horizon)
    assert ours.steps_kept == 1.0 and ours.samples_lost == 0


# --- the code that decides in a run ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(some.integers(2, 40), some.integers(1, 12), some.data())
def test_shards_are_taken_over_as_core_says(groups: int, each: int, data: some.DataObject) -> None:
    shards, members = groups * each, data.draw(some.integers(2, groups))
    lost = data.draw(some.integers(1, members - 1))
    runs = contiguous(shards, (1.0,) * members)
    more = fill(shards, runs[: members - lost], (1.0,) * (members - lost))
    assert taken_over(shards, members, lost) == max(len(one) for one in more)
    assert busiest(shards, members) == max(len(one) for one in runs)


@settings(max_examples=40, deadline=None)
@given(some.lists(some.floats(0.01, 40.0), min_size=1, max_size=140), some.integers(0, 8))
def test_groups_are_started_when_core_says(gaps: list[float], failures: int) -> None:
    """One group that dies again and again, with so many quick failures before each of its deaths."""
    spec, replacements = PlanSpec(desired=2), Replacements(2)
    now, started = 0.0, []
    for incarnation, gap in enumerate(gaps):
        now += gap
        due = replacements.start(now, failures)
        dead = ObservedGroup(1, incarnation, GroupState.DEAD, since=now, exit_code=-9, quick_failures=failures)
        other = ObservedGroup(0, 0, GroupState.RUNNING, settled=True)
        seen = Observed((other, dead), committed=True, replacements=tuple(started))
        assert _first_start(spec, seen, now) == pytest.approx(due)
        started.append(due)
        now = due


def _first_start(spec: PlanSpec, seen: Observed, now: float) -> float:
    """When ``core.plan`` starts the dead group if nothing else happens."""
    while not any(isinstance(action, Start) for action in plan(spec, seen, now)):
        wakeup = next_wakeup(spec, seen, now)
        assert wakeup is not None
        now = wakeup
    return now
