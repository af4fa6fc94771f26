"""Which groups took part in every sync of a low-communication job: what its result depends on beside seed and data.

The record is part of the shared state, so every group that lives has all of it, and so has every checkpoint. Rank 0 of
every group writes it to ``membership.json`` after every sync, with what else the bits depend on. A run that is given
such a file (``planaria run --replay``) has the same shards left out of, and begun anew in, the same syncs, and ends
with the same bits; or it is refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planaria.core.fingerprint import SOFT
from planaria.core.messages import QuorumId
from planaria.errors import UsageError
from planaria.files import write_whole

FILE = "membership.json"
VERSION = 2
# In the words of the script, where an entry of the fingerprint has another name.
_SPOKEN = {"sync": "method", "exact": "promise", "policy": "policy", "layout": "layout of a group's ranks"}
# Shorter is another run's beginning, and longer ends where the record does.
_FREE = frozenset({"steps"})


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync. A shard is the inner steps of the group of its number (of whoever carries on, should none of the groups
    be left that the job was founded with)."""

    counted: frozenset[int]  # shards in the mean
    anew: frozenset[int]  # of these: began with the shared parameters and a fresh inner optimizer
    left_out: frozenset[int]  # were there, but what they had computed was not finite
    short: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (shard, inner steps) of those that made fewer than a whole round's


@dataclass(slots=True)
class Membership:
    """All syncs so far. Kept as changes: who is counted, and with how many steps, stays so until told otherwise; all
    else holds for one sync."""

    # [number, counted, anew, left out, short], each list ascending
    changes: list[list[Any]] = field(default_factory=list)

    def add(self, number: int, sync: Sync) -> bool:
        """The next sync; whether it was worth a line."""
        before = self.of(number - 1) if self.changes else None
        if before is not None and sync == Sync(before.counted, frozenset(), frozenset(), before.short):
            return False
        short = [list(each) for each in sorted(sync.short)]
        self.changes.append([number, sorted(sync.counted), sorted(sync.anew), sorted(sync.left_out), short])
        return True

    def of(self, number: int) -> Sync:
        """The sync of this number; the last line holds for all that follow. UsageError before the first."""
        for line, counted, anew, left_out, short in reversed(self.changes):
            fewer = frozenset((shard, steps) for shard, steps in short)
            if line == number:
                return Sync(frozenset(counted), frozenset(anew), frozenset(left_out), fewer)
            if line < number:
                return Sync(frozenset(counted), frozenset(), frozenset(), fewer)
        raise UsageError(f"the membership record has nothing about sync {number}")

    def groups(self) -> frozenset[int]:
        """All that were ever there."""
        return frozenset(group for _, counted, _, left_out, _ in self.changes for group in (*counted, *left_out))


@dataclass(frozen=True, slots=True)
class Script:
    """A run to be replayed: its membership, and what else its bits depend on."""

    path: Path
    identity: Mapping[str, str]  # the fingerprint of its groups
    membership: Membership
    syncs: int  # that it made
    origin: str = ""  # digest of the shared state in which it began; empty: not known
    first: str = ""  # after its first sync: what data and loss have made of that
    final: str = ""  # at the end of all steps; empty if it never came there

    @property
    def shards(self) -> int:
        return int(self.identity["shards"])

    def absent(self, number: int, shard: int) -> bool:
        sync = self.membership.of(number)
        return shard not in sync.counted | sync.left_out

    def check_groups(self, groups: int) -> None:
        """Raises UsageError if there are too few for all that took part."""
        needed = max(self.membership.groups()) + 1
        if groups < needed:
            raise UsageError(
                f"--replay {self.path}: {needed} groups took part in that run; start --groups {needed}, not {groups}"
            )

    def check(self, identity: Mapping[str, str]) -> None:
        """Raises UsageError if this job cannot be that run again, bit for bit."""
        for key in ("shards", "seed", "sync", "reduction", *sorted(self.identity.keys() | identity.keys())):
            theirs, ours = (each.get(key, "absent") for each in (self.identity, identity))
            if theirs != ours and key not in _FREE:
                what = key.removeprefix(SOFT)
                raise UsageError(
                    f"--replay {self.path}: that run's {_SPOKEN.get(what, what)} was {theirs}, this one's is {ours}"
                )

    def compare(self, what: str, theirs: str, ours: str) -> None:
        """Two digests of what should be equal, where there are two. Raises UsageError."""
        if theirs and ours and theirs != ours:
            raise UsageError(
                f"--replay {self.path}: {what} is not that run's (digest {ours}, not {theirs}): the script, its "
                "arguments or its data have changed"
            )


def write(directory: Path, script: Script, quorum: QuorumId, durably: bool = True) -> None:
    """Whole or not at all. ``durably``: on the disk when this returns, else before long."""
    body = {
        "version": VERSION,
        "identity": dict(script.identity),
        "origin": script.origin,
        "first": script.first,
        "final": script.final,
        "quorum": [quorum.epoch, quorum.number],
        "syncs": script.syncs,
        "changes": script.membership.changes,
    }
    write_whole(directory / FILE, json.dumps(body), durable=durably)


def read(path: Path) -> Script:
    """A record's file, or the newest in the directory of a run: any group that was there last has all of it, so one
    that is damaged is left alone while there are others. Raises UsageError."""
    if not path.is_dir():
        return _parse(path)[1]
    found = [each for each in path.glob(f"**/rg*/i*/{FILE}")]
    if not found:
        raise UsageError(
            f"--replay {path}: no {FILE} is in the directories of its groups; a job of low communication that is "
            "not exact=True writes one"
        )
    good, bad = [], []
    for each in found:
        try:
            good.append(_parse(each))
        except UsageError as error:
            bad.append(error)
    if not good:
        raise bad[0]
    for damage in bad:
        sys.stderr.write(f"planaria: {damage}; the other groups' are used\n")
    return max(good, key=lambda each: each[0])[1]


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
        changes: list[list[Any]] = [
            [int(number), *map(_numbers, lists), sorted([int(shard), int(steps)] for shard, steps in short)]
            for number, *lists, short in body["changes"]
        ]
        identity = {str(key): str(value) for key, value in body["identity"].items()}
        digests = [str(body[each]) for each in ("origin", "first", "final")]
        script = Script(path, identity, Membership(changes), int(body["syncs"]), *digests)
        numbers = [number for number, *_ in changes]
        if numbers[:1] != [0] or numbers != sorted(set(numbers)) or script.syncs <= numbers[-1]:
            raise ValueError
        for _, *lists, short in changes:
            counted, anew, left_out = (set(each) for each in lists)
            # Of nobody there is no sync. A damaged line that passed would be told as a group lost in the replay.
            if not counted or not anew <= counted or counted & left_out:
                raise ValueError
            if any(not 0 <= shard < script.shards for shard in counted | left_out):  # however many they are said to be
                raise ValueError
            if not {shard for shard, _ in short} <= counted or any(steps < 1 for _, steps in short):
                raise ValueError
        return (*map(int, body["quorum"]), script.syncs), script
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UsageError(f"--replay {path}: is no {FILE}, or a damaged one") from None


def _numbers(values: Sequence[Any]) -> list[int]:
    return sorted(map(int, values))
