"""The rules by which all contestants are judged, on small histories made by hand."""

from pathlib import Path

import pytest

from bench.timeline import (
    Life,
    Logs,
    loss,
    missing,
    next_commit,
    once,
    samples_per_second,
    steady,
    step_seconds,
    survivor_recovery,
    take_part_again,
)

FULL = 64  # four groups of 16


def life(group: int, *commits: tuple[int, float, int], started: float = 0.0, took_part: bool = True) -> Life:
    """Commits are (step, seconds, samples)."""
    made = Life(group)
    made.feed(f"start {100 + group} {int(started * 1e9)}")
    for step, at, samples in commits:
        made.feed(f"attempt {step} {int((at - 0.01) * 1e9)}")
        made.feed(f"commit {step} {int(at * 1e9)} {samples} {int(took_part)}")
    return made


# --- lines


def test_a_life_is_read_line_by_line() -> None:
    made = Life(3)
    for line in ("start 42 5000000000", "attempt 7 6000000000", "commit 7 6500000000 64 1", "attempt 8 6500000001"):
        made.feed(line)
    assert (made.pid, made.started) == (42, 5.0)
    assert [(c.step, c.at, c.samples, c.took_part) for c in made.commits] == [(7, 6.5, 64, True)]
    assert made.discarded == []  # the open attempt may still be committed


def test_an_attempt_without_a_commit_before_the_next_one_was_discarded() -> None:
    made = Life(0)
    for line in ("attempt 1 1000000000", "attempt 1 2000000000", "commit 1 3000000000 48 1"):
        made.feed(line)
    assert made.discarded == [2.0]


def test_a_step_committed_twice_by_one_life_was_taken_back() -> None:
    made = life(0, (1, 1.0, 64), (2, 2.0, 64), (2, 3.0, 64))
    assert made.discarded == [3.0]


def test_a_crash_keeps_its_reason_with_spaces() -> None:
    made = Life(0)
    made.feed("crash 0 2500000000 \"TimeoutError('waited too long')\"")
    assert made.crashed == 2.5 and made.error == "TimeoutError('waited too long')"


def test_an_unknown_line_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown line"):
        Life(0).feed("banana 1 2")


# --- files


