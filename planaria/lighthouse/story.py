"""A recovery in a sentence, from the events that the lighthouse keeps."""

from __future__ import annotations

from collections.abc import Iterable

from planaria.core.messages import Event, Policy
from planaria.explain.incidents import tell
from planaria.explain.record import Entry
from planaria.explain.words import lost
from planaria.lighthouse.history import seconds_in_words

_NAMED = 3  # of groups that were lost at once

_SHARDS = {
    Policy.REDISTRIBUTE: "their shards went to the others",
    Policy.SPARE: "a standby or the others took their shards",
    Policy.SHRINK: "their shards are left out",
}


def recovery(events: Iterable[Event], took: float, members: int, policy: Policy | None) -> str:
    """``events``: up to the one that ended the recovery. ``took``: seconds. ``members``: that are at work now."""
    known = [Entry(each.at, each.kind, each.text, each.group, dict(each.data)) for each in events]
    # Losses that are told of by no quorum, or by an older one, have no part in it.
    last = next((entry for entry in reversed(known) if entry.kind == "quorum"), None)
    found = next((each for each in tell(known).incidents if each.quorum is not None and each.quorum is last), None)
    who = f"all {members} " if members > 1 else ""
    after = f"{who}at work again after {seconds_in_words(took)}"
    if found is None or not found.losses:
        return f"the quorum was formed again, {after}"
    losses = [lost(loss) for loss in found.losses.values()]
    more = f" and {len(losses) - _NAMED} more groups" if len(losses) > _NAMED else ""
    shards = _SHARDS.get(policy, "") if policy is not None else ""
    if len(losses) == 1:
        shards = shards.replace("their", "its")
    return ", ".join(part for part in ("; ".join(losses[:_NAMED]) + more, shards, after) if part)
