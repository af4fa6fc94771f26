"""Nodes that other work can be made to leave: a command of the site's is asked for one (``planaria run --borrow``).

Under the policy ``spare``, when a rank is lost whose own node (or GPU) cannot have it again, and no standby is left.
The command makes room somewhere and starts a helper there (``planaria run --node-rank``). The standby of that takes
the place. Until then everybody waits, no longer than ``--spare-wait``. The command is called again when the node may be
given back.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planaria.agent.proc import describe, has_ended, kill_group
from planaria.agent.refill import has_place, outlives, refill
from planaria.core.messages import Policy, Stay

if TYPE_CHECKING:
    from planaria.agent.agent import Agent
    from planaria.agent.lives import Life
    from planaria.agent.ranklife import RankLife

# A process that was sent SIGKILL is gone in milliseconds, unless a driver holds it, or it is another user's (sudo).
_GONE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Lender:
    """The site's command. ``address``: where helpers find node 0; ``first_node``: the lowest number for them."""

    argv: tuple[str, ...]
    address: str
    first_node: int


@dataclass(slots=True)
class _Wait:
    """A group whose living ranks wait for a process in the place of ``lost``."""

    life: Life
    lost: RankLife
    until: float
    asking: asyncio.Task[str]  # the result: why there will be no node; empty if one was promised


@dataclass(slots=True)
class _Loan:
    group: int
    rank: int
    asking: asyncio.Task[str] | None = None


class Borrowing:
    """On the event loop's thread, for ``agent``. Without a ``lender`` it never waits."""

    def __init__(self, agent: Agent, lender: Lender | None) -> None:
        self._agent = agent
        self._lender = lender
        self._limit = agent.assignment.spec.spare_wait
        self._waits: list[_Wait] = []
        self._loans: dict[int, _Loan] = {}  # nodes that were promised, and not given back
        self.returned: set[int] = set()  # nodes that were: nothing is prepared there any more
        self._returning: set[asyncio.Task[str]] = set()

    def would_wait(self, life: Life, lost: RankLife) -> bool:
        """Whether it is worth to ask for a node: another could take the place, but here and now there is none."""
        if self._lender is None or self._agent.assignment.spec.policy is not Policy.SPARE or self._limit <= 0:
            return False
        able = lost.rank != 0 and len(life.ranks) > 1 and not life.asked_to_end
        return able and outlives(self._agent, life, lost) and not has_place(self._agent, life, lost)

    def wait(self, life: Life, lost: RankLife) -> bool:
        """Ask for a node, and have the group's other ranks wait. False if that is of no use."""
        if not self.would_wait(life, lost):
            return False
        assert self._lender is not None
        self._agent.hub.send(life.member, Stay(lost.rank, lost=True))
        busy = {*self._agent.engine.nodes(), *self._loans}
        number = next(
            n for n in range(self._lender.first_node, len(busy) + self._lender.first_node + 1) if n not in busy
        )
        self.returned.discard(number)
        loan = self._loans[number] = _Loan(life.member.group, lost.rank)
        who = f"rank {lost.rank} of group {life.member.group}"
        text = f"a node is asked for, as node {number}: {who} is lost, and neither its own nor a standby is left"
        self._agent.events.add("borrow", text, life.member.group, {"node": number, "rank": lost.rank})
        loan.asking = asyncio.get_running_loop().create_task(self._call("ask", number, loan))
        self._waits.append(_Wait(life, lost, time.monotonic() + self._limit, loan.asking))
        return True

    def tick(self, now: float) -> None:
        agent = self._agent
        for wait in list(self._waits):
            life, lost = wait.life, wait.lost
            if agent.lives.of(life.member) is not life or not life.alive:
                self._waits.remove(wait)
                continue
            if has_place(agent, life, lost) and refill(agent, life, lost):
                self._waits.remove(wait)
                continue
            why = "" if outlives(agent, life, lost) else "its group cannot go on"
            if not why and wait.asking.done():
                why = wait.asking.result()
            if not why and now > wait.until:
                why = f"no standby came within {self._limit:g} s (--spare-wait)"
            if why:
                self._waits.remove(wait)
                agent.events.add("borrow", f"nobody waits for rank {lost.rank} of group {life.member.group}: {why}")
                agent.ends.give_up(life)
        if not self._waits:
            for number in self._unused():
                self._give_back(number)

    def _unused(self) -> list[int]:
        """Those on which no rank is."""
        agent = self._agent
        used = {agent.engine.node_of(x.member, rank.rank) for x in agent.lives.alive() for rank in x.ranks}
        return [number for number in self._loans if number not in used]

    def _give_back(self, number: int) -> None:
        loan = self._loans.pop(number)
        self.returned.add(number)
        self._agent.events.add("borrow", f"node {number} may be given back: no rank is there", data={"node": number})
        task = asyncio.get_running_loop().create_task(self._return(number, loan))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def close(self) -> None:
        """Give everything back, as far as the command does it within its limit. No process of it is left."""
        self._waits.clear()
        for number in list(self._loans):
            self._give_back(number)
        await asyncio.gather(*self._returning, return_exceptions=True)

    async def _return(self, number: int, loan: _Loan) -> str:
        # One that still asks, for nobody, would get the node after it was given back.
        if loan.asking is not None:
            loan.asking.cancel()
            await asyncio.wait({loan.asking})
        return await self._call("return", number, loan)

    async def _call(self, verb: str, number: int, loan: _Loan) -> str:
        """Run the command with ``verb`` as its last word. Why it did not do what it should; empty if it did."""
        assert self._lender is not None
        lender, agent = self._lender, self._agent
        name = f"the borrow command {shlex.join([*lender.argv, verb])}"
        about = {"NODE": number, "GROUP": loan.group, "RANK": loan.rank, "ADDR": lender.address}
        about |= {"JOB": agent.assignment.spec.job}
        env = {**os.environ, **{f"PLANARIA_BORROW_{key}": str(value) for key, value in about.items()}}
        problem = await _run([*lender.argv, verb], env, agent.assignment.directory / "borrow.log", self._limit)
        if problem:
            problem = f"{name} {problem}"
            self._agent.events.add("borrow", f"{problem} (see borrow.log)", loan.group, {"node": number})
        self._agent.wake()
        return problem


async def _run(argv: Sequence[str], env: dict[str, str], log: os.PathLike[str], limit: float) -> str:
    """Why it was no success, in words that follow its name. What it leaves behind goes on, unless it was late."""
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    ended = asyncio.ensure_future(has_ended(process))
    try:
        done, _ = await asyncio.wait({ended}, timeout=limit)
    except asyncio.CancelledError:
        kill_group(process.pid)
        await asyncio.wait({ended}, timeout=_GONE_SECONDS)
        raise
    if not done:
        kill_group(process.pid)
        await asyncio.wait({ended}, timeout=_GONE_SECONDS)
        return f"did not end within {limit:g} s: it was killed"
    return "" if process.returncode == 0 else describe(process.returncode)
