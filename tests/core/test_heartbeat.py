"""An agent's stream as the lighthouse hears it: overdue by observed gaps, if the lighthouse was awake."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.liveness import HEARTBEAT, HEARTBEAT_SECONDS, HeartbeatWatch, WatchedClock

quick = settings(max_examples=60, deadline=None)  # no deadline: the machine may be busy


def new_watch() -> HeartbeatWatch:
    return HeartbeatWatch(WatchedClock(HEARTBEAT_SECONDS))


def beating(count: int, gap: float = HEARTBEAT_SECONDS, begin: float = 50.0) -> tuple[HeartbeatWatch, float]:
    watch, now = new_watch(), begin
    watch.observe(now)
    for _ in range(count):
        until = now + gap
        while (now := min(now + HEARTBEAT_SECONDS, until)) < until:
            assert watch.overdue(now) is None
        watch.observe(now)
    return watch, now


def silence_until_overdue(watch: HeartbeatWatch, now: float) -> float:
    """Look once a second, and when it is due; how long until it says overdue."""
    begin, watched = now, watch.due - watch.silences.limit
    for _ in range(200):
        step = min(max(watch.due - watched, 0.001), HEARTBEAT_SECONDS)
        now, watched = now + step, watched + step
        if watch.overdue(now):
            return now - begin
    raise AssertionError("the watch never found the stream overdue")


def test_three_missed_beats_are_overdue() -> None:
    watch, now = beating(10)
    assert silence_until_overdue(watch, now) == pytest.approx(3.0, abs=0.01)


def test_a_new_agent_is_given_longer_until_its_first_beat() -> None:
    watch = new_watch()
    assert watch.due == math.inf and watch.overdue(0.0) is None
    for burst in range(5):
        watch.observe(1.0 + burst / 1000)  # its first reports come at once and say nothing of its beats
    assert silence_until_overdue(watch, 1.004) == pytest.approx(HEARTBEAT.unseen, abs=0.01)


def test_a_slow_agent_has_a_longer_limit() -> None:
    watch, now = beating(5, gap=2.0)
    assert silence_until_overdue(watch, now) == pytest.approx(6.0, abs=0.01)


def test_an_agent_that_was_slow_is_trusted_less_long_after_a_while() -> None:
    watch, now = beating(3, gap=2.5)
    watch_limit = watch.silences.limit
    for _ in range(1500):
        now += 1.0
        watch.observe(now)
    assert watch.silences.limit < watch_limit
    assert silence_until_overdue(watch, now) == pytest.approx(3.0, abs=0.1)


def test_an_agent_that_is_heard_again_is_cleared() -> None:
    watch, now = beating(5)
    now += silence_until_overdue(watch, now)
    watch.observe(now + 60.0)
    assert watch.overdue(now + 60.5) is None
    assert watch.silences.limit <= 2 * HEARTBEAT.floor


def test_the_reason_is_a_sentence() -> None:
    watch, now = beating(5)
    for second in range(1, 5):
        sentence = watch.overdue(now + second)
    assert sentence == "nothing heard for 4.0 s (limit 3 s, longest seen 1 s)"


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 1e9])
def test_a_lighthouse_that_was_paused_accuses_no_agent(jump: float) -> None:
    watch, now = beating(5)
    now += jump
    assert watch.overdue(now) is None
    assert watch.overdue(now + 1.0) is None
    watch.observe(now + 1.1)
    assert watch.overdue(now + 2.0) is None


@quick
@given(st.lists(st.floats(0.0, 4.0), max_size=40))
def test_deadlines_always_lead_to_a_verdict_within_the_ceiling(gaps: list[float]) -> None:
    watch, now = new_watch(), 0.1
    watch.observe(now)
    for gap in gaps:
        now += gap
        watch.observe(now)
    assert silence_until_overdue(watch, now) <= HEARTBEAT.ceiling + 0.1
