"""The bytes that ride at the end of a step's last exchange, and those of the roll call.

Sizes are fixed for given counts, because an all-gather needs every member's contribution to be equally long. The
formats are ``struct`` only: nothing from a peer is executed. A checksum in front makes anything malformed (another
version, a stale or torn buffer) a :class:`ProtocolError` rather than a wrong number.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from planaria.core.messages import ControlWord, QuorumId, Standing
from planaria.errors import PlanariaError, ProtocolError, UsageError

VERSION = 6
# Scalars that a script may record per shard. A fixed number keeps the tails of all members equally long.
METRICS = 8
_ENVELOPE = struct.Struct("<QHHI")  # xxh3_64 of all that follows, version, kind, bytes of the body in use
_SUMMED_FROM = 8
_TAIL_KIND, _STANDING_KIND = 0x5441, 0x5354
_WORD = struct.Struct("<qQQd?Q")
_COUNTS = struct.Struct("<IIHI")  # records, bytes of a presence bitmap, metrics per record, second opinions
_RECORD = struct.Struct("<Iqd?IQ")
_SECOND = struct.Struct("<IQ")
_STANDING = struct.Struct("<q?dQQIQIqQQI")
_QUORUM = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What one computed shard adds to a step besides its gradients. Whoever computes it, it is the same."""

    shard: int
    presence: bytes  # bitmap over parameters, see pack_presence: which got a gradient
    metrics: tuple[float, ...] = ()  # float64, in the order in which the job knows their names
    cursor: int = 0  # where a ShardedStream stands after the shard; 0 for other data
    weight: float = 1.0  # low communication: how much it counts; 0: left out; ABSENT
    anew: bool = False  # low communication: it began with the shared parameters and a fresh inner optimizer
    steps: int = 0  # low communication: inner steps
    checksum: int = 0  # of this rank's part of its gradients, if they are compared


# Shards of others that a member has computed as well, and the checksums that it got.
Seconds = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange brought, beside the gradients."""

    words: list[ControlWord]
    records: list[ShardRecord]
    means: dict[str, float]
    finite: bool = True
    doubtful: frozenset[int] = frozenset()  # shards of which two members have computed different gradients


# The weight of a shard of which a replayed run knows that its group was not there.
ABSENT = -1.0


# --- presence bitmaps -----------------------------------------------------------------------------------------


def presence_bytes(parameters: int) -> int:
    """Length in bytes of a bitmap over ``parameters`` parameters."""
    return (parameters + 7) // 8


def pack_presence(flags: Sequence[int] | bytes | bytearray) -> bytes:
    """Bitmap of the flags: flag ``i`` is bit ``i % 8`` of byte ``i // 8``; bits beyond the last are 0."""
    bits = 0
    for index, flag in enumerate(flags):
        if flag:
            bits |= 1 << index
    return bits.to_bytes(presence_bytes(len(flags)), "little")


def unpack_presence(bitmap: bytes, parameters: int) -> list[bool]:
    """Inverse of :func:`pack_presence`. Raises ProtocolError if the length is not that of ``parameters`` flags."""
    if len(bitmap) != presence_bytes(parameters):
        raise ProtocolError(
            f"a presence bitmap has {len(bitmap)} bytes, {parameters} parameters need {presence_bytes(parameters)}"
        )
    bits = int.from_bytes(bitmap, "little")
    if bits >> parameters:
        raise ProtocolError(f"a presence bitmap names parameters beyond the last of {parameters}")
    return [bool(bits >> index & 1) for index in range(parameters)]


def union_presence(records: Iterable[ShardRecord], parameters: int) -> tuple[bool, ...]:
    """For every parameter: did any of the shards give it a gradient?"""
    return _union(frozenset(record.presence for record in records), parameters)


@functools.lru_cache(maxsize=8)  # as a rule all bitmaps are equal, in all steps
def _union(bitmaps: frozenset[bytes], parameters: int) -> tuple[bool, ...]:
    flags = [unpack_presence(bitmap, parameters) for bitmap in bitmaps]
    return tuple(any(column) for column in zip(*flags, strict=True)) if flags else (False,) * parameters


# --- the tail of a step ---------------------------------------------------------------------------------------


def tail_bytes(parameters: int, metrics: int, max_records: int, max_seconds: int = 0) -> int:
    """Size of every tail whose member has at most ``max_records`` shards of ``metrics`` metrics each, and as many as
    ``max_seconds`` second opinions."""
    record = _RECORD.size + presence_bytes(parameters) + 8 * metrics
    return _ENVELOPE.size + _WORD.size + _COUNTS.size + max_records * record + max_seconds * _SECOND.size


