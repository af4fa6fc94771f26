"""One run of a job under a list of failures, from event to event."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from planaria.sim.goodput.cluster import Failure, Layout
from planaria.sim.goodput.ledger import Ledger, Outcome
from planaria.sim.goodput.replacements import Replacements
from planaria.sim.goodput.shares import busiest, taken_over
from planaria.sim.goodput.strategies import Loses, Strategy


@dataclass(frozen=True, slots=True)
class Costs:
    """In seconds, the same for all strategies."""

    every: float  # of work between two checkpoints
    save: float = 5.0  # for which a checkpoint stops the job
    heal: float = 0.0  # to give one that comes back the state


def run(layout: Layout, strategy: Strategy, costs: Costs, failures: Iterable[Failure], horizon: float) -> Outcome:
    """``failures``: ascending in time, up to ``horizon`` seconds."""
    job = _Job(layout, strategy, costs)
    for failure in failures:
        job.until(failure.at)
        job.strike(failure)
    job.until(horizon)
    return Outcome(job.ledger, job.steps, job.discarded, job.hits, layout.share, strategy.keeps_batch)


@dataclass(slots=True)
class _Dead:
    """A group that waits to be started."""

    failures: int  # quick ones, in a row
    seconds: float  # from its start until it is back


@dataclass(slots=True)
class _Starting:
    dead: _Dead
    since: float


class _Job:
    def __init__(self, layout: Layout, strategy: Strategy, costs: Costs) -> None:
        self.ledger = Ledger()
        self.steps = 0.0
        self.discarded = 0
        self.hits = 0
        self._layout, self._strategy, self._costs = layout, strategy, costs
        self._now = 0.0
        self._healthy = layout.machines
        self._members = layout.groups
        self._starting: dict[int, _Starting] = {}
        self._dead: list[_Dead] = []
        self._replacements = Replacements(layout.groups)
        self._events: list[tuple[float, int]] = []  # (when, which start); a repair: -1
        self._starts = 0
        self._pending: list[tuple[str, float]] = []  # (part of the ledger, seconds) before work goes on
        self._cycle = 0.0  # seconds since the last checkpoint was complete
        self._saved = (0.0, 0.0)  # (kept, steps) at the last checkpoint
        self._phase = 0.0  # of the step in flight

    # --- time passes --------------------------------------------------------------------------------------------------

    def until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            at, which = heapq.heappop(self._events)
            self._pass(at)
            if which < 0:
                self._healthy += 1
                self._start_dead()
            elif which in self._starting:
                del self._starting[which]
                self._members += 1
                if self._strategy.heal:
                    self._pending.append(("healing", self._costs.heal))
        self._pass(end)

    def _pass(self, end: float) -> None:
        while self._now < end:
            left = end - self._now
            if not self._enough():
                self.ledger.waiting += left
            elif self._pending:
                part, seconds = self._pending[0]
                left = min(left, seconds)
                setattr(self.ledger, part, getattr(self.ledger, part) + left)
                self._pending[0] = (part, seconds - left)
                if seconds - left <= 0:
                    del self._pending[0]
            else:
                self._work(left)
            self._now = end if left == end - self._now else self._now + left

    def _enough(self) -> bool:
        if self._strategy.elastic:
            return self._members > 0
        return self._layout.capacity(self._healthy) == self._layout.groups

    def _work(self, seconds: float) -> None:
        every, save = self._costs.every, self._costs.save
        while seconds > 0:
            if self._cycle == 0.0 and seconds >= every + save:  # whole cycles at once
                cycles = math.floor(seconds / (every + save))
                self._train(every * cycles)
                self.ledger.saving += save * cycles
                self._saved = (self.ledger.kept, self.steps)
                seconds -= cycles * (every + save)
            elif self._cycle < every:
                part = min(seconds, every - self._cycle)
                self._train(part)
                self._cycle += part
                seconds -= part
            else:
                part = min(seconds, every + save - self._cycle)
                self.ledger.saving += part
                self._cycle += part
                seconds -= part
                if self._cycle >= every + save:
                    self._cycle = 0.0
                    self._saved = (self.ledger.kept, self.steps)

    def _train(self, seconds: float) -> None:
        here, speed = self._strength()
        work = seconds / self._strategy.overhead
        self.ledger.overhead += seconds - work
        self.ledger.kept += work * here * speed
        self.ledger.absent += work * (1 - here)
        self.ledger.uneven += work * here * (1 - speed)
        steps = seconds / self._step_seconds()
        self.steps += steps
        self._phase = (self._phase + steps) % 1.0

    def _strength(self) -> tuple[float, float]:
        """(share of the groups that are there, what they make of it)."""
        groups, there = self._layout.groups, self._members
        if not self._strategy.elastic or there == groups:
            return 1.0, 1.0
        if not self._strategy.keeps_batch:
            return there / groups, 1.0
        pace = self._layout.shards_per_group / busiest(self._layout.shards, there)
        return there / groups, pace * groups / there

    def _step_seconds(self) -> float:
        here, speed = self._strength()
        pace = here * speed if self._strategy.keeps_batch else 1.0
        return self._layout.step_seconds * self._strategy.overhead / pace

    # --- a failure ----------------------------------------------------------------------------------------------------

    def strike(self, failure: Failure) -> None:
        machine = int(failure.place * self._layout.machines)
        busy = self._layout.machines_of(self._members)
        starting = self._layout.machines_of(self._members + len(self._starting))
        there = machine < self._healthy
        if not there:
            return  # it is being repaired
        if failure.hard:
            self._healthy -= 1
            heapq.heappush(self._events, (failure.at + failure.repair, -1))
        lost = self._layout.groups_per_machine if failure.hard else 1
        if machine < busy:
            self.hits += 1
            self._lose(failure, min(lost, self._members))
        elif machine < starting:
            for which in list(self._starting)[:lost]:
                self._fail_start(self._starting.pop(which), failure)
        self._start_dead()

    def _lose(self, failure: Failure, lost: int) -> None:
        strategy, layout = self._strategy, self._layout
        noticed = strategy.detection(failure.sign, layout)
        if not strategy.elastic:
            if strategy.swap is not None and failure.luck < strategy.kept:
                self._discard_step()
                self._stand("stalled", noticed + strategy.swap)
            else:
                self._back_to_checkpoint(noticed)
            return
        if strategy.swap is not None and layout.capacity(self._healthy) >= self._members + len(self._starting):
            again = self._phase * self._step_seconds()  # its own shards of this step: its sums are gone
            self._stand("stalled", noticed + strategy.swap)
            self._pending += [("healing", self._costs.heal), ("redone", again)]
            return
        before = self._members
        self._members -= lost
        seconds = strategy.hard_start if failure.hard else strategy.soft_start
        self._dead += [_Dead(0, seconds) for _ in range(lost)]
        if self._members == 0:
            self._members = layout.capacity(self._healthy)
            self._dead = [_Dead(0, strategy.hard_start) for _ in range(layout.groups - self._members)]
            self._starting.clear()
            self._back_to_checkpoint(noticed)
        elif strategy.loses is Loses.STEP:
            self._members, there = before, self._members  # it was that many who made what is thrown away
            self._discard_step()
            self._members = there
            self._stand("stalled", noticed + strategy.stall)
        else:
            self._stand("stalled", noticed + strategy.stall)
            if strategy.keeps_batch:
                more = taken_over(layout.shards, before, lost)
                shard = layout.step_seconds * strategy.overhead / layout.shards_per_group
                self._pending.append(("redone", more * shard))

    def _stand(self, part: str, seconds: float) -> None:
        """A failure while all stand still begins that anew; work that has to be done again remains."""
        self._pending = [(part, seconds), *(each for each in self._pending if each[0] in ("redone", "restarting"))]

    def _discard_step(self) -> None:
        if self._pending:
            return  # none was in flight
        here, speed = self._strength()
        pace = here * speed
        lost = min(self._phase * self._step_seconds() / self._strategy.overhead * pace, self.ledger.kept)
        self._take_back(lost)
        self.steps -= min(self._phase, self.steps)
        self._phase = 0.0
        self.discarded += 1

    def _back_to_checkpoint(self, noticed: float) -> None:
        kept, steps = self._saved
        self._take_back(self.ledger.kept - kept)
        self.steps, self._phase, self._cycle = steps, 0.0, 0.0
        self._pending = [("stalled", noticed), ("restarting", self._strategy.restart)]

    def _take_back(self, work: float) -> None:
        self.ledger.kept -= work
        self.ledger.redone += work

    # --- groups come back ---------------------------------------------------------------------------------------------

    def _start_dead(self) -> None:
        if not self._strategy.elastic:
            return
        room = self._layout.capacity(self._healthy) - self._members - len(self._starting)
        while self._dead and room > 0:
            dead = self._dead.pop(0)
            due = self._replacements.start(self._now, dead.failures)
            self._starts += 1
            self._starting[self._starts] = _Starting(dead, self._now)
            heapq.heappush(self._events, (due + dead.seconds, self._starts))
            room -= 1

    def _fail_start(self, start: _Starting, failure: Failure) -> None:
        lived = max(0.0, failure.at - start.since)
        seconds = self._strategy.hard_start if failure.hard else self._strategy.soft_start
        self._dead.append(_Dead(self._replacements.died_starting(start.dead.failures, lived), seconds))
