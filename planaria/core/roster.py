"""What the lighthouse knows about the groups and the agents of one job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from planaria.core.liveness import HeartbeatWatch
from planaria.core.messages import (
    AT_WORK,
    NO_QUORUM,
    Event,
    Link,
    Member,
    Order,
    Phase,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
)


class State(Enum):
    """A member as the lighthouse sees it."""

    STARTING = "starting"  # seen in a heartbeat, not ready yet
    READY = "ready"  # parked: may be taken into a quorum
    ACTIVE = "active"  # adopted a quorum: holds a settled state
    SUSPECT = "suspect"  # its agent sees no progress; fenced until it is ready again
    DEAD = "dead"  # certain: the process table said so, or an operator did
    REFUSED = "refused"  # bad input
    FINISHED = "finished"  # committed the last step


SHOWN = 12  # groups named in a sentence; a rack that is lost would fill pages otherwise


def named(members: Iterable[Member]) -> str:
    """Groups in a sentence, in their order: "group 3", "groups 0, 2", "groups 0, 1, … and 988 more"."""
    ids = sorted(member.group for member in members)
    text = ", ".join(str(id) for id in ids[:SHOWN]) + (f", … and {len(ids) - SHOWN} more" if ids[SHOWN:] else "")
    return f"groups {text}" if len(ids) > 1 else f"group {text}"


# States whose member can never take part again, so that its silence needs no majority.
CERTAINLY_GONE = frozenset({State.DEAD, State.REFUSED, State.FINISHED})


@dataclass(slots=True)
class Group:
    """The newest incarnation of a group."""

    member: Member
    agent: str
    state: State = State.STARTING
    ready: Ready | None = None
    adopted: QuorumId = NO_QUORUM  # newest quorum that it said it works under
    fenced: QuorumId = NO_QUORUM  # newest quorum that left it out, or in which nobody held a settled state
    step: int = 0
    draining: bool = False  # it leaves after a commit, for good
    moved: bool = False  # and its group goes on at another agent
    moving: bool = False  # it leaves after a commit, and comes back when one of its ranks has moved
    spared: bool = False  # dead, and a standby takes its place
    evicted: bool = False  # an operator declared it dead although no process table did
    digest: str = ""
    pulse: Pulse | None = None
    note: str = ""
    late: int = 0  # times that this life was left out of a sync because the others had waited too long

    @property
    def settled(self) -> bool:
        """Whether its state counts, as far as it has said."""
        return self.adopted > self.fenced

    @property
    def leaving(self) -> bool:
        return self.draining or self.moving


@dataclass(slots=True)
class Agent:
    """One supervisor's stream."""

    beats: HeartbeatWatch
    host: str = ""
    devices: tuple[str, ...] = ()  # GPUs of its node that are the job's
    warm: int = 0  # standbys that wait there
    nodes: dict[int, str] = field(default_factory=dict)  # that help it, in reach: their names by number
    connected: bool = True  # in reach: something was heard lately
    synced: bool = False  # on this stream it has told everything that it knew when the stream opened
    lost_at: float = 0.0
    told: set[Member] = field(default_factory=set)  # members that it has spoken of since its last Hello
    dismissed: bool = False  # on this stream it was told that the job is complete without its groups


@dataclass(frozen=True, slots=True)
class LineageRecord:
    """One published quorum, as the store keeps it. ``step`` is the highest commit reported before it. One without
    members ends the job, or, if it is its own ``run``, begins it again from a durable checkpoint."""

    job: str
    epoch: int
    number: int
    members: tuple[Member, ...]
    lineage: str
    step: int
    run: QuorumId = NO_QUORUM  # the record with which the job began again last, before or with this one

    @property
    def id(self) -> QuorumId:
        return QuorumId(self.epoch, self.number)


def lineage_after(previous: str, id: QuorumId, members: tuple[Member, ...]) -> str:
    """Hash-chained lineage: equal only if the whole history of memberships is equal."""
    text = f"{previous}|{id.epoch}.{id.number}|" + ",".join(f"{m.group}.{m.incarnation}" for m in members)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Send:
    """Tell an agent (or, through it, one of its members)."""

    agent: str
    order: Order


@dataclass(frozen=True, slots=True)
class Persist:
    """Must be in the store before any later effect is done."""

    record: LineageRecord


@dataclass(frozen=True, slots=True)
class Record:
    """For people and for the event file."""

    event: Event


Effect = Send | Persist | Record


# Whoever is at work comes first, whoever needs a look last.
CONDITIONS = (
    *("working", "finished", "forming", "healing", "loading", "starting", "ready", "draining", "moving", "drained"),
    *("suspect", "out of reach", "dead", "refused"),
)


@dataclass(frozen=True, slots=True)
class GroupStatus:
    member: Member
    state: str
    step: int
    quorum: QuorumId
    phase: Phase
    loss: float
    step_seconds: float
    pid: int
    agent: str
    connected: bool
    note: str = ""
    links: tuple[Link, ...] = ()
    shards: int = 0  # as in Pulse


@dataclass(frozen=True, slots=True)
class JobStatus:
    job: str
    epoch: int
    quorum: Quorum | None
    planned: Quorum | None
    desired: int
    complete: bool
    groups: tuple[GroupStatus, ...]
    events: tuple[Event, ...] = field(default=())
    drained: tuple[str, ...] = ()  # agents, or "agent:GPU"
    scaled: int = 0  # how often an operator has said how many groups are wanted, in this epoch


def status_of(view: Group, connected: bool) -> GroupStatus:
    """A group's line in ``planaria status``."""
    pulse = view.pulse or Pulse(view.member, Phase.STARTING, view.step, view.adopted, float("nan"), 0.0)
    return GroupStatus(
        member=view.member,
        state=_shown(view),
        step=max(view.step, pulse.step if view.state is State.ACTIVE else 0),
        quorum=view.adopted,
        phase=pulse.phase,
        loss=pulse.loss,
        step_seconds=pulse.step_seconds,
        pid=pulse.pid,
        agent=view.agent,
        connected=connected,
        note=view.note,
        links=pulse.links,
        shards=pulse.shards,
    )


def condition(group: GroupStatus) -> str:
    """One word for what a group is doing, of CONDITIONS."""
    if group.state in ("dead", "refused", "drained", "finished", "suspect", "draining", "moving"):
        return group.state
    if not group.connected:
        return "out of reach"
    if group.state == "active" and group.phase in AT_WORK:
        return "working"
    if group.phase in (Phase.HEALING, Phase.FORMING, Phase.LOADING):
        return group.phase.name.lower()
    return "starting" if group.state == "starting" else "ready"


def _shown(view: Group) -> str:
    """The state in the words of the command line."""
    if view.draining and view.state not in CERTAINLY_GONE:
        return "draining"
    if view.moving and view.state not in CERTAINLY_GONE:
        return "moving"
    return "drained" if view.draining and view.state is State.DEAD else view.state.value
