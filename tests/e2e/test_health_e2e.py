"""A group that is slower than the others leaves in order, and nothing of the result changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.e2e
RULES = """
every = 0.1
[rules.slow]
action = "drain"
readings = 5
"""


def test_a_slow_group_is_drained(tmp_path: Path, quiet: Callable[..., str]) -> None:
    table = tmp_path / "rules.toml"
    table.write_text(RULES)
    words = ("--pause", "0.01", "--odd", "slow")
    with Run(tmp_path / "run", *words, options=("--health", str(table))) as run:
        run.step(1)
        run.until(lambda: any("drained" in event["text"] for event in run.events("health")), "the verdict")
        (event,) = run.events("health")
        assert event["group"] == 1 and event["data"]["value"] > 1.25
        assert "group 1 takes" in event["text"] and "as long for a shard as the median of the other" in event["text"]
        run.until(lambda: not run.life(1).alive, "group 1 to leave")
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet()}, run.log()
        assert not run.events("trouble")


def test_a_standby_takes_the_place_of_a_rank_that_is_not_well(tmp_path: Path, quiet: Callable[..., str]) -> None:
    sick, check, table = tmp_path / "sick", tmp_path / "check", tmp_path / "rules.toml"
    bad = '{"signal": "odd", "value": 1, "group": 1, "rank": 0}'  # once: the verdict stands until it is carried out
    check.write_text(f"#!/bin/sh\nif [ -e {sick} ]; then rm {sick}; echo '{bad}'; fi\n")
    check.chmod(0o755)
    rule = "signal = 'command.odd'\naction = 'drain'\nabove = 0"
    table.write_text(f"every = 0.1\n[command]\nrun = '{check}'\nevery = 0.2\n[rules.odd]\n{rule}\n")
    options = ("--health", str(table), "--standbys", "1")
    with Run(tmp_path / "run", "--pause", "0.01", options=options) as run:
        run.step(1)
        run.settled(3)
        run.until(lambda: any("is warm" in event["text"] for event in run.events("standby")), "a warm standby")
        before = run.life(1).processes[0].pid
        sick.touch()
        run.incarnation(1, 1)
        (event,) = run.until(lambda: run.events("health"), "word of it")
        said = "group 1, rank 0 shows odd = 1 in the site's health command: a standby takes the place of rank 0"
        assert event["text"] == said
        run.settled(3, beyond=run.watch.step)
        assert run.life(1).processes[0].pid != before
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet()}, run.log()
        assert not run.events("trouble") and not run.events("lost")
