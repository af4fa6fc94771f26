"""``python -m planaria.sim``: run many seeds, or one scenario, and show the first that breaks a promise."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from planaria.sim.scale import Fleet, table
from planaria.sim.scenario import LOST_MESSAGES, Scenario, random_scenario
from planaria.sim.shrink import shrink
from planaria.sim.world import Outcome, World

BATCH = 25  # seeds a worker takes at once: half a second of work
SHOWN = 40  # lines of a trace


Menu = tuple[str, ...]


def run_batch(first: int, count: int, base: Scenario, menu: Menu) -> list[Outcome]:
    return [World(random_scenario(seed, base, menu)).run() for seed in range(first, first + count)]


def outcomes(start: int, seeds: int, base: Scenario, menu: Menu, jobs: int) -> Iterator[Outcome]:
    batches = [(s, min(BATCH, start + seeds - s)) for s in range(start, start + seeds, BATCH)]
    if jobs < 2:
        for first, count in batches:
            yield from run_batch(first, count, base, menu)
        return
    with ProcessPoolExecutor(jobs) as pool:
        pending = [pool.submit(run_batch, first, count, base, menu) for first, count in batches]
        try:
            for each in pending:
                yield from each.result()
        finally:
            for each in pending:
                each.cancel()


def sweep(options: argparse.Namespace, base: Scenario, menu: Menu) -> int:
    began = time.monotonic()
    counts: Counter[str] = Counter()
    virtual, commits, quorums = 0.0, 0, 0
    for outcome in outcomes(options.start, options.seeds, base, menu, options.jobs):
        virtual, commits, quorums = virtual + outcome.seconds, commits + outcome.commits, quorums + outcome.quorums
        counts["FAILED" if outcome.failed else outcome.verdict] += 1
        if options.verbose:
            print(f"seed {outcome.seed}: {outcome.verdict} at {outcome.seconds:.1f} s, {outcome.quorums} quorums")
        if outcome.failed:
            report(random_scenario(outcome.seed, base, menu), outcome, options.save)
            if counts["FAILED"] >= options.keep_going:
                break
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(
        f"{counts.total()} seeds from {options.start}: {told}; {commits} commits under {quorums} quorums in "
        f"{virtual / 3600:.1f} virtual hours, {time.monotonic() - began:.0f} s"
    )
    return 1 if counts["FAILED"] else 0


def report(scenario: Scenario, outcome: Outcome, save: Path | None) -> None:
    """The shortest run that still fails, its newest lines, and how to see it again."""
    small, last = shrink(scenario, outcome)
    print(f"seed {outcome.seed} FAILED: {last.verdict}")
    print(f"  {small.groups} groups on {small.nodes} nodes, {small.shards} shards, {small.steps} steps, {small.policy}")
    for fault in small.faults:
        print(f"  {fault}")
    print("\n".join(last.lines[-SHOWN:]))
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)
        path = save / f"seed-{outcome.seed}.json"
        path.write_text(small.to_json())
        print(f"saved as {path}: python -m planaria.sim --scenario {path}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m planaria.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many runs")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--groups", type=int, default=5, help="at most so many groups")
    parser.add_argument("--shards", type=int, default=8, help="at most so many shards")
    parser.add_argument("--steps", type=int, default=14, help="at most so many steps")
    parser.add_argument("--checkpoints", action="store_true", help="every job writes checkpoints and is lost")
    parser.add_argument("--copies", action="store_true", help="every job keeps copies in memory, and loses ranks")
    parser.add_argument("--flips", action="store_true", help="every job compares what its groups hold, and bits flip")
    parser.add_argument("--lighthouses", action="store_true", help="every job has several, of which one leads")
    parser.add_argument("--lost-messages", action="store_true", help="exchanges stand still though nobody died")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--scenario", type=Path, help="run this file instead of seeds")
    parser.add_argument("--save", type=Path, help="write failing runs here, as scenario files")
    parser.add_argument("--keep-going", type=int, default=1, metavar="N", help="end after N failures")
    parser.add_argument("--agents", type=int, action="append", help="what so many agents cost a lighthouse; repeatable")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(arguments)
    if options.agents:
        print("\n".join(table([Fleet(count).run() for count in options.agents])))
        return 0
    if options.scenario is not None:
        outcome = World(Scenario.load(options.scenario), keep_trace=options.verbose).run()
        print("\n".join(outcome.lines if options.verbose else outcome.lines[-SHOWN:]))
        print(f"{options.scenario.name}: {outcome.verdict} after {outcome.seconds:.1f} virtual seconds")
        return 1 if outcome.failed else 0
    base = Scenario(
        groups=options.groups,
        shards=max(options.shards, options.groups),
        steps=options.steps,
        save_every=int(options.checkpoints),
        copy_every=int(options.copies),
        check_every=int(options.flips),
        lighthouses=1 + int(options.lighthouses),
    )
    return sweep(options, base, LOST_MESSAGES if options.lost_messages else ())


if __name__ == "__main__":
    sys.exit(main())
