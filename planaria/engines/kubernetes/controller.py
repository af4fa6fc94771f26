"""The operator: watches what there is in a namespace, and keeps every job of it by a task of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from planaria.engines.kubernetes import crd
from planaria.engines.kubernetes.api import (
    BUDGETS,
    DEPLOYMENTS,
    JOBS,
    NODES,
    PODS,
    SERVICES,
    Api,
    ApiError,
    Kind,
    Object,
)
from planaria.engines.kubernetes.budgets import Budgets
from planaria.engines.kubernetes.cache import Cache
from planaria.engines.kubernetes.keeper import JobKeeper
from planaria.engines.kubernetes.lending import Lending, change, party
from planaria.engines.kubernetes.observe import Seen
from planaria.engines.kubernetes.resources import JOB
from planaria.errors import UsageError

log = logging.getLogger("planaria.operator")

# A pod that finds no room is in nobody's way for a moment.
_LEND_SECONDS = 2.0
_ASK_AGAIN = 10.0  # for what it can do without


class Controller:
    """``run`` it until it is cancelled: then it lets go of everything, and what it has made goes on without it.

    ``nodes``: watch nodes too, so that groups leave those that are cordoned, and those of lost ones are replaced before
    Kubernetes gives their pods up. ``check``: as of `JobKeeper`."""

    def __init__(self, api: Api, namespace: str, nodes: bool, check: Callable[[Sequence[str]], None]) -> None:
        self._api, self._namespace, self._check = api, namespace, check
        self._jobs = Cache(api, JOBS, namespace, lambda job: self._wake(job["metadata"]["name"]))
        self._pods = Cache(api, PODS, namespace, self._changed, JOB)
        self._deployments = Cache(api, DEPLOYMENTS, namespace, self._changed, JOB)
        self._services = Cache(api, SERVICES, namespace, self._changed, JOB)
        self._nodes = Cache(api, NODES, "", self._node_changed) if nodes else None
        self._budgets: tuple[Kind, Cache] | None = None
        self._marks: dict[str, tuple[bool, bool]] = {}  # of nodes: cordoned, lost
        self._cordoned, self._lost = frozenset[str](), frozenset[str]()  # the same
        self._keepers: dict[str, tuple[JobKeeper, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        caches = [self._jobs, self._pods, self._deployments, self._services]
        async with asyncio.TaskGroup() as group:
            for cache in caches:
                group.create_task(cache.run())
            if self._nodes is not None:  # it may not be allowed to see them, and can do without
                group.create_task(self._nodes.run())
            group.create_task(self._see_budgets())
            for cache in caches:
                # Half a view is none: pods that are not known yet would be made again.
                await cache.filled.wait()
            log.info("watching namespace %s", self._namespace)
            self._start = group.create_task
            for name in list(self._jobs.objects):
                self._wake(name)
            group.create_task(self._lend())

    _start: Callable[..., asyncio.Task[None]] | None = None

    def _wake(self, name: str) -> None:
        if self._start is None:
            return
        if name not in self._jobs.objects:
            if name in self._keepers:
                self._keepers.pop(name)[1].cancel()
            return
        if name not in self._keepers:
            keeper = JobKeeper(self._api, self._jobs, self._pods, self._namespace, name, self._see, self._check)
            self._keepers[name] = (keeper, self._start(keeper.run()))
        self._keepers[name][0].wake()

    async def _see_budgets(self) -> None:
        """Nothing waits for them: an older Role may not allow it, and training does without."""
        while True:
            try:
                kind = await self._api.served(*BUDGETS)
                break
            except ApiError as error:
                log.warning("PodDisruptionBudgets cannot be made yet: %s", error)
                await asyncio.sleep(_ASK_AGAIN)
        cache = Cache(self._api, kind, self._namespace, self._changed, JOB)
        self._budgets = kind, cache
        await cache.run()

    async def _lend(self) -> None:
        """Make room for those that wait."""
        lending = Lending()
        while True:
            try:
                await self._lend_once(lending)
            except Exception:  # jobs are kept without it
                log.exception("lending: an error of the operator itself")
            await asyncio.sleep(_LEND_SECONDS)

    async def _lend_once(self, lending: Lending) -> None:
        parties = []
        for name, job in self._jobs.objects.items():
            with suppress(UsageError):
                wanted = crd.read(job)
                pods = self._see(name, wanted.uid).pods_of("trainer")
                parties.append(party(name, job, wanted.desired, wanted.least, wanted.shrinks, pods))
        for name, to in lending.decide(parties, time.monotonic()).items():
            try:
                await self._api.patch(JOBS, self._namespace, name, change(self._jobs.objects[name], to))
                log.info("%s lends groups: %s", name, to or "none any more")
            except (ApiError, KeyError) as error:
                log.warning("%s: what it lends could not be changed: %s", name, error)

    def _changed(self, item: Object) -> None:
        if name := (item["metadata"].get("labels") or {}).get(JOB):
            self._wake(name)

    def _node_changed(self, node: Object) -> None:
        assert self._nodes is not None
        name = node["metadata"]["name"]
        marks = (_cordoned(node), _lost(node)) if name in self._nodes.objects else (False, True)
        if self._marks.get(name, (False, False)) != marks:  # heartbeats are changes too
            # Clusters that grow and shrink have ever new nodes: those that are gone matter while pods are on them.
            used = {pod["spec"].get("nodeName") for pod in self._pods.objects.values()}
            self._marks = {n: m for n, m in self._marks.items() if n in self._nodes.objects or n in used}
            self._marks[name] = marks
            self._cordoned = frozenset(n for n, (cordoned, _) in self._marks.items() if cordoned)
            self._lost = frozenset(n for n, (_, lost) in self._marks.items() if lost)
            for keeper, _ in self._keepers.values():
                keeper.wake()

    def _see(self, job: str, uid: str) -> Seen:
        def ours(cache: Cache) -> list[Object]:
            # Of a job of this name that was deleted something may be left; pods of lighthouses are a ReplicaSet's.
            return [o for o in cache.of(job) if _kin(o) in ("ReplicaSet", uid)]

        budgets = None
        if self._budgets is not None and self._budgets[1].filled.is_set():
            kind, cache = self._budgets
            budgets = Budgets(kind, {body["metadata"]["name"]: body for body in ours(cache)})
        return Seen(
            pods=tuple(ours(self._pods)),
            deployment=next(iter(ours(self._deployments)), None),
            services={service["metadata"]["name"]: service for service in ours(self._services)},
            cordoned=self._cordoned,
            lost=self._lost,
            budgets=budgets,
        )


def _kin(item: Object) -> str:
    """The uid of the job that owns it, or what kind of thing does."""
    owners = item["metadata"].get("ownerReferences") or ()
    owner: Object = next((o for o in owners if o.get("controller")), {})
    return str(owner.get("uid") if owner.get("kind") == JOBS.kind else owner.get("kind"))


def _cordoned(node: Object) -> bool:
    return bool(node["spec"].get("unschedulable"))


def _lost(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "Unknown" for c in conditions)
