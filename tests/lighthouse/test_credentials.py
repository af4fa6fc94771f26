"""Who is let in at a lighthouse, and whom its callers believe. Real handshakes, real processes."""

from __future__ import annotations

import asyncio
import datetime
import http.client
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from lighthouse_clients import PATIENCE, ROOT, FakeAgent, Lighthouse, link_that_notes

from planaria.agent.link import Link
from planaria.core.messages import Hello, JobSpec
from planaria.engines import nodestream
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.wire import authority
from planaria.wire.channel import open_channel
from planaria.wire.control_pb2_grpc import LighthouseStub
from planaria.wire.credentials import ENVIRONMENT, Credentials, is_loopback
from planaria.wire.roles import Role


@pytest.fixture
def own(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of this test's own with all of the site's credentials, in use."""
    directory = tmp_path / "credentials"
    shutil.copytree(site, directory)
    monkeypatch.setenv(ENVIRONMENT, str(directory))
    return directory


def only(directory: Path, site: Path, monkeypatch: pytest.MonkeyPatch, *roles: Role) -> None:
    """From now on this process has these alone."""
    directory.mkdir()
    for name in ("ca.pem", *(f"{role.value}.pem" for role in roles)):
        shutil.copy(site / name, directory / name)
    monkeypatch.setenv(ENVIRONMENT, str(directory))


async def test_roles(own: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lighthouse(tmp_path / "db") as lighthouse:
        async with FakeAgent(lighthouse.address, "a") as agent:
            assert await agent.epoch() == 1
            with OperatorClient(lighthouse.address) as client:
                assert [job.job for job in client.statuses()] == ["train"]
            only(tmp_path / "viewer", site, monkeypatch, Role.VIEWER)
            with OperatorClient(lighthouse.address) as client:
                assert [job.job for job in client.statuses()] == ["train"]
                with pytest.raises(UsageError, match=r"takes the role agent or operator.*certificate says viewer"):
                    client.evict(0)
        # One whose certificate is good, but another's.
        shutil.copy(site / "operator.pem", tmp_path / "viewer" / "agent.pem")
        async with open_channel(lighthouse.address) as channel:
            call = LighthouseStub(channel).Attend(wait_for_ready=True)
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "takes the role agent" in str(await call.details())


async def test_strangers(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "foreign"
    authority.init(foreign, 1)
    with Lighthouse(tmp_path / "db") as lighthouse:
        for given in ("", str(foreign)):
            monkeypatch.setenv(ENVIRONMENT, given)
            with OperatorClient(lighthouse.address) as client, pytest.raises(UsageError, match="cannot reach"):
                client.statuses()
        monkeypatch.setenv(ENVIRONMENT, str(own))
        with OperatorClient(lighthouse.address) as client:
            assert client.statuses() == []
    assert "Traceback" not in lighthouse.end()[1]


@pytest.mark.parametrize("where", ["address", "http"])
async def test_strangers_that_say_nothing_keep_nobody_out(where: str, own: Path, tmp_path: Path) -> None:
    """More of them than a process may have files open, unless it asks for more; and what they hold is given up."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))  # of the lighthouse, which begins with it
    try:
        lighthouse = Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with lighthouse, ExitStack() as strangers:
        host, port = lighthouse.listening[where].split(":")
        for _ in range(200):
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
        async with FakeAgent(lighthouse.address, "a") as agent:
            assert await agent.epoch() == 1
            files = Path(f"/proc/{lighthouse.listening['pid']}/fd")
            async with asyncio.timeout(PATIENCE):
                while len(list(files.iterdir())) > 100:
                    await asyncio.sleep(0.2)


def test_only_a_lighthouse_is_believed_to_be_one(own: Path, site: Path, tmp_path: Path) -> None:
    shutil.copy(site / "agent.pem", own / "lighthouse.pem")
    with (
        Lighthouse(tmp_path / "db") as lighthouse,
        OperatorClient(lighthouse.address) as client,
        pytest.raises(UsageError, match="cannot reach"),
    ):
        client.statuses()


async def test_credentials_are_replaced_under_a_running_lighthouse_and_agent(own: Path, tmp_path: Path) -> None:
    notes: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    link = link_that_notes(notes)
    with Lighthouse(tmp_path / "db") as first:
        running = asyncio.create_task(link.run(first.address))
        try:
            assert "connected" in (await notes.get())[1]
            old = tmp_path / "old"
            shutil.copytree(own, old)
            shutil.rmtree(own)
            authority.init(own, 1)  # even another authority
            with OperatorClient(first.address) as client:  # the lighthouse shows, and believes, what is there now
                assert [job.job for job in client.statuses()] == ["train"]
            first.end(signal.SIGKILL)
            assert "out of reach" in (await notes.get())[1]
            with Lighthouse(tmp_path / "db", bind=first.address):
                while "connected" not in (note := await notes.get())[1]:
                    assert note[0] == "link", note
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_nodes_of_a_group_are_agents_to_each_other(
    own: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.put_nowait(writer)

    server = await nodestream.listen("127.0.0.1", 0, connected)
    port = server.sockets[0].getsockname()[1]
    good = await nodestream.connect("127.0.0.1", port)
    (await came.get()).close()
    await good.close()
    only(tmp_path / "viewer", site, monkeypatch, Role.VIEWER)
    shutil.copy(site / "viewer.pem", tmp_path / "viewer" / "agent.pem")
    stranger = await nodestream.connect("127.0.0.1", port)  # the handshake is fine, what it says of itself is not
    assert [word async for word in stranger.words()] == [] and came.empty()
    await stranger.close()
    monkeypatch.setenv(ENVIRONMENT, "")
    plain = await nodestream.connect("127.0.0.1", port)
    assert [word async for word in plain.words()] == [] and came.empty()
    await plain.close()
    server.close()
    # Node 0 is one that only says so.
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "viewer"))
    server = await nodestream.listen("127.0.0.1", 0, connected)
    monkeypatch.setenv(ENVIRONMENT, str(own))
    with pytest.raises(OSError):
        await nodestream.connect("127.0.0.1", server.sockets[0].getsockname()[1])
    server.close()
    with pytest.raises(UsageError, match="without credentials"):
        monkeypatch.setenv(ENVIRONMENT, "")
        await nodestream.listen("0.0.0.0", 0, connected)


