"""The batch scripts: what ``sbatch`` is given for one life of a group."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from planaria.core.exits import EXIT_LEFT
from planaria.engines import placing
from planaria.engines.keeper import HostAway
from planaria.engines.placing import agent_words, directory_of, name_of
from planaria.engines.slurm.commands import ASKED_TO_END
from planaria.errors import UsageError

# Before its time limit a group leaves in order: the others go on without a pause, and the next job of it is asked for.
# Two minutes are longer than a step and a checkpoint of most.
WARNING = "signal=B:USR1@120"
# These say which job belongs to which group, and that nobody else starts it again.
_OURS = frozenset(("job-name", "array", "requeue", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "wait"))
_SHORT = {"J": "job-name", "a": "array", "N": "nodes", "n": "ntasks", "W": "wait", "x": "exclude", "w": "nodelist"}
_SHORT |= {
    "A": "account",
    "p": "partition",
    "t": "time",
    "q": "qos",
    "C": "constraint",
    "c": "cpus-per-task",
    "o": "output",
}
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENETUNREACH, errno.EHOSTDOWN}
_OPTION = re.compile(r"-{0,2}([A-Za-z][A-Za-z0-9-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Template(placing.Template):
    """What the jobs of all groups have in common."""

    sbatch: tuple[str, ...] = ()  # more options of sbatch, KEY or KEY=VALUE


def options_given(given: Collection[str]) -> tuple[str, ...]:
    """Options of sbatch in one form, KEY or KEY=VALUE. UsageError for what is none, or is not the user's to say."""
    found = []
    for text in given:
        match = _OPTION.fullmatch(text.strip())
        if match is None or "\n" in text:
            raise UsageError(f"--sbatch {text!r}: give an option of sbatch as KEY=VALUE, or KEY, on one line")
        key = _SHORT.get(match[1], match[1])
        if key in _OURS:
            raise UsageError(f"--sbatch {text}: planaria says this itself for every group")
        found.append(key if match[2] is None else f"{key}={match[2]}")
    return tuple(found)


def make_directory(template: Template, group: int, incarnation: int) -> Path:
    """Where Slurm puts the life's output. HostAway: not now, for the disk is full, or its server away; UsageError."""
    directory = directory_of(template.directory, group, incarnation)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "slurm.log").touch()  # a file may need room where a directory does not
    except OSError as error:
        text = f"{directory} cannot be made: {error.strerror}"
        raise (HostAway(text) if error.errno in _PASSING else UsageError(text)) from None
    return directory


def render(template: Template, group: int, incarnation: int, avoid: Collection[str] = ()) -> str:
    """The batch script, for sbatch's standard input."""
    directory = directory_of(template.directory, group, incarnation)
    options = [
        f"job-name={name_of(template.run, group, incarnation)}",
        f"nodes={template.nodes}",
        "ntasks-per-node=1",
        "no-requeue",
        f"chdir={template.cwd}",
        f"output={_plain(directory / 'slurm.log')}",
        "open-mode=append",
        WARNING,
    ]
    keys = {option.partition("=")[0] for option in template.sbatch}
    options = [option for option in options if option.partition("=")[0] not in keys]
    more = [option for option in template.sbatch if not option.startswith("exclude=")]
    if nodes := excluded(template, avoid):
        more.append(f"exclude={','.join(nodes)}")
    lines = [f"#SBATCH --{_quoted(option)}" for option in (*options, *more)]
    several = template.nodes > 1
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            f"# Group {group} of the job {template.run}: an agent on every node of it.",
            *((_MEETING,) if several else ()),
            f"group={shlex.quote(_agent(template, group, incarnation))}",
            f"said={shlex.quote(str(directory / 'summary.json'))}",
            _LIFE.replace("WATCH", _watch(template)),
        ]
    )


def excluded(template: Template, avoid: Collection[str]) -> list[str]:
    """All nodes that are kept from a job, those that its user names among them."""
    given = [option.partition("=")[2] for option in template.sbatch if option.startswith("exclude=")]
    return [*given, *sorted(avoid)]


