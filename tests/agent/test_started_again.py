"""An agent that is started again while its job goes on: its groups begin lives that nobody had before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.core.messages import Member
from planaria.lighthouse.client import OperatorClient

from .conftest import SCRIPTS, Run, plain_environ
from .test_run import everything_ended

StartRun = Callable[..., Run]
FOR_LONG = (str(SCRIPTS / "speaker.py"), "1000000", "0.02")


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorClient]:
    """Of a lighthouse that serves several agents."""
    command = [sys.executable, "-m", "planaria", "lighthouse", "--bind", "127.0.0.1:0", "--store", str(tmp_path / "db")]
    process = subprocess.Popen(command, env=plain_environ(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with OperatorClient(json.loads(process.stdout.readline())["address"]) as client:
        yield client
    process.kill()
    process.wait()
    process.stdout.close()


def at_work(operator: OperatorClient, *members: Member) -> Callable[[], bool]:
    """Whether exactly these are in the quorum, and work."""

    def ask() -> bool:
        seen = operator.statuses()
        active = {group.member for group in seen[0].groups if group.state == "active"} if seen else set()
        return bool(seen and seen[0].quorum and seen[0].quorum.members == members and active == set(members))

    return ask


def end(*runs: Run) -> None:
    for run in runs:
        run.interrupt()
    for run in runs:
        assert run.wait() == 130, run.err.read_text()
        everything_ended(run)


def test_an_agent_of_several(start_run: StartRun, operator: OperatorClient) -> None:
    common = ("--groups", "3", "--job", "shared", "--lighthouse", operator.addresses[0])
    left = start_run(*common, "--local-groups", "2", *FOR_LONG)
    right = start_run(*common, "--first-group", "2", *FOR_LONG)
    left.until(at_work(operator, Member(0, 0), Member(1, 0), Member(2, 0)))
    for life in (1, 2):
        right.process.kill()
        right.process.wait()
        right = start_run(*common, "--first-group", "2", *FOR_LONG)
        left.until(at_work(operator, Member(0, 0), Member(1, 0), Member(2, life)))
        assert [path.name for path in (right.logs / "rg2").iterdir()] == [f"i{life}"]
        assert right.until(lambda run=right: run.events("start"))[0]["data"]["incarnation"] == life
    end(left, right)
    assert right.summary()["replacements"] == 0, "nothing was lost while it was there"


def test_node_0_of_groups_that_are_spread(start_run: StartRun, operator: OperatorClient, address: str) -> None:
    common = ("--groups", "2", "--job", "shared", "--lighthouse", operator.addresses[0])
    left = start_run(*common, "--local-groups", "1", *FOR_LONG)
    spread = (*common, "--first-group", "1", "--nnodes", "2", "--group-addr", address)
    zero, one = start_run(*spread, *FOR_LONG), start_run(*spread, "--node-rank", "1", *FOR_LONG)
    left.until(at_work(operator, Member(0, 0), Member(1, 0)))
    zero.process.kill()
    zero.process.wait()
    again = start_run(*spread, *FOR_LONG)
    left.until(at_work(operator, Member(0, 0), Member(1, 1)))
    node = one.logs / "node1"
    assert [path.name for path in (node / "rg1").iterdir()] == ["i1"], "the helper's is the same life"
    assert [path.name for path in (node / "earlier-1" / "rg1").iterdir()] == ["i0"]
    again.interrupt()
    assert (again.wait(), one.wait()) == (130, 130), one.err.read_text()
    end(left)
    everything_ended(one)
