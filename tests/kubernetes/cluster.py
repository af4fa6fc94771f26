"""A Kubernetes cluster on this machine for tests: real etcd, API server, scheduler and controller manager; pods are
processes."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import yaml

from planaria.agent.parent import tied
from planaria.engines.kubernetes.access import find_access
from planaria.engines.kubernetes.api import JOBS, PODS, Kind, Object
from planaria.engines.kubernetes.crd import definition
from planaria.engines.kubernetes.deploy import cluster_manifests, manifests
from planaria.wire import authority
from tests.kubernetes.process_kubelet import Kubelet
from tests.ports import free_ports
from tools.kube_control_plane import binaries, etcd

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tests" / "e2e" / "scripts" / "train.py"
ADMIN = "an-admin-of-a-cluster-for-tests"
# Hangs are what these tests look for: far beyond what anything here takes on a loaded machine.
PATIENCE = 300.0
# Of a job to which things happen: half of them are made at once, and the others take some four seconds each before the
# test lets it come to its end.
STEPS = 200
# Of no other use on this machine: the addresses of Services.
_SERVICES = "127.77.0.0/24"


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kubeconfig = directory / "kubeconfig"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._client: httpx2.Client | None = None

    # --- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        where, here = binaries(), self.directory
        clients, peer, port = free_ports(3)
        url = f"http://127.0.0.1:{clients}"
        peers = f"http://127.0.0.1:{peer}"
        etcd_flags = ["--data-dir", str(here / "etcd"), "--unsafe-no-fsync", "--listen-client-urls", url]
        etcd_flags += ["--advertise-client-urls", url, "--listen-peer-urls", peers]
        etcd_flags += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        self.run("etcd", [str(etcd()), *etcd_flags])
        key = here / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (here / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        flags = {
            "etcd-servers": url,
            "cert-dir": here / "certs",
            "secure-port": port,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "endpoint-reconciler-type": "none",
            "token-auth-file": here / "tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-signing-key-file": key,
            "service-account-key-file": key,
            "service-cluster-ip-range": _SERVICES,
            "disable-admission-plugins": "ServiceAccount",
        }
        self.run("apiserver", [str(where / "kube-apiserver"), *(f"--{k}={v}" for k, v in flags.items())])
        self.authority = here / "certs" / "apiserver.crt"
        self.server = f"https://127.0.0.1:{port}"
        self.until(self.authority.exists, "a certificate of the API server")
        self.write_kubeconfig(self.kubeconfig)
        self._client = httpx2.Client(
            base_url=self.server,
            verify=find_access(self.kubeconfig).context,
            headers={"Authorization": f"Bearer {ADMIN}"},
            timeout=30,
        )
        self.until(self._is_up, "the API server")
        common = ["--kubeconfig", str(self.kubeconfig), "--leader-elect=false", "--port=0"]
        self.run("scheduler", [str(where / "kube-scheduler"), *common, "--secure-port=0"])
        more = [f"--service-account-private-key-file={key}", f"--root-ca-file={self.authority}", "--secure-port=0"]
        more += ["--node-monitor-grace-period=20s"]
        self.run("manager", [str(where / "kube-controller-manager"), *common, *more])
        self.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition())
        self.until(lambda: self.try_call("GET", JOBS.path("default")), "the custom resource")
        self.kubelet = Kubelet(find_access(self.kubeconfig), self.authority, here / "pods")
        self.kubelet.start()

    def stop(self) -> None:
        if hasattr(self, "kubelet"):
            self.kubelet.stop()
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._client is not None:
            self._client.close()

    def run(self, name: str, command: list[str], environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A process of its own, that ends with this one. Its output is in NAME.log."""
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                tied(command),
                stdout=log,
                stderr=log,
                env=environ,
                cwd=self.directory,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def _is_up(self) -> bool:
        assert self._client is not None
        try:
            return self._client.get("/readyz").status_code == 200
        except httpx2.HTTPError:
            return False

    def write_kubeconfig(self, path: Path, namespace: str = "default", token: str = ADMIN) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "clusters": [
                {"name": "test", "cluster": {"server": self.server, "certificate-authority": str(self.authority)}}
            ],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(config))

    # --- the API ---------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Object:
        assert self._client is not None
        data = None if body is None else json.dumps(body)
        answer = self._client.request(method, path, content=data, headers={"Content-Type": kind})
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text}"
        found: Object = answer.json()
        return found

    def post_unless(self, status: int, path: str, body: Object) -> bool:
        """False if it is refused with this status."""
        assert self._client is not None
        answer = self._client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code < 300 or answer.status_code == status, f"{path}: {answer.text}"
        return answer.status_code != status

    def try_call(self, method: str, path: str) -> Object | None:
        try:
            return self.call(method, path)
        except (AssertionError, httpx2.HTTPError):
            return None

    def merge(self, path: str, body: Object) -> Object:
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def until(self, met: Callable[[], Any], what: str | Callable[[], str]) -> Any:
        """Wait until ``met()`` is true, and return it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := met()):
            assert time.monotonic() < deadline, f"still waiting for {what if isinstance(what, str) else what()}"
            time.sleep(0.05)
        return found

    def space(self, name: str) -> Space:
        return Space(self, name)


class Space:
    """A namespace with an operator in it, under its own account."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.directory = cluster.directory / name
        self.directory.mkdir()
        self.release = self.directory / "release"
        self.operators: list[subprocess.Popen[bytes]] = []
        cluster.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        for body in [*cluster_manifests(name), *manifests(name, "none")]:
            if body["kind"] in ("CustomResourceDefinition", "Deployment", "Namespace"):
                continue
            group = "api" if body["apiVersion"] == "v1" else "apis"
            plural = body["kind"].lower() + "s"
            place = "" if body["kind"].startswith("Cluster") else f"/namespaces/{name}"
            cluster.call("POST", f"/{group}/{body['apiVersion']}{place}/{plural}", body)
        site = self.directory / "site"
        authority.init(site, 30)
        data = {p.name: base64.b64encode(p.read_bytes()).decode() for p in site.glob("*.pem")}
        secret = {"metadata": {"name": "planaria-credentials"}, "data": data}
        cluster.call("POST", f"/api/v1/namespaces/{name}/secrets", secret)
        token = cluster.call(
            "POST",
            f"/api/v1/namespaces/{name}/serviceaccounts/planaria-operator/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
        )["status"]["token"]
        self.kubeconfig = self.directory / "kubeconfig"
        cluster.write_kubeconfig(self.kubeconfig, name, token)

    def operate(self) -> subprocess.Popen[bytes]:
        """Start an operator."""
        command = [sys.executable, "-m", "planaria", "operator", "--kubeconfig", str(self.kubeconfig)]
        command += ["--credentials", str(self.directory / "site"), "--lease", "8"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.operators.append(self.cluster.run(f"{self.name}-operator", command, environ))
        return self.operators[-1]

    def close(self) -> None:
        for operator in self.operators:
            if operator.poll() is None:
                operator.terminate()
            operator.wait()
        self.release.touch()  # who is asked to leave does so after a step
        jobs = JOBS.path(self.name)
        for job in self.cluster.call("GET", jobs)["items"]:
            self.cluster.call("DELETE", f"{jobs}/{job['metadata']['name']}")
        self.until(lambda: not self.pods(), "the end of all pods")

    # --- jobs ------------------------------------------------------------------------------------------------

    def job(self, name: str, groups: int = 2, steps: int = STEPS, submit: bool = True, **more: Any) -> Object:
        """A small training, which hardly gets on in its second half before ``release`` is there."""
        hold = ["--hold", str(self.release), "--hold-for", "1.5"]
        spec: Object = {
            "replicaGroups": {"desired": groups, "min": 1},
            "shards": 6,
            "template": {
                "spec": {
                    "terminationGracePeriodSeconds": 60,
                    "containers": [
                        {
                            "name": "trainer",
                            "image": "none",
                            "command": [sys.executable, "-m", "planaria"],
                            "args": ["--quiet", str(TRAIN), "--steps", str(steps), *hold],
                            "env": [
                                {"name": "PYTHONPATH", "value": str(ROOT)},
                                {"name": "OMP_NUM_THREADS", "value": "1"},
                            ],
                            "resources": {"requests": {"cpu": "1"}},
                        }
                    ],
                }
            },
        }
        for key, value in more.items():
            if isinstance(value, dict) and isinstance(spec.get(key), dict):
                spec[key].update(value)
            else:
                spec[key] = value
        body = {"apiVersion": JOBS.version, "kind": JOBS.kind, "metadata": {"name": name}, "spec": spec}
        return self.submit(body) if submit else body

    def submit(self, body: Object) -> Object:
        return self.cluster.call("POST", JOBS.path(self.name), body)

    def found(self, name: str) -> Object:
        return self.cluster.call("GET", JOBS.path(self.name, name))

    def status(self, name: str) -> Object:
        status: Object = self.found(name).get("status") or {}
        return status

    def change(self, name: str, spec: Object) -> None:
        self.cluster.merge(JOBS.path(self.name, name), {"spec": spec})

    def pods(self, selector: str = "") -> list[Object]:
        path = PODS.path(self.name) + (f"?labelSelector={selector}" if selector else "")
        items: list[Object] = self.cluster.call("GET", path)["items"]
        return items

    def pod_of(self, name: str, group: int, node: int = 0) -> Object | None:
        """The newest pod of a group, on this one of its nodes, if it runs."""
        pods = self.pods(f"planaria.dev/job={name},planaria.dev/group={group},planaria.dev/node={node}")
        pods = [
            p
            for p in pods
            if p.get("status", {}).get("phase") == "Running" and not p["metadata"].get("deletionTimestamp")
        ]
        return max(pods, key=lambda p: int(p["metadata"]["labels"]["planaria.dev/attempt"]), default=None)

    def evict(self, pod: str) -> bool:
        """As kubectl drain does; whether it was allowed."""
        path = PODS.path(self.name, pod, "eviction")
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.name}}
        return self.cluster.post_unless(429, path, body)

    def events(self, reason: str) -> list[str]:
        items = self.cluster.call("GET", f"/api/v1/namespaces/{self.name}/events")["items"]
        return [item["message"] for item in items if item["reason"] == reason]

    def list(self, kind: Kind) -> list[Object]:
        items: list[Object] = self.cluster.call("GET", kind.path(self.name))["items"]
        return items

    def until(self, met: Callable[[], Any], what: str) -> Any:
        return self.cluster.until(met, lambda: f"{what}\n{self.story()}")

    def at_work(self, name: str, groups: int, beyond: int = 0) -> Object:
        """Wait until so many groups are in the quorum, and at least one step beyond ``beyond`` is made."""

        def met() -> Object | None:
            status = self.status(name)
            good = (
                status.get("groupsReady") == f"{groups}/{groups}" and status.get("quorum", {}).get("groups") == groups
            )
            return status if good and status.get("step", 0) > beyond else None

        found: Object = self.until(met, f"{groups} groups of {name} at work")
        return found

    def phase(self, name: str, phase: str) -> Object:
        found: Object = self.until(
            lambda: s if (s := self.status(name)).get("phase") == phase else None, f"{name} to be {phase}"
        )
        return found

    def digests(self, name: str) -> set[str]:
        """Of the final states of all groups that finished."""
        found = self.cluster.directory.glob(f"pods/{name}-rg*/planaria-logs/{name}/rg*/i*/result.json")
        return {json.loads(path.read_text())["digest"] for path in found}

    def story(self) -> str:
        """What there is, for people who look at a failure."""
        log = self.cluster.directory / f"{self.name}-operator.log"
        lines = log.read_text(errors="replace").splitlines()[-25:] if log.exists() else []
        for job in self.cluster.call("GET", JOBS.path(self.name))["items"]:
            lines.append(json.dumps(job.get("status"), indent=1))
        for pod in self.pods():
            name = pod["metadata"]["name"]
            lines.append(f"--- {name} {pod['spec'].get('nodeName')} {pod.get('status', {}).get('phase')}")
            lines += self.cluster.kubelet.log(name).splitlines()[-12:]
        return "\n".join(lines)
