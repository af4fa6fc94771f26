"""Everything that makes something of bytes which another process, a file or a person gave, as functions of bytes.

Each has examples of what it is meant for, and the errors that it may raise: nothing else may come of any bytes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from planaria.agent.sitecommand import _read as read_site_command
from planaria.chaos.schedule import parse_kinds, parse_seconds
from planaria.chaos.watch import _event
from planaria.cli.logdir import read_run
from planaria.cli.options import health_table, policy_named
from planaria.core.messages import (
    Adopted,
    Died,
    Event,
    Heartbeat,
    Hello,
    JobSpec,
    Member,
    Phase,
    Publish,
    Pulse,
    Quorum,
    QuorumId,
    Ready,
    Standing,
    Stop,
)
from planaria.engines.nodestream import HEADER_BYTES, NodeStream
from planaria.errors import PlanariaError, ProtocolError, UsageError
from planaria.exchange.healing import _Contents
from planaria.jax import checkpoint as jax_checkpoint
from planaria.lighthouse.actions import _fields
from planaria.lighthouse.http import StatusPages
from planaria.lighthouse.seat import Seat
from planaria.lighthouse.store import Store
from planaria.rank.durable import MANIFEST
from planaria.rank.records import (
    ControlWord,
    ShardRecord,
    decode_standing,
    decode_tail,
    encode_standing,
    encode_tail,
    pack_presence,
    tail_bytes,
)
from planaria.rank.rounds import Note
from planaria.torch import plain
from planaria.torch.catching_up import _opened
from planaria.torch.checkpoint_files import Checkpoint
from planaria.torch.state import _parse
from planaria.wire import codec, frames, membership
from planaria.wire import control_pb2 as pb
from planaria.wire.channel import split_address
from planaria.wire.page import ProgressPage
from planaria.wire.quorums import decode_quorum, encode_quorum
from planaria.wire.status import decode_event, decode_status, encode_event
from planaria.wire.token import HEADER, ROLES, Denied, Guard, Token, make

MEMBER = Member(2, 1)
QUORUM = Quorum(QuorumId(1, 4), (Member(0, 0), MEMBER), ("h:1", "h:2"), True, "lineage", "group 1 lost")
_DIRECTORY = Path(tempfile.mkdtemp(prefix="planaria-fuzz-"))


@dataclass(frozen=True)
class Decoder:
    """``jsonish``: its bytes are JSON, and are also changed as such."""

    name: str
    decode: Callable[[bytes], object]
    examples: list[bytes]
    errors: tuple[type[Exception], ...] = (ProtocolError,)
    jsonish: bool = False
    ages: bool = False  # its examples hold for a moment only
    seal: Callable[[bytes], bytes] = field(default=lambda data: data)  # makes checksums right, so that more is reached


class Pipe:
    """What a FrameReader needs of a socket."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def recv(self, size: int, /) -> bytes:
        part = self._data[self._at : self._at + min(size, 1 << 16)]
        self._at += len(part)
        return part

    def fileno(self) -> int:
        return 3


def _file(read: Callable[[Path], object], name: str = "file") -> Callable[[bytes], object]:
    path = _DIRECTORY / name
    path.parent.mkdir(exist_ok=True)

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return decode


def _page(data: bytes) -> object:
    path = _DIRECTORY / "page"
    path.write_bytes(data)
    page = ProgressPage.open(path)
    try:
        return page.read(), page.commits(), page.history()
    finally:
        page.close()


def _a_page() -> bytes:
    path = _DIRECTORY / "made"
    page = ProgressPage.create(path)
    page.quorum = QUORUM.id
    page.committed(7, QUORUM.id, 0.5, 10, 2, 0)
    page.close()
    return path.read_bytes()


class _Nobody:
    """The other end of a stream that only hears."""

    transport = None

    def is_closing(self) -> bool:
        return True


def _words(data: bytes) -> object:
    async def read() -> list[Any]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        stream = NodeStream(reader, _Nobody())  # type: ignore[arg-type]
        try:
            return [word async for word in stream.words()]
        finally:
            stream._beating.cancel()

    return asyncio.run(read())


def _word(word: object) -> bytes:
    body = json.dumps(word).encode()
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def _read_async(data: bytes) -> object:
    async def read() -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await frames.read_frame(reader)

    return asyncio.run(read())


def _pages(data: bytes) -> object:
    return _PAGES._answer(data)


