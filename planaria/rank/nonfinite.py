"""Which shards brought what is not finite into a step's sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from planaria.core.actions import Exchange
from planaria.core.messages import QuorumId
from planaria.errors import NonFiniteError
from planaria.rank.front import Sums
from planaria.rank.records import ShardRecord, pack_presence, presence_bytes, unpack_presence
from planaria.rank.session import Session


def stop_on_nonfinite(records: Sequence[ShardRecord], store: Sums, session: Session, work: Exchange) -> NoReturn:
    """Every member saw the same flags, so all come here; together they find the shards."""
    suspects = suspects_of(records, store, session, work.quorum)
    names = ", ".join(map(str, sorted(suspects))) or "unknown"
    raise NonFiniteError(
        f"job {session.settings.job}, step {work.step}: the gradient is not finite (NaN or infinite), from shard "
        f"{names}. The weights were not touched; lower the learning rate, clip gradients, or look at its samples"
    )


def suspects_of(records: Sequence[ShardRecord], store: Sums, session: Session, quorum: QuorumId) -> set[int]:
    """The shards, as all members find together. A loss that is not finite tells the shard exactly; a sum of gradients
    only the shards that are in it."""
    shards = store.shards
    bad = [False] * shards
    for record in records:
        bad[record.shard] = any(not math.isfinite(metric) for metric in record.metrics)
    mine = [False] * shards
    for index, node in enumerate(store.nodes):
        parts = (store.parts(b)[index] for b in range(len(store.bucket_numels)))
        if not all(bool(torch.isfinite(part).all()) for part in parts):
            mine[node.start : node.stop] = [True] * node.size
    seen = [pack_presence(mine)]

    def ask() -> None:
        pending = session.communicator(quorum).gather(pack_presence(mine))
        seen.extend(pending.wait(lambda: session.stopped_waiting(quorum)))

    session.attempt(quorum, "looking for what is not finite", ask)
    exact = _named(session.gather(pack_presence(bad)), shards)
    return exact or _named(session.gather(b"".join(seen)), shards)


def _named(bitmaps: Sequence[bytes], shards: int) -> set[int]:
    """Shards that any of the bitmaps, of which each payload may hold several, names."""
    size = presence_bytes(shards)
    singles = [each[at : at + size] for each in bitmaps for at in range(0, len(each), size)]
    return {shard for each in singles for shard, named in enumerate(unpack_presence(each, shards)) if named}
