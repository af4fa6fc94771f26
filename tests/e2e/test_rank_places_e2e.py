"""Ranks come to other nodes, by standbys that are there: the others of their group keep their processes, and the bits
are the quiet run's."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.layouts import SCRIPT

pytestmark = pytest.mark.e2e
WORDS = ("fsdp", "--guard", "--pause", "0.01")


def node(directory: Path, address: str, number: int, *more: str) -> Run:
    options = ("--node-rank", str(number), "--group-addr", address, "--device", "cpu", *more)
    return Run(directory, *WORDS, groups=2, options=options, script=SCRIPT)


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def warm(run: Run, count: int, at: int) -> int:
    """The pid of the newest standby of a node, once so many were warm there in all."""

    def found() -> list[int]:
        facts = [event["data"] for event in run.events("standby") if "is warm" in event["text"]]
        return [fact["pid"] for fact in facts if fact["node"] == at]

    return int(run.until(lambda: len(found()) >= count and found(), f"{count} warm standbys on node {at}")[-1])


def pids(run: Run, group: int, incarnation: int) -> dict[int, int]:
    """Of both ranks, as the agent knows them, once the incarnation is at work."""
    run.incarnation(group, incarnation)
    run.settled(2, beyond=run.watch.step)
    found: dict[int, int] = {}
    for facts in (event["data"] for event in run.events("start") if event["group"] == group):
        if facts["incarnation"] <= incarnation:
            found[facts["rank"]] = facts["pid"]
    return found


def failures(run: Run) -> list[dict[str, object]]:
    return list(json.loads((run.directory / "summary.json").read_text())["failures"])


def test_ranks_go_to_a_node_that_has_standbys_and_come_back(
    tmp_path: Path, unhurt: Callable[[str], str], address: str
) -> None:
    ranks = ("--nproc-per-group", "2")
    with (
        node(tmp_path / "run", address, 0, *ranks) as run,
        node(tmp_path / "far", address, 1, *ranks, "--standbys", "1") as far,
    ):
        before, standby = pids(run, 1, 0), warm(run, 1, at=1)
        refused = run.operate("migrate", "1", "--rank", "0", "--to", "1")
        assert refused.returncode == 2 and "stays on node 0" in refused.stderr
        refused = run.operate("migrate", "1", "--rank", "1", "--to", "2")
        assert refused.returncode == 2 and "2 is none of them" in refused.stderr
        done = run.operate("migrate", "1", "--rank", "1", "--to", "1")
        assert done.returncode == 0, done.stderr
        assert pids(run, 1, 1) == {**before, 1: standby}, run.log()
        assert not run.events("lost") and not run.events("recovered"), run.log()
        again = run.operate("migrate", "1", "--rank", "1", "--to", "0")  # a standby is prepared there for it
        assert again.returncode == 0, again.stderr
        near = pids(run, 1, 2)
        assert near[0] == before[0] and near[1] not in (before[1], standby), run.log()
        assert not run.events("lost"), run.log()

        before, standby = pids(run, 0, 0), warm(run, 2, at=1)
        os.kill(before[1], signal.SIGKILL)
        assert pids(run, 0, 1) == {**before, 1: standby}, run.log()
        far.kill()  # the whole node: a new process starts where the group began
        after = pids(run, 0, 2)
        assert after[0] == before[0] and after[1] not in (before[1], standby), run.log()
        assert run.end() == 0, run.log()
        assert run.digests() == {unhurt("fsdp")}, run.log()
        assert [failure["rank"] for failure in failures(run)] == [1, 1]


def test_a_node_of_a_group_is_lost(tmp_path: Path, unhurt: Callable[[str], str], address: str) -> None:
    """Group 0 is elsewhere. Group 1 has a rank on each node, and a standby on node 0."""
    with node(tmp_path / "other", address, 0, "--nproc-per-group", "2") as other:
        other.until(lambda: (other.directory / "run.json").exists(), "the lighthouse")
