"""Groups that are spread over nodes: real processes, in network namespaces where a network has to fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.chaos.netns import Networks
from planaria.core.messages import Member
from planaria.engines.launch import directory_of
from planaria.wire import authority
from planaria.wire.credentials import ENVIRONMENT

from .conftest import SCRIPTS, Run, running
from .test_run import everything_ended

StartRun = Callable[..., Run]
SPEAKER = str(SCRIPTS / "speaker.py")


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Networks]:
    """Two nodes, 0 and 1, on a network that can be cut, and with credentials for it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    authority.init(tmp_path / "credentials", 1)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "credentials"))
    made = Networks(2)
    try:
        made.make()
        yield made
    finally:
        made.close()


def pids(run: Run, group: int, ranks: int, incarnation: int = 0) -> list[int]:
    return [run.pid_of(group, incarnation, rank) for rank in range(ranks)]


def heard(logs: Path, group: int, rank: int, incarnation: int = 0) -> list[str]:
    return (directory_of(logs, Member(group, incarnation), rank) / "heard").read_text().splitlines()


def noted(run: Run, part: str, logs: Path | None = None) -> bool:
    """Whether the run's record (or another one of the same run) says so."""
    try:
        lines = ((logs or run.logs) / "events.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return False
    return any(part in json.loads(line)["text"] for line in lines if line.endswith("\n"))


def gone(*those: int) -> bool:
    return not any(running(pid) for pid in those)


def test_ranks_on_two_nodes_are_one_group(start_run: StartRun, networks: Networks) -> None:
    words = ("--groups", "2", "--nproc-per-group", "2", "--nnodes", "2", "--group-addr", f"{networks.address(0)}:29520")
    script = (SPEAKER, "200", "0.03", "crash-once@3", "hold")
    one = start_run(*words, "--node-rank", "1", *script, namespace=networks.of(1))  # it may come first
    zero = start_run(*words, *script, namespace=networks.of(0))
    first = [*pids(zero, 0, 4), *pids(zero, 1, 4)]
    second = pids(zero, 1, 4, 1)
    assert gone(*first[4:]), "all were gone before the first new one came"
    zero.until(lambda: zero.step_of(1, 1) >= 3)
    os.kill(second[2], signal.SIGKILL)
    third = pids(zero, 1, 4, 2)
    zero.until(lambda: zero.step_of(1, 2) >= 1)
    one.release()
    assert (zero.end(), one.wait()) == (0, 0), zero.err.read_text() + one.err.read_text()
    crash, kill = zero.summary()["failures"]
    assert (crash["rank"], crash["exit_code"], crash["message"]) == (3, 1, "ValueError: boom at step 2")
    assert crash["log_file"].endswith("node1/rg1/i0/rank3/stderr.log")
    assert (kill["rank"], kill["signal"]) == (2, 9)
    assert "[rg0:rank0] finished 200 steps" in zero.out.read_text() and "rank3]" not in zero.out.read_text()
    assert "[rg0:rank3] finished 200 steps" in one.out.read_text() and "rank0]" not in one.out.read_text()
    told = heard(zero.logs, 0, 0)
    assert len(told) > 3 and told == heard(zero.logs, 0, 1)
    assert told == heard(one.logs / "node1", 0, 2) == heard(one.logs / "node1", 0, 3)
    everything_ended(zero, *first, *second, *third)
    everything_ended(one)


def test_a_link_that_is_cut(start_run: StartRun, networks: Networks) -> None:
    """Group 0 is on node 0; group 1 has a rank on each node."""
    zero = networks.of(0)
    script = (SPEAKER, "100000", "0.05")
    common = ("--groups", "2", "--job", "shared", "--nproc-per-group")
    service = start_run("--groups", "1", SPEAKER, "100000", "1", namespace=zero)
    about = service.logs / "run.json"
    lighthouse = service.until(lambda: about.exists() and json.loads(about.read_text())["lighthouse"])
    alone = start_run(*common, "2", "--lighthouse", lighthouse, "--local-groups", "1", *script, namespace=zero)
    spread = (*common, "1", "--nnodes", "2", "--group-addr", f"{networks.address(0)}:29520", "--first-group", "1")
    spread = (*spread, "--lighthouse", lighthouse)
    speaker = start_run(*spread, *script, namespace=zero)
    helper = start_run(*spread, "--node-rank", "1", *script, namespace=networks.of(1))
    near, far = pids(speaker, 1, 2)
    for run, group in ((alone, 0), (speaker, 1)):
        run.until(lambda run=run, group=group: run.step_of(group) >= 3)

    networks.cut(1)
    speaker.until(lambda: noted(speaker, "node 1 is out of reach: nothing heard for"))
    speaker.until(lambda: gone(near))
    helper.until(lambda: gone(far))
    helper.until(lambda: noted(helper, "node 0 is out of reach: nothing heard for", helper.logs / "node1"))
    step = alone.step_of(0)
    alone.until(lambda: alone.step_of(0) > step + 5)
    assert not [event for event in speaker.events("start") if event["data"]["incarnation"] == 1], "waits for the node"

    networks.mend(1)
    again = pids(speaker, 1, 2, 1)
    speaker.until(lambda: speaker.step_of(1, 1) >= 3)
    first = speaker.events("exit")[0]
    assert "rank 1, is lost: node 1 is out of reach" in first["text"]
    helper.interrupt()  # asks for the end of the whole job
    assert helper.wait() == speaker.wait() == 130
    assert "[rg1:rank1] leaves after" in helper.out.read_text(), "told, not killed"
    assert gone(*again)
    for run in (alone, service):
        run.interrupt()
        assert run.wait() == 130
    everything_ended(speaker)


def test_a_helper_that_is_killed(start_run: StartRun, address: str) -> None:
    words = ("--groups", "2", "--min-groups", "1", "--nnodes", "2", "--group-addr", address)
    script = (SPEAKER, "100000", "0.05")
    zero = start_run(*words, *script)
    one = start_run(*words, "--node-rank", "1", *script)
    old = [*pids(zero, 0, 2), *pids(zero, 1, 2)]
    zero.until(lambda: noted(zero, "quorum 1.1"))
    one.process.kill()
    one.process.wait()
    assert zero.wait() == 1, "no group is left that has the state"
    zero.until(lambda: gone(*old))
    assert "every group that held the state is lost" in zero.err.read_text()
    first = zero.summary()["first_failure"]
    assert first["rank"] == 1 and first["message"] == "node 1 is out of reach: its connection was closed"
    everything_ended(zero)
    everything_ended(one)


def test_who_does_not_fit_is_refused(start_run: StartRun, address: str) -> None:
    plain = ("--groups", "1", "--nnodes", "2", "--group-addr", address)
    words = (*plain, "--check-state", "3")
    script = (SPEAKER, "100000", "0.05")
    zero = start_run(*words, *script)
    odd = start_run(*words, "--nproc-per-group", "2", "--node-rank", "1", *script)
    assert odd.wait() == 2
    assert "node 1 was started with another nproc than node 0: 2, not 1" in odd.err.read_text()
    # Else its ranks would end the job, and a standby of it in the moment in which it is needed.
    forgets = start_run(*plain, "--node-rank", "1", *script)
    assert forgets.wait() == 2
    assert "node 1 was started with another check_state than node 0: None, not 3" in forgets.err.read_text()
    one = start_run(*words, "--node-rank", "1", *script)
    zero.until(lambda: zero.step_of(0) >= 1)
    twin = start_run(*words, "--node-rank", "1", *script)
    assert twin.wait() == 2
    assert (
        "give every node a --node-rank of its own" in twin.err.read_text() and "Traceback" not in twin.err.read_text()
    )
    host, port = address.split(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\2{}"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(nonsense)
            while stranger.recv(1000):
                pass
    assert noted(zero, "a connection to --group-addr was cut off")
    step = zero.step_of(0)
    zero.until(lambda: zero.step_of(0) > step)
    far = zero.pid_of(0, 0, 1)
    zero.process.kill()
    zero.process.wait()
    one.until(lambda: gone(far) and noted(one, "node 0 is out of reach", one.logs / "node1"))
    one.interrupt()  # it waits for another agent on node 0, unless it is told to end
    assert one.wait() == 130
    everything_ended(zero)
    everything_ended(one)


def test_a_stranger_at_the_address_of_node_0(start_run: StartRun, address: str) -> None:
    host, port = address.split(":")
    with socket.create_server((host, int(port))) as stranger:
        one = start_run("--nnodes", "2", "--node-rank", "1", "--group-addr", address, SPEAKER, "1", "0.1")
        for _ in range(2):
            connection, _ = stranger.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
        one.interrupt()
        assert one.wait() == 130
    (line,) = [line for line in one.err.read_text().splitlines() if "out of reach" in line]
    assert "it said what makes no sense (a message of " in line


def test_bad_words(start_run: StartRun, address: str) -> None:
    for words, part in (
        (("--nnodes", "0"), "--nnodes 0: a group has at least one node"),
        (("--nnodes", "2", "--node-rank", "2"), "begin on nodes 0 to 1; a node beyond them has standbys for them"),
        (("--nnodes", "2", "--group-addr", "here"), "--group-addr 'here' is not of the form host:port"),
        (
            ("--nnodes", "2", "--group-addr", "203.0.113.1:1"),
            "203.0.113.1, which other machines reach, without credentials",
        ),
    ):
        run = start_run(*words, SPEAKER, "1", "0.1")
        assert run.wait() == 2 and part in run.err.read_text()
        assert "Traceback" not in run.err.read_text()
