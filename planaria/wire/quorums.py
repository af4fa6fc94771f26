"""The protobuf form of a quorum, the longest of all that travels."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from planaria.core.messages import Member, Quorum
from planaria.errors import ProtocolError
from planaria.wire import checks
from planaria.wire import control_pb2 as pb
from planaria.wire.checks import (
    clip,
    decode_member,
    decode_quorum_id,
    encode_member,
    encode_quorum_id,
    name,
    text,
)

# The newest quorum encoded: a lighthouse sends one and the same to every member, and to build it anew for
# each of n members would be n * n work inside its event loop. A pair, replaced as a whole, so that threads
# may share it.
_newest: tuple[Quorum, pb.Quorum] | None = None


def encode_quorum(quorum: Quorum) -> pb.Quorum:
    """The caller must not modify what comes back: it may be handed out again."""
    global _newest
    seen = _newest
    if seen is not None and seen[0] is quorum:
        return seen[1]
    _check_members(len(quorum.members), len(quorum.addresses))
    message = pb.Quorum(
        id=encode_quorum_id(quorum.id),
        members=[encode_member(member) for member in quorum.members],
        addresses=[name(address, "the address of a rendezvous store", empty=True) for address in quorum.addresses],
        urgent=quorum.urgent,
        lineage=name(quorum.lineage, "a lineage", empty=True),
        reason=clip(quorum.reason),
        founding=quorum.founding,
    )
    _newest = (quorum, message)
    return message


_published: tuple[Quorum, bytes] | None = None  # the frame of the newest, as it is for every member


def publish_frame(member: Member, quorum: Quorum) -> bytes:
    """A serialised LighthouseFrame that tells ``member`` of ``quorum``. A thousand agents are told of the same one, and
    to copy and serialise it for each took most of the time in which they waited. Protobuf merges messages whose bytes
    follow each other, so what differs is put in front of what does not."""
    global _published
    seen = _published
    if seen is None or seen[0] is not quorum:
        whole = pb.LighthouseFrame()
        whole.order.publish.quorum.CopyFrom(encode_quorum(quorum))
        seen = _published = (quorum, whole.SerializeToString())
    return _told(member) + seen[1]


@lru_cache(maxsize=checks.MAX_MEMBERS)  # the same members are told again and again
def _told(member: Member) -> bytes:
    own = pb.LighthouseFrame()
    own.order.publish.member.CopyFrom(encode_member(member))
    return own.SerializeToString()


def decode_quorum(message: pb.Quorum) -> Quorum:
    """Members must be there, ascending by group and without repetition. An address may be empty (not known
    yet) in what operators are shown of a quorum that was loaded from the store."""
    _check_members(len(message.members), len(message.addresses))
    members = tuple(decode_member(member) for member in message.members)
    if any(left.group >= right.group for left, right in pairwise(members)):
        raise ProtocolError(f"the members of quorum {decode_quorum_id(message.id)} are not in ascending order")
    return Quorum(
        decode_quorum_id(message.id),
        members,
        tuple(name(address, "the address of a rendezvous store", empty=True) for address in message.addresses),
        message.urgent,
        name(message.lineage, "a lineage", empty=True),
        text(message.reason, "a reason"),
        message.founding,
    )


def _check_members(members: int, addresses: int) -> None:
    checks.integer(members, 1, checks.MAX_MEMBERS, "the number of members of a quorum")
    if members != addresses:
        raise ProtocolError(f"a quorum of {members} members with {addresses} addresses")
