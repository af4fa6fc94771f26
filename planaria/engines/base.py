"""What every engine offers. The agent decides; an engine only does, and tells what happened."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planaria.core.health import Reading
from planaria.core.liveness import ProgressSample
from planaria.core.messages import Member, Order


@dataclass(frozen=True, slots=True)
class Instance:
    """One rank of an incarnation that the engine knows of. ``pid`` is 0 until its process is there."""

    member: Member
    pid: int
    directory: Path  # logs, progress page and results of this rank
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    member: Member
    pid: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Remains:
    """What a rank on another node has left there: what it said of its failure, and where its log is."""

    error: dict[str, object]
    log: Path


@dataclass(frozen=True, slots=True)
class Ended:
    """``returncode`` as in ``subprocess``: negative for a signal; None if it never ran or nobody knows."""

    member: Member
    returncode: int | None
    cause: str
    rank: int = 0
    remains: Remains | None = None  # None: it lies in the rank's directory


@dataclass(frozen=True, slots=True)
class Dying:
    """It runs no code of its own any more, but is not gone yet: the kernel takes back what it held (a GPU's memory
    needs a tenth of a second). ``Ended`` follows. ``returncode`` and ``cause`` as there."""

    member: Member
    returncode: int
    cause: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank is whose progress page is on another node. Told a few times a second."""

    member: Member
    rank: int
    sample: ProgressSample


@dataclass(frozen=True, slots=True)
class Warm:
    """A standby on another node has tried what it is to try. ``fingerprint``: see ``Present``."""

    standby: int
    fingerprint: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Nodes:
    """Another node is there, or gone: see ``Engine.nodes``."""


@dataclass(frozen=True, slots=True)
class Felt:
    """Signs of health that were read on another node."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine cannot create anything any more. ``reason`` is a sentence for people."""

    reason: str


Change = Started | Dying | Ended | Progress | Warm | Nodes | Felt | Broken


class Engine(Protocol):
    """Where groups run.

    ``watch`` names the one function that is told of every change, in the order in which they happen and as soon
    as the engine knows: the death of a rank is the start of every recovery. It must not block.

    An engine knows of ranks only. What the end of one means for the others of its group is for the agent to say.
    """

    def watch(self, tell: Callable[[Change], None]) -> None: ...

    def create(self, group: int, incarnation: int, founder: bool = True) -> None:
        """Begin to start all ranks of this incarnation. For each, ``Started`` or ``Ended`` follows. Creating twice is
        creating once. ``founder``: nobody is known to hold the job's state, so it looks for a checkpoint."""

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL, rank: int | None = None) -> None:
        """Send ``signum`` to the incarnation's ranks, or to one of them; ``Ended`` follows for each that is gone.
        Unknown ones are ignored."""

    def regroup(self, member: Member, newer: Member, rank: int, standby: int | None = None) -> int | None:
        """The member's ranks but ``rank``, which ends or has ended, are ``newer`` from now on, and a new process begins
        to start in its place, where the group began, or the standby of this number takes it. Returns the port where
        they are to meet; None if that cannot be done here."""

    def prepare(self, number: int, rank: int, node: int = 0) -> bool:
        """Begin to start a standby, ``Member(STANDBYS, number)``, which tries itself as ``rank`` of a group. False if
        the node has no device for it now."""

    def environ_of(self, member: Member, rank: int) -> dict[str, str]:
        """What of a rank's environment is its own, as far as a process of this node can take it on that runs already:
        all but its devices."""

    def standbys(self) -> Mapping[int, int]:
        """How many standbys each node is to keep that is in reach. This node is number 0."""

    def nodes(self) -> Mapping[int, str]:
        """The other nodes that are in reach, by number: their names."""

    def node_of(self, member: Member, rank: int) -> int:
        """The number of the node on which the rank is, or will be."""

    def home_of(self, rank: int) -> int:
        """The number of the node on which a group begins with this rank, and on which new processes for it start."""

    def look(self, member: Member) -> None:
        """Something may have happened to the member: for each of its ranks that is found to be dying, ``Dying`` is
        told, once and before this returns. Ends come by themselves, but perhaps much later."""

    def list(self) -> tuple[Instance, ...]:
        """All ranks that were created and have not ended."""

    def placed(self) -> dict[str, tuple[int, int]]:
        """The (group, rank) that each GPU of this node belongs to, by its name in CUDA_VISIBLE_DEVICES."""

    def devices(self) -> tuple[str, ...]:
        """The GPUs of this node, by the same names."""

    def avoid(self, gpus: Collection[str]) -> None:
        """Give no group one of these GPUs of this node, unless there is nothing else."""

    def close_devices(self, gpus: Collection[str]) -> None:
        """Give nobody one of these GPUs of this node, whatever happens. A standby that has one is ended."""

    def has_place(self, group: int) -> bool:
        """Whether the group, started now, would find GPUs that are not closed."""

    def elsewhere(self, group: int) -> bool:
        """Whether the group, started again, would get other GPUs than it has, and none of those to be avoided."""

    def relay(self, member: Member, order: Order) -> None:
        """Pass an order on to the ranks of the member that are not connected to the agent's own socket."""

    async def close(self) -> None:
        """End everything that is left, and the engine."""
