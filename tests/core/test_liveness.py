"""Suspicion: the stopped, frozen and hung are named; the slow, waiting and unwatched are not."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.liveness import (
    APPLYING,
    COMPUTING,
    CONTROL,
    EARLY_PASSES,
    GENEROUS,
    STARTING,
    JobTimes,
    ProgressSample,
    ProgressWatch,
    Rule,
    Silences,
    WatchedClock,
)
from planaria.core.messages import Phase

quick = settings(max_examples=60, deadline=None)  # no deadline: the machine may be busy
POLL = 0.1
WAITING = (Phase.PARKED, Phase.FORMING, Phase.HEALING, Phase.EXCHANGING)


@dataclass
class Rank:
    """A rank as its agent sees it, on a clock of our own."""

    times: JobTimes = field(default_factory=JobTimes)
    now: float = 1000.0
    phase: Phase = Phase.STARTING
    beat: int = 0
    control: int = 0

    def __post_init__(self) -> None:
        self.watch = ProgressWatch(self.times)

    def poll(self, stopped: bool = False) -> str | None:
        self.watch.observe(self.now, ProgressSample(self.phase, self.beat, self.control, stopped))
        return self.watch.verdict(self.now)

    def run(
        self,
        seconds: float,
        beats: bool = False,
        control: bool = True,
        stopped: bool = False,
        poll: float = POLL,
    ) -> str | None:
        """Live for a while, polled regularly; the first verdict that is not None, if any."""
        found: str | None = None
        for _ in range(round(seconds / poll)):
            self.now += poll
            self.beat += beats
            self.control += control
            verdict = self.poll(stopped)
            found = found or verdict
        return found

    def enter(self, phase: Phase) -> str | None:
        self.phase = phase
        self.beat += 1
        return self.poll()

    def steps(self, count: int, shard: float = 0.2) -> str | None:
        """Whole steps, each with one silent shard of ``shard`` seconds."""
        found: str | None = None
        for _ in range(count):
            for phase, seconds in ((Phase.COMPUTING, shard), (Phase.EXCHANGING, 0.1), (Phase.APPLYING, 0.1)):
                verdicts = [self.enter(phase), self.run(seconds)]
                found = found or verdicts[0] or verdicts[1]
        return found


def trained(steps: int = 5, shard: float = 0.2) -> Rank:
    """A rank that has started and made a few steps, past the early ones."""
    rank = Rank()
    rank.run(1.0)
    assert rank.steps(steps, shard) is None
    return rank


# --- a rank: examples ---------------------------------------------------------------------------------------


def test_nothing_observed_is_nothing_suspected() -> None:
    assert ProgressWatch().verdict(5.0) is None


def test_a_training_rank_is_fine() -> None:
    assert trained().steps(20) is None


def test_a_stopped_process_is_suspected_at_the_second_poll() -> None:
    rank = trained()
    assert rank.run(POLL, control=False, stopped=True) is None
    assert "stopped" in (rank.run(POLL, control=False, stopped=True) or "")


def test_a_stopped_process_is_suspected_while_it_waits_too() -> None:
    for phase in WAITING:
        rank = trained()
        rank.enter(phase)
        assert "stopped" in (rank.run(2 * POLL, control=False, stopped=True) or "")


def test_a_process_read_by_a_profiler_is_not_suspected() -> None:
    """It is stopped at every poll, by chance, but its control thread beats in between."""
    assert trained().run(3.0, control=True, stopped=True) is None


def test_a_process_that_goes_on_is_cleared() -> None:
    rank = trained()
    assert rank.run(20.0, control=False, stopped=True)
    rank.control += 1
    assert rank.poll() is None
    assert rank.steps(5) is None


def test_being_stopped_teaches_nothing() -> None:
    """Otherwise one long stop would blind the watch for the rest of the job."""
    rank = trained()
    rank.enter(Phase.COMPUTING)
    control = rank.times.control.limit
    rank.run(300.0, control=False, stopped=True)
    rank.run(0.5, beats=True)
    assert rank.times.control.limit == control
    assert rank.run(COMPUTING.floor + 1.0)


def test_a_frozen_process_is_suspected_by_its_control_beat() -> None:
    """A frozen cgroup shows no state T."""
    rank = trained()
    assert rank.run(CONTROL.floor - 0.2, control=False) is None
    assert "control thread" in (rank.run(0.5, control=False) or "")
    rank.run(POLL)
    assert rank.poll() is None


def test_a_control_thread_that_is_slow_at_times_raises_its_limit() -> None:
    rank = trained()
    for _ in range(3):
        assert rank.run(1.5, control=False) is None
        rank.run(POLL)
    assert 3 * 1.5 <= rank.times.control.limit <= 3 * 1.8
    assert rank.run(4.0, control=False) is None
    assert rank.run(1.5, control=False)


def test_a_rank_without_a_control_thread_yet_is_not_judged_by_it() -> None:
    rank = Rank()
    assert rank.run(50.0, control=False) is None


def test_imports_and_loading_may_keep_the_interpreter_lock() -> None:
    rank = Rank()
    rank.run(1.0)
    assert rank.run(50.0, control=False) is None
    rank.enter(Phase.PARKED)
    assert rank.run(CONTROL.floor - 0.2, control=False) is None  # only from here on


def test_the_first_step_may_compile_for_long() -> None:
    rank = Rank()
    rank.run(1.0)
    assert rank.enter(Phase.COMPUTING) is None
    assert rank.run(0.5, beats=True) is None  # the data was quick; then the compiler starts
    assert rank.run(GENEROUS - 10.0, poll=0.5) is None
    assert "computing a shard" in (rank.run(20.0, poll=0.5) or "")


def test_compilation_does_not_count_as_a_usual_shard() -> None:
    rank = Rank()
    rank.run(1.0)
    assert rank.steps(1, shard=90.0) is None
    rank.steps(EARLY_PASSES + 2)
    rank.enter(Phase.COMPUTING)
    assert rank.run(COMPUTING.floor - 0.5) is None
    assert rank.run(1.0)


def test_a_restarted_rank_may_compile_again_but_not_for_ever() -> None:
    first = Rank()
    first.run(1.0)
    first.steps(6, shard=20.0)
    again = Rank(first.times)
    again.run(1.0)
    again.enter(Phase.COMPUTING)
    assert again.run(COMPUTING.factor * 20.0 - 5.0) is None
    assert again.run(10.0)


def test_what_follows_compilation_within_a_pass_does_not_hide_it() -> None:
    first = Rank()
    first.run(1.0)
    first.enter(Phase.COMPUTING)
    first.run(30.0)  # compiles
    first.run(1.0, beats=True)  # computes
    first.enter(Phase.EXCHANGING)
    again = Rank(first.times)
    again.run(1.0)
    again.enter(Phase.COMPUTING)
    assert again.run(COMPUTING.factor * 30.0 - 5.0) is None


def test_a_hung_shard_is_suspected_after_a_multiple_of_the_longest() -> None:
    rank = trained(steps=8, shard=4.0)
    rank.enter(Phase.COMPUTING)
    assert rank.run(19.0) is None
    sentence = rank.run(3.0) or ""
    assert "no progress while computing a shard" in sentence
    assert "longest seen 4" in sentence


def test_other_ranks_of_the_job_teach_too() -> None:
    slow = trained(steps=8, shard=10.0)
    other = Rank(slow.times)
    other.run(1.0)
    other.steps(6, shard=0.2)
    other.enter(Phase.COMPUTING)
    assert other.run(45.0) is None


def test_a_first_evaluation_of_half_a_minute_is_fine() -> None:
    rank = trained()
    rank.enter(Phase.APPLYING)
    assert rank.run(APPLYING.floor / 2) is None
    rank.enter(Phase.COMPUTING)
    rank.enter(Phase.APPLYING)
    assert rank.run(APPLYING.factor * APPLYING.floor / 2 - 5.0) is None


def test_a_load_may_take_ten_minutes_whatever_the_others_took_and_no_longer() -> None:
    rank = trained()
    for _ in range(10):
        rank.enter(Phase.LOADING)
        assert rank.run(1.0) is None
        rank.enter(Phase.HEALING)
    rank.enter(Phase.LOADING)
    assert rank.run(GENEROUS - 1.0) is None
    assert "no progress while saving or loading the state" in (rank.run(2.0) or "")


@pytest.mark.parametrize("phase", WAITING)
def test_waiting_for_others_is_nobodys_fault(phase: Phase) -> None:
    rank = trained()
    rank.enter(phase)
    assert rank.run(2 * GENEROUS, poll=0.5) is None


def test_a_finished_rank_may_take_its_time_to_end() -> None:
    rank = trained()
    rank.enter(Phase.FINISHED)
    assert rank.run(100.0, control=False) is None


def test_a_start_is_given_time_but_not_for_ever() -> None:
    rank = Rank()
    rank.run(1.0)
    assert rank.run(GENEROUS - 20.0, poll=0.5) is None
    assert "starting" in (rank.run(30.0, poll=0.5) or "")
    rank.enter(Phase.PARKED)
    assert rank.poll() is None


def test_later_starts_are_judged_by_earlier_ones() -> None:
    first = Rank()
    first.run(20.0)
    first.enter(Phase.PARKED)
    again = Rank(first.times)
    assert again.run(STARTING.factor * 20.0 - 2.0) is None
    assert again.run(5.0)


# --- the watcher itself was paused --------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [3600.0, 1e9, -3600.0])
def test_a_watcher_that_was_paused_or_whose_clock_was_set_accuses_nobody(jump: float) -> None:
    rank = trained()
    rank.enter(Phase.COMPUTING)
    rank.now += jump
    assert rank.watch.verdict(rank.now) is None
    assert rank.poll() is None  # the rank was paused as well, and has not run yet
    assert rank.run(5.0) is None


def test_after_a_pause_the_hung_are_still_found() -> None:
    rank = trained()
    rank.enter(Phase.COMPUTING)
    rank.run(5.0)
    rank.now += 3600.0
    assert rank.run(4.0) is None
    assert rank.run(2.0)


def test_a_pause_teaches_nothing_wrong() -> None:
    rank = trained()
    before = rank.times.control.limit
    for _ in range(5):
        rank.now += 100.0
        rank.steps(1)
    assert rank.times.control.limit == before


def test_watched_time_passes_only_with_looks() -> None:
    clock = WatchedClock(step=0.5)
    assert clock.look(100.0) == 0.0
    assert clock.at(100.2) == pytest.approx(0.2)
    assert clock.look(100.4) == pytest.approx(0.4)
    assert clock.look(99.0) == pytest.approx(0.4)
    assert clock.look(99.1) == pytest.approx(0.5)
    assert clock.look(500.0) == pytest.approx(1.0)


# --- limits -------------------------------------------------------------------------------------------------

RULE = Rule(floor=2.0, factor=3.0, ceiling=30.0, unseen=10.0)


def test_a_limit_has_a_floor_a_multiple_and_a_ceiling() -> None:
    silences = Silences(RULE)
    assert silences.limit == 10.0
    silences.ended(0.1)
    assert silences.limit == 2.0
    silences.ended(1.0)
    assert silences.limit == 3.0
    for _ in range(10):
        silences.ended(1000.0)
    assert silences.limit == 30.0


def test_a_suspected_silence_that_ends_at_most_doubles_the_limit() -> None:
    silences = Silences(RULE)
    silences.ended(1.0)
    silences.ended(3600.0)
    assert silences.limit == pytest.approx(6.0)


def test_a_bad_moment_is_forgotten() -> None:
    silences = Silences(Rule(floor=1.0, factor=3.0, ceiling=30.0, unseen=10.0, half_life=100))
    silences.ended(3.0)
    for _ in range(100):
        silences.ended(0.1)
    assert silences.limit == pytest.approx(4.5)
    for _ in range(400):
        silences.ended(0.1)
    assert silences.limit == 1.0


@quick
@given(st.lists(st.floats(0.0, 1e6)))
def test_limits_stay_within_their_bounds(silent: list[float]) -> None:
    silences = Silences(RULE)
    for silence in silent:
        before = silences.limit
        silences.ended(silence)
        assert RULE.floor <= silences.limit <= RULE.ceiling
        assert silences.limit <= max(2 * before, RULE.factor * silence) + 1e-9


# --- properties of a rank's watch ---------------------------------------------------------------------------


@quick
@given(
    st.lists(st.tuples(st.sampled_from(list(Phase)), st.integers(1, 10)), max_size=15),
    st.lists(st.floats(-1e6, 1e6), max_size=15),
)
def test_who_shows_life_at_every_poll_is_never_suspected(life: list[tuple[Phase, int]], jumps: list[float]) -> None:
    """Whatever the clock does."""
    rank = Rank()
    for index, (phase, polls) in enumerate(life):
        assert rank.enter(phase) is None
        assert rank.run(polls * POLL, beats=True) is None
        rank.now += jumps[index] if index < len(jumps) else 0.0


@quick
@given(st.sampled_from(list(Phase)), st.lists(st.booleans(), min_size=1, max_size=30))
def test_whoever_is_suspected_is_cleared_by_signs_of_life(phase: Phase, stops: list[bool]) -> None:
    rank = trained()
    rank.enter(phase)
    for stopped in stops:
        rank.run(0.5, control=False, stopped=stopped)
    rank.run(2 * POLL, beats=True)
    assert rank.poll() is None


@quick
@given(st.integers(1, 40))
def test_polls_more_often_do_not_suspect_earlier(divisor: int) -> None:
    rank = trained()
    rank.enter(Phase.COMPUTING)
    assert rank.run(COMPUTING.floor - 0.2, poll=0.5 / divisor) is None
    assert rank.run(2.0, poll=0.5 / divisor)
