"""``planaria run --engine k8s``: submit a FaultTolerantJob, follow its groups, and end with the job's exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
import yaml

from planaria.cli import engine as engines
from planaria.cli.options import RunOptions
from planaria.core.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from planaria.engines.kubernetes import crd
from planaria.engines.kubernetes.access import find_access
from planaria.engines.kubernetes.api import JOBS, PODS, Api, ApiError, Object
from planaria.engines.kubernetes.observe import trainer
from planaria.engines.kubernetes.resources import JOB, ROLE
from planaria.errors import UsageError

# What the resource says in fields of its own, or the operator says to every pod.
_IN_FIELDS = (
    "groups",
    "shards",
    "nproc_per_group",
    "nnodes",
    "min_groups",
    "max_replacements",
    "restart_backoff",
    "job",
    "log_dir",
    "image",
    "namespace",
    "pod_template",
    "kubeconfig",
    "live",
    "tee",
    "credentials",
    "token_file",
)
# People follow lines as they come; a second is no wait for a status.
_LOOK = 1.0


def run(options: RunOptions, ctx: typer.Context) -> int:
    """The exit code of the job. Ctrl-C stops following, and the job goes on."""
    body = resource(options, ctx)
    if ctx.params["dry_run"]:
        print(yaml.safe_dump(body, sort_keys=False), end="")
        return EXIT_OK
    access = find_access(ctx.params.get("kubeconfig"))
    namespace = ctx.params.get("namespace") or access.namespace
    name = body["metadata"]["name"]
    try:
        return asyncio.run(_submit(Api(access), namespace, body))
    except ApiError as error:
        if error.status == 404 and error.reason != "NotFound":
            raise UsageError("the cluster knows no FaultTolerantJobs: kubectl apply -f deploy/planaria.yaml") from None
        raise UsageError(f"job {name}: {error}") from None
    except KeyboardInterrupt:
        print(f"planaria: job {name} goes on; kubectl delete ftj {name} ends it", file=sys.stderr)
        return EXIT_INTERRUPTED


def resource(options: RunOptions, ctx: typer.Context) -> Object:
    """The FaultTolerantJob. UsageError for what cannot work."""
    name = options.job.lower().replace("_", "-").replace(".", "-")
    name = (name if name[:1].isalpha() else f"job-{name}")[: crd.LONGEST_NAME].rstrip("-")
    image, given = ctx.params.get("image"), ctx.params.get("pod_template")
    template = _template(given) if given is not None else {"spec": {"containers": [{"name": "trainer"}]}}
    container = crd.container(template)
    if image:
        container["image"] = image
    if not container.get("image"):
        raise UsageError("--engine k8s: give the --image in which the script is, or a --pod-template that names one")
    words = engines.words_of(ctx, _IN_FIELDS)
    # Kubernetes would put in variables of the container for $(NAME).
    container["args"] = [word.replace("$", "$$") for word in (*words, options.script, *options.args)]
    body: Object = {
        "apiVersion": JOBS.version,
        "kind": JOBS.kind,
        "metadata": {"name": name},
        "spec": {
            "replicaGroups": {"desired": options.groups, "min": options.min_groups},
            "shards": options.shards or options.groups,
            "nodesPerGroup": options.nnodes,
            "procsPerNode": options.nproc_per_group,
            "maxReplacements": options.max_replacements,
            "restartBackoffSeconds": options.restart_backoff,
            "template": template,
        },
    }
    meta = {**body["metadata"], "namespace": "", "uid": ""}
    crd.read({**body, "metadata": meta})
    return body


def _template(path: Path) -> Object:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--pod-template {path}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise UsageError(f"--pod-template {path}: it must be a PodTemplateSpec, with a spec")
    return {key: found[key] for key in ("metadata", "spec") if key in found}


async def _submit(api: Api, namespace: str, body: Object) -> int:
    try:
        name = body["metadata"]["name"]
        await api.create(JOBS, namespace, body)
        print(f"planaria: job {name} is submitted to namespace {namespace}", file=sys.stderr)
        return await _follow(api, namespace, name)
    finally:
        await api.close()


async def _follow(api: Api, namespace: str, name: str) -> int:
    """Print what its pods say and how it goes, until it is over."""
    following: dict[str, asyncio.Task[None]] = {}
    told = ""
    try:
        while True:
            try:
                status: dict[str, Any] = (await api.get(JOBS, namespace, name)).get("status") or {}
                pods = (await api.list(PODS, namespace, f"{JOB}={name},{ROLE}=trainer"))["items"]
                line = _line(status)
            except ApiError as error:
                if not error.passing:
                    raise
                status, pods, line = {}, [], f"{error}; the job goes on, and so does this"
            if line != told:
                told = line
                print(f"[planaria] {line}", file=sys.stderr)
            for pod in pods:
                if pod["metadata"]["uid"] not in following and pod.get("status", {}).get("phase") != "Pending":
                    log = _log(api, namespace, pod["metadata"]["name"], trainer(pod), print)
                    following[pod["metadata"]["uid"]] = asyncio.ensure_future(log)
            if (outcome := status.get("outcome")) is not None:
                await asyncio.wait(
                    [*following.values()] or [asyncio.ensure_future(asyncio.sleep(0))], timeout=5 * _LOOK
                )
                print(f"planaria: job {name}: {outcome['reason']} (step {status.get('step')})", file=sys.stderr)
                return int(outcome["exitCode"])
            await asyncio.sleep(_LOOK)
    except ApiError as error:
        if error.status == 404:
            print(f"planaria: job {name} was deleted", file=sys.stderr)
            return EXIT_FAILED
        raise
    finally:
        for task in following.values():
            task.cancel()
        await asyncio.gather(*following.values(), return_exceptions=True)


async def _log(api: Api, namespace: str, pod: str, container: str, say: Callable[[str], None]) -> None:
    with suppress(ApiError):  # its node may be gone, and its log with it
        async for line in api.log(namespace, pod, container):
            say(line)


def _line(status: dict[str, Any]) -> str:
    if not status:
        return "waiting for the operator"
    more = f": {status['message']}" if status.get("message") else ""
    quorum = f", quorum {status['quorum']['id']}" if status.get("quorum") else ""
    return f"{status.get('phase')}, groups {status.get('groupsReady')}{quorum}{more}"
