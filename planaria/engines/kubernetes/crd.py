"""The custom resource FaultTolerantJob: its definition for the API server, and what of it the operator understands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from planaria.core.plan import PlanSpec
from planaria.engines.kubernetes.api import JOBS, Object
from planaria.errors import UsageError

GROUP, VERSION = JOBS.version.split("/")
# A pod's name is its host name, of at most 63 letters: "-rg99999-99999-999" is added to the job's.
LONGEST_NAME = 44
# Services are named after it, too, and their names begin with a letter.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
# Of lighthouses. Training does without a leader, and an API server under load is slower than other stores.
LEASE_SECONDS = 10
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a FaultTolerantJob asks for, checked. ``template``: of every pod of a group."""

    name: str
    namespace: str
    uid: str
    generation: int
    suspend: bool
    desired: int
    least: int
    shards: int
    nodes: int
    procs: int
    budget: int
    backoff: float
    credentials: str
    lighthouses: int
    lease: float
    lighthouse_image: str
    shrinks: bool
    template: Object

    def plan(self, desired: int) -> PlanSpec:
        # A suspect was out of reach of the lighthouse, and left out by the others or given up by Kubernetes, already:
        # five more of its heartbeats are for a connection that comes back.
        return PlanSpec(
            desired=desired,
            min_groups=min(self.least, desired),
            budget=self.budget,
            backoff_first=self.backoff,
            backoff_max=max(self.backoff, 60.0),
            suspect_patience=5.0,
        )


def read(job: Object) -> Wanted:
    """Raises UsageError with a sentence that names the field, for all that the schema cannot say. Defaults are filled
    in here too: an API server fills in those of a definition that may be older than this operator."""
    meta, spec = job["metadata"], job.get("spec") or {}
    groups, lighthouse = spec.get("replicaGroups") or {}, spec.get("lighthouse") or {}
    template = _without_nulls(spec.get("template") or {})
    _check_forms(template)
    try:
        wanted = Wanted(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            generation=int(meta.get("generation", 1)),
            suspend=bool(spec.get("suspend", False)),
            desired=int(groups["desired"]),
            least=int(groups.get("min", 1)),
            shards=int(spec["shards"]),
            nodes=int(spec.get("nodesPerGroup", 1)),
            procs=int(spec.get("procsPerNode", 1)),
            budget=int(spec.get("maxReplacements", 100)),
            backoff=float(spec.get("restartBackoffSeconds", 1)),
            credentials=str(spec.get("credentialsSecret", "planaria-credentials")),
            lighthouses=int(lighthouse.get("replicas", 2)),
            lease=float(lighthouse.get("leaseSeconds", LEASE_SECONDS)),
            lighthouse_image=str(lighthouse.get("image") or container(template).get("image", "")),
            shrinks=bool(spec.get("shrinkLowerPriority", True)),
            template=template,
        )
    except KeyError as error:
        raise UsageError(f"spec has no {error.args[0]}") from None
    _check(wanted)
    return wanted


def args_of(job: Wanted) -> list[str]:
    """What follows ``planaria run`` in its pods. Whoever has a command line at hand checks them."""
    return list(container(job.template)["args"])


def container(template: Object) -> Object:
    """The one that trains. UsageError if there is none."""
    containers = (template.get("spec") or {}).get("containers") or []
    if not containers or not isinstance(containers[0], dict):
        raise UsageError("spec.template.spec.containers is empty: the first container trains")
    first: Object = containers[0]
    return first


def _without_nulls(found: Any) -> Any:
    """To Kubernetes a field that is null is not there, and what a chart leaves empty is null."""
    if isinstance(found, dict):
        return {key: _without_nulls(value) for key, value in found.items() if value is not None}
    return [_without_nulls(each) for each in found] if isinstance(found, list) else found


def _check_forms(template: Any) -> None:
    """The definition lets anything through as a template, and the operator adds to these."""
    first = [f"spec.containers.0.{key}" for key in ("env", "volumeMounts", "command")]
    mappings = ("", "metadata", "metadata.labels", "spec", "spec.affinity", "spec.affinity.nodeAffinity")
    preferred = f"spec.affinity.nodeAffinity.{PREFERRED}"
    for path in (*mappings, "spec.containers", "spec.tolerations", "spec.volumes", preferred, *first):
        found = template
        for key in filter(None, path.split(".")):
            found = None if not found else found[0] if key == "0" else found.get(key)
        if path in mappings:
            fine, form = isinstance(found, dict), "a mapping"
        elif path.endswith("command"):
            fine, form = _is_list_of(str, found), "a list of strings"
        else:
            fine, form = _is_list_of(dict, found), "a list of mappings"
        if found is not None and not fine:
            raise UsageError(f"{'.'.join(filter(None, ('spec.template', path)))} must be {form}")