def _action(data: bytes) -> object:
    try:
        return pb.KillRequest(**_fields(data, {"group": int, "signal": int}))
    except RecursionError as error:  # as whoever calls it has it
        raise ValueError from error


_PAGES = StatusPages(Seat(Store.open(_DIRECTORY / "store.db")), None)
_TOKEN = Token(make(_DIRECTORY / "token", ROLES))
_GUARD = Guard(_TOKEN)


def _checkpoint(data: bytes) -> object:
    directory = _DIRECTORY / "step1"
    directory.mkdir(exist_ok=True)
    for name in ("rank0.json", "rank0.safetensors"):
        (directory / name).write_bytes(bytes(64))
    (directory / MANIFEST).write_bytes(data)
    return Checkpoint.read(directory)


def _jax_checkpoint(data: bytes) -> Any:
    directory = _DIRECTORY / "step-00000002"
    (directory / "state").mkdir(exist_ok=True, parents=True)
    (directory / "state" / "file").write_bytes(bytes(64))
    (directory / MANIFEST).write_bytes(data)
    return jax_checkpoint.Checkpoint.read(directory)


def _sealed(data: bytes) -> bytes:
    """With the checksum that a manifest of this body has."""
    try:
        body = json.loads(data)["checkpoint"]
        dumped = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return b'{"checksum":"%s","checkpoint":%s}' % (xxhash.xxh3_128_hexdigest(dumped).encode(), dumped)
    except (ValueError, KeyError, TypeError, RecursionError):
        return data


_MANIFEST = {
    "version": 1,
    "job": "j",
    "step": 1,
    "seed": 0,
    "shards": 2,
    "ranks": 1,
    "fingerprint": {"torch": "2.13"},
    "files": {"rank0.json": [64, 64, "x"], "rank0.safetensors": [64, 8, "y"]},
    "tensors": {"model.w": ["float32", [2, 4], [[[0, 0], [2, 4], "rank0.safetensors", 8, "c"]]]},
}
_JAX_MANIFEST = {
    "version": "jax 1",
    "job": "j",
    "step": 1,
    "seed": 0,
    "shards": 2,
    "fingerprint": {"jax": "0.10"},
    "leaves": [["state['w']", "float32", [2, 4], "", [[[0, 2], [0, 4]]]]],
    "metrics": {"loss": 0.5},
    "files": {"state/file": [64, xxhash.xxh3_128_hexdigest(bytes(64))]},
}
_MISSED = {"manifest": "m", "missed": [[3, 1, 2, 0, 4.0, [], 0], [4, 1, 2, 1, 3.5, [], 0]]}
_MEMBERSHIP = {
    "version": 2,
    "identity": {"sync": "diloco", "shards": "2", "seed": "0"},
    "origin": "o",
    "first": "f",
    "final": "",
    "quorum": [1, 2],
    "syncs": 3,
    "changes": [[0, [0, 1], [], [], []], [2, [0], [], [1], [[0, 2]]]],
}
_RECORD = ShardRecord(1, pack_presence([True, False]), (0.5,), 3)
_STATE = plain.dump(
    {"version": 1, "objects": [["model", "module", {"dict": [["w", {"tensor": 0}]]}]], "tensors": [["float32", [2]]]}
)
_REPORTS = [
    Hello("a", "host", JobSpec("j", 2)),
    Ready(MEMBER, "h:1", (("torch", "2"),), "start", 4, 10),
    Adopted(MEMBER, QUORUM.id, 3),
    Died(MEMBER, "killed by SIGKILL"),
    Heartbeat((Pulse(MEMBER, Phase.COMPUTING, 3, QUORUM.id, 0.5, 0.1, 1),)),
]
_ORDERS = [Publish(MEMBER, QUORUM), Stop("nobody is left")]
_USAGE = (UsageError,)

