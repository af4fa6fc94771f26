# Written by hand: protoc makes no stubs for services. One class per side, as the generated module has them.
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from planaria.wire import control_pb2 as pb

class LighthouseStub:
    def __init__(self, channel: grpc.Channel | grpc.aio.Channel) -> None: ...
    # What a call returns depends on the kind of channel (an awaitable or a value), so the callables stay open.
    Attend: Callable[..., Any]
    Status: Callable[..., Any]
    Kill: Callable[..., Any]
    Drain: Callable[..., Any]
    Migrate: Callable[..., Any]
    DrainNode: Callable[..., Any]
    Evict: Callable[..., Any]
    Scale: Callable[..., Any]
    WatchEvents: Callable[..., Any]

class LighthouseServicer:
    async def Attend(
        self,
        request_iterator: AsyncIterator[pb.AgentFrame],
        context: grpc.aio.ServicerContext[pb.AgentFrame, pb.LighthouseFrame],
    ) -> None: ...
    async def Status(
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply]
    ) -> pb.StatusReply: ...
    async def Kill(
        self, request: pb.KillRequest, context: grpc.aio.ServicerContext[pb.KillRequest, pb.Done]
    ) -> pb.Done: ...
    async def Drain(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done: ...
    async def Migrate(
        self, request: pb.MigrateRequest, context: grpc.aio.ServicerContext[pb.MigrateRequest, pb.Done]
    ) -> pb.Done: ...
    async def DrainNode(
        self, request: pb.NodeRequest, context: grpc.aio.ServicerContext[pb.NodeRequest, pb.Done]
    ) -> pb.Done: ...
    async def Evict(
        self, request: pb.GroupRequest, context: grpc.aio.ServicerContext[pb.GroupRequest, pb.Done]
    ) -> pb.Done: ...
    async def Scale(
        self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.Done]
    ) -> pb.Done: ...
    async def WatchEvents(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.Event]
    ) -> None: ...

def add_LighthouseServicer_to_server(servicer: LighthouseServicer, server: grpc.aio.Server) -> None: ...
