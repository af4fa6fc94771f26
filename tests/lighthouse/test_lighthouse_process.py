"""``planaria lighthouse`` as a real process: killed, restarted, stopped, and started wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lighthouse_clients import PATIENCE, ROOT, FakeAgent, Lighthouse

from planaria.core.messages import Adopted, Died, Member, Publish, QuorumId
from planaria.errors import UsageError
from planaria.lighthouse.client import OperatorClient
from planaria.lighthouse.store import Store

# An agent's stream that beats like one, says that it stands, and after a line of input, two seconds later, whether it
# still does.
ATTENDS = """
import asyncio, sys
from tests.lighthouse.lighthouse_clients import FakeAgent
from planaria.core.messages import Heartbeat, Welcome
async def main():
    async with FakeAgent(sys.argv[1], "a") as agent:
        await agent.wait_for(Welcome)
        beating = asyncio.create_task(beat(agent))
        await asyncio.sleep(2.5)
        print("attends", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(2.0)
        print(f"ended: {agent.ended!r}" if agent.ended or beating.done() else "still does", flush=True)
async def beat(agent):
    while True:
        await agent.tell(Heartbeat(()))
        await asyncio.sleep(1.0)
asyncio.run(main())
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "lighthouse.db"


def test_it_says_where_it_listens_in_one_line(store: Path) -> None:
    with Lighthouse(store, "--http", "127.0.0.1:0") as lighthouse:
        line = lighthouse.listening
        assert line["epoch"] == 1 and line["pid"] == lighthouse.process.pid
        assert line["http"].startswith("127.0.0.1:") and line["address"].startswith("127.0.0.1:")
        assert line["http"] != line["address"] and not line["address"].endswith(":0")
        with OperatorClient(lighthouse.address) as client:
            assert client.statuses() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_stops_in_order_when_told_to(store: Path, number: signal.Signals) -> None:
    with Lighthouse(store) as lighthouse:
        async with FakeAgent(lighthouse.address, "a") as agent:
            await agent.ready(0, 1)
            await agent.wait_for(Publish)
            lighthouse.process.send_signal(number)
            assert "lighthouse stops" in str((await agent.wait_for_end()).details())
        code, errors = lighthouse.end()
        assert code == 0
        assert "Traceback" not in errors and "job train: quorum" in errors  # the log tells what was decided


async def test_killed_and_restarted_it_goes_on_with_a_higher_epoch_and_the_same_lineage(store: Path) -> None:
    """The agent reports what it has; nobody is restarted, nobody is asked to begin again."""
    with Lighthouse(store) as first:
        bind = first.address
        agent = FakeAgent(bind, "a")
        await agent.connect()
        assert await agent.epoch() == 1
        await agent.ready(0, 1)
        founding = (await agent.wait_for(Publish)).quorum
        await agent.adopt(founding, 0)
        await agent.tell(Died(Member(1, 0), "SIGKILL"))
        alone = (await agent.wait_for(Publish, lambda p: p.quorum.id > founding.id)).quorum
        await agent.adopt(alone, 7)
        first.end(signal.SIGKILL)
        await agent.wait_for_end()

    with Lighthouse(store, bind=bind) as second:
        assert second.listening["epoch"] == 2
        agent.orders.clear()
        await agent.connect(agent.parked(0), Adopted(Member(0, 0), alone.id, 12))
        assert await agent.epoch() == 2
        with OperatorClient(bind) as client:
            status = client.status("train")
            assert status.quorum is not None
            assert (status.quorum.id, status.quorum.lineage) == (alone.id, alone.lineage)
        await agent.ready(1, incarnation=1)
        grown = (await agent.wait_for(Publish, lambda p: len(p.quorum.members) == 2)).quorum
        assert grown.id > alone.id and grown.id.epoch == 2
        assert grown.members == (Member(0, 0), Member(1, 1)) and not grown.founding
        await agent.close()
        second.end(signal.SIGKILL)

    again = Store.open(store)
    kept = again.lineage("train")
    assert again.epoch == 3
    assert [record.id for record in kept[:2]] == [QuorumId(1, 1), QuorumId(1, 2)]
    assert kept[-1].epoch == 2 and kept[-1].lineage != alone.lineage
    again.close()


def start(*options: str) -> subprocess.CompletedProcess[str]:
    """The command as a user has it, with the project's errors turned into exit codes."""
    script = (
        "import sys, typer\n"
        "from planaria.cli.lighthouse import lighthouse\n"
        "from planaria.errors import PlanariaError\n"
        "try: typer.run(lighthouse)\n"
        "except PlanariaError as error: print(error, file=sys.stderr); sys.exit(error.exit_code)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", script, *options],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=PATIENCE,
    )


def test_a_port_in_use_is_bad_input(store: Path, tmp_path: Path) -> None:
    with Lighthouse(store) as lighthouse:
        done = start("--bind", lighthouse.address, "--store", str(tmp_path / "other.db"))
    assert done.returncode == 2
    assert f"cannot listen on {lighthouse.address}" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_store_in_use_is_bad_input(store: Path) -> None:
    with Lighthouse(store):
        done = start("--bind", "127.0.0.1:0", "--store", str(store))
    assert done.returncode == 2 and "another lighthouse is using the store" in done.stderr


def test_a_damaged_store_is_bad_input_and_the_advice_works(store: Path) -> None:
    store.write_bytes(b"no database" * 500)
    done = start("--bind", "127.0.0.1:0", "--store", str(store))
    assert done.returncode == 2 and "--epoch-floor" in done.stderr
    store.unlink()
    with Lighthouse(store, "--epoch-floor", "500") as lighthouse:
        assert lighthouse.listening["epoch"] == 501


def test_nobody_there_is_one_sentence() -> None:
    with OperatorClient("127.0.0.1:1", deadline=2.0) as client, pytest.raises(UsageError) as error:
        client.status("train")
    assert "cannot reach the lighthouse at 127.0.0.1:1" in str(error.value) and "is it running?" in str(error.value)


async def test_an_agent_that_could_not_run_for_seconds_keeps_its_stream(store: Path) -> None:
    """A machine under load: a stream that ends is one more to be made. What counts are heartbeats."""
    with Lighthouse(store) as lighthouse:
        command = [sys.executable, "-c", ATTENDS, lighthouse.address]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
            assert agent.stdin is not None and agent.stdout is not None
            try:
                assert agent.stdout.readline() == "attends\n"
                agent.send_signal(signal.SIGSTOP)
                await asyncio.sleep(6.0)  # longer than a lighthouse that stands still is waited for
                agent.send_signal(signal.SIGCONT)
                agent.stdin.write("\n")
                agent.stdin.flush()
                assert agent.stdout.readline() == "still does\n"
            finally:
                agent.kill()


def test_a_lighthouse_that_hangs_does_not_hang_the_operator(store: Path) -> None:
    with Lighthouse(store) as lighthouse, OperatorClient(lighthouse.address, deadline=PATIENCE) as client:
        assert client.statuses() == []
        lighthouse.process.send_signal(signal.SIGSTOP)
        client._deadline = 1.0  # shorter before, it would be one of how loaded this machine is
        with pytest.raises(UsageError, match="cannot reach the lighthouse"):
            client.statuses()
        lighthouse.process.send_signal(signal.SIGCONT)