def test_logs_follow_files_as_they_grow_and_wait_for_whole_lines(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.poll()
    assert logs.newest(0) is None
    first = tmp_path / "life.0.1000000000"
    first.write_text("start 11 1000000000\nattempt 0 1100000000\ncommit 0 12000")
    logs.poll()
    assert logs.newest(0) is not None and logs.newest(0).pid == 11 and logs.newest(0).commits == []
    with first.open("a") as file:
        file.write("00000 64 1\n")
    logs.poll()
    assert [c.at for c in logs.newest(0).commits] == [1.2]


def test_lives_of_a_group_are_in_order_of_birth_whatever_their_names_sort_like(tmp_path: Path) -> None:
    (tmp_path / "life.1.99").write_text("start 1 99\n")
    (tmp_path / "life.1.100").write_text("start 2 100\n")
    (tmp_path / "unrelated").write_text("x")
    logs = Logs(tmp_path)
    logs.poll()
    assert [made.pid for made in logs.lives[1]] == [1, 2]
    assert logs.newest(1).pid == 2
    assert len(logs.all()) == 2


# --- the next commit


def test_the_step_in_flight_is_the_one_held_up() -> None:
    assert next_commit([1.0, 2.0, 3.5, 4.5], at=2.2) == 3.5


def test_a_step_already_on_the_wire_does_not_count_as_recovery() -> None:
    # Killed at 2.2 after its contribution had left: the others commit at 3.0 as ever and are held up after that.
    assert next_commit([1.0, 2.0, 3.0, 9.0, 10.0], at=2.2) == 9.0


def test_the_next_commit_is_not_known_before_two_commits() -> None:
    assert next_commit([1.0, 2.0, 3.0], at=2.2) is None
    assert next_commit([3.0, 4.0], at=2.2) is None


def test_a_survivor_that_crashed_is_through_when_its_next_life_takes_part() -> None:
    old = life(1, (1, 1.0, 64))
    new = life(1, (8, 7.0, 64), started=5.0, took_part=False)
    assert survivor_recovery([old, new], 2.0) is None
    new.feed("commit 9 8000000000 64 1")
    assert survivor_recovery([old, new], 2.0) == 8.0


def test_taking_part_again_counts_only_lives_begun_after_the_kill() -> None:
    old = life(0, (1, 1.0, 64), (2, 3.0, 64))
    assert take_part_again([old], 2.0) is None
    assert take_part_again([old, life(0, (5, 6.0, 64), started=4.0)], 2.0) == 6.0


# --- one loss


def four_groups() -> dict[int, list[Life]]:
    """Group 0 is killed at 2.5 and takes part again at 6; each survivor throws one attempt away. Two short steps."""
    lives = {0: [life(0, (1, 1.0, 64), (2, 2.0, 64)), life(0, (5, 6.0, 64), started=4.0)]}
    for group in (1, 2, 3):
        made = life(group, (1, 1.0, 64), (2, 2.0, 64))
        made.feed("attempt 3 2000000001")
        late = group / 10  # they hear of it one after the other
        for step, at, samples in ((3, 3.5 + late, 48), (4, 4.5 + late, 48), (5, 6.0, 64)):
            made.feed(f"attempt {step} {int((at - 0.5) * 1e9)}")
            made.feed(f"commit {step} {int(at * 1e9)} {samples} 1")
        lives[group] = [made]
    return lives


def test_a_loss_is_judged_by_its_survivors() -> None:
    found = loss(four_groups(), victim=0, at=2.5, full=FULL)
    assert found is not None
    assert found.first == pytest.approx(1.1) and found.slowest == pytest.approx(1.3)
    assert found.back == pytest.approx(3.5)
    assert found.discarded == 3 and found.crashed == 0


def test_samples_lost_are_those_missing_in_commits_and_those_of_discarded_attempts() -> None:
    found = loss(four_groups(), victim=0, at=2.5, full=FULL)
    assert found is not None and found.samples_lost == 2 * 16 + 3 * 16


def test_a_loss_without_loss() -> None:
    lives = {0: [life(0, (1, 1.0, 64)), life(0, (4, 4.0, 64), started=2.0)]}
    lives[1] = [life(1, (1, 1.0, 64), (2, 2.1, 64), (3, 3.0, 64), (4, 4.0, 64))]
    found = loss(lives, victim=0, at=1.5, full=FULL)
    assert found is not None
    assert (found.discarded, found.samples_lost, found.crashed) == (0, 0, 0)


def test_a_loss_is_open_until_the_victim_is_back() -> None:
    lives = four_groups()
    lives[0].pop()
    assert loss(lives, victim=0, at=2.5, full=FULL) is None


def test_a_survivor_that_had_to_be_started_again_is_counted() -> None:
    lives = four_groups()
    lives[3] = [life(3, (1, 1.0, 64), (2, 2.0, 64)), life(3, (5, 6.2, 64), started=5.0)]
    found = loss(lives, victim=0, at=2.5, full=FULL)
    assert found is not None and found.crashed == 1 and found.slowest == pytest.approx(3.7)


# --- goodput


def test_a_step_counts_once_whoever_committed_it() -> None:
    lives = [life(0, (1, 1.0, 64), (2, 2.0, 64)), life(1, (1, 1.1, 64), (2, 2.1, 64), (3, 3.0, 48))]
    assert once(lives, 0.5, 10.0) == {1: 64, 2: 64, 3: 48}
    assert missing(lives, 0.5, 10.0, FULL) == 16
    assert samples_per_second(lives, 0.0, 4.0) == pytest.approx((64 + 64 + 48) / 4.0)


def test_a_step_committed_before_the_window_is_not_counted_again_in_it() -> None:
    lives = [life(0, (1, 1.0, 64), (2, 1.9, 64)), life(1, (1, 1.1, 64), (2, 2.1, 64), (3, 2.5, 64))]
    assert once(lives, 2.0, 10.0) == {3: 64}


def test_a_group_that_trains_alone_from_step_0_adds_nothing() -> None:
    lives = [life(0, (1, 1.0, 64), (2, 2.0, 64)), life(1, (1, 5.0, 16), (2, 6.0, 16), started=4.0)]
    assert sum(once(lives, 3.0, 10.0).values()) == 0


def test_step_seconds_do_not_reach_over_the_border() -> None:
    assert step_seconds([life(0, (1, 1.0, 64), (2, 2.0, 64), (3, 3.5, 64))], 1.5, 10.0) == [1.5]


def test_steady_wants_full_commits_of_the_newest_life_of_every_group() -> None:
    lives = {0: [life(0, (1, 1.0, 64), (2, 2.0, 64))], 1: [life(1, (1, 1.0, 64), (2, 2.0, 48))]}
    assert steady(lives, 2, since=0.0, commits=1, full=FULL)
    assert not steady(lives, 2, since=0.0, commits=2, full=FULL)  # one of group 1's was short
    assert not steady(lives, 2, since=1.5, commits=1, full=FULL)
    assert not steady(lives, 3, since=0.0, commits=1, full=FULL)  # one has not come yet
    lives[0].append(life(0, started=3.0))
    assert not steady(lives, 2, since=0.0, commits=1, full=FULL)
