"""Faults done to real processes: who is struck, when, and that everything is undone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pretend import Cluster, until

from planaria.chaos.inject import NOBODY, Injector, choose, lighthouse_of
from planaria.chaos.schedule import Fault, Kind, Moment, Victim
from planaria.chaos.session import with_home
from planaria.chaos.watch import Life, Watch
from planaria.core.messages import Member, Phase


def injector(watch: Watch, *faults: Fault, network: FakeNetwork | None = None) -> Injector:
    made = Injector(watch, faults, lambda: None, network)
    watch.poll()
    made.begin()
    return made


class FakeNetwork:
    """Stands for namespaces, which need root (see test_chaos_netns): only notes what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def cut(self, group: int) -> None:
        self.asked.append(("cut", group))

    def mend(self, group: int) -> None:
        self.asked.append(("mend", group))


def work_through(watch: Watch, it: Injector) -> None:
    def step() -> bool:
        watch.poll()
        it.poll()
        return it.over

    until(step)


def test_a_kill_kills_the_group_that_was_named(cluster: Cluster, watch: Watch) -> None:
    ranks = [cluster.rank(group) for group in range(3)]
    it = injector(watch, Fault(Kind.KILL, group=1))
    work_through(watch, it)
    assert ranks[1].wait(10) == -9
    assert ranks[0].poll() is None and ranks[2].poll() is None
    [done] = it.done
    assert (done.member, done.step, done.phase) == (Member(1, 0), 3, Phase.COMPUTING)
    assert done.struck_as_planned and done.until_ns == 0


def test_a_kill_strikes_one_rank(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0)
    first, second = cluster.rank(1), cluster.rank(1, rank=1)
    watch.poll()
    it = injector(watch, Fault(Kind.KILL, group=1, rank=7))
    work_through(watch, it)
    assert second.wait(10) == -9 and first.poll() is None, "7 of 0, 1, 0, 1 ..."
    assert (it.done[0].member, it.done[0].rank) == (Member(1, 0), 1)


def test_the_last_one_that_holds_the_state_is_never_touched(cluster: Cluster, watch: Watch) -> None:
    ranks = [cluster.rank(0), cluster.rank(1), cluster.rank(2, commits=0)]
    it = injector(watch, Fault(Kind.KILL, group=0), Fault(Kind.STOP, group=1, duration=9), Fault(Kind.KILL))
    for _ in range(30):
        watch.poll()
        it.poll()
    assert it.left == 2 and len(it.done) == 1
    assert ranks[0].wait(10) == -9 and ranks[1].poll() is None and ranks[2].poll() is None
    cluster.rank(0, 1)  # its next life has committed: now there are two again
    watch.poll()
    it.poll()
    assert [done.member for done in it.done] == [Member(0, 0), Member(1, 0)]
    it.close()


def test_a_stop_ends_by_itself(cluster: Cluster, watch: Watch) -> None:
    ranks = [cluster.rank(group) for group in range(2)]
    it = injector(watch, Fault(Kind.STOP, group=1, duration=0.05))
    watch.poll()
    it.poll()
    life = watch.lives[Member(1, 0)]
    until(lambda: life.stopped)
    assert not it.over
    work_through(watch, it)
    until(lambda: not life.stopped)
    assert all(rank.poll() is None for rank in ranks)
    assert it.done[0].until_ns - it.done[0].at_ns >= 0.05e9


def test_closing_ends_every_stop_and_cut(cluster: Cluster, watch: Watch) -> None:
    for group in range(4):
        cluster.rank(group)
    network = FakeNetwork()
    faults = [Fault(Kind.PARTITION, group=2, duration=1e6), Fault(Kind.STOP, group=0, duration=1e6)]
    it = injector(watch, *faults, network=network)
    for _ in range(2):
        watch.poll()
        it.poll()
    life = watch.lives[Member(0, 0)]
    until(lambda: life.stopped)
    it.close()
    until(lambda: not life.stopped)
    assert network.asked == [("cut", 2), ("mend", 2)]
    assert all(done.until_ns > done.at_ns for done in it.done)


def test_a_cut_leaves_a_majority(cluster: Cluster, watch: Watch) -> None:
    for group in range(2):
        cluster.rank(group)
    network = FakeNetwork()
    it = injector(watch, Fault(Kind.PARTITION, duration=1), network=network)
    it.poll()
    assert not it.done and not network.asked
    cluster.rank(2)
    watch.poll()
    it.poll()
    assert network.asked == [("cut", 0)]
    it.close()


def test_faults_wait_for_their_step_and_their_time(cluster: Cluster, watch: Watch) -> None:
    for group in range(3):
        cluster.rank(group)
    it = injector(watch, Fault(Kind.KILL, step=4), Fault(Kind.KILL, after=3600))
    it.poll()
    assert not it.done
    cluster.rank(3, commits=4)
    watch.poll()
    it.poll()
    assert len(it.done) == 1
    it.poll()
    assert it.left == 1


