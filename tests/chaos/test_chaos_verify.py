"""The judge, on run directories that the real writers have written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from planaria.chaos.inject import NOBODY, Injected
from planaria.chaos.schedule import Fault, Kind
from planaria.chaos.verify import Record, Verdict, cost, discarded, judge, median, read_record, read_records
from planaria.chaos.watch import Life, Process
from planaria.core.messages import Member, QuorumId
from planaria.errors import PlanariaError
from planaria.rank.journal import Journal
from planaria.wire.page import ProgressPage

SHARDS = 8
MS = 1_000_000
STEPS = 10


@dataclass
class Story:
    """Writes what ranks would have written. Times are milliseconds."""

    root: Path
    lives: list[Life] = field(default_factory=list)

    def life(self, group: int, incarnation: int = 0, *, first: int = 0, commits: list[tuple[int, int]]) -> Life:
        """``commits``: (at, shards computed for it) of consecutive steps from ``first`` on."""
        directory = self.root / f"rg{group}" / f"i{incarnation}"
        directory.mkdir(parents=True)
        page = ProgressPage.create(directory / "progress")
        journal = Journal(directory)
        total = 0
        for step, (at, computed) in enumerate(commits, start=first):
            total += computed
            page.committed(step + 1, QuorumId(1, 1), loss_at(step), at * MS, total, 0)
            journal.commit(step, SHARDS, {"loss": loss_at(step)})
        if first + len(commits) == STEPS:
            journal.result(STEPS, "same", {"loss": loss_at(STEPS - 1)})
        journal.close()
        life = Life(Member(group, incarnation), directory, page.read(), {0: Process(page, -1)})
        life.look()
        self.lives.append(life)
        return life

    def judge(self, *injected: Injected, quiet: Record | None = None) -> Verdict:
        return judge(read_records([self.root]), self.lives, injected, SHARDS, quiet)


def loss_at(step: int) -> float:
    return 1 / (3 + step)


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def quiet_record(directory: Path, digest: str = "same", off: int = -1) -> Record:
    """A quiet run's, whose loss is another one at step ``off``."""
    directory.mkdir()
    journal = Journal(directory)
    for step in range(STEPS):
        journal.commit(step, SHARDS, {"loss": loss_at(step) + (1e-16 if step == off else 0)})
    journal.result(STEPS, digest, {})
    journal.close()
    return read_record(directory)


def every_100(count: int, computed: int, start: int = 100) -> list[tuple[int, int]]:
    return [(start + 100 * index, computed) for index in range(count)]


def blow(kind: Kind, member: Member, at: int, until: int = 0) -> Injected:
    return Injected(Fault(kind), member, at * MS, 0, None, until * MS)


# --- was everything committed? ------------------------------------------------------------------------------


def test_a_run_without_faults_is_good(story: Story, tmp_path: Path) -> None:
    for group in range(2):
        story.life(group, commits=every_100(STEPS, 4))
    verdict = story.judge(quiet=quiet_record(tmp_path / "quiet"))
    assert (verdict.steps, verdict.committed, verdict.discarded, verdict.shards_lost) == (STEPS, STEPS, 0, 0)
    assert verdict.identical and verdict.complete and verdict.good and not verdict.contradictions
    assert verdict.loss == verdict.quiet_loss == loss_at(STEPS - 1)
    assert verdict.curve == tuple((step, loss_at(step)) for step in range(STEPS))


def test_without_a_quiet_run_nothing_is_called_identical(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    verdict = story.judge()
    assert verdict.good and not verdict.identical and not verdict.verified


def test_another_digest_is_not_identical(story: Story, tmp_path: Path) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    verdict = story.judge(quiet=quiet_record(tmp_path / "quiet", digest="other"))
    assert not verdict.identical and not verdict.good and verdict.quiet_differences == 0


def test_one_bit_of_one_loss_is_seen(story: Story, tmp_path: Path) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    verdict = story.judge(quiet=quiet_record(tmp_path / "quiet", off=STEPS - 1))
    assert verdict.quiet_differences == 1 and not verdict.identical and not verdict.good


def test_groups_that_end_with_different_weights_are_not_good(story: Story) -> None:
    for group in range(2):
        story.life(group, commits=every_100(STEPS, 4))
    result = story.root / "rg1" / "i0" / "result.json"
    result.write_text(result.read_text().replace("same", "odd"))
    verdict = story.judge()
    assert verdict.digests == ("odd", "same") and not verdict.complete and not verdict.good


def test_missing_shards_are_counted(story: Story) -> None:
    life = story.life(0, commits=every_100(STEPS, 8))
    log = life.directory / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"shards": 8', '"shards": 6')
    log.write_text("".join(lines))
    verdict = story.judge()
    assert verdict.shards_lost == 2 and not verdict.good


def test_a_step_that_nobody_committed_is_seen(story: Story, tmp_path: Path) -> None:
    story.life(0, commits=every_100(4, 8))
    story.life(0, 1, first=5, commits=every_100(STEPS - 5, 8, start=1000))
    verdict = story.judge(quiet=quiet_record(tmp_path / "quiet"))
    assert (verdict.committed, verdict.discarded) == (STEPS - 1, 1)
    assert not verdict.good


def test_a_run_that_stopped_early_is_not_complete(story: Story, tmp_path: Path) -> None:
    story.life(0, commits=every_100(4, 8))
    verdict = story.judge(quiet=quiet_record(tmp_path / "quiet"))
    assert (verdict.steps, verdict.committed, verdict.digests) == (STEPS, 4, ())
    assert not verdict.complete and not verdict.good and not verdict.identical


def test_two_truths_of_one_step_are_a_contradiction(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 4))
    other = story.life(1, commits=every_100(STEPS, 4))
    log = other.directory / "metrics.jsonl"
    log.write_text(log.read_text().replace(repr(loss_at(3)), repr(math.nextafter(loss_at(3), 1))))
    verdict = story.judge()
    [words] = verdict.contradictions
    assert "group 1" in words and "step 3" in words
    assert not verdict.good


