"""A group that is slower than the others leaves in order, and nothing of the result changes."""

from __future__ import annotations

import json
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


def check_once(home: Path, *readings: dict[str, object]) -> tuple[Path, Path, tuple[str, ...]]:
    """A command that gives bad readings once, when the first file is made, and a line in the second for every run."""
    sick, runs, check, table = home / "sick", home / "runs", home / "check", home / "rules.toml"
    said = "; ".join(f"echo '{json.dumps({'signal': 'odd', 'value': 1} | reading)}'" for reading in readings)
    check.write_text(f"#!/bin/sh\necho >> {runs}\nif [ -e {sick} ]; then rm {sick}; {said}; fi\n")
    check.chmod(0o755)
    rule = "signal = 'command.odd'\naction = 'drain'\nabove = 0"
    table.write_text(f"every = 0.1\n[command]\nrun = '{check}'\nevery = 0.2\n[rules.odd]\n{rule}\n")
    return sick, runs, ("--health", str(table))


def test_a_standby_takes_the_place_of_a_rank_that_is_not_well(tmp_path: Path, quiet: Callable[..., str]) -> None:
    # Once: the verdict stands until it is carried out.
    sick, _, options = check_once(tmp_path, {"group": 1, "rank": 0})
    options += ("--standbys", "1")
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


def test_no_more_than_the_share_is_replaced_at_once(tmp_path: Path, quiet: Callable[..., str]) -> None:
    sick, _, options = check_once(tmp_path, *({"group": group, "rank": 0} for group in range(3)))
    options += ("--standbys", "3")
    with Run(tmp_path / "run", "--pause", "0.01", options=options) as run:
        run.settled(3)
        run.until(lambda: sum("is warm" in e["text"] for e in run.events("standby")) == 3, "warm standbys")
        sick.touch()
        for group in range(3):
            run.incarnation(group, 1)
        run.settled(3, beyond=run.watch.step)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet()}, run.log()
        # "quorum 1.4: groups 0, 2 (…)": never one alone.
        assert all(": groups " in event["text"] for event in run.events("plan")), run.log()


def test_what_was_said_of_a_group_is_not_held_against_its_next_life(tmp_path: Path, quiet: Callable[..., str]) -> None:
    sick, runs, options = check_once(tmp_path, {"group": 0}, {"group": 1})
    with Run(tmp_path / "run", "--pause", "0.01", options=options) as run:
        run.settled(3)
        sick.touch()
        run.until(lambda: any("not drained: 1 of 3" in e["text"] for e in run.events("health")), "a refusal")
        run.signal(1)
        run.incarnation(1, 1)
        run.settled(2, beyond=run.watch.step)
        assert run.operate("scale", "2").returncode == 0  # so that one more may leave
        seen = runs.stat().st_size
        run.until(lambda: runs.stat().st_size > seen + 5, "more readings")
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet()}, run.log()
        assert {event["group"] for event in run.events("drain")} == {0}, run.log()
