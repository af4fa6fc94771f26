"""Who computes what: everything exactly once, as early as possible, and the same answer everywhere."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.assignment import RESOLUTION, _speeds, contiguous, dedupe, fill, paced, slots, weights_of
from planaria.core.tree import maximal_nodes

quick = settings(max_examples=60, deadline=None)  # no deadline: the machine may be busy
WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)
ANY_WEIGHTS = st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=8)


def sets(*groups: set[int]) -> tuple[frozenset[int], ...]:
    return tuple(frozenset(group) for group in groups)


def nodes(shards: int, groups: tuple[frozenset[int], ...]) -> int:
    return sum(len(maximal_nodes(group, shards)) for group in groups)


def after(
    shards: int, have: tuple[frozenset[int], ...], more: tuple[frozenset[int], ...]
) -> tuple[frozenset[int], ...]:
    return tuple(kept | new for kept, new in zip(dedupe(shards, have), more, strict=True))


Case = tuple[int, tuple[frozenset[int], ...], list[float]]


@st.composite
def roll_calls(draw: st.DrawFn, twice: bool = False) -> Case:
    """Shards, what each member holds (``twice``: some shards several times), and weights."""
    shards, members = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    have: list[frozenset[int]] = []
    for _ in range(members):
        bits = draw(st.integers(0, 2**shards - 1))  # one number instead of many draws: fast
        own = frozenset(shard for shard in range(shards) if bits >> shard & 1)
        have.append(own if twice else own.difference(*have))
    weights = draw(st.lists(st.sampled_from([1.0, 1.0, 0.5, 2.0, 0.7, 3.3]), min_size=members, max_size=members))
    return shards, tuple(have), weights


# --- contiguous: examples -----------------------------------------------------------------------------------


def test_equal_members_get_equal_runs() -> None:
    assert contiguous(8, [1.0, 1.0]) == sets({0, 1, 2, 3}, {4, 5, 6, 7})
    assert contiguous(4, [1.0] * 4) == sets({0}, {1}, {2}, {3})


def test_a_member_twice_as_fast_gets_twice_as_much() -> None:
    assert contiguous(9, [2.0, 1.0]) == sets({0, 1, 2, 3, 4, 5}, {6, 7, 8})


@pytest.mark.parametrize("weight", [1.0, 0.37, 1e-300, 0.0, -1.0, math.inf, math.nan])
def test_equal_weights_of_any_kind_are_equal_speeds_without_arithmetic(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every member asks after every step, and exact fractions of a thousand weights take milliseconds."""
    slightly = _speeds([weight] * 3 + [math.nan])  # not all equal, but the last counts as the median of the others
    monkeypatch.setattr("planaria.core.assignment.Fraction", None)
    assert _speeds([weight] * 4) == slightly == (RESOLUTION,) * 4


def test_the_unit_of_the_weights_does_not_matter() -> None:
    assert contiguous(9, [2e-9, 1e-9]) == contiguous(9, [2.0, 1.0]) == contiguous(9, [2e30, 1e30])


def test_everybody_gets_at_least_one() -> None:
    assert contiguous(4, [1000.0, 1.0, 1.0]) == sets({0, 1}, {2}, {3})
    assert contiguous(3, [1000.0, 1.0, 1.0]) == sets({0}, {1}, {2})


def test_with_too_few_shards_some_get_none() -> None:
    assert contiguous(2, [1.0, 1.0, 1.0]) == sets({0}, {1}, set())


def test_equally_balanced_splits_into_whole_subtrees_are_preferred() -> None:
    assert contiguous(7, [1.0] * 3) == sets({0, 1}, {2, 3}, {4, 5, 6})  # and not 3, 2, 2
    assert contiguous(6, [1.0] * 4) == sets({0, 1}, {2, 3}, {4}, {5})


def test_a_newcomer_without_a_measurement_counts_as_the_median() -> None:
    assert contiguous(9, [2.0, 0.0, 2.0]) == contiguous(9, [1.0, 1.0, 1.0])
    assert contiguous(4, [math.nan, math.inf]) == contiguous(4, [1.0, 1.0])
    assert contiguous(12, [3.0, -1.0, 1.0, 2.0]) == contiguous(12, [3.0, 2.0, 1.0, 2.0])


def test_differences_too_small_to_measure_do_not_move_shards() -> None:
    assert contiguous(7, [1.0, 1.0001, 0.9999]) == contiguous(7, [1.0, 1.0, 1.0])


def test_nobody_and_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no member"):
        contiguous(4, [])
    with pytest.raises(ValueError, match="at least one shard"):
        contiguous(0, [1.0])


