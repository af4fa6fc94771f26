"""The real service in this process, on a free port, with real gRPC clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from lighthouse_clients import FakeAgent, eventually

from planaria.core.messages import (
    Adopted,
    Desired,
    Died,
    Finished,
    Member,
    Publish,
    QuorumId,
    Refuse,
    Stop,
    Synced,
    Welcome,
)
from planaria.errors import UsageError
from planaria.lighthouse import jobs as jobs_module
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import open_channel
from planaria.wire.codec import encode_report
from planaria.wire.control_pb2_grpc import LighthouseStub


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0")
        yield server


async def found(server: Server, agents: list[FakeAgent], job: str = "train") -> Publish:
    """Bring the job's groups (one per agent) into their first quorum."""
    for group, agent in enumerate(agents):
        await agent.ready(group)
    publish = await agents[0].wait_for(Publish)
    for group, agent in enumerate(agents):
        await agent.wait_for(Publish)
        await agent.adopt(publish.quorum, 0, group)
    machine = server.seat.jobs.find(job).machine
    await eventually(lambda: machine.founded and all(g.adopted != QuorumId(0, 0) for g in machine.groups.values()))
    return publish


def is_idle(server: Server, job: str) -> bool:
    return not server.seat.jobs.find(job).streams


# --- one job ------------------------------------------------------------------------------------------------


