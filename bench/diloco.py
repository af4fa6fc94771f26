"""The loss that low communication reaches, beside plain data parallel at equal tokens, and what each sends.

    python bench/diloco.py
    python bench/diloco.py --kill-every 15        # and with a group killed every 15 s

Each method is one ``planaria train`` of the reference model: the same data in the same order, the same inner optimizer
and learning rates. *Loss* is that of held-out text at the end (of the parameters that the groups share). *MB per step*:
what a group sends, in fp32, for each of its optimizer steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import BenchError
from planaria.chaos.session import with_home
from planaria.chaos.watch import Watch
from planaria.train.shapes import SHAPES
from planaria.train.tokens import Bytes

METHODS = {
    "data parallel": (),
    "local_sgd": ("--semi_sync.method=local_sgd",),
    "diloco": ("--semi_sync.method=diloco",),
    "diloco-exact": ("--semi_sync.method=diloco", "--semi_sync.exact=true"),
    "streaming": ("--semi_sync.method=streaming", "--semi_sync.num_fragments=2", "--semi_sync.fragment_sync_delay=2"),
}


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--methods", default=",".join(["data parallel", "diloco", "streaming"]), help=", ".join(METHODS))
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--steps", type=int, default=400, help="optimizer steps of every group")
    p.add_argument("--every", type=int, default=40, help="of them between two exchanges of a parameter")
    p.add_argument("--batch", type=int, default=4, help="sequences in a step of a group")
    p.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    p.add_argument("--flavor", default="debug", help="model.flavor: debug (0.4 million parameters), 3M")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--outer-lr", type=float, default=0.7)
    p.add_argument("--outer-momentum", type=float, default=0.9)
    p.add_argument("--mix", type=float, default=0.5, help="streaming: share of a group's own value")
    p.add_argument("--files", default="", help="text to train on; default: this package's own source")
    p.add_argument("--kill-every", type=float, default=0.0, metavar="S", help="seconds between kills; 0: none")
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def train(args: argparse.Namespace, method: str, directory: Path) -> tuple[float, float, int]:
    """(loss on held-out text, seconds, kills). Raises BenchError if it does not end well."""
    files = args.files or str(Path(__file__).resolve().parent.parent / "planaria" / "**" / "*.py")
    config = directory / "config.toml"
    config.write_text(f'[data]\nfiles = "{files}"\n')
    keys = {
        "job.dump_folder": directory / "out",
        "training.steps": args.steps,
        "training.seq_len": args.length,
        "training.local_batch_size": args.batch,
        "training.seed": args.seed,
        "model.flavor": args.flavor,
        "optimizer.lr": args.lr,
        "lr_scheduler.warmup_steps": args.steps // 10,
        "fault_tolerance.enable": "true",
        "fault_tolerance.group_size": args.groups,
        "semi_sync.sync_steps": args.every,
        "semi_sync.outer_lr": args.outer_lr,
        "semi_sync.outer_momentum": args.outer_momentum,
        "semi_sync.fragment_update_alpha": args.mix,
        "validation.enable": "true",
        "validation.freq": args.steps,
        "validation.steps": 32,
    }
    words = [*(f"--{key}={value}" for key, value in keys.items()), *METHODS[method]]
    command = [sys.executable, "-m", "planaria", "train", str(config), *words]
    env = with_home(os.environ | {"OMP_NUM_THREADS": "1", "PLANARIA_RUN_QUIET": "1"})
    began, kills, blows = time.monotonic(), 0, random.Random(args.seed)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            watch = Watch(directory / "out" / "logs") if args.kill_every else None
            due = began + args.kill_every
            while process.poll() is None:
                time.sleep(0.05)
                if watch is None:
                    continue
                watch.poll()
                there = [life for life in watch.settled() if life.alive and life.commits]
                if time.monotonic() > due and len(there) == args.groups:
                    os.kill(blows.choice(there).processes[0].pid, signal.SIGKILL)
                    kills, due = kills + 1, time.monotonic() + args.kill_every
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
    if process.returncode != 0:
        raise BenchError(f"{method} ended with {process.returncode}:\n{(directory / 'log').read_text()[-2000:]}")
    rows = [json.loads(row) for row in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["validation_loss"]), time.monotonic() - began, kills


def main() -> None:
    args = parse()
    numel = replace(SHAPES[args.flavor], vocab=-(-Bytes().size // 64) * 64).parameters
    sent = numel * 4 * 2 * (args.groups - 1) / args.groups / 1e6  # reduce-scatter and all-gather
    print(report.header(report.environment()))
    print(
        f"{args.groups} groups, {numel / 1e6:.1f} M parameters, {args.steps} steps of {args.batch} x {args.length} "
        f"bytes each, H = {args.every}, inner lr {args.lr:g}, outer {args.outer_lr:g} with momentum "
        f"{args.outer_momentum:g}\n"
    )
    print("| method | loss | beside data parallel | MB per step | kills | s |\n|---|---|---|---|---|---|")
    base = None
    for method in args.methods.split(","):
        with tempfile.TemporaryDirectory() as directory:
            loss, seconds, kills = train(args, method, Path(directory))
        base = loss if method == "data parallel" else base
        beside = "" if base is None else f"{(loss / base - 1) * 100:+.1f} %"
        each = sent if method == "data parallel" else sent / args.every
        print(f"| {method} | {loss:.4f} | {beside} | {each:.3f} | {kills} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
