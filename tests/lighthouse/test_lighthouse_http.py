"""The status pages over real sockets: what monitors read, and what they may send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lighthouse_clients import FakeAgent, eventually
from prometheus_client.parser import text_string_to_metric_families

from planaria.core.messages import Died, Member, Publish
from planaria.lighthouse import http
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0", http="127.0.0.1:0")
        yield server


def address(server: Server) -> tuple[str, int]:
    assert server._pages is not None
    host, _, port = server._pages.address.rpartition(":")
    return host, int(port)


async def send(server: Server, request: bytes) -> bytes:
    """Whatever comes back until the other side closes."""
    reader, writer = await asyncio.open_connection(*address(server))
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:  # hung up on before all of the request was read
        return b""
    finally:
        writer.close()


async def get(server: Server, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body)."""
    raw = await send(server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".encode())
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    if method == "GET":
        assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, body


async def metrics(server: Server) -> dict[tuple[str, tuple[str, ...]], float]:
    """{(name, values of labels in the order of their names): value}, parsed by Prometheus' own parser."""
    status, headers, body = await get(server, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {
        (s.name, tuple(value for _, value in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


async def work(agent: FakeAgent) -> None:
    await agent.ready(0, 1)
    quorum = (await agent.wait_for(Publish)).quorum
    await agent.adopt(quorum, 3)
    await agent.beat(0, 1, step=3)


async def test_healthz(server: Server) -> None:
    assert await get(server, "/healthz") == (200, (await get(server, "/healthz"))[1], b"ok\n")


async def test_status_json_is_valid_json_even_with_nan(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        await agent.beat(0, step=4, loss=float("nan"))
        machine = server.seat.jobs.find("train").machine
        await eventually(lambda: machine.groups[0].step == 4)
        status, headers, body = await get(server, "/status.json?pretty=1")
        assert status == 200 and headers["content-type"] == "application/json"
        form = json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert form["epoch"] == 1
        (job,) = form["jobs"]
        assert job["job"] == "train" and job["quorum"]["id"] == {"epoch": 1, "number": 1}
        assert job["groups"][0]["loss"] is None and job["groups"][1]["loss"] == 0.5
        assert job["groups"][0]["phase"] == "computing" and job["groups"][0]["member"]["group"] == 0
        assert await get(server, "/") == await get(server, "/status.json")


async def test_metrics_without_jobs(server: Server) -> None:
    assert await metrics(server) == {("planaria_jobs", ()): 0, ("planaria_leads", ()): 1}


async def test_metrics_follow_the_job(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        job = server.seat.jobs.find("train")
        await eventually(lambda: job.machine.groups[1].pulse is not None)
        seen = await metrics(server)
        for name, value in {
            "epoch": 1,
            "quorum_number": 1,
            "quorum_members": 2,
            "desired_groups": 2,
            "step": 3,
            "agents": 1,
        }.items():
            assert seen[(f"planaria_{name}", ("train",))] == value, name
        assert seen[("planaria_groups", ("train", "computing", "active"))] == 2
        for name, value in {"member": 1, "step": 3, "loss": 0.5}.items():
            assert seen[(f"planaria_group_{name}", ("1", "train"))] == value, name
        assert seen[("planaria_group_step_seconds", ("1", "train"))] > 0
        assert 0 < seen[("planaria_seconds_since_commit", ("train",))] < 60
        assert seen[("planaria_events_total", ("train", "quorum"))] == 1
        assert seen[("planaria_recovery_seconds_count", ("train",))] == 0

        await agent.tell(Died(Member(1, 0), "SIGKILL"))
        second = (await agent.wait_for(Publish, lambda p: p.quorum.id.number > 1)).quorum
        await agent.adopt(second, 4)
        await eventually(lambda: sum(job.recoveries) == 1)
        seen = await metrics(server)
        assert seen[("planaria_quorum_members", ("train",))] == 1
        assert [seen[("planaria_group_member", (str(group), "train"))] for group in range(2)] == [1, 0]
        assert seen[("planaria_events_total", ("train", "lost"))] == 1
        assert seen[("planaria_recovery_seconds_count", ("train",))] == 1
        assert seen[("planaria_recovery_seconds_bucket", ("train", "+Inf"))] == 1
        assert seen[("planaria_recovery_seconds_sum", ("train",))] > 0
        assert seen[("planaria_groups", ("train", "computing", "dead"))] == 1


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /secrets HTTP/1.1", 404),
        (b"GET /../etc/passwd HTTP/1.1", 404),
        (b"POST /status.json HTTP/1.1", 405),
        (b"DELETE / HTTP/1.0", 405),
        (b"nonsense", 400),
        (b"GET /healthz", 400),
        (b"GET /healthz HTTP/2", 400),
        (b"\xff\xfe\x00 \x01 HTTP/1.1", 405),
        (b"", 400),
    ],
)
async def test_other_requests_are_refused(server: Server, request_line: bytes, status: int) -> None:
    reply = await send(server, request_line + b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example:80", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_no_web_page_is_told(server: Server, host: str, status: int) -> None:
    # Its name may lead to this machine; its browser still says the name.
    reply = await send(server, f"GET /status.json HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert reply.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"Access-Control" not in reply  # nor may a page of another origin read it


async def test_head_has_no_body(server: Server) -> None:
    status, headers, body = await get(server, "/healthz", "HEAD")
    assert (status, headers["content-length"], body) == (200, "3", b"")


async def test_an_endless_request_is_cut_off(server: Server) -> None:
    reply = await send(server, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n")
    assert reply.startswith(b"HTTP/1.1 431") or reply == b""
    assert (await get(server, "/healthz"))[0] == 200


async def test_a_silent_client_is_hung_up_on(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TIMEOUT", 0.1)
    assert await send(server, b"GET /healthz HTTP/1.1\r\n") == b""


async def test_a_flood_is_turned_away_and_passes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    idle = [await asyncio.open_connection(*address(server)) for _ in range(3)]
    pages = server._pages
    assert pages is not None
    await eventually(lambda: len(pages._open) == 3)
    assert await send(server, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
    for _, writer in idle:
        writer.close()
    await eventually(lambda: not pages._open)
    assert (await get(server, "/healthz"))[0] == 200


async def test_stopping_does_not_wait_for_clients(tmp_path: Path) -> None:
    server = Server(Store.open(tmp_path / "other.db"))
    await server.start("127.0.0.1:0", http="127.0.0.1:0")
    reader, writer = await asyncio.open_connection(*address(server))
    pages = server._pages
    assert pages is not None
    await eventually(lambda: len(pages._open) == 1)
    await server.stop()
    assert await reader.read() == b""
    writer.close()
