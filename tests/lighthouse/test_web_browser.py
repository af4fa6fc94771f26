"""The web pages in a real browser, of a real lighthouse that real streams feed. Screenshots are kept in the directory
that PLANARIA_SCREENSHOTS names, else in pytest's; somebody should look at them now and then."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from crowd import Crowd
from lighthouse_clients import ROOT, FakeAgent, Lighthouse, eventually

from planaria.core.messages import Drain, Phase, Publish
from planaria.lighthouse.client import OperatorClient
from planaria.lighthouse.streams import MAX_STREAMS
from planaria.wire import authority
from planaria.wire.credentials import ENVIRONMENT, Credentials
from planaria.wire.roles import LIGHTHOUSE_NAME, Role

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)"),
]

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", f"--host-resolver-rules=MAP {LIGHTHOUSE_NAME} 127.0.0.1"),
)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
PATIENCE_MS = 60_000
EVIL = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with playwright.async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        await browser.close()


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    directory = Path(os.environ.get("PLANARIA_SCREENSHOTS") or tmp_path / "screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


class Viewer:
    """A page in a window of its own. Whatever the browser complains of is kept."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page: Any = None

    async def open(self, browser: Any, url: str, size: str = "desktop", scheme: str = "light") -> Viewer:
        width, height = SIZES[size]
        context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = await context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: message.type in ("error", "warning") and self._note(message.text))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        await self.page.goto(url)
        return self

    async def sees(self, text: str | re.Pattern[str]) -> None:
        await self.page.get_by_text(text).first.wait_for()

    async def shot(self, path: Path) -> None:
        await self.page.screenshot(path=path, full_page=True)

    async def close(self) -> None:
        await self.page.context.close()

    def _note(self, text: str) -> None:
        self.complaints.append(text)


def http(lighthouse: Lighthouse) -> str:
    return f"http://{lighthouse.listening['http']}"


