"""The one process of a group, as the session wants to see a group: nothing to agree on, nobody to lose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from planaria.exchange.waiting import Bell
from planaria.rank.rounds import Note


class SoleWorld:
    """A group of one process, which may have several devices: those are XLA's business."""

    rank = 0
    size = 1
    idle = False
    renewable = False
    shape: Mapping[str, int] = MappingProxyType({})
    part = (0, 1)

    def round(self, note: Note) -> list[Note]:
        return [note]

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def cut(self) -> None:
        """There are no connections to others."""

    def renew(self, port: int, name: str, bell: Bell, cancelled: Callable[[], bool]) -> None:
        raise RuntimeError("a group of one process has no ranks to meet again")

    def await_devices(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Nothing is left to do."""

    def collectives(self) -> int:
        return 0
