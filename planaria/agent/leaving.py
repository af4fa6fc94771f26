"""Groups that an engine has placed here, and asks back: they leave the job in order, and the others go on."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from planaria.agent.link import LEAVE_SECONDS
from planaria.core.exits import EXIT_LEFT

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class Leaving:
    """Of all groups of ``agent``, once a signal asks for it. ``close`` it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._task is not None

    def begin(self, signum: int) -> None:
        """Within the agent's loop."""
        self._task = asyncio.get_running_loop().create_task(self._leave(signum))

    def close(self) -> list[asyncio.Task[None]]:
        """What is to be cancelled and awaited."""
        return [self._task] if self._task is not None else []

    async def _leave(self, signum: int) -> None:
        """Have the lighthouse do without the groups here. Where it cannot (there is no other), the job stops in order:
        its state is not lost if it keeps checkpoints."""
        agent = self._agent
        job, reason = agent.assignment.spec.job, f"its agent got {signal.Signals(signum).name}"
        groups = sorted(life.member.group for life in agent.lives.alive())
        if not groups:
            agent.finish(EXIT_LEFT, f"{reason}, and no group runs here")
        while groups:
            await agent.link.up.wait()
            why = await agent.link.drain(job, groups[0], reason, seconds=LEAVE_SECONDS)
            if why is None:
                del groups[0]
            elif agent.link.up.is_set():
                agent.events.add("stop", f"group {groups[0]} cannot leave ({why}): it stops after the next commit")
                agent.stop_in_order(signum)
                return
