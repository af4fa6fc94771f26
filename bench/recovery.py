"""One of several groups is killed with SIGKILL, again and again: how soon do the others commit, and what is
lost?

    python bench/recovery.py --peers torchft --kills 12

Every worker appends a line to a log for each attempt and each commit (bench/workload.py), stamped with one
clock, so all contestants are judged from the outside by the same rules (bench/timeline.py). The number of
samples in an update is read from a gradient that counts them. A kill waits until all groups have made
--settle commits at full strength, then for a random moment.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import free, report, timeline
from bench.contestants import BenchError, Contestant
from bench.peers import PeerError


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    free.add_arguments(p)
    p.add_argument("--kills", type=int, default=12)
    p.add_argument(
        "--default-kills",
        type=int,
        default=4,
        help="kills of torchft's default and readme settings, which can take minutes each (default: %(default)s)",
    )
    p.add_argument("--settle", type=int, default=20, help="commits at full strength before a kill")
    p.add_argument("--limit", type=float, default=300.0, help="seconds that one recovery may take")
    return p.parse_args()


def one_kill(c: Contestant, rng: random.Random, args: argparse.Namespace, full: int) -> dict[str, Any]:
    since = time.monotonic()
    limit = max(args.limit, free.START_LIMIT)
    c.wait(lambda: timeline.steady(c.logs.lives, args.groups, since, args.settle, full), limit, "full strength")
    free.let_run(c, rng.uniform(0.3, 0.8))
    watch, victim = report.LoadWatch(), rng.randrange(args.groups)
    at = c.kill(victim)
    healthy = statistics.median(timeline.step_seconds(c.logs.all(), since, at))
    c.wait(
        lambda: timeline.loss(c.logs.lives, victim, at, full) is not None,
        args.limit,
        f"recovery from the loss of group {victim}",
    )
    found = timeline.loss(c.logs.lives, victim, at, full)
    assert found is not None
    return {
        "name": c.name,
        "victim": victim,
        "healthy_step": healthy,
        "others": watch.others(),
        **dataclasses.asdict(found),
    }


def kills_of(c: Contestant, args: argparse.Namespace) -> int:
    slow = c.name in ("torchft default", "torchft readme")
    return int(min(args.kills, args.default_kills) if slow else args.kills)


def measure(c: Contestant, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All kills of one contestant. A contestant that does not recover within the limit is started afresh."""
    rng, full, records = random.Random(args.seed), free.full_step(args), []
    with free.running(c):
        for k in range(kills_of(c, args)):
            record = one_kill(c, rng, args, full)
            records.append(record)
            print(
                f"{c.name} kill {k + 1}: next commit {record['slowest']:.2f} s, back {record['back']:.2f} s, "
                f"{record['discarded']} discarded, {record['samples_lost']} samples lost, "
                f"{record['crashed']} survivors crashed",
                flush=True,
            )
    return records


HEADER = (
    "contestant",
    "kills",
    "next commit s, slowest",
    "first",
    "slowest less one step",
    "healthy step ms",
    "survivors crashed",
    "attempts discarded",
    "samples lost",
    "back s",
    "CPU of others",
)


def row(name: str, records: list[dict[str, Any]]) -> list[str]:
    def of(key: str) -> report.Spread:
        return report.spread([r[key] for r in records])

    less = report.spread([r["slowest"] - r["healthy_step"] for r in records])
    return [
        name,
        str(len(records)),
        of("slowest").text(),
        of("first").text(),
        less.text(),
        of("healthy_step").text(1, 1e3),
        str(sum(r["crashed"] for r in records)),
        str(sum(r["discarded"] for r in records)),
        str(sum(r["samples_lost"] for r in records)),
        of("back").text(),
        of("others").text(0, 100) + " %",
    ]


def rows(result: dict[str, Any]) -> list[list[str]]:
    """One for each contestant, those that failed at the end."""
    names = dict.fromkeys(r["name"] for r in result["kills"])
    found = [row(name, [r for r in result["kills"] if r["name"] == name]) for name in names]
    return found + [[name, "failed", *["-"] * (len(HEADER) - 2)] for name in result["failed"]]


def main() -> int:
    args = parse()
    result = free.compare(args, "kills", measure)
    print("\n" + report.table(HEADER, rows(result)))
    print(
        f"\n{args.groups} groups, {args.size} parameters, {args.sleep * 1e3:.0f} ms added to each step; "
        "median (lowest..highest); crashed, discarded and lost are sums over all kills."
    )
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BenchError, PeerError) as error:
        sys.exit(str(error))
