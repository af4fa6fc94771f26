"""Training between places with slow lines: what is exchanged, how fast it goes, and what kills cost.

    python bench/slow_links.py                                   # all parts, about 20 minutes on 2 cores; needs root
    python bench/slow_links.py --parts rate --seconds 60 --rounds 2 --peers torchft
    python bench/slow_links.py --parts kills --minutes 5

Four groups, each in a network namespace of its own whose line takes ``--mbit`` million bits a second each way.

- ``rate``: tokens a second, and bytes that a group sends for an inner step (counted by its network device). Contestants
  run one after another, in turns, for ``--seconds`` each; what they do before their second exchange does not count.
- ``kills``: streaming DiLoCo with int8; SIGKILL of one group every 15 s, between two quiet stretches. Tokens count that
  a committed exchange had in it.
What low communication costs in loss is for bench/diloco.py to say.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import TORCHFT_LIGHTHOUSE, BenchError, end_in_order, end_tree
from bench.peers import Peer, ensure
from bench.text_net import BATCH
from planaria.chaos.netns import HUB_ADDRESS, NamespacedRun, Networks, inside
from planaria.chaos.session import Script, spawn
from planaria.chaos.watch import Watch

HERE = Path(__file__).resolve().parent
GROUPS = 4
EVERY, DELAY = 40, 5
START = 180.0  # seconds that a contestant may take until its second exchange
TORCHFT_PORT = 29510


@dataclass(frozen=True)
class Way:
    """A contestant: the arguments of its worker, and ``planaria run``'s options. No options: torchft."""

    name: str
    words: tuple[str, ...]
    options: tuple[str, ...] | None = None


WAYS = [
    Way("planaria, every step, tree", ("--method", "step"), ("--reduction", "tree")),
    Way("planaria, every step, int8", ("--method", "step"), ("--reduction", "int8")),
    Way("planaria, DiLoCo", ("--method", "diloco"), ("--reduction", "tree")),
    Way("planaria, streaming DiLoCo, int8", ("--method", "streaming"), ("--reduction", "int8")),
    Way("torchft, DiLoCo", ("--fragments", "1")),
    Way("torchft, streaming DiLoCo", ("--fragments", "2")),
]
STREAMING = WAYS[3]


@dataclass
class Exchanges:
    """What the workers wrote down: once for each exchange that was committed."""

    directory: Path
    found: dict[int, tuple[float, int, int]] = field(default_factory=dict)  # sync: (at, steps, groups)

    def read(self) -> dict[int, tuple[float, int, int]]:
        self.found.clear()
        for path in self.directory.glob("*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                facts = json.loads(line) if line.endswith("\n") else {}
                if facts.get("steps"):
                    sync, at = facts["sync"], facts["at"]
                    known = self.found.get(sync)
                    self.found[sync] = (at if known is None else min(at, known[0]), facts["steps"], facts["groups"])
        return self.found

    def tokens(self, since: float, until: float) -> float:
        """A second. From the first exchange in that time to the last."""
        rows = sorted(row for row in self.read().values() if since <= row[0] <= until)
        if len(rows) < 2:
            raise BenchError(f"{len(rows)} exchanges in {until - since:.0f} s: give it more --seconds")
        return sum(steps * groups * BATCH for _, steps, groups in rows[1:]) / (rows[-1][0] - rows[0][0])


class TorchftRun:
    """Its lighthouse in the hub, and a process for each group: as much of NamespacedRun as is used here."""

    def __init__(self, peer: Peer, words: Sequence[str], directory: Path) -> None:
        self._peer, self._words, self.log = peer, words, directory / "run.log"
        self.network = Networks(GROUPS)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.network.make()
        settings = {"bind": f"[::]:{TORCHFT_PORT}", "min_replicas": GROUPS, **TORCHFT_LIGHTHOUSE["readme"]}
        words = [str(self._peer.lighthouse), *(str(x) for k, v in settings.items() for x in (f"--{k}", v))]
        self._processes.append(spawn(inside(self.network.hub, words), dict(os.environ), self.log))
        for group in range(GROUPS):
            host = self.network.address(group)
            more = {"REPLICA_GROUP_ID": str(group), "BENCH_HOST": host, "GLOO_SOCKET_IFNAME": "eth0"}
            more["TORCHFT_LIGHTHOUSE"] = f"http://{HUB_ADDRESS}:{TORCHFT_PORT}"
            command = [str(self._peer.python), str(HERE / "worker_slow_torchft.py"), *self._words]
            self._processes.append(spawn(inside(self.network.of(group), command), os.environ | more, self.log))

    def poll(self) -> int | None:
        return next((code for each in self._processes if (code := each.poll()) is not None), None)

    def stop(self) -> None:
        try:
            for each in self._processes:
                end_tree(each)
        finally:
            self.network.close()


def run_of(way: Way, directory: Path, peer: Peer | None) -> NamespacedRun | TorchftRun:
    words = (*way.words, "--every", str(EVERY), "--delay", str(DELAY))
    if way.options is None:
        assert peer is not None
        return TorchftRun(peer, words, directory)
    script = Script(HERE / "worker_slow_planaria.py", words, GROUPS, GROUPS, "cpu")
    return NamespacedRun(script, directory / "run", ("--quiet", *way.options))


@contextmanager
def running(way: Way, mbit: float, peer: Peer | None) -> Iterator[tuple[NamespacedRun | TorchftRun, Exchanges]]:
    """Past its second exchange."""
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"BENCH_LOG": str(Path(name) / "log"), "OMP_NUM_THREADS": "1"}
        (Path(name) / "log").mkdir()
        run, seen = run_of(way, Path(name), peer), Exchanges(Path(name) / "log")
        try:
            run.start()
            assert run.network is not None
            for group in range(GROUPS):
                run.network.limit(group, mbit)  # type: ignore[attr-defined]
            wait(run, lambda: len(seen.read()) >= 2, START)
            yield run, seen
        finally:
            run.stop()


