"""What recovery.py and goodput.py share: the line-up in free mode, one run after the other, and waiting."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bench import report
from bench.contestants import TORCHFT_LIGHTHOUSE, BenchError, Contestant, Planaria, Torchft, end_in_order
from bench.peers import Peer, ensure
from bench.workload import BATCH, SIZES, Config

START_LIMIT = 180.0  # seconds: imports of all groups at once on two busy cores, torchft's default join time of 60 s


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--peers", default="torchft", help="torchft, or empty for none (default: %(default)s)")
    p.add_argument("--settings", default="tuned,default", help=f"of torchft: {', '.join(TORCHFT_LIGHTHOUSE)}")
    p.add_argument("--ours", default="tree", help="reductions of Planaria, empty for none (default: %(default)s)")
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--shards", type=int, default=0, help="of Planaria, a divisor of 16 * groups (default: groups)")
    p.add_argument("--size", default="3M", choices=SIZES)
    p.add_argument("--sleep", type=float, default=0.02, help="seconds added to each step (default: %(default)s)")
    p.add_argument(
        "--restart-after",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds after which ended groups of "
        "torchft are started again; Planaria does it itself (default: at once)",
    )
    p.add_argument("--seed", type=int, default=0, help="of the choice of victims and moments")
    p.add_argument("--keep", action="store_true", help="keep the logs of the runs and say where they are")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")


def words(text: str) -> list[str]:
    return [w for w in text.split(",") if w]


def peer_of(args: argparse.Namespace) -> Peer | None:
    return ensure() if "torchft" in words(args.peers) else None


def line_up(args: argparse.Namespace, peer: Peer | None) -> list[Contestant]:
    config = Config("free", "", args.groups, args.size, sleep=args.sleep, shards=args.shards)
    found: list[Contestant] = [Planaria(f"planaria {r}", config, r) for r in words(args.ours)]
    if peer:
        for s in words(args.settings):
            found.append(Torchft(f"torchft {s}", replace(config, settings=s), peer, args.restart_after))
    for contestant in found:
        contestant.keep = args.keep
    return found


def full_step(args: argparse.Namespace) -> int:
    """Samples of a step when every group is there."""
    return int(args.groups) * BATCH


@contextlib.contextmanager
def running(contestant: Contestant) -> Iterator[Contestant]:
    """Started on entry; ended, with all its processes, on exit."""
    try:
        contestant.start()
        yield contestant
    finally:
        contestant.stop()


def let_run(contestant: Contestant, seconds: float) -> None:
    end = time.monotonic() + seconds
    contestant.wait(lambda: time.monotonic() >= end, seconds + 60, "time to pass")


def compare(
    args: argparse.Namespace, what: str, measure: Callable[[Contestant, argparse.Namespace], list[dict[str, Any]]]
) -> dict[str, Any]:
    """Measure one contestant after the other. The records come under ``what`` in the result; a contestant that fails
    is noted under "failed" and the others go on. --json is written after each, whatever came of it."""
    end_in_order()
    peer = peer_of(args)
    environment = report.environment(peer.versions if peer else None)
    print(report.header(environment), flush=True)
    result: dict[str, Any] = {"environment": environment, "arguments": vars(args), what: [], "failed": {}}
    for contestant in line_up(args, peer):
        try:
            result[what] += measure(contestant, args)
        except BenchError as error:
            print(error, file=sys.stderr, flush=True)
            result["failed"][contestant.name] = str(error)
        if args.json:
            report.write_json(args.json, result)
    return result
