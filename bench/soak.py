"""Hours of mixed trouble: does anything grow, and are the bits still those of a quiet run?

    python bench/soak.py --minutes 120

Groups of two ranks (FSDP2, with step.guard(), so that single ranks are replaced in living groups) train under kills,
stops and lost lighthouses at a fixed seed. Lighthouse, agent and ranks are sampled meanwhile: memory, threads, files,
sockets, shared memory. What rises with the number of faults (bench/growth.py) is a leak and fails the run, as does a
hash that is not that of one quiet group, which trains beside them at the lowest priority. When the time is over no
fault comes any more, and what is left of the steps is made without pauses; Ctrl-C shows what was found until then.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench import growth, report
from planaria.chaos import schedule
from planaria.chaos.inject import Injected
from planaria.chaos.session import LocalRun, Script, end, run_command, spawn, trouble
from planaria.chaos.verify import read_records
from planaria.chaos.watch import Watch, agent_pid
from planaria.core.messages import Event
from planaria.errors import PlanariaError, UsageError

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "e2e" / "scripts" / "parallel.py"
KILL, STOP, LIGHTHOUSE = schedule.Kind.KILL, schedule.Kind.STOP, schedule.Kind.LIGHTHOUSE
# One lighthouse in some two hundred faults: nothing can be seen of one that lives for three.
KINDS = (LIGHTHOUSE, *(KILL, KILL, KILL, STOP) * 50)
RANKS = 2
PAUSE = 0.1  # seconds in every shard: with steps of 0.2 s nothing is bound by the processor on two cores
STEP = 0.3  # seconds, recoveries from a fault every four seconds included
EVERY = 4.0  # seconds from one fault to the next, on average
NEWS = 600.0  # seconds between two lines that say that all is well
SHM = Path("/dev/shm")


class Samples:
    """Of every process of a run, by who it is. Looks at most once in ``pause`` seconds; after ``seconds`` it makes the
    file that ends the pauses."""

    def __init__(self, directory: Path, run: LocalRun, pause: float, seconds: float, hurry: Path) -> None:
        self.found: defaultdict[str, list[growth.Sample]] = defaultdict(list)
        self.faults = 0
        self._directory, self._run, self._pause, self._hurry = directory, run, pause, hurry
        self._due, self._began = 0.0, time.monotonic()
        self._over, self._news = self._began + seconds, self._began + NEWS

    def look(self, watch: Watch, done: Sequence[Injected], _: Sequence[Event]) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due, self.faults = now + self._pause, len(done)
        if now >= self._over:
            self._hurry.touch()
        if now >= self._news:
            self._news += NEWS
            print(f"{(now - self._began) / 60:.0f} min: {len(done)} faults, step {watch.step}", flush=True)
        if (agent := agent_pid(self._directory)) is not None:
            self._take("agent", agent, len(done))
        if (lighthouse := self._run.lighthouse()) is not None:
            self._take(f"lighthouse {lighthouse[0]}", lighthouse[0], len(done))
        for life in watch.newest():
            for rank, process in life.processes.items():
                if process.alive:
                    self._take(f"group {life.member.group} rank {rank} pid {process.pid}", process.pid, len(done))

    def _take(self, who: str, pid: int, events: int) -> None:
        if (found := growth.sample(pid, events)) is not None:
            self.found[who].append(found)


def digests(directory: Path) -> set[str]:
    return {record.digest for record in read_records([directory]).values() if record.digest}


class Quiet:
    """A run of the same without faults. It takes as long, so it is made beside the other, of what that leaves of the
    machine. ``stop`` it."""

    def __init__(self, words: Sequence[str], directory: Path) -> None:
        self._directory, self._log = directory, directory / "run.log"
        directory.mkdir(parents=True, exist_ok=True)
        script = Script(SCRIPT, tuple(words), 1, None, "cpu", RANKS)
        command = ["nice", "-n", "19", *run_command(script, directory, ["--quiet"])]
        self._process = spawn(command, dict(os.environ), self._log)

    def digests(self) -> set[str]:
        """Once it has ended. Raises PlanariaError."""
        if (code := self._process.wait()) != 0:
            raise PlanariaError(f"the quiet run ended with exit code {code}; see {self._log}")
        return digests(self._directory)

    def stop(self) -> None:
        end(self._process)


def table(found: dict[str, list[growth.Sample]]) -> tuple[list[str], list[str]]:
    """Lines for people, and those of them that are leaks."""
    lines, leaks = [], []
    for who, samples in sorted(found.items()):
        for each in growth.growth(samples):
            line = (
                f"{who:28} {each.what:8} {each.first:10.0f} -> {each.last:10.0f} over {each.events:5} faults: "
                f"{each.slope:+9.3f} a fault, by chance {each.chance:.2g}"
            )
            lines.append(line)
            if each.leaks:
                leaks.append(line)
    return lines, leaks


def judged(samples: Samples) -> list[str]:
    """Print what was found. The lines about leaks."""
    lines, leaks = table(samples.found)
    shown = [line for line in lines if not line.startswith("group")] + [line for line in leaks if line[:5] == "group"]
    print("\n".join(shown))
    print(f"{len(samples.found)} processes, {len(lines)} quantities judged, {len(leaks)} that grow with the faults")
    return leaks


def trials(args: argparse.Namespace) -> list[schedule.Fault]:
    """For long spans one rank of every group is spared, and outlives dozens of its neighbour's lives: were all struck
    alike, none would be old enough to be judged."""
    faults = schedule.random_schedule(args.seed, KINDS, args.groups, int(args.minutes * 60 / args.every), args.every)
    span = max(40, len(faults) // 8)
    return [replace(fault, rank=1 - number // span % RANKS) for number, fault in enumerate(faults)]


def soak(args: argparse.Namespace, directory: Path) -> int:
    steps = max(20, int(args.minutes * 60 / STEP))
    words = ("fsdp", "--guard", "--steps", str(steps))
    quiet = Quiet(words, directory / "quiet")
    try:
        return compared(args, directory, steps, words, quiet)
    finally:
        quiet.stop()


def compared(args: argparse.Namespace, directory: Path, steps: int, words: Sequence[str], quiet: Quiet) -> int:
    seconds, hurry = args.minutes * 60, directory / "hurry"
    hurry.unlink(missing_ok=True)
    faults = trials(args)
    options = ("--quiet", "--nproc-per-group", str(RANKS), "--max-replacements", str(100 + 4 * len(faults)))
    script = Script(SCRIPT, (*words, "--pause", str(PAUSE), "--hurry", str(hurry)), args.groups, None, "cpu")
    run = LocalRun(script, directory / "run", options)
    samples = Samples(directory / "run", run, args.sample, seconds, hurry)
    shm = len(list(SHM.iterdir())) if SHM.is_dir() else 0
    try:
        troubled = trouble(run, faults, args.groups, samples.look)
    except KeyboardInterrupt:
        print(f"ended by hand after {samples.faults} faults; no hash is compared", flush=True)
        judged(samples)
        return 130
    troubled.watch.close()
    done, left = len(troubled.injected), troubled.left
    print(f"{done} faults in {troubled.seconds / 60:.1f} minutes, {left} that came too late; {steps} steps", flush=True)
    leaks = judged(samples)
    if args.json:
        report.write_json(args.json, {who: [_plain(each) for each in s] for who, s in samples.found.items()})
    if troubled.exit_code != 0:
        print(f"the run ended with exit code {troubled.exit_code}; see {run.log}", file=sys.stderr)
        return 1
    found, wanted = digests(directory / "run"), quiet.digests()
    same = found == wanted and len(wanted) == 1
    print(f"hash: {', '.join(sorted(found))}: {'that of a quiet run' if same else f'NOT {wanted}'}")
    if (now := len(list(SHM.iterdir())) if SHM.is_dir() else 0) > shm:
        print(f"{now - shm} more files in {SHM} than before (other programs of this machine count too)")
    return 0 if same and not leaks else 1


def _plain(each: growth.Sample) -> list[int]:
    return [each.events, each.files, each.sockets, each.threads, each.memory, each.shared]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--minutes", type=float, default=120.0, help="about (default: %(default)s)")
    p.add_argument("--groups", type=int, default=2)
    p.add_argument("--every", type=float, default=EVERY, help="seconds between faults (default: %(default)s)")
    p.add_argument("--sample", type=float, default=2.0, help="seconds between samples (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the faults")
    p.add_argument("--dir", type=Path, help="keep the logs here")
    p.add_argument("--json", metavar="FILE", help="write all samples")
    args = p.parse_args()
    if min(args.minutes, args.every, args.sample) <= 0 or args.groups < 2:
        raise UsageError("--minutes, --every and --sample must be more than 0, and --groups at least 2")
    if args.dir and args.dir.exists() and any(args.dir.iterdir()):
        raise UsageError(f"{args.dir} is not empty: what an earlier run left there would be taken for this one's")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number in (signal.SIGINT, signal.SIGTERM):  # however it is ended, also in the background of a script
        signal.signal(number, signal.default_int_handler)
    # Every process that ever was is looked at by a file.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(report.header(report.environment()), flush=True)
    with tempfile.TemporaryDirectory(prefix="planaria-soak-") as made:
        return soak(args, args.dir or Path(made))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlanariaError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # in the quiet run, or before there was anything to be shown
        sys.exit(130)
