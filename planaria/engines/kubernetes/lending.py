"""Shrink before kill: a job whose groups find no room is given groups of jobs of lower priority that have more than
their minimum. They leave in order, their jobs train on, and get them back when the other job is over.

The scheduler's own pre-emption knows pods only. It is kept from ending more than must be by a PriorityClass with
``preemptionPolicy: Never``; then this is what makes room. Groups are taken one after the other, until those that wait
have found room; if they do not find it, everything is given back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from planaria.engines.kubernetes.api import Object
from planaria.engines.kubernetes.resources import PREFIX

LENT = PREFIX + "lent-to"  # annotation of a job: other jobs, and how many groups each has of it
_PATIENCE = 60.0  # seconds
# A scheduler tries again when a pod has ended, but a pod that found no room several times only after ten seconds.
_SCHEDULER = 12.0


@dataclass(frozen=True, slots=True)
class Party:
    """A job, as far as this matters. ``waiting``: groups for which there is no room."""

    name: str
    priority: int
    waiting: int
    surplus: int  # groups above its minimum that it still has
    leaving: bool  # a group of it is about to leave
    over: bool  # has ended, or is suspended
    shrinks: bool  # takes groups from others
    lent: Mapping[str, int]


@dataclass(slots=True)
class Lending:
    """``decide`` again and again; it remembers since when a job waits in vain."""

    taken_at: dict[str, float] = field(default_factory=dict)
    in_vain: dict[str, int] = field(default_factory=dict)  # jobs for which it did not help: groups that waited

    def decide(self, parties: Iterable[Party], now: float) -> dict[str, dict[str, int]]:
        """What the named jobs lend from now on, to whom; those that are not named as before."""
        known = {party.name: party for party in parties}
        lent = {name: dict(party.lent) for name, party in known.items()}
        for to in lent.values():
            for name in [n for n in to if n not in known or known[n].over]:
                del to[name]
        for party in sorted(known.values(), key=lambda p: (-p.priority, p.name)):
            if not party.waiting or party.over:
                self.in_vain.pop(party.name, None)
            elif party.shrinks and self.in_vain.get(party.name) != party.waiting:
                self._take(party, known, lent, now)
        return {name: to for name, to in lent.items() if to != known[name].lent}

    def _take(self, party: Party, known: dict[str, Party], lent: dict[str, dict[str, int]], now: float) -> None:
        if any(known[name].leaving for name, to in lent.items() if party.name in to):
            self.taken_at[party.name] = now
            return  # what it was given last is not free yet
        able = [p for p in known.values() if p.priority < party.priority and not p.over and not p.leaving]
        able = [p for p in able if p.surplus - (sum(lent[p.name].values()) - sum(p.lent.values())) > 0]
        if now < self.taken_at.get(party.name, -_PATIENCE) + _SCHEDULER:
            return  # what it was given may be free, and the scheduler has not seen it yet
        if able:
            victim = min(able, key=lambda p: (p.priority, -p.surplus, p.name))
            lent[victim.name][party.name] = lent[victim.name].get(party.name, 0) + 1
            self.taken_at[party.name] = now
        elif now >= self.taken_at.get(party.name, now) + _PATIENCE:
            self.in_vain[party.name] = party.waiting
            for to in lent.values():
                to.pop(party.name, None)


def lent_by(job: Object) -> dict[str, int]:
    """What the job's annotation says; nothing if it is none that an operator wrote."""
    text = (job["metadata"].get("annotations") or {}).get(LENT, "")
    try:
        found = json.loads(text) if text else {}
        return {str(name): int(count) for name, count in found.items() if int(count) > 0}
    except (ValueError, TypeError, AttributeError):
        return {}


def change(job: Object, to: Mapping[str, int]) -> Object:
    """The patch that has it lend so. It is refused if the job was changed meanwhile."""
    value = json.dumps(dict(sorted(to.items()))) if to else None
    return {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"], "annotations": {LENT: value}}}


def party(name: str, job: Object, desired: int, least: int, shrinks: bool, pods: Iterable[Object]) -> Party:
    """``pods``: of its groups."""
    pods, status, lent = list(pods), job.get("status") or {}, lent_by(job)
    waiting = {pod["metadata"]["labels"].get(PREFIX + "group") for pod in pods if _finds_no_room(pod)}
    return Party(
        name=name,
        priority=max((int(pod["spec"].get("priority") or 0) for pod in pods), default=0),
        waiting=len(waiting),
        surplus=max(0, desired - sum(lent.values()) - least),
        leaving=any(pod["metadata"].get("deletionTimestamp") for pod in pods)
        or int(status.get("lent", 0)) != sum(lent.values()),
        over="outcome" in status or bool(job["spec"].get("suspend")),
        shrinks=shrinks,
        lent=lent,
    )


def _finds_no_room(pod: Object) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)