def encode_tail(
    word: ControlWord, records: Sequence[ShardRecord], size: int, seconds: Seconds = MappingProxyType({})
) -> bytes:
    """The control word and the shards' records, ``size`` bytes long (see :func:`tail_bytes`).

    All records must have bitmaps of one length and equally many metrics (UsageError names the shards that do not:
    it is the script that records metrics). Raises ProtocolError if ``size`` is too small.
    """
    presence, metrics = _uniform(records)
    parts = [
        _WORD.pack(
            word.step, word.planned.epoch, word.planned.number, word.seconds_per_shard, word.stop, word.checksum
        ),
        _COUNTS.pack(len(records), presence, metrics, len(seconds)),
    ]
    values = struct.Struct(f"<{metrics}d")
    for record in records:
        fixed = _RECORD.pack(record.shard, record.cursor, record.weight, record.anew, record.steps, record.checksum)
        parts += (fixed, record.presence, values.pack(*record.metrics))
    parts += (_SECOND.pack(shard, checksum) for shard, checksum in sorted(seconds.items()))
    return _seal(_TAIL_KIND, b"".join(parts), size)


def decode_tail(data: bytes) -> tuple[ControlWord, tuple[ShardRecord, ...], Seconds]:
    """Inverse of :func:`encode_tail`. Raises ProtocolError for anything that it did not make."""
    body = _unseal(_TAIL_KIND, data)
    try:
        step, epoch, number, speed, stop, checksum = _WORD.unpack_from(body, 0)
        count, presence, metrics, opinions = _COUNTS.unpack_from(body, _WORD.size)
        values = struct.Struct(f"<{metrics}d")
        at = _WORD.size + _COUNTS.size
        if len(body) != at + count * (_RECORD.size + presence + values.size) + opinions * _SECOND.size:
            raise ProtocolError(f"a step's tail of {count} records has an odd length of {len(body)} bytes")
        records = []
        for _ in range(count):
            shard, cursor, weight, anew, steps, checked = _RECORD.unpack_from(body, at)
            at += _RECORD.size
            bitmap = body[at : at + presence]
            at += presence
            metrics = values.unpack_from(body, at)
            records.append(ShardRecord(shard, bitmap, metrics, cursor, weight, anew, steps, checked))
            at += values.size
        seconds = dict(_SECOND.unpack_from(body, at + i * _SECOND.size) for i in range(opinions))
    except struct.error as error:
        raise ProtocolError(f"a step's tail is cut short ({error})") from None
    return ControlWord(step, QuorumId(epoch, number), speed, stop, checksum), tuple(records), seconds


def open_tails(
    tails: Iterable[bytes], step: int, owned: Iterable[frozenset[int]], where: str
) -> tuple[list[ControlWord], list[ShardRecord], list[Seconds]]:
    """What all members said at the end of ``step``: their words by rank, each shard's record, ascending, and their
    second opinions by rank. Raises PlanariaError if that is not of one step in which each shard was computed once."""
    opened = [decode_tail(tail) for tail in tails]
    words = [word for word, _, _ in opened]
    if any(word.step != step for word in words):
        raise PlanariaError(
            f"{where}: members exchanged different steps {[word.step for word in words]}; this is a bug"
        )
    records = sorted((r for _, rs, _ in opened for r in rs), key=lambda r: r.shard)
    if [r.shard for r in records] != sorted(shard for each in owned for shard in each):
        raise PlanariaError(
            f"{where}, step {step}: shards {[r.shard for r in records]} were exchanged, not each of them once; this is "
            "a bug"
        )
    return words, records, [seconds for _, _, seconds in opened]


def mean_metrics(records: Iterable[ShardRecord]) -> tuple[float, ...]:
    """Mean of every metric over the shards: summed in float64 in ascending order of shards, so that every group
    gets the same bits whatever order the records came in. No records: no metrics."""
    ordered = sorted(records, key=lambda record: record.shard)
    if not ordered:
        return ()
    _, metrics = _uniform(ordered)
    sums = [0.0] * metrics
    for record in ordered:
        for index, value in enumerate(record.metrics):
            sums[index] += value
    return tuple(total / len(ordered) for total in sums)


def cursors(records: Iterable[ShardRecord]) -> Mapping[int, int]:
    """Where every shard's stream stands after the step, to be committed."""
    return {record.shard: record.cursor for record in records}


