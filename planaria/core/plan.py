"""Keep N groups alive: what to start, end and give up, as one function of what is seen.

``plan`` has no memory. Whoever runs groups (an agent, a Kubernetes operator, a Slurm driver) calls it
whenever something changes and at ``next_wakeup``, carries out the actions in order, and shows the outcome in
the next call. Every action may be carried out twice: the same view gives the same actions.

``now`` and all other times are seconds on one clock of the caller's that is never set back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK


class BelowMin(Enum):
    """What becomes of a job of which too few groups work for too long."""

    FAIL = "fail"
    SUSPEND = "suspend"


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """What is wanted. Whoever drains a group wants one fewer: the caller lowers ``desired`` by one."""

    desired: int  # groups
    min_groups: int = 1  # with fewer, and no way to get more, the job has failed
    max_groups: int | None = None  # no more than these, whoever wants them

    # With fewer than the minimum at work for so many seconds the job ends, or makes room for others until somebody
    # resumes it. None: it waits for as long as there is a way to get more, and fails when there is none.
    below_min_limit: float | None = None
    below_min: BelowMin = BelowMin.FAIL

    # Back-off of one group after quick failures in a row; the first replacement is immediate. A warm start
    # takes about a second, so the first wait doubles the cost of an attempt and no more; at the maximum a
    # group that cannot live costs the others two attempts a minute.
    backoff_first: float = 1.0
    backoff_max: float = 30.0
    # A life of this length is no quick failure: twice the longest wait, so waiting is not mistaken for
    # living.
    calm_after: float = 60.0

    # Replacements of the whole job. A failure every six seconds for ten minutes is beyond any hardware: it is
    # the script, and restarting it heals nothing.
    budget: int = 100
    budget_window: float = 600.0

    # A job that has never committed a step, and all of whose groups failed so often in a row, will not start.
    start_attempts: int = 3

    # A suspect may come back by itself, and healing it costs little. Waiting for about as long as a cold
    # replacement takes is at most twice as bad as knowing the future (the ski-rental argument).
    suspect_patience: float = 30.0

    # A node on which so many groups failed within so many seconds is avoided: three in an hour are no coincidence, and
    # a day's shift finds out why. One that was lost is avoided until any scheduler has seen that it is down (Slurm's
    # own limit is 300 s, that of Kubernetes 340 s), for it would be given out again until then.
    quarantine_failures: int = 3
    quarantine_window: float = 3600.0
    quarantine_seconds: float = 6 * 3600.0
    lost_node_seconds: float = 600.0

    # When the first group has finished, the others have made the same last step. One that has not after as
    # long as a heal takes at most has nobody left to heal from.
    finish_grace: float = 10.0

    def __post_init__(self) -> None:
        if self.desired < 1 or self.min_groups < 1:
            raise ValueError(
                f"a job needs at least one group, not {self.desired} (with a minimum of {self.min_groups})"
            )
        if min(self.budget, self.backoff_first, self.suspect_patience, self.finish_grace) < 0:
            raise ValueError(f"times and budgets cannot be negative: {self}")
        if self.max_groups is not None and self.max_groups < self.min_groups:
            raise ValueError(f"at most {self.max_groups} groups cannot be at least {self.min_groups}")
        if self.quarantine_failures < 1 or min(self.quarantine_window, self.quarantine_seconds) < 0:
            raise ValueError(f"a node is avoided after at least one failure, and for no negative time: {self}")
        if self.backoff_max < self.backoff_first or self.budget_window <= 0 or self.start_attempts < 1:
            raise ValueError(
                "the longest back-off must be at least the first one, the budget's window positive, and "
                f"there must be at least one attempt to start: {self}"
            )

    @property
    def wanted(self) -> int:
        """Groups, within the bounds."""
        return self.desired if self.max_groups is None else min(self.desired, self.max_groups)


class GroupState(Enum):
    PENDING = "pending"  # asked for, and waiting for a place to run
    RUNNING = "running"  # started, perhaps not ready yet, and not known to have ended
    DRAINING = "draining"  # running, and asked to leave
    DEAD = "dead"  # ended, however, and none of the following
    FINISHED = "finished"  # ended with exit code 0, after the job's last step or by its script's own decision
    REFUSED = "refused"  # ended with exit code 2: bad input, to try again is useless
    DRAINED = "drained"  # left for good


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The newest incarnation of one group, as the caller sees it."""

    group: int
    incarnation: int
    state: GroupState
    since: float = 0.0  # when it ended, if it has
    exit_code: int | None = None  # negative: the signal that ended it; None: unknown
    message: str = ""  # what it said of its failure, a sentence
    quick_failures: int = 0  # in a row, this one included: see the function of this name
    settled: bool = False  # holds the job's state: has healed, or was there from the beginning
    done: bool = False  # has committed the job's last step
    suspected_since: float | None = None
    outlives: bool = False  # it is one rank that is suspected, and the group's state outlives that one

    def __str__(self) -> str:
        return f"group {self.group} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """A group failed on ``node``; ``lost``: because of it, as far as can be seen."""

    node: str
    at: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Observed:
    """What there is: every group that was ever started, at most once each."""

    groups: tuple[ObservedGroup, ...] = ()
    committed: bool = False  # whether any step of this job was ever committed
    replacements: tuple[float, ...] = ()  # when incarnations after the first were started, in any order
    node_failures: tuple[NodeFailure, ...] = ()  # in any order
    below_min_since: float | None = None  # since when fewer than the minimum have run, if they do

    def __post_init__(self) -> None:
        times = Counter(g.group for g in self.groups)
        for group, count in times.items():
            if count > 1:
                raise ValueError(f"group {group} was observed {count} times: name its newest life only")

    def having(self, *states: GroupState) -> list[ObservedGroup]:
        """Ascending by group."""
        return sorted((g for g in self.groups if g.state in states), key=lambda g: g.group)


# --- actions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Never two lives of a group: whoever carries it out makes sure first that the one before counts for nothing."""

    group: int
    incarnation: int
    avoid: tuple[str, ...] = ()  # nodes, ascending


