"""Groups whose ranks are on several nodes: the engine of the node that speaks for them, node 0.

The other nodes run helpers (``planaria.agent.helper``), which connect to this one and create, delete, list and watch
ranks for it. A helper that is out of reach has lost its ranks: it kills them when it notices that itself, and nothing
is started on its node before it is back.

Groups begin on the first ``Terms.nnodes`` nodes, each of which has a run of their ranks. A rank may come to another of
the nodes, or to one beyond these, by a standby that is there. Rank 0 stays: its node is where the others meet.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from planaria.core.exits import EXIT_FAILED
from planaria.core.health import reading_from
from planaria.core.liveness import ProgressSample
from planaria.core.messages import STANDBYS, Member, Order, Phase
from planaria.engines.base import (
    Broken,
    Change,
    Dying,
    Ended,
    Felt,
    Instance,
    Nodes,
    Progress,
    Remains,
    Started,
    Warm,
)
from planaria.engines.launch import Launch
from planaria.engines.local import LocalEngine
from planaria.engines.nodestream import NodeStream, Word, listen
from planaria.errors import ProtocolError, UsageError
from planaria.wire.channel import split_address
from planaria.wire.checks import PROTOCOL
from planaria.wire.codec import encode_order


@dataclass(frozen=True, slots=True)
class Terms:
    """What all nodes of a group must have been told alike. A rank that was told something else would not do what the
    others of its group do, and a standby would be found out only when it is needed."""

    nnodes: int
    nproc: int
    groups: int
    first_group: int
    local_groups: int
    buddy: int = 0  # steps between copies in another rank's memory
    shards: int | None = None
    policy: str = ""
    reduction: str = ""
    exact: str | None = None
    check_state: int | None = None
    recheck: float | None = None
    checkpoint: str | None = None  # the directory: the ranks of a group write one checkpoint
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    replay: str | None = None
    protocol: int = PROTOCOL


@dataclass(slots=True)
class _Node:
    number: int
    name: str  # of the helper's life on its machine
    stream: NodeStream
    standbys: int = 0  # that it is to keep
    gpus: bool = False  # it has some, so it can have no more standbys than that
    cast: dict[int, tuple[int, int]] = field(default_factory=dict)  # standbys that came to be ranks: (group, rank)
    alive: dict[tuple[Member, int], int] = field(default_factory=dict)  # ranks that have not ended: their pids, or 0


class SpreadEngine:
    """Implements ``planaria.engines.base.Engine``.

    ``note`` gets (kind, sentence) for the record. ``asked_to_stop`` is called with a signal that a helper was sent.
    """

    def __init__(self, local: LocalEngine, launch: Launch, terms: Terms, note: Callable[[str, str], None]) -> None:
        self.asked_to_stop: Callable[[int], None] = lambda signum: None
        # Exit code of the job and the reason, told to the helpers at the end.
        self.parting = (EXIT_FAILED, "the agent on node 0 has ended")
        self._run = uuid.uuid4().hex  # tells helpers that come back whether it is to this very life of node 0
        self._local = local
        self._launch = launch
        self._terms = terms
        self._note = note
        self._tell: Callable[[Change], None] = lambda change: None
        self._nodes: dict[int, _Node] = {}
        self._places: dict[Member, dict[int, int]] = {}  # the node of each rank, of the newest life of every group
        self._waiting: dict[
            Member, bool
        ] = {}  # by whether they are founders: created, and not started yet because a node is missing
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, address: str) -> None:
        """UsageError if it cannot."""
        host, port = split_address(address, "--group-addr")
        try:
            self._server = await listen(host, port, self._connected)
        except OSError as error:
            raise UsageError(f"--group-addr {address}: cannot listen there ({error.strerror or error})") from None

    # --- the verbs -------------------------------------------------------------------------------------------

    def watch(self, tell: Callable[[Change], None]) -> None:
        self._tell = tell
        self._local.watch(tell)

    def create(self, group: int, incarnation: int, founder: bool = True) -> None:
        member = Member(group, incarnation)
        if member in self._waiting or any(instance.member == member for instance in self.list()):
            return
        self._waiting[member] = founder
        if missing := self._missing():
            self._note("node", f"{member} waits for {_nodes(missing)}")
        self._start_waiting()

    def delete(self, group: int, incarnation: int, signum: int = signal.SIGKILL, rank: int | None = None) -> None:
        member = Member(group, incarnation)
        if member in self._waiting:
            if signum != signal.SIGCONT:
                del self._waiting[member]
                asyncio.get_running_loop().call_soon(self._never_started, member)
            return
        self._local.delete(group, incarnation, signum, rank)
        for node in self._nodes.values():
            if any(other == member and rank in (None, each) for other, each in node.alive):
                node.stream.send({"delete": [group, incarnation], "signal": signum, "rank": rank})

    def regroup(self, member: Member, newer: Member, rank: int, standby: int | None = None) -> int | None:
        at = self.home_of(rank) if standby is None else self._node_with(standby)
        places = self._places.get(member)
        if places is None or at not in (0, *self._nodes):
            return None
        kept = {each: number for each, number in places.items() if each != rank}
        if not all(self._lives(number, member, each) for each, number in kept.items() if number):
            return None
        ours = [each for each, number in kept.items() if number == 0]
        port = self._local.regroup(member, newer, rank, standby, kept=ours, here=at == 0)
        if port is None:
            return None
        self._place(newer, {**kept, rank: at})
        for number, node in self._nodes.items():
            here = [each for each, place in kept.items() if place == number]
            for each in here:
                node.alive[newer, each] = node.alive.pop((member, each))
            if at == number:
                pid = 0 if standby is None else node.alive.pop((Member(STANDBYS, standby), 0))
                node.alive[newer, rank] = pid
                if standby is not None:
                    node.cast[standby] = newer.group, rank
            if here or at == number:
                word: Word = {"regroup": [member.group, member.incarnation], "newer": newer.incarnation}
                node.stream.send({**word, "rank": rank, "port": port, "here": at == number, "standby": standby})
        return port

    def prepare(self, number: int, rank: int, node: int = 0) -> bool:
        if node == 0:
            return self._local.prepare(number, rank)
        there = self._nodes.get(node)
        if there is None:
            return False
        # Ranks that have come there by a standby have its GPU.
        guests = [1 for other, each in there.alive if other.group != STANDBYS and self.home_of(each) != node]
        if there.gpus and len(_standbys_of(there)) + len(guests) >= there.standbys:
            return False
        there.alive[Member(STANDBYS, number), 0] = 0
        there.stream.send({"prepare": number, "rank": rank})
        return True

    def standbys(self) -> Mapping[int, int]:
        return {**self._local.standbys(), **{number: node.standbys for number, node in self._nodes.items()}}

    def nodes(self) -> Mapping[int, str]:
        return {number: node.name for number, node in self._nodes.items()}

    def node_of(self, member: Member, rank: int) -> int:
        return self._places.get(member, {}).get(rank, self.home_of(rank))

    def home_of(self, rank: int) -> int:
        return rank // self._terms.nproc

    def environ_of(self, member: Member, rank: int) -> dict[str, str]:
        return self._local.environ_of(member, rank)

    def placed(self) -> dict[str, tuple[int, int]]:
        return self._local.placed()

    def avoid(self, gpus: Collection[str]) -> None:
        self._local.avoid(gpus)

    def devices(self) -> tuple[str, ...]:
        return self._local.devices()

    def close_devices(self, gpus: Collection[str]) -> None:
        self._local.close_devices(gpus)

    def has_place(self, group: int) -> bool:
        return self._local.has_place(group)

    def elsewhere(self, group: int) -> bool:
        return False  # it would need other GPUs on every node, or to know which of them are free there

    def look(self, member: Member) -> None:
        self._local.look(member)  # the other nodes look for themselves

    def list(self) -> tuple[Instance, ...]:
        ranks = range(self._terms.nnodes * self._terms.nproc)
        waiting = [(member, rank, 0) for member in self._waiting for rank in ranks]
        away = [(member, rank, pid) for node in self._nodes.values() for (member, rank), pid in node.alive.items()]
        instances = (
            Instance(member, pid, self._launch.directory_of(member, rank), rank)
            for member, rank, pid in [*waiting, *away]
        )
        return (*self._local.list(), *instances)

    def relay(self, member: Member, order: Order) -> None:
        word = {"order": encode_order(order).SerializeToString().hex(), "to": [member.group, member.incarnation]}
        for node in self._nodes.values():
            if any(other == member for other, _ in node.alive):
                node.stream.send(word)

    async def close(self) -> None:
        self._tell = lambda change: None
        if self._server is not None:
            self._server.close()
        code, reason = self.parting
        for node in self._nodes.values():
            node.stream.send({"bye": code, "reason": reason})
        await asyncio.gather(*(node.stream.close() for node in self._nodes.values()))
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._local.close()

    # --- nodes that come and go ------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        stream, node = NodeStream(reader, writer), None
        try:
            async for word in stream.words():
                if node is not None:
                    self._heard(node, word)
                elif (node := self._admit(stream, word)) is None:
                    break
        except (ProtocolError, KeyError, TypeError, ValueError) as error:
            stream.why = f"it said what makes no sense ({error})"
            if node is None:
                self._note("refused", f"a connection to --group-addr was cut off: {stream.why}")
        finally:
            if node is not None:
                self._lost(node)
            await stream.close()
            self._serving.discard(task)

    def _admit(self, stream: NodeStream, word: Word) -> _Node | None:
        """The node that introduces itself with ``word``; None, and it is told why, if it does not fit."""
        number, name, terms = int(word["node"]), str(word["name"]), word["terms"]
        before = self._nodes.get(number)
        problem = ""
        if terms != asdict(self._terms):
            ours = asdict(self._terms)
            odd = next((key for key in ours if terms.get(key) != ours[key]), "a flag of a newer release")
            problem = f"node {number} was started with another {odd} than node 0: {terms.get(odd)}, not {ours.get(odd)}"
        elif number < 1 or (number >= self._terms.nnodes and not int(word["standbys"])):
            problem = f"groups of {self._terms.nnodes} nodes need no node {number}, and it has no --standbys for them"
        elif before is not None and before.name != name:
            problem = f"node {number} is served by {before.name} already; give every node a --node-rank of its own"
        if problem:
            self._note("refused", problem)
            stream.send({"refused": problem})
            return None
        if before is not None:  # it noticed earlier than we did that its connection was lost
            self._lost(before)
        node = self._nodes[number] = _Node(number, name, stream, int(word["standbys"]), bool(word["gpus"]))
        stream.send({"welcome": self._launch.job, "run": self._run})
        self._note("node", f"node {number} is there ({name})")
        self._start_waiting()
        self._tell(Nodes())
        return node

    def _start_waiting(self) -> None:
        if self._missing():
            return
        waiting, self._waiting = self._waiting, {}
        for member, founder in waiting.items():
            self._local.create(member.group, member.incarnation, founder)
            port = self._local.port_of(member)
            places = {rank: self.home_of(rank) for rank in range(self._launch.world)}
            self._place(member, places)
            for node in self._nodes.values():
                if node.number >= self._terms.nnodes:
                    continue
                node.alive |= {(member, rank): 0 for rank, at in places.items() if at == node.number}
                node.stream.send({"create": [member.group, member.incarnation], "founder": founder, "port": port})

    def _missing(self) -> Sequence[int]:
        return [number for number in range(1, self._terms.nnodes) if number not in self._nodes]

    def _place(self, member: Member, places: dict[int, int]) -> None:
        self._places = {other: theirs for other, theirs in self._places.items() if other.group != member.group}
        self._places[member] = places

    def _lives(self, number: int, member: Member, rank: int) -> bool:
        node = self._nodes.get(number)
        return node is not None and node.alive.get((member, rank), 0) > 0

    def _node_with(self, standby: int) -> int:
        return next((number for number, node in self._nodes.items() if standby in _standbys_of(node)), 0)

    def _lost(self, node: _Node) -> None:
        if self._nodes.get(node.number) is not node:
            return
        del self._nodes[node.number]
        why = f"node {node.number} is out of reach: {node.stream.why or 'its connection was closed'}"
        if self._server is not None and self._server.is_serving():
            self._note("node", why)
        # Its standbys first: they must not take the places of its ranks.
        for member, rank in sorted(node.alive, reverse=True):
            self._tell(Ended(member, None, why, rank))
        self._tell(Nodes())

    def _never_started(self, member: Member) -> None:
        for rank in range(self._terms.nnodes * self._terms.nproc):
            self._tell(Ended(member, None, "it was not started: a node was missing", rank))

    def _heard(self, node: _Node, word: Word) -> None:
        match word:
            case {"started": [int(group), int(incarnation)], "rank": int(rank), "pid": int(pid)}:
                if (Member(group, incarnation), rank) in node.alive:
                    node.alive[Member(group, incarnation), rank] = pid
                    self._tell(Started(Member(group, incarnation), pid, rank))
            case {"dying": [int(group), int(incarnation)], "rank": int(rank), "code": int(code), "cause": str(cause)}:
                member, rank = _meant(node, Member(group, incarnation), rank)
                if (member, rank) in node.alive:
                    self._tell(Dying(member, code, cause, rank))
            case {"ended": [int(group), int(incarnation)], "rank": int(rank), "code": code, "cause": str(cause)}:
                member, rank = _meant(node, Member(group, incarnation), rank)
                if node.alive.pop((member, rank), None) is not None:
                    remains = Remains(dict(word["error"]), Path(f"{node.name}:{word['log']}"))
                    self._tell(Ended(member, None if code is None else int(code), cause, rank, remains))
            case {"warm": int(standby), "fingerprint": list(entries)}:
                if standby in _standbys_of(node):
                    self._tell(Warm(standby, tuple((str(key), str(value)) for key, value in entries)))
            case {"pages": list(pages)}:
                for group, incarnation, rank, *sample in pages:
                    if (Member(group, incarnation), rank) in node.alive:
                        self._tell(Progress(Member(group, incarnation), rank, sample_from(sample)))
            case {"health": list(readings)}:
                self._tell(Felt(tuple(replace(reading_from(facts), node=node.number) for facts in readings)))
            case {"broken": str(reason)}:
                self._tell(Broken(f"node {node.number}: {reason}"))
            case {"stop": int(signum)}:
                self._note("stop", f"node {node.number} was sent {signal.Signals(signum).name}")
                self.asked_to_stop(signum)
            case _:
                raise ProtocolError(f"a word of no known kind: {', '.join(word)}")


def _meant(node: _Node, member: Member, rank: int) -> tuple[Member, int]:
    """Whose rank a word of ``node`` is about: it may have been on its way when the rank became a newer member's, or a
    standby a rank."""
    if (member, rank) not in node.alive:
        group, incarnation = member.group, member.incarnation
        if group == STANDBYS:
            (group, rank), incarnation = node.cast.get(incarnation, (group, rank)), -1
        for other, each in node.alive:
            if each == rank and other.group == group and other.incarnation > incarnation:
                return other, rank
    return member, rank


def _standbys_of(node: _Node) -> list[int]:
    return [member.incarnation for member, _ in node.alive if member.group == STANDBYS]


def sample_from(row: Iterable[int]) -> ProgressSample:
    """The inverse of ``sample_row``. ValueError or TypeError if it is none."""
    phase, beat, control_beat, stopped, collectives, guarded, copies = row
    sample = ProgressSample(Phase(phase), int(beat), int(control_beat), bool(stopped))
    return replace(sample, collectives=int(collectives), guarded=bool(guarded), copies=bool(copies))


def sample_row(sample: ProgressSample) -> list[int]:
    row = [sample.phase.value, sample.beat, sample.control_beat, int(sample.stopped)]
    return [*row, sample.collectives, int(sample.guarded), int(sample.copies)]


def _nodes(numbers: Sequence[int]) -> str:
    return ("node " if len(numbers) == 1 else "nodes ") + ", ".join(map(str, numbers))
