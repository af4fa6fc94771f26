"""What there is of a job, from its pods and from what its lighthouse says, in the words of ``core.plan``.

Kubernetes knows what has ended; the lighthouse knows who is at work. A pod that Kubernetes still takes for running is
suspected if its agent is out of the lighthouse's reach and either the others go on without it or its node is lost.
"""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planaria.core import plan as planning
from planaria.core.exits import EXIT_BAD_INPUT, EXIT_LEFT, EXIT_OK
from planaria.core.plan import GroupState, NodeFailure, Observed, ObservedGroup, PlanSpec
from planaria.core.roster import GroupStatus, JobStatus
from planaria.engines.keeper import ASKED
from planaria.engines.kubernetes.api import Object
from planaria.engines.kubernetes.budgets import Budgets
from planaria.engines.kubernetes.resources import ATTEMPT, CREDENTIALS, GROUP, ROLE

# Failures and replacements that a status lists; a job with more of them has other troubles.
MOST_REMEMBERED = 200
# A status shows as much of a pod's last words as a terminal does.
LONGEST_WORDS = 600


@dataclass(frozen=True, slots=True)
class Seen:
    """As the caches of the operator have it. ``lighthouse``: None if it does not answer."""

    pods: tuple[Object, ...] = ()
    deployment: Object | None = None
    services: Mapping[str, Object] = field(default_factory=dict)
    lighthouse: JobStatus | None = None
    cordoned: frozenset[str] = frozenset()  # nodes that take no new pods
    lost: frozenset[str] = frozenset()  # nodes that Kubernetes does not hear of
    budgets: Budgets | None = None  # None: they cannot be seen

    def pods_of(self, role: str) -> list[Object]:
        return [pod for pod in self.pods if (pod["metadata"].get("labels") or {}).get(ROLE) == role]


@dataclass(frozen=True, slots=True)
class Attempt:
    """The pods of one attempt at a group, by the number of their node in it."""

    group: int
    number: int
    pods: tuple[Object, ...]

    @property
    def nodes(self) -> list[str]:
        return [name for pod in self.pods if (name := pod["spec"].get("nodeName"))]

    @property
    def terminating(self) -> bool:
        return any(pod["metadata"].get("deletionTimestamp") for pod in self.pods)

    @property
    def ended(self) -> list[Object]:
        return [pod for pod in self.pods if is_over(pod) or _terminated(pod) is not None]


# A list that was asked for before a pod was made may be answered after it.
_APPEARS = 30.0  # seconds
# Of a `Past`, in a job's status.
_MARKS = ("met", "settled", "given_up", "leaves", "counted")


@dataclass(slots=True)
class Past:
    """What the pods that are there do not tell of a group."""

    attempt: int = -1  # the newest
    failures: int = 0  # quick ones in a row, as of core.plan
    died: float | None = None  # when the newest attempt was first seen to have ended; None: it has not
    fate: tuple[GroupState, int | None, str] = (GroupState.DEAD, None, "")  # of it, once it has ended
    settled: bool = False  # the newest attempt has held the job's state
    met: bool = False  # its agent was in the lighthouse's reach in the newest attempt
    suspected: float | None = None
    given_up: bool = False  # the lighthouse was told that it is dead
    leaves: bool = False  # for good
    whole: bool = False  # all pods of the newest attempt were seen
    made: float = 0.0  # when its pods were, if by this operator
    counted: bool = False  # its end is among the failures already

    def marks(self) -> list[str]:
        """What an operator that is started again could not see any more."""
        return [name for name in _MARKS if getattr(self, name)]


