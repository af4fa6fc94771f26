"""Judging a run: was every step committed once with all its shards, and what did each fault cost?

Three witnesses, none of which the faults can bribe: ``metrics.jsonl`` of every incarnation (what was
committed, with which loss, from how many shards), the progress pages (when), and a quiet run of the same
script (the truth).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from planaria.chaos.inject import NOBODY, Injected
from planaria.chaos.schedule import Kind
from planaria.chaos.watch import Life
from planaria.core.messages import Member
from planaria.errors import PlanariaError


@dataclass(frozen=True, slots=True)
class Line:
    """One commit in a ``metrics.jsonl``. ``step`` is an index, from 0."""

    step: int
    shards: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """What one incarnation, or the quiet run, wrote down. ``digest`` is empty if it did not reach the end."""

    lines: tuple[Line, ...]
    steps: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one fault cost, in seconds from the blow. None: it did not come to that before the run ended."""

    fault: Injected
    lost: bool  # whether the job went on without the victim
    recovery: float | None  # until the first commit by another group that the loss held up
    back: float | None  # until the victim's group took part in a commit again


@dataclass(frozen=True, slots=True)
class Verdict:
    steps: int  # the job's
    committed: int  # steps committed by somebody
    discarded: int  # see ``discarded``
    shards_lost: int  # shards missing in the committed steps
    contradictions: tuple[str, ...]  # commits of one step that differ, or that should not be
    costs: tuple[Cost, ...]
    digests: tuple[str, ...]  # of the groups that finished, without repeats
    curve: tuple[tuple[int, float | None], ...]  # (step, loss) of all steps committed
    quiet_loss: float | None = None
    quiet_digest: str = ""
    quiet_differences: int = 0  # steps whose loss differs from the quiet run's
    verified: bool = False  # whether there was a quiet run to compare with

    @property
    def loss(self) -> float | None:
        """Of the last step."""
        return self.curve[-1][1] if self.curve else None

    @property
    def identical(self) -> bool:
        """The same weights and the same loss at every step, bit for bit."""
        same = self.digests == (self.quiet_digest,) and self.quiet_digest != ""
        return self.verified and same and self.quiet_differences == 0

    @property
    def complete(self) -> bool:
        return self.steps > 0 and self.committed == self.steps and len(self.digests) == 1

    @property
    def good(self) -> bool:
        """Everything that Planaria promises held."""
        kept = self.discarded == 0 and self.shards_lost == 0 and not self.contradictions
        return self.complete and kept and (self.identical or not self.verified)

    def recoveries(self, *kinds: Kind) -> list[float]:
        """Seconds, of the faults of these kinds that lost a member."""
        return [c.recovery for c in self.costs if c.lost and c.recovery is not None and c.fault.fault.kind in kinds]


# --- reading ------------------------------------------------------------------------------------------------


def read_record(directory: Path) -> Record:
    """What lies in one rank's directory. A line cut short by a kill is left out: peers wrote the same
    step."""
    lines: list[Line] = []
    try:
        text = (directory / "metrics.jsonl").read_text()
    except FileNotFoundError:
        text = ""
    for row in text.split("\n")[:-1]:
        raw = json.loads(row)
        loss = raw.get("loss")
        lines.append(Line(int(raw["step"]), int(raw["shards"]), None if loss is None else float(loss)))
    try:
        result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    except FileNotFoundError:
        result = {}
    return Record(tuple(lines), int(result.get("step", 0)), str(result.get("digest", "")))


def read_records(directories: Iterable[Path]) -> dict[Member, Record]:
    """Of every incarnation in these run directories."""
    records: dict[Member, Record] = {}
    for directory in directories:
        for path in directory.glob("rg*/i*"):
            member = Member(int(path.parent.name.removeprefix("rg")), int(path.name.removeprefix("i")))
            records[member] = read_record(path)
    return records


# --- judging ------------------------------------------------------------------------------------------------


def judge(
    records: Mapping[Member, Record],
    lives: Sequence[Life],
    injected: Sequence[Injected],
    shards: int,
    quiet: Record | None,
) -> Verdict:
    """``shards``: V. Raises PlanariaError if the quiet run did not finish: then there is no truth to
    compare with."""
    finished = [record for record in records.values() if record.digest]
    steps = max((record.steps for record in finished), default=0)
    if quiet is not None:
        if not quiet.digest:
            raise PlanariaError("the quiet reference did not finish, so there is nothing to compare with")
        steps = quiet.steps
    merged = _Merged.of(records, shards)
    return Verdict(
        steps=steps,
        committed=len(merged.losses),
        discarded=discarded(merged.losses, lives, injected, shards),
        shards_lost=merged.missing,
        contradictions=tuple(merged.contradictions),
        costs=tuple(cost(one, lives) for one in injected),
        digests=tuple(sorted({record.digest for record in finished})),
        curve=tuple(sorted(merged.losses.items())),
        **_compared(merged.losses, quiet),
    )


def _compared(losses: Mapping[int, float | None], quiet: Record | None) -> dict[str, Any]:
    if quiet is None:
        return {}
    truth = {line.step: line.loss for line in quiet.lines}
    return {
        "quiet_loss": quiet.lines[-1].loss if quiet.lines else None,
        "quiet_digest": quiet.digest,
        "quiet_differences": sum(1 for step, loss in truth.items() if losses.get(step) != loss),
        "verified": True,
    }


