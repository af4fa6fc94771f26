"""What the lighthouse says, to protobuf and back. To be used through `codec`, which guards it."""

from __future__ import annotations

from typing import assert_never

from planaria.core.messages import (
    Cast,
    Close,
    Desired,
    Drain,
    Host,
    Kill,
    Migrate,
    Order,
    Publish,
    Refuse,
    Regroup,
    Resume,
    Stay,
    Stop,
    Welcome,
)
from planaria.errors import ProtocolError
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import (
    PROTOCOL,
    clip,
    decode_facts,
    decode_member,
    decode_quorum_id,
    encode_facts,
    encode_member,
    encode_quorum_id,
    name,
    same_protocol,
    text,
)
from planaria.wire.quorums import decode_quorum, encode_quorum


def order_out(order: Order) -> pb.Order:
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


def order_in(message: pb.Order) -> Order:
    match message.WhichOneof("order"):
        case "welcome":
            same_protocol(message.welcome.protocol, "the lighthouse")
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
