"""Whole jobs in a real control plane: real API server, scheduler and controller manager; pods are processes.

Each test is one job to which several things happen, for starting one takes longest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from planaria.engines.kubernetes.api import BUDGETS, JOBS, LEASES, NODES
from tests.kubernetes.cluster import PATIENCE, ROOT, STEPS, TRAIN, Space

pytestmark = pytest.mark.k8s


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training, run by itself."""
    directory = tmp_path_factory.mktemp("quiet")
    environ = {**os.environ, "PLANARIA_DIR": str(directory), "PLANARIA_SHARDS": "6", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(TRAIN), "--steps", str(STEPS)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return str(json.loads((directory / "result.json").read_text())["digest"])


def test_losses_and_changes_of_size_leave_no_trace(space: Space, quiet: str) -> None:
    """A rank, a pod and a node are lost, the operator and the lighthouses are rolled, the job goes 4 -> 2 -> 5."""
    cluster = space.cluster
    space.job("train", groups=4)
    status = space.at_work("train", 4)

    # A rank: its agent is faster than anybody could be from outside.
    pod = space.pod_of("train", 1)
    assert pod is not None
    agent = cluster.kubelet.process(pod["metadata"]["name"])
    os.kill(_rank_of(agent), signal.SIGKILL)
    space.until(lambda: "i1" in _lives(space, "train", 1), "a second life of group 1")
    status = space.at_work("train", 4, status["step"])
    assert status["replaced"] == 0

    # A pod, with its agent.
    os.kill(agent, signal.SIGKILL)
    space.until(lambda: space.status("train")["replaced"] == 1, "the replacement of group 1")
    status = space.at_work("train", 4, status["step"])

    # The operator is away, and a pod dies: the others train on, and the next operator finds it.
    space.operators[0].terminate()
    space.operators[0].wait()
    pod = space.pod_of("train", 2)
    assert pod is not None
    os.kill(cluster.kubelet.process(pod["metadata"]["name"]), signal.SIGKILL)
    space.operate()
    space.until(lambda: space.status("train")["replaced"] == 2, "the replacement of group 2")
    status = space.at_work("train", 4, status["step"])

    # Both lighthouses, one after the other, as any Deployment is rolled.
    before = {p["metadata"]["uid"] for p in space.pods("planaria.dev/role=lighthouse")}
    space.change("train", {"lighthouse": {"leaseSeconds": 6}})
    space.until(
        lambda: not before & {p["metadata"]["uid"] for p in space.pods("planaria.dev/role=lighthouse")},
        "new lighthouses",
    )
    status = space.at_work("train", 4, status["step"])

    # Fewer and more, by kubectl's own verb.
    _scale(space, "train", 2)
    status = space.at_work("train", 2, status["step"])
    space.until(lambda: not space.pods("planaria.dev/job=train,planaria.dev/group=3"), "the last group to be gone")
    _scale(space, "train", 5)
    status = space.at_work("train", 5, status["step"])
    assert status["replaced"] == 2

    # A node, with all that is there. Kubernetes takes a while to see it.
    nodes = _nodes(space, "train")
    node = min(set(nodes), key=nodes.count)
    cluster.kubelet.lose(node)
    try:
        lost = nodes.count(node)
        space.until(
            lambda: space.status("train")["replaced"] == 2 + lost, "the replacement of what was on the lost node"
        )
        status = space.at_work("train", 5, status["step"])
        assert space.events("GroupGivenUp")
        assert node not in _nodes(space, "train")
    finally:
        cluster.kubelet.recover(node)
    space.release.touch()
    status = space.phase("train", "Complete")
    assert status["step"] == STEPS
    assert space.digests("train") == {quiet}
    space.until(lambda: not space.pods("planaria.dev/role=lighthouse"), "the lighthouses to be gone")
    cluster.call("DELETE", JOBS.path(space.name, "train"))
    space.until(lambda: not space.pods(), "all that was made for the job to be gone")


def test_cordons_and_evictions_move_groups_and_a_suspended_job_goes_on_from_its_checkpoint(
    space: Space, quiet: str
) -> None:
    cluster = space.cluster
    kept = space.directory / "checkpoints"
    body = space.job("train", groups=2, submit=False)
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["args"] = ["--checkpoint", str(kept), "--checkpoint-every", "50", *container["args"]]
    space.submit(body)
    status = space.at_work("train", 2)
    pod = space.pod_of("train", 1)
    assert pod is not None
    node = pod["spec"]["nodeName"]
    other = space.pod_of("train", 0)
    assert other is not None
    cluster.merge(NODES.path("", node), {"spec": {"unschedulable": True}})
    try:
        moved = 1 if other["spec"]["nodeName"] != node else None
        if moved is None:  # both were there: neither may leave, for nobody else holds the state
            assert not space.events("GroupMoves")
        else:
            space.until(lambda: (p := space.pod_of("train", 1)) and p["spec"]["nodeName"] != node, "group 1 elsewhere")
            assert space.events("GroupMoves")
            status = space.at_work("train", 2, status["step"])
    finally:
        cluster.merge(NODES.path("", node), {"spec": {"unschedulable": None}})
    # Somebody evicts a pod: its group leaves in order, and nobody may evict the other before this one is back.
    space.until(lambda: len(space.list(BUDGETS[1])) == 2, "budgets")
    first, second = _pods(space, "train", 2)
    space.until(lambda: space.evict(first), "the eviction of one group")
    assert not space.evict(second), "the only one that holds the state"
    space.until(lambda: space.evict(second), "the eviction of the other")
    assert _holds_the_state(space, "train", 0), "a pod that only runs is no reason to let the last holder go"
    space.until(lambda: not {first, second} & {*_pods(space, "train", 2)}, "another pod of both")
    status = space.at_work("train", 2, status["step"])
    # And of the lighthouses.
    first, second = (p["metadata"]["name"] for p in space.pods("planaria.dev/role=lighthouse"))
    space.until(lambda: space.evict(first), "the eviction of a lighthouse")
    assert not space.evict(second), "the last one"
    space.change("train", {"suspend": True})
    space.phase("train", "Suspended")
    assert not space.pods("planaria.dev/role=trainer")
    space.until(lambda: not space.list(BUDGETS[1]), "no budgets of what is not there")
    space.change("train", {"suspend": False})
    space.at_work("train", 2, 0)
    space.release.touch()
    space.phase("train", "Complete")
    assert space.digests("train") == {quiet}


def test_an_urgent_job_takes_a_group_of_another_and_gives_it_back(space: Space, quiet: str) -> None:
    """A group takes most of a node, and there are as many nodes as the first job has groups."""
    cluster = space.cluster
    urgent = {"metadata": {"name": "urgent"}, "value": 1000, "preemptionPolicy": "Never"}
    cluster.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", urgent)
    jobs = {}
    for name, groups in (("modest", 3), ("urgent", 1)):
        jobs[name] = space.job(name, groups=groups, submit=False)
        template = jobs[name]["spec"]["template"]["spec"]
        template["containers"][0]["resources"] = {"requests": {"cpu": "3"}}
    template["priorityClassName"] = "urgent"
    template["containers"][0]["args"] = ["--quiet", str(TRAIN), "--steps", str(STEPS)]
    space.submit(jobs["modest"])
    status = space.at_work("modest", 3)
    space.submit(jobs["urgent"])
    space.until(lambda: space.status("modest").get("lent") == 1, "a group that is lent")
    status = space.at_work("modest", 2, status["step"])
    space.phase("urgent", "Complete")
    status = space.at_work("modest", 3, status["step"])
    assert (status["lent"], status["replaced"]) == (0, 0)
    space.release.touch()
    space.phase("modest", "Complete")
    assert space.digests("modest") == space.digests("urgent") == {quiet}


def test_bad_jobs_say_what_is_wrong_and_stop(space: Space) -> None:
    cluster = space.cluster
    space.job("invalid", groups=7)  # of 6 shards
    found = space.phase("invalid", "Invalid")
    assert "7" in found["message"] and not space.pods("planaria.dev/job=invalid")
    assert space.events("InvalidSpec")
    space.change("invalid", {"suspend": True, "replicaGroups": {"desired": 2}})  # put right
    space.phase("invalid", "Suspended")

    body = space.job("dies", groups=1, submit=False)
    body["spec"]["template"]["spec"]["containers"][0]["command"] = [sys.executable, "-c", "exit('no such model')"]
    body["spec"]["restartBackoffSeconds"] = 0.1
    space.submit(body)
    failed = space.phase("dies", "Failed")
    assert "no such model" in failed["message"] and "3 attempts" in failed["message"]

    # What no node has room for, and what a quota forbids.
    quota = {"metadata": {"name": "one"}, "spec": {"hard": {"requests.cpu": "1"}}}
    body = space.job("large", groups=2, submit=False)
    body["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "99"}}
    space.submit(body)
    space.until(lambda: "Insufficient cpu" in space.status("large").get("message", ""), "a sentence about room")
    cluster.call("POST", f"/api/v1/namespaces/{space.name}/resourcequotas", quota)
    space.until(lambda: _hard(space), "the quota to count")
    space.change("large", {"replicaGroups": {"desired": 3}})
    space.until(lambda: "exceeded quota" in space.status("large").get("message", ""), "a sentence about the quota")
    assert space.operators[0].poll() is None


def test_of_two_operators_one_works(space: Space) -> None:
    path, log = LEASES.path(space.name, "planaria-operator"), space.cluster.directory / f"{space.name}-operator.log"

    def holder() -> str:
        return str((space.cluster.try_call("GET", path) or {}).get("spec", {}).get("holderIdentity", ""))

    first = space.until(holder, "an operator that works")
    second = space.operate()
    space.until(lambda: "standing by" in log.read_text(), "an operator that stands by")
    space.operators[0].kill()
    space.until(lambda: holder() not in ("", first), "the other operator to work")
    space.job("none", groups=1, suspend=True)
    space.phase("none", "Suspended")
    assert second.poll() is None


def test_submitting_from_the_command_line_ends_with_the_jobs_own_code(space: Space) -> None:
    template = space.directory / "pod.yaml"
    body = space.job("unused", groups=1, submit=False)
    spec = body["spec"]["template"]["spec"]
    container = spec["containers"][0]
    script = container.pop("args")[1:]
    template.write_text(json.dumps({"spec": spec}))
    admin = space.directory / "admin"
    space.cluster.write_kubeconfig(admin, space.name)
    command = [sys.executable, "-m", "planaria", "run", "--engine", "k8s", "--kubeconfig", str(admin)]
    command += ["--pod-template", str(template), "--job", "sent", "--groups", "1", "--shards", "6", *script]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    space.release.touch()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + space.story()
    assert "all steps are committed" in done.stderr


def _scale(space: Space, name: str, groups: int) -> None:
    path = JOBS.path(space.name, name, "scale")
    space.cluster.merge(path, {"spec": {"replicas": groups}})


def _nodes(space: Space, name: str) -> list[str]:
    """Of every group that runs."""
    pods = [space.pod_of(name, group) for group in range(9)]
    return [pod["spec"]["nodeName"] for pod in pods if pod is not None]


def _pods(space: Space, name: str, groups: int) -> list[str]:
    """The newest one of every group that runs."""
    pods = [space.pod_of(name, group) for group in range(groups)]
    return [pod["metadata"]["name"] for pod in pods if pod is not None]


def _holds_the_state(space: Space, name: str, group: int) -> bool:
    """As the lighthouse has it."""
    command = [sys.executable, "-m", "planaria", "status", "--json", "--lighthouse", space.status(name)["lighthouse"]]
    command += ["--credentials", str(space.directory / "site")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True)
    told = json.loads(done.stdout)["groups"]
    return any(each["member"]["group"] == group and each["state"] == "active" for each in told)


def _hard(space: Space) -> bool:
    found = space.cluster.call("GET", f"/api/v1/namespaces/{space.name}/resourcequotas/one")
    return "requests.cpu" in found.get("status", {}).get("used", {})


def _rank_of(agent: int) -> int:
    """The pid of the training process, a child of the agent's forkserver."""
    import psutil

    ranks = [p for p in psutil.Process(agent).children(recursive=True) if not p.children()]
    with_rank = [p for p in ranks if "PLANARIA_DIR" in _environ(p) or p.num_threads() > 1]
    return max(with_rank or ranks, key=lambda p: p.create_time()).pid


def _environ(process: object) -> dict[str, str]:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _lives(space: Space, name: str, group: int) -> set[str]:
    found = space.cluster.directory.glob(f"pods/{name}-rg{group}-*/planaria-logs/{name}/rg{group}/i*")
    return {path.name for path in found}
