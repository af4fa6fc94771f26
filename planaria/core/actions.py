"""What a member's state machine (stepper.py) asks of the two sides that share it."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.core.messages import NO_QUORUM, Adopted, Finished, Member, Quorum, QuorumId, Ready, Standing, Trouble
from planaria.core.tree import Node, leaves, maximal_nodes

# --- effects for the control side -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """Start building the communicator of this quorum in the background."""

    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Drop:
    """Give up this quorum's communicator: waits on it end at once."""

    quorum: QuorumId


@dataclass(frozen=True, slots=True)
class Tell:
    """Report to the lighthouse (through the agent)."""

    report: Adopted | Trouble | Ready | Finished


Effect = Form | Drop | Tell

# --- what the training side does next -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done before news. ``parked``: outside any quorum."""

    parked: bool


@dataclass(frozen=True, slots=True)
class RollCall:
    quorum: QuorumId
    standing: Standing


@dataclass(frozen=True, slots=True)
class Heal:
    """Transfer the state of ``step`` from the ranks ``sources`` to the ranks ``healers``."""

    quorum: QuorumId
    step: int
    sources: tuple[int, ...]
    healers: tuple[int, ...]
    receive: bool
    checksum: int = 0  # of that state, as its sources signed it; 0: they did not
    under: QuorumId = NO_QUORUM  # quorum of its newest commit
    since: int | None = None  # healers are given the syncs from this step on, not the state: see catching_up.py


@dataclass(frozen=True, slots=True)
class Compute:
    """Yield this shard's batches to the user. ``last``: the exchange may start during its backward. ``again``: another
    member holds the shard, and what comes out is only compared."""

    step: int
    shard: int
    last: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """Reduce the gradients of ``step``. ``owned[r]``: the shards whose gradients rank r holds at the end. ``twice[r]``:
    those of others that it has computed as well, to be compared; none, if nothing is."""

    quorum: QuorumId
    step: int
    owned: tuple[frozenset[int], ...]
    twice: tuple[frozenset[int], ...] = ()

    def nodes(self, shards: int, merged: bool = True) -> tuple[tuple[Node, ...], ...]:
        """The subtrees whose sums each rank holds. ``merged``: siblings are added up as soon as both are there."""
        return tuple((maximal_nodes if merged else leaves)(o, shards) for o in self.owned)

    @property
    def present(self) -> int:
        """Shards in the sum: V, or fewer under the policy `shrink`. The divisor."""
        return sum(len(o) for o in self.owned)


@dataclass(frozen=True, slots=True)
class Finish:
    """All steps are committed, here and at every other member."""

    step: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The member's work ends before the last step, in order: drained, or the job was asked to stop."""

    reason: str
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Disputed:
    """Members hold different states of the same step, and nobody can tell who is right; or this one alone is wrong,
    again after it has healed, or nobody is left to heal it."""

    step: int
    members: tuple[Member, ...]


Action = Wait | RollCall | Heal | Compute | Exchange | Finish | Leave | Disputed
