"""The GPUs of this node, found without a framework, and each group's share of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_CUDA, _HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpus:
    """``ids`` as the variables have them: numbers, or names (GPU-…). ``variables`` tell a process which are its own."""

    ids: tuple[str, ...] = ()
    variables: tuple[str, ...] = (_CUDA,)

    def env(self, ids: tuple[str, ...]) -> dict[str, str]:
        return {variable: ",".join(ids) for variable in self.variables}


def find(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Gpus:
    """Those that the environment names, else all that have a device file."""
    # torch for ROCm reads both variables, and this one first.
    amd = _HIP in environ or (dev / "kfd").exists()
    variables = (_HIP, _CUDA) if amd else (_CUDA,)
    for variable in variables:
        if variable in environ:
            return Gpus(_named(environ[variable]), variables)
    # In a container the numbers of device files may have gaps; those of the drivers' interfaces never have.
    pattern, where = (r"renderD[0-9]+", dev / "dri") if amd else (r"nvidia[0-9]+", dev)
    count = sum(1 for path in where.glob("*") if re.fullmatch(pattern, path.name))
    return Gpus(tuple(str(number) for number in range(count)), variables)


def _named(value: str) -> tuple[str, ...]:
    """An id that cannot be (-1 and the like) ends the list, as the driver has it."""
    ids: list[str] = []
    for word in (part.strip() for part in value.split(",")):
        if not word or word.startswith("-") or word == "NoDevFiles":
            break
        ids.append(word)
    return tuple(ids)


class Shares:
    """Equal shares of ``each`` GPUs, in the order of their ids. A group keeps its share from life to life, unless there
    is a better one: ``avoided`` are GPUs that are not well, and nobody is given one that is ``closed``. The last
    ``standbys`` GPUs are lent to single processes, which may come to take their GPU into a group's share."""

    avoided: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()

    def __init__(self, gpus: Gpus, each: int, standbys: int = 0) -> None:
        self._gpus = gpus
        kept = len(gpus.ids) - standbys
        self._shares = [list(gpus.ids[at : at + each]) for at in range(0, kept - each + 1, each)]
        self._of: dict[int, int] = {}
        self._spare = list(gpus.ids[kept:]) if standbys else []
        self._lent: dict[int, str] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        return self._gpus.ids

    @property
    def any(self) -> bool:
        """Whether the node has GPUs for this job."""
        return bool(self._gpus.ids)

    def env(self, group: int, living: Collection[int]) -> dict[str, str] | None:
        """The variables for ``group``; None if those of ``living`` groups have all there is. On a node without GPUs
        nothing is said."""
        if not self.any:
            return {}
        own, share = self._of.get(group), self._choose(group, living)
        if share is None:
            return None
        if share != own:
            # Whoever had it is gone, and gets another one should it come back.
            self._of = {other: theirs for other, theirs in self._of.items() if theirs != share}
            self._of[group] = share
        return self._gpus.env(tuple(self._shares[share]))

    def has_place(self, group: int, living: Collection[int]) -> bool:
        """Whether ``env`` would find one."""
        return not self.any or self._choose(group, living) is not None

    def _choose(self, group: int, living: Collection[int]) -> int | None:
        own = self._of.get(group)
        if own is not None and (group in living or not self._bad(own)):  # ranks that live hold theirs
            return own
        free = self._free([*living, group])
        if own is None or self._shut(own) or (free is not None and not self._bad(free)):
            return free
        return own

    def lend(self, standby: int) -> dict[str, str] | None:
        """The variables for a standby; None if there is no GPU for it."""
        if not self.any:
            return {}
        spare = [id for id in self._spare if id not in self.closed]
        if not spare:
            return None
        self._lent[standby] = best = min(spare, key=lambda id: id in self.avoided)  # the first of the best
        self._spare.remove(best)
        return self._gpus.env((self._lent[standby],))

    def give(self, group: int, position: int, standby: int) -> dict[str, str]:
        """The standby is a rank of ``group`` now: its GPU takes the place of the one at ``position`` of the group's
        share, which is to be lent from now on. The group's variables."""
        if not self.any:
            return {}
        if group not in self._of:  # one of a single process, which has come from another node
            self._of[group] = len(self._shares)
            self._shares.append([self._lent.pop(standby)])
            return self._gpus.env(tuple(self._shares[-1]))
        share = self._shares[self._of[group]]
        # Last: whatever was wrong with it, others are tried before.
        self._spare.append(share[position])
        share[position] = self._lent.pop(standby)
        return self._gpus.env(tuple(share))

    def take_back(self, standby: int) -> None:
        """The standby is gone."""
        self.regain(self.part_with(standby))

    def part_with(self, standby: int) -> str:
        """The standby is a rank now of a group that has no share here: its GPU, until that is ``regain``ed."""
        return self._lent.pop(standby, "")

    def regain(self, id: str) -> None:
        """A GPU is to be lent again; nothing if it has no name."""
        if id:
            self._spare.append(id)

    def lent(self) -> dict[int, str]:
        """The GPUs that standbys have."""
        return dict(self._lent)

    def of(self, group: int) -> tuple[str, ...]:
        """The GPUs that the group has or had last."""
        share = self._of.get(group)
        return () if share is None else tuple(self._shares[share])

    def better(self, group: int, living: Collection[int]) -> bool:
        """Whether a share of GPUs that are all well is free for the group, other than its own."""
        free = self._free([*living, group])
        return free is not None and not self._bad(free)

    def _bad(self, share: int) -> bool:
        return not (self.avoided | self.closed).isdisjoint(self._shares[share])

    def _shut(self, share: int) -> bool:
        return not self.closed.isdisjoint(self._shares[share])

    def _free(self, living: Collection[int]) -> int | None:
        """The first that nobody ever had, else one of a group that is not alive; rather one whose GPUs are well."""
        untouched = [share for share in range(len(self._shares)) if share not in self._of.values()]
        left = [share for group, share in sorted(self._of.items()) if group not in living]
        # The first of the best.
        return min((s for s in [*untouched, *left] if not self._shut(s)), key=self._bad, default=None)
