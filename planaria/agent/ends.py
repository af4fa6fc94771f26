"""What is done when a rank's process ends: others wait for word of it, and its group may have to follow it."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

from planaria.agent.lives import Life, ended_state, failure_of
from planaria.agent.ranklife import RankLife
from planaria.agent.refill import refill, spared
from planaria.core import plan as planning
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK
from planaria.core.messages import Died, Member
from planaria.core.plan import GroupState
from planaria.engines.base import Dying, Ended

if TYPE_CHECKING:
    from planaria.agent.agent import Agent

# A dead process has said everything, so its words are there to be read at once; only a child that it left with its
# socket could keep the stream open, and its end must not wait for that.
_LAST_WORDS_SECONDS = 1.0
_LOST = (GroupState.DEAD, GroupState.REFUSED)


class Ends:
    """Carries out for ``agent`` what the end of a process means.

    A group is lost with the first of its ranks that ends badly: that is told at once. Another process takes the lost
    one's place, if the other ranks can live with that (see refill). Otherwise they would only wait for it, and are
    killed; the group is over, and may be replaced, when no process of it is left.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._hearing: dict[Member, asyncio.Task[None]] = {}

    def take(self, change: Ended) -> None:
        """Must be called on the event loop's thread, as soon as the end is known."""
        speaking = None
        if change.rank == 0 and change.returncode == EXIT_OK:
            speaking = self._agent.hub.stream_of(change.member)
        if speaking is not None:
            # It left in order, and its last words may still be in the socket: they are told before its end.
            hearing = asyncio.get_running_loop().create_task(self._hear_out(speaking, change))
            self._hearing[change.member] = hearing
            hearing.add_done_callback(lambda _: self._hearing.pop(change.member))
        elif (pending := self._hearing.get(change.member)) is not None:
            pending.add_done_callback(lambda _: self._tell(change))
        else:
            self._tell(change)

    def foresee(self, change: Dying) -> None:
        """A rank is as good as gone. What its end means is told now; its place is free only when it has ended."""
        life = self._agent.lives.of(change.member)
        # One that leaves in order is left to say its last words.
        if life is None or not life.alive or not _bad(change) or change.member in self._hearing:
            return
        self._tell_lost(change, life)
        rank = life.ranks[change.rank]
        if not rank.killed:
            rank.was_exiting = True
            rank.returncode, rank.cause = change.returncode, change.cause
            asyncio.get_running_loop().call_soon(self._lose, life, rank)

    def close(self) -> list[asyncio.Task[None]]:
        """What still runs, for the caller to cancel and to await."""
        return list(self._hearing.values())

    async def _hear_out(self, speaking: asyncio.Task[None], change: Ended) -> None:
        await asyncio.wait({speaking}, timeout=_LAST_WORDS_SECONDS)
        self._tell(change)

    def _tell(self, change: Ended) -> None:
        # While rank 0 speaks for its group, another that left in order is no news: it is only a moment ahead.
        if _bad(change) or change.rank == 0:
            # Others wait for this word, and for nothing else that happens here.
            self._tell_lost(change, self._agent.lives.of(change.member))
        asyncio.get_running_loop().call_soon(self._ended, change)

    def _tell_lost(self, change: Dying | Ended, life: Life | None) -> None:
        newest = self._agent.lives.groups.get(change.member.group)
        # It was told already if it was foreseen, and another process may have taken its place since: to tell it once
        # more would be to say that none does.
        if (life is not None and life.fell) or (newest is not None and newest.member > change.member):
            return
        words = change.cause if life is None else life.named(life.ranks[change.rank], change.cause)
        if self._agent.hosting.holds(change.member):  # for the lighthouse its group is elsewhere
            return
        if life is not None:
            lost = life.ranks[change.rank]
            asks = life.first_bad is None and self._agent.borrowing.would_wait(life, lost)
            life.spared = change.returncode != EXIT_BAD_INPUT and (asks or spared(self._agent, life, lost))
        self._say(Died(change.member, words, life is not None and life.spared, life is not None and life.moved))
        if life is not None:
            life.fell_ns, life.fell_under = time.monotonic_ns(), life.quorum

    def _say(self, report: Died) -> None:
        self._agent.link.tell(report)
        self._agent.told.record(report)

    def _ended(self, change: Ended) -> None:
        life = self._agent.lives.of(change.member)
        if life is None or not life.alive:
            return
        rank = life.ranks[change.rank]
        rank.over, rank.returncode, rank.cause = True, change.returncode, change.cause
        rank.remains = change.remains
        if rank is life.moving and not _bad(change):
            self._tell_lost(change, life)
            self._lose(life, rank)
        elif (_bad(change) or (life.joins and not life.ready)) and not rank.killed:
            self._lose(life, rank)
        if self._agent.lives.of(life.member) is life and all(rank.over for rank in life.ranks):
            self._conclude(life)

    def _lose(self, life: Life, lost: RankLife) -> None:
        """``lost`` ends as no rank should: the group ends with it."""
        life.first_bad = life.first_bad or lost
        if life.asked_to_end:
            return  # each of them was told for itself
        if life.first_bad is lost and (refill(self._agent, life, lost) or self._agent.borrowing.wait(life, lost)):
            self._agent.wake()
            return
        self.give_up(life)

    def give_up(self, life: Life) -> None:
        """No process takes the place of the rank that was lost, and the others would only wait for it."""
        if life.spared:  # others wait for it, and need not
            life.spared = False
            self._say(Died(life.member, "no standby takes its place after all"))
        for rank in life.ranks:
            if rank.spare_or_kill():
                self._agent.engine.delete(life.member.group, life.member.incarnation, signal.SIGKILL, rank.rank)

    def _conclude(self, life: Life) -> None:
        """No process of it is left."""
        agent, now = self._agent, time.monotonic()
        life.last_look()
        culprit = life.culprit()
        life.state = ended_state(life, culprit.code)
        life.ended, life.exit_code = now, culprit.code
        moved = culprit is life.moving and culprit.code == EXIT_OK
        if life.settled and life.state in _LOST and not moved:
            agent.recoveries.died(life.member, life.fell_under, life.fell_ns)
        failure = failure_of(life, culprit)
        told = failure.reported or culprit.code is None
        life.message = failure.message if told else ""
        if life.state is GroupState.DEAD and not life.makes_way:
            spec = agent.assignment.plan
            life.quick_failures = planning.quick_failures(spec, life.quick_failures, now - life.created, life.settled)
        if life.state in _LOST and not agent.ending:
            if life.ready and culprit.code == EXIT_INTERRUPTED:
                agent.events.add("stop", f"{life.member} was asked to stop by another group's agent", life.member.group)
                agent.stop_in_order(signal.SIGINT)
            elif not (life.makes_way or moved) and not (
                life.being_killed and agent.lives.complete
            ):  # nothing was lost with it
                agent.failures.append(failure)
        text = f"{failure.who} {failure.how()}" + (f": {failure.message}" if told else "")
        if culprit.code == EXIT_OK:
            text = f"{life.member} {failure.how()}"
        elif agent.stopping and culprit.code == EXIT_INTERRUPTED:
            text = f"{life.member} stopped after {life.step} steps"
        facts = {"state": life.state.value, "exit_code": culprit.code, "rank": culprit.rank, "step": life.step}
        agent.events.add("exit", text, life.member.group, {"incarnation": life.member.incarnation, **facts})
        if life.comes_back and life.state is GroupState.DRAINED:
            life.state, life.makes_way = GroupState.DEAD, True
        agent.hosting.ended(life)
        agent.hub.forget(life.member)
        agent.orders.a_group_ended()
        agent.wake()


def _bad(change: Dying | Ended) -> bool:
    return change.returncode not in (EXIT_OK, EXIT_INTERRUPTED)
