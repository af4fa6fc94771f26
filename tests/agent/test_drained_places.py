"""A GPU and a node are drained and taken back: real agents and a real lighthouse, with ranks that only count."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from planaria.cli.operate import drain, find, undrain
from planaria.core.messages import Member
from planaria.core.roster import JobStatus
from planaria.engines.launch import directory_of
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient

from .conftest import SCRIPTS, Run, plain_environ
from .test_run import everything_ended

StartRun = Callable[..., Run]
TRAIN = (str(SCRIPTS / "speaker.py"), "100000", "0.02")


def refused(run: Run, verb: Callable[..., None] = drain, **words: Any) -> str:
    with pytest.raises(UsageError) as caught:
        verb(log_dir=run.logs, **words)
    return str(caught.value)


def status(run: Run) -> JobStatus:
    target = find("", None, run.logs)
    with OperatorClient(target.address) as client:
        return client.status(target.job)


def gpus_of(run: Run, group: int, incarnation: int) -> str:
    return (directory_of(run.logs, Member(group, incarnation)) / "gpus").read_text()


def at_work(run: Run, *members: tuple[int, int]) -> None:
    for member in members:
        run.until(lambda member=member: run.step_of(*member) >= 3)


def test_a_gpu(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *TRAIN, environ=plain_environ(CUDA_VISIBLE_DEVICES="4,5,6"))
    at_work(run, (0, 0), (1, 0))
    node = json.loads((run.logs / "run.json").read_text())["agent"]
    assert (gpus_of(run, 0, 0), gpus_of(run, 1, 0)) == ("4", "5")
    assert f"node {node} has no GPU 9 of this job (GPUs: 4, 5, 6)" in refused(run, gpu=f"{node}:9")

    drain(log_dir=run.logs, gpu=f"{node}:5")
    at_work(run, (1, 1))
    assert gpus_of(run, 1, 1) == "6", "it is not needed any more, and the group comes back on another"
    drain(log_dir=run.logs, gpu=f"{node}:6")
    run.until(lambda: any(e["group"] == 1 and e["data"]["incarnation"] == 1 for e in run.events("exit")))
    run.until(lambda: [group.state for group in status(run).groups] == ["active", "drained"])
    assert status(run).drained == (f"{node}:5", f"{node}:6")
    assert "would end the job" in refused(run, gpu=f"{node}:4")
    assert "would end the job" in refused(run, node=node)
    before = run.step_of(0)
    run.until(lambda: run.step_of(0) > before + 10)
    assert len([e for e in run.events("start") if e["group"] == 1]) == 2, "there is no place for it"

    undrain(log_dir=run.logs, gpu=f"{node}:5")
    at_work(run, (1, 2))
    assert gpus_of(run, 1, 2) == "5"
    assert not run.events("lost"), "whatever left did so in order"
    assert not [e for e in run.events("quorum") if "lost" in e["text"]]
    run.interrupt()
    assert run.wait() == 130 and not run.summary()["failures"]
    everything_ended(run)


def test_a_node(start_run: StartRun) -> None:
    service = start_run("--groups", "1", *TRAIN)
    about = service.logs / "run.json"
    lighthouse = service.until(lambda: about.exists() and json.loads(about.read_text())["lighthouse"])
    common = ("--groups", "3", "--job", "shared", "--lighthouse", lighthouse, "--local-groups")
    one = start_run(*common, "1", *TRAIN)
    two = start_run(*common, "2", "--first-group", "1", *TRAIN)
    at_work(one, (0, 0))
    at_work(two, (1, 0), (2, 0))
    first, second = (json.loads((run.logs / "run.json").read_text())["agent"] for run in (one, two))

    drain(log_dir=two.logs, node=second)
    two.until(lambda: len(two.events("exit")) == 2)
    assert "would end the job" in refused(one, node=first)
    before = one.step_of(0)
    one.until(lambda: one.step_of(0) > before + 10)
    assert len(two.events("start")) == 2 and two.process.poll() is None, "it waits, and starts nothing"
    assert status(two).drained == (second,)

    undrain(log_dir=two.logs, node=second)
    at_work(two, (1, 1), (2, 1))
    assert "is not drained" in refused(two, undrain, node=second)
    assert not two.events("lost"), "whatever left did so in order"
    for run in (one, two, service):
        run.interrupt()
        assert run.wait() == 130
    everything_ended(two)


def test_what_makes_no_sense(start_run: StartRun) -> None:
    run = start_run("--groups", "2", *TRAIN)
    at_work(run, (0, 0), (1, 0))
    both = {"group": 1, "node": "a"}
    for words in ({}, both, {"rank": 0}, {"gpu": "a"}, {"gpu": ":1"}, {"node": "nowhere"}, {"group": 1, "rank": 1}):
        assert refused(run, **words)
    assert refused(run, undrain) and refused(run, undrain, node="nowhere")
    run.interrupt()
    assert run.wait() == 130


def test_no_gpu_is_drained_for_a_group_of_which_any_rank_may_be_wrong(start_run: StartRun) -> None:
    gpus = plain_environ(CUDA_VISIBLE_DEVICES="4,5,6,7")
    run = start_run("--groups", "2", "--nproc-per-group", "2", *TRAIN, "damaged", environ=gpus)
    run.until(lambda: any("was damaged 3 times" in event["text"] for event in run.events("suspicious")))
    assert run.events("health") == [] and status(run).drained == ()
    run.interrupt()
    assert run.wait() == 130, run.err.read_text()


def test_the_gpu_of_the_rank_that_was_caught_again_and_again(start_run: StartRun) -> None:
    gpus = plain_environ(CUDA_VISIBLE_DEVICES="4,5,6,7,8,9")
    run = start_run("--groups", "2", "--nproc-per-group", "2", *TRAIN, "damaged", "rank-1", environ=gpus)
    at_work(run, (0, 0), (1, 0), (1, 1))
    node = json.loads((run.logs / "run.json").read_text())["agent"]
    (event,) = run.events("health")
    why = "group 1 rank 1: GPU 7 was caught with a wrong state or wrong gradients 3 times"
    assert event["text"] == f"{why}: drained, until planaria undrain takes it back" and event["data"]["rank"] == 1
    (advice,) = run.events("suspicious")
    assert advice["text"].endswith("3 times, at rank 1; if it is its hardware: planaria drain 1 --rank 1")
    assert status(run).drained == (f"{node}:7",)
    assert gpus_of(run, 1, 1) == "8,9", "without standbys all of it moves"
    run.interrupt()
    assert run.wait() == 130, run.err.read_text()


def test_a_rank_on_another_node_that_was_caught_goes_only_to_a_standby(start_run: StartRun, address: str) -> None:
    gpus = plain_environ(CUDA_VISIBLE_DEVICES="4,5")
    words = ("--groups", "2", "--nnodes", "2", "--group-addr", address)
    one = start_run(*words, "--node-rank", "1", *TRAIN, "damaged", "rank-1", environ=gpus)
    zero = start_run(*words, *TRAIN, "damaged", "rank-1", environ=gpus)
    (event,) = zero.until(lambda: zero.events("health"))
    why = "group 1, rank 1 was caught with a wrong state or wrong gradients 3 times"
    assert event["text"] == f"{why}: not drained: no standby can take the place of rank 1"
    before = zero.step_of(1)
    zero.until(lambda: zero.step_of(1) > before + 10)
    assert status(zero).drained == ()
    zero.interrupt()
    assert zero.wait() == 130 and one.wait() == 130


def test_a_gpu_on_which_a_group_was_caught_again_and_again(start_run: StartRun) -> None:
    """By a rule of health, as an operator would have it, who takes it back."""
    run = start_run("--groups", "2", *TRAIN, "damaged", environ=plain_environ(CUDA_VISIBLE_DEVICES="4,5,6"))
    at_work(run, (0, 0), (1, 0), (1, 1))
    node = json.loads((run.logs / "run.json").read_text())["agent"]
    (event,) = run.events("health")
    why = "group 1: GPU 5 was caught with a wrong state or wrong gradients 3 times"
    assert event["text"] == f"{why}: drained, until planaria undrain takes it back"
    assert gpus_of(run, 1, 1) == "6" and status(run).drained == (f"{node}:5",)
    assert "leaves after" in (run.logs / "rg1" / "i0" / "stdout.log").read_text(), "nothing of it was killed"
    undrain(log_dir=run.logs, gpu=f"{node}:5")
    run.until(lambda: "GPU 5 of this node is used again" in [event["text"] for event in run.events("node")])
    assert status(run).drained == ()
    run.interrupt()
    assert run.wait() == 130, run.err.read_text()
