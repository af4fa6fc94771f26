"""Keeping N groups alive, in a small world in which anything may happen: the rules hold all the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.plan import (
    Action,
    Drain,
    Finish,
    GroupState,
    Kill,
    Observed,
    ObservedGroup,
    PlanSpec,
    Start,
    backoff,
    next_wakeup,
    plan,
    quick_failures,
)

quick = settings(max_examples=60, deadline=None)  # no deadline: the machine may be busy
PENDING, RUNNING = GroupState.PENDING, GroupState.RUNNING
DRAINING, DEAD = GroupState.DRAINING, GroupState.DEAD
FINISHED, REFUSED, DRAINED = GroupState.FINISHED, GroupState.REFUSED, GroupState.DRAINED


@dataclass
class World:
    """Groups that do what the actions say, checks each action against the rules, and lets things happen."""

    spec: PlanSpec
    now: float = 0.0
    view: Observed = field(default_factory=Observed)
    queues: bool = False  # a group that is started waits for a place first
    born: dict[int, float] = field(default_factory=dict)
    ended: Finish | None = None

    def get(self, id: int) -> ObservedGroup | None:
        return next((g for g in self.view.groups if g.group == id), None)

    def put(self, new: ObservedGroup) -> None:
        others = tuple(g for g in self.view.groups if g.group != new.group)
        self.view = replace(self.view, groups=(*others, new))

    def live(self) -> list[ObservedGroup]:
        return self.view.having(PENDING, RUNNING, DRAINING)

    def act(self) -> None:
        """Carry out the plan until it asks for nothing more."""
        for _ in range(10):
            actions = plan(self.spec, self.view, self.now)
            assert actions == plan(self.spec, self.view, self.now), "the same view gives the same actions"
            if not actions or self.ended:
                return
            for action in actions:
                self.carry_out(action)
        raise AssertionError(f"the plan never comes to rest: {actions}")

    def carry_out(self, action: Action) -> None:
        match action:
            case Start(id, incarnation):
                self.start(id, incarnation)
            case Kill(id):
                assert self.get(id) in self.live()
                self.die(id, -9)
            case Drain(id):
                old = self.get(id)
                assert old is not None and old.state in (RUNNING, PENDING, DEAD)
                running = sorted(self.view.having(RUNNING), key=lambda g: g.suspected_since is not None)
                if old.state is RUNNING:
                    assert old in running[self.spec.desired :], "suspects leave, then the highest ids"
                else:
                    assert len(self.view.having(RUNNING, PENDING, DEAD)) > self.spec.desired
                self.put(replace(old, state=DRAINING if old.state is RUNNING else DRAINED))
            case Finish(exit_code):
                if exit_code == 1 and not any(g.done for g in self.view.groups) and self.view.committed:
                    least = min(self.spec.min_groups, self.spec.desired)
                    assert len(self.view.having(RUNNING, PENDING)) < least, "with enough groups a job goes on"
                self.ended = action

    def start(self, id: int, incarnation: int) -> None:
        old = self.get(id)
        if old is None:
            assert incarnation == 0
        else:
            assert old.state is DEAD, "never two live incarnations, and nobody who left for good"
            assert incarnation == old.incarnation + 1, "incarnations rise by one"
            assert self.now >= old.since + backoff(self.spec, old.quick_failures)
            self.view = replace(self.view, replacements=(*self.view.replacements, self.now))
            window = [t for t in self.view.replacements if t > self.now - self.spec.budget_window]
            assert len(window) <= self.spec.budget
        # One that is leaving takes the place of a new group, but not of one that gets its own place back.
        count = len(self.live() if old is None else self.view.having(RUNNING, PENDING))
        assert count < self.spec.desired, "never more groups than wanted"
        self.put(ObservedGroup(id, incarnation, PENDING if self.queues else RUNNING))
        self.born[id] = self.now

    def die(self, id: int, exit_code: int, leaves: bool = False) -> None:
        """``leaves``: by its script's own decision, with all that is committed."""
        old = self.get(id)
        assert old is not None
        if exit_code == 0 and (old.done or leaves):
            state = FINISHED
        elif old.state is DRAINING:
            state = DRAINED
        else:
            state = REFUSED if exit_code == 2 else DEAD
        failures = quick_failures(self.spec, old.quick_failures, self.now - self.born[id], old.settled)
        self.put(ObservedGroup(id, old.incarnation, state, self.now, exit_code, quick_failures=failures, done=old.done))

    def others_go_on(self) -> None:
        """They make a step without those that have left, who are let go, as their agent does."""
        if any(g.settled and not g.done for g in self.live()):
            for gone in self.view.having(FINISHED):
                if not gone.done:
                    self.put(replace(gone, state=DRAINED))
                    self.spec = replace(self.spec, desired=max(1, self.spec.desired - 1))

    def happen(self, event: str, pick: int) -> None:
        if event == "time":
            self.now += pick / 2
        elif event == "wakeup":
            self.wake()
        elif event == "a step":
            self.others_go_on()
        elif event == "scale":
            self.spec = replace(self.spec, desired=1 + pick % 5)
        elif self.live():
            self.happen_to(self.live()[pick % len(self.live())], event)

    def happen_to(self, old: ObservedGroup, event: str) -> None:
        if event in ("killed", "failed", "refused", "left"):
            self.die(old.group, {"killed": -9, "failed": 1, "refused": 2, "left": 0}[event])
        elif event == "leaves" and old.settled:
            self.die(old.group, 0, leaves=True)
        elif event == "gets a place" and old.state is PENDING:
            self.put(replace(old, state=RUNNING))
        elif event == "settles" and old.state is not PENDING:
            self.view = replace(self.view, committed=True)
            self.put(replace(old, settled=True))
        elif event == "done" and old.settled:
            self.put(replace(old, done=True))
        elif event == "suspected" and old.state is not PENDING:
            self.put(replace(old, suspected_since=None if old.suspected_since else self.now))

    def wake(self) -> None:
        """Until then the plan must not change by itself."""
        until = next_wakeup(self.spec, self.view, self.now)
        now = plan(self.spec, self.view, self.now)
        for fraction in (0.25, 0.5, 0.999):
            later = self.now + (1000.0 if until is None else until - self.now) * fraction
            if until is None or later < until:
                assert _kinds(plan(self.spec, self.view, later)) == _kinds(now)
        if until is not None:
            assert until > self.now
            self.now = until


