"""One operator of several works: whoever holds the Lease. Two at once would do no harm that the API server does not
refuse (names of pods say whose attempt they are), but they would tell everything twice.

A Lease lapses when others have seen it unchanged for its length, each on its own clock."""

from __future__ import annotations

import asyncio
import datetime
import logging
import math
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from planaria.engines.kubernetes.access import Access
from planaria.engines.kubernetes.api import LEASES, Api, ApiError, Object
from planaria.engines.kubernetes.controller import Controller

log = logging.getLogger("planaria.operator")
NAME = "planaria-operator"
_THREADS = 64
_RENEWALS = 3  # in its length, as lighthouses do


class Leader:
    """``seconds``: the length of the Lease."""

    def __init__(self, api: Api, namespace: str, seconds: float) -> None:
        self._api, self._namespace, self._seconds = api, namespace, seconds
        self._me = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._seen: tuple[str, float] = ("", 0.0)  # what it last was, and since when
        self._held = False

    async def acquire(self) -> None:
        """Returns when this one leads."""
        told = ""
        while True:
            try:
                holder = await self._try()
                if not holder:
                    log.info("this operator works (%s)", self._me)
                    self._held = True
                    return
                if holder != told:
                    log.info("standing by: %s works", holder)
                    told = holder
            except ApiError as error:
                log.warning("the Lease cannot be read: %s", error)
            await asyncio.sleep(self._seconds / _RENEWALS)

    async def keep(self) -> None:
        """Returns when it is lost."""
        good = time.monotonic()
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS)
            asked = time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, good + self._seconds * 3 / 4 - asked)):
                    holder = await self._try()
                if holder:
                    log.warning("%s works now", holder)
                    return
                good = asked
            except ApiError as error:
                log.warning("the Lease cannot be renewed: %s", error)
            except TimeoutError:
                log.warning("the Lease cannot be renewed: the API server does not answer")
            if time.monotonic() - good >= self._seconds * 3 / 4:
                log.warning("the Lease was not renewed for %.0f s: another one may work", time.monotonic() - good)
                return

    async def release(self) -> None:
        if not self._held:
            return
        try:
            found = await self._api.get(LEASES, self._namespace, NAME)
            if found["spec"].get("holderIdentity") == self._me:
                found["spec"]["holderIdentity"] = ""
                await self._api.replace(LEASES, self._namespace, found)
        except ApiError as error:
            log.warning("the Lease could not be given back: %s", error)

    async def _try(self) -> str:
        """Take it or renew it; who has it otherwise."""
        try:
            found: Object = await self._api.get(LEASES, self._namespace, NAME)
        except ApiError as error:
            if error.status != 404:
                raise
            found = {"apiVersion": LEASES.version, "kind": LEASES.kind, "metadata": {"name": NAME}, "spec": {}}
        spec = found.setdefault("spec", {})
        holder = str(spec.get("holderIdentity") or "")
        if holder not in ("", self._me) and not self._lapsed(found):
            return holder
        at = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if holder != self._me:
            spec |= {"leaseTransitions": int(spec.get("leaseTransitions") or 0) + 1, "acquireTime": at}
        spec |= {"holderIdentity": self._me, "renewTime": at, "leaseDurationSeconds": math.ceil(self._seconds)}
        try:
            if "resourceVersion" in found["metadata"]:
                await self._api.replace(LEASES, self._namespace, found)
            else:
                await self._api.create(LEASES, self._namespace, found)
        except ApiError as error:
            if error.status != 409:
                raise
            # Somebody has written it since it was read: perhaps another operator, perhaps people who annotate it.
            now = await self._api.get(LEASES, self._namespace, NAME)
            holder = str((now.get("spec") or {}).get("holderIdentity") or "")
            if holder in ("", self._me):
                raise
            return holder
        return ""

    def _lapsed(self, found: Object) -> bool:
        version, moment = str(found["metadata"]["resourceVersion"]), time.monotonic()
        if self._seen[0] != version:
            self._seen = (version, moment)
        length = float(found["spec"].get("leaseDurationSeconds") or self._seconds)
        return moment - self._seen[1] > length


async def operate(
    access: Access, namespace: str, nodes: bool, seconds: float, check: Callable[[Sequence[str]], None]
) -> None:
    """Until cancelled: stand by, work, stand by again if the Lease is lost."""
    # Of lighthouses that do not answer each keeps a thread busy for seconds, and the others are not to wait for them.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "ask"))
    api = Api(access)
    leader = Leader(api, namespace, seconds)
    try:
        while True:
            await leader.acquire()
            work = asyncio.ensure_future(Controller(api, namespace, nodes, check).run())
            keep = asyncio.ensure_future(leader.keep())
            try:
                await asyncio.wait({work, keep}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, keep):
                    task.cancel()
                await asyncio.gather(work, keep, return_exceptions=True)
            if not work.cancelled() and (error := work.exception()) is not None:
                raise error
    finally:
        await asyncio.shield(leader.release())
        await api.close()
