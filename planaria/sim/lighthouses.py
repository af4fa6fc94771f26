"""Several lighthouses of which one leads: the real ``Leadership``, and a store that they reach or do not reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.core.leadership import (
    Acquire,
    Answer,
    Away,
    Effect,
    Granted,
    Held,
    Lead,
    Lost,
    Renew,
    Renewed,
    StepDown,
)
from planaria.core.roster import LineageRecord
from planaria.sim.coordinator import Coordinator, Store
from planaria.sim.kernel import Process

if TYPE_CHECKING:
    from planaria.sim.world import World

LEASE = 2.0  # virtual seconds; the shortest that there is
PATIENCE = LEASE / 4
STORE = "store"  # its place in the network
STORE_DELAY = (0.0005, 0.02)  # one way
SLOW_DELAY = (0.1, 1.2)  # a disk that hesitates, an election of its own: longer than anybody waits
SLOW_SHARE = 0.02


class Electoral(Store):
    """``ends_leases``: the store itself ends a lease, as etcd does; else the candidates see that it has lapsed."""

    def __init__(self, ends_leases: bool) -> None:
        super().__init__()
        self.holder = ""
        self.where = ""  # place of the holder
        self._ends_leases = ends_leases
        self._beat = 0
        self._until = 0.0

    def acquire(self, name: str, place: str, question: Acquire, now: float) -> Answer:
        held = self.holder and not (self._ends_leases and now >= self._until)
        if held and self.holder != name:
            if self._ends_leases:
                return Held(self.where, "", float("inf"))
            if self._stamp() != question.over:
                return Held(self.where, self._stamp(), LEASE)
        self.holder, self.where, self._until, self._beat = name, place, now + LEASE, self._beat + 1
        self.epoch = max(self.epoch, question.floor) + 1
        return Granted(self.epoch)

    def renew(self, name: str, now: float) -> Answer:
        if self.holder != name or (self._ends_leases and now >= self._until):
            return Lost("another one leads")
        self._until, self._beat = now + LEASE, self._beat + 1
        return Renewed()

    def _stamp(self) -> str:
        return f"{self.holder} {self._beat}"


class Candidate:
    """One life of one lighthouse's process."""

    def __init__(self, world: World, store: Electoral, place: str, life: int) -> None:
        self.world, self.store, self.place = world, store, place
        self.name = f"{place}, life {life}"
        self.kernel = world.kernel
        self.process = Process(world.kernel, place)
        self.process.on_death.append(self._down)
        self.machine = world.leadership(LEASE)
        self.coordinator: Coordinator | None = None
        self.stood_still = 0.0  # seconds for which its clock did not run: a frozen machine
        self._rate = self.kernel.between(0.999, 1.001)  # clocks do not run alike
        self._began = self.kernel.between(0.0, 1e6)
        self._question = 0
        self._wakeup: float | None = None
        self._run()

    def clock(self) -> float:
        return self._began + (self.kernel.now - self.stood_still) * self._rate

    def may_act(self) -> bool:
        return self.machine.leads(self.clock())

    def told(self, epoch: int) -> None:
        self._do(self.machine.told(epoch, self.clock()))
        self._run()

    def keep(self, record: LineageRecord) -> bool:
        """As a leader does it: whatever is not kept for certain, it leads no more."""
        reached = self.world.links.reach(self.place, STORE)
        kept = (reached or self.kernel.chance(0.5)) and self.store.holder == self.name and self.store.append(record)
        if kept and reached:
            return True
        self._do(self.machine.failed("what had to be kept could not be", self.clock()))
        self._run()
        return False

    # --- the machine -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._do(self.machine.tick(self.clock()))
        due = self.machine.next_wakeup()
        if due != self._wakeup and due < float("inf"):
            self._wakeup = due
            self.process.after(max((due - self.clock()) / self._rate, 0.0), lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if self._wakeup == due:
            self._wakeup = None
            self._run()

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Lead(epoch):
                    last = self.store.records[-1] if self.store.records else None
                    self.coordinator = self.world.coordinator = Coordinator(
                        self.world, self.process, self.place, epoch, last, self
                    )
                    self.world.emit("lighthouse up", -1, "{} leads, epoch {}", self.place, epoch)
                case StepDown(why):
                    self.world.emit("lighthouse down", -1, "{} stands by: {}", self.place, why)
                    coordinator, self.coordinator = self.coordinator, None
                    if coordinator is not None:
                        coordinator.close()
                case Acquire() | Renew():
                    self._ask(effect)

    def _ask(self, question: Acquire | Renew) -> None:
        self._question += 1
        number = self._question
        self.process.after(PATIENCE, lambda: self._hear(number, Away("no answer")))
        if self._reaches():
            self.kernel.after(self._delay(), lambda: self._arrive(number, question))

    def _arrive(self, number: int, question: Acquire | Renew) -> None:
        """At the store, whatever has become of who asked."""
        if isinstance(question, Acquire):
            answer = self.store.acquire(self.name, self.place, question, self.kernel.now)
        else:
            answer = self.store.renew(self.name, self.kernel.now)
        if self._reaches():
            self.process.after(self._delay(), lambda: self._hear(number, answer))

    def _hear(self, number: int, answer: Answer) -> None:
        if number == self._question:
            self._question += 1  # nothing else counts as its answer
            self._do(self.machine.answered(answer, self.clock()))
            self._run()

    def _reaches(self) -> bool:
        return self.world.links.reach(self.place, STORE)

    def _delay(self) -> float:
        return self.kernel.between(*(SLOW_DELAY if self.kernel.chance(SLOW_SHARE) else STORE_DELAY))

    def _down(self) -> None:
        self.world.emit("lighthouse down", -1, "{} is down", self.place)
        self.coordinator = None
        self.world.lasting(self.world.coordinator_down, lambda: self.world.start_candidate(self.place))
        self.world.coordinator_down = self.world.restart_time