def _is_list_of(kind: type, found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, kind) for each in found)


def _check(job: Wanted) -> None:
    if len(job.name) > LONGEST_NAME or not _NAME.fullmatch(job.name):
        raise UsageError(
            f"metadata.name is {job.name}: at most {LONGEST_NAME} small letters, digits and dashes, a letter first and "
            "no dash last, for pods and services are named after it"
        )
    if not 1 <= job.least <= job.desired:
        raise UsageError(f"spec.replicaGroups.min is {job.least}: must be between 1 and desired ({job.desired})")
    if job.desired > job.shards:
        raise UsageError(
            f"spec.replicaGroups.desired is {job.desired}, and a step has spec.shards = {job.shards} of which every "
            "group needs one"
        )
    args = container(job.template).get("args") or []
    if not args or not _is_list_of(str, args):
        raise UsageError(
            "spec.template.spec.containers[0].args: the script and its arguments must be there, as strings"
        )
    if (job.template.get("spec") or {}).get("restartPolicy", "Never") != "Never":
        raise UsageError("spec.template.spec.restartPolicy: leave it out; pods of groups are replaced, not restarted")


def _integer(least: int, default: int | None = None, about: str = "") -> Object:
    return {"type": "integer", "format": "int32", "minimum": least} | _more(default, about)


def _more(default: Any, about: str) -> Object:
    return ({} if default is None else {"default": default}) | ({"description": about} if about else {})


def definition() -> Object:
    """The CustomResourceDefinition."""
    columns = [
        ("Phase", "string", ".status.phase", 0),
        ("Groups", "string", ".status.groupsReady", 0),
        ("Step", "integer", ".status.step", 0),
        ("Quorum", "string", ".status.quorum.id", 0),
        ("Replaced", "integer", ".status.replaced", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Lighthouse", "string", ".status.lighthouse", 1),
        ("Message", "string", ".status.message", 1),
    ]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{JOBS.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": JOBS.kind,
                "listKind": JOBS.kind + "List",
                "plural": JOBS.plural,
                "singular": JOBS.kind.lower(),
                "shortNames": ["ftj"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicaGroups.desired",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in columns
                    ],
                }
            ],
        },
    }


def _schema() -> Object:
    spec = {
        "type": "object",
        "required": ["replicaGroups", "shards", "template"],
        "properties": {
            "suspend": {"type": "boolean"}
            | _more(False, "No pods while it is true. Resumed, the job goes on from its newest checkpoint."),
            "replicaGroups": {
                "type": "object",
                "required": ["desired"],
                "properties": {
                    "desired": _integer(1, None, "Replica groups; kubectl scale changes it while the job trains."),
                    "min": _integer(1, 1, "The job fails if fewer can be kept, and gives none below it away."),
                },
            },
            "shards": _integer(1, None, "Of every step, whoever computes them; fixed. At least as many as groups."),
            "nodesPerGroup": _integer(1, 1, "Pods of a group."),
            "procsPerNode": _integer(1, 1, "Ranks in each of them."),
            "maxReplacements": _integer(0, 100, "Of groups by new pods, in ten minutes."),
            "restartBackoffSeconds": {"type": "number", "minimum": 0}
            | _more(1, "Before a group that failed twice at once is replaced; doubles."),
            "shrinkLowerPriority": {"type": "boolean"}
            | _more(True, "Take groups above their min from jobs of lower priority, rather than wait for room."),
            "credentialsSecret": {"type": "string"}
            | _more("planaria-credentials", "Secret with the files that planaria certs init makes, but ca.key."),
            "lighthouse": {
                "type": "object",
                "default": {},
                "properties": {
                    "replicas": _integer(1, 2, "One leads, the others stand by."),
                    "leaseSeconds": {"type": "number", "minimum": 2}
                    | _more(
                        LEASE_SECONDS,
                        "After so long another one leads; an API server that takes a quarter of it "
                        "to answer is no trouble.",
                    ),
                    "image": {"type": "string", "description": "Default: that of the first container."},
                },
            },
            "template": {
                "type": "object",
                "description": "PodTemplateSpec. The first container's args are the options, the script and its "
                "arguments as after planaria run; its command is what runs planaria (default: planaria).",
                "x-kubernetes-preserve-unknown-fields": True,
            },
        },
    }
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}}
