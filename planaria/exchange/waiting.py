"""How the training thread waits: on one condition, ended by a result or by news.

A rank has one :class:`Bell`. The threads that finish exchanges and the thread that hears of newer quorums
ring it; the training thread looks at what it waits for and at whether it should stop waiting whenever it
rings. So no wait polls, and none can outlast the news that makes it pointless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from planaria.errors import CommunicatorError, PlanariaError, afresh

T = TypeVar("T")


class Interrupted(CommunicatorError):
    """The wait was ended by news (a newer quorum, an order to stop), not by a failure."""


class Bell:
    """One condition on which a thread waits for whichever of several things comes first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rings = 0

    def ring(self) -> None:
        """Something changed: make the waiting thread look again. Any thread, never blocks for long."""
        with self._condition:
            self._rings += 1
            self._condition.notify_all()

    def wait(self, until: Callable[[], bool], interrupted: Callable[[], bool], what: str = "a wait") -> None:
        """Return once ``until()`` is true; raise :class:`Interrupted` once ``interrupted()`` is.

        ``until`` is asked first: work that is finished wins over news. Whoever changes what either of them
        looks at must ring afterwards.
        """
        while True:
            # The count is read before the questions are asked and they are asked without the lock: a ring in
            # between is not lost, and whoever rings may hold locks that the questions need.
            with self._condition:
                seen = self._rings
            if until():
                return
            if interrupted():
                raise Interrupted(f"{what} was interrupted by news")
            with self._condition:
                while self._rings == seen:
                    self._condition.wait()

    def wait_for(self, until: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``until()`` is true, but not longer than this. Whether it is."""
        over = time.monotonic() + seconds
        while True:
            with self._condition:
                seen = self._rings
            if until() or time.monotonic() >= over:
                return until()
            with self._condition:
                while self._rings == seen and (left := over - time.monotonic()) > 0:
                    self._condition.wait(left)


class Pending(Generic[T]):
    """A result that another thread will deliver. The first of ``succeed`` and ``fail`` counts."""

    def __init__(self, bell: Bell, what: str) -> None:
        self.what = what
        self._bell = bell
        self._lock = threading.Lock()
        self._done = False
        self._value: T | None = None
        self._error: PlanariaError | None = None

    def __repr__(self) -> str:
        return f"<Pending {self.what}: {'done' if self._done else 'not done'}>"

    @property
    def done(self) -> bool:
        """True once there is a result or a failure."""
        return self._done

    def succeed(self, value: T) -> None:
        self._settle(value, None)

    def fail(self, error: PlanariaError) -> None:
        self._settle(None, error)

    def _settle(self, value: T | None, error: PlanariaError | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error = value, afresh(error) if error is not None else None
            self._done = True
        self._bell.ring()

    def wait(self, interrupted: Callable[[], bool] = lambda: False) -> T:
        """The result. Raises :class:`Interrupted`, or the ``CommunicatorError`` of the failed operation."""
        self._bell.wait(lambda: self._done, interrupted, self.what)
        if self._error is not None:
            raise afresh(self._error)
        return self._value  # type: ignore[return-value]  # settled without error: it holds a T
