"""The plain data that members, agents and the lighthouse tell each other.

Every message is a frozen dataclass without behaviour beyond validation, so that the real services, the
simulator and the tests pass the very same values. The protobuf forms live in ``planaria.wire``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# In place of a group's number: a process that waits for a rank to be lost, and so is of no group yet. Its incarnation
# numbers those of an agent. Agents and their ranks alone know of it.
STANDBYS = (1 << 16) - 1


@dataclass(frozen=True, order=True, slots=True)
class Member:
    """One life of one replica group: a restarted group is a new incarnation and so a new member."""

    group: int
    incarnation: int

    def __str__(self) -> str:
        if self.group == STANDBYS:
            return f"standby {self.incarnation}"
        return f"group {self.group} (incarnation {self.incarnation})"


@dataclass(frozen=True, order=True, slots=True)
class QuorumId:
    """Quorums are totally ordered: first by the lighthouse's epoch (its fencing token), then by number."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


NO_QUORUM = QuorumId(0, 0)


@dataclass(frozen=True, slots=True)
class Quorum:
    """A numbered membership. A member's position in ``members`` is its rank in the communicator.

    ``urgent`` quorums replace a membership that is broken: members drop what they are exchanging and switch at
    once. The others are planned changes: members build the communicator on the side and switch together after a
    commit at which all of them have said, in the control words, that it is built.
    """

    id: QuorumId
    members: tuple[Member, ...]  # ascending by group
    addresses: tuple[str, ...]  # host:port of each member's rendezvous store, in the same order
    urgent: bool
    lineage: str  # hash over (previous lineage, id, members): equal lineages mean equal histories
    reason: str = ""
    # No member is known to hold a settled state: the newest complete ones count, at the start those of the scripts.
    founding: bool = False

    def rank_of(self, member: Member) -> int | None:
        return self.members.index(member) if member in self.members else None


class Policy(Enum):
    """What happens to the shards of a lost group."""

    REDISTRIBUTE = "redistribute"  # the others compute them: same samples, same bits
    SPARE = "spare"  # the others wait for a standby that takes its place, up to a limit, and only then compute them
    SHRINK = "shrink"  # they are left out and the mean is taken over the shards present


# Fixed brackets, so bit-exact; each member's own sums first; fixed brackets over every shard's own gradient, which
# travels in eight bits a number. The default first.
CODED = ("int8", "fp8")
REDUCTIONS = ("tree", "fast", *CODED)
PROMISES = ("bits", "samples")  # about the result: see planaria.rank.promise


class Phase(Enum):
    """Where a rank is, as its progress page shows it."""

    STARTING = 0  # imports, model, data: before the rank is ready
    PARKED = 1  # ready, waiting to be taken into a quorum
    FORMING = 2  # waiting for a communicator or a roll call
    HEALING = 3
    COMPUTING = 4  # inside a shard: user code runs
    EXCHANGING = 5
    APPLYING = 6  # between the exchange and the next step: user code runs (optimizer, logging, evaluation)
    FINISHED = 7
    LOADING = 8  # the script's own save or load runs, for a group that heals (job.register)


# Those of a step.
AT_WORK = frozenset({Phase.COMPUTING, Phase.EXCHANGING, Phase.APPLYING})


# --- a rank -> its agent ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Present:
    """How a rank k >= 1 of a group opens its connection to the agent, and all that it ever says: rank 0 speaks for the
    group. From then on it hears every order about its member, those from before it came included. A standby says it
    when it is warm, with what the bits of a rank in its place would depend on."""

    member: Member
    rank: int
    fingerprint: tuple[tuple[str, str], ...] = ()  # as that of Ready


# --- a member (or the agent for it) -> lighthouse -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The member is built and warm, and waits to be taken into a quorum. Sent again when its state has come to
    count no more: ``after`` is the quorum that left it out, or in which nobody held a settled state."""

    member: Member
    address: str  # host:port of its rendezvous store
    fingerprint: tuple[tuple[str, str], ...]  # what bits depend on (DESIGN section 7), sorted by key
    # Digest of the state that it starts from. Empty: there are checkpoints and it did not look at them, for the others
    # had the state; so the job must not begin with it.
    initial: str
    shards: int
    total_steps: int
    after: QuorumId = NO_QUORUM
    step: int = 0  # steps committed in the state that it starts from: more than 0 if that is a durable checkpoint
    saves: bool = False  # the job writes durable checkpoints, and can start again from one
    # The newest `Resume.run` that its agent knew when it started it: what it saw of the disk is at least so new.
    looked: QuorumId = NO_QUORUM
    keeps: bool = False  # the job keeps copies of its state in memory, and can start again from those
    # That state is such a copy: the quorum under which its last step was committed. What is in memory may be gone
    # with the next process, so it does not count as known.
    kept: QuorumId = NO_QUORUM
    # Low communication that is not exact: the others may go on without a group that is late.
    lenient: bool = False
    # Step of the newest checkpoint that it passed over, because it is damaged. 0: of none.
    damaged: int = 0


@dataclass(frozen=True, slots=True)
class Adopted:
    """The member now works under ``quorum`` with ``step`` steps committed."""

    member: Member
    quorum: QuorumId
    step: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """A communicator of ``quorum`` failed at the member. Not an accusation: the peer may be dead or only gone."""

    member: Member
    quorum: QuorumId
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The member committed the last step and owes nobody anything. Digests of finished members must agree."""

    member: Member
    step: int
    digest: str = ""  # of the protected state


