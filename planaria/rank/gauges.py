"""What a rank shows on its progress page about the steps that it has made, for whoever watches: commits, speed, links.

Nothing is decided by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from planaria.core.health import slowness
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import ControlWord, QuorumId
from planaria.errors import CommunicatorError
from planaria.rank.session import Session

# Weight of the newest shard time in the running mean: follows a change of speed within a few steps, and a single
# slow shard (a page fault, a neighbour's burst) does not reassign work.
SMOOTHING = 0.2


def smoothed(mean: float, seconds: float) -> float:
    """The running mean of a shard's time, with the newest one; 0: there is none yet."""
    return seconds if mean == 0 else mean + SMOOTHING * (seconds - mean)


class Gauges:
    """Of one rank. Without a page (a job that nobody started as one of many) there is nobody to show it to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._page = session.page
        self._links_at = 0.0  # time.monotonic from which on to look at the connections again

    def committed(self, step: int, quorum: QuorumId, metrics: Mapping[str, float], shards: int) -> None:
        """``shards``: that this rank has computed so far."""
        if self._page is not None:
            loss, again = metrics.get("loss", math.nan), self._session.stepper.recomputed
            self._page.committed(step, quorum, loss, time.monotonic_ns(), shards, again)
        self._session.journal.committed(quorum, step)

    def exchanged(self, quorum: QuorumId, groups: Sequence[int], words: Sequence[ControlWord], seconds: float) -> None:
        """How fast this rank is (``seconds`` for each shard), and its group beside the others, as all said in this
        step; and how fast the connections between them are. ``groups`` in the order of ``words``."""
        if self._page is None:
            return
        own = groups.index(self._session.member.group)
        others = [word.seconds_per_shard for rank, word in enumerate(words) if rank != own]
        self._page.speed(seconds, slowness(words[own].seconds_per_shard, others))
        now = time.monotonic()
        if now < self._links_at:
            return
        self._links_at = now + HEARTBEAT_SECONDS  # nobody looks more often
        with suppress(CommunicatorError):
            if links := self._session.communicator(quorum).links():
                self._page.links(links)
