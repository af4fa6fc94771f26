"""A group of this node is suspected, or shows life again; and where everybody stood meanwhile, for the record.

The others go on as soon as the lighthouse has heard of the suspicion, so that is told first, and what is for the record
comes one look later: long before anything is killed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from planaria.agent.lives import Life
from planaria.agent.proc import STOPPED, state_of
from planaria.agent.ranklife import RankLife
from planaria.core.messages import Suspected
from planaria.wire import stacks

if TYPE_CHECKING:
    from planaria.agent.agent import Agent


def judge(agent: Agent, life: Life, why: str | None, now: float) -> None:
    """``why``: what is suspicious about it now; None if nothing is."""
    if why is None and life.suspected_since is not None:
        life.suspected_since, life.suspicion, life.recorded = None, "", False
        agent.events.add("alive", f"{life.member} shows life again", life.member.group)
        if (ready := agent.told.ready(life.member)) is not None:  # it takes the suspicion back
            agent.link.tell(ready)
            agent.told.record(ready)
    elif why is not None and life.suspected_since is None:
        life.suspected_since, life.suspicion = now, why
        report = Suspected(life.member, why)
        agent.link.tell(report)
        agent.told.record(report)
        facts = {"incarnation": life.member.incarnation, "why": why, "step": life.step}
        agent.events.add("suspect", f"{life.member}: {why}", life.member.group, facts)
    elif why is not None:
        note_where_they_stand(agent, life)


def note_where_they_stand(agent: Agent, life: Life) -> None:
    """Once for each suspicion: what the pages of all ranks here show, and the stacks of those of the group in question.
    Nobody waits for these: a rank writes them itself, as it is asked to, and needs some milliseconds. The ranks of
    other groups, which are in the middle of a recovery, are not disturbed."""
    if life.recorded or life.suspected_since is None:
        return
    life.recorded = True
    ranks = [_stand(agent, each, rank, each is life) for each in agent.lives.alive() for rank in each.ranks]
    text = f"where the ranks of this node stood while {life.member} was suspected: planaria explain shows it"
    facts = {"incarnation": life.member.incarnation, "ranks": ranks}
    agent.events.add("hang", text, life.member.group, facts)


def _stand(agent: Agent, life: Life, rank: RankLife, suspected: bool) -> dict[str, object]:
    found: dict[str, object] = {
        "group": life.member.group,
        "incarnation": life.member.incarnation,
        "rank": rank.rank,
        "collectives": rank.collectives,  # begun within its group
    }
    if rank.away:
        return found | {"away": True}
    found |= {"pid": rank.pid, "process": state_of(rank.pid)}
    if (view := rank.view) is not None:
        since = max(0.0, (time.monotonic_ns() - view.phase_since_ns) / 1e9)
        found |= {"phase": view.phase.name.lower(), "seconds": round(since, 3), "step": view.step}
        found |= {"shard": view.shard, "quorum": str(view.quorum)}
    if suspected:
        written = stacks.size(rank.directory)
        # One that is stopped would answer when it goes on, which says nothing.
        here = rank.pid > 0 and not rank.over and found["process"] not in STOPPED
        if here and (stacks.ask(rank.pid) or stacks.ask(rank.pid, insist=True)):  # not yet on a thread
            asyncio.get_running_loop().call_later(stacks.ANSWER_SECONDS, _insist, rank, rank.pid, written)
            place = rank.directory / stacks.FILE
            found |= {"stacks": str(place.relative_to(agent.assignment.directory)), "from": written}
    return found


def _insist(rank: RankLife, pid: int, written: int) -> None:
    """Unless it has answered, has ended, or was stopped meanwhile."""
    here = rank.pid == pid and not rank.over and state_of(pid) not in STOPPED
    if here and stacks.size(rank.directory) == written:
        stacks.ask(pid, insist=True)