@dataclass(frozen=True, slots=True)
class Saved:
    """The member wrote a durable checkpoint of its state after ``step`` steps, or could not."""

    member: Member
    step: int
    seconds: float  # from the pause of the training until it was on the disk
    trouble: str = ""  # why it could not: a sentence


@dataclass(frozen=True, slots=True)
class Corrupted:
    """What the member holds, or computed, was seen to be wrong: others have something else, and are more. Its state
    comes from them now. ``text``: what it was, a sentence. ``rank``: the one rank of the group that did this; -1: that
    cannot be told."""

    member: Member
    step: int
    text: str
    rank: int = -1


@dataclass(frozen=True, slots=True)
class Died:
    """The process table says so: certain, not a suspicion. ``spare``: a standby takes its place, as its group's next
    incarnation. Said again if none does after all. ``moved``: its agent was told that its group goes on elsewhere."""

    member: Member
    cause: str
    spare: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The member is to be left out after the next commit: a rank of it moves. It comes back as a new incarnation."""

    member: Member


@dataclass(frozen=True, slots=True)
class Prepared:
    """The next life of a group of another agent, which the lighthouse wants here (``Host``), is built and warm, and
    waits for the older one to leave. ``trouble``: why there will be none, a sentence."""

    member: Member
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Suspected:
    """The agent sees no progress (stopped or hung). The process may still be there, and may come back."""

    member: Member
    why: str


@dataclass(frozen=True, slots=True)
class Link:
    """What a group has seen of its connection to ``group``, sending what is exchanged from main memory."""

    group: int
    bits: float  # a second, while there was something to send
    round_trip: float  # seconds
    lost: float  # share of the packets that were sent again


@dataclass(frozen=True, slots=True)
class Pulse:
    """One group's line in a heartbeat, read from its progress page. Display and liveness only: no decision of a
    step depends on it."""

    member: Member
    phase: Phase
    step: int
    quorum: QuorumId
    loss: float  # NaN if the script records none
    step_seconds: float  # median of recent steps, 0 if unknown
    pid: int = 0
    devices: tuple[str, ...] = ()  # the GPU of each rank, as in CUDA_VISIBLE_DEVICES; empty: on another node
    links: tuple[Link, ...] = ()  # to some other groups, the slowest if they are many
    shards: int = 0  # that it computed for its newest step; 0: not known


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pulses: tuple[Pulse, ...]
    warm: int = 0  # standbys of the agent that wait, and can be any rank
    nodes: tuple[tuple[int, str], ...] = ()  # the other nodes of its groups that are in reach: number, name


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What ``planaria run`` was asked for."""

    job: str
    groups: int
    min_groups: int = 1
    policy: Policy = Policy.REDISTRIBUTE
    ranks: int = 1  # of every group
    spare_wait: float = 0.0  # seconds; the limit of the policy `spare`


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of an agent's stream; then it sends again the newest Ready, Adopted, Finished and Died of its
    groups, then Synced. A lighthouse that was restarted learns everything from this."""

    agent: str
    host: str
    spec: JobSpec
    fresh: bool = False  # it has started no group yet, and waits for the Welcome to know which lives there were
    devices: tuple[str, ...] = ()  # GPUs of its node that are the job's
    closed: tuple[str, ...] = ()  # as in `Close`: what an operator has drained here
    hosted: tuple[int, ...] = ()  # groups that have come to it from other agents
    epoch: int = 0  # the highest that it has seen: a lighthouse below it was deposed


@dataclass(frozen=True, slots=True)
class Synced:
    """The agent has told everything that it knew when the stream opened."""


Report = (
    Hello
    | Synced
    | Heartbeat
    | Present
    | Ready
    | Adopted
    | Trouble
    | Finished
    | Saved
    | Corrupted
    | Died
    | Suspected
    | Leaving
    | Prepared
)


# --- lighthouse -> agent (and through it, a member) -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int
    # For a fresh agent: the newest life of every group that no agent in reach has. Lives that it starts come after
    # them, or else one of its groups would be taken for one that its predecessor had.
    lives: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True)
class Publish:
    """A new quorum, for ``member`` whether it is in it or not (one that is not has been fenced or is leaving)."""

    member: Member
    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Refuse:
    """The member cannot join: bad input. It says ``reason`` and exits with code 2."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """The member will be left out of the next planned quorum; it must not be started again. ``moved``: its group goes
    on at another agent."""

    member: Member
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """An operator's wish (``planaria kill``): the agent sends ``signal`` to the group's processes, or to one rank's."""

    group: int
    signal: int
    rank: int | None = None  # None: all


