"""Operators' verbs against the real service: through the blocking client and the commands people type."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import typer
from lighthouse_clients import FakeAgent, eventually
from rich.console import Console
from typer.testing import CliRunner

from planaria.cli import operate
from planaria.core.messages import Desired, Drain, Event, Kill, Member, Phase, Publish, QuorumId
from planaria.core.roster import GroupStatus, JobStatus
from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from tests.ports import free_address

T = TypeVar("T")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0")
        yield server


@pytest.fixture
async def agent(server: Server) -> AsyncIterator[FakeAgent]:
    """An agent of the job "train" whose groups 0 and 1 work in its first quorum."""
    async with FakeAgent(server.address, "a") as agent:
        await agent.ready(0, 1)
        quorum = (await agent.wait_for(Publish)).quorum
        await agent.adopt(quorum, 3)
        await agent.beat(0, 1, step=3, loss=0.25)
        machine = server.seat.jobs.find("train").machine
        await eventually(lambda: all(group.pulse for group in machine.groups.values()) and len(machine.groups) == 2)
        yield agent


async def ask(server: Server, question: Callable[[OperatorClient], T]) -> T:
    """Put a blocking question from another thread, as another process would."""

    def run() -> T:
        with OperatorClient(server.address) as client:
            return question(client)

    return await asyncio.to_thread(run)


async def test_status_shows_what_the_groups_do(server: Server, agent: FakeAgent) -> None:
    before = time.time()
    status = await ask(server, lambda client: client.status())
    assert (status.job, status.epoch, status.desired, status.complete) == ("train", 1, 2, False)
    assert status.quorum is not None and status.quorum.id == QuorumId(1, 1) and status.planned is None
    group = status.groups[1]
    assert (group.member, group.state, group.step, group.quorum) == (
        Member(1, 0),
        "active",
        3,
        QuorumId(1, 1),
    )
    assert (group.phase, group.loss, group.step_seconds) == (Phase.COMPUTING, 0.25, 0.1)
    assert (group.pid, group.agent, group.connected) == (1001, "a", True)
    assert {event.kind for event in status.events} >= {"epoch", "ready", "quorum"}
    assert all(before - 60 < event.at <= time.time() for event in status.events)  # wall clock, for people


async def test_the_verbs_reach_the_agent(server: Server, agent: FakeAgent) -> None:
    said = await ask(server, lambda client: client.kill(1, 15, "train"))
    assert said == "job train: signal 15 goes to group 1"
    assert await agent.wait_for(Kill) == Kill(1, 15)
    assert "4 groups" in await ask(server, lambda client: client.scale(4))
    await agent.wait_for(Desired, lambda desired: desired.groups == 4)
    assert "group 1 leaves" in await ask(server, lambda client: client.drain(1))
    assert await agent.wait_for(Drain) == Drain(Member(1, 0))
    planned = await agent.wait_for(Publish, lambda publish: publish.quorum.members == (Member(0, 0),))
    assert not planned.quorum.urgent
    assert "group 1 counts as dead" in await ask(server, lambda client: client.evict(1))
    await agent.wait_for(Kill, lambda kill: kill == Kill(1, 9))


REFUSED: list[tuple[str, Callable[[OperatorClient], object]]] = [
    ("knows no job other", lambda client: client.status("other")),
    ("knows no job other", lambda client: client.kill(0, 9, "other")),
    ("knows no job other", lambda client: next(client.events("other"))),
    ("no running group 7", lambda client: client.kill(7, 9)),
    ("no running group 7", lambda client: client.drain(7)),
    ("no running group 7", lambda client: client.evict(7)),
    ("no running group -1", lambda client: client.kill(-1, 9)),
    ("no rank 1; it has only rank 0", lambda client: client.kill(0, 9, rank=1)),
    ("a rank is -1", lambda client: client.kill(0, 9, rank=-1)),
    ("a signal is 99", lambda client: client.kill(0, 99)),
    ("number of groups is 0", lambda client: client.scale(0)),
    ("4 shards a step, so at most 4", lambda client: client.scale(9)),
    ("out of range", lambda client: client.scale(1 << 40)),
]


@pytest.mark.parametrize(("says", "question"), REFUSED)
async def test_what_cannot_be_is_refused_with_a_sentence(
    server: Server, agent: FakeAgent, says: str, question: Callable[[OperatorClient], object]
) -> None:
    with pytest.raises(UsageError, match=says):
        await ask(server, question)


async def test_of_several_jobs_one_must_be_named(server: Server, agent: FakeAgent) -> None:
    async with FakeAgent(server.address, "b", "second") as other:
        await other.ready(0, 1)
        await other.wait_for(Publish)
        for question in (lambda c: c.status(), lambda c: c.drain(0)):
            with pytest.raises(UsageError, match=r"say which job with --job .*second, train"):
                await ask(server, question)
        statuses = await ask(server, lambda client: client.statuses())
        assert [status.job for status in statuses] == ["second", "train"]
        await ask(server, lambda client: client.kill(0, 10, "second"))
        assert await other.wait_for(Kill) == Kill(0, 10)
        assert not any(isinstance(order, Kill) for order in agent.orders)


async def test_a_lighthouse_without_jobs_says_so(server: Server) -> None:
    with pytest.raises(UsageError, match="none yet"):
        await ask(server, lambda client: client.status())


async def test_events_are_replayed_and_followed(server: Server, agent: FakeAgent) -> None:
    def watch(client: OperatorClient) -> list[str]:
        seen = []
        for event in client.events("train"):
            seen.append(event.kind)
            if event.kind == "kill":
                return seen
            if event.kind == "quorum":
                client.kill(0, 10)
        return seen

    seen = await ask(server, watch)
    assert seen[0] == "epoch" and "ready" in seen and seen[-1] == "kill"
    job = server.seat.jobs.find("train")
    await eventually(lambda: not job.watchers)  # a watcher that left is forgotten


async def test_a_watcher_that_does_not_read_is_cut_off(server: Server, agent: FakeAgent) -> None:
    job = server.seat.jobs.find("train")
    watcher = job.watch()
    for _ in range(2000):
        job.operate(lambda now: job.machine.kill(0, 10, now))
        if watcher.verdict:
            break
    assert "too slow" in watcher.verdict and watcher not in job.watchers
    assert agent.ended is None


# --- the commands -------------------------------------------------------------------------------------------


def application() -> typer.Typer:
    app = typer.Typer()
    for command in (operate.status, operate.kill, operate.drain, operate.evict, operate.scale):
        app.command()(command)
    return app


async def planaria(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, run from another thread as another process would."""
    result = await asyncio.to_thread(lambda: CliRunner().invoke(application(), list(words), env={"COLUMNS": "200"}))
    # the main program prints the sentence and exits with the code
    if isinstance(result.exception, PlanariaError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.output


async def test_status_as_a_table(server: Server, agent: FakeAgent) -> None:
    code, output = await planaria("status", "--lighthouse", server.address)
    assert code == 0
    assert "job train  epoch 1, quorum 1.1 of groups 0, 1, 2 groups wanted" in output
    line = next(line for line in output.splitlines() if line.startswith("    1 "))
    for cell in ("active", "computing", "3", "0.25", "0.100 s", "1001", "is ready"):
        assert cell in line
    assert "the job starts" in output


async def test_status_as_json(server: Server, agent: FakeAgent) -> None:
    code, output = await planaria("status", "--lighthouse", server.address, "--job", "train", "--json")
    form = json.loads(output)
    assert code == 0
    assert form["job"] == "train" and form["quorum"]["id"] == {"epoch": 1, "number": 1}
    assert form["groups"][0]["phase"] == "computing" and form["groups"][0]["loss"] == 0.25


async def test_the_commands_do_what_they_say(server: Server, agent: FakeAgent) -> None:
    at = ("--lighthouse", server.address)
    assert await planaria("kill", "0", "--signal", "SIGUSR1", *at) == (
        0,
        "job train: signal 10 goes to group 0\n",
    )
    assert await agent.wait_for(Kill) == Kill(0, 10)
    for words in (("scale", "3"), ("drain", "1"), ("evict", "1"), ("kill", "0")):
        code, output = await planaria(*words, *at)
        assert code == 0 and output.startswith("job train: ")
    await agent.wait_for(Kill, lambda kill: kill == Kill(0, 9))


async def test_the_commands_refuse_nonsense(server: Server, agent: FakeAgent) -> None:
    at = ("--lighthouse", server.address)
    for words, says in [
        (("kill", "0", "--signal", "WINK"), "'WINK' is no signal"),
        (("kill", "9"), "no running group 9"),
        (("drain", "9"), "no running group 9"),
        (("status", "--job", "nobody"), "knows no job nobody"),
        (("scale", "0"), "Invalid value"),
        (("kill", "0", "--rank", "99"), "group 0 of job train has no rank 99; it has only rank 0"),
        (("kill", "0", "--rank", "-1"), "Invalid value"),
        (("kill", "0", "--job", "nobody"), "knows no job nobody"),
        (("drain", "-1"), "No such option"),
    ]:
        code, output = await planaria(*words, *at)
        assert code == 2 and says in output, (words, output)
    code, output = await planaria("status", "--lighthouse", "nonsense")
    assert code == 2 and "is not of the form host:port" in output


# --- finding the lighthouse ---------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(operate.ENVIRONMENT, raising=False)
    return tmp_path


def run_file(directory: Path, job: str, address: str, age: float = 0.0, pid: int = 1 << 30) -> Path:
    path = directory / "planaria_logs" / job / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"job": job, "lighthouse": address, "groups": 2, "pid": pid}))
    os.utime(path, (time.time() - age,) * 2)
    return path.parent


