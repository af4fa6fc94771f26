"""The jobs of a lighthouse: each a state machine of ``core``, its keeper, its agents' streams and its
clock."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable

from planaria.core.messages import Adopted, Event, Heartbeat, Hello, Order, Report
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, JobStatus, LineageRecord, Persist, Record, Send, condition, status_of
from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse import story
from planaria.lighthouse.elector import Keeper
from planaria.lighthouse.history import History
from planaria.lighthouse.outbox import Outbox
from planaria.lighthouse.recovery import RecoveryWatch
from planaria.logs import facts_of
from planaria.wire.checks import clip

log = logging.getLogger("planaria.lighthouse")

# Orders waiting for one agent. A quorum is one order per group of the agent, so this holds dozens of quorums
# for the largest node; an agent that is that far behind is stuck.
ORDERS_WAITING = 4096
EVENTS_KEPT = 512  # per job, for status and for those who begin to watch
EVENTS_WAITING = 2 * EVENTS_KEPT  # for one watcher: what is kept, told at once, and as much again
# Jobs without agents; beyond this they are forgotten, the oldest first. The past of a long one takes some 2 MB.
JOBS_KEPT = 128

# Seconds. Half of the figure for a recovery (0.15 s) at the lower end, the slowest that torchft showed at the
# upper.
RECOVERY_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 150.0)


class Job:
    """One job. Every method runs to its end in the event loop's thread, so that effects keep their order."""

    def __init__(self, name: str, keeper: Keeper, last: LineageRecord | None, may_act: Callable[[], bool]) -> None:
        """``may_act``: whether this lighthouse leads, asked before anything is decided or leaves."""
        self.name = name
        self.may_act = may_act
        self.closed = ""  # why it was given up; empty while it is in use
        self.machine = Lighthouse(name, keeper.epoch, last)
        self.streams: dict[str, Outbox[Order]] = {}
        self.watchers: set[Outbox[Event]] = set()
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.events_count = 0  # so far
        self.events_by_kind: Counter[str] = Counter()
        self.recoveries: list[int] = [0] * (len(RECOVERY_BUCKETS) + 1)
        self.recovery_seconds = 0.0
        self.history = History(time.time(), time.monotonic())
        # The most steps that anybody has committed (in this run: it may go back), and when it came to be known.
        self._newest = -1, time.monotonic()
        self._keeper = keeper
        self._recovery = RecoveryWatch()
        self._agents_seen: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    # --- agents ---

    def attend(self, hello: Hello, stream: Outbox[Order]) -> None:
        """A new stream of an agent. An older one of the same agent is a connection that died unnoticed: it
        ends."""
        former = self.streams.pop(hello.agent, None)
        if former is not None:
            former.close("replaced by a newer stream of the same agent")
            self._run(lambda now: self.machine.agent_lost(hello.agent, now))
        self.streams[hello.agent] = stream
        self._agents_seen.add(hello.agent)
        self.report(hello.agent, hello)
        if self.closed:
            stream.close(self.closed)

    def report(self, agent: str, report: Report) -> None:
        # Without effects a heartbeat only moves deadlines away, and a tick that comes too early does no harm.
        # So the clock need not be set anew for the bulk of all reports.
        self._run(lambda now: self.machine.handle(agent, report, now), keep_timer=isinstance(report, Heartbeat))
        self._show(report)

    def leave(self, agent: str, stream: Outbox[Order]) -> None:
        """The stream ended. Says nothing to the machine if a newer one has replaced it."""
        if self.streams.get(agent) is stream:
            del self.streams[agent]
            self._run(lambda now: self.machine.agent_lost(agent, now))
            if not self.streams:  # nothing may be heard for long: that time is not what was seen last
                self._account(time.monotonic())

    def is_over_for(self, agent: str) -> bool:
        """Whether an unknown agent that says hello can only mean a new run under the same name."""
        if self.streams or agent in self._agents_seen:
            return False
        return bool(self.machine.stopped) or self.machine.complete

    # --- operators ---

    def operate(self, verb: Callable[[float], list[Effect]]) -> None:
        """Do an operator's verb. UsageError, with a sentence, if it cannot be done."""
        refusals: list[ValueError] = []

        def step(now: float) -> list[Effect]:
            try:
                return verb(now)
            except ValueError as error:
                refusals.append(error)
                return []

        self._run(step)
        if refusals:
            raise UsageError(str(refusals[0]))
        if self.closed or not self.may_act():
            raise PlanariaError(self.closed or "this lighthouse leads no more")

    @property
    def seconds_since_commit(self) -> float:
        """Since the newest step was heard of, or the job; 0 once all steps are committed."""
        return 0.0 if self.machine.complete else time.monotonic() - self._newest[1]

    def status(self) -> JobStatus:
        return dataclasses.replace(self.machine.snapshot(), events=tuple(self.events))

    def watch(self) -> Outbox[Event]:
        """Events from now on, after those that are kept."""
        watcher: Outbox[Event] = Outbox(EVENTS_WAITING)
        for event in self.events:
            watcher.offer(event)
        self.watchers.add(watcher)
        return watcher

    # --- the machine ---

    def _run(self, step: Callable[[float], list[Effect]], keep_timer: bool = False) -> None:
        """One transition of the machine. A job that breaks is given up and built anew from what its agents
        say, so that neither a bug nor a full disk reaches the other jobs or ends training."""
        if self.closed or not self.may_act():
            return
        now = time.monotonic()
        try:
            effects = step(now)
            if (top := self.machine.seen.top_step) != self._newest[0]:  # less: the job went back to a checkpoint
                if top > self._newest[0]:
                    self.history.committed(top, time.time(), now)
                self._newest = top, now
            self._perform(effects, now)
            if self.history.due(now):
                self._account(now)
            if effects or not keep_timer or self._timer is None:
                self._set_timer(now)
        except Exception as error:
            known = isinstance(error, (PlanariaError, sqlite3.Error))
            log.error("job %s: given up, its agents connect again: %s", self.name, error, exc_info=not known)
            self.close(f"the lighthouse gave job {self.name} up and takes it anew: {error}")

    def _perform(self, effects: list[Effect], now: float) -> None:
        """Strictly in order: nobody may hear of a quorum before it is stored."""
        for effect in effects:
            match effect:
                case Persist(record):
                    self._keeper.append(record)
                case Send(agent, order):
                    if (stream := self.streams.get(agent)) is not None:
                        stream.offer(order)
                case Record(event):
                    self._record(event)
            self._recovery.effect(effect, now)

    def _record(self, event: Event) -> None:
        # people read wall clocks; decisions are over by now
        event = dataclasses.replace(event, at=time.time(), text=clip(event.text))
        self.events.append(event)
        self.events_count += 1
        self.history.event(event, max(self.machine.seen.top_step, 0))
        self.events_by_kind[event.kind] += 1
        facts = {"job": self.name, "text": event.text, **facts_of(event)}
        log.info("job %s: %s: %s", self.name, event.kind, event.text, extra={"facts": facts})
        for watcher in [*self.watchers]:
            if not watcher.offer(event):
                self.watchers.discard(watcher)

    def _show(self, report: Report) -> None:
        """What is for people alone. If that breaks, no agent is to notice."""
        if self.closed or not self.may_act():
            return
        try:
            if isinstance(report, Heartbeat):
                self.history.heard(report.pulses)
            elif isinstance(report, Adopted):
                self._measure(report)
        except Exception:
            log.exception("job %s: a report does not come to be seen", self.name)

    def _measure(self, report: Adopted) -> None:
        at, now, step = time.time(), time.monotonic(), max(self.machine.seen.top_step, 0)
        self.history.adopted(report.member, at, step)
        took = self._recovery.adopted(report, now)
        if took is not None:
            self.recoveries[sum(took > bound for bound in RECOVERY_BUCKETS)] += 1
            self.recovery_seconds += took
            members = len(self.machine.current.members) if self.machine.current is not None else 0
            policy = self.machine.spec.policy if self.machine.spec is not None else None
            text = story.recovery(self.events, took, members, policy)
            self.history.recovered(took, members, now, at, step, text)

    def _account(self, now: float) -> None:
        seen, spec = self.machine.seen, self.machine.spec
        # No snapshot, which sorts: this is done every second whether anybody looks or not.
        conditions = Counter(condition(status_of(view, seen.connected(view))) for view in seen.groups.values())
        conditions["missing"] = max((spec.groups if spec is not None else 0) - len(seen.groups), 0)
        self.history.account({} if self.machine.complete else conditions, now)

    def _set_timer(self, now: float) -> None:
        """Have the machine ticked when it wants to be."""
        if self._timer is not None:
            self._timer.cancel()
        wakeup = self.machine.next_wakeup()
        loop = asyncio.get_running_loop()
        self._timer = None if wakeup is None else loop.call_later(max(0.0, wakeup - now), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._run(self.machine.tick)

    def close(self, verdict: str) -> None:
        """End every stream. The job is not used again."""
        self.closed = self.closed or verdict
        if self._timer is not None:
            self._timer.cancel()
        for stream in self.streams.values():
            stream.close(verdict)
        for watcher in self.watchers:
            watcher.close(verdict)
        self.streams, self.watchers = {}, set()


class Jobs:
    """All jobs of a lighthouse, by name."""

    def __init__(self, keeper: Keeper, may_act: Callable[[], bool] = lambda: True) -> None:
        self.keeper = keeper
        self._may_act = may_act
        self._jobs: dict[str, Job] = {}
        self._epochs_used: set[str] = set()  # jobs that have had a machine under the present epoch

    def all(self) -> list[Job]:
        return [self._jobs[name] for name in sorted(self._jobs)]

    def attend(self, hello: Hello, stream: Outbox[Order]) -> Job:
        """The job to which the agent belongs, made if need be. The caller calls ``leave`` when the stream
        ends."""
        name = hello.spec.job
        job = self._jobs.get(name)
        if job is not None and job.is_over_for(hello.agent):
            log.info("job %s is over; agent %s begins a new run of that name", name, hello.agent)
            job.close("a new run of the job has begun")
            job = self._make(name, last=None)
        elif job is None or job.closed:
            job = self._make(name, self.keeper.last(name))
        job.attend(hello, stream)
        return job

    def find(self, name: str) -> Job:
        """UsageError if there is no such job; an empty name means the only one."""
        running = self.all()
        known = ", ".join(job.name for job in running) or "none yet"
        if name:
            job = self._jobs.get(name)
            if job is None:
                raise UsageError(f"the lighthouse knows no job {name} (jobs: {known})")
            return job
        if len(running) != 1:
            raise UsageError(f"say which job with --job (jobs: {known})")
        return running[0]

    def close(self, verdict: str) -> None:
        for job in self.all():
            job.close(verdict)

    def _make(self, name: str, last: LineageRecord | None) -> Job:
        self._forget()
        if name in self._epochs_used:
            # Quorum numbers begin again with each machine, so each needs an epoch of its own.
            self.keeper.bump_epoch()
            self._epochs_used.clear()
        self._epochs_used.add(name)
        job = self._jobs[name] = Job(name, self.keeper, last, self._may_act)
        return job

    def _forget(self) -> None:
        """Keep the number of jobs bounded; those whose agents are all gone can be rebuilt or are over."""
        idle = [name for name, job in self._jobs.items() if not job.streams]
        for name in idle[: max(0, len(idle) - JOBS_KEPT + 1)]:
            self._jobs.pop(name).close("forgotten: its agents are gone and other jobs need the place")
