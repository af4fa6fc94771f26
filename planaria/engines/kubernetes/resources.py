"""What the operator creates for a job: pods of its groups, and the lighthouse at which they meet."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from planaria.engines.kubernetes.api import JOBS, Object
from planaria.engines.kubernetes.crd import PREFERRED, Wanted

PREFIX = "planaria.dev/"
JOB, GROUP, ATTEMPT, NODE, ROLE = (PREFIX + key for key in ("job", "group", "attempt", "node", "role"))
# What was asked for that follows the job. What a webhook makes of it (another registry's image) is not put right: it
# would do it again, for ever.
ASKED = PREFIX + "asked"
PORT = 29510
GROUP_PORT = 29511
LIGHTHOUSE_ACCOUNT = "planaria-lighthouse"
CREDENTIALS = "planaria-credentials"  # a volume of the container that trains, and of no other
_CREDENTIALS = "/var/run/planaria/credentials"
_API = "/var/run/planaria/api"
_LOGS = "/var/log/planaria"
# Kubernetes takes a node for lost after some 40 s, and then leaves its pods for 300 s more unless they say otherwise.
# The lighthouse is faster; this is for jobs whose lighthouse was on the same node.
_TOLERATED = 10  # seconds
# A group leaves after a commit, and steps may be long.
_GRACE = 120  # seconds
# Schedulers look at each of them for every node.
_MOST_AVOIDED = 50


def job_name(job: Wanted, run: int) -> str:
    """By which the lighthouse knows it: a job of the same name that was deleted before is another one, and so is one
    that was suspended."""
    return f"{job.name}-{job.uid[:8]}" + (f"-{run}" if run else "")


def pod_name(job: Wanted, group: int, attempt: int, node: int) -> str:
    return f"{job.name}-rg{group}-{attempt}" + (f"-{node}" if job.nodes > 1 else "")


def lighthouse_name(job: Wanted) -> str:
    return lighthouse_of(job.name)


def lighthouse_of(name: str) -> str:
    return f"{name}-lighthouse"


def names_of(job: Wanted) -> str:
    """The Service that gives pods of groups of several nodes their names; also what keeps evictions from all groups."""
    return f"{job.name}-groups"


def labels(job: Wanted, role: str) -> dict[str, str]:
    return {JOB: job.name, ROLE: role}


def pod(
    job: Wanted,
    group: int,
    attempt: int,
    node: int,
    run: int,
    desired: int,
    address: str,
    avoid: Sequence[str] = (),
) -> Object:
    """One node of a group. ``address``: of the lighthouse. ``avoid``: nodes, if there is room on others."""
    made = copy.deepcopy(job.template)
    meta, spec = made.setdefault("metadata", {}), made["spec"]
    name = pod_name(job, group, attempt, node)
    place = {GROUP: str(group), ATTEMPT: str(attempt), NODE: str(node)}
    meta |= {
        "name": name,
        "labels": {**(meta.get("labels") or {}), **labels(job, "trainer"), **place},
        "ownerReferences": [owner(job)],
    }
    container = spec["containers"][0]
    command = container.get("command") or ["planaria"]
    container["command"] = [*command, "run", *_options(job, group, attempt, node, run, desired, address)]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # the last words, for the status
    container["env"] = [*(container.get("env") or []), _pod_ip()]
    container["volumeMounts"] = [
        *(container.get("volumeMounts") or []),
        {"name": CREDENTIALS, "mountPath": _CREDENTIALS, "readOnly": True},
        {"name": "planaria-logs", "mountPath": _LOGS},
    ]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        _secret(job, "agent.pem"),
        {"name": "planaria-logs", "emptyDir": {}},
    ]
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    spec.setdefault("automountServiceAccountToken", False)
    spec["tolerations"] = _tolerating(spec.get("tolerations") or [])
    if avoid:
        _keep_off(spec, avoid)
    if job.nodes > 1:
        spec |= {"hostname": name, "subdomain": names_of(job)}
    return {"apiVersion": "v1", "kind": "Pod", **made}


def _options(job: Wanted, group: int, attempt: int, node: int, run: int, desired: int, address: str) -> list[str]:
    known = {
        "--groups": max(desired, group + 1),
        "--first-group": group,
        "--local-groups": 1,
        "--min-groups": job.least,
        "--shards": job.shards,
        "--nproc-per-group": job.procs,
        "--lighthouse": address,
        "--job": job_name(job, run),
        "--host": "$(POD_IP)",
        "--log-dir": f"{_LOGS}/{job.name}",
        "--credentials": _CREDENTIALS,
    }
    if job.nodes > 1:
        # The first listens where it knows that it is: its name is known only when others have been told where it runs.
        head = f"{pod_name(job, group, attempt, 0)}.{names_of(job)}.{job.namespace}.svc" if node else "$(POD_IP)"
        known |= {"--nnodes": job.nodes, "--node-rank": node, "--group-addr": f"{head}:{GROUP_PORT}"}
    return [*(word for option, value in known.items() for word in (option, str(value))), "--placed"]


def lighthouse(job: Wanted) -> Object:
    """The Deployment."""
    name = lighthouse_name(job)
    trainer = job.template["spec"]["containers"][0]
    here = f"$(POD_IP):{PORT}"
    container = {
        "name": "lighthouse",
        "image": job.lighthouse_image,
        "command": [*(trainer.get("command") or ["planaria"]), "lighthouse"],
        "args": [
            *("--bind", here, "--advertise", here, "--credentials", _CREDENTIALS),
            *("--elector", f"kubernetes:{job.namespace}/{name}", "--elector-credentials", _API),
            *("--lease", f"{job.lease:g}"),
        ],
        "env": [_pod_ip()],
        "ports": [{"name": "grpc", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": 65532,
        },
        "volumeMounts": [
            {"name": CREDENTIALS, "mountPath": _CREDENTIALS, "readOnly": True},
            {"name": "planaria-api", "mountPath": _API, "readOnly": True},
        ],
    }
    apart = {"labelSelector": {"matchLabels": labels(job, "lighthouse")}, "topologyKey": "kubernetes.io/hostname"}
    spec: Object = {
        "serviceAccountName": LIGHTHOUSE_ACCOUNT,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 65532},
        "containers": [container],
        "volumes": [_secret(job, "lighthouse.pem"), _api_token()],
        "tolerations": _tolerating([]),
        "affinity": {"podAntiAffinity": {PREFERRED: [{"weight": 100, "podAffinityTerm": apart}]}},
    }
    for field in ("priorityClassName", "imagePullSecrets"):
        if field in job.template["spec"]:
            spec[field] = job.template["spec"][field]
    asked = json.dumps([job.lighthouses, *(container[key] for key in ("image", "command", "args"))])
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**_owned(job, name, "lighthouse"), "annotations": {ASKED: asked}},
        "spec": {
            "replicas": job.lighthouses,
            "selector": {"matchLabels": labels(job, "lighthouse")},
            "template": {"metadata": {"labels": labels(job, "lighthouse")}, "spec": spec},
        },
    }


def service(job: Wanted) -> Object:
    """Whichever lighthouse it leads to says who leads."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, lighthouse_name(job), "lighthouse"),
        "spec": {
            "selector": labels(job, "lighthouse"),
            "ports": [{"name": "grpc", "port": PORT, "targetPort": PORT}],
        },
    }


