"""An agent's stream to the lighthouse that leads: finds it, keeps it, obeys no older one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.core.messages import Heartbeat, Hello, JobSpec, Report, Synced, Welcome
from planaria.core.told import Told
from planaria.sim.coordinator import LIGHTHOUSE, Coordinator
from planaria.sim.kernel import Process
from planaria.sim.network import End, Stream

if TYPE_CHECKING:
    from planaria.sim.world import World

HEARTBEAT = 1.0  # seconds
RECONNECT_TIME = (0.02, 0.3)
SILENCE = 3.0  # of the lighthouse's side of a stream, as keep-alive pings see it


class Uplink:
    """``_order`` gets every order that counts; ``_beats`` is asked once a second."""

    def __init__(self, world: World, node: str) -> None:
        self.world = world
        self.kernel = world.kernel
        self.node = node
        self.process = Process(world.kernel, f"agent of {node}")
        self.told = Told()
        self.stopped = ""
        self.closed = False  # an operator has drained this node
        self.epoch = 0  # the highest seen
        self._stream: tuple[Stream, End] | None = None
        self._server: Process | None = None  # the other end of the stream
        self._place = LIGHTHOUSE  # where it is
        self._heard_at = 0.0
        self._turn = 0  # of several lighthouses, which is asked

    def _order(self, message: object) -> None:
        raise NotImplementedError

    def _beats(self) -> Heartbeat:
        raise NotImplementedError

    def _hosted(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _connect(self) -> None:
        if self.stopped or self._stream is not None:
            return
        coordinator = self._find()
        if coordinator is None or not coordinator.process.alive:
            self.process.after(self.kernel.between(*RECONNECT_TIME), self._connect)
            return
        mine, theirs = End(self.process, self.node), End(coordinator.process, coordinator.place)
        stream = Stream(self.kernel, self.world.links, mine, theirs)
        mine.on_message = lambda message: self._hear(mine, message)
        mine.on_lost = lambda: self._lost(mine)
        coordinator.accept(self.node, stream, theirs)
        self._stream, self._server, self._place = (stream, mine), coordinator.process, coordinator.place
        self._heard_at = self.kernel.now
        config = self.world.config
        closed = ("",) if self.closed else ()
        spec = JobSpec("job", config.groups, 1, config.policy, spare_wait=config.spare_wait)
        self._send(Hello(self.node, self.node, spec, closed=closed, hosted=self._hosted(), epoch=self.epoch))
        for report in self.told.again():
            self._send(report)
        self._send(Synced())

    def _find(self) -> Coordinator | None:
        """One that leads, as far as it knows itself, and can be reached."""
        if not self.world.candidates:
            return self.world.coordinator if self._reach(LIGHTHOUSE) else None
        places = list(self.world.candidates)
        place = places[self._turn % len(places)]
        self._turn += 1
        candidate = self.world.candidates[place]
        if not (candidate.process.alive and self._reach(place)):
            return None
        if candidate.coordinator is None and (leads := candidate.machine.leader):
            self._turn = places.index(leads)
        return candidate.coordinator

    def _hear(self, end: End, message: object) -> None:
        if self._stream is None or self._stream[1] is not end:
            return
        if isinstance(message, Welcome):
            if message.epoch < self.epoch:
                self._hang_up()  # it must not count on this agent, nor this agent on it
                return
            self.epoch = message.epoch
        self._order(message)

    def _reach(self, place: str) -> bool:
        return self.world.links.reach(self.node, place)

    def _lost(self, end: End) -> None:
        if self._stream is not None and self._stream[1] is end:
            self._stream = None
            self.process.after(self.kernel.between(*RECONNECT_TIME), self._connect)

    def _hang_up(self) -> None:
        assert self._stream is not None
        stream, end = self._stream
        stream.close(end)
        self._stream = None
        self.process.after(self.kernel.between(*RECONNECT_TIME), self._connect)

    def snap(self) -> None:
        """The connection breaks."""
        if self._stream is not None:
            self._stream[0].snap()

    def _send(self, report: Report) -> None:
        if self._stream is not None:
            stream, end = self._stream
            stream.send(end, report)

    def _beat(self) -> None:
        """Once a second: a heartbeat, and a look whether the lighthouse still answers pings."""
        if self._reach(self._place) and self._server is not None and not self._server.paused:
            self._heard_at = self.kernel.now
        elif self._stream is not None and self.kernel.now > self._heard_at + SILENCE:
            self._hang_up()
        self._send(self._beats())
        if not self.stopped:
            self.process.after(HEARTBEAT, self._beat)
