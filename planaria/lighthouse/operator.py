"""The operators' verbs: status, kill, drain, evict, scale and the stream of events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.lighthouse import verbs
from planaria.lighthouse.jobs import Job, Jobs
from planaria.lighthouse.seat import Seat, who_leads
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import LEADER
from planaria.wire.control_pb2_grpc import LighthouseServicer
from planaria.wire.roles import CHANGE, READ, Role, roles_of
from planaria.wire.status import encode_event, encode_status
from planaria.wire.token import Denied, Guard


class Operators(LighthouseServicer):
    """The half of the service that people use. A call that names no job means the only one."""

    def __init__(self, seat: Seat, knows_callers: bool, guard: Guard | None = None) -> None:
        self.seat = seat
        self._guard = guard
        self._knows_callers = knows_callers  # by their certificates; else whoever gets here is let in

    async def require(self, method: str, context: grpc.aio.ServicerContext[Any, Any], allowed: frozenset[Role]) -> None:
        """Returns only if the caller has a role that may do this."""
        if self._guard is not None:
            await self._require_proof(self._guard, method, context, allowed)
        if not self._knows_callers:
            return
        about = context.auth_context()
        found = roles_of([*about.get("x509_subject_alternative_name", ()), *about.get("peer_uri", ())])
        if not found & allowed:
            theirs = " and ".join(sorted(role.value for role in found)) or "none that is known"
            wanted = " or ".join(sorted(role.value for role in allowed))
            text = f"this takes the role {wanted}; the caller's certificate says {theirs}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def leading(self, context: grpc.aio.ServicerContext[Any, Any]) -> Jobs:
        """The jobs of this lighthouse. Returns only if it leads; else the caller is told who does."""
        if self.seat.jobs is not None and self.seat.may_act():
            return self.seat.jobs
        status = self.seat.status()
        where = ((LEADER, status.leader),) if status.leader and not status.leads else ()
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"this lighthouse stands by: {who_leads(status)}", where)
        raise AssertionError("abort always raises")

    async def _require_proof(
        self, guard: Guard, method: str, context: grpc.aio.ServicerContext[Any, Any], allowed: frozenset[Role]
    ) -> None:
        try:
            role = guard.role(method, context.invocation_metadata() or ())
        except Denied as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            return
        if role not in allowed:
            wanted = " or ".join(sorted(each.value for each in allowed))
            text = f"this takes the role {wanted}; the caller's token is that of {role.value}"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply]
    ) -> pb.StatusReply:
        """One job, or all of them if none is named; none from one that stands by."""
        await self.require("Status", context, READ)
        jobs, seat = self.seat.jobs, self.seat.status()
        reply = pb.StatusReply(
            leads=seat.leads, leader=seat.leader, epoch=seat.epoch, trouble=checks.clip(seat.trouble)
        )
        if jobs is None:
            return reply
        try:
            found = [jobs.find(request.job)] if request.job else jobs.all()
            reply.jobs.extend(encode_status(job.status()) for job in found)
            return reply
        except PlanariaError as error:
            await _refuse(context, error)

    async def Kill(
        self, request: pb.KillRequest, context: grpc.aio.ServicerContext[pb.KillRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("Kill", request.job, partial(verbs.kill, request), context)

    async def Drain(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("Drain", request.job, partial(verbs.drain, request), context)

    async def Migrate(
        self, request: pb.MigrateRequest, context: grpc.aio.ServicerContext[pb.MigrateRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("Migrate", request.job, partial(verbs.migrate, request), context)

    async def DrainNode(
        self, request: pb.NodeRequest, context: grpc.aio.ServicerContext[pb.NodeRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("DrainNode", request.job, partial(verbs.drain_node, request), context)

    async def Evict(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("Evict", request.job, partial(verbs.evict, request), context)

    async def Scale(
        self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.Done]
    ) -> pb.Done:
        return await self._operate("Scale", request.job, partial(verbs.scale, request), context)

    async def WatchEvents(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.Event]
    ) -> None:
        """The events that are kept, then every new one, until the watcher leaves."""
        await self.require("WatchEvents", context, READ)
        jobs = await self.leading(context)
        try:
            job = jobs.find(request.job)
        except PlanariaError as error:
            await _refuse(context, error)
        watcher = job.watch()
        try:
            while (event := await watcher.take()) is not None:
                await context.write(encode_event(event))
        finally:
            job.watchers.discard(watcher)
        await context.abort(grpc.StatusCode.UNAVAILABLE, watcher.verdict)

    async def _operate(
        self,
        method: str,
        name: str,
        choose: Callable[[Job], verbs.Chosen],
        context: grpc.aio.ServicerContext[Any, pb.Done],
    ) -> pb.Done:
        await self.require(method, context, CHANGE)
        jobs = await self.leading(context)
        try:
            job = jobs.find(name)
            return pb.Done(text=verbs.perform(job, choose))
        except PlanariaError as error:
            await _refuse(context, error)


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: PlanariaError) -> NoReturn:
    """Bad input is told apart from a failure by the code; the sentence goes with either."""
    bad = isinstance(error, (UsageError, ProtocolError))
    code = grpc.StatusCode.INVALID_ARGUMENT if bad else grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error))
    raise AssertionError("abort always raises")
