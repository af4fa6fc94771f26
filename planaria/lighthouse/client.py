"""A small blocking client for operators. Every call has a deadline and every failure is one sentence."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from planaria.core.messages import Event
from planaria.core.roster import JobStatus
from planaria.errors import UsageError
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import leader_in, open_sync_channel, split_addresses
from planaria.wire.control_pb2_grpc import LighthouseStub
from planaria.wire.credentials import ENVIRONMENT
from planaria.wire.roles import Role
from planaria.wire.status import decode_event, decode_status
from planaria.wire.token import metadata

# Seconds. A lighthouse answers within milliseconds; one that restarts is back well within this.
DEADLINE = 5.0
_ROLES = (Role.OPERATOR, Role.VIEWER)


@dataclass(frozen=True, slots=True)
class Post:
    """One of several lighthouses, as somebody who asked it saw it."""

    address: str
    state: str  # "leads", "stands by", or why it cannot be asked
    epoch: int = 0  # under which it leads


class OperatorClient:
    """Talks to the lighthouse that leads, of those at ``addresses`` (host:port, separated by commas). An empty job
    means the only one.

    Every method raises UsageError: the lighthouse cannot be reached, or it knows no such job or group.
    """

    def __init__(self, addresses: str, deadline: float = DEADLINE) -> None:
        self.addresses = split_addresses(addresses)
        self._deadline = deadline
        self._channels = {a: open_sync_channel(a, *_ROLES) for a in self.addresses}
        self._first = self.addresses[0]  # that which led last

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def posts(self) -> list[Post]:
        """What each of the lighthouses is doing."""
        asked = [
            (
                address,
                self._stub(address).Status.future(pb.StatusRequest(), self._deadline, metadata("Status", *_ROLES)),
            )
            for address in self.addresses
        ]
        found = []
        for address, call in asked:
            try:
                reply = call.result()
                state = "leads" if reply.leads else f"stands by ({reply.trouble})" if reply.trouble else "stands by"
                found.append(Post(address, state, reply.epoch))
            except grpc.RpcError as error:
                found.append(Post(address, f"no answer ({_why(error)})"))
        return found

    def statuses(self) -> list[JobStatus]:
        """Every job that the lighthouse knows, by name."""
        return [decode_status(job) for job in self._status("").jobs]

    def status(self, job: str = "") -> JobStatus:
        if job:
            return decode_status(self._status(job).jobs[0])
        known = self.statuses()
        if len(known) != 1:
            names = ", ".join(status.job for status in known) or "none yet"
            where = ", ".join(self.addresses)
            raise UsageError(f"say which job with --job (jobs of the lighthouse at {where}: {names})")
        return known[0]

    def kill(self, group: int, signal: int, job: str = "", rank: int | None = None) -> str:
        """Have ``signal`` sent to the group's processes, or to one rank's. Like the verbs below: what will happen,
        as a sentence."""
        return self._verb("Kill", pb.KillRequest, job=job, group=group, signal=signal, rank=rank)

    def drain(self, group: int, job: str = "") -> str:
        return self._verb("Drain", pb.GroupRequest, job=job, group=group)

    def migrate(self, group: int, rank: int | None, job: str = "", drains: bool = False, to: str = "") -> str:
        """``to``: the node where the new process is to be. Without a ``rank`` all of the group moves there."""
        fields: dict[str, int | str] = {"group": group, "rank": rank or 0, "drains": drains, "to": to}
        fields["whole"] = rank is None
        return self._verb("Migrate", pb.MigrateRequest, job=job, **fields)

    def drain_node(self, node: str, device: str, job: str = "", undrain: bool = False) -> str:
        """``node``: the name of an agent, or its host's. ``device``: a GPU of it; empty: all of it."""
        fields: dict[str, str | bool] = {"node": node, "device": device, "undrain": undrain}
        return self._verb("DrainNode", pb.NodeRequest, job=job, **fields)

    def evict(self, group: int, job: str = "") -> str:
        return self._verb("Evict", pb.GroupRequest, job=job, group=group)

    def scale(self, groups: int, job: str = "") -> str:
        return self._verb("Scale", pb.ScaleRequest, job=job, groups=groups)

    def events(self, job: str = "") -> Iterator[Event]:
        """Recent events, then new ones as they come, until the caller stops or the lighthouse does."""
        # No deadline: it is meant to last; a dead lighthouse is noticed by the channel's keepalive.
        first: Any = None
        calls: list[Any] = []

        def begin(stub: Any) -> None:
            nonlocal first
            calls.append(stub.WatchEvents(pb.WatchRequest(job=job), metadata=metadata("WatchEvents", *_ROLES)))
            first = next(calls[-1], None)

        self._of_leader(begin)
        try:
            while first is not None:
                yield decode_event(first)
                first = next(calls[-1], None)
        except grpc.RpcError as error:
            raise self._problem(self._first, error) from None

    def _status(self, job: str) -> Any:
        def ask(stub: Any) -> Any:
            proof = metadata("Status", *_ROLES)
            reply = stub.Status(pb.StatusRequest(job=job), timeout=self._deadline, metadata=proof)
            return reply if reply.leads else _StandsBy(reply.leader, reply.trouble)

        return self._of_leader(ask)

    def _verb(self, method: str, request: Any, **fields: int | str | None) -> str:
        try:
            made = request(**fields)
        except ValueError as error:  # a number that does not fit into the message
            raise UsageError(str(error)) from None

        def ask(stub: Any) -> Any:
            return getattr(stub, method)(made, timeout=self._deadline, metadata=metadata(method, *_ROLES))

        return str(self._of_leader(ask).text)

    def _of_leader(self, ask: Callable[[Any], Any]) -> Any:
        """The answer of the one that leads. One that stands by names it; else the others are asked in their order."""
        asked: dict[str, UsageError] = {}
        waiting = [self._first, *(address for address in self.addresses if address != self._first)]
        while waiting:
            address = waiting.pop(0)
            try:
                answer = ask(self._stub(address))
                if not isinstance(answer, _StandsBy):
                    self._first = address
                    return answer
                leads = answer.leader
                asked[address] = UsageError(
                    f"the lighthouse at {address} stands by, and {answer.trouble or 'none that leads can be reached'}"
                )
            except grpc.RpcError as error:
                leads = leader_in(error)
                asked[address] = self._problem(address, error)
                if error.code() is not grpc.StatusCode.UNAVAILABLE and (
                    error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
                ):
                    raise asked[address] from None
            if leads and leads not in asked:
                waiting = [leads, *(other for other in waiting if other != leads)]
        first, *more = asked.values()
        raise UsageError("; ".join([str(first), *(str(one) for one in more)])) from None

    def _stub(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = open_sync_channel(address, *_ROLES)
        return LighthouseStub(self._channels[address])

    def _problem(self, address: str, error: Any) -> UsageError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(details)
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return UsageError(f"the lighthouse at {address} refuses: {details}")
        if "stands by" in details or "leads no more" in details:
            return UsageError(f"the lighthouse at {address} is of no use now: {details}")
        why, doubt = _why(error), ""
        if code is grpc.StatusCode.UNAVAILABLE and "refused" not in why:  # somebody is there, and hangs up
            doubt = ", with these --credentials" if os.environ.get(ENVIRONMENT) else ", without --credentials"
        return UsageError(f"cannot reach the lighthouse at {address} ({why}); is it running{doubt}?")


@dataclass(frozen=True, slots=True)
class _StandsBy:
    leader: str
    trouble: str


def _why(error: Any) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return str(error.details()).rsplit(": ", 1)[-1]
