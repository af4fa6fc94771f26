"""What an operator has drained here: the whole node, or GPUs of it. Nothing is started there before it is undrained."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from planaria.core.messages import Close, Migrate
from planaria.core.plan import GroupState

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


class Closing:
    """Carries out for ``agent`` what ``Close`` orders. Groups leave by orders of their own, for the lighthouse makes
    the quorum that does without them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.closed: frozenset[str] = frozenset()  # GPUs; the empty name is the node

    @property
    def node(self) -> bool:
        """Whether nothing at all may be started here."""
        return "" in self.closed

    def obey(self, order: Close) -> None:
        if order.opens:
            self.closed -= {order.device}
            self._tell(order.device, "is used again")
        elif self.close(order.device) and not order.device:
            self._clear()
        elif (found := self._agent.engine.placed().get(order.device)) is not None:
            self._agent.moves.ask(Migrate(*found, drains=True))

    def close(self, device: str) -> bool:
        """Whether it was open before."""
        if device in self.closed:
            return False
        self.closed |= {device}
        self._tell(device, "is drained: nothing is started there before planaria undrain")
        return True

    def device_of(self, group: int, rank: int) -> str:
        """The GPU of a rank on this node; empty if none is known."""
        placed = self._agent.engine.placed()
        return next((gpu for gpu, place in placed.items() if place == (group, rank)), "")

    def may_start(self, group: int) -> bool:
        return not self.closed or (not self.node and self._agent.engine.has_place(group))

    def _tell(self, device: str, fate: str) -> None:
        self._agent.engine.close_devices(self.closed - {""})
        self._agent.events.add("node", f"GPU {device} of this node {fate}" if device else f"this node {fate}")
        self._agent.wake()

    def _clear(self) -> None:
        """End what is in nobody's way: the lighthouse may not even know of it."""
        self._agent.standbys.end("its node is drained")
        for life in self._agent.lives.alive():
            if not life.ready:
                life.state, life.comes_back, life.moving = GroupState.DRAINING, True, None
                life.being_killed = life.being_killed or "its node is drained"
                self._agent.engine.delete(life.member.group, life.member.incarnation, signal.SIGKILL)
