"""Silent corruption: what a flipped bit changes, and the promise of docs/corruption.md, checked while a run goes on.

Nobody commits a sum that a damaged member spoilt, and nobody heals to a damaged state, while a member takes part that
holds the right one; and no member ends itself while more than half of those whose states count hold the right one.
Whatever no comparison can show ends the run with the verdict "unseen": a group that is alone, or that alone holds the
newest step, has nobody to be compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planaria.core.corruption import compared
from planaria.core.messages import NOTHING, Member, QuorumId, Standing
from planaria.sim.invariants import START, Violation, apply

WIDTH = 60  # bits of a state that may flip, each but once: no two members are damaged alike by chance
HIDDEN = 30  # of those of the moments so many are too small to move the weights


@dataclass(frozen=True, slots=True)
class State:
    """What a member holds. ``moments``: by how much that which its optimizer keeps is not what it should be."""

    weights: int = START
    moments: int = 0

    @property
    def parameters(self) -> int:
        """Their checksum."""
        return _checksum((self.weights,))

    @property
    def whole(self) -> int:
        return _checksum((self.weights, self.moments))

    def applied(self, step: int, total: int) -> State:
        return replace(self, weights=apply(self.weights, step, total) ^ (self.moments >> HIDDEN))

    def flipped(self, bit: int, moments: bool) -> State:
        mask = 1 << bit
        return replace(self, moments=self.moments ^ mask) if moments else replace(self, weights=self.weights ^ mask)


def _checksum(values: tuple[int, ...]) -> int:
    return (hash(values) & ((1 << 64) - 1)) or 1  # 0 says that there is none


class Unseen(Exception):
    """A damaged state goes on, and nobody could have known."""


class Witness:
    """Knows the quiet run, and so who is damaged. ``reference``: its weights after each number of steps."""

    def __init__(self, reference: Sequence[int]) -> None:
        self._reference = reference
        self._rolls: dict[QuorumId, tuple[Standing, ...]] = {}  # the newest of each quorum
        self._doubts: set[Member] = set()  # who saw a difference, and no roll call since that several answered

    def right(self, step: int, state: State) -> bool:
        return state == State(self._reference[step])

    def called(self, id: QuorumId, standings: Sequence[Standing]) -> None:
        self._rolls[id] = tuple(standings)

    def differs(self, member: Member) -> None:
        """The member sees that states differ."""
        self._doubts.add(member)

    def rolled(self, member: Member, id: QuorumId, holds: bool) -> None:
        """The member has heard all in a roll call; ``holds``: and works under that quorum."""
        signed = [self._rolls[id][r].checksum for r in compared(self._rolls[id])]
        if len(set(signed)) > 1 and not holds:
            self._doubts.add(member)
        elif len(signed) > 1:
            self._doubts.discard(member)

    def _unseen(self, member: Member, why: str) -> None:
        if member in self._doubts:
            raise Violation(f"{member} knew that states differ, and {why}")
        raise Unseen(f"{member} {why}")

    def _sources(self, id: QuorumId) -> tuple[list[int], set[int]]:
        """Whose states count in the newest roll call of the quorum, by rank, and which of those are right."""
        standings = self._rolls[id]
        sources = compared(standings)
        if standings[sources[0]].step == NOTHING:
            return sources, set()
        right = State(self._reference[standings[sources[0]].step]).whole
        return sources, {r for r in sources if standings[r].checksum in (0, right)}

    def counts(self, member: Member, id: QuorumId, step: int, state: State) -> None:
        """After the newest roll call of the quorum the member has this state, given to it or its own, and it counts."""
        if self.right(step, state):
            return
        sources, right = self._sources(id)
        if right:
            had = f"{len(right)} of {len(sources)} had the right one"
            raise Violation(f"{member} goes on with a damaged state, but {had}")
        self._unseen(member, f"goes on with step {step}, which {len(sources)} held, all damaged")

    def summed(self, member: Member, step: int, states: Sequence[State], right: bool) -> None:
        """The member commits the step; ``states``: all that took part, when their control words left them. ``right``:
        the sum is that of the quiet run."""
        if right:
            return
        if len({s.parameters for s in states}) > 1 or states[0].weights == self._reference[step]:
            raise Violation(f"{member} commits a spoilt sum in step {step}")
        self._unseen(member, f"commits a spoilt sum in step {step}, and all {len(states)} are damaged alike")

    def ends(self, member: Member, rank: int, id: QuorumId, flips: int) -> None:
        """The member ends itself, for it holds that nobody can tell who is right, or that it is broken; ``flips``: how
        often it was damaged."""
        sources, right = self._sources(id)
        if len(right) < 2 or 2 * len(right) <= len(sources):
            return
        if rank in right:
            raise Violation(f"{member} ends itself, but {len(right)} of {len(sources)} have the right state, as it has")
        if flips < 2:
            raise Violation(f"{member} ends itself instead of healing from the {len(right)} who have the right state")
