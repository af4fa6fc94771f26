"""What an operator does to a running job: drain, scale, kill, status, Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run

pytestmark = pytest.mark.e2e
Quiet = Callable[..., str]
LONG = ("--steps", "400", "--pause", "0.01")


def test_drain(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *LONG) as run:
        run.step(10)
        done = run.operate("drain", "1")
        assert done.returncode == 0, done.stderr
        run.until(lambda: not run.life(1).alive, "group 1 to leave")
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*LONG)}
        assert run.watch.life(1).member.incarnation == 0  # type: ignore[union-attr]
        assert not run.events("trouble")  # a planned change breaks nothing


def test_scale_down_and_up(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *LONG) as run:
        run.step(10)
        assert run.operate("scale", "2").returncode == 0
        run.until(lambda: not run.life(2).alive, "group 2 to leave")
        assert run.operate("scale", "4").returncode == 0
        run.settled(4)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*LONG)}


def test_kill_and_status(tmp_path: Path, quiet: Quiet) -> None:
    with Run(tmp_path / "run", *LONG) as run:
        run.step(10)
        run.settled(3)
        status = run.operate("status", "--json")
        assert status.returncode == 0, status.stderr
        body = json.loads(status.stdout)
        assert len(body["groups"]) == 3
        assert run.operate("kill", "2").returncode == 0
        run.incarnation(2, 1)
        run.settled(3)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*LONG)}
        told = run.operate("explain", str(run.directory))
        assert told.returncode == 0, told.stderr
        for words in (
            "1 loss\n", "why: an operator sent signal 9 to group 2", "noticed by: its agent, the parent",
            "old communicator dropped, new one formed: ", "first commit after ", "it took the state in ",
            "it took part in a commit again", "the end: all steps are committed",
        ):  # fmt: skip
            assert words in told.stdout, told.stdout


def test_one_interrupt_stops_all_groups_after_the_same_commit(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *LONG) as run:
        run.step(10)
        run.interrupt()
        assert run.end() == 130
        steps = {life.look().step for life in run.watch.lives.values()}
        assert len(steps) == 1, run.log()


def test_operating_what_is_not_there(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *LONG) as run:
        run.step(1)
        for words in (("drain", "7"), ("kill", "7"), ("scale", "0"), ("scale", "9")):
            done = run.operate(*words)
            assert done.returncode == 2, (words, done)
            assert done.stderr.strip() and "Traceback" not in done.stderr, words


def test_a_group_whose_sums_may_round_differently_is_told(tmp_path: Path) -> None:
    options = ("--exact", "samples")
    with Run(
        tmp_path / "run", "--odd", "threads", "--steps", "1000", "--pause", "0.02", groups=2, options=options
    ) as run:
        run.settled(2)
        (drift,) = run.until(lambda: run.events("drift"), "the event")
        assert "group 1 (incarnation 0) differs from group 0 in threads (1 there, 2 here)" in drift["text"]
        assert "differs from group 0 in threads" in " ".join(run.operate("status").stdout.split())
