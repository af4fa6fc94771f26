"""A lost rank's place is filled under the living others of its group, which keep their processes.

What is left of the group goes on as its next incarnation, with a new process in the lost one's place. For the job that
is a group which was lost and is back, only sooner: the others have gone on meanwhile, and give it their state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.agent.lives import Life, failure_of
from planaria.agent.ranklife import RankLife
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_OK
from planaria.core.messages import Member, Policy
from planaria.core.plan import GroupState
from planaria.engines.base import Started
from planaria.engines.launch import directory_of

if TYPE_CHECKING:
    from planaria.agent.agent import Agent

_OF_RANK_0 = ("progress", "stdout.log", "stderr.log", "metrics.jsonl", "quorums.jsonl", "stacks.txt")


def can_refill(agent: Agent, life: Life, lost: RankLife) -> bool:
    """Whether the group can do without ``lost`` and take in another process."""
    return outlives(agent, life, lost) and has_place(agent, life, lost)


def outlives(agent: Agent, life: Life, lost: RankLife) -> bool:
    """Whether the group can do without ``lost``: if its other ranks live and outlive this (see Step.guard), and another
    group has the state, or they have copies of it. A group that was lost before it took part in a step is not worth it,
    and bad input ends more than a rank."""
    others = [rank for rank in life.ranks if rank is not lost]
    usable = life.state is GroupState.RUNNING and life.settled and not agent.ending
    usable = usable and (not life.being_killed or lost is life.hung) and lost.returncode != EXIT_BAD_INPUT
    alive = all(not rank.over and not rank.killed and not rank.was_exiting for rank in others)
    guarded = all(rank.guarded for rank in others)
    held = _copied(life, lost) or agent.others_hold_the_state(life)
    return usable and alive and guarded and held


def has_place(agent: Agent, life: Life, lost: RankLife) -> bool:
    """Whether there is a standby for the place of ``lost``, or a new process could start in it."""
    if agent.standbys.warm_for(lost.rank):
        return True
    home = agent.engine.home_of(lost.rank)
    if home not in (0, *agent.engine.nodes()):
        return False
    if agent.closing.device_of(life.member.group, lost.rank) in agent.closing.closed:
        return False  # the new process would have the same GPU
    return len(life.ranks) > 1  # a group of one is as soon started again


def _copied(life: Life, lost: RankLife) -> bool:
    """Whether the other ranks have copies of the state, the lost part included."""
    others = [rank for rank in life.ranks if rank is not lost]
    return bool(others) and not life.done and all(rank.copies for rank in others)


def hung(agent: Agent, life: Life) -> RankLife | None:
    """The one rank of the group that seems to hang, if the others can go on without it."""
    one = life.suspect if life.suspected_since is not None and life.certain and not agent.lives.complete else None
    return one if one is not None and can_refill(agent, life, one) else None


def goes_back(agent: Agent, life: Life) -> bool:
    """Whether it is one rank that hangs, and the group has copies of what would be lost with it."""
    one = hung(agent, life)
    return one is not None and _copied(life, one)


def spared(agent: Agent, life: Life, lost: RankLife) -> bool:
    """Whether a standby is about to take the place of ``lost``, as far as is known in the moment of its end, and the
    others wait for that by the policy of the job."""
    waits = agent.assignment.spec.policy is Policy.SPARE and agent.standbys.warm_for(lost.rank) > 0
    return waits and life.first_bad is None and not life.asked_to_end and can_refill(agent, life, lost)


def refill(agent: Agent, life: Life, lost: RankLife) -> bool:
    """Do it, if it can be done, by a standby if there is one."""
    now = time.monotonic()
    others = [rank for rank in life.ranks if rank is not lost]
    for rank in others:
        rank.look(now)
    if not can_refill(agent, life, lost):
        return False
    newer = Member(life.member.group, life.member.incarnation + 1)
    standby = agent.standbys.take(lost.rank, lost.goes_to if life.moving is lost else None)
    port = agent.engine.regroup(life.member, newer, lost.rank, standby.number if standby is not None else None)
    if port is None:
        return False
    link(agent.assignment.directory, life.member, newer, [rank.rank for rank in others if not rank.away])
    _note_the_end(agent, life, lost, now)
    places = [directory_of(agent.assignment.directory, newer, rank) for rank in range(len(life.ranks))]
    successor = agent.lives.begin(newer, places, now, agent.engine.node_of)
    successor.joins, successor.founder, successor.run = True, False, agent.orders.run
    for rank in others:
        successor.ranks[rank.rank] = rank
        rank.watch.pardon()
    agent.hub.regroup(life.member, newer, lost.rank, port)
    text = f"another process takes the place of rank {lost.rank} of group {newer.group}"
    if standby is not None:
        agent.standbys.taken(standby, newer, lost.rank)
        agent.started(Started(newer, standby.pid, lost.rank))
        where = f", on node {standby.node}," * (standby.node != agent.engine.home_of(lost.rank))
        text = f"{standby.member}{where} takes the place of rank {lost.rank} of group {newer.group}"
    if others:
        text += f" under its living rank{'s' * (len(others) > 1)} " + ", ".join(str(rank.rank) for rank in others)
    if life.moving is not lost:
        agent.moves.put_off(life)
    agent.events.add("regroup", text, newer.group, {"incarnation": newer.incarnation, "rank": lost.rank})
    return True


def _note_the_end(agent: Agent, life: Life, lost: RankLife, now: float) -> None:
    lost.last_look()
    life.state, life.ended, life.exit_code = GroupState.DEAD, now, lost.code
    facts = {"incarnation": life.member.incarnation, "state": life.state.value, "exit_code": lost.code}
    facts |= {"rank": lost.rank, "step": life.step, "alone": True}  # the others of its group live on
    if life.moving is lost and lost.returncode == EXIT_OK:
        agent.events.add("exit", f"rank {lost.rank} of {life.member} has left", life.member.group, facts)
        return
    agent.replacements.append(now)
    agent.recoveries.died(life.member, life.fell_under, life.fell_ns)
    failure = failure_of(life, lost)
    agent.failures.append(failure)
    text = f"{failure.who} {failure.how()}" + (f": {failure.message}" if failure.reported else "")
    agent.events.add("exit", text, life.member.group, facts)


def link(directory: Path, older: Member, newer: Member, ranks: Iterable[int]) -> None:
    """Have what the living ranks of this node write be found in the new incarnation's directory too."""
    home = directory_of(directory, newer)
    home.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        before = directory_of(directory, older, rank)
        names = [""] if rank else [name for name in _OF_RANK_0 if (before / name).exists()]
        for name in names:
            place = home / name if name else directory_of(directory, newer, rank)
            if not place.is_symlink():
                # To the file itself: the kernel follows no more than 40 links, one after the other.
                place.symlink_to(os.path.relpath(os.path.realpath(before / name), os.path.realpath(place.parent)))