def _kinds(actions: list[Action]) -> list[tuple[str, int]]:
    """Without the reasons, which tell the time."""
    return [(type(a).__name__, a.exit_code if isinstance(a, Finish) else a.group) for a in actions]


EVENTS = [
    "time",
    "wakeup",
    "wakeup",
    "scale",
    "killed",
    "failed",
    "refused",
    "left",
    "settles",
    "settles",
    "done",
]
EVENTS += ["suspected", "killed", "failed", "leaves", "a step", "gets a place", "gets a place"]
SPECS = st.builds(
    PlanSpec,
    desired=st.integers(1, 5),
    min_groups=st.integers(1, 3),
    budget=st.integers(0, 8),
    budget_window=st.sampled_from([5.0, 60.0, 1000.0]),
    backoff_first=st.sampled_from([0.0, 1.0, 4.0]),
)
LIFE = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 20)), max_size=40)


@quick
@given(SPECS, LIFE, st.booleans())
def test_whatever_happens_the_rules_hold(asked: PlanSpec, life: list[tuple[str, int]], queues: bool) -> None:
    world = World(asked, queues=queues)
    world.act()
    assert len(world.live()) == asked.desired
    for event, pick in life:
        if world.ended:
            return
        world.happen(event, pick)
        world.act()


@quick
@given(SPECS, LIFE, st.booleans())
def test_once_nothing_more_happens_all_groups_run_again_or_the_job_ends(
    asked: PlanSpec, life: list[tuple[str, int]], queues: bool
) -> None:
    world = World(replace(asked, budget=1000), queues=queues)
    world.act()
    for event, pick in life:
        world.happen(event, pick)
        world.act()
        if world.ended:
            return
    for _ in range(50):
        for old in world.live():
            state = RUNNING if old.state is PENDING else old.state
            world.put(replace(old, state=state, settled=True, suspected_since=None))
            if old.state is DRAINING:
                world.die(old.group, 0)
        world.others_go_on()
        world.act()
        if world.ended:
            return
        if next_wakeup(world.spec, world.view, world.now) is None and not world.view.having(DRAINING):
            break
        world.wake()
    if any(g.done for g in world.view.groups):
        return
    refused = len(world.view.having(REFUSED))  # they keep their places while so many groups are wanted
    assert world.spec.desired - refused <= len(world.view.having(RUNNING)) <= world.spec.desired


@quick
@given(SPECS, LIFE, st.randoms(use_true_random=False))
def test_the_order_in_which_groups_are_listed_does_not_matter(
    asked: PlanSpec, life: list[tuple[str, int]], rng: Any
) -> None:
    world = World(asked)
    world.act()
    for event, pick in life:
        world.happen(event, pick)
        shuffled = list(world.view.groups)
        rng.shuffle(shuffled)
        again = replace(world.view, groups=tuple(shuffled))
        assert plan(asked, again, world.now) == plan(asked, world.view, world.now)
        world.act()
        if world.ended:
            return
