"""Several ``planaria lighthouse`` processes, of which one leads: killed, stopped, cut from their store, all at once.

The agents are real links (``agent.link``), which find the leader by themselves.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import elector_stores as stores
import pytest
from elector_stores import LEASE, Store
from lighthouse_clients import PATIENCE, ROOT, FakeAgent, Lighthouse, eventually

from planaria.agent.link import Link
from planaria.core.leadership import Granted, Held
from planaria.core.messages import (
    Adopted,
    Died,
    Hello,
    JobSpec,
    Member,
    Order,
    Publish,
    QuorumId,
    Ready,
    Welcome,
)
from planaria.core.roster import LineageRecord
from planaria.core.told import Told
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.wire.channel import split_address


@pytest.fixture(params=["file", "etcd", "Lease, stand-in"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    match request.param:
        case "file":
            made = stores.file_store(tmp_path)
        case "etcd":
            made = stores.etcd_store(tmp_path)
        case _:
            made = stores.stand_in_store(tmp_path, monkeypatch)
    yield made
    made.close()


class Several:
    """Lighthouses that share ``store``."""

    def __init__(self, store: Store, directory: Path, count: int = 2) -> None:
        self._store, self._directory = store, directory
        self.all = [self.start() for _ in range(count)]

    def start(self, bind: str = "127.0.0.1:0") -> Lighthouse:
        return Lighthouse(self._directory / "none", "--http", "127.0.0.1:0", *self._store.options(), bind=bind)

    def again(self, lighthouse: Lighthouse) -> Lighthouse:
        """Start one that was killed, at its address."""
        self.all[self.all.index(lighthouse)] = new = self.start(lighthouse.address)
        return new

    def __enter__(self) -> Several:
        return self

    def __exit__(self, *_: object) -> None:
        for lighthouse in self.all:
            lighthouse.end(signal.SIGKILL)

    @property
    def addresses(self) -> str:
        return ",".join(lighthouse.address for lighthouse in self.all)

    def leading(self) -> list[Lighthouse]:
        return [lighthouse for lighthouse in self.all if ready(lighthouse)[0] == 200]

    async def leader(self) -> Lighthouse:
        """The one that leads, once it does."""
        await eventually(lambda: len(self.leading()) == 1)
        return self.leading()[0]

    def other(self, than: Lighthouse) -> Lighthouse:
        return next(lighthouse for lighthouse in self.all if lighthouse is not than)

    def log(self, lighthouse: Lighthouse) -> str:
        return lighthouse.end(signal.SIGKILL)[1]


def ready(lighthouse: Lighthouse) -> tuple[int, str]:
    return page(lighthouse, "readyz")


def page(lighthouse: Lighthouse, path: str) -> tuple[int, str]:
    """(status, body); 0 if there is no answer, as from one that was killed. None that was stopped is asked."""
    try:
        with urllib.request.urlopen(f"http://{lighthouse.listening['http']}/{path}", timeout=PATIENCE) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


class Agent:
    """A real link, with an agent's memory around it."""

    def __init__(self, name: str, *groups: int, of: int = 2) -> None:
        self.name = name
        self.groups = groups
        self.told = Told()
        self.orders: list[Order] = []
        self.notes: list[tuple[str, str]] = []
        self.link = Link(
            lambda: Hello(name, "host", JobSpec("train", of)),
            self.told.again,
            self.orders.append,
            lambda kind, text: self.notes.append((kind, text)),
            lambda reason: None,
        )

    def say(self, *reports: Any) -> None:
        for report in reports:
            self.told.record(report)
            self.link.tell(report)

    def ready(self) -> None:
        for group in self.groups:
            self.say(Ready(Member(group, 0), f"h:{group}", (("torch", "2"),), "d", 4, 100))

    def adopt(self, id: QuorumId, step: int) -> None:
        for group in self.groups:
            self.say(Adopted(Member(group, 0), id, step))

    async def epoch_above(self, epoch: int) -> int:
        """Wait until it obeys a lighthouse of a higher epoch."""
        await eventually(lambda: self.link.epoch > epoch and self.link.up.is_set())
        return self.link.epoch

    async def urgent(self, above: QuorumId) -> Publish:
        def found() -> list[Publish]:
            return [o for o in self.orders if isinstance(o, Publish) and o.quorum.urgent and o.quorum.id > above]

        await eventually(lambda: bool(found()))
        return found()[0]