@dataclass(slots=True)
class Memory:
    """Of one job, kept by the operator from one look to the next. What must not be forgotten when it is started again
    is in the job's status. Times are of a clock that goes on through that (``keeper.clock``)."""

    groups: dict[int, Past] = field(default_factory=lambda: defaultdict(Past))
    replacements: list[float] = field(default_factory=list)
    node_failures: list[NodeFailure] = field(default_factory=list)
    replaced: int = 0
    committed: bool = False
    step: int = 0
    run: int = 0  # how often it was suspended
    outcome: tuple[int, str] | None = None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Memory:
        memory = cls(replaced=int(status.get("replaced", 0)), step=int(status.get("step", 0)))
        memory.run = int(status.get("run", 0))
        memory.committed = memory.step > 0
        if (outcome := status.get("outcome")) is not None:
            memory.outcome = (int(outcome["exitCode"]), str(outcome["reason"]))
        memory.replacements = [float(at) for at in status.get("replacements") or ()]
        for told in status.get("nodeFailures") or ():
            memory.node_failures.append(NodeFailure(str(told["node"]), float(told["at"]), bool(told.get("lost"))))
        for told in status.get("groups") or ():
            past = memory.groups[int(told["group"])]
            past.attempt, past.failures, past.whole = int(told["attempt"]), int(told.get("quickFailures", 0)), True
            for name in _MARKS:
                setattr(past, name, name in (told.get("marks") or ()))
        return memory

    def blame(self, nodes: Iterable[str], at: float, lost: bool = False) -> None:
        self.node_failures += [NodeFailure(node, at, lost) for node in nodes]

    def forget(self, spec: PlanSpec, now: float) -> None:
        """What is too old to matter; and what the operator before wrote by a clock that was ahead was before now."""
        self.replacements = [min(at, now) for at in self.replacements]
        self.node_failures = [replace(f, at=min(f.at, now)) for f in self.node_failures]
        longest = max(spec.quarantine_window + spec.quarantine_seconds, spec.lost_node_seconds)
        self.replacements = [at for at in self.replacements if at + spec.budget_window > now][-MOST_REMEMBERED:]
        self.node_failures = [f for f in self.node_failures if f.at + longest > now][-MOST_REMEMBERED:]


def attempts(pods: Iterable[Object]) -> dict[int, list[Attempt]]:
    """Of every group, the newest last."""
    found: dict[tuple[int, int], list[Object]] = defaultdict(list)
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if labels.get(ROLE) == "trainer" and labels.get(GROUP, "").isdecimal() and labels.get(ATTEMPT, "").isdecimal():
            found[int(labels[GROUP]), int(labels[ATTEMPT])].append(pod)
    groups: dict[int, list[Attempt]] = defaultdict(list)
    for (group, number), members in sorted(found.items(), key=lambda item: item[0]):
        groups[group].append(Attempt(group, number, tuple(sorted(members, key=lambda p: p["metadata"]["name"]))))
    return groups


def observe(spec: PlanSpec, nodes: int, seen: Seen, memory: Memory, now: float) -> Observed:
    """``nodes``: pods of a group. Brings ``memory`` up to date."""
    status = seen.lighthouse
    told = {group.member.group: group for group in status.groups} if status is not None else {}
    memory.forget(spec, now)
    if status is not None:
        memory.step = max([memory.step, *(group.step for group in status.groups)])
        memory.committed = memory.committed or memory.step > 0
    found = attempts(seen.pods)
    groups = []
    for group in sorted({*found, *(number for number, past in memory.groups.items() if past.attempt >= 0)}):
        past, newest = memory.groups[group], found[group][-1] if found.get(group) else None
        if newest is not None and newest.number > past.attempt:
            if past.attempt >= 0:  # it was made, and nobody could tell us
                memory.replacements.append(now)
                memory.replaced += 1
            memory.groups[group] = past = Past(newest.number, past.failures)
        if newest is not None and newest.number < past.attempt:
            newest = None  # the pods of the newest attempt are not there yet, or not any more
        if past.died is None:
            _look(spec, nodes, newest, told.get(group), seen, past, memory, now)
        if past.died is not None and past.leaves:
            state = GroupState.DRAINED
        elif past.died is not None:
            state = past.fate[0]
        else:
            # Nobody would tell us that it has begun on a node that is lost.
            begun = newest is not None and (_runs(newest) or _away(newest, seen))
            state = GroupState.RUNNING if begun else GroupState.PENDING
            state = GroupState.DRAINING if past.leaves else state
        groups.append(
            ObservedGroup(
                group,
                past.attempt,
                state,
                since=past.died or 0.0,
                exit_code=past.fate[1] if past.died is not None else None,
                message=past.fate[2] if past.died is not None else "",
                quick_failures=past.failures,
                settled=past.settled,
                done=group in told and told[group].state == "finished",
                suspected_since=past.suspected,
            )
        )
    return Observed(tuple(groups), memory.committed, tuple(memory.replacements), tuple(memory.node_failures))


