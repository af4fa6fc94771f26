"""What a cluster needs for the operator: accounts with no more rights than they use, and the operator itself.

The one source of the manifests in deploy/: ``python -m planaria.engines.kubernetes.deploy`` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from planaria.engines.kubernetes.api import JOBS, Object
from planaria.engines.kubernetes.crd import GROUP, definition
from planaria.engines.kubernetes.leader import NAME
from planaria.engines.kubernetes.resources import LIGHTHOUSE_ACCOUNT

_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 65532,
}


def cluster_manifests(namespace: str) -> list[Object]:
    """What is not in a namespace: the definition, and the operator's right to see nodes (which it can do without)."""
    see = [_rule("", ["nodes"], "get", "list", "watch")]
    name = f"{NAME}-nodes-{namespace}"  # no other release of the chart may have made it
    return [
        definition(),
        _rbac("ClusterRole", name, rules=see),
        _rbac("ClusterRoleBinding", name, **_bound("ClusterRole", name, NAME, namespace)),
    ]


def manifests(namespace: str, image: str) -> list[Object]:
    operator = [
        _rule(GROUP, [JOBS.plural], "get", "list", "watch", "patch"),
        _rule(GROUP, [f"{JOBS.plural}/status"], "patch"),
        # Names of the owner in what is made from it: where that is checked, it takes this right.
        _rule(GROUP, [f"{JOBS.plural}/finalizers"], "update"),
        _rule("", ["pods", "services"], "get", "list", "watch", "create", "delete"),
        _rule("apps", ["deployments"], "get", "list", "watch", "create", "patch", "delete"),
        _rule("policy", ["poddisruptionbudgets"], "get", "list", "watch", "create", "patch", "delete"),
        _rule("", ["events"], "create"),
        _rule("coordination.k8s.io", ["leases"], "get", "create"),
        {**_rule("coordination.k8s.io", ["leases"], "update"), "resourceNames": [NAME]},
    ]
    lighthouse = [_rule("coordination.k8s.io", ["leases"], "get", "create", "update")]
    made: list[Object] = []
    for name, rules in ((NAME, operator), (LIGHTHOUSE_ACCOUNT, lighthouse)):
        made += [
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
            _rbac("Role", name, namespace, rules=rules),
            _rbac("RoleBinding", name, namespace, **_bound("Role", name, name, namespace)),
        ]
    return [*made, _operator(namespace, image)]


def _operator(namespace: str, image: str) -> Object:
    labels = {"app.kubernetes.io/name": NAME}
    container = {
        "name": "operator",
        "image": image,
        "command": ["planaria", "operator"],
        "args": ["--credentials", "/var/run/planaria/credentials"],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _RESTRICTED,
        "volumeMounts": [{"name": "credentials", "mountPath": "/var/run/planaria/credentials", "readOnly": True}],
    }
    items = [{"key": key, "path": key} for key in ("ca.pem", "operator.pem")]
    secret = {"secretName": "planaria-credentials", "items": items, "defaultMode": 0o440}
    spec = {
        "serviceAccountName": NAME,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, "fsGroup": 65532},
        "containers": [container],
        "volumes": [{"name": "credentials", "secret": secret}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME, "namespace": namespace, "labels": labels},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def _rule(group: str, resources: list[str], *verbs: str) -> Object:
    return {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}


def _rbac(kind: str, name: str, namespace: str = "", **more: Any) -> Object:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name, **place}, **more}


def _bound(kind: str, role: str, account: str, namespace: str) -> dict[str, Any]:
    return {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }


def plain(namespace: str, image: str) -> str:
    """All of it, for kubectl apply -f."""
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    return yaml.safe_dump_all([space, *cluster_manifests(namespace), *manifests(namespace, image)], sort_keys=False)


def chart() -> dict[str, str]:
    """The Helm chart, by file. Helm installs what is in crds/ before the rest, and never deletes it."""
    space, image = "{{ .Release.Namespace }}", "{{ .Values.image }}"
    nodes = yaml.safe_dump_all(cluster_manifests(space)[1:], sort_keys=False)
    rest = yaml.safe_dump_all(manifests(space, image), sort_keys=False)
    return {
        "Chart.yaml": yaml.safe_dump(
            {
                "apiVersion": "v2",
                "name": "planaria",
                "description": "Training that goes on when machines die: the operator of FaultTolerantJobs",
                "type": "application",
                "version": "0.1.0",
            },
            sort_keys=False,
        ),
        "values.yaml": "# An image in which planaria[k8s] is installed.\nimage: planaria:0.1.0\n"
        "# Watch nodes, to leave those that are cordoned: takes a ClusterRole that may read nodes.\nnodes: true\n",
        "crds/faulttolerantjobs.yaml": yaml.safe_dump(definition(), sort_keys=False),
        "templates/nodes.yaml": f"{{{{- if .Values.nodes }}}}\n{nodes}{{{{- end }}}}\n",
        "templates/operator.yaml": rest.replace(
            "        - /var/run/planaria/credentials\n",
            "        - /var/run/planaria/credentials\n        {{- if not .Values.nodes }}\n        - --no-nodes\n"
            "        {{- end }}\n",
            1,
        ),
    }


def main() -> None:
    root = Path(__file__).parents[3] / "deploy"
    for name, text in {"planaria.yaml": plain("planaria", "planaria:0.1.0"), **_under("chart", chart())}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _under(directory: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{directory}/{name}": text for name, text in files.items()}


if __name__ == "__main__":
    main()
