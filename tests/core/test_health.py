"""Rules over signs of health: what fires, what takes it back, and what never does."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.health import Action, Reading, Rule, Watch, allowed, reading_from, slow_rank, slowness

HOT = Rule("hot", "temperature", Action.REPORT, above=90, readings=3, clear=80, clear_readings=2)
values = st.floats(60, 110)


def fired(rule: Rule, series: list[float]) -> list[int]:
    """At which readings the verdict changed: fires, is taken back, fires …"""
    watch = Watch([rule])
    changes = []
    for at, value in enumerate(series):
        for verdict in watch.take([Reading(rule.signal, value, "0")]):
            assert verdict.bad is (len(changes) % 2 == 0), "verdicts take turns"
            changes.append(at)
        assert bool(watch.standing) is (len(changes) % 2 == 1)
    return changes


def test_it_takes_several_in_a_row_and_several_to_take_it_back() -> None:
    assert fired(HOT, [95, 95, 85, 95, 95, 95, 85, 79, 85, 79, 80, 95]) == [5, 10]


@given(st.lists(values, max_size=60))
def test_every_change_has_its_run_of_readings(series: list[float]) -> None:
    changes = fired(HOT, series)
    for number, at in enumerate(changes):
        if number % 2 == 0:
            assert all(value > 90 for value in series[at - 2 : at + 1]) and at >= 2
        else:
            assert all(value <= 80 for value in series[at - 1 : at + 1])
    for earlier, later in pairwise([-1, *changes]):
        assert later - earlier >= 2, "no reading counts for two changes"


@given(st.lists(values, max_size=60))
def test_no_run_of_readings_is_missed(series: list[float]) -> None:
    changes = [*fired(HOT, series), len(series)]
    for number, (earlier, later) in enumerate(pairwise([-1, *changes])):
        quiet = series[earlier + 1 : later]
        needed, speaks = (3, lambda v: v > 90) if number % 2 == 0 else (2, lambda v: v <= 80)
        for at in range(len(quiet) - needed + 1):
            assert not all(speaks(value) for value in quiet[at : at + needed])


@given(st.lists(st.floats(80.001, 90), max_size=40), st.booleans())
def test_within_the_band_nothing_changes(series: list[float], bad: bool) -> None:
    before = [95.0] * 3 if bad else [70.0]
    assert fired(HOT, before + series) == ([2] if bad else [])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_counters_count_from_the_first_reading_whatever_they_were_and_through_resets(counts: list[int]) -> None:
    rule = Rule("ecc", "ecc_uncorrectable", Action.DRAIN, above=0)
    increase = sum(new - old if new >= old else new for old, new in pairwise(counts))
    watch = Watch([rule])
    for count in counts:
        watch.take([Reading(rule.signal, count, "0")])
    assert bool(watch.standing) is (increase > 0)
    if increase:
        (verdict,) = watch.standing.values()
        assert verdict.value == increase
        assert verdict.words("12:01") == f"has uncorrectable ECC errors ({increase:.4g} since 12:01)"


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 8))
def test_within_looks_at_the_newest_readings_only(steps: list[int], within: int) -> None:
    rule = Rule("link", "nvlink_errors", Action.REPORT, above=60, within=within, clear_readings=1)
    watch, count = Watch([rule]), 1000
    for at in range(len(steps)):
        count += steps[at]
        watch.take([Reading(rule.signal, count, "0")])
        recent = steps[max(1, at - within + 1) : at + 1]  # the first reading has nothing before it
        assert bool(watch.standing) is (sum(recent) > 60)


def test_subjects_are_judged_apart_and_stay_the_same_whoever_uses_them() -> None:
    watch = Watch([HOT])
    for _ in range(2):
        assert watch.take([Reading("temperature", 95, "0", group=1), Reading("temperature", 95, "1")]) == []
    (verdict,) = watch.take([Reading("temperature", 95, "0", group=-1), Reading("temperature", 85, "1")])
    assert verdict.reading.subject == "GPU 0"
    assert Reading("x", 0, "0", node=2).subject == "GPU 0 of node 2"
    assert Reading("x", 0, node=2).subject == "node 2"
    assert Reading("x", 0, group=2, rank=1).subject == "group 2, rank 1"


def test_a_rule_that_is_off_and_a_signal_without_rule_do_nothing() -> None:
    watch = Watch([Rule("t", "temperature", Action.OFF, above=0)])
    assert watch.take([Reading("temperature", 9), Reading("command.what", 9)]) == [] == [*watch.standing]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"signal": "xid", "above": 0, "within": 0}, "at least 1"),
        ({"signal": "temprature", "above": 1}, "there is no signal temprature; known signals: gpu_lost"),
        ({"signal": "command.", "above": 1}, "there is no signal command."),
        ({"signal": "temperature"}, "give one of above and below"),
        ({"signal": "temperature", "above": 1, "below": 0}, "give one of above and below"),
        ({"signal": "temperature", "above": math.inf}, "finite"),
        ({"signal": "temperature", "above": 90, "clear": 95}, "clear = 95 is itself a bad reading"),
        ({"signal": "temperature", "below": 10, "clear": 5}, "clear = 5 is itself a bad reading"),
        ({"signal": "temperature", "above": 90, "within": 3}, "temperature does not"),
        ({"signal": "temperature", "above": 90, "readings": 0}, "at least 1"),
    ],
)
def test_rules_that_make_no_sense(facts: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why.replace(".", r"\.").replace("(", r"\(")):
        Rule("rule", action=Action.REPORT, **facts)  # type: ignore[arg-type]


seconds = st.floats(0.001, 100)


@given(seconds, st.lists(seconds, min_size=1, max_size=9), st.floats(0.01, 100))
def test_slowness_needs_no_unit_and_never_accuses_the_crowd(own: float, others: list[float], unit: float) -> None:
    found = slowness(own, others)
    assert found == 1.0 or found > 1.125
    assert found <= max(1.0, own / min(others))
    if own <= max(sorted(others)[: len(others) // 2 + 1]):
        assert found == 1.0, "as fast as half of the others"
    scaled = slowness(own * unit, [each * unit for each in others])
    assert scaled == 1.0 or found == 1.0 or scaled == pytest.approx(found)


def test_slowness() -> None:
    assert slowness(1.6, [1.0, 1.0, 1.1]) == pytest.approx(1.6)
    assert slowness(1.6, [1.0, 1.4, 0.8, 1.8]) == 1.0, "they differ as much among themselves"
    assert slowness(0.0, [1.0]) == slowness(9.0, []) == slowness(9.0, [0.0, math.nan]) == 1.0, "nothing measured"
    assert [slow_rank(ranks) for ranks in ([1.0], [1.0, 2.0, 1.0], [1.0, 1.02], [2.0, 0.0])] == [0, 1, -1, -1]


@given(st.floats(0, 1), st.integers(1, 5000))
def test_the_share_is_at_least_one_group_and_never_more_than_it_says(share: float, groups: int) -> None:
    most = allowed(share, groups)
    assert most == 1 or 1 < most <= share * groups


words = st.text(st.characters(exclude_categories=("C", "Z")), max_size=9)


@given(st.builds(Reading, st.just("command"), values, words, st.integers(), st.integers(), words))
def test_readings_travel_as_json(reading: Reading) -> None:
    assert reading_from(json.loads(json.dumps(asdict(reading)))) == reading


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_anything_else_is_refused_with_a_reason(rubbish: object) -> None:
    with pytest.raises(ValueError):
        reading_from(rubbish)
    with pytest.raises(ValueError):
        reading_from({"signal": "x", "value": rubbish if not isinstance(rubbish, float) else str(rubbish)})
    with pytest.raises(ValueError, match="a finite number"):
        reading_from({"signal": "x", "value": 10**400})  # JSON has such numbers, floats have not


def test_another_one_of_the_same_name_begins_anew() -> None:
    watch = Watch([HOT])
    for _ in range(3):
        watch.take([Reading("temperature", 95, group=1), Reading("temperature", 95, group=2)])
    watch.forget("group 1")
    assert [verdict.reading.subject for verdict in watch.standing.values()] == ["group 2"]
    assert watch.take([Reading("temperature", 95, group=1)] * 2) == []
    assert len(watch.take([Reading("temperature", 95, group=1)])) == 1
