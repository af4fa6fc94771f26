"""A node beside node 0 of its groups: runs their ranks here, for the agent on node 0.

It decides nothing. It keeps a connection to node 0, does what it is told, and tells what happens. When the connection
is lost, its ranks count as lost there, so they are killed here; then it connects again.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from planaria.agent.events import EventLog
from planaria.agent.health import HealthWatch
from planaria.agent.ranklife import RankLife
from planaria.agent.ranks import RankHub
from planaria.agent.refill import link
from planaria.core.exits import EXIT_INTERRUPTED, EXIT_OK
from planaria.core.health import Reading
from planaria.core.liveness import HEARTBEAT, ProgressWatch
from planaria.core.messages import STANDBYS, Cast, Member
from planaria.engines.base import Broken, Change, Dying, Ended, Progress, Started
from planaria.engines.launch import Launch
from planaria.engines.local import LocalEngine
from planaria.engines.nodestream import NodeStream, Word, connect
from planaria.engines.spread import Terms, sample_row
from planaria.errors import ProtocolError, UsageError
from planaria.wire.channel import split_address
from planaria.wire.checks import clip
from planaria.wire.codec import order_from_bytes

# A stopped rank is seen within two looks, and the shortest limit for silence is ten of them.
_SAMPLE_SECONDS = 0.2
# From hardly noticeable to one heartbeat: nobody waits for a node that node 0 does not miss yet.
_PAUSE = (0.05, 1.0)
# People who look at a job that does not begin should not have to wait for the reason, nor drown in it.
_REMIND_SECONDS = 30.0


class NodeHelper:
    """``run`` it once; ``close`` it in any case. ``number``: of this node, from 1.

    ``make_engine`` gets the job's name, the address of this end of the connection and the socket for ranks. It is
    called for every run of node 0, whose incarnations may begin from 0 again.
    """

    def __init__(
        self,
        number: int,
        host: str,
        terms: Terms,
        make_engine: Callable[[str, str, Path], tuple[Launch, LocalEngine]],
        events: EventLog,
        health: HealthWatch | None = None,
        standbys: int = 0,
        gpus: bool = False,
    ) -> None:
        """``standbys``: how many this node is to keep; ``gpus``: each of them needs one."""
        self.events = events
        self._offer: Word = {"standbys": standbys, "gpus": gpus}
        self._health = health
        self._feeling: asyncio.Task[None] | None = None  # the health of this node
        self._number = number
        self._name = f"{host}-{uuid.uuid4().hex[:8]}"
        self._terms = terms
        self._make_engine = make_engine
        self._launch: Launch | None = None
        self._serves = ""  # the run of node 0 for which the engine was made
        self._engine: LocalEngine | None = None
        self._ranks: dict[tuple[Member, int], RankLife] = {}
        self._hub = RankHub(
            self._admit,
            lambda report: None,
            lambda reason: events.add("refused", reason),
            lambda member: [rank for other, rank in self._ranks if other == member],
            on_hangup=self._look,
            on_standby=lambda present: self._say(
                {"warm": present.member.incarnation, "fingerprint": [list(entry) for entry in present.fingerprint]}
            ),
        )
        self._stream: NodeStream | None = None
        self._gone = asyncio.Event()  # no rank is left
        self._gone.set()
        self._outcome: tuple[int, str] | None = None
        self._stopping = 0
        self._running: asyncio.Task[tuple[int, str]] | None = None

    async def run(self, address: str) -> tuple[int, str]:
        """Serve node 0 at ``address`` until the job is over: its exit code and the reason. UsageError if node 0 does
        not take this node."""
        self._running = asyncio.get_running_loop().create_task(self._run(address))
        try:
            return await self._running
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            return 128 + self._stopping, f"stopped by {signal.Signals(self._stopping).name}"

    def interrupt(self, signum: int) -> None:
        """First: the whole job is asked to stop in order, if it can be. Second: everything here ends now."""
        first, self._stopping = not self._stopping, signum
        if first and self._stream is not None:
            self.events.add(
                "stop", f"{signal.Signals(signum).name}: the job is asked to stop; once more ends this node"
            )
            self._stream.send({"stop": signum})
        elif self._running is not None:
            self._running.cancel()

    async def close(self) -> None:
        """End every rank, the engine, the socket, and what reads signs of health."""
        if self._feeling is not None:
            self._feeling.cancel()
            await asyncio.gather(self._feeling, return_exceptions=True)
        if self._engine is not None:
            await self._engine.close()
        await self._hub.close()

    # --- node 0 ----------------------------------------------------------------------------------------------

    async def _run(self, address: str) -> tuple[int, str]:
        await self._hub.start()
        told = ""
        while True:
            stream = await self._connect(address)
            try:
                await self._serve(stream)
            except (ProtocolError, KeyError, TypeError, ValueError) as error:
                stream.why = f"it said what makes no sense ({error})"
            finally:
                welcomed, self._stream = self._stream is not None, None
                await self._kill_all()
                await stream.close()
            if self._outcome is not None:
                return self._outcome
            if self._stopping:
                return EXIT_INTERRUPTED, "node 0 is gone, and this node was asked to stop"
            if welcomed or stream.why != told:
                told = stream.why
                self.events.add("node", f"node 0 is out of reach: {told}; no rank runs here now, trying on")
            if not welcomed:
                await asyncio.sleep(_PAUSE[1])  # somebody else may listen there, and would say the same again

    async def _connect(self, address: str) -> NodeStream:
        host, port = split_address(address, "--group-addr")
        pause, loop = 0.0, asyncio.get_running_loop()
        remind_at = loop.time() + HEARTBEAT.floor
        while True:
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, _PAUSE[0]), _PAUSE[1])
            why = "no answer"
            with suppress(TimeoutError):
                try:
                    # One that does not answer within the limit for a silent node is as good as one that is not there.
                    async with asyncio.timeout(HEARTBEAT.floor):
                        return await connect(host, port)
                except OSError as error:
                    why = error.strerror or str(error)
                except UsageError as error:  # credentials that are half replaced, or have expired: perhaps later
                    why = str(error)
            if loop.time() >= remind_at:
                remind_at = loop.time() + _REMIND_SECONDS
                self.events.add("node", f"node 0 cannot be reached at {address} yet ({why}); trying on")

    async def _serve(self, stream: NodeStream) -> None:
        stream.send({"node": self._number, "name": self._name, "terms": asdict(self._terms), **self._offer})
        sampling = asyncio.get_running_loop().create_task(self._sample(stream))
        try:
            async for word in stream.words():
                await self._obey(stream, word)
                if self._outcome is not None:
                    return
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    async def _obey(self, stream: NodeStream, word: Word) -> None:
        match word:
            case {"welcome": str(job), "run": str(run)}:
                await self._begin(job, run, stream)
            case {"refused": str(reason)}:
                raise UsageError(f"node 0 refuses this node: {reason}")
            case {"create": [int(group), int(incarnation)], "founder": bool(founder), "port": int(port)}:
                self._create(Member(group, incarnation), founder, port)
            case {"delete": [int(group), int(incarnation)], "signal": int(signum), "rank": int() | None as rank}:
                if self._engine is not None:
                    self._engine.delete(group, incarnation, signum, rank)
            case {
                "regroup": [int(group), int(incarnation)],
                "newer": int(newer),
                "rank": int(rank),
                "port": int(port),
                "here": bool(here),
                "standby": int() | None as standby,
            }:
                self._regroup(Member(group, incarnation), Member(group, newer), rank, port, here, standby)
            case {"prepare": int(number), "rank": int(rank)}:
                self._prepare(number, rank)
            case {"order": str(order), "to": [int(group), int(incarnation)]}:
                if self._admit(member := Member(group, incarnation)):
                    self._hub.send(member, order_from_bytes(bytes.fromhex(order)))
                    self._look(member)  # it may be a quorum in place of one that broke
            case {"bye": int(code), "reason": str(reason)}:
                self._outcome = (code, reason)
            case _:
                raise ProtocolError(f"a word of no known kind: {', '.join(word)}")

    async def _begin(self, job: str, run: str, stream: NodeStream) -> None:
        if self._launch is None or self._serves != run:
            if self._engine is not None:
                await self._engine.close()
            self._serves = run
            self._launch, self._engine = self._make_engine(job, stream.local_host, self._hub.path)
            self._engine.watch(self._on_change)
        self._stream = stream
        if self._health is not None and self._feeling is None:
            log = self._launch.directory / "health.log"
            watching = self._health.run(log, self._placed, self._feel, self._note)
            self._feeling = asyncio.get_running_loop().create_task(watching)
        self.events.add("node", f"this node runs ranks of job {job}")

    def _placed(self) -> dict[str, tuple[int, int]]:
        return self._engine.placed() if self._engine is not None else {}

    def _feel(self, readings: list[Reading]) -> None:
        self._say({"health": [asdict(reading) for reading in readings]})

    def _note(self, sentence: str) -> None:
        self.events.add("health", sentence)

    # --- ranks -----------------------------------------------------------------------------------------------

    def _admit(self, member: Member) -> bool:
        return any(other == member for other, _ in self._ranks)

    def _create(self, member: Member, founder: bool, port: int) -> None:
        assert self._engine is not None and self._launch is not None
        for rank in self._launch.ranks:
            directory = self._launch.directory_of(member, rank)
            self._ranks[member, rank] = RankLife(rank, directory, ProgressWatch())
        self._gone.clear()
        self._engine.create(member.group, member.incarnation, founder, port)

    def _prepare(self, number: int, rank: int) -> None:
        assert self._engine is not None and self._launch is not None
        spare = Member(STANDBYS, number)
        if not self._engine.prepare(number, rank):
            word: Word = {"ended": [STANDBYS, number], "rank": 0, "code": None, "cause": "finds no free device"}
            self._say({**word, "error": {}, "log": ""})
            return
        self._ranks[spare, 0] = RankLife(0, self._launch.directory_of(spare), ProgressWatch())
        self._gone.clear()

    def _regroup(self, member: Member, newer: Member, rank: int, port: int, here: bool, standby: int | None) -> None:
        """See Engine.regroup. Processes that have ended here meanwhile are left out: node 0 hears of them."""
        assert self._engine is not None and self._launch is not None
        kept = [each for other, each in self._ranks if other == member and each != rank]
        spare = Member(STANDBYS, standby or 0)
        taken = self._ranks.pop((spare, 0), None) if here and standby is not None else None
        for each in kept:
            self._ranks[newer, each] = self._ranks.pop((member, each))
        if here and (standby is None or taken is not None):
            directory = self._launch.directory_of(newer, rank)
            self._ranks[newer, rank] = RankLife(rank, directory, ProgressWatch())
            self._gone.clear()
        link(self._launch.directory, member, newer, kept)
        self._engine.regroup(member, newer, rank, standby, port, kept, here)
        self._hub.regroup(member, newer, rank, port)
        if taken is not None:
            self._ranks[newer, rank].pid = taken.pid
            environ = tuple(sorted(self._engine.environ_of(newer, rank).items()))
            self._hub.cast(spare, Cast(newer, rank, environ))
            self._started(newer, rank, taken.pid)

    def _look(self, member: Member) -> None:
        if self._engine is not None:
            self._engine.look(member)

    async def _kill_all(self) -> None:
        if self._engine is not None:
            for member, rank in self._ranks:
                self._engine.delete(member.group, member.incarnation, signal.SIGKILL, rank)
        await self._gone.wait()

    def _on_change(self, change: Change) -> None:
        match change:
            case Started(member, pid, rank):
                self._ranks[member, rank].pid = pid
                self._say({"started": [member.group, member.incarnation], "rank": rank, "pid": pid})
                if member.group == STANDBYS:
                    self.events.add("standby", f"{member} runs as pid {pid}", data={"pid": pid})
                else:
                    self._started(member, rank, pid)
            case Dying(member, dying_code, cause, rank):
                word = {"dying": [member.group, member.incarnation], "rank": rank}
                self._say({**word, "code": dying_code, "cause": cause})
            case Ended(member, code, cause, rank):
                self._on_end(member, rank, code, cause)
            case Broken(reason):
                self._say({"broken": reason})
                self.events.add("refused", reason)
            case Progress():
                raise AssertionError("engines of one node are looked at, they do not tell")

    def _started(self, member: Member, rank: int, pid: int) -> None:
        facts = {"incarnation": member.incarnation, "rank": rank, "pid": pid}
        self.events.add("start", f"{member}, rank {rank}, runs as pid {pid}", member.group, facts)

    def _on_end(self, member: Member, rank: int, code: int | None, cause: str) -> None:
        life = self._ranks.pop((member, rank))
        said = life.error()
        error = {"message": clip(str(said["message"])), "exit_code": said.get("exit_code")} if "message" in said else {}
        word: Word = {"ended": [member.group, member.incarnation], "rank": rank, "code": code, "cause": cause}
        self._say({**word, "error": error, "log": str(life.log)})
        life.last_look()
        if not self._admit(member):
            self._hub.forget(member)
        if not self._ranks:
            self._gone.set()
        if member.group == STANDBYS:
            self.events.add("standby", f"{member} {cause}")
            return
        state = "finished" if code == EXIT_OK else "dead"
        facts = {"incarnation": member.incarnation, "rank": rank, "state": state, "exit_code": code}
        self.events.add("exit", f"{member}, rank {rank}, {cause}", member.group, facts)

    def _say(self, word: Word) -> None:
        if self._stream is not None:
            self._stream.send(word)

    async def _sample(self, stream: NodeStream) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            rows = []
            for (member, rank), life in self._ranks.items():
                if member.group != STANDBYS and (sample := life.sample()) is not None:
                    rows.append([member.group, member.incarnation, rank, *sample_row(sample)])
            if rows:
                stream.send({"pages": rows})
