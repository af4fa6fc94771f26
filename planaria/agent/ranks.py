"""The Unix socket to the ranks of this agent: reports in, orders out."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from planaria.core.messages import (
    STANDBYS,
    Adopted,
    Cast,
    Corrupted,
    Finished,
    Member,
    Order,
    Present,
    Ready,
    Regroup,
    Report,
    Saved,
    Trouble,
)
from planaria.errors import ProtocolError
from planaria.wire.frames import read_frame, write_frame

# The kernel's limit for the path of a Unix socket is 108 bytes, the closing zero included.
_LONGEST_PATH = 107
_NAME = "agent"
_PREFIX = "planaria-"
# A socket that is bound but does not listen yet refuses connections too, for microseconds; a paused machine included.
_SWEEP_AFTER = 60.0


class RankHub:
    """Listens in a private directory. A connection belongs to the rank that its first report names: a ``Present`` says
    which, everything else comes from rank 0.

    ``on_report`` gets every report of a member for which ``admit`` says True; another connection is closed, as is
    one that says what a rank must not say (``on_refused`` gets a sentence). That a connection ends means nothing by
    itself (``on_hangup`` gets the member): the process table says who is dead.

    All ranks of a member hear the same orders in the same order, however late one of them connects.
    """

    def __init__(
        self,
        admit: Callable[[Member], bool],
        on_report: Callable[[Report], None],
        on_refused: Callable[[str], None],
        ranks: Callable[[Member], Collection[int]] = lambda member: (0,),
        relay: Callable[[Member, Order], None] = lambda member, order: None,
        on_hangup: Callable[[Member], None] = lambda member: None,
        on_standby: Callable[[Present], None] = lambda present: None,
    ) -> None:
        """``ranks``: of a member, those that connect here; ``relay`` passes orders on to the others; ``on_standby``
        hears of a standby that is warm."""
        self._admit = admit
        self._on_report = on_report
        self._on_refused = on_refused
        self._ranks = ranks
        self._relay = relay
        self._on_hangup = on_hangup
        self._on_standby = on_standby
        self._writers: dict[tuple[Member, int], asyncio.StreamWriter] = {}
        self._owners: dict[asyncio.StreamWriter, tuple[Member, int]] = {}  # the same the other way round
        self._streams: dict[Member, asyncio.Task[None]] = {}  # of those that speak
        self._arrived: dict[Member, set[int]] = {}  # ranks that have connected, dead or alive
        self._said: dict[Member, list[Order]] = {}  # while some rank has not
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        _sweep(Path(tempfile.gettempdir()))
        self._directory = _private_directory()

    @property
    def path(self) -> Path:
        return self._directory / _NAME

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.path)

    def send(self, member: Member, order: Order) -> bool:
        """Queue ``order`` for all ranks of the member. False if the one that speaks for it is not connected: then
        nobody gets it. Never waits for a rank."""
        ranks = self._ranks(member)
        if 0 in ranks and self._open(member, 0) is None:
            return False
        if len(self._arrived.get(member, ())) < len(ranks):
            self._said.setdefault(member, []).append(order)
        for rank in ranks:
            if (writer := self._open(member, rank)) is not None:
                write_frame(writer, order)
        self._relay(member, order)
        return True

    def connected(self) -> tuple[Member, ...]:
        """Members that can be told something."""
        return tuple(member for member, rank in self._writers if rank == 0)

    def forget(self, member: Member) -> None:
        """It is gone: no rank of it will connect any more."""
        self._arrived.pop(member, None)
        self._said.pop(member, None)

    def cast(self, standby: Member, part: Cast) -> None:
        """Tell a standby of this node what it is from now on; it connects again as that."""
        if (writer := self._open(standby, 0)) is not None:
            write_frame(writer, part)
        self.forget(standby)

    def regroup(self, member: Member, newer: Member, lost: int, port: int) -> None:
        """The connections of the member's living ranks are ``newer``'s from now on, and these are told so."""
        self.forget(member)
        for (whose, rank), writer in list(self._writers.items()):
            if whose != member:
                continue
            del self._writers[whose, rank]
            if rank != lost:
                self._writers[newer, rank], self._owners[writer] = writer, (newer, rank)
                self._arrived.setdefault(newer, set()).add(rank)
                write_frame(writer, Regroup(newer, port))
        if (stream := self._streams.pop(member, None)) is not None and lost != 0:
            self._streams[newer] = stream

    def _open(self, member: Member, rank: int) -> asyncio.StreamWriter | None:
        writer = self._writers.get((member, rank))
        return None if writer is None or writer.is_closing() else writer

    def stream_of(self, member: Member) -> asyncio.Task[None] | None:
        """What reads the member's words, done when it has passed the last one on; None if it is not connected."""
        return self._streams.get(member)

    async def close(self) -> None:
        """Close all connections, which ends the ranks that still live, and remove the directory."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            known = await self._first(reader, writer, task)
            while known and (report := await read_frame(reader)) is not None:
                self._take(*self._owners[writer], report)
        except ProtocolError as error:
            who = self._owners.get(writer)
            whose = "a process" if who is None else f"{who[0]}" + (f", rank {who[1]}," if who[1] else "")
            self._on_refused(f"{whose} was cut off from the agent's socket: {error}")
        except OSError:
            pass  # the rank went while something was written to it: that a connection ends means nothing
        except asyncio.CancelledError:
            pass  # by close; nothing is left to be done but to hang up
        finally:
            self._tasks.discard(task)
            who = self._owners.pop(writer, None)
            if who is not None and self._writers.get(who) is writer:
                del self._writers[who]
                if who[1] == 0:
                    del self._streams[who[0]]
                self._on_hangup(who[0])
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _first(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """Take the report that says whose connection it is. False if it was closed before."""
        report = await read_frame(reader)
        if report is None:
            return False
        member, rank = (report.member, report.rank) if isinstance(report, Present) else (_speaker(report), 0)
        if not self._admit(member):
            raise ProtocolError(f"{member} is not a running member of this agent")
        if rank not in (ranks := self._ranks(member)):
            raise ProtocolError(f"{member} has no rank {rank} here")
        if (old := self._writers.get((member, rank))) is not None:
            old.close()
        self._writers[member, rank], self._owners[writer] = writer, (member, rank)
        arrived = self._arrived.setdefault(member, set())
        if rank not in arrived:
            arrived.add(rank)
            for order in self._said.get(member, ()):
                write_frame(writer, order)
            if len(arrived) == len(ranks):
                self._said.pop(member, None)
        if rank == 0:
            self._streams[member] = task
            if not isinstance(report, Present):  # one that takes the place of a lost rank speaks later
                self._take(member, rank, report)
            elif member.group == STANDBYS:
                self._on_standby(report)
        return True

    def _take(self, member: Member, rank: int, report: Report) -> None:
        if rank != 0:
            raise ProtocolError(f"it sent a {type(report).__name__}, but rank 0 speaks for its group")
        speaker = _speaker(report)
        if speaker.group != member.group or speaker.incarnation > member.incarnation:
            raise ProtocolError(f"{member} spoke for {speaker}")
        if speaker == member or isinstance(report, Saved):  # else said before it heard that a rank was lost
            self._on_report(report)


def _speaker(report: Report) -> Member:
    """Whom a rank's report is about. Everything else is for the agent to say."""
    if isinstance(report, (Ready, Adopted, Trouble, Finished, Saved, Corrupted)):
        return report.member
    raise ProtocolError(f"a rank sent a {type(report).__name__}, which only agents send")


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(directory / _NAME).encode()) > _LONGEST_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return directory


def _sweep(parent: Path) -> None:
    """Remove what agents of this user left behind that were killed before they could do it themselves."""
    for path in parent.glob(f"{_PREFIX}*/{_NAME}"):
        with suppress(OSError):
            facts = path.lstat()
            old = time.time() - facts.st_mtime > _SWEEP_AFTER
            if facts.st_uid == os.getuid() and old and path.is_socket() and _refuses(path):
                path.unlink()
                path.parent.rmdir()  # only if it is empty: whatever else is in there is not ours


def _refuses(path: Path) -> bool:
    """Whether nobody listens on the socket. Never waits: a listener that is busy is there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
