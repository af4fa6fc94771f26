"""What to do for a job now, as one function of what is seen and remembered. No I/O: the controller carries it out.

Every operation may be carried out twice, and the next look begins with what there is then. A pod is asked to end by
deleting it: its agent takes the SIGTERM for a wish to leave the job in order (``planaria run --placed``). So scaling
down, a cordon, a suspension and an eviction by somebody else are one mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planaria.core import plan as planning
from planaria.core.plan import GroupState, Observed, ObservedGroup
from planaria.engines.desk import GONE
from planaria.engines.kubernetes import budgets, resources
from planaria.engines.kubernetes.api import DEPLOYMENTS, LEASES, PODS, SERVICES, Kind, Object
from planaria.engines.kubernetes.crd import Wanted
from planaria.engines.kubernetes.observe import Attempt, Memory, Past, Seen, attempts, is_over, observe
from planaria.engines.kubernetes.resources import PORT

# Seconds for what is to end and has nothing to save: enough for an agent to end its ranks.
_HOPELESS = 5


@dataclass(frozen=True, slots=True)
class Create:
    """``group``: it is a pod of this attempt at a group. ``told``: when it is made, that it replaces another one."""

    kind: Kind
    body: Object
    group: int = -1
    attempt: int = -1
    told: Tell | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    kind: Kind
    body: Object
    grace: int | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    kind: Kind
    name: str
    body: Object


@dataclass(frozen=True, slots=True)
class Evict:
    """Have the lighthouse count the group as dead; only then its pods may be taken for dead."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Tell the lighthouse how many groups the job is to have."""

    groups: int


@dataclass(frozen=True, slots=True)
class Tell:
    """An Event of Kubernetes about the job."""

    reason: str
    message: str
    warning: bool = False


Operation = Create | Delete | Patch | Evict | Scale | Tell


@dataclass(slots=True)
class Decision:
    operations: list[Operation] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)
    due: float | None = None  # when to look again although nothing happens


def decide(job: Wanted, seen: Seen, memory: Memory, now: float, fewer: int = 0) -> Decision:
    """``fewer``: groups that it has lent to jobs of higher priority. Brings ``memory`` up to date with what is seen."""
    desired = max(job.desired - fewer, job.least)
    spec = job.plan(desired)
    if memory.outcome is not None:
        return Decision(_clear(seen), observe(spec, job.nodes, seen, memory, now))
    if job.suspend:
        decision = Decision([*_suspended(seen, memory), *_protected(seen, [])])
        # An operator that is started again before all have left is to know that there was a run.
        known = [(group, past.attempt) for group, past in sorted(memory.groups.items()) if past.attempt >= 0]
        decision.observed = Observed(tuple(ObservedGroup(*each, GroupState.DRAINING) for each in known))
        return decision
    decision = Decision(_foundation(job, seen))
    decision.observed = observe(spec, job.nodes, seen, memory, now)
    service = seen.services.get(resources.lighthouse_name(job))
    if service is None or not service["spec"].get("clusterIP"):
        return decision  # nothing can be told where the lighthouse is
    # Before pods are made that count as ready, and do not hold the state yet.
    decision.operations += _protected(seen, budgets.wanted(job, desired, decision.observed, memory.committed))
    address = f"{service['spec']['clusterIP']}:{PORT}"
    world = _World(job, seen, memory, desired, address, now, decision.operations)
    world.complete()
    for action in planning.plan(spec, decision.observed, now):
        match action:
            case planning.Start(group, _, avoid):
                world.start(group, avoid)
            case planning.Kill(group, reason):
                world.kill(group, reason)
            case planning.Drain(group):
                world.drain(group)
            case planning.Finish(code, reason):
                memory.outcome = (code, reason)
                told = ("Complete", False) if code == 0 else ("Failed", True)
                decision.operations.append(Tell(told[0], reason, told[1]))
                return decision
    world.leave(decision.observed)
    if planning.budget_left(spec, decision.observed, now):  # else it would not come back
        world.leave_cordoned(decision.observed)
    world.forget(decision.observed)
    if (status := seen.lighthouse) is not None and status.quorum is not None and not status.complete:
        # Who is too many is said by the planner alone: the lighthouse is told of fewer when they have left.
        leaving = decision.observed.having(GroupState.DRAINING)
        there = decision.observed.having(GroupState.RUNNING, GroupState.PENDING, GroupState.DEAD)
        if status.desired < desired or (status.desired > desired and not leaving and len(there) <= desired):
            decision.operations.append(Scale(desired))
    decision.due = planning.next_wakeup(spec, decision.observed, now)
    return decision