def test_a_step_committed_twice_by_one_process_is_a_contradiction(story: Story) -> None:
    life = story.life(0, commits=every_100(STEPS, 8))
    log = life.directory / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines[:5], lines[4], *lines[5:]]))
    assert "committed step 4 after step 4" in story.judge().contradictions[0]


def test_what_a_kill_cut_off_is_made_up_by_the_peers(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 4))
    victim = story.life(1, commits=every_100(6, 4))
    log = victim.directory / "metrics.jsonl"
    log.write_text(log.read_text()[:-20])  # killed in the middle of a line
    assert len(read_record(victim.directory).lines) == 5
    assert story.judge(blow(Kind.KILL, Member(1, 0), 601)).committed == STEPS


def test_a_quiet_run_that_failed_is_no_truth(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    with pytest.raises(PlanariaError, match="did not finish"):
        story.judge(quiet=Record(()))


def test_an_empty_directory_is_an_empty_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) == Record(())
    verdict = judge({}, [], [], SHARDS, None)
    assert not verdict.good and verdict.loss is None


# --- was work thrown away? ----------------------------------------------------------------------------------


def survivors_of_a_kill(story: Story, extra: int) -> list[Injected]:
    """Group 3 of 4 dies in the middle of step 5; the others compute its two shards, and ``extra`` once too often."""
    again = [1 + extra, 1, 0]
    for group in range(3):
        commits = [*every_100(5, 2), (700, 2 + again[group]), *every_100(4, 2, start=800)]
        story.life(group, commits=commits)
    story.life(3, commits=every_100(5, 2))
    return [blow(Kind.KILL, Member(3, 0), 520)]


def test_the_shards_of_a_lost_group_are_no_discarded_step(story: Story) -> None:
    assert story.judge(*survivors_of_a_kill(story, 0)).discarded == 0


def test_shards_computed_twice_by_survivors_are_a_discarded_step(story: Story) -> None:
    assert story.judge(*survivors_of_a_kill(story, 1)).discarded == 1


def test_a_victim_that_had_committed_already_is_not_counted_twice(story: Story) -> None:
    for group in range(3):
        commits = [*every_100(5, 2), (700, 3 if group < 2 else 2), *every_100(4, 2, start=800)]
        story.life(group, commits=commits)
    story.life(3, commits=every_100(6, 2))  # it committed step 5, which its share had completed there only
    assert story.judge(blow(Kind.KILL, Member(3, 0), 610)).discarded == 0


def test_what_a_stopped_group_had_done_is_its_own_loss(story: Story) -> None:
    for group in range(3):
        commits = [*every_100(5, 2), (700, 3 if group < 2 else 2), *every_100(4, 2, start=800)]
        story.life(group, commits=commits)
    # Woken while the others were still at step 5, it healed and computed its part of that very step again.
    zombie = story.life(3, commits=[*every_100(5, 2), (700, 4), *every_100(4, 2, start=800)])
    stop = blow(Kind.STOP, Member(3, 0), 520, until=600)
    assert discarded(range(STEPS), story.lives, [stop], SHARDS) == 0
    assert discarded(range(STEPS), story.lives, [], SHARDS) == 1
    assert zombie.member == stop.member


