"""Checksums of the protected state, by which groups see that one of them is not like the others.

All groups hold the same bits, so unequal checksums mean that something has changed by itself. What is exchanged in a
step depends on parameters and buffers. Their checksum is taken when the step's gradients are there, and rides in the
control word of the very exchange that brings those to the others: so what a damaged parameter did to them is known
before anybody commits it. What optimizers keep acts on the group's own parameters alone, and is seen by those one step
later at the latest. It is looked at for itself every ``every`` steps, at every roll call, and at the end.

When checksums differ nobody commits the step. The roll is called again, with checksums of everything, and the members
that are more heal the others, as they heal who was away (core/stepper.py). Here is found what it is that differs, for
people.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from planaria.core.actions import Disputed
from planaria.core.corruption import compared, odd_ones, signs
from planaria.core.messages import Standing
from planaria.errors import CorruptionError
from planaria.exchange.checksum import lane_sums
from planaria.rank.front import Comparable

EVIDENCE = "corruption.json"
NAMED = 3  # tensors, in a sentence
_SUM = struct.Struct("<Q")

Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True, slots=True)
class Finding:
    """What of a member's state is not like that of others, in words, and at which of its ranks; -1: at several."""

    text: str
    rank: int


class StateChecks:
    """One per rank. ``gather`` gives every rank of the group what all its ranks have said; ``directory``: for evidence.

    ``every``: steps between two looks at all of the state; 0: nothing is looked at.
    """

    def __init__(self, every: int, state: Comparable, gather: Gather, directory: Path | None) -> None:
        self.every = every
        self._state = state
        self._gather = gather
        self._directory = directory
        self._differ: dict[int, list[str]] | None = None  # of this rank's tensors, by member: see ``look``
        self._values: dict[str, dict[int, str]] = {}  # of those: the sums that each member has
        # What tells a member from the others, by its rank in the quorum; if nobody can tell who is right, of all.
        self.found: dict[int, Finding] = {}

    def word(self, step: int) -> int:
        """This rank's part in the control word of ``step``, once the gradients of that are there."""
        if not self.every:
            return 0
        return _of(lane_sums([*self._state.checked(whole=step % self.every == 0).values()]))

    def signed(self, standing: Standing) -> Standing:
        """With the checksum of all that the group holds, if that counts or may come to. All its ranks call this
        together. Raises what ``gather`` raises."""
        self.found = {}
        if not (self.every and signs(standing)):
            return standing
        return replace(standing, checksum=self._whole())

    def bears_out(self, checksum: int) -> bool:
        """Whether all that the group holds, after it has healed, is what its sources had signed, if they had. One of
        them may have changed since, and who heals from it would be its witness. All ranks call this together. Raises
        what ``gather`` raises."""
        return not (self.every and checksum) or checksum == self._whole()

    def _whole(self) -> int:
        mine = _of(lane_sums([*self._state.checked(whole=True).values()]))
        return xxhash.xxh3_64_intdigest(b"".join(self._gather(_SUM.pack(mine))))

    def look(self, standings: Sequence[Standing], gather: Gather) -> None:
        """If those that count in a roll call differ, find out in which tensors. ``gather`` asks all members of the
        quorum, which all do this together. Raises what it raises."""
        self._differ = None
        members = compared(standings)
        if len({standings[rank].checksum for rank in members}) <= 1:
            return
        tensors = self._state.checked(whole=True)
        sums = lane_sums([*tensors.values()])
        told = [json.loads(each) for each in gather(json.dumps(sums).encode())]
        self._differ, self._values = {rank: [] for rank in members}, {}
        for index, name in enumerate(tensors):
            # A member that has other tensors, or none, differs in all of them.
            values = [told[rank][index] if len(told[rank]) == len(sums) else -1 for rank in members]
            odd = odd_ones(values)
            if odd is None or odd:
                self._values[name] = {rank: f"{value:016x}" for rank, value in zip(members, values, strict=True)}
            for position in range(len(members)) if odd is None else odd:
                self._differ[members[position]].append(name)

    def conclude(self, step: int) -> None:
        """Put together what the ranks of the group have found: ``found``. All of them call this, after ``look``."""
        if self._differ is None:
            return
        mine = json.dumps([self._differ, self._values]).encode()
        ranks = [json.loads(each) for each in self._gather(mine)]
        members, self._differ = [*self._differ], None
        found = {member: {r: differ[str(member)] for r, (differ, _) in enumerate(ranks)} for member in members}
        if self._directory is not None:  # every rank's: whoever looks for evidence may have lost the others
            facts = {"step": step, "members": members, "ranks": {r: values for r, (_, values) in enumerate(ranks)}}
            with (self._directory / EVIDENCE).open("a") as file:
                file.write(json.dumps(facts) + "\n")
        self.found = {member: _finding(by_rank) for member, by_rank in found.items() if any(by_rank.values())}


def disputed(checks: StateChecks, action: Disputed, where: str) -> CorruptionError:
    """The error that ends what nobody can put right."""
    what = "; ".join(f"member {rank} of the quorum: {each.text}" for rank, each in sorted(checks.found.items()))
    who = ", ".join(map(str, action.members))
    if len(action.members) == 1:
        return CorruptionError(
            f"{where}, step {action.step}: {who} has another state than the others had, and has it again right after "
            f"it has healed, or nobody is left to heal it ({what or 'its tensors were named before'}). If it comes "
            "again: its device, or something in the script that is not the same on all groups, changes it"
        )
    if not checks.found:
        return CorruptionError(
            f"{where}, step {action.step}: {who} hold or compute different things, and too few are left, or agree, to "
            "tell who is right. With durable checkpoints the job goes back to the newest one"
        )
    return CorruptionError(
        f"{where}, step {action.step}: the states of {who} differ and nobody can tell whose is right ({what}). Three "
        f"groups or more would tell. Details are in {EVIDENCE} beside each rank's logs. With durable checkpoints the "
        "job goes back to the newest one"
    )


def _of(sums: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(map(_SUM.pack, sums)))


def _finding(by_rank: dict[int, list[str]]) -> Finding:
    at = [rank for rank, names in by_rank.items() if names]
    return Finding(_sentence(by_rank), at[0] if len(at) == 1 else -1)


def _sentence(by_rank: dict[int, list[str]]) -> str:
    told = []
    for rank, names in by_rank.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        told.append((f"rank {rank}: " if len(by_rank) > 1 else "") + ", ".join(names[:NAMED]) + more)
    return "; ".join(each for each, names in zip(told, by_rank.values(), strict=True) if names)
