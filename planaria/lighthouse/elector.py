"""Where several lighthouses agree on who leads, and where the leader keeps what the next one must know.

An elector is a store that one lighthouse at a time may change. Its epoch is the fencing token: it rises with every
leader, and whatever a leader keeps is taken only while the store itself holds that it still leads. So one that has lost
its lease without knowing it adds nothing to the lineage, and no two leaders ever follow from the same quorum.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any, Protocol

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.messages import Member, QuorumId
from planaria.core.roster import LineageRecord
from planaria.errors import PlanariaError, UsageError
from planaria.wire.checks import MAX_NUMBER

# Seconds. A failure of a leader costs nothing until a member fails as well; then this is for how long others wait. A
# shorter lease has the store written more often, and a store that hesitates for as long changes the leader, which costs
# the agents a reconnect.
LEASE = 5.0
# etcd gives no shorter one (its own election takes a second), and then a step of it is half a second.
SHORTEST_LEASE = 2.0
# A question must be answered well before the leader has to stop, so that it can be put once more.
PATIENCE = 1 / 4  # of the lease


class StoreAway(PlanariaError):
    """The store does not answer, or not in time: what was asked may have been done or not."""


class Deposed(PlanariaError):
    """The store holds that another lighthouse leads, or nobody does."""


class Keeper(Protocol):
    """What a lighthouse that leads keeps; a file of its own (``Store``) does it too."""

    @property
    def epoch(self) -> int: ...

    def append(self, record: LineageRecord) -> None:
        """Keep the newest quorum of a job. It is durable when this returns."""

    def last(self, job: str) -> LineageRecord | None:
        """The newest quorum of ``job``."""

    def bump_epoch(self) -> int:
        """A new epoch for the same leader."""


class Elector(Keeper, Protocol):
    """Every call blocks, for PATIENCE leases at most (a disk that hangs aside, which nothing can interrupt), and may
    come from any thread. Raises StoreAway; what only a
    leader may do raises Deposed. ``epoch`` is the newest token: that under which this one leads, if it does."""

    def acquire(self, address: str, floor: int, over: str) -> Granted | Held:
        """Lead, if nobody else does: see ``core.leadership.Acquire``. ``address``: where agents reach this one."""

    def renew(self) -> Renewed | Lost: ...

    def release(self) -> None:
        """Lead no more, so that another need not wait."""

    def close(self) -> None: ...


def open_elector(where: str, seconds: float, credentials: Path | None) -> Elector:
    """The elector that ``where`` names. UsageError if there is no such thing, or it can be seen at once that it cannot
    work; that a store is not there now is no such thing."""
    # Loaded only if it is the one: each brings what the others do not need.
    from planaria.lighthouse.elector_etcd import EtcdElector
    from planaria.lighthouse.elector_file import FileElector
    from planaria.lighthouse.elector_kubernetes import KubernetesElector

    if not seconds >= SHORTEST_LEASE:
        raise UsageError(f"--lease {seconds:g}: at least {SHORTEST_LEASE:g} seconds")
    name = uuid.uuid4().hex  # of this life: another life at the same place is another candidate
    kind, _, rest = where.partition(":")
    if rest and kind == "file":
        if credentials is not None:
            raise UsageError("--elector-credentials: a directory needs none")
        return FileElector(Path(rest), seconds, name)
    if rest and kind == "etcd":
        return EtcdElector(rest, seconds, name, credentials)
    if rest and kind == "kubernetes":
        return KubernetesElector(rest, seconds, name, credentials)
    raise UsageError(
        f"--elector {where}: give file:DIRECTORY, etcd:URL[,URL] or kubernetes:NAMESPACE/NAME (docs/lighthouse.md)"
    )


def epoch_above(*epochs: int) -> int:
    """Raises StoreAway if there is none that the protocol can say."""
    epoch = max(epochs) + 1
    if epoch > MAX_NUMBER:
        raise StoreAway(f"the next leader would take epoch {epoch}, above {MAX_NUMBER}: begin with another store")
    return epoch


def record_to_json(record: LineageRecord) -> str:
    content = {
        "epoch": record.epoch,
        "number": record.number,
        "members": [[member.group, member.incarnation] for member in record.members],
        "lineage": record.lineage,
        "step": record.step,
        "run": [record.run.epoch, record.run.number],
    }
    return json.dumps(content, separators=(",", ":"))


def record_from_json(job: str, text: str | bytes) -> LineageRecord:
    """Raises StoreAway if it is nothing that a lighthouse wrote: to lead without it would be to forget a quorum."""
    try:
        found: dict[str, Any] = json.loads(text)
        members = tuple(Member(int(group), int(incarnation)) for group, incarnation in found["members"])
        id = QuorumId(int(found["epoch"]), int(found["number"]))
        run = QuorumId(*(int(each) for each in found["run"]))
        return LineageRecord(job, id.epoch, id.number, members, str(found["lineage"]), int(found["step"]), run)
    except (ValueError, TypeError, KeyError) as error:
        raise StoreAway(f"the newest quorum of job {job} is unreadable in the elector's store ({error!r})") from None
