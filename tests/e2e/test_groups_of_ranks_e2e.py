"""The promise for groups of several ranks: a rank dies, its group with it, and the bits are those of the quiet run."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.layouts import LAYOUTS, start

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp", "fsdp-tp"])
def test_ranks_are_killed(tmp_path: Path, unhurt: Callable[[str], str], layout: str) -> None:
    with start(tmp_path / "run", layout, "--pause", "0.02") as run:
        run.step(5)
        run.signal(1, rank=LAYOUTS[layout] - 1)
        run.incarnation(1, 1)
        run.settled(2)
        run.signal(0, rank=0)  # the host of both rendezvous: its group's own and that of the groups
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()


def test_a_rank_hangs(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--pause", "0.02") as run:
        run.step(5)
        life = run.signal(1, signal.SIGSTOP, rank=1)
        run.until(lambda: "suspect" in run.log(), "the suspicion")
        run.step(life.commits[-1].step + 3)  # the others go on without it
        run.signal(1, signal.SIGCONT, rank=1)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_one_rank_runs_out_of_memory(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--odd", "memory") as run:
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()
    (failure,) = json.loads((tmp_path / "run" / "summary.json").read_text())["failures"]
    assert (failure["group"], failure["rank"]) == (1, 1)
    assert "out of memory" in failure["message"]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("mesh", "the mesh (fsdp=3) does not fit the 2 ranks of a group"),
        ("whole", "is not spread over the 2 ranks that share every batch"),
        ("seed", "the ranks of a group differ in seed (3, 4)"),
        ("steps", "the ranks of a group differ in steps (60, 61)"),
    ],
)
def test_bad_input_of_a_group(tmp_path: Path, odd: str, said: str) -> None:
    with start(tmp_path / "run", "fsdp", "--odd", odd, groups=1) as run:
        assert run.end() == 2, run.log()
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
    assert said in reason and "Traceback" not in reason


def test_a_rank_that_leaves_alone(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--odd", "leaves", groups=1) as run:
        assert run.end() != 0, "its group cannot go on, and must not wait for ever"


def test_groups_of_different_layouts(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--odd", "layout") as run:
        assert run.end() != 0
    assert "layout (fsdp=2 there, tp=2 here)" in run.log()