@asynccontextmanager
async def at_work(addresses: str, *agents: Agent) -> AsyncIterator[QuorumId]:
    """The agents' groups work under the first quorum."""
    running = [asyncio.create_task(agent.link.run(addresses)) for agent in agents]
    try:
        for agent in agents:
            await agent.epoch_above(0)
            agent.ready()
        id = (await agents[0].urgent(QuorumId(0, 0))).quorum.id
        for agent in agents:
            await agent.urgent(QuorumId(0, 0))
            agent.adopt(id, 5)
        yield id
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def lose_one(loser: Agent, *survivors: Agent, above: QuorumId, epoch: int) -> None:
    """A group dies, and the others are told to go on without it, by a lighthouse of ``epoch`` or above."""
    dead = Member(loser.groups[0], 0)
    loser.say(Died(dead, "SIGKILL"))
    for agent in survivors:
        quorum = (await agent.urgent(above)).quorum
        assert quorum.id.epoch >= epoch and dead not in quorum.members


async def test_the_leader_is_killed(store: Store, tmp_path: Path) -> None:
    """The other takes over with a higher epoch and knows the lineage; an operator finds it; nothing is begun anew."""
    a, b = Agent("a", 0), Agent("b", 1)
    with Several(store, tmp_path) as lighthouses:
        leader = await lighthouses.leader()
        async with at_work(lighthouses.addresses, a, b) as id:
            code, text = ready(lighthouses.other(leader))
            assert code == 503 and text == f"stands by: the one at {leader.address} leads\n"
            status = json.loads(page(lighthouses.other(leader), "status.json")[1])
            assert status["jobs"] == [] and not status["leads"] and status["leader"] == leader.address
            assert page(lighthouses.other(leader), "healthz")[0] == 200, "it lives"
            leader.end(signal.SIGKILL)
            epoch = await a.epoch_above(id.epoch)
            assert await b.epoch_above(id.epoch) == epoch
            assert lighthouses.leading() == [lighthouses.other(leader)]
            await asyncio.sleep(0)
            assert not [o for o in a.orders if isinstance(o, Publish) and o.quorum.id > id], "nobody was interrupted"
            await lose_one(b, a, above=id, epoch=epoch)
            with OperatorClient(lighthouses.addresses) as client:
                job = client.status("train")
                assert job.epoch == epoch and job.quorum is not None and job.quorum.id.epoch == epoch
                dead, alive = sorted(client.posts(), key=lambda post: post.state == "leads")
                assert (dead.address, alive.state, alive.epoch) == (leader.address, "leads", epoch)
                assert "no answer" in dead.state
    assert not [text for kind, text in a.notes if kind == "stale"]


async def test_the_leader_ends_in_order_and_the_next_does_not_wait_for_its_lease(tmp_path: Path) -> None:
    store = stores.file_store(tmp_path)
    with Several(store, tmp_path, 1) as lighthouses:
        leader = await lighthouses.leader()
        leader.end(signal.SIGTERM)
        # Without knowing the stamp of a lease that has lapsed.
        assert isinstance(store.candidate().acquire("x:1", 0, ""), Granted)
    store.close()


