"""Slurm's own commands, and what they say. No accounting is needed: ``squeue`` knows jobs that ended lately.

Its text output is used, for that has kept its form for ten years; the JSON of 22.05 and of 23.11 differ in every field
that matters here.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from planaria.engines.keeper import HostAway, HostState
from planaria.errors import UsageError

# A controller that is busy answers within its MessageTimeout, 10 s by default; clients try a few times.
COMMAND_SECONDS = 60.0
NEEDED = ("sbatch", "squeue", "scancel", "scontrol", "srun")
_FIELDS = ("JobID", "Name", "State", "exit_code", "NodeList", "StartTime", "EndTime", "Reason")
FORMAT = ",".join(f"{field}:|" for field in _FIELDS)
_WAITING = frozenset(
    {
        *("PENDING", "CONFIGURING", "POWER_UP_NODE", "EXPEDITING"),
        *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    }
)
_ASKED = frozenset({"CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED"})
_LOST = frozenset({"NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED"})
_ENDED = _ASKED | _LOST | {"COMPLETED", "FAILED", "OUT_OF_MEMORY", "RECONFIG_FAIL"}
# What a controller says that will be able to take a job some day.
_PASSING = re.compile(
    r"unable to contact|timed out|temporarily unable|zero bytes|connection refused|connection reset|"
    r"communication|in standby|invalid job credential|max(imum)? .*jobs|limit|not responding",
    re.IGNORECASE,
)
_WAITS_NO_MORE = re.compile(r"invalid job id|no longer pending|already finished", re.IGNORECASE)
_NO_SUCH_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
ASKED_TO_END = 143  # 128 + SIGTERM
# Variables in which sbatch finds what the script says, and may not be otherwise: see ``scripts``.
_SAID_BY_US = tuple(
    f"SBATCH_{name}"
    for name in ("JOB_NAME", "ARRAY_INX", "REQUEUE", "NO_REQUEUE", "WAIT", "WAIT_ALL_NODES", "OUTPUT", "OPEN_MODE")
)
# Where the cluster is, and who asks: nothing of a job.
_OF_CLUSTER = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_KEY"})


class NoNodes(UsageError):
    """With these constraints there is no node at all for the job."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """``exit_code``: as a shell has it, 128 + signal; 143 for whatever was asked to end. None: running, or unknown."""

    id: str
    name: str
    state: HostState
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    since: float | None = None  # unix seconds
    reason: str = ""
    lost: bool = False


def check_present() -> None:
    """UsageError if Slurm's commands are not here."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        raise UsageError(
            f"--engine slurm: there is no {missing[0]} on PATH; start this where jobs of the cluster are submitted, or "
            "see with --dry-run what would be"
        )


async def submit(script: str) -> str:
    """The number of the job. NoNodes; UsageError in Slurm's words if it will never take it; HostAway."""
    try:
        said = await _run(("sbatch", "--parsable"), script)
    except _Failed as error:
        if _NO_SUCH_NODES.search(error.words):
            raise NoNodes(f"sbatch: {error.words}") from None
        if _PASSING.search(error.words):
            raise HostAway(f"sbatch: {error.words}") from None
        raise UsageError(f"sbatch: {error.words}") from None
    return said.strip().partition(";")[0]


async def jobs() -> list[SlurmJob]:
    """All of this user's that are known. HostAway."""
    try:
        return parse(await _run(("squeue", "--noheader", "--states=all", "--me", f"--Format={FORMAT}")))
    except _Failed as error:
        raise HostAway(f"squeue: {error.words}") from None


async def cancel(*ids: str) -> None:
    """Ask the jobs to end: SIGTERM, and SIGKILL after the cluster's KillWait. HostAway."""
    try:
        await _run(("scancel", *ids))
    except _Failed as error:
        if "invalid job id" not in error.words.lower():  # it has ended meanwhile
            raise HostAway(f"scancel: {error.words}") from None


async def exclude(job: str, nodes: Collection[str]) -> None:
    """Keep these nodes, and no others, from a job that waits. HostAway."""
    try:
        await _run(("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}"))
    except _Failed as error:
        if not (_WAITS_NO_MORE.search(error.words) or _NO_SUCH_NODES.search(error.words)):
            raise HostAway(f"scontrol: {error.words}") from None


async def steps(job: str) -> list[SlurmJob]:
    """Those of an allocation that run. HostAway."""
    try:
        text = await _run(("squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j|%N|%S"))
    except _Failed as error:
        raise HostAway(f"squeue: {error.words}") from None
    found = []
    for cells in (line.strip().split("|") for line in text.splitlines()):
        if len(cells) == 4:
            places = tuple(expand(cells[2]))
            found.append(SlurmJob(cells[0], cells[1], HostState.RUNNING, places, since=_time(cells[3])))
    return found


