"""The agent: keeps this node's groups alive and passes the words between them and the lighthouse.

One event loop and no threads of its own. It has no part in a step; what it does when a member dies is the
beginning of every recovery, so the death is told before anything else is looked at.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from planaria.agent.borrowing import Borrowing, Lender
from planaria.agent.closing import Closing
from planaria.agent.copies import CopiesWatch
from planaria.agent.ends import Ends
from planaria.agent.events import EventLog
from planaria.agent.health import Health, HealthWatch
from planaria.agent.hosting import Hosting
from planaria.agent.leaving import Leaving
from planaria.agent.link import Link
from planaria.agent.lives import Failure, Life, Lives
from planaria.agent.moves import Moves
from planaria.agent.orders import Orders
from planaria.agent.ranks import RankHub
from planaria.agent.recovery import RecoveryTimes
from planaria.agent.refill import goes_back, hung
from planaria.agent.standbys import Standbys
from planaria.agent.suspicion import judge, note_where_they_stand
from planaria.core import plan as planning
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_LEFT, EXIT_OK
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import (
    NO_QUORUM,
    STANDBYS,
    Adopted,
    Corrupted,
    Event,
    Finished,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Phase,
    Ready,
    Report,
    Stop,
    Trouble,
)
from planaria.core.plan import GroupState, Observed, ObservedGroup, PlanSpec
from planaria.core.told import Told
from planaria.engines.base import Broken, Change, Dying, Ended, Engine, Felt, Nodes, Progress, Started, Warm
from planaria.engines.launch import directory_of

# Forty looks in the shortest limit for silence (2 s), and a stopped process is seen within two of them.
POLL_SECONDS = 0.05
# What still runs when the job is over is told to end; Python ends at once, and only scripts that handle SIGTERM use
# this. As long as a container runtime's shortest usual grace, halved. Their ends are the news that end this wait.
_END_SECONDS = 5.0
# A debugger or profiler that stops a process for a moment lets it go on within this.
_LEAST_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What this agent has to look after. ``plan.desired`` is the number of groups here, ``spec.groups`` in all."""

    spec: JobSpec
    plan: PlanSpec
    directory: Path
    first_group: int = 0
    host: str = field(default_factory=socket.gethostname)
    ranks: int = 1  # of every group
    lender: Lender | None = None  # what can be asked for other nodes
    copies: bool = False  # ranks keep copies of each other's state
    name: str = ""  # by which the lighthouse knew this agent before its death, if it had a life before
    following: Mapping[int, int] = field(default_factory=dict)  # and the next incarnations of its groups
    health: HealthWatch | None = None  # None: nobody watches it
    placed: bool = False  # an engine keeps the groups, one agent each: a signal is for these alone, and so is a scale

    @property
    def is_last(self) -> bool:
        """Whether it hosts the highest groups, so that groups beyond the first number are its."""
        return not self.placed and self.first_group + self.plan.desired >= self.spec.groups


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    reason: str  # a sentence for people
    failures: tuple[Failure, ...]
    replacements: int
    step: int