@dataclass(frozen=True, slots=True)
class Desired:
    """How many groups the job should have from now on (``planaria scale``)."""

    groups: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The job cannot go on (every settled group was lost). ``reason`` is a sentence for people. Empty: the job is
    complete, and none of the agent's groups has a part in that. (To a rank, from its agent: stop in order.)"""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Every group that held the state is lost: the job starts again from its newest durable checkpoint, or from copies
    in memory. Groups that were started before, or without a look at the disk, must be replaced by some that look at it
    now; those whose processes keep copies look for themselves."""

    reason: str
    run: QuorumId = NO_QUORUM  # the record in the lineage with which the job begins again


@dataclass(frozen=True, slots=True)
class Migrate:
    """Have another process, on another device if there is one, take a rank's place. Nothing failed. ``drains``: no
    process may have the rank's device afterwards; if the rank cannot move, all of its group leaves. ``node``: where to,
    by its number among the nodes of the group's agent; None: wherever there is a standby."""

    group: int
    rank: int
    drains: bool = False
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """Start ``member``, the next life of a group of another agent, and say when it is ready, but do not have it join.
    ``joins``: the older life has left, so now it joins. ``off``: it is not needed any more."""

    member: Member
    joins: bool = False
    off: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """An operator's wish (``planaria drain --node``, ``--gpu``): nothing may be started on the agent's node (``device``
    is empty), or on one GPU of it, and what has the GPU moves or leaves. ``opens``: it may again (``undrain``)."""

    device: str
    opens: bool = False


@dataclass(frozen=True, slots=True)
class Stay:
    """From an agent to the ranks of a group, of which ``rank`` moves: when the group is left out of the quorum, the
    others wait for a ``Regroup`` instead of ending. ``lost``: it does not move, it is lost, and they wait likewise."""

    rank: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Regroup:
    """From an agent to the ranks that are left of a group which has lost one: they go on as ``member``, its next
    incarnation, with a new process in the lost one's place. They meet at ``port`` of the group's master address."""

    member: Member
    port: int


@dataclass(frozen=True, slots=True)
class Cast:
    """From an agent to a standby: it is ``rank`` of ``member`` from now on, with these variables of the environment."""

    member: Member
    rank: int
    environ: tuple[tuple[str, str], ...]


Order = (
    Welcome | Publish | Refuse | Drain | Kill | Desired | Stop | Resume | Migrate | Host | Close | Stay | Regroup | Cast
)


# --- between members, over the communicator -------------------------------------------------------------------


NOTHING = -1  # in place of a step: what a member holds is known to be wrong


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member says in the roll call, the first exchange on every new communicator."""

    step: int  # steps committed, or NOTHING; the step being worked on has this index
    settled: bool  # False: fresh or fenced, its state does not count and must be healed
    have: frozenset[int] = frozenset()  # shards of `step` whose gradients it holds
    under: QuorumId = NO_QUORUM  # quorum of its newest commit: with `step`, the identity of its state
    seconds_per_shard: float = 0.0  # as in its newest control word; 0: it has none yet
    recounts: int = 0  # how often the exchange of `step` was complete, and did not count: something differed
    checksum: int = 0  # of its group's whole state, 64 bits; 0: not asked for, or its state does not count anyway
    # Low communication, see catching_up.py. A state that the group holds or has a copy of, as step and quorum of its
    # newest commit, from which it could follow; none, if that quorum is NO_QUORUM.
    base: tuple[int, QuorumId] = (0, NO_QUORUM)
    # Likewise: the states from which it could lead others to its own: the quorums under which step - 1, step - 2, …
    # were committed; at most HISTORY.
    history: tuple[QuorumId, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlWord:
    """Rides in the last exchange of every step, gathered from every member."""

    step: int
    planned: QuorumId = NO_QUORUM  # planned quorum whose communicator this member has built
    seconds_per_shard: float = 0.0
    stop: bool = False  # this member was asked to end the job in order (Ctrl-C): all stop after this commit
    checksum: int = 0  # of this rank's parameters, at times of all its state; 64 bits; 0: not asked for


@dataclass(frozen=True, slots=True)
class Event:
    """A line for people and for the record: plain language, with where it happened."""

    at: float  # seconds, the caller's clock
    kind: str  # "join", "lost", "suspect", "quorum", "heal", "finish", "refuse", "drain", "scale", "epoch", …
    text: str
    group: int = -1
    data: tuple[tuple[str, str], ...] = field(default=())
