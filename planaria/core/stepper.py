"""A member's side of a step, as a pure state machine.

Two callers share it (under one lock that the shell owns). The control side tells it of quorums and communicators
(``hear``, ``formed``, ``broken``) and carries out the effects that come back. The training side asks ``next`` what
to do, does it, and says how it went (``rolled``, ``healed``, ``shard_done``, ``exchanged``, ``applied``).

The rules (DESIGN section 4): who finished a step is right, everybody else takes its state; nobody counts before it
has healed; an exchange covers every shard exactly once; a planned change is taken only if every member named the
same one in the control words of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planaria.core.actions import (
    Action,
    Compute,
    Disputed,
    Drop,
    Effect,
    Exchange,
    Finish,
    Form,
    Heal,
    Leave,
    RollCall,
    Tell,
    Wait,
)
from planaria.core.assignment import contiguous, dedupe, fill, slots, weights_of
from planaria.core.catching_up import way
from planaria.core.corruption import Recheck, compared, odd_ones
from planaria.core.messages import (
    NO_QUORUM,
    NOTHING,
    Adopted,
    ControlWord,
    Finished,
    Member,
    Policy,
    Quorum,
    QuorumId,
    Ready,
    Standing,
    Trouble,
)
from planaria.core.tree import maximal_nodes

# Exchanges of a step that did not count because something differed, and nobody was named for it. A member that differs
# heals; one that then differs in the same step again is broken. So whoever is named costs one exchange at most, and the
# job goes on however many are, as long as more than half agree.
RECOUNTS = 3


class Stepper:
    """One incarnation of a group. ``total`` steps, ``shards`` = V; ``groups`` sizes the slots of policy shrink;
    ``recheck`` says which shards are computed twice."""

    def __init__(self, ready: Ready, policy: Policy, groups: int, recheck: Recheck | None = None) -> None:
        self.me: Member = ready.member
        self.shards = ready.shards
        self.total = ready.total_steps
        self.policy = policy
        self.groups = groups
        self.recheck = recheck
        self.step = ready.step  # commits applied; the step being worked on has this index
        self.settled = False  # whether this member's state counts
        self.under = ready.kept  # quorum of the newest commit, as far as is known
        self.have: set[int] = set()  # shards of `step` computed here
        self.checked: set[int] = set()  # shards of `step` computed here to be compared, and held by others
        self.target: Quorum | None = None  # the quorum worked under, or to be taken up next
        self.planned: Quorum | None = None
        self.first: Member | None = None  # of the quorum in which the newest exchange took place, or will
        self.newest = ready.looked  # nothing older is ever taken up: fences late and stale quorums
        self.recomputed = 0  # shards computed here that another member had computed and lost
        self._ready = ready
        self._formed: set[QuorumId] = set()
        self._broken = False
        self._rolled: QuorumId | None = None
        self._heal: Heal | None = None  # to be done next
        self._transfer: Heal | None = None  # begun
        self._healed_under = NO_QUORUM
        self._exchanged_under = NO_QUORUM
        self._owned: tuple[frozenset[int], ...] = ()
        self._advertised: Quorum | None = None  # named in the control word of the exchange under way
        self._switch: Quorum | None = None
        self._asked_to_stop = False  # this process
        self._stopping = False  # all members, from the commit on at which one said so
        self._mine: frozenset[int] = frozenset()  # shards of `step` given to this member so far
        self._rank = 0  # of this member in the quorum that was rolled last
        self._seconds = 0.0  # per shard, as said in the control word of the newest exchange
        self._in_doubt = False  # states differ, and this one may be the one that is wrong
        self._wrong = False  # this one is known to be, and has not healed
        self._odd_at = -1  # the newest step at which it was
        self._recounts = 0  # since the newest commit, for which nobody was named
        self._ending: Finish | Leave | Disputed | None = None

    # --- control side ----------------------------------------------------------------------------------------

    def hear(self, quorum: Quorum) -> list[Effect]:
        """A quorum was published to this member, whether it is in it or not."""
        if quorum.id <= self.newest:
            return []
        self.newest = quorum.id
        return self._hear_urgent(quorum) if quorum.urgent else self._hear_planned(quorum)

    def _hear_urgent(self, quorum: Quorum) -> list[Effect]:
        old = {q.id for q in (self.target, self.planned, self._advertised, self._switch) if q is not None}
        effects: list[Effect] = [Drop(id) for id in sorted(old)]
        self._formed.clear()
        self.planned = self._advertised = self._switch = None
        self._rolled, self._heal, self._broken = None, None, False
        if self.me in quorum.members:
            self.target = quorum
            return [*effects, Form(quorum)]
        # Fenced: the others went on without this member, so its state no longer counts.
        return [*effects, *self._ask_again(quorum)]

    def _ask_again(self, quorum: Quorum) -> list[Effect]:
        """Asks to join again, after ``quorum`` has made this member's state count no more."""
        self.target, self.settled = None, False
        self._ready = replace(self._ready, after=quorum.id)
        return [Tell(self._ready)]

    def _hear_planned(self, quorum: Quorum) -> list[Effect]:
        effects: list[Effect] = []
        inside = self.me in quorum.members
        if self.joining:  # a joiner: it waits in the new quorum's roll call for the members to come
            if self.target is not None:
                effects.append(Drop(self.target.id))
                self._formed.discard(self.target.id)
            self.target, self._broken = (quorum if inside else None), False
            return [*effects, Form(quorum)] if inside else effects
        if self.planned is not None and self.planned is not self._advertised:
            effects.append(Drop(self.planned.id))
            self._formed.discard(self.planned.id)
        self.planned = quorum
        if not inside:
            self._formed.add(quorum.id)  # a leaver has nothing to build
            return effects
        return [*effects, Form(quorum)]

    def formed(self, id: QuorumId) -> list[Effect]:
        """The communicator of ``id`` stands."""
        if self.knows(id):
            self._formed.add(id)
            return []
        return [Drop(id)]

    def broken(self, id: QuorumId, text: str) -> list[Effect]:
        """The communicator of ``id`` could not be built, or failed in use."""
        if self.works_under(id):
            self._broken = True
            return [Tell(Trouble(self.me, id, self.step, text))]
        if self.planned is not None and self.planned.id == id and id not in self._formed:
            return [Tell(Trouble(self.me, id, self.step, text))]
        return []

    def stop(self) -> None:
        """The process was asked to end the job in order: said in the next control word, taken by all members."""
        self._asked_to_stop = True

    # --- training side ---------------------------------------------------------------------------------------

    def next(self) -> Action:
        """What to do now. Asked again after every answer and after news that ended a wait."""
        if self._ending is not None:
            return self._ending
        target = self.target
        if target is None:
            return Leave("the job was asked to stop") if self._asked_to_stop else Wait(parked=True)
        if self._broken or target.id not in self._formed:
            return Wait(parked=not self.settled)
        if self._rolled != target.id:
            return RollCall(target.id, self._standing())
        if self._heal is not None:
            self._transfer = self._heal
            return self._heal
        rank = target.members.index(self.me)
        todo = sorted(self._owned[rank] - self.have)
        twice = self._twice()
        again = sorted(twice[rank] - self.checked) if twice else []
        if again and len(todo) <= 1:  # the last shard of its own comes last, for the exchange begins with it
            return Compute(self.step, again[0], last=False, again=True)
        if todo:
            return Compute(self.step, todo[0], last=len(todo) == 1)
        return Exchange(target.id, self.step, self._owned, twice)

    def _standing(self) -> Standing:
        if self._wrong:  # it holds nothing that anybody should begin with, itself included
            return Standing(NOTHING, settled=False, seconds_per_shard=self._seconds)
        have = frozenset(self.have) if self.settled else frozenset()
        return Standing(self.step, self.settled, have, self.under, self._seconds, recounts=self._recounts)

    @property
    def joining(self) -> bool:
        """Whether it waits to be taken in: the next quorum, planned or not, takes the place of any before it."""
        return self.target is None or (not self.settled and self._rolled is None and not self.target.urgent)

    @property
    def given(self) -> frozenset[int]:
        """The shards of the current step that this member has computed or is to compute."""
        return self._mine

    @property
    def stopping(self) -> bool:
        """Whether it was told that the process was asked to end the job."""
        return self._asked_to_stop

    def knows(self, id: QuorumId) -> bool:
        """Whether the communicator of ``id`` is, or may become, of use."""
        return any(q is not None and q.id == id for q in (self.target, self.planned, self._advertised, self._switch))

    def works_under(self, id: QuorumId) -> bool:
        """Whether ``id`` is in force here and not known to be broken."""
        return self.target is not None and self.target.id == id and not self._broken

    def rolled(self, id: QuorumId, standings: Sequence[Standing]) -> list[Effect]:
        """The roll call on ``id`` is complete; ``standings`` by rank. Every member comes to the same conclusions."""
        target = self.target
        if target is None or not self.works_under(id):
            # Who took part may have ended because of what it showed, and this one be left with a state that is wrong.
            same = {standings[rank].checksum for rank in compared(standings)}
            self._in_doubt = self._in_doubt or len(same) > 1
            return []
        rank = target.members.index(self.me)
        holders = [r for r, s in enumerate(standings) if s.settled]
        # In a founding roll call nobody needs to: the job starts (the lighthouse compared the states that the scripts
        # made), or everybody who was up to date died while others were fenced: their states are older but whole, and
        # the job goes on from there.
        if not holders and not target.founding:
            # Everybody who was settled has died. The lighthouse knows whether somebody outside holds a state.
            effects: list[Effect] = [Drop(q.id) for q in (target, self.planned) if q is not None]
            self.planned = None
            return [*effects, *self._ask_again(target)]
        # Equal steps mean equal states, but for the policy shrink: a member that was left out of a quorum and has
        # not heard of it may have committed the same step with other shards. The later quorum's commit is right.
        sources = tuple(compared(standings))
        top, under = standings[sources[0]].step, standings[sources[0]].under
        if top == NOTHING:  # all are known to be wrong, and nobody is left to heal them
            self._ending = Disputed(self.step, (self.me,))
            return []
        self._recounts = max(standings[r].recounts for r in sources)
        found = odd_ones([standings[r].checksum for r in sources])
        odd = None if found is None else {sources[i] for i in found}
        if odd is None or self._still_unclear(top, rank in odd, len(sources) - len(odd)):
            self._ending = Disputed(top, (self.me,) if odd and rank in odd else target.members)
            return []
        if odd:
            self._recounts = max(0, self._recounts - 1)
        if rank in odd:  # whatever comes of the healing, what it holds counts no more
            self.settled, self._wrong, self._odd_at = False, True, top
            self.have.clear()
        self._in_doubt = False
        sources = tuple(r for r in sources if r not in odd)
        healers = tuple(r for r in range(len(standings)) if r not in sources)
        self._rolled, self._rank, self.first = id, rank, target.members[0]
        if top >= self.total and not healers:
            self._ending = Finish(top)
            return [Tell(Adopted(self.me, id, top))]
        if healers:
            checksum = standings[sources[0]].checksum
            since, givers = way(standings, sources, healers) if not odd else (None, sources)
            receive = rank in healers
            self._heal = Heal(id, top, givers, healers, receive, checksum, under, since)
            self._healed_under = under
        haves = [standings[r].have if r in sources else frozenset() for r in range(len(standings))]
        weights = weights_of([s.seconds_per_shard for s in standings])
        self._owned = self._share(target, haves, weights) if top < self.total else ()
        if rank in healers:
            return []  # until the transfer is complete the old state stands: should the sources die, it may be needed
        self.settled = True
        if self._owned:
            # What was not offered, or what another's counts for, is given up: sums of subtrees cannot be taken apart.
            offered = maximal_nodes(self.have & haves[rank], self.shards)
            kept = [set(range(n.start, n.stop)) for n in offered]
            self.have = set().union(*(k for k in kept if k <= self._owned[rank]))
            if self._mine:  # in the middle of a step: what is new here was another member's, and lost with it
                self.recomputed += len(self._owned[rank] - self._mine)
            self._mine = self._owned[rank]
        return [Tell(Adopted(self.me, id, self.step))]

    def _share(
        self, quorum: Quorum, haves: Sequence[frozenset[int]], weights: Sequence[float]
    ) -> tuple[frozenset[int], ...]:
        """All shards each rank will hold at the exchange: what it has, and what it computes."""
        if self.policy is Policy.SHRINK:
            table = slots(self.shards, self.groups)
            owned = tuple(table[m.group] if m.group < len(table) else frozenset() for m in quorum.members)
            # Groups that were added later have no slot. If only such are left, they share all.
            return owned if any(owned) else contiguous(self.shards, weights)
        if not any(haves):
            return contiguous(self.shards, weights)
        kept = dedupe(self.shards, haves)
        more = fill(self.shards, kept, weights)
        return tuple(k | m for k, m in zip(kept, more, strict=True))

    def healed(self, id: QuorumId) -> list[Effect]:
        """The state of the healing under ``id`` is in place (receiver), or was handed over (source). Holds even if a
        newer quorum was heard at the same moment: what was overwritten is overwritten."""
        heal = self._transfer
        if heal is None or heal.quorum != id:
            return []
        self._transfer = None
        if self._heal is heal:
            self._heal = None
            if heal.step >= self.total:
                self._rolled = None  # farewell: ask again until everybody is there
        if not heal.receive:
            return []
        self.step, self.under = heal.step, self._healed_under
        self.settled = self._ready.after < id  # not if it was fenced in that very moment
        self._wrong = False
        self.have.clear()
        self.checked.clear()
        self._mine = frozenset()
        told: list[Effect] = [Tell(Adopted(self.me, id, self.step))]
        # If it was, it has asked to join with what it held before. What it holds now does not count either, but it is
        # whole: should all others be lost, the job goes on from there, and only who was told of it knows.
        return told if self.settled else [*told, Tell(self._ready)]

    def spoilt(self, id: QuorumId) -> list[Effect]:
        """The state that came in the healing under ``id`` is in place, and not what its sources had in the roll call.
        It counts no more than what was there before, and another roll call tells whose does."""
        self._transfer = None
        self.settled, self._wrong = False, True
        self.have.clear()
        self.checked.clear()
        self._mine = frozenset()
        return self.broken(id, "the state that it was given is not the one that its sources had in the roll call")

    def shard_done(self, shard: int) -> None:
        """The gradients of ``shard`` of the current step are held, whatever happened to the quorum meanwhile."""
        self.have.add(shard)

    def shard_checked(self, shard: int) -> None:
        """``shard`` of the current step was computed for comparison."""
        self.checked.add(shard)

    def dispute(self, shards: frozenset[int], named: bool = False) -> None:
        """The exchange is complete, but for ``shards`` two members have computed something else: nobody commits it.
        They are computed again, by the same members or by others, and so is what their sums hold besides. ``named``:
        all know who is wrong, and that it leaves."""
        held = [set(range(node.start, node.stop)) for node in maximal_nodes(self.have, self.shards)]
        self.have = set().union(*(each for each in held if not each & shards))
        self.checked -= shards
        self._rolled = None
        self._recounts += not named

    def work(self) -> Exchange:
        """The exchange that the current step will end with, as things stand: known before its last shard starts."""
        if self.target is None or self._rolled != self.target.id:
            return Exchange(NO_QUORUM, self.step, ())
        return Exchange(self.target.id, self.step, self._owned, self._twice())

    def _twice(self) -> tuple[frozenset[int], ...]:
        """Who computes which shards of the current step for comparison."""
        if self.recheck is None or self.step >= self.total:
            return ()
        return self.recheck.checkers(self.step, self._owned, self._recounts)

    def watched(self, shard: int) -> bool:
        """Whether the shard of the current step is computed twice."""
        return self.recheck is not None and shard in self.recheck.chosen(self.step, self.shards)

    def word(self, seconds_per_shard: float, named: QuorumId | None = None, checksum: int = 0) -> ControlWord:
        """The control word for the exchange that is about to end. What it names is kept until the outcome is known.

        ``named``: the planned quorum whose communicator stands, as this rank alone knows; ``exchanged`` must then be
        told what came of that. None: what this stepper was told."""
        ready = self.planned is not None and self.planned.id in self._formed
        self._advertised = self.planned if ready and named is None else None
        if named is None:
            named = NO_QUORUM if self._advertised is None else self._advertised.id
        return ControlWord(self.step, named, seconds_per_shard, self._asked_to_stop, checksum)

    def recount(self) -> None:
        """The exchange is complete, but the control words show that members' states differ: nobody commits it. The roll
        is called again, on the same communicator, which tells whose state counts."""
        self._rolled, self._in_doubt = None, True
        self._recounts += 1

    def _still_unclear(self, step: int, odd: bool, agreeing: int) -> bool:
        """Whether a roll call does not settle whose state of ``step`` is right: nobody is left to bear this one's out,
        or all that could be done for the step was done, and it shows a difference again."""
        if self._recounts >= RECOUNTS:
            return True
        return self._odd_at == step if odd else self._in_doubt and agreeing < 2

    def stands(self, quorum: Quorum) -> bool:
        """Whether this stepper knows that it could switch to the planned ``quorum``."""
        return quorum.id in self._formed or self.me not in quorum.members

    def advertised(self, id: QuorumId) -> None:
        """All ranks of the group have named ``id`` in the exchange that has ended, and heard everybody name it: it is
        kept, whatever is heard now."""
        if self.planned is not None and self.planned.id == id:
            self._advertised = self.planned
            self._formed.add(id)

    def exchanged(self, id: QuorumId, words: Sequence[ControlWord]) -> None:
        """The exchange of the current step under ``id`` is complete: the step is committed once the user's code has
        applied it. Holds even if a newer quorum was heard at the same moment: who finished is right."""
        self._exchanged_under = id
        self._stopping = any(w.stop for w in words)
        self._seconds = words[
            self._rank
        ].seconds_per_shard  # not what word() was given: some rank may not have got there
        named = {w.planned for w in words}
        self._switch = None
        if self.target is None or self.target.id != id:
            return
        if self._advertised is not None and named == {self._advertised.id}:
            self._switch = self._advertised  # also if a newer one was heard since: the others saw the same words
        else:
            weights = weights_of([w.seconds_per_shard for w in words])
            self._owned = self._share(self.target, [frozenset()] * len(words), weights)

    def applied(self) -> list[Effect]:
        """The user's code has applied the step: it is committed here."""
        self.step += 1
        self._recounts = 0
        self.checked.clear()
        self.under = self._exchanged_under
        self.have.clear()
        goes_on = self._switch is None and self.target is not None and self.target.id == self._exchanged_under
        self._mine = self._owned[self._rank] if goes_on and self._owned else frozenset()
        effects: list[Effect] = []
        advertised, self._advertised = self._advertised, None
        if advertised is not None and advertised is not self._switch and advertised is not self.planned:
            effects.append(Drop(advertised.id))  # replaced by a newer one meanwhile, and not taken
        if self._stopping and self.step < self.total:
            self._ending = Leave("the job was asked to stop")
            return effects
        if self._switch is not None and self.target is not None:
            effects.append(Drop(self.target.id))
            if self.planned is not None and self.planned.id == self._switch.id:
                self.planned = None
            self.target, self._switch, self._rolled = self._switch, None, None
            if self.me not in self.target.members:
                self._ending = Leave(f"group {self.me.group} was drained", drained=True)
            else:
                # Said before the roll call: should that fail, the lighthouse must know which quorum is in force.
                effects.append(Tell(Adopted(self.me, self.target.id, self.step)))
        elif self.step >= self.total:
            self._rolled = None  # farewell: see that everybody is there before leaving
        return effects

    def finished(self, digest: str) -> list[Effect]:
        return [Tell(Finished(self.me, self.step, digest))]
