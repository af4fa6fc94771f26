"""A run of Planaria under kills, judged by what the run itself wrote down: progress pages, metrics, digests.

Its other half is ``planaria.chaos``, which strikes and judges; here are the phases of a recovery, and runs that end as
soon as they have shown what they were for.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.contestants import BenchError
from bench.workload import Config
from planaria.chaos.inject import Injected
from planaria.chaos.schedule import Fault, Kind, random_schedule
from planaria.chaos.session import LocalRun, Script, Troubled, shards_of, trouble, verdict_of
from planaria.chaos.verify import read_records
from planaria.chaos.watch import Life, Watch
from planaria.core.messages import Event, Member, Phase

WORKER = Path(__file__).resolve().parent / "worker_planaria.py"
AFTER = 5  # commits of all groups after the last kill's group is back: the run at full strength again


class Enough(Exception):
    """The run has shown what it was for."""


@dataclass
class Recorder:
    """Follows a run; ends it when ``kills`` were made and overcome, or ``limit`` seconds after its start. 0 kills:
    never."""

    kills: int
    groups: int
    limit: float
    began: float = field(default_factory=time.monotonic)
    phases: dict[Member, list[tuple[Phase, int]]] = field(default_factory=dict)  # (phase, since), as seen
    events: list[Event] = field(default_factory=list)
    watch: Watch | None = None
    injected: tuple[Injected, ...] = ()
    late: bool = False

    def show(self, watch: Watch, injected: Sequence[Injected], events: Sequence[Event]) -> None:
        self.watch, self.injected = watch, tuple(injected)
        self.events += events
        for member, life in watch.lives.items():
            found, now = self.phases.setdefault(member, []), (life.view.phase, life.view.phase_since_ns)
            if not found or found[-1] != now:
                found.append(now)
        self.late = time.monotonic() - self.began > self.limit
        if self.late or (self.kills and len(injected) == self.kills and self._whole(watch, injected[-1])):
            raise Enough

    def _whole(self, watch: Watch, last: Injected) -> bool:
        newest = watch.newest()
        settled = len(watch.settled()) == self.groups
        return settled and all(sum(c.at_ns > last.at_ns for c in life.commits) >= AFTER for life in newest)

    def spent(self, member: Member, phase: Phase) -> float:
        """Seconds in ``phase``, of the intervals that were seen to end."""
        found = self.phases.get(member, [])
        return sum(b[1] - a[1] for a, b in pairwise(found) if a[0] is phase) / 1e9

    def first(self, member: Member, after: Phase) -> int:
        """When ``after`` was over for the first time (ns); 0: not seen."""
        return next((b[1] for a, b in pairwise(self.phases.get(member, [])) if a[0] is after), 0)


def run(
    config: Config, directory: Path, faults: tuple[Fault, ...], recorder: Recorder, nproc: int = 1, reduction: str = ""
) -> Troubled:
    """Until it ends or the recorder has enough. Raises Enough if it was late before every group had trained."""
    options = ["--device", config.device, "--nproc-per-group", str(nproc), "--quiet", "--max-replacements", "1000"]
    if reduction:
        options += ["--reduction", reduction]
    script = Script(WORKER, (config.to_json(),), config.groups, config.shard_count)
    with contextlib.suppress(Enough):
        return trouble(LocalRun(script, directory, options), faults, config.groups, recorder.show)
    assert recorder.watch is not None
    left = len(faults) - len(recorder.injected)
    return Troubled(0, time.monotonic() - recorder.began, recorder.watch, recorder.injected, left)


def tails(directory: Path, most: int = 3) -> str:
    """What ranks and the agent said last, for a run that went wrong."""
    logs = [directory / "run.log", *sorted(directory.glob("rg*/i*/**/stderr.log"))]
    texts = [(log, log.read_text(errors="replace")[-1500:]) for log in logs if log.exists()]
    return "\n".join(f"--- {log.relative_to(directory)}\n{text}" for log, text in texts[: most + 1] if text)


# --- recovery -------------------------------------------------------------------------------------------------


def recovery(
    config: Config, directory: Path, kills: int, every: float, limit: float, state: int, nproc: int = 1
) -> dict[str, Any]:
    """SIGKILL of groups, again and again. ``state``: bytes that a group heals."""
    recorder = Recorder(kills, config.groups, limit)
    faults = random_schedule(config.seed, (Kind.KILL,), config.groups, kills, every)
    troubled = run(config, directory, faults, recorder, nproc)
    if not troubled.injected:
        raise BenchError(f"no group was ever killed, for never were all of them at work\n{tails(directory)}")
    lives = list(troubled.watch.lives.values())
    step = healthy_step(lives, config)
    verdict = verdict_of(troubled, None)
    found = []
    for cost in verdict.costs:
        dead = cost.fault.member
        heir = min((m for m in recorder.phases if m.group == dead.group and m > dead), default=None)
        found.append(
            {
                "group": dead.group,
                "phase": None if cost.fault.phase is None else cost.fault.phase.name.lower(),
                "next_commit": cost.recovery,
                "less_one_step": None if cost.recovery is None or step is None else cost.recovery - step,
                "back": cost.back,
                **({} if heir is None else _birth(recorder, heir, cost.fault.at_ns)),
            }
        )
    heals = [one["healing"] for one in found if one.get("healing") and one["back"] is not None]
    result = {
        "kills": len(found),
        "kills_wanted": kills,
        "steps": verdict.committed,
        "steps_discarded": verdict.discarded,
        "shards_lost": verdict.shards_lost,
        "contradictions": list(verdict.contradictions),
        "healthy_step": step,
        "state_bytes": state,
        "healing_gb_s": state / statistics.median(heals) / 1e9 if heals else None,
        "exit_code": troubled.exit_code,
        "seconds": troubled.seconds,
        "faults": found,
        "events": [[round(e.at, 3), e.kind, e.group, e.text[:160]] for e in recorder.events][:200],
    }
    if troubled.exit_code or len(found) < kills or any(one["back"] is None for one in found):
        result["tails"] = tails(directory)
    return result


def _birth(recorder: Recorder, heir: Member, killed_ns: int) -> dict[str, Any]:
    """How the next life of a group came about, in seconds. ``built``: from its first sign until it said that it was
    ready: device, model, warm-up; ``healing``: the state taken and put in place."""
    born = recorder.phases[heir][0][1]
    built = recorder.first(heir, Phase.STARTING)
    return {
        "born": (born - killed_ns) / 1e9,
        "built": (built - born) / 1e9 if built else None,
        "healing": recorder.spent(heir, Phase.HEALING),
        "phases": [[phase.name.lower(), (since - killed_ns) / 1e9] for phase, since in recorder.phases[heir][:8]],
    }


def healthy_step(lives: Sequence[Life], config: Config) -> float | None:
    """Median seconds of a step in which every group computed its own shards and no more."""
    mine = config.shard_count // config.groups
    gaps = [
        (b.at_ns - a.at_ns) / 1e9
        for life in lives
        for a, b in pairwise(life.commits)
        if b.step == a.step + 1 and b.shards_computed - a.shards_computed == mine
    ]
    return statistics.median(gaps) if gaps else None


# --- bits -----------------------------------------------------------------------------------------------------


def bits(config: Config, directory: Path, kills: int, every: float, limit: float, nproc: int = 1) -> dict[str, Any]:
    """The same job twice at once, quietly in one group and under kills in all: are the final hashes equal?"""
    faults = random_schedule(config.seed + 1, (Kind.KILL,), config.groups, kills, every)
    alone = replace(config, groups=1, shards=config.shard_count, batch=config.batch * config.groups, sleep=0.0)
    quiet_directory, troubled_directory = directory / "quiet", directory / "troubled"
    with ThreadPoolExecutor(2) as pool:
        quietly = pool.submit(run, alone, quiet_directory, (), Recorder(0, 1, limit), nproc)
        struck = pool.submit(run, config, troubled_directory, faults, Recorder(0, config.groups, limit), nproc)
        quiet_run, troubled = quietly.result(), struck.result()
    records = read_records([quiet_directory])
    quiet = next((r for r in records.values() if r.digest), None)
    verdict = verdict_of(troubled, quiet)
    result = {
        "kills": len(troubled.injected),
        "next_commit": [cost.recovery for cost in verdict.costs],
        "back": [cost.back for cost in verdict.costs],
        "steps": verdict.steps,
        "committed": verdict.committed,
        "steps_discarded": verdict.discarded,
        "shards_lost": verdict.shards_lost,
        "identical": verdict.identical,
        "losses_that_differ": verdict.quiet_differences,
        "digests": list(verdict.digests),
        "quiet_digest": verdict.quiet_digest,
        "shards": shards_of(records.values()),
        "loss": verdict.loss,
        "contradictions": list(verdict.contradictions),
        "exit_code": troubled.exit_code,
        "quiet_exit_code": quiet_run.exit_code,
        "seconds": troubled.seconds,
    }
    if not verdict.identical:
        result["tails"] = tails(troubled_directory) + "\n" + tails(quiet_directory)
    return result
