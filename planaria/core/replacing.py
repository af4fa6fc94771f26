"""What follows a quorum that is broken: who is in the next one, and whether there can be one at all.

A new quorum needs a majority of the last one, or certainty that the others are dead. It goes on from a state that
counts if one is left, and otherwise from the newest of those that were once right. Members that cannot reach each other
are left out one after the other until the rest can work; members of another lineage are sent home.
"""

from __future__ import annotations

from planaria.core.messages import NO_QUORUM, Member, Policy, Quorum, QuorumId
from planaria.core.roster import CERTAINLY_GONE, Group, LineageRecord, State, named
from planaria.core.standstill import IN_A_ROW, REPLAN_DELAY, Standstills


class Replacements(Standstills):
    """``_replace`` when the quorum in force is broken; ``_send_home`` when strangers are met."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self._stateless = NO_QUORUM  # a quorum whose roll call found nobody with a state that counts
        self._strikes = 0  # urgent quorums in a row that broke although nobody died
        self._strike_step = -1

    def _replace(self, base: Quorum, gone: list[Member]) -> None:
        # Only members that can be told: one out of reach would stall the forming, and heals if it lives.
        tellable = self.seen.tellable()
        told = {g.member for g in tellable}
        inside = set(base.members)
        uncertain = {m for m in inside if not self.seen.certain(m) and m not in told}
        if uncertain and len(told & inside) <= len(uncertain):
            names = named(uncertain)
            self._warn(base, f"out of reach: {names} of quorum {base.id}, and the others are no majority of it")
            return
        live = [g for g in tellable if not g.leaving]
        if not live or not any(g.settled for g in live):
            live = tellable  # whoever leaves stays until somebody has healed from it
        founding = self._may_go_on(base, live, uncertain)
        if founding is None:
            return
        if founding:  # who has not looked at the disk must not give the job its state: it joins when there is one
            live = [g for g in live if g.adopted != NO_QUORUM or self._looked(g)]
        if self.complete or (not founding and self._waits_for_rounds(live, inside)):
            live = [g for g in live if g.member in inside]  # if the job is ending, nobody joins any more
        if not live:
            return
        if not gone and self._stateless != base.id:
            live = self._leave_one_out(live)
        late = [m for m in gone if (v := self.seen.of(m)) is not None and v.state is State.SUSPECT and v.late]
        broke = "it stood still" if self._stood_still == base.id else "a communicator broke"
        why = f"{named(gone)} {'late' if late == gone else 'lost'}" if gone else broke
        self._publish(live, True, why, founding)

    def _waits_for_rounds(self, live: list[Group], inside: set[Member]) -> bool:
        """Whether low communication goes on without those who are to join. Who is taken in in the middle of a round
        makes all of its inner steps, and the others, who have made theirs, wait; after the commit it costs nobody
        anything. But for the policy ``spare``, which has them wait."""
        if self.spec is None or self.spec.policy is Policy.SPARE or not all(g.ready and g.ready.lenient for g in live):
            return False
        return any(g.settled for g in live if g.member in inside)

    def _may_go_on(self, base: Quorum, live: list[Group], uncertain: set[Member]) -> bool | None:
        """Whether a quorum of ``live`` can be made: False if somebody in it may be settled, True if it has to begin
        with the newest complete states there are; None if it must not be made, at least not now."""
        if not self.founded:
            if base.id.epoch != self.epoch and self._may_begin_again and all(self.seen.over(m) for m in base.members):
                self._all_lost()  # an earlier life of the lighthouse made it, and nobody lives to tell how far it got
                return None
            if self._waits_for_copies(live):
                return None
            if self._can_begin(live):
                return True
            # Nothing to lose yet: start afresh when they are back.
            self._take(None)
            self._first_ready_at = None
            self._found()
            return None
        untouched = self._untouched or set()
        if self._can_begin(g for g in live if g.adopted == g.fenced == NO_QUORUM and g.member in untouched):
            return True
        if any(g.settled for g in live):
            return False
        if away := [m for m in base.members if m in uncertain or self.seen.suspect(m)]:
            # Out of reach or stopped is not dead: they may come back with the state.
            text = f"the newest state is held only by {named(away)}"
            if self.keeps and not any(m in uncertain for m in away):
                # To evict one would be to lose its copies too.
                self._warn(base, text, "planaria kill GROUP --rank RANK has the rank replaced that does not go on")
            else:
                self._warn(base, text)
            return None
        joined = {m for q in (base, *self._offered.values()) for m in q.members}
        if any(g.member in joined and g.fenced < base.id for g in live):
            return False  # a joiner may have healed just before the others died: its roll call will say
        if any(g.adopted != NO_QUORUM for g in live):
            return True  # fenced members: their states are older, but whole, and so still right
        if veterans := self.seen.veterans():
            self._warn(base, f"a state is held only by {named(g.member for g in veterans)}")
        elif not self.complete and not self._may_be_unheard():
            self._all_lost()
        return None

    def _begin_again(self, reason: str) -> None:
        super()._begin_again(reason)
        self._strikes, self._strike_step, self._replan_at = 0, -1, 0.0

    def _leave_one_out(self, live: list[Group]) -> list[Group]:
        """Communicators keep breaking though nobody died: two members cannot reach each other. Leave out another
        one each time until those who remain can work; the one left out may come back by a planned change. What stood
        still may be slow: that counts only when it comes again and again.

        Whoever has not said that it broke comes first: all who live see it, and one whose process needs long to die,
        or whose agent is slow to say so, is silent."""
        if self._stood_still == self._current_id and self._in_a_row[1] <= IN_A_ROW:
            return live
        self._strikes += 1
        self._strike_step = self.seen.top_step
        if self._strikes <= 2 or len(live) < 2:
            return live
        doubtful = sorted(live, key=lambda g: (g.member in self._complained, -g.member.group))
        odd = doubtful[(self._strikes - 3) % len(live)]
        self._replan_at = self.seen.progress_at + REPLAN_DELAY[1]
        return [g for g in live if g is not odd]

    def _strangers(self) -> list[Group]:
        """Members with a state of another lineage: they work under a quorum above all that this one has. Somebody had
        another lighthouse, with a store of its own, serve the same job. If one is left who holds a state of this
        lineage, it wins, however far the other got; if none is, the other goes on as this one."""
        newest = max(QuorumId(self.epoch, self._number) if self._number else NO_QUORUM, self._newest_before)
        settled = [g for g in self.seen.tellable() if g.settled]
        strangers = [g for g in settled if g.adopted > newest]
        return strangers if newest != NO_QUORUM and len(strangers) < len(settled) else []

    def _send_home(self, current: Quorum, strangers: list[Group]) -> None:
        """Fence them by a quorum without them. They heal, and join again."""
        out = {view.member for view in strangers}
        live = [g for g in self.seen.tellable() if g.settled and g.member not in out and not g.leaving]
        inside = {g.member for g in live} & set(current.members)
        uncertain = [m for m in current.members if not self.seen.certain(m) and m not in out | inside]
        if not live or len(inside) <= len(uncertain):
            self._warn(current, f"{named(out)} holds a state of another lineage, and of this one no majority is there")
            return
        for view in strangers:
            self._throws_away(view, max(self._step_before, 0), view.step, "comes from another lineage of this job")
        self._publish(live, True, f"{named(out)} of another lineage", founding=False)

    def _throws_away(self, view: Group, known: int, step: int, why: str) -> None:
        if (steps := step - known) > 0:
            thrown = f"up to {steps} steps that it committed after step {known} are thrown away"
            self._event("diverged", f"{view.member} {why}: {thrown}", view.member.group)

    def _unheard(self, current: Quorum) -> bool:
        """Whether a quorum of an earlier life of the lighthouse never reached some member, as far as that one says."""
        if current.id.epoch == self.epoch:
            return False
        views = [v for m in current.members if (v := self.seen.of(m)) is not None and v.state not in CERTAINLY_GONE]
        return any(v.adopted != current.id and self.seen.connected(v) for v in views)

    def _nobody_settled(self, quorum: Quorum) -> None:
        """The roll call of ``quorum`` said so to one member, and thereby to all."""
        self.founded = True  # or else they would have begun with the states of the scripts
        self._stateless = quorum.id
        for member in quorum.members:
            if (view := self.seen.of(member)) is not None:
                view.fenced = max(view.fenced, quorum.id)

    def _gone(self, member: Member, trouble: bool) -> bool:
        return self.seen.gone(member, trouble)