class _World:
    """Adds operations on the groups of a job to ``out``."""

    def __init__(
        self, job: Wanted, seen: Seen, memory: Memory, desired: int, address: str, now: float, out: list[Operation]
    ) -> None:
        self._job, self._seen, self._memory, self._now, self._out = job, seen, memory, now, out
        self._desired, self._address = desired, address
        self._found = attempts(seen.pods)

    def start(self, group: int, avoid: tuple[str, ...]) -> None:
        memory, job = self._memory, self._job
        past = memory.groups[group]
        again = past.attempt >= 0
        # The newest end is kept for its log, what was before goes.
        older = self._found.get(group, [])
        self._out += _deleted([pod for attempt in older[:-1] for pod in attempt.pods])
        left = [pod for pod in older[-1].pods if not is_over(pod)] if older else []
        self._out += _deleted(left, grace=_HOPELESS)
        if any(pod not in older[-1].ended for pod in left) and not past.given_up:
            return  # the rest of a group of several pods: two lives of a group must not be
        where = f" (not on {', '.join(avoid)} if there is room elsewhere)" if avoid else ""
        told = Tell("GroupReplaced", f"group {group} is replaced{where}: {_fate(past)}", warning=True)
        self._create(group, past.attempt + 1, range(job.nodes), told if again else None, avoid)

    def complete(self) -> None:
        """Make those pods of an attempt that could not be made with the others."""
        for group, found in self._found.items():
            past, newest = self._memory.groups[group], found[-1]
            if past.whole or past.died is not None or newest.number < past.attempt or past.leaves:
                continue
            there = {int(pod["metadata"]["labels"][resources.NODE]) for pod in newest.pods}
            self._create(group, newest.number, [n for n in range(self._job.nodes) if n not in there], None)

    def kill(self, group: int, reason: str) -> None:
        """Nothing is to be expected of it any more."""
        if self._memory.groups[group].suspected is None:  # the others have finished
            self._out += _deleted([pod for attempt in self._found.get(group, []) for pod in attempt.pods], _HOPELESS)
        elif self._counts(group):
            self._out.append(Evict(group, reason))
        else:  # nobody need be told: what the lighthouse has not heard of counts as little as what it takes for dead
            self._memory.groups[group].given_up = True
            self._out.append(Tell("GroupGivenUp", f"group {group} is given up: {reason}", warning=True))

    def _counts(self, group: int) -> bool:
        told = self._seen.lighthouse.groups if self._seen.lighthouse is not None else ()
        return any(each.member.group == group and each.state not in GONE for each in told)

    def forget(self, observed: Observed) -> None:
        """The numbers of groups that have left are free again, when nothing of them is left."""
        for g in observed.having(GroupState.DRAINED):
            pods = [pod for attempt in self._found.get(g.group, []) for pod in attempt.pods]
            self._out += _deleted(pods)
            if not pods:
                self._memory.groups.pop(g.group, None)

    def drain(self, group: int) -> None:
        """It is to leave for good."""
        past = self._memory.groups[group]
        pods = [pod for attempt in self._found.get(group, []) for pod in attempt.pods]
        if not past.leaves:
            past.leaves = True
            self._out.append(Tell("GroupLeaves", f"group {group} leaves: {self._desired} groups are wanted"))
        self._out += _deleted(pods)

    def leave(self, observed: Observed) -> None:
        """Ask those again that were to leave and could not be told."""
        for g in observed.having(GroupState.DRAINING):
            self._out += _deleted([pod for attempt in self._found.get(g.group, []) for pod in attempt.pods])

    def leave_cordoned(self, observed: Observed) -> None:
        """One group at a time leaves a node that takes no new pods, if others hold the state. It starts elsewhere."""
        running = observed.having(GroupState.RUNNING)
        newest = {group: found[-1] for group, found in self._found.items()}
        if any(newest[g.group].terminating for g in running if g.group in newest):
            return
        safe = [g for g in running if g.settled and not self._cordoned(newest.get(g.group))]
        for g in running:
            attempt = newest.get(g.group)
            if attempt is None or not self._cordoned(attempt):
                continue
            if any(other.group != g.group for other in safe) or not _at_work(attempt):
                where = ", ".join(node for node in attempt.nodes if node in self._seen.cordoned)
                self._out.append(Tell("GroupMoves", f"group {g.group} leaves node {where}, which is cordoned"))
                self._out += _deleted(attempt.pods)
                return

    def _cordoned(self, attempt: Attempt | None) -> bool:
        return attempt is not None and any(node in self._seen.cordoned for node in attempt.nodes)

    def _create(
        self, group: int, attempt: int, nodes: list[int] | range, told: Tell | None, avoid: tuple[str, ...] = ()
    ) -> None:
        for node in nodes:
            made = resources.pod(self._job, group, attempt, node, self._memory.run, self._desired, self._address, avoid)
            self._out.append(Create(PODS, made, group, attempt, told if node == 0 else None))


