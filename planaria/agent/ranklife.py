"""What the agent knows of one rank: its process, its progress page, how it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.agent.proc import STOPPED, is_exiting, state_of
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_INTERRUPTED
from planaria.core.liveness import ProgressSample, ProgressWatch
from planaria.engines.base import Remains
from planaria.errors import ProtocolError
from planaria.wire.page import Copies, PageView, ProgressPage


@dataclass(slots=True)
class RankLife:
    """One rank of one incarnation, from its creation on."""

    rank: int
    directory: Path
    watch: ProgressWatch
    pid: int = 0
    page: ProgressPage | None = None
    view: PageView | None = None
    over: bool = False  # no process of it is left
    returncode: int | None = None  # None: it could not be started
    cause: str = ""
    killed: bool = False  # by the agent, because another rank of its group was lost
    was_exiting: bool = False  # already when the agent saw the first of its group end
    away: bool = False  # on another node
    goes_to: int | None = None  # the node to which it is to move; None: whichever has a standby
    drained: bool = False  # its device is to be free, whatever that costs
    told: ProgressSample | None = None  # from there, and not looked at yet
    remains: Remains | None = None  # there

    def look(self, now: float) -> None:
        """Poll the page and the process table. Without a page nothing is known of its progress, and it may load data
        for as long as it likes."""
        if (sample := self.sample()) is not None:
            self.watch.observe(now, sample)

    def sample(self) -> ProgressSample | None:
        """What is seen of it now; None if nothing is, or from another node has come nothing new."""
        if self.away:
            sample, self.told = self.told, None
            return sample
        self.read()
        if self.view is None or self.over:
            return None
        return ProgressSample(
            self.view.phase,
            self.view.beat,
            self.view.control_beat,
            state_of(self.pid) in STOPPED,
            self.view.collectives,
            self.view.guarded,
            self.view.copies is Copies.WHOLE,
        )

    @property
    def collectives(self) -> int:
        """As last seen."""
        return self.watch.last.collectives if self.watch.last is not None else 0

    @property
    def guarded(self) -> bool:
        """As last seen."""
        return self.watch.last is not None and self.watch.last.guarded

    @property
    def copies(self) -> bool:
        """Whether it knew of whole copies of its group's state, as last seen."""
        return self.watch.last is not None and self.watch.last.copies

    def read(self) -> None:
        with suppress(FileNotFoundError, ProtocolError):
            if self.page is None:
                page = ProgressPage.open(self.directory / "progress")
                if self.pid and page.pid != self.pid:
                    page.close()  # of an earlier run in this directory
                    return
                self.page = page
            self.view = self.page.read()

    def last_look(self) -> None:
        """Read the page to its end and let go of it: the process is dead."""
        self.read()
        if self.page is not None:
            self.page.close()
            self.page = None

    def spare_or_kill(self) -> bool:
        """Whether it must be killed because its group is lost. One that is ending by itself is only noted."""
        if self.over or self.killed:
            return False
        self.was_exiting = self.was_exiting or (self.pid > 0 and not self.away and is_exiting(self.pid))
        self.killed = not self.was_exiting
        return True

    @property
    def log(self) -> Path:
        return self.directory / "stderr.log" if self.remains is None else self.remains.log

    def error(self) -> dict[str, object]:
        """What it said itself of its failure; empty if nothing."""
        if self.away:
            return self.remains.error if self.remains is not None else {}
        return error_in(self.directory)

    @property
    def code(self) -> int | None:
        """How it ended, or was about to end when it was killed for another's sake."""
        bad_input = self.killed and self.error().get("exit_code") == EXIT_BAD_INPUT
        return EXIT_BAD_INPUT if bad_input else self.returncode


def error_in(directory: Path) -> dict[str, object]:
    """What the process whose directory it is said of its failure; empty if nothing."""
    try:
        content = json.loads((directory / "error.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def culprit(ranks: list[RankLife], first: RankLife | None) -> RankLife:
    """Whose end is the group's. ``first``: the first that ended badly, None if none did.

    Bad input is nobody's failure but the input's, so it counts wherever it is found. Otherwise the first bad end
    counts; but a process with much to free (a GPU's memory) is seen dead only after its peers have raised an error
    because of its closed sockets. So one that died of a signal and was ending already comes before an error.
    """
    if refused := [rank for rank in ranks if rank.code == EXIT_BAD_INPUT]:
        return refused[0]
    if first is not None:
        died = [rank for rank in ranks if rank.was_exiting and rank.returncode is not None and rank.returncode < 0]
        return died[0] if died and (first.returncode or 0) > 0 else first
    return next((rank for rank in ranks if rank.returncode == EXIT_INTERRUPTED), ranks[0])


def suspicious(ranks: Sequence[RankLife], now: float) -> tuple[RankLife | None, str, bool]:
    """The rank of a group that seems to stand still, why, and whether it is known to be that one and no other. None if
    none does."""
    frozen = [(rank, why) for rank in ranks if (why := rank.watch.frozen(now)) is not None]
    if frozen:
        return (*frozen[0], len(frozen) == 1)
    # One that waits in a collective for another rank of its group looks like one that hangs. So while any of them has
    # work of its own and is within what that may take (it saves, say), nobody is accused.
    judged = [rank for rank in ranks if rank.watch.judged]
    silent = [(rank, why) for rank in judged if (why := rank.watch.silent(now)) is not None]
    if not judged or len(silent) < len(judged):
        return None, "", False
    # All begin the same collectives in the same order, and nobody waits for one that is ahead.
    found, why = min(silent, key=lambda each: each[0].collectives)
    return found, why, all(rank is found or rank.collectives > found.collectives for rank in judged)
