"""Groups move between nodes, each with an agent of its own, and the bits are the quiet run's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Run
from tests.e2e.test_checkpoints_e2e import lighthouse
from tests.e2e.test_lost_ranks_e2e import pids
from tests.e2e.test_standbys_e2e import ONE, warm

pytestmark = pytest.mark.e2e
LONG = ("--steps", "400", "--pause", "0.01")


def agent_of(run: Run) -> str:
    return str(json.loads((run.directory / "run.json").read_text())["agent"])


def test_a_drained_node_is_left_for_a_standby_of_another(tmp_path: Path, quiet: Callable[..., str]) -> None:
    with lighthouse(tmp_path) as address:
        common = ("--lighthouse", address, "--job", "shared", "--local-groups")
        left = Run(tmp_path / "left", *LONG, options=(*common, "2"))
        right = Run(tmp_path / "right", *LONG, options=(*common, "1", "--first-group", "2", *ONE))
        with left, right:
            left.settled(2)
            standby = warm(right, 1)
            done = left.operate("drain", "--node", agent_of(left), "--job", "shared")
            assert done.returncode == 0, done.stderr
            assert pids(right, 0, 1, 1) == {0: standby}, right.log()
            left.until(lambda: len(left.events("exit")) == 2, "both groups to have left")
            assert left.operate("undrain", "--node", agent_of(left), "--job", "shared").returncode == 0
            left.incarnation(1, 1)
            left.settled(1, beyond=right.watch.step)
            right.settled(2, beyond=left.watch.step)
            assert not right.events("lost") and not right.events("trouble"), "a planned change breaks nothing"
            assert right.end(left) == 0, right.log()
            assert left.end() == 0, left.log()
            assert left.digests() == right.digests() == {quiet(*LONG)}


def test_a_lost_node_is_made_up_for_by_a_standby_of_another(tmp_path: Path, quiet: Callable[..., str]) -> None:
    with lighthouse(tmp_path) as address:
        common = ("--lighthouse", address, "--job", "shared", "--local-groups")
        left = Run(tmp_path / "left", *LONG, options=(*common, "1"))
        right = Run(tmp_path / "right", *LONG, options=(*common, "2", "--first-group", "1", *ONE))
        with left, right:
            left.settled(1)
            right.settled(2)
            standby = warm(right, 1)
            os.kill(int(json.loads((left.directory / "run.json").read_text())["pid"]), signal.SIGKILL)
            assert pids(right, 0, 1, 1) == {0: standby}, right.log()
            right.settled(3, beyond=right.watch.step)
            with Run(tmp_path / "again", *LONG, options=(*common, "1")) as again:
                assert again.end() == 0, again.log()
                assert not again.digests(), "its place is taken"
            assert right.end() == 0, right.log()
            assert right.digests() == {quiet(*LONG)}, right.log()
