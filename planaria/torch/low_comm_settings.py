"""What low communication makes of a job's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from planaria.core.messages import Policy
from planaria.errors import UsageError
from planaria.rank.settings import Settings
from planaria.torch.sync_part import SyncPart
from planaria.wire.membership import Script, read


def of_low_communication(
    settings: Settings, sync: SyncPart, environ: Mapping[str, str] = os.environ
) -> tuple[Settings, Script | None]:
    """The settings, with the policy that the promise is about, and the run that is to be replayed, if any.

    Not exact: shard ``v`` is group ``v``'s own, whoever else is there, and left out if that is not there. Exact: any
    group computes it. Raises UsageError for what contradicts that.
    """
    if settings.recheck and not sync.sync.exact:
        raise UsageError(
            f"{settings.where}: recheck needs exact=True of {sync.kind}: without it what a group makes of its batches "
            "depends on parameters and on an inner optimizer that it alone has, so nobody could do the same again. "
            "check_state can be had: it compares what the groups share"
        )
    replayed = environ.get("PLANARIA_REPLAY")
    if sync.sync.exact:
        if settings.policy is Policy.SHRINK:
            raise UsageError(
                f"{settings.where}: exact=True has the others compute what a lost group had to, which the policy "
                f"{Policy.SHRINK.value!r} rules out; leave one of the two out"
            )
        if replayed:
            raise UsageError(
                f"{settings.where}: --replay is for runs whose result depends on who took part; with exact=True it "
                "does not: run the same script again"
            )
        return settings, None
    changed = replace(settings, policy=Policy.SHRINK, groups=settings.shards)
    if not replayed:
        return changed, None
    script = read(Path(replayed))
    script.check_groups(settings.groups)
    return changed, script
