"""The exchange on GPUs beside NCCL's own all-reduce and DDP: speed, bits, kills, healing, memory; one table.

One process per GPU, in the roles of members; rates and ratios are medians over rounds in which all ways take turns
after a barrier. Plain all-reduces work in place, on torch's ProcessGroupNCCL; ours leave what is submitted unchanged,
divide, look for NaN, and return when the result is there. For kills a warm standby waits on the last GPU; then the
member there is killed in the middle of an exchange and it takes part in its stead.

    python bench/gpu_exchange.py [--ranks 2] [--parameters 8e8] [--buckets 25 100] [--rounds 15] [--kills 12] [--heal 8]
    python bench/gpu_exchange.py --device cpu --parameters 3e6 --buckets 1 --heal 0.05 --kills 3
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# The server that forks the processes looks here for what it imports for all of them.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.environ["PYTHONPATH"])

import torch

from bench.gpu_rank import Options, copy_rates, rank_main
from planaria.core.messages import Member, Quorum, QuorumId

# Seconds for any one answer: far above what any takes. Then the process is asked where it is, and all are ended.
LIMIT = 60.0


# --- the parent -----------------------------------------------------------------------------------------------


class Process:
    def __init__(self, context: Any, member: Member, device: torch.device) -> None:
        self.member = member
        self.pipe, theirs = context.Pipe()
        self.control, their_control = context.Pipe()
        arguments = (member, device, theirs, their_control)
        self.process = context.Process(target=rank_main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        their_control.close()

    def receive(self) -> Any:
        if not self.pipe.poll(LIMIT):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(1)
            raise TimeoutError(f"{self.member} does not answer")
        return self.pipe.recv()

    def tell(self, name: str, *arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def answer(self) -> Any:
        fine, value = self.receive()
        if not fine:
            raise RuntimeError(f"{self.member}: {value}")
        return value


class Crew:
    """The processes of one part of the measurement."""

    def __init__(self, size: int, device: str) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "planaria.exchange.tree_exchange", "planaria.exchange.healing"])
        self.device, self.size, self.numbers, self.all = device, size, 0, []
        self.members = [self.start(group) for group in range(size)]

    def start(self, group: int) -> Process:
        device = torch.device(self.device, group) if self.device != "cpu" else torch.device("cpu")
        self.all.append(Process(self.context, Member(group, len(self.all)), device))
        return self.all[-1]

    def quorum(self) -> Quorum:
        self.numbers += 1
        members = tuple(each.member for each in self.members)
        return Quorum(QuorumId(1, self.numbers), members, tuple(each.address for each in self.members), True, "")

    def everyone(self, name: str, *arguments: Any) -> list[Any]:
        for each in self.members:
            each.tell(name, *arguments)
        return [each.answer() for each in self.members]

    def __enter__(self) -> Crew:
        for each in self.all:
            each.address = each.receive()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.all:
            each.process.kill()
            each.process.join()


@contextlib.contextmanager
def part(name: str) -> Iterator[None]:
    """A part that fails says so and does not keep the others from being measured."""
    began = time.monotonic()
    try:
        yield
    except Exception:
        failed.append(name)
        print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
    print(f"  ({name}: {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)


failed: list[str] = []


def row(what: str, value: str, remark: str = "") -> None:
    print(f"{what:<58} {value:>12}  {remark}".rstrip(), flush=True)


def show_speed(found: list[dict[str, Any]], options: Options) -> None:
    first = found[0]
    row("forming a communicator in a warm process", f"{max(f['forming'] for f in found):.2f} s")
    row("memory that NCCL takes", f"{(first['free before forming'] - first['free after forming']) / 1e6:.0f} MB")
    for megabytes in options.buckets:
        marks = first[f"{megabytes:g}"]
        what = f"all-reduce of {options.parameters / 1e9:.3g} B parameters in buckets of {megabytes:g} MB"
        row(what, f"{marks['plain'] * 1e3:.2f} ms")
        for way in ("fast", "tree"):
            row(f"  {way}", f"{marks[way] * 1e3:.2f} ms", f"{marks[way] / marks['plain']:.3f} x plain")
        row("  memory beyond what is submitted, bytes per parameter", f"{marks['extra bytes per parameter']:.2f}")
        row("  tree: same bits on all ranks", str(marks["same bits"]))


def kills(crew: Crew, options: Options) -> None:
    standbys = [crew.start(crew.size - 1) for _ in range(options.kills)]
    for each in crew.all:
        if not hasattr(each, "address"):
            each.address = each.receive()
        each.tell("prepare", options)
        each.answer()
    crew.everyone("steady", crew.quorum())
    totals, shares = [], []
    for standby in standbys:
        victim, others = crew.members[-1], crew.members[:-1]
        for each in others:
            each.tell("survive")
        victim.tell("be_killed")
        victim.answer()
        standby.tell("take_part")
        time.sleep(0.3)  # until all have enqueued what they can and wait for the one who holds back
        crew.members[-1] = standby
        quorum = crew.quorum()
        began = time.monotonic()
        victim.process.kill()
        for each in crew.members:
            each.control.send(quorum)
        marks = [each.answer() for each in crew.members]
        totals.append(max(each["done"] for each in marks) - began)
        shares.append((max(m["formed"] for m in marks) - began, max(m["lives"] for m in marks)))
    row(f"SIGKILL to a new exchange of all, {len(totals)} kills", f"{statistics.median(totals):.2f} s", "median")
    row("  fastest and slowest", f"{min(totals):.2f} {max(totals):.2f}", " ".join(f"{each:.2f}" for each in totals))
    row("  of which until the communicator was formed", f"{statistics.median(s[0] for s in shares):.2f} s", "median")
    row("  lives that had not ended after any of them", f"{max(s[1] for s in shares) - 1}")


def show_heal(found: list[list[dict[str, float]]], copy: float | None) -> None:
    healer, source = found[-1], found[0]
    for name, number in (("first time", 0), ("again", -1)):
        size, seconds = healer[number]["bytes"], healer[number]["seconds"]
        beside = f"{size / seconds / 1e9 / copy:.2f} x the copy rate" if copy else ""
        rate = f"{size / seconds / 1e9:.1f} GB/s"
        row(f"healing {size / 1e9:.2f} GB, {name}", f"{seconds * 1e3:.0f} ms", f"{rate} {beside}")
        pause, copied = (f"{source[number][name] * 1e3:.1f} ms" for name in ("pause", "copied"))
        row("  the source's thread pauses; its device has copied", pause, copied)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="default: one per GPU")
    parser.add_argument("--parameters", type=float, default=8.05e8)
    parser.add_argument("--buckets", type=float, nargs="+", default=[25, 100], help="MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="training steps per round")
    parser.add_argument("--tokens", type=int, default=8192, help="per training step")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--kill-parameters", type=float, default=6.4e7)
    parser.add_argument("--heal", type=float, default=8.0, help="GB")
    parser.add_argument("--skip", nargs="*", default=[], help="speed bits training heal kills")
    options = parser.parse_args()
    gpus = options.device == "cuda"
    count = torch.cuda.device_count() if gpus else 2
    size = options.ranks or count
    if size < 2 or (gpus and size > count):
        parser.error(f"{size} ranks with {count} GPUs: at least two, one GPU each")
    copy = None
    if gpus:
        from planaria.exchange.nccl import version

        row("machine", "", f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, NCCL {version()}")
    else:
        row("machine", "", f"CPU, torch {torch.__version__}")
    context = multiprocessing.get_context("forkserver")
    if gpus:
        with part("copy"):
            ours, theirs = context.Pipe()
            process = context.Process(target=copy_rates, args=(theirs,))
            process.start()
            assert ours.poll(LIMIT)
            copy, own = ours.recv()
            process.join()
            row("copy from one GPU to another; within one", f"{copy:.0f} GB/s", f"{own:.0f} GB/s read and written")
    with Crew(size, options.device) as crew:
        if "bits" not in options.skip:
            with part("bits"):
                row("tree: bits of the definition on a CPU, all ranks", str(all(crew.everyone("bits", crew.quorum()))))
        if gpus:
            with part("launching"):
                found = crew.everyone("launching", crew.quorum())[0]
                row("one launch of NCCL, host", f"{found.pop('launch us'):.0f} us")
                row("messages both ways at once, GB/s", "", "  ".join(f"{k}: {v:.0f}" for k, v in found.items()))
        if "speed" not in options.skip:
            with part("speed"):
                show_speed(crew.everyone("speed", crew.quorum(), options), options)
            if gpus and "training" not in options.skip:
                with part("training"):
                    found = crew.everyone("training", crew.quorum(), options)[0]
                    for way in ("ddp", "ddp, host waits", "fast", "tree"):
                        remark = f"{found[way] / found['ddp']:.3f} x DDP"
                        if (gap := found.get(f"gap {way}")) is not None:
                            remark += f", {gap:.2f} ms of it between backward and the optimizer"
                        row(f"training step, {way}", f"{found[way]:.2f} ms", remark)
        if "heal" not in options.skip:
            with part("heal"):
                show_heal(crew.everyone("heal", crew.quorum(), options.heal), copy)
    if options.kills and "kills" not in options.skip:
        with part("kills"), Crew(size, options.device) as crew:
            kills(crew, options)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
