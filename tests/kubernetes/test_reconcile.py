"""The operator's decisions, without a cluster: what holds whatever happens, and what each thing leads to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planaria.engines.kubernetes import crd
from planaria.engines.kubernetes.observe import Memory
from planaria.engines.kubernetes.reconcile import Create, Delete, Evict, Patch, Tell, decide
from planaria.engines.kubernetes.resources import lighthouse, pod
from planaria.engines.kubernetes.status import MOST_GROUPS, invalid, same, status_of
from planaria.errors import UsageError
from tests.kubernetes.world import World, job

KINDS = [
    "exit",
    "leave",
    "kill",
    "lose",
    "delete",
    "scale",
    "silent",
    "heard",
    "run",
    "wait",
    "restart",
    "refuse",
    "accept",
]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 20),
    ),
    max_size=40,
)


def restarted(world: World) -> None:
    """The operator is started again: it knows what the status says."""
    seen = world.seen()
    groups = decide(world.wanted, seen, world.memory, world.now).observed.groups
    world.memory = Memory.of(json.loads(json.dumps(status_of(world.wanted, seen, world.memory, groups, "", 0, {}))))


def happen(world: World, what: str, number: int) -> None:
    running = sorted(world.running())
    name = running[number % len(running)] if running else ""
    match what:
        case "exit" if name:
            world.exit(name, 1)
        case "leave" if name:
            world.exit(name, 75)
        case "kill" if len(running) > 1:
            world.exit(name, 137)
        case "lose" if len(running) > 1:
            world.lost.add(name)
        case "delete" if name:
            world.pods[name]["metadata"]["deletionTimestamp"] = "now"
        case "scale":
            world.body["spec"]["replicaGroups"] = {"desired": number % 6 + 1}
        case "silent":
            world.answers = False
        case "heard":
            world.answers = True
        case "refuse":
            world.refuses = True
        case "accept":
            world.refuses = False
        case "run":
            world.run()
        case "wait":
            world.now += number
        case "restart":  # of the operator: it knows what the status says
            restarted(world)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
@example([("run", 0), ("run", 0), ("refuse", 0), ("scale", 0), ("wait", 0)])  # who leaves cannot be told at once
@example([("refuse", 0), ("run", 0)])  # the first attempt at a group cannot be made at once
@example([("run", 0), ("run", 0), ("lose", 0), ("scale", 0)])  # who stays is lost, and its node with it
@example([("run", 0), ("run", 0), ("lose", 1), ("scale", 0)])  # who leaves
def test_never_two_lives_and_in_the_end_as_many_as_wanted(events: list[tuple[str, int]]) -> None:
    world = World(job(3, maxReplacements=1000))
    for what, number in events:
        world.look()
        happen(world, what, number)
        assert all(len(set(lives)) == 1 for lives in world.living().values()), world.living()
    world.answers, world.refuses = True, False
    world.settle()
    if not world.running():  # whoever alone holds the state is waited for until somebody removes its node
        world.pods = {name: pod for name, pod in world.pods.items() if name not in world.lost}
        world.settle()
    assert world.memory.outcome is None
    assert len(world.running()) == world.body["spec"]["replicaGroups"]["desired"]
    assert len(world.living()) == len(world.running())
    # At rest there is nothing to do, however often it is looked at.
    again = decide(world.wanted, world.seen(), world.memory, world.now)
    assert again.operations == []


def test_a_lost_node_is_evicted_first_and_then_replaced() -> None:
    world = World(job(3))
    world.settle(3)
    world.noticed = False
    world.lost.add("j-rg1-0")
    kinds = []
    for _ in range(6):
        kinds += [type(o).__name__ for o in world.look().operations]
        world.now += 2.0
    assert kinds.index("Evict") < kinds.index("Create") and kinds.count("Create") == 1
    assert "j-rg1-1" in world.pods


def test_on_a_lost_node_who_never_met_the_lighthouse_is_replaced_without_asking_it() -> None:
    """It would refuse to take for dead whom it does not know."""
    world = World(job(3))
    world.settle(3)
    world.exit("j-rg1-0", 1)
    world.look()
    world.pods["j-rg1-1"]["status"]["phase"] = "Running"
    world.lost.add("j-rg1-1")
    world.noticed = True
    status = world.status
    world.status = lambda: replace(status(), groups=tuple(g for g in status().groups if g.member.group != 1))  # type: ignore[method-assign]
    done = []
    for _ in range(6):
        done += world.look().operations
        world.now += 2.0
    assert not [o for o in done if isinstance(o, Evict)] and "j-rg1-2" in world.pods


def test_nothing_is_replaced_whose_end_nobody_can_be_told_of() -> None:
    world = World(job(3))
    world.settle(3)
    world.noticed = False
    world.lost.add("j-rg1-0")
    world.answers = False
    world.settle(5)
    assert set(world.pods) == {"j-rg0-0", "j-rg1-0", "j-rg2-0"}


def test_a_group_that_starts_slowly_is_not_taken_for_lost() -> None:
    """What the lighthouse says may be of the attempt before."""
    world = World(job(2))
    world.settle(3)
    world.exit("j-rg1-0", 1)
    world.look()
    world.pods["j-rg1-1"]["status"]["phase"] = "Running"
    status = world.status
    old = status()
    dead = [g for g in old.groups if g.member.group == 0]
    world.status = lambda: old.__class__(**{**_fields(old), "groups": tuple(dead)})  # type: ignore[method-assign]
    for _ in range(10):
        world.look()
        world.now += 5.0
    assert sorted(world.pods) == ["j-rg0-0", "j-rg1-0", "j-rg1-1"]


def _fields(status: Any) -> dict[str, Any]:
    return {name: getattr(status, name) for name in status.__slots__}


def test_an_image_that_dies_at_once_ends_the_job() -> None:
    world = World(job(2))
    starts = 0
    for _ in range(200):
        starts += sum(isinstance(o, Create) and o.group >= 0 for o in world.look().operations)
        for name in [n for n, p in world.pods.items() if p["status"]["phase"] == "Pending"]:
            world.exit(name, 1)
        world.now += 1.0
    assert world.memory.outcome is not None and world.memory.outcome[0] == 1
    assert "3 attempts" in world.memory.outcome[1] and "ended with 1" in world.memory.outcome[1]
    assert starts == 6


def test_done_means_that_all_ends_but_the_logs() -> None:
    world = World(job(2))
    world.settle(3)
    for name in list(world.pods):
        world.exit(name, 0)
    world.settle(5)
    assert world.memory.outcome == (0, "all groups left their loop early")
    assert sorted(world.pods) == ["j-rg0-0", "j-rg1-0"] and world.deployment is None and not world.services


def test_suspended_nothing_runs_and_resumed_it_is_another_run() -> None:
    world = World(job(2))
    world.settle(3)
    before = world.pods["j-rg0-0"]["spec"]["containers"][0]["command"]
    world.body["spec"]["suspend"] = True
    world.settle(4)
    assert not world.pods and world.deployment is None
    world.body["spec"]["suspend"] = False
    world.settle(4)
    after = world.pods["j-rg0-0"]["spec"]["containers"][0]["command"]
    name = before.index("--job") + 1
    assert after[name] == before[name] + "-1" and len(world.running()) == 2


def test_a_cordoned_node_is_left_one_group_at_a_time() -> None:
    world = World(job(3))
    world.settle(3)
    world.cordoned = frozenset({"node-of-j-rg0-0", "node-of-j-rg1-0"})
    asked = [o for o in world.look().operations if isinstance(o, Delete)]
    assert [o.body["metadata"]["name"] for o in asked] == ["j-rg0-0"]
    assert not [o for o in world.look().operations if isinstance(o, Delete)]


def test_who_holds_the_only_state_stays_on_its_cordoned_node() -> None:
    world = World(job(2))
    world.settle(3)
    world.cordoned = frozenset({"node-of-j-rg0-0", "node-of-j-rg1-0"})
    assert not [o for o in world.look().operations if isinstance(o, (Delete, Evict, Tell))]


def test_a_group_of_several_pods_ends_as_one() -> None:
    world = World(job(2, nodesPerGroup=2))
    world.settle(3)
    assert sorted(world.pods) == ["j-rg0-0-0", "j-rg0-0-1", "j-rg1-0-0", "j-rg1-0-1"]
    world.exit("j-rg1-0-1", 1)
    world.look()
    assert "j-rg1-1-0" not in world.pods  # before the rest is gone
    world.settle(3)
    assert {"j-rg1-1-0", "j-rg1-1-1"} <= set(world.running())


def one(**container: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "t", "image": "i"} | container]}}}


BAD = [
    ({"replicaGroups": {"desired": 13}}, "desired is 13"),
    ({"replicaGroups": {"desired": 2, "min": 3}}, "min is 3"),
    ({"template": {"spec": {"containers": []}}}, "containers is empty"),
    (one(), "args"),
    (one(args="x.py"), "args"),
    (one(args=["x.py"], env=["A=1"]), "containers.0.env must be a list of mappings"),
    ({"template": {"spec": [1]}}, "spec.template.spec must be a mapping"),
    ({"template": {"metadata": ["a"], **one(args=["x.py"])["template"]}}, "spec.template.metadata must be a mapping"),
    ({"template": {"spec": {"restartPolicy": "Always", **one(args=["x.py"])["template"]["spec"]}}}, "restartPolicy"),
]


@pytest.mark.parametrize(("spec", "said"), BAD)
def test_what_cannot_work_is_said_in_the_status(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        crd.read(job(**spec))
    status = invalid(1, said, {"phase": "Running", "step": 7})
    assert status["conditions"][0]["status"] == "False" and status["phase"] == "Running" and status["step"] == 7


def test_a_status_is_bounded_and_only_what_matters_is_written() -> None:
    world = World(job(12))
    world.body["spec"] |= {"shards": 1000, "replicaGroups": {"desired": 1000}}
    world.settle(3)
    seen = world.seen()
    groups = decide(world.wanted, seen, world.memory, world.now).observed.groups
    status = status_of(world.wanted, seen, world.memory, groups, "", 0, {})
    assert len(status["groups"]) == MOST_GROUPS and status["groupsReady"] == "1000/1000"
    assert same(status, status | {"step": status["step"] + 1}) and not same(status, status | {"replicas": 3})


def test_pods_say_what_a_group_is_and_take_no_rights() -> None:
    made = pod(crd.read(job(3)), 1, 2, 0, 0, 3, "10.0.0.1:29510")
    command = made["spec"]["containers"][0]["command"]
    for option, value in (("--first-group", "1"), ("--groups", "3"), ("--lighthouse", "10.0.0.1:29510")):
        assert command[command.index(option) + 1] == value
    assert "--placed" in command and made["spec"]["automountServiceAccountToken"] is False
    context = lighthouse(crd.read(job(3)))["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    assert context["runAsNonRoot"] and context["capabilities"] == {"drop": ["ALL"]}


def test_the_first_pod_of_a_group_listens_where_it_is_and_the_others_ask_for_it_by_name() -> None:
    """Its own name may not be known yet when it begins to listen; whoever asks for it asks again."""
    wanted = crd.read(job(3, nodesPerGroup=2))
    for node, host in ((0, "$(POD_IP)"), (1, "j-rg1-2-0.j-groups.n.svc")):
        command = pod(wanted, 1, 2, node, 0, 3, "10.0.0.1:29510")["spec"]["containers"][0]["command"]
        assert command[command.index("--group-addr") + 1] == f"{host}:29511"


def test_an_operator_that_is_started_again_knows_whom_the_lighthouse_has_met() -> None:
    """So that a node that was lost meanwhile need not be given up by Kubernetes first."""
    world = World(job(3))
    world.settle(3)
    restarted(world)
    world.noticed = False
    world.lost.add("j-rg1-0")
    for _ in range(6):
        world.look()
        world.now += 2.0
    assert "j-rg1-1" in world.pods


def test_an_operator_that_is_started_again_counts_no_end_twice_and_keeps_to_the_budget() -> None:
    world = World(job(2, maxReplacements=3, restartBackoffSeconds=30))
    world.settle(3)
    for attempt in range(2):
        world.exit(f"j-rg1-{attempt}", 1)
        for _ in range(5):
            world.look()
            restarted(world)
            world.now += 5.0
            world.run()
        failures = world.memory.groups[1].failures
    assert failures == 0, "it had held the state"
    assert len(world.memory.replacements) == 2
    world.exit("j-rg1-2", 1)
    world.settle(2)
    world.exit("j-rg1-3", 1)
    world.settle(3)
    assert "j-rg1-4" not in world.pods, "that would be the fourth within ten minutes"


def test_an_end_before_any_work_is_counted_once_however_often_the_operator_starts() -> None:
    world = World(job(1, restartBackoffSeconds=300))
    world.look()
    for attempt in range(2):
        world.look()
        world.exit(f"j-rg0-{attempt}", 1)
    for _ in range(4):
        world.look()
        restarted(world)
    assert world.memory.groups[0].failures == 2 and "j-rg0-2" not in world.pods


def test_who_was_leaving_still_leaves_when_the_operator_is_started_again() -> None:
    world = World(job(3))
    world.settle(3)
    world.noticed = False
    world.lost.add("j-rg1-0")  # a suspect leaves before others
    world.look()
    world.body["spec"]["replicaGroups"] = {"desired": 2}
    world.look()
    restarted(world)
    world.lost.clear()  # it could be reached again
    world.settle(6)
    assert sorted(world.running()) == ["j-rg0-0", "j-rg2-0"]


def test_groups_that_fail_again_and_again_on_a_node_start_on_others() -> None:
    world = World(job(3))
    world.settle(3)
    for attempt in range(3):
        name = f"j-rg1-{attempt}"
        world.pods[name]["spec"]["nodeName"] = "bad"
        world.exit(name, 137)
        restarted(world)
        world.settle(3)
    terms = world.pods["j-rg1-3"]["spec"]["affinity"]["nodeAffinity"][crd.PREFERRED]
    assert terms[0]["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": ["bad"]}]
    assert "affinity" not in world.pods["j-rg1-2"]["spec"]


def test_a_node_is_not_blamed_for_groups_that_were_asked_to_end() -> None:
    world = World(job(3))
    world.settle(3)
    for attempt in range(4):
        world.exit(f"j-rg1-{attempt}", 143 if attempt % 2 else 75)
        world.settle(3)
    assert world.memory.node_failures == []


def test_a_job_that_is_over_says_how_many_groups_finished_also_when_their_pods_are_gone() -> None:
    world = World(job(2))
    world.settle(3)
    for name in list(world.pods):
        world.exit(name, 0)
    world.look()
    status: dict[str, Any] = {}
    for _ in range(2):
        seen = world.seen()
        groups = decide(world.wanted, seen, world.memory, world.now).observed.groups
        status = status_of(world.wanted, seen, world.memory, groups, "", 0, status)
        assert (status["phase"], status["groupsReady"], status["replicas"]) == ("Complete", "2/2", 0)
        world.memory = Memory.of(status)
        world.pods.clear()


def test_a_lighthouse_that_is_to_be_another_keeps_all_else_that_it_has() -> None:
    """A merge replaces lists."""
    world = World(job(2))
    world.settle(3)
    assert world.deployment is not None
    before = world.deployment["spec"]["template"]["spec"]["containers"][0]
    world.body["spec"]["lighthouse"] = {"image": "newer", "leaseSeconds": 20}
    (patch,) = [o for o in world.look().operations if isinstance(o, Patch)]
    (after,) = patch.body["spec"]["template"]["spec"]["containers"]
    assert after["image"] == "newer" and "20" in after["args"]
    assert {key: after[key] for key in after if key not in ("image", "args")} == {
        key: before[key] for key in before if key not in ("image", "args")
    }


def test_a_pod_that_goes_before_anybody_has_seen_it_is_made_again() -> None:
    world = World(job(2))
    world.look()
    world.look()
    del world.pods["j-rg1-0"]
    world.settle(4)
    assert "j-rg1-1" not in world.pods, "it may only not be told yet"
    world.settle(6)
    assert "j-rg1-1" in world.pods
