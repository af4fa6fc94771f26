"""``planaria chaos``: train under a seeded schedule of faults, and prove that nothing came of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from planaria.chaos import report, schedule, session
from planaria.chaos.schedule import Kind
from planaria.chaos.verify import Record, read_records
from planaria.cli.chaos_view import View, Waiting
from planaria.cli.logdir import check_writable
from planaria.core.bitflips import GRADIENT, TARGETS, VARIABLE
from planaria.core.exits import EXIT_INTERRUPTED
from planaria.engines.devices import find
from planaria.errors import PlanariaError, UsageError
from planaria.wire.checks import MAX_RANK


def chaos(
    script: Annotated[Path, typer.Argument(help="The training script; its own arguments follow after --.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    groups: Annotated[int, typer.Option(help="Replica groups.")] = 4,
    nproc_per_group: Annotated[int, typer.Option(help="Processes in a group.")] = 1,
    shards: Annotated[int | None, typer.Option(help="Shards of a step; default: what the script says.")] = None,
    every: Annotated[str, typer.Option(help="Mean time between faults: 2s, 500ms, 1m.")] = "2s",
    kills: Annotated[int, typer.Option(help="How many faults, of all kinds together.")] = 50,
    kinds: Annotated[str, typer.Option(help="kill,stop,partition,bitflip,lighthouse. Partitions need root.")] = "kill",
    flips: Annotated[
        str, typer.Option(help="What bits flip in: parameter,moment,gradient. Low communication: gradient if exact.")
    ] = ",".join(TARGETS),
    seed: Annotated[int, typer.Option(help="Of the schedule.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU for every rank, else cpu.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also train alone without faults, and compare.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole record here.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Run directory; default: a new one in planaria_logs.")] = None,
) -> None:
    """Train SCRIPT under a seeded schedule of faults. Exit code 0 only if nothing was lost or discarded
    and, with --verify, every bit is that of a quiet run."""
    chosen = schedule.parse_kinds(kinds)
    gap = schedule.parse_seconds(every)
    _check(script, groups, kills, chosen, nproc_per_group)
    if json_file is not None:
        check_writable(json_file, "--json")
    faults = schedule.random_schedule(seed, chosen, groups, kills, gap, schedule.parse_targets(flips))
    directory = new_directory(log_dir, "chaos")
    console = Console()
    device = device or device_for(console, groups * nproc_per_group, Kind.PARTITION in chosen)
    what = session.Script(script, tuple(args or ()), groups, shards, device, nproc_per_group)
    asked = {
        "script": str(script),
        "args": list(what.args),
        "groups": groups,
        "nproc_per_group": nproc_per_group,
        "shards": shards,
        "device": device,
        "every": gap,
        "kills": kills,
        "kinds": [kind.value for kind in chosen],
        "flips": flips,
        "seed": seed,
    }
    code = prove(console, what, faults, directory, Proof(verify, json_file, asked))
    raise typer.Exit(code)


class Proof:
    """What is wanted beside the run: a quiet run to compare with, a record, a picture."""

    def __init__(
        self,
        verify: bool,
        json_file: Path | None,
        asked: dict[str, Any],
        plot: Path | None = None,
        all_faults: bool = False,
    ) -> None:
        self.verify = verify
        self.json_file = json_file
        self.asked = asked
        self.plot = plot
        self.all_faults = all_faults  # whether it proves nothing if some fault did not come to pass


def prove(
    console: Console,
    script: session.Script,
    faults: tuple[schedule.Fault, ...],
    directory: Path,
    proof: Proof,
) -> int:
    """Run, judge, print, write down. Returns the exit code."""
    with ending_in_order():
        try:
            return _prove(console, script, faults, directory, proof)
        except KeyboardInterrupt:
            console.print("interrupted; everything that was started has been ended")
            return EXIT_INTERRUPTED


def _prove(
    console: Console,
    script: session.Script,
    faults: tuple[schedule.Fault, ...],
    directory: Path,
    proof: Proof,
) -> int:
    run = deployment(script, directory, faults)
    where = " on the CPU" if script.device == "cpu" else ""
    console.print(f"{script.groups} groups{where}, {len(faults)} faults to come; logs in {directory}", soft_wrap=True)
    with View(console, script.path.name) as view:
        troubled = session.trouble(run, faults, script.groups, view.show)
    try:
        if troubled.exit_code != 0 and not troubled.watch.step:
            raise failed(troubled.exit_code, run.log)  # it never trained: there is nothing to judge
        wanted = proof.verify and troubled.exit_code == 0
        quiet = _quiet(console, script, troubled, directory) if wanted else None
        verdict = session.verdict_of(troubled, quiet)
    finally:
        troubled.watch.close()
    console.print(report.faults_table(verdict.costs))
    console.print(report.verdict_table(verdict, troubled))
    if troubled.left:
        early = f"the job ended after {troubled.seconds:.0f} s, too early for {troubled.left} of {len(faults)} faults"
        console.print(f"{early}; give the script more steps", soft_wrap=True)
    if proof.json_file is not None:
        body = report.record(verdict, troubled, proof.asked)
        proof.json_file.write_text(json.dumps(body, indent=1) + "\n")
    if proof.plot is not None:
        from planaria.chaos import plot

        plot.draw(proof.plot, verdict, quiet, troubled.injected)
        console.print(f"loss curves: {proof.plot}", soft_wrap=True)
    if troubled.exit_code != 0:
        raise failed(troubled.exit_code, run.log)
    flips = sum(one.fault.kind is Kind.BITFLIP for one in troubled.injected)
    if troubled.caught < flips:
        return 1
    return 0 if verdict.good and not (proof.all_faults and troubled.left) else 1


def _quiet(console: Console, script: session.Script, troubled: session.Troubled, directory: Path) -> Record:
    shards = session.shards_of(read_records(troubled.watch.directories).values())
    alone = "alone, in one process" if script.nproc == 1 else "as one group"
    console.print(f"now the quiet run: the same script {alone}, without faults", soft_wrap=True)
    with Waiting(console, "training quietly") as waiting:
        return session.quiet_run(script, shards, directory / "quiet", waiting.tick)


def deployment(script: session.Script, directory: Path, faults: tuple[schedule.Fault, ...]) -> session.Deployment:
    """One agent with all groups; with partitions, a network namespace and an agent for each group."""
    # Every kill costs a replacement, and so does a stop that lasts; the default budget is for machines that
    # fail less often. What ranks print is in their own logs.
    options = ["--quiet", "--max-replacements", str(100 + 2 * len(faults))]
    if any(fault.kind is Kind.BITFLIP for fault in faults):
        os.environ[VARIABLE] = "1"  # the run's environment is this one's
        # Without rules of health: bits that flip on purpose say nothing of a GPU, which would be drained.
        options += ["--check-state", "1", "--health", "off"]
    if any(fault.target == GRADIENT for fault in faults):  # nothing else would see it
        options += ["--recheck", "1"]
    if any(fault.kind is Kind.PARTITION for fault in faults):
        from planaria.chaos.netns import NamespacedRun

        return NamespacedRun(script, directory, options)
    return session.LocalRun(script, directory, options)


def _check(script: Path, groups: int, kills: int, kinds: Sequence[Kind], nproc: int) -> None:
    if not script.is_file():
        raise UsageError(f"there is no script {script}")
    if groups < 2:
        raise UsageError(f"chaos needs at least 2 groups, so that one is left when another is lost; not {groups}")
    if kills < 0:
        raise UsageError(f"--kills must not be negative, not {kills}")
    if Kind.BITFLIP in kinds and groups < 3:
        raise UsageError(f"bit flips need at least 3 groups, so that two agree on what is right; not {groups}")
    if not 1 <= nproc <= MAX_RANK:
        raise UsageError(f"--nproc-per-group {nproc}: a group has between 1 and {MAX_RANK} processes")
    if Kind.PARTITION in kinds and nproc > 1:
        raise UsageError("networks are cut for groups of one process only; leave out partition, or --nproc-per-group")
    if Kind.PARTITION in kinds:
        from planaria.chaos import netns

        netns.require(groups)


def device_for(console: Console, ranks: int, partitions: bool) -> str | None:
    """``cpu``, and a line that says so, if there are GPUs but not one for every rank; else None: what there is.
    Groups in networks of their own are agents of their own, which would all take the same GPU."""
    if said := os.environ.get("PLANARIA_RUN_DEVICE"):
        return said  # the run would take it from there, and the quiet one must be like it
    found = len(find(os.environ).ids)
    if not found or (found >= ranks and not partitions):
        return None
    why = "are not used where networks are cut" if partitions else f"here are {found}, too few for {ranks} ranks"
    console.print(f"GPUs {why}: training on the CPU", soft_wrap=True)
    return "cpu"


def new_directory(given: Path | None, name: str) -> Path:
    """An absolute path for the logs, without traces of an earlier run. Raises UsageError if it has some."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    directory = (given or Path("planaria_logs", f"{name}-{stamp}-{os.getpid()}")).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"the log directory {directory} is not empty; give a new one")
    return directory


def failed(code: int, log: Path) -> PlanariaError:
    """The error for a run that failed, with the end of its own words."""
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    kind = UsageError if code == UsageError.exit_code else PlanariaError
    return kind("\n".join([f"the run exited with code {code}; the end of {log}:", *lines]))


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM ends this process the way Ctrl-C does: what it started is ended first."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