# --- the roll call --------------------------------------------------------------------------------------------


def standing_bytes(shards: int, history: int = 0) -> int:
    """Size of every roll-call entry of a job of ``shards`` shards whose members tell of so much ``history``."""
    return _ENVELOPE.size + _STANDING.size + presence_bytes(shards) + history * _QUORUM.size


def encode_standing(standing: Standing, shards: int, history: int = 0) -> bytes:
    """One member's entry in the roll call, ``standing_bytes(shards, history)`` bytes long."""
    if standing.have and not 0 <= min(standing.have) <= max(standing.have) < shards:
        raise ProtocolError(f"a standing claims shards {sorted(standing.have)} of a job of {shards}")
    held = pack_presence([shard in standing.have for shard in range(shards)])
    under, seconds = standing.under, standing.seconds_per_shard
    head = _STANDING.pack(
        standing.step,
        standing.settled,
        seconds,
        under.epoch,
        under.number,
        shards,
        standing.checksum,
        standing.recounts,
        standing.base[0],
        standing.base[1].epoch,
        standing.base[1].number,
        len(standing.history),
    )
    told = b"".join(_QUORUM.pack(each.epoch, each.number) for each in standing.history)
    return _seal(_STANDING_KIND, head + held + told, standing_bytes(shards, history))


def decode_standing(data: bytes, shards: int) -> Standing:
    """Inverse of :func:`encode_standing`. Raises ProtocolError, also if the peer's job has another number of shards."""
    body = _unseal(_STANDING_KIND, data)
    if len(body) < _STANDING.size:
        raise ProtocolError("a roll-call entry is cut short")
    step, settled, seconds, epoch, number, theirs, checksum, recounts, *base, told = _STANDING.unpack_from(body, 0)
    if theirs != shards:
        raise ProtocolError(f"a peer's job has {theirs} shards, this one {shards}")
    end = _STANDING.size + presence_bytes(shards)
    if len(body) != end + told * _QUORUM.size:
        raise ProtocolError(f"a roll-call entry that tells of {told} syncs has an odd length of {len(body)} bytes")
    held = unpack_presence(body[_STANDING.size : end], shards)
    have = frozenset(shard for shard, flag in enumerate(held) if flag)
    history = tuple(QuorumId(*each) for each in _QUORUM.iter_unpack(body[end:]))
    key = (base[0], QuorumId(*base[1:]))
    return Standing(step, settled, have, QuorumId(epoch, number), seconds, recounts, checksum, key, history)


# --- shared ---------------------------------------------------------------------------------------------------


def _uniform(records: Sequence[ShardRecord]) -> tuple[int, int]:
    """(bytes of a bitmap, number of metrics), the same in all records."""
    if not records:
        return 0, 0
    first = records[0]
    for record in records:
        if len(record.metrics) != len(first.metrics):
            raise UsageError(
                f"shard {record.shard} recorded {len(record.metrics)} metrics but shard {first.shard} recorded "
                f"{len(first.metrics)}; record the same metrics for every batch"
            )
        if len(record.presence) != len(first.presence):
            raise ProtocolError(
                f"shards {first.shard} and {record.shard} have presence bitmaps of {len(first.presence)} and "
                f"{len(record.presence)} bytes"
            )
    return len(first.presence), len(first.metrics)


def _seal(kind: int, body: bytes, size: int) -> bytes:
    if _ENVELOPE.size + len(body) > size:
        raise ProtocolError(f"{_ENVELOPE.size + len(body)} bytes do not fit into a fixed size of {size}")
    rest = _ENVELOPE.pack(0, VERSION, kind, len(body))[_SUMMED_FROM:] + body
    rest += bytes(size - _SUMMED_FROM - len(rest))
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(rest)) + rest


def _unseal(kind: int, data: bytes) -> bytes:
    if len(data) < _ENVELOPE.size:
        raise ProtocolError(f"{len(data)} bytes are too few for a record of a step")
    checksum, version, found, length = _ENVELOPE.unpack_from(data, 0)
    if checksum != xxhash.xxh3_64_intdigest(data[_SUMMED_FROM:]):
        raise ProtocolError("a record of a step does not match its checksum")
    if version != VERSION or found != kind:
        raise ProtocolError(f"a record of a step has version {version} and kind {found:#x}, not {VERSION}, {kind:#x}")
    if length > len(data) - _ENVELOPE.size:
        raise ProtocolError("a record of a step is cut short")
    return bytes(data[_ENVELOPE.size : _ENVELOPE.size + length])
