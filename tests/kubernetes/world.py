"""A cluster as the reconciler sees it, without any I/O: it carries out what was decided, and things happen to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from planaria.core.messages import Member, Phase, Quorum, QuorumId
from planaria.core.roster import GroupStatus, JobStatus
from planaria.engines.kubernetes import crd
from planaria.engines.kubernetes.api import BUDGETS, DEPLOYMENTS, PODS, SERVICES, Object
from planaria.engines.kubernetes.budgets import Budgets
from planaria.engines.kubernetes.observe import Memory, Past, Seen, attempts
from planaria.engines.kubernetes.reconcile import Create, Decision, Delete, Evict, Patch, Scale, decide
from planaria.engines.kubernetes.resources import ATTEMPT, GROUP


def job(desired: int = 3, **spec: Any) -> Object:
    template = {"spec": {"containers": [{"name": "trainer", "image": "i", "args": ["train.py"]}]}}
    body = {"replicaGroups": {"desired": desired}, "shards": 12, "template": template}
    return {"metadata": {"name": "j", "namespace": "n", "uid": "u1234567890", "generation": 1}, "spec": body | spec}


@dataclass
class World:
    body: Object
    now: float = 100.0
    memory: Memory = field(default_factory=Memory)
    pods: dict[str, Object] = field(default_factory=dict)
    deployment: Object | None = None
    services: dict[str, Object] = field(default_factory=dict)
    budgets: dict[str, Object] | None = field(default_factory=dict)  # None: the operator may not see them
    healing: set[str] = field(default_factory=set)  # pods that run, and whose group does not hold the state yet
    lost: set[str] = field(default_factory=set)  # pods whose node is gone
    evicted: set[str] = field(default_factory=set)  # of those, pods whose group the lighthouse has given up
    noticed: bool = False  # Kubernetes has seen which nodes are lost
    cordoned: frozenset[str] = frozenset()
    answers: bool = True
    refuses: bool = False  # nothing can be made or deleted now: a quota, or a server in trouble
    told: int = 0  # groups that the lighthouse was told of last
    complete: bool = False

    @property
    def wanted(self) -> crd.Wanted:
        return crd.read(self.body)

    def look(self) -> Decision:
        """Once: decide, and carry it out."""
        before = decide(self.wanted, self.seen(), self.memory, self.now)
        for operation in before.operations:
            match operation:
                case Create() | Delete() if self.refuses:
                    pass
                case Create(kind, body, group, attempt, told):
                    name = body["metadata"]["name"]
                    if kind is PODS and name not in self.pods:
                        body["status"] = {"phase": "Pending"}
                        body["spec"]["nodeName"] = f"node-of-{name}"
                        self.pods[name] = body
                    elif kind is SERVICES:
                        self.services[name] = body | {"spec": body["spec"] | {"clusterIP": "10.0.0.9"}}
                    elif kind is DEPLOYMENTS:
                        self.deployment = body
                    elif kind in BUDGETS and self.budgets is not None:
                        self.budgets[name] = body
                    if group >= 0 and attempt > self.memory.groups[group].attempt:
                        self.memory.groups[group] = Past(attempt, self.memory.groups[group].failures, made=self.now)
                        if told is not None:
                            self.memory.replacements.append(self.now)
                case Delete(kind, body, _) if kind is PODS:
                    body["metadata"]["deletionTimestamp"] = "now"
                case Patch(kind, name, body) if kind in BUDGETS and self.budgets is not None:
                    self.budgets[name] = {**self.budgets[name], **body}
                case Delete(kind, body, _) if kind in BUDGETS and self.budgets is not None:
                    del self.budgets[body["metadata"]["name"]]
                case Delete(kind, body, _):
                    if kind is DEPLOYMENTS:
                        self.deployment = None
                    self.services.pop(body["metadata"]["name"], None)
                case Evict(group, _):
                    self.memory.groups[group].given_up = True
                    self.evicted |= {n for n in self.lost if self.pods[n]["metadata"]["labels"][GROUP] == str(group)}
                case Scale(groups):
                    self.told = groups
        return before

    def seen(self) -> Seen:
        return Seen(
            tuple(self.pods.values()),
            self.deployment,
            dict(self.services),
            self.status() if self.answers else None,
            self.cordoned,
            frozenset(f"node-of-{name}" for name in self.lost if self.noticed),
            Budgets(BUDGETS[0], dict(self.budgets)) if self.budgets is not None else None,
        )

    def status(self) -> JobStatus:
        """What a lighthouse says that has seen everything."""
        groups, members = [], []
        for group, found in attempts(self.pods.values()).items():
            running = [a for a in found if any(p["status"]["phase"] == "Running" for p in a.pods)]
            if not running:
                continue
            newest = running[-1]
            away = any(p["metadata"]["name"] in self.lost for p in newest.pods)
            member = Member(group, newest.number)
            state = "dead" if away and newest.pods[0]["metadata"]["name"] in self.evicted else "active"
            state = "healing" if any(p["metadata"]["name"] in self.healing for p in newest.pods) else state
            groups.append(
                GroupStatus(member, state, 5, QuorumId(1, 1), Phase.COMPUTING, math.nan, 0.1, 1, f"a{group}", not away)
            )
            if not away:
                members.append(member)
        quorum = None
        if members:
            quorum = Quorum(QuorumId(1, 1), tuple(members), ("a",) * len(members), True, "")
        return JobStatus("j", 1, quorum, None, self.told or self.wanted.desired, self.complete, tuple(groups))

    def evictable(self, name: str) -> bool:
        """Whether the API server would take an eviction of this pod of a group."""
        budget = (self.budgets or {}).get("j-groups")
        healthy = [n for n in self.running() if not self.pods[n]["metadata"].get("deletionTimestamp")]
        return budget is None or name not in healthy or len(healthy) > budget["spec"]["minAvailable"]

    # --- what happens ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Whatever can start starts, and whatever was deleted goes, but on lost nodes."""
        for name, pod in list(self.pods.items()):
            if name in self.lost:
                continue
            if pod["metadata"].get("deletionTimestamp"):
                del self.pods[name]
            elif pod["status"]["phase"] == "Pending":
                pod["status"]["phase"] = "Running"

    def exit(self, name: str, code: int) -> None:
        pod = self.pods[name]
        pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        over = {"exitCode": code, "message": f"ended with {code}"}
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": over}}]

    def running(self) -> list[str]:
        return [
            name for name, pod in self.pods.items() if pod["status"]["phase"] == "Running" and name not in self.lost
        ]

    def living(self) -> dict[int, list[int]]:
        """By group, the attempts that may still do something."""
        found: dict[int, list[int]] = {}
        for name, pod in self.pods.items():
            labels = pod["metadata"]["labels"]
            if pod["status"]["phase"] in ("Pending", "Running") and name not in self.evicted:
                found.setdefault(int(labels[GROUP]), []).append(int(labels[ATTEMPT]))
        return found

    def settle(self, rounds: int = 30) -> None:
        """Time passes without trouble."""
        self.noticed = True
        for _ in range(rounds):
            self.look()
            self.run()
            self.now += 5.0
