"""A small blocking client for operators. Every call has a deadline and every failure is one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import grpc

from planaria.core.messages import Event
from planaria.core.roster import JobStatus
from planaria.errors import UsageError
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import open_sync_channel
from planaria.wire.control_pb2_grpc import LighthouseStub
from planaria.wire.credentials import ENVIRONMENT
from planaria.wire.roles import Role
from planaria.wire.status import decode_event, decode_status
from planaria.wire.token import metadata

# Seconds. A lighthouse answers within milliseconds; one that restarts is back well within this.
DEADLINE = 5.0
_ROLES = (Role.OPERATOR, Role.VIEWER)


class OperatorClient:
    """Talks to the lighthouse at ``address`` (host:port). An empty job means the only one.

    Every method raises UsageError: the lighthouse cannot be reached, or it knows no such job or group.
    """

    def __init__(self, address: str, deadline: float = DEADLINE) -> None:
        self.address = address
        self._deadline = deadline
        self._channel = open_sync_channel(address, *_ROLES)
        self._stub = LighthouseStub(self._channel)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def statuses(self) -> list[JobStatus]:
        """Every job that the lighthouse knows, by name."""
        return [decode_status(job) for job in self._call(self._stub.Status, pb.StatusRequest).jobs]

    def status(self, job: str = "") -> JobStatus:
        if job:
            return decode_status(self._call(self._stub.Status, pb.StatusRequest, job=job).jobs[0])
        known = self.statuses()
        if len(known) != 1:
            names = ", ".join(status.job for status in known) or "none yet"
            raise UsageError(f"say which job with --job (jobs of the lighthouse at {self.address}: {names})")
        return known[0]

    def kill(self, group: int, signal: int, job: str = "", rank: int | None = None) -> str:
        """Have ``signal`` sent to the group's processes, or to one rank's. Like the verbs below: what will happen,
        as a sentence."""
        return self._verb(self._stub.Kill, pb.KillRequest, job=job, group=group, signal=signal, rank=rank)

    def drain(self, group: int, job: str = "") -> str:
        return self._verb(self._stub.Drain, pb.GroupRequest, job=job, group=group)

    def migrate(self, group: int, rank: int, job: str = "", drains: bool = False, to: str = "") -> str:
        """``to``: the node to which all of the group moves; empty: only the rank moves."""
        fields: dict[str, int | str] = {"group": group, "rank": rank, "drains": drains, "to": to}
        return self._verb(self._stub.Migrate, pb.MigrateRequest, job=job, **fields)

    def drain_node(self, node: str, device: str, job: str = "", undrain: bool = False) -> str:
        """``node``: the name of an agent, or its host's. ``device``: a GPU of it; empty: all of it."""
        fields: dict[str, str | bool] = {"node": node, "device": device, "undrain": undrain}
        return self._verb(self._stub.DrainNode, pb.NodeRequest, job=job, **fields)

    def evict(self, group: int, job: str = "") -> str:
        return self._verb(self._stub.Evict, pb.GroupRequest, job=job, group=group)

    def scale(self, groups: int, job: str = "") -> str:
        return self._verb(self._stub.Scale, pb.ScaleRequest, job=job, groups=groups)

    def events(self, job: str = "") -> Iterator[Event]:
        """Recent events, then new ones as they come, until the caller stops or the lighthouse does."""
        try:
            # No deadline: it is meant to last; a dead lighthouse is noticed by the channel's keepalive.
            for event in self._stub.WatchEvents(pb.WatchRequest(job=job), metadata=metadata(*_ROLES)):
                yield decode_event(event)
        except grpc.RpcError as error:
            raise self._problem(error) from None

    def _verb(self, method: Any, request: Any, **fields: int | str | None) -> str:
        return str(self._call(method, request, **fields).text)

    def _call(self, method: Any, request: Any, **fields: int | str | None) -> Any:
        try:
            return method(request(**fields), timeout=self._deadline, metadata=metadata(*_ROLES))
        except grpc.RpcError as error:
            raise self._problem(error) from None
        except ValueError as error:  # a number that does not fit into the message
            raise UsageError(str(error)) from None

    def _problem(self, error: Any) -> UsageError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(details)
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return UsageError(f"the lighthouse at {self.address} refuses: {details}")
        why = "no answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else str(details).rsplit(": ", 1)[-1]
        doubt = ""
        if code is grpc.StatusCode.UNAVAILABLE and "refused" not in why:  # somebody is there, and hangs up
            doubt = ", with these --credentials" if os.environ.get(ENVIRONMENT) else ", without --credentials"
        return UsageError(f"cannot reach the lighthouse at {self.address} ({why}); is it running{doubt}?")
