"""Orders that cross with what has just happened here. What is around them is played; the agent's own parts are real."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from planaria.agent.agent import Agent
from planaria.agent.hosting import Hosting
from planaria.agent.lives import Lives
from planaria.agent.orders import Orders
from planaria.core.messages import Host, Member, Prepared, Ready, Report, Welcome
from planaria.core.plan import GroupState, Observed, PlanSpec, Start, plan

NEWER = Member(1, 1)


class Around:
    """What is of an agent beside its lives and what they are ordered."""

    def __init__(self) -> None:
        self.lives = Lives()
        self.said: list[Report] = []
        self.asked: list[int] = []
        self.answers: list[str | None] = []
        self.name, self.ending = "a2", False
        self.told = SimpleNamespace(record=lambda report: None)
        self.events = SimpleNamespace(add=lambda *words: None)
        self.assignment = SimpleNamespace(spec=SimpleNamespace(groups=2, job="train"))
        self.link = SimpleNamespace(tell=self.said.append, drain=self.drain, up=asyncio.Event())

    def wake(self) -> None:
        pass

    async def drain(self, job: str, group: int, reason: str) -> str | None:
        self.asked.append(group)
        return self.answers.pop(0) if self.answers else None

    @property
    def agent(self) -> Agent:
        return cast(Any, self)


def test_a_group_whose_prepared_life_ends_as_it_is_told_to_join_is_started_again(tmp_path: Path) -> None:
    around = Around()
    hosting = Hosting(around.agent)
    own = around.lives.begin(Member(0, 0), [tmp_path], 0.0)
    own.state = GroupState.RUNNING
    life = around.lives.begin(NEWER, [tmp_path], 0.0)
    hosting.groups.add(1)
    hosting._held[NEWER] = None
    hosting.ready(Ready(NEWER, "host:1", (), "start", 6, 10))
    life.state, life.ended = GroupState.DEAD, 5.0
    hosting.ended(life)
    assert [report.trouble != "" for report in around.said if isinstance(report, Prepared)] == [False, True]
    assert plan(PlanSpec(desired=1), Observed((own.observed(), life.observed()), True), 10.0) == []
    hosting.obey(Host(NEWER, joins=True))
    wanted = PlanSpec(desired=1 + len(hosting.groups))
    assert plan(wanted, Observed((own.observed(), life.observed()), True), 10.0) == [Start(1, 2)]
    assert hosting.joined() == (1,)


async def test_a_lighthouse_that_was_started_again_hears_who_waits_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planaria.agent.orders.HEARTBEAT_SECONDS", 0.01)
    around = Around()
    orders = Orders(around.agent)
    around.link.up.set()
    stays, leaves = (around.lives.begin(Member(group, 0), [tmp_path], 0.0) for group in range(2))
    stays.state = leaves.state = GroupState.RUNNING
    orders.obey(Welcome(3))
    leaves.state = GroupState.DRAINING
    orders.obey(Welcome(3))  # the same one, by another stream
    await asyncio.sleep(0.05)
    assert around.asked == []
    around.answers = ["no running group 1", "it is the only one that works"]
    orders.obey(Welcome(4))
    while len(around.asked) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert around.asked == [1, 1, 1], "until it has let go of it"
