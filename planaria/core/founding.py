"""How a job begins, and how it begins again when every group that held the state is lost: from a durable checkpoint, or
from copies that ranks keep in each other's memory.

The disk is the truth about checkpoints: the last one may have become complete just before the last death, and then
nobody has told of it. So a job that writes checkpoints always begins again, with groups that look at the disk after
that was decided. Each says what it found; the newest counts, and the others take its state at the roll call. It is so
whichever agent has which group, and even if they see different disks. Memory is one more place to look at, but nothing
that was once found there can be counted on later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from planaria.core.fingerprint import drift, odd_ones, outdated
from planaria.core.ledger import Ledger
from planaria.core.messages import NO_QUORUM, Ready, Resume, Saved
from planaria.core.roster import CERTAINLY_GONE, Group, LineageRecord, State, named

# The first groups to be ready wait for the others as long again as the first one took, at least this long
# (processes of one start come up within seconds of each other).
FOUNDING_GRACE = 10.0
# Whoever loses every group so often between one checkpoint and the next has a cause that starting again does not heal.
RESUMES = 3


class Founding(Ledger):
    """The first quorum of a job, and of every run of it after all was lost."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self.durable = 0  # step of the newest durable checkpoint that is known of; 0: none
        self.saves: bool | None = None  # whether the job writes any; None: nobody has said
        self.keeps = False  # whether it keeps copies in memory
        self._first_ready_at: float | None = None
        self._start = 0  # the step with which the job began last
        self._had = 0  # 1: there was a state that counted, so a job without checkpoints needs a copy of one
        self._resumed = (0, 0)  # from which step the job was started again last, and how often in a row from there
        self._sought = 0  # the newest checkpoint that was known when groups were told to look at the disk
        self._missed = 0  # people were told that nobody sees the checkpoint of this step
        self._awaited_copies = -1  # they were told that newer copies than of this step are waited for

    # --- what a report changes -------------------------------------------------------------------------------

    def _saved(self, report: Saved) -> None:
        group = report.member.group
        self.saves = True
        if report.trouble:
            self._event("unsaved", f"{report.member}: {report.trouble}", group)
        elif report.step > self.durable:  # else it is said again after a reconnect
            self.durable = report.step
            self._event("saved", f"{report.member} saved step {report.step} in {report.seconds:.2f} s", group)

    def _may_begin(self, report: Ready) -> None:
        """A group is there, with whatever it found on the disk."""
        self.saves = self.saves or report.saves
        self.keeps = self.keeps or report.keeps
        if report.kept == NO_QUORUM:
            self.durable = max(self.durable, report.step)

    # --- decisions -------------------------------------------------------------------------------------------

    def _found(self) -> None:
        """The first quorum: wait for the groups that were asked for, but not for ever."""
        ready = [g for g in self.seen.tellable() if g.state is State.READY and not g.draining]
        if late := {g.agent: None for g in ready if not self._looked(g)}:
            # They were started while others held the state, and nobody does any more: others will come in their place.
            reason = "nobody holds the state of the job any more"
            if self._run == NO_QUORUM:  # who is to look once more must be told a number, and no run has had any yet
                self._begin_again(reason)
                return
            self._have_looked(late, reason)
            ready = [g for g in ready if self._looked(g)]
        # Whoever leaves stays until somebody has its copy.
        leaving = [g for g in self.seen.tellable() if g.state is State.READY and g.draining and self._looked(g)]
        newest = max((g.ready.step for g in ready if g.ready is not None), default=-1)
        ready += [g for g in leaving if g.ready and g.ready.kept != NO_QUORUM and g.ready.step > newest]
        if self.spec is None or not ready or self.complete:
            return
        if self._first_ready_at is None:
            self._first_ready_at = self.seen.at
        overdue = self.seen.at >= self._first_ready_at + self._founding_grace()
        if len(ready) < self.spec.groups and (not overdue or len(ready) < self.spec.min_groups):
            return
        reports = [g.ready for g in ready if g.ready is not None]
        newest = max(report.step for report in reports)
        if newest < self.durable and self._is_damaged(reports):
            text = (
                f"the checkpoint of step {self.durable} is damaged; the newest that is whole is that of step {newest}"
            )
            self._event("unshared", text)
            self.durable = newest
        if newest < self._least() and not self.saves:
            self._without_copies()
            return
        if newest < self.durable and self._look_further(len(ready)):
            return
        if self._waits_for_copies(ready):
            return
        older = [r for r in reports if r.step < newest and self._run != NO_QUORUM]
        odd = [(r, f"{r.member} starts at {outdated(r, self.durable)}") for r in reports if newest < self.durable]
        # Copies of one step may come from different runs of it. The roll call tells them apart.
        odd = odd or odd_ones([r for r in reports if r.kept == NO_QUORUM], newest if older else 0)
        for report, reason in odd:
            self._refuse(self.seen.groups[report.member.group], reason)
        if odd:
            return
        for report in older:
            text = f"{report.member} sees {outdated(report, newest)}. It takes the state from the others"
            self._event("unshared", text, report.member.group)
        self._drifts(reports[1:], reports[:1])
        self._start = newest
        self._publish(ready, True, "the job starts", founding=True)

    def _drifts(self, joining: list[Ready], others: Iterable[Ready]) -> None:
        """Tell of members that may differ in what bits depend on, and do."""
        for report in joining:
            if told := drift(report, others):
                self._event("drift", told, report.member.group)

    def _look_further(self, ready: int) -> bool:
        """Nobody who is there sees the newest checkpoint that is known of. Whether one may still come who does."""
        if self._sought < self.durable:  # it was heard of after they had looked
            self._begin_again(f"the checkpoint of step {self.durable} was heard of late: all look at the disk again")
            return True
        if self.spec is None or ready >= self.spec.groups:
            return False
        if self._missed != self.durable:
            self._missed = self.durable
            text = f"none of the groups that are there sees the checkpoint of step {self.durable}"
            self._event("unshared", f"{text}; waiting for the others. Give all the same directory")
        return True

    def _waits_for_copies(self, views: Collection[Group]) -> bool:
        """Whether somebody lives, if perhaps out of reach or stopped, who has told of a newer copy than ``views``."""
        newest = max((v.ready.step for v in views if v.ready is not None), default=0)
        others = [v for v in self.seen.groups.values() if v not in views and v.state not in CERTAINLY_GONE]
        newer = [v for v in others if v.ready and v.ready.kept != NO_QUORUM and v.ready.step > newest]
        away = [v for v in newer if self._looked(v)]
        if away and self._awaited_copies != newest:
            self._awaited_copies = newest
            held = named(v.member for v in away)
            text = f"a newer copy of the state than that of step {newest} is held only by {held}; waiting for them"
            self._event("unshared", f"{text} (planaria evict GROUP declares one dead)")
        return bool(away)

    def _without_copies(self) -> None:
        """None of the groups that are there has a copy of the state, and there are no checkpoints."""
        views = self.seen.groups.values()
        # One that was to leave before it was ever there holds nothing, and may never be.
        waits = [v for v in views if v.state not in CERTAINLY_GONE and (v.ready is not None or not v.draining)]
        away = [v.member for v in waits if not self._looked(v)]
        # Of one that has lost a rank the others may live, with their copies: its agent would say so.
        lost = [v for v in views if v.state is State.DEAD and not v.evicted and not v.draining]
        away += [v.member for v in lost if not self.seen.connected(v)]
        if away:
            if self._missed != self._least():
                self._missed = self._least()
                text = f"no whole copy of the state was found yet; waiting for {named(away)}"
                self._event("unshared", f"{text} (planaria evict GROUP declares one dead)")
            return
        text = f"job {self.job}: every group that held the state is lost, and no whole copy of it is left in memory"
        self._stop(f"{text}; without a durable checkpoint the job cannot go on. Start it again")

    def _least(self) -> int:
        """Steps that the job's state must have at least, or it would be another that is known of or was lost."""
        return self.durable if self.saves else max(self.durable, self._had)

    def _all_lost(self) -> None:
        if self.saves is None:
            return  # after a restart: the next group to be there will say
        lost = f"every group that held the state is lost (last commit seen: step {max(self.seen.top_step, 0)})"
        if not (self.saves or self.keeps):
            self._stop(f"job {self.job}: {lost}; without a durable checkpoint the job cannot go on. Start it again")
            return
        self._had = int(self.founded)
        step, times = self._resumed
        mark = max(self.durable, self._start)
        self._resumed = (mark, times + 1 if step == mark else 1)
        if self._resumed[1] > RESUMES:
            self._stop(
                f"job {self.job}: {lost}; started again {RESUMES} times, it did not get from "
                f"{self._start_known()} to the next checkpoint"
            )
            return
        newer = "or a newer one if there is any"
        if self.keeps:
            newer = "or from a newer copy in memory if there is a whole one"
        self._begin_again(f"{lost}; the job starts again from {self._start_known()}, {newer}")

    def _start_known(self) -> str:
        if self._start > self.durable:
            return f"step {self._start}"
        return f"the checkpoint of step {self.durable}" if self.durable else "the beginning"

    def _begin_again(self, reason: str) -> None:
        """A new run of the job, in the same line of numbers: whoever held a state under an older one is fenced."""
        self.founded, self._untouched, self._sought = False, None, self.durable
        self._run = self._store((), begins=True)
        self._take(None)
        self.planned, self._offered, self._trouble_at = None, {}, None
        self._first_ready_at, self._started_at, self._awaited_copies = None, self.seen.at, -1
        self.seen.top_step = self.durable
        self._event("resume", reason)
        self._have_looked(self.seen.agents, reason)

    def _have_looked(self, agents: Collection[str], reason: str) -> None:
        """Have the groups of these agents replaced that looked too early, or not at all."""
        for agent in agents:
            self._send(agent, Resume(reason, self._run))
        for view in (view for agent in agents for view in self.seen.of_agent(agent)):
            if view.state is State.READY and not self._looked(view):
                view.state = State.STARTING

    def _tell_again(self, agent: str) -> None:
        super()._tell_again(agent)
        if self.current is None and self._run != NO_QUORUM:
            self._have_looked((agent,), "the job starts again from its newest checkpoint")

    # --- small questions -------------------------------------------------------------------------------------

    @property
    def _may_begin_again(self) -> bool:
        """Whether the job has, or may have, something to begin again from."""
        return self.saves is not False or self.keeps

    def _looked(self, view: Group) -> bool:
        """Whether it has seen the newest of what the disk held when this run of the job began."""
        return view.ready is not None and view.ready.initial != "" and view.ready.looked >= self._run

    def _can_begin(self, views: Iterable[Group]) -> bool:
        """Whether among these is one with which the job may begin, as far as checkpoints are known."""
        reports = [g.ready for g in views if g.ready is not None and self._looked(g)]
        newest = max((report.step for report in reports), default=-1)
        return newest >= self._least() or (newest >= 0 and self._is_damaged(reports))

    def _is_damaged(self, reports: Iterable[Ready]) -> bool:
        """Whether one of these saw that the newest checkpoint that is known of is of no use."""
        return self.saves is True and any(report.damaged >= max(self.durable, 1) for report in reports)

    def _founding_grace(self) -> float:
        return max(FOUNDING_GRACE, (self._first_ready_at or 0.0) - (self._started_at or 0.0))
