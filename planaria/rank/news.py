"""What a rank has heard of quorums and communicators, and its training thread has not taken in yet.

The control thread and helper threads note it here, under a lock that is never held while waiting. It becomes the
stepper's once all ranks of the group have it, see ``rounds``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from planaria.core.messages import NO_QUORUM, Quorum, QuorumId
from planaria.core.stepper import Stepper
from planaria.rank.rounds import Note

Knows = Callable[[QuorumId], bool]  # whether a quorum's communicator is, or may become, of use to the stepper


class News:
    """Of one rank. True while there is any. All methods may be called on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: list[Quorum] = []
        self._newest = NO_QUORUM  # heard of
        self._formed: set[QuorumId] = set()
        self._broken: dict[QuorumId, str] = {}
        self.urgent = NO_QUORUM  # the newest that is: no older one will ever be worked under

    def __bool__(self) -> bool:
        return bool(self._heard or self._formed or self._broken)

    def hear(self, quorum: Quorum) -> bool:
        """A quorum was published. False if it is old, and so no news."""
        with self._lock:
            if quorum.id <= self._newest:
                return False
            self._newest = quorum.id
            self.urgent = quorum.id if quorum.urgent else self.urgent
            self._heard.append(quorum)
        return True

    def formed(self, id: QuorumId) -> None:
        """The communicator of ``id`` stands here."""
        with self._lock:
            self._formed.add(id)

    def broken(self, id: QuorumId, text: str) -> None:
        """The communicator of ``id`` failed here. The first cause is the one that counts."""
        with self._lock:
            self._broken.setdefault(id, text)

    def forget_quorums(self) -> None:
        """What is published from here on is meant for another incarnation of the group."""
        with self._lock:
            self._heard.clear()
            self._newest = self.urgent = NO_QUORUM

    def ends(self, id: QuorumId, joining: bool) -> bool:
        """Whether what goes on under quorum ``id`` cannot go on. Reads single fields: no lock needed.

        A planned quorum interrupts nobody but a joiner that waits for the members in an older one."""
        return id in self._broken or any(quorum.urgent or joining for quorum in tuple(self._heard))

    def ready_for(self, stepper: Stepper) -> QuorumId:
        """The newest planned quorum, if this rank could switch to it, else NO_QUORUM."""
        with self._lock:
            heard = self._heard[-1] if self._heard else stepper.planned
            if heard is None or any(quorum.urgent for quorum in self._heard):
                return NO_QUORUM
            return heard.id if heard.id in self._formed or stepper.stands(heard) else NO_QUORUM

    # --- rounds ----------------------------------------------------------------------------------------------

    def told(self, note: Note, knows: Knows) -> Note:
        """``note``, with what there is here to tell the group's other ranks."""
        with self._lock:
            # What a newer urgent quorum has outdated is of interest only while the stepper still works under it.
            live = {id for id in (*self._formed, *self._broken) if id >= self.urgent or knows(id)}
            formed = frozenset(self._formed & live)
            broken = {id: text for id, text in self._broken.items() if id in live}
            return replace(note, heard=self._newest, formed=formed, broken=broken)

    def take(self, outcome: Note) -> tuple[list[Quorum], list[QuorumId], list[tuple[QuorumId, str]]]:
        """What all ranks have heard of: the quorums, and of these and older ones those that stand and that fell."""
        with self._lock:
            taken = [quorum for quorum in self._heard if quorum.id <= outcome.heard]
            self._heard = [quorum for quorum in self._heard if quorum.id > outcome.heard]
            # What was said of a quorum that not all have heard of is said again with it.
            formed = sorted(id for id in outcome.formed if id <= outcome.heard)
            broken = sorted((id, text) for id, text in outcome.broken.items() if id <= outcome.heard)
            self._formed -= set(formed)
            for id, _ in broken:
                self._broken.pop(id, None)
        return taken, formed, broken

    def drop_old(self, heard: QuorumId, knows: Knows) -> None:
        """What is said of quorums that were replaced meanwhile is of no interest to anybody."""
        with self._lock:
            self._formed = {id for id in self._formed if id > heard or knows(id)}
            self._broken = {id: text for id, text in self._broken.items() if id > heard or knows(id)}