async def tell(step: str) -> None:
    """Send SIGTERM to a step's tasks. HostAway."""
    try:
        await _run(("scancel", "--signal=TERM", step))
    except _Failed as error:
        if "invalid job id" not in error.words.lower():
            raise HostAway(f"scancel: {error.words}") from None


async def _run(words: Sequence[str], text: str = "") -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            env=environ_for(words[0], os.environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the supervisor, which has them end in order
        )
    except OSError as error:
        raise HostAway(f"cannot start {words[0]} ({error.strerror})") from None
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            out, problem = await process.communicate(text.encode())
    except TimeoutError:
        raise HostAway(f"{words[0]} has not ended after {COMMAND_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise _Failed(_sentence(problem.decode(errors="replace"), process.returncode))
    return out.decode(errors="replace")


def environ_for(command: str, given: Mapping[str, str]) -> dict[str, str]:
    """What the command is to see of an environment. There sbatch finds options that win over those in a script, and
    squeue and scancel which jobs to leave out. What it says of a job around this process is not about those that it
    submits."""
    environ = {name: value for name, value in given.items() if not name.startswith(("SQUEUE_", "SCANCEL_"))}
    if command == "sbatch":
        around = "SLURM_JOB_ID" in given or "SLURM_JOBID" in given
        job = (name for name in environ if around and name.startswith(("SLURM_", "SLURMD_", "SRUN_", "PMI_")))
        for name in (*_SAID_BY_US, *job):
            if name not in _OF_CLUSTER:
                environ.pop(name, None)
    return environ | {"SLURM_TIME_FORMAT": "standard"}


class _Failed(Exception):
    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words


def _sentence(problem: str, code: int) -> str:
    """The last thing that a command said, without its name: the reason, as a rule."""
    lines = [line for line in problem.splitlines() if line.strip() and not line.startswith("Try ")]
    words = [re.sub(r"^(sbatch|squeue|scancel|scontrol|srun): (error: )?", "", line).strip() for line in lines]
    return "; ".join(dict.fromkeys(words)) or f"exit code {code}"


# --- what squeue says ---------------------------------------------------------------------------------------


def parse(text: str) -> list[SlurmJob]:
    """Of the output of squeue with ``FORMAT``. Lines that are none are left out."""
    found = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) >= len(_FIELDS):
            # The reason is the last, and the one that may hold anything.
            found.append(_job(*(cell.strip() for cell in cells[: len(_FIELDS)])))
    return found


def _job(id: str, name: str, state: str, code: str, nodes: str, started: str, ended: str, reason: str) -> SlurmJob:
    why = "" if reason in ("None", "") else reason
    if state in _WAITING:
        return SlurmJob(id, name, HostState.PENDING, reason=why)
    places = tuple(expand(nodes))
    # A job that is told to end is COMPLETING until its processes are gone: its group may be leaving in order. And a
    # state that no release had when this was written is no end: whoever is taken for ended gets a second life.
    if state not in _ENDED:
        return SlurmJob(id, name, HostState.RUNNING, places, since=_time(started))
    exit_code: int | None = _exit_code(code)
    lost = state in _LOST
    if state in _ASKED and exit_code != 2:
        exit_code = ASKED_TO_END
    elif state != "COMPLETED" and exit_code == 0:
        exit_code = None  # nothing in it can have said so
    words = state if why in ("", "NonZeroExitCode") else f"{state}, {why}"
    if exit_code and state not in _ASKED:
        words += f", exit code {exit_code}"
    return SlurmJob(id, name, HostState.ENDED, places, exit_code, _time(ended), words, lost)


def _exit_code(text: str) -> int:
    """Of a status as wait() has it, or of "code:signal" as newer releases write it."""
    head, _, tail = text.partition(":")
    if not head.isdecimal():
        return 0
    if tail.isdecimal():
        return int(head) if int(head) else 128 + int(tail) if int(tail) else 0
    status = int(head)
    return status >> 8 if status & 0x7F == 0 else 128 + (status & 0x7F)


def _time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def expand(nodes: str) -> Collection[str]:
    """The names in a list of hosts such as "gpu[01-03,7],login1", in order."""
    found = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            found.append(part)
            continue
        for piece in match[2].split(","):
            first, dash, last = piece.partition("-")
            if dash and first.isdecimal() and last.isdecimal():
                numbers = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
            else:
                numbers = [piece]
            found += [name for number in numbers for name in expand(f"{match[1]}{number}{match[3]}")]
    return found
