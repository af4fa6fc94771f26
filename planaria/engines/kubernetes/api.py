"""The few calls of the Kubernetes API that an operator needs, over its HTTPS. Objects are the server's own JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2

from planaria.engines.kubernetes.access import Access
from planaria.errors import PlanariaError, UsageError

Object = dict[str, Any]

# Seconds. The server itself gives up on ordinary calls after 60 s; one that is well answers within milliseconds, and
# whatever was asked is asked again.
_PATIENCE = 15.0
# A watch is ended by the server after so long and begun again, so that a connection that died in silence is noticed.
WATCH_SECONDS = 240
MERGE = "application/merge-patch+json"


class ApiError(PlanariaError):
    """The server refused, or (status 0) cannot be reached. ``retry_after``: seconds for which it asks."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    @property
    def passing(self) -> bool:
        """Whether the same may be answered some time."""
        return self.status in (0, 429) or self.status >= 500


@dataclass(frozen=True, slots=True)
class Kind:
    """``plural`` of ``version`` ("v1", "apps/v1"), in a namespace or not."""

    version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", sub: str = "") -> str:
        root = f"/api/{self.version}" if self.version == "v1" else f"/apis/{self.version}"
        place = f"/namespaces/{namespace}" if self.namespaced else ""
        return "/".join(p for p in (f"{root}{place}/{self.plural}", name, sub) if p)


JOBS = Kind("planaria.dev/v1alpha1", "FaultTolerantJob", "faulttolerantjobs")
PODS = Kind("v1", "Pod", "pods")
SERVICES = Kind("v1", "Service", "services")
EVENTS = Kind("v1", "Event", "events")
NODES = Kind("v1", "Node", "nodes", namespaced=False)
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments")
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
# The newest that a cluster has: the second is gone since 1.25, the first is there since 1.21.
BUDGETS = tuple(Kind(v, "PodDisruptionBudget", "poddisruptionbudgets") for v in ("policy/v1", "policy/v1beta1"))


class Api:
    """Every method raises ApiError. ``close`` it."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._asking = ThreadPoolExecutor(1, "token")
        self._client = httpx2.AsyncClient(base_url=access.server, verify=access.context, timeout=_PATIENCE)

    async def close(self) -> None:
        await self._client.aclose()
        self._asking.shutdown(wait=False)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def list(self, kind: Kind, namespace: str, selector: str = "") -> Object:
        """With its ``items`` and the ``metadata.resourceVersion`` from which to watch."""
        return await self._call("GET", kind.path(namespace), params={"labelSelector": selector} if selector else {})

    async def served(self, *kinds: Kind) -> Kind:
        """The first of them that the server has; ApiError 404 if it has none."""
        for kind in kinds:
            try:
                await self._call("GET", f"/apis/{kind.version}")
                return kind
            except ApiError as error:
                if error.status != 404:
                    raise
        raise ApiError(404, "NotFound", f"the server has no {kinds[0].plural} of a version known here")

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        return await self._call("POST", kind.path(namespace), body)

    async def replace(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Only if it is still of the body's resourceVersion; else ApiError 409."""
        return await self._call("PUT", kind.path(namespace, body["metadata"]["name"]), body)

    async def patch(self, kind: Kind, namespace: str, name: str, body: Object, sub: str = "") -> Object:
        return await self._call("PATCH", kind.path(namespace, name, sub), body, MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str = "", grace: int | None = None) -> None:
        """Gone already is as good."""
        options: Object = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self._call("DELETE", kind.path(namespace, name), options)
        except ApiError as error:
            if error.status not in (404, 409):  # 409: another object has got the name since
                raise

    async def watch(self, kind: Kind, namespace: str, version: str, selector: str = "") -> AsyncIterator[Object]:
        """Changes after ``version``, as the server tells them. Ends when the server ends it."""
        params = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        params |= {"timeoutSeconds": str(WATCH_SECONDS)}
        if selector:
            params["labelSelector"] = selector
        timeout = httpx2.Timeout(_PATIENCE, read=WATCH_SECONDS + _PATIENCE)
        request = self._client.build_request(
            "GET", kind.path(namespace), params=params, headers=await self._headers(), timeout=timeout
        )
        try:
            answer = await self._client.send(request, stream=True)
            try:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                async for line in _lines(answer):
                    if line.strip():
                        yield json.loads(line)
            finally:
                await answer.aclose()
        except (httpx2.HTTPError, ValueError) as error:
            raise ApiError(0, "Unreachable", f"the watch of {kind.plural} broke: {error!r}") from None

    async def log(self, namespace: str, pod: str, container: str) -> AsyncIterator[str]:
        """Lines of its output, from the first one to its end."""
        path = PODS.path(namespace, pod, "log")
        timeout = httpx2.Timeout(_PATIENCE, read=None)
        params = {"follow": "true", "container": container}
        try:
            async with self._client.stream(
                "GET", path, params=params, headers=await self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    raise _refusal(answer)
                async for line in _lines(answer):
                    yield line.decode(errors="replace").rstrip("\r")
        except httpx2.HTTPError as error:
            raise ApiError(0, "Unreachable", f"the log of {pod} broke off: {error!r}") from None

    async def _headers(self) -> dict[str, str]:
        try:
            if not self.access.slow:
                return self.access.headers()
            # In a thread of its own: those of everybody may be busy with lighthouses that do not answer. The first call
            # of several asks, and the others find what it was told.
            return await asyncio.get_running_loop().run_in_executor(self._asking, self.access.headers)
        except (OSError, UsageError) as error:
            raise ApiError(0, "NoToken", str(error)) from None

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        content: str = "application/json",
        params: Mapping[str, str] | None = None,
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": content, **await self._headers()}
        data = None if body is None else json.dumps(body)
        try:
            answer = await self._client.request(method, path, content=data, headers=headers, params=params)
            if answer.status_code >= 300:
                raise _refusal(answer)
            found: Object = answer.json()
        except (httpx2.HTTPError, ValueError) as error:
            text = f"the Kubernetes API server at {self.access.server} does not answer: {error!r}"
            raise ApiError(0, "Unreachable", text) from None
        return found


async def _lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Without their ends. To httpx2, and to ``str``, lines end at more than that, which people write in texts."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def _refusal(answer: httpx2.Response) -> ApiError:
    try:
        said = answer.json()
        reason, message = str(said.get("reason", "")), str(said.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", answer.text[:200]
    after = answer.headers.get("Retry-After", "")
    wait = float(after) if after.isdecimal() else 0.0
    return ApiError(answer.status_code, reason, f"Kubernetes says {answer.status_code}: {message}", wait)
