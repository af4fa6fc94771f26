"""What may be done by the web pages, and by whom: each of the conditions alone keeps it from being done."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lighthouse_clients import FakeAgent
from test_lighthouse_http import address, send, work

from planaria.core.messages import Drain, Kill
from planaria.lighthouse import http, streams
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from planaria.wire.credentials import ENVIRONMENT, Credentials
from planaria.wire.roles import LIGHTHOUSE_NAME, Role

HOST = f"{LIGHTHOUSE_NAME}:4433"
GOOD = {
    "Host": HOST,
    "Origin": f"https://{HOST}",
    "Sec-Fetch-Site": "same-origin",
    "X-Planaria-Action": "1",
    "Content-Type": "application/json",
}


@pytest.fixture
async def server(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setenv(ENVIRONMENT, str(site))
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0", http="127.0.0.1:0")
        yield server


@pytest.fixture
async def agent(server: Server) -> AsyncIterator[FakeAgent]:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        yield agent


def certificate(site: Path, role: Role) -> ssl.SSLContext:
    return Credentials(site, role).context(serves=False)


async def ask(server: Server, context: ssl.SSLContext, request: bytes) -> tuple[int, object]:
    host, port = address(server)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=LIGHTHOUSE_NAME)
    writer.write(request)
    raw = await reader.read()
    writer.close()
    return int(raw.split()[1]), json.loads(raw.partition(b"\r\n\r\n")[2])


def post(path: str, body: bytes, **changed: str | None) -> bytes:
    """A request as the page sends it, with some headers changed, or left out (None)."""
    headers = {**GOOD, "Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in changed.items()}}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode() + body


KILL = b'{"group": 1, "signal": 9}'


async def nothing_was_done(server: Server, agent: FakeAgent) -> None:
    """Orders come in their order: the one of a later verb would come behind any that there is."""
    assert server.seat.jobs is not None
    job = server.seat.jobs.find("train")
    job.operate(lambda now: job.machine.kill(0, 15, now))
    await agent.wait_for(Kill, lambda order: order.group == 0)
    assert [order.group for order in agent.orders if isinstance(order, (Kill, Drain))] == [0]


async def test_an_operator_can_have_it_done(server: Server, agent: FakeAgent, site: Path) -> None:
    operator = certificate(site, Role.OPERATOR)
    status, told = await ask(server, operator, post("/jobs/train/kill", KILL))
    assert (status, told) == (200, {"text": "job train: signal 9 goes to group 1"})
    assert (await agent.wait_for(Kill)).group == 1
    for path, body, text in (
        ("/jobs/train/scale", b'{"groups": 3}', "the job goes to 3 groups"),
        ("/jobs/train/drain", b'{"group": 0}', "group 0 leaves"),
        ("/jobs/train/evict", b'{"group": 1}', "counts as dead"),
    ):
        status, told = await ask(server, operator, post(path, body))
        assert status == 200 and text in str(told)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Host": "127.0.0.1:4433"}, 421),
        ({"Host": "evil.example", "Origin": "https://evil.example"}, 421),
        ({"Host": f"{LIGHTHOUSE_NAME}.evil.example", "Origin": f"https://{LIGHTHOUSE_NAME}.evil.example"}, 421),
        ({"Host": None}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": f"http://{HOST}"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "none"}, 403),
        ({"Sec_Fetch_Site": None}, 403),
        ({"X_Planaria_Action": None}, 403),
        ({"Content_Type": "text/plain"}, 403),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 403),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "1000000"}, 413),
        ({"Transfer_Encoding": "chunked"}, 411),
    ],
)
async def test_every_condition_counts(
    server: Server, agent: FakeAgent, site: Path, changed: dict[str, str | None], status: int
) -> None:
    given = {name.replace("_", "-"): value for name, value in changed.items()}
    found, _ = await ask(server, certificate(site, Role.OPERATOR), post("/jobs/train/kill", KILL, **given))
    assert found == status
    await nothing_was_done(server, agent)


@pytest.mark.parametrize("role", [Role.VIEWER, Role.AGENT, Role.LIGHTHOUSE])
async def test_nobody_else_may(server: Server, agent: FakeAgent, site: Path, role: Role) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(site / "ca.pem")
    context.load_cert_chain(site / f"{role.value}.pem")
    try:
        assert (await ask(server, context, post("/jobs/train/kill", KILL)))[0] == 403
        asked = f"GET /verbs HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        assert await ask(server, context, asked) == (200, [])
    except (OSError, IndexError):
        assert role is Role.LIGHTHOUSE, "whose certificate is for no client"
    await nothing_was_done(server, agent)


async def test_the_page_is_told_what_there_is(server: Server, site: Path) -> None:
    operator = certificate(site, Role.OPERATOR)
    for host, some in ((HOST, True), ("127.0.0.1", False)):
        status, verbs = await ask(server, operator, f"GET /verbs HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert status == 200 and bool(verbs) is some


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/jobs/train/kill", b"", 400),
        ("/jobs/train/kill", b"[" * 1000, 400),
        ("/jobs/train/kill", b'{"group": 1}', 400),
        ("/jobs/train/kill", b'{"group": 1, "signal": 9, "rank": 0}', 400),
        ("/jobs/train/kill", b'{"group": true, "signal": 9}', 400),
        ("/jobs/train/kill", b'{"group": 1e3, "signal": 9}', 400),
        ("/jobs/train/kill", b'{"group": 99999999999999999999, "signal": 9}', 400),
        ("/jobs/train/kill", b'{"group": 1, "signal": 900}', 409),
        ("/jobs/train/kill", b"\xff\xfe", 400),
        ("/jobs/train/drain", b'{"group": 77}', 409),
        ("/jobs/train/scale", b'{"groups": 0}', 409),
        ("/jobs/train/undrain", b'{"node": "nobody", "device": ""}', 409),
        ("/jobs/other/kill", KILL, 409),
        ("/jobs//kill", KILL, 409),
        ("/jobs/train/migrate", KILL, 404),
        ("/jobs/train", KILL, 404),
        ("/jobs/train/kill/more", KILL, 404),
        ("/status.json", KILL, 404),
    ],
)
async def test_senseless_requests_change_nothing(
    server: Server, agent: FakeAgent, site: Path, path: str, body: bytes, status: int
) -> None:
    found, told = await ask(server, certificate(site, Role.OPERATOR), post(path, body))
    assert found == status and isinstance(told, dict) and told["text"]
    await nothing_was_done(server, agent)


async def test_a_viewer_is_told_again_and_again(server: Server, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(http, "TIMEOUT", 1.0)
    host, port = address(server)
    context = certificate(site, Role.VIEWER)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=LIGHTHOUSE_NAME)
    writer.write(f"GET /live/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    for _ in range(200):
        await reader.readuntil(b"\n\n")
    writer.close()


async def test_without_credentials_nothing_can_be_done(tmp_path: Path) -> None:
    async with Server(Store.open(tmp_path / "plain.db")) as server:
        await server.start("127.0.0.1:0", http="127.0.0.1:0")
        async with FakeAgent(server.address, "a") as agent:
            await work(agent)
            reply = await send(server, post("/jobs/train/kill", KILL))
            assert reply.startswith(b"HTTP/1.1 405 ")
            verbs = await send(server, b"GET /verbs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert verbs.endswith(b"\r\n\r\n[]")
            await nothing_was_done(server, agent)
