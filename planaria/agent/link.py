"""The agent's stream to the lighthouse. Nothing in training waits for it: it may be down for hours."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import grpc
import grpc.aio

from planaria.core.liveness import HEARTBEAT
from planaria.core.messages import Event, Hello, Order, Publish, Report, Synced, Welcome
from planaria.errors import ProtocolError, UsageError
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import CONNECT_SECONDS, leader_in, open_channel, split_addresses
from planaria.wire.checks import clip
from planaria.wire.codec import decode_order, encode_report
from planaria.wire.control_pb2_grpc import LighthouseStub
from planaria.wire.credentials import Credentials, Pem
from planaria.wire.roles import Role
from planaria.wire.status import decode_event, decode_status
from planaria.wire.token import metadata

# After a stream that broke, the first retry comes at once and gRPC itself paces connecting. These bound the pauses
# between streams that a reachable lighthouse ends again: from hardly noticeable to one heartbeat, for a
# lighthouse that is up decides on heartbeats.
_PAUSE = (0.05, 1.0)
# Of several lighthouses, one that stands still (its kernel still takes connections) is soon left for the next. One that
# only is slow must not be left so for ever: after every try that was too short the next may take twice as long.
_CONNECT = (0.1, CONNECT_SECONDS)
# A second of silence after the start is normal for a lighthouse that starts too; after three, people want to know.
_UNREACHABLE_AFTER = 3.0
# People who look at a job that does not begin should not have to wait for the reason, nor drown in it.
_REMIND_SECONDS = 30.0
# A lighthouse answers an operator within milliseconds, or is not there.
_DRAIN_SECONDS = 1.0
# The same when an agent leaves; the end of a run is worth more patience than one of many tries.
LEAVE_SECONDS = 5.0

# To try again would be pointless.
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)

_Stream = grpc.aio.StreamStreamCall[pb.AgentFrame, pb.LighthouseFrame]


class Link:
    """``hello`` and ``again`` are asked at every connect; ``on_order`` gets the orders that count.

    ``on_note`` gets (kind, sentence) for the record: link up, link down, an order refused as outdated.
    ``on_refused`` gets the lighthouse's own words if it says that this agent need not try again.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        again: Callable[[], Iterable[Report]],
        on_order: Callable[[Order], None],
        on_note: Callable[[str, str], None],
        on_refused: Callable[[str], None],
    ) -> None:
        self.address = ""  # of the lighthouse that is asked now
        self.addresses: tuple[str, ...] = ()  # of all that may lead
        self._named = ""  # as whoever started this agent named them
        self.epoch = 0  # the highest seen: the fence
        self.up = asyncio.Event()
        self._hello = hello
        self._again = again
        self._on_order = on_order
        self._on_note = on_note
        self._on_refused = on_refused
        self._outbox: asyncio.Queue[Report | None] | None = None  # None is the last: nothing more will be told
        self._leaving = False
        self._gone = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._shown: Pem | None = None  # the credentials that it was opened with
        self._connect: dict[str, float] = {}  # seconds for the newest try of each, since one was heard
        self._leads = ""  # where a lighthouse that stands by said that another one leads
        self._stale_noted = 0
        self._refusals: set[str] = set()  # noted since the link was up last

    def tell(self, report: Report) -> None:
        """Send ``report`` now, or never: what still counts at the next connect is what ``again`` says then."""
        if self._outbox is not None:
            self._outbox.put_nowait(report)

    async def run(self, addresses: str) -> None:
        """Keep a stream to the lighthouse that leads open until cancelled. ``addresses``: one or more of host:port,
        separated by commas, or @FILE that holds them: it is read again whenever a stream ends."""
        self._named = addresses
        self.addresses = split_addresses(addresses)
        self.address = self.addresses[0]
        self._channel, self._shown = self._made(self.address), _shown()
        watchdog = asyncio.get_running_loop().create_task(self._watch_silence())
        try:
            pause = 0.0
            while True:
                await self._show_newest()
                heard = await self._attend()
                if self._leaving:
                    self._gone.set()
                    return
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise asyncio.CancelledError  # gRPC may take it for the end of the call, and say only that
                pause = 0.0 if heard else min(max(2 * pause, _PAUSE[0]), _PAUSE[1] / len(self.addresses))
                # Jitter: a thousand agents that lost one lighthouse must not come back in one instant.
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                await self._turn()
        finally:
            watchdog.cancel()
            await asyncio.gather(watchdog, return_exceptions=True)
            await self._channel.close(None)

    async def _turn(self) -> None:
        """Ask another lighthouse next, if there are several: the one that leads, as one that stands by has said, or the
        next in the list. Whoever is said to lead without being in the list must show a lighthouse's certificate as all
        do; without certificates nobody beyond this machine can have said it."""
        leads, self._leads = self._leads, ""
        if self._named.startswith("@"):
            with suppress(UsageError):  # it is being written, or its file system is away: those known may still do
                self.addresses = split_addresses(self._named)
        place = self.addresses.index(self.address) + 1 if self.address in self.addresses else 0
        address = leads or self.addresses[place % len(self.addresses)]
        if address != self.address:
            await self._open(address)

    async def _open(self, address: str) -> None:
        """A new channel in place of the one that there is."""
        try:
            made, shows = self._made(address), _shown()
        except UsageError as error:  # credentials that are half replaced, or have expired: perhaps later
            self._refused(str(error))
            return
        assert self._channel is not None
        old, self._channel, self._shown, self.address = self._channel, made, shows, address
        await old.close(None)

    def _made(self, address: str) -> grpc.aio.Channel:
        if len(self.addresses) == 1:
            return open_channel(address)
        self._connect[address] = min(max(2 * self._connect.get(address, 0.0), _CONNECT[0]), _CONNECT[1])
        return open_channel(address, connect=self._connect[address])

    async def leave(self, job: str) -> tuple[Event, ...]:
        """End the stream when all that was told has been taken in; the events of the job that the lighthouse keeps.
        Nothing without a lighthouse that answers: whoever ends does not wait for one."""
        self._leaving = True
        if self._outbox is None:
            return ()
        self._outbox.put_nowait(None)
        # UsageError: credentials that are being replaced just now.
        with suppress(TimeoutError, grpc.RpcError, ProtocolError, UsageError):
            async with asyncio.timeout(LEAVE_SECONDS), open_channel(self.address) as channel:
                await self._gone.wait()
                reply = await LighthouseStub(channel).Status(pb.StatusRequest(job=job), metadata=_proof("Status"))
                # One that stands by knows of no job; who answers behind an address of several is chance.
                return decode_status(reply.jobs[0]).events if reply.jobs else ()
        return ()

    async def drain(
        self, job: str, group: int, reason: str = "", share: float | None = None, seconds: float = _DRAIN_SECONDS
    ) -> str | None:
        """Ask the lighthouse to leave a group out; None if it will. That it cannot now, and why, is no matter for long:
        whoever wants it asks again. ``reason`` and ``share`` as in ``core.wishes``."""
        assert self._channel is not None
        request = pb.GroupRequest(job=job, group=group, reason=clip(reason), share=share)
        stub = LighthouseStub(self._channel)
        return await _refusal(stub.Drain(request, timeout=seconds, metadata=_proof("Drain")))

    async def migrate(
        self, job: str, group: int, rank: int, reason: str, share: float, drains: bool = False
    ) -> str | None:
        """The same for a single rank: another process is to take its place. ``drains``: and nobody its GPU, until an
        operator takes that back."""
        assert self._channel is not None
        request = pb.MigrateRequest(job=job, group=group, rank=rank, reason=clip(reason), share=share, drains=drains)
        stub = LighthouseStub(self._channel)
        return await _refusal(stub.Migrate(request, timeout=_DRAIN_SECONDS, metadata=_proof("Migrate")))

    async def events(self, job: str) -> AsyncIterator[Event]:
        """The lighthouse's own events of the job, as they happen; ends when the lighthouse is lost."""
        assert self._channel is not None
        call = LighthouseStub(self._channel).WatchEvents(pb.WatchRequest(job=job), metadata=_proof("WatchEvents"))
        try:
            async for message in call:
                yield decode_event(message)
        except (grpc.RpcError, ProtocolError):
            return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Else its channel was closed, for another one.

    async def _attend(self) -> bool:
        """One stream, from connecting to its end. Returns whether the lighthouse answered on it."""
        assert self._channel is not None
        # With several, one that cannot be reached is left for the next at once.
        only = self.addresses == (self.address,)
        call = LighthouseStub(self._channel).Attend(wait_for_ready=only, metadata=_proof("Attend"))
        heard, writer = False, None
        try:
            # By then gRPC has tried several times: where the lighthouse is, or the credentials, may be others by now.
            async with asyncio.timeout(HEARTBEAT.ceiling):
                await call.wait_for_connection()
            # What is told from here on comes after the snapshot: both are taken without a pause between.
            self._outbox = asyncio.Queue()
            opening = [replace(self._hello(), epoch=self.epoch), *self._again(), Synced()]
            writer = asyncio.get_running_loop().create_task(self._write(call, opening, self._outbox))
            stream_epoch = 0
            async for frame in call:
                order = decode_order(frame.order)
                if isinstance(order, Welcome):
                    stream_epoch = order.epoch
                    if stream_epoch < self.epoch:
                        self._note_stale(stream_epoch)
                        return False  # let go of it: it must not count on this agent, nor this agent on it
                    heard = True
                    self._up()
                if self._counts(order, stream_epoch):
                    self._on_order(order)
        except TimeoutError:
            pass
        except grpc.RpcError as error:
            self._leads = leader_in(error)
            if not self._leads:
                self._down(_reason(error))
            if isinstance(error, grpc.aio.AioRpcError) and error.code() in _FINAL:
                self._on_refused(_reason(error))
        except ProtocolError as error:
            heard = False  # it will say the same again: do not hurry back
            self._down(str(error))
        else:
            if not self._leaving:
                self._down("the lighthouse ended the stream")
        finally:
            self._outbox = None
            self.up.clear()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
        return heard

    async def _write(self, call: _Stream, opening: list[Report], outbox: asyncio.Queue[Report | None]) -> None:
        with suppress(grpc.RpcError, asyncio.InvalidStateError):  # the reading side says what happened
            for report in opening:
                await self._write_one(call, report)
            while (told := await outbox.get()) is not None:
                await self._write_one(call, told)
            await call.done_writing()  # the lighthouse reads to the end, then ends its side

    async def _write_one(self, call: _Stream, report: Report) -> None:
        try:
            frame = pb.AgentFrame(report=encode_report(report))
        except ProtocolError as error:
            # One report that breaks a limit must not cost the stream that carries all others.
            self._on_note("refused", f"a {type(report).__name__} could not be sent: {error}")
            return
        await call.write(frame)

    def _counts(self, order: Order, stream_epoch: int) -> bool:
        """Whether the order is of the newest lighthouse that was ever heard. An older one may still run, cut off
        or paused, and must not be obeyed."""
        epoch = order.quorum.id.epoch if isinstance(order, Publish) else stream_epoch
        if epoch < self.epoch:
            self._note_stale(epoch)
            return False
        self.epoch = max(self.epoch, epoch)
        return True

    def _note_stale(self, epoch: int) -> None:
        if self._stale_noted != epoch:
            self._stale_noted = epoch
            self._on_note("stale", f"a lighthouse of epoch {epoch} is not obeyed: epoch {self.epoch} has been seen")

    def _up(self) -> None:
        self.up.set()
        self._connect.clear()
        self._refusals.clear()
        self._on_note("link", f"connected to the lighthouse at {self.address}")

    def _down(self, why: str) -> None:
        if self.up.is_set():
            self._on_note("link", f"the lighthouse at {self.address} is out of reach ({why}); training goes on")
        elif self.addresses == (self.address,):  # else it may only be down: if none answers, the watchdog says so
            self._refused(f"the lighthouse at {self.address} refused the stream: {why}")

    def _refused(self, why: str) -> None:
        if why not in self._refusals:
            self._refusals.add(why)  # it is asked again within a second, and will say the same for as long as it lasts
            self._on_note("link", why)

    async def _show_newest(self) -> None:
        """A channel shows the certificate with which it was opened; one for which there is a newer one is replaced."""
        with suppress(UsageError):  # half replaced
            if _shown() != self._shown:
                await self._open(self.address)

    async def _watch_silence(self) -> None:
        """Say again and again, until a lighthouse is heard for the first time, that and why there is none. And whenever
        it is because of our own credentials."""
        pause = _UNREACHABLE_AFTER
        while True:
            await asyncio.sleep(pause)
            pause = _REMIND_SECONDS
            assert self._channel is not None
            try:
                _shown()
            except UsageError as error:
                self._refused(str(error))
                continue
            why = "" if self.epoch else await _trouble(self._channel)
            if why and not self.epoch:
                where = " or ".join(self.addresses)
                self._on_note("link", f"no lighthouse answers at {where} yet ({why}); trying on")


def _proof(method: str) -> tuple[tuple[str, str], ...]:
    try:
        return metadata(method, Role.AGENT)
    except UsageError:
        return ()  # half replaced: the lighthouse says no, and is asked again


def _shown() -> Pem | None:
    credentials = Credentials.given((Role.AGENT,))
    return None if credentials is None else credentials.read()


async def _trouble(channel: grpc.aio.Channel) -> str:
    """Why nothing can be asked of a lighthouse; empty if it can. The stream itself only waits for a connection."""
    try:
        stub = LighthouseStub(channel)
        reply = await stub.Status(pb.StatusRequest(), timeout=_DRAIN_SECONDS, metadata=_proof("Status"))
        if not reply.leads:
            return f"it stands by; {reply.trouble or reply.leader or 'nobody is known to lead'}"
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time"
        return _reason(error)
    return ""


async def _refusal(call: Awaitable[pb.Done]) -> str | None:
    try:
        await call
    except grpc.RpcError as error:
        return _reason(error)
    return None


def _reason(error: grpc.RpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error)