def test_nothing_is_done_before_the_job_is_at_full_strength(cluster: Cluster, watch: Watch) -> None:
    for group in range(2):
        cluster.rank(group)
    it = Injector(watch, [Fault(Kind.KILL)], lambda: None)
    watch.poll()
    it.poll()
    assert not it.done


@pytest.mark.parametrize("_", range(5))
def test_a_kill_in_mid_exchange_leaves_an_exchanging_page(cluster: Cluster, watch: Watch, _: int) -> None:
    cluster.rank(0)
    victim = cluster.rank(1, phase="cycle")
    it = injector(watch, Fault(Kind.KILL, group=1, moment=Moment.EXCHANGING))
    work_through(watch, it)
    assert victim.wait(10) == -9
    assert it.done[0].struck_as_planned
    assert watch.lives[Member(1, 0)].page.read().phase is Phase.EXCHANGING


def test_the_second_of_two_kills_strikes_while_the_quorum_forms(cluster: Cluster, watch: Watch) -> None:
    for group in (0, 3):
        cluster.rank(group)
    cluster.rank(1, phase="forming")
    cluster.rank(2)
    it = injector(watch, Fault(Kind.KILL, group=2), Fault(Kind.KILL, group=1, moment=Moment.FORMING))
    work_through(watch, it)
    assert [done.member.group for done in it.done] == [2, 1]
    assert it.done[1].struck_as_planned
    assert it.done[1].at_ns > it.done[0].at_ns


def test_a_pair_of_kills_needs_a_third_group(cluster: Cluster, watch: Watch) -> None:
    for group in range(2):
        cluster.rank(group)
    it = injector(watch, Fault(Kind.KILL), Fault(Kind.KILL, moment=Moment.FORMING))
    it.poll()
    assert not it.done


def test_a_missed_moment_is_said(cluster: Cluster, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.chaos.inject.MOMENT_SECONDS", 0.05)
    for group in range(2):
        cluster.rank(group)  # they compute for ever
    it = injector(watch, Fault(Kind.KILL, moment=Moment.EXCHANGING))
    work_through(watch, it)
    assert not it.done[0].struck_as_planned


def test_the_lighthouse_is_killed_only_if_it_is_the_one(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lighthouse:
        found: list[tuple[int, int] | None] = [None, (lighthouse.pid, os.getppid()), (lighthouse.pid, os.getpid())]
        it = Injector(watch, [Fault(Kind.LIGHTHOUSE)], lambda: found[0])
        watch.poll()
        it.begin()
        for _ in range(2):  # not there; then somebody else's
            it.poll()
            assert not it.done and lighthouse.poll() is None
            found.pop(0)
        it.poll()
        assert lighthouse.wait(10) == -9
    assert it.done[0].member == NOBODY and it.done[0].phase is None and it.over


def test_a_lighthouse_is_found_below_its_agent(tmp_path: Path) -> None:
    assert lighthouse_of(os.getpid()) is None
    command = [sys.executable, "-m", "planaria", "lighthouse", "--bind", "127.0.0.1:0"]
    command += ["--store", str(tmp_path / "store")]
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        subprocess.Popen(command, stdout=subprocess.PIPE, env=with_home(os.environ)) as child,
    ):
        assert child.stdout is not None and b"address" in child.stdout.readline()
        assert lighthouse_of(os.getpid()) == (child.pid, os.getpid())
        child.kill()
        child.wait()
        assert lighthouse_of(os.getpid()) is None
        other.kill()


def lives_of(watch: Watch, groups: Sequence[int]) -> list[Life]:
    return [watch.lives[Member(group, 0)] for group in groups]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(Kind.KILL, group=2), 2),
        (Fault(Kind.KILL, group=1), 2),  # not among them: the next one
        (Fault(Kind.KILL, group=4), 0),  # the next one in the circle
        (Fault(Kind.KILL, victim=Victim.HOST, group=3), 0),
        (Fault(Kind.KILL, victim=Victim.OTHER), 2),
    ],
)
def test_victims(cluster: Cluster, watch: Watch, fault: Fault, expected: int) -> None:
    for group in (0, 2, 3):
        cluster.rank(group)
    watch.poll()
    assert choose(fault, lives_of(watch, (0, 2, 3))).member.group == expected


def test_when_only_one_is_there_it_is_the_other_one_too(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(5)
    watch.poll()
    for victim in Victim:
        assert choose(Fault(Kind.KILL, victim=victim), lives_of(watch, (5,))).member.group == 5


def test_times_are_those_of_the_commits(cluster: Cluster, watch: Watch) -> None:
    for group in range(2):
        cluster.rank(group)
    before = time.monotonic_ns()
    it = injector(watch, Fault(Kind.KILL))
    work_through(watch, it)
    assert before < it.done[0].at_ns < time.monotonic_ns()
    assert watch.lives[Member(0, 0)].commits[-1].at_ns < it.done[0].at_ns
