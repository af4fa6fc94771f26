"""The progress page: a small file, mapped into memory, in which a rank leaves word of how far it is.

One page per incarnation of a rank. The rank writes without system calls; the agent reads whenever it likes,
also after the rank was killed. Nothing is ever locked: every fact is either one aligned 8-byte word with one
writing thread, or lies in a slot that is written first and published by such a word afterwards. The page
serves display and liveness; no decision of a step depends on it.

Layout, in 8-byte words of the machine's own byte order (the file never leaves the machine): magic, version,
pid, phase and shard, phase since (ns), beats, control beats, quorum, resumed at step, commits, guarded, collectives,
seconds per shard and slowness (doubles), copies, commits before it resumed; then SLOTS commits of 8 words each: step,
at (ns), loss (a double), shards computed, shards recomputed, and 3 spare; then LINKS links of 4 words each: group + 1
(0: none), bits a second, round trip, share of lost packets (doubles).
"""

from __future__ import annotations

import math
import mmap
import os
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path

from planaria.core.messages import STANDBYS, Link, Phase, QuorumId
from planaria.errors import ProtocolError

MAGIC = int.from_bytes(b"PLANPAGE", "little")
VERSION = 2
KEPT = 256  # commits that a reader can see
_SLOTS = KEPT + 1  # the slot being written is never one of those shown
_MAGIC, _VERSION, _PID, _PHASE, _SINCE, _BEATS, _CONTROL, _QUORUM, _RESUMED, _COMMITS, _GUARDED, _COLLECTIVES = range(
    12
)
_SHARD_SECONDS, _SLOWNESS, _COPIES, _RESUMED_AFTER = 12, 13, 14, 15
_HEAD = 16
_WORDS = 8
_STEP, _AT, _LOSS, _COMPUTED, _RECOMPUTED = range(5)
_SLOT_BYTES = 8 * _WORDS
_COMMIT = struct.Struct("=QQdQQ")
# a reader that lost the processor for KEPT whole steps in the middle of a copy simply copies again
_TRIES = 4
_AFTER_SLOTS = _HEAD + _SLOTS * _WORDS
LINKS = 16  # of a group to others: the slowest, if there are more
_LINK_WORDS = 4
PAGE_BYTES = 8 * (_AFTER_SLOTS + LINKS * _LINK_WORDS)
# steps whose median is shown: enough to shrug off a recovery, few enough to follow a change of speed
RECENT = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """``step``: steps committed, this one included. ``at_ns``: CLOCK_MONOTONIC, the same in every process."""

    step: int
    at_ns: int
    loss: float
    shards_computed: int
    shards_recomputed: int


class Copies(IntEnum):
    """Of the states of a group's ranks, in each other's memory (``planaria run --buddy``)."""

    NONE = 0
    WHOLE = 1  # of some step, those of all ranks
    NO_ROOM = 2  # there will be none: memory is too small


@dataclass(frozen=True, slots=True)
class PageView:
    pid: int
    phase: Phase
    shard: int  # -1: none
    phase_since_ns: int
    beat: int  # changes whenever the training thread shows life
    control_beat: int  # the same for the control thread
    quorum: QuorumId
    step: int  # steps committed
    loss: float  # NaN if none was recorded
    committed_at_ns: int  # 0: nothing committed yet
    shards_computed: int
    shards_recomputed: int
    step_shards: int  # computed for the newest step, 0 if unknown
    step_seconds: float  # median of recent steps, 0 if unknown
    guarded: bool  # it outlives the loss of another rank of its group
    collectives: int  # see ``control_beat``
    shard_seconds: float = 0.0  # running mean of this rank, 0 if unknown
    slowness: float = 0.0  # of its group, beside the others: see core.health.slowness; 0 if unknown
    copies: Copies = Copies.NONE
    links: tuple[Link, ...] = ()


