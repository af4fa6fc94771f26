"""How soon does the next lighthouse serve, when the one that leads is killed, or stands still?

    python bench/failover.py --times 5
    python bench/failover.py --times 5 --stores etcd,kubernetes --lease 2

Two lighthouses are processes that share a store; agents are real links, which know both addresses. When all work under
a quorum, the leader gets a signal, and in the same moment a group dies. Told are the seconds until the first and the
last agent have the welcome of the next leader, and until all others have the quorum without the dead group: what a
death costs that comes together with the lighthouse's. (A death before or after it costs nothing of this.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import BenchError
from planaria.agent.link import Link
from planaria.core.liveness import HEARTBEAT_SECONDS
from planaria.core.messages import (
    Adopted,
    Died,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Order,
    Publish,
    Quorum,
    Ready,
    Report,
)
from planaria.core.told import Told
from planaria.lighthouse.elector import LEASE
from tests.lighthouse import elector_stores

ROOT = Path(__file__).resolve().parent.parent
STORES = ("file", "etcd", "kubernetes")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
PATIENCE = 60.0  # seconds for anything; whatever needs longer has failed


class Agent:
    """A real link, with an agent's memory around it, and one group."""

    def __init__(self, job: str, number: int, agents: int) -> None:
        self.member = Member(number, 0)
        self.quorum: Quorum | None = None
        self.quorum_at = self.welcome_at = 0.0
        self._told = Told()
        hello = Hello(f"agent {number}", "host", JobSpec(job, agents))
        self.link = Link(lambda: hello, self._told.again, self._ordered, self._noted, lambda reason: None)

    async def run(self, addresses: str) -> None:
        """Until cancelled. It beats, or a lighthouse to which others come late would take it for dead meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.link.run(addresses))
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                self.link.tell(Heartbeat(()))

    def say(self, told: Report) -> None:
        self._told.record(told)
        self.link.tell(told)

    def _ordered(self, order: Order) -> None:
        if isinstance(order, Publish):
            self.quorum, self.quorum_at = order.quorum, time.monotonic()

    def _noted(self, kind: str, text: str) -> None:
        if kind == "link" and text.startswith("connected"):
            self.welcome_at = time.monotonic()


class Lighthouse:
    """``elector``: the options that say it."""

    def __init__(self, elector: Sequence[str], log: Path, bind: str = "127.0.0.1:0") -> None:
        words = ["--bind", bind, *elector]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planaria", "lighthouse", *words],
                stdout=subprocess.PIPE, stderr=file, text=True, cwd=ROOT,
            )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchError(f"a lighthouse did not start: {log.read_text()[-2000:]}")
        self.address = str(json.loads(line)["address"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def until(met: Any, what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not met():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise BenchError(f"waited {PATIENCE:.0f} s for {what}") from None


def leader_of(agents: Sequence[Agent]) -> str:
    """Its address, if all are with the same one; else nothing."""
    found = {agent.link.address if agent.link.up.is_set() else "" for agent in agents}
    return found.pop() if len(found) == 1 else ""


async def one_blow(lighthouses: list[Lighthouse], agents: list[Agent], number: signal.Signals) -> dict[str, float]:
    """The agents' job, to its first quorum and to the one after the blow. The lighthouse that was hit is left so."""
    addresses = ",".join(each.address for each in lighthouses)
    running = [asyncio.create_task(agent.run(addresses)) for agent in agents]
    try:
        await until(lambda: all(agent.link.up.is_set() for agent in agents), "a lighthouse that leads")
        for agent in agents:
            agent.say(Ready(agent.member, f"h:{agent.member.group}", (("torch", "2"),), "d", len(agents), 100))
        await until(lambda: all(agent.quorum is not None for agent in agents), "the first quorum")
        for agent in agents:
            assert agent.quorum is not None
            agent.say(Adopted(agent.member, agent.quorum.id, 5))
        await asyncio.sleep(random.uniform(1.0, 3.0))  # at any moment of a lease
        # On a busy machine some may just be on their way back to it, by the other one.
        await until(lambda: leader_of(agents), "a lighthouse that leads")
        leader = next(each for each in lighthouses if each.address == leader_of(agents))
        epoch, (victim, *others) = agents[0].link.epoch, agents
        began = time.monotonic()
        leader.process.send_signal(number)
        victim.say(Died(victim.member, "killed by SIGKILL"))

        def answered() -> bool:
            found = [agent.quorum for agent in others]
            return all(q is not None and q.id.epoch > epoch and victim.member not in q.members for q in found)

        try:
            await until(answered, "the next leader's answer to a death")
        except BenchError as error:
            knows = [f"{each.member.group}: {each.link.address}, {each.quorum and each.quorum.id}" for each in others]
            raise BenchError(f"{error}; epoch {epoch} was killed, and groups are at {'; '.join(knows)}") from None
        welcomes = [agent.welcome_at - began for agent in others]
        return {
            "first": min(welcomes),
            "last": max(welcomes),
            "answer": max(agent.quorum_at for agent in others) - began,
        }
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def blows(elector: Sequence[str], directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    log = directory / "lighthouses.log"
    lighthouses = [Lighthouse(elector, log) for _ in range(2)]
    found: dict[str, Any] = {}
    try:
        for name, number in SIGNALS.items():
            found[name] = []
            for time_ in range(args.times):
                agents = [Agent(f"{name}-{time_}", each, args.agents) for each in range(args.agents)]
                found[name].append(await one_blow(lighthouses, agents, number))
                for index, each in enumerate(lighthouses):
                    each.process.send_signal(signal.SIGCONT)
                    if each.process.poll() is not None:
                        lighthouses[index] = Lighthouse(elector, log, each.address)
                await asyncio.sleep(1.0)  # for the one that was stopped to find that it leads no more
    finally:
        for each in lighthouses:
            each.end()
    return found


@contextmanager
def electors(kind: str, directory: Path, lease: float) -> Iterator[tuple[str, ...]]:
    """The options of a lighthouse that say where its elector looks."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            if kind == "file":
                store = elector_stores.file_store(directory)
            elif kind == "etcd":
                store = elector_stores.etcd_store(directory)
            else:
                store = elector_stores.kubernetes_store(directory, patch)
        except pytest.skip.Exception as error:
            raise BenchError(str(error)) from None
        try:
            yield store.options(lease)
        finally:
            store.close()


def rows(found: dict[str, dict[str, list[dict[str, float]]]]) -> list[list[str]]:
    return [
        [kind, name, str(len(times)), *(report.spread([t[key] for t in times]).text() for key in times[0])]
        for kind, signals in found.items()
        for name, times in signals.items()
    ]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stores", default="file,etcd", help=f"of {', '.join(STORES)} (default: %(default)s)")
    p.add_argument("--lease", type=float, default=LEASE, help="seconds (default: %(default)s)")
    p.add_argument("--agents", type=int, default=8)
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    args = p.parse_args()
    kinds = args.stores.split(",")
    if unknown := [kind for kind in kinds if kind not in STORES]:
        raise BenchError(f"there is no store {unknown[0]!r}, but {', '.join(STORES)}")
    environment = report.environment()
    print(report.header(environment), flush=True)
    watch, found = report.LoadWatch(), {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as made, electors(kind, Path(made), args.lease) as options:
            found[kind] = asyncio.run(blows(options, Path(made), args))
    header = ["store", "leader", "times", "first agent, s", "last agent, s", "answer to a death, s"]
    print("\n" + report.table(header, rows(found)))
    print(f"\nlease: {args.lease:g} s; {args.agents} agents; CPU of others: {watch.others():.0%}")
    if args.json:
        report.write_json(args.json, {"environment": environment, "arguments": vars(args), "found": found})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
