"""What the web pages are made of, and the streams that they listen to, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lighthouse_clients import FakeAgent, eventually
from test_lighthouse_http import address, get, send, work

from planaria.core.messages import Died, Event, Finished, Member, Publish
from planaria.core.roster import Effect
from planaria.lighthouse import http, streams
from planaria.lighthouse.assets import assets
from planaria.lighthouse.jobs import Job
from planaria.lighthouse.picture import picture_of
from planaria.lighthouse.server import Server
from planaria.lighthouse.store import Store
from tools.vendor_web import PACKAGES, VENDOR


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with Server(Store.open(tmp_path / "lighthouse.db")) as server:
        await server.start("127.0.0.1:0", http="127.0.0.1:0")
        yield server


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pictures a second."""
    monkeypatch.setattr(streams, "HEARTBEAT_SECONDS", 0.01)


def the_job(server: Server) -> Job:
    assert server.seat.jobs is not None
    return server.seat.jobs.find("train")


def all_heard(job: Job) -> bool:
    return all(view.pulse is not None for view in job.machine.seen.groups.values())


def pages(server: Server) -> http.StatusPages:
    assert server._pages is not None
    return server._pages


class Listener:
    """A stream as a browser has it."""

    def __init__(self, server: Server, path: str) -> None:
        self._server, self._path = server, path
        self.head = b""

    async def __aenter__(self) -> Listener:
        self._reader, self._writer = await asyncio.open_connection(*address(self._server), limit=1 << 24)
        self._writer.write(f"GET {self._path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        self.head = await self._reader.readuntil(b"\r\n\r\n")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def next(self, kind: str, **having: Any) -> dict[str, Any]:
        """The next event of that kind in which these are so."""
        async with asyncio.timeout(30):
            while True:
                name, data = (await self._reader.readuntil(b"\n\n")).decode().rstrip().split("\n")
                found = json.loads(data.removeprefix("data: "))
                if name == f"event: {kind}" and having.items() <= found.items():
                    return dict(found)

    async def end(self) -> None:
        async with asyncio.timeout(30):
            while await self._reader.read(1 << 16):
                pass


async def ask(server: Server, path: str, *lines: str) -> tuple[int, dict[str, str], bytes]:
    raw = await send(server, "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode())
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in rest), body


async def test_browsers_get_a_page_and_programs_the_status(server: Server) -> None:
    for path in ("/", "/jobs/train", "/jobs/%3Cb%3E/x", "/jobs/"):
        status, headers, body = await ask(server, path, "Accept: text/html,*/*")
        assert status == 200 and headers["content-type"] == "text/html; charset=utf-8" and b"<!doctype html>" in body
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
    assert (await ask(server, "/"))[1]["content-type"] == "application/json"


async def test_files_are_packed_and_known_again(server: Server) -> None:
    _, headers, body = await ask(server, "/web/app.js")
    packed = await ask(server, "/web/app.js", "Accept-Encoding: gzip, br")
    assert packed[1]["content-encoding"] == "gzip" and gzip.decompress(packed[2]) == body
    assert headers["content-type"].startswith("text/javascript")
    status, _, nothing = await ask(server, "/web/app.js", f"If-None-Match: {headers['etag']}")
    assert (status, nothing) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/web/", "/web/../http.py", "/web/%2e%2e/http.py", "//etc/passwd", "/web//etc/passwd", "/web/app.js/", "/x"],
)
async def test_nothing_else_is_served(server: Server, path: str) -> None:
    assert (await ask(server, path, "Accept: text/html"))[0] == 404


def test_every_module_imports_what_is_there() -> None:
    known = assets()
    assert {"index.html", "app.js", "style.css", "vendor/uplot/LICENSE", "vendor/lit-html/LICENSE"} <= known.keys()
    ours = {name: asset.body.decode() for name, asset in known.items() if not name.startswith("vendor/")}
    asked = {found for text in ours.values() for found in re.findall(r'"/web/([^"]+)"', text)}
    assert asked and asked <= known.keys(), asked - known.keys()
    assert not any("http:" in text.replace("http://www.w3.org/2000/svg", "") for text in ours.values())


def test_what_others_have_written_is_what_the_script_fetches() -> None:
    listed = {f"vendor/{package.name}/{name}" for package in PACKAGES for name in package.files}
    assert {path.relative_to(VENDOR.parent).as_posix() for path in VENDOR.rglob("*") if path.is_file()} == listed


