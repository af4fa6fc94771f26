"""The lighthouse's shell: the real ``Lighthouse``, streams from agents, a timer, and a store that outlives crashes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.core.messages import Hello, Publish, Report
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, LineageRecord, Persist, Record, Send, lineage_after
from planaria.sim.invariants import Violation
from planaria.sim.kernel import Process
from planaria.sim.network import End, Stream

if TYPE_CHECKING:
    from planaria.sim.lighthouses import Candidate
    from planaria.sim.world import World

LIGHTHOUSE = "lighthouse"  # its place in the network


class Store:
    """What survives. Writing is refused to everybody but the holder of the newest epoch (fencing)."""

    def __init__(self) -> None:
        self.epoch = 0
        self.records: list[LineageRecord] = []

    def take_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def append(self, record: LineageRecord) -> bool:
        if record.epoch != self.epoch:
            return False
        before = self.records[-1].lineage if self.records else ""
        if record.lineage != lineage_after(before, record.id, record.members):
            raise Violation(f"the lineage of quorum {record.id} does not follow from the one before it")
        self.records.append(record)
        return True


class Coordinator:
    """A lighthouse that leads, for as long as it does. ``candidate``: it is one of several."""

    def __init__(
        self,
        world: World,
        process: Process,
        place: str,
        epoch: int,
        last: LineageRecord | None,
        candidate: Candidate | None = None,
    ) -> None:
        self.world = world
        self.kernel = world.kernel
        self.store = world.store
        self.process = process
        self.place = place
        self.candidate = candidate
        self.closed = False
        self.core: Lighthouse = world.lighthouse("job", epoch, last)
        self.crash_after: int | None = None  # effects, for the fault "dies between two effects"
        self._streams: dict[str, tuple[Stream, End]] = {}
        self._wakeup: float | None = None

    def clock(self) -> float:
        return self.kernel.now + self.world.clock_offset

    def accept(self, agent: str, stream: Stream, end: End) -> None:
        """A new stream. It counts from its Hello on; then an older one of the same agent ends."""
        end.on_message = lambda message: self._hear(agent, stream, end, message)
        end.on_lost = lambda: self._lost(end)

    def _hear(self, agent: str, stream: Stream, end: End, message: object) -> None:
        report: Report = message  # type: ignore[assignment]
        if isinstance(report, Hello):
            if self.candidate is not None:
                self.candidate.told(report.epoch)
            if not self._may_act():
                stream.close(end)
                return
            old = self._streams.get(agent)
            self._streams[agent] = (stream, end)
            if old is not None:
                old[0].close(old[1])
                self._do(self.core.agent_lost(agent, self.clock()))
        if agent in self._streams and self._streams[agent][1] is end:
            self.report(agent, report)

    def report(self, agent: str, report: Report) -> None:
        if self._may_act():
            self._do(self.core.handle(agent, report, self.clock()))

    def _lost(self, end: End) -> None:
        agent = next((a for a, (_, e) in self._streams.items() if e is end), None)
        if agent is not None:
            del self._streams[agent]
            if self._may_act():
                self._do(self.core.agent_lost(agent, self.clock()))

    def operate(self, verb: str, *values: int | str) -> None:
        """An operator's command. One that cannot be carried out changes nothing."""
        if not self._may_act():
            return
        try:
            effects = getattr(self.core, verb)(*values, self.clock())
        except ValueError as why:
            self.world.emit("refused", -1, "{} {}: {}", verb, values, why)
            return
        self._do(effects)

    def close(self) -> None:
        """Lead no more: every stream ends."""
        self.closed = True
        streams, self._streams = self._streams, {}
        for stream, end in streams.values():
            stream.close(end)

    def _may_act(self) -> bool:
        if self.closed or (self.candidate is not None and not self.candidate.may_act()):
            return False
        self.world.check_leads(self)
        return True

    def _keep(self, record: LineageRecord) -> bool:
        if self.candidate is not None:
            return self.candidate.keep(record)
        if not self.store.append(record):
            self.world.emit("fenced", -1, "the lighthouse of epoch {} is deposed", record.epoch)
            self.process.die()
            return False
        return True

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.world.emit("crash", -1, "the lighthouse dies between two effects")
                    self.process.die()
            if not self.process.alive:
                return
            match effect:
                case Persist(record):
                    if not self._keep(record):
                        return
                    if record.run == record.id:
                        self.world.begins(record.run)
                case Send(agent, order):
                    if isinstance(order, Publish):
                        self.world.check_publish(order.quorum)
                    if agent in self._streams:
                        stream, end = self._streams[agent]
                        stream.send(end, order)
                case Record(event):
                    self.world.emit("event", event.group, "lighthouse {}: {}", self.core.epoch, event.text)
        self._arm()

    def _arm(self) -> None:
        due = self.core.next_wakeup()
        if due is None or due == self._wakeup:
            return
        self._wakeup = due
        self.process.after(max(due - self.clock(), 0.0), lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self._wakeup == due and self._may_act():
            self._wakeup = None
            self._do(self.core.tick(self.clock()))
