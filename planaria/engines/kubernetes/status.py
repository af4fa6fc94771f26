"""What a job's status says. Of bounded size: at most 128 groups are listed, those in trouble first."""

from __future__ import annotations

import datetime
from typing import Any

from planaria.core.plan import GroupState, ObservedGroup
from planaria.core.roster import JobStatus
from planaria.engines.kubernetes.api import Object
from planaria.engines.kubernetes.crd import Wanted
from planaria.engines.kubernetes.observe import Attempt, Memory, Past, Seen, attempts, waiting
from planaria.engines.kubernetes.resources import JOB, PORT, ROLE, lighthouse_name

# Some 200 bytes each: 25 KiB, where etcd takes 1.5 MiB of an object.
MOST_GROUPS = 128


def status_of(
    job: Wanted, seen: Seen, memory: Memory, groups: tuple[ObservedGroup, ...], trouble: str, fewer: int, before: Object
) -> Object:
    """``trouble``: why something could not be done. ``before``: the status that it follows."""
    lighthouse, found = seen.lighthouse, attempts(seen.pods)
    told = {group.member.group: group for group in lighthouse.groups} if lighthouse is not None else {}
    at_work = _at_work(lighthouse)
    ready = len(at_work & {g.group for g in groups if g.state in (GroupState.RUNNING, GroupState.DRAINING)})
    desired = max(job.desired - fewer, job.least)
    listed = []
    for g in groups:
        newest = found[g.group][-1] if found.get(g.group) else None
        phase = told[g.group].state if g.group in told and g.state is GroupState.RUNNING else g.state.value
        listed.append(_group(g, phase, newest, memory.groups.get(g.group)))
    phase = _phase(job, memory, seen, ready, desired)
    message = trouble or _message(job, memory, groups, found)
    service = seen.services.get(lighthouse_name(job), {}).get("spec", {})
    status: Object = {
        "observedGeneration": job.generation,
        "phase": phase,
        "message": message,
        "replicas": ready,
        "selector": f"{JOB}={job.name},{ROLE}=trainer",
        "groupsReady": f"{ready if memory.outcome is None else _finished(groups, before)}/{desired}",
        "lent": fewer,
        "step": memory.step,
        "replaced": memory.replaced,
        "run": memory.run,
        "lighthouse": f"{service['clusterIP']}:{PORT}" if service.get("clusterIP") else "",
        "groups": sorted(sorted(listed, key=lambda g: bool(g["phase"] == "active"))[:MOST_GROUPS], key=_number),
    }
    if lighthouse is not None and lighthouse.quorum is not None:
        id = lighthouse.quorum.id
        status["quorum"] = {"id": f"{id.epoch}.{id.number}", "groups": len(lighthouse.quorum.members)}
    elif "quorum" in before:
        status["quorum"] = before["quorum"]
    if memory.replacements:
        status["replacements"] = [round(at, 3) for at in memory.replacements]
    if memory.node_failures:
        status["nodeFailures"] = [
            {"node": failure.node, "at": round(failure.at, 3), **({"lost": True} if failure.lost else {})}
            for failure in memory.node_failures
        ]
    if memory.outcome is not None:
        status["outcome"] = {"exitCode": memory.outcome[0], "reason": memory.outcome[1]}
    status["conditions"] = conditions(job, status, seen, trouble, before)
    return status


def invalid(generation: int, why: str, before: Object) -> Object:
    """Of a job whose spec cannot be followed; what runs is left alone."""
    told = [("Valid", False, "InvalidSpec", why)]
    if not before.get("phase") or before["phase"] == "Invalid":
        before = {**before, "phase": "Invalid"}
    return {
        **before,
        "observedGeneration": generation,
        "message": why,
        "conditions": _stamped(told, generation, before),
    }


