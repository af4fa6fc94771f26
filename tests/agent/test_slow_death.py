"""A process that is killed closes its sockets at once, but may need long to be gone: that it dies is told before."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from planaria.agent.agent import Agent, Assignment
from planaria.agent.events import EventLog
from planaria.agent.proc import ending, is_exiting, state_of
from planaria.core.messages import Adopted, Died, JobSpec, Member, Publish, Quorum, QuorumId, Report, Trouble
from planaria.core.plan import PlanSpec
from planaria.engines.base import Dying, Ended, Started
from planaria.engines.launch import Launch, directory_of
from planaria.engines.local import LocalEngine

from .conftest import SCRIPTS, Run, plain_environ
from .slow_death import SlowDeath
from .test_run import everything_ended

StartRun = Callable[..., Run]
SPEAKER, DIES = str(SCRIPTS / "speaker.py"), str(SCRIPTS / "dies.py")
OTHER, VICTIM = Member(0, 0), Member(1, 0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


class Victim:
    """A process that does what it is told (``dies.py``)."""

    def __init__(self, server: socket.socket, directory: Path) -> None:
        self.connection, _ = server.accept()
        self.pid = int(self.connection.makefile().readline())
        self.death = SlowDeath(self.pid, directory)

    def does(self, code: str) -> None:
        """Returns when it has closed its end, whatever it did."""
        self.connection.sendall(code.encode())
        assert self.connection.recv(1) == b""

    def let_go(self) -> None:
        self.death.let_go()
        self.connection.close()  # ends one that waits for a word


@pytest.fixture
def victim(listener: socket.socket, tmp_path: Path) -> Iterator[Victim]:
    port = str(listener.getsockname()[1])
    process = subprocess.Popen([sys.executable, DIES, port], env=plain_environ(PLANARIA_DIR=str(tmp_path)))
    made = Victim(listener, tmp_path)
    yield made
    made.let_go()
    process.kill()
    process.wait()


# --- what the kernel shows of it -----------------------------------------------------------------------------------


def slowly(victim: Victim) -> bool:
    return is_exiting(victim.pid) and not victim.death.over


def test_one_that_was_killed(victim: Victim) -> None:
    assert ending(victim.pid) is None
    victim.does("os.kill(os.getpid(), signal.SIGKILL)")
    assert ending(victim.pid) == -signal.SIGKILL and slowly(victim)


def test_one_that_was_stopped_before_it_was_killed(victim: Victim) -> None:
    os.kill(victim.pid, signal.SIGSTOP)
    while state_of(victim.pid) != "T":
        pass
    assert ending(victim.pid) is None and not is_exiting(victim.pid)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.connection.recv(1) == b""
    assert ending(victim.pid) == -signal.SIGKILL and slowly(victim)


@pytest.mark.parametrize("code", [0, 2, 130])
def test_one_that_ends_by_itself(victim: Victim, code: int) -> None:
    victim.does(f"os._exit({code})")
    assert ending(victim.pid) == code and slowly(victim)


def test_one_that_only_hangs_up_lives(victim: Victim) -> None:
    victim.does("connection.close(); signal.pause()")
    assert ending(victim.pid) is None and not is_exiting(victim.pid)


def test_one_that_becomes_another_program_lives(victim: Victim) -> None:
    victim.death.let_go()  # or the new program would wait for the old one's threads
    victim.does("os.execv(sys.executable, [sys.executable, '-c', 'import signal; signal.pause()'])")
    assert ending(victim.pid) is None and not is_exiting(victim.pid)


def test_nobody() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert ending(process.pid) is None and is_exiting(process.pid)


# --- what an agent makes of it -------------------------------------------------------------------------------------


class Bench:
    """An agent with an engine and a rank in each of two groups, of which the second dies slowly. Nothing listens to
    the agent: what it tells the lighthouse is in ``told``."""

    def __init__(self, agent: Agent, engine: LocalEngine, victim: Victim, changes: list[object]) -> None:
        self.agent = agent
        self.engine = engine
        self.victim = victim
        self.changes = changes
        self.told: list[Report] = []
        agent.link.tell = self.told.append  # type: ignore[method-assign]

    def publish(self, urgent: bool) -> None:
        quorum = Quorum(QuorumId(1, 2), (OTHER, VICTIM), ("h:1", "h:2"), urgent, "")
        self.agent.orders.obey(Publish(VICTIM, quorum))


@pytest.fixture
async def bench(listener: socket.socket, tmp_path: Path) -> AsyncIterator[Bench]:
    def make_engine(path: Path) -> LocalEngine:
        port = str(listener.getsockname()[1])
        return LocalEngine(Launch("j", 2, DIES, (port,), tmp_path, path, environ=plain_environ()))

    assignment = Assignment(JobSpec("j", 2), PlanSpec(desired=2), tmp_path)
    agent = Agent(assignment, make_engine, EventLog(tmp_path / "events.jsonl"))
    engine = agent.engine
    assert isinstance(engine, LocalEngine)
    changes: list[object] = []
    started: asyncio.Queue[Started] = asyncio.Queue()

    def take(change: object) -> None:
        changes.append(change)
        if isinstance(change, Started):
            started.put_nowait(change)
        agent._on_change(change)  # type: ignore[arg-type]

    await agent.hub.start()
    engine.watch(take)
    victims = []
    for member in (OTHER, VICTIM):
        agent.lives.begin(member, [directory_of(tmp_path, member)], 0.0)
        engine.create(member.group, member.incarnation)
        await started.get()
        victims.append(await asyncio.to_thread(listener.accept))
        victims[-1][0].makefile().readline()
    made = Victim.__new__(Victim)
    made.connection, made.pid = victims[1][0], agent.lives.groups[1].pid
    made.death = SlowDeath(made.pid, directory_of(tmp_path, VICTIM))
    yield Bench(agent, engine, made, changes)
    made.let_go()
    victims[0][0].close()
    await agent.close()
    agent.events.close()


DEATH = Died(VICTIM, "killed by SIGKILL")


async def test_a_death_is_told_before_the_trouble_that_it_makes(bench: Bench) -> None:
    bench.victim.does("os.kill(os.getpid(), signal.SIGKILL)")
    trouble = Trouble(OTHER, QuorumId(1, 1), 5, "the connection was closed")
    bench.agent._on_report(trouble)
    assert bench.told == [DEATH, trouble] and not bench.victim.death.over
    bench.agent._on_report(trouble)
    assert bench.told == [DEATH, trouble, trouble], "told once"


async def test_trouble_elsewhere_makes_an_agent_look_too(bench: Bench) -> None:
    bench.victim.does("os.kill(os.getpid(), signal.SIGKILL)")
    bench.publish(urgent=False)
    assert bench.told == []
    bench.publish(urgent=True)  # because others have said that they cannot exchange
    assert bench.told == [DEATH] and not bench.victim.death.over


async def test_its_place_is_free_only_when_it_is_gone(bench: Bench) -> None:
    bench.victim.does("os.kill(os.getpid(), signal.SIGKILL)")
    bench.engine.look(VICTIM)
    await asyncio.sleep(0)  # the others of its group are seen to after the word
    life = bench.agent.lives.groups[1]
    assert life.alive and life.fell and life.first_bad is life.speaker
    bench.victim.let_go()
    while life.alive:
        await asyncio.sleep(0.01)
    assert [type(change) for change in bench.changes[-2:]] == [Dying, Ended]
    assert bench.told == [DEATH] and life.exit_code == -signal.SIGKILL


async def test_it_is_not_told_again_when_its_place_is_taken(bench: Bench, tmp_path: Path) -> None:
    """Or others that wait for whoever has taken it (policy spare) would wait no longer."""
    bench.victim.does("os.kill(os.getpid(), signal.SIGKILL)")
    bench.engine.look(VICTIM)
    newer = Member(VICTIM.group, 1)
    bench.agent.lives.begin(newer, [directory_of(tmp_path, newer)], 0.0)  # as a standby does, before it is gone
    bench.victim.let_go()
    while not isinstance(bench.changes[-1], Ended):
        await asyncio.sleep(0.01)
    assert bench.told == [DEATH]


@pytest.mark.parametrize("code", ["os._exit(0)", "os._exit(130)", "connection.close(); signal.pause()"])
async def test_who_leaves_in_order_or_only_hangs_up_is_not_reported(bench: Bench, code: str) -> None:
    bench.victim.does(code)
    bench.agent._on_report(Trouble(OTHER, QuorumId(1, 1), 5, "the connection was closed"))
    assert [type(report) for report in bench.told] == [Trouble]
    bench.agent._on_report(Adopted(OTHER, QuorumId(1, 2), 6))
    assert bench.agent.lives.groups[1].first_bad is None


# --- whole runs ----------------------------------------------------------------------------------------------------


def lost(run: Run) -> bool:
    """Whether the lighthouse has heard that a group is lost, or some group has ended (too late for that)."""
    return bool(run.events("lost") or run.events("exit"))


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_go_on_before_it_is_gone(start_run: StartRun, killed: int) -> None:
    run = start_run("--groups", "2", "--nproc-per-group", "2", SPEAKER, "200", "0.02", "slow-death", "hold")
    pids = [run.pid_of(1, rank=rank) for rank in range(2)]
    run.until(lambda: run.step_of(0) >= 2 and run.step_of(1, rank=1) >= 2)
    death = SlowDeath(pids[killed], directory_of(run.logs, VICTIM, killed))
    os.kill(pids[killed], signal.SIGKILL)
    run.until(lambda: lost(run))
    assert not run.events("exit") and not death.over
    assert f"rank {killed}: killed by SIGKILL" in run.events("lost")[0]["text"]
    death.let_go()
    run.until(lambda: run.step_of(1, 1) >= 1)
    assert run.end() == 0, run.err.read_text()
    (failure,) = run.summary()["failures"]
    assert (failure["rank"], failure["signal"]) == (killed, 9)
    assert [event["data"]["group"] for event in run.events("recovered")] == [1]
    everything_ended(run, *pids)


def test_on_another_node(start_run: StartRun, address: str) -> None:
    words = ("--groups", "2", "--nnodes", "2", "--group-addr", address)
    script = (SPEAKER, "200", "0.02", "slow-death", "hold")
    run = start_run(*words, *script)
    other = start_run(*words, "--node-rank", "1", *script)
    victim = run.pid_of(1, rank=1)
    home = other.logs / "node1"
    run.until(lambda: run.step_of(1) >= 2 and (home / "rg1" / "i0" / "rank1" / "progress").exists())
    death = SlowDeath(victim, directory_of(home, VICTIM, 1))
    os.kill(victim, signal.SIGKILL)
    run.until(lambda: lost(run))
    assert not run.events("exit") and not death.over
    assert "rank 1: killed by SIGKILL" in run.events("lost")[0]["text"]
    death.let_go()
    run.until(lambda: run.step_of(1, 1) >= 1)
    other.release()
    assert (run.end(), other.wait()) == (0, 0), run.err.read_text()
    (failure,) = run.summary()["failures"]
    assert (failure["rank"], failure["signal"]) == (1, 9)
    everything_ended(run, victim)
