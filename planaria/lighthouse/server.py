"""The lighthouse service: agents' streams over gRPC, the operators' verbs, and the life of the process."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from planaria.core.messages import Hello, Order, Publish
from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.lighthouse.elector import LEASE, Elector, open_elector
from planaria.lighthouse.http import StatusPages
from planaria.lighthouse.jobs import ORDERS_WAITING, Job
from planaria.lighthouse.operator import Operators
from planaria.lighthouse.outbox import Outbox
from planaria.lighthouse.seat import Candidate, Seat
from planaria.lighthouse.store import Store
from planaria.logs import LogFormat, configure
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import DEFAULT_BIND, add_port, make_server, split_address
from planaria.wire.codec import decode_report, encode_order, guarded
from planaria.wire.control_pb2_grpc import add_LighthouseServicer_to_server
from planaria.wire.credentials import Credentials, demand_for
from planaria.wire.quorums import publish_frame
from planaria.wire.roles import ATTEND, Role
from planaria.wire.token import Guard, Token

log = logging.getLogger("planaria.lighthouse")

Context = grpc.aio.ServicerContext[pb.AgentFrame, pb.LighthouseFrame]

# How long calls that are being answered may take when the service stops: twice a heartbeat. Streams are told
# to end and need no grace.
STOP_GRACE = 2.0
# Containers made, less those freed, between two looks for garbage in cycles; Python's own number is 700. With 1,000
# agents a look at everything takes 13 ms (bench/lighthouse.py), in which 170 of them could be told of a death, and
# there is hardly ever anything to be found.
GARBAGE = 50_000


class Service(Operators):
    """All of ``service Lighthouse``: the operators' half lives in ``operator``."""

    async def Attend(self, request_iterator: AsyncIterator[pb.AgentFrame], context: Context) -> None:
        """One agent's stream, from its Hello until either side ends it."""
        await self.require("Attend", context, ATTEND)
        await context.send_initial_metadata(())  # at once: it tells the agent that it is connected
        try:
            hello = await _hello(context)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        self.seat.told(hello.epoch)
        jobs, stream = await self.leading(context), Outbox[Order](ORDERS_WAITING)
        try:
            job = jobs.attend(hello, stream)
        except PlanariaError as error:  # the elector's store failed: this one leads no more
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            return
        reading = asyncio.create_task(_read(job, hello.agent, context))
        writing = asyncio.create_task(_write(job, stream, context))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            job.leave(hello.agent, stream)
            problems = await _end(reading, writing)
        for problem in problems:
            await _refuse(context, f"job {job.name}: agent {hello.agent}", problem)
        if stream.verdict:
            log.info("job %s: the stream of agent %s ends: %s", job.name, hello.agent, stream.verdict)
            await context.abort(grpc.StatusCode.UNAVAILABLE, stream.verdict)


async def _refuse(context: Context, who: str, problem: BaseException) -> None:
    """INVALID_ARGUMENT tells the agent that to try again is pointless."""
    if isinstance(problem, ProtocolError):
        log.warning("%s: %s", who, problem)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
    log.error("%s: its stream failed", who, exc_info=problem)
    await context.abort(grpc.StatusCode.INTERNAL, f"the stream failed at the lighthouse: {problem}")


async def _hello(context: Context) -> Hello:
    frame = await _next(context)
    if frame is None:
        raise ProtocolError("the stream ended before its Hello")
    report = decode_report(frame.report)
    if not isinstance(report, Hello):
        raise ProtocolError(f"the first report of a stream must be a Hello, not a {type(report).__name__}")
    return report


async def _next(context: Context) -> pb.AgentFrame | None:
    """None at the end of the agent's side."""
    frame = await context.read()
    return frame if isinstance(frame, pb.AgentFrame) else None  # the alternative is grpc.aio.EOF


async def _read(job: Job, agent: str, context: Context) -> None:
    """Pass the agent's reports on until it ends its side."""
    while (frame := await _next(context)) is not None:
        report = decode_report(frame.report)
        if isinstance(report, Hello):
            raise ProtocolError("a second Hello in one stream")
        job.report(agent, report)


async def _write(job: Job, stream: Outbox[Order], context: Context) -> None:
    """Send what the agent is to know until the stream is closed. Waits, and waits alone, if the agent is
    slow. What is still there when another lighthouse may lead is never sent."""
    write: Any = context.write  # of bytes: see _add_to
    while (order := await stream.take()) is not None and job.may_act():
        await write(guarded(_frame, order))


def _frame(order: Order) -> bytes:
    if isinstance(order, Publish):
        return publish_frame(order.member, order.quorum)
    return pb.LighthouseFrame(order=encode_order(order)).SerializeToString()


def _add_to(server: Any, service: Service) -> None:
    """What goes to agents is serialised here, see ``publish_frame``. Of the generic handlers of a method the first
    counts, of the registered ones, which not all releases of grpc know, the last."""
    read: Any = pb.AgentFrame.FromString
    name = "planaria.v1.Lighthouse"
    own = {"Attend": grpc.stream_stream_rpc_method_handler(service.Attend, request_deserializer=read)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, own),))
    add_LighthouseServicer_to_server(service, server)
    server.add_registered_method_handlers(name, own)