def step(template: Template, group: int, incarnation: int, avoid: Collection[str] = ()) -> list[str]:
    """The command that runs this life as a step of the allocation that it is given in."""
    words = ["srun", f"--job-name={name_of(template.run, group, incarnation)}", "--exact", *_watch(template).split()]
    words += [f"--nodes={template.nodes}", f"--ntasks={template.nodes}", "--ntasks-per-node=1"]
    words += [f"--exclude={','.join(sorted(avoid))}"] if avoid else []
    meeting = f"SLURM_JOB_NODELIST=$SLURM_STEP_NODELIST; {_MEETING}; " if template.nodes > 1 else ""
    port = "port=$((port + SLURM_STEP_ID % 1000)); " if meeting else ""
    return [*words, "bash", "-c", meeting.replace("\n", "; ") + port + _agent(template, group, incarnation)]


def whole(template: Template, groups: int, words: Collection[str]) -> str:
    """The batch script of one allocation for all groups, in which a supervisor keeps a step for each. ``words``: how
    that one is called."""
    options = [
        f"job-name={template.run}",
        f"nodes={groups * template.nodes}",
        "ntasks-per-node=1",
        "no-kill",
        "no-requeue",
        f"chdir={template.cwd}",
        f"output={_plain(template.directory / 'slurm.log')}",
        "open-mode=append",
        "signal=B:TERM@120",
    ]
    keys = {option.partition("=")[0] for option in template.sbatch}
    options = [option for option in options if option.partition("=")[0] not in keys]
    lines = [f"#SBATCH --{_quoted(option)}" for option in (*options, *template.sbatch)]
    return "\n".join(["#!/bin/bash", *lines, "", f"{_CLEAN}exec {shlex.join(words)}", ""])


def _watch(template: Template) -> str:
    """For srun: when one node's agent is gone the step ends. Of several, all have ten seconds to end in order."""
    return "--kill-on-bad-exit=1" if template.nodes == 1 else "--kill-on-bad-exit=0 --wait=10"


def _agent(template: Template, group: int, incarnation: int) -> str:
    """What every node of the group runs, for a shell."""
    command = shlex.join(agent_words(template, group, incarnation)) + ' --host "$host"'
    if template.nodes > 1:
        command += f' --nnodes {template.nodes} --node-rank "$SLURM_NODEID" --group-addr "$first:$port"'
    return f"{_CLEAN}{_ADDRESS}exec {command} {shlex.join(template.script)}"


def _plain(path: Path) -> str:
    """A file's name in which sbatch finds nothing to put in."""
    return str(path).replace("%", "%%")


def _quoted(option: str) -> str:
    """As sbatch splits its own lines: like a shell."""
    key, equals, value = option.partition("=")
    return f"{key}={shlex.quote(value)}" if equals else key


# sbatch passes the environment on, and whoever said something there said it to the supervisor: whatever of that is for
# the groups too is in the words.
_CLEAN = "unset ${!PLANARIA_RUN_@}; "
# What Slurm itself takes to reach a node is the address at which the other nodes find it.
_ADDRESS = (
    'host=$(scontrol show node "$SLURMD_NODENAME" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p"); '
    "host=${host:-$(hostname)}; "
)
# Two jobs on one node have different numbers, so their ports differ too.
_MEETING = """\
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
first=$(scontrol show node "$first" | sed -n "s/.*NodeAddr=\\([^ ]*\\).*/\\1/p")
export first port=$((20000 + SLURM_JOB_ID % 20000))"""
# scancel tells every process of the job; srun would take that for the wish to kill its step at once, so it is kept
# out of the way in a session of its own. Before the time limit only this shell is told.
_LIFE = f"""asked=
trap : TERM
trap 'asked=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID"' USR1
setsid --wait srun WATCH bash -c "$group" &
step=$!
while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2> /dev/null || break
done
# The first node speaks for the group; srun knows only the greatest of the nodes' exit codes.
last=$(sed -n 's/.*"exit_code": \\([0-9]*\\).*/\\1/p' "$said" 2> /dev/null | head -n 1)
code=${{last:-$code}}
# It left because its time is up, and is to come back; without this it would seem to have been drained.
if [ -n "$asked" ] && [ "$code" -eq {EXIT_LEFT} ]; then code={ASKED_TO_END}; fi
exit "$code"
"""
