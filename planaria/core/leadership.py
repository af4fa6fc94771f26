"""Who of several lighthouses leads: one lighthouse's part in it, as a pure state machine.

Lighthouses agree in a store that changes only for whoever saw its newest state (an *elector*: a directory, etcd, a
Kubernetes Lease). Who leads has a lease there, and renews it. This machine says when to ask the store for what, and,
before every order, whether this lighthouse still leads. It never compares clocks of two machines, and never reads one.

Two things keep a leader harmless that has lost its lease and does not know it. It stops by itself, on its own clock,
well before anybody else may take over. And should its clock have stood still (a frozen virtual machine), it cannot add
to the lineage, because the store refuses it, and whoever has heard of a newer epoch obeys it no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# All in shares of the lease. Two renewals may fail, or one may hang for as long as it likes, before the leader stops.
RENEW = 1 / 3
RETRY = 1 / 10  # after the store did not answer
# From the moment at which the newest renewal was *asked for*. The rest is for clocks that do not run alike (by NTP's
# own limit, 500 ppm, a hundredth of that would do) and for orders that are on their way out.
FENCE = 3 / 4
LOOK = 1 / 5  # how often those who stand by look whether anybody leads


# --- what is asked of the store ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """Lead, if nobody does, under an epoch above every earlier one and above ``floor``. ``over``: the stamp of a lease
    that has lapsed, so that it may be taken if it has not been renewed meanwhile."""

    floor: int
    over: str = ""


@dataclass(frozen=True, slots=True)
class Renew:
    """Go on leading."""


@dataclass(frozen=True, slots=True)
class Lead:
    """To the lighthouse itself: serve, under ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """To the lighthouse itself: end every stream, and obey nothing any more. ``why``: a sentence."""

    why: str


Effect = Acquire | Renew | Lead | StepDown


# --- what it answers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    epoch: int


@dataclass(frozen=True, slots=True)
class Renewed:
    pass


@dataclass(frozen=True, slots=True)
class Held:
    """Another one leads: ``address`` is where agents reach it. ``stamp`` changes with every renewal. ``seconds`` is the
    length of its lease; infinite if the store itself ends it."""

    address: str
    stamp: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease that was to be renewed is not there any more."""

    why: str


@dataclass(frozen=True, slots=True)
class Away:
    """The store did not answer, or not in time: what was asked may have been done or not."""

    why: str


Answer = Granted | Renewed | Held | Lost | Away


class Leadership:
    """``lease``: seconds. All times are of one clock of this machine that never goes back, and that goes on while the
    machine sleeps. The caller does what ``tick`` and the others return, and gives every answer to ``answered``."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.epoch = 0  # under which this one leads; 0: it stands by
        self.leader = ""  # address of another one that leads, as last seen
        self.trouble = ""  # why the store could not be asked last; empty: it could
        self._fence = -math.inf  # from then on it must not act, whatever else it knows
        self._asked_at: float | None = None  # when the question was put that is still open
        self._due = -math.inf  # of the next question
        self._floor = 0
        self._stamp, self._seconds, self._since = "", math.inf, 0.0  # of the lease of another, and since when unchanged

    def leads(self, now: float) -> bool:
        """Whether an order may leave. To be asked right before each."""
        return self.epoch > 0 and now < self._fence

    def left(self, now: float) -> float:
        """Seconds for which it may go on acting."""
        return max(self._fence - now, 0.0) if self.epoch else 0.0

    def next_wakeup(self) -> float:
        """When ``tick`` must be called at the latest; earlier does no harm."""
        due = self._due if self._asked_at is None else math.inf
        return min(due, self._fence) if self.epoch else due

    def tick(self, now: float) -> list[Effect]:
        effects = self._lapse(now)
        if self._asked_at is None and now >= self._due:
            self._asked_at = now
            lapsed = self._stamp if self._stamp and now >= self._since + self._seconds else ""
            effects.append(Renew() if self.epoch else Acquire(self._floor, lapsed))
        return effects

    def answered(self, answer: Answer, now: float) -> list[Effect]:
        """To the question that ``tick`` asked last."""
        assert self._asked_at is not None, "nothing was asked"
        # An answer in time for the lease may be too late for the fence. What was heard in between was not acted upon,
        # and nobody says it again to a leader that goes on.
        lapsed = self._lapse(now)
        asked, self._asked_at = self._asked_at, None
        self.trouble = answer.why if isinstance(answer, Away) else ""
        match answer:
            case Granted(epoch):
                # The lease runs from some moment after the question. So does the fence, from the question itself.
                self._fence = asked + FENCE * self.lease
                self._due = now
                if now < self._fence:
                    self.epoch, self.leader, self._stamp = epoch, "", ""
                    self._due = asked + RENEW * self.lease
                    return [Lead(epoch)]
            case Renewed():
                if not self.epoch:  # it has stepped down meanwhile, and may ask for a new epoch
                    self._due = now
                    return lapsed
                self._fence = asked + FENCE * self.lease
                self._due = asked + RENEW * self.lease
                return self.tick(now) if now >= self._fence else []
            case Held(address, stamp, seconds):
                if stamp != self._stamp:
                    self._stamp, self._since = stamp, now
                self.leader, self._seconds = address, seconds
                # As soon as it can lapse, and not long after.
                self._due = now + LOOK * self.lease
                if now < self._since + seconds < self._due:
                    self._due = self._since + seconds
            case Lost(why):
                self._due = now
                return lapsed or self._stand_by(why, now)
            case Away():
                self._due = now + (RETRY if self.epoch else LOOK) * self.lease
        return lapsed

    def told(self, epoch: int, now: float) -> list[Effect]:
        """An agent has seen ``epoch``: this one must not lead below it, wherever that came from."""
        self._floor = max(self._floor, epoch)
        if not self.epoch or epoch <= self.epoch:
            return []
        self._due = now
        return self._stand_by(f"an agent has seen epoch {epoch}", now)

    def failed(self, why: str, now: float) -> list[Effect]:
        """What a leader wanted to keep could not be kept, or perhaps was: who leads next, this one or another, reads
        what is there."""
        if not self.epoch:
            return []
        self._due = now
        return self._stand_by(why, now)

    def _lapse(self, now: float) -> list[Effect]:
        late = self.epoch > 0 and now >= self._fence
        return self._stand_by("its lease could not be renewed in time", now) if late else []

    def _stand_by(self, why: str, now: float) -> list[Effect]:
        self._due = min(self._due, now)
        if not self.epoch:
            return []
        self.epoch, self._fence = 0, -math.inf
        return [StepDown(why)]