def conditions(job: Wanted, status: Object, seen: Seen, trouble: str, before: Object) -> list[Object]:
    phase, message = status["phase"], status["message"]
    over = phase in ("Complete", "Failed")
    said = seen.lighthouse is not None
    told = [
        ("Valid", True, "SpecAccepted", ""),
        ("LighthouseReady", said, "Answers" if said else "OutOfReach", ""),
        ("QuorumHealthy", phase == "Running", phase, "" if phase == "Running" else message),
        ("Progressing", not (trouble or over), "Blocked" if trouble else phase, trouble),
        ("Suspended", phase == "Suspended", phase, ""),
        ("Complete", phase == "Complete", phase, message if phase == "Complete" else ""),
        ("Failed", phase == "Failed", phase, message if phase == "Failed" else ""),
    ]
    return _stamped(told, job.generation, before)


def same(one: Object, other: Object) -> bool:
    """But for the step, which alone is not worth a write every second."""
    return {**one, "step": 0} == {**other, "step": 0}


def _stamped(told: list[tuple[str, bool, str, str]], generation: int, before: Object) -> list[Object]:
    old = {each["type"]: each for each in before.get("conditions") or ()}
    made = []
    for kind, holds, reason, message in told:
        value = "True" if holds else "False"
        since = old.get(kind, {}).get("lastTransitionTime") if old.get(kind, {}).get("status") == value else None
        made.append(
            {
                "type": kind,
                "status": value,
                "reason": reason,
                "message": message,
                "observedGeneration": generation,
                "lastTransitionTime": since or now(),
            }
        )
    return made


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _finished(groups: tuple[ObservedGroup, ...], before: Object) -> int:
    """Of a job that is over: those that were there to its end. Their pods may be deleted since."""
    if "outcome" in before:
        return int(before["groupsReady"].split("/")[0])
    return sum(g.state is GroupState.FINISHED for g in groups)


def _at_work(lighthouse: JobStatus | None) -> set[int]:
    if lighthouse is None or lighthouse.quorum is None:
        return set()
    members = set(lighthouse.quorum.members)
    return {g.member.group for g in lighthouse.groups if g.member in members and g.state == "active"}


def _phase(job: Wanted, memory: Memory, seen: Seen, ready: int, desired: int) -> str:
    if memory.outcome is not None:
        return "Complete" if memory.outcome[0] == 0 else "Failed"
    if job.suspend:
        return "Suspending" if seen.pods_of("trainer") else "Suspended"
    if seen.lighthouse is None:
        return "Pending" if not memory.step else "Unwatched"
    if ready == 0:
        return "Pending"
    return "Running" if ready >= desired else "Degraded"


def _message(job: Wanted, memory: Memory, groups: tuple[ObservedGroup, ...], found: dict[int, list[Attempt]]) -> str:
    if memory.outcome is not None:
        return memory.outcome[1]
    for g in groups:
        if g.state in (GroupState.RUNNING, GroupState.PENDING) and found.get(g.group):
            for pod in found[g.group][-1].pods:
                if why := waiting(pod):
                    return f"group {g.group} waits: {why}"
    for g in groups:
        if g.state in (GroupState.DEAD, GroupState.REFUSED):
            code = "" if g.exit_code is None else f" with exit code {g.exit_code}"
            again = "" if g.state is GroupState.REFUSED else f"; {g.quick_failures} quick failures in a row"
            return f"group {g.group} ended{code}: {g.message or 'no last words'}{again}"
    return ""


def _group(g: ObservedGroup, phase: str, newest: Attempt | None, past: Past | None) -> dict[str, Any]:
    told: dict[str, Any] = {"group": g.group, "attempt": g.incarnation, "phase": phase}
    if newest is not None and newest.nodes:
        told["nodes"] = newest.nodes
    if g.quick_failures:
        told["quickFailures"] = g.quick_failures
    if g.exit_code is not None or g.message:
        told["last"] = {"exitCode": g.exit_code, "message": g.message}
    if past is not None and (marks := past.marks()):
        told["marks"] = marks  # for the operator itself, when it is started again
    return told


def _number(told: dict[str, Any]) -> int:
    return int(told["group"])
