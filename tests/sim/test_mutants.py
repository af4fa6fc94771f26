"""The simulator is only worth as much as the mistakes that it finds. Each of these is planted, and must be found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.core import stepper as core
from planaria.core.messages import NO_QUORUM, ControlWord, Policy, Quorum, QuorumId, Standing
from planaria.core.quorum import Lighthouse
from planaria.core.roster import Effect, Group, Persist, State
from planaria.core.stepper import Stepper
from planaria.sim.scenario import Scenario, random_scenario
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


class CountsHalfHealed(Stepper):
    """The receiver of a state that was cut short believes that it has it."""

    def broken(self, id: QuorumId, text: str) -> list[core.Effect]:
        if self._heal is not None and self._heal.receive:
            self.settled, self.step = True, self._heal.step
        return super().broken(id, text)


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
        super().exchanged(id, [replace(w, planned=self._advertised) for w in words])


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

    def _end(self, at: float) -> list[Effect]:
        return sorted(super()._end(at), key=lambda effect: isinstance(effect, Persist))


class ForgetsItsEpoch(Lighthouse):
    """Numbers its quorums as if it were the first lighthouse of the job."""

    def __init__(self, job: str, epoch: int, last=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(job, 1, last)


class TrustsTheDead(Lighthouse):
    """Does not replace a quorum when one of its members dies."""

    def _gone(self, member, now):  # type: ignore[no-untyped-def]
        return False

    def _trouble(self, report, now):  # type: ignore[no-untyped-def]
        pass


class CondemnsTheSilent(Lighthouse):
    """Takes every agent out of reach for dead at once."""

    def _condemned(self, agent: str, now: float) -> bool:
        return True


class FoundsAgain(Lighthouse):
    """Every quorum may start from the states of the scripts, and stopped holders are not waited for."""

    def _founding(self, chosen: list[Group]) -> bool:
        return True

    def _holder_left(self, base: Quorum, live: list[Group]) -> bool:
        return bool(live)


class StopsTooEarly(Lighthouse):
    """Ends the job although the only holder of the state is merely suspected."""

    def _all_lost(self, uncertain, now):  # type: ignore[no-untyped-def]
        for group in self.groups.values():
            if group.state is State.SUSPECT:
                group.state = State.DEAD
        super()._all_lost([], now)


def hunt(stepper: type[Stepper] = Stepper, lighthouse: type[Lighthouse] = Lighthouse, base: Scenario = BASE) -> str:
    """What the first seed that fails says; empty if none does."""
    for seed in range(SEEDS):
        try:
            outcome = World(random_scenario(seed, base), stepper, lighthouse).run()
        except (AssertionError, IndexError, KeyError, ValueError) as crash:
            return f"seed {seed}: {crash!r}"
        if outcome.failed:
            return f"seed {seed}: {outcome.verdict}"
    return ""


@pytest.mark.parametrize(
    "stepper",
    [
        TakesStaleQuorums,
        LosesAShard,
        CountsAShardTwice,
        CountsBeforeItHealed,
        CountsHalfHealed,
        TakesTheLaggard,
        KeepsOldGradients,
        SwitchesAlone,
        SaysNothing,
    ],
)
def test_a_mistake_in_the_stepper_is_found(stepper: type[Stepper]) -> None:
    assert hunt(stepper=stepper)


def test_leaving_early_is_found_where_bits_depend_on_it() -> None:
    assert hunt(stepper=FinishesAlone, base=replace(BASE, policy=Policy.SHRINK))


@pytest.mark.parametrize(
    "lighthouse",
    [PublishesFirst, ForgetsItsEpoch, TrustsTheDead, CondemnsTheSilent, FoundsAgain, StopsTooEarly],
)
def test_a_mistake_in_the_lighthouse_is_found(lighthouse: type[Lighthouse]) -> None:
    assert hunt(lighthouse=lighthouse)


def test_a_standing_is_settled_only_by_healing_or_founding() -> None:
    assert not Standing(0, False).settled