def test_slots_are_the_same_whoever_is_there() -> None:
    assert slots(4, 2) == {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    assert frozenset().union(*slots(10, 3).values()) == frozenset(range(10))


def test_a_group_beyond_the_slots_has_none() -> None:
    assert slots(8, 4).get(4) is None


def test_weights_come_from_measured_times() -> None:
    assert weights_of([0.5, 0.25]) == (2.0, 4.0)


def test_noise_around_the_usual_speed_does_not_move_shards() -> None:
    assert weights_of([0.100, 0.104, 0.097, 0.111]) == (1 / 0.104,) * 4
    assert len(set(weights_of([0.1, 0.1, 0.1, 0.3]))) == 2


def test_times_that_are_no_measurements_are_no_weights() -> None:
    assert weights_of([0.0, math.nan, math.inf, -1.0, 0.5]) == (0.0, 0.0, 0.0, 0.0, 2.0)
    assert weights_of([0.0, 0.0]) == (0.0, 0.0)
    assert weights_of([5e-324]) == (0.0,)  # its inverse is no number
    assert contiguous(4, weights_of([0.0, 0.0])) == contiguous(4, [1.0, 1.0])


# --- contiguous: properties ---------------------------------------------------------------------------------


@quick
@given(st.integers(1, 60), ANY_WEIGHTS)
def test_runs_are_contiguous_and_complete(shards: int, weights: list[float]) -> None:
    runs = contiguous(shards, weights)
    assert len(runs) == len(weights)
    assert [shard for run in runs for shard in sorted(run)] == list(range(shards))
    if shards >= len(weights):
        assert all(runs)


@quick
@given(st.integers(1, 60), WEIGHTS)
def test_runs_are_proportional_within_one_shard(shards: int, weights: list[float]) -> None:
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    if any(shards * weight < total for weight in exact):
        return  # somebody got one shard only because everybody must
    for run, weight in zip(contiguous(shards, weights), exact, strict=True):
        # one shard of rounding, and what weights are rounded to: a thousandth of the fastest
        assert abs(len(run) - shards * weight / total) <= 1 + Fraction(shards * len(weights), 1000)


@quick
@given(st.integers(1, 200), st.integers(1, 12))
def test_equal_weights_differ_by_at_most_one(shards: int, members: int) -> None:
    sizes = {len(run) for run in contiguous(shards, [1.0] * members)}
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 40), WEIGHTS)
def test_a_faster_member_never_gets_less(shards: int, weights: list[float]) -> None:
    sizes = [len(run) for run in contiguous(shards, weights)]
    for (a, size_a), (b, size_b) in itertools.permutations(zip(weights, sizes, strict=True), 2):
        if a > b * 1.01 and a > max(weights) / 100:
            assert size_a >= size_b


@pytest.mark.parametrize("shards", range(1, 13))
def test_a_balanced_split_into_single_subtrees_is_found_if_there_is_one(shards: int) -> None:
    for members in range(1, shards + 1):
        low, over = divmod(shards, members)
        best = members * shards
        for extra in itertools.combinations(range(members), over):
            edges = [0, *itertools.accumulate(low + (rank in extra) for rank in range(members))]
            best = min(best, nodes(shards, sets(*(set(range(a, b)) for a, b in itertools.pairwise(edges)))))
        if best == members:
            assert nodes(shards, contiguous(shards, [1.0] * members)) == members


# --- fill: examples -----------------------------------------------------------------------------------------


def test_the_shards_of_a_lost_group_are_shared_out() -> None:
    """Four groups of eight shards; the last is lost after the others have finished theirs."""
    assert fill(8, sets({0, 1}, {2, 3}, {4, 5}), [1.0] * 3) == sets({6}, {7}, set())


def test_only_additional_work_counts() -> None:
    """Rank 0 has done much already; it still takes as much of the rest as rank 1."""
    more = fill(12, sets(set(range(8)), set()), [1.0, 1.0])
    assert [len(each) for each in more] == [2, 2]


def test_a_missing_sibling_goes_to_the_holder() -> None:
    assert fill(8, sets({0, 1, 2, 3}, {4, 5, 6}), [1.0, 1.0]) == sets(set(), {7})


def test_merges_cascade() -> None:
    """Rank 1 gets 3 because it holds 2, then holds 2-3; rank 0 gets 5 and then holds 4-5."""
    assert fill(8, sets({0, 1, 4}, {2, 6, 7}), [1.0, 1.0]) == sets({5}, {3})


def test_a_slow_member_is_given_nothing_if_it_would_be_late() -> None:
    assert fill(8, sets({0, 1, 2}, {4, 5, 6}), [1.0, 0.1]) == sets({3, 7}, set())


def test_nothing_missing_is_nothing_to_do() -> None:
    assert fill(4, sets({0, 1}, {2, 3}), [1.0, 1.0]) == sets(set(), set())


def test_a_fresh_step_gives_whole_subtrees() -> None:
    assert fill(8, sets(set(), set()), [1.0, 1.0]) == sets({0, 1, 2, 3}, {4, 5, 6, 7})
    assert fill(8, sets(set(), set()), [3.0, 1.0]) == sets({0, 1, 2, 3, 4, 5}, {6, 7})


