"""A verdict for people (a table) and for the record (JSON)."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from planaria.chaos.inject import NOBODY, Injected
from planaria.chaos.schedule import Kind, Moment
from planaria.chaos.session import Troubled
from planaria.chaos.verify import Cost, Verdict, median

SIGNALS = {
    Kind.KILL: "SIGKILL",
    Kind.STOP: "SIGSTOP",
    Kind.PARTITION: "network cut",
    Kind.LIGHTHOUSE: "SIGKILL",
    Kind.BITFLIP: "a bit",
}


def sentence(one: Injected) -> str:
    """A fault in words."""
    fault = one.fault
    whom = "the lighthouse" if one.member == NOBODY else str(one.member)
    note = f" of a {fault.target}" if fault.target else f", {fault.note}" if fault.note else ""
    if not one.struck_as_planned and one.phase is not None:
        note += f" (missed that moment: struck while {one.phase.name.lower()})"
    lasting = f", for {fault.duration:.1f} s" if fault.duration else ""
    return f"{SIGNALS[fault.kind]}: {whom}{lasting}{note}"


def faults_table(costs: Sequence[Cost]) -> Table:
    """One row for each fault: what it was and what it cost."""
    table = Table(title="What was done", title_justify="left")
    for name in ("step", "fault", "others went on after", "group back after"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for cost in costs:
        back = seconds(cost.back) if cost.lost else "-"
        table.add_row(str(cost.fault.step), Text(sentence(cost.fault)), seconds(cost.recovery), back)
    return table


def verdict_table(verdict: Verdict, troubled: Troubled) -> Table:
    """The result, line by line."""
    table = Table(title="What came of it", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value, good in _rows(verdict, troubled):
        style = "" if good is None else "bold green" if good else "bold red"
        table.add_row(name, Text(value, style=style))
    return table


def _rows(verdict: Verdict, troubled: Troubled) -> list[tuple[str, str, bool | None]]:
    done = Counter(one.fault.kind for one in troubled.injected)
    counts = ", ".join(f"{done[kind]} {kind.value}" for kind in Kind if done[kind]) or "none"
    rows: list[tuple[str, str, bool | None]] = [
        ("faults", counts + (f" ({troubled.left} more did not come to pass)" if troubled.left else ""), None),
        ("steps committed", f"{verdict.committed} of {verdict.steps}", verdict.complete),
        ("steps discarded", str(verdict.discarded), verdict.discarded == 0),
        ("samples lost", samples_lost(verdict), verdict.shards_lost == 0),
        *_times(verdict),
    ]
    if flips := done[Kind.BITFLIP]:
        rows.append(("bit flips seen, and named", f"{troubled.caught} of {flips}", troubled.caught >= flips))
    rows += [("contradiction", text, False) for text in verdict.contradictions[:5]]
    if not verdict.verified:
        return [
            *rows,
            ("loss at the end", number(verdict.loss), None),
            ("bit-identical", "not asked (--verify)", None),
        ]
    same = "yes" if verdict.identical else "NO"
    if not verdict.identical and verdict.quiet_differences:
        same += f" (loss differs at {verdict.quiet_differences} steps)"
    return [
        *rows,
        ("loss at the end", number(verdict.loss), None),
        ("loss of the quiet run", number(verdict.quiet_loss), None),
        ("weights", short(verdict.digests), None),
        ("weights of the quiet run", short((verdict.quiet_digest,)), None),
        ("bit-identical", same, verdict.identical),
    ]


def _times(verdict: Verdict) -> list[tuple[str, str, bool | None]]:
    rows: list[tuple[str, str, bool | None]] = []
    for what, kind in (("kill", Kind.KILL), ("hang", Kind.STOP), ("network cut", Kind.PARTITION)):
        found = verdict.recoveries(kind)
        if found:
            rows.append((f"recovery from a {what}, median", seconds(median(found)), None))
            rows.append((f"recovery from a {what}, worst", seconds(max(found)), None))
    pauses = [c.recovery for c in verdict.costs if c.fault.fault.kind is Kind.LIGHTHOUSE and c.recovery is not None]
    if pauses:
        rows.append(("next commit without a lighthouse, worst", seconds(max(pauses)), None))
    back = [c.back for c in verdict.costs if c.back is not None and c.fault.fault.kind is Kind.KILL]
    if back:
        rows.append(("killed group takes part again, median", seconds(median(back)), None))
    return rows


def samples_lost(verdict: Verdict) -> str:
    return "0" if verdict.shards_lost == 0 else f"those of {verdict.shards_lost} shards"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.10g}"


def short(digests: Sequence[str]) -> str:
    return ", ".join(digest[:16] for digest in digests) or "-"


def record(verdict: Verdict, troubled: Troubled, asked: dict[str, Any]) -> dict[str, Any]:
    """Everything, for ``--json``. Seconds everywhere; ``asked``: the command's own settings."""
    start = troubled.injected[0].at_ns if troubled.injected else 0
    kills = verdict.recoveries(Kind.KILL)
    return {
        "asked": asked,
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "exit_code": troubled.exit_code,
        "seconds": troubled.seconds,
        "good": verdict.good,
        "bit_identical": verdict.identical if verdict.verified else None,
        "steps": verdict.steps,
        "steps_committed": verdict.committed,
        "steps_discarded": verdict.discarded,
        "shards_lost": verdict.shards_lost,
        "contradictions": list(verdict.contradictions),
        "recovery_median": median(kills),
        "recovery_worst": max(kills, default=None),
        "loss": verdict.loss,
        "quiet_loss": verdict.quiet_loss,
        "digests": list(verdict.digests),
        "quiet_digest": verdict.quiet_digest,
        "faults_left": troubled.left,
        "flips_caught": troubled.caught,
        "faults": [_fault(cost, start) for cost in verdict.costs],
    }


def _fault(cost: Cost, start_ns: int) -> dict[str, Any]:
    one = cost.fault
    return {
        "kind": one.fault.kind.value,
        "at": (one.at_ns - start_ns) / 1e9,
        "step": one.step,
        "group": None if one.member == NOBODY else one.member.group,
        "incarnation": None if one.member == NOBODY else one.member.incarnation,
        "phase": None if one.phase is None else one.phase.name.lower(),
        "moment": one.fault.moment.value if one.fault.moment is not Moment.ANY else None,
        "struck_as_planned": one.struck_as_planned,
        "duration": one.fault.duration or None,
        "lost": cost.lost,
        "recovery": cost.recovery,
        "back": cost.back,
    }
