"""What the Kubernetes operator costs a cluster in which nothing happens: its API calls, its CPU and memory.

    python bench/kube_operator.py --jobs 1,20,200

The operator is a process of its own with a Lease, as in a cluster. Its API server is one in memory (the tests' own),
behind a proxy that counts; lighthouses are stood in for: every job's says that all groups work and make a step a
second, so that all that changes is what changes in a real one. Calls that an hour has are taken from ``--seconds``.
Watches are asked for again every four minutes, so let it run for a multiple of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from planaria.cli.pod_args import check
from planaria.core.messages import Member, Phase, Quorum, QuorumId
from planaria.core.roster import GroupStatus, JobStatus
from planaria.engines.kubernetes.access import Access
from planaria.engines.kubernetes.api import JOBS
from planaria.engines.kubernetes.crd import Wanted
from planaria.engines.kubernetes.keeper import JobKeeper
from planaria.engines.kubernetes.leader import operate
from planaria.engines.kubernetes.observe import Memory, Seen
from tests.kubernetes.fault_proxy import FaultProxy
from tests.kubernetes.small_api import SmallApi
from tests.kubernetes.world import job

GROUPS = 4


async def _told(keeper: JobKeeper, wanted: Wanted, seen: Seen, memory: Memory) -> JobStatus:
    """In place of a lighthouse."""
    step, id = int(time.monotonic()), QuorumId(1, 1)
    members = tuple(Member(group, 0) for group in range(GROUPS))
    groups = tuple(GroupStatus(m, "active", step, id, Phase.COMPUTING, math.nan, 1.0, 1, "a", True) for m in members)
    return JobStatus(wanted.name, 1, Quorum(id, members, ("a",) * GROUPS, True, ""), None, GROUPS, False, groups)


def child(url: str) -> None:
    JobKeeper._ask = _told  # type: ignore[method-assign]
    asyncio.run(operate(Access(url, False, dict, "n"), "n", False, 15.0, check))


async def measure(jobs: int, seconds: float) -> dict[str, Any]:
    server = SmallApi()
    await server.start()
    proxy = FaultProxy(server.url, random.Random(0))
    await proxy.start()
    for number in range(jobs):
        body = job(GROUPS)
        body["metadata"] = {"name": f"j{number}"}
        await server._create(JOBS.path("n"), body)
    process = subprocess.Popen([sys.executable, __file__, "--child", proxy.url])
    try:
        while True:
            await server.kubelet()
            statuses = [found.get("status") or {} for found in server.of(JOBS.plural)]
            if all(status.get("groupsReady") == f"{GROUPS}/{GROUPS}" for status in statuses):
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(10.0)
        there = psutil.Process(process.pid)
        before, cpu, begun = Counter(proxy.counts), sum(there.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(seconds)
        lasted = time.monotonic() - begun
        cpu = sum(there.cpu_times()[:2]) - cpu
        memory = there.memory_info().rss
        size = max(len(json.dumps(found["status"])) for found in server.of(JOBS.plural))
    finally:
        process.terminate()
        process.wait()
        await proxy.close()
        await server.close()
    hourly = {what: round(count * 3600 / lasted) for what, count in (proxy.counts - before).items()}
    return {
        "jobs": jobs,
        "calls_an_hour": sum(hourly.values()),
        "by_kind": dict(sorted(hourly.items(), key=lambda item: -item[1])),
        "cpu_share": round(cpu / lasted, 4),
        "memory_mib": round(memory / 2**20),
        "status_bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", default="1,20,200")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    found = [asyncio.run(measure(int(jobs), asked.seconds)) for jobs in asked.jobs.split(",")]
    rows = []
    for each in found:
        writes = each["by_kind"].get("PATCH faulttolerantjobs/status", 0)
        cpu, memory, size = f"{each['cpu_share']:.1%}", f"{each['memory_mib']} MiB", f"{each['status_bytes']} B"
        rows.append([str(each["jobs"]), str(each["calls_an_hour"]), str(writes), cpu, memory, size])
        print(each["by_kind"], file=sys.stderr)
    print(report.table(["jobs", "API calls an hour", "of which status", "CPU of a core", "memory", "status"], rows))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