def test_status_pages_take_a_certificate(own: Path, tmp_path: Path) -> None:
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        host, port = lighthouse.listening["http"].split(":")
        context = ssl.create_default_context(cafile=own / "ca.pem")
        context.check_hostname = False  # as for gRPC, it is who vouches for it that counts
        with pytest.raises(OSError):
            page(http.client.HTTPConnection(host, int(port), timeout=30))
        with pytest.raises(OSError):
            page(http.client.HTTPSConnection(host, int(port), context=context, timeout=30))
        context.load_cert_chain(own / "viewer.pem")
        assert page(http.client.HTTPSConnection(host, int(port), context=context, timeout=30)) == b"ok\n"


def test_status_pages_take_up_what_is_replaced(own: Path, tmp_path: Path) -> None:
    """Even another authority; and what is half replaced is as if it were not."""
    old = tmp_path / "old"
    shutil.copytree(own, old)

    def looks(shown: Path, believed: Path) -> bytes:
        context = ssl.create_default_context(cafile=believed / "ca.pem")
        context.check_hostname = False
        context.load_cert_chain(shown / "viewer.pem")
        return page(http.client.HTTPSConnection(host, int(port), context=context, timeout=PATIENCE))

    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        host, port = lighthouse.listening["http"].split(":")
        assert looks(old, old) == b"ok\n"
        (own / "lighthouse.pem").write_text("half of")
        assert looks(old, old) == b"ok\n"
        shutil.rmtree(own)
        authority.init(own, 1)
        assert looks(own, own) == b"ok\n"
        for shown, believed in ((own, old), (old, own)):
            with pytest.raises(OSError):
                looks(shown, believed)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("where", ["http", "address"])
