"""Who leads, as one lighthouse sees it: what is asked of the store when, and until when it may act."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.leadership import (
    FENCE,
    LOOK,
    RENEW,
    RETRY,
    Acquire,
    Answer,
    Away,
    Effect,
    Granted,
    Held,
    Lead,
    Leadership,
    Lost,
    Renew,
    Renewed,
    StepDown,
)

LEASE = 10.0


def leading(now: float = 100.0) -> Leadership:
    machine = Leadership(LEASE)
    assert machine.tick(now) == [Acquire(0)]
    assert machine.answered(Granted(3), now + 0.1) == [Lead(3)]
    return machine


def test_a_leader_renews_early_and_counts_from_its_question() -> None:
    machine = leading(100.0)
    assert machine.next_wakeup() == 100.0 + RENEW * LEASE
    assert machine.tick(103.0) == []
    assert machine.tick(103.4) == [Renew()]
    assert machine.next_wakeup() == 100.0 + FENCE * LEASE, "a question that hangs does not keep it in office"
    assert machine.answered(Renewed(), 105.0) == []
    assert machine.leads(103.4 + FENCE * LEASE - 0.01) and not machine.leads(103.4 + FENCE * LEASE)


def test_a_leader_that_cannot_renew_stops_before_anybody_may_take_over() -> None:
    machine = leading(100.0)
    machine.tick(104.0)
    assert machine.answered(Away("no route"), 106.0) == []
    assert machine.trouble == "no route" and machine.next_wakeup() == 106.0 + RETRY * LEASE
    assert machine.tick(107.0) == [Renew()]
    stepped, *more = machine.tick(100.0 + FENCE * LEASE)
    assert isinstance(stepped, StepDown) and more == []
    assert machine.answered(Renewed(), 108.0) == [], "too late: it asks for a new epoch"
    assert machine.tick(108.0) == [Acquire(0)]


def test_the_floor_is_the_highest_epoch_that_was_told() -> None:
    machine = Leadership(LEASE)
    for epoch in (50, 40):
        machine.told(epoch, 100.0)
    assert machine.tick(100.0) == [Acquire(50)]


def test_one_that_was_stopped_may_not_act_when_it_wakes_whatever_is_asked_first() -> None:
    machine = leading(100.0)
    machine.tick(104.0)
    assert not machine.leads(500.0)
    # The answer to a question from before its sleep was waiting for it.
    assert machine.answered(Renewed(), 500.0)[0] == StepDown("its lease could not be renewed in time")
    assert not machine.leads(500.0)


def test_one_that_was_silent_for_a_moment_does_not_go_on_as_if_it_had_heard_everything() -> None:
    machine = leading(100.0)
    machine.tick(104.0)
    late = 100.0 + FENCE * LEASE
    assert not machine.leads(late)  # and so a report that came now was dropped
    assert machine.answered(Renewed(), late) == [StepDown("its lease could not be renewed in time")]
    assert machine.tick(late) == [Acquire(0)], "agents tell everything to whoever leads under another epoch"


def test_a_grant_that_comes_too_late_is_none() -> None:
    machine = Leadership(LEASE)
    machine.tick(100.0)
    assert machine.answered(Granted(3), 100.0 + FENCE * LEASE) == []
    assert not machine.leads(100.0 + FENCE * LEASE) and machine.tick(108.0) == [Acquire(0)]


def test_the_lease_of_another_lapses_when_it_was_seen_unchanged_for_its_length() -> None:
    machine = Leadership(LEASE)
    machine.tick(100.0)
    machine.answered(Held("a:1", "x 1", 5.0), 100.0)
    assert machine.leader == "a:1" and machine.next_wakeup() == 100.0 + LOOK * LEASE
    assert machine.tick(102.0) == [Acquire(0)]
    machine.answered(Held("a:1", "x 2", 5.0), 102.0)  # it was renewed
    assert machine.tick(104.0) == [Acquire(0)]
    machine.answered(Held("a:1", "x 2", 5.0), 104.0)
    assert machine.tick(106.9) == [Acquire(0)]
    machine.answered(Held("a:1", "x 2", 5.0), 106.9)
    assert machine.next_wakeup() == 107.0, "no later than it can lapse"
    assert machine.tick(107.0) == [Acquire(0, over="x 2")]


def test_one_that_stood_by_in_its_sleep_has_seen_nothing_lapse() -> None:
    machine = Leadership(LEASE)
    machine.tick(100.0)
    machine.answered(Held("a:1", "x 1", 5.0), 100.0)
    assert machine.tick(900.0) == [Acquire(0, over="x 1")], "the store takes it only if it is still the same lease"
    machine.answered(Held("a:1", "x 77", 5.0), 900.0)
    assert machine.tick(902.0) == [Acquire(0)]


def test_a_lease_that_is_lost_ends_it_and_one_that_an_agent_knows_to_be_old_too() -> None:
    machine = leading(100.0)
    machine.tick(104.0)
    assert machine.answered(Lost("x leads"), 104.1) == [StepDown("x leads")]
    machine = leading(100.0)
    assert machine.told(3, 101.0) == [] and machine.leads(101.0)
    assert machine.told(8, 101.0) == [StepDown("an agent has seen epoch 8")]
    assert machine.tick(101.0) == [Acquire(8)]
    assert machine.answered(Granted(9), 101.1) == [Lead(9)]
    assert machine.failed("the disk is full", 102.0) == [StepDown("the disk is full")]
    assert not machine.leads(102.0) and machine.failed("again", 102.0) == []


class Register:
    """A store, its two candidates, and a clock for each that runs by its own rate."""

    def __init__(self, rates: tuple[float, float], ends_leases: bool) -> None:
        self.now = 0.0
        self.rates = rates
        self.ends_leases = ends_leases
        self.machines = (Leadership(LEASE), Leadership(LEASE))
        self.holder, self.beat, self.epoch, self.until = -1, 0, 0, 0.0
        self.open: list[list[Answer]] = [[], []]  # answers on their way
        self.granted: list[int] = []

    def clock(self, who: int) -> float:
        return 1000.0 * who + self.now * self.rates[who]

    def do(self, who: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Acquire):
                self.open[who].append(self.acquire(who, effect))
            elif isinstance(effect, Renew):
                lost = self.holder != who or (self.ends_leases and self.now >= self.until)
                if not lost:
                    self.beat, self.until = self.beat + 1, self.now + LEASE
                self.open[who].append(Lost("x") if lost else Renewed())

    def acquire(self, who: int, question: Acquire) -> Answer:
        held = self.holder not in (-1, who) and not (self.ends_leases and self.now >= self.until)
        if held and (self.ends_leases or question.over != f"{self.holder} {self.beat}"):
            return Held("x", "" if self.ends_leases else f"{self.holder} {self.beat}", LEASE)
        self.holder, self.beat, self.until = who, self.beat + 1, self.now + LEASE
        self.epoch = max(self.epoch, question.floor) + 1
        self.granted.append(self.epoch)
        return Granted(self.epoch)


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(st.floats(0.99, 1.01), st.floats(0.99, 1.01)),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from((0, 1)), st.floats(0.0, 12.0), st.sampled_from(("tick", "answer", "lose answer", "told"))
        ),
        max_size=60,
    ),
)
def test_never_do_two_lead(rates: tuple[float, float], ends_leases: bool, steps: list[tuple[int, float, str]]) -> None:
    """Whatever is late, lost or asleep, as long as clocks run alike to a hundredth."""
    world = Register(rates, ends_leases)
    for who, pause, what in steps:
        world.now += pause
        machine, now = world.machines[who], world.clock(who)
        if what == "tick":
            world.do(who, machine.tick(now))
        elif world.open[who] and what != "told":
            answer = world.open[who].pop()
            world.do(who, machine.answered(answer if what == "answer" else Away("lost"), now))
        elif what == "told":
            world.do(who, machine.told(world.epoch + int(pause), now))
        leading = [each for each in (0, 1) if world.machines[each].leads(world.clock(each))]
        assert len(leading) <= 1
        if leading:
            assert world.machines[leading[0]].epoch == world.granted[-1]
    assert world.granted == sorted(set(world.granted)), "epochs only rise"
