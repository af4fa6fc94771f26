"""Standbys: a warm process takes a lost rank's place, whichever rank it is, and the bits are the quiet run's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run, alone
from tests.e2e.layouts import LAYOUTS, start
from tests.e2e.test_lost_ranks_e2e import pids

pytestmark = pytest.mark.e2e
ONE = ("--standbys", "1")


def warm(run: Run, count: int) -> int:
    """The pid of the newest standby, once so many were warm in all."""

    def found() -> list[int]:
        return [int(e["data"]["pid"]) for e in run.events("standby") if "is warm" in e["text"]]

    return int(run.until(lambda: len(found()) >= count and found(), f"{count} warm standbys")[-1])


@pytest.mark.parametrize("layout", ["fsdp", "tp", "pp", "fsdp-tp"])
def test_a_standby_takes_any_rank(tmp_path: Path, unhurt: Callable[[str], str], layout: str) -> None:
    ranks = LAYOUTS[layout]
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01", more=ONE) as run:
        # Each tries itself as rank 0, so the first is to be what it tried, and the second must run its script again.
        for count, (group, lost) in enumerate([(0, 0), (1, ranks - 1)]):
            before = pids(run, group, 0, ranks)
            standby = warm(run, count + 1)
            run.signal(group, rank=lost)
            after = pids(run, group, 1, ranks)
            assert after == {**before, lost: standby}, run.log()
        warm(run, 3)  # they are as many as before
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()
        assert not run.events("unprepared")


def test_standbys_die_too(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", more=ONE) as run:
        os.kill(warm(run, 1), signal.SIGKILL)  # while it waits: another is prepared
        standby = warm(run, 2)
        pids(run, 1, 0, 2)
        run.signal(1, rank=1)
        run.until(lambda: run.events("regroup"), "its replacement to begin")
        os.kill(standby, signal.SIGKILL)  # while it takes the lost one's place, or just after
        pids(run, 1, 2, 2)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_a_script_without_a_guard_has_no_use_for_standbys(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--pause", "0.01", more=ONE) as run:
        (told,) = run.until(lambda: run.events("unprepared"), "the reason why there is none")
        assert "step.guard()" in told["text"]
        run.settled(2, beyond=run.watch.step + 3)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")} and len(run.events("unprepared")) == 1


def test_nothing_that_follows_the_loop_happens_in_a_standby(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--odd", "stops", more=ONE) as run:
        run.until(lambda: len(run.events("unprepared")) == 3, "the last try")
        text = run.events("unprepared")[-1]["text"]
        assert "was left at" in text and "parallel.py, line" in text and "there will be no standbys" in text
        assert run.end() == 0, run.log()
    assert sorted((tmp_path / "run" / "result").read_text().splitlines()) == ["0 60", "0 60", "1 60", "1 60"]


def test_another_rank_dies_before_one_can_move(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.2", more=ONE) as run:
        before = pids(run, 1, 0, 2)
        warm(run, 1)
        assert run.operate("migrate", "1", "--rank", "1").returncode == 0
        run.until(lambda: len(run.events("move")) >= 2, "the move to begin")
        run.signal(1, rank=0)
        after = pids(run, 1, 2, 2)  # for the one that died, and for the one that moved
        assert not set(before.values()) & set(after.values()), run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


@pytest.mark.parametrize(("layout", "more"), [("fsdp", ONE), ("fsdp-tp", ())])
def test_ranks_move(tmp_path: Path, unhurt: Callable[[str], str], layout: str, more: tuple[str, ...]) -> None:
    """Without standbys, one is prepared for the move."""
    ranks = LAYOUTS[layout]
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01", more=more) as run:
        for incarnation, moves in enumerate([ranks - 1, 0]):  # 0 hosts both rendezvous, and speaks for its group
            before = pids(run, 1, incarnation, ranks)
            done = run.operate("migrate", "1", "--rank", str(moves))
            assert done.returncode == 0, done.stderr
            after = pids(run, 1, incarnation + 1, ranks)
            assert {rank for rank in before if before[rank] == after[rank]} == set(range(ranks)) - {moves}, run.log()
        refused = run.operate("migrate", "1", "--rank", str(ranks))
        assert refused.returncode == 2 and f"has no rank {ranks}" in refused.stderr
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()
        # Planned: nobody was interrupted, and no shard was computed for somebody else.
        assert (
            not run.events("lost")
            and not run.events("recovered")
            and not json.loads((tmp_path / "run" / "summary.json").read_text())["failures"]
        )


def test_groups_of_one(tmp_path: Path) -> None:
    with Run(tmp_path / "run", "--odd", "early", groups=2, options=ONE) as run:
        standby = warm(run, 1)
        run.signal(1)
        assert pids(run, 1, 1, 1) == {0: standby}, run.log()
        standby = warm(run, 2)
        assert run.operate("migrate", "0").returncode == 0
        assert pids(run, 0, 1, 1) == {0: standby}, run.log()
        warm(run, 3)  # whose words are counted below
        assert run.end() == 0, run.log()
        assert run.digests() == {alone(tmp_path / "alone", "--odd", "early")}, run.log()
        assert len(run.events("recovered")) == 1 and len(run.events("exit")) == 4
        # What they draw before anything is seeded, and make by default, is alike in those that begin again.
        logs = [*run.directory.glob("rg*/i*/stdout.log"), *run.directory.glob("standbys/*/stdout.log")]
        lines = [line for log in logs for line in log.read_text().splitlines() if line.startswith("early")]
        assert len(lines) == 7 and len(set(lines)) == 1, lines


def test_the_others_wait_for_it(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    more = (*ONE, "--policy", "spare", "--spare-wait", "80")
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", more=more) as run:
        standby = warm(run, 1)
        run.settled(2)
        run.signal(1, rank=1)
        assert pids(run, 1, 1, 2)[1] == standby
        run.settled(2, beyond=run.watch.step)
        texts = [e["text"] for e in run.events("quorum")]
        assert [text for text in texts if "lost" in text] == ["quorum 1.2: groups 0, 1 (group 1 lost)"], run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_an_orderly_end_does_not_wait_for_one_that_is_not_there_yet(tmp_path: Path) -> None:
    more = (*ONE, "--policy", "spare", "--spare-wait", "3600")
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", more=more) as run:
        os.kill(warm(run, 1), signal.SIGSTOP)
        run.settled(2)
        run.signal(1, rank=1)
        run.until(lambda: run.events("spare"), "the others to wait")
        run.interrupt()
        assert run.end() == 130, run.log()


def test_the_only_group_cannot_move_ranks(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", groups=1) as run:
        run.settled(1)
        refused = run.operate("migrate", "0")
        assert refused.returncode == 2 and "the only one that holds the state" in refused.stderr
        assert run.end() == 0, run.log()
