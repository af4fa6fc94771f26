"""Links: who can reach whom, and streams that keep order, hold back during a partition and can break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from planaria.sim.kernel import Kernel, Process

# One way, in seconds: a rack or a region, and now and then a busy switch or a garbage collection.
DELAY = (0.0002, 0.005)
SLOW_DELAY = (0.05, 0.4)
SLOW_SHARE = 0.03


class Links:
    """Pairs of places that cannot reach each other. Places are names ("lighthouse", "node 0")."""

    def __init__(self) -> None:
        self._cuts: dict[frozenset[str], int] = {}  # counted: two partitions may overlap in time
        self.on_restore: list[Callable[[], None]] = []

    def reach(self, a: str, b: str) -> bool:
        return a == b or frozenset((a, b)) not in self._cuts

    def cut(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1

    def restore(self, a: str, b: str) -> None:
        pair = frozenset((a, b))
        self._cuts[pair] -= 1
        if not self._cuts[pair]:
            del self._cuts[pair]
            for action in list(self.on_restore):
                action()


class End:
    """One side of a stream: where it is, what hears its messages and that it is over."""

    def __init__(self, process: Process, place: str) -> None:
        self.process = process
        self.place = place
        self.on_message: Callable[[object], None] = lambda message: None
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = False
        self.last_arrival = 0.0
        self.under_way: deque[Callable[[], None]] = deque()  # to it, the oldest first


class Stream:
    """Two ordered channels, as one HTTP/2 stream gives them. Order holds within a direction and nowhere else."""

    def __init__(self, kernel: Kernel, links: Links, client: End, server: End) -> None:
        self.kernel = kernel
        self.links = links
        self.ends = (client, server)
        self.broken = False
        self._held: list[End] = []  # whom something would reach but for a partition
        links.on_restore.append(self._release)
        for near, far in ((client, server), (server, client)):
            near.process.on_death.append(lambda far=far: self._hang_up(far))  # type: ignore[misc]

    def send(self, near: End, message: object) -> None:
        far = self.ends[1] if near is self.ends[0] else self.ends[0]
        if not near.lost and not self.broken:
            self._carry(far, lambda: None if far.lost else far.on_message(message))

    def close(self, near: End) -> None:
        """One side gives the stream up; what it sent before still arrives."""
        if not near.lost:
            near.lost = True
            self._hang_up(self.ends[1] if near is self.ends[0] else self.ends[0])

    def snap(self) -> None:
        """The connection is reset: what is under way is lost, and both sides learn of it, each in its own time."""
        if self.broken:
            return
        self.broken = True
        self._forget()
        for end in self.ends:
            end.process.after(self.kernel.between(0.0, 0.02), lambda end=end: self._lose(end))  # type: ignore[misc]

    def _hang_up(self, far: End) -> None:
        if not self.broken:
            self._carry(far, lambda: self._lose(far))

    def _lose(self, end: End) -> None:
        self._forget()
        if not end.lost:
            end.lost = True
            end.on_lost()

    def _forget(self) -> None:
        if self._release in self.links.on_restore:
            self.links.on_restore.remove(self._release)

    def _carry(self, far: End, action: Callable[[], None]) -> None:
        far.under_way.append(action)
        self._travel(far)

    def _travel(self, far: End) -> None:
        """The oldest that is under way to ``far``, when this arrives."""
        if not self.links.reach(self.ends[0].place, self.ends[1].place):
            self._held.append(far)  # sent again by the transport once the partition is over
            return
        delay = self.kernel.between(*(SLOW_DELAY if self.kernel.chance(SLOW_SHARE) else DELAY))
        far.last_arrival = max(far.last_arrival + 1e-6, self.kernel.now + delay)
        self.kernel.after(far.last_arrival - self.kernel.now, lambda: self._arrive(far))

    def _arrive(self, far: End) -> None:
        if self.broken:
            return
        if self._held or not self.links.reach(self.ends[0].place, self.ends[1].place):
            self._held.append(far)
            return
        far.process.post(far.under_way.popleft())

    def _release(self) -> None:
        if self.links.reach(self.ends[0].place, self.ends[1].place):
            held, self._held = self._held, []
            for far in held:
                self._travel(far)