def _foundation(job: Wanted, seen: Seen) -> list[Operation]:
    """The lighthouse, as far as it is not there."""
    made: list[Operation] = []
    if resources.lighthouse_name(job) not in seen.services:
        made.append(Create(SERVICES, resources.service(job)))
    if job.nodes > 1 and resources.names_of(job) not in seen.services:
        made.append(Create(SERVICES, resources.names_service(job)))
    if seen.deployment is None:
        made += [Create(LEASES, resources.lease(job)), Create(DEPLOYMENTS, resources.lighthouse(job))]
        return made
    wanted = resources.lighthouse(job)
    asked, there = wanted["metadata"]["annotations"], seen.deployment["metadata"].get("annotations") or {}
    scaled = seen.deployment["spec"].get("replicas") != job.lighthouses
    if scaled or there.get(resources.ASKED) != asked[resources.ASKED]:
        # Of a list a merge leaves nothing that is not said again.
        containers = {"spec": {"containers": wanted["spec"]["template"]["spec"]["containers"]}}
        spec = {"replicas": job.lighthouses, "template": containers}
        change = {"metadata": {"annotations": asked}, "spec": spec}
        made.append(Patch(DEPLOYMENTS, resources.lighthouse_name(job), change))
    return made


def _protected(seen: Seen, wanted: list[Object]) -> list[Operation]:
    """The budgets of evictions as they are wanted."""
    if seen.budgets is None:
        return []
    kind, found = seen.budgets.kind, dict(seen.budgets.found)
    made: list[Operation] = []
    for body in wanted:
        name = body["metadata"]["name"]
        there = found.pop(name, None)
        if there is None:
            made.append(Create(kind, {"apiVersion": kind.version, **body}))
        elif any(there["spec"].get(key) != value for key, value in body["spec"].items()):
            made.append(Patch(kind, name, {"spec": body["spec"]}))
    return [*made, *(Delete(kind, body) for body in found.values())]


def _suspended(seen: Seen, memory: Memory) -> list[Operation]:
    if seen.pods_of("trainer"):
        return _deleted(seen.pods_of("trainer"))
    if memory.groups:
        # What comes after is another run, which begins with the newest checkpoint of this one.
        memory.run += 1
        memory.groups.clear()
    return [*_gone(DEPLOYMENTS, seen.deployment)]


def _clear(seen: Seen) -> list[Operation]:
    """The job is over: what runs ends; what has ended is left for its logs."""
    over = [pod for pod in seen.pods_of("trainer") if not is_over(pod)]
    if over:
        return _deleted(over)
    services = [Delete(SERVICES, each) for each in seen.services.values()]
    return [*_gone(DEPLOYMENTS, seen.deployment), *services, *_protected(seen, [])]


def _gone(kind: Kind, body: Object | None) -> list[Operation]:
    return [Delete(kind, body)] if body is not None and not body["metadata"].get("deletionTimestamp") else []


def _deleted(pods: list[Object] | tuple[Object, ...], grace: int | None = None) -> list[Operation]:
    return [Delete(PODS, pod, grace) for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def _at_work(attempt: Attempt) -> bool:
    return any(pod.get("status", {}).get("phase") == "Running" for pod in attempt.pods)


def _fate(past: Past) -> str:
    _, code, words = past.fate
    how = "" if code is None else f"exit code {code}"
    return ": ".join(part for part in (how, words) if part) or "it ended"
