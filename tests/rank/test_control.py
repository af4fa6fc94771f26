"""The control thread, against the other end of a real socket."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pytest

from planaria.core.messages import Adopted, Member, Order, QuorumId, Refuse, Stop
from planaria.errors import UsageError
from planaria.rank.control import Control
from planaria.wire.codec import report_from_bytes
from planaria.wire.frames import FrameReader, send_frame
from planaria.wire.page import ProgressPage

ME = Member(1, 2)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[socket.socket, Path]]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "agent"))
        sock.listen()
        yield sock, tmp_path / "agent"


def test_orders_and_reports(listener: tuple[socket.socket, Path]) -> None:
    server, path = listener
    heard: Queue[Order] = Queue()
    control = Control(path, None, heard.put, "job j, group 1")
    agent, _ = server.accept()
    orders: list[Order] = [Refuse(ME, "bad"), Stop("")]
    for order in orders:
        send_frame(agent, order)
    assert [heard.get(timeout=10) for _ in orders] == orders
    report = Adopted(ME, QuorumId(1, 7), 5)
    control.send(report)
    assert next(iter(FrameReader(agent, report_from_bytes))) == report
    control.close()
    agent.close()
    assert not [t for t in threading.enumerate() if t.name == "planaria-control"]


def test_life_shows_on_the_page_without_any_order(listener: tuple[socket.socket, Path], tmp_path: Path) -> None:
    server, path = listener
    page = ProgressPage.create(tmp_path / "progress")
    control = Control(path, page, lambda order: None, "here")
    agent, _ = server.accept()
    first = page.read().control_beat
    while page.read().control_beat < first + 3:  # ends by the test's own limit if it never beats
        os.sched_yield()
    control.close()
    agent.close()
    page.close()


def test_no_agent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no agent listens"):
        Control(tmp_path / "nobody", None, lambda order: None, "job j, group 1")


SCRIPT = """
import sys, time
from pathlib import Path
from planaria.rank.control import Control
control = Control(Path(sys.argv[1]), None, lambda order: None, "job j, group 1")
print("up", flush=True)
while True:
    time.sleep(1)  # a training thread that is deep in something
"""


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff\xff\xff nonsense"])
def test_a_rank_ends_with_its_agent(listener: tuple[socket.socket, Path], garbage: bytes) -> None:
    server, path = listener
    command = [sys.executable, "-c", SCRIPT, str(path)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        agent, _ = server.accept()
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
        if garbage:
            agent.sendall(garbage)
        agent.close()
        _, said = rank.communicate(timeout=30)
        assert rank.returncode == 1
        assert "job j, group 1" in said and "Traceback" not in said
    finally:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
