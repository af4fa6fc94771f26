"""Everything about training on GPUs that Planaria promises, in one command and one table.

    python bench/gpu_train.py --json gpu_train.json                    # all GPUs, about five minutes on two H200s
    python bench/gpu_train.py --device cpu --size tiny                 # to try it without GPUs, about a minute

One rank per group and one group per GPU; with four GPUs or more also two groups of two ranks with FSDP2. Parts:

- ``step``: a healthy step of torch DDP, Planaria fast and Planaria tree, in turns (see bench/step.py), and the memory.
- ``recovery``, ``recovery-small``: SIGKILL of groups, with the large and with the small model.
- ``bits``, ``bits-fsdp`` (``bits-fsdp2``, ``recovery-fsdp2``: groups of two ranks): the final hash under kills and
  that of a quiet run, with deterministic kernels.
- ``determinism``: what deterministic kernels cost and which ones (see bench/determinism.py). One GPU.

Every part is a process of its own with a time limit: one that hangs or breaks takes nothing from the others. What was
measured is written after each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import report
from bench.contestants import BenchError, Contestant, Ddp, Planaria, end_in_order, end_tree
from bench.transformer import SHAPES
from bench.workload import Config

HERE = Path(__file__).resolve().parent
GB = 1e9
LARGE = {"full": "llm-0.8B", "tiny": "llm-tiny"}
SMALL = {"full": "llm-20M", "tiny": "llm-tiny"}
# Seconds that a part may take, several times what it needs on two H100s. A part of kills ends itself a little before.
LIMITS = {
    "recovery-small": 70.0,  # first: if this fails, so will all others of its kind
    "step": 110.0,
    "recovery": 140.0,
    "bits": 80.0,
    "bits-fsdp": 80.0,
    "bits-fsdp2": 90.0,
    "recovery-fsdp2": 80.0,
    "determinism": 110.0,
}
ONLY_WITH_FOUR = ("bits-fsdp2", "recovery-fsdp2")
LEAVE = 25.0  # seconds that a run is given to end in order: see planaria.chaos.session


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default="", help=f"of {', '.join(LIMITS)} (default: all that the GPUs are enough for)")
    p.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    p.add_argument("--size", default="full", choices=("full", "tiny"))
    p.add_argument("--groups", type=int, default=0, help="default: one per GPU, two on CPUs")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--kills", type=int, default=6)
    p.add_argument("--batch", type=int, default=0, help="sequences per group and step of the large model")
    p.add_argument("--patience", type=float, default=1.0, help="factor on all time limits")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured, after each part")
    p.add_argument("--part", default="", help=argparse.SUPPRESS)  # what the command calls itself for
    return p.parse_args()


def gpus() -> list[str]:
    """Their names and memories; asked in a process of its own, for this one must not hold any."""
    code = "import torch; c = torch.cuda; print([(p.name, p.total_memory) for p in map(c.get_device_properties, "
    code += "range(c.device_count()))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise BenchError(f"asking torch for GPUs failed:\n{done.stderr[-800:]}")
    return [f"{name}, {memory / GB:.1f} GB" for name, memory in eval(done.stdout)]


def config_of(args: argparse.Namespace, size: str, mode: str, **more: Any) -> Config:
    batch = args.batch if args.batch and size == LARGE["full"] else SHAPES[size].batch
    return Config(mode, "", args.groups, size, device=args.device, batch=batch, **more)


# --- parts ------------------------------------------------------------------------------------------------------


def step(args: argparse.Namespace, directory: Path, limit: float) -> dict[str, Any]:
    size = LARGE[args.size]
    rejected: list[int] = []
    # Round 0 warms up, the one after the last is traced, and one more is never begun: nobody is to end, and hash its
    # weights, while others are still timed.
    after = args.rounds + 1
    config = config_of(args, size, "blocks", warmup=3, steps=10, blocks=after + 2, traced=after)
    while True:
        try:
            return {"size": size, "batch": config.batch, "too_large": rejected, **_side_by_side(args, config)}
        except BenchError as error:
            if "out of memory" not in str(error) or config.batch < 2:
                raise
            rejected.append(config.batch)
            config = replace(config, batch=config.batch // 2)


def _side_by_side(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    from bench.step import measure

    line_up: list[Contestant] = [Ddp("ddp", config), *(Planaria(f"planaria {r}", config, r) for r in ("fast", "tree"))]
    try:
        records = measure(line_up, args.rounds, 0.0, together=(os.cpu_count() or 1) >= 8)
        traces = {}
        for contestant in line_up:
            contestant.arrive(args.rounds + 1)
            contestant.run_block(args.rounds + 1)
            traces[contestant.name] = contestant.trace()
    finally:
        for contestant in line_up:
            contestant.stop()

    def of(name: str, key: str) -> dict[int, float]:
        return {r["round"]: r[key] for r in records if r["name"] == name}

    def memory(name: str, key: str) -> int:
        return max((m[key] for r in records if r["name"] == name for m in r["memory"]), default=0)

    found = {}
    for contestant in line_up:
        name = contestant.name
        extra = (memory(name, "peak") - memory("ddp", "peak")) / SHAPES[config.size].parameters
        found[name] = {
            "ms": vars(report.spread([v * 1e3 for v in of(name, "median").values()])),
            "ratio": vars(report.spread(report.paired_ratios(of(name, "median"), of("ddp", "median")))),
            "ratio_of_means": vars(report.spread(report.paired_ratios(of(name, "mean"), of("ddp", "mean")))),
            "peak_bytes": memory(name, "peak"),
            "held_bytes": memory(name, "held"),
            "extra_bytes_per_parameter": extra,
        }
    return {"contestants": found, "records": records, "traces": traces}


def recovery(size: dict[str, str]) -> Callable[[argparse.Namespace, Path, float], dict[str, Any]]:
    def part(args: argparse.Namespace, directory: Path, limit: float) -> dict[str, Any]:
        from bench import kills

        name = size[args.size]
        config = config_of(args, name, "steps", steps=0, sleep=0.02 if args.size == "tiny" else 0.0)
        state = 12 * SHAPES[name].parameters  # fp32: the parameter and two moments
        return kills.recovery(config, directory, args.kills, 3.0, limit - LEAVE, state)

    return part


def recovery_fsdp2(args: argparse.Namespace, directory: Path, limit: float) -> dict[str, Any]:
    from bench import kills

    args.groups = max(args.groups // 2, 2)
    config = config_of(args, SMALL[args.size], "steps", steps=0, fsdp=True)
    state = 12 * SHAPES[config.size].parameters // 2
    return kills.recovery(config, directory, args.kills, 3.0, limit - LEAVE, state, nproc=2)


def bits(fsdp: bool, ranks: int = 1) -> Callable[[argparse.Namespace, Path, float], dict[str, Any]]:
    def part(args: argparse.Namespace, directory: Path, limit: float) -> dict[str, Any]:
        from bench import kills

        args.groups = max(args.groups // ranks, 2)
        # The pause leaves room for kills; it changes no bits, and the quiet run has none.
        steps, sleep = (250, 0.03) if args.size == "full" else (150, 0.02)
        config = config_of(args, SMALL[args.size], "steps", steps=steps, sleep=sleep, fsdp=fsdp, deterministic=True)
        return kills.bits(config, directory, args.kills - 2, 2.0, limit - LEAVE, ranks)

    return part


def determinism(args: argparse.Namespace, directory: Path, limit: float) -> dict[str, Any]:
    size, found = LARGE[args.size], {}
    batch = args.batch if args.size == "full" else 0
    for key, more in (("measured", []), ("plain", ["--plain"])):
        out = directory / f"{key}.json"
        command = [sys.executable, str(HERE / "determinism.py"), "--size", size, "--device", args.device]
        command += ["--batch", str(batch), "--json", str(out), *more]
        environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
        if done.returncode:
            raise BenchError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        found[key] = json.loads(out.read_text())
    return found


PARTS: dict[str, Callable[[argparse.Namespace, Path, float], dict[str, Any]]] = {
    "step": step,
    "recovery": recovery(LARGE),
    "recovery-small": recovery(SMALL),
    "bits": bits(False),
    "bits-fsdp": bits(True),
    "bits-fsdp2": bits(True, 2),
    "recovery-fsdp2": recovery_fsdp2,
    "determinism": determinism,
}


# --- what came of it ----------------------------------------------------------------------------------------------

Row = list[str]  # part, figure, measured, target, met
HEADER = ("part", "figure", "measured", "target", "met")


def row(part: str, what: str, text: str, target: str = "", met: bool | None = None) -> Row:
    return [part, what, text, target, "" if met is None else "yes" if met else "NO"]


def spread_of(values: list[Any], digits: int = 2) -> tuple[float, str]:
    spread = report.spread([float(v) for v in values if v is not None])
    return spread.median, spread.text(digits)


def rows_of_step(part: str, found: dict[str, Any]) -> list[Row]:
    rows = []
    for name, target in (("ddp", math.inf), ("planaria fast", 1.0), ("planaria tree", 1.03)):
        of = found["contestants"][name]
        rows.append(row(part, f"{name}: step ms, batch {found['batch']}", report.Spread(**of["ms"]).text(2)))
        if name == "ddp":
            continue
        ratio = report.Spread(**of["ratio"])
        rows.append(row(part, f"{name}: x DDP", ratio.text(3), f"<= {target:.2f}", ratio.median <= target))
    for name, of in found["contestants"].items():
        if not of["peak_bytes"]:
            continue  # no GPU, no such record
        text = f"{of['peak_bytes'] / GB:.2f} peak, {of['held_bytes'] / GB:.2f} held"
        for rank, trace in enumerate(found["traces"][name]):
            if trace:
                others = sum(trace["others"].values())
                busy = f"{trace['busy']:.2f} busy, {trace['idle']:.2f} idle, other streams {others:.2f}"
                rows.append(row(part, f"{name}: rank {rank}, ms of a step", busy))
        rows.append(row(part, f"{name}: GB of the device", text))
        rows.append(row(part, f"{name}: peak over DDP, B/parameter", f"{of['extra_bytes_per_parameter']:.2f}"))
    return rows


def rows_of_recovery(part: str, found: dict[str, Any]) -> list[Row]:
    faults = found["faults"]
    whole = found["kills"] == found["kills_wanted"] and not found["exit_code"]
    less, less_text = spread_of([f["less_one_step"] for f in faults])
    lost = found["steps_discarded"], found["shards_lost"]
    healing = spread_of([f.get("healing") or None for f in faults], 3)[1]
    rate = "-" if found["healing_gb_s"] is None else f"{found['healing_gb_s']:.1f} GB/s"
    return [
        row(part, "kills", f"{found['kills']} of {found['kills_wanted']}, {found['steps']} steps", "all", whole),
        row(part, "healthy step ms", "-" if not found["healthy_step"] else f"{found['healthy_step'] * 1e3:.1f}"),
        row(part, "SIGKILL to next commit s", spread_of([f["next_commit"] for f in faults])[1]),
        row(part, "the same less one step s", less_text, "<= 0.40", less <= 0.4),
        row(part, "group takes part again s", spread_of([f["back"] for f in faults])[1]),
        row(part, "of that: born", spread_of([f.get("born") for f in faults])[1]),
        row(part, "of that: device, model, warm-up", spread_of([f.get("built") for f in faults])[1]),
        row(part, f"of that: healing {found['state_bytes'] / GB:.2f} GB", f"{healing}, {rate}"),
        row(part, "steps discarded, shards lost", f"{lost[0]}, {lost[1]}", "0, 0", lost == (0, 0)),
    ]


def rows_of_bits(part: str, found: dict[str, Any]) -> list[Row]:
    what = f"hash after {found['kills']} kills = quiet"
    digest = ",".join(d[:12] for d in found["digests"]) or "none"
    text = f"{digest} / {found['quiet_digest'][:12] or 'none'}, {found['committed']} of {found['steps']} steps"
    lost = found["steps_discarded"], found["shards_lost"]
    return [
        row(part, what, text, "equal", found["identical"] and found["kills"] > 0),
        row(part, "SIGKILL to next commit s", spread_of(found["next_commit"])[1]),
        row(part, "steps discarded, shards lost", f"{lost[0]}, {lost[1]}", "0, 0", lost == (0, 0)),
    ]


def rows_of_determinism(part: str, found: dict[str, Any]) -> list[Row]:
    measured, plain = found["measured"], found["plain"]["ms"]
    rows = [row(part, "forward+backward ms, CUBLAS_WORKSPACE_CONFIG unset", f"{plain:.2f}")]
    for name, of in measured["final"].items():
        ratio, last = report.Spread(**of["ratio"]), name == measured["best"]["name"]
        target = ("<= 1.08", ratio.median <= 1.08) if last else ("", None)
        rows.append(row(part, f"{name}: ms, x default", f"{of['ms']:.2f}, {ratio.text(3)}", *target))
    return rows


def rows_of(part: str, found: dict[str, Any]) -> list[Row]:
    if "failed" in found:
        return [row(part, "failed", found["failed"].strip().splitlines()[-1][:100], "", False)]
    kind = part.split("-")[0]
    of = {"step": rows_of_step, "recovery": rows_of_recovery, "bits": rows_of_bits, "determinism": rows_of_determinism}
    return of[kind](part, found)


# --- running ------------------------------------------------------------------------------------------------------


def run_part(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """In a process of its own. Whatever becomes of it, give a result."""
    limit = LIMITS[part] * args.patience
    with tempfile.TemporaryDirectory(prefix="planaria-gpu-", ignore_cleanup_errors=True) as temporary:
        out, log = Path(temporary, "result.json"), Path(temporary, "log")
        command = [sys.executable, str(HERE / "gpu_train.py"), "--part", part, "--json", str(out)]
        for name in ("device", "size", "groups", "rounds", "kills", "batch", "patience"):
            command += [f"--{name}", str(getattr(args, name))]
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"nothing after {limit:.0f} s"
        finally:
            end_tree(process)
        found: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError):
            found = json.loads(out.read_text())
        text = log.read_text(errors="replace")
        print(text if part == "determinism" or not found else text[-1500:], flush=True)
        if not found:
            found = {"failed": f"{text[-6000:]}\nended with {code}"}
        return {**found, "part_seconds": time.monotonic() - began}


def part_main(args: argparse.Namespace) -> int:
    end_in_order()
    with tempfile.TemporaryDirectory(prefix="planaria-gpu-", ignore_cleanup_errors=True) as directory:
        limit = LIMITS[args.part] * args.patience
        result = PARTS[args.part](args, Path(directory), limit)
        report.write_json(args.json, result)
    return 0


def main() -> int:
    args = parse()
    if args.part:
        return part_main(args)
    end_in_order()
    cards = gpus() if args.device == "cuda" else []
    if args.device == "cuda" and len(cards) < 2:
        print(f"needs two GPUs, found {len(cards)}: only determinism can be measured", file=sys.stderr)
    args.groups = args.groups or len(cards) or 2
    parts = [p for p in args.parts.split(",") if p] or [p for p in LIMITS if p not in ONLY_WITH_FOUR or len(cards) >= 4]
    if unknown := set(parts) - set(LIMITS):
        raise BenchError(f"unknown parts {', '.join(sorted(unknown))}; known: {', '.join(LIMITS)}")
    result: dict[str, Any] = {"environment": report.environment() | {"gpus": cards}, "arguments": vars(args)}
    print(report.header(result["environment"]), flush=True)
    result["parts"], rows = {}, []
    for part in parts:
        found = result["parts"][part] = run_part(args, part)
        new = rows_of(part, found)
        rows += new
        print(f"\n{report.table(HEADER, new)}\n{part}: {found['part_seconds']:.0f} s\n", flush=True)
        if args.json:
            report.write_json(args.json, result)
    print(report.table(HEADER, rows))
    return 1 if any("failed" in found for found in result["parts"].values()) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