async def _end(*tasks: asyncio.Task[None]) -> list[BaseException]:
    """Cancel the tasks, wait for them, and give what they failed with."""
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return [result for result in results if isinstance(result, Exception)]


@dataclass(frozen=True, slots=True)
class Listening:
    """Printed as one line of JSON when the lighthouse can be reached."""

    address: str  # host:port of the gRPC service
    http: str | None  # host:port of the status pages, if they were asked for
    epoch: int
    pid: int


class Server:
    """A lighthouse within an event loop; ``start`` and ``stop`` it, or use it as an asynchronous context."""

    def __init__(self, store: Store | None, elector: Elector | None = None, lease: float = LEASE) -> None:
        """One of both is given, and is the server's from here on: ``stop`` closes it. With an ``elector`` it is one of
        several lighthouses. ``lease``: seconds, as the elector has them."""
        self.store = store
        self.seat: Seat
        if elector is not None:
            self.seat = Candidate(elector, lease)
        else:
            assert store is not None
            self.seat = Seat(store)
        self._standing: asyncio.Task[None] | None = None  # for election
        self.address = ""
        self._credentials = Credentials.given((Role.LIGHTHOUSE,))
        self._grpc = make_server()
        self._pages: StatusPages | None = None
        self._token = Token.given()
        guard = None if self._token is None else Guard(self._token)
        service = Service(self.seat, knows_callers=self._credentials is not None, guard=guard)
        _add_to(self._grpc, service)

    async def start(self, bind: str = DEFAULT_BIND, http: str | None = None, advertise: str | None = None) -> Listening:
        """``advertise``: where agents reach this one, if not at ``bind``. UsageError if an address is taken or
        senseless, or strangers could reach it."""
        self.address = add_port(self._grpc, bind, self._credentials, self._token)
        self.seat.address = advertise or self.address
        await self._grpc.start()
        if http is not None:
            self._pages = StatusPages(self.seat, self._credentials)
            await self._pages.start(http)
        if isinstance(self.seat, Candidate):
            self._standing = asyncio.get_running_loop().create_task(self.seat.run())
        pages = self._pages.address if self._pages is not None else None
        return Listening(self.address, pages, self.seat.status().epoch, os.getpid())

    async def stop(self) -> None:
        """End every stream with a word of why, then the service. Agents go on training and look for its
        return."""
        if self._standing is not None:
            self._standing.cancel()
            await asyncio.gather(self._standing, return_exceptions=True)
        await self.seat.close()
        if self._pages is not None:
            await self._pages.stop()
        await self._grpc.stop(STOP_GRACE)
        if self.store is not None:
            self.store.close()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def refuse_strangers(bind: str, http: str | None) -> None:
    """Raises UsageError if the addresses are senseless, or anybody could reach them."""
    credentials = Credentials.given((Role.LIGHTHOUSE,))
    demand_for(split_address(bind, "--bind")[0], "the lighthouse", credentials, Token.given())
    if http is not None:
        demand_for(split_address(http, "--http")[0], "the status pages", credentials)


def print_listening(listening: Listening) -> None:
    """One line of JSON on standard output, for whoever started the process."""
    form = {
        "address": listening.address,
        "http": listening.http,
        "epoch": listening.epoch,
        "pid": listening.pid,
    }
    print(json.dumps(form), flush=True)


@dataclass(frozen=True, slots=True)
class Options:
    """Of a lighthouse's process."""

    bind: str = DEFAULT_BIND
    store: str | Path = "lighthouse.db"
    http: str | None = None
    epoch_floor: int = 0
    elector: str | None = None  # with one, ``store`` and ``epoch_floor`` have no meaning
    lease: float = LEASE
    advertise: str | None = None
    elector_credentials: Path | None = None
    log_format: LogFormat = LogFormat.TEXT


async def serve(options: Options) -> None:
    """Run a lighthouse until SIGTERM or SIGINT. UsageError if it cannot start."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    refuse_strangers(options.bind, options.http)  # before a store is made
    async with _server(options) as server:
        listening = await server.start(options.bind, options.http, options.advertise)
        print_listening(listening)
        where = options.elector or f"store {options.store}"
        log.info("epoch %d, listening on %s, %s", listening.epoch, listening.address, where)
        await stop.wait()
        log.info("stopping")


def _server(options: Options) -> Server:
    if options.elector is None:
        return Server(Store.open(options.store, options.epoch_floor))
    host, _ = split_address(options.advertise or options.bind, "--advertise" if options.advertise else "--bind")
    if host in ("0.0.0.0", "::", ""):
        raise UsageError(
            f"--bind {options.bind}: give --advertise host:port too, at which agents reach this lighthouse"
        )
    elector = open_elector(options.elector, options.lease, options.elector_credentials)
    return Server(None, elector, options.lease)


def _open_many() -> None:
    """Each agent takes a file, and so does each stranger until the handshake is given up. With the 1,024 that a process
    may usually open unless it asks for more, a thousand of either would keep all others out, and cost a leader whose
    elector is a directory its lease."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # then with what there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(options: Options) -> None:
    """``serve`` as the whole of a process, with a log on standard error."""
    configure(options.log_format, "%(asctime)s %(levelname)s %(message)s")
    gc.set_threshold(GARBAGE)
    _open_many()
    asyncio.run(serve(options))
