"""The data plane: communicators of quorums, and collectives that may end well at some members and badly at others.

Modelled after what gloo and NCCL do. Forming needs every member there and blocks until a timeout if one dies in it.
A collective starts to end once all have entered it, and then ends for each member on its own: whoever dies or lets
go in between leaves some with a result and some with an error, which is the case that the protocol exists for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from planaria.core.messages import Member, Quorum, QuorumId
from planaria.sim.invariants import Checker
from planaria.sim.kernel import Process
from planaria.sim.network import Links

FORM_TIMEOUT = 4.0  # seconds; the real one is derived from how long forming took before
FORM_TIME = (0.01, 0.15)
NOTICE_TIME = (0.0005, 0.03)  # from a peer's death or hanging up to an error here (21 ms were seen with gloo)


class Peer(Protocol):
    """A member as its communicators see it."""

    member: Member
    node: str
    process: Process
    address: str
    orderly: bool  # whether its process ended by itself: what it has sent arrives for certain

    def formed(self, id: QuorumId) -> None: ...
    def broken(self, id: QuorumId, text: str) -> None: ...


class Stage(Enum):
    FORMING = 0
    UP = 1
    OVER = 2


@dataclass(slots=True)
class Result:
    """How a collective ended at one member: what every rank put in, or why there is nothing."""

    payloads: tuple[object, ...] | None
    error: str = ""


@dataclass(slots=True)
class Entry:
    key: object
    payload: object
    done: Callable[[Result], None]
    pending: bool = True


class Operation:
    """One collective, entered by each member in its own time."""

    def __init__(self, length: tuple[float, float]) -> None:
        self.length = length
        self.entries: dict[int, Entry] = {}
        self.started = False


class Endpoint:
    def __init__(self, peer: Peer, rank: int) -> None:
        self.peer = peer
        self.rank = rank
        self.stage = Stage.FORMING
        self.entered = 0  # operations entered so far

    @property
    def there(self) -> bool:
        return self.peer.process.alive and self.stage is not Stage.OVER


class Communicator:
    def __init__(self, fabric: Fabric, quorum: Quorum) -> None:
        self.fabric = fabric
        self.quorum = quorum
        self.ends: dict[int, Endpoint] = {}
        self.operations: list[Operation] = []
        self.joining = False  # all are there and the connections are being made
        self.silent = False  # a message was lost: what has not begun to end never does
        self.deaf: set[Endpoint] = set()  # nothing reaches these any more, not even that a peer is gone

    @property
    def size(self) -> int:
        return len(self.quorum.members)

    # --- forming ---------------------------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        rank = self.quorum.members.index(peer.member)
        end = self.ends[rank] = Endpoint(peer, rank)
        peer.process.after(FORM_TIMEOUT, lambda: self._fail_forming(end, "timed out while forming"))
        if any(not other.there for other in self.ends.values()):
            self._doubt(end)
        self.progress()

    def progress(self) -> None:
        """Something changed that forming or an operation may have waited for."""
        if not self._whole():
            return
        if not self.joining and len(self.ends) == self.size:
            self.joining = True
            for end in self.ends.values():
                end.peer.process.after(self.fabric.between(FORM_TIME), lambda end=end: self._up(end))  # type: ignore[misc]
        for number, operation in enumerate(self.operations):
            if not (operation.started or self.silent) and len(operation.entries) == self.size:
                self._start(number, operation)

    def _whole(self) -> bool:
        ends = list(self.ends.values())
        if any(not e.there or e.peer.process.paused for e in ends):
            return False
        reach = self.fabric.links.reach
        return all(reach(a.peer.node, b.peer.node) for a in ends for b in ends if a.rank < b.rank)

    def _up(self, end: Endpoint) -> None:
        if end.stage is not Stage.FORMING:
            return
        if any(not other.there for other in self.ends.values()) and self.fabric.chance(0.7):
            self._doubt(end)  # a peer went away while the connections were made
            return
        end.stage = Stage.UP
        end.peer.formed(self.quorum.id)

    def _doubt(self, end: Endpoint) -> None:
        """A refused connection shows at once, a half-made one only when the timeout is over."""
        if self.fabric.chance(0.5):
            delay = self.fabric.between(NOTICE_TIME)
            end.peer.process.after(delay, lambda: self._fail_forming(end, "a peer is gone"))

    def _fail_forming(self, end: Endpoint, text: str) -> None:
        if end.stage is Stage.FORMING:
            self.leave(end)
            end.peer.broken(self.quorum.id, text)

    # --- operations ------------------------------------------------------------------------------------------

    def enter(self, end: Endpoint, entry: Entry, length: tuple[float, float]) -> None:
        number = end.entered
        end.entered += 1
        if number == len(self.operations):
            self.operations.append(Operation(length))
        operation = self.operations[number]
        operation.entries[end.rank] = entry
        keys = {e.key for e in operation.entries.values()}
        if len(keys) > 1:
            self.fabric.checker.fail(f"members of quorum {self.quorum.id} are in different collectives: {keys}")
        for other in self.ends.values():
            if not other.there:
                self._miss(end, entry, number, other)
        self.progress()

    def _miss(self, end: Endpoint, entry: Entry, number: int, other: Endpoint) -> None:
        """``other`` is gone. What it sent before may still be enough for ``end``."""
        if end in self.deaf:
            return
        operation = self.operations[number]
        if other.rank in operation.entries and len(operation.entries) == self.size and operation.started:
            # Everything was under way. A member that had its result has certainly sent all that others need.
            sure = 1.0 if other.peer.process.alive or other.peer.orderly else 0.9
            if self.fabric.chance(sure if not operation.entries[other.rank].pending else 0.3):
                return
        delay = self.fabric.between(NOTICE_TIME)
        end.peer.process.after(delay, lambda: self._fail(end, entry, f"rank {other.rank} is gone"))

    def _start(self, number: int, operation: Operation) -> None:
        operation.started = True
        payloads = tuple(operation.entries[rank].payload for rank in range(self.size))
        self.fabric.checker.collective(self.quorum, operation.entries[0].key, payloads)
        for rank, entry in operation.entries.items():
            end = self.ends[rank]
            if end in self.deaf:
                continue
            delay = self.fabric.between(operation.length)
            end.peer.process.after(delay, lambda end=end, entry=entry: self._complete(end, entry, payloads))  # type: ignore[misc]

    def _complete(self, end: Endpoint, entry: Entry, payloads: tuple[object, ...]) -> None:
        if entry.pending:
            entry.pending = False
            entry.done(Result(payloads))

    def _fail(self, end: Endpoint, entry: Entry, text: str) -> None:
        if entry.pending:
            entry.pending = False
            entry.done(Result(None, text))

    # --- the end of an endpoint ------------------------------------------------------------------------------

    def leave(self, end: Endpoint) -> None:
        """Closed by its owner, or dead with it. Its own waits end at once, those of the others in their time."""
        if end.stage is Stage.OVER:
            return
        end.stage = Stage.OVER
        for number, operation in enumerate(self.operations):
            mine = operation.entries.get(end.rank)
            if mine is not None and mine.pending and end.peer.process.alive:
                self._fail(end, mine, "given up here")
            for rank, entry in operation.entries.items():
                if rank != end.rank and entry.pending:
                    self._miss(self.ends[rank], entry, number, end)
        for other in self.ends.values():
            if other.stage is Stage.FORMING and other.peer.process.alive:
                self._doubt(other)


class Fabric:
    """All communicators of a world."""

    def __init__(
        self,
        links: Links,
        checker: Checker,
        between: Callable[[tuple[float, float]], float],
        chance: Callable[[float], bool],
    ) -> None:
        self.links = links
        self.checker = checker
        self.between = between
        self.chance = chance
        self._open: dict[QuorumId, Communicator] = {}
        links.on_restore.append(self.progress)

    def form(self, peer: Peer, quorum: Quorum) -> None:
        self.checker.membership(quorum)
        communicator = self._open.get(quorum.id)
        if communicator is None:
            communicator = self._open[quorum.id] = Communicator(self, quorum)
        communicator.join(peer)

    def lose_message(self, peer: Peer, alone: bool) -> None:
        """In the communicators that the peer has: nothing more is heard by anybody, or by the peer ``alone``."""
        for communicator in self._open.values():
            for end in communicator.ends.values():
                if end.peer is peer and end.stage is Stage.UP and communicator.size > 1:
                    if alone:
                        communicator.deaf.add(end)
                    else:
                        communicator.silent = True

    def drop(self, peer: Peer, id: QuorumId) -> None:
        communicator = self._open.get(id)
        end = self._end_of(peer, id)
        if communicator is not None and end is not None:
            communicator.leave(end)

    def enter(
        self,
        peer: Peer,
        id: QuorumId,
        key: object,
        payload: object,
        length: tuple[float, float],
        done: Callable[[Result], None],
    ) -> None:
        """Enter the next collective on ``id``; ``done`` is called once, in the peer's process."""
        end = self._end_of(peer, id)
        if end is None or end.stage is not Stage.UP:
            done(Result(None, "the communicator was given up"))
        else:
            self._open[id].enter(end, Entry(key, payload, done), length)

    def gone(self, peer: Peer) -> None:
        """The peer's process died: the kernel closes its connections."""
        for communicator in list(self._open.values()):
            for end in communicator.ends.values():
                if end.peer is peer:
                    communicator.leave(end)
        self._forget()

    def progress(self) -> None:
        for communicator in list(self._open.values()):
            communicator.progress()

    def _end_of(self, peer: Peer, id: QuorumId) -> Endpoint | None:
        communicator = self._open.get(id)
        if communicator is None:
            return None
        return next((e for e in communicator.ends.values() if e.peer is peer), None)

    def _forget(self) -> None:
        """Communicators that nobody holds any more, to keep long runs fast."""
        for id, communicator in list(self._open.items()):
            if len(communicator.ends) == communicator.size and not any(e.there for e in communicator.ends.values()):
                del self._open[id]