async def test_the_leader_is_stopped_and_wakes(store: Store, tmp_path: Path) -> None:
    """SIGSTOP for longer than its lease, with deaths to hear of in its sockets: it must not decide anything."""
    a, b = Agent("a", 0), Agent("b", 1)
    with Several(store, tmp_path) as lighthouses:
        old = await lighthouses.leader()
        async with FakeAgent(old.address, "c") as late, at_work(lighthouses.addresses, a, b) as id:
            old.process.send_signal(signal.SIGSTOP)
            # What it will find when it wakes, from an agent that has not noticed: reason for a new quorum.
            await late.tell(Died(Member(0, 0), "late"), Died(Member(1, 0), "late"))
            epoch = await a.epoch_above(id.epoch)
            await b.epoch_above(id.epoch)
            await lose_one(b, a, above=id, epoch=epoch)
            newest = (await a.urgent(id)).quorum.id
            old.process.send_signal(signal.SIGCONT)
            with suppress(TimeoutError):
                await late.wait_for_end()
            await eventually(lambda: ready(old)[0] == 503)
            assert not [o for o in late.orders if isinstance(o, Publish)], "an order left after the lease had lapsed"
            assert lighthouses.leading() == [lighthouses.other(old)]
            # It serves again when it is its turn.
            lighthouses.other(old).end(signal.SIGKILL)
            assert await a.epoch_above(epoch) > newest.epoch
            assert ready(old)[0] == 200
        log = lighthouses.log(old)
    assert "stands by from now on" in log and "Traceback" not in log


async def test_a_stale_leader_that_is_told_of_a_newer_epoch_takes_one_above(tmp_path: Path) -> None:
    """The store was lost, or an old copy of it came back: epochs begin below those that the agents have seen."""
    store = stores.file_store(tmp_path)
    with Several(store, tmp_path, 1) as lighthouses:
        leader = await lighthouses.leader()
        async with FakeAgent(leader.address, "a") as agent:
            assert await agent.epoch() == 1
        agent = FakeAgent(leader.address, "a")
        agent.hello = Hello("a", "host", JobSpec("train", 2), epoch=40)
        await agent.connect()
        assert "stands by" in str((await agent.wait_for_end()).details())
        await agent.close()
        await eventually(lambda: bool(lighthouses.leading()))
        async with FakeAgent(leader.address, "a") as agent:
            assert await agent.epoch() == 41
    store.close()


async def test_both_are_cut_from_their_store(tmp_path: Path) -> None:
    """Then nobody leads, and nobody says so; training goes on. When the store is back one leads, with all it knew."""
    store = stores.etcd_store(tmp_path)
    assert store.process is not None
    a, b = Agent("a", 0), Agent("b", 1)
    try:
        with Several(store, tmp_path) as lighthouses:
            await lighthouses.leader()
            async with at_work(lighthouses.addresses, a, b) as id:
                store.process.signal(signal.SIGSTOP)
                await eventually(lambda: not lighthouses.leading())
                await eventually(lambda: not (a.link.up.is_set() or b.link.up.is_set()))
                with OperatorClient(lighthouses.addresses) as client, pytest.raises(UsageError, match="stands by"):
                    client.evict(0)
                b.say(Died(Member(1, 0), "SIGKILL"))  # kept for whoever leads next
                store.process.signal(signal.SIGCONT)
                epoch = await a.epoch_above(id.epoch)
                quorum = (await a.urgent(id)).quorum
                assert quorum.id.epoch >= epoch and quorum.members == (Member(0, 0),)
            for each in lighthouses.all:
                assert "Traceback" not in lighthouses.log(each)
    finally:
        store.close()


async def test_everything_is_started_again_at_once(store: Store, tmp_path: Path) -> None:
    """Both lighthouses and, where it is a process, their store. The lineage goes on from what was kept."""
    a, b = Agent("a", 0), Agent("b", 1)
    with Several(store, tmp_path) as lighthouses:
        await lighthouses.leader()
        async with at_work(lighthouses.addresses, a, b) as id:
            for each in lighthouses.all:
                each.process.send_signal(signal.SIGKILL)
            if store.process is not None:
                store.process.signal(signal.SIGKILL)
                store.process.start()
            for each in list(lighthouses.all):
                each.end(signal.SIGKILL)
                lighthouses.again(each)
            epoch = await a.epoch_above(id.epoch)
            assert await b.epoch_above(id.epoch) == epoch
            assert not [o for o in a.orders if isinstance(o, Publish) and o.quorum.id > id]
            await lose_one(b, a, above=id, epoch=epoch)


