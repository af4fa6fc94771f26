"""How long a group is missing that was killed, on each engine: from SIGKILL to the planned quorum with it.

    python bench/replacement.py --engines local,slurm,k8s,ray --kills 5

local: the group's only process; slurm, k8s and ray: the agent of the group and with it all that the job, pod or actor
is, so that the scheduler has to give it a place again. All of them are real, with all nodes on this machine, as in
make test-slurm, test-k8s and test-ray (which fetch what this needs). Times are those of the events that the
agent of another group records, on the one clock that there is here. The steps take a tenth of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from tests.e2e.harness import Run
from tests.kubernetes.cluster import Cluster as KubeCluster
from tests.slurm.cluster import Cluster as SlurmCluster
from tests.slurm.supervised import Supervised

GROUPS, VICTIM = 3, 1
STEPS = ("--steps", "8000", "--hold-for", "0.1")
PATIENCE = 180.0
_QUORUMS = ("quorum", "plan")  # after a loss, and a planned one: it is taken after the commit that follows


@dataclass
class Job:
    events: Callable[[], Path]  # of the agent of a group that is not hurt
    kill: Callable[[], None]


@contextlib.contextmanager
def local(directory: Path) -> Iterator[Job]:
    with Run(directory / "run", *STEPS, groups=GROUPS) as run:
        run.settled(GROUPS)
        yield Job(lambda: directory / "run" / "events.jsonl", lambda: _signal(run))


def _signal(run: Run) -> None:
    run.watch.poll()
    run.signal(VICTIM)


@contextlib.contextmanager
def slurm(directory: Path) -> Iterator[Job]:
    options = ("--groups", str(GROUPS), "--sbatch", "cpus-per-task=2", "--quiet")
    with (
        SlurmCluster(directory) as cluster,
        Supervised(cluster, directory / "run", "r", *STEPS, options=options) as run,
    ):
        run.start()
        run.quorum(set(range(GROUPS)))
        events = directory / "run" / "rg0-i0" / "events.jsonl"
        yield Job(lambda: events, lambda: os.kill(run.agent_of(run.job_of(VICTIM)[0]), signal.SIGKILL))


@contextlib.contextmanager
def ray(directory: Path) -> Iterator[Job]:
    # Where Ray is not installed the other engines are measured all the same.
    from tests.ray.cluster import Cluster as RayCluster
    from tests.ray.supervised import Supervised as OnRay

    # Ray has sockets in its directory, and their names may not be long.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place,
        RayCluster(Path(place)) as its,
    ):
        for _ in range(3):
            its.add()
        options = ("--groups", str(GROUPS), "--quiet")
        with OnRay(its, directory / "run", "r", *STEPS, options=options) as run:
            run.start()
            run.quorum(set(range(GROUPS)))
            events = directory / "run" / "rg0-i0" / "events.jsonl"
            yield Job(lambda: events, lambda: os.kill(run.agent(run.life(VICTIM)), signal.SIGKILL))


@contextlib.contextmanager
def k8s(directory: Path) -> Iterator[Job]:
    cluster = KubeCluster(directory)
    try:
        cluster.start()
        for node in ("n1", "n2", "n3"):
            cluster.kubelet.add(node)
        space = cluster.space("r")
        space.operate()
        body = space.job("r", groups=GROUPS, submit=False)
        container = body["spec"]["template"]["spec"]["containers"][0]
        container["args"] = ["--quiet", container["args"][1], *STEPS, "--hold", str(space.release)]
        cluster.call("POST", f"/apis/{body['apiVersion']}/namespaces/r/faulttolerantjobs", body)
        space.at_work("r", GROUPS)

        def kill() -> None:
            pod = space.until(lambda: space.pod_of("r", VICTIM), "its pod")
            os.kill(cluster.kubelet.process(pod["metadata"]["name"]), signal.SIGKILL)

        yield Job(lambda: next(directory.glob("pods/r-rg0-*/planaria-logs/r/events.jsonl")), kill)
    finally:
        cluster.stop()


def times(job: Job) -> tuple[float, float]:
    """Kill once: seconds to the quorum of the others, and to the one that counts the group again."""
    killed = time.time()
    job.kill()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        quorums = [e for e in map(json.loads, job.events().read_text().splitlines()) if e["kind"] in _QUORUMS]
        after = [e for e in quorums if e["at"] > killed]
        lost = next((e["at"] for e in after if str(VICTIM) in e["data"]["lost"].split(",")), None)
        back = next((e["at"] for e in after if str(VICTIM) in e["data"]["joined"].split(",")), None)
        if lost is not None and back is not None:
            return lost - killed, back - killed
        time.sleep(0.1)
    raise SystemExit(f"the group was not back after {PATIENCE:.0f} s")


def measure(engine: str, kills: int) -> list[tuple[float, float]]:
    begin = {"local": local, "slurm": slurm, "k8s": k8s, "ray": ray}[engine]
    with tempfile.TemporaryDirectory(prefix=f"replacement-{engine}-") as place, begin(Path(place)) as job:
        found = []
        for _ in range(kills):
            time.sleep(3.0)  # all is calm again
            found.append(times(job))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engines", default="local,slurm,k8s,ray")
    parser.add_argument("--kills", type=int, default=5)
    asked = parser.parse_args()
    rows = []
    for engine in asked.engines.split(","):
        busy, begun = report.busy_seconds() - report.own_seconds(), time.monotonic()
        found = measure(engine, asked.kills)
        others = (report.busy_seconds() - report.own_seconds() - busy) / (time.monotonic() - begun)
        print(f"{engine}: {found}, CPU of others and of what this started: {others:.1f} cores", file=sys.stderr)
        texts = []
        for each in zip(*found, strict=True):
            texts.append(f"{statistics.median(each):.2f} ({min(each):.2f}..{max(each):.2f})")
        rows.append([engine, str(len(found)), *texts])
    print(report.table(["engine", "kills", "quorum of the others, s", "planned quorum with it, s"], rows))


if __name__ == "__main__":
    main()
