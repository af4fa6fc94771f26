"""Pods that are not as the operator made them, or do not get as far as those of most: what webhooks put in, sidecars
that do not end, init containers, nodes that are lost too early, templates with holes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria.core.plan import NodeFailure
from planaria.engines.kubernetes import crd
from planaria.engines.kubernetes.lending import party
from planaria.engines.kubernetes.observe import Memory, trainer
from planaria.engines.kubernetes.reconcile import decide
from planaria.engines.kubernetes.resources import pod
from planaria.engines.kubernetes.status import status_of
from planaria.errors import UsageError
from tests.kubernetes.world import World, job

MESH = {"name": "istio-proxy", "image": "mesh"}


def begun(groups: int) -> World:
    """Its pods are made, and none of them runs."""
    world = World(job(groups))
    world.look()
    world.look()
    assert len(world.pods) == groups
    return world


def with_mesh(world: World, first: bool) -> None:
    """As an admission webhook does it to every pod."""
    for each in world.pods.values():
        containers = each["spec"]["containers"]
        if MESH not in containers:
            containers.insert(0 if first else len(containers), MESH)


def trainer_ends(world: World, name: str, code: int) -> None:
    """And the pod goes on, for its sidecar does."""
    mesh = {"name": "istio-proxy", "state": {"running": {}}}
    over = {"exitCode": code, "message": f"ended with {code}"}
    ended = {"name": "trainer", "state": {"terminated": over}}
    world.pods[name]["status"] |= {"containerStatuses": [mesh, ended]}


def meshed(groups: int, first: bool) -> World:
    world = World(job(groups))
    for _ in range(3):
        world.look()
        with_mesh(world, first)
        world.run()
        world.now += 5.0
    assert all(trainer(each) == "trainer" for each in world.pods.values())
    return world


@pytest.mark.parametrize("first", [False, True])
def test_a_job_is_complete_when_all_trainers_are_whatever_runs_beside_them(first: bool) -> None:
    world = meshed(2, first)
    for name in list(world.pods):
        trainer_ends(world, name, 0)
    world.settle(5)
    assert world.memory.outcome == (0, "all groups left their loop early")
    assert not world.pods and world.deployment is None, "sidecars hold their GPUs until their pods are gone"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_group_whose_trainer_has_ended_is_replaced_whatever_runs_beside_it(first: bool, code: int) -> None:
    world = meshed(2, first)
    trainer_ends(world, "j-rg1-0", code)
    world.look()
    assert "j-rg1-1" in world.pods and world.memory.groups[1].attempt == 1
    assert world.pods["j-rg1-0"]["metadata"].get("deletionTimestamp"), "its sidecar keeps others from the place"
    world.settle(5)
    assert world.running() == ["j-rg0-0", "j-rg1-1"]


def test_what_a_sidecar_ends_with_says_nothing_of_the_group() -> None:
    world = meshed(2, first=True)
    statuses = [{"name": "istio-proxy", "state": {"terminated": {"exitCode": 0}}}]
    world.pods["j-rg1-0"]["status"] |= {"containerStatuses": statuses}
    world.settle(5)
    assert world.running() == ["j-rg0-0", "j-rg1-0"] and world.memory.outcome is None


def test_an_init_container_that_fails_is_named_and_one_that_waits_says_why() -> None:
    world = begun(2)
    said = {"name": "fetch", "state": {"terminated": {"exitCode": 3, "message": "no such bucket\n"}}}
    world.pods["j-rg1-0"]["status"] = {"phase": "Failed", "initContainerStatuses": [said]}
    world.look()
    assert world.memory.groups[1].failures == 1
    world.pods["j-rg1-1"]["status"] = {"phase": "Failed", "initContainerStatuses": [said]}
    world.look()
    assert world.memory.groups[1].fate[2] == "init container fetch ended with exit code 3: no such bucket"
    waits = {"name": "fetch", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}}
    world.pods["j-rg0-0"]["status"] = {"phase": "Pending", "initContainerStatuses": [waits]}
    assert written(world)["message"] == "group 0 waits: ImagePullBackOff: no image"


def written(world: World) -> dict[str, Any]:
    """The status, as it comes back from the API server."""
    seen = world.seen()
    groups = decide(world.wanted, seen, world.memory, world.now).observed.groups
    status = status_of(world.wanted, seen, world.memory, groups, "", 0, {})
    found: dict[str, Any] = json.loads(json.dumps(status))
    return found


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_pod_that_was_about_to_start_on_a_node_that_is_lost_is_replaced(attempt: int) -> None:
    """Kubernetes deletes it after a while, and waits for the node to say that it is gone."""
    world = begun(3)
    if attempt:
        world.settle(3)
        world.exit("j-rg1-0", 1)
        world.look()
    name = f"j-rg1-{attempt}"
    assert world.pods[name]["status"]["phase"] == "Pending"
    world.lost.add(name)
    world.settle(10)
    assert f"j-rg1-{attempt + 1}" in world.running()
    assert [f.node for f in world.memory.node_failures if f.lost] == [f"node-of-{name}"]


def test_where_nobody_has_begun_yet_and_a_node_is_lost() -> None:
    """There is no quorum, for it is waited for."""
    world = begun(1)
    world.lost.add("j-rg0-0")
    world.settle(10)
    assert world.running() == ["j-rg0-1"]


def test_an_operator_that_is_started_again_while_a_job_is_being_suspended_knows_that_a_run_has_ended() -> None:
    """Else the next run is called as the one before, and whoever lives on of that takes part in it."""
    world = World(job(2))
    world.settle(3)
    world.body["spec"]["suspend"] = True
    world.look()
    status = written(world)
    assert [group["phase"] for group in status["groups"]] == ["draining", "draining"]
    world.memory = Memory.of(status)
    world.settle(3)
    assert world.memory.run == 1 and not world.pods
    assert written(world)["groups"] == []
    world.memory = Memory.of(written(world))
    world.settle(1)
    assert world.memory.run == 1, "counted once"


def test_what_was_remembered_by_a_clock_that_was_ahead_ages_as_all_else() -> None:
    world = World(job(2, maxReplacements=1))
    world.memory.replacements = [world.now + 1e8]
    world.memory.node_failures = [NodeFailure("n", world.now + 1e8, lost=True)]
    world.settle(3)
    world.exit("j-rg1-0", 1)
    world.settle(3)
    assert world.running() == ["j-rg0-0"], "the budget is used up"
    world.now += 700.0
    world.settle(3)
    assert "j-rg1-1" in world.running()
    assert "affinity" not in world.pods["j-rg1-1"]["spec"], "the node is not avoided for years"


def test_a_node_is_not_left_by_a_group_that_could_not_come_back() -> None:
    world = World(job(3, maxReplacements=0))
    world.settle(3)
    world.cordoned = frozenset({"node-of-j-rg0-0"})
    world.settle(5)
    assert world.running() == ["j-rg0-0", "j-rg1-0", "j-rg2-0"]


def test_what_a_chart_leaves_empty_is_not_there() -> None:
    """Kubernetes takes null for nothing, in every field."""
    container = {"name": "t", "image": "i", "args": ["x.py"], "env": None, "command": None, "resources": None}
    nulls = dict.fromkeys(("tolerations", "volumes", "affinity", "restartPolicy", "terminationGracePeriodSeconds"))
    template = {"metadata": None, "spec": {"containers": [container], **nulls}}
    made = pod(crd.read(job(template=template)), 0, 0, 0, 0, 3, "l:1", ["bad"])
    assert made["metadata"]["name"] == "j-rg0-0" and made["spec"]["terminationGracePeriodSeconds"] == 120
    assert "null" not in json.dumps(made)
    with pytest.raises(UsageError, match=r"args: the script"):
        crd.read(job(template={"spec": {"containers": [{**container, "args": [None]}]}}))
    with pytest.raises(UsageError, match=r"containers must be a list of mappings"):
        crd.read(job(template={"spec": {"containers": [None]}}))


@pytest.mark.parametrize("name", ["70b", "7-b", "-a", "a-", "A", "a.b", "a" * 45, "ä", ""])
def test_names_of_which_no_service_can_be_made_are_refused(name: str) -> None:
    body = job()
    body["metadata"]["name"] = name
    with pytest.raises(UsageError, match=r"metadata.name is .*a letter first"):
        crd.read(body)


def test_a_pod_that_somebody_has_taken_our_labels_from_is_nobodys_trouble() -> None:
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    strange = {"metadata": {"labels": {}}, "spec": {}, "status": {"conditions": [waits]}}
    assert party("j", job(), 3, 1, True, [strange]).waiting == 1
