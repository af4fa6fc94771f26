"""The bell: finished work wins over news, news wins over waiting, and no ring is lost."""

from __future__ import annotations

import threading

import pytest

from planaria.errors import CommunicatorError
from planaria.exchange.waiting import Bell, Interrupted, Pending


def never() -> bool:
    return False


def test_finished_work_wins_over_news() -> None:
    Bell().wait(lambda: True, lambda: True)


def test_news_that_is_there_already_ends_the_wait() -> None:
    with pytest.raises(Interrupted, match="rolling the call was interrupted"):
        Bell().wait(never, lambda: True, "rolling the call")


def test_a_wait_ends_when_another_thread_changes_something_and_rings() -> None:
    bell, arrived = Bell(), threading.Event()

    def arrive() -> None:
        arrived.set()
        bell.ring()

    threading.Timer(0.02, arrive).start()
    bell.wait(arrived.is_set, never)


def test_rings_without_change_do_not_end_a_wait() -> None:
    bell, rings = Bell(), []

    def ring() -> None:
        for number in range(100):
            rings.append(number)
            bell.ring()

    threading.Timer(0.01, ring).start()
    bell.wait(lambda: len(rings) == 100, never)


def test_a_ring_between_the_questions_and_the_wait_is_not_lost() -> None:
    bell, ready = Bell(), False

    def until() -> bool:
        nonlocal ready
        was, ready = ready, True
        bell.ring()  # as another thread would, after the question was answered
        return was

    bell.wait(until, never)


def test_whoever_rings_may_hold_locks_that_the_questions_need() -> None:
    bell, lock, finished = Bell(), threading.Lock(), []

    def until() -> bool:
        with lock:
            return bool(finished)

    def finish() -> None:
        for _ in range(200):
            with lock:
                bell.ring()
        with lock:
            finished.append(True)
            bell.ring()

    threading.Thread(target=finish).start()
    bell.wait(until, never)


def test_pending_delivers_its_first_outcome_only() -> None:
    pending: Pending[int] = Pending(Bell(), "counting")
    assert not pending.done
    pending.succeed(3)
    pending.fail(CommunicatorError("too late"))
    pending.succeed(4)
    assert pending.done
    assert pending.wait() == 3
    assert pending.wait(lambda: True) == 3


def test_pending_raises_its_failure_in_the_waiting_thread() -> None:
    pending: Pending[int] = Pending(Bell(), "counting")
    threading.Timer(0.01, pending.fail, [CommunicatorError("rank 1 is gone")]).start()
    with pytest.raises(CommunicatorError, match="rank 1 is gone"):
        pending.wait()


def test_an_interrupted_pending_can_be_waited_for_again() -> None:
    bell = Bell()
    pending: Pending[str] = Pending(bell, "counting")
    with pytest.raises(Interrupted):
        pending.wait(lambda: True)
    pending.succeed("done")
    assert pending.wait() == "done"


def test_interrupted_is_a_communicator_error() -> None:
    assert issubclass(Interrupted, CommunicatorError)
