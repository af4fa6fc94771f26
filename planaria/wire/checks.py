"""The version and the limits of what may travel, checked in both directions: nobody sends what a peer would refuse."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from planaria.core.messages import Member, QuorumId
from planaria.errors import ProtocolError
from planaria.wire import control_pb2 as pb

# Raised whenever an old and a new release would misunderstand each other; checked in Hello and in Welcome.
PROTOCOL = 5
# A quorum of MAX_MEMBERS members with full addresses is about half of it; anything larger is not ours.
MAX_MESSAGE_BYTES = 4 << 20
MAX_MEMBERS = 1 << 14
MAX_GROUP = (1 << 16) - 1
MAX_RANK = (1 << 16) - 1
# steps, shards, pids: what every JSON reader of status and metrics can still represent
MAX_COUNT = (1 << 53) - 1
MAX_INCARNATION = (1 << 31) - 1
MAX_NUMBER = (1 << 32) - 1  # epochs and quorum numbers; the progress page packs two of them in one word
MAX_EVENTS = 4096
MAX_FACTS = 256
MAX_NAME = 256  # jobs, agents, hosts, addresses, digests, keys
MAX_TEXT = 4096  # free text for people; longer text is cut by the sender
# What has a terminal do something else than to show a character: colours, the cursor, the title, text that runs
# backwards. People see names and texts at terminals and in logs, where nobody else's line may look like another one.
_CONTROL = "\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069"
_NO_NAME = re.compile(f"[{_CONTROL}]")
_NO_TEXT = re.compile(rf"(\x1b\[[0-9;]*m)|(?![\n\t])[{_CONTROL}]")  # colours, of which nothing need be seen, and others


def same_protocol(theirs: int, who: str) -> None:
    if theirs != PROTOCOL:
        raise ProtocolError(
            f"{who} speaks protocol {theirs}, this side {PROTOCOL}: install one release of planaria on both"
        )


def integer(value: int, low: int, high: int, what: str) -> int:
    """``value`` if it lies in [low, high], else ProtocolError."""
    if low <= value <= high:
        return value
    raise ProtocolError(f"{what} is {value}, outside {low}..{high}; is a peer of another version?")


def count(value: int, what: str) -> int:
    return integer(value, 0, MAX_COUNT, what)


def seconds(value: float, what: str) -> float:
    """Finite, and not negative."""
    if 0 <= value < math.inf:
        return value
    raise ProtocolError(f"{what} is {value} seconds")


def group(value: int, what: str = "a group number") -> int:
    return integer(value, 0, MAX_GROUP, what)


def rank(value: int) -> int:
    return integer(value, 0, MAX_RANK, "a rank")


def name(value: str, what: str, *, empty: bool = False) -> str:
    """An identifier: short, without control characters and, unless ``empty`` is allowed, not empty. Never cut: that
    would make another name."""
    if len(value) > MAX_NAME:
        raise ProtocolError(f"{what} has {len(value)} characters, more than {MAX_NAME}: {value[:40]!r}...")
    if not value and not empty:
        raise ProtocolError(f"{what} is empty")
    if not value.isprintable() and _NO_NAME.search(value):
        raise ProtocolError(f"{what} has control characters: {value[:40]!a}")
    return value


def clip(text: str) -> str:
    """Free text made fit to travel and to be shown: a traceback must not make its own report undeliverable, and what a
    process has said must do nothing to the terminal of whoever reads it."""
    text = _NO_TEXT.sub(lambda found: "" if found[1] else "\ufffd", text)
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def text(value: str, what: str) -> str:
    if len(value) > MAX_TEXT:
        raise ProtocolError(f"{what} has {len(value)} characters, more than {MAX_TEXT}")
    return value


def names(values: Collection[str], what: str) -> tuple[str, ...]:
    """Identifiers, of which one may be empty."""
    length(len(values), MAX_FACTS, what)
    return tuple(name(value, what, empty=True) for value in values)


def length(items: int, limit: int, what: str) -> int:
    return integer(items, 0, limit, f"the number of {what}")


# --- the three words that most messages contain -------------------------------------------------------------


def encode_member(member: Member) -> pb.Member:
    group(member.group)
    integer(member.incarnation, 0, MAX_INCARNATION, "an incarnation")
    return pb.Member(group=member.group, incarnation=member.incarnation)


def decode_member(message: pb.Member) -> Member:
    return Member(group(message.group), integer(message.incarnation, 0, MAX_INCARNATION, "an incarnation"))


def encode_quorum_id(id: QuorumId) -> pb.QuorumId:
    integer(id.epoch, 0, MAX_NUMBER, "an epoch")
    integer(id.number, 0, MAX_NUMBER, "a quorum number")
    return pb.QuorumId(epoch=id.epoch, number=id.number)


def decode_quorum_id(message: pb.QuorumId) -> QuorumId:
    return QuorumId(message.epoch, message.number)  # unsigned 32 bits on the wire: nothing left to check


def encode_facts(facts: tuple[tuple[str, str], ...], what: str) -> list[pb.Fact]:
    length(len(facts), MAX_FACTS, what)
    return [pb.Fact(key=name(key, what), value=text(value, what)) for key, value in facts]


def decode_facts(facts: Collection[pb.Fact], what: str) -> tuple[tuple[str, str], ...]:
    length(len(facts), MAX_FACTS, what)
    return tuple((name(fact.key, what), text(fact.value, what)) for fact in facts)
