"""Who is late at a sync, and who is not: one group at work, the others at the exchange, a second for each look."""

from __future__ import annotations

from dataclasses import replace

from planaria.core.grace import ROUND, Grace
from planaria.core.links import LEARNING, READINGS, LinkWatch
from planaria.core.messages import Link, Member, Phase, Pulse, QuorumId
from planaria.core.roster import Group

QUORUM = QuorumId(1, 1)


class Rounds:
    """Three groups; ``took`` says after how many seconds each comes to the exchange of a round."""

    def __init__(self) -> None:
        self.grace = Grace()
        self.at, self.step, self.quorum = 0.0, 0, QUORUM
        self.views = [Group(Member(group, 0), "a") for group in range(3)]

    def look(self, *phases: Phase, steps: tuple[int, ...] | None = None) -> list[int]:
        self.at += 1.0
        for index, (view, phase) in enumerate(zip(self.views, phases, strict=True)):
            step = self.step if steps is None else steps[index]
            view.pulse = Pulse(view.member, phase, step, self.quorum, 0.0, 0.0)
        return [view.member.group for view, _ in self.grace.look(self.at, self.step, self.quorum, self.views)]

    def round(self, *took: int) -> list[list[int]]:
        found = []
        for second in range(max(took)):
            phases = [Phase.EXCHANGING if second >= each else Phase.COMPUTING for each in took]
            found.append(self.look(*phases))
        found.append(self.look(*[Phase.EXCHANGING] * 3))
        self.step += 1
        return [late for late in found if late]


W, X, E = Phase.COMPUTING, Phase.EXCHANGING, Phase.APPLYING


def test_one_that_is_much_later_than_it_ever_was() -> None:
    rounds = Rounds()
    for _ in range(5):
        assert rounds.round(2, 3, 4) == []
    for _ in range(13):
        assert rounds.look(X, X, W) == []
    assert rounds.look(X, X, W) == [2], "three times its longest round, which was four seconds"
    assert rounds.look(X, X, W) == [], "being late has widened its window"


def test_nobody_is_late_while_somebody_else_is_at_work_in_time() -> None:
    rounds = Rounds()
    for _ in range(5):
        rounds.round(1, 1, 1)
    for _ in range(30):
        assert rounds.look(X, E, W) == [], "one evaluates, so the others would wait in any case"
        assert rounds.look(X, X, X) == []
        assert rounds.look(X, W, W) == [], "more are late than wait"
        assert rounds.look(X, X, W, steps=(5, 5, 4)) == [], "it is behind: what it shows is old, or it heals"


def test_the_first_rounds_of_a_life_are_not_judged() -> None:
    rounds = Rounds()
    rounds.round(1, 1, 1)
    for _ in range(60):
        assert rounds.look(X, X, W) == [], "it compiles"
    rounds = Rounds()
    for _ in range(5):
        rounds.round(1, 1, 1)
    rounds.views[2] = Group(Member(2, 1), "a")
    rounds.quorum = replace(QUORUM, number=2)
    for _ in range(60):
        assert rounds.look(X, X, W) == []


def test_one_that_became_slow_for_good_is_waited_for_in_the_end() -> None:
    rounds, missed = Rounds(), 0
    for _ in range(5):
        rounds.round(2, 2, 2)
    for _ in range(10):
        if any(rounds.look(X, X, W) for _ in range(40)):
            missed += 1
            rounds.quorum = replace(rounds.quorum, number=rounds.quorum.number + 1)
        rounds.look(X, X, X)
        rounds.step += 1
    assert 0 < missed <= 4


def test_short_rounds_have_a_floor() -> None:
    rounds = Rounds()
    for _ in range(5):
        rounds.step += 40  # many rounds between two looks
        assert rounds.look(W, W, W) == []
    for _ in range(int(ROUND.floor)):
        assert rounds.look(X, X, W) == []
    assert rounds.look(X, X, W) == [2]


def test_a_link_that_became_slow_is_told_once_and_so_is_its_recovery() -> None:
    watch = LinkWatch()

    def read(mbit: float, times: int) -> list[str]:
        told = []
        for number in range(times):
            link = Link(1, mbit * 1e6 * (1 + number / 100), 0.01, 0.02)
            told += watch.observe(0, [link, link])  # a heartbeat may bring the same reading again
            told += watch.observe(2, [Link(1, 5e6 + number, 0.01, 0.0)])
        return told

    assert read(20, LEARNING + READINGS) == []
    assert read(3, READINGS - 1) == [] and read(20, 2) == [], "a burst of a neighbour's"
    (slow,) = read(3, 10)
    assert slow.startswith("the link from group 0 to group 1 has become slow: 3.06 Mbit/s, usually 2")
    assert "2.0% of its packets are sent again" in slow
    (again,) = read(18, 10)
    assert "is as fast as it was: 18.4 Mbit/s" in again
