"""Which groups took part in every sync of a low-communication job: what its result depends on beside seed and data.

The record is part of the shared state, so every group that lives has all of it, and so has every checkpoint. Rank 0 of
every group writes it to ``membership.json`` whenever it changes. A run that is given such a file (``planaria run
--replay``) has the same shards left out of, and begun anew in, the same syncs, and ends with the same bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planaria.core.messages import QuorumId
from planaria.errors import UsageError

FILE = "membership.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync. A shard is the inner steps of the group of its number (of whoever carries on, should none of the groups
    be left that the job was founded with)."""

    counted: frozenset[int]  # shards in the mean
    anew: frozenset[int]  # of these: began with the shared parameters and a fresh inner optimizer
    left_out: frozenset[int]  # were there, but what they had computed was not finite


@dataclass(slots=True)
class Membership:
    """All syncs so far. Kept as changes: who is counted stays so until told otherwise, all else holds for one sync."""

    changes: list[list[Any]] = field(default_factory=list)  # [number, counted, anew, left out], each list ascending

    def add(self, number: int, sync: Sync) -> bool:
        """The next sync; whether it was worth a line."""
        before = self.of(number - 1) if self.changes else None
        if before is not None and sync == Sync(before.counted, frozenset(), frozenset()):
            return False
        self.changes.append([number, sorted(sync.counted), sorted(sync.anew), sorted(sync.left_out)])
        return True

    def of(self, number: int) -> Sync:
        """The sync of this number; the last line holds for all that follow. UsageError before the first."""
        for line, counted, anew, left_out in reversed(self.changes):
            if line == number:
                return Sync(frozenset(counted), frozenset(anew), frozenset(left_out))
            if line < number:
                return Sync(frozenset(counted), frozenset(), frozenset())
        raise UsageError(f"the membership record has nothing about sync {number}")

    def groups(self) -> frozenset[int]:
        """All that were ever there."""
        return frozenset(group for _, counted, _, left_out in self.changes for group in (*counted, *left_out))


@dataclass(frozen=True, slots=True)
class Script:
    """A run to be replayed: its membership, and what else must be alike."""

    path: Path
    method: str
    shards: int
    seed: int
    membership: Membership

    def absent(self, number: int, shard: int) -> bool:
        sync = self.membership.of(number)
        return shard not in sync.counted | sync.left_out

    def check(self, method: str, shards: int, seed: int, groups: int) -> None:
        """Raises UsageError if this job cannot be that run again."""
        for what, theirs, ours in (
            ("shards", self.shards, shards),
            ("seed", self.seed, seed),
            ("method", self.method, method),
        ):
            if theirs != ours:
                raise UsageError(f"--replay {self.path}: that run's {what} was {theirs}, this one's is {ours}")
        needed = max(self.membership.groups()) + 1
        if groups < needed:
            raise UsageError(
                f"--replay {self.path}: {needed} groups took part in that run; start --groups {needed}, not {groups}"
            )


def write(directory: Path, script: Script, quorum: QuorumId, syncs: int) -> None:
    """On the disk when this returns; whole or not at all."""
    body = {
        "version": VERSION,
        "method": script.method,
        "shards": script.shards,
        "seed": script.seed,
        "quorum": [quorum.epoch, quorum.number],
        "syncs": syncs,
        "changes": script.membership.changes,
    }
    draft = directory / f"{FILE}.new"
    with draft.open("w") as file:
        json.dump(body, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, directory / FILE)


def read(path: Path) -> Script:
    """A record's file, or the newest in the directory of a run. Raises UsageError."""
    if path.is_dir():
        found = [each for each in path.glob(f"**/rg*/i*/{FILE}")]
        if not found:
            raise UsageError(
                f"--replay {path}: no {FILE} is in the directories of its groups; a job of low communication that is "
                "not exact=True writes one"
            )
        return max((_parse(each) for each in found), key=lambda each: each[0])[1]
    return _parse(path)[1]


def _parse(path: Path) -> tuple[tuple[int, ...], Script]:
    """(how new it is, what it says)"""
    try:
        body = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--replay {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UsageError(f"--replay {path}: is no {FILE}") from None
    try:
        if body["version"] != VERSION:
            raise UsageError(f"--replay {path}: is of version {body['version']}, not {VERSION}")
        changes: list[list[Any]] = [[int(number), *map(_numbers, lists)] for number, *lists in body["changes"]]
        script = Script(path, str(body["method"]), int(body["shards"]), int(body["seed"]), Membership(changes))
        numbers = [number for number, *_ in changes]
        if numbers[:1] != [0] or numbers != sorted(set(numbers)):
            raise ValueError
        for _, *lists in changes:
            counted, anew, left_out = (set(each) for each in lists)
            # Of nobody there is no sync. A damaged line that passed would be told as a group lost in the replay.
            if not counted or not anew <= counted or counted & left_out:
                raise ValueError
            if not counted | left_out <= set(range(script.shards)):
                raise ValueError
        return (*map(int, body["quorum"]), int(body["syncs"])), script
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(f"--replay {path}: is no {FILE}, or a damaged one") from None


def _numbers(values: Sequence[Any]) -> list[int]:
    return sorted(map(int, values))
