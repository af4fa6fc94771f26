"""The seeded scheduler, the virtual clock, and processes that can be stopped, continued and killed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Action = Callable[[], None]


class Kernel:
    """A heap of things to do. Equal seeds give equal runs: there is no other source of time or chance."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0  # seconds
        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def after(self, delay: float, action: Action) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, action))

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Runs until ``done()``, the time or the end of events. Returns whether it ended by ``done``."""
        heap = self._heap
        while not done():
            if not heap or heap[0][0] > until:
                return False
            self.now, _, action = heapq.heappop(heap)
            action()
        return True


class Process:
    """Whatever happens in a process goes through ``post``: a stopped one does it when it is continued, a dead one
    never. A restarted process is a new object, so that nothing of the old life reaches it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.alive = True
        self.paused = False
        self.on_death: list[Action] = []
        self._backlog: list[Action] = []

    def post(self, action: Action) -> None:
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(action)
        else:
            action()

    def after(self, delay: float, action: Action) -> None:
        self.kernel.after(delay, lambda: self.post(action))

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for position, action in enumerate(backlog):
            if not self.alive:
                return
            if self.paused:
                self._backlog = backlog[position:] + self._backlog
                return
            action()

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        for action in self.on_death:
            action()