DECODERS = [
    Decoder("report", codec.report_from_bytes, [codec.encode_report(each).SerializeToString() for each in _REPORTS]),
    Decoder("order", codec.order_from_bytes, [codec.encode_order(each).SerializeToString() for each in _ORDERS]),
    Decoder(
        "quorum",
        lambda data: decode_quorum(codec.parse(pb.Quorum, data)),
        [encode_quorum(QUORUM).SerializeToString()],
    ),
    Decoder("status", lambda data: decode_status(codec.parse(pb.JobStatus, data)), [b"\n\x01j"]),
    Decoder(
        "event",
        lambda data: decode_event(codec.parse(pb.Event, data)),
        [encode_event(Event(1.0, "kind", "text", 2)).SerializeToString()],
    ),
    Decoder("frames", lambda data: list(frames.FrameReader(Pipe(data))), [frames.frame(each) for each in _ORDERS]),
    Decoder("a rank's frame", _read_async, [frames.frame(each) for each in _REPORTS]),
    Decoder("page", _page, [_a_page()]),
    Decoder("words of a node", _words, [_word({"beat": 1}), _word({"welcome": "j", "run": "r"})]),
    Decoder("tail", decode_tail, [encode_tail(ControlWord(3, QUORUM.id, 0.5), [_RECORD], tail_bytes(2, 2, 1))]),
    Decoder(
        "standing",
        lambda data: decode_standing(data, 6),
        [encode_standing(Standing(3, True, frozenset({1, 5}), QUORUM.id, 0.1), 6)],
    ),
    Decoder(
        "round", Note.decode, [Note(QUORUM.id, metrics={"loss": 0.5}, broken={QUORUM.id: "x"}).encode()], jsonish=True
    ),
    Decoder(
        "plain data",
        lambda data: plain.decode(data, [torch.zeros(1)]),
        [plain.encode({"a": (1, 2.5, [None, b"x"]), 3: torch.Size([2])}, [], "x")],
        jsonish=True,
    ),
    Decoder("state", _parse, [_STATE], jsonish=True),
    Decoder("missed syncs", lambda data: _opened(plain.load(data), []), [json.dumps(_MISSED).encode()], jsonish=True),
    Decoder("contents", _Contents.unpack, [_Contents((8, 16), (False, True), b"manifest").pack()]),
    Decoder(
        "manifest", _checkpoint, [_sealed(json.dumps({"checkpoint": _MANIFEST}).encode())], _USAGE, True, seal=_sealed
    ),
    Decoder(
        "manifest of a JAX job",
        _jax_checkpoint,
        [_sealed(json.dumps({"checkpoint": _JAX_MANIFEST}).encode())],
        (UsageError, jax_checkpoint.Damaged),
        True,
        seal=_sealed,
    ),
    Decoder("membership", _file(membership.read), [json.dumps(_MEMBERSHIP).encode()], _USAGE, True),
    Decoder("action of a page", _action, [b'{"group": 1, "signal": 9}'], (ValueError,), True),
    Decoder("run.json", _file(read_run, "run.json"), [b'{"job": "j", "lighthouse": "h:1", "pid": 3}'], _USAGE, True),
    Decoder("event line", _event, [b'{"at": 1.5, "kind": "lost", "text": "t", "group": 1, "data": {}}'], (), True),
    Decoder(
        "site command",
        lambda data: read_site_command("check", data.decode(errors="replace"), 1),
        [b'{"signal": "x", "value": 1, "group": 0, "rank": 1, "text": "t"}'],
        (),
        True,
    ),
    Decoder(
        "health table",
        _file(lambda path: health_table(str(path), False)),
        [b'every = 2\nshare = 0.5\n[command]\nrun = "true"\n[rules.a]\nsignal = "xid"\nabove = 1\naction = "report"\n'],
        _USAGE,
    ),
    Decoder(
        "status page",
        _pages,
        [b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HEAD /metrics HTTP/1.0\r\n\r\n"],
        (),
    ),
    Decoder(
        "proof",
        lambda data: _GUARD.role("Kill", [(HEADER, data.decode("latin-1"))]),
        [_TOKEN.proof("Kill", [role]).encode() for role in ROLES],
        (Denied,),
        ages=True,
    ),
    Decoder("token file", _file(lambda path: Token(path).secrets()), [b"agent " + b"0" * 64 + b"\n"], _USAGE),
    Decoder("address", lambda data: split_address(data.decode("latin-1")), [b"[::1]:80", b"h:1"], _USAGE),
    Decoder("times", lambda data: parse_seconds(data.decode("latin-1")), [b"500ms", b"1.5", b"2m"], _USAGE),
    Decoder("kinds", lambda data: parse_kinds(data.decode("latin-1")), [b"kill,stop"], _USAGE),
    Decoder("policy", lambda data: policy_named(data.decode("latin-1")), [b"shrink"], _USAGE),
]
assert all(issubclass(error, (PlanariaError, ValueError)) for each in DECODERS for error in each.errors)
