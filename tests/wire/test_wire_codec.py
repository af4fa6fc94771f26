"""Messages survive the wire unchanged, and nothing that comes off it can do harm."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from wire_strategies import events, many, orders, patient, quorums, reports, statuses

from planaria.core import messages as m
from planaria.core.messages import (
    Adopted,
    Desired,
    Drain,
    Heartbeat,
    Hello,
    JobSpec,
    Kill,
    Member,
    Order,
    Phase,
    Policy,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Refuse,
    Report,
    Synced,
    Trouble,
)
from planaria.core.roster import GroupStatus, JobStatus
from planaria.errors import ProtocolError
from planaria.wire import checks, codec, status
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import PROTOCOL
from planaria.wire.quorums import decode_quorum, encode_quorum, publish_frame

MEMBER = Member(1, 0)
QUORUM = Quorum(QuorumId(3, 4), (Member(0, 0), MEMBER), ("a:1", "b:2"), True, "abc", "group 2 lost")


@patient
@given(reports)
def test_reports_round_trip(report: Report) -> None:
    assert repr(codec.report_from_bytes(codec.encode_report(report).SerializeToString())) == repr(report)


def test_a_frame_that_is_put_together_of_what_all_and_what_one_is_told_is_whole() -> None:
    newer = dataclasses.replace(QUORUM, id=QuorumId(3, 5), reason="")
    for quorum in (QUORUM, newer, QUORUM):
        for member in (*quorum.members, Member(0, 0), Member(60_000, 3)):
            frame = pb.LighthouseFrame.FromString(publish_frame(member, quorum))
            assert codec.decode_order(frame.order) == Publish(member, quorum)


@patient
@given(orders)
def test_orders_round_trip(order: Order) -> None:
    assert codec.order_from_bytes(codec.encode_order(order).SerializeToString()) == order


@patient
@given(events)
def test_events_round_trip(event: m.Event) -> None:
    data = status.encode_event(event).SerializeToString()
    assert repr(status.decode_event(codec.parse(pb.Event, data))) == repr(event)


@patient
@given(statuses)
def test_statuses_round_trip(job: JobStatus) -> None:
    data = status.encode_status(job).SerializeToString()
    assert repr(status.decode_status(codec.parse(pb.JobStatus, data))) == repr(job)


@patient
@given(st.lists(quorums(), min_size=2, max_size=3), st.data())
def test_the_memory_of_the_newest_quorum_never_mixes_quorums_up(several: list[Quorum], data: st.DataObject) -> None:
    for _ in range(6):
        quorum = data.draw(st.sampled_from(several))
        assert decode_quorum(encode_quorum(quorum)) == quorum


PARSERS: list[Callable[[bytes], object]] = [
    codec.report_from_bytes,
    codec.order_from_bytes,
    lambda data: status.decode_event(codec.parse(pb.Event, data)),
    lambda data: status.decode_status(codec.parse(pb.JobStatus, data)),
]


@many
@given(st.binary(max_size=200), st.sampled_from(PARSERS))
def test_random_bytes_are_a_value_or_a_protocol_error(data: bytes, parser: Callable[[bytes], object]) -> None:
    try:
        parser(data)
    except ProtocolError as error:
        assert str(error)


@many
@given(reports, st.data())
def test_damaged_reports_are_a_value_or_a_protocol_error(report: Report, data: st.DataObject) -> None:
    """Closer to real messages than random bytes: one byte changed, or the end cut off."""
    raw = bytearray(codec.encode_report(report).SerializeToString())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        seen = codec.report_from_bytes(cut)
    except ProtocolError:
        return
    again = codec.encode_report(seen).SerializeToString()  # whatever is let in can also be sent on
    assert repr(codec.report_from_bytes(again)) == repr(seen)


# --- the mirror ---------------------------------------------------------------------------------------------

NAMES_THAT_DIFFER = {"Drain": "DrainMember", "Kill": "KillGroup"}
EXTRA = {"Hello": {"protocol"}, "Welcome": {"protocol"}}
WORDS: list[type[Any]] = [
    *get_args(Report),
    *get_args(Order),
    Member,
    QuorumId,
    Quorum,
    Pulse,
    JobSpec,
    m.Event,
    GroupStatus,
    JobStatus,
]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word.__name__)
def test_the_proto_mirrors_every_dataclass(word: type[Any]) -> None:
    """A field that is added to a dataclass and forgotten on the wire would be lost without a sound."""
    form: type[Message] = getattr(pb, NAMES_THAT_DIFFER.get(word.__name__, word.__name__))
    ours = {field.name for field in dataclasses.fields(word)} | EXTRA.get(word.__name__, set())
    assert {field.name for field in form.DESCRIPTOR.fields} == ours


@pytest.mark.parametrize(("union", "form"), [(Report, pb.Report), (Order, pb.Order)])
def test_the_proto_has_every_kind_of_message(union: object, form: type[Message]) -> None:
    kinds = {re.sub("^(Drain|Kill)$", r"\1", kind.__name__).lower() for kind in get_args(union)}
    assert {field.name for field in form.DESCRIPTOR.fields} == kinds


@pytest.mark.parametrize(("ours", "theirs"), [(Phase, pb.Phase), (Policy, pb.Policy)])
def test_the_proto_has_every_name_of_an_enum(ours: Any, theirs: Any) -> None:
    prefix = ours.__name__.upper()
    assert set(theirs.keys()) == {f"{prefix}_UNSPECIFIED"} | {f"{prefix}_{item.name}" for item in ours}


# --- nonsense -----------------------------------------------------------------------------------------------

SENSELESS_REPORTS: list[tuple[str, pb.Report]] = [
    ("no known kind", pb.Report()),
    ("group number is -1", pb.Report(died=pb.Died(member=pb.Member(group=-1)))),
    ("group number is 65536", pb.Report(died=pb.Died(member=pb.Member(group=65536)))),
    ("incarnation is -2", pb.Report(died=pb.Died(member=pb.Member(incarnation=-2)))),
    ("step is -1", pb.Report(adopted=pb.Adopted(step=-1))),
    ("a rank is -1", pb.Report(present=pb.Present(rank=-1))),
    ("step is", pb.Report(finished=pb.Finished(step=1 << 60))),
    ("phase 0", pb.Report(heartbeat=pb.Heartbeat(pulses=[pb.Pulse()]))),
    ("phase 99", pb.Report(heartbeat=pb.Heartbeat(pulses=[pb.Pulse(phase=99)]))),  # type: ignore[arg-type]
    (
        "finite and not",
        pb.Report(heartbeat=pb.Heartbeat(pulses=[pb.Pulse(phase=pb.PHASE_PARKED, links=[pb.Link(bits=-1.0)])])),
    ),
    ("pid is -5", pb.Report(heartbeat=pb.Heartbeat(pulses=[pb.Pulse(phase=pb.PHASE_PARKED, pid=-5)]))),
    ("rendezvous store is empty", pb.Report(ready=pb.Ready())),
    ("4097 characters", pb.Report(trouble=pb.Trouble(text="x" * 4097))),
    ("257 characters", pb.Report(ready=pb.Ready(address="x" * 257))),
    ("control characters", pb.Report(ready=pb.Ready(address="h:1\x1b[2J"))),
    ("control characters", pb.Report(hello=pb.Hello(agent="a\nb", protocol=PROTOCOL))),
    ("control characters", pb.Report(hello=pb.Hello(agent="a", protocol=PROTOCOL, spec=pb.JobSpec(job="\u202ej")))),
    ("protocol 0", pb.Report(hello=pb.Hello(agent="a"))),
    ("install one release", pb.Report(hello=pb.Hello(agent="a", protocol=PROTOCOL + 1))),
    ("agent's name is empty", pb.Report(hello=pb.Hello(protocol=PROTOCOL))),
    ("job's name is empty", pb.Report(hello=pb.Hello(agent="a", protocol=PROTOCOL))),
    (
        "number of groups is 0",
        pb.Report(hello=pb.Hello(agent="a", protocol=PROTOCOL, spec=pb.JobSpec(job="j"))),
    ),
    (
        "policy 0",
        pb.Report(hello=pb.Hello(agent="a", protocol=PROTOCOL, spec=pb.JobSpec(job="j", groups=1, min_groups=1))),
    ),
]


@pytest.mark.parametrize(("says", "report"), SENSELESS_REPORTS)
def test_a_senseless_report_is_refused_and_says_why(says: str, report: pb.Report) -> None:
    with pytest.raises(ProtocolError, match=re.escape(says)):
        codec.decode_report(report)


def publish(**fields: Any) -> pb.Order:
    return pb.Order(publish=pb.Publish(member=pb.Member(group=1), quorum=pb.Quorum(**fields)))


SENSELESS_ORDERS: list[tuple[str, pb.Order]] = [
    ("no known kind", pb.Order()),
    ("protocol 0", pb.Order(welcome=pb.Welcome(epoch=1))),
    ("members of a quorum is 0", publish()),
    ("1 members with 0 addresses", publish(members=[pb.Member()])),
    ("ascending", publish(members=[pb.Member(group=2), pb.Member(group=1)], addresses=["a", "b"])),
    ("ascending", publish(members=[pb.Member(), pb.Member(incarnation=1)], addresses=["a", "b"])),
    ("signal is 0", pb.Order(kill=pb.KillGroup(group=1))),
    ("signal is 65", pb.Order(kill=pb.KillGroup(group=1, signal=65))),
    ("groups is -3", pb.Order(desired=pb.Desired(groups=-3))),
]


@pytest.mark.parametrize(("says", "order"), SENSELESS_ORDERS)
def test_a_senseless_order_is_refused_and_says_why(says: str, order: pb.Order) -> None:
    with pytest.raises(ProtocolError, match=re.escape(says)):
        codec.decode_order(order)


def test_too_many_members_are_refused() -> None:
    crowd = [pb.Member(group=group) for group in range(checks.MAX_MEMBERS + 1)]
    with pytest.raises(ProtocolError, match="number of members"):
        codec.decode_order(publish(members=crowd, addresses=["a"] * len(crowd)))


def test_an_oversize_message_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ProtocolError, match="bytes, more than"):
        codec.report_from_bytes(bytes(checks.MAX_MESSAGE_BYTES + 1))


UNSENDABLE: list[Report | Order] = [
    Adopted(Member(-1, 0), QuorumId(1, 1), 0),
    Adopted(MEMBER, QuorumId(-1, 1), 0),
    Adopted(MEMBER, QuorumId(1 << 32, 1), 0),
    Adopted(MEMBER, QuorumId(1, 1), -1),
    Heartbeat((Pulse(MEMBER, Phase.PARKED, 0, QuorumId(0, 0), 0.0, 0.0, -1),)),
    Ready(MEMBER, "", (), "", 1, 1),
    Ready(MEMBER, "a:1", (("k" * 300, "v"),), "", 1, 1),
    Ready(MEMBER, "a:1", (("k", "v" * 5000),), "", 1, 1),
    Ready(MEMBER, "a:1\ud800", (), "", 1, 1),
    Hello("agent", "host", JobSpec("", 1)),
    Kill(1, 0),
    Desired(-1),
    Publish(MEMBER, dataclasses.replace(QUORUM, addresses=("a:1",))),
    Publish(MEMBER, dataclasses.replace(QUORUM, members=(), addresses=())),
]


@pytest.mark.parametrize("message", UNSENDABLE, ids=lambda message: type(message).__name__)
def test_a_mistake_shows_at_the_sender(message: Report | Order) -> None:
    with pytest.raises(ProtocolError):
        codec.encode_order(message) if isinstance(message, Order) else codec.encode_report(message)


def test_long_free_text_is_cut_so_that_the_report_arrives() -> None:
    sent = Trouble(MEMBER, QuorumId(1, 1), 5, "trace " * 10_000)
    seen = codec.decode_report(codec.encode_report(sent))
    assert isinstance(seen, Trouble)
    assert len(seen.text) == checks.MAX_TEXT
    assert seen.text.startswith("trace trace") and seen.text.endswith("…")


def test_text_that_is_not_unicode_still_arrives() -> None:
    """A path with undecodable bytes in an error's text comes as lone surrogates."""
    seen = codec.decode_order(codec.encode_order(Refuse(MEMBER, "no such file: \udcff.bin")))
    assert seen == Refuse(MEMBER, "no such file: ?.bin")


def test_what_a_process_has_said_does_nothing_to_a_terminal() -> None:
    said = "Traceback:\n\tat \x1b[1;31mline 3\x1b[0m\r\x1b]0;title\x07\x9b2J\x00 \u202eenod"
    seen = codec.decode_report(codec.encode_report(Trouble(MEMBER, QuorumId(1, 1), 5, said)))
    assert isinstance(seen, Trouble)
    assert seen.text == "Traceback:\n\tat line 3\ufffd\ufffd]0;title\ufffd\ufffd2J\ufffd \ufffdenod"
    assert checks.clip("naïve 学習 🚀 \u00a0") == "naïve 学習 🚀 \u00a0"


def test_small_messages_stay_small() -> None:
    """A heartbeat a second and a frame per report: the forms are compact."""
    assert len(codec.encode_report(Adopted(MEMBER, QuorumId(1, 7), 100)).SerializeToString()) < 20
    assert len(codec.encode_order(Drain(MEMBER)).SerializeToString()) < 10
    assert codec.encode_report(Synced()).SerializeToString() == b"\x12\x00"
