"""What the agent makes of progress pages and ends, with a real process and a real page."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from planaria.agent.lives import Life, Lives, ended_state, failure_of
from planaria.agent.proc import describe, state_of
from planaria.agent.ranklife import suspicious
from planaria.agent.recovery import RecoveryTimes
from planaria.core.liveness import EARLY_PASSES, ProgressSample
from planaria.core.messages import NO_QUORUM, Adopted, Member, Phase, QuorumId
from planaria.core.plan import GroupState
from planaria.wire.page import ProgressPage

A, B, C = Member(0, 0), Member(1, 0), Member(2, 0)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield started
    started.kill()
    started.wait()


def test_a_group_waits_in_an_exchange_only_if_all_its_ranks_do(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    homes = [tmp_path / str(rank) for rank in range(2)]
    for home in homes:
        home.mkdir()
    pages = [ProgressPage.create(home / "progress", process.pid) for home in homes]
    life = Lives().begin(A, homes, time.monotonic())
    for rank in life.ranks:
        rank.pid = process.pid
    for phase in (Phase.COMPUTING, Phase.APPLYING, Phase.LOADING, Phase.EXCHANGING):
        pages[0].set_phase(Phase.EXCHANGING)
        pages[1].set_phase(phase)
        life.look(time.monotonic())
        assert life.pulse().phase is phase
    pages[0].set_phase(Phase.HEALING)
    pages[1].set_phase(Phase.COMPUTING)
    life.look(time.monotonic())
    assert life.pulse().phase is Phase.HEALING


def life_of(directory: Path, pid: int, member: Member = A) -> Life:
    life = Lives().begin(member, [directory], time.monotonic())
    life.speaker.pid = pid
    return life


def test_without_a_page_nothing_is_suspicious(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    life = life_of(tmp_path, process.pid)
    assert life.look(0.0) is None and life.look(10_000.0) is None
    pulse = life.pulse()
    assert (pulse.phase, pulse.step, pulse.quorum, pulse.pid) == (Phase.STARTING, 0, NO_QUORUM, process.pid)
    assert math.isnan(pulse.loss) and life.commits() == []


def test_page_is_shown_as_pulse(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    page = ProgressPage.create(tmp_path / "progress", process.pid)
    life = life_of(tmp_path, process.pid)
    page.committed(3, QuorumId(1, 2), 0.25, time.monotonic_ns(), 4, 0)
    page.set_phase(Phase.COMPUTING, 1)
    assert life.look(time.monotonic()) is None
    pulse = life.pulse()
    assert (pulse.phase, pulse.step, pulse.quorum, pulse.loss) == (Phase.COMPUTING, 3, QuorumId(1, 2), 0.25)
    assert [step for step, _ in life.commits()] == [3]


def test_page_of_an_earlier_process_is_not_taken(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    ProgressPage.create(tmp_path / "progress", process.pid + 1)
    life = life_of(tmp_path, process.pid)
    life.look(time.monotonic())
    assert life.view is None


def test_stopped_process_is_suspected_and_cleared(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    page = ProgressPage.create(tmp_path / "progress", process.pid)
    page.set_phase(Phase.COMPUTING)
    life = life_of(tmp_path, process.pid)
    now = time.monotonic()
    assert life.look(now) is None
    process.send_signal(signal.SIGSTOP)
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    life.look(now + 0.05)
    why = life.look(now + 0.1)
    assert why is not None and "stopped" in why
    process.send_signal(signal.SIGCONT)
    while state_of(process.pid) == "T":
        time.sleep(0.01)
    page.beat()
    assert life.look(now + 0.15) is None


def test_waiting_for_a_stopped_rank_of_its_group_teaches_nothing(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    lives = Lives()
    life = lives.begin(A, [tmp_path / "0", tmp_path / "1"], 0.0)
    for rank, pid in zip(life.ranks, (os.getpid(), process.pid), strict=True):
        rank.directory.mkdir()
        rank.pid, page = pid, ProgressPage.create(rank.directory / "progress", pid)
        rank.page = page
    now = 1000.0

    def pass_by(seconds: float, phase: Phase | None = None) -> None:
        """Both ranks in ``phase``; None: not a sign of either."""
        nonlocal now
        for rank in life.ranks if phase is not None else ():
            assert rank.page is not None and phase is not None
            rank.page.set_phase(phase)
        for _ in range(round(seconds / 0.1)):
            now += 0.1
            life.look(now)

    for _ in range(EARLY_PASSES + 1):
        pass_by(0.2, Phase.COMPUTING)
        pass_by(0.2, Phase.EXCHANGING)
    times = lives.times.training(Phase.COMPUTING, early=False)
    assert times is not None and times.longest is not None
    before = times.longest
    pass_by(0.2, Phase.COMPUTING)
    process.send_signal(signal.SIGSTOP)
    while state_of(process.pid) != "T":
        time.sleep(0.01)
    pass_by(8.0)
    process.send_signal(signal.SIGCONT)
    while state_of(process.pid) == "T":
        time.sleep(0.01)
    pass_by(0.2, Phase.EXCHANGING)
    assert times.longest == pytest.approx(before)
    pass_by(8.0, Phase.COMPUTING)
    pass_by(0.2, Phase.EXCHANGING)
    assert times.longest > 7, "but a shard that takes so long does"


def test_settled_means_at_work_in_a_quorum(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    page = ProgressPage.create(tmp_path / "progress", process.pid)
    life = life_of(tmp_path, process.pid)
    page.set_phase(Phase.COMPUTING)
    life.look(time.monotonic())
    assert not life.settled
    life.adopted = True
    page.set_phase(Phase.HEALING)
    life.look(time.monotonic())
    assert not life.settled
    page.set_phase(Phase.EXCHANGING)
    life.look(time.monotonic())
    assert life.settled and life.settle_seconds >= 0
    assert life.observed().settled


def test_last_look_keeps_what_was_seen(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    page = ProgressPage.create(tmp_path / "progress", process.pid)
    life = life_of(tmp_path, process.pid)
    page.committed(9, QuorumId(1, 1), 1.0, 1, 1, 0)
    life.last_look()
    assert life.step == 9 and life.speaker.page is None


@pytest.mark.parametrize(
    ("code", "draining", "left_out", "state"),
    [
        (0, False, False, GroupState.FINISHED),
        (0, True, True, GroupState.DRAINED),
        (-9, True, False, GroupState.DRAINED),
        (0, False, True, GroupState.DEAD),
        (1, False, False, GroupState.DEAD),
        (-11, False, False, GroupState.DEAD),
        (None, False, False, GroupState.DEAD),
        (2, False, False, GroupState.REFUSED),
    ],
)
def test_what_an_end_means(tmp_path: Path, code: int | None, draining: bool, left_out: bool, state: GroupState) -> None:
    life = life_of(tmp_path, 0)
    life.left_out = left_out
    if draining:
        life.state = GroupState.DRAINING
    assert ended_state(life, code) is state


def test_failure_says_what_the_rank_said(tmp_path: Path) -> None:
    life = life_of(tmp_path, 0)
    life.speaker.returncode, life.speaker.cause = -9, "killed by SIGKILL"
    assert failure_of(life, life.speaker).message == "killed by SIGKILL"
    life.being_killed = "it was suspected for 3 s"
    assert failure_of(life, life.speaker).message == "it was suspected for 3 s"
    (tmp_path / "error.json").write_text(json.dumps({"message": "boom"}))
    life.speaker.returncode = 1
    failure = failure_of(life, life.speaker)
    assert (failure.message, failure.reported, failure.how()) == ("boom", True, "exited with code 1")
    (tmp_path / "error.json").write_text("half a f")
    assert not failure_of(life, life.speaker).reported


def test_lives_keep_the_newest_and_its_failures(tmp_path: Path) -> None:
    lives = Lives()
    first = lives.begin(A, [tmp_path], 0.0)
    first.quick_failures, first.state = 2, GroupState.DEAD
    second = lives.begin(Member(0, 1), [tmp_path], 1.0)
    assert second.quick_failures == 2
    assert lives.of(A) is None and lives.of(Member(0, 1)) is second
    assert lives.alive() == [second]


def test_a_group_left_only_if_others_go_on(tmp_path: Path) -> None:
    lives = Lives()

    pages = {}

    def at_step(member: Member, step: int) -> Life:
        life = lives.begin(member, [tmp_path / str(member.group)], 0.0)
        life.speaker.directory.mkdir()
        page = pages[member] = ProgressPage.create(life.speaker.directory / "progress", os.getpid())
        page.committed(step, QuorumId(1, 1), 1.0, 1, 1, 0)
        life.speaker.pid = os.getpid()
        life.look(0.0)
        return life

    gone, other = at_step(A, 20), at_step(B, 20)
    gone.state = GroupState.FINISHED
    assert lives.newly_left() == [] and lives.complete and lives.trained, "perhaps all leave alike"
    pages[B].committed(21, QuorumId(1, 1), 1.0, 1, 1, 0)
    other.look(0.1)
    assert lives.newly_left() == [gone] and lives.newly_left() == [], "told once"
    gone.left, gone.done = False, True
    assert lives.newly_left() == []


def test_words_for_ends() -> None:
    assert describe(-9) == "killed by SIGKILL" and describe(3) == "exited with code 3"
    assert describe(-64) in ("killed by SIGRTMAX", "killed by signal 64")
    assert state_of(os.getpid()) in "RSD" and state_of(1 << 30) == ""


# --- how long a recovery took ------------------------------------------------------------------------------------


def test_recovery_ends_with_the_first_commit_under_a_newer_quorum() -> None:
    times = RecoveryTimes()
    commits: dict[Member, list[tuple[int, int]]] = {A: [(9, 1)], C: []}
    times.adopted(Adopted(A, QuorumId(1, 1), 0))
    times.died(B, QuorumId(1, 1))
    start = time.monotonic_ns()
    assert times.closed(commits.__getitem__) == []
    commits[A].append((10, start + 5))  # as good as made before the death
    times.adopted(Adopted(A, QuorumId(1, 2), 10))
    times.adopted(Adopted(C, QuorumId(1, 2), 10))
    assert times.closed(commits.__getitem__) == []
    commits[A].append((11, start + 200_000_000))
    commits[C].append((11, start + 150_000_000))
    ((dead, seconds, step),) = times.closed(commits.__getitem__)
    assert dead == B and step == 11
    assert seconds == pytest.approx(0.15, abs=0.05)
    assert times.closed(commits.__getitem__) == [], "told once"


def test_two_deaths_at_once_are_two_recoveries() -> None:
    times = RecoveryTimes()
    times.died(B, QuorumId(1, 1))
    times.died(C, QuorumId(1, 1))
    times.adopted(Adopted(A, QuorumId(1, 3), 4))
    done = times.closed(lambda member: [(5, time.monotonic_ns())])
    assert [dead for dead, _, _ in done] == [B, C]


def test_the_survivors_may_be_heard_before_the_death() -> None:
    times = RecoveryTimes()
    died = time.monotonic_ns()
    times.adopted(Adopted(B, QuorumId(1, 1), 0))
    times.adopted(Adopted(A, QuorumId(1, 2), 10))
    times.died(B, QuorumId(1, 1), died)
    commits = [(11, died + 100_000_000), (12, died + 7_000_000_000)]
    assert times.closed(lambda member: commits if member == A else []) == [(B, 0.1, 11)]


def test_what_survivors_said_long_ago_says_nothing() -> None:
    times = RecoveryTimes()
    times.adopted(Adopted(A, QuorumId(1, 2), 10))
    times.died(B, QuorumId(1, 2))
    assert times.closed(lambda member: [(11, time.monotonic_ns())]) == []


def test_old_quorums_say_nothing() -> None:
    times = RecoveryTimes()
    times.died(B, QuorumId(2, 5))
    times.adopted(Adopted(A, QuorumId(1, 9), 4))
    times.adopted(Adopted(A, QuorumId(2, 5), 4))
    assert times.closed(lambda member: [(5, time.monotonic_ns())]) == []


@dataclass
class Watched:
    """What is known of one rank at one moment."""

    frost: str | None = None
    silence: str | None = None
    judged: bool = True
    collectives: int = 0

    @property
    def last(self) -> ProgressSample:
        return ProgressSample(Phase.COMPUTING, 1, 1, self.frost is not None, self.collectives)

    def frozen(self, now: float) -> str | None:
        return self.frost

    def silent(self, now: float) -> str | None:
        return self.silence


@pytest.mark.parametrize(
    ("ranks", "accused", "sure"),
    [
        ([Watched(), Watched(silence="hangs")], None, False),  # rank 0 saves, rank 1 waits for it in a collective
        ([Watched(judged=False), Watched(silence="hangs")], 1, True),  # rank 0 is done and waits: for nobody but rank 1
        ([Watched(silence="hangs"), Watched(silence="hangs")], 0, False),
        ([Watched(silence="hangs", collectives=8), Watched(silence="hangs", collectives=7)], 1, True),
        ([Watched(silence="waits", collectives=n) for n in (7, 8, 7)], 0, False),  # nobody knows for whom
        ([Watched(), Watched(frost="stopped")], 1, True),  # a stopped process is never waiting for anybody
        ([Watched(frost="stopped"), Watched(frost="stopped")], 0, False),
        ([Watched(), Watched()], None, False),
    ],
)
def test_who_of_a_group_is_accused(tmp_path: Path, ranks: list[Watched], accused: int | None, sure: bool) -> None:
    life = Lives().begin(A, [tmp_path / str(number) for number in range(len(ranks))], 0.0)
    for rank, watched in zip(life.ranks, ranks, strict=True):
        rank.watch = watched  # type: ignore[assignment]
    found, _, certain = suspicious(life.ranks, 1.0)
    assert (None if found is None else found.rank, certain) == (accused, sure)
