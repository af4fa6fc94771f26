"""What the lighthouse orders, and how many groups this agent should have after all of it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from planaria.agent.proc import signal_name
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import (
    NO_QUORUM,
    Close,
    Desired,
    Drain,
    Host,
    Kill,
    Member,
    Migrate,
    Order,
    Publish,
    Quorum,
    Refuse,
    Resume,
    Stop,
    Welcome,
)
from planaria.core.plan import GroupState

if TYPE_CHECKING:
    from planaria.agent.agent import Agent
    from planaria.agent.lives import Life


class Orders:
    """Carries the lighthouse's orders out for ``agent``. ``total``: groups that the whole job should have."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.total = agent.assignment.spec.groups
        self.quorum: Quorum | None = None  # the newest heard of
        self.run = NO_QUORUM  # the newest `Resume.run`
        self.welcomed = False  # a lighthouse has taken this agent
        self._epoch = 0  # under which it did last
        self._lived: dict[int, int] = {}  # incarnations of groups that other agents had before this one
        self._told_total = self.total
        self._retold = True  # the next Desired only repeats what was wanted before this stream
        self._drained: set[Member] = set()
        self._fewer: set[Member] = set()  # those of them that are not to be started again
        self._unheeded: Stop | None = None
        self._asking: dict[int, asyncio.Task[None]] = {}

    def obey(self, order: Order) -> None:
        match order:
            case Publish():
                self._publish(order)
            case Refuse():
                self._refuse(order)
            case Drain():
                self._drain(order)
            case Kill():
                self._kill(order)
            case Migrate():
                self._agent.moves.ask(order)
            case Host():
                self._agent.hosting.obey(order)
            case Close():
                self._agent.closing.obey(order)
            case Desired():
                self._desired(order)
            case Stop():
                self._stop(order)
            case Resume():
                self._resume(order)
            case Welcome():
                self._retold = self.welcomed = True
                self._lived |= {member.group: member.incarnation for member in order.lives}
                self._served_by(order.epoch)
                self._agent.wake()

    def _served_by(self, epoch: int) -> None:
        """A lighthouse that was started again does not know who it is that waits to leave."""
        if self._epoch not in (0, epoch):
            for life in self._agent.lives.alive():
                self._ask_again(life)
        self._epoch = epoch

    def _ask_again(self, life: Life) -> None:
        """Until it has let go of the group: it may not have heard of it yet, or of any other that could go on."""

        def later(_: str) -> None:
            asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._ask_again, life)

        waits = life.alive and life.state is GroupState.DRAINING and not life.moved
        if waits and self._agent.link.up.is_set() and not self._agent.ending:
            self.ask_drain(life.member.group, refused=later)

    def a_group_ended(self) -> None:
        """Do what had to wait for it."""
        if (order := self._unheeded) is not None:
            self._unheeded = None
            self._stop(order)

    def first_life(self, group: int) -> int:
        """The incarnation with which this agent may begin."""
        return self._lived.get(group, -1) + 1

    def desired_here(self) -> int:
        """How many groups this agent should keep alive."""
        assignment, more = self._agent.assignment, len(self._agent.hosting.groups)
        if assignment.is_last:
            return self.total - assignment.first_group + more
        here = assignment.plan.desired - len(self._fewer)
        # Whoever placed the groups here says which of them are too many, and has them drained.
        return (here if assignment.placed else min(here, self._told_total - assignment.first_group)) + more

    def ask_drain(self, group: int, reason: str = "", refused: Callable[[str], None] = lambda why: None) -> None:
        """Fewer groups are wanted, or it has lost its place: have the lighthouse leave one out. Its order comes back
        when it does; else ``refused`` is told why not."""

        async def ask() -> None:
            why = await self._agent.link.drain(self._agent.assignment.spec.job, group, reason)
            if why is not None:
                refused(why)

        if group not in self._asking:
            self._asking[group] = asyncio.get_running_loop().create_task(ask())
            self._asking[group].add_done_callback(lambda _: self._asking.pop(group, None))

    def let_go(self, life: Life) -> None:
        """A group left by itself in mid-training. Like a drained one it is not replaced, and ends nothing."""
        self._drained.add(life.member)
        self._give_up(life.member)
        life.state = GroupState.DRAINED

    def _give_up(self, member: Member) -> None:
        """It is not to be started again here."""
        if member.group in self._agent.hosting.groups:
            self._agent.hosting.groups.discard(member.group)
        elif all(other.group != member.group for other in self._fewer):
            self._fewer.add(member)
            self.total -= 1

    def _publish(self, order: Publish) -> None:
        self._agent.hub.send(order.member, order)
        if order.quorum.urgent:
            # The one before broke: perhaps because of a rank here that is still dying.
            self._agent.engine.look(order.member)
        if self.quorum is None or order.quorum.id > self.quorum.id:
            self.quorum = order.quorum
        if (life := self._agent.lives.of(order.member)) is not None:
            life.left_out = order.member not in order.quorum.members

    def _refuse(self, order: Refuse) -> None:
        life = self._agent.lives.of(order.member)
        if life is not None and not self._agent.hub.send(order.member, order):
            life.being_killed = order.reason  # it cannot be told, and must not be taken for one that works
            self._agent.engine.delete(order.member.group, order.member.incarnation, signal.SIGKILL)

    def _drain(self, order: Drain) -> None:
        life = self._agent.lives.groups.get(order.member.group)
        if order.member in self._drained:
            return
        self._drained.add(order.member)
        comes_back = self._agent.closing.node or (life is not None and life.comes_back)
        if order.moved or not comes_back:
            self._give_up(order.member)
        if life is not None:
            life.comes_back, life.moved = comes_back and not order.moved, order.moved
        if life is not None and life.alive:
            life.state, life.moving = GroupState.DRAINING, None  # all of it leaves
            self._agent.hub.send(order.member, order)
        elif life is not None and life.state is GroupState.DEAD and not life.comes_back:
            life.state = GroupState.DRAINED

    def _kill(self, order: Kill) -> None:
        life = self._agent.lives.groups.get(order.group)
        if life is None or not life.alive:
            return
        name, whom = signal_name(order.signal), str(life.member)
        if order.rank is not None:
            whom += f", rank {order.rank},"
        self._agent.events.add("signal", f"{whom} gets {name}, as the lighthouse ordered", order.group)
        self._agent.engine.delete(life.member.group, life.member.incarnation, order.signal, order.rank)

    def _desired(self, order: Desired) -> None:
        # Drains that came since it was first told must not be undone by its being told again at a connect.
        again, self._retold = self._retold and order.groups == self._told_total, False
        if not again:
            self.total = self._told_total = order.groups
            self._agent.events.add("scale", f"the job is to have {order.groups} groups")

    def _resume(self, order: Resume) -> None:
        if order.run >= self.run:
            self.run, self.quorum = order.run, None  # its members are gone
            self._agent.recoveries.forget()
        for life in self._agent.lives.alive():
            # Since an earlier one looked, a checkpoint may have become complete of which nobody lived to tell.
            late = life.run < self.run or not life.founder
            if not late or life.fell or life.makes_way:
                continue
            if order.run != NO_QUORUM and not life.being_killed and any(rank.copies for rank in life.ranks):
                # In the memory of its processes. If it cannot be told yet, it will ask again, and be told again.
                self._agent.hub.send(life.member, order)
            else:
                life.makes_way, life.being_killed = True, order.reason
                self._agent.events.add("resume", f"{life.member} makes way for one that starts from the checkpoint")
                self._agent.engine.delete(life.member.group, life.member.incarnation, signal.SIGKILL)

    def _stop(self, order: Stop) -> None:
        if self._agent.stopping:
            return  # of course every group is lost when all were told to end
        if not order.reason:
            # Whatever still runs here came too late to have a part in it, and holds nothing that anybody needs.
            self._agent.finish(EXIT_OK, "the job is complete: all steps were committed without the groups here")
            return
        if any(life.fell for life in self._agent.lives.alive()):
            self._unheeded = order  # it was ordered because of an end whose cause is not known before all of it is gone
            return
        for member in self._agent.hub.connected():
            self._agent.hub.send(member, order)
        lives = self._agent.lives.groups.values()
        refused = [life for life in lives if life.state is GroupState.REFUSED]
        if refused and not self._agent.lives.alive():
            # All ended for bad input (a NaN ends every group at the same step): that is the news, not the loss.
            self._agent.finish(EXIT_BAD_INPUT, refused[0].message or order.reason)
        else:
            self._agent.finish(EXIT_FAILED, order.reason)