async def test_an_agent_is_welcomed_and_told_its_quorum(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        assert await agent.epoch() == 1
        assert (await agent.wait_for(Desired)).groups == 2
        await agent.ready(0, 1)
        quorum = (await agent.wait_for(Publish, lambda p: p.member.group == 0)).quorum
        assert (await agent.wait_for(Publish, lambda p: p.member.group == 1)).quorum == quorum
        assert quorum.members == (Member(0, 0), Member(1, 0)) and quorum.addresses == ("h:0", "h:1")
        assert quorum.id == QuorumId(1, 1) and quorum.urgent
        stored = server.store.last("train")
        assert stored is not None and (stored.id, stored.lineage) == (quorum.id, quorum.lineage)


async def test_an_older_grpc_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.66 takes registered handlers of an asyncio server, and forgets them."""
    monkeypatch.setattr(type(grpc.aio.server()), "add_registered_method_handlers", lambda *_: None)
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0")
        async with FakeAgent(server.address, "a", groups=1) as agent:
            assert (await found(server, [agent])).quorum.members == (Member(0, 0),)


async def test_a_death_brings_a_smaller_quorum_to_the_others(server: Server) -> None:
    async with FakeAgent(server.address, "a") as a, FakeAgent(server.address, "b") as b:
        first = await found(server, [a, b])
        await b.tell(Died(Member(1, 0), "SIGKILL"))
        second = await a.wait_for(Publish, lambda p: p.quorum.id > first.quorum.id)
        assert second.quorum.members == (Member(0, 0),) and second.quorum.urgent
        assert "group 1 lost" in second.quorum.reason
        await a.adopt(second.quorum, 5)
        await eventually(lambda: sum(server.seat.jobs.find("train").recoveries) == 1)


async def test_the_machine_is_ticked_when_it_asks_for_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three groups are ready: the third is waited for, then they begin. Only the clock can do that."""
    monkeypatch.setattr("planaria.core.founding.FOUNDING_GRACE", 0.2)
    async with FakeAgent(server.address, "a", groups=3) as agent:
        await agent.ready(0, 1)
        publish = await agent.wait_for(Publish)
        assert publish.quorum.members == (Member(0, 0), Member(1, 0))


async def test_a_misfit_is_refused(server: Server) -> None:
    async with FakeAgent(server.address, "a") as a, FakeAgent(server.address, "b") as b:
        await found(server, [a, b])
        await b.ready(2, shards=99)
        refusal = await b.wait_for(Refuse)
        assert refusal.member == Member(2, 0) and "shards" in refusal.reason


# --- streams ------------------------------------------------------------------------------------------------


async def test_the_end_of_a_stream_is_the_loss_of_the_agent(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await agent.epoch()
        job = server.seat.jobs.find("train")
        assert job.machine.agents["a"].connected
        await agent.leave()
        await eventually(lambda: not job.machine.agents["a"].connected)
        assert job.streams == {}


async def test_a_connection_that_breaks_is_the_loss_of_the_agent(server: Server) -> None:
    agent = FakeAgent(server.address, "a")
    await agent.connect()
    await agent.epoch()
    await agent.close()
    job = server.seat.jobs.find("train")
    await eventually(lambda: not job.machine.agents["a"].connected)


async def test_a_newer_stream_replaces_the_older_one(server: Server) -> None:
    async with FakeAgent(server.address, "a") as old, FakeAgent(server.address, "a") as new:
        ended = await old.wait_for_end()
        assert ended.code() is grpc.StatusCode.UNAVAILABLE
        assert "replaced by a newer stream" in str(ended.details())
        await new.epoch()
        job = server.seat.jobs.find("train")
        await eventually(lambda: len(job.streams) == 1)
        assert job.machine.agents["a"].connected
        await new.ready(0, 1)
        await new.wait_for(Publish)


async def test_an_agent_that_comes_back_is_told_what_it_missed(server: Server) -> None:
    async with FakeAgent(server.address, "a", groups=4) as a, FakeAgent(server.address, "b", groups=4) as b:
        await a.ready(0)
        await b.ready(1, 2, 3)
        first = await b.wait_for(Publish)
        await a.adopt(first.quorum, 0, 0)
        await b.adopt(first.quorum, 0, 1, 2, 3)
        await a.leave()
        await b.tell(Died(Member(3, 0), "SIGKILL"))
        missed = await b.wait_for(Publish, lambda p: p.quorum.id > first.quorum.id)
        await a.connect(Adopted(Member(0, 0), first.quorum.id, 3))
        heard = await a.wait_for(Publish, lambda p: p.quorum.id == missed.quorum.id)
        assert heard.quorum == missed.quorum and heard.member == Member(0, 0)


async def test_an_agent_that_is_too_late_for_a_complete_job_is_told_so(server: Server) -> None:
    async with FakeAgent(server.address, "a", groups=1) as a:
        await a.ready(0)
        first = await a.wait_for(Publish)
        await a.adopt(first.quorum)
        await a.tell(Finished(Member(0, 0), 100, "d"))
        async with FakeAgent(server.address, "late", groups=1) as late:
            assert (await late.wait_for(Stop)).reason == ""
        assert not any(isinstance(order, Stop) for order in a.orders)


async def test_after_a_complete_run_a_restarted_lighthouse_takes_the_next_one_for_a_new_one(tmp_path: Path) -> None:
    for epoch in (1, 2):
        async with Server(Store.open(tmp_path / "db")) as server:
            await server.start("127.0.0.1:0")
            async with FakeAgent(server.address, f"a{epoch}", groups=1) as agent:
                await agent.ready(0)
                quorum = (await agent.wait_for(Publish)).quorum
                assert quorum.founding and quorum.id == QuorumId(epoch, 1)
                await agent.adopt(quorum)
                await agent.tell(Finished(Member(0, 0), 100, "d"), Died(Member(0, 0), "exit 0"))
                job = server.seat.jobs.find("train")
                await eventually(lambda kinds=job.events_by_kind: kinds["complete"] == 1)


async def test_a_slow_reader_is_cut_off_and_the_others_are_served(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stops reading fills its own queue and nothing else."""
    monkeypatch.setattr("planaria.lighthouse.server.ORDERS_WAITING", 50)
    channel = open_channel(server.address)
    slow = LighthouseStub(channel).Attend()
    hello = FakeAgent(server.address, "slow", "big").hello
    await slow.write(pb.AgentFrame(report=encode_report(hello)))
    await slow.write(pb.AgentFrame(report=encode_report(Synced())))
    await eventually(lambda: any(job.name == "big" for job in server.seat.jobs.all()))
    job = server.seat.jobs.find("big")
    await eventually(lambda: "slow" in job.streams)

    async with FakeAgent(server.address, "quick", "other") as quick:
        rounds = 0
        while "slow" in job.streams:
            job.streams["slow"].offer(Refuse(Member(0, 0), "x" * 4000))  # what a machine's Send does
            rounds += 1
            if rounds % 20 == 0:
                await asyncio.sleep(0)
        await quick.ready(0, 1)
        await quick.wait_for(Publish)
    assert rounds >= 50
    assert not job.machine.agents["slow"].connected

    with pytest.raises(grpc.aio.AioRpcError) as ended:  # when it reads again it learns why
        async for _ in slow:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "too slow" in str(ended.value.details())
    await channel.close(None)


async def first_frame(server: Server, raw: bytes) -> grpc.aio.AioRpcError:
    """Send ``raw`` as the first frame of a stream; how the lighthouse ends it."""
    async with open_channel(server.address) as channel:
        # the stubs insist on serializers: without one, bytes are sent as they are
        attend: Any = channel.stream_stream
        call = attend("/planaria.v1.Lighthouse/Attend")()
        await call.write(raw)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        return ended.value


async def test_senseless_first_frames_are_refused_with_a_reason(server: Server) -> None:
    def framed(report: pb.Report) -> bytes:
        return pb.AgentFrame(report=report).SerializeToString()

    no_hello = await first_frame(server, framed(pb.Report(synced=pb.Synced())))
    assert no_hello.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be a Hello, not a Synced" in str(no_hello.details())
    other_release = await first_frame(server, framed(pb.Report(hello=pb.Hello(agent="a", protocol=99))))
    assert other_release.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "install one release" in str(other_release.details())
    empty = await first_frame(server, b"")
    assert empty.code() is grpc.StatusCode.INVALID_ARGUMENT
    garbage = await first_frame(server, b"\xff\xff\xff\xff")
    assert garbage.code() is not grpc.StatusCode.OK
    assert server.seat.jobs.all() == []


async def test_nonsense_in_mid_stream_ends_that_stream_only(server: Server) -> None:
    async with FakeAgent(server.address, "a") as a, FakeAgent(server.address, "b") as b:
        await found(server, [a, b])
        await a._call.write(pb.AgentFrame(report=pb.Report(died=pb.Died(member=pb.Member(group=-1)))))
        ended = await a.wait_for_end()
        assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT and "group number is -1" in str(ended.details())
        job = server.seat.jobs.find("train")
        await eventually(lambda: not job.machine.agents["a"].connected)
        assert job.machine.agents["b"].connected and b.ended is None
        await b.tell(b.hello)
        assert "second Hello" in str((await b.wait_for_end()).details())


async def test_garbage_on_the_port_does_no_harm(server: Server) -> None:
    host, _, port = server.address.rpartition(":")

    async def throw(data: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        # The server may hang up as soon as it has seen enough, or wait for more.
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(1):
                await reader.read()
        writer.close()

    async with FakeAgent(server.address, "a") as agent:
        await agent.epoch()
        await asyncio.gather(
            throw(b"GET / HTTP/1.1\r\n\r\n"),
            throw(bytes(range(256)) * 500),
            throw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000),
            throw(b""),
        )
        await agent.ready(0, 1)
        await agent.wait_for(Publish)


# --- several jobs -------------------------------------------------------------------------------------------


async def test_jobs_do_not_see_each_other(server: Server) -> None:
    """The same agent name, the same group numbers, another job."""
    async with FakeAgent(server.address, "a", "one") as one, FakeAgent(server.address, "a", "two") as two:
        await one.ready(0, 1)
        published = await one.wait_for(Publish)
        assert two.ended is None
        await two.wait_for(Desired)
        assert not any(isinstance(order, Publish) for order in two.orders)
        await two.ready(0, 1)
        assert (await two.wait_for(Publish)).quorum.id == published.quorum.id  # numbered each for itself
        assert [job.name for job in server.seat.jobs.all()] == ["one", "two"]
        assert set(server.store.jobs()) == {"one", "two"}


async def test_a_job_whose_machine_breaks_is_taken_anew_and_the_others_live(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeAgent(server.address, "a", "bad") as bad, FakeAgent(server.address, "b", "good") as good:
        await bad.ready(0, 1)
        first = (await bad.wait_for(Publish)).quorum
        await good.ready(0, 1)
        await good.wait_for(Publish)
        machine = server.seat.jobs.find("bad").machine
        monkeypatch.setattr(machine, "handle", lambda *_: 1 / 0)
        await bad.tell(Synced())
        ended = await bad.wait_for_end()
        assert ended.code() is grpc.StatusCode.UNAVAILABLE and "takes it anew" in str(ended.details())
        assert good.ended is None

        bad.orders.clear()
        await bad.connect(*(Adopted(member, first.id, 7) for member in first.members))
        assert await bad.epoch() == 2  # a machine of its own numbers, so an epoch of its own
        status = server.seat.jobs.find("bad").status()
        assert status.quorum is not None and status.quorum.lineage == first.lineage


async def test_a_quorum_that_cannot_be_stored_is_not_published(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await agent.epoch()

        def full(_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(server.store, "append", full)
            await agent.ready(0, 1)
            assert "No space left" in str((await agent.wait_for_end()).details())
        assert not any(isinstance(order, Publish) for order in agent.orders)
        await agent.connect()
        await agent.ready(0, 1)
        await agent.wait_for(Publish)


async def test_a_new_run_under_the_name_of_one_that_is_over(server: Server) -> None:
    """A long-lived lighthouse, and a user who calls every run the same."""
    async with FakeAgent(server.address, "a1", groups=1) as first:
        await first.ready(0)
        quorum = (await first.wait_for(Publish)).quorum
        await first.adopt(quorum)
        await first.tell(Died(Member(0, 0), "SIGKILL"))
        await eventually(lambda: bool(server.seat.jobs.find("train").machine.stopped))
        await first.leave()
        await eventually(lambda: not server.seat.jobs.find("train").streams)
    async with FakeAgent(server.address, "a2", groups=1) as second:
        assert await second.epoch() == 2
        await second.ready(0)
        quorum = (await second.wait_for(Publish)).quorum
        assert quorum.founding and quorum.id == QuorumId(2, 1)


async def test_idle_jobs_are_forgotten_before_they_fill_the_memory(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "JOBS_KEPT", 2)
    agents = (FakeAgent(server.address, "a", f"busy{number}") for number in range(3))
    async with contextlib.AsyncExitStack() as stack:
        for busy in agents:  # more than are kept, and no reason to forget others
            await (await stack.enter_async_context(busy)).epoch()
        for number in range(5):
            async with FakeAgent(server.address, "a", f"job{number}") as agent:
                await agent.epoch()
                await agent.leave()
                await eventually(partial(is_idle, server, f"job{number}"))
        assert [job.name for job in server.seat.jobs.all()] == ["busy0", "busy1", "busy2", "job3", "job4"]


# --- addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":::", "127.0.0.1:x"])
async def test_a_senseless_address_is_named(tmp_path: Path, bind: str) -> None:
    async with Server(Store.open(tmp_path / "s.db")) as server:
        with pytest.raises(UsageError, match="is not of the form host:port"):
            await server.start(bind)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        async with Server(Store.open(tmp_path / "s.db")) as server:
            with pytest.raises(UsageError, match=f"cannot listen on {bind}"):
                await server.start(bind)
            with pytest.raises(UsageError, match=f"status pages cannot listen on {bind}"):
                await server.start("127.0.0.1:0", http=bind)


async def test_stopping_tells_the_agents_why(tmp_path: Path) -> None:
    server = Server(Store.open(tmp_path / "s.db"))
    await server.start("127.0.0.1:0")
    async with FakeAgent(server.address, "a") as agent:
        await agent.wait_for(Welcome)
        await server.stop()
        ended = await agent.wait_for_end()
        assert ended.code() is grpc.StatusCode.UNAVAILABLE and "lighthouse stops" in str(ended.details())
