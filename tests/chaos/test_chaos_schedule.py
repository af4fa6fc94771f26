"""Schedules are pure: the same seed, the same faults; and what they promise holds for every seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.chaos.schedule import (
    CUT,
    LONG_STOP,
    SHORT_STOP,
    Kind,
    Moment,
    Victim,
    demo_schedule,
    parse_kinds,
    parse_seconds,
    parse_targets,
    random_schedule,
)
from planaria.errors import UsageError

kinds_lists = st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=4, unique=True)
seeds = st.integers(min_value=-(2**70), max_value=2**70)
counts = st.integers(min_value=0, max_value=200)
group_counts = st.integers(min_value=1, max_value=64)
gaps = st.floats(min_value=0.001, max_value=1000)


@given(seeds, kinds_lists, group_counts, counts, gaps)
def test_the_same_seed_gives_the_same_schedule(
    seed: int, kinds: list[Kind], groups: int, count: int, every: float
) -> None:
    assert random_schedule(seed, kinds, groups, count, every) == random_schedule(seed, kinds, groups, count, every)


@given(seeds, kinds_lists, group_counts, counts, gaps)
def test_faults_come_in_order_and_about_as_often_as_asked(
    seed: int, kinds: list[Kind], groups: int, count: int, every: float
) -> None:
    faults = random_schedule(seed, kinds, groups, count, every)
    assert len(faults) == count
    times = [0.0, *(fault.after for fault in faults)]
    for before, after in pairwise(times):
        assert 0.499 * every <= after - before <= 1.501 * every


@given(seeds, kinds_lists, group_counts, counts)
def test_every_kind_gets_its_share(seed: int, kinds: list[Kind], groups: int, count: int) -> None:
    seen = Counter(fault.kind for fault in random_schedule(seed, kinds, groups, count, 1.0))
    shares = [seen[kind] for kind in kinds]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(seeds, group_counts, counts)
def test_groups_and_durations_are_within_their_bounds(seed: int, groups: int, count: int) -> None:
    for fault in random_schedule(seed, list(Kind), groups, count, 1.0):
        assert 0 <= fault.group < groups
        assert fault.moment is Moment.ANY and fault.victim is Victim.GROUP
        match fault.kind:
            case Kind.STOP:
                assert any(low <= fault.duration <= high for low, high in (SHORT_STOP, LONG_STOP))
            case Kind.PARTITION:
                assert CUT[0] <= fault.duration <= CUT[1]
            case _:
                assert fault.duration == 0


def test_bits_flip_in_what_was_asked_for() -> None:
    faults = random_schedule(0, [Kind.BITFLIP], 3, 40, 1.0, parse_targets("moment, parameter"))
    assert {fault.target for fault in faults} == {"moment", "parameter"}
    for text, sentence in (("weights", "no bits flip in 'weights'"), ("", "at least one thing")):
        with pytest.raises(UsageError, match=sentence):
            parse_targets(text)


def test_other_seeds_give_other_schedules() -> None:
    schedules = {random_schedule(seed, [Kind.KILL], 4, 10, 1.0) for seed in range(50)}
    assert len(schedules) == 50


def test_stops_are_both_short_and_long() -> None:
    durations = [fault.duration for fault in random_schedule(1, [Kind.STOP], 4, 100, 1.0)]
    short = sum(1 for duration in durations if duration <= SHORT_STOP[1])
    assert 20 < short < 80


@pytest.mark.parametrize("steps", [60, 200, 1000])
def test_the_demo_does_everything_the_readme_says(steps: int) -> None:
    faults = demo_schedule(steps)
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
    assert all(0 < fault.step < 0.9 * steps for fault in faults)
    moments = [fault.moment for fault in faults]
    assert Moment.EXCHANGING in moments and Moment.FORMING in moments
    assert any(fault.victim is Victim.HOST for fault in faults)
    assert {fault.kind for fault in faults} == {Kind.KILL, Kind.STOP, Kind.LIGHTHOUSE}
    forming = faults[moments.index(Moment.FORMING)]
    before = faults[moments.index(Moment.FORMING) - 1]
    assert (before.kind, before.step) == (Kind.KILL, forming.step), "a quorum forms only after a loss"


@pytest.mark.parametrize(("text", "seconds"), [("2s", 2), ("500ms", 0.5), ("1.5", 1.5), ("2m", 120), (" 3s ", 3)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "two", "-1s", "0", "5h", "inf", "nan", "1sm", "1 2"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="time"):
        parse_seconds(text)


def test_kinds_are_read_in_order_and_once() -> None:
    assert parse_kinds("stop, kill,stop") == (Kind.STOP, Kind.KILL)
    assert parse_kinds("kill,stop,partition,bitflip,lighthouse") == tuple(Kind)


@pytest.mark.parametrize("text", ["", ",", "kill,flood", "Kill"])
def test_unknown_kinds_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"known kinds|at least one"):
        parse_kinds(text)
