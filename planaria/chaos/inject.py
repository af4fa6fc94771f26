"""Doing what a schedule says to a run that is under way, and noting exactly what was done.

The injector owns what it has begun: every process that it stopped goes on, and every network that it cut is
connected again, at the latest when it is closed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planaria.chaos.schedule import Fault, Kind, Moment, Victim
from planaria.chaos.watch import Life, Process, Watch, children_of, command_of, open_child
from planaria.core.bitflips import DONE, ORDER
from planaria.core.messages import Member, Phase
from planaria.files import write_whole

NOBODY = Member(-1, 0)
# An exchange of a tiny model lasts milliseconds; looking more often than this would take the processor from
# it.
LOOK_SECONDS = 0.0005
# Nothing shorter than a step may be awaited for so long: the moment is then taken as it is, and said to be.
MOMENT_SECONDS = 10.0
# A quorum forms in tens of milliseconds after a loss; if that was missed, it is over.
FORMING_SECONDS = 2.0


@dataclass(slots=True)
class Injected:
    """What was done. Times are CLOCK_MONOTONIC in nanoseconds, as those of commits."""

    fault: Fault
    member: Member  # NOBODY for the lighthouse
    at_ns: int
    step: int  # steps committed by the job at that moment
    phase: Phase | None  # of the victim when it was struck
    until_ns: int = 0  # when it went on (stop, partition); 0: not yet, or never
    rank: int = 0  # of the member, that was struck

    @property
    def struck_as_planned(self) -> bool:
        """Whether the victim was in the phase that the fault asked for."""
        match self.fault.moment:
            case Moment.EXCHANGING:
                return self.phase is Phase.EXCHANGING
            case Moment.FORMING:
                return self.phase is Phase.FORMING
            case _:
                return True


class Network(Protocol):
    """Who can cut a group off. See ``planaria.chaos.netns``."""

    def cut(self, group: int) -> None: ...

    def mend(self, group: int) -> None: ...


@dataclass(slots=True)
class _Undo:
    at_ns: int
    done: Injected
    victim: Process


class Injector:
    """Works through ``faults`` in order. ``lighthouse`` gives the pid of the lighthouse and that of its
    parent, or None if it is not there (being started again)."""

    def __init__(
        self,
        watch: Watch,
        faults: Sequence[Fault],
        lighthouse: Callable[[], tuple[int, int] | None],
        network: Network | None = None,
    ) -> None:
        self.done: list[Injected] = []
        self._watch = watch
        self._pending = list(faults)
        self._lighthouse = lighthouse
        self._network = network
        self._undo: list[_Undo] = []
        self._companions: list[Life] = []  # who held the state beside the newest victim
        self._flipped: tuple[Life, Path, Injected] | None = None  # the newest order to flip a bit
        self._began_ns = 0  # when every group had committed: the schedule's zero

    @property
    def over(self) -> bool:
        """Everything was done, and undone where it ends by itself."""
        return not self._pending and not self._undo and self._flipped is None

    @property
    def left(self) -> int:
        return len(self._pending)

    def begin(self) -> None:
        """The job is at full strength: the clock of the schedule starts."""
        self._began_ns = time.monotonic_ns()

    def poll(self) -> None:
        """Do what is due and possible. Call it every few milliseconds; ``watch`` has been polled before."""
        now = time.monotonic_ns()
        for undo in [undo for undo in self._undo if undo.at_ns <= now]:
            self._end(undo)
        if self._flipped is not None and self._is_over(*self._flipped):
            self._flipped = None
        if self._flipped is not None or not (self._began_ns and self._pending and self._due(self._pending[0], now)):
            return
        if self._try(self._pending[0]):
            self._pending.pop(0)

    def close(self) -> None:
        """End every stop and every cut."""
        for undo in list(self._undo):
            self._end(undo)

    # --- what is due, and to whom ---------------------------------------------------------------------------

    def _due(self, fault: Fault, now: int) -> bool:
        return now - self._began_ns >= fault.after * 1e9 and self._watch.step >= fault.step

    def _try(self, fault: Fault) -> bool:
        if fault.kind is Kind.LIGHTHOUSE:
            return self._strike_lighthouse(fault)
        settled = self._candidates(fault)
        if len(settled) < self._needed(fault):
            return False  # the last one who holds the state is never touched: there would be nothing to recover
        victim = choose(fault, settled)
        self._companions = [life for life in settled if life is not victim]
        match fault.moment:
            case Moment.EXCHANGING:
                return self._strike_at(fault, victim, Phase.EXCHANGING, MOMENT_SECONDS)
            case Moment.FORMING:
                return self._strike_at(fault, victim, Phase.FORMING, FORMING_SECONDS)
            case _:
                return self._strike(fault, victim)

    def _candidates(self, fault: Fault) -> list[Life]:
        settled = [life for life in self._watch.settled() if not self._is_struck(life.member)]
        recent = self.done and time.monotonic_ns() - self.done[-1].at_ns < FORMING_SECONDS * 1e9
        if fault.moment is Moment.FORMING and recent and len(settled) < len(self._companions):
            # While a quorum forms its members do not all work under the newest one, which is what makes
            # them count. They did when the fault before this one struck.
            return [life for life in self._companions if life.alive]
        return settled

    def _is_struck(self, member: Member) -> bool:
        """Whether a blow is still at work on it. A signal takes a moment: until then its victim looks
        well."""
        killed = any(done.member == member and done.fault.kind is Kind.KILL for done in self.done)
        return killed or any(undo.done.member == member for undo in self._undo)

    def _needed(self, fault: Fault) -> int:
        """How many must hold the state so that at least one of them certainly goes on."""
        if fault.kind in (Kind.PARTITION, Kind.BITFLIP):
            return 3  # those left must be a majority of the quorum
        follower = self._pending[1].moment is Moment.FORMING if len(self._pending) > 1 else False
        return 3 if follower else 2

    # --- doing it -------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault, life: Life, stopped_ns: int = 0) -> bool:
        at, rank = stopped_ns or time.monotonic_ns(), rank_of(fault, life)
        victim = life.processes[rank]
        done = Injected(fault, life.member, at, self._watch.step, victim.page.read().phase, rank=rank)
        try:
            match fault.kind:
                case Kind.KILL:
                    victim.signal(signal.SIGKILL)
                case Kind.STOP:
                    victim.signal(signal.SIGSTOP)
                case Kind.BITFLIP:
                    self._flip(done, life)
                case _:
                    if self._network is None:
                        raise RuntimeError("partitions need a network that can be cut")
                    self._network.cut(life.member.group)
        except ProcessLookupError:
            return False  # it died by itself in between: another victim, another time
        if fault.duration > 0:
            self._undo.append(_Undo(at + int(fault.duration * 1e9), done, victim))
        self.done.append(done)
        return True

    def _flip(self, done: Injected, life: Life) -> None:
        """Order it; the rank does it itself, in its next pass through the model."""
        directory = life.directory / f"rank{done.rank}" if done.rank else life.directory
        write_whole(directory / ORDER, f"{done.fault.target} {done.fault.number}", durable=False)
        self._flipped = life, directory / DONE, done

    def _is_over(self, life: Life, record: Path, done: Injected) -> bool:
        """Whether a flip was carried out, and everybody has had the time to see it: what an optimizer keeps shows in
        the parameters one step later. Two things at once could leave nobody who is more."""
        lines = record.read_text().splitlines() if record.exists() else []
        for facts in map(json.loads, lines):
            if facts["number"] == done.fault.number:
                done.at_ns = facts["at_ns"]
                return self._watch.step > int(facts["step"]) + 2 or not life.alive
        return not life.alive

    def _strike_at(self, fault: Fault, life: Life, phase: Phase, patience: float) -> bool:
        """Strike ``life`` in ``phase``. It is stopped for the blink in which its page is read: what is
        seen then is true at the moment of the blow, not some time before."""
        end = time.monotonic() + patience
        victim = life.processes[rank_of(fault, life)]
        while life.alive and time.monotonic() < end:
            if victim.page.read().phase is not phase:
                time.sleep(LOOK_SECONDS)
                continue
            at = time.monotonic_ns()
            with suppress(ProcessLookupError):
                victim.signal(signal.SIGSTOP)
                _await_stop(victim)
                if victim.page.read().phase is phase:
                    return self._strike(fault, life, at)
                victim.signal(signal.SIGCONT)
        return life.alive and self._strike(fault, life)

    def _strike_lighthouse(self, fault: Fault) -> bool:
        found = self._lighthouse()
        if found is None:
            return False
        descriptor = open_child(*found)
        if descriptor < 0:
            return False
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        self.done.append(Injected(fault, NOBODY, time.monotonic_ns(), self._watch.step, None))
        return True

    def _end(self, undo: _Undo) -> None:
        self._undo.remove(undo)
        if undo.done.fault.kind is Kind.PARTITION and self._network is not None:
            self._network.mend(undo.done.member.group)
        elif undo.victim.alive:
            with suppress(ProcessLookupError):
                undo.victim.signal(signal.SIGCONT)
        undo.done.until_ns = time.monotonic_ns()


def rank_of(fault: Fault, life: Life) -> int:
    """The one that is struck of the ranks that the group has."""
    ranks = sorted(life.processes)
    return ranks[fault.rank % len(ranks)]


def _await_stop(victim: Process) -> None:
    """A process that runs on another processor stops there when the kernel interrupts it: microseconds
    later."""
    end = time.monotonic() + MOMENT_SECONDS  # ends sooner in any case, unless it hangs inside the kernel
    while victim.alive and not victim.stopped and time.monotonic() < end:
        time.sleep(0)


def choose(fault: Fault, settled: Sequence[Life]) -> Life:
    """The victim among ``settled`` (by group, not empty)."""
    if fault.victim is Victim.HOST:
        return settled[0]
    if fault.victim is Victim.OTHER:
        return settled[min(1, len(settled) - 1)]
    groups = max(life.member.group for life in settled) + 1
    return min(settled, key=lambda life: (life.member.group - fault.group) % max(groups, fault.group + 1))


def lighthouse_of(agent: int) -> tuple[int, int] | None:
    """(pid, parent) of the lighthouse that the agent ``agent`` started; None if there is none now."""
    for pid in children_of(agent):
        words = command_of(pid)
        if words[1:2] == ["-m"] and any("lighthouse" in word for word in words[2:4]):
            return pid, agent
    return None
