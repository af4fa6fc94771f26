"""A cluster and a lighthouse in memory, for the keeper: they do what real ones may do, as a seed chooses."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from planaria.core.messages import Member, Phase, Quorum, QuorumId
from planaria.core.roster import GroupStatus, JobStatus
from planaria.engines.desk import Away
from planaria.engines.keeper import HostAway, Hosted, HostState

KINDS = ("kill", "cancel", "node", "cut", "back", "away", "there", "scale", "drain", "join", "time")


@dataclass
class Life:
    """One job of the cluster, and the agent in it."""

    group: int
    incarnation: int
    node: str = ""
    state: HostState = HostState.PENDING
    exit_code: int | None = None
    since: float = 0.0
    lost: bool = False
    hung: bool = False  # the scheduler believes that it runs, and nobody can reach it
    joined: bool = False  # the lighthouse has heard of it
    evicted: bool = False
    left: bool = False
    lingers: bool = False  # it has ended, and the lighthouse has not noticed yet

    @property
    def lives(self) -> bool:
        """Whether its processes may still run."""
        return self.state is HostState.RUNNING or self.hung


@dataclass
class World:
    """A `GroupHost` and a `Desk` at once. Rules are checked whenever something is asked of it."""

    rng: random.Random
    desired: int
    nodes: tuple[str, ...] = ("n1", "n2", "n3", "n4", "n5", "n6")
    now: float = 1000.0
    lives: list[Life] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    epoch: int = 1
    scaled: int = 0  # times, in this epoch
    away: str = ""  # host or desk: it cannot be asked
    step: int = 0
    complete: bool = False
    majority: bool = True  # else the lighthouse keeps members that it cannot hear
    asked: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)
    eased: list[tuple[int, int, tuple[str, ...]]] = field(default_factory=list)  # asked for again
    listed: int = 0  # how often the scheduler was asked

    # --- the cluster -----------------------------------------------------------------------------------------

    async def create(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        self._in_reach("host")
        if any((x.group, x.incarnation) == (group, incarnation) for x in self.lives):
            self.eased.append((group, incarnation, tuple(avoid)))
            return
        for other in self.lives:
            if other.group == group and other.joined and not (other.evicted or other.left):
                gone = other.state is HostState.ENDED and not other.lingers
                assert gone, f"group {group} has a life that counts: {other}"
        self.asked.append((group, incarnation, tuple(avoid)))
        self.lives.append(Life(group, incarnation, since=self.now))

    async def delete(self, group: int, incarnation: int) -> None:
        self._in_reach("host")
        for life in self.lives:
            if (life.group, life.incarnation) == (group, incarnation) and not life.hung:
                self.end(life, 143)

    async def list(self) -> Sequence[Hosted]:
        self.listed += 1
        self._in_reach("host")
        return [
            Hosted(x.group, x.incarnation, x.state, (x.node,) if x.node else (), x.exit_code, x.since, lost=x.lost)
            for x in self.lives
        ]

    async def changed(self) -> None:
        raise AssertionError("this world is looked at by hand")

    # --- the lighthouse --------------------------------------------------------------------------------------

    async def look(self) -> JobStatus | None:
        self._in_reach("desk")
        newest: dict[int, Life] = {}
        for life in self.lives:
            if life.joined:
                newest[life.group] = life
        if not newest:
            return None
        members = tuple(Member(x.group, x.incarnation) for x in newest.values() if self._counts(x))
        quorum = Quorum(QuorumId(1, 1), members, ("",) * len(members), True, "") if members else None
        groups = tuple(map(self._status, newest.values()))
        return JobStatus("job", self.epoch, quorum, None, self.desired, self.complete, groups, scaled=self.scaled)

    def _counts(self, life: Life) -> bool:
        return self.at_work(life) or (life.hung and not life.evicted and not self.majority)

    def _status(self, life: Life) -> GroupStatus:
        state = "active"
        if life.lingers and not life.evicted:
            pass
        elif life.left:
            state = "drained" if life.state is HostState.ENDED else "draining"
        elif life.evicted or (life.state is HostState.ENDED and not life.lost):
            state = "finished" if life.exit_code == 0 else "dead"
        member = Member(life.group, life.incarnation)
        connected = self.at_work(life) or (life.lingers and not life.evicted)
        agent = f"agent-{life.group}-{life.incarnation}"
        return GroupStatus(
            member, state, self.step, QuorumId(1, 1), Phase.COMPUTING, math.nan, 1.0, 1, agent, connected
        )

    async def evict(self, group: int) -> str | None:
        self._in_reach("desk")
        found = [x for x in self.lives if x.group == group and x.joined]
        if not found:
            return "there is no such group"
        if not any(self.at_work(x) for x in self.lives if x.group != group):
            return "it is the only one that holds the state"
        found[-1].evicted = True
        return None

    async def drain(self, group: int) -> str | None:
        self._in_reach("desk")
        working = [x for x in self.lives if self.at_work(x) and not x.left]
        if working == [x for x in working if x.group == group]:
            return "it is the only one that works"
        for life in working:
            life.left = life.left or life.group == group
        return None

    # --- what happens ----------------------------------------------------------------------------------------

    def scale(self, groups: int) -> None:
        """As the lighthouse does it: who is too many is asked to leave at once, and whoever looks may see that later
        than that it has left."""
        self.desired, self.scaled = groups, self.scaled + 1
        working = sorted((x for x in self.lives if self.at_work(x) and not x.left), key=lambda x: x.group)
        for life in working[groups:]:
            life.left = True

    def at_work(self, life: Life) -> bool:
        return life.joined and life.state is HostState.RUNNING and not life.hung and not life.evicted

    def end(self, life: Life, code: int | None, lost: bool = False) -> None:
        if life.state is not HostState.ENDED:
            life.lingers = life.joined and not life.left and code == 137 and self.rng.random() < 0.5
            life.state, life.exit_code, life.since, life.lost = HostState.ENDED, code, self.now, lost

    def place(self) -> None:
        """The scheduler gives a place to whoever waits, as far as there are any."""
        taken = {x.node for x in self.lives if x.state is HostState.RUNNING}
        free = [node for node in self.nodes if node not in taken | self.down]
        for life in self.lives:
            if life.state is HostState.PENDING and free:
                life.node, life.state, life.since = free.pop(self.rng.randrange(len(free))), HostState.RUNNING, self.now

    def join(self) -> None:
        for life in self.lives:
            life.lingers = False
            if life.state is HostState.RUNNING and not life.hung:
                life.joined = True
        self.step += 1
        for life in self.lives:
            if life.left and life.state is HostState.RUNNING:
                self.end(life, 0 if self.complete else 75)

    def happen(self) -> str:
        running = [x for x in self.lives if self.at_work(x)]
        kind = self.rng.choice(
            ["kill", "cancel", "node", "cut", "back", "away", "there", "scale", "drain", "join", "time"]
        )
        if kind in ("kill", "cancel") and running:
            self.end(self.rng.choice(running), {"kill": 137, "cancel": 143}[kind])
        elif kind == "node" and len(running) > 1:
            self.end(life := self.rng.choice(running), None, lost=True)
            self.down.add(life.node)
        elif kind == "cut" and len(running) > 1:
            self.rng.choice(running).hung = True
        elif kind == "back":
            self.down.clear()
            for life in self.lives:
                life.hung = False
                if life.evicted or life.lost:
                    self.end(life, 137)  # it was fenced, and ended
        elif kind == "away":
            self.away = self.rng.choice(["host", "desk"])
        elif kind == "there":
            self.away = ""
        elif kind == "scale":
            self.scale(self.rng.randint(1, 5))
        elif kind == "drain" and len(running) > 1 and self.desired > 1:
            self.rng.choice(running).left = True
        self.place()
        if kind == "join":
            self.join()
        self.now += self.rng.choice([0.1, 1.0, 12.0, 40.0])
        return kind

    def _in_reach(self, what: str) -> None:
        if self.away == what:
            raise (HostAway if what == "host" else Away)(f"the {what} does not answer")
