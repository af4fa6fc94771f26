"""What the pages show of a job, as plain data: all of it again and again, and its past a piece at a time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from planaria.core.messages import Quorum
from planaria.core.roster import GroupStatus, JobStatus, condition
from planaria.lighthouse.history import Mark, short
from planaria.lighthouse.jobs import RECOVERY_BUCKETS, Job
from planaria.lighthouse.seat import Seat, who_leads


def seat_of(seat: Seat) -> dict[str, Any]:
    status = seat.status()
    words = "" if status.leads else f"This lighthouse stands by: {who_leads(status)}."
    return {"leads": status.leads, "epoch": status.epoch, "words": words}


def line_of(job: Job) -> dict[str, Any]:
    """A job among others."""
    status = job.status()
    return _heading(job, status) | {"working": sum(condition(group) == "working" for group in status.groups)}


def picture_of(job: Job) -> dict[str, Any]:
    """A job as it is now."""
    status, history = job.status(), job.history
    spec = job.machine.spec
    members = set(status.quorum.members) if status.quorum is not None else set()
    return _heading(job, status) | {
        "now": time.time(),
        "began": history.began,
        "epoch": status.epoch,
        "policy": spec.policy.value if spec is not None else "",
        "quorum": _quorum(status.quorum),
        "planned": _quorum(status.planned),
        "drained": [[agent, gpu] for agent, closed in job.machine.closed.items() for gpu in sorted(closed)],  # "": all
        "agents": len(job.streams),
        "groups": [_row(group, group.member in members) for group in status.groups],
        "group_seconds": {name: round(seconds, 1) for name, seconds in history.group_seconds.items() if seconds},
        "recovery_bounds": RECOVERY_BUCKETS,
        "recoveries": job.recoveries,
        "recovery_seconds": round(job.recovery_seconds, 3),
    }


@dataclass(slots=True)
class Reader:
    """How much of a job's past somebody has been told."""

    job: Job | None = None
    events: int = 0
    marks: int = 0
    commits: int = 0
    curves: dict[str, tuple[int, int]] = field(default_factory=dict)  # version, rows

    def news(self, job: Job) -> dict[str, Any]:
        """What came since the last time; ``anew`` if all that was told before is to be forgotten."""
        anew = job is not self.job
        if anew:
            self.job, self.events, self.marks, self.commits, self.curves = job, 0, 0, 0, {}
        history, fresh = job.history, min(job.events_count - self.events, len(job.events))
        found = {
            "anew": anew,
            "events": [[e.at, e.kind, e.group, e.text] for e in list(job.events)[len(job.events) - fresh :]],
            "marks": [_mark(mark) for mark in history.marks_since(self.marks)],
            "commits": history.commits_since(self.commits),
        }
        self.events, self.marks, self.commits = job.events_count, history.marked, history.committed_count
        for name, curve in (("loss", history.loss), ("progress", history.progress)):
            start, rows = curve.since(*self.curves.get(name, (-1, 0)))
            self.curves[name] = curve.version, len(curve.rows)
            found[name] = {"from": start, "rows": rows}
        return found


def _heading(job: Job, status: JobStatus) -> dict[str, Any]:
    losses = [group.loss for group in status.groups if math.isfinite(group.loss)]
    totals = [view.ready.total_steps for view in job.machine.seen.groups.values() if view.ready is not None]
    return {
        "job": job.name,
        "step": max((group.step for group in status.groups), default=0),
        "steps": max(totals, default=0),
        "loss": _finite(sum(losses) / len(losses)) if losses else None,
        "desired": status.desired,
        "members": len(status.quorum.members) if status.quorum is not None else 0,
        "complete": status.complete,
        "stopped": job.closed or job.machine.stopped,
        "since_commit": round(job.seconds_since_commit, 1),
        "losses": job.history.losses,
    }


def _quorum(quorum: Quorum | None) -> dict[str, Any] | None:
    if quorum is None:
        return None
    return {"id": str(quorum.id), "members": len(quorum.members), "reason": quorum.reason}


def _row(group: GroupStatus, inside: bool) -> list[object]:
    """A list, for a thousand of them travel every second. Whoever is not ``inside`` the quorum holds no shards."""
    return [
        group.member.group,
        group.member.incarnation,
        condition(group),
        group.phase.name.lower(),
        group.step,
        _finite(group.step_seconds) or 0.0,
        _finite(group.loss),
        group.shards if inside else 0,
        group.agent,
        group.note,
    ]


def _mark(mark: Mark) -> list[object]:
    return [mark.lane, round(mark.at, 4), mark.until and round(mark.until, 4), mark.group, mark.step, mark.text]


def _finite(value: float) -> float | None:
    """JSON has no other numbers. (A mean of large ones may be none.)"""
    return short(value) if math.isfinite(value) else None