class ProgressPage:
    """Made with ``create`` in the rank and with ``open`` in the agent.

    ``set_phase``, ``beat``, ``committed``, ``resumed`` and ``quorum`` belong to the training thread,
    ``control_beat`` to the control thread.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        view = memoryview(memory)
        # Item assignment on such a view is one aligned 8-byte copy: neither slow nor ever half done.
        self._words = view.cast("Q")
        self._doubles = view.cast("d")
        self._beats = 0
        self._control_beats = 0
        self._count = 0

    @classmethod
    def create(cls, path: str | Path, pid: int | None = None) -> ProgressPage:
        """A new page for the process ``pid`` (default: this one), replacing what is at ``path``."""
        path = Path(path)
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(bytes(PAGE_BYTES))
        with draft.open("r+b") as file:
            page = cls(mmap.mmap(file.fileno(), PAGE_BYTES))
        page._words[_MAGIC] = MAGIC
        page._words[_VERSION] = VERSION
        page._words[_PID] = os.getpid() if pid is None else pid
        page.set_phase(Phase.STARTING)
        draft.rename(path)  # a reader finds a whole page or none
        return page

    @classmethod
    def open(cls, path: str | Path) -> ProgressPage:
        """For reading. FileNotFoundError if the rank has not made it yet, ProtocolError if it is something
        else."""
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_size != PAGE_BYTES:
                raise ProtocolError(f"{path} is not a progress page of this release: its size is wrong")
            page = cls(mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ))
        magic, version = page._words[_MAGIC], page._words[_VERSION]
        if magic != MAGIC or version != VERSION:
            page.close()
            raise ProtocolError(f"{path} is not a progress page of this release (it has version {version})")
        return page

    def close(self) -> None:
        self._words.release()
        self._doubles.release()
        self._memory.close()

    # --- the rank ---

    def set_phase(self, phase: Phase, shard: int = -1) -> None:
        """``shard``: the shard being computed, if any. Counts as a sign of life."""
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_PHASE] = (shard + 1) << 8 | phase.value
        self.beat()

    def beat(self) -> None:
        """The training thread lives."""
        self._beats += 1
        self._words[_BEATS] = self._beats

    def control_beat(self, collectives: int = 0) -> None:
        """The control thread lives. ``collectives``: how many the training thread has begun with the other ranks of its
        group, so that who is behind can be told from those who wait for it."""
        self._words[_COLLECTIVES] = collectives
        self._control_beats += 1
        self._words[_CONTROL] = self._control_beats

    def committed(
        self,
        step: int,
        quorum: QuorumId,
        loss: float,
        at_ns: int,
        shards_computed: int,
        shards_recomputed: int,
    ) -> None:
        """``step``: steps committed, this one included. ``loss``: NaN for none. ``at_ns``:
        time.monotonic_ns()."""
        at = _HEAD + self._count % _SLOTS * _WORDS
        words = self._words
        words[at + _STEP] = step
        words[at + _AT] = at_ns
        self._doubles[at + _LOSS] = loss
        words[at + _COMPUTED] = shards_computed
        words[at + _RECOMPUTED] = shards_recomputed
        self.quorum = quorum
        self._count += 1
        words[_COMMITS] = self._count  # last: this publishes the slot
        self.beat()

    def resumed(self, step: int) -> None:
        """The state now is that after ``step`` steps, given by peers or by a checkpoint."""
        self._words[_RESUMED] = step
        self._words[_RESUMED_AFTER] = self._count
        self.beat()

    @property
    def quorum(self) -> QuorumId:
        """The quorum under which the rank works."""
        word = self._words[_QUORUM]
        return QuorumId(word >> 32, word & 0xFFFFFFFF)

    @quorum.setter
    def quorum(self, id: QuorumId) -> None:
        # one word, so that a reader never sees half of each
        self._words[_QUORUM] = id.epoch << 32 | id.number

    @property
    def guarded(self) -> bool:
        """Whether the rank outlives the loss of another rank of its group, so that one can be replaced."""
        return bool(self._words[_GUARDED])

    @guarded.setter
    def guarded(self, guarded: bool) -> None:
        self._words[_GUARDED] = int(guarded)

    def copies(self, copies: Copies) -> None:
        """What there is of them, as far as this rank knows. On any one thread at a time."""
        self._words[_COPIES] = copies

    def speed(self, shard_seconds: float, slowness: float) -> None:
        """How long this rank takes for a shard, and how slow its group is beside the others."""
        self._doubles[_SHARD_SECONDS] = shard_seconds
        self._doubles[_SLOWNESS] = slowness

    def links(self, links: Sequence[Link]) -> None:
        """What was seen of the connections to other groups."""
        slowest = sorted(sorted(links, key=lambda link: link.bits)[:LINKS], key=lambda link: link.group)
        for index in range(LINKS):
            at = _AFTER_SLOTS + index * _LINK_WORDS
            self._words[at] = 0
            if index < len(slowest):
                link = slowest[index]
                self._doubles[at + 1], self._doubles[at + 2], self._doubles[at + 3] = (
                    link.bits,
                    link.round_trip,
                    link.lost,
                )
                self._words[at] = link.group + 1

    @property
    def pid(self) -> int:
        return self._words[_PID]

    # --- the agent ---

    def read(self) -> PageView:
        """What the rank is doing. ProtocolError if the page holds what no rank writes."""
        history = self.history(RECENT + 1)
        last = history[-1] if history else Commit(0, 0, math.nan, 0, 0)
        phase = self._words[_PHASE]
        try:
            known, copies = Phase(phase & 0xFF), Copies(self._words[_COPIES])
        except ValueError as error:
            raise ProtocolError(f"the progress page of pid {self.pid} shows what no rank writes: {error}") from error
        return PageView(
            pid=self.pid,
            phase=known,
            shard=(phase >> 8) - 1,
            phase_since_ns=self._words[_SINCE],
            beat=self._words[_BEATS],
            control_beat=self._words[_CONTROL],
            quorum=self.quorum,
            step=self._words[_RESUMED] if self._words[_COMMITS] == self._words[_RESUMED_AFTER] else last.step,
            loss=last.loss,
            committed_at_ns=last.at_ns,
            shards_computed=last.shards_computed,
            shards_recomputed=last.shards_recomputed,
            step_shards=_newest_shards(history),
            step_seconds=_median_seconds(history),
            guarded=self.guarded,
            collectives=self._words[_COLLECTIVES],
            shard_seconds=self._doubles[_SHARD_SECONDS],
            slowness=self._doubles[_SLOWNESS],
            copies=copies,
            links=self._links(),
        )

    def _links(self) -> tuple[Link, ...]:
        places = range(_AFTER_SLOTS, _AFTER_SLOTS + LINKS * _LINK_WORDS, _LINK_WORDS)
        numbers, found = self._doubles, [at for at in places if 0 < self._words[at] < STANDBYS]
        return tuple(Link(self._words[at] - 1, numbers[at + 1], numbers[at + 2], numbers[at + 3]) for at in found)

    def commits(self) -> list[tuple[int, int]]:
        """(step, ns) of up to the last KEPT commits, oldest first."""
        return [(commit.step, commit.at_ns) for commit in self.history()]

    def history(self, most: int = KEPT) -> list[Commit]:
        """Up to the last ``most`` commits, at most KEPT, oldest first."""
        for _ in range(_TRIES):
            end = self._words[_COMMITS]
            ring = self._memory[8 * _HEAD : 8 * _AFTER_SLOTS]  # one copy, so that the rank can hardly overtake it
            # The rank went on meanwhile: slots that it has begun to fill again do not count.
            start = max(0, end - KEPT, self._words[_COMMITS] - KEPT)
            if start < end or end == 0:
                break
        return [
            Commit(*_COMMIT.unpack_from(ring, index % _SLOTS * _SLOT_BYTES))
            for index in range(max(start, end - most), end)
        ]


def _newest_shards(commits: list[Commit]) -> int:
    if len(commits) < 2 or commits[-1].step != commits[-2].step + 1:
        return 0
    return max(commits[-1].shards_computed - commits[-2].shards_computed, 0)


def _median_seconds(commits: list[Commit]) -> float:
    times = [(new.at_ns - old.at_ns) / 1e9 for old, new in pairwise(commits) if new.step == old.step + 1]
    return statistics.median(times) if times else 0.0
