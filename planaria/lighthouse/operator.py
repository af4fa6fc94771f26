"""The operators' verbs: status, kill, drain, evict, scale and the stream of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from planaria.core.roster import Effect
from planaria.errors import PlanariaError, ProtocolError, UsageError
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
        def verb(job: Job) -> tuple[Verb, str]:
            checks.integer(request.signal, 1, 64, "a signal")
            machine, whom, rank = job.machine, f"group {request.group}", None
            if request.HasField("rank"):
                rank = checks.rank(request.rank)
                whom = f"rank {rank} of {whom}"
            return (
                lambda now: machine.kill(request.group, request.signal, now, rank),
                f"signal {request.signal} goes to {whom}",
            )

        return await self._operate("Kill", request.job, verb, context)

    async def Drain(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done:
        def verb(job: Job) -> tuple[Verb, str]:
            share = request.share if request.HasField("share") else None
            return (
                lambda now: job.machine.drain(request.group, now, checks.clip(request.reason), share),
                f"group {request.group} leaves after one of the next commits",
            )

        return await self._operate("Drain", request.job, verb, context)

    async def Migrate(
        self, request: pb.MigrateRequest, context: grpc.aio.ServicerContext[pb.MigrateRequest, pb.Done]
    ) -> pb.Done:
        def verb(job: Job) -> tuple[Verb, str]:
            node = checks.name(request.to, "a node", empty=not request.whole)
            if request.whole:
                group = request.group
                text = f"group {group} moves to node {node} when it is ready there"
                return lambda now: job.machine.move(group, node, now), text
            group, rank = request.group, checks.rank(request.rank)
            share = request.share if request.HasField("share") else None
            machine, reason = job.machine, checks.clip(request.reason)
            text = f"rank {rank} of group {group} moves when another process is ready to take its place"
            text += f" on node {node}" if node else ""
            if request.drains:
                text += ", and nobody comes to its GPU after it"
                return lambda now: machine.drain_rank(group, rank, now, reason, share), text
            return lambda now: machine.migrate(group, rank, now, reason, share, to=node), text

        return await self._operate("Migrate", request.job, verb, context)

    async def DrainNode(
        self, request: pb.NodeRequest, context: grpc.aio.ServicerContext[pb.NodeRequest, pb.Done]
    ) -> pb.Done:
        def verb(job: Job) -> tuple[Verb, str]:
            node, device = checks.name(request.node, "a node"), checks.name(request.device, "a GPU", empty=True)
            what = f"GPU {device} of node {node}" if device else f"node {node}"
            if request.undrain:
                return lambda now: job.machine.undrain_node(node, device, now), f"{what} is used again"
            return (
                lambda now: job.machine.drain_node(node, device, now),
                f"what is on {what} leaves after one of the next commits, and nothing is started there until planaria "
                "undrain",
            )

        return await self._operate("DrainNode", request.job, verb, context)

    async def Evict(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done:
        def verb(job: Job) -> tuple[Verb, str]:
            return (
                lambda now: job.machine.evict(request.group, now),
                f"group {request.group} counts as dead from now on",
            )

        return await self._operate("Evict", request.job, verb, context)

    async def Scale(
        self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.Done]
    ) -> pb.Done:
        def verb(job: Job) -> tuple[Verb, str]:
            checks.integer(request.groups, 1, checks.MAX_GROUP, "the number of groups")
            return lambda now: job.machine.scale(request.groups, now), f"the job goes to {request.groups} groups"

        return await self._operate("Scale", request.job, verb, context)

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
        choose: Callable[[Job], tuple[Verb, str]],
        context: grpc.aio.ServicerContext[Any, pb.Done],
    ) -> pb.Done:
        await self.require(method, context, CHANGE)
        jobs = await self.leading(context)
        try:
            job = jobs.find(name)
            verb, text = choose(job)
            job.operate(verb)
        except PlanariaError as error:
            await _refuse(context, error)
        return pb.Done(text=f"job {job.name}: {text}")


Verb = Callable[[float], list[Effect]]


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: PlanariaError) -> NoReturn:
    """Bad input is told apart from a failure by the code; the sentence goes with either."""
    bad = isinstance(error, (UsageError, ProtocolError))
    code = grpc.StatusCode.INVALID_ARGUMENT if bad else grpc.StatusCode.UNAVAILABLE
    await context.abort(code, str(error))
    raise AssertionError("abort always raises")
