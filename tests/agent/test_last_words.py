"""A member that ends in order is heard out: its Finished is told before its end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from planaria.agent.agent import Agent, Assignment
from planaria.agent.events import EventLog
from planaria.core.messages import Died, Finished, JobSpec, Member, Ready, Report
from planaria.core.plan import PlanSpec
from planaria.engines.base import Change, Ended, Instance
from planaria.wire.frames import send_frame

ME = Member(0, 0)


class NoEngine:
    """Nothing runs: the test says what happened."""

    def watch(self, tell: Callable[[Change], None]) -> None: ...

    def create(self, group: int, incarnation: int) -> None: ...

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL, rank: int | None = None) -> None: ...

    def look(self, member: Member) -> None: ...

    def list(self) -> tuple[Instance, ...]:
        return ()

    async def close(self) -> None: ...


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    assignment = Assignment(JobSpec("j", 1), PlanSpec(desired=1), tmp_path)
    made = Agent(assignment, lambda path: NoEngine(), EventLog(tmp_path / "events.jsonl"))
    await made.hub.start()
    made.lives.begin(ME, [tmp_path / "rg0" / "i0"], 0.0)
    yield made
    await made.close()
    made.events.close()


async def joined(agent: Agent, told: asyncio.Queue[Report]) -> socket.socket:
    """A rank that has said that it is ready; ``told`` gets what the agent tells the lighthouse from now on."""
    agent.link.tell = told.put_nowait  # type: ignore[method-assign]
    rank = socket.socket(socket.AF_UNIX)
    rank.connect(str(agent.hub.path))
    ready = Ready(ME, "127.0.0.1:1", (), "d", 8, 100)
    send_frame(rank, ready)
    assert await told.get() == ready
    return rank


async def test_last_words_come_before_the_end(agent: Agent) -> None:
    told: asyncio.Queue[Report] = asyncio.Queue()
    rank = await joined(agent, told)
    words = Finished(ME, 100, "digest")
    send_frame(rank, words)
    rank.close()
    agent._on_change(Ended(ME, 0, "exited with code 0"))  # the process table was faster than the socket
    assert [await told.get(), await told.get()] == [words, Died(ME, "exited with code 0")]


async def test_an_end_does_not_wait_for_a_socket_that_somebody_else_holds(agent: Agent) -> None:
    told: asyncio.Queue[Report] = asyncio.Queue()
    rank = await joined(agent, told)  # stays open, as in a child that was left behind
    agent._on_change(Ended(ME, 0, "exited with code 0"))
    assert await told.get() == Died(ME, "exited with code 0")
    rank.close()


async def test_a_death_is_told_at_once(agent: Agent) -> None:
    told: asyncio.Queue[Report] = asyncio.Queue()
    rank = await joined(agent, told)
    agent._on_change(Ended(ME, -9, "killed by SIGKILL"))
    assert told.get_nowait() == Died(ME, "killed by SIGKILL")  # nothing else had a turn
    rank.close()
