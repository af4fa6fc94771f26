"""What the agent knows of the incarnations that it looks after."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from planaria.agent.proc import describe, state_of
from planaria.core.exits import EXIT_BAD_INPUT
from planaria.core.liveness import JobTimes, ProgressSample, ProgressWatch
from planaria.core.messages import NO_QUORUM, Member, Phase, Pulse, QuorumId
from planaria.core.plan import GroupState, ObservedGroup
from planaria.errors import ProtocolError
from planaria.wire.page import PageView, ProgressPage

_AT_WORK = frozenset({Phase.COMPUTING, Phase.EXCHANGING, Phase.APPLYING})


@dataclass(slots=True)
class Life:
    """One incarnation, from its creation on. Times are seconds of the monotonic clock."""

    member: Member
    directory: Path
    created: float
    watch: ProgressWatch
    quick_failures: int = 0  # of its group, in a row
    state: GroupState = GroupState.RUNNING
    pid: int = 0
    page: ProgressPage | None = None
    view: PageView | None = None
    ready: bool = False
    adopted: bool = False
    settled: bool = False
    done: bool = False  # it reported the last step as committed
    left_out: bool = False  # of the newest quorum that it was told of
    suspected_since: float | None = None
    suspicion: str = ""
    being_killed: str = ""  # the reason why the agent ends it
    ended: float = 0.0
    exit_code: int | None = None
    message: str = ""
    left: bool = False  # told to people: it ended in peace although there was more to do
    settle_seconds: float = math.nan  # from creation to work in a quorum

    @property
    def alive(self) -> bool:
        return self.state in (GroupState.RUNNING, GroupState.DRAINING)

    @property
    def phase(self) -> Phase:
        return self.view.phase if self.view is not None else Phase.STARTING

    @property
    def step(self) -> int:
        return self.view.step if self.view is not None else 0

    @property
    def quorum(self) -> QuorumId:
        return self.view.quorum if self.view is not None else NO_QUORUM

    def look(self, now: float) -> str | None:
        """Poll the page and the process table; a sentence if the rank is suspicious."""
        self._read()
        if self.view is None:
            # Without a page nothing is known of its progress, and it may load data for as long as it likes.
            return None
        if self.adopted and not self.settled and self.view.phase in _AT_WORK:
            self.settled, self.settle_seconds = True, now - self.created
        view = self.view
        stopped = state_of(self.pid) in ("T", "t")
        self.watch.observe(now, ProgressSample(view.phase, view.beat, view.control_beat, stopped))
        return self.watch.verdict(now)

    def last_look(self) -> None:
        """Read the page to its end and let go of it: the process is dead."""
        self._read()
        if self.page is not None:
            self.page.close()
            self.page = None

    def commits(self) -> list[tuple[int, int]]:
        return self.page.commits() if self.page is not None else []

    def pulse(self) -> Pulse:
        view = self.view
        if view is None:
            return Pulse(self.member, Phase.STARTING, 0, NO_QUORUM, math.nan, 0.0, self.pid)
        return Pulse(self.member, view.phase, view.step, view.quorum, view.loss, view.step_seconds, self.pid)

    def observed(self) -> ObservedGroup:
        return ObservedGroup(
            self.member.group,
            self.member.incarnation,
            self.state,
            self.ended if not self.alive else self.created,
            self.exit_code,
            self.message,
            self.quick_failures,
            self.settled,
            self.done,
            self.suspected_since,
        )

    def _read(self) -> None:
        with suppress(FileNotFoundError, ProtocolError):
            if self.page is None:
                page = ProgressPage.open(self.directory / "progress")
                if self.pid and page.pid != self.pid:
                    page.close()  # of an earlier run in this directory
                    return
                self.page = page
            self.view = self.page.read()


@dataclass(frozen=True, slots=True)
class Failure:
    """How an incarnation ended that should not have. ``at``: unix seconds."""

    member: Member
    returncode: int | None
    at: float
    step: int
    message: str
    log: Path
    reported: bool  # whether the rank itself said why (error.json)

    def how(self) -> str:
        return "could not be started" if self.returncode is None else describe(self.returncode)


def failure_of(life: Life, returncode: int | None, cause: str) -> Failure:
    error = _error_of(life.directory)
    message = str(error.get("message") or "") or life.being_killed or cause
    return Failure(life.member, returncode, time.time(), life.step, message, life.directory / "stderr.log", bool(error))


def _error_of(directory: Path) -> dict[str, object]:
    try:
        content = json.loads((directory / "error.json").read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def ended_state(life: Life, returncode: int | None) -> GroupState:
    """What the end of a process means for its group.

    A script may leave its loop early by its own decision, which all groups take alike: that is a finished group. But
    one that the others had left out before is replaced.
    """
    if life.state is GroupState.DRAINING:
        return GroupState.DRAINED
    if returncode == 0 and not life.left_out:
        return GroupState.FINISHED
    if returncode == EXIT_BAD_INPUT:
        return GroupState.REFUSED
    return GroupState.DEAD


@dataclass(slots=True)
class Lives:
    """The newest life of every group of this agent."""

    times: JobTimes = field(default_factory=JobTimes)
    groups: dict[int, Life] = field(default_factory=dict)

    def begin(self, member: Member, directory: Path, now: float) -> Life:
        before = self.groups.get(member.group)
        life = Life(member, directory, now, ProgressWatch(self.times))
        life.quick_failures = before.quick_failures if before is not None else 0
        self.groups[member.group] = life
        return life

    def of(self, member: Member) -> Life | None:
        life = self.groups.get(member.group)
        return life if life is not None and life.member == member else None

    @property
    def trained(self) -> bool:
        """Whether any of them took a step, or found that all were taken."""
        return any(life.done or life.step > 0 for life in self.groups.values())

    @property
    def complete(self) -> bool:
        """Whether the job's last step is committed, as far as these groups tell."""
        return any(life.done or life.state is GroupState.FINISHED for life in self.groups.values())

    def newly_left(self) -> list[Life]:
        """Groups that ended with exit code 0 while others went on beyond their last step, each of them once.

        That the others went on is what tells it from a loop that all leave alike.
        """
        furthest = max((life.step for life in self.alive()), default=0)
        gone = [
            life
            for life in self.groups.values()
            if life.state is GroupState.FINISHED and not life.done and not life.left and furthest > life.step
        ]
        for life in gone:
            life.left = True
        return gone

    def alive(self) -> list[Life]:
        return [life for life in self.groups.values() if life.alive]