def _look(
    spec: PlanSpec,
    nodes: int,
    newest: Attempt | None,
    told: GroupStatus | None,
    seen: Seen,
    past: Past,
    memory: Memory,
    now: float,
) -> None:
    """Whether the newest attempt of a group has ended, or is suspected."""
    if newest is None:
        if past.whole or now > past.made + _APPEARS:  # else they have just been made
            past.fate, past.died = (GroupState.DEAD, None, "its pod is gone"), now
        return
    if told is not None and told.connected and _runs(newest):
        past.met, past.settled = True, past.settled or told.state == "active"
    if past.given_up:
        past.fate, past.died = (GroupState.DEAD, None, "it was out of reach, and was given up"), now
        memory.blame(() if past.counted else newest.nodes, now, lost=True)
        past.counted = True
        return
    if newest.ended:
        _ended(spec, newest, past, memory, now)
    elif len(newest.pods) < nodes and past.whole:
        past.fate, past.died = (GroupState.DEAD, None, "one of its pods is gone"), now
    past.whole = past.whole or len(newest.pods) == nodes
    past.suspected = (past.suspected or now) if past.died is None and _suspect(newest, told, seen, past.met) else None


def _ended(spec: PlanSpec, newest: Attempt, past: Past, memory: Memory, now: float) -> None:
    def worst(pod: Object) -> int:
        code = exit_code(pod)
        return {EXIT_BAD_INPUT: 4, EXIT_LEFT: 1, EXIT_OK: 0}.get(code if code is not None else -1, 2)

    pod = max(newest.ended, key=worst)
    code = exit_code(pod)
    if code == EXIT_OK and len(newest.ended) < len(newest.pods):
        return  # its other nodes are about to follow
    state = {EXIT_OK: GroupState.FINISHED, EXIT_BAD_INPUT: GroupState.REFUSED}.get(
        code if code is not None else -1, GroupState.DEAD
    )
    if state is GroupState.DEAD and code != EXIT_LEFT and not past.counted:
        past.failures = planning.quick_failures(spec, past.failures, lived(pod), past.settled)
        if code not in ASKED and (node := pod["spec"].get("nodeName")):
            memory.blame([node], now)
    past.counted = True
    past.fate, past.died = (state, code, last_words(pod)), now


def _suspect(newest: Attempt, told: GroupStatus | None, seen: Seen, met: bool) -> bool:
    """``met``: the lighthouse speaks of this attempt, not of one before."""
    lost, status = _away(newest, seen), seen.lighthouse
    if status is None:
        return False  # nobody could be told
    if not _runs(newest):
        return lost
    if status.quorum is None:
        return False  # nobody goes on without it
    if told is None or not met:
        return lost
    return not told.connected and (lost or told.member not in status.quorum.members)


def _away(attempt: Attempt, seen: Seen) -> bool:
    return any(node in seen.lost for node in attempt.nodes)


def is_over(pod: Object) -> bool:
    """All of it. The container that trains may have ended before, and what a mesh or a log shipper has put in beside it
    goes on."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _runs(attempt: Attempt) -> bool:
    return all(pod.get("status", {}).get("phase") == "Running" for pod in attempt.pods)


def exit_code(pod: Object) -> int | None:
    """Of the container that trains, if it has ended."""
    ended = _terminated(pod)
    return int(ended["exitCode"]) if ended is not None and "exitCode" in ended else None


def last_words(pod: Object) -> str:
    status = pod.get("status", {})
    own = (_terminated(pod) or {}).get("message")
    said = str(own or status.get("message") or status.get("reason") or _of_init(status)).strip()
    return said[-LONGEST_WORDS:]


def lived(pod: Object) -> float:
    """Seconds, on the clock of its node."""
    ended = _terminated(pod) or {}
    begun, over = _time(ended.get("startedAt")), _time(ended.get("finishedAt"))
    return max(0.0, over - begun) if begun and over else 0.0


def waiting(pod: Object) -> str:
    """Why it does not run yet; empty if it does, or has just been made."""
    status = pod.get("status", {})
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        why = (container.get("state") or {}).get("waiting")
        if why and why.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{why['reason']}: {why.get('message', '')}".strip(": ")
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason')}: {condition.get('message', '')}"
    return ""


def _of_init(status: Object) -> str:
    """What an init container that failed said: those that train never began."""
    for container in status.get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = f"init container {container['name']} ended with exit code {ended['exitCode']}"
            return ": ".join(filter(None, (words, str(ended.get("message") or "").strip())))
    return ""


def trainer(pod: Object) -> str:
    """The name of the container that trains: the one that was given credentials. Others may have been put before it."""
    containers = pod["spec"]["containers"]
    ours = (c for c in containers if any(m.get("name") == CREDENTIALS for m in c.get("volumeMounts") or ()))
    return str(next(ours, containers[0])["name"])


def _terminated(pod: Object) -> Object | None:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        if container["name"] == trainer(pod):
            found: Object | None = (container.get("state") or {}).get("terminated")
            return found
    return None


def _time(text: str | None) -> float:
    return datetime.datetime.fromisoformat(text).timestamp() if text else 0.0