class Agent:
    """``run`` it once, ``close`` it in any case. ``lives``, ``orders`` and ``events`` are also for views."""

    def __init__(self, assignment: Assignment, make_engine: Callable[[Path], Engine], events: EventLog) -> None:
        """``make_engine`` is given the path of the socket to which ranks connect."""
        self.assignment = assignment
        self.events = events
        self.lives = Lives()
        self.told = Told()
        self.failures: list[Failure] = []
        self.committed = False
        self.replacements: list[float] = []
        self.hub = RankHub(
            self._admit,
            self._on_report,
            lambda reason: events.add("refused", reason),
            self.lives.ranks_here,
            lambda member, order: self.engine.relay(member, order),
            lambda member: self.engine.look(member),
            lambda present: self.standbys.present(present.member, present.fingerprint),
        )
        self.engine = make_engine(self.hub.path)
        self.orders = Orders(self)
        self.ends = Ends(self)
        self.health = Health(self, assignment.health) if assignment.health is not None else None
        self.standbys = Standbys(self)
        self.moves = Moves(self)
        self.borrowing = Borrowing(self, assignment.lender)
        self.closing = Closing(self)
        self.leaving = Leaving(self)
        self.hosting = Hosting(self)
        self.copies = CopiesWatch(self)
        self.link = Link(self._hello, self.told.again, self.orders.obey, self._on_note, self._on_refused)
        self.name = assignment.name or f"{assignment.host}-{uuid.uuid4().hex[:8]}"
        self.recoveries = RecoveryTimes()
        self._stopping = 0  # the signal that asked for an orderly end
        self._outcome: tuple[int, str] | None = None
        self._news = asyncio.Event()
        self._beat_at = 0.0
        self._started_any = False
        self._mismatch = ""  # what the lighthouse said of states that differ at the end
        self._relayed: set[tuple[float, str]] = set()  # the lighthouse's events in our record, by time and text

    # --- life ------------------------------------------------------------------------------------------------

    async def run(self, lighthouse: str) -> Outcome:
        """Until the job is over here; ``lighthouse`` is its host:port. No rank is left then."""
        await self.hub.start()
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self.link.run(lighthouse)), loop.create_task(self._relay_events())]
        if self.health is not None:
            tasks.append(loop.create_task(self.health.run()))
        self.engine.watch(self._on_change)
        try:
            while self._outcome is None:
                self._tick()
                await self._pause()
            await self._end_groups()
            self._take_events(await self.link.leave(self.assignment.spec.job))
            code, reason = self._outcome
            if code == EXIT_OK and self._mismatch:
                # The weights are not those of one run, whichever of them is taken: no script must take it for success.
                code, reason = EXIT_FAILED, f"{reason}, but {self._mismatch}"
            self.events.add("end", reason, data={"exit_code": code})
        finally:
            tasks += [*self.ends.close(), *self.leaving.close()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()
            await self.borrowing.close()
        step = max((life.step for life in self.lives.groups.values()), default=0)
        return Outcome(code, reason, tuple(self.failures), len(self.replacements), step)

    async def close(self) -> None:
        """End every rank, the engine and the socket. Safe to call twice."""
        await self.engine.close()
        await self.hub.close()

    @property
    def stopping(self) -> bool:
        """Whether an orderly end was asked for."""
        return bool(self._stopping)

    @property
    def ending(self) -> bool:
        """Whether nothing is replaced any more."""
        return self.stopping or self._outcome is not None

    def wake(self) -> None:
        """Something happened that may call for action."""
        self._news.set()

    def beat_soon(self) -> None:
        """The lighthouse is to see what is new here."""
        self._beat_at = 0.0

    def interrupt(self, signum: int) -> None:
        """First: all ranks stop after the same commit. Second: everything ends now."""
        name = signal.Signals(signum).name
        if self._stopping or self.leaving.begun:
            self.events.add("stop", f"{name} again: everything is killed")
            self.finish(128 + signum, f"killed by a second {name}")
            for life in self.lives.alive():
                self._delete(life, signal.SIGKILL)
            return
        if self.assignment.placed:
            self.events.add("stop", f"{name}: the groups here leave after the next commit; the others go on")
            self.leaving.begin(signum)
            return
        self.events.add("stop", f"{name}: the groups stop after the next commit; once more kills them")
        self.stop_in_order(signum)

    def stop_in_order(self, signum: int) -> None:
        if self._stopping or self._outcome is not None:
            return
        self._stopping = signum
        for life in self.lives.alive():
            self._ask_to_stop(life)
        self._news.set()

    def finish(self, exit_code: int, reason: str) -> None:
        """The job is over here: the first outcome counts."""
        if self._outcome is None:
            self._outcome = (exit_code, reason)
        self._news.set()

    async def _pause(self) -> None:
        # Pages and process states bring no news by themselves: without any it is time to look at them.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), POLL_SECONDS)
        self._news.clear()

    async def _end_groups(self) -> None:
        self.standbys.end("the job is over here")
        until = time.monotonic() + _END_SECONDS
        for life in self.lives.alive():
            self._delete(life, signal.SIGTERM)
            # One that was stopped could not hear it.
            self._delete(life, signal.SIGCONT)
        while self.engine.list() and time.monotonic() < until:
            await self._pause()

    async def _relay_events(self) -> None:
        """Put what the lighthouse records into the run's own record."""
        while True:
            await self.link.up.wait()
            async for event in self.link.events(self.assignment.spec.job):
                self._take_events([event])
            await asyncio.sleep(POLL_SECONDS)  # a stream that ends at once must not be asked for in a busy loop

    def _take_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if (event.at, event.text) not in self._relayed:
                self._relayed.add((event.at, event.text))
                self.events.take(event)
                if event.kind == "mismatch":
                    self._mismatch = event.text

    # --- news ------------------------------------------------------------------------------------------------

    def _on_change(self, change: Change) -> None:
        match change:
            case Dying():
                self.ends.foresee(change)
            case Started() if change.member.group == STANDBYS:
                self.standbys.started(change)
            case Ended() if change.member.group == STANDBYS:
                self.standbys.ended(change)
            case Ended():
                self.ends.take(change)
            case Started():
                self._started_any = True
                self.started(change)
            case Progress():
                if (life := self.lives.of(change.member)) is not None:
                    life.ranks[change.rank].told = change.sample
            case Warm():
                self.standbys.present(Member(STANDBYS, change.standby), change.fingerprint)
            case Nodes():
                self.beat_soon()  # an operator may want to speak of it
            case Felt():
                if self.health is not None:
                    self.health.take(change.readings)
            case Broken():
                self.finish(EXIT_FAILED if self._started_any else EXIT_BAD_INPUT, change.reason)

    def started(self, change: Started) -> None:
        """A process is a rank from now on."""
        self.beat_soon()  # an operator may want to speak of its GPU
        who = str(change.member)
        if (life := self.lives.of(change.member)) is not None:
            life.ranks[change.rank].pid = change.pid
            who += f", rank {change.rank}," if len(life.ranks) > 1 else ""
        text = f"{who} runs as pid {change.pid}"
        facts = {"incarnation": change.member.incarnation, "rank": change.rank, "pid": change.pid}
        self.events.add("start", text, change.member.group, facts)

    def _admit(self, member: Member) -> bool:
        if self.standbys.knows(member):
            return True
        life = self.lives.of(member)
        return life is not None and life.alive and life.first_bad is None

    def _on_report(self, report: Report) -> None:
        if isinstance(report, Ready) and (life := self.lives.of(report.member)) is not None:
            report = replace(report, looked=max(life.run, report.looked))
            if self.hosting.holds(report.member):
                life.ready = True
                self.hosting.ready(report)
                return
        if isinstance(report, Trouble):
            # Whoever broke the exchange may be here, and dying: then that is the news, and it comes first.
            for one in self.lives.alive():
                self.engine.look(one.member)
        self.link.tell(report)
        self.told.record(report)
        match report:
            case Ready():
                if (life := self.lives.of(report.member)) is not None:
                    # Outside of any quorum, for the first time or again: its state does not count.
                    self.moves.put_off(life)
                    life.ready, life.adopted, life.settled = True, False, False
                    if self._stopping:
                        self._ask_to_stop(life)
            case Corrupted() if self.health is not None:
                self.health.damaged(report.member, report.rank)
            case Adopted():
                if (life := self.lives.of(report.member)) is not None:
                    life.adopted = True
                self.committed = self.committed or report.step > 0
                self.recoveries.adopted(report)
            case Finished():
                if (life := self.lives.of(report.member)) is not None:
                    life.done = True

    def _on_note(self, kind: str, text: str) -> None:
        self.events.add(kind, text)

    def _on_refused(self, reason: str) -> None:
        """The lighthouse does not take this agent at all."""
        if not self.link.epoch:
            self.finish(EXIT_BAD_INPUT, f"the lighthouse at {self.link.address} refuses this agent: {reason}")

    def _hello(self) -> Hello:
        spec = replace(self.assignment.spec, groups=self.orders.total)
        closed = tuple(sorted(self.closing.closed))
        devices, hosted = self.engine.devices(), self.hosting.joined()
        return Hello(self.name, self.assignment.host, spec, not self.lives.groups, devices, closed, hosted)

    # --- looking and acting ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        for life in self.lives.alive():
            if life.pid and life.first_bad is None:
                judge(self, life, life.look(now), now)
                self.committed = self.committed or life.step > 0
                if life.state is GroupState.DRAINING and life.phase is Phase.PARKED and not life.being_killed:
                    life.being_killed = "it was drained"  # it waits for a quorum that will not come
                    self._delete(life, signal.SIGTERM)
        for life in self.lives.newly_left():
            text = f"group {life.member.group} left at step {life.step} of its own accord (exit code 0 before the last"
            ended = {"incarnation": life.member.incarnation, "step": life.step}
            self.events.add("left", f"{text} step); the others go on", life.member.group, ended)
            self.orders.let_go(life)
        for dead, seconds, step in self.recoveries.closed(self._commits):
            text = f"the others went on {seconds:.3f} s after {dead} was lost"
            facts = {"seconds": round(seconds, 6), "group": dead.group, "step": step}
            self.events.add("recovered", text, dead.group, facts)
        if now >= self._beat_at:
            self._beat_at = now + HEARTBEAT_SECONDS
            placed = {place: gpu for gpu, place in self.engine.placed().items()}
            spoken_of = (x for x in self.lives.alive() if not (x.fell or self.hosting.holds(x.member)))
            pulses, nodes = tuple(life.pulse(placed) for life in spoken_of), tuple(self.engine.nodes().items())
            self.link.tell(Heartbeat(pulses, self.standbys.warm_for(0), nodes))
        if self._outcome is not None:
            return
        if self._stopping:
            self._conclude_stop()
        else:
            self._act(now)
            self.moves.tick()
            self.borrowing.tick(now)
            self.copies.tick()
            self.standbys.tick(now)

    def _commits(self, member: Member) -> list[tuple[int, int]]:
        life = self.lives.of(member)
        return life.commits() if life is not None else []

    def _act(self, now: float) -> None:
        if not self.orders.welcomed:
            return  # nobody knows which lives the groups had under an agent before this one
        desired = self.orders.desired_here()
        if desired < 1:
            if not self.lives.alive() and not self.closing.node:
                drained = "all groups of this agent were drained"
                why = drained if self.lives.groups else "the job wants no groups of this agent"
                self.finish(EXIT_LEFT if self.assignment.placed else EXIT_OK, why)
            return
        if self.closing.node and not (self.lives.alive() or self.lives.complete):
            return  # what left comes back when it may
        spec = replace(self.assignment.plan, desired=desired, suspect_patience=self._patience())
        for action in planning.plan(spec, self._observed(), now):
            match action:
                case planning.Start(group) if not self.closing.may_start(group):
                    pass
                case planning.Start(group, incarnation):
                    before = self.lives.groups.get(group)
                    if before is not None and not before.makes_way:
                        self.replacements.append(now)
                    self.start(Member(group, incarnation if before else self._first_life(group)), now)
                case planning.Kill():
                    life = self.lives.groups[action.group]
                    if not life.being_killed and life.first_bad is None:
                        self._kill(life, action.reason)
                case planning.Drain():
                    self.orders.ask_drain(action.group)
                case planning.Finish():
                    trained = self.committed or self.lives.trained
                    empty = action.exit_code == 0 and not trained
                    self.finish(action.exit_code, "the script ended without taking a step" if empty else action.reason)

    def _kill(self, life: Life, reason: str) -> None:
        """All of it; or, if it is one rank that hangs and the others can go on without it, that one."""
        life.hung = hung(self, life)
        life.being_killed = reason + (f" ({life.suspicion})" if life.suspicion else "")
        who = f"{life.member}, rank {life.hung.rank}," if life.hung is not None else str(life.member)
        note_where_they_stand(self, life)
        self.events.add("kill", f"{who} is killed: {life.being_killed}", life.member.group)
        if life.hung is not None:
            self.engine.delete(life.member.group, life.member.incarnation, signal.SIGKILL, life.hung.rank)
        else:
            self._delete(life, signal.SIGKILL)

    def _observed(self) -> Observed:
        # Groups below the first one belong to other agents: for the plan their numbers are taken.
        below = [group for group in range(self.assignment.first_group) if group not in self.lives.groups]
        others = [ObservedGroup(group, 0, GroupState.DRAINED) for group in below]
        ours = [replace(x.observed(), outlives=goes_back(self, x)) for x in self.lives.groups.values()]
        return Observed((*others, *ours), self.committed, tuple(self.replacements))

    def _patience(self) -> float:
        """What a replacement costs here, as last seen: killing a suspect is worth it when waiting has cost as much."""
        seen = [life.settle_seconds for life in self.lives.groups.values() if life.settle_seconds > 0]
        return max(_LEAST_PATIENCE, min(seen)) if seen else self.assignment.plan.suspect_patience

    def _first_life(self, group: int) -> int:
        return max(self.orders.first_life(group), self.assignment.following.get(group, 0))

    def start(self, member: Member, now: float) -> None:
        life = self.begin(member, now)
        self.engine.create(member.group, member.incarnation, life.founder)

    def begin(self, member: Member, now: float) -> Life:
        """From now on it is this agent's, and may run."""
        assignment = self.assignment
        directories = [directory_of(assignment.directory, member, rank) for rank in range(assignment.ranks)]
        life = self.lives.begin(member, directories, now, self.engine.node_of)
        life.founder, life.run = not self.others_hold_the_state(), self.orders.run
        return life

    def others_hold_the_state(self, than: Life | None = None) -> bool:
        """As far as is known here. If it is wrong, a checkpoint is read for nothing, or the lighthouse will say so."""
        quorum = self.orders.quorum
        elsewhere = any(member.group not in self.lives.groups for member in quorum.members) if quorum else False
        here = [life for life in self.lives.alive() if life is not than]
        return elsewhere or any(life.adopted and not (life.fell or life.makes_way) for life in here)

    def _delete(self, life: Life, signum: int) -> None:
        life.asked_to_end = life.asked_to_end or signum == signal.SIGTERM
        self.engine.delete(life.member.group, life.member.incarnation, signum)

    # --- an orderly end --------------------------------------------------------------------------------------

    def _ask_to_stop(self, life: Life) -> None:
        life.speaker.read()  # the newest look may be older than its first step
        # One that is in no quorum, or not even connected, has nothing to finish; nor has one whose living ranks still
        # wait for a new one, and show the quorum in which they were before.
        waits = life.first_bad is not None  # for a node that was asked for
        if waits or life.quorum == NO_QUORUM or not life.ready or not self.hub.send(life.member, Stop("")):
            self._delete(life, signal.SIGTERM)
            # One that was stopped could not hear it, and others may wait for it (policy spare).
            self._delete(life, signal.SIGCONT)

    def _conclude_stop(self) -> None:
        if self.lives.alive():
            return
        if any(life.done for life in self.lives.groups.values()):
            self.finish(0, "all steps are committed")
            return
        step = max((life.step for life in self.lives.groups.values()), default=0)
        name = signal.Signals(self._stopping).name
        self.finish(128 + self._stopping, f"stopped by {name} after {step} committed steps")
