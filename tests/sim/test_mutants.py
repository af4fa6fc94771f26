"""The simulator is only worth as much as the mistakes that it finds. Each of these is planted, and must be found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.core import actions as core
from planaria.core import leadership as election
from planaria.core.leadership import Answer, Away, Held, Leadership, Renewed
from planaria.core.messages import (
    NO_QUORUM,
    Adopted,
    ControlWord,
    Member,
    Policy,
    Quorum,
    QuorumId,
    Ready,
    Standing,
    Trouble,
)
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, Group, Persist
from planaria.core.stepper import Stepper
from planaria.sim.scenario import CONTROL_FAULTS, LOST_MESSAGES, MEMBER_FAULTS, PLANNED, Scenario, random_scenario
from planaria.sim.world import World

SEEDS = 400
BASE = Scenario(groups=4, shards=6, steps=8)


class TakesStaleQuorums(Stepper):
    """Not fenced: takes up whatever was published, also by an older epoch."""

    def hear(self, quorum: Quorum) -> list[core.Effect]:
        self.newest = NO_QUORUM
        return super().hear(quorum)


class LosesAShard(Stepper):
    """After a loss, one inherited shard is given to nobody."""

    def _share(self, quorum, haves, weights):  # type: ignore[no-untyped-def]
        owned = super()._share(quorum, haves, weights)
        return (owned[0] - {max(owned[0], default=0)}, *owned[1:]) if any(haves) else owned


class CountsAShardTwice(Stepper):
    """After a loss, the first two ranks both compute the same shard."""

    def _share(self, quorum, haves, weights):  # type: ignore[no-untyped-def]
        owned = super()._share(quorum, haves, weights)
        if any(haves) and len(owned) > 1 and owned[1]:
            return (owned[0] | {min(owned[1])}, *owned[1:])
        return owned


class CountsBeforeItHealed(Stepper):
    """A joiner goes on with the state that its script made."""

    def rolled(self, id: QuorumId, standings):  # type: ignore[no-untyped-def]
        effects = super().rolled(id, standings)
        if self._heal is not None:
            self.step, self.settled, self._heal = self._heal.step, True, None
        return effects


class TakesTheLaggard(Stepper):
    """Members that are a step behind are taken to be in step."""

    def rolled(self, id: QuorumId, standings):  # type: ignore[no-untyped-def]
        top = max(s.step for s in standings)
        return super().rolled(id, [replace(s, step=top) if s.settled else s for s in standings])


class KeepsOldGradients(Stepper):
    """Shards of the last step are still held to be there in the next."""

    def applied(self) -> list[core.Effect]:
        kept = set(self.have)
        effects = super().applied()
        self.have = kept
        return effects


class SwitchesAlone(Stepper):
    """Takes a planned change as soon as its own communicator is built."""

    def exchanged(self, id: QuorumId, words: list[ControlWord]) -> None:  # type: ignore[override]
        mine = self._advertised.id if self._advertised is not None else NO_QUORUM
        super().exchanged(id, [replace(w, planned=mine) for w in words])


class SaysNothing(Stepper):
    """A broken communicator is not reported."""

    def broken(self, id: QuorumId, text: str) -> list[core.Effect]:
        super().broken(id, text)
        return []


class FinishesAlone(Stepper):
    """Leaves right after its last commit, without asking whether somebody still needs its state."""

    def applied(self) -> list[core.Effect]:
        effects = super().applied()
        if self._ending is None and self.step >= self.total:
            self._ending = core.Finish(self.step)
        return effects


class PublishesFirst(Lighthouse):
    """Tells members of a quorum before it is in the store."""

    def _end(self) -> list[Effect]:
        return sorted(super()._end(), key=lambda effect: isinstance(effect, Persist))


class ForgetsItsEpoch(Lighthouse):
    """Numbers its quorums as if it were the first lighthouse of the job."""

    def __init__(self, job: str, epoch: int, last=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(job, 1, last)


class TrustsTheDead(Lighthouse):
    """Does not replace a quorum when one of its members dies."""

    def _gone(self, member, trouble):  # type: ignore[no-untyped-def]
        return False

    def _trouble(self, report):  # type: ignore[no-untyped-def]
        pass


class CondemnsTheSilent(Lighthouse):
    """Takes every member out of reach for dead at once."""

    def _gone(self, member, trouble):  # type: ignore[no-untyped-def]
        return self.seen.gone(member, True)


class FoundsAgain(Lighthouse):
    """Starts from the states of the scripts although somebody who is out of reach or stopped holds a newer one."""

    def _may_go_on(self, base, live, uncertain):  # type: ignore[no-untyped-def]
        return True if live else None


class ForgetsVeterans(Lighthouse):
    """Ends the job as soon as those who are up to date are lost, although fenced members still hold a state."""

    def _may_go_on(self, base, live, uncertain):  # type: ignore[no-untyped-def]
        if not self.founded or any(g.settled for g in live):
            return not self.founded
        self._stop("every group that held the state is lost")
        return None


class HurriesChanges(Lighthouse):
    """Publishes a planned change before the last one was taken by all."""

    def _plan(self) -> None:
        self._awaited.clear()
        super()._plan()


class ExpectsNoLeave(Lighthouse):
    """Takes the end of a drained group for a loss."""

    def _leaving(self, member):  # type: ignore[no-untyped-def]
        return False


class KeepsLateJoiners(Lighthouse):
    """Leaves agents waiting whose groups came too late to have a part in the end of the job."""

    def _dismiss(self) -> None:
        pass


class DismissesTooEarly(Lighthouse):
    """Takes the end of the first group to have finished for the end of all."""

    def _in_force(self, member: Member) -> bool:
        return not self.complete and super()._in_force(member)


class BelievesReportsAlone(Lighthouse):
    """Ends the job if all was lost before it heard of a checkpoint."""

    def _all_lost(self) -> None:
        self.saves = self.durable > 0
        super()._all_lost()


class BeginsWithAnybody(Lighthouse):
    """Takes whoever is there for a beginning, with or without a look at the disk."""

    def _looked(self, view: Group) -> bool:
        return view.ready is not None


class BeginsWithoutACopy(Lighthouse):
    """Takes whoever is there for a beginning, although copies of a state were lost or are still to come."""

    def _least(self) -> int:
        return self.durable


class BeginsWithAnOlderCopy(Lighthouse):
    """Does not wait for one that stands still and has the newest."""

    def _waits_for_copies(self, views: Collection[Group]) -> bool:
        return False


class HearsNothingOfThePast(Lighthouse):
    """Drops complaints about the quorum before a planned one that was taken."""

    def _holds_up(self, report: Trouble) -> bool:
        return False


class TakesEveryComplaintForAFailureToForm(Lighthouse):
    """What broke while it was planned, as far as was known, is dropped when it is heard that it was taken before."""

    def _adopted(self, agent: str, report: Adopted) -> None:
        self._unbuilt = None
        super()._adopted(agent, report)


class ForgetsThatANodeIsDrained(Lighthouse):
    """Takes a group that dies there for one that is started again where it was."""

    def _has_place(self, view: Group) -> bool:
        return True


class CountsOnCopies(Lighthouse):
    """Takes what was found in memory for what is found on a disk."""

    def _may_begin(self, report: Ready) -> None:
        super()._may_begin(replace(report, kept=NO_QUORUM))


class StopsAtOnce(Lighthouse):
    """Does not ask whether copies are left."""

    def _all_lost(self) -> None:
        self.keeps = False
        super()._all_lost()


class SleepsTooLong(Lighthouse):
    """Decides on news alone: what only becomes due is never done."""

    def _due(self) -> list[float]:
        return []


class NeverSleeps(Lighthouse):
    """No mistake: takes every event for news, as if decisions cost nothing."""

    def _end(self) -> list[Effect]:
        self._news = True
        return super()._end()


class WaitsForEver(Lighthouse):
    """Sees nothing wrong where everybody is there."""

    def _break_off_what_stands_still(self) -> None:
        pass


class SeesNoDifference(Stepper):
    """Goes on after a recount as if all members held the same."""

    def rolled(self, id: QuorumId, standings):  # type: ignore[no-untyped-def]
        return super().rolled(id, [replace(s, checksum=0) for s in standings])


class ForgetsADoubt(Stepper):
    """A group that saw a difference, and is left alone, goes on."""

    def recount(self) -> None:
        super().recount()
        self._in_doubt = False


class ForgetsARollCall(Stepper):
    """What a roll call has shown is lost with its quorum."""

    def rolled(self, id: QuorumId, standings):  # type: ignore[no-untyped-def]
        return super().rolled(id, standings) if self.target is not None and self.works_under(id) else []


class TakesWhatItIsGiven(Stepper):
    """Does not mind that a healing brought something else than its sources had signed."""

    def spoilt(self, id: QuorumId) -> list[core.Effect]:
        return self.healed(id)


class EndsWhoDiffersLater(Stepper):
    """A group that is damaged in a step in which another one was, and healed, is taken for broken."""

    _doubted = (-1, 0)

    def recount(self) -> None:
        super().recount()
        step, times = self._doubted
        self._doubted = self.step, (times if step == self.step else 0) + 1

    def _still_unclear(self, step: int, odd: bool, agreeing: int) -> bool:
        return self._doubted[1] > 1 if odd else super()._still_unclear(step, odd, agreeing)


class BeginsWithWhatIsWrong(Stepper):
    """One that is known to be wrong says what it holds, as if others could begin with that, and ends if they may."""

    def _standing(self) -> Standing:
        wrong, self._wrong = self._wrong, False
        said = super()._standing()
        self._wrong = wrong
        return said

    def rolled(self, id: QuorumId, standings):  # type: ignore[no-untyped-def]
        if self._wrong and self.target is not None and self.target.founding and not any(s.settled for s in standings):
            self._ending = core.Disputed(self.step, (self.me,))
            return []
        return super().rolled(id, standings)


class KeepsALateHealingToItself(Stepper):
    """Tells nobody what it holds if that does not count any more."""

    def healed(self, id: QuorumId) -> list[core.Effect]:
        told = super().healed(id)
        return told if self.settled else []


class LeadsForEver(Leadership):
    """Takes no notice of its fence: it acts until the store itself says that another one leads."""

    def leads(self, now: float) -> bool:
        return self.epoch > 0


class GoesOnAfterASilence(Leadership):
    """An answer that comes after its fence keeps it in office, though what it heard meanwhile was dropped."""

    def answered(self, answer: Answer, now: float) -> list[election.Effect]:
        if isinstance(answer, Renewed) and self.epoch:
            self._fence = max(self._fence, now + 0.001)
        return super().answered(answer, now)


class TakesOverEarly(Leadership):
    """Does not wait for the lease of another to lapse."""

    def answered(self, answer: Answer, now: float) -> list[election.Effect]:
        return super().answered(replace(answer, seconds=0.1) if isinstance(answer, Held) else answer, now)


class GivesUp(Leadership):
    """Does not ask again when the store did not answer."""

    def answered(self, answer: Answer, now: float) -> list[election.Effect]:
        effects = super().answered(answer, now)
        if isinstance(answer, Away) and not self.epoch:
            self._due = 1e12
        return effects


def hunt(
    stepper: type[Stepper] = Stepper,
    lighthouse: type[Lighthouse] = Lighthouse,
    base: Scenario = BASE,
    menu: tuple[str, ...] = (),
    leadership: type[Leadership] = Leadership,
) -> str:
    """What the first seed that fails says; empty if none does."""
    for seed in range(SEEDS):
        try:
            outcome = World(random_scenario(seed, base, menu), stepper, lighthouse, leadership=leadership).run()
        except (AssertionError, IndexError, KeyError, ValueError) as crash:
            return f"seed {seed}: {crash!r}"
        if outcome.failed:
            return f"seed {seed}: {outcome.verdict}"
    return ""


SHRINKING = replace(BASE, policy=Policy.SHRINK)
STEPPERS: list[tuple[type[Stepper], Scenario, tuple[str, ...]]] = [
    (TakesStaleQuorums, BASE, ()),
    (LosesAShard, BASE, ()),
    (CountsAShardTwice, BASE, ()),
    (CountsBeforeItHealed, BASE, ()),
    (TakesTheLaggard, BASE, MEMBER_FAULTS),
    (KeepsOldGradients, BASE, ()),
    (SwitchesAlone, BASE, PLANNED),
    (SaysNothing, BASE, MEMBER_FAULTS),
    (FinishesAlone, SHRINKING, MEMBER_FAULTS),  # elsewhere, whoever is left behind computes the same bits again
]
FLIPPING = replace(BASE, check_every=1)
FLIPPED: list[tuple[type[Stepper], tuple[str, ...]]] = [
    (SeesNoDifference, ("flip",)),
    (ForgetsADoubt, ("kill", "flip")),
    (ForgetsARollCall, ("kill", "flip")),
    (TakesWhatItIsGiven, ("flip",)),
    (EndsWhoDiffersLater, ("flip",)),
]
LIGHTHOUSES: list[tuple[type[Lighthouse], tuple[str, ...]]] = [
    (WaitsForEver, LOST_MESSAGES),
    (PublishesFirst, ()),
    (ForgetsItsEpoch, CONTROL_FAULTS),
    (TrustsTheDead, ()),
    (CondemnsTheSilent, CONTROL_FAULTS),
    (FoundsAgain, MEMBER_FAULTS),
    (ForgetsVeterans, MEMBER_FAULTS),
    (HurriesChanges, PLANNED),
    (ExpectsNoLeave, PLANNED),
    (KeepsLateJoiners, MEMBER_FAULTS),
    (DismissesTooEarly, MEMBER_FAULTS),
    (SleepsTooLong, MEMBER_FAULTS),
]

SEVERAL = replace(BASE, lighthouses=2)
STOPS = ("pause lighthouse", "pause lighthouse", "snap agent", "snap agent", "cut store")
LEADERS = [LeadsForEver, TakesOverEarly, GivesUp]
SAVING = replace(BASE, save_every=1)
SAVERS = [BelievesReportsAlone, BeginsWithAnybody]
COPYING = replace(BASE, copy_every=1)
KEEPERS = [
    (BeginsWithAnybody, COPYING),
    (CountsOnCopies, replace(COPYING, save_every=1)),
    (StopsAtOnce, COPYING),
]


@pytest.mark.parametrize(("stepper", "base", "menu"), STEPPERS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_the_stepper_is_found(stepper: type[Stepper], base: Scenario, menu: tuple[str, ...]) -> None:
    assert hunt(stepper=stepper, base=base, menu=menu)


@pytest.mark.parametrize(("lighthouse", "menu"), LIGHTHOUSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_in_the_lighthouse_is_found(lighthouse: type[Lighthouse], menu: tuple[str, ...]) -> None:
    assert hunt(lighthouse=lighthouse, menu=menu)


@pytest.mark.parametrize(("stepper", "menu"), FLIPPED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_around_flipped_bits_is_found(stepper: type[Stepper], menu: tuple[str, ...]) -> None:
    assert hunt(stepper=stepper, base=FLIPPING, menu=menu)


def test_without_a_mistake_around_flipped_bits_nothing_is_found() -> None:
    for seed in range(60):
        outcome = World(random_scenario(seed, FLIPPING)).run()
        assert not outcome.failed, f"seed {seed}: {outcome.verdict}"


@pytest.mark.parametrize("leadership", LEADERS, ids=lambda x: x.__name__)
def test_a_mistake_of_one_of_several_lighthouses_is_found(leadership: type[Leadership]) -> None:
    assert hunt(base=SEVERAL, menu=STOPS, leadership=leadership)


def test_without_a_mistake_of_one_of_several_lighthouses_nothing_is_found() -> None:
    for seed in range(60):
        outcome = World(random_scenario(seed, SEVERAL, CONTROL_FAULTS)).run()
        assert not outcome.failed, f"seed {seed}: {outcome.verdict}"


@pytest.mark.parametrize("lighthouse", SAVERS, ids=lambda x: x.__name__)
def test_a_mistake_around_checkpoints_is_found(lighthouse: type[Lighthouse]) -> None:
    assert hunt(lighthouse=lighthouse, base=SAVING)


def test_without_a_mistake_around_checkpoints_nothing_is_found() -> None:
    for seed in range(60):
        outcome = World(random_scenario(seed, SAVING)).run()
        assert not outcome.failed, f"seed {seed}: {outcome.verdict}"


@pytest.mark.parametrize(("lighthouse", "base"), KEEPERS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_mistake_around_copies_in_memory_is_found(lighthouse: type[Lighthouse], base: Scenario) -> None:
    assert hunt(lighthouse=lighthouse, base=base)


def test_without_a_mistake_around_copies_in_memory_nothing_is_found() -> None:
    for seed in range(60):
        outcome = World(random_scenario(seed, COPYING)).run()
        assert not outcome.failed, f"seed {seed}: {outcome.verdict}"


@pytest.mark.parametrize("menu", [MEMBER_FAULTS, CONTROL_FAULTS, PLANNED], ids=["members", "control", "planned"])
def test_without_a_mistake_nothing_is_found(menu: tuple[str, ...]) -> None:
    for seed in range(40):
        outcome = World(random_scenario(seed, BASE, menu)).run()
        assert not outcome.failed, f"seed {seed}: {outcome.verdict}"


def test_what_is_taken_for_no_news_would_have_changed_no_decision() -> None:
    for seed in range(150):
        scenario = random_scenario(seed, BASE)
        lazy, eager = (World(scenario, lighthouse=kind, keep_trace=True).run() for kind in (Lighthouse, NeverSleeps))
        assert lazy.lines == eager.lines, f"seed {seed}"


# What several things must go wrong at once to show: random seeds find it once in thousands.
KNOWN: list[tuple[str, type[Stepper], type[Lighthouse], type[Leadership]]] = [
    ("lease-is-renewed-after-a-report-was-dropped", Stepper, Lighthouse, GoesOnAfterASilence),
    ("whoever-has-the-copy-is-out-of-reach", Stepper, BeginsWithoutACopy, Leadership),
    ("newest-copy-is-held-by-one-that-stands-still", Stepper, BeginsWithAnOlderCopy, Leadership),
    ("cannot-finish-the-step-before-a-planned-change", Stepper, HearsNothingOfThePast, Leadership),
    ("who-could-not-be-healed-founds-the-next-quorum", BeginsWithWhatIsWrong, Lighthouse, Leadership),
    ("fenced-as-it-healed-and-all-others-die", KeepsALateHealingToItself, Lighthouse, Leadership),
    ("planned-quorum-breaks-before-it-is-known-to-be-taken", Stepper, TakesEveryComplaintForAFailureToForm, Leadership),
    ("scales-down-while-a-node-is-drained", Stepper, ForgetsThatANodeIsDrained, Leadership),
    ("dies-on-a-node-that-is-drained", Stepper, ForgetsThatANodeIsDrained, Leadership),
]


@pytest.mark.parametrize(
    ("name", "stepper", "lighthouse", "leadership"), KNOWN, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_mistake_that_was_made_is_found_by_its_scenario(
    name: str, stepper: type[Stepper], lighthouse: type[Lighthouse], leadership: type[Leadership]
) -> None:
    scenario = Scenario.load(Path(__file__).parents[1] / "scenarios" / f"{name}.json")
    assert not World(scenario).run().failed
    assert World(scenario, stepper, lighthouse, leadership=leadership).run().failed
