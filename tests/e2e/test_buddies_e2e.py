"""Ranks of all groups that hold the state die: the others keep their processes, all go back to copies in memory, and
the bits are the quiet run's."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.chaos.watch import Life
from planaria.core.messages import Member
from tests.e2e.harness import Run
from tests.e2e.layouts import LAYOUTS, start

pytestmark = pytest.mark.e2e


def at_work(run: Run, incarnation: int, ranks: int, groups: int = 1) -> dict[tuple[int, int], int]:
    """The pids of all ranks by (group, rank), when they have committed steps since they were all there."""
    since: dict[Member, int] = {}

    def met() -> list[Life] | None:
        # Two ranks that were killed one after the other may have made two lives.
        lives = [life for life in run.watch.newest() if life.member.incarnation >= incarnation]
        if len(lives) < groups or any(len(life.processes) != ranks for life in lives):
            return None
        began = [since.setdefault(life.member, time.monotonic_ns()) for life in lives]
        made = [sum(c.at_ns > at for c in life.commits) for life, at in zip(lives, began, strict=True)]
        return lives if min(made) >= 2 else None

    lives: list[Life] = run.until(met, f"steps of incarnation {incarnation} of {groups} groups, with all ranks")
    return {(life.member.group, rank): process.pid for life in lives for rank, process in life.processes.items()}


def begins(run: Run) -> list[int]:
    """The steps of the copies to which the groups went back, in order."""
    texts = [event["text"] for event in run.events("ready")]
    return [int(found[1]) for text in texts if (found := re.search(r"from the copy of step (\d+)", text))]


@pytest.mark.parametrize(("layout", "every", "standbys"), [("fsdp", 3, 0), ("fsdp-tp", 1, 1)])
def test_the_only_group_goes_back_to_its_copies(
    tmp_path: Path, unhurt: Callable[[str], str], layout: str, every: int, standbys: int
) -> None:
    """With a copy after every step, one is always under way when a rank dies right after a commit."""
    ranks = LAYOUTS[layout]
    options = ("--buddy", str(every), "--standbys", str(standbys))
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01", groups=1, more=options) as run:
        before = at_work(run, 0, ranks)
        for number, lost in enumerate((ranks - 1, 0, ranks - 1)):
            run.signal(0, rank=lost)
            after = at_work(run, number + 1, ranks)
            assert {who for who in before if before[who] != after[who]} == {(0, lost)}, run.log()
            before = after
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()
        assert len(begins(run)) == 3 and sorted(begins(run)) == begins(run), run.log()


def test_a_rank_of_the_only_group_is_stopped(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", groups=1, more=("--buddy", "2")) as run:
        before = at_work(run, 0, 2)
        run.signal(0, signal.SIGSTOP, rank=1)
        after = at_work(run, 1, 2)
        assert {who for who in before if before[who] != after[who]} == {(0, 1)}, run.log()
        assert "planaria kill GROUP --rank RANK has the rank replaced" in run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")} and len(begins(run)) == 1, run.log()


def test_two_groups_are_hurt_at_once(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", more=("--buddy", "2")) as run:
        before = at_work(run, 0, 2, groups=2)
        run.signal(0, rank=1)
        run.signal(1, rank=0)
        after = at_work(run, 1, 2, groups=2)
        assert {who for who in before if before[who] != after[who]} == {(0, 1), (1, 0)}, run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()
        assert begins(run), run.log()


def test_a_rank_and_its_buddy_die(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    """The copies are lost, but not the checkpoint."""
    options = ("--buddy", "1", "--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2")
    with start(tmp_path / "run", "fsdp-tp", "--guard", "--pause", "0.01", groups=1, more=options) as run:
        at_work(run, 0, 4)
        run.until(lambda: run.events("saved"), "a checkpoint")
        for rank in (1, 2):
            run.signal(0, rank=rank)
        at_work(run, 1, 4)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp-tp")}, run.log()
        assert not begins(run), run.log()


def test_all_copies_are_lost(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", groups=1, more=("--buddy", "1")) as run:
        at_work(run, 0, 2)
        for rank in (0, 1):
            run.signal(0, rank=rank)
        assert run.end() == 1, run.log()
        assert "no whole copy of it is left in memory; without a durable checkpoint" in run.log()


def test_copies_are_of_no_use_without_a_guard(tmp_path: Path) -> None:
    with start(tmp_path / "run", "fsdp", "--pause", "0.01", groups=1, more=("--buddy", "1")) as run:
        run.until(lambda: run.events("uncopied"), "word of it")
        assert "does not put the body of its loop under `with step.guard():`" in run.events("uncopied")[0]["text"]
        assert run.end() == 0, run.log()
