"""What the ranks of a group tell each other before any of them acts: one small all-gather, a *round*.

Every rank of a group runs the same stepper on the same events, so all ranks take the same shards in the same order and
commit the same steps. What differs is when each of them hears of something: a newer quorum, a communicator that
stands or fell, an exchange that worked. A round puts that together, by rules that give the same answer everywhere
(state-machine replication, Schneider 1990, with a barrier in place of a log: a group that lost a rank is over anyway).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planaria.core.messages import NO_QUORUM, QuorumId
from planaria.errors import ProtocolError, UsageError

# One size for all, so that a round is a single collective. Holds METRICS names and values and a sentence.
NOTE_BYTES = 2048
_LONGEST_TEXT = 150

# Gives every rank's bytes to all, by rank; all are of the given length. How a front's ranks talk to each other.
AllGather = Callable[[bytes, int], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's part of a round."""

    heard: QuorumId = NO_QUORUM  # the newest quorum that it was told of
    formed: frozenset[QuorumId] = frozenset()  # communicators that stand here and that the stepper has not been told of
    broken: dict[QuorumId, str] = field(default_factory=dict)  # those that failed here
    stop: bool = False  # it was asked to end the job in order
    ok: bool = True  # what it did since the last round worked
    finite: bool = True  # no gradient was NaN or infinite
    seconds: float = 0.0  # per shard
    metrics: dict[str, float] = field(default_factory=dict)  # means over all shards, of what this rank records
    named: QuorumId = (
        NO_QUORUM  # the planned quorum that all members named in the exchange that this rank had a part in
    )
    run: QuorumId = NO_QUORUM  # in which the job begins again, as this rank was told to look for copies
    alike: bool = True  # the control words say that all members have the same state
    doubtful: frozenset[int] = frozenset()  # shards of which two members have computed different gradients

    def encode(self) -> bytes:
        broken = [[*_numbers(id), text[:_LONGEST_TEXT]] for id, text in sorted(self.broken.items())]
        formed = [_numbers(id) for id in sorted(self.formed)]
        flags = [self.stop, self.ok, self.finite, self.alike]
        facts = [_numbers(self.heard), formed, broken, flags, self.seconds, self.metrics, _numbers(self.named)]
        facts += [_numbers(self.run), sorted(self.doubtful)]
        body = json.dumps(facts).encode()
        if len(body) > NOTE_BYTES:
            raise UsageError(
                f"the names of the recorded metrics {', '.join(self.metrics)[:200]}… are too long in all; shorten them"
            )
        return body.ljust(NOTE_BYTES)

    @staticmethod
    def decode(data: bytes) -> Note:
        try:
            heard, formed, broken, (stop, ok, finite, alike), seconds, metrics, named, run, doubtful = json.loads(data)
            return Note(
                QuorumId(*heard),
                frozenset(QuorumId(*id) for id in formed),
                {QuorumId(epoch, number): text for epoch, number, text in broken},
                stop,
                ok,
                finite,
                seconds,
                metrics,
                QuorumId(*named),
                QuorumId(*run),
                alike,
                frozenset(doubtful),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"a rank of this group sent a round that cannot be read: {error}") from None


def agreed(notes: Sequence[Note]) -> Note:
    """What holds for the whole group; ``notes`` by rank. The same on every rank.

    A quorum counts once all ranks have heard of it, a communicator stands once it stands at all of them and has
    fallen if it fell at one. Metrics are means over the ranks that record them.
    """
    broken: dict[QuorumId, str] = {}
    for rank, note in enumerate(notes):
        for id, text in note.broken.items():
            broken.setdefault(id, text if len(notes) == 1 else f"rank {rank}: {text}")
    names = sorted({name for note in notes for name in note.metrics})
    alike = all(note.alike for note in notes)
    doubtful = frozenset[int]().union(*(note.doubtful for note in notes))
    same = alike and not doubtful and all(note.named == notes[0].named for note in notes)
    values = {name: [note.metrics[name] for note in notes if name in note.metrics] for name in names}
    return Note(
        min(note.heard for note in notes),
        frozenset.intersection(*(note.formed for note in notes)),
        broken,
        any(note.stop for note in notes),
        all(note.ok for note in notes),
        all(note.finite for note in notes),
        max(note.seconds for note in notes),  # the group is as slow as its slowest rank
        {name: sum(of) / len(of) for name, of in values.items()},
        notes[0].named if same else NO_QUORUM,
        min(note.run for note in notes),
        alike,
        doubtful,
    )


def notes_of(all_gather: AllGather, note: Note) -> list[Note]:
    """A round: everybody's note, by rank. Raises what ``all_gather`` raises."""
    return [Note.decode(data) for data in all_gather(note.encode(), NOTE_BYTES)]


def payloads_of(all_gather: AllGather, payload: bytes) -> list[bytes]:
    """Everybody's payload, by rank; lengths may differ. Raises what ``all_gather`` raises."""
    lengths = [int.from_bytes(each, "little") for each in all_gather(len(payload).to_bytes(8, "little"), 8)]
    longest = max(*lengths, 1)
    padded = all_gather(payload.ljust(longest, b"\0"), longest)
    return [each[:length] for each, length in zip(padded, lengths, strict=True)]


def _numbers(id: QuorumId) -> list[int]:
    return [id.epoch, id.number]
