"""Planned moves: what is asked for is done, put off or given up with a word, and never forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.agent.agent import Agent, Assignment
from planaria.agent.events import EventLog
from planaria.agent.lives import Life
from planaria.agent.ranklife import RankLife
from planaria.agent.refill import can_refill, link
from planaria.agent.standbys import Standby
from planaria.core.exits import EXIT_OK
from planaria.core.liveness import ProgressSample, ProgressWatch
from planaria.core.messages import STANDBYS, Drain, JobSpec, Leaving, Member, Migrate, Phase, QuorumId, Ready, Report
from planaria.core.plan import GroupState, PlanSpec
from planaria.engines.base import Ended
from planaria.engines.launch import Launch, directory_of
from planaria.engines.local import LocalEngine
from planaria.wire.page import ProgressPage

from .conftest import plain_environ

GROUP, OTHER = Member(1, 0), Member(0, 0)


class Bench:
    """An agent of two groups of two ranks, which are at work as far as it knows, with a standby. No process runs."""

    def __init__(self, directory: Path, assignment: Assignment | None = None) -> None:
        def make_engine(path: Path) -> LocalEngine:
            launch = Launch("job", 2, "script", (), directory, path, nproc=2, environ=plain_environ())
            return LocalEngine(launch, standbys=1)

        assignment = assignment or Assignment(JobSpec("job", 2, ranks=2), PlanSpec(2), directory, ranks=2)
        self.events = EventLog(directory / "events.jsonl")
        self.agent = Agent(assignment, make_engine, self.events)
        self.told: list[Report] = []
        self.agent.link.tell = self.told.append  # type: ignore[method-assign]
        self.agent.standbys._living[0] = Standby(0, 0, pid=1, warm=True)
        self.life(OTHER)

    def life(self, member: Member, guarded: bool = True) -> Life:
        places = [directory_of(self.agent.assignment.directory, member, rank) for rank in (0, 1)]
        life = self.agent.lives.begin(member, places, time.monotonic())
        life.ready = life.adopted = life.settled = True
        places[0].mkdir(parents=True)
        page = ProgressPage.create(places[0] / "progress")
        page.committed(1, QuorumId(1, 1), 0.5, time.monotonic_ns(), 1, 0)
        for rank in life.ranks:
            rank.watch.observe(0.0, ProgressSample(Phase.COMPUTING, 1, 1, False, 1, guarded))
            rank.read()
        return life

    def asks(self, rank: int) -> None:
        self.agent.moves.ask(Migrate(1, rank))
        self.agent.moves.tick()

    def words(self) -> list[str]:
        return [event.text for event in self.events.newest if event.kind == "move"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.events.close()


def test_one_after_the_other(bench: Bench) -> None:
    life = bench.life(GROUP)
    for rank in (1, 0, 1, 0):
        bench.asks(rank)
    assert life.moving is life.ranks[1] and bench.told == [Leaving(GROUP)]
    assert len(bench.agent.moves.waiting()) == 2, "the standby is for one of them"
    life.moving = None
    bench.agent.moves.tick()
    assert life.moving is life.ranks[0]


def test_a_move_is_put_off_while_the_group_is_left_out_for_another_reason(bench: Bench) -> None:
    life = bench.life(GROUP)
    bench.asks(1)
    bench.agent._on_report(Ready(GROUP, "a:1", (), "", 4, 9, QuorumId(1, 2)))
    bench.agent.moves.tick()
    assert life.moving is None and len(bench.agent.moves.waiting()) == 1
    life.adopted = life.settled = True  # it is back
    bench.agent.moves.tick()
    assert life.moving is life.ranks[1] and [type(each) for each in bench.told] == [Leaving, Ready, Leaving]


def test_a_group_that_leaves_for_good_moves_nothing(bench: Bench) -> None:
    life = bench.life(GROUP)
    bench.asks(1)
    bench.agent.orders.obey(Drain(GROUP))
    assert life.moving is None and len(bench.agent.moves.waiting()) == 0


def test_who_has_been_replaced_need_not_move(bench: Bench) -> None:
    life = bench.life(GROUP)
    life.settled = False
    bench.asks(1)
    life.ranks[1] = RankLife(1, bench.agent.assignment.directory, ProgressWatch())
    life.settled = True
    bench.agent.moves.tick()
    assert len(bench.agent.moves.waiting()) == 0 and "need not move any more" in bench.words()[-1]


def test_without_a_guard_it_is_told_that_the_rank_stays(bench: Bench) -> None:
    bench.life(GROUP, guarded=False)
    bench.asks(1)
    assert len(bench.agent.moves.waiting()) == 0 and "stays where it is" in bench.words()[-1]


def test_a_rank_of_the_only_group_stays_although_its_state_has_copies(bench: Bench) -> None:
    """To go back to them is better than to lose the rank, but not better than to keep it."""
    life = bench.life(GROUP)
    for rank in life.ranks:
        rank.watch.observe(0.0, ProgressSample(Phase.COMPUTING, 1, 1, False, 1, guarded=True, copies=True))
    bench.agent.lives.groups.pop(0)
    assert can_refill(bench.agent, life, life.ranks[1])
    bench.asks(1)
    assert life.moving is None and bench.told == []


def test_a_standby_for_a_move_ends_with_it(bench: Bench) -> None:
    bench.agent.engine.standbys = lambda: {0: 0}  # type: ignore[method-assign]
    life = bench.life(GROUP)
    bench.asks(1)
    bench.agent.standbys.tick(1.0)
    assert bench.agent.standbys.warm_for(0) == 1, "the rank has not left yet"
    life.moving = None
    bench.agent.standbys.tick(1.0)
    assert bench.agent.standbys.warm_for(0) == 0


async def test_the_others_do_not_wait_for_a_new_rank_that_ended_before_it_met_them(bench: Bench) -> None:
    newer = Member(1, 1)
    life = bench.life(newer)
    life.joins, life.ready, life.adopted, life.settled = True, False, False, False
    bench.agent.ends.take(Ended(newer, EXIT_OK, "exited with code 0", 1))  # its script has swallowed what ends a try
    await asyncio.sleep(0)
    assert life.ranks[0].killed
    bench.agent.ends.take(Ended(newer, -9, "killed"))
    await asyncio.sleep(0)
    assert life.state is GroupState.DEAD, "it did not leave of its own accord"


def test_a_script_that_fails_in_every_try_is_tried_no_more(bench: Bench) -> None:
    standbys = bench.agent.standbys
    for number, code in enumerate((1, 1, -9, 1), start=1):
        assert not standbys.given_up
        standbys._living[number] = Standby(number, 0)
        standbys.ended(Ended(Member(STANDBYS, number), code, "ended"))
    assert standbys.given_up


def test_a_standby_that_hangs_in_its_try_is_ended_and_the_move_told(bench: Bench) -> None:
    life, standbys = bench.life(GROUP), bench.agent.standbys
    standbys._living.clear()
    bench.agent.engine.prepare = lambda number, rank, node=0: True  # type: ignore[method-assign]
    life.settle_seconds = 20.0
    bench.asks(1)
    for number in range(3):
        standbys._prepare(0)
        began = standbys._living[number].began
        standbys._end_those_that_hang(began + 99.0)
        assert not standbys._living[number].late, "five times as long as a group's start"
        standbys._end_those_that_hang(began + 101.0)
        standbys.ended(Ended(Member(STANDBYS, number), -9, "killed by SIGKILL"))
    assert standbys.given_up and bench.agent.moves.waiting() == []
    (text,) = [e.text for e in bench.events.newest if e.kind == "unprepared" and "standby 0 " in e.text]
    assert "is not warm after 101 s (limit 100 s" in text and "and was killed" in text


def test_a_standby_that_is_ended_for_a_drain_has_not_failed(bench: Bench) -> None:
    for number in range(5):
        bench.agent.standbys._living = {number: Standby(number, 0)}
        bench.agent.standbys.end("its node is drained")
        bench.agent.standbys.ended(Ended(Member(STANDBYS, number), -9, "killed by SIGKILL"))
    assert not [event for event in bench.events.newest if event.kind == "unprepared"]
    assert bench.agent.standbys._due == 0.0


def test_only_a_standby_of_the_same_node_can_be_rank_0(bench: Bench) -> None:
    bench.agent.standbys._living = {1: Standby(1, 1, warm=True, node=2), 2: Standby(2, 1, warm=True)}
    take = bench.agent.standbys.take
    assert (take(0).number, take(1).number, take(1, 2).number) == (2, 2, 1)  # type: ignore[union-attr]
    bench.agent.standbys._living.pop(2)
    assert take(0) is None and take(1).number == 1  # type: ignore[union-attr]


def test_a_move_to_a_node_that_is_gone_is_given_up(bench: Bench) -> None:
    life = bench.life(GROUP)
    bench.agent.moves.ask(Migrate(1, 1, node=2))
    bench.agent.moves.tick()
    assert life.moving is None and "stays where it is: node 2 is out of reach" in bench.words()[-1]


def test_files_of_living_ranks_are_found_after_any_number_of_losses(tmp_path: Path) -> None:
    directory_of(tmp_path, GROUP, 1).mkdir(parents=True)
    for incarnation in range(60):
        for name in ("progress", "stdout.log"):
            (directory_of(tmp_path, GROUP) / name).touch()
        link(tmp_path, Member(1, incarnation), Member(1, incarnation + 1), [0, 1])
    newest = directory_of(tmp_path, Member(1, 60))
    (newest / "rank1" / "stdout.log").write_text("here")
    assert (directory_of(tmp_path, GROUP, 1) / "stdout.log").read_text() == "here"
    assert (newest / "progress").exists() and not (newest / "metrics.jsonl").exists()


def test_a_standby_unlike_the_ranks_at_work_takes_no_place(bench: Bench) -> None:
    """Its group would be refused with it: what is told by it alone costs that alone."""
    life = bench.life(GROUP)
    bench.agent.told.record(Ready(OTHER, "a:1", (("threads", "1"),), "", 4, 9))
    standby = bench.agent.standbys._living[0] = Standby(0, 1)
    bench.asks(1)
    bench.agent.standbys.present(standby.member, (("threads", "2"),))
    assert not standby.warm and life.moving is None and not bench.agent.moves.waiting()
    assert (
        "stays where it is: a process on this node differs from group 0 in threads (1 there, 2 here)"
        in (bench.words()[-1])
    )
    bench.agent.standbys.ended(Ended(standby.member, -9, "killed by SIGKILL"))
    bench.agent.standbys.tick(time.monotonic())
    assert not bench.agent.standbys._living, "nor would another"


def test_a_standby_like_the_ranks_at_work_does(bench: Bench) -> None:
    life = bench.life(GROUP)
    bench.agent.told.record(Ready(OTHER, "a:1", (("threads", "1"),), "", 4, 9))
    standby = bench.agent.standbys._living[0] = Standby(0, 1)
    bench.agent.standbys.present(standby.member, (("threads", "1"),))
    bench.asks(1)
    assert standby.warm and life.moving is life.ranks[1]
