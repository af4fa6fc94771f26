"""Planned moves of single ranks: another process takes a rank's place while nothing has failed.

The process is there before anything happens. Then the group is left out after a commit, as if it were drained, so
nobody waits for it and no shard is computed twice; its other ranks stay, the one that moves ends in order, and the rest
is what is done for a lost rank (see refill).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.agent.refill import can_refill
from planaria.core.messages import Leaving, Migrate, Stay

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class Moves:
    """Carries them out for ``agent``, one for a group at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asked: dict[int, int] = {}  # groups, with the rank that is to move

    @property
    def waiting(self) -> int:
        """How many moves wait for a process."""
        return len(self._asked)

    def under_way(self, group: int) -> bool:
        """Whether a rank of ``group`` is to move, or moves."""
        life = self._agent.lives.groups.get(group)
        return group in self._asked or (life is not None and life.moving is not None)

    def ask(self, order: Migrate) -> None:
        life = self._agent.lives.groups.get(order.group)
        if life is None or not life.alive or life.moving is not None:
            return
        self._asked[order.group] = order.rank
        if self._agent.standbys.given_up:
            self.give_up("there are no standbys")
            return
        if not self._agent.standbys.warm:
            text = f"rank {order.rank} of group {order.group} moves as soon as another process is ready"
            self._agent.events.add("move", text, order.group)
        self._agent.wake()

    def give_up(self, why: str) -> None:
        """There will be no process to move to."""
        for group, rank in self._asked.items():
            self._agent.events.add("move", f"rank {rank} of group {group} stays where it is: {why}", group)
        self._asked.clear()

    def tick(self) -> None:
        agent = self._agent
        for group, number in list(self._asked.items()):
            life = agent.lives.groups.get(group)
            if life is None or not life.alive:
                del self._asked[group]  # whoever comes back needs no move
                continue
            if not agent.standbys.warm or not can_refill(agent, life, life.ranks[number]):
                continue  # what is missing now (the group heals, or starts again) may be there at the next look
            del self._asked[group]
            life.moving = life.ranks[number]
            text = f"rank {number} of {life.member} moves after the next commit"
            agent.events.add("move", text, group, {"rank": number})
            # In this order: its ranks must know before the quorum that leaves them out can reach them.
            agent.hub.send(life.member, Stay(number))
            report = Leaving(life.member)
            agent.link.tell(report)
            agent.told.record(report)
