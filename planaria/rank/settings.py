"""What a rank was told: by ``planaria run`` through the environment, and by the script through ``init``."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planaria.core.messages import CODED, REDUCTIONS, STANDBYS, Member, Policy
from planaria.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """``socket`` is None for a script that runs alone: a job of one group, without agent or lighthouse."""

    job: str
    born: Member  # the life that the process began in: its group lives on as the next one when a rank was replaced
    groups: int
    shards: int
    seed: int
    policy: Policy
    reduction: str
    host: str  # where this rank binds the store that its peers connect to
    socket: Path | None
    directory: Path | None  # for the progress page, metrics.jsonl and result.json
    rank: int = 0  # in the group
    world_size: int = 1  # ranks in a group
    founder: bool = True  # nobody is known to hold the job's state: a durable checkpoint counts
    joins: bool = False  # takes the place of a lost rank in a group whose other ranks live
    check_state: int = 0  # steps between comparisons of all that groups hold; 0: nothing is compared
    recheck: float = 0.0  # probability with which a shard is computed twice
    standby: int | None = None  # the number of a process that waits for a rank to be lost, and tries itself as this one

    @property
    def merges(self) -> bool:
        """Whether a group adds up the gradients of its shards. Codes are made of each shard's own."""
        return self.reduction not in CODED

    @property
    def where(self) -> str:
        rank = f", rank {self.rank}" if self.world_size > 1 else ""
        who = f"group {self.born.group}{rank}" if self.standby is None else str(self.born)
        return f"job {self.job}, {who}"


def read_settings(
    shards: int | None,
    seed: int,
    policy: str | None,
    reduction: str | None,
    environ: Mapping[str, str] = os.environ,
    check_state: int = 0,
    recheck: float = 0.0,
) -> Settings:
    """Environment over arguments over defaults, so that one script serves every command line.

    Raises UsageError naming the setting.
    """
    groups = _number("PLANARIA_GROUPS", environ.get("PLANARIA_GROUPS"), 1, least=1)
    fallback = shards if shards is not None else groups
    count = _number("shards", environ.get("PLANARIA_SHARDS"), fallback, least=1)
    if groups > count:
        raise UsageError(
            f"{groups} groups cannot share {count} shards: every group needs at least one shard of every step. "
            f"Give --shards {groups} or more (it is part of what the result depends on), or fewer groups"
        )
    socket = environ.get("PLANARIA_SOCKET")
    directory = environ.get("PLANARIA_DIR")
    world_size = _number("WORLD_SIZE", environ.get("WORLD_SIZE"), 1, least=1)
    rank = _number("RANK", environ.get("RANK"), 0)
    if rank >= world_size:
        raise UsageError(f"RANK is {rank} but WORLD_SIZE is {world_size}; ranks count from 0")
    waiting = environ.get("PLANARIA_STANDBY")
    standby = _number("PLANARIA_STANDBY", waiting, 0) if waiting else None
    member = Member(
        _number("PLANARIA_GROUP", environ.get("PLANARIA_GROUP"), 0),
        _number("PLANARIA_INCARNATION", environ.get("PLANARIA_INCARNATION"), 0),
    )
    return Settings(
        job=environ.get("PLANARIA_JOB") or f"alone-{uuid.uuid4().hex[:8]}",
        born=member if standby is None else Member(STANDBYS, standby),
        groups=groups,
        shards=count,
        seed=_number("seed", None, seed),
        policy=_policy(environ.get("PLANARIA_POLICY") or policy or Policy.REDISTRIBUTE.value),
        reduction=_reduction(environ.get("PLANARIA_REDUCTION") or reduction or REDUCTIONS[0]),
        host=environ.get("PLANARIA_HOST") or "127.0.0.1",
        socket=Path(socket) if socket else None,
        directory=Path(directory) if directory else None,
        rank=rank,
        world_size=world_size,
        founder=environ.get("PLANARIA_RESUME") != "0",
        joins=environ.get("PLANARIA_JOINS") == "1",
        check_state=_number("check_state", environ.get("PLANARIA_CHECK_STATE"), check_state),
        recheck=_share("recheck", environ.get("PLANARIA_RECHECK"), recheck),
        standby=standby,
    )


def _number(name: str, text: str | None, default: int, least: int = 0) -> int:
    value: object = default if text is None or text == "" else text
    try:
        number = int(str(value)) if not isinstance(value, bool) else -1
    except ValueError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise UsageError(f"{name} must be at least {least}, not {number}")
    return number


def _share(name: str, text: str | None, default: float) -> float:
    value = text or default
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number between 0 and 1, not {value!r}") from None
    if not 0 <= number <= 1:
        raise UsageError(f"{name} must be between 0 and 1, not {value}")
    return number


def _policy(name: str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(p.value for p in Policy)
        raise UsageError(f"unknown policy {name!r}; known policies: {known}") from None


def _reduction(name: str) -> str:
    if name not in REDUCTIONS:
        raise UsageError(f"unknown reduction {name!r}; known reductions: {', '.join(REDUCTIONS)}")
    return name