async def test_a_stream_tells_all_and_then_what_is_new(server: Server, hurried: None) -> None:
    async with Listener(server, "/live/") as all_jobs, FakeAgent(server.address, "a") as agent:
        assert b"text/event-stream" in all_jobs.head
        assert (await all_jobs.next("picture"))["jobs"] == []
        await work(agent)
        async with Listener(server, "/live/train") as one:
            picture = (await one.next("picture"))["job"]
            assert picture["quorum"]["id"] == "1.1" and [row[0] for row in picture["groups"]] == [0, 1]
            news = await one.next("news", anew=True)
            assert [event[1] for event in news["events"]][-1] == "quorum"
            await agent.tell(Died(Member(1, 0), "SIGKILL"))
            second = (await agent.wait_for(Publish, lambda p: p.quorum.id.number > 1)).quorum
            await agent.adopt(second, 4)
            told: list[Any] = []
            while not any(mark[0] == "recovery" for mark in told):
                news = await one.next("news", anew=False)
                told += news["marks"]
            assert [mark[0] for mark in told] == ["interrupt", "quorum", "recovery"]
            assert "group 1 lost (SIGKILL), its shards went to the others" in told[-1][5]
        while not (jobs := (await all_jobs.next("picture"))["jobs"]) or jobs[0]["losses"] != 1:
            pass
        assert jobs[0]["job"] == "train" and jobs[0]["members"] == 1


async def test_losses_that_are_no_sensible_numbers_end_no_stream(server: Server, hurried: None) -> None:
    async with FakeAgent(server.address, "a") as agent, Listener(server, "/live/train") as listener:
        await work(agent)
        for loss in (1.7e308, -math.inf, math.nan, 1e308):
            await agent.beat(0, 1, step=4, loss=loss)
        await agent.beat(0, 1, step=5, loss=1e308)
        while (picture := (await listener.next("picture")).get("job")) is None or picture["step"] < 5:
            pass
        assert picture["loss"] is None, "the mean of two of 1e308"
        await listener.next("news")