@dataclass(frozen=True, slots=True)
class Kill:
    """End the group's processes now, for ``reason``. It is replaced once it is seen dead."""

    group: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let the group leave after a commit, or drop it at once if it is dead. It is never started again."""

    group: int


@dataclass(frozen=True, slots=True)
class Suspend:
    """End whatever still runs, and start nothing before somebody resumes the job. ``reason`` is a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End whatever still runs, and the job, with this exit code; ask no more. ``reason`` is a sentence."""

    exit_code: int
    reason: str


Action = Start | Kill | Drain | Suspend | Finish


# --- the plan -----------------------------------------------------------------------------------------------


def plan(spec: PlanSpec, observed: Observed, now: float) -> list[Action]:
    """What to do now, in this order."""
    return _decide(spec, observed, now).actions


def next_wakeup(spec: PlanSpec, observed: Observed, now: float) -> float | None:
    """Until when ``plan`` stays as it is if nothing changes; None: for ever."""
    return min((time for time in _decide(spec, observed, now).due if time > now), default=None)


def quick_failures(spec: PlanSpec, before: int, lived: float, settled: bool) -> int:
    """The new count for a group that died after ``lived`` seconds, ``before`` being its count so far.

    Only dying before it was of use counts as a quick failure. A settled group that dies soon was killed while
    it worked: waiting would not help it, so that counts for nothing, and the job's budget is the limit.
    """
    if lived >= spec.calm_after:
        return 0
    return before if settled else before + 1


def backoff(spec: PlanSpec, failures: int) -> float:
    """Seconds from a death to the next start, after so many quick failures in a row."""
    if failures <= 1:
        return 0.0
    return min(spec.backoff_max, spec.backoff_first * 2.0 ** min(failures - 2, 64))


def avoided(spec: PlanSpec, failures: tuple[NodeFailure, ...], now: float) -> dict[str, float]:
    """The nodes on which nothing should be started now, and until when."""
    until: dict[str, float] = {}
    for node in {failure.node for failure in failures}:
        times = sorted(failure.at for failure in failures if failure.node == node)
        ends = [failure.at + spec.lost_node_seconds for failure in failures if failure.node == node and failure.lost]
        enough = spec.quarantine_failures - 1
        for first, last in zip(times, times[enough:], strict=False):
            if last - first <= spec.quarantine_window:
                ends.append(last + spec.quarantine_seconds)
        if ends and max(ends) > now:
            until[node] = max(ends)
    return until


def budget_left(spec: PlanSpec, seen: Observed, now: float) -> int:
    """Replacements that may be made now."""
    return max(0, spec.budget - len(_recent(spec, seen, now)))


@dataclass(slots=True)
class _Decision:
    actions: list[Action] = field(default_factory=list)
    due: list[float] = field(default_factory=list)  # times at which the decision may change by itself


def _decide(spec: PlanSpec, seen: Observed, now: float) -> _Decision:
    if _over(seen):
        return _conclude(spec, seen, now)
    end = _bad_input(seen) or _never_started(spec, seen) or _too_few(spec, seen, now)
    if end:
        return _Decision([end])
    decision = _keep_alive(spec, seen, now)
    if spec.below_min_limit is not None and seen.below_min_since is not None:
        decision.due.append(seen.below_min_since + spec.below_min_limit)
    return decision


def _over(seen: Observed) -> list[ObservedGroup]:
    """Groups that ended after the last step, or in peace before. From the first one on, no group is started any more:
    a loop may be left early by all groups alike. If one leaves alone, the caller says so by its state DRAINED, as soon
    as the others have made a step without it."""
    return [g for g in seen.having(GroupState.FINISHED, GroupState.DEAD) if g.done or g.state is GroupState.FINISHED]


def _conclude(spec: PlanSpec, seen: Observed, now: float) -> _Decision:
    """Those who have left may be followed by the others, in peace; who can never get so far must not be waited for."""
    running = seen.having(GroupState.PENDING, GroupState.RUNNING, GroupState.DRAINING)
    finished = seen.having(GroupState.FINISHED)
    if not running:
        if finished:
            done = any(g.done for g in seen.groups)
            return _Decision(
                [Finish(EXIT_OK, "all steps are committed" if done else "all groups left their loop early")]
            )
        last = max(_over(seen), key=lambda g: g.since)
        return _Decision([Finish(EXIT_FAILED, f"all steps are committed, but after the last one {_fate(last)}")])
    if not finished:  # one that died early in its end proves nothing about the others
        return _Decision()
    late = [g for g in running if not g.done]
    last_made = [g.since for g in finished if g.done]
    if last_made:
        # The others have made the same last step. One that holds the state may be at its own last commit; one that
        # never did has nobody left to heal from.
        until = min(last_made) + spec.finish_grace
        hopeless = [g for g in late if now >= until or not g.settled]
        actions: list[Action] = [Kill(g.group, "the job finished without it") for g in hopeless]
        return _Decision(actions, due=[until] if len(hopeless) < len(late) else [])
    # Somebody left before the last step. Whoever holds the state goes on with its steps, however long they take, or
    # leaves as well; joiners wait for those.
    if not any(g.settled for g in running):
        return _Decision([Kill(g.group, "every group that held the state has left") for g in late])
    decision = _Decision()
    for g in late:
        if g.suspected_since is not None and (g.outlives or not _needed(g, running, seen)):
            due = g.suspected_since + spec.suspect_patience
            if now >= due:
                decision.actions.append(Kill(g.group, _suspicion(g, now)))
            else:
                decision.due.append(due)
    return decision


def _bad_input(seen: Observed) -> Finish | None:
    refused = seen.having(GroupState.REFUSED)
    if not refused:
        return None
    others = GroupState.PENDING, GroupState.RUNNING, GroupState.DEAD, GroupState.DRAINING
    if seen.committed and seen.having(*others):
        return None  # the others can do with what this one refuses
    return Finish(EXIT_BAD_INPUT, refused[0].message or f"{refused[0]} says that its input is bad; see its log")


def _never_started(spec: PlanSpec, seen: Observed) -> Finish | None:
    tried = seen.having(GroupState.PENDING, GroupState.RUNNING, GroupState.DRAINING, GroupState.DEAD)
    hopeless = all(g.state is GroupState.DEAD and g.quick_failures >= spec.start_attempts for g in tried)
    if seen.committed or not tried or not hopeless:
        return None
    last = max(tried, key=lambda g: g.since)
    return Finish(
        EXIT_FAILED,
        f"no group made a first step in {spec.start_attempts} attempts; the last failure: {_fate(last)}",
    )


def _too_few(spec: PlanSpec, seen: Observed, now: float) -> Finish | Suspend | None:
    """The fewest groups that are enough are out of reach, now and for good, or have been for too long."""
    running, dead = seen.having(GroupState.RUNNING, GroupState.PENDING), seen.having(GroupState.DEAD)
    refused = seen.having(GroupState.REFUSED)
    least = min(spec.min_groups, spec.wanted)
    if spec.below_min_limit is not None:
        since = seen.below_min_since
        if since is None or now < since + spec.below_min_limit:
            return None
        at_work = len(seen.having(GroupState.RUNNING))
        why = f"fewer than {least} groups have run for {now - since:.0f} s (now: {at_work})"
        return Suspend(why) if spec.below_min is BelowMin.SUSPEND else Finish(EXIT_FAILED, why)
    fresh = max(0, spec.wanted - len(running) - len(dead) - len(refused))
    spent = budget_left(spec, seen, now) == 0
    if len(running) + fresh + (0 if spent else len(dead)) >= least:
        return None
    causes = []
    if dead and spent:
        last = max(dead, key=lambda g: g.since)
        causes.append(
            f"the budget of {spec.budget} replacements in {spec.budget_window:g} s is used up "
            f"(the last failure: {_fate(last)})"
        )
    if refused:
        causes.append(f"{len(refused)} refused their input ({_fate(refused[0])})")
    return Finish(
        EXIT_FAILED,
        f"groups that can run: {len(running) + fresh}, needed: {least}; {'; '.join(causes)}",
    )


def _keep_alive(spec: PlanSpec, seen: Observed, now: float) -> _Decision:
    decision = _Decision()
    # With fewer wanted the dead are dropped first, which costs nothing (and they may be without budget to
    # return), then those that only wait, then suspects (the others could not leave if one were all that stays), then
    # the highest ids.
    working = sorted(seen.having(GroupState.RUNNING), key=lambda g: g.suspected_since is not None)
    places = [*working, *(g for state in (GroupState.PENDING, GroupState.DEAD) for g in seen.having(state))]
    staying, leaving = places[: spec.wanted], places[spec.wanted :]
    decision.actions += [Drain(g.group) for g in leaving if not _needed(g, staying, seen)]
    left = budget_left(spec, seen, now)
    avoid = tuple(sorted(avoided(spec, seen.node_failures, now)))
    wish: list[Action] = []  # what costs budget, in the order in which it is given out
    for g in sorted(staying, key=lambda g: (g.since, g.group)):
        if g.state is GroupState.DEAD:
            due = g.since + backoff(spec, g.quick_failures)
            if now >= due:
                wish.append(Start(g.group, g.incarnation + 1, avoid))
            else:
                decision.due.append(due)
    for g in staying:
        suspected = g.state is GroupState.RUNNING and g.suspected_since is not None
        if suspected and (g.outlives or not _needed(g, staying, seen)):
            assert g.suspected_since is not None
            due = g.suspected_since + spec.suspect_patience
            if now >= due:
                wish.append(Kill(g.group, _suspicion(g, now)))
            else:
                decision.due.append(due)
    decision.actions += wish[:left]
    for g in seen.having(GroupState.DRAINING):  # a suspect does not leave by itself; nothing comes after it
        if g.suspected_since is not None:
            due = g.suspected_since + spec.suspect_patience
            if now >= due:
                decision.actions.append(Kill(g.group, _suspicion(g, now)))
            else:
                decision.due.append(due)
    recent = _recent(spec, seen, now)
    if len(wish) > left and recent:
        decision.due.append(min(recent) + spec.budget_window)
    decision.actions += [Start(group, 0, avoid) for group in _new_groups(spec, seen)]
    return decision


def _needed(group: ObservedGroup, staying: list[ObservedGroup], seen: Observed) -> bool:
    """Whether ``group`` may be the last that holds the job's state: it stays until another has healed."""
    if not seen.committed or not group.settled or group.state is not GroupState.RUNNING:
        return False
    return not any(
        g.state is GroupState.RUNNING and g.settled and g.suspected_since is None
        for g in staying
        if g.group != group.group
    )


def _new_groups(spec: PlanSpec, seen: Observed) -> list[int]:
    """Ids for new groups: the lowest that were never used.

    A group that was refused keeps its place (a new one would be given the same input), and one that is
    leaving keeps it until its devices are free.
    """
    kept = (s for s in GroupState if s not in (GroupState.FINISHED, GroupState.DRAINED))
    missing = spec.wanted - len(seen.having(*kept))
    used = {g.group for g in seen.groups}
    free = (group for group in range(len(used) + spec.wanted) if group not in used)
    return [group for group, _ in zip(free, range(missing), strict=False)]


def _recent(spec: PlanSpec, seen: Observed, now: float) -> list[float]:
    return [time for time in seen.replacements if time + spec.budget_window > now]


def _suspicion(group: ObservedGroup, now: float) -> str:
    return f"{group} has been suspected for {now - (group.suspected_since or now):.0f} s"


def _fate(group: ObservedGroup) -> str:
    if group.exit_code is None:
        how = "ended"
    elif group.exit_code < 0:
        how = f"was ended by signal {-group.exit_code}"
    else:
        how = f"ended with exit code {group.exit_code}"
    return f"{group} {how}" + (f": {group.message}" if group.message else "")
