"""Memory that outlives a rank's process, in which it keeps what its successor in the same place can begin with.

Files without a name that this process holds open: they are gone when it is, however it ends, and nobody else's limit on
/dev/shm holds for them. Ranks open them through /proc, which lets nobody in but this user. What is in them is the
ranks' business: planaria/torch/kept.py.
"""

from __future__ import annotations

import os
import sys

SLOTS = 2  # one is whole while the other is written


class Keeping:
    """Of one node's ranks, by group and rank."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], list[int]] = {}

    def paths(self, group: int, rank: int) -> str:
        """Of the files of this place, separated by colons; empty where there is no such memory. They are empty at
        first, and stay the same for all that come to this place."""
        if sys.platform != "linux":
            return ""
        if (group, rank) not in self._files:
            made: list[int] = []
            try:
                while len(made) < SLOTS:
                    made.append(os.memfd_create(f"planaria-{group}.{rank}"))
            except OSError:  # no descriptor is left, or the system allows no such files
                for each in made:
                    os.close(each)
                return ""
            self._files[group, rank] = made
        return ":".join(f"/proc/{os.getpid()}/fd/{each}" for each in self._files[group, rank])

    def empty(self, group: int) -> None:
        """Give the memory of a group that has left back; it has no processes here. The files stay, for their numbers
        may have been told."""
        for (other, _), files in self._files.items():
            if other == group:
                for each in files:
                    os.ftruncate(each, 0)

    def close(self) -> None:
        for files in self._files.values():
            for each in files:
                os.close(each)
        self._files.clear()
