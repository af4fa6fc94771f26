"""A planned move away from what is not well: by a standby in the place of one rank, or of the whole group.

A group leaves in order, after a commit, and goes on elsewhere if it can.

The others hear of both in planned quorums, so nothing is interrupted, and nothing that it computed is thrown away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.agent.refill import can_refill
from planaria.core.messages import Migrate
from planaria.core.plan import GroupState

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class NotMoved(Exception):
    """A sentence for people. It may be possible later."""


async def move(
    agent: Agent,
    group: int,
    rank: int,
    reason: str,
    share: float = 1.0,
    stays: bool = True,
    leaves: bool = True,
) -> str:
    """Have a warm standby take the place of ``rank`` (whose device is the cause; -1: not known) under its group's other
    ranks. Where that cannot be, ``group`` leaves, and starts again on other devices of its node if there are any that
    are well and free.

    ``share``: of the job's groups, which may be missing then; the lighthouse sees to it, for it knows all of them, and
    that the last group which works never leaves. ``stays``: it may start again on this node. ``leaves``: all of it may
    leave. Returns what was done, in words. Raises NotMoved if nothing was.
    """
    life = agent.lives.groups.get(group)
    if life is None or life.state is not GroupState.RUNNING or not life.adopted or life.moving or agent.ending:
        raise NotMoved(f"group {group} is not at work")
    if rank >= 0 and agent.standbys.warm_for(rank) and can_refill(agent, life, life.ranks[rank]):
        refusal = await agent.link.migrate(agent.assignment.spec.job, group, rank, reason, share)
        if refusal is not None:
            raise NotMoved(refusal)
        agent.moves.ask(Migrate(group, rank))  # the order to do so may come later than this answer
        return f"a standby takes the place of rank {rank}"
    if not leaves:
        raise NotMoved(f"no standby can take the place of rank {rank}")
    # Before the order to drain, which may come before the answer.
    life.comes_back = stays and agent.engine.elsewhere(group)
    refusal = await agent.link.drain(agent.assignment.spec.job, group, reason, share)
    if refusal is not None:
        life.comes_back = False
        raise NotMoved(refusal)
    return "drained; it starts again on other devices" if life.comes_back else "drained"


async def drain(agent: Agent, group: int, rank: int, reason: str, share: float) -> str:
    """Have the rank go and nobody use its GPU, until an operator takes that back (``planaria undrain``): the lighthouse
    and the agent both keep what is drained. Otherwise as ``move``."""
    refusal = await agent.link.migrate(agent.assignment.spec.job, group, rank, reason, share, drains=True)
    if refusal is not None:
        raise NotMoved(refusal)
    return "drained, until planaria undrain takes it back"
