"""Exact two-way conversion between the dataclasses of ``planaria.core.messages`` and their protobuf forms.

Decoding trusts nothing: whatever bytes come in, the outcome is a valid value or ProtocolError. Encoding
applies the same limits (``wire.checks``), so that a mistake shows at the sender; only free text is cut to fit
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar, assert_never, cast

from google.protobuf.message import DecodeError, Message

from planaria.core.messages import (
    Adopted,
    Cast,
    Close,
    Corrupted,
    Desired,
    Died,
    Drain,
    Finished,
    Heartbeat,
    Hello,
    Host,
    JobSpec,
    Kill,
    Leaving,
    Link,
    Migrate,
    Order,
    Phase,
    Policy,
    Prepared,
    Present,
    Publish,
    Pulse,
    Ready,
    Refuse,
    Regroup,
    Report,
    Resume,
    Saved,
    Stay,
    Stop,
    Suspected,
    Synced,
    Trouble,
    Welcome,
)
from planaria.errors import ProtocolError
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import (
    clip,
    count,
    decode_facts,
    decode_member,
    decode_quorum_id,
    encode_facts,
    encode_member,
    encode_quorum_id,
    name,
    names,
    text,
)
from planaria.wire.quorums import decode_quorum, encode_quorum

# Raised whenever an old and a new release would misunderstand each other; checked in Hello and in Welcome.
PROTOCOL = 5

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
M = TypeVar("M", bound=Message)

# The casts are for the type checker only: protobuf's enum values are plain integers at run time.
_PHASE_OUT = {phase: cast("pb.Phase", pb.Phase.Value(f"PHASE_{phase.name}")) for phase in Phase}
_PHASE_IN: dict[int, Phase] = {number: phase for phase, number in _PHASE_OUT.items()}
_POLICY_OUT = {policy: cast("pb.Policy", pb.Policy.Value(f"POLICY_{policy.name}")) for policy in Policy}
_POLICY_IN: dict[int, Policy] = {number: policy for policy, number in _POLICY_OUT.items()}


def encode_report(report: Report) -> pb.Report:
    """Raises ProtocolError if the report breaks a limit of the protocol."""
    return guarded(_report_out, report)


def decode_report(message: pb.Report) -> Report:
    """Raises ProtocolError if the message says nothing that makes sense."""
    return guarded(_report_in, message)


def encode_order(order: Order) -> pb.Order:
    """Raises ProtocolError if the order breaks a limit of the protocol."""
    return guarded(_order_out, order)


def decode_order(message: pb.Order) -> Order:
    """Raises ProtocolError if the message says nothing that makes sense."""
    return guarded(_order_in, message)


def report_from_bytes(data: bytes) -> Report:
    """Any bytes: a Report, or ProtocolError."""
    return decode_report(parse(pb.Report, data))


def order_from_bytes(data: bytes) -> Order:
    """Any bytes: an Order, or ProtocolError."""
    return decode_order(parse(pb.Order, data))


def parse(kind: type[M], data: bytes) -> M:
    """``data`` as a protobuf message of ``kind``, else ProtocolError."""
    if len(data) > checks.MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes, more than {checks.MAX_MESSAGE_BYTES}")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def guarded(convert: Callable[[A], B], value: A) -> B:
    """``convert(value)``; what protobuf itself refuses (a number too large, text that is not Unicode) is a
    ProtocolError too."""
    try:
        return convert(value)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"cannot convert a {type(value).__name__}: {error}") from error


# --- reports ------------------------------------------------------------------------------------------------


def _report_out(report: Report) -> pb.Report:
    match report:
        case Hello():
            return pb.Report(hello=_hello_out(report))
        case Synced():
            return pb.Report(synced=pb.Synced())
        case Heartbeat(pulses, warm, nodes):
            checks.length(len(pulses), checks.MAX_MEMBERS, "pulses in a heartbeat")
            shown = [_pulse_out(pulse) for pulse in pulses]
            checks.length(len(nodes), checks.MAX_MEMBERS, "nodes in a heartbeat")
            helping = [pb.HelpingNode(number=checks.rank(n), name=checks.name(name, "a node")) for n, name in nodes]
            return pb.Report(heartbeat=pb.Heartbeat(pulses=shown, warm=checks.rank(warm), nodes=helping))
        case Present(member, rank, prints):
            facts = encode_facts(prints, "a fingerprint")
            return pb.Report(
                present=pb.Present(member=encode_member(member), rank=checks.rank(rank), fingerprint=facts)
            )
        case Ready():
            return pb.Report(ready=_ready_out(report))
        case Adopted(member, quorum, step):
            return pb.Report(
                adopted=pb.Adopted(
                    member=encode_member(member), quorum=encode_quorum_id(quorum), step=count(step, "a step")
                )
            )
        case Trouble(member, quorum, step, words):
            return pb.Report(
                trouble=pb.Trouble(
                    member=encode_member(member),
                    quorum=encode_quorum_id(quorum),
                    step=count(step, "a step"),
                    text=clip(words),
                )
            )
        case Finished(member, step, digest):
            return pb.Report(
                finished=pb.Finished(
                    member=encode_member(member),
                    step=count(step, "a step"),
                    digest=name(digest, "a digest", empty=True),
                )
            )
        case Saved(member, step, seconds, trouble):
            count(step, "a step")
            return pb.Report(
                saved=pb.Saved(member=encode_member(member), step=step, seconds=seconds, trouble=clip(trouble))
            )
        case Corrupted(member, step, words, rank):
            at, which = count(step, "a step"), None if rank == -1 else checks.rank(rank)
            return pb.Report(
                corrupted=pb.Corrupted(member=encode_member(member), step=at, text=clip(words), rank=which)
            )
        case Died(member, cause, spare, moved):
            return pb.Report(died=pb.Died(member=encode_member(member), cause=clip(cause), spare=spare, moved=moved))
        case Leaving(member):
            return pb.Report(leaving=pb.Leaving(member=encode_member(member)))
        case Prepared(member, trouble):
            return pb.Report(prepared=pb.Prepared(member=encode_member(member), trouble=clip(trouble)))
        case Suspected(member, why):
            return pb.Report(suspected=pb.Suspected(member=encode_member(member), why=clip(why)))
        case _:
            assert_never(report)


def _report_in(message: pb.Report) -> Report:
    match message.WhichOneof("report"):
        case "hello":
            return _hello_in(message.hello)
        case "synced":
            return Synced()
        case "heartbeat":
            pulses = message.heartbeat.pulses
            checks.length(len(pulses), checks.MAX_MEMBERS, "pulses in a heartbeat")
            helping = message.heartbeat.nodes
            checks.length(len(helping), checks.MAX_MEMBERS, "nodes in a heartbeat")
            nodes = tuple((checks.rank(node.number), checks.name(node.name, "a node")) for node in helping)
            return Heartbeat(tuple(_pulse_in(each) for each in pulses), checks.rank(message.heartbeat.warm), nodes)
        case "present":
            present = message.present
            prints = decode_facts(present.fingerprint, "a fingerprint")
            return Present(decode_member(present.member), checks.rank(present.rank), prints)
        case "ready":
            return _ready_in(message.ready)
        case "adopted":
            adopted = message.adopted
            return Adopted(
                decode_member(adopted.member), decode_quorum_id(adopted.quorum), count(adopted.step, "a step")
            )
        case "trouble":
            trouble = message.trouble
            return Trouble(
                decode_member(trouble.member),
                decode_quorum_id(trouble.quorum),
                count(trouble.step, "a step"),
                text(trouble.text, "a trouble"),
            )
        case "finished":
            finished = message.finished
            digest = name(finished.digest, "a digest", empty=True)
            return Finished(decode_member(finished.member), count(finished.step, "a step"), digest)
        case "saved":
            saved = message.saved
            return Saved(
                decode_member(saved.member),
                count(saved.step, "a step"),
                saved.seconds,
                text(saved.trouble, "a trouble"),
            )
        case "corrupted":
            found = message.corrupted
            which = checks.rank(found.rank) if found.HasField("rank") else -1
            at = count(found.step, "a step")
            return Corrupted(decode_member(found.member), at, text(found.text, "a finding"), which)
        case "died":
            died = message.died
            return Died(decode_member(died.member), text(died.cause, "a cause of death"), died.spare, died.moved)
        case "leaving":
            return Leaving(decode_member(message.leaving.member))
        case "prepared":
            return Prepared(decode_member(message.prepared.member), text(message.prepared.trouble, "a trouble"))
        case "suspected":
            suspected = message.suspected
            return Suspected(decode_member(suspected.member), text(suspected.why, "a suspicion"))
        case _:
            raise ProtocolError("a report of no known kind; is the sender of a newer version?")


def _hello_out(hello: Hello) -> pb.Hello:
    spec = hello.spec
    return pb.Hello(
        agent=name(hello.agent, "an agent's name"),
        host=name(hello.host, "a host", empty=True),
        spec=pb.JobSpec(
            job=name(spec.job, "a job's name"),
            groups=checks.integer(spec.groups, 1, checks.MAX_GROUP, "the number of groups"),
            min_groups=checks.integer(spec.min_groups, 1, checks.MAX_GROUP, "the least number of groups"),
            policy=_POLICY_OUT[spec.policy],
            ranks=checks.integer(spec.ranks, 1, checks.MAX_RANK, "the number of ranks"),
            spare_wait=checks.seconds(spec.spare_wait, "the wait for a standby"),
        ),
        fresh=hello.fresh,
        devices=names(hello.devices, "a device"),
        closed=names(hello.closed, "a device"),
        hosted=[checks.group(each) for each in hello.hosted],
        epoch=checks.integer(hello.epoch, 0, checks.MAX_NUMBER, "an epoch"),
        protocol=PROTOCOL,
    )


def _hello_in(hello: pb.Hello) -> Hello:
    _same_protocol(hello.protocol, f"agent {hello.agent[: checks.MAX_NAME]!r}")
    spec = hello.spec
    return Hello(
        name(hello.agent, "an agent's name"),
        name(hello.host, "a host", empty=True),
        JobSpec(
            name(spec.job, "a job's name"),
            checks.integer(spec.groups, 1, checks.MAX_GROUP, "the number of groups"),
            checks.integer(spec.min_groups, 1, checks.MAX_GROUP, "the least number of groups"),
            _known(_POLICY_IN, spec.policy, "policy"),
            checks.integer(spec.ranks, 1, checks.MAX_RANK, "the number of ranks"),
            checks.seconds(spec.spare_wait, "the wait for a standby"),
        ),
        hello.fresh,
        names(hello.devices, "a device"),
        names(hello.closed, "a device"),
        tuple(checks.group(each) for each in hello.hosted),
        hello.epoch,
    )


def _same_protocol(theirs: int, who: str) -> None:
    if theirs != PROTOCOL:
        raise ProtocolError(
            f"{who} speaks protocol {theirs}, this side {PROTOCOL}: install one release of planaria on both"
        )


def _known(table: dict[int, T], number: int, what: str) -> T:
    if number not in table:
        raise ProtocolError(f"{what} {number} is not known here; is the sender of a newer version?")
    return table[number]


def _pulse_out(pulse: Pulse) -> pb.Pulse:
    return pb.Pulse(
        member=encode_member(pulse.member),
        phase=phase_out(pulse.phase),
        step=count(pulse.step, "a step"),
        quorum=encode_quorum_id(pulse.quorum),
        loss=pulse.loss,
        step_seconds=pulse.step_seconds,
        pid=count(pulse.pid, "a pid"),
        devices=names(pulse.devices, "a device"),
        links=links_out(pulse.links),
        shards=count(pulse.shards, "the number of shards"),
    )


def _pulse_in(pulse: pb.Pulse) -> Pulse:
    return Pulse(
        decode_member(pulse.member),
        phase_in(pulse.phase),
        count(pulse.step, "a step"),
        decode_quorum_id(pulse.quorum),
        pulse.loss,
        pulse.step_seconds,
        count(pulse.pid, "a pid"),
        names(pulse.devices, "a device"),
        links_in(pulse.links),
        count(pulse.shards, "the number of shards"),
    )


def links_out(links: Sequence[Link]) -> list[pb.Link]:
    checks.length(len(links), checks.MAX_MEMBERS, "links of a group")
    return [pb.Link(group=checks.group(e.group), bits=e.bits, round_trip=e.round_trip, lost=e.lost) for e in links]


def links_in(links: Sequence[pb.Link]) -> tuple[Link, ...]:
    checks.length(len(links), checks.MAX_MEMBERS, "links of a group")
    if not all(math.isfinite(x) and x >= 0 for e in links for x in (e.bits, e.round_trip, e.lost)):
        raise ProtocolError("a link's figures must be finite and not negative")
    return tuple(Link(checks.group(e.group), e.bits, e.round_trip, e.lost) for e in links)


def phase_out(phase: Phase) -> pb.Phase:
    return _PHASE_OUT[phase]


def phase_in(number: int) -> Phase:
    return _known(_PHASE_IN, number, "phase")


def _ready_out(ready: Ready) -> pb.Ready:
    return pb.Ready(
        member=encode_member(ready.member),
        address=name(ready.address, "the address of a rendezvous store"),
        fingerprint=encode_facts(ready.fingerprint, "a fingerprint"),
        initial=name(ready.initial, "a digest", empty=True),
        shards=count(ready.shards, "the number of shards"),
        total_steps=count(ready.total_steps, "the number of steps"),
        after=encode_quorum_id(ready.after),
        step=count(ready.step, "a step"),
        saves=ready.saves,
        looked=encode_quorum_id(ready.looked),
        keeps=ready.keeps,
        lenient=ready.lenient,
        kept=encode_quorum_id(ready.kept),
        damaged=count(ready.damaged, "a step"),
    )


def _ready_in(ready: pb.Ready) -> Ready:
    return Ready(
        decode_member(ready.member),
        name(ready.address, "the address of a rendezvous store"),
        decode_facts(ready.fingerprint, "a fingerprint"),
        name(ready.initial, "a digest", empty=True),
        count(ready.shards, "the number of shards"),
        count(ready.total_steps, "the number of steps"),
        decode_quorum_id(ready.after),
        count(ready.step, "a step"),
        ready.saves,
        decode_quorum_id(ready.looked),
        ready.keeps,
        decode_quorum_id(ready.kept),
        ready.lenient,
        count(ready.damaged, "a step"),
    )


# --- orders -------------------------------------------------------------------------------------------------


def _order_out(order: Order) -> pb.Order:
    match order:
        case Welcome(epoch, lives):
            checks.integer(epoch, 0, checks.MAX_NUMBER, "an epoch")
            checks.length(len(lives), checks.MAX_MEMBERS, "lives in a welcome")
            lived = [encode_member(member) for member in lives]
            return pb.Order(welcome=pb.Welcome(epoch=epoch, protocol=PROTOCOL, lives=lived))
        case Publish(member, quorum):
            return pb.Order(publish=pb.Publish(member=encode_member(member), quorum=encode_quorum(quorum)))
        case Refuse(member, reason):
            return pb.Order(refuse=pb.Refuse(member=encode_member(member), reason=clip(reason)))
        case Drain(member, moved):
            return pb.Order(drain=pb.DrainMember(member=encode_member(member), moved=moved))
        case Kill(group, signal, rank):
            whom = None if rank is None else checks.rank(rank)
            return pb.Order(kill=pb.KillGroup(group=checks.group(group), signal=_signal(signal), rank=whom))
        case Desired(groups):
            return pb.Order(desired=pb.Desired(groups=checks.group(groups, "the number of groups")))
        case Stop(reason):
            return pb.Order(stop=pb.Stop(reason=clip(reason)))
        case Resume(reason, run):
            return pb.Order(resume=pb.Resume(reason=clip(reason), run=encode_quorum_id(run)))
        case Migrate(group, rank, drains, node):
            where = None if node is None else checks.rank(node)
            wish = pb.Migrate(group=checks.group(group), rank=checks.rank(rank), drains=drains, node=where)
            return pb.Order(migrate=wish)
        case Host(member, joins, off):
            return pb.Order(host=pb.Host(member=encode_member(member), joins=joins, off=off))
        case Close(device, opens):
            return pb.Order(close=pb.Close(device=name(device, "a device", empty=True), opens=opens))
        case Stay(rank, lost):
            return pb.Order(stay=pb.Stay(rank=checks.rank(rank), lost=lost))
        case Regroup(member, port):
            return pb.Order(regroup=pb.Regroup(member=encode_member(member), port=_port(port)))
        case Cast(member, rank, environ):
            facts = encode_facts(environ, "an environment")
            return pb.Order(cast=pb.Cast(member=encode_member(member), rank=checks.rank(rank), environ=facts))
        case _:
            assert_never(order)


def _order_in(message: pb.Order) -> Order:
    match message.WhichOneof("order"):
        case "welcome":
            _same_protocol(message.welcome.protocol, "the lighthouse")
            lives = message.welcome.lives
            checks.length(len(lives), checks.MAX_MEMBERS, "lives in a welcome")
            return Welcome(message.welcome.epoch, tuple(decode_member(member) for member in lives))
        case "publish":
            return Publish(decode_member(message.publish.member), decode_quorum(message.publish.quorum))
        case "refuse":
            return Refuse(decode_member(message.refuse.member), text(message.refuse.reason, "a reason"))
        case "drain":
            return Drain(decode_member(message.drain.member), message.drain.moved)
        case "kill":
            kill = message.kill
            whom = checks.rank(kill.rank) if kill.HasField("rank") else None
            return Kill(checks.group(kill.group), _signal(kill.signal), whom)
        case "desired":
            return Desired(checks.group(message.desired.groups, "the number of groups"))
        case "stop":
            return Stop(text(message.stop.reason, "a reason"))
        case "resume":
            return Resume(text(message.resume.reason, "a reason"), decode_quorum_id(message.resume.run))
        case "migrate":
            migrate = message.migrate
            node = checks.rank(migrate.node) if migrate.HasField("node") else None
            return Migrate(checks.group(migrate.group), checks.rank(migrate.rank), migrate.drains, node)
        case "host":
            return Host(decode_member(message.host.member), message.host.joins, message.host.off)
        case "close":
            return Close(name(message.close.device, "a device", empty=True), message.close.opens)
        case "stay":
            return Stay(checks.rank(message.stay.rank), message.stay.lost)
        case "regroup":
            return Regroup(decode_member(message.regroup.member), _port(message.regroup.port))
        case "cast":
            member, rank = decode_member(message.cast.member), checks.rank(message.cast.rank)
            return Cast(member, rank, decode_facts(message.cast.environ, "an environment"))
        case _:
            raise ProtocolError("an order of no known kind; is the lighthouse of a newer version?")


def _port(number: int) -> int:
    return checks.integer(number, 1, 65535, "a port")


def _signal(number: int) -> int:
    return checks.integer(number, 1, 64, "a signal")  # 64: Linux's SIGRTMAX
