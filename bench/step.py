"""Healthy step time, side by side: torch DDP on gloo, Planaria (fast and tree), torchft (default and tuned).

    python bench/step.py --peers ddp,torchft --rounds 7 --sizes 0.1M,3M,30M --groups 2

All contestants are alive at once and take turns: in each round, each runs a block of steps while the others
stand still, in an order that rotates. Same network, data, batch per group, optimizer (SGD) and threads (1). A
step's time is taken inside the workers and is the mean over ranks; a block's figure is the median of its
steps; ratios are taken within a round. Round 0 warms up and is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import BenchError, Contestant, Ddp, Planaria, Torchft, end_in_order
from bench.peers import Peer, PeerError, ensure
from bench.quiet import wait_quiet
from bench.workload import SIZES, Config

BLOCK = {"tiny": (10, 200), "0.1M": (10, 200), "3M": (5, 60), "30M": (2, 15)}  # warm-up and timed steps


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--peers", default="ddp,torchft", help="of ddp, torchft; empty for none (default: %(default)s)")
    p.add_argument("--ours", default="fast,tree", help="reductions of Planaria, empty for none (default: %(default)s)")
    p.add_argument("--settings", default="default,tuned", help="of torchft (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--sizes", default="0.1M,3M,30M", help=f"of {', '.join(SIZES)}")
    p.add_argument("--groups", type=int, default=2)
    p.add_argument("--steps", type=int, default=0, help="timed steps of a block (default: by size)")
    p.add_argument(
        "--quiet",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="wait before each round until others use less than this share of the machine (default: do not wait)",
    )
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    return p.parse_args()


def words(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


def line_up(args: argparse.Namespace, peer: Peer | None, size: str) -> list[Contestant]:
    warmup, steps = BLOCK[size]
    config = Config("blocks", "", args.groups, size, warmup, args.steps or steps, blocks=args.rounds + 1)
    found: list[Contestant] = []
    if "ddp" in words(args.peers):
        found.append(Ddp("ddp", config))
    found += [Planaria(f"planaria {r}", config, r) for r in words(args.ours)]
    if peer:
        for s in words(args.settings):
            found.append(Torchft(f"torchft {s}", replace(config, settings=s), peer))
    return found


def measure(contestants: list[Contestant], rounds: int, quiet: float, together: bool = False) -> list[dict[str, Any]]:
    """Run all rounds; give one record per block. ``together``: start all at once, for where cores abound."""
    by_name = {c.name: c for c in contestants}
    records: list[dict[str, Any]] = []
    for contestant in contestants:
        contestant.start()
        if not together:
            contestant.arrive(0)  # one after the other: imports of all at once would fill the cores for long
    for number in range(rounds + 1):  # round 0 warms up
        if quiet:
            wait_quiet(quiet)
        for name in report.rotated(list(by_name), number):
            by_name[name].arrive(number)
            watch = report.LoadWatch()
            seconds = by_name[name].run_block(number)
            mean = report.rank_mean(seconds)
            records.append(
                {
                    "round": number,
                    "name": name,
                    "median": statistics.median(mean),
                    "mean": statistics.fmean(mean),
                    "others": watch.others(),
                    "seconds": seconds,
                    "memory": by_name[name].memory(number),
                }
            )
    return [r for r in records if r["round"] > 0]


def summarize(size: str, names: list[str], records: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table for one size."""

    def by_round(name: str, key: str) -> dict[int, float]:
        return {r["round"]: r[key] for r in records if r["name"] == name}

    rows = []
    for name in names:
        row = [size, name, report.spread(list(by_round(name, "median").values())).text(2, 1e3)]
        for key in ("median", "mean"):
            base = by_round("ddp", key)
            row.append(report.spread(report.paired_ratios(by_round(name, key), base)).text(3) if base else "-")
        others = report.spread([r["others"] for r in records if r["name"] == name])
        rows.append([*row, f"{others.median:.0%} (max {others.high:.0%})"])
    return rows


HEADER = ("size", "contestant", "step ms", "x DDP (median step)", "x DDP (mean step)", "CPU of others")


def main() -> int:
    args = parse()
    end_in_order()
    peer = ensure() if "torchft" in words(args.peers) else None
    environment = report.environment(peer.versions if peer else None)
    print(report.header(environment), flush=True)
    result: dict[str, Any] = {"environment": environment, "arguments": vars(args), "sizes": {}}
    rows: list[list[str]] = []
    for size in words(args.sizes):
        contestants = line_up(args, peer, size)
        try:
            records = measure(contestants, args.rounds, args.quiet)
        finally:
            for contestant in contestants:
                contestant.stop()
        result["sizes"][size] = records
        new = summarize(size, [c.name for c in contestants], records)
        rows += new
        print("\n" + report.table(HEADER, new), flush=True)
        if args.json:
            report.write_json(args.json, result)
    print("\n" + report.table(HEADER, rows) if len(words(args.sizes)) > 1 else "")
    print(
        f"\n{args.groups} groups, batch 16 each; median (lowest..highest) over {args.rounds} rounds; "
        "a step = mean over ranks."
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BenchError, PeerError) as error:
        sys.exit(str(error))
