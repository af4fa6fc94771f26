"""What evictions must leave of a job."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.cli.pod_args import check
from planaria.engines.kubernetes import keeper
from planaria.engines.kubernetes.access import Access
from planaria.engines.kubernetes.api import BUDGETS, EVENTS, JOBS, PODS, Api, ApiError
from planaria.engines.kubernetes.controller import Controller
from planaria.engines.kubernetes.reconcile import Create, Decision, Patch
from tests.kubernetes.small_api import SmallApi
from tests.kubernetes.world import World, job

PATIENCE = 60.0


def at_work(**spec: object) -> World:
    world = World(job(**spec))  # type: ignore[arg-type]
    world.settle(3)
    return world


def minimum(world: World) -> int | None:
    budget = (world.budgets or {}).get("j-groups")
    return None if budget is None else int(budget["spec"]["minAvailable"])


def holders(world: World) -> int:
    """Groups that hold the state, all of whose pods stay."""
    return sum(
        all(
            name in world.running()
            and name not in world.healing
            and not world.pods[name]["metadata"].get("deletionTimestamp")
            for name in names
        )
        and len(names) == world.wanted.nodes
        for names in groups(world).values()
    )


def groups(world: World) -> dict[int, list[str]]:
    """The pods of the newest attempt at each."""
    found: dict[int, list[str]] = {}
    for group, past in world.memory.groups.items():
        found[group] = [name for name in world.pods if f"{name}-".startswith(f"j-rg{group}-{past.attempt}-")]
    return found


@pytest.mark.parametrize(
    ("desired", "least", "nodes", "left"), [(4, 2, 1, 2), (4, 4, 1, 3), (4, 1, 1, 1), (4, 2, 2, 6), (2, 2, 3, 5)]
)
def test_groups_above_the_minimum_may_go_and_one_even_if_there_are_none(
    desired: int, least: int, nodes: int, left: int
) -> None:
    """A pod takes its group with it, whichever of its pods it is."""
    world = at_work(desired=desired, replicaGroups={"desired": desired, "min": least}, nodesPerGroup=nodes)
    assert minimum(world) == left
    assert world.budgets is not None and world.budgets["j-lighthouse"]["spec"]["maxUnavailable"] == 1


def test_who_has_not_healed_is_no_reason_to_let_another_go() -> None:
    world = at_work(desired=3, replicaGroups={"desired": 3, "min": 2})
    assert world.evictable("j-rg1-0")
    world.exit("j-rg1-0", 137)
    world.healing.add("j-rg1-1")
    done = world.look().operations
    (patch,) = [done.index(o) for o in done if isinstance(o, Patch) and o.kind in BUDGETS]
    (create,) = [done.index(o) for o in done if isinstance(o, Create) and o.kind is PODS]
    assert patch < create, "else its pod would be ready before"
    world.settle(3)
    assert len(world.running()) == 3 and not world.evictable("j-rg2-0")
    world.healing.clear()
    world.settle(1)
    assert world.evictable("j-rg2-0")


def test_it_follows_the_number_of_groups_and_goes_with_them() -> None:
    world = at_work(desired=3)
    assert minimum(world) == 1
    world.body["spec"]["replicaGroups"]["desired"] = 5
    world.settle(3)
    assert minimum(world) == 1, "one holds the state"
    world.body["spec"]["replicaGroups"]["min"] = 3
    world.settle(1)
    assert minimum(world) == 3
    world.body["spec"]["replicaGroups"] = {"desired": 1}
    world.settle(5)
    assert minimum(world) is None, "its node could never be drained"
    world.body["spec"]["suspend"] = True
    world.settle(3)
    assert world.budgets == {}


def test_none_is_left_of_a_job_that_is_over() -> None:
    world = at_work(desired=2)
    assert world.budgets
    for name in world.running():
        world.exit(name, 0)
    world.settle(3)
    assert world.memory.outcome is not None and world.budgets == {}


def test_an_operator_that_may_not_see_them_does_without() -> None:
    world = World(job(2))
    world.budgets = None
    world.settle(3)
    assert len(world.running()) == 2


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_evicted_enough_groups_hold_the_state(seed: int) -> None:
    rng = random.Random(seed)
    desired, nodes = rng.randint(2, 5), rng.randint(1, 3)
    least = rng.randint(1, desired)
    world = at_work(desired=desired, replicaGroups={"desired": desired, "min": least}, nodesPerGroup=nodes)
    evicted = 0
    for _ in range(120):
        match rng.choice(["evict", "evict", "look", "run", "heal", "time"]):
            case "evict":
                name = rng.choice(sorted(world.running()) or [""])
                before = holders(world)
                if name and not world.pods[name]["metadata"].get("deletionTimestamp") and world.evictable(name):
                    world.pods[name]["metadata"]["deletionTimestamp"] = "now"
                    evicted += 1
                    assert holders(world) >= min(least, desired - 1, before)
            case "look":
                world.look()
            case "run":
                pending = {name for name, pod in world.pods.items() if pod["status"]["phase"] == "Pending"}
                world.run()
                world.healing |= pending
            case "heal" if world.healing:
                world.healing.discard(rng.choice(sorted(world.healing)))
            case "time":
                world.now += 5.0
    world.healing.clear()
    world.settle()
    assert len(world.running()) == desired * nodes and evicted
    assert any(world.evictable(name) for name in world.running()), "a drain is to get on"


async def until(met: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def operated(server: SmallApi) -> AsyncIterator[None]:
    """An operator of a server in memory, to which a job of two groups is submitted."""

    async def run_pods() -> None:
        while True:
            await server.kubelet()
            await asyncio.sleep(0.05)

    await server.start()
    api = Api(Access(server.url, False, dict, "n"))
    tasks = [asyncio.ensure_future(each) for each in (run_pods(), Controller(api, "n", False, check).run())]
    try:
        await server._create(JOBS.path("n"), job(2) | {"metadata": {"name": "j"}})
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await api.close()
        await server.close()


def made(server: SmallApi) -> list[tuple[str, str]]:
    """Budgets, by version."""
    return sorted((b["apiVersion"], b["metadata"]["name"]) for b in server.of("poddisruptionbudgets"))


@pytest.mark.parametrize("version", ["policy/v1", "policy/v1beta1"])
async def test_they_are_of_the_newest_version_that_the_cluster_has(version: str) -> None:
    server = SmallApi()
    server.lacks = {"policy/v1"} - {version}
    async with operated(server):
        await until(lambda: len(made(server)) == 2, "budgets")
        assert made(server) == [(version, "j-groups"), (version, "j-lighthouse")]


class Forbidding(SmallApi):
    """Budgets alone are forbidden: by a Role that is older than the operator, or by a quota."""

    def __init__(self, *methods: str) -> None:
        super().__init__()
        self.methods, self.refused = methods, 0

    async def _answer(
        self, method: str, path: str, asked: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if "/poddisruptionbudgets" in path and method in self.methods:
            self.refused += 1
            return 403, {"reason": "Forbidden", "message": "no budgets here"}
        return await super()._answer(method, path, asked, body)


@pytest.mark.parametrize("methods", [("GET", "POST"), ("POST",)])
async def test_a_cluster_that_forbids_them_keeps_no_group_from_being_replaced(methods: tuple[str, ...]) -> None:
    server = Forbidding(*methods)
    async with operated(server):
        status = lambda: server.objects[JOBS.path("n"), "j"].get("status", {})  # noqa: E731
        # Of a pod that it has not seen yet it cannot know that it is gone: not for half a minute.
        running = lambda: [group["phase"] for group in status().get("groups", ())] == ["running"] * 2  # noqa: E731
        await until(lambda: running() and server.refused, "pods that the operator has seen, and a refusal")
        await server.remove(PODS.path("n"), "j-rg1-0")
        await until(lambda: (PODS.path("n"), "j-rg1-1") in server.objects, "another attempt")
        assert ("no budgets here" in status()["message"]) == (methods == ("POST",)), "who cannot see them does without"


class Refusing:
    """Counts what it is asked, and takes nothing."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def create(self, kind: Any, *_: Any) -> None:
        if kind is not EVENTS:
            self._refuse("create")

    async def patch(self, *_: Any) -> None:
        self._refuse("patch")

    def _refuse(self, what: str) -> None:
        self.asked[what] += 1
        raise ApiError(403, "Forbidden", f"no {what} here")


async def test_what_is_refused_is_asked_for_less_and_less_often_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = 100.0
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: moment))
    api: Any = Refusing()
    ours: Any = keeper.JobKeeper(api, None, None, "n", "j", None, None)  # type: ignore[arg-type]
    body = {"metadata": {"name": "x", "uid": "u"}}

    async def looked(*operations: Any) -> str:
        return str(await ours._carry_out(Decision(list(operations)), None, body, None))

    patch, create = Patch(BUDGETS[0], "x", {}), Create(PODS, body)
    for _ in range(100):
        assert await looked(patch) == "no patch here", "it is said for as long as it lasts"
        moment += 0.1
    assert api.asked["patch"] == 5, "after 0.5, 1, 2 and 4 seconds"
    for _ in range(3):
        await looked(create, create, patch)
    assert api.asked == {"patch": 5, "create": 1}
    moment += 0.5
    await looked(create, create, patch)
    assert api.asked == {"patch": 5, "create": 2}, "one that waits does not make others wait"
    assert await looked() == ""
    await looked(patch)
    assert api.asked["patch"] == 6, "who was not wanted meanwhile begins anew"
