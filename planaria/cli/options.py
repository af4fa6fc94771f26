"""What ``planaria run`` was asked for, and everything that can be wrong with it before anything is started."""

from __future__ import annotations

import importlib.machinery
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from planaria.agent.health import HealthWatch
from planaria.core.healthtable import HealthTable, parse
from planaria.core.messages import PROMISES, REDUCTIONS, Policy
from planaria.engines.devices import Gpus, find
from planaria.engines.nodestream import DEFAULT_ADDRESS
from planaria.errors import UsageError
from planaria.logs import LogFormat
from planaria.wire.channel import split_address, split_addresses
from planaria.wire.checks import MAX_RANK
from planaria.wire.credentials import Credentials
from planaria.wire.roles import Role
from planaria.wire.token import Token

DEVICES = ("cpu", "cuda")
# A warm standby is at work within one or two seconds of small models; a wait costs all groups' time.
SPARE_WAIT = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


LogFormatOption = Annotated[
    LogFormat,
    typer.Option("--log-format", help="json: each line of the log is a JSON object.", envvar="PLANARIA_LOG_FORMAT"),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``shards`` and ``local_groups`` are None if not given; ``log_dir`` and ``job`` always have a value."""

    script: str
    args: tuple[str, ...]
    module: bool
    groups: int
    shards: int | None
    lighthouse: str | None
    job: str
    first_group: int
    local_groups: int
    policy: Policy
    reduction: str
    log_dir: Path
    quiet: bool
    live: bool
    max_replacements: int
    restart_backoff: float
    min_groups: int
    http: str | None
    host: str | None = None
    nproc_per_group: int = 1
    device: str | None = None
    exact: str | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    replay: Path | None = None  # the membership record of another run
    nnodes: int = 1
    node_rank: int = 0
    group_addr: str = DEFAULT_ADDRESS
    spread: bool = False  # other nodes may help
    health: HealthTable | None = None  # None: nobody watches it
    standbys: int = 0
    spare_wait: float | None = None  # seconds
    borrow: tuple[str, ...] = ()  # the site's command that is asked for nodes
    log_format: LogFormat = LogFormat.TEXT
    buddy: int | None = None  # steps between copies in another rank's memory; None: there are none
    check_state: int | None = None  # steps between comparisons of all that groups hold; None: what the script says
    placed: bool = False  # by an engine that keeps the groups alive, one agent each
    recheck: float | None = None  # share of the shards that are computed twice; None: what the script says

    @property
    def ranks(self) -> int:
        """Of every group."""
        return self.nproc_per_group * self.nnodes

    @property
    def master(self) -> str:
        """Where the nodes of a group reach node 0."""
        return split_address(self.group_addr, "--group-addr")[0] if self.spread else "127.0.0.1"

    @property
    def helps(self) -> bool:
        """Whether no group begins on this node."""
        return self.node_rank >= self.nnodes


def policy_named(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(policy.value for policy in Policy)
        raise UsageError(f"--policy {name}: unknown policy; known policies: {known}") from None


def words_of(command: str | None, option: str) -> tuple[str, ...]:
    """As a shell splits them. UsageError if it cannot, or there is no such program."""
    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise UsageError(f"{option} {command!r}: {error}") from None
    if command is not None and (not words or shutil.which(words[0]) is None):
        raise UsageError(f"{option} {command!r}: there is no such program")
    return words


def health_table(given: str | None, dry_run: bool) -> HealthTable | None:
    """What --health and --health-dry-run ask for. UsageError if the file is no table of health rules."""
    if given == "off":
        return None
    try:
        table = HealthTable() if given is None else parse(tomllib.loads(Path(given).read_text()))
    except OSError as error:
        raise UsageError(f"--health {given}: cannot read it ({error.strerror})") from None
    except RecursionError:
        raise UsageError(f"--health {given}: it is nested too deep to be a table of rules") from None
    except ValueError as error:  # no TOML, no text, or no table
        raise UsageError(f"--health {given}: {error}") from None
    return replace(table, dry_run=table.dry_run or dry_run)


def new_job(script: str) -> str:
    """A name that is new and says what and when."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem).lstrip("._-") or "job"
    return f"{stem[:64]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check(options: RunOptions, here: bool = True) -> None:
    """Raise UsageError, one sentence, for whatever cannot work. Starts nothing; makes the log directory. ``here``: the
    groups are to run on this node."""
    _check_numbers(options)
    if here:
        _check_devices(options)
    Credentials.given((Role.AGENT,))
    if (token := Token.given()) is not None:
        token.proof("Attend", (Role.AGENT,))
    if options.reduction not in REDUCTIONS:
        raise UsageError(f"--reduction {options.reduction}: unknown; known reductions: {', '.join(REDUCTIONS)}")
    if options.exact not in (None, *PROMISES):
        raise UsageError(f"--exact {options.exact}: unknown; known promises: {', '.join(PROMISES)}")
    if not _NAME.fullmatch(options.job):
        raise UsageError(f"--job {options.job!r}: a job's name has letters, digits, dots, dashes and underscores only")
    split_address(options.group_addr, "--group-addr")
    if options.lighthouse is not None:
        split_addresses(options.lighthouse)
    if options.http is not None and options.lighthouse is not None:
        raise UsageError(f"--http {options.http}: the pages are the lighthouse's; give --http to planaria lighthouse")
    if options.http is not None and options.node_rank == 0:
        _check_free(options.http, "--http")
    if options.module:
        _check_module(options.script)
    else:
        _check_script(Path(options.script))
    command = options.health.command if options.health is not None else None
    if command is not None and shutil.which(command.argv[0]) is None:
        raise UsageError(f"--health: there is no program {command.argv[0]} that could be run as the health command")
    if options.replay is not None and options.replay.is_relative_to(options.log_dir):
        raise UsageError(f"--replay {options.replay} is in --log-dir; give the replay a log directory of its own")
    if options.checkpoint is not None:
        _check_directory(options.checkpoint, "--checkpoint")
    _check_directory(options.log_dir, "--log-dir")


def _check_numbers(options: RunOptions) -> None:
    groups, shards = options.groups, options.shards
    if groups < 1:
        raise UsageError(f"--groups {groups}: a job needs at least one group")
    if not 1 <= options.nproc_per_group <= MAX_RANK:
        raise UsageError(f"--nproc-per-group {options.nproc_per_group}: a group has between 1 and {MAX_RANK} processes")
    if not 1 <= options.nnodes <= MAX_RANK // options.nproc_per_group:
        raise UsageError(f"--nnodes {options.nnodes}: a group has at least one node, and at most {MAX_RANK} processes")
    if not 0 <= options.node_rank <= MAX_RANK:
        raise UsageError(f"--node-rank {options.node_rank}: must be between 0 and {MAX_RANK}")
    if options.helps and not options.standbys:
        raise UsageError(
            f"--node-rank {options.node_rank}: groups of --nnodes {options.nnodes} begin on nodes 0 to "
            f"{options.nnodes - 1}; a node beyond them has standbys for them: say how many with --standbys"
        )
    if shards is not None and shards < 1:
        raise UsageError(f"--shards {shards}: a step needs at least one shard")
    if shards is not None and groups > shards:
        raise UsageError(
            f"{groups} groups cannot share {shards} shards: give --shards {groups} or more, or fewer groups"
        )
    if not 1 <= options.min_groups <= groups:
        raise UsageError(f"--min-groups {options.min_groups}: must be between 1 and --groups {groups}")
    beyond = options.first_group + options.local_groups > groups and not options.placed  # others have left for good
    if options.first_group < 0 or options.local_groups < 1 or beyond:
        raise UsageError(
            f"--first-group {options.first_group} with --local-groups {options.local_groups}: "
            f"an agent hosts at least one of the groups 0 to {groups - 1}"
        )
    if options.local_groups < groups and options.lighthouse is None:
        raise UsageError(
            f"this agent hosts {options.local_groups} of {groups} groups: "
            "give the --lighthouse at which the agents meet"
        )
    if options.placed and options.lighthouse is None:
        raise UsageError("--placed: groups that an engine places meet at a lighthouse; give --lighthouse")
    if not 0 <= options.standbys <= MAX_RANK:
        raise UsageError(f"--standbys {options.standbys}: must be between 0 and {MAX_RANK}")
    if options.spare_wait is not None and options.policy is not Policy.SPARE:
        raise UsageError(f"--spare-wait {options.spare_wait:g}: only --policy spare waits for standbys")
    if options.spare_wait is not None and not 0 < options.spare_wait <= 3600:
        raise UsageError(f"--spare-wait {options.spare_wait:g}: must be more than 0 and at most 3600 seconds")
    if options.borrow and options.policy is not Policy.SPARE:
        raise UsageError("--borrow: only --policy spare waits for nodes that are borrowed")
    if options.borrow and not options.spread:
        raise UsageError("--borrow: give the --group-addr at which a borrowed node finds this one")
    if options.borrow and options.ranks == 1:
        raise UsageError("--borrow: a borrowed node takes single ranks, and groups of one rank end with theirs")
    if options.buddy is not None and options.buddy < 1:
        raise UsageError(f"--buddy {options.buddy}: copies can be made every step or less often, so at least 1")
    if options.buddy is not None and options.ranks == 1:
        raise UsageError(
            "--buddy: the copies of a rank are kept by another rank of its group, and groups of one rank have none; "
            "give --nproc-per-group 2 or more, or --checkpoint"
        )
    if options.check_state is not None and options.check_state < 0:
        raise UsageError(f"--check-state {options.check_state}: a number of steps, or 0 for no checks")
    if options.recheck is not None and not 0 <= options.recheck <= 1:
        raise UsageError(f"--recheck {options.recheck:g}: a share of the shards, between 0 and 1")
    if options.max_replacements < 0:
        raise UsageError(f"--max-replacements {options.max_replacements}: must not be negative")
    if not 0 <= options.restart_backoff <= 3600:
        raise UsageError(f"--restart-backoff {options.restart_backoff:g}: must be between 0 and 3600 seconds")
    for name, number in (("every", options.checkpoint_every), ("keep", options.checkpoint_keep)):
        if number is not None and number < 1:
            raise UsageError(f"--checkpoint-{name} {number}: must be at least 1")


def gpus_of(options: RunOptions) -> Gpus:
    """What the groups of this node share: nothing if they are to use none."""
    return Gpus() if options.device == "cpu" else find(os.environ)


def health_watch(options: RunOptions) -> HealthWatch | None:
    """What is watched on this node."""
    return None if options.health is None else HealthWatch(options.health, gpus_of(options).ids)


def _check_devices(options: RunOptions) -> None:
    if options.device not in (None, *DEVICES):
        raise UsageError(f"--device {options.device}: unknown; known devices: {', '.join(DEVICES)}")
    groups, each = 0 if options.helps else options.local_groups, options.nproc_per_group
    found = len(gpus_of(options).ids)
    if found >= groups * each + options.standbys or (found == 0 and options.device != "cuda"):
        return
    spare = f" and {options.standbys} standby{'s' * (options.standbys > 1)}" if options.standbys else ""
    have = {0: "no GPU is", 1: "one GPU is"}.get(found, f"{found} GPUs are")
    raise UsageError(
        f"{groups * each + options.standbys} GPUs are needed for {groups} {'group' if groups == 1 else 'groups'} with "
        f"{each} {'process' if each == 1 else 'processes'} each{spare}, but {have} visible here: "
        "give fewer, or --device cpu"
    )


def _check_script(script: Path) -> None:
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise UsageError(f"{script} is a directory without __main__.py, so there is nothing to run")
        return
    if not script.exists():
        raise UsageError(f"no script at {script}" + (" (for a module, use -m)" if not script.suffix else ""))
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise UsageError(f"cannot read {script}: {error.strerror}") from None
    except SyntaxError as error:
        raise UsageError(f"{script} is not a Python script: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UsageError(f"{script} is not a Python script: {error}") from None


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    # Only the top is looked for: looking deeper would import, and so run, its packages here.
    found = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if found is None and top not in sys.builtin_module_names:
        raise UsageError(f"-m {name}: there is no module {top} here")


def _check_free(address: str, option: str) -> None:
    host, port = split_address(address, option)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"{option} {address}: cannot listen there ({error.strerror})") from None


def _check_directory(directory: Path, option: str) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UsageError(f"{option} {directory}: cannot write there ({error.strerror})") from None
