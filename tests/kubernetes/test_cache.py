"""What the operator has seen, by job."""

from __future__ import annotations

import random
from typing import Any

from planaria.engines.kubernetes.api import PODS
from planaria.engines.kubernetes.cache import Cache
from planaria.engines.kubernetes.resources import JOB


def pod(name: str, job: str, version: int) -> dict[str, Any]:
    labels = {JOB: job} if job else {}
    return {"metadata": {"name": name, "uid": name, "resourceVersion": str(version), "labels": labels}}


class Server:
    """Tells what it is told to."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.changes: list[dict[str, Any]] = []

    async def list(self, *_: Any) -> dict[str, Any]:
        return {"items": list(self.items.values()), "metadata": {"resourceVersion": "0"}}

    async def watch(self, *_: Any) -> Any:
        while self.changes:
            yield self.changes.pop(0)


async def test_by_job_is_what_there_is_whatever_comes_and_goes() -> None:
    rng, server = random.Random(3), Server()
    cache = Cache(server, PODS, "n", lambda _: None, JOB)  # type: ignore[arg-type]
    for version in range(1, 400):
        name, job = f"p{rng.randrange(8)}", rng.choice(["a", "b", ""])  # labels may be changed
        match rng.choice(["put", "list", "change", "gone"]):
            case "put":
                cache.put(pod(name, job, version))
            case "list":
                server.items = {n: pod(n, rng.choice(["a", "b"]), version) for n in rng.sample(["p1", "p2", "p3"], 2)}
                await cache._fill()
            case "change":
                server.changes.append({"type": "MODIFIED", "object": pod(name, job, version)})
            case "gone":
                server.changes.append({"type": "DELETED", "object": pod(name, job, version)})
        await cache._follow("0")
        for each in ("a", "b"):
            labelled = [o for o in cache.objects.values() if o["metadata"]["labels"].get(JOB) == each]
            key = lambda o: o["metadata"]["name"]  # noqa: E731
            assert sorted(cache.of(each), key=key) == sorted(labelled, key=key)