def test_of_two_equal_holdings_the_lower_rank_counts() -> None:
    assert dedupe(4, sets({0, 1}, {1, 2})) == sets({0, 1}, {2})
    assert dedupe(4, sets({1}, {1}, {1})) == sets({1}, set(), set())


def test_a_sum_of_two_shards_cannot_be_taken_apart() -> None:
    """Rank 1 holds the sum of 0 and 1 and no longer the parts: so rank 0's part is what is dropped."""
    assert dedupe(4, sets({0}, {0, 1})) == sets(set(), {0, 1})
    assert fill(4, sets({0}, {0, 1}), [1.0, 1.0]) == sets({2}, {3})


def test_bad_roll_calls_are_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 says it holds shard 4"):
        fill(4, sets({0}, {4}), [1.0, 1.0])
    with pytest.raises(ValueError, match="holdings of 1 members but weights of 2"):
        fill(4, sets({0}), [1.0, 1.0])


# --- fill: properties ---------------------------------------------------------------------------------------


@quick
@given(roll_calls(twice=True))
def test_every_missing_shard_is_computed_exactly_once(case: Case) -> None:
    shards, have, weights = case
    missing = sorted(frozenset(range(shards)).difference(*have))
    assert sorted(shard for each in fill(shards, have, weights) for shard in each) == missing


@quick
@given(roll_calls(twice=True))
def test_in_the_end_every_shard_counts_exactly_once(case: Case) -> None:
    shards, have, weights = case
    final = after(shards, have, fill(shards, have, weights))
    assert sorted(shard for each in final for shard in each) == list(range(shards))


@quick
@given(roll_calls(twice=True))
def test_what_counts_is_made_of_sums_that_the_member_has(case: Case) -> None:
    shards, have, _ = case
    kept = dedupe(shards, have)
    assert frozenset().union(*kept) == frozenset().union(*have)
    for before, now in zip(have, kept, strict=True):
        assert now <= before
        for node in maximal_nodes(before, shards):
            assert len(now.intersection(range(node.start, node.stop))) in (0, node.size)


@quick
@given(roll_calls())
def test_without_duplicates_everything_counts(case: Case) -> None:
    shards, have, _ = case
    assert dedupe(shards, have) == have


@quick
@given(roll_calls())
def test_nobody_could_finish_earlier(case: Case) -> None:
    """In no shorter time could all members together do the missing work."""
    shards, have, weights = case
    speeds = [round(Fraction(weight) * 1000 / Fraction(max(weights))) for weight in weights]
    more = fill(shards, have, weights)
    finish = max(Fraction(len(each), speed) for each, speed in zip(more, speeds, strict=True))
    missing = sum(len(each) for each in more)
    if missing:
        assert sum(math.ceil(finish * speed) - 1 for speed in speeds) < missing


@quick
@given(roll_calls())
def test_equal_members_are_given_equally_much(case: Case) -> None:
    shards, have, weights = case
    sizes = [len(each) for each in fill(shards, have, [1.0] * len(weights))]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(st.integers(1, 64), st.integers(1, 8))
def test_a_fresh_step_is_never_in_more_pieces_than_contiguous_runs_would_be(shards: int, members: int) -> None:
    """Allowing one piece more for each cut that contiguity would have shared."""
    weights = [1.0] * members
    fresh = fill(shards, (frozenset(),) * members, weights)
    assert nodes(shards, fresh) <= nodes(shards, contiguous(shards, weights)) + members


@quick
@given(roll_calls())
def test_a_second_roll_call_asks_for_nothing_more(case: Case) -> None:
    shards, have, weights = case
    final = after(shards, have, fill(shards, have, weights))
    assert not any(fill(shards, final, weights))


def test_other_processes_come_to_the_same_answer() -> None:
    """Hash seeds differ between processes; the assignment must not."""
    script = (
        "from planaria.core.assignment import paced, fill, contiguous\n"
        "have = [frozenset({31, 2, 17}), frozenset({4, 40, 9}), frozenset({63, 1}), frozenset()]\n"
        "print([sorted(s) for s in fill(64, have, [0.31, 1.7, 0.9, 0.0])])\n"
        "print([sorted(s) for s in contiguous(64, [0.31, 1.7, 0.9, 0.0])])\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(answers) == 1


def test_paced_members_take_as_long_as_the_fastest() -> None:
    seconds = [1.0, 1.1, 2.0, 40.0, 0.0]
    assert [paced(40, 2, seconds, rank, 40) for rank in range(5)] == [40, 40, 20, 2, 40]
    assert paced(40, 2, [1.0, 2.1], 1, 20) == 20, "a small difference changes nothing"
    assert paced(40, 2, [1.0, 4.0], 1, 20) == 10
    assert paced(40, 2, [1.0, 1.0], 1, 20) == 40
    assert paced(40, 2, [0.0, 0.0], 1, 20) == 20
