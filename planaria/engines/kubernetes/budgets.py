"""PodDisruptionBudgets of a job: what evictions (``kubectl drain``, an autoscaler's, a descheduler's) must leave alone.

Evictions know nothing of groups: those of several nodes that are drained at once would take all that hold the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planaria.core.plan import GroupState, Observed
from planaria.engines.kubernetes import resources
from planaria.engines.kubernetes.api import Kind, Object
from planaria.engines.kubernetes.crd import Wanted


@dataclass(frozen=True, slots=True)
class Budgets:
    """Those that there are, by name. ``kind``: as this cluster has it."""

    kind: Kind
    found: Mapping[str, Object]


def wanted(job: Wanted, desired: int, observed: Observed, committed: bool) -> list[Object]:
    """``desired``: groups. ``committed``: there is a state to be lost."""
    # Of one lighthouse alone: it may go, training does not need it.
    made = [resources.budget(job, resources.lighthouse_name(job), "lighthouse", {"maxUnavailable": 1})]
    if desired > 1:  # one group alone would keep its node from ever being drained
        pods = desired * job.nodes
        left = pods - _free(job, desired, observed, committed)
        made.append(resources.budget(job, resources.names_of(job), "trainer", {"minAvailable": left}))
    return made


def _free(job: Wanted, desired: int, observed: Observed, committed: bool) -> int:
    """Pods that may go now. As many as groups, for any pod takes its whole group with it."""
    # Those above the minimum; one even if there is none: a drain is to get on, and the others train on when it is back.
    free = max(1, desired - job.least)
    if committed:
        # A pod is ready when it runs; its group holds the state later.
        holders = [g for g in observed.having(GroupState.RUNNING) if g.settled and g.suspected_since is None]
        free -= desired - len(holders)
    return max(0, free)
