"""Samples trained per second while a group is killed every N seconds, over the rate without failures.

    python bench/goodput.py --peers torchft --every 10 --minutes 5

For each contestant: a quiet phase, the phase with kills, another quiet phase; the rate without failures is
that of both quiet phases together, measured in the same life of the same run. A step counts once, with the
samples that really went into its update, whoever committed it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
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
    p.set_defaults(settings="tuned")
    p.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between kills")
    p.add_argument("--minutes", type=float, default=5.0, help="length of the phase with kills")
    p.add_argument("--quiet-seconds", type=float, default=30.0, help="length of each quiet phase")
    return p.parse_args()


def quiet_phase(c: Contestant, args: argparse.Namespace, full: int) -> tuple[float, float]:
    """Give start and end of a phase without failures, begun at full strength."""
    since = time.monotonic()
    c.wait(lambda: timeline.steady(c.logs.lives, args.groups, since, 10, full), 300, "full strength")
    start = time.monotonic()
    free.let_run(c, args.quiet_seconds)
    return start, time.monotonic()


def kill_phase(c: Contestant, args: argparse.Namespace) -> tuple[float, float, int]:
    """Give start, end and the number of kills. A victim is chosen among all groups; one that is down is down."""
    rng, start, kills = random.Random(args.seed), time.monotonic(), 0
    while (kills + 1) * args.every < args.minutes * 60 + args.every / 2:
        free.let_run(c, max(0.0, start + (kills + 0.5) * args.every - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # it is between two lives: this failure hits nothing
            c.kill(rng.randrange(args.groups))
        kills += 1
    free.let_run(c, max(0.0, start + args.minutes * 60 - time.monotonic()))
    return start, time.monotonic(), kills


def measure(c: Contestant, args: argparse.Namespace) -> list[dict[str, Any]]:
    full = free.full_step(args)
    with free.running(c):
        watch = report.LoadWatch()
        before = quiet_phase(c, args, full)
        start, end, kills = kill_phase(c, args)
        after = quiet_phase(c, args, full)
        lives = c.logs.all()
        quiet = [timeline.samples_per_second(lives, *phase) for phase in (before, after)]
        rate = timeline.samples_per_second(lives, start, end)
        discarded = sum(1 for life in lives for t in life.discarded if start < t <= end)
        steps = timeline.once(lives, start, end)
        found = {
            "name": c.name,
            "kills": kills,
            "seconds": end - start,
            "quiet_rates": quiet,
            "rate": rate,
            "goodput": rate / (sum(quiet) / 2),
            "discarded": discarded,
            "steps": len(steps),
            "samples_lost": timeline.missing(lives, start, end, full),
            "lives": {g: len(of) for g, of in c.logs.lives.items()},
            "others": watch.others(),
        }
        return [found]


HEADER = (
    "contestant",
    "kills",
    "samples/s quiet (before, after)",
    "samples/s with kills",
    "work kept",
    "steps committed",
    "attempts discarded",
    "samples missing in commits",
    "CPU of others",
)


def row(r: dict[str, Any]) -> list[str]:
    quiet = ", ".join(f"{q:.0f}" for q in r["quiet_rates"])
    return [
        r["name"],
        str(r["kills"]),
        quiet,
        f"{r['rate']:.0f}",
        f"{r['goodput']:.1%}",
        str(r["steps"]),
        str(r["discarded"]),
        str(r["samples_lost"]),
        f"{r['others']:.0%}",
    ]


def main() -> int:
    args = parse()
    result = free.compare(args, "runs", measure)
    print("\n" + report.table(HEADER, [row(r) for r in result["runs"]]))
    print(f"\n{args.groups} groups, {args.size} parameters, a SIGKILL every {args.every:.0f} s.")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BenchError, PeerError) as error:
        sys.exit(str(error))
