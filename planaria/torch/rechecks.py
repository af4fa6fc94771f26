"""Shards that two groups compute, so that a gradient which came out wrong is seen before it is committed.

A wrong gradient reaches all groups alike, so no comparison of states shows it. But a shard has the same gradient, bit
for bit, whoever computes it. Of those that are watched the tails of the exchange carry checksums: the owner's, and that
of another member. If they differ nobody commits the step; both are computed again, and another pair is compared. Once
two agree it is known who was wrong. Who is wrong again and again leaves: it is the device. And if a step is in dispute
as often as the job bears, always about shards of one and the same member, whoever else had computed them, that one
leaves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import xxhash
from torch import Tensor

from planaria.core.corruption import odd_ones
from planaria.core.messages import Corrupted, Member
from planaria.core.stepper import RECOUNTS
from planaria.errors import CorruptionError
from planaria.rank.records import Seconds, ShardRecord
from planaria.rank.session import Session

# A particle flips one bit. A device that is wrong whenever somebody looks is broken.
STRIKES = 3


class Rechecks:
    """Of one step at a time; one per rank. What concerns the group all its ranks do together."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sums: dict[tuple[int, bool], Tensor | int] = {}  # by shard, and whether it is another member's
        self._said: dict[int, list[tuple[Member, int]]] = {}  # of watched shards, by whom what came out, oldest first
        self._heard: list[tuple[int, Member, int]] = []  # of shards, in the newest exchange, which may not count
        self._strikes = 0  # how often this group was wrong, in a row of steps in which it was compared
        self._disputed: set[int] = set()  # shards that were in doubt at any rank of the group
        self._pairs: list[set[Member]] = []  # for each of those, and each time, who had computed it
        self._times = 0  # exchanges with such

    def clear(self) -> None:
        """A step begins."""
        self._sums.clear()
        self._said.clear()
        self._heard.clear()
        self._disputed.clear()
        self._pairs.clear()
        self._times = 0

    def computed(self, shard: int, sums: Tensor, again: bool) -> None:
        """This rank's part of a watched shard's gradient has these sums; on a device they need not be there yet."""
        self._sums[shard, again] = sums

    def own(self, shard: int) -> int:
        """The checksum of a shard that this group holds; 0 if it is not watched."""
        return self._sum(shard, False)

    def seconds(self, twice: Sequence[frozenset[int]], rank: int) -> Seconds:
        """Those of shards that others hold, for this member's tail."""
        return {shard: self._sum(shard, True) for shard in twice[rank]} if twice else {}

    def _sum(self, shard: int, again: bool) -> int:
        found = self._sums.get((shard, again), 0)
        if isinstance(found, Tensor):
            found = xxhash.xxh3_64_intdigest(repr(found.tolist()).encode())
            self._sums[shard, again] = found
        return found

    def compare(
        self, owned: Sequence[frozenset[int]], records: Sequence[ShardRecord], seconds: Sequence[Seconds]
    ) -> frozenset[int]:
        """The shards of which this rank's part came out in two ways."""
        self._heard.clear()
        if not any(seconds):
            return frozenset()
        target = self._session.stepper.target
        assert target is not None
        owners = {shard: rank for rank, shards in enumerate(owned) for shard in shards}
        sums = {record.shard: record.checksum for record in records}
        doubtful = set()
        for rank, opinions in enumerate(seconds):
            for shard, opinion in opinions.items():
                self._heard += [(shard, target.members[owners[shard]], sums[shard])]
                self._heard += [(shard, target.members[rank], opinion)]
                if sums[shard] != opinion:
                    doubtful.add(shard)
        return frozenset(doubtful)

    def dispute(self, shards: frozenset[int]) -> None:
        """``shards`` came out in two ways at a rank of the group. They are computed again. Raises CorruptionError if it
        is known that it is this group which computes wrongly, and goes on doing so."""
        self._times += 1
        self._pairs += [{member for each, member, _ in self._heard if each == shard} for shard in shards]
        self._count()
        self._disputed |= shards
        for shard in shards:
            self._sums.pop((shard, False), None)
            self._sums.pop((shard, True), None)
        if self._any_rank(any(self._stubborn(shard) for shard in shards)):
            self._tell(f"shards {sorted(shards)}, twice")
            raise self._broken()
        culprit = self._always_there()
        if culprit == self._session.member:
            self._tell(f"shards in dispute in {self._times} exchanges of a step, all of them its own or checked by it")
            raise self._broken()
        if culprit is not None:
            self._pairs.clear()
            self._times = 0
        self._session.stepper.dispute(shards, named=culprit is not None)

    def _always_there(self) -> Member | None:
        """The one member that had computed all shards which were ever in dispute in this step, once that is so often
        that the job would end. Everybody who was there says the same. None if two always were: nobody can tell."""
        common = set.intersection(*self._pairs) if self._pairs else set()
        return next(iter(common)) if self._times >= RECOUNTS and len(common) == 1 else None

    def _count(self) -> None:
        """The newest exchange is complete at all ranks, of members whose states are alike: what was said counts."""
        for shard, member, value in self._heard:
            self._said.setdefault(shard, []).append((member, value))
        self._heard.clear()

    def _stubborn(self, shard: int) -> bool:
        """Whether this member computed the shard more than once, and others agree on something else."""
        said = self._said.get(shard, [])
        own = [value for member, value in said if member == self._session.member]
        newest = dict(said)
        members, values = list(newest), list(newest.values())
        odd = odd_ones(values)
        return len(own) > 1 and odd is not None and any(members[i] == self._session.member for i in odd)

    def settle(self) -> None:
        """All that was compared has come out alike. If it had not before, who was wrong says so. Raises CorruptionError
        if this group was wrong STRIKES times in a row."""
        self._count()
        me = self._session.member
        mine = [(shard, value) for shard, said in self._said.items() for member, value in said if member == me]
        if not self._disputed:
            self._strikes = 0 if mine else self._strikes
            return
        wrong = sorted({shard for shard, value in mine if value != self._said[shard][-1][1]})
        told = [json.loads(each) for each in self._session.gather(json.dumps(wrong).encode())]
        self._disputed.clear()
        where = "; ".join(f"rank {rank}: shards {shards}" for rank, shards in enumerate(told) if shards)
        if not where:
            return
        self._strikes += 1
        self._tell(where)
        if self._strikes >= STRIKES:
            raise self._broken()

    def _tell(self, where: str) -> None:
        session = self._session
        if session.world.rank == 0:
            text = f"its gradients are not those that others agree on ({where})"
            # Within a group the ranks make gradients together, so those of one may be wrong because of another.
            rank = 0 if session.world.size == 1 else -1
            session.tell(Corrupted(session.member, session.stepper.step, text, rank))

    def _broken(self) -> CorruptionError:
        return CorruptionError(
            f"{self._session.settings.where}, step {self._session.stepper.step}: its gradients are not those that "
            "others agree on, again and again; its device computes wrongly, or its script is not the same"
        )

    def _any_rank(self, mine: bool) -> bool:
        return any(each == b"1" for each in self._session.gather(b"1" if mine else b"0"))
