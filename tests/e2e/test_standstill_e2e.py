"""Everybody lives, and all wait for each other: seen, broken off and done again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.e2e


def test_an_exchange_that_stands_still_is_done_again(tmp_path: Path, quiet: Callable[..., str]) -> None:
    with Run(tmp_path / "run", "--odd", "mislays") as run:
        pids = {group: run.life(group).processes[0].pid for group in range(3)}
        run.step(9)
        run.until(lambda: run.events("still"), "an exchange that stands still")
        run.step(12)
        assert run.end() == 0, run.log()
        (told,) = run.events("still")
        assert "all members have waited in the exchange of step 9 for 2" in told["text"]
        assert run.digests() == {quiet()}, run.log()
        assert {group: run.life(group).processes[0].pid for group in range(3)} == pids  # nobody was started again
