"""Communicators: one life of a gloo group for one quorum, and the owner of all lives.

A life has one thread. It forms the group, then posts all operations of the life in the order in which they
were asked for (every member asks in the same order), and takes the group down at the end. So forming never
blocks the caller, a destructor that joins gloo's threads never does, and the training thread only ever waits
on its bell. Where gradients are on a device, the life has a half there too (device.py), under the same thread.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from planaria.core.messages import Link, Member, Quorum, QuorumId
from planaria.errors import CommunicatorError, PlanariaError, afresh
from planaria.exchange.device import CPU, DeviceLink, Shelf, load_kernels
from planaria.exchange.linkmeter import LinkMeter
from planaria.exchange.rendezvous import NEVER, Group, form_group, reason
from planaria.exchange.sockets import Lines
from planaria.exchange.waiting import Bell, Pending

T = TypeVar("T")
Job = Callable[[], None]

# Healing has the tags from here on: it involves only some members, so it cannot draw from the common
# sequence.
HEALING_TAGS = 1 << 30

# A formation takes milliseconds once all members take part, but a member may come late: it is told of the
# quorum by a control thread that competes with its training thread. A formation that fails for another reason
# is ended by news (a newer quorum, a closed connection), so this limit only has to be generous: it is the
# last resort when a machine vanished and nobody says so.
FORMATION_FLOOR = 30.0  # seconds
FORMATION_FACTOR = 20.0  # times the longest formation observed

# Lives whose formation is no longer wanted end at once when their sockets are cut; only one that hangs in
# connecting to a store on a vanished machine lasts until the limit above. More than this many of those means
# that something else is wrong, and more threads would not help.
LINGERING_LIMIT = 64


# Bytes that one member may say to all others at once. What is gathered is some kilobytes: standings, and checksums of
# every tensor if states differ. A peer that is not what it seems shall not choose how much memory is taken here.
MOST_GATHERED = 1 << 26


class Communicator:
    """One life of a group: made by :class:`Communicators`, usable from ``on_formed`` until it is dropped.

    ``rank`` is this member's position in the quorum, ``size`` the number of members. Every method that talks
    to peers must be called by all members in the same order. A communicator of one member has no peers and no
    gloo. ``link`` and ``shelf`` are there unless ``device`` is the CPU.
    """

    def __init__(
        self,
        quorum: Quorum,
        rank: int,
        bell: Bell,
        column: int = 0,
        device: torch.device = CPU,
        shelf: Shelf | None = None,
        prepared: Job = lambda: None,
    ) -> None:
        self.quorum = quorum
        self.column = column
        self.device = device
        self.shelf = shelf
        self._prepared = prepared
        self.link: DeviceLink | None = None
        self.quorum_id = quorum.id
        self.rank = rank
        self.size = len(quorum.members)
        # Every member starts with another peer, so that no one is asked by all at once.
        self.peers = [(rank + step) % self.size for step in range(1, self.size)]
        self._bell = bell
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._error: PlanariaError | None = None
        self._pendings: set[Pending[Any]] = set()
        self._lines = Lines()
        self._group: Group | None = None
        self._meter: LinkMeter | None = None
        self._at_quiet: list[Job] = []
        self._next_tag = 0

    def __repr__(self) -> str:
        state = f"broken: {self._error}" if self._error else "usable"
        return f"<Communicator of quorum {self.quorum_id}, rank {self.rank} of {self.size}, {state}>"

    @property
    def error(self) -> PlanariaError | None:
        """Why this life is over, None while it is not."""
        return self._error

    @property
    def idle(self) -> bool:
        """True if no job is waiting for the life's thread (for a job that could go on either way)."""
        return self._jobs.empty()

    def member(self, rank: int) -> Member:
        return self.quorum.members[rank]

    def links(self) -> list[Link]:
        """What was seen of the connections to the others, as far as they were used. For one thread."""
        if self._meter is None:
            self._meter = LinkMeter(self._lines, self._lines.peers)
        return [replace(link, group=self.member(peer).group) for peer, link in sorted(self._meter.read().items())]

    # --- jobs of the life's thread --------------------------------------------------------------------------

    def pending(self, what: str) -> Pending[Any]:
        """A pending result that fails when this life ends; settled by a job that the caller posts."""
        pending: Pending[Any] = Pending(self._bell, f"{what} in quorum {self.quorum_id}")
        with self._lock:
            error = self._error
            if error is None:
                self._pendings.add(pending)
        if error is not None:
            pending.fail(error)
        return pending

    def post(self, job: Job) -> None:
        """Have ``job`` run by the life's thread after those posted before. An exception in it ends the
        life. After the end nothing is run.
        """
        with self._lock:
            if self._error is None:
                self._jobs.put(job)

    def settle(self, pending: Pending[T], value: T) -> None:
        """Deliver the result of ``pending``."""
        with self._lock:
            self._pendings.discard(pending)
        pending.succeed(value)

    def call(self, what: str, job: Callable[[], T]) -> Pending[T]:
        """Have ``job`` run by the life's thread; its result."""
        pending: Pending[T] = self.pending(what)
        self.post(lambda: self.settle(pending, job()))
        return pending

    def background(self, what: str, job: Callable[[], T]) -> Pending[T]:
        """Run ``job`` in a thread of its own beside the life's thread: for long transfers with tags of their
        own.

        It ends with the life at the latest, because all that it can wait for are operations of this life.
        """
        pending: Pending[T] = self.pending(what)

        def run() -> None:
            if self.device.type != "cpu":
                torch.cuda.set_device(self.device)  # else a thread's first touch makes a context on device 0
            self.guard(lambda: self.settle(pending, job()))

        if not pending.done:
            threading.Thread(target=run, name=f"planaria-{what}-{self.quorum_id}", daemon=True).start()
        return pending

    def guard(self, job: Job) -> None:
        """Run ``job`` now; an exception in it ends the life."""
        try:
            job()
        except PlanariaError as error:
            self.fail(error)
        except Exception as error:
            self.fail(CommunicatorError(f"a job of quorum {self.quorum_id} failed: {type(error).__name__}: {error}"))

    def tags(self, count: int) -> int:
        """The first of ``count`` fresh message tags, the same at every member that calls in the same
        order.
        """
        if self._next_tag + count > HEALING_TAGS:
            self._next_tag = 0  # a billion messages later, the early ones are long delivered
        first, self._next_tag = self._next_tag, self._next_tag + count
        return first

    # --- messages: for jobs only ----------------------------------------------------------------------------

    def send(self, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        """Begin to send a contiguous tensor. It must not change until the transfer is done."""
        return self._transfer(tensor, peer, tag, what, sending=True)

    def receive(self, tensor: Tensor, peer: int, tag: int, what: str) -> Transfer:
        """Begin to receive into a contiguous tensor. It must have at least the size of what is sent: gloo
        ends the process if it is smaller, so sizes that are not certain are exchanged first.
        """
        return self._transfer(tensor, peer, tag, what, sending=False)

    def _transfer(self, tensor: Tensor, peer: int, tag: int, what: str, *, sending: bool) -> Transfer:
        group = self._group
        if group is None or self._error is not None:
            raise afresh(self._error or CommunicatorError(f"quorum {self.quorum_id} is not formed"))
        try:
            work = group.send([tensor], peer, tag) if sending else group.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self.trouble(what, peer, error) from error
        return Transfer(self, work, tensor, peer, what)

    def trouble(self, what: str, peer: int, error: BaseException | str) -> CommunicatorError:
        """The error for a failed operation with ``peer``."""
        why = error if isinstance(error, str) else reason(error)
        return CommunicatorError(
            f"{what} with rank {peer}, {self.member(peer)}, failed in quorum {self.quorum_id}: {why}"
        )

    def gather(self, payload: bytes) -> Pending[list[bytes]]:
        """All members' payloads in rank order, on every member. Lengths may differ."""
        first = self.tags(2)
        return self.call("gathering", lambda: self.gather_now(payload, first))

    def gather_now(self, payload: bytes, first_tag: int) -> list[bytes]:
        """The same inside a job; uses two tags."""
        peers = self.peers
        length = as_tensor(struct.pack("<q", len(payload)))
        lengths = {peer: torch.empty(8, dtype=torch.uint8, device="cpu") for peer in peers}
        arrivals = [self.receive(lengths[peer], peer, first_tag, "gathering") for peer in peers]
        sent = [self.send(length, peer, first_tag, "gathering") for peer in peers]
        for each in arrivals:
            each.wait()
        bodies = {}
        for peer in peers:
            (size,) = struct.unpack("<q", as_bytes(lengths[peer]))
            if not 0 <= size <= MOST_GATHERED:
                raise self.trouble("gathering", peer, f"it says that {size} bytes follow")
            bodies[peer] = torch.empty(size, dtype=torch.uint8, device="cpu")
        body = as_tensor(payload)
        arrivals = [self.receive(bodies[peer], peer, first_tag + 1, "gathering") for peer in peers]
        sent += [self.send(body, peer, first_tag + 1, "gathering") for peer in peers]
        for each in arrivals + sent:
            each.wait()
        return [payload if peer == self.rank else as_bytes(bodies[peer]) for peer in range(self.size)]

    # --- the end --------------------------------------------------------------------------------------------

    def fail(self, error: PlanariaError) -> None:
        """End this life at once: everything pending fails, here and (their connections close) at the peers.
        Any thread; never blocks. Only the first call counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error = afresh(error)
            pendings, self._pendings = self._pendings, set()
        self._lines.cut()
        self._jobs.put(None)
        for pending in pendings:
            pending.fail(error)

    def when_quiet(self, job: Job) -> None:
        """Have ``job`` run by the life's thread when the life is over and its device does nothing for it any more."""
        self._at_quiet.append(job)

    def _live(self, host: str, timeout: float) -> None:
        """Form the group: the first act of the life's thread."""
        if self.size > 1:
            limit, kind = timedelta(seconds=timeout), self.device.type
            self._group = form_group(self.quorum, self.rank, host, limit, self._lines, self.column, kind)
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
            self.link = DeviceLink(self.device, self.rank, self.peers, lambda: self._error)
            load_kernels(self.device)
            if self.size > 1:
                first = self.tags(4)
                self.link.form(lambda mine: self.gather_now(mine, first), lambda: self._assemble(first + 2))

    def _assemble(self, first_tag: int) -> None:
        """Until all members are prepared: whoever takes this life for formed may wait for the others from then on."""
        self._prepared()
        self.gather_now(b"", first_tag)

    def _serve(self) -> None:
        """Run jobs until the end: the other acts of the life's thread."""
        while self._error is None and (job := self._jobs.get()) is not None:
            self.guard(job)

    def _let_go(self) -> None:
        """Take down what was formed: the last act of the life's thread."""
        self._group = None  # the destructor joins gloo's threads, which the cut connections have freed
        if self.link is not None:
            self.link.end()
        for job in self._at_quiet:
            job()
        self._at_quiet.clear()
        # What was not run any more knows this life, which keeps it: together they would stay, with gloo's threads and
        # connections, until Python looks for such rings, which in a long run it seldom does.
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()


class Transfer:
    """A message on its way. Holds on to its tensor until it is done."""

    __slots__ = ("_communicator", "_peer", "_tensor", "_what", "_work")

    def __init__(self, communicator: Communicator, work: Work, tensor: Tensor, peer: int, what: str) -> None:
        self._communicator, self._work, self._tensor, self._peer, self._what = (
            communicator,
            work,
            tensor,
            peer,
            what,
        )

    def wait(self) -> None:
        """Until the message has arrived (or has left). Raises CommunicatorError. For jobs only: it blocks."""
        try:
            self._work.wait(NEVER)
        except RuntimeError as error:
            why = self._communicator.error or self._communicator.trouble(self._what, self._peer, error)
            raise afresh(why) from error


def as_tensor(data: bytes) -> Tensor:
    """A uint8 tensor with a copy of ``data``."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """The content of a contiguous uint8 tensor."""
    return tensor.numpy().tobytes()


class Communicators:
    """The owner of all communicator lives of this rank. Any thread may call it, and no method but ``close``
    blocks.

    ``on_formed(quorum_id, error)`` is called once for every quorum that was given to :meth:`form`, by the
    life's thread: with None if the communicator can be used, else with a sentence that says why it cannot.
    ``column`` is this rank's number within its group: it exchanges with the same rank of the other groups.
    ``device`` is where its gradients are. ``prepared`` returns when this rank could do its part in a step, which may
    be a moment after it says that it can; it is asked where NCCL is formed, which takes longer.
    """

    def __init__(
        self,
        me: Member,
        host: str,
        bell: Bell,
        on_formed: Callable[[QuorumId, str | None], None],
        column: int = 0,
        device: torch.device = CPU,
        prepared: Job = lambda: None,
    ) -> None:
        self._me = me
        self._host = host
        self._bell = bell
        self._on_formed = on_formed
        self._column = column
        self._device = device
        self._prepared = prepared
        self._shelf = None if device.type == "cpu" else Shelf(device)
        self._lock = threading.Lock()
        self._lives: dict[QuorumId, Communicator] = {}
        self._formed: set[QuorumId] = set()
        self._threads: dict[Communicator, threading.Thread] = {}
        self._longest = 0.0  # seconds
        self._closed = False

    def form(self, quorum: Quorum) -> None:
        """Begin to form the communicator of ``quorum``. A quorum that was given before is not formed again.

        Raises CommunicatorError if this member is not in it, if too many lives linger, or after ``close``.
        """
        rank = quorum.rank_of(self._me)
        if rank is None:
            raise CommunicatorError(f"{self._me} is not a member of quorum {quorum.id}")
        with self._lock:
            if self._closed:
                raise CommunicatorError(f"the communicators of {self._me} are closed")
            if quorum.id in self._lives:
                return
            lingering = sum(life.error is not None for life in self._threads)
            if lingering >= LINGERING_LIMIT:
                raise CommunicatorError(f"{lingering} dropped communicators have not ended yet; restart the rank")
            life = Communicator(quorum, rank, self._bell, self._column, self._device, self._shelf, self._prepared)
            timeout = max(FORMATION_FLOOR, FORMATION_FACTOR * self._longest)
            name = f"planaria-exchange-{quorum.id}"
            thread = threading.Thread(target=self._run, args=(life, timeout), name=name, daemon=True)
            self._lives[quorum.id] = life
            self._threads[life] = thread
        thread.start()

    def get(self, quorum_id: QuorumId) -> Communicator | None:
        """The communicator of a quorum if it is formed and was not dropped."""
        with self._lock:
            return self._lives[quorum_id] if quorum_id in self._formed else None

    def drop(self, quorum_id: QuorumId, why: str = "it was dropped") -> None:
        """End a life, formed or not: unusable at once, taken down in the background. Unknown ids are
        ignored.
        """
        with self._lock:
            life = self._lives.pop(quorum_id, None)
            self._formed.discard(quorum_id)
        if life is not None:
            life.fail(CommunicatorError(f"the communicator of quorum {quorum_id} has ended: {why}"))

    def drop_before(self, quorum_id: QuorumId) -> None:
        """Drop all lives of older quorums."""
        with self._lock:
            older = [id for id in self._lives if id < quorum_id]
        for id in older:
            self.drop(id, f"quorum {quorum_id} takes its place")

    def rename(self, me: Member) -> None:
        """Drop all lives: this rank is one of ``me`` from now on."""
        with self._lock:
            ids, self._me = list(self._lives), me
        for quorum_id in ids:
            self.drop(quorum_id, "its group lost a rank")

    def close(self) -> None:
        """Drop all lives and wait for their threads, at most for a moment each."""
        with self._lock:
            self._closed = True
            ids, threads = list(self._lives), list(self._threads.values())
        for quorum_id in ids:
            self.drop(quorum_id, "the rank is ending")
        for thread in threads:
            if thread is not threading.current_thread():
                # Cut connections free gloo's threads within milliseconds. The rare formation that hangs
                # longer is a daemon thread in a system call, which the end of the process takes along.
                thread.join(2.0)

    def _run(self, life: Communicator, timeout: float) -> None:
        try:
            error = self._form(life, timeout)
            self._on_formed(life.quorum_id, error)
            if error is None:
                life._serve()
        finally:
            life._let_go()
            with self._lock:
                self._threads.pop(life, None)

    def _form(self, life: Communicator, timeout: float) -> str | None:
        began = time.monotonic()
        try:
            life._live(self._host, timeout)
        except Exception as error:  # whatever it is: somebody waits to be told
            life.fail(CommunicatorError(f"quorum {life.quorum_id} was not formed: {error}"))
        with self._lock:
            if life.error is None and self._lives.get(life.quorum_id) is life:
                self._formed.add(life.quorum_id)
                self._longest = max(self._longest, time.monotonic() - began)
                return None
        return str(life.error)