async def test_one_that_cannot_keep_a_quorum_tells_nobody_of_it(tmp_path: Path) -> None:
    """Its lease was taken by another while it was not looking (a frozen machine): no clock of its own would tell."""
    store = stores.file_store(tmp_path)
    a = Agent("a", 0)
    with Several(store, tmp_path, 1) as lighthouses:
        leader = await lighthouses.leader()
        async with at_work(leader.address, a, b := Agent("b", 1)) as id:
            usurper = store.candidate(3600.0)
            answer = usurper.acquire("127.0.0.1:1", 0, "")
            while isinstance(answer, Held):  # as if its lease had lapsed
                answer = usurper.acquire("127.0.0.1:1", 0, answer.stamp)
            b.say(Died(Member(1, 0), "SIGKILL"))
            await eventually(lambda: not a.link.up.is_set() and ready(leader)[0] == 503)
            assert not [o for o in a.orders if isinstance(o, Publish) and o.quorum.id > id]
            newest = usurper.last("train")
            assert isinstance(newest, LineageRecord) and newest.id == id
    store.close()


async def test_operators_are_sent_to_the_leader_and_see_who_stands_by(tmp_path: Path) -> None:
    store = stores.file_store(tmp_path)
    a, b = Agent("a", 0), Agent("b", 1)
    with Several(store, tmp_path) as lighthouses:
        leader = await lighthouses.leader()
        standby = lighthouses.other(leader)
        async with at_work(standby.address, a, b):  # they know only the one that stands by, and are sent on
            assert a.link.address == leader.address
            with OperatorClient(standby.address) as client:
                assert client.status().quorum is not None
                assert "3 groups" in client.scale(3)
                assert next(iter(client.events())).kind == "epoch"
            words = ("status", "--lighthouse", lighthouses.addresses)
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-m", "planaria", *words], capture_output=True, text=True, cwd=ROOT
            )
            assert f"lighthouse {leader.address}  leads, epoch 1" in done.stdout, done.stderr
            assert f"lighthouse {standby.address}  stands by" in done.stdout
            done = await asyncio.to_thread(
                subprocess.run, [sys.executable, "-m", "planaria", *words, "--json"], capture_output=True, text=True
            )
            assert {post["state"] for post in json.loads(done.stdout)["lighthouses"]} == {"leads", "stands by"}
    store.close()


async def test_late_orders_of_an_older_epoch_are_not_obeyed(tmp_path: Path) -> None:
    """The agent comes to a lighthouse that still believes it leads, after it has obeyed a newer one."""
    old, new = stores.file_store(tmp_path), stores.Store(f"file:{tmp_path / 'new'}")
    new.candidate().acquire("x:1", 6, "")
    a = Agent("a", 0, of=1)
    with Several(old, tmp_path, 1) as former, Several(new, tmp_path, 1) as present:
        leader = await present.leader()
        stale = await former.leader()
        async with FakeAgent(stale.address, "other"):
            async with at_work(leader.address, a) as id:
                assert id.epoch > 6
            running = asyncio.create_task(a.link.run(f"{stale.address},{leader.address}"))
            await eventually(lambda: a.link.up.is_set() and a.link.address == leader.address)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert not [o for o in a.orders if isinstance(o, Welcome) and o.epoch < id.epoch]
    for each in (old, new):
        each.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--elector", "file:x", "--lease", "1"), "at least 2 seconds"),
        (("--elector", "file:x", "--epoch-floor", "3"), "--epoch-floor is for a --store"),
        (("--elector", "nonsense"), "give file:DIRECTORY"),
    ],
)
def test_bad_options(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planaria", "lighthouse", "--bind", "127.0.0.1:0", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_addresses() -> None:
    for wrong in ("", "a", "a:1,", "a:1,a:1"):
        with pytest.raises(UsageError):
            OperatorClient(wrong)
    assert split_address("a:1") == ("a", 1) and LEASE >= 2
