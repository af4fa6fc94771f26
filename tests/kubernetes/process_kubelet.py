"""A small kubelet: nodes of a cluster whose pods are processes of this machine.

It does for a real control plane what kubelet and kube-proxy do, as far as our pods need it: registers nodes and says
that they live, runs the first container of each pod with an address of its own (127.10.x.y), mounts by writing volumes
into a directory and replacing their paths in the command line, probes, reports ends, honours deletion; leads
connections to a Service's address to one of its ready pods; and tells the names of pods of a Service without one.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import itertools
import os
import random
import re
import signal
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from planaria.agent.parent import tied
from planaria.engines.kubernetes.access import Access
from planaria.engines.kubernetes.api import NODES, PODS, SERVICES, Api, ApiError, Kind, Object
from tests.kubernetes.names import Names

_LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases")
_ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts")
_SECRETS = Kind("v1", "Secret", "secrets")
_BEAT = 3.0
# A cluster's DNS is told of pods late, and remembers for a while that there is no such name.
_NAMES_LATE = 3.0
_KEPT = ("PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS", "LANG", "TMPDIR")


class Kubelet:
    """Runs in a thread of its own from ``start`` to ``stop``; the other methods may be called from outside."""

    def __init__(self, access: Access, authority: Path, directory: Path) -> None:
        self._access, self._authority, self._directory = access, authority, directory
        directory.mkdir()
        self.names = Names(directory / "hosts")
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(200))  # every process is waited for by one
        self._thread = threading.Thread(target=self._loop.run_forever, name="kubelet")
        self._nodes: dict[str, bool] = {}  # by name: whether it lives
        self._pods: dict[str, _Pod] = {}  # by uid
        self._numbers = itertools.count(2)
        self._servers: dict[str, asyncio.Server] = {}
        self._known: dict[str, Object] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        self._thread.start()
        self._do(self._begin())

    def stop(self) -> None:
        if self._thread.is_alive():
            self._do(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def add(self, node: str, cpus: int = 4) -> None:
        self._do(self._register(node, cpus))

    def lose(self, node: str) -> None:
        """As if its power were cut: its processes are gone, and nobody says so."""

        async def lose() -> None:
            self._nodes[node] = False
            for pod in self._pods.values():
                if pod.node == node:
                    pod.lost = True
                    pod.kill(signal.SIGKILL)

        self._do(lose())

    def recover(self, node: str) -> None:
        """Its power is back: it says what became of its pods, and starts those again that are to be."""

        async def recover() -> None:
            self._nodes[node] = True
            for pod in self._pods.values():
                if pod.node == node and pod.lost:
                    self._keep(pod.recover())

        self._do(recover())

    def process(self, pod: str) -> int:
        """The pid of a pod's process. LookupError if it does not run."""
        return next(p.process.pid for p in self._pods.values() if p.name == pod and p.process and not p.ended)

    def log(self, pod: str) -> str:
        return next((p.output() for p in reversed(list(self._pods.values())) if p.name == pod), "")

    def directories(self) -> list[Path]:
        return [pod.directory for pod in self._pods.values()]

    # --- in the thread ---------------------------------------------------------------------------------------

    def _do(self, doing: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(doing, self._loop)
        return future.result(60)

    async def _begin(self) -> None:
        self.api = Api(self._access)
        for doing in (self._beat(), self._follow_pods(), self._follow_services()):
            self._keep(doing)

    def _keep(self, doing: Any) -> None:
        task = asyncio.ensure_future(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for pod in self._pods.values():
            pod.kill(signal.SIGKILL)
        await asyncio.gather(*tasks, return_exceptions=True)
        for pod in self._pods.values():
            if pod.process is not None:
                await asyncio.to_thread(pod.process.wait)
        for server in self._servers.values():
            server.close()
        await self.api.close()

    async def _register(self, name: str, cpus: int) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        }
        await self.api.create(NODES, "", body)
        size = {"cpu": str(cpus), "memory": "64Gi", "pods": "110", "ephemeral-storage": "100Gi"}
        await self.api.patch(NODES, "", name, {"status": {"capacity": size, "allocatable": size}}, "status")
        self._nodes[name] = True
        await self._say_alive(name)

    async def _beat(self) -> None:
        while True:
            for name in [name for name, lives in self._nodes.items() if lives]:
                with contextlib.suppress(ApiError):
                    await self._say_alive(name)
            await asyncio.sleep(_BEAT)

    async def _say_alive(self, name: str) -> None:
        now = _now()
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        await self.api.patch(NODES, "", name, {"status": {"conditions": [ready]}}, "status")
        lease = {
            "apiVersion": _LEASES.version,
            "kind": "Lease",
            "metadata": {"name": name},
            "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now[:-1] + ".000000Z"},
        }
        try:
            await self.api.patch(_LEASES, "kube-node-lease", name, {"spec": lease["spec"]})
        except ApiError:
            await self.api.create(_LEASES, "kube-node-lease", lease)

    async def _follow_pods(self) -> None:
        async for pod in _changes(self.api, PODS):
            meta = pod["metadata"]
            if pod["_gone"]:
                self._known.pop(meta["uid"], None)
                if (gone := self._pods.get(meta["uid"])) is not None:
                    gone.kill(signal.SIGKILL)
                continue
            self._known[meta["uid"]] = pod
            node = pod["spec"].get("nodeName")
            if not self._nodes.get(node or "", False):
                continue
            ours = self._pods.get(meta["uid"])
            if ours is None and pod.get("status", {}).get("phase") == "Pending":
                number = next(self._numbers)
                ours = _Pod(self, pod, f"127.10.{number // 250}.{number % 250 + 2}", self._directory / meta["name"])
                self._pods[meta["uid"]] = ours
                self._keep(ours.run())
            if ours is not None and meta.get("deletionTimestamp"):
                ours.end(int(meta.get("deletionGracePeriodSeconds", 30)))
            elif ours is None and meta.get("deletionTimestamp"):
                self._keep(self.remove(pod))

    async def remove(self, pod: Object) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(ApiError):
            await self.api.delete(PODS, meta["namespace"], meta["name"], meta["uid"], 0)

    async def _follow_services(self) -> None:
        async for service in _changes(self.api, SERVICES):
            uid, spec = service["metadata"]["uid"], service["spec"]
            if service["_gone"]:
                if uid in self._servers:
                    self._servers.pop(uid).close()
            elif uid not in self._servers and spec.get("selector") and spec.get("clusterIP", "None") != "None":
                port = spec["ports"][0]
                self._servers[uid] = await asyncio.start_server(
                    lambda r, w, s=service, p=port: self._lead(s, int(p["targetPort"]), r, w),
                    spec["clusterIP"],
                    int(port["port"]),
                )

    async def _lead(
        self, service: Object, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One connection, to a ready pod."""
        wanted, namespace = service["spec"]["selector"].items(), service["metadata"]["namespace"]
        ready = [
            pod.address
            for pod in self._pods.values()
            if pod.ready and pod.namespace == namespace and wanted <= pod.labels.items() and not pod.lost
        ]
        try:
            there = await asyncio.open_connection(random.choice(ready), port)
        except (OSError, IndexError):
            writer.close()
            return
        await asyncio.gather(_pump(reader, there[1]), _pump(there[0], writer))


class _Pod:
    def __init__(self, kubelet: Kubelet, body: Object, address: str, directory: Path) -> None:
        self._kubelet, self._body, self.address = kubelet, body, address
        meta = body["metadata"]
        self.name, self.namespace, self.node = meta["name"], meta["namespace"], body["spec"]["nodeName"]
        self.labels = meta.get("labels") or {}
        self.directory = directory.parent / f"{meta['name']}-{meta['uid'][:6]}"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = self.lost = self.ended = False
        self._ending = self._named = False
        self._restarts = 0

    def kill(self, signum: int) -> None:
        """All of it, as a container's end takes all of its processes."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if signum == signal.SIGKILL else os.kill)(self.process.pid, signum)

    def end(self, grace: int) -> None:
        if self._ending or self.lost:
            return
        self._ending = True
        self.kill(signal.SIGTERM)

        def impatient() -> None:
            self.kill(signal.SIGKILL)

        asyncio.get_running_loop().call_later(grace, impatient)
        if self.process is None or self.ended:
            self._kubelet._keep(self._kubelet.remove(self._body))

    async def recover(self) -> None:
        self.lost = self.ready = False
        try:
            there = await self._kubelet.api.get(PODS, self.namespace, self.name)
        except ApiError:
            return  # nobody waits for news of it
        if there["metadata"]["uid"] != self._body["metadata"]["uid"]:
            return
        if there["metadata"].get("deletionTimestamp"):
            self.ended = True
            await self._kubelet.remove(self._body)
        elif self._body["spec"].get("restartPolicy", "Always") == "Never":
            self.ended = True
            over = {"exitCode": 137, "startedAt": _now(), "finishedAt": _now(), "reason": "Error"}
            await self._report("Failed", {"terminated": over})
        else:
            await self.run()

    def output(self) -> str:
        log = self.directory / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    async def run(self) -> None:
        spec = self._body["spec"]
        container = spec["containers"][0]
        while True:
            try:
                command, environ = await self._prepare(container)
            except (ApiError, LookupError) as error:
                why = {"reason": "CreateContainerConfigError", "message": str(error)}
                await self._report("Pending", {"waiting": why})
                await asyncio.sleep(1)
                if self._ending:
                    return
                continue
            begun = _now()
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    tied(command),
                    env=environ,
                    cwd=self.directory,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            if self._ending:
                self.kill(signal.SIGTERM)
            await self._report("Running", {"running": {"startedAt": begun}})
            probing = asyncio.ensure_future(self._probe(container, begun))
            code = await asyncio.to_thread(self.process.wait)
            probing.cancel()
            self.ready = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            if self.lost:
                return
            over = {
                "exitCode": code if code >= 0 else 128 - code,
                "startedAt": begun,
                "finishedAt": _now(),
                "reason": "Completed" if code == 0 else "Error",
            }
            if container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and code != 0:
                over["message"] = self.output()[-2000:]
            if spec.get("restartPolicy", "Always") == "Never" or self._ending:
                self.ended = True
                await self._report("Succeeded" if code == 0 else "Failed", {"terminated": over})
                if self._ending:
                    await self._kubelet.remove(self._body)
                return
            self._restarts += 1
            await self._report("Running", {"waiting": {"reason": "CrashLoopBackOff"}})
            await asyncio.sleep(min(2**self._restarts, 30))

    async def _probe(self, container: Object, begun: str) -> None:
        probe = container.get("readinessProbe")
        while probe is not None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(self.address, int(probe["tcpSocket"]["port"]))
                writer.close()
                break
            await asyncio.sleep(0.2)
        self.ready = True
        await self._report("Running", {"running": {"startedAt": begun}})

    async def _report(self, phase: str, state: Object) -> None:
        if self.lost:
            return
        ready = "True" if self.ready else "False"
        container = {
            "name": self._body["spec"]["containers"][0]["name"],
            "image": self._body["spec"]["containers"][0]["image"],
            "imageID": "",
            "ready": self.ready,
            "restartCount": self._restarts,
            "state": state,
        }
        conditions = [{"type": kind, "status": ready} for kind in ("Ready", "ContainersReady")]
        conditions.append({"type": "PodScheduled", "status": "True"})
        status = {"phase": phase, "podIP": self.address, "podIPs": [{"ip": self.address}], "conditions": conditions}
        status |= {"containerStatuses": [container], "startTime": _now()}
        while True:
            try:
                await self._kubelet.api.patch(PODS, self.namespace, self.name, {"status": status}, "status")
                await self._tell_name()
                return
            except ApiError as error:
                if error.status in (404, 409, 422):
                    return
                await asyncio.sleep(0.5)

    async def _tell_name(self) -> None:
        """As a Service without an address does, once it has been told where the pod runs."""
        spec = self._body["spec"]
        if self._named or "subdomain" not in spec:
            return
        found = await self._kubelet.api.get(SERVICES, self.namespace, spec["subdomain"])
        service = found["spec"]
        whole = self.ready or service.get("publishNotReadyAddresses")
        if service["clusterIP"] == "None" and whole and service["selector"].items() <= self.labels.items():
            name = f"{spec['hostname']}.{spec['subdomain']}.{self.namespace}.svc"
            told = partial(self._kubelet.names.tell, self.address, name, f"{name}.cluster.local")
            asyncio.get_running_loop().call_later(_NAMES_LATE, told)
            self._named = True

    async def _prepare(self, container: Object) -> tuple[list[str], dict[str, str]]:
        self.directory.mkdir(parents=True, exist_ok=True)
        places = {}
        for volume in self._body["spec"].get("volumes") or ():
            places[volume["name"]] = await self._volume(volume)
        mounts = {m["mountPath"]: str(places[m["name"]]) for m in container.get("volumeMounts") or ()}
        environ = {key: os.environ[key] for key in _KEPT if key in os.environ}
        server = self._kubelet._access.server
        host, port = server.removeprefix("https://").rsplit(":", 1)
        environ |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        for each in container.get("env") or ():
            if "value" in each:
                environ[each["name"]] = self._placed(each["value"], mounts, environ)
            elif each["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP":
                environ[each["name"]] = self.address
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        command = [self._placed(word, mounts, environ) for word in words]
        return (self._kubelet.names.knowing(command) if "subdomain" in self._body["spec"] else command), environ

    @staticmethod
    def _placed(text: str, mounts: dict[str, str], environ: dict[str, str]) -> str:
        text = re.sub(r"\$\((\w+)\)", lambda m: environ.get(m[1], m[0]), text)
        for path in sorted(mounts, key=len, reverse=True):
            if text == path or text.startswith(path + "/"):
                return mounts[path] + text[len(path) :]
        return text

    async def _volume(self, volume: Object) -> Path:
        place = self.directory / volume["name"]
        place.mkdir(exist_ok=True)
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "secret" in volume:
            found = await self._kubelet.api.get(_SECRETS, self.namespace, volume["secret"]["secretName"])
            for item in volume["secret"].get("items") or [{"key": k, "path": k} for k in found["data"]]:
                (place / item["path"]).write_bytes(base64.b64decode(found["data"][item["key"]]))
        for source in volume.get("projected", {}).get("sources") or ():
            if "serviceAccountToken" in source:
                account = self._body["spec"]["serviceAccountName"]
                body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
                path = _ACCOUNTS.path(self.namespace, account, "token")
                made = await self._kubelet.api._call("POST", path, body)
                (place / source["serviceAccountToken"]["path"]).write_text(made["status"]["token"])
            elif source.get("configMap", {}).get("name") == "kube-root-ca.crt":
                (place / "ca.crt").write_bytes(self._kubelet._authority.read_bytes())
        return place


async def _changes(api: Api, kind: Kind) -> Any:
    """Objects of all namespaces, as they are and as they change; with "_gone"."""
    everywhere = Kind(kind.version, kind.kind, kind.plural, namespaced=False)
    while True:
        try:
            found = await api.list(everywhere, "")
            for item in found["items"]:
                yield {**item, "_gone": False}
            version = found["metadata"]["resourceVersion"]
            while True:
                async for change in api.watch(everywhere, "", version):
                    if change["type"] == "ERROR":
                        raise ApiError(410, "Gone", "")
                    version = change["object"]["metadata"]["resourceVersion"]
                    if change["type"] != "BOOKMARK":
                        yield {**change["object"], "_gone": change["type"] == "DELETED"}
        except ApiError:
            await asyncio.sleep(0.5)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
