"""Keeps the groups of one job alive where each runs as a whole somewhere else: a job of Slurm, a pod of Kubernetes.

The agent inside replaces ranks within a second. What is done here is for what it cannot mend: its job, its node, or
itself is gone. ``core.plan`` decides; this shell shows it what the scheduler and the lighthouse say, and carries out
what it wants. It holds nothing that it cannot learn again, but for a `Memory` that spares it mistakes; training never
waits for it.

Before a group is started again, the life before it is made to count for nothing: the scheduler says that it has ended,
or the lighthouse is told to take it for dead (`evict`), which fences it should it live on behind a cut cable. So at no
time can two lives of a group take part. Times are seconds of the unix clock, for schedulers tell those, and they must
outlive this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from planaria.core import plan as planning
from planaria.core.attendance import STALL_BEATS
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_LEFT, EXIT_OK
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import NO_QUORUM, Member
from planaria.core.plan import Finish, GroupState, NodeFailure, Observed, ObservedGroup, PlanSpec, Suspend
from planaria.core.roster import GroupStatus, JobStatus, named
from planaria.engines.desk import GONE, Away, Desk
from planaria.errors import UsageError

# A life that was deleted may need long to end (a node that is out of reach): it is asked for again after this long,
# twice what schedulers give processes between SIGTERM and SIGKILL by default.
DELETE_AGAIN_SECONDS = 60.0
# What the scheduler or the lighthouse could not do now is tried again after this long: a few heartbeats.
RETRY_SECONDS = 3.0
# Ends that somebody asked for: 128 + SIGINT, 128 + SIGTERM, and SIGTERM before anybody could handle it.
ASKED = frozenset({EXIT_INTERRUPTED, 143, -15})
_ALIVE = (GroupState.PENDING, GroupState.RUNNING, GroupState.DRAINING)


class HostState(Enum):
    PENDING = "pending"  # created, and waiting for a place
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Hosted:
    """One life of a group, as the scheduler sees it. ``incarnation`` counts the lives there: the agent inside may
    start its ranks several times during each, so the lighthouse counts others."""

    group: int
    incarnation: int
    state: HostState
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None  # negative: the signal; None: not ended, or unknown
    since: float | None = None  # when it came into this state, if the scheduler tells
    reason: str = ""  # why it waits, or how it ended, in words for people
    lost: bool = False  # its node is to blame, as far as the scheduler knows


class HostAway(Exception):
    """The scheduler cannot be asked now; it will be asked again."""


class Clock:
    """Seconds of the unix epoch that are never set back, and go on if the system's are: nothing waits until those have
    caught up."""

    def __init__(self) -> None:
        self._ahead = -math.inf  # of `time.monotonic`

    def __call__(self) -> float:
        self._ahead = max(self._ahead, time.time() - time.monotonic())
        return self._ahead + time.monotonic()


class GroupHost(Protocol):
    """Where whole groups run. Each verb may be called twice. UsageError: it never will, and why, in a sentence."""

    async def create(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        """Ask for a place for this life, not on the nodes ``avoid`` if there are others. `list` shows it then. Asked
        again while it waits: no other nodes are kept from it any more, where the scheduler can change that."""

    async def delete(self, group: int, incarnation: int) -> None:
        """Begin to end it: SIGTERM, by which it leaves the quorum, and SIGKILL after the scheduler's own time."""

    async def list(self) -> Sequence[Hosted]:
        """Every life that is there, and those that ended lately."""

    async def changed(self) -> None:
        """Return when `list` may have changed."""

    def close(self) -> None:
        """Give back what it holds here. Groups that are to go on do so."""


@dataclass(slots=True)
class Life:
    """The newest life of a group, as far as it is remembered."""

    incarnation: int
    born: float
    state: GroupState = GroupState.PENDING
    ended: float = 0.0
    exit_code: int | None = None
    message: str = ""
    quick_failures: int = 0
    settled: bool = False  # it has held the job's state
    done: bool = False  # it ended after the job's last step
    nodes: tuple[str, ...] = ()
    suspected_since: float | None = None
    stale: str = ""  # the agent of the life before: what the lighthouse says of that one is not about this
    left_at: int = -1  # the newest step of the job when it left in peace before the last one
    counted: bool = False  # that it leaves, or has left, has nothing to say any more about how many are wanted
    avoid: tuple[str, ...] = ()  # nodes that are kept from it while it waits