@dataclass(slots=True)
class _Merged:
    """The commits of all incarnations, brought together by step."""

    losses: dict[int, float | None] = field(default_factory=dict)
    missing: int = 0
    contradictions: list[str] = field(default_factory=list)

    @staticmethod
    def of(records: Mapping[Member, Record], shards: int) -> _Merged:
        merged = _Merged()
        present: dict[int, int] = {}
        for member in sorted(records):
            merged._add(member, records[member], present)
        merged.missing = sum(shards - count for count in present.values())
        return merged

    def _add(self, member: Member, record: Record, present: dict[int, int]) -> None:
        for before, after in pairwise(record.lines):
            if after.step <= before.step:
                self.contradictions.append(f"{member} committed step {after.step} after step {before.step}")
        for line in record.lines:
            if line.step not in self.losses:
                self.losses[line.step], present[line.step] = line.loss, line.shards
            elif (self.losses[line.step], present[line.step]) != (line.loss, line.shards):
                self.contradictions.append(f"{member} committed step {line.step} otherwise than another group")


def discarded(committed: Iterable[int], lives: Sequence[Life], injected: Sequence[Injected], shards: int) -> int:
    """Steps whose work was thrown away.

    Counted are steps that nobody committed although a later one was, and steps for which groups that were
    not struck computed more shards than the step has: then some of their work was not used. What a lost
    group had computed is lost with it and computed again by others; that is the price of the loss, not a
    step discarded.
    """
    seen = set(committed)
    holes = max(seen) + 1 - len(seen) if seen else 0
    return holes + sum(1 for passes in _passes(lives, injected).values() if passes > shards)


def _passes(lives: Sequence[Life], injected: Sequence[Injected]) -> dict[int, int]:
    """For every step: the shards computed for it by the incarnations that were still there when it was
    committed by the last one."""
    last: dict[int, int] = {}
    for life in lives:
        for commit in life.commits:
            last[commit.step] = max(last.get(commit.step, 0), commit.at_ns)
    blows = {(one.member, one.at_ns) for one in injected}
    passes: dict[int, int] = {}
    for life in lives:
        mine = [at for member, at in blows if member == life.member]
        for before, after in pairwise(life.commits):
            # The count on a page runs on over a life. Between commits of steps that do not follow each
            # other the member was healed, and what it had computed belongs to no step that can be told from
            # here.
            follows = after.step == before.step + 1
            struck = any(before.at_ns < at <= after.at_ns for at in mine)
            if follows and not struck and life.commits[-1].at_ns >= last[after.step]:
                more = after.shards_computed - before.shards_computed
                passes[after.step] = passes.get(after.step, 0) + more
    return passes


# --- what a fault cost ----------------------------------------------------------------------------------------


def cost(injected: Injected, lives: Sequence[Life]) -> Cost:
    """Judge one fault by the commits of all incarnations."""
    if injected.member == NOBODY:
        others = [life for life in lives if life.commits]
        return Cost(injected, False, _seconds(injected.at_ns, _held_up(others, injected.at_ns)), None)
    group = injected.member.group
    others = [life for life in lives if life.member.group != group and life.commits]
    lost = injected.fault.kind is Kind.KILL or _went_on_without(injected, lives, others)
    recovery = _held_up(others, injected.at_ns)
    back = _back(injected, [life for life in lives if life.member.group == group]) if lost else None
    return Cost(injected, lost, _seconds(injected.at_ns, recovery), _seconds(injected.at_ns, back))


def _seconds(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else (end_ns - start_ns) / 1e9


def _went_on_without(injected: Injected, lives: Sequence[Life], others: Sequence[Life]) -> bool:
    """Whether others got ahead of the victim by more than the step for which its share was already on
    its way."""
    victim = next(life for life in lives if life.member == injected.member)
    reached = max((c.step for c in victim.commits if c.at_ns <= injected.at_ns), default=0)
    end = min((c.at_ns for c in victim.commits if c.at_ns > injected.at_ns), default=1 << 63)
    return any(c.step > reached + 1 and injected.at_ns < c.at_ns < end for life in others for c in life.commits)


def _held_up(others: Sequence[Life], at_ns: int) -> int | None:
    """When the fastest of the other groups was through: the commit that the loss held up, by its clock.

    The step in flight may still be committed with the victim's share, if that was on the wire already; then
    it is the one after it that waits. So of the first two gaps that end after the blow the longer one is
    taken, which never flatters. Groups that were born later do not count, nor do those that were lost
    themselves before their second commit, unless nobody made two because the job ended.
    """
    found: dict[bool, list[int]] = {True: [], False: []}
    for life in others:
        times = [commit.at_ns for commit in life.commits]
        before = [at for at in times if at <= at_ns]
        after = [at for at in times if at > at_ns][:2]
        if before and after:
            longer = max(pairwise([before[-1], *after]), key=lambda gap: gap[1] - gap[0])
            found[len(after) == 2].append(longer[1])
    return min(found[True] or found[False], default=None)


def _back(injected: Injected, lives: Sequence[Life]) -> int | None:
    """The first commit of the group after its loss into which it put work of its own."""
    found = []
    for life in lives:
        if life.member.incarnation < injected.member.incarnation:
            continue
        same = life.member == injected.member
        since = (injected.until_ns or (1 << 63)) if same else injected.at_ns
        found += [
            b.at_ns for a, b in pairwise(life.commits) if b.at_ns > since and b.shards_computed > a.shards_computed
        ]
        if not same and life.commits and life.commits[0].at_ns > since and life.commits[0].shards_computed > 0:
            found.append(life.commits[0].at_ns)
    return min(found, default=None)


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
