"""The promise, checked while a run goes on (DESIGN section 8).

One membership per quorum id; every collective is entered by all with the same intention; every committed step has
every shard exactly once; no two different commits of a step; nobody's unhealed state ever counts; epochs only rise;
whoever finishes holds the state of the run in which nothing failed; whatever happens, the job goes on once faults stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planaria.core.actions import Exchange
from planaria.core.messages import NO_QUORUM, Member, Policy, Quorum, QuorumId, Standing
from planaria.core.tree import Node, fold_plan

START = 17
LONGEST_STEP = 2.0  # seconds, when nothing happens to members: the slowest step takes 0.8


class Violation(Exception):
    """A promise was broken. The text says which one and where."""


def gradient(weights: int, step: int, shard: int) -> int:
    """Hashes of tuples of numbers are the same in every run and on every machine."""
    return hash((weights, step, shard))


def add(a: int, b: int) -> int:
    """Like the addition of floats: commutative, not associative, so that every bracket matters."""
    return hash((min(a, b), max(a, b)))


def reduce(parts: Sequence[tuple[Node, int]], shards: int) -> int:
    """The sum of subtree sums, with the brackets of the tree."""
    sums = [value for _, value in parts]
    for into, other in fold_plan([node for node, _ in parts], shards):
        sums[into] = add(sums[into], sums[other])
    return sums[0]


def apply(weights: int, step: int, total: int) -> int:
    return hash((weights, step, total))


class Checker:
    """Hears of everything that matters and raises Violation at once."""

    def __init__(
        self,
        shards: int,
        steps: int,
        policy: Policy,
        calm: bool = False,
        steady: bool = False,
        parting: bool = False,
        copies: bool = False,
    ) -> None:
        self.on_roll: Callable[[QuorumId, list[Standing]], None] = lambda id, standings: None
        self.calm = calm  # nothing fails in this run, but changes may be asked for
        self.parting = parting  # under the policy shrink, changes are asked for or the job may begin again
        self.copies = copies  # the job may begin again from what is in memory
        self.steady = steady  # no member and no link between members fails in this run
        self.shards = shards
        self.policy = policy
        self.reference = [START]  # the quiet run: weights after each number of steps
        self._sums: list[int] = []  # of its steps
        for step in range(steps):
            weights = self.reference[-1]
            leaves = [(Node(s, s + 1), gradient(weights, step, s)) for s in range(shards)]
            self._sums.append(reduce(leaves, shards))
            self.reference.append(apply(weights, step, self._sums[-1]))
        self.exchanged = 0  # steps of which an exchange was complete at somebody
        self.commits = 0
        self.finishers: dict[Member, int] = {}
        self.quorums: list[Quorum] = []  # all that were published
        self._quorums: dict[QuorumId, tuple[Member, ...]] = {}
        self._lineages: dict[QuorumId, str] = {}
        self._urgent: dict[QuorumId, tuple[Member, ...]] = {}
        self._commit_at: dict[Member, float] = {}
        self._rolled: dict[Member, QuorumId] = {}
        self._commits: dict[tuple[QuorumId, int], int] = {}
        self.evicted: set[Member] = set()  # an operator took it upon himself
        # Every run of the job, by the record with which it began: the next step that can be committed, and the first.
        self._runs: dict[QuorumId, int] = {}
        self._starts: dict[QuorumId, int] = {}
        self._needed: dict[QuorumId, int] = {NO_QUORUM: 0}  # steps that its start must have

    def fail(self, text: str) -> None:
        raise Violation(text)

    def membership(self, quorum: Quorum) -> None:
        known = self._quorums.setdefault(quorum.id, quorum.members)
        if known != quorum.members:
            self.fail(f"quorum {quorum.id} has two memberships: {known} and {quorum.members}")
        if self._lineages.setdefault(quorum.id, quorum.lineage) != quorum.lineage:
            self.fail(f"quorum {quorum.id} has two lineages")

    def published(self, quorum: Quorum, stored: set[QuorumId]) -> None:
        self.membership(quorum)
        if quorum not in self.quorums[-9:]:
            self.quorums.append(quorum)
        if quorum.id not in stored:
            self.fail(f"quorum {quorum.id} was published and is not in the store")
        if quorum.urgent:
            self._urgent[quorum.id] = quorum.members

    def included(self, member: Member, newest: QuorumId) -> bool:
        """Whether no urgent quorum, also of those that have not reached the member yet, leaves it out."""
        return all(member in members for id, members in self._urgent.items() if id > newest)

    # --- runs: the job began again from a checkpoint ---------------------------------------------------------

    @property
    def began(self) -> int:
        """How often it did."""
        return len(self._needed) - 1

    def begins(self, run: QuorumId, newest: int) -> None:
        """A run begins; ``newest``: step of the newest checkpoint that is complete now."""
        self._needed[run] = newest

    def _run_of(self, id: QuorumId) -> QuorumId:
        return max(run for run in self._needed if run <= id)

    def starts(self, quorum: Quorum, step: int) -> None:
        """Members of a founding quorum are about to begin with the state of ``step``."""
        run = self._run_of(quorum.id)
        if step < self._needed[run]:
            self.fail(f"{quorum.id} begins at step {step}, but there was a checkpoint of step {self._needed[run]}")
        start, due = self._starts.setdefault(run, step), self._runs.setdefault(run, step)
        # A copy may be gone with its group before anybody committed on it; and it may have had a part in a job that is
        # complete, of which only a checkpoint is left for another of that name.
        if self.copies and step < start and (start == due or self.finishers):
            self._starts[run] = self._runs[run] = step

    def _counts_once(self, member: Member, exchange: Exchange) -> None:
        run, step = self._run_of(exchange.quorum), exchange.step
        if run != max(self._needed) and member not in self.evicted:
            self.fail(f"{member} commits step {step} under {exchange.quorum}, but the job began again meanwhile")
        if not self._starts.get(run, 0) <= step <= self._runs.get(run, step):
            self.fail(f"{member} commits step {step} in a run that began at {self._starts.get(run)}, out of turn")
        self._runs[run] = max(self._runs.get(run, 0), step + 1)

    # --- members ---------------------------------------------------------------------------------------------

    def rolled(self, member: Member, id: QuorumId) -> None:
        if id < self._rolled.get(member, id):
            self.fail(f"{member} works under {id} after {self._rolled[member]}")
        self._rolled[member] = id

    def broken(self, member: Member, id: QuorumId, text: str) -> None:
        if self.calm:
            self.fail(f"only planned changes were asked for, but at {member} {id} broke: {text}")

    def collective(self, quorum: Quorum, key: object, payloads: Sequence[object]) -> None:
        if isinstance(key, tuple) and key[0] == "exchange":
            self._shards(quorum, key[1], key[2])
            origins = {getattr(payload, "origin", 0) for payload in payloads}
            if len(origins) > 1:
                self.fail(f"members of {quorum.id} come from different checkpoints: of steps {sorted(origins)}")
            self.exchanged = max(self.exchanged, key[1] + 1)
        if key == "roll call":
            standings = [p for p in payloads if isinstance(p, Standing)]
            if len(standings) != len(quorum.members):
                self.fail(f"the roll call of {quorum.id} has {len(standings)} standings")
            self.on_roll(quorum.id, standings)

    def _shards(self, quorum: Quorum, step: int, owned: Sequence[frozenset[int]]) -> None:
        counted = sorted(s for each in owned for s in each)
        if len(set(counted)) != len(counted):
            self.fail(f"step {step} under {quorum.id} has a shard twice: {counted}")
        if not counted:
            self.fail(f"step {step} under {quorum.id} is exchanged without any shard")
        if self.policy is not Policy.SHRINK and counted != list(range(self.shards)):
            self.fail(f"step {step} under {quorum.id} has shards {counted} of {self.shards}")

    def is_sum(self, step: int, total: int) -> bool:
        """Whether the step of the quiet run has this sum."""
        return self._sums[step] == total

    def committed(
        self, member: Member, exchange: Exchange, nodes: Sequence[Node], weights: int | None, now: float
    ) -> None:
        """``weights``: with which the member ends; None if it was damaged before."""
        self.commits += 1
        gap = now - self._commit_at.get(member, now)
        self._commit_at[member] = now
        if self.steady and gap > LONGEST_STEP:
            self.fail(f"no member failed, but {member} took {gap:.1f} s for step {exchange.step}")
        self._counts_once(member, exchange)
        step = exchange.step
        promised = sorted(s for each in exchange.owned for s in each)
        shards = sorted(s for node in nodes for s in range(node.start, node.stop))
        if shards != promised:
            self.fail(f"{member} committed step {step} with shards {shards} instead of {promised}")
        if weights is None:
            return
        if self.policy is not Policy.SHRINK:
            if weights != self.reference[step + 1]:
                self.fail(f"{member} committed step {step} with a state that is not that of the quiet run")
        elif self._commits.setdefault((exchange.quorum, step), weights) != weights:
            self.fail(f"{member} committed step {step} under {exchange.quorum} unlike another member")

    def healed(self, member: Member, step: int, given: Sequence[Any]) -> tuple[Any, int]:
        """The state that the receiver ends with, and the step of the checkpoint from which it comes."""
        if len(set(given)) != 1:
            self.fail(f"{member} heals to step {step} from sources that disagree: {given}")
        found = given[0]
        assert isinstance(found, tuple)
        if found[0] != step:
            self.fail(f"{member} heals to step {step} from a source that holds step {found[0]}, state {found[1]}")
        return found[1], int(found[2])

    def finished(self, member: Member, step: int, weights: int) -> None:
        self.finishers[member] = weights
        if step != len(self.reference) - 1:
            self.fail(f"{member} finished at step {step} of {len(self.reference) - 1}")
        if self.policy is not Policy.SHRINK and weights != self.reference[-1]:
            self.fail(f"{member} finished with a state that is not that of the quiet run")
        # Under the policy shrink a planned change can part the members just as a false alarm does: each part then goes
        # on with its own samples until one of them hears that it was fenced. And a step that is made again after all
        # was lost may have other samples than before. That is what the user has chosen.
        if len(set(self.finishers.values())) > 1 and not self.parting:
            self.fail(f"finished members hold different states: {self.finishers}")