@dataclass(slots=True)
class Memory:
    """What outlives a keeper. Without it the next one only knows the lives that the scheduler still shows."""

    lives: dict[int, Life] = field(default_factory=dict)  # by group
    replacements: list[float] = field(default_factory=list)
    node_failures: list[NodeFailure] = field(default_factory=list)
    desired: int = 0  # that was asked for last
    wish: tuple[int, int] = (0, 0)  # by an operator: the lighthouse's epoch, and which of them since that began
    fewer: int = 0  # groups that an operator has drained since
    below_min_since: float | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """What came of one look. ``outcome``: the job is over, or suspended. ``wakeup``: look again then at the latest."""

    outcome: Finish | Suspend | None
    wakeup: float | None
    status: JobStatus | None
    groups: tuple[ObservedGroup, ...] = ()


class Keeper:
    """``tick`` it whenever something may have changed, or ``run`` it."""

    def __init__(
        self,
        host: GroupHost,
        desk: Desk,
        note: Callable[[str, str, int], None],
        memory: Memory | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """``note`` is told (kind, sentence, group or -1)."""
        self._host, self._desk, self._note, self._clock = host, desk, note, clock or Clock()
        self.memory = memory if memory is not None else Memory()
        self._now = 0.0
        self._status: JobStatus | None = None
        self._deleted: dict[tuple[int, int], float] = {}
        self._leftovers: list[tuple[int, int]] = []  # lives that should not be there any more
        self._newest_step, self._progress_at = -1, 0.0
        self._looked = False  # the scheduler was asked before
        self._again = False  # something could not be done now
        self._unheard = False  # the lighthouse did not answer when it was asked last
        self._said: dict[int, str] = {}

    async def run(
        self, spec_of: Callable[[JobStatus | None], PlanSpec], looked: Callable[[Tick], None]
    ) -> Finish | Suspend:
        """Until the job is over, or suspended: then whatever runs is asked to end. ``spec_of`` says what is wanted, of
        a job that the lighthouse sees like this; ``looked`` is told of every tick. UsageError as for `tick`."""
        while True:
            tick = await self.tick(spec_of)
            looked(tick)
            if tick.outcome is not None:
                return tick.outcome
            until = tick.wakeup - self._now if tick.wakeup is not None else None
            await self._wait(until)

    async def tick(self, spec_of: Callable[[JobStatus | None], PlanSpec]) -> Tick:
        """Look once and do what is to be done. UsageError if the scheduler refuses a group for good."""
        self._now, self._again = max(self._now, self._clock()), False
        try:
            if self._unheard:  # nothing is decided without it, and schedulers are to be left in peace
                await self._desk.look()
            hosted = await self._host.list()
            self._status = await self._desk.look()
            self._unheard = False
        except (HostAway, Away) as error:
            self._unheard = self._unheard or isinstance(error, Away)
            self._say(-1, str(error), "away")
            return Tick(None, self._now + RETRY_SECONDS, self._status)
        self._said.pop(-1, None)
        if self._top_step() > self._newest_step:
            self._newest_step, self._progress_at = self._top_step(), self._now
        asked = spec_of(self._status)
        self._take(hosted, asked)
        spec = self._wanted(asked)
        observed = self._observed(spec)
        actions = planning.plan(spec, observed, self._now)
        outcome = next((action for action in actions if isinstance(action, (Finish, Suspend))), None)
        try:
            for group, incarnation in self._leftovers:
                await self._delete(group, incarnation)
            for action in actions:
                await self._do(action)
            await self._ease(spec)
        except (HostAway, Away) as error:
            self._again, outcome = True, None
            self._say(-1, str(error), "away")
        wakeup = planning.next_wakeup(spec, observed, self._now)
        if self._again:
            wakeup = min(wakeup or self._now + RETRY_SECONDS, self._now + RETRY_SECONDS)
        return Tick(outcome, wakeup, self._status, observed.groups)

    async def _wait(self, seconds: float | None) -> None:
        tasks = [asyncio.ensure_future(self._host.changed()), asyncio.ensure_future(self._desk.changed())]
        try:
            done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- what is seen ----------------------------------------------------------------------------------------

    def _wanted(self, spec: PlanSpec) -> PlanSpec:
        """Fewer by those whom an operator has drained since this many were asked for: they are not missed."""
        memory, lives, status = self.memory, self.memory.lives.values(), self._status
        # Between two looks a job may be asked for fewer groups, and for as many as before: nobody is drained by that.
        # A lighthouse that was started again has not been asked anything, which is no wish.
        wish = (status.epoch, status.scaled) if status is not None and status.scaled else memory.wish
        if spec.desired != memory.desired or wish != memory.wish:
            # A new wish counts as it stands, whoever leaves because of an older one.
            leaving = (GroupState.DRAINING, GroupState.DRAINED)
            for life in lives if memory.desired else ():
                life.counted = life.counted or life.state in leaving
            memory.desired, memory.wish, memory.fewer = spec.desired, wish, 0
        # As many as are missing now were drained; the others were too many, and are no reason to want fewer.
        gone = [life for life in lives if life.state is GroupState.DRAINED and not life.counted]
        for life in gone:
            life.counted = True
        memory.fewer += max(0, min(len(gone), spec.desired - memory.fewer - self._places()))
        return replace(spec, desired=max(1, spec.desired - memory.fewer))

    def _take(self, hosted: Sequence[Hosted], spec: PlanSpec) -> None:
        newest: dict[int, Hosted] = {}
        for each in sorted(hosted, key=lambda h: h.incarnation):
            newest[each.group] = each
        for group, seen in newest.items():
            life = self.memory.lives.get(group)
            if life is None or life.incarnation < seen.incarnation:
                failures = life.quick_failures if life is not None else 0
                born = seen.since if seen.since is not None and seen.state is not HostState.ENDED else self._now
                self.memory.lives[group] = Life(seen.incarnation, born, quick_failures=failures)
        if not self._looked:
            there = [h for h in newest.values() if h.state is not HostState.ENDED]
            if there:
                self._note("adopt", f"adopted: {named(Member(h.group, h.incarnation) for h in there)}", -1)
            self._looked = True
        for group, life in self.memory.lives.items():
            found = next((h for h in hosted if (h.group, h.incarnation) == (group, life.incarnation)), None)
            if life.state in _ALIVE:
                self._look_at(group, life, found, spec)
            elif life.state is GroupState.FINISHED and 0 <= life.left_at < self._top_step():
                life.state = GroupState.DRAINED  # it left alone: the others go on
        self._leftovers = []
        for each in hosted:
            life = self.memory.lives[each.group]
            old = each.incarnation < life.incarnation or life.state not in _ALIVE
            if old and each.state is not HostState.ENDED:
                self._leftovers.append((each.group, each.incarnation))  # given up, or a newer one is there

    def _look_at(self, group: int, life: Life, found: Hosted | None, spec: PlanSpec) -> None:
        view = self._view(group, life)
        life.settled = life.settled or (view is not None and view.quorum != NO_QUORUM)
        if found is not None:
            life.nodes = found.nodes or life.nodes
        if found is None or found.state is HostState.ENDED:
            self._ended(group, life, found, spec)
            return
        if found.state is HostState.PENDING:
            life.state = GroupState.PENDING
            if found.reason:
                self._say(group, f"group {group} waits: {found.reason}", "pending")
            return
        if life.state is GroupState.PENDING:
            life.born = found.since if found.since is not None else self._now
            where = f" on {', '.join(life.nodes)}" if life.nodes else ""
            self._note("start", f"group {group} (life {life.incarnation}) runs{where}", group)
        life.state = GroupState.DRAINING if view is not None and view.state == "draining" else GroupState.RUNNING
        if view is not None and self._out_of_reach(view):
            if life.suspected_since is None:
                life.suspected_since = self._now
                self._note("suspect", f"group {group} is out of the lighthouse's reach", group)
        else:
            life.suspected_since = None

    def _ended(self, group: int, life: Life, found: Hosted | None, spec: PlanSpec) -> None:
        life.ended = (found.since if found is not None else None) or self._now
        life.exit_code = found.exit_code if found is not None else None
        life.message = found.reason if found is not None else "the scheduler knows nothing of it any more"
        complete = self._status is not None and self._status.complete
        if life.exit_code == EXIT_OK and complete:
            life.state, life.done = GroupState.FINISHED, True
        elif life.exit_code == EXIT_LEFT:
            life.state = GroupState.DRAINED
        elif life.exit_code == EXIT_OK:
            life.state, life.left_at = GroupState.FINISHED, self._top_step()
        elif life.exit_code == EXIT_BAD_INPUT:
            life.state = GroupState.REFUSED
        else:
            lost = found is not None and found.lost
            self._dead(life, lost, spec, blame=lost or life.exit_code not in ASKED)
        # A controller's clock may be ahead by as much as munge lets it be: nothing waits for that.
        life.ended = min(life.ended, self._now)
        how = f"exit code {life.exit_code}" if life.exit_code is not None else "no exit code"
        text = f"group {group} (life {life.incarnation}) ended: {life.message or how}"
        self._note("exit" if life.exit_code == EXIT_OK else "lost", text, group)

    def _dead(self, life: Life, lost: bool, spec: PlanSpec, blame: bool) -> None:
        life.state = GroupState.DEAD
        life.quick_failures = planning.quick_failures(spec, life.quick_failures, life.ended - life.born, life.settled)
        if blame:
            self.memory.node_failures += [NodeFailure(node, life.ended, lost) for node in life.nodes]

    @property
    def _began(self) -> bool:
        """Whether any group has ever had a place."""
        return any(life.incarnation or life.state is not GroupState.PENDING for life in self.memory.lives.values())

    def _places(self) -> int:
        over = (GroupState.FINISHED, GroupState.DRAINED)
        return sum(life.state not in over for life in self.memory.lives.values())

    def _view(self, group: int, life: Life) -> GroupStatus | None:
        """What the lighthouse says of this very life."""
        views = self._status.groups if self._status is not None else ()
        view = next((v for v in views if v.member.group == group), None)
        return view if view is not None and view.agent != life.stale else None

    def _out_of_reach(self, view: GroupStatus) -> bool:
        """The lighthouse hears nothing of it, and the others go on without it, or cannot go on: it alone may not take
        it for dead. A group that only cannot reach the lighthouse trains on, and is left in peace."""
        quorum = self._status.quorum if self._status is not None else None
        if view.connected or view.state in ("finished", "drained") or quorum is None or self._status is None:
            return False
        slowest = max((group.step_seconds for group in self._status.groups), default=0.0)
        stalled = self._now > self._progress_at + STALL_BEATS * (HEARTBEAT_SECONDS + slowest)
        return view.member not in quorum.members or stalled

    def _top_step(self) -> int:
        return max((v.step for v in self._status.groups), default=0) if self._status is not None else 0

    def _observed(self, spec: PlanSpec) -> Observed:
        status, memory = self._status, self.memory
        complete = status is not None and status.complete
        groups = []
        for group, life in sorted(memory.lives.items()):
            view = self._view(group, life) if life.state in _ALIVE else None
            groups.append(
                ObservedGroup(
                    group,
                    life.incarnation,
                    life.state,
                    life.born if life.state in _ALIVE else life.ended,
                    life.exit_code,
                    life.message,
                    life.quick_failures,
                    settled=view is not None and view.state in ("active", "draining") and view.quorum != NO_QUORUM,
                    done=complete
                    and (life.state is GroupState.FINISHED or (view is not None and view.state == "finished")),
                    suspected_since=life.suspected_since,
                )
            )
        running = sum(g.state is GroupState.RUNNING for g in groups)
        if running >= min(spec.min_groups, spec.wanted):
            memory.below_min_since = None
        elif memory.below_min_since is None:
            memory.below_min_since = self._now
        longest = max(spec.quarantine_window, spec.quarantine_seconds, spec.lost_node_seconds)
        # What was remembered by a clock that was ahead was before now.
        replaced = (min(t, self._now) for t in memory.replacements)
        failed = (replace(f, at=min(f.at, self._now)) for f in memory.node_failures)
        memory.replacements = [t for t in replaced if t + spec.budget_window > self._now]
        memory.node_failures = [f for f in failed if f.at + 2 * longest > self._now]
        return Observed(
            tuple(groups),
            complete or self._top_step() > 0,
            tuple(memory.replacements),
            tuple(memory.node_failures),
            memory.below_min_since,
        )

    # --- what is done ----------------------------------------------------------------------------------------

    async def _do(self, action: planning.Action) -> None:
        match action:
            case planning.Start(group, incarnation, avoid):
                await self._start(group, incarnation, avoid)
            case planning.Kill(group, reason):
                await self._kill(group, reason)
            case planning.Drain(group):
                await self._drain(group)
            case Finish() | Suspend():
                await self.end_all()

    async def _start(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        before = self.memory.lives.get(group)
        views = self._status.groups if self._status is not None else ()
        view = next((v for v in views if v.member.group == group), None)
        if view is not None and view.state not in GONE:
            refused = await self._desk.evict(group)
            if refused is not None and view.connected:
                # The end of its stream is on its way: as long as it stands, a new life would be refused.
                self._again = True
                return
        try:
            await self._host.create(group, incarnation, avoid)
        except UsageError as error:
            if not self._began:  # nothing is lost, and somebody is there to read it
                await self.end_all()
                raise
            self._say(group, f"group {group} cannot be asked for now: {error}", "refused")
            self._again = True
            return
        life = Life(incarnation, self._now, stale=view.agent if view is not None else "", avoid=tuple(avoid))
        if before is not None:
            life.quick_failures = before.quick_failures
            self.memory.replacements.append(self._now)
        self.memory.lives[group] = life
        besides = f", not on {', '.join(avoid)}" if avoid else ""
        self._note("create", f"group {group} (life {incarnation}) is asked for{besides}", group)

    async def _ease(self, spec: PlanSpec) -> None:
        """Who waits may be waiting for the very node that was lost when it was asked for, and is back."""
        avoid = planning.avoided(spec, tuple(self.memory.node_failures), self._now)
        for group, life in self.memory.lives.items():
            left = tuple(node for node in life.avoid if node in avoid)
            if life.state is GroupState.PENDING and left != life.avoid:
                try:
                    await self._host.create(group, life.incarnation, left)
                except UsageError as error:
                    self._say(group, f"group {group} cannot be asked for now: {error}", "refused")
                    continue
                free = ", ".join(node for node in life.avoid if node not in left)
                self._note(
                    "ease", f"group {group} (life {life.incarnation}), which waits, may run on {free} again", group
                )
                life.avoid = left

    async def _kill(self, group: int, reason: str) -> None:
        life = self.memory.lives[group]
        view = self._view(group, life)
        complete = self._status is not None and self._status.complete
        refused = None
        if view is not None and view.state not in GONE and not complete:
            refused = await self._desk.evict(group)
        if refused is not None:
            self._say(group, f"group {group} is not given up: {refused}", "suspect")
            self._again = True
            return
        life.ended, life.exit_code, life.message = self._now, None, reason
        life.quick_failures = life.quick_failures if life.settled else life.quick_failures + 1
        leaves = life.state is GroupState.DRAINING
        life.state, life.suspected_since = GroupState.DRAINED if leaves else GroupState.DEAD, None
        if not complete:
            self.memory.node_failures += [NodeFailure(node, self._now, lost=True) for node in life.nodes]
        self._note("kill", f"group {group} (life {life.incarnation}) is given up: {reason}", group)
        await self._delete(group, life.incarnation)  # if that cannot be done now, it is what should not be there

    async def _drain(self, group: int) -> None:
        life = self.memory.lives[group]
        if life.state is GroupState.DEAD:
            life.state, life.counted = GroupState.DRAINED, True
            return
        view = self._view(group, life)
        if view is not None and view.state not in GONE:
            if (refused := await self._desk.drain(group)) is None:
                return
            if view.quorum != NO_QUORUM:
                self._say(group, f"group {group} does not leave yet: {refused}", "drain")
                self._again = True
                return
        await self._delete(group, life.incarnation)
        life.state, life.ended, life.counted = GroupState.DRAINED, self._now, True

    async def end_all(self) -> None:
        """Ask every life that is there to end."""
        for group, life in self.memory.lives.items():
            if life.state in _ALIVE:
                await self._delete(group, life.incarnation)

    async def end_these(self, hosted: Sequence[Hosted]) -> None:
        """The same for what the scheduler shows, which may have taken one in the moment when ``run`` was cancelled."""
        self._now = max(self._now, self._clock())
        for each in hosted:
            if each.state is not HostState.ENDED:
                await self._delete(each.group, each.incarnation)

    async def _delete(self, group: int, incarnation: int) -> None:
        if self._now >= self._deleted.get((group, incarnation), -DELETE_AGAIN_SECONDS) + DELETE_AGAIN_SECONDS:
            await self._host.delete(group, incarnation)
            self._deleted[group, incarnation] = self._now

    def _say(self, group: int, text: str, kind: str) -> None:
        """Once, until it is another sentence."""
        if self._said.get(group) != text:
            self._said[group] = text
            self._note(kind, text, group)
