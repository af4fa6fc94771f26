"""What is lost, and for how long, when a rank, a group, several groups, all of them or the lighthouse die; and what a
planned move of a rank costs. With and without standbys.

    python bench/losses.py --times 5
    python bench/losses.py --times 5 --device cuda      # on two GPUs: two groups of two ranks
    python bench/losses.py --only copies                # what a step costs with copies in memory

Everything is read from what the run itself writes down: progress pages and events. *Pause*: the longest time between
two commits of the groups that were not hurt (of all, where none is left unhurt). *Whole again*: from the blow to the
first commit in which every group has a part; for a move, how long the group was away; where steps are made again from
copies in memory, to the first step that is new. The length of a healthy step is in both.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import BenchError
from planaria.chaos.session import LocalRun, Script
from planaria.chaos.watch import Life, Watch

WORKER = Path(__file__).resolve().parent / "worker_losses.py"
SETTLE = 15  # commits of every group before a blow
LIMIT = 120.0  # seconds that anything may take
WIDE = 2048  # 4.3 M parameters: 13 MB of state in each of four ranks
CALM = 3


@dataclass
class Found:
    pause: float
    whole: float
    kept: int  # processes of the hurt groups that live on
    ranks: int  # and how many they were


class Bench:
    """One job, from which parts are taken away again and again."""

    def __init__(
        self,
        groups: int,
        ranks: int,
        standbys: int,
        directory: Path,
        seed: int,
        device: str,
        buddy: int = 0,
        words: tuple[str, ...] = (),
    ) -> None:
        self.groups, self.ranks, self.standbys, self.device, self.buddy = groups, ranks, standbys, device, buddy
        self.directory, self.random = directory, random.Random(seed)
        options = ["--nproc-per-group", str(ranks), "--standbys", str(standbys), "--device", device, "--quiet"]
        options += ["--max-replacements", "10000", "--checkpoint", str(directory / "checkpoints")]
        options += ["--checkpoint-every", "25"]
        options += ["--buddy", str(buddy)] if buddy else []
        self._run = LocalRun(Script(WORKER, ("--shards", "4", *words), groups, 4), directory / "run", options)
        self.watch = Watch(directory / "run")
        self.steps: list[float] = []

    def __enter__(self) -> Bench:
        self._run.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run.stop()
        self.watch.close()

    def until(self, met: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + LIMIT
        while True:
            self.watch.poll()
            if found := met():
                return found
            if self._run.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"no {what}: {self._run.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.001)

    def calm(self) -> list[Life]:
        """Everybody is at work and has been for a while, and the standbys are warm."""
        since = time.monotonic_ns()

        def met() -> bool:
            lives = [life for life in self.watch.settled() if len(life.processes) == self.ranks]
            worked = all(sum(c.at_ns > since for c in life.commits) >= SETTLE for life in lives)
            return len(lives) == self.groups and worked and self._warm() == self.standbys

        self.until(met, "calm")
        lives = self.watch.newest()
        recent = [c.at_ns for c in lives[0].commits if c.at_ns > since]
        self.steps += [(b - a) / 1e9 for a, b in pairwise(recent)]
        time.sleep(self.random.uniform(0.0, 0.2))  # at any moment of a step
        self.watch.poll()
        return lives

    def _warm(self) -> int:
        events = [json.loads(line) for line in (self.directory / "run" / "events.jsonl").read_text().splitlines()]
        warm = sum(e["kind"] == "standby" and "is warm" in e["text"] for e in events)
        return warm - sum(e["kind"] == "regroup" and "standby" in e["text"] for e in events)

    def blow(self, strike: Callable[[], None], hurt: set[int], kills: bool) -> Found:
        """``strike``, of which the groups in ``hurt`` are the victims. ``kills``: or else it only asks for a move."""
        before = {life.member.group: life for life in self.watch.newest()}
        pids = {(g, r): p.pid for g, life in before.items() for r, p in life.processes.items() if g in hurt}
        made = {group: life.commits[-1].step for group, life in before.items()}
        at = time.monotonic_ns()
        strike()

        def whole() -> list[Life] | None:
            lives = self.watch.newest()
            renewed = all(x.member > before[x.member.group].member for x in lives if x.member.group in hurt)
            complete = all(len(x.processes) == self.ranks for x in lives) and len(self.watch.settled()) == self.groups
            return lives if renewed and complete and len(lives) == self.groups else None

        lives = self.until(whole, "recovery")
        seen = time.monotonic_ns()
        self.until(lambda: all(x.commits[-1].at_ns > seen for x in lives), "commits of all groups together")
        if not hurt:
            self.until(lambda: all(sum(c.at_ns > at for c in x.commits) >= SETTLE for x in lives), "steps")
        if self.buddy:  # the only group goes back
            (life,) = lives
            self.until(lambda: life.commits[-1].step > made[life.member.group], "a step that is new")
            _, again = _return(life, before[life.member.group], at)
            new = min(c.at_ns for c in life.commits if c.at_ns > at and c.step > made[life.member.group])
            now = {(life.member.group, r): p.pid for r, p in life.processes.items()}
            kept = sum(now.get(key) == pid for key, pid in pids.items())
            return Found((again - at) / 1e9, (new - at) / 1e9, kept, len(pids))
        returns = [_return(x, before[x.member.group], at) for x in lives if x.member.group in hurt]
        joined = max((back for _, back in returns), default=min(x.commits[-1].at_ns for x in lives))
        gone = at if kills else max(last for last, _ in returns)
        self.until(lambda: all(x.commits[-1].at_ns > joined for x in lives), "commits after it")
        others = [x for x in lives if x.member.group not in hurt]
        pauses = [self._pause(x.commits, at, joined) for x in others] or [(joined - at) / 1e9]
        now = {(x.member.group, r): p.pid for x in lives for r, p in x.processes.items()}
        kept = sum(now.get(key) == pid for key, pid in pids.items())
        return Found(max(pauses), (joined - gone) / 1e9, kept, len(pids))

    @staticmethod
    def _pause(commits: list[Any], at: int, until: int) -> float:
        times = [c.at_ns for c in commits]
        return max((b - a) / 1e9 for a, b in pairwise(times) if b > at and a < until)


def _return(life: Life, before: Life, at: int) -> tuple[int, int]:
    """The last commit that a group made before it was away, and the first when it was back."""
    times = [c.at_ns for c in life.commits]
    if times[0] > at:
        return before.commits[-1].at_ns, times[0]
    # Its page is that of a process that lived on.
    return max(((b - a, a, b) for a, b in pairwise(times) if b > at))[1:]


def _kill(lives: list[Life], ranks: list[int] | None = None) -> Callable[[], None]:
    def strike() -> None:
        for life in lives:
            for rank, process in life.processes.items():
                if ranks is None or rank in ranks:
                    os.kill(process.pid, signal.SIGKILL)

    return strike


def _rank_of(bench: Bench, life: Life) -> int:
    return ON_FIRST[life.member.group] if bench.device == "cuda" else bench.random.randrange(bench.ranks)


def _losses(bench: Bench, lives: list[Life], kind: str) -> tuple[Callable[[], None], set[int]]:
    chosen = bench.random.sample(lives, {"two groups": 2, "all groups": len(lives)}.get(kind, 1))
    hurt = {life.member.group for life in chosen}
    match kind:
        case "a rank":
            return _kill(chosen, [_rank_of(bench, chosen[0])]), hurt
        case "a rank moves":
            group, rank = chosen[0].member.group, _rank_of(bench, chosen[0])
            words = [sys.executable, "-m", "planaria", "migrate", str(group), "--rank", str(rank)]
            words += ["--log-dir", str(bench.directory / "run")]
            return lambda: subprocess.run(words, check=True, stdout=subprocess.DEVNULL), hurt
        case "the lighthouse":
            found = bench._run.lighthouse()
            assert found is not None
            pid = found[0]
            return lambda: os.kill(pid, signal.SIGKILL), set()
        case _:
            return _kill(chosen), hurt


BUDDY = 10  # steps between copies
PLANS = {  # (groups, ranks): what is lost. The only group has copies in memory.
    "cpu": {
        (2, 4): ["a rank", "a rank moves", "a group"],
        (1, 4): ["a rank"],
        (4, 1): ["a group", "two groups", "all groups", "the lighthouse", "a rank moves"],
    },
    "cuda": {(2, 2): ["a rank", "a rank moves", "a group"]},
}
# Every communicator has one rank on each of two GPUs, which are shared by two processes each: not what a step should
# take, but enough to see what a loss takes. A standby's GPU is the first, so ranks there are lost.
CROSSED = "0,1,1,0"
ON_FIRST = {0: 0, 1: 1}  # by group


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5, help="of every loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=tuple(PLANS))
    parser.add_argument("--keep", type=Path, help="directory for what the runs wrote down: events, logs")
    parser.add_argument("--standbys", type=int, choices=(0, 1), help="only with so many")
    parser.add_argument("--only", default="", help="losses whose name contains this")
    parser.add_argument("--shape", default="", help="of these groups and ranks alone, as 1x4")
    args = parser.parse_args()
    if args.only == "copies":
        print(_copies(args.seed))
        return 0
    rows = []
    for (groups, ranks), kinds in PLANS[args.device].items():
        wanted = [kind for kind in kinds if args.only in kind and args.shape in ("", f"{groups}x{ranks}")]
        for standbys in [n for n in (0, 1) if args.standbys in (None, n)] if wanted else ():
            if args.device == "cuda":
                os.environ["CUDA_VISIBLE_DEVICES"] = CROSSED + ",0" * standbys
            with (
                _directory(args.keep, f"{groups}x{ranks}-{standbys}") as name,
                Bench(groups, ranks, standbys, name, args.seed, args.device, BUDDY * (groups == 1)) as bench,
            ):
                for kind in wanted:
                    if args.device == "cuda" and "moves" in kind and not standbys:
                        continue  # there is no GPU for the process that it would move to
                    found = []
                    for _ in range(args.times):
                        strike, hurt = _losses(bench, bench.calm(), kind)
                        found.append(bench.blow(strike, hurt, kills="moves" not in kind))
                        print(f"{groups}x{ranks}, {standbys} standbys, {kind}: {found[-1]}", flush=True)
                    rows.append(_row(groups, ranks, standbys, kind, found, statistics.median(bench.steps)))
    header = ("groups x ranks", "lost", "standbys", "step s", "pause s", "whole again s", "processes kept")
    print(report.table(header, rows))
    return 0


def _copies(seed: int) -> str:
    """What copies cost while nothing is lost: one group of four ranks, whose state is WIDE."""
    rows = []
    for buddy in (0, 10, 1):
        with (
            tempfile.TemporaryDirectory() as name,
            Bench(1, 4, 0, Path(name), seed, "cpu", buddy, ("--width", str(WIDE))) as bench,
        ):
            for _ in range(CALM):
                bench.calm()
            steps = sorted(bench.steps)
            mean = statistics.fmean(steps[: len(steps) * 9 // 10])  # a busy machine's longest ones say nothing
            rows.append([str(buddy or "-"), str(len(steps)), f"{statistics.median(steps):.4f}", f"{mean:.4f}"])
            print(rows[-1], flush=True)
    return report.table(("copies every", "steps", "step s, median", "mean of nine in ten"), rows)


@contextmanager
def _directory(keep: Path | None, name: str) -> Iterator[Path]:
    """For one run's files, gone afterwards unless they are to be kept."""
    if keep is not None:
        (keep / name).mkdir(parents=True)
        yield keep / name
        return
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def _row(groups: int, ranks: int, standbys: int, kind: str, found: list[Found], step: float) -> list[str]:
    pause, whole = (report.spread([getattr(f, name) for f in found]).text() for name in ("pause", "whole"))
    kept = f"{found[0].kept} of {found[0].ranks}"
    if not found[0].ranks:  # no group was hurt
        whole, kept = "-", "all"
    return [f"{groups} x {ranks}", kind, str(standbys), f"{step:.3f}", pause, whole, kept]


if __name__ == "__main__":
    raise SystemExit(main())
