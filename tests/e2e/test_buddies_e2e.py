"""A rank of the only group dies: the others keep their processes, all go back to copies in memory, and the bits are the
quiet run's."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.layouts import LAYOUTS, start

pytestmark = pytest.mark.e2e


def at_work(run: Run, incarnation: int, ranks: int) -> dict[int, int]:
    """The pids of all ranks of the only group, when they have committed steps since they were all there."""
    run.incarnation(0, incarnation)
    run.until(lambda: len(run.life(0).processes) == ranks, "all of its ranks")
    since = time.monotonic_ns()
    run.until(lambda: sum(commit.at_ns > since for commit in run.life(0).commits) >= 2, "steps")
    return {rank: process.pid for rank, process in run.life(0).processes.items()}


def begins(run: Run) -> list[int]:
    """The steps with which the job began again."""
    texts = [event["text"] for event in run.events("ready")]
    return [int(found[1]) for text in texts if (found := re.search(r"from the copy of step (\d+)", text))]


@pytest.mark.parametrize(("layout", "every", "standbys"), [("fsdp", 3, 0), ("tp", 1, 0), ("fsdp-tp", 2, 1)])
def test_the_only_group_goes_back_to_its_copies(
    tmp_path: Path, unhurt: Callable[[str], str], layout: str, every: int, standbys: int
) -> None:
    ranks = LAYOUTS[layout]
    options = ("--buddy", str(every), "--standbys", str(standbys))
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01", groups=1, more=options) as run:
        before = at_work(run, 0, ranks)
        for number, lost in enumerate((ranks - 1, 0, ranks - 1)):
            run.signal(0, rank=lost)
            after = at_work(run, number + 1, ranks)
            kept = {rank for rank in before if before[rank] == after[rank]}
            assert kept == set(range(ranks)) - {lost}, run.log()
            before = after
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()
        assert len(begins(run)) == 3 and sorted(begins(run)) == begins(run), run.log()