async def test_commits_after_going_back_are_told(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        job = the_job(server)
        await eventually(lambda: all_heard(job))

        def back(now: float) -> list[Effect]:
            job.machine.seen.top_step = 1
            return []

        before = job.history.committed_count
        job._run(back)
        assert job.history.committed_count == before, "that is no commit"
        await agent.beat(0, 1, step=2)
        await eventually(lambda: job.history.committed_count > before)
        assert job.history.commits_since(before)[0][1] == 2
        assert job.seconds_since_commit < 30


async def test_a_bug_of_what_is_shown_ends_no_agents_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        job = the_job(server)
        monkeypatch.setattr(job.history, "heard", broken)
        monkeypatch.setattr(job.history, "adopted", broken)
        await agent.adopt(agent.newest(Publish).quorum, 3)
        for step in (4, 5):
            await agent.beat(0, 1, step=step)
            await eventually(lambda step=step: job.machine.seen.top_step == step)
        assert agent.ended is None and not job.closed


async def test_the_time_after_the_last_agent_is_no_time_at_work(server: Server) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        job = the_job(server)
        await eventually(lambda: all_heard(job))
        job._account(time.monotonic())
        assert job.history._conditions["working"] == 2
        await agent.leave()
        await eventually(lambda: not job.streams)
        assert job.history._conditions["working"] == 0 and job.history._conditions["out of reach"] == 2


async def test_the_account_takes_no_snapshot(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        job = the_job(server)
        monkeypatch.setattr(job.machine, "snapshot", lambda: pytest.fail("which sorts all groups"))
        job._account(time.monotonic())


async def test_a_node_and_a_gpu_that_are_drained_are_told_apart(server: Server) -> None:
    async with FakeAgent(server.address, "rack:1") as agent:
        await work(agent)
        job = the_job(server)
        job.machine.closed = {"rack:1": frozenset({""}), "rack": frozenset({"1"})}
        assert picture_of(job)["drained"] == [["rack:1", ""], ["rack", "1"]]


async def test_many_jobs_are_drawn_bit_by_bit_and_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(streams, "seat_of", lambda seat: {})
    monkeypatch.setattr(streams, "line_of", lambda job: drawn.append(job))
    seat: Any = SimpleNamespace(jobs=SimpleNamespace(all=lambda: range(5)))
    told = streams.Streams(seat)

    async def others() -> list[int]:
        found = []
        while len(drawn) < 5:
            await asyncio.sleep(0)
            found.append(len(drawn))
        return found

    _, _, between = await asyncio.gather(told._all(), told._all(), others())
    assert set(between) >= {2, 3, 4} and drawn == [0, 1, 2, 3, 4]


async def test_the_first_news_are_not_made_in_one_go_with_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "seat_of", lambda seat: {})
    monkeypatch.setattr(streams, "picture_of", lambda job: {})
    seat: Any = SimpleNamespace(jobs=SimpleNamespace(find=lambda name: "a job"))
    reader: Any = SimpleNamespace(job=None, news=lambda job: {})
    making = asyncio.ensure_future(streams.Streams(seat)._one("train", reader))
    await asyncio.sleep(0)
    assert not making.done()
    assert b"event: news" in await making


async def test_a_job_that_ended_stays_to_be_seen(server: Server, hurried: None) -> None:
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        await agent.tell(*(Finished(Member(group, 0), 100, "digest") for group in range(2)))
        async with Listener(server, "/live/train") as listener:
            picture = (await listener.next("picture"))["job"]
            while {row[2] for row in picture["groups"]} != {"finished"}:
                picture = (await listener.next("picture"))["job"]
            assert picture["complete"] and picture["step"] == 100
            spent = picture["group_seconds"]
            for _ in range(5):
                assert (await listener.next("picture"))["job"]["group_seconds"] == spent, "its time has passed"


async def test_a_job_that_is_not_there_yet_and_one_that_begins_anew(server: Server, hurried: None) -> None:
    async with Listener(server, "/live/a%20job") as listener:
        assert "knows no job a job" in (await listener.next("picture"))["missing"]
        async with FakeAgent(server.address, "a", job="a job") as agent:
            await work(agent)
            await listener.next("news", anew=True)
            jobs = server.seat.jobs
            assert jobs is not None
            jobs.find("a job").close("given up")
            await agent.wait_for_end()
            await agent.connect()
            await listener.next("news", anew=True)


async def test_a_stream_ends_with_its_client(server: Server, hurried: None) -> None:
    async with Listener(server, "/live/train") as listener:
        await listener.next("picture")
        assert pages(server)._streams.open == 1
    await eventually(lambda: pages(server)._streams.open == 0 and not pages(server)._open)


async def test_a_reader_that_stops_is_hung_up_on_and_costs_little(
    server: Server, hurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 0.5)
    async with FakeAgent(server.address, "a") as agent:
        await work(agent)
        jobs = server.seat.jobs
        assert jobs is not None
        job = jobs.find("train")
        for number in range(200):  # a first piece of news of several hundred kilobytes
            job._record(Event(0.0, "trouble", f"{number}" * 1000, 0))
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(address(server))
            slow.sendall(b"GET /live/train HTTP/1.1\r\nHost: localhost\r\n\r\n")
            shown = pages(server)
            await eventually(lambda: shown._streams.open == 1)
            (writer,) = shown._open
            # Loopback takes megabytes before anybody has to wait.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            most = 0
            while shown._streams.open:
                most = max(most, writer.transport.get_write_buffer_size())
                assert (await get(server, "/healthz"))[0] == 200, "nobody else waits for it"
            assert most < 4 << 20, "one picture and one piece of news, and no more"
            await eventually(lambda: writer.transport.get_write_buffer_size() == 0)
            await eventually(lambda: not shown._open)


async def test_streams_leave_room_for_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_STREAMS", 2)
    async with Listener(server, "/live/"), Listener(server, "/live/x"):
        assert (await ask(server, "/live/"))[0] == 503
        assert (await get(server, "/healthz"))[0] == 200
    await eventually(lambda: pages(server)._streams.open == 0)
    async with Listener(server, "/live/") as again:
        assert b" 200 " in again.head


@pytest.mark.parametrize("path", ["/live/", "/status.json", "/web/app.js"])
async def test_other_sites_pages_are_told_nothing(server: Server, path: str) -> None:
    for site in ("cross-site", "same-site"):
        assert (await ask(server, path, f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: no-cors"))[0] == 403
    assert (await send(server, f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode())).startswith(
        b"HTTP/1.1 421"
    )


async def test_a_link_from_elsewhere_may_be_followed(server: Server) -> None:
    lines = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Accept: text/html")
    assert (await ask(server, "/jobs/train", *lines))[0] == 200


async def test_stopping_ends_streams(tmp_path: Path) -> None:
    server = Server(Store.open(tmp_path / "other.db"))
    await server.start("127.0.0.1:0", http="127.0.0.1:0")
    async with Listener(server, "/live/") as listener:
        await listener.next("picture")
        await server.stop()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await listener.next("nothing")
