"""Protobuf forms of what operators see: events and the status of a job. Ranks and agents do not need it."""

from __future__ import annotations

from planaria.core.messages import Event
from planaria.core.roster import GroupStatus, JobStatus
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import clip, count, decode_facts, decode_member, decode_quorum_id, name, names, text
from planaria.wire.codec import guarded
from planaria.wire.quorums import decode_quorum, encode_quorum
from planaria.wire.reports import links_in, links_out, phase_in, phase_out


def encode_event(event: Event) -> pb.Event:
    """``at`` travels as it is: the sender sees to it that it is unix seconds."""
    return guarded(_event_out, event)


def decode_event(message: pb.Event) -> Event:
    return guarded(_event_in, message)


def encode_status(status: JobStatus) -> pb.JobStatus:
    return guarded(_status_out, status)


def decode_status(message: pb.JobStatus) -> JobStatus:
    return guarded(_status_in, message)


def _event_out(event: Event) -> pb.Event:
    facts = tuple((key, clip(value)) for key, value in event.data)
    return pb.Event(
        at=event.at,
        kind=name(event.kind, "the kind of an event"),
        text=clip(event.text),
        group=checks.integer(event.group, -1, checks.MAX_GROUP, "a group number"),
        data=checks.encode_facts(facts, "the data of an event"),
    )


def _event_in(message: pb.Event) -> Event:
    return Event(
        message.at,
        name(message.kind, "the kind of an event"),
        text(message.text, "an event"),
        checks.integer(message.group, -1, checks.MAX_GROUP, "a group number"),
        decode_facts(message.data, "the data of an event"),
    )


def _status_out(status: JobStatus) -> pb.JobStatus:
    checks.length(len(status.groups), checks.MAX_MEMBERS, "groups in a status")
    checks.length(len(status.events), checks.MAX_EVENTS, "events in a status")
    return pb.JobStatus(
        job=name(status.job, "a job's name"),
        epoch=checks.integer(status.epoch, 0, checks.MAX_NUMBER, "an epoch"),
        quorum=None if status.quorum is None else encode_quorum(status.quorum),
        planned=None if status.planned is None else encode_quorum(status.planned),
        desired=checks.group(status.desired, "the number of groups"),
        complete=status.complete,
        groups=[_group_out(group) for group in status.groups],
        events=[_event_out(event) for event in status.events],
        drained=names(status.drained, "a node"),
        scaled=count(status.scaled, "the number of wishes"),
    )


def _status_in(message: pb.JobStatus) -> JobStatus:
    checks.length(len(message.groups), checks.MAX_MEMBERS, "groups in a status")
    checks.length(len(message.events), checks.MAX_EVENTS, "events in a status")
    return JobStatus(
        job=name(message.job, "a job's name"),
        epoch=message.epoch,
        quorum=decode_quorum(message.quorum) if message.HasField("quorum") else None,
        planned=decode_quorum(message.planned) if message.HasField("planned") else None,
        desired=checks.group(message.desired, "the number of groups"),
        complete=message.complete,
        groups=tuple(_group_in(group) for group in message.groups),
        events=tuple(_event_in(event) for event in message.events),
        drained=names(message.drained, "a node"),
        scaled=count(message.scaled, "the number of wishes"),
    )


def _group_out(group: GroupStatus) -> pb.GroupStatus:
    return pb.GroupStatus(
        member=checks.encode_member(group.member),
        state=name(group.state, "a state"),
        step=count(group.step, "a step"),
        quorum=checks.encode_quorum_id(group.quorum),
        phase=phase_out(group.phase),
        loss=group.loss,
        step_seconds=group.step_seconds,
        pid=count(group.pid, "a pid"),
        agent=name(group.agent, "an agent's name", empty=True),
        connected=group.connected,
        note=clip(group.note),
        links=links_out(group.links),
        shards=count(group.shards, "the number of shards"),
    )


def _group_in(group: pb.GroupStatus) -> GroupStatus:
    return GroupStatus(
        member=decode_member(group.member),
        state=name(group.state, "a state"),
        step=count(group.step, "a step"),
        quorum=decode_quorum_id(group.quorum),
        phase=phase_in(group.phase),
        loss=group.loss,
        step_seconds=group.step_seconds,
        pid=count(group.pid, "a pid"),
        agent=name(group.agent, "an agent's name", empty=True),
        connected=group.connected,
        note=text(group.note, "a note"),
        links=links_in(group.links),
        shards=count(group.shards, "the number of shards"),
    )