async def hurt(crowd: Crowd) -> None:
    """Some minutes of a large job's life in a few seconds."""
    groups = len(crowd.lives)
    for _ in range(4):
        await crowd.beat(60)
    await crowd.die((3,), "killed by SIGKILL")
    await crowd.beat(40)
    await crowd.die((groups // 2, groups - 1), f"exit code 1: {EVIL}")
    await crowd.beat(40)
    await crowd.come_back(3)
    await crowd.hang(groups // 3, "no progress while computing a shard for 10.0 s (limit 10 s, longest seen 0.13 s)")
    phases = {group: Phase.HEALING for group in range(40, 44)} | {group: Phase.FORMING for group in range(60, 63)}
    for _ in range(4):
        await crowd.beat(30, phases={group: phase for group, phase in phases.items() if group < groups})


@pytest.mark.parametrize("groups", [8, 1000])
async def test_a_job_on_every_screen(browser: Any, shots: Path, tmp_path: Path, groups: int) -> None:
    agents = tuple(f"node{number}" if number else EVIL for number in range(8))
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        url = f"{http(lighthouse)}/jobs/{quote(f'pretrain-{groups}', safe='')}"
        async with Crowd(lighthouse.address, f"pretrain-{groups}", groups, agents) as crowd:
            await hurt(crowd)
            for size in SIZES:
                for scheme in ("light", "dark"):
                    viewer = await Viewer().open(browser, url, size, scheme)
                    await viewer.sees(re.compile(r"all \d+ at work again after"))
                    cells = viewer.page.get_by_role("option")
                    assert await cells.count() == groups
                    name = f"group {groups // 2}, dead, step"
                    await viewer.page.get_by_role("option", name=name).click()
                    await viewer.sees(f"Group {groups // 2}")
                    await crowd.beat(10)
                    await viewer.sees(f"{crowd.step:,}")
                    await viewer.page.wait_for_timeout(300)  # what it shows is drawn in the next frame
                    await viewer.shot(shots / f"job-{groups}-{size}-{scheme}.png")
                    width = await viewer.page.evaluate("document.documentElement.scrollWidth")
                    assert width <= SIZES[size][0], "nothing is wider than the screen"
                    assert viewer.complaints == [] and viewer.hosts == {lighthouse.listening["http"]}
                    assert "owned" not in await viewer.page.title()
                    assert await viewer.page.locator("img:not(nav img)").count() == 0
                    await viewer.close()


async def test_names_and_losses_of_all_kinds(browser: Any, shots: Path, tmp_path: Path) -> None:
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        viewer = await Viewer().open(browser, http(lighthouse))
        await viewer.sees("knows no job yet")
        await viewer.shot(shots / "no-job.png")
        async with Crowd(lighthouse.address, EVIL, 2, ("a", "b")) as crowd:
            for loss in (2.0, float("nan"), float("inf"), 1.5):
                await crowd.beat(5, loss)
            await viewer.page.get_by_role("link", name="onerror").click()
            await viewer.page.get_by_role("heading", name="onerror").wait_for()
            assert await viewer.page.locator("h1").text_content() == EVIL
            await viewer.sees("of 20,000")
            await viewer.page.goto(f"{http(lighthouse)}/jobs/nobody%2Fknows")
            await viewer.sees("The lighthouse knows no job nobody/knows")
            await viewer.shot(shots / "unknown-job.png")
            await viewer.page.goto(f"{http(lighthouse)}/jobs/%E0%A4%A")
            await viewer.sees("The lighthouse knows no job")
        assert viewer.complaints == [] and "owned" not in await viewer.page.title()


async def test_by_keyboard(browser: Any, tmp_path: Path) -> None:
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        async with Crowd(lighthouse.address, "train", 30, ("a",)) as crowd:
            await hurt(crowd)
            viewer = await Viewer().open(browser, f"{http(lighthouse)}/jobs/train")
            await viewer.sees(re.compile("at work again after"))
            keys = viewer.page.keyboard
            await viewer.page.get_by_role("option").first.focus()
            for key in ("ArrowRight", "ArrowRight", "End", "ArrowLeft"):
                await keys.press(key)
            await viewer.sees("Group 28")
            chart = viewer.page.get_by_role("img", name="Timeline")
            before = await chart.get_attribute("aria-label")
            await chart.focus()
            for _ in range(30):
                await keys.press("+")
            await viewer.page.wait_for_function(
                "before => document.querySelector('[aria-label^=Timeline]').ariaLabel !== before", arg=before
            )
            assert "Timeline of 10 ms" in str(await chart.get_attribute("aria-label"))
            await keys.press("0")
            assert viewer.complaints == []


async def test_a_real_run_and_the_end_of_its_lighthouse(browser: Any, shots: Path, tmp_path: Path) -> None:
    words = ["-m", "planaria", "run", "--groups", "3", "--shards", "6", "--quiet", "--log-dir", str(tmp_path / "run")]
    script = str(ROOT / "examples" / "tiny_lm.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, script, "--steps", "100000"), env=env, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert run.stderr is not None
        told = (await run.stderr.readline()).decode()
        assert "watch it at http://127.0.0.1:" in told, "its address is the first that it says"
        viewer = await Viewer().open(browser, told.split()[-1])
        await viewer.sees(re.compile("3 groups"))
        await viewer.sees(re.compile(r"working"))
        with OperatorClient(address_of(tmp_path / "run")) as client:
            await asyncio.to_thread(client.kill, 1, signal.SIGKILL)
            await viewer.sees(re.compile(r"group 1 lost \(killed by SIGKILL\), its shards went to the others, all 2"))
            await viewer.sees(re.compile(r"group 1 was away for .* healed, and works again"))
            await viewer.sees(re.compile(r"^\d shards?$"))
            await viewer.shot(shots / "real-run.png")
            assert viewer.complaints == []
        os.kill(pid_of_lighthouse(run.pid), signal.SIGKILL)
        await viewer.sees("No answer from the lighthouse since")
        await viewer.page.get_by_text("No answer from the lighthouse").wait_for(state="detached")
        await viewer.sees(re.compile(r"lighthouse epoch 2 serves job"))
        run.send_signal(signal.SIGINT)
        await viewer.sees("No answer from the lighthouse since")
        await viewer.shot(shots / "run-over.png")
        await run.wait()
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


def address_of(run: Path) -> str:
    return str(json.loads((run / "run.json").read_text())["lighthouse"])


def pid_of_lighthouse(agent: int) -> int:
    return next(
        child.pid for child in psutil.Process(agent).children() if "planaria.agent.lighthouse_main" in child.cmdline()
    )


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.VIEWER])
async def test_an_operator_drains_a_group(
    browser: Any, shots: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    site = tmp_path / "site"
    authority.init(site, 1)
    monkeypatch.setenv(ENVIRONMENT, str(site))
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        async with FakeAgent(lighthouse.address, "a") as agent, with_certificate(lighthouse, site, role) as port:
            await agent.ready(0, 1)
            await agent.adopt((await agent.wait_for(Publish)).quorum)
            await agent.beat(0, 1, step=3)
            context = await browser.new_context(ignore_https_errors=True)
            page = await context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            async with page.expect_response("**/verbs"):
                await page.goto(f"https://{LIGHTHOUSE_NAME}:{port}/jobs/train")
            await page.get_by_role("option", name=re.compile("^group 1, ")).click()
            await page.get_by_role("heading", name="Group 1").wait_for()
            if role is Role.VIEWER:
                assert await page.get_by_role("button", name="Drain").count() == 0
                return
            await page.get_by_role("button", name="Drain …").click()
            dialog = page.get_by_role("dialog", name="Drain group 1")
            await page.screenshot(path=shots / "operator.png")
            await dialog.get_by_role("button", name="Cancel").click()
            await dialog.wait_for(state="detached")
            assert not [order for order in agent.orders if isinstance(order, Drain)]
            await page.get_by_role("button", name="Drain …").click()
            await dialog.get_by_role("button", name="Drain group 1").click()
            await dialog.get_by_text("job train: group 1 leaves after one of the next commits").wait_for()
            assert (await agent.wait_for(Drain)).member.group == 1


@asynccontextmanager
async def with_certificate(lighthouse: Lighthouse, site: Path, role: Role) -> AsyncIterator[int]:
    """A port that leads to the status pages with the certificate of ``role``: a browser takes its own from a store of
    the user's, which tests leave alone. All else is between the browser and the lighthouse."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(site / "lighthouse.pem")
    asking = Credentials(site, role).context(serves=False)
    host, port = lighthouse.listening["http"].split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            other = await asyncio.open_connection(host, int(port), ssl=asking, server_hostname=LIGHTHOUSE_NAME)
            await asyncio.gather(pump(reader, other[1]), pump(other[0], writer))

    server = await asyncio.start_server(join, "127.0.0.1", 0, ssl=served)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_one_that_stands_by_says_who_leads(browser: Any, shots: Path, tmp_path: Path) -> None:
    elector = ("--elector", f"file:{tmp_path / 'elector'}")
    with Lighthouse(tmp_path / "a", *elector) as first:
        await eventually(lambda: leads(first.address))
        with Lighthouse(tmp_path / "b", *elector, "--http", "127.0.0.1:0") as second:
            viewer = await Viewer().open(browser, f"{http(second)}/jobs/train")
            await viewer.sees(f"This lighthouse stands by: the one at {first.address} leads.")
            await viewer.shot(shots / "stands-by.png")


def leads(address: str) -> bool:
    with OperatorClient(address) as client:
        return client.posts()[0].state == "leads"


async def test_it_says_that_too_many_pages_are_open(browser: Any, tmp_path: Path) -> None:
    with Lighthouse(tmp_path / "db", "--http", "127.0.0.1:0") as lighthouse:
        host, port = lighthouse.listening["http"].split(":")
        writers = []
        for _ in range(MAX_STREAMS):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /live/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\n\n")
            writers.append(writer)
        viewer = await Viewer().open(browser, http(lighthouse))
        await viewer.sees("Too many pages of this lighthouse are open")
        assert await viewer.page.get_by_text("No answer from the lighthouse").count() == 0
        for writer in writers:
            writer.close()
        await viewer.sees("knows no job yet")
        assert await viewer.page.get_by_text("Too many pages").count() == 0
