"""What it costs to look for silent corruption: steps with and without, taking turns in one and the same run.

    python bench/corruption.py                                     # CPU
    python bench/corruption.py --device cuda --size llm-0.8B       # a GPU for each group

*parameters*: their checksum in every step, which is the least that --check-state does; *all, every N*: --check-state N,
optimizer state included; *recheck P*: --recheck P. All ways take turns, a block of steps each, in an order that goes
round; a figure is the ratio to the block without, of the same round. The run is `planaria run` with this file as its
script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.transformer import SHAPES

RARELY = 1 << 40  # steps: never due in a run
# (state is looked at every, share of shards that are computed twice); the first is what the others are compared with
WAYS = {
    "nothing": (0, 0.0),
    "parameters": (RARELY, 0.0),
    "all, every 10": (10, 0.0),
    "all, every step": (1, 0.0),
    "recheck 0.1": (0, 0.1),
    "recheck 1": (0, 1.0),
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="llm-20M", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--groups", type=int, default=2)
    p.add_argument("--batch", type=int, default=0, help="sequences of a shard (default: by size)")
    p.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons (default: all)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=10, help="of a block; the first is not counted")
    return p.parse_args()


def order(ways: list[str], rounds: int) -> list[str]:
    """Of all blocks; the first round warms up and is not counted."""
    return [way for number in range(rounds + 1) for way in report.rotated(ways, number)]


def work(args: argparse.Namespace) -> None:
    """A rank of the run."""
    from dataclasses import replace

    import torch

    import planaria.torch as pt
    from bench.transformer import Transformer, loss_of
    from planaria.core.corruption import Recheck

    shape = SHAPES[args.size]
    shape = replace(shape, batch=args.batch or shape.batch)
    job = pt.init(exact="bits", check_state=1, recheck=1.0)
    net = Transformer(shape).to(job.device)
    net.turn = tuple(each.to(job.device) for each in net.turn)
    net.embedding = "one-hot"  # deterministic, and fast on GPUs
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    job.protect(model=net, optimizer=optimizer)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (256, shape.length + 1), generator=generator)
    data = pt.ShardedDataset(torch.utils.data.TensorDataset(tokens), batch_size=shape.batch)
    blocks = order(args.ways.split(";"), args.rounds)
    times: list[list[float]] = [[] for _ in blocks]
    before = 0.0
    for step in job.steps(len(blocks) * args.steps):
        number, at = divmod(step.index, args.steps)
        every, share = WAYS[blocks[number]]
        session = step._worker.session  # all groups change over at the same step
        session.checks.every = every
        session.stepper.recheck = Recheck(share, 0) if share else None
        for (batch,) in step.batches(data):
            batch = batch.to(job.device)
            loss_of(net, (batch[:, :-1], batch[:, 1:])).backward()
        optimizer.step()
        if job.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if at:
            times[number].append(now - before)
        before = now
    if job.group == 0:
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(times))


def drive(args: argparse.Namespace) -> None:
    ways = args.ways.split(";")
    if unknown := [way for way in ways if way not in WAYS]:
        sys.exit(f"unknown ways {unknown}; known: {'; '.join(WAYS)}")
    with tempfile.TemporaryDirectory() as name:
        result = Path(name) / "times.json"
        command = [sys.executable, "-m", "planaria", "run", "--groups", str(args.groups), "--device", args.device]
        command += ["--log-dir", f"{name}/logs", __file__, *sys.argv[1:]]
        home = str(Path(__file__).resolve().parent.parent)
        env = {**os.environ, "BENCH_RESULT": str(result), "PYTHONPATH": home}
        if subprocess.run(command, env=env, check=False).returncode:
            sys.exit("the run failed")
        times = json.loads(result.read_text())
    blocks = order(ways, args.rounds)
    medians = [statistics.median(each) for each in times]
    rounds = [
        dict(zip(blocks[i : i + len(ways)], medians[i : i + len(ways)], strict=True))
        for i in range(0, len(blocks), len(ways))
    ]
    rows = []
    for way in ways:
        seconds = [each[way] for each in rounds[1:]]
        ratios = [each[way] / each[ways[0]] for each in rounds[1:]]
        rows.append([way, report.spread(seconds).text(1, 1000), report.spread(ratios).text(3)])
    print(report.header(report.environment()))
    print(f"{args.size}, {SHAPES[args.size].parameters / 1e6:.1f} M parameters, {args.groups} groups, {args.device}")
    print(report.table(["looking at", "step, ms", f"of {ways[0]}"], rows))


if __name__ == "__main__":
    (work if "PLANARIA_JOB" in os.environ else drive)(parse())
