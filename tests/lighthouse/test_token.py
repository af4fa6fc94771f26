"""Callers that prove with a secret who they are, where TLS ends elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from lighthouse_clients import Lighthouse, link_that_notes

from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.wire import control_pb2 as pb
from planaria.wire import token
from planaria.wire.channel import open_channel
from planaria.wire.control_pb2_grpc import LighthouseStub
from planaria.wire.roles import Role
from planaria.wire.token import HEADER, SKEW, Denied, Guard, Token


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = token.make(tmp_path / "token", token.ROLES)
    monkeypatch.setenv(token.ENVIRONMENT, str(path))
    return path


def only(path: Path, role: Role) -> str:
    """The file, as a machine with this role has it."""
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(role.value))


async def test_roles_and_replay(secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lighthouse(tmp_path / "db", bind="0.0.0.0:0") as lighthouse:
        address = lighthouse.address.replace("0.0.0.0", "127.0.0.1")
        shown = token.metadata("Status", Role.AGENT)
        async with open_channel(address) as channel:
            stub = LighthouseStub(channel)
            await stub.Status(pb.StatusRequest(), metadata=shown)
            drains = token.metadata(
                "Status", Role.OPERATOR
            )  # a proof that was held back on the way, and put to other use
            with pytest.raises(grpc.aio.AioRpcError, match="not given for this call"):
                await stub.Drain(pb.GroupRequest(group=0), metadata=drains)
            for again in (shown, (), ((HEADER, "nonsense"),), ((HEADER, shown[0][1].replace("agent", "operator")),)):
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await stub.Status(pb.StatusRequest(), metadata=again)
                assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        mine = tmp_path / "viewer"
        mine.write_text(only(secret, Role.VIEWER))
        monkeypatch.setenv(token.ENVIRONMENT, str(mine))
        with OperatorClient(address) as client:
            assert client.statuses() == []
            with pytest.raises(UsageError, match=r"takes the role agent or operator.*that of viewer"):
                client.evict(0)
        mine.write_text(f"operator {'0' * 64}\n")
        with OperatorClient(address) as client, pytest.raises(UsageError, match="none that this lighthouse knows"):
            client.statuses()
    assert "Traceback" not in lighthouse.end()[1]


async def test_new_secrets_are_taken_up_under_a_running_lighthouse_and_agent(secret: Path, tmp_path: Path) -> None:
    notes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    link = link_that_notes(notes)
    with Lighthouse(tmp_path / "db") as first:
        running = asyncio.create_task(link.run(first.address))
        try:
            assert "connected" in (await notes.get())[1]
            before = secret.read_text()
            token.make(secret, token.ROLES)
            assert all(line in secret.read_text() for line in before.splitlines()), "the old ones still count"
            token.make(secret, token.ROLES)
            assert not any(line in secret.read_text() for line in before.splitlines()), "and then no more"
            with OperatorClient(first.address) as client:
                assert [job.job for job in client.statuses()] == ["train"]
            assert await link.drain("train", 0) is not None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def test_what_a_guard_lets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Token(token.make(tmp_path / "token", token.ROLES))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    guard = Guard(given)

    def enter(proof: str) -> Role:
        return guard.role("Status", [("other", "x"), (HEADER, proof)])

    proof = given.proof("Status", [Role.OPERATOR])
    assert enter(proof) is Role.OPERATOR
    for _ in range(2):
        with pytest.raises(Denied, match="used before"):
            enter(proof)
    name, at, number, signature = given.proof("Status", [Role.VIEWER]).split()
    for spoilt in (
        f"operator {at} {number} {signature}",
        f"{name} {int(at) + 1} {number} {signature}",
        f"{name} {at} {'0' * 32} {signature}",
        f"{name} {at} {number} {'0' * 64}",
    ):
        with pytest.raises(Denied, match="none that this lighthouse knows"):
            enter(spoilt)
    early = given.proof("Status", [Role.AGENT])
    now += SKEW + 1
    with pytest.raises(Denied, match="clock differs"):
        enter(early)
    late = given.proof("Status", [Role.AGENT])
    assert enter(late) is Role.AGENT
    # A new life of the lighthouse knows nothing of what was used in the former one.
    now += 1
    guard = Guard(given)
    with pytest.raises(Denied, match="older than this lighthouse"):
        enter(late)
    # Nothing is remembered for longer than it could be used.
    guard = Guard(given)
    for _ in range(5):
        enter(given.proof("Status", [Role.AGENT]))
        now += SKEW
    assert len(guard._seen) <= 3
    # Nor for shorter: one that was made by a clock that is ahead counts for twice the time.
    now += SKEW - 1
    ahead = given.proof("Status", [Role.AGENT])
    now -= SKEW - 1
    enter(ahead)
    for _ in range(3):
        now += SKEW / 2
        enter(given.proof("Status", [Role.AGENT]))
        with pytest.raises(Denied, match="used before"):
            enter(ahead)


@pytest.mark.parametrize(
    "text", ["", "agent", "agent 12\n", f"lighthouse {'0' * 64}\n", f"agent {'0' * 64} x\n", "\xff"]
)
def test_files_that_are_no_tokens(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text, "latin-1")
    script = tmp_path / "script.py"
    script.write_text("")
    for words in (["lighthouse", "--token-file", str(path)], ["run", "--token-file", str(path), str(script)]):
        if text == "agent":  # one of them is enough: these are processes
            command = [sys.executable, "-m", "planaria", *words]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 2 and "--token-file" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(UsageError, match="--token-file"):
        Token(path).secrets()


def test_the_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    assert token.make(tmp_path / "token", [Role.VIEWER]).stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match="no secret of the role agent"):
        Token(tmp_path / "token").proof("Status", [Role.AGENT])


def test_of_two_that_are_made_at_once_none_is_lost(tmp_path: Path) -> None:
    path = token.make(tmp_path / "token", token.ROLES)
    for _ in range(50):
        before = set(Token(path).secrets())
        with ThreadPoolExecutor(2) as both:
            assert list(both.map(lambda _: token.make(path, token.ROLES), range(2))) == [path] * 2
        now = Token(path).secrets()
        assert len(now) == 2 * len(token.ROLES) and not before & set(now)