def test_a_count_that_spans_a_healing_says_nothing(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    life = story.life(1, commits=every_100(3, 0))
    life.page.committed(8, QuorumId(1, 2), 0.1, 801 * MS, 40, 0)
    life.over = False  # its writer is this process, which is not its own child
    life.look()
    assert discarded(range(STEPS), story.lives, [], SHARDS) == 0


# --- what did it cost? --------------------------------------------------------------------------------------


def test_recovery_counts_to_the_commit_that_was_held_up(story: Story) -> None:
    story.life(0, commits=[*every_100(5, 4), (830, 8), (900, 4)])
    story.life(1, commits=every_100(5, 4))
    got = cost(blow(Kind.KILL, Member(1, 0), 520), story.lives)
    assert got.lost and got.recovery == pytest.approx(0.31) and got.back is None


def test_a_step_that_the_victim_had_already_fed_does_not_flatter(story: Story) -> None:
    # Killed at 590 with its share of the step on the wire: the others commit it at 600, and only then stand still.
    story.life(0, commits=[*every_100(6, 4), (950, 8), (1000, 4)])
    story.life(1, commits=every_100(5, 4))
    got = cost(blow(Kind.KILL, Member(1, 0), 590), story.lives)
    assert got.recovery == pytest.approx(0.36)


def test_the_fastest_of_the_others_counts_and_newborn_ones_do_not(story: Story) -> None:
    for group, late in ((0, 20), (1, 0)):
        story.life(group, commits=[*every_100(5, 4), (700 + late, 8), (800, 4)])
    story.life(2, commits=every_100(5, 4))
    story.life(3, 1, first=5, commits=[(530, 1), (540, 1)])
    assert cost(blow(Kind.KILL, Member(2, 0), 510), story.lives).recovery == pytest.approx(0.19)


def test_a_group_that_is_lost_itself_right_after_is_no_witness(story: Story) -> None:
    # Group 1 commits the step that group 2 had already fed, at 602, and dies too: that was no recovery.
    story.life(0, commits=[*every_100(5, 4), (601, 4), (1100, 8), (1200, 8)])
    story.life(1, commits=[*every_100(5, 4), (602, 4)])
    story.life(2, commits=every_100(5, 4))
    assert cost(blow(Kind.KILL, Member(2, 0), 600), story.lives).recovery == pytest.approx(0.5)


def test_at_the_end_of_the_job_one_commit_is_all_there_is(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 4))
    story.life(1, commits=every_100(STEPS - 1, 4))
    assert cost(blow(Kind.KILL, Member(1, 0), 920), story.lives).recovery == pytest.approx(0.08)


def test_the_group_is_back_when_it_has_worked_again(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    story.life(1, commits=every_100(3, 4))
    reborn = story.life(1, 1, first=6, commits=[(700, 0), (800, 4), (900, 4)])
    got = cost(blow(Kind.KILL, Member(1, 0), 350), story.lives)
    assert got.back == pytest.approx(0.45), "a commit to which it gave nothing is not yet being back"
    assert reborn.commits[0].shards_computed == 0


def test_a_short_stop_loses_nobody(story: Story) -> None:
    for group in range(2):
        story.life(group, commits=[*every_100(5, 4), (720, 4), (800, 4)])
    got = cost(blow(Kind.STOP, Member(1, 0), 510, until=700), story.lives)
    assert not got.lost and got.back is None and got.recovery == pytest.approx(0.21)


def test_a_long_stop_loses_the_group_until_it_works_again(story: Story) -> None:
    story.life(0, commits=every_100(STEPS, 8))
    zombie = story.life(1, commits=every_100(3, 4))
    zombie.page.committed(9, QuorumId(1, 2), 0.1, 900 * MS, 14, 0)
    zombie.page.committed(10, QuorumId(1, 2), 0.1, 1000 * MS, 18, 0)
    zombie.over = False  # its writer is this process, which is not its own child
    zombie.look()
    got = cost(blow(Kind.STOP, Member(1, 0), 350, until=750), story.lives)
    assert got.lost and got.back == pytest.approx(0.55)


def test_a_group_that_the_others_left_behind_is_lost_even_if_it_took_long(story: Story) -> None:
    # Out of reach from 510 to 900; the others waited for certainty until 950 and were two steps on when it came back.
    story.life(0, commits=[*every_100(5, 4), (950, 8), (1050, 8), (1150, 4)])
    cut = story.life(1, commits=every_100(5, 4))
    cut.page.committed(8, QuorumId(1, 2), 0.1, 1151 * MS, 24, 0)
    cut.over = False  # its writer is this process, which is not its own child
    cut.look()
    got = cost(blow(Kind.PARTITION, Member(1, 0), 510, until=900), story.lives)
    assert got.lost and got.recovery == pytest.approx(0.44) and got.back == pytest.approx(0.641)


def test_a_lighthouse_loses_nobody(story: Story) -> None:
    for group in range(2):
        story.life(group, commits=every_100(STEPS, 4))
    got = cost(blow(Kind.LIGHTHOUSE, NOBODY, 450), story.lives)
    assert not got.lost and got.back is None and got.recovery in (pytest.approx(0.05), pytest.approx(0.15))


def test_recoveries_are_those_of_lost_members(story: Story) -> None:
    kill = survivors_of_a_kill(story, 0)
    verdict = story.judge(*kill, blow(Kind.STOP, Member(0, 0), 810, until=820), blow(Kind.KILL, Member(2, 0), 2000))
    assert verdict.recoveries(Kind.KILL) == [pytest.approx(0.18)]
    assert verdict.recoveries(Kind.STOP) == []
    assert median([]) is None and median([1.0, 3.0]) == 2.0