def test_the_newest_run_is_found(directory: Path) -> None:
    run_file(directory, "old", "h:1", age=100)
    run_file(directory, "new", "h:2")
    run_file(directory, "older", "h:3", age=200)
    assert operate.find("", None, None) == operate.Target("h:2", "new")
    assert operate.find("mine", None, None) == operate.Target("h:2", "mine")


def test_a_run_that_lives_is_found_before_a_newer_one(directory: Path) -> None:
    run_file(directory, "lives", "h:1", age=100, pid=os.getpid())
    run_file(directory, "ended", "h:2")
    (run_file(directory, "broken", "h:2") / "run.json").write_text("x")
    assert operate.find("", None, None) == operate.Target("h:1", "lives")
    run_file(directory, "too", "h:3", pid=os.getpid())
    with pytest.raises(UsageError, match=r"several runs live .*planaria_logs/lives \(job lives\), .*/too \(job too\)"):
        operate.find("", None, None)
    assert operate.find("lives", None, None) == operate.Target("h:1", "lives")


def test_an_ended_run_is_told_from_its_summary(directory: Path) -> None:
    path = run_file(directory, "j", free_address())
    words = ["status", "--log-dir", str(path)]
    result = CliRunner().invoke(application(), words)
    assert isinstance(result.exception, UsageError) and "cannot reach" in str(result.exception)
    summary = {"job": "j", "exit_code": 1, "reason": "the budget is used up", "step": 12}
    (path / "summary.json").write_text(json.dumps(summary))
    result = CliRunner().invoke(application(), words)
    assert result.exit_code == 0
    assert result.output == "job j has ended: the budget is used up (exit code 1, 12 steps committed)\n"
    result = CliRunner().invoke(application(), [*words, "--json"])
    assert result.exit_code == 0 and json.loads(result.output) == summary
    for verb in ("kill", "drain", "evict", "scale"):
        result = CliRunner().invoke(application(), [verb, "1", *words[1:]])
        assert isinstance(result.exception, UsageError) and "job j has ended: the budget" in str(result.exception)
    result = CliRunner().invoke(application(), [*words, "--job", "other"])
    assert isinstance(result.exception, UsageError), "that is not the job that ended"


