"""What the lighthouse says, or must be told, when a group is not where it was thought to be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from planaria.core.messages import Adopted, Finished, Hello, JobSpec, Member, Publish, Ready, Synced
from planaria.lighthouse.client import OperatorClient
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import open_channel
from planaria.wire.codec import decode_order, encode_report
from planaria.wire.control_pb2_grpc import LighthouseStub

from .test_run import SPEAKER, StartRun


async def test_an_agent_that_comes_when_the_job_is_complete_ends_in_peace(start_run: StartRun, tmp_path: Path) -> None:
    member = Member(0, 0)
    async with Server(Store.open(tmp_path / "db")) as server:
        await server.start("127.0.0.1:0")
        channel = open_channel(server.address)
        call = LighthouseStub(channel).Attend()

        async def tell(*reports: Hello | Ready | Synced | Adopted | Finished) -> None:
            for report in reports:
                await call.write(pb.AgentFrame(report=encode_report(report)))

        await tell(Hello("first", "h", JobSpec("shared", 1)), Ready(member, "h:1", (), "d", 4, 3), Synced())
        while not isinstance(order := decode_order((await call.read()).order), Publish):
            pass
        await tell(Adopted(member, order.quorum.id, 0), Finished(member, 3, "d"))
        place = ("--groups", "2", "--first-group", "1", "--job", "shared", "--lighthouse", server.address)
        late = start_run(*place, SPEAKER, "100000", "0.02")
        assert await asyncio.to_thread(late.wait) == 0, late.err.read_text()
        # It is told both; whichever it hears first.
        reason = late.summary()["reason"]
        assert "the job is complete" in reason or reason == "the job wants no groups of this agent"
        call.cancel()
        await channel.close(None)


def test_a_suspicion_that_was_wrong_is_taken_back(start_run: StartRun) -> None:
    """Or else the lighthouse would keep the only group that holds the state out of every later quorum."""
    run = start_run("--groups", "1", SPEAKER, "100000", "0.02")
    run.until(lambda: run.step_of(0) >= 1)
    pid = run.pid_of(0)
    os.kill(pid, signal.SIGSTOP)
    run.until(lambda: run.events("suspect"))
    os.kill(pid, signal.SIGCONT)
    run.until(lambda: run.events("alive"))
    with OperatorClient(json.loads((run.logs / "run.json").read_text())["lighthouse"]) as operator:
        operator.scale(2)
        run.until(lambda: [g for g in operator.status().groups if g.member.group == 1 and g.state == "active"])
    run.interrupt()
    assert run.wait() == 130