def names_service(job: Wanted) -> Object:
    """Names for the pods of groups of several nodes. They are needed before a pod is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned(job, names_of(job), "trainer"),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels(job, "trainer"),
            "ports": [{"name": "group", "port": GROUP_PORT}],
        },
    }


def lease(job: Wanted) -> Object:
    """In which lighthouses agree; made here so that it goes with the job."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": _owned(job, lighthouse_name(job), "lighthouse"),
        "spec": {},
    }


def budget(job: Wanted, name: str, role: str, spec: Object) -> Object:
    """A PodDisruptionBudget, but for the version, in which clusters differ."""
    selector = {"matchLabels": labels(job, role)}
    return {"kind": "PodDisruptionBudget", "metadata": _owned(job, name, role), "spec": {**spec, "selector": selector}}


def owner(job: Wanted) -> Object:
    return {
        "apiVersion": JOBS.version,
        "kind": JOBS.kind,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _owned(job: Wanted, name: str, role: str) -> Object:
    return {"name": name, "labels": labels(job, role), "ownerReferences": [owner(job)]}


def _pod_ip() -> Object:
    return {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def _secret(job: Wanted, *keys: str) -> Object:
    items = [{"key": key, "path": key} for key in ("ca.pem", *keys)]
    secret = {"secretName": job.credentials, "items": items, "defaultMode": 0o444}  # whoever the image runs as
    return {"name": CREDENTIALS, "secret": secret}


def _api_token() -> Object:
    sources: list[Any] = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    ]
    return {"name": "planaria-api", "projected": {"sources": sources}}


def _keep_off(spec: Object, nodes: Sequence[str]) -> None:
    """Rather on any other: where groups fail everywhere, it is not for the nodes' sake."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes[:_MOST_AVOIDED]]
    affinity = spec.get("affinity") or {}
    place = affinity.get("nodeAffinity") or {}
    said = place.get(PREFERRED) or []
    place = {**place, PREFERRED: [*said, {"weight": 100, "preference": {"matchFields": fields}}]}
    spec["affinity"] = {**affinity, "nodeAffinity": place}


def _tolerating(given: list[Object]) -> list[Object]:
    said = {each.get("key") for each in given}
    ours = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _TOLERATED}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    ]
    return [*given, *(each for each in ours if each["key"] not in said)]
