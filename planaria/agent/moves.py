"""Planned moves of single ranks: another process takes a rank's place while nothing has failed.

The process is there before anything happens. Then the group is left out after a commit, as if it were drained, so
nobody waits for it and no shard is computed twice; its other ranks stay, the one that moves ends in order, and the rest
is what is done for a lost rank (see refill).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.agent.lives import Life
from planaria.agent.ranklife import RankLife
from planaria.agent.refill import can_refill
from planaria.core.messages import Leaving, Migrate, Stay

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class Moves:
    """Carries them out for ``agent``, one for a group at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._asked: list[tuple[int, RankLife]] = []  # groups, with a rank that is to move; the oldest first

    def waiting(self) -> list[tuple[int, int | None]]:
        """Moves that need a process which has not taken its place yet: the rank, and the node where it is to be."""
        moving = [life.moving for life in self._agent.lives.alive() if life.moving is not None]
        return [(rank.rank, rank.goes_to) for rank in [*moving, *(rank for _, rank in self._asked)]]

    def under_way(self, group: int) -> bool:
        """Whether a rank of ``group`` is to move, or moves."""
        life = self._agent.lives.groups.get(group)
        return any(asked == group for asked, _ in self._asked) or (life is not None and life.moving is not None)

    def ask(self, order: Migrate) -> None:
        life = self._agent.lives.groups.get(order.group)
        if life is None or not life.alive:
            return
        rank = life.ranks[order.rank]
        if rank is not life.moving:
            rank.goes_to = order.node
        if order.drains and (device := self._agent.closing.device_of(order.group, order.rank)):
            rank.drained = True
            self._agent.closing.close(device)
        if rank is life.moving or any(rank is each for _, each in self._asked):
            return
        self._asked.append((order.group, rank))
        if self._agent.standbys.given_up:
            self.give_up("there are no standbys")
            return
        if not self._agent.standbys.warm_for(order.rank, order.node):
            text = f"rank {order.rank} of group {order.group} moves as soon as another process is ready"
            self._agent.events.add("move", text, order.group)
        self._agent.wake()

    def put_off(self, life: Life) -> None:
        """Something else has happened to the group before its rank could leave it."""
        if life.moving is not None:
            self._asked.insert(0, (life.member.group, life.moving))
            life.moving = None

    def give_up(self, why: str, node: int | None = None) -> None:
        """There will be no process to move to, on that node or any."""
        asked, self._asked = self._asked, []
        for group, rank in asked:
            if node in (None, rank.goes_to or 0):
                self._stays(group, rank, why)
            else:
                self._asked.append((group, rank))

    def tick(self) -> None:
        agent = self._agent
        asked, self._asked = self._asked, []
        for group, rank in asked:
            life = agent.lives.groups.get(group)
            if life is None or not life.alive or life.ranks[rank.rank] is not rank:
                text = f"rank {rank.rank} of group {group} need not move any more: its process has ended"
                agent.events.add("move", text, group)
            elif _never(life, rank):
                self._stays(group, rank, "the other ranks of its group do not outlive it (see step.guard)")
            elif rank.goes_to not in (None, 0, *agent.engine.nodes()):
                self._stays(group, rank, f"node {rank.goes_to} is out of reach")
            elif (
                life.moving is not None
                or not agent.standbys.warm_for(rank.rank, rank.goes_to)
                or not _can_move(agent, life, rank)
            ):
                # What is missing now (the group heals, or starts again) may be there at the next look.
                self._asked.append((group, rank))
            else:
                self._begin(life, rank)

    def _begin(self, life: Life, rank: RankLife) -> None:
        agent, life.moving = self._agent, rank
        where = f" to node {rank.goes_to}" if rank.goes_to is not None else ""
        text = f"rank {rank.rank} of {life.member} moves{where} after the next commit"
        agent.events.add("move", text, life.member.group, {"rank": rank.rank})
        # In this order: its ranks must know before the quorum that leaves them out can reach them.
        agent.hub.send(life.member, Stay(rank.rank))
        report = Leaving(life.member)
        agent.link.tell(report)
        agent.told.record(report)

    def _stays(self, group: int, rank: RankLife, why: str) -> None:
        which, life = f"rank {rank.rank} of group {group}", self._agent.lives.groups.get(group)
        if not rank.drained or life is None or not life.alive:
            self._agent.events.add("move", f"{which} stays where it is: {why}", group)
            return

        def refused(why: str) -> None:
            rank.drained = life.comes_back = False
            self._stays(group, rank, why)

        self._agent.events.add("move", f"{which} cannot move, so all of its group leaves: {why}", group)
        # It comes back when there is a place for it, perhaps at once.
        life.comes_back = True
        self._agent.orders.ask_drain(group, f"the GPU of its rank {rank.rank} is drained", refused)


def _can_move(agent: Agent, life: Life, rank: RankLife) -> bool:
    """Without a step that is made again."""
    return can_refill(agent, life, rank) and agent.others_hold_the_state(life)


def _never(life: Life, rank: RankLife) -> bool:
    """Whether the group can never do without the rank: it has made a step, and that was under no guard."""
    others = [each for each in life.ranks if each is not rank]
    made = life.settled and life.view is not None and life.view.committed_at_ns > 0
    return made and not all(each.guarded for each in others)
