"""The simulated data plane: forming, collectives, and what a death in the middle does."""

from __future__ import annotations

from planaria.core.messages import Member, Policy, Quorum, QuorumId
from planaria.sim.fabric import FORM_TIMEOUT, Fabric, Result
from planaria.sim.invariants import Checker, Violation
from planaria.sim.kernel import Kernel, Process
from planaria.sim.network import Links

ID = QuorumId(1, 1)


class Rank:
    def __init__(self, kernel: Kernel, fabric: Fabric, group: int) -> None:
        self.member = Member(group, 0)
        self.node = f"node {group}"
        self.address = ""
        self.orderly = False
        self.process = Process(kernel, f"group {group}")
        self.process.on_death.append(lambda: fabric.gone(self))
        self.news: list[str] = []
        self.results: list[Result] = []

    def formed(self, id: QuorumId) -> None:
        self.news.append("formed")

    def broken(self, id: QuorumId, text: str) -> None:
        self.news.append(text)


class Plane:
    def __init__(self, size: int = 3, seed: int = 0) -> None:
        self.kernel = Kernel(seed)
        self.links = Links()
        self.fabric = Fabric(
            self.links,
            Checker(4, 4, Policy.REDISTRIBUTE),
            lambda pair: self.kernel.between(*pair),
            self.kernel.chance,
        )
        self.ranks = [Rank(self.kernel, self.fabric, g) for g in range(size)]
        self.quorum = Quorum(ID, tuple(r.member for r in self.ranks), ("",) * size, True, "lineage")

    def form(self, *which: int) -> None:
        for number in which or range(len(self.ranks)):
            self.fabric.form(self.ranks[number], self.quorum)

    def enter(self, number: int, key: object = "greeting") -> None:
        rank = self.ranks[number]
        self.fabric.enter(rank, ID, key, number, (0.01, 0.05), rank.results.append)

    def run(self, seconds: float) -> None:
        self.kernel.run(self.kernel.now + seconds, lambda: False)

    @property
    def news(self) -> list[list[str]]:
        return [r.news for r in self.ranks]


def test_a_communicator_stands_when_all_are_there() -> None:
    plane = Plane()
    plane.form(0, 1)
    plane.run(1.0)
    assert plane.news == [[], [], []]
    plane.form(2)
    plane.run(1.0)
    assert plane.news == [["formed"]] * 3


def test_forming_without_a_member_ends_by_its_timeout() -> None:
    plane = Plane()
    plane.form(0, 1)
    plane.run(FORM_TIMEOUT + 1.0)
    assert all("timed out" in plane.ranks[n].news[0] or "gone" in plane.ranks[n].news[0] for n in (0, 1))


def test_a_partition_delays_forming_until_it_is_over() -> None:
    plane = Plane()
    plane.links.cut("node 0", "node 2")
    plane.form()
    plane.run(1.0)
    assert plane.news == [[], [], []]
    plane.links.restore("node 0", "node 2")
    plane.run(1.0)
    assert plane.news == [["formed"]] * 3


def test_a_collective_ends_with_what_all_have_put_in() -> None:
    plane = Plane()
    plane.form()
    plane.run(1.0)
    plane.enter(0)
    plane.enter(1)
    plane.run(0.5)
    assert not plane.ranks[0].results
    plane.enter(2)
    plane.run(0.5)
    assert [r.results[0].payloads for r in plane.ranks] == [(0, 1, 2)] * 3


def test_a_death_before_all_have_entered_fails_it_for_the_others() -> None:
    plane = Plane()
    plane.form()
    plane.run(1.0)
    plane.enter(0)
    plane.enter(1)
    plane.ranks[2].process.die()
    plane.run(0.5)
    assert [r.results[0].payloads for r in plane.ranks[:2]] == [None, None]


def test_a_death_in_the_middle_leaves_some_with_a_result_and_some_without() -> None:
    """The case that the whole protocol is about must really occur."""
    outcomes = set()
    for seed in range(60):
        plane = Plane(seed=seed)
        plane.form()
        plane.run(1.0)
        for number in range(3):
            plane.enter(number)
        plane.run(0.03)
        plane.ranks[2].process.die()
        plane.run(4.0)
        outcomes.add(tuple(r.results[0].payloads is not None for r in plane.ranks[:2]))
    assert outcomes == {(True, True), (True, False), (False, True), (False, False)}


def test_a_stopped_member_is_waited_for() -> None:
    plane = Plane()
    plane.form()
    plane.run(1.0)
    plane.ranks[2].process.pause()
    plane.enter(0)
    plane.enter(1)
    plane.run(1000.0)
    assert [r.results for r in plane.ranks] == [[], [], []], "nothing tells it from one that computes"
    plane.ranks[2].process.resume()
    plane.enter(2)
    plane.run(1.0)
    assert [len(r.results) for r in plane.ranks] == [1, 1, 1]


def test_a_message_is_lost_to_all_or_to_one() -> None:
    for alone in (False, True):
        plane = Plane()
        plane.form()
        plane.run(1.0)
        plane.fabric.lose_message(plane.ranks[1], alone)
        for number in range(3):
            plane.enter(number)
        plane.run(1000.0)
        assert [len(r.results) for r in plane.ranks] == ([1, 0, 1] if alone else [0, 0, 0])
        plane.ranks[0].process.die()
        plane.run(1.0)
        assert [len(r.results) for r in plane.ranks[1:]] == ([0, 1] if alone else [1, 1])
        plane.fabric.drop(plane.ranks[1], ID)
        assert plane.ranks[1].results[0].payloads is None, "news end every wait"


def test_who_gives_a_communicator_up_ends_its_own_wait_at_once() -> None:
    plane = Plane()
    plane.form()
    plane.run(1.0)
    plane.enter(0)
    plane.fabric.drop(plane.ranks[0], ID)
    assert plane.ranks[0].results[0].error == "given up here"
    plane.enter(0)
    assert plane.ranks[0].results[1].error == "the communicator was given up"


def test_members_in_different_collectives_are_a_violation() -> None:
    plane = Plane()
    plane.form()
    plane.run(1.0)
    plane.enter(0, "roll call")
    try:
        plane.enter(1, "heal")
    except Violation as found:
        assert "different collectives" in str(found)
    else:
        raise AssertionError("not noticed")


def test_two_memberships_under_one_id_are_a_violation() -> None:
    plane = Plane()
    plane.form(0)
    plane.quorum = Quorum(ID, plane.quorum.members[:2], ("",) * 2, True, "lineage")
    try:
        plane.form(1)
    except Violation as found:
        assert "two memberships" in str(found)
    else:
        raise AssertionError("not noticed")
