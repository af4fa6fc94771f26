"""A group moves to another agent, by order and because its node is drained: real processes that only count."""

from __future__ import annotations

import json
from collections.abc import Callable

from planaria.cli.operate import drain, migrate, undrain

from .conftest import Run
from .test_drained_places import TRAIN, at_work, refused, status
from .test_run import everything_ended

StartRun = Callable[..., Run]


def agent_of(run: Run) -> str:
    return str(json.loads((run.logs / "run.json").read_text())["agent"])


def test_there_and_back(start_run: StartRun) -> None:
    service = start_run("--groups", "1", *TRAIN)
    about = service.logs / "run.json"
    lighthouse = service.until(lambda: about.exists() and json.loads(about.read_text())["lighthouse"])
    common = ("--groups", "3", "--job", "shared", "--lighthouse", lighthouse, "--nproc-per-group", "2")
    one = start_run(*common, "--local-groups", "2", *TRAIN)
    two = start_run(*common, "--first-group", "2", *TRAIN)
    at_work(one, (0, 0), (1, 0))
    at_work(two, (2, 0))
    for group, node, why in (
        (0, agent_of(one), "is on node"),
        (7, agent_of(two), "no running group"),
        (0, "x", "node x"),
    ):
        assert why in refused(one, migrate, group=group, to=node)

    migrate(0, to=agent_of(two), log_dir=one.logs)
    at_work(two, (0, 1))
    assert [two.pid_of(0, 1, rank) for rank in (0, 1)]
    left = one.until(lambda: next((e for e in one.events("exit") if e["group"] == 0), None))
    ready = next(e for e in two.events("start") if e["group"] == 0)
    assert ready["at"] < left["at"], "the new place was prepared before the old one was given up"
    assert left["data"]["exit_code"] == 0

    migrate(0, to=agent_of(one), log_dir=one.logs)
    at_work(one, (0, 2))
    two.until(lambda: [e for e in two.events("exit") if e["group"] == 0])
    members = {str(group.member): group.agent for group in status(one).groups if group.state == "active"}
    assert members == {
        "group 0 (incarnation 2)": agent_of(one),
        "group 1 (incarnation 0)": agent_of(one),
        "group 2 (incarnation 0)": agent_of(two),
    }
    drain(node=agent_of(two), log_dir=one.logs)
    two.until(lambda: [e for e in two.events("exit") if e["group"] == 2])
    assert "is drained" in refused(one, migrate, group=0, to=agent_of(two))
    undrain(node=agent_of(two), log_dir=one.logs)
    at_work(two, (2, 1))
    for run in (one, two):
        assert not [e for e in run.events("quorum") if "lost" in e["text"]], "whatever left did so in order"
    for run in (one, two, service):
        run.interrupt()
        assert run.wait() == 130
        everything_ended(run)