def test_what_is_said_counts_more_than_what_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = run_file(directory, "old", "h:1", age=100)
    run_file(directory, "new", "h:2")
    monkeypatch.setenv(operate.ENVIRONMENT, "h:4")
    assert operate.find("", None, None) == operate.Target("h:4", "")
    assert operate.find("", None, old) == operate.Target("h:1", "old")
    assert operate.find("j", "h:5", old) == operate.Target("h:5", "j")


def test_nothing_to_be_found_is_named(directory: Path) -> None:
    with pytest.raises(UsageError, match="no lighthouse is known: give --lighthouse"):
        operate.find("", None, None)
    with pytest.raises(UsageError, match="is that the --log-dir of a run"):
        operate.find("", None, directory)


@pytest.mark.parametrize("content", ["", "[]", "{}", "nonsense", '{"lighthouse": "h:1"}'])
def test_a_broken_run_file_is_named(directory: Path, content: str) -> None:
    path = run_file(directory, "job", "h:1")
    (path / "run.json").write_text(content)
    with pytest.raises(UsageError, match="does not describe a run"):
        operate.find("", None, path)


@pytest.mark.parametrize(("text", "number"), [("KILL", 9), ("sigterm", 15), ("9", 9), ("stop", 19), ("SIGCONT", 18)])
def test_signals_by_name_and_number(text: str, number: int) -> None:
    assert operate.signal_number(text) == number


@pytest.mark.parametrize("text", ["0", "999", "-1"])
def test_numbers_that_are_no_signals(text: str) -> None:
    with pytest.raises(UsageError, match=f"there is no signal {text}; give one of 1 to 64"):
        operate.signal_number(text)


def test_more_groups_than_there_can_be() -> None:
    with pytest.raises(UsageError, match="at most 65535 groups, not 100000"):
        operate.scale(100_000, lighthouse="h:1")


@pytest.mark.parametrize(("width", "shown", "hidden"), [(200, "a long sentence", ""), (80, "exchanging", "node-17")])
def test_state_and_phase_are_readable_on_a_narrow_terminal(width: int, shown: str, hidden: str) -> None:
    member = Member(0, 3)
    group = GroupStatus(
        member, "suspect", 123456, QuorumId(1, 1), Phase.EXCHANGING, 3.25, 0.125, 4194304, "node-17.example-1a2b", False
    )
    event = Event(0.0, "suspect", "a long sentence about what happened to it", 0)
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    operate.show(console, JobStatus("j", 1, None, None, 2, False, (group,), (event,)))
    text = console.export_text()
    line = next(line for line in text.splitlines() if "123456" in line)
    assert "suspect, out of reach" in line and "exchanging" in line and shown in line
    assert not hidden or hidden not in line
    assert all(len(line) <= width for line in text.splitlines())


def test_markup_in_names_is_shown_as_it_is() -> None:
    """Job names and events come from others and must not turn into colours or errors."""
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    operate.show(console, JobStatus("[red]x[/nonsense]", 1, None, None, 2, False, ()))
    assert "[red]x[/nonsense]" in console.export_text()
