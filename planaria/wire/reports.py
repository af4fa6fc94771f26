"""What an agent and its ranks say, to protobuf and back. To be used through `codec`, which guards it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, assert_never, cast

from planaria.core.messages import (
    Adopted,
    Corrupted,
    Died,
    Finished,
    Heartbeat,
    Hello,
    JobSpec,
    Leaving,
    Link,
    Phase,
    Policy,
    Prepared,
    Present,
    Pulse,
    Ready,
    Report,
    Saved,
    Suspected,
    Synced,
    Trouble,
)
from planaria.errors import ProtocolError
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import (
    PROTOCOL,
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
    same_protocol,
    text,
)

T = TypeVar("T")

# The casts are for the type checker only: protobuf's enum values are plain integers at run time.
_PHASE_OUT = {phase: cast("pb.Phase", pb.Phase.Value(f"PHASE_{phase.name}")) for phase in Phase}
_PHASE_IN: dict[int, Phase] = {number: phase for phase, number in _PHASE_OUT.items()}
_POLICY_OUT = {policy: cast("pb.Policy", pb.Policy.Value(f"POLICY_{policy.name}")) for policy in Policy}
_POLICY_IN: dict[int, Policy] = {number: policy for policy, number in _POLICY_OUT.items()}


def report_out(report: Report) -> pb.Report:
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


def report_in(message: pb.Report) -> Report:
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
    same_protocol(hello.protocol, f"agent {hello.agent[: checks.MAX_NAME]!r}")
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
