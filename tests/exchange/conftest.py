"""Real processes for the tests of the exchange, kept over many examples and replaced when they were killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.core.messages import Member, Quorum, QuorumId

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import exchange_rank  # noqa: E402

LIMIT = 120.0  # seconds for any one answer: far above what a loaded machine needs, below the test's own limit


class Process:
    """One rank. Commands run one at a time: ``tell`` one, then ``answer`` it."""

    def __init__(
        self, context: multiprocessing.context.ForkServerContext, member: Member, device: str, column: int = 0
    ) -> None:
        self.member = member
        self.commands, theirs = context.Pipe()
        self.control, their_control = context.Pipe()
        arguments = (member, theirs, their_control, device, column)
        self.process = context.Process(target=exchange_rank.main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        their_control.close()
        self.address: str | None = None
        self.busy = False

    def ready(self) -> None:
        if self.address is None:
            assert self.commands.poll(LIMIT), f"{self.member} did not start"
            self.address = self.commands.recv()

    def tell(self, name: str, **arguments: Any) -> None:
        assert not self.busy, f"{self.member} has not answered its last command"
        self.busy = True
        self.commands.send((name, arguments))

    def outcome(self) -> tuple[bool, Any]:
        assert self.commands.poll(LIMIT), f"{self.member} does not answer"
        self.busy = False
        return self.commands.recv()

    def answer(self) -> Any:
        fine, value = self.outcome()
        assert fine, f"{self.member}: {value}"
        return value

    def failure(self) -> str:
        fine, value = self.outcome()
        assert not fine, f"{self.member} did not fail: {value}"
        return str(value)

    def do(self, name: str, **arguments: Any) -> Any:
        self.tell(name, **arguments)
        return self.answer()

    def news(self, news: bool = True) -> None:
        """What a control thread hears: stop waiting."""
        self.control.send(news)
        assert self.control.poll(LIMIT), f"the control thread of {self.member} does not answer"
        self.control.recv()

    def waits_for(self, peer: int) -> bool:
        """Whether it waits for a message of the rank ``peer`` at this moment."""
        self.control.send("whom do you wait for")
        assert self.control.poll(LIMIT), f"the control thread of {self.member} does not answer"
        return peer in self.control.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(LIMIT)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()


class Cluster:
    """A pool of ranks, all on CPUs or each on a GPU of its own, and the numbering of quorums."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.most = 4 if kind == "cpu" else torch.cuda.device_count()
        # The server that forks ranks imports torch once for all of them, if it finds our modules: it looks in the
        # environment for where they are (Python 3.11 does not tell it the path of its parent).
        path = [str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["exchange_rank"])
        self._pool: dict[int, Process] = {}
        self._incarnations = 0
        self._numbers = 0

    def take(self, count: int) -> list[Process]:
        """``count`` ranks that are alive and idle."""
        if count > self.most:
            pytest.skip(f"needs {count} GPUs")
        for group in range(count):
            found = self._pool.get(group)
            if found is None or not found.alive or found.busy:
                if found is not None and found.alive:
                    found.kill()
                self._pool[group] = self.start(group)
        taken = [self._pool[group] for group in range(count)]
        for each in taken:
            each.ready()
            each.do("reset")
        return taken

    def some(self, count: int) -> list[Process]:
        """As many if there are GPUs enough; at least two."""
        return self.take(min(count, self.most))

    def start(self, group: int) -> Process:
        self._incarnations += 1
        device = "cpu" if self.kind == "cpu" else f"{self.kind}:{group}"
        return Process(self._context, Member(group, self._incarnations), device)

    def beside(self, rank: Process, column: int) -> Process:
        """Another rank of the same group, on a CPU."""
        return Process(self._context, rank.member, "cpu", column)

    def quorum(self, ranks: list[Process], store: str | None = None) -> Quorum:
        self._numbers += 1
        addresses = [str(rank.address) for rank in ranks]
        if store is not None:
            addresses[0] = store
        members = tuple(rank.member for rank in ranks)
        return Quorum(QuorumId(1, self._numbers), members, tuple(addresses), urgent=True, lineage="")

    def form(self, ranks: list[Process]) -> QuorumId:
        """A communicator of exactly these ranks."""
        quorum = self.quorum(ranks)
        for rank in ranks:
            rank.do("form", quorum=quorum)
        for rank in ranks:
            assert rank.do("formed", quorum_id=quorum.id) is None
        return quorum.id

    def everyone(self, ranks: list[Process], name: str, **arguments: Any) -> list[Any]:
        for rank in ranks:
            rank.tell(name, **arguments)
        return [rank.answer() for rank in ranks]

    def close(self) -> None:
        for each in self._pool.values():
            if each.alive:
                each.kill()


GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPUS])])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    made.close()
