"""The operator: watches what there is in a namespace, and keeps every job of it by a task of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from planaria.engines.kubernetes.api import DEPLOYMENTS, JOBS, NODES, PODS, SERVICES, Api, Object
from planaria.engines.kubernetes.cache import Cache
from planaria.engines.kubernetes.keeper import JobKeeper
from planaria.engines.kubernetes.observe import Seen
from planaria.engines.kubernetes.resources import JOB, lighthouse_of

log = logging.getLogger("planaria.operator")


class Controller:
    """``run`` it until it is cancelled: then it lets go of everything, and what it has made goes on without it.

    ``nodes``: watch nodes too, so that groups leave those that are cordoned, and those of lost ones are replaced before
    Kubernetes gives their pods up."""

    def __init__(self, api: Api, namespace: str, nodes: bool) -> None:
        self._api, self._namespace = api, namespace
        self._jobs = Cache(api, JOBS, namespace, lambda job: self._wake(job["metadata"]["name"]))
        self._pods = Cache(api, PODS, namespace, self._changed, JOB)
        self._deployments = Cache(api, DEPLOYMENTS, namespace, self._changed, JOB)
        self._services = Cache(api, SERVICES, namespace, self._changed, JOB)
        self._nodes = Cache(api, NODES, "", self._node_changed) if nodes else None
        self._marks: dict[str, tuple[bool, bool]] = {}  # of nodes: cordoned, lost
        self._keepers: dict[str, tuple[JobKeeper, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        caches = [self._jobs, self._pods, self._deployments, self._services, *([self._nodes] if self._nodes else [])]
        async with asyncio.TaskGroup() as group:
            for cache in caches:
                group.create_task(cache.run())
            for cache in caches:
                # Half a view is none: pods that are not known yet would be made again.
                await cache.filled.wait()
            log.info("watching namespace %s", self._namespace)
            self._start = group.create_task
            for name in list(self._jobs.objects):
                self._wake(name)

    _start: Callable[..., asyncio.Task[None]] | None = None

    def _wake(self, name: str) -> None:
        if self._start is None:
            return
        if name not in self._jobs.objects:
            if name in self._keepers:
                self._keepers.pop(name)[1].cancel()
            return
        if name not in self._keepers:
            keeper = JobKeeper(self._api, self._jobs, self._pods, self._namespace, name, self._see)
            self._keepers[name] = (keeper, self._start(keeper.run()))
        self._keepers[name][0].wake()

    def _changed(self, item: Object) -> None:
        if name := (item["metadata"].get("labels") or {}).get(JOB):
            self._wake(name)

    def _node_changed(self, node: Object) -> None:
        assert self._nodes is not None
        name = node["metadata"]["name"]
        marks = (_cordoned(node), _lost(node)) if name in self._nodes.objects else (False, True)
        if self._marks.get(name, (False, False)) != marks:  # heartbeats are changes too
            self._marks[name] = marks
            for keeper, _ in self._keepers.values():
                keeper.wake()

    def _see(self, job: str) -> Seen:
        def ours(cache: Cache) -> list[Object]:
            return [o for o in cache.objects.values() if (o["metadata"].get("labels") or {}).get(JOB) == job]

        return Seen(
            pods=tuple(ours(self._pods)),
            deployment=self._deployments.objects.get(lighthouse_of(job)),
            services={service["metadata"]["name"]: service for service in ours(self._services)},
            cordoned=frozenset(name for name, (cordoned, _) in self._marks.items() if cordoned),
            lost=frozenset(name for name, (_, lost) in self._marks.items() if lost),
        )


def _cordoned(node: Object) -> bool:
    return bool(node["spec"].get("unschedulable"))


def _lost(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "Unknown" for c in conditions)
