"""One rank dies, and only that one: the others of its group keep their processes, and the bits are the quiet run's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.engines.local import hold_port
from tests.e2e.harness import Run
from tests.e2e.layouts import LAYOUTS, SCRIPT, start

pytestmark = pytest.mark.e2e


def pids(run: Run, group: int, incarnation: int, ranks: int) -> dict[int, int]:
    """Of all ranks of an incarnation, once it is at work."""
    run.incarnation(group, incarnation)
    run.until(lambda: len(run.life(group).processes) == ranks, "all of its ranks")
    run.settled(2, beyond=run.watch.step)
    return {rank: process.pid for rank, process in run.life(group).processes.items()}


@pytest.mark.parametrize("layout", ["tp", "pp", "fsdp-tp", "pp-fsdp"])
def test_ranks_are_replaced_under_the_others(tmp_path: Path, unhurt: Callable[[str], str], layout: str) -> None:
    ranks = LAYOUTS[layout]
    saving = ("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01", more=saving) as run:
        before = pids(run, 1, 0, ranks)
        run.signal(1, rank=ranks - 1)
        after = pids(run, 1, 1, ranks)
        assert {rank for rank in before if before[rank] == after[rank]} == set(range(ranks - 1)), run.log()
        before = pids(run, 0, 0, ranks)
        run.signal(0, rank=0)  # the host of both rendezvous, and the one that speaks for its group
        after = pids(run, 0, 1, ranks)
        assert {rank for rank in before if before[rank] == after[rank]} == set(range(1, ranks)), run.log()
        # Ranks that began in different lives of their group write one checkpoint.
        saved = "group 0 (incarnation 1) saved"
        run.until(lambda: any(event["text"].startswith(saved) for event in run.events("saved")), "a save")
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()
        assert len(run.events("regroup")) == 2 and len(run.events("lost")) == 2


def test_a_rank_is_lost_while_the_others_write_a_checkpoint(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    """They wait for their writing, which takes long, before they meet again: that is no collective that hangs."""
    saved = tmp_path / "checkpoints"
    saving = ("--checkpoint", str(saved), "--checkpoint-every", "4")
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", "--slow-saves", "4", more=saving) as run:
        before = pids(run, 0, 0, 2)
        run.until(lambda: [*saved.glob("*partial*/*")], "a checkpoint that is written")
        run.signal(0, rank=1)
        after = pids(run, 0, 1, 2)
        assert before[0] == after[0], run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


@pytest.mark.parametrize(("layout", "hung"), [("fsdp", 0), ("fsdp-tp", 2)])
def test_a_stopped_rank_is_replaced(tmp_path: Path, unhurt: Callable[[str], str], layout: str, hung: int) -> None:
    ranks = LAYOUTS[layout]
    with start(tmp_path / "run", layout, "--guard", "--pause", "0.01") as run:
        before = pids(run, 1, 0, ranks)
        run.signal(1, signal.SIGSTOP, rank=hung)
        after = pids(run, 1, 1, ranks)
        assert {rank for rank in before if before[rank] != after[rank]} == {hung}, run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt(layout)}, run.log()


def test_a_rank_that_hangs_is_told_from_one_that_waits_for_it(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    """All of its group compute, and none gets on."""
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01", "--odd", "hangs") as run:
        before = pids(run, 1, 0, 2)
        after = pids(run, 1, 1, 2)
        assert {rank for rank in before if before[rank] != after[rank]} == {1}, run.log()
        assert "rank 1: no progress while computing a shard" in run.log()
        hang = [event for event in run.events("hang") if event["group"] == 1][-1]
        stood = [rank for rank in hang["data"]["ranks"] if rank["group"] == 1]
        assert [rank["phase"] for rank in stood] == ["computing", "computing"], stood
        assert (run.directory / stood[1]["stacks"]).exists()  # it was asked before it was killed
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_another_rank_dies_while_one_is_replaced(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--guard", "--pause", "0.01") as run:
        pids(run, 1, 0, 2)
        run.signal(1, rank=1)
        run.until(lambda: run.events("regroup"), "its replacement to begin")
        run.signal(1, rank=0)
        pids(run, 1, 2, 2)
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()


def test_ranks_on_two_nodes(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    held = hold_port()  # until nobody is to listen there any more
    address = f"127.0.0.1:{held.getsockname()[1]}"

    def node(number: int) -> Run:
        options = ("--nnodes", "2", "--node-rank", str(number), "--group-addr", address, "--device", "cpu")
        words = ("fsdp", "--guard", "--pause", "0.01")
        return Run(tmp_path / f"run{number}", *words, groups=2, options=options, script=SCRIPT)

    def started(run: Run, group: int, incarnation: int) -> dict[int, int]:
        """Pids by rank."""
        facts = [event["data"] for event in run.events("start") if event["group"] == group]
        return {fact["rank"]: fact["pid"] for fact in facts if fact["incarnation"] == incarnation}

    with node(0) as near, node(1) as far:
        near.settled(2)
        os.kill(started(near, 1, 0)[1], signal.SIGKILL)  # far from the agent
        near.incarnation(1, 1)
        near.settled(2, beyond=near.watch.step)
        os.kill(started(near, 0, 0)[0], signal.SIGKILL)  # the host of both rendezvous, and the one that speaks
        near.incarnation(0, 1)
        near.settled(2, beyond=near.watch.step)
        assert set(started(near, 1, 1)) == {1} and set(started(near, 0, 1)) == {0}, near.log()
        for pid in (started(near, 1, 0)[0], started(near, 1, 1)[1]):  # one is regrouped, and is dead already
            os.kill(pid, signal.SIGKILL)
        near.incarnation(1, 2)
        near.settled(2, beyond=near.watch.step)
        assert (near.end(far), far.end()) == (0, 0), near.log() + far.log()
        assert near.digests() == {unhurt("fsdp")}, near.log()
    held.close()


def test_a_group_that_cannot_outlive_its_rank(tmp_path: Path, unhurt: Callable[[str], str]) -> None:
    with start(tmp_path / "run", "fsdp", "--pause", "0.01") as run:
        before = pids(run, 1, 0, 2)
        run.signal(1, rank=1)
        after = pids(run, 1, 1, 2)
        assert not set(before.values()) & set(after.values()) and not run.events("regroup")
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()
