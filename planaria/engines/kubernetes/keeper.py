"""Keeps one job: looks at what there is, decides, carries it out, tells the status. Again at every change."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from planaria.core.roster import JobStatus
from planaria.engines.kubernetes import crd, resources
from planaria.engines.kubernetes.api import EVENTS, JOBS, Api, ApiError, Object
from planaria.engines.kubernetes.cache import Cache
from planaria.engines.kubernetes.crd import Wanted
from planaria.engines.kubernetes.lending import lent_by
from planaria.engines.kubernetes.observe import Memory, Past, Seen
from planaria.engines.kubernetes.reconcile import (
    Create,
    Decision,
    Delete,
    Evict,
    Operation,
    Patch,
    Scale,
    Tell,
    decide,
)
from planaria.engines.kubernetes.status import invalid, now, same, status_of
from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse.client import OperatorClient

log = logging.getLogger("planaria.operator")

# A heartbeat of the agents': the lighthouse knows nothing newer.
_POLL = 1.0
# A lighthouse answers within milliseconds; one that does not is asked again.
_ASK_SECONDS = 2.0
# Between attempts at what the API server refuses: a quota may take people to change.
_PAUSE = (0.5, 30.0)
# Steps change all the time, and nobody reads them more often. Of many jobs all together are written no more often than
# this, which is nothing to an API server.
_STEP_SECONDS = 10.0
_STEPS_A_SECOND = 2.0
# What a job at rest is looked at again for: a change that was missed.
_RESYNC = 300.0

# Since when `time.monotonic` has counted.
_BEGAN = time.time() - time.monotonic()


def clock() -> float:
    """Of the unix epoch, so that its times mean the same to the next operator; never set back while this one lives."""
    return _BEGAN + time.monotonic()


@dataclass(frozen=True, slots=True)
class _Hindrance:
    """The API server refuses this, and is not asked again ``until`` then."""

    why: str
    pause: float
    until: float


class JobKeeper:
    """``run`` it as a task, ``wake`` it at every change of what it sees. ``see`` gives what the caches hold, ``check``
    raises UsageError for what pods would not be able to do with such arguments."""

    def __init__(
        self,
        api: Api,
        jobs: Cache,
        pods: Cache,
        namespace: str,
        name: str,
        see: Callable[[str, str], Seen],
        check: Callable[[Sequence[str]], None],
    ) -> None:
        self.name = name
        self._api, self._jobs, self._pods, self._namespace, self._see = api, jobs, pods, namespace, see
        self._check = check
        self._memory: Memory | None = None
        self._uid = ""
        self._status: Object = {}  # as written last
        self._written = 0.0
        self._client: OperatorClient | None = None
        self._told: dict[str, str] = {}  # newest message of each reason: it is not told twice in a row
        self._news = asyncio.Event()
        self._pause = 0.0
        self._hindrances: dict[str, _Hindrance] = {}  # by what is refused: see `_asked`

    def wake(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._news.clear()
                wait = await self._look()
                with suppress(TimeoutError):  # wait_for may take a cancellation for its own, and this would go on
                    async with asyncio.timeout(wait):
                        await self._news.wait()
                # What one change brings with it comes within milliseconds: one look for all of it.
                await asyncio.sleep(0.02)
        finally:
            if self._client is not None:
                self._client.close()

    async def _look(self) -> float:
        """Seconds until the next look, if nothing happens."""
        try:
            return await self._attend()
        except ApiError as error:
            log.warning("%s: %s", self.name, error)
            self._pause = min(max(2 * self._pause, _PAUSE[0], error.retry_after), _PAUSE[1])
            return self._pause
        except Exception:  # one job's trouble must not be the others'
            log.exception("%s: an error of the operator itself", self.name)
            return _PAUSE[1]

    async def _attend(self) -> float:
        body = self._jobs.objects.get(self.name)
        if body is None or body["metadata"].get("deletionTimestamp"):
            return _RESYNC
        if self._memory is None or self._uid != body["metadata"]["uid"]:
            self._uid, self._status = body["metadata"]["uid"], body.get("status") or {}
            self._memory = Memory.of(self._status)
        try:
            job = crd.read(body)
            self._check(crd.args_of(job))
        except UsageError as error:
            await self._tell(Tell("InvalidSpec", str(error), warning=True), body)
            await self._write(invalid(int(body["metadata"].get("generation", 1)), str(error), self._status))
            return _RESYNC
        memory = self._memory
        seen = self._see(self.name, job.uid)
        lighthouse = None if memory.outcome is not None else await self._ask(job, seen, memory)
        moment = clock()
        fewer = sum(lent_by(body).values())
        decision = decide(job, replace(seen, lighthouse=lighthouse), memory, moment, fewer)
        trouble = await self._carry_out(decision, job, body, memory)
        # What was done is seen in the status at once.
        seen = replace(self._see(self.name, job.uid), lighthouse=lighthouse)
        await self._write(status_of(job, seen, memory, decision.observed.groups, trouble, fewer, self._status))
        self._pause = 0.0
        return self._wait(job, memory, decision, moment)

    def _wait(self, job: Wanted, memory: Memory, decision: Decision, moment: float) -> float:
        if memory.outcome is not None or (job.suspend and not memory.groups):
            return _RESYNC
        due = _POLL if decision.due is None else min(_POLL, max(0.01, decision.due - moment))
        return due

    # --- doing -----------------------------------------------------------------------------------------------

    async def _carry_out(self, decision: Decision, job: Wanted, body: Object, memory: Memory) -> str:
        """All that can be done; why something could not be, or nothing."""
        trouble, before, self._hindrances = "", self._hindrances, {}
        for operation in decision.operations:
            what = _asked(operation)
            held = before.get(what)
            if what in self._hindrances:
                continue
            if held is not None and time.monotonic() < held.until:
                self._hindrances[what] = held  # a quota does not change because it is asked every second
                continue
            try:
                await self._do(operation, job, body, memory)
            except ApiError as error:
                # Of an admission webhook that is away the server says 500: that is about this operation alone.
                if error.passing and error.status != 500:
                    self._hindrances = before | self._hindrances
                    raise
                trouble = str(error)
                pause = min(2 * held.pause if held is not None else _PAUSE[0], _PAUSE[1])
                self._hindrances[what] = _Hindrance(trouble, pause, time.monotonic() + pause)
                known = held is not None and held.why == trouble
                second = held is not None and known and held.pause == _PAUSE[0]
                if second if error.passing else not known:  # what passes may have passed by the second time
                    await self._tell(Tell("Refused", trouble, warning=True), body)
            except UsageError as error:  # of the lighthouse
                trouble = str(error)
        return trouble or next((each.why for each in self._hindrances.values()), "")

    async def _do(self, operation: Operation, job: Wanted, body: Object, memory: Memory) -> None:
        match operation:
            case Create():
                await self._create(operation, body, memory)
            case Delete(kind, found, grace):
                meta = found["metadata"]
                await self._api.delete(kind, self._namespace, meta["name"], meta["uid"], grace)
            case Patch(kind, name, change):
                await self._api.patch(kind, self._namespace, name, change)
            case Evict(group, reason):
                await self._ask_lighthouse(lambda client, name: client.evict(group, name), job, memory)
                memory.groups[group].given_up = True
                await self._tell(Tell("GroupGivenUp", f"group {group} is given up: {reason}", warning=True), body)
                self.wake()
            case Scale(groups):
                await self._ask_lighthouse(lambda client, name: client.scale(groups, name), job, memory)
            case Tell():
                await self._tell(operation, body)

    async def _create(self, operation: Create, body: Object, memory: Memory) -> None:
        kind, meta = operation.kind, operation.body["metadata"]
        try:
            made = await self._api.create(kind, self._namespace, operation.body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            made = await self._api.get(kind, self._namespace, meta["name"])
            owners = [owner["uid"] for owner in made["metadata"].get("ownerReferences") or ()]
            if self._uid not in owners:
                text = f"{kind.kind} {meta['name']} is there and not of this job"
                raise ApiError(409, "AlreadyExists", text) from None
        if operation.group < 0:
            return
        self._pods.put(made)
        past = memory.groups[operation.group]
        if operation.attempt > past.attempt:
            memory.groups[operation.group] = Past(operation.attempt, past.failures, made=clock())
            if operation.told is not None:
                memory.replacements.append(clock())
                memory.replaced += 1
                await self._tell(operation.told, body)

    # --- the lighthouse --------------------------------------------------------------------------------------

    async def _ask(self, job: Wanted, seen: Seen, memory: Memory) -> JobStatus | None:
        service = seen.services.get(resources.lighthouse_name(job))
        address = (service or {}).get("spec", {}).get("clusterIP")
        if not address or not any(_runs(pod) for pod in seen.pods_of("lighthouse")):
            return None
        where = f"{address}:{resources.PORT}"
        if self._client is None or self._client.addresses != (where,):
            if self._client is not None:
                self._client.close()
            self._client = OperatorClient(where, _ASK_SECONDS)
        client, name = self._client, resources.job_name(job, memory.run)
        with suppress(PlanariaError):  # it does not know the job yet, or nobody leads just now
            return await asyncio.to_thread(client.status, name)
        return None

    async def _ask_lighthouse(self, ask: Callable[[OperatorClient, str], str], job: Wanted, memory: Memory) -> None:
        """Raises UsageError if it refuses."""
        if self._client is None:
            raise UsageError("the lighthouse is not there yet")
        said = await asyncio.to_thread(ask, self._client, resources.job_name(job, memory.run))
        log.info("%s: %s", self.name, said)

    # --- telling ---------------------------------------------------------------------------------------------

    async def _write(self, status: Object) -> None:
        moment = time.monotonic()
        if same(status, self._status):
            old = status.get("step") == self._status.get("step")
            pause = max(_STEP_SECONDS, len(self._jobs.objects) / _STEPS_A_SECOND)
            if old or moment < self._written + pause:
                return
        gone = {key: None for key in self._status if key not in status}
        await self._api.patch(JOBS, self._namespace, self.name, {"status": {**gone, **status}}, "status")
        self._status, self._written = status, moment

    async def _tell(self, event: Tell, body: Object) -> None:
        """People's news: that it cannot be written stops nothing."""
        if self._told.get(event.reason) == event.message:
            return
        self._told[event.reason] = event.message
        log.info("%s: %s: %s", self.name, event.reason, event.message)
        meta, at = body["metadata"], now()
        made: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.name}.", "namespace": self._namespace},
            "involvedObject": {
                "apiVersion": JOBS.version,
                "kind": JOBS.kind,
                "name": self.name,
                "namespace": self._namespace,
                "uid": meta["uid"],
            },
            "reason": event.reason,
            "message": event.message[:1000],
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": "planaria-operator"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._api.create(EVENTS, self._namespace, made)
        except ApiError as error:
            log.warning("%s: an event could not be written: %s", self.name, error)


def _runs(pod: Object) -> bool:
    return bool(pod.get("status", {}).get("phase") == "Running")


def _asked(operation: Operation) -> str:
    """What the API server may refuse for a reason that holds for all of this: that there are too many pods says nothing
    of budgets, nor that one pod may not go of others."""
    match operation:
        case Create(kind):
            return f"create {kind.kind}"
        case Delete(kind, found):
            return f"delete {kind.kind} {found['metadata']['name']}"
        case Patch(kind, name):
            return f"patch {kind.kind} {name}"
        case _:
            return type(operation).__name__