def test_no_session_outlives_the_authority_under_which_it_began(
    where: str, version: ssl.TLSVersion, own: Path, tmp_path: Path
) -> None:
    context = ssl.create_default_context(cafile=own / "ca.pem")
    context.check_hostname, context.maximum_version = False, version
    context.set_alpn_protocols(["h2"] if where == "address" else [])
    context.load_cert_chain(own / "viewer.pem")
    ask = (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
        if where == "address"
        else b"GET /healthz HTTP/1.1\r\n\r\n"
    )

    def session(earlier: ssl.SSLSession | None) -> ssl.SSLSession | None:
        host, port = lighthouse.listening[where].split(":")
        plain = socket.create_connection((host, int(port)), timeout=PATIENCE)
        with context.wrap_socket(plain, session=earlier) as connection:
            connection.sendall(ask)
            assert connection.recv(100)
            return connection.session

    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        try:
            earlier = session(session(None))
        except OSError:
            assert where == "http" and version is ssl.TLSVersion.TLSv1_2
            return
        shutil.rmtree(own)
        authority.init(own, 1)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # of one who believes anybody
        with pytest.raises((OSError, AssertionError)):
            session(earlier)


async def test_node_0_takes_up_what_is_replaced(own: Path) -> None:
    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await nodestream.listen("127.0.0.1", 0, connected)
    shutil.rmtree(own)
    authority.init(own, 1)
    stream = await nodestream.connect("127.0.0.1", server.sockets[0].getsockname()[1])
    assert [word async for word in stream.words()] == []
    await stream.close()
    server.close()


def page(connection: http.client.HTTPConnection) -> bytes:
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().read()
    except http.client.HTTPException as error:
        raise OSError from error
    finally:
        connection.close()


@pytest.mark.parametrize("words", [["--bind", "0.0.0.0:0"], ["--bind", "127.0.0.1:0", "--http", "[::]:0"]])
def test_without_credentials_nobody_else_is_listened_to(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planaria", "lighthouse", *words]
    done = subprocess.run(command, cwd=tmp_path, env=plain(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "without credentials" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def plain() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != ENVIRONMENT}, "PYTHONPATH": str(ROOT)}


def mix(where: Path, key: str, certificate: str) -> None:
    """Into the file ``certificate``, with the key of another."""
    start = b"-----BEGIN CERTIFICATE"
    parts = [(where / name).read_bytes().partition(start) for name in (key, certificate)]
    (where / certificate).write_bytes(parts[0][0] + start + parts[1][2])


def lock(path: Path) -> None:
    key, start, rest = path.read_bytes().partition(b"-----BEGIN CERTIFICATE")
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    private = serialization.load_pem_private_key(key, None)
    path.write_bytes(private.private_bytes(serialization.Encoding.PEM, form, locked) + start + rest)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        (lambda where: (where / "ca.pem").unlink(), "cannot read .*ca.pem: No such file"),
        (lambda where: (where / "agent.pem").unlink(), "has no agent.pem"),
        (lambda where: (where / "agent.pem").write_bytes(b"\xff\x00"), "does not hold a key and a certificate"),
        (lambda where: shutil.rmtree(where), "has no agent.pem"),
        (lambda where: (where / "ca.pem").write_text("nonsense"), "damaged"),
        (lambda where: mix(where, "operator.pem", "agent.pem"), "its key is another certificate's"),
        (lambda where: lock(where / "agent.pem"), "is locked with a password"),
    ],
)
def test_files_that_are_no_credentials(own: Path, spoilt: object, said: str) -> None:
    spoilt(own)  # type: ignore[operator]
    with pytest.raises(UsageError, match=said):
        Credentials.given((Role.AGENT,))


