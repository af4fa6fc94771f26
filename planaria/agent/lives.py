"""What the agent knows of the incarnations that it looks after."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from planaria.agent.proc import describe
from planaria.agent.ranklife import RankLife, culprit, suspicious
from planaria.core.exits import EXIT_BAD_INPUT
from planaria.core.liveness import JobTimes, ProgressWatch
from planaria.core.messages import AT_WORK, NO_QUORUM, Member, Phase, Pulse, QuorumId
from planaria.core.plan import GroupState, ObservedGroup
from planaria.wire.page import PageView

_BUSY = frozenset({Phase.COMPUTING, Phase.APPLYING, Phase.LOADING})  # getting on by itself, or to be judged if not


@dataclass(slots=True)
class Life:
    """One incarnation, from its creation on, until no process of it is left. Times are seconds of the monotonic clock.

    What it does is what its rank 0 does: the ranks of a group take every step together.
    """

    member: Member
    created: float
    ranks: list[RankLife]
    quick_failures: int = 0  # of its group, in a row
    state: GroupState = GroupState.RUNNING
    ready: bool = False
    adopted: bool = False
    settled: bool = False
    done: bool = False  # it reported the last step as committed
    left_out: bool = False  # of the newest quorum that it was told of
    suspected_since: float | None = None
    suspicion: str = ""
    moving: RankLife | None = None  # it is to leave in order, and another process to take its place
    suspect: RankLife | None = None  # whom the newest suspicion was about
    recorded: bool = False  # where its ranks stood when it was suspected
    certain: bool = False  # that it was that rank, and that the others only wait for it
    hung: RankLife | None = None  # the one that is killed for it, alone
    joins: bool = False  # begun under ranks of the life before, which wait for the one that is new
    founder: bool = True  # it looked for a checkpoint, so the job may begin with its state
    being_killed: str = ""  # the reason why the agent ends it
    run: QuorumId = NO_QUORUM  # in which the job began again last, as far as was known when it was created
    makes_way: bool = False  # for one that looks at the disk now: that it ends is no failure
    asked_to_end: bool = False  # every rank was sent SIGTERM, and ends in its own time
    fell_ns: int = 0  # when the lighthouse was told that it is gone; processes may be left
    fell_under: QuorumId = NO_QUORUM
    spared: bool = False  # it was said that a standby takes the lost rank's place
    first_bad: RankLife | None = None  # the first rank that ended as none should
    ended: float = 0.0
    exit_code: int | None = None
    message: str = ""
    moved: bool = False  # its group goes on at another agent
    comes_back: bool = False  # it leaves in order only to start again on other devices
    left: bool = False  # told to people: it ended in peace although there was more to do
    settle_seconds: float = math.nan  # from creation to work in a quorum

    @property
    def alive(self) -> bool:
        """Whether processes of it are left."""
        return self.state in (GroupState.RUNNING, GroupState.DRAINING)

    @property
    def fell(self) -> bool:
        """Whether it counts as gone already."""
        return self.fell_ns > 0

    @property
    def speaker(self) -> RankLife:
        return self.ranks[0]

    @property
    def pid(self) -> int:
        return self.speaker.pid

    @property
    def view(self) -> PageView | None:
        return self.speaker.view

    @property
    def phase(self) -> Phase:
        return self.view.phase if self.view is not None else Phase.STARTING

    @property
    def step(self) -> int:
        return self.view.step if self.view is not None else 0

    @property
    def quorum(self) -> QuorumId:
        return self.view.quorum if self.view is not None else NO_QUORUM

    def look(self, now: float) -> str | None:
        """Poll the pages and the process table; a sentence if a rank is suspicious."""
        for rank in self.ranks:
            rank.look(now)
        if any(rank.watch.stopped for rank in self.ranks):
            for rank in self.ranks:
                rank.watch.excuse()
        if self.adopted and not self.settled and self.view is not None and self.view.phase in AT_WORK:
            self.settled, self.settle_seconds = True, now - self.created
        found, why, certain = suspicious([rank for rank in self.ranks if not rank.over], now)
        if found is None:
            return None
        self.suspect, self.certain = found, certain
        return self.named(found, why)

    def last_look(self) -> None:
        """Read the pages to their end and let go of them: the processes are dead."""
        for rank in self.ranks:
            rank.last_look()
        # It may have come to work and died between two looks.
        self.settled = self.settled or (self.adopted and self.view is not None and self.view.committed_at_ns > 0)

    def commits(self) -> list[tuple[int, int]]:
        page = self.speaker.page
        return page.commits() if page is not None else []

    def culprit(self) -> RankLife:
        """Whose end is the group's, now that all have ended."""
        return culprit(self.ranks, self.suspect if self.being_killed and self.suspect else self.first_bad)

    def named(self, rank: RankLife, words: str) -> str:
        """``words`` about a rank, with its number where there are several."""
        return f"rank {rank.rank}: {words}" if len(self.ranks) > 1 else words

    def pulse(self, placed: Mapping[tuple[int, int], str] = MappingProxyType({})) -> Pulse:
        """``placed``: the GPUs of (group, rank)."""
        devices = tuple(placed.get((self.member.group, rank.rank), "") for rank in self.ranks) if placed else ()
        view = self.view
        if view is None:
            return Pulse(self.member, Phase.STARTING, 0, NO_QUORUM, math.nan, 0.0, self.pid, devices)
        seen = self._slowest_phase(view), view.step, view.quorum, view.loss, view.step_seconds
        return Pulse(self.member, *seen, self.pid, devices, view.links, view.step_shards)

    def _slowest_phase(self, view: PageView) -> Phase:
        """Of the ranks here: where one waits in an exchange, another may be what it waits for."""
        if view.phase is Phase.EXCHANGING:
            for rank in self.ranks:
                if not rank.over and rank.view is not None and rank.view.phase in _BUSY:
                    return rank.view.phase
        return view.phase

    def observed(self) -> ObservedGroup:
        return ObservedGroup(
            self.member.group,
            self.member.incarnation,
            self.state,
            self.ended if not self.alive else self.created,
            self.exit_code,
            self.message,
            self.quick_failures,
            self.settled and not (self.alive and self.first_bad),  # what is left of it holds no state
            self.done,
            self.suspected_since,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """How an incarnation ended that should not have. ``at``: unix seconds."""

    member: Member
    returncode: int | None
    at: float
    step: int
    message: str
    log: Path
    reported: bool  # whether the rank itself said why (error.json)
    rank: int = 0
    ranks: int = 1  # of the group
    ran: bool = True

    @property
    def who(self) -> str:
        return f"{self.member}, rank {self.rank}," if self.ranks > 1 else str(self.member)

    def how(self) -> str:
        if self.returncode is None:
            return "is lost" if self.ran else "could not be started"
        return describe(self.returncode)


def failure_of(life: Life, rank: RankLife) -> Failure:
    """``rank``: whose end is the group's."""
    error = rank.error()
    message = str(error.get("message") or "") or life.being_killed or rank.cause
    return Failure(
        life.member,
        rank.code,
        time.time(),
        life.step,
        message,
        rank.log,
        bool(error),
        rank.rank,
        ranks=len(life.ranks),
        ran=rank.pid > 0,
    )


def ended_state(life: Life, returncode: int | None) -> GroupState:
    """What the end of a process means for its group.

    A script may leave its loop early by its own decision, which all groups take alike: that is a finished group. But
    one that the others had left out before is replaced.
    """
    if life.state is GroupState.DRAINING:
        return GroupState.DRAINED
    if returncode == 0 and not life.left_out and (life.ready or not life.joins):
        return GroupState.FINISHED
    if returncode == EXIT_BAD_INPUT:
        return GroupState.REFUSED
    return GroupState.DEAD


@dataclass(slots=True)
class Lives:
    """The newest life of every group of this agent."""

    times: JobTimes = field(default_factory=JobTimes)
    groups: dict[int, Life] = field(default_factory=dict)

    def begin(
        self,
        member: Member,
        directories: list[Path],
        now: float,
        node_of: Callable[[Member, int], int] = lambda member, rank: 0,
    ) -> Life:
        """``directories``: one for each rank. ``node_of``: the number of a rank's node; this one is 0."""
        before = self.groups.get(member.group)
        ranks = [RankLife(rank, path, ProgressWatch(self.times)) for rank, path in enumerate(directories)]
        for rank in ranks:
            rank.away = node_of(member, rank.rank) != 0
        life = Life(member, now, ranks)
        life.quick_failures = before.quick_failures if before is not None else 0
        self.groups[member.group] = life
        return life

    def ranks_here(self, member: Member) -> list[int]:
        """Those that are on this node; of a standby the only one."""
        life = self.of(member)
        return [0] if life is None else [rank.rank for rank in life.ranks if not rank.away]

    def of(self, member: Member) -> Life | None:
        life = self.groups.get(member.group)
        return life if life is not None and life.member == member else None

    @property
    def trained(self) -> bool:
        """Whether any of them took a step, or found that all were taken."""
        return any(life.done or life.step > 0 for life in self.groups.values())

    @property
    def complete(self) -> bool:
        """Whether the job's last step is committed, as far as these groups tell."""
        return any(life.done or life.state is GroupState.FINISHED for life in self.groups.values())

    def newly_left(self) -> list[Life]:
        """Groups that ended with exit code 0 while others went on beyond their last step, each of them once.

        That the others went on is what tells it from a loop that all leave alike.
        """
        furthest = max((life.step for life in self.alive()), default=0)
        gone = [
            life
            for life in self.groups.values()
            if life.state is GroupState.FINISHED and not life.done and not life.left and furthest > life.step
        ]
        for life in gone:
            life.left = True
        return gone

    def alive(self) -> list[Life]:
        return [life for life in self.groups.values() if life.alive]
