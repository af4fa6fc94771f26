"""All objects of a kind, kept up to date by a list and watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from planaria.engines.kubernetes.api import Api, ApiError, Kind, Object
from planaria.engines.kubernetes.resources import JOB

log = logging.getLogger("planaria.operator")

# Between attempts: the first is hardly noticed, the last is what a server in trouble can bear from every operator.
_PAUSE = (0.2, 10.0)


class Cache:
    """``run`` it as a task. ``changed`` is told of every object that is new, changed or gone."""

    def __init__(self, api: Api, kind: Kind, namespace: str, changed: Callable[[Object], None], selector: str = ""):
        self._api, self._kind, self._namespace, self._selector = api, kind, namespace, selector
        self._changed = changed
        self.objects: dict[str, Object] = {}  # by name
        self._of: dict[str, dict[str, Object]] = {}  # the same, by job and name: jobs look often, and may be many
        self.filled = asyncio.Event()
        self.trouble = ""  # why it may be old

    async def run(self) -> None:
        """Until cancelled. Never gives up: what cannot be read now is read later."""
        pause = 0.0
        while True:
            try:
                version = await self._fill()
                self.trouble, pause = "", 0.0
                while True:
                    version = await self._follow(version)
            except ApiError as error:
                if error.status != 410:  # Gone: it has forgotten the changes since, which is why there are lists
                    self.trouble = str(error)
                    log.warning("%s: %s", self._kind.plural, error)
                pause = min(max(2 * pause, _PAUSE[0], error.retry_after), max(_PAUSE[1], error.retry_after))
            await asyncio.sleep(pause)

    def put(self, found: Object) -> None:
        """What a write of our own has answered: it is seen at once, not only when the watch tells it."""
        name = found["metadata"]["name"]
        known = self.objects.get(name)
        if known is None or known["metadata"]["uid"] != found["metadata"]["uid"] or _newer(found, known):
            self._keep(found)

    def of(self, job: str) -> list[Object]:
        """Those that are labelled with the job's name."""
        return list(self._of.get(job, {}).values())

    def _keep(self, item: Object) -> None:
        self._drop(item["metadata"]["name"])
        self.objects[item["metadata"]["name"]] = item
        if job := _job(item):
            self._of.setdefault(job, {})[item["metadata"]["name"]] = item

    def _drop(self, name: str) -> None:
        old = self.objects.pop(name, None)
        if old is not None and (job := _job(old)) and (left := self._of[job]).pop(name, None) is not None and not left:
            del self._of[job]

    async def _fill(self) -> str:
        found = await self._api.list(self._kind, self._namespace, self._selector)
        before, self.objects, self._of = self.objects, {}, {}
        for item in found["items"]:
            self._keep(item)
        self.filled.set()
        for name, item in self.objects.items():
            if name not in before or before[name]["metadata"].get("resourceVersion") != _version(item):
                self._changed(item)
        for name, item in before.items():
            if name not in self.objects:
                self._changed(item)
        return _version(found)

    async def _follow(self, version: str) -> str:
        async for change in self._api.watch(self._kind, self._namespace, version, self._selector):
            item, what = change["object"], change["type"]
            if what == "ERROR":
                raise ApiError(int(item.get("code", 0)), str(item.get("reason", "")), str(item.get("message", "")))
            version = _version(item)
            if what == "BOOKMARK":
                continue
            name = item["metadata"]["name"]
            if what == "DELETED":
                self._drop(name)
            else:
                self._keep(item)
            self._changed(item)
        return version


def _job(item: Object) -> str:
    return str((item["metadata"].get("labels") or {}).get(JOB, ""))


def _version(item: Object) -> str:
    return str(item["metadata"].get("resourceVersion", ""))


def _newer(one: Object, other: Object) -> bool:
    """Versions are opaque, but all servers count; if one does not, the watch puts it right."""
    a, b = _version(one), _version(other)
    return a.isdecimal() and b.isdecimal() and int(a) > int(b)
