"""Whether this lighthouse leads, and the jobs that it serves while it does.

A thin shell: ``core.leadership`` decides. Questions to the elector are put on a thread of their own, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from planaria.core.leadership import Acquire, Answer, Away, Effect, Lead, Leadership, Renew, StepDown
from planaria.core.roster import LineageRecord
from planaria.errors import PlanariaError
from planaria.lighthouse.elector import Deposed, Elector, Keeper, StoreAway
from planaria.lighthouse.jobs import Jobs

log = logging.getLogger("planaria.lighthouse")


def boot_clock() -> float:
    """Seconds. Never goes back, is never set, and goes on while the machine sleeps: a lease does too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class SeatStatus:
    leads: bool
    leader: str  # where agents reach whoever leads, as far as is known; empty: nobody, or it is not known
    epoch: int  # under which this one leads; 0: it stands by
    trouble: str = ""  # why the elector's store cannot be asked


def who_leads(status: SeatStatus) -> str:
    """In words, for those who came to one that stands by."""
    if status.trouble:
        return f"it cannot ask who leads ({status.trouble})"
    return f"the one at {status.leader} leads" if status.leader else "nobody is known to lead"


class Seat:
    """Of a lighthouse that is the only one: it always leads. ``jobs`` is None while another one leads."""

    def __init__(self, keeper: Keeper, address: str = "") -> None:
        self.address = address  # where agents reach this one
        self.jobs: Jobs | None = Jobs(keeper, self.may_act)

    def may_act(self) -> bool:
        """Whether an order may leave. Asked right before each."""
        return True

    def status(self) -> SeatStatus:
        return SeatStatus(True, self.address, self.jobs.keeper.epoch if self.jobs is not None else 0)

    def told(self, epoch: int) -> None:
        """An agent has seen ``epoch``."""
        if self.jobs is not None and epoch > self.jobs.keeper.epoch:
            log.error(
                "an agent has seen epoch %d, and this lighthouse has %d: if its store was lost or is an old one, start "
                "it again with --epoch-floor %d",
                epoch,
                self.jobs.keeper.epoch,
                epoch,
            )

    async def close(self) -> None:
        """Serve no more."""
        if self.jobs is not None:
            self.jobs.close("the lighthouse stops")


class Candidate(Seat):
    """Of one of several lighthouses. ``run`` is to be awaited as a task; ``elector`` is closed with it."""

    def __init__(self, elector: Elector, seconds: float, clock: Callable[[], float] = boot_clock) -> None:
        self.address = ""
        self.jobs = None
        self._elector = elector
        self._clock = clock
        self._machine = Leadership(seconds)
        self._news = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "planaria-elector")

    def may_act(self) -> bool:
        return self._machine.leads(self._clock())

    def status(self) -> SeatStatus:
        if self.jobs is not None:
            return SeatStatus(True, self.address, self.jobs.keeper.epoch, self._machine.trouble)
        return SeatStatus(False, self._machine.leader, 0, self._machine.trouble)

    def told(self, epoch: int) -> None:
        self._do(self._machine.told(epoch, self._clock()))
        self._news.set()

    def failed(self, why: str) -> None:
        """What had to be kept could not be."""
        self._do(self._machine.failed(why, self._clock()))
        self._news.set()

    async def run(self) -> None:
        while True:
            self._news.clear()
            self._do(self._machine.tick(self._clock()))
            pause = self._machine.next_wakeup() - self._clock()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(pause, 0.0))

    async def close(self) -> None:
        await super().close()
        leads, self.jobs = self._machine.epoch > 0, None
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        # After whatever it is still being asked, for there is one thread.
        await asyncio.get_running_loop().run_in_executor(self._thread, self._leave, leads)
        self._thread.shutdown()

    def _leave(self, leads: bool) -> None:
        with suppress(PlanariaError):  # then its lease lapses
            if leads:
                self._elector.release()
        self._elector.close()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Lead(epoch):
                    log.info("epoch %d: this lighthouse leads", epoch)
                    self.jobs = Jobs(_Kept(self._elector, self.failed), self.may_act)
                case StepDown(why):
                    log.warning("this lighthouse stands by from now on: %s", why)
                    jobs, self.jobs = self.jobs, None
                    if jobs is not None:
                        jobs.close(f"this lighthouse leads no more: {why}")
                case Acquire() | Renew():
                    self._asking = asyncio.get_running_loop().create_task(self._ask(effect))

    async def _ask(self, question: Acquire | Renew) -> None:
        answer: Answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._put, question)
        before = (self._machine.leader, self._machine.trouble)
        self._do(self._machine.answered(answer, self._clock()))
        if self._machine.trouble and self._machine.trouble != before[1]:
            log.warning("%s", self._machine.trouble)
        if self._machine.leader != before[0] and self.jobs is None:
            log.info("the lighthouse at %s leads; this one stands by", self._machine.leader)
        self._news.set()

    def _put(self, question: Acquire | Renew) -> Answer:
        try:
            if isinstance(question, Renew):
                return self._elector.renew()
            return self._elector.acquire(self.address, question.floor, question.over)
        except Exception as error:
            if not isinstance(error, PlanariaError):
                log.exception("the elector failed")
            return Away(str(error))


class _Kept:
    """What a leader keeps in the elector's store. A leader that cannot keep something leads no more: it may have been
    kept all the same, and only who reads it anew knows."""

    def __init__(self, elector: Elector, on_failure: Callable[[str], None]) -> None:
        self._elector = elector
        self._on_failure = on_failure

    @property
    def epoch(self) -> int:
        return self._elector.epoch

    def append(self, record: LineageRecord) -> None:
        self._or_stand_by(lambda: self._elector.append(record))

    def last(self, job: str) -> LineageRecord | None:
        found: list[LineageRecord | None] = []
        self._or_stand_by(lambda: found.append(self._elector.last(job)))
        return found[0]

    def bump_epoch(self) -> int:
        found: list[int] = []
        self._or_stand_by(lambda: found.append(self._elector.bump_epoch()))
        return found[0]

    def _or_stand_by(self, deed: Callable[[], None]) -> None:
        try:
            deed()
        except (
            StoreAway,
            Deposed,
        ) as why:  # of other errors nothing was written for certain: that job alone is given up
            self._on_failure(str(why))
            raise
