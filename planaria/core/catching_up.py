"""Low communication: who can be led to the newest state by the syncs that it missed, instead of being given that state.

What a sync makes of the shared state is a function of that state and of what was exchanged. So whoever holds an older
state, and is given what was exchanged since, gets the same bits: a log and a snapshot, as databases recover. A state is
known by its step and the quorum under which that was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from planaria.core.messages import NO_QUORUM, QuorumId, Standing

HISTORY = 16  # syncs that a member tells of: more than anybody misses who is restarted in the place where it was


def way(
    standings: Sequence[Standing], sources: Sequence[int], healers: Sequence[int]
) -> tuple[int | None, tuple[int, ...]]:
    """(since, sources): all ``healers`` can follow if they are given the syncs from step ``since`` on by these sources,
    of which each has all of them. None, and all ``sources``: somebody needs the state. Ranks in the roll call; every
    member comes to the same conclusion."""
    bases = {standings[rank].base for rank in healers}
    if any(under == NO_QUORUM for _, under in bases):
        return None, tuple(sources)
    able = tuple(rank for rank in sources if bases <= _states(standings[rank]))
    if not able:
        return None, tuple(sources)
    return min(step for step, _ in bases), able


def alike(told: Sequence[Sequence[tuple[int, QuorumId]]]) -> list[tuple[int, QuorumId]]:
    """What the ranks of a group say alike of the states that they know, newest first: the beginning of what each says.
    Only that counts, or they would come to different conclusions, and their own collectives would not meet."""
    columns = zip(*told, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def _states(standing: Standing) -> set[tuple[int, QuorumId]]:
    """Those from which it can lead to its own, which is one of them."""
    unders = (standing.under, *standing.history)
    return {(standing.step - back, under) for back, under in enumerate(unders)}
