"""Whether a link between two groups has become much slower than it used to be. Pure; fed from heartbeats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.core.messages import Link

# Rates of one line vary by tens of per cent with what else it carries; a third is another line. Three readings in a row
# (of some exchanges each) are no burst of a neighbour's.
SLOWER, AGAIN, READINGS = 1 / 3, 2 / 3, 3
LEARNING = 4  # readings before anything is judged
SMOOTHING = 0.05  # weight of the newest reading in what is usual


@dataclass(slots=True)
class _Usual:
    bits: float = 0.0
    seen: int = 0
    odd: int = 0  # readings in a row that speak against what is held of it
    slow: bool = False
    last: Link | None = None


class LinkWatch:
    """Of one job. ``observe`` gives sentences for people about links that have become slow, or are whole again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Usual] = {}

    def observe(self, group: int, links: Iterable[Link]) -> list[str]:
        told = []
        for link in links:
            usual = self._known.setdefault((group, link.group), _Usual())
            if link == usual.last:
                continue  # the same reading, in another heartbeat
            usual.last = link
            usual.seen += 1
            share = link.bits / usual.bits if usual.bits else 1.0
            usual.odd = usual.odd + 1 if (share > AGAIN if usual.slow else share < SLOWER) else 0
            if usual.seen > LEARNING and usual.odd >= READINGS:
                usual.slow, usual.odd = not usual.slow, 0
                which = f"the link from group {group} to group {link.group}"
                rates = f"{link.bits / 1e6:.3g} Mbit/s, usually {usual.bits / 1e6:.3g}"
                if usual.slow:
                    lost = f", {link.lost:.1%} of its packets are sent again" if link.lost >= 0.001 else ""
                    told.append(f"{which} has become slow: {rates}{lost}")
                else:
                    told.append(f"{which} is as fast as it was: {rates}")
            if not usual.slow and not usual.odd:
                usual.bits += (link.bits - usual.bits) * max(SMOOTHING, 1 / usual.seen)
        return told