def test_an_authority_is_made_once_and_renews_only_its_own(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no authority"):
        authority.renew(tmp_path, 1, [Role.AGENT])
    made = authority.init(tmp_path / "new", 1)
    assert [path.name for path in made] == ["ca.pem", *(f"{role.value}.pem" for role in Role)]
    secret = [path.name for path in (tmp_path / "new").iterdir() if path.stat().st_mode & 0o077]
    assert secret == ["ca.pem"]  # all others hold keys
    with pytest.raises(UsageError, match="has an authority"):
        authority.init(tmp_path / "new", 1)
    before = (tmp_path / "new" / "agent.pem").read_bytes()
    authority.renew(tmp_path / "new", 1, [Role.OPERATOR])
    assert (tmp_path / "new" / "agent.pem").read_bytes() == before
    (tmp_path / "new" / "ca.key").write_text("nonsense")
    with pytest.raises(UsageError, match="damaged"):
        authority.renew(tmp_path / "new", 1, [Role.AGENT])


RENEW = """
import sys
from pathlib import Path
from planaria.wire import authority
from planaria.wire.roles import Role
for _ in range(60):
    authority.renew(Path(sys.argv[1]), 1, [Role.AGENT])
"""
BEGIN = """
import sys
from pathlib import Path
from planaria.wire import authority
sys.stdin.read()
authority.init(Path(sys.argv[1]), 1)
"""


def python(code: str, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=plain())


def test_two_that_renew_at_once_write_whole_certificates(own: Path) -> None:
    both = [python(RENEW, own) for _ in range(2)]
    while any(each.poll() is None for each in both):
        Credentials(own, Role.AGENT).read()
    assert [(each.wait(), each.communicate()[1]) for each in both] == [(0, "")] * 2


def test_of_two_that_begin_at_once_one_makes_the_authority(tmp_path: Path) -> None:
    several = [python(BEGIN, tmp_path / "site") for _ in range(4)]
    for each in several:
        assert each.stdin is not None
        each.stdin.close()
    assert sorted(each.wait() for each in several) == [0, 1, 1, 1]
    authority.renew(tmp_path / "site", 1, [Role.AGENT])
    Credentials(tmp_path / "site", Role.AGENT).context()
    Credentials(tmp_path / "site", Role.VIEWER).context()


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::", False)]
)
def test_loopback(host: str, here: bool) -> None:
    assert is_loopback(host) == here
    assert not is_loopback("10.0.0.1") and not is_loopback("gpu-17")


def test_certificates_that_have_expired_are_told_at_the_start(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lighthouse(tmp_path / "db") as lighthouse:
        monkeypatch.setattr(authority, "_SKEW", datetime.timedelta(days=3))
        authority.renew(own, -1, tuple(Role))
        with pytest.raises(UsageError, match=r"agent.pem is valid from .* and not now; planaria certs renew"):
            open_channel(lighthouse.address)
        with pytest.raises(UsageError, match=r"operator.pem is valid from"):
            OperatorClient(lighthouse.address)
    command = [
        sys.executable,
        "-m",
        "planaria",
        "lighthouse",
        "--bind",
        "127.0.0.1:0",
        "--store",
        str(tmp_path / "db2"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 2 and "lighthouse.pem is valid from" in done.stderr and done.stdout == ""
    assert not (tmp_path / "db2").exists(), "before a store is made"


async def test_an_agent_whose_certificate_expires_says_so_and_goes_on_when_it_is_renewed(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    told = asyncio.Event()

    def note(kind: str, text: str) -> None:
        notes.append(text)
        if "is valid from" in text:
            told.set()

    hello = Hello("a", "host", JobSpec("train", 1))
    link = Link(lambda: hello, lambda: (), lambda order: None, note, lambda why: None)
    with Lighthouse(tmp_path / "db") as first, Lighthouse(tmp_path / "db3") as second:
        running = asyncio.create_task(link.run(f"{first.address},{second.address}"))
        await asyncio.wait_for(link.up.wait(), 60)
        with monkeypatch.context() as late:
            late.setattr(authority, "_SKEW", datetime.timedelta(days=3))
            authority.renew(own, -1, (Role.AGENT,))
        first.end(signal.SIGKILL)
        await asyncio.wait_for(told.wait(), 60)
        authority.renew(own, 1, (Role.AGENT,))
        await asyncio.wait_for(link.up.wait(), 60)
        assert link.address == second.address
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