def wait(run: Any, until: Any, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not until():
        if run.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"it did not get on: {run.log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def sent(run: NamespacedRun | TorchftRun) -> int:
    """Bytes that group 0's line has taken from it."""
    assert run.network is not None
    words = ["ip", "netns", "exec", run.network.of(0), "cat", "/sys/class/net/eth0/statistics/tx_bytes"]  # type: ignore[attr-defined]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def rate(way: Way, args: argparse.Namespace, peer: Peer | None) -> tuple[float, float]:
    """Tokens a second of all groups, and bytes that one sends for an inner step."""
    with running(way, args.mbit, peer) as (run, seen):
        began, before = time.time(), sent(run)
        least = len(seen.read()) + 3
        time.sleep(args.seconds)
        wait(run, lambda: len(seen.read()) >= least, START)
        ended, after = time.time(), sent(run)
        steps = sum(steps for at, steps, _ in seen.read().values() if began <= at <= ended)
        return seen.tokens(began, ended), (after - before) / steps


def rates(args: argparse.Namespace) -> None:
    peer = ensure() if "torchft" in args.peers else None
    ways = [way for way in WAYS if way.options is not None or peer is not None]
    speeds: dict[str, list[float]] = {way.name: [] for way in ways}
    sizes: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(args.rounds):
        for name in report.rotated([way.name for way in ways], number):
            way = next(each for each in ways if each.name == name)
            try:
                tokens, size = rate(way, args, peer)
            except BenchError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            speeds[name].append(tokens)
            sizes[name].append(size)
            print(f"round {number}, {name}: {tokens:.0f} tokens/s, {size / 1e3:.1f} kB per inner step", flush=True)
    base = statistics.median(speeds[WAYS[0].name])
    rows = [
        [
            name,
            report.spread(found).text(0),
            f"{statistics.median(found) / base:.1f}",
            _kilobytes(sizes[name]),
        ]
        for name, found in speeds.items()
        if found
    ]
    print(report.table(("contestant", "tokens/s", "x every step", "kB sent per inner step"), rows))


def _kilobytes(sizes: Sequence[float]) -> str:
    return report.spread(sizes).text(1, 1e-3)


def kills(args: argparse.Namespace) -> None:
    choose, killed = random.Random(args.seed), 0
    with running(STREAMING, args.mbit, None) as (run, seen):
        assert isinstance(run, NamespacedRun)
        watches = [Watch(directory) for directory in run.directories]
        marks = [time.time()]
        time.sleep(args.quiet)
        marks.append(time.time())
        while time.time() < marks[1] + args.minutes * 60:
            time.sleep(args.between)
            group = choose.randrange(GROUPS)
            watches[group].poll()
            for life in watches[group].newest():
                for process in life.processes.values():
                    os.kill(process.pid, signal.SIGKILL)
                    killed += 1
        marks.append(time.time())
        time.sleep(args.quiet)
        marks.append(time.time())
        for watch in watches:
            watch.close()
        before, during, after = (seen.tokens(a, b) for a, b in pairwise(marks))
        rows = sorted((at, groups) for at, _, groups in seen.read().values() if marks[1] <= at <= marks[2])
    quiet = statistics.fmean([before, after])
    whole = sum(groups == GROUPS for _, groups in rows)
    speeds = f"{before:.0f}, {during:.0f}, {after:.0f}"
    row = [str(killed), speeds, f"{during / quiet:.1%}", f"{whole} of {len(rows)}"]
    header = ("kills", "tokens/s before, under kills, after", "kept", "exchanges with all groups")
    print(report.table(header, [row]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="rate,kills")
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="torchft, in an environment of its own (see bench/peers.py)")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--between", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds before and after the kills")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    end_in_order()
    for part in args.parts.split(","):
        {"rate": rates, "kills": kills}[part](args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
