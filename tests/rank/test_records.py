"""The tail of a step and the roll call: fixed sizes, exact round trips, and nothing malformed gets through."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.messages import NO_QUORUM, NOTHING, ControlWord, QuorumId, Standing
from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.rank.records import (
    ShardRecord,
    cursors,
    decode_standing,
    decode_tail,
    encode_standing,
    encode_tail,
    mean_metrics,
    pack_presence,
    presence_bytes,
    standing_bytes,
    tail_bytes,
    union_presence,
    unpack_presence,
)

I64 = st.integers(-(2**63), 2**63 - 1)
U64 = st.integers(0, 2**64 - 1)
FLOATS = st.floats(width=64)
WORDS = st.builds(ControlWord, I64, st.builds(QuorumId, U64, U64), FLOATS, st.booleans(), U64)


@st.composite
def steps(draw: st.DrawFn) -> tuple[ControlWord, list[ShardRecord], int, int]:
    parameters, metrics = draw(st.integers(0, 20)), draw(st.integers(0, 4))
    flags = st.lists(st.booleans(), min_size=parameters, max_size=parameters)
    values = st.lists(FLOATS, min_size=metrics, max_size=metrics).map(tuple)
    record = st.builds(ShardRecord, st.integers(0, 2**32 - 1), flags.map(pack_presence), values, I64, checksum=U64)
    return draw(WORDS), draw(st.lists(record, max_size=5)), parameters, metrics


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(steps(), st.dictionaries(st.integers(0, 2**32 - 1), U64, max_size=4), st.integers(0, 3))
def test_tail_round_trip(
    step: tuple[ControlWord, list[ShardRecord], int, int], seconds: dict[int, int], room: int
) -> None:
    word, records, parameters, metrics = step
    size = tail_bytes(parameters, metrics, len(records) + room, len(seconds) + room)
    data = encode_tail(word, records, size, seconds)
    assert len(data) == size
    back, copies, opinions = decode_tail(data)
    assert opinions == seconds
    assert (back.step, back.planned, back.stop) == (word.step, word.planned, word.stop)
    assert back.checksum == word.checksum
    assert bits(back.seconds_per_shard) == bits(word.seconds_per_shard)
    assert len(copies) == len(records)
    for copy, record in zip(copies, records, strict=True):
        assert (copy.shard, copy.presence, copy.cursor) == (record.shard, record.presence, record.cursor)
        assert (copy.checksum, copy.weight, copy.anew) == (record.checksum, record.weight, record.anew)
        assert [bits(value) for value in copy.metrics] == [bits(value) for value in record.metrics]


def test_all_members_send_tails_of_one_size() -> None:
    records = [ShardRecord(shard, b"\x07", (1.0, 2.0)) for shard in range(3)]
    size = tail_bytes(3, 2, 3)
    assert {len(encode_tail(ControlWord(1), records[:count], size)) for count in range(4)} == {size}


def test_too_many_records_for_the_size() -> None:
    records = [ShardRecord(shard, b"\x07", (1.0,)) for shard in range(3)]
    with pytest.raises(ProtocolError, match="do not fit"):
        encode_tail(ControlWord(1), records, tail_bytes(3, 1, 2))


def test_shards_must_record_the_same_metrics() -> None:
    records = [ShardRecord(0, b"", (1.0,)), ShardRecord(4, b"", ())]
    with pytest.raises(UsageError, match="shard 4 recorded 0 metrics but shard 0 recorded 1"):
        encode_tail(ControlWord(1), records, 1000)
    with pytest.raises(UsageError, match="record the same metrics for every batch"):
        mean_metrics(records)


def test_records_of_different_models() -> None:
    with pytest.raises(ProtocolError, match="presence bitmaps of 1 and 2 bytes"):
        encode_tail(ControlWord(1), [ShardRecord(0, b"\1"), ShardRecord(1, b"\1\1")], 1000)


GOOD = encode_tail(ControlWord(9), [ShardRecord(1, b"\x03", (0.5,), 4)], tail_bytes(2, 1, 2))


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(GOOD)
    data[at] ^= change
    with pytest.raises(ProtocolError):
        decode_tail(bytes(data))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_tail(data)
    with pytest.raises(ProtocolError):
        decode_standing(data, 4)


def test_cut_and_confused_records() -> None:
    with pytest.raises(ProtocolError, match="checksum"):
        decode_tail(GOOD[:-1])
    with pytest.raises(ProtocolError, match="kind"):
        decode_standing(GOOD, 4)
    with pytest.raises(ProtocolError, match="too few"):
        decode_tail(b"")


# --- presence -------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=40))
def test_presence_round_trip(flags: list[bool]) -> None:
    bitmap = pack_presence(flags)
    assert len(bitmap) == presence_bytes(len(flags))
    assert unpack_presence(bitmap, len(flags)) == flags
    assert pack_presence(bytes(flags)) == bitmap


def test_presence_of_another_model() -> None:
    with pytest.raises(ProtocolError, match="1 bytes, 9 parameters need 2"):
        unpack_presence(b"\xff", 9)
    with pytest.raises(ProtocolError, match="beyond the last of 3"):
        unpack_presence(b"\x0f", 3)


def test_a_parameter_is_present_if_any_shard_had_its_gradient() -> None:
    records = [ShardRecord(0, pack_presence([1, 0, 0])), ShardRecord(1, pack_presence([0, 0, 1]))]
    assert union_presence(records, 3) == (True, False, True)
    assert union_presence([], 3) == (False,) * 3


# --- metrics --------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.randoms())
def test_means_do_not_depend_on_the_order_of_records(losses: list[float], random: object) -> None:
    records = [ShardRecord(shard, b"", (loss, -loss)) for shard, loss in enumerate(losses)]
    expected = mean_metrics(records)
    random.shuffle(records)  # type: ignore[attr-defined]
    assert mean_metrics(records) == expected
    exact = sum(map(Fraction, losses)) / len(losses)
    assert math.isclose(expected[0], float(exact), rel_tol=1e-12, abs_tol=1e-8)


def test_no_records_no_metrics() -> None:
    assert mean_metrics([]) == ()


def test_cursors_by_shard() -> None:
    assert cursors([ShardRecord(2, b"", (), 20), ShardRecord(0, b"", (), 5)]) == {2: 20, 0: 5}


# --- roll call ------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 40).flatmap(lambda shards: st.tuples(st.just(shards), st.frozensets(st.integers(0, shards - 1)))),
    st.integers(NOTHING, 2**62),
    st.booleans(),
    st.floats(0, 1e9),
    st.lists(st.builds(QuorumId, st.integers(0, 2**62), st.integers(0, 2**62)), max_size=4),
)
def test_standing_round_trip(
    held: tuple[int, frozenset[int]], step: int, settled: bool, seconds: float, told: list[QuorumId]
) -> None:
    shards, have = held
    base = (abs(step) // 2, told[0]) if told else (0, NO_QUORUM)
    standing = Standing(step, settled, have, QuorumId(2, abs(step)), seconds, base=base, history=tuple(told))
    data = encode_standing(standing, shards, 4)
    assert len(data) == standing_bytes(shards, 4)
    assert decode_standing(data, shards) == standing


def test_standings_that_make_no_sense() -> None:
    data = encode_standing(Standing(3, True), 8)
    with pytest.raises(ProtocolError, match="a peer's job has 8 shards, this one 4"):
        decode_standing(data, 4)
    with pytest.raises(PlanariaError, match="claims shards"):
        encode_standing(Standing(3, True, frozenset({8})), 8)
