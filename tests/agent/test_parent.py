"""Children that end with their parent."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from planaria.agent.parent import tied


@pytest.fixture
def talk() -> Iterator[None]:
    """gRPC in use on other threads of this process."""

    def answer(request: bytes, _: grpc.ServicerContext) -> bytes:
        return request

    server = grpc.server(futures.ThreadPoolExecutor(2))
    handlers = {"Answer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("talk", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                ask = channel.unary_unary("/talk/Answer")
                for _ in range(50):
                    ask(b"x")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()
    server.stop(None).wait()


def test_a_child_of_a_process_that_talks_by_grpc_becomes_its_command(talk: None) -> None:
    for _ in range(40):
        done = subprocess.run(tied(["true"]), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_command_finds_its_process_as_if_it_had_been_started_by_itself() -> None:
    shown = ["sh", "-c", "grep SigIgn /proc/self/status; env; ps -o ppid= -p $$"]
    plain, ours = (subprocess.run(each, capture_output=True, text=True, env={}) for each in (shown, tied(shown)))
    assert plain.stdout.split() == ours.stdout.split()


def test_a_command_that_is_not_there_is_named() -> None:
    done = subprocess.run(tied(["/none/such"]), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == "cannot run /none/such: No such file or directory\n"


def test_a_child_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys; from planaria.agent.parent import tied\n"
        "child = subprocess.Popen(tied(['sleep', '600'])); print(child.pid, flush=True); sys.stdin.read(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        parent.kill()
        # Its standard output is the parent's: it ends when both have.
        assert parent.stdout.read() == b""
