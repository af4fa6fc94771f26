"""Figures, ratios and tables."""

import json
import math
import time
from pathlib import Path

import pytest

from bench.report import (
    LoadWatch,
    busy_seconds,
    environment,
    own_seconds,
    paired_ratios,
    rank_mean,
    rotated,
    spread,
    table,
    write_json,
)


def test_spread_is_median_and_range() -> None:
    s = spread([3.0, 1.0, 10.0])
    assert (s.n, s.median, s.low, s.high) == (3, 3.0, 1.0, 10.0)
    assert s.text() == "3.00 (1.00..10.00)"
    assert s.text(0, 1e3) == "3000 (1000..10000)"


def test_spread_of_nothing_says_so() -> None:
    assert math.isnan(spread([]).median)
    assert spread([]).text() == "-"


def test_ratios_are_taken_within_a_round_and_only_where_both_ran() -> None:
    ours = {1: 2.0, 2: 30.0, 4: 5.0}
    base = {1: 1.0, 2: 20.0, 3: 7.0}
    assert paired_ratios(ours, base) == [2.0, 1.5]


def test_rank_mean_does_not_count_the_same_delay_twice() -> None:
    # Two ranks take turns at being late: both needed 4 seconds for 2 steps.
    assert rank_mean([[1.0, 3.0], [3.0, 1.0]]) == [2.0, 2.0]


def test_rank_mean_refuses_ranks_with_different_numbers_of_steps() -> None:
    with pytest.raises(ValueError):
        rank_mean([[1.0], [1.0, 2.0]])


def test_everybody_is_first_once() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, r) for r in range(3)]
    assert [o[0] for o in orders] == names
    assert all(sorted(o) == names for o in orders)
    assert rotated(names, 3) == names
    assert rotated([], 5) == []


def test_table_is_markdown_with_aligned_columns() -> None:
    lines = table(("a", "long"), [["xx", "1"], ["y", "22"]]).splitlines()
    assert lines == ["| a  | long |", "|----|------|", "| xx | 1    |", "| y  | 22   |"]


def test_environment_names_versions_and_a_peer_torch_only_if_it_differs() -> None:
    here = environment()
    assert here["cores"] >= 1 and here["torch"] != "?" and "torchft" not in here
    same = environment({"torch": here["torch"], "torchft-nightly": "1"})
    assert same["torchft"] == "1" and "torch_of_torchft" not in same
    assert environment({"torch": "0", "torchft": "2"})["torch_of_torchft"] == "0"
    json.dumps(here)


def test_own_work_is_not_the_work_of_others() -> None:
    before, busy = own_seconds(), busy_seconds()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert own_seconds() - before >= 0.19
    assert busy_seconds() >= busy


def test_load_of_others_is_never_negative() -> None:
    watch = LoadWatch()
    end = time.process_time() + 0.05  # our own work, which the coarse ticks of the system may not show yet
    while time.process_time() < end:
        pass
    assert watch.others() >= 0.0


def test_json_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(str(path), {"a": 1})
    write_json(str(path), {"b": [1.5]})
    assert json.loads(path.read_text()) == {"b": [1.5]}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
