"""How much our exchange costs beside plain gloo all-reduces of the same bytes, on this machine.

Ranks are processes connected over loopback. In each round every rank runs each way once, after a barrier, one way after
the other, so that whatever else the machine does hits all alike; medians over the rounds of rank 0's times are
compared. The CPU time of a rank is shown too: on a busy machine it is the steadier figure. Plain all-reduces work in
place; ours leave what is submitted unchanged, divide, and look for NaN. The megabytes that a rank sends are counted
where they are given to gloo.

With --mbit every rank is in a network namespace of its own, on a line of so many million bits a second (needs root).

    python bench/exchange.py [--ranks 2 4] [--megabytes 0.4 12 120] [--rounds 15] [--pieces 25] [--windows 2]
    python bench/exchange.py --mbit 20 --megabytes 12 --rounds 3
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from planaria.chaos.netns import Networks
from planaria.core.messages import REDUCTIONS, Member, Quorum, QuorumId
from planaria.core.tree import maximal_nodes
from planaria.exchange.communicator import Communicator, Communicators, Transfer
from planaria.exchange.layout import Layout
from planaria.exchange.rendezvous import NEVER, RendezvousStore, connect
from planaria.exchange.tree_exchange import TreeExchange
from planaria.exchange.waiting import Bell

PARAMETER = 1 << 18  # elements: a model is taken to consist of 1 MB tensors


def enter(namespace: str) -> None:
    """The calling thread, and all that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as place:
        if libc.setns(place.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def rank_main(
    rank: int, size: int, options: argparse.Namespace, megabytes: float, pipe: Connection, at: tuple[str, str] | None
) -> None:
    torch.set_num_threads(1)
    host = "127.0.0.1"
    if at is not None:
        enter(at[0])
        host = at[1]
    bell, store, formed = Bell(), RendezvousStore(host), []
    member = Member(rank, 0)
    communicators = Communicators(member, host, bell, lambda _, error: (formed.append(error), bell.ring()))
    pipe.send(store.address)
    addresses = pipe.recv()
    quorum = Quorum(QuorumId(1, 1), tuple(Member(r, 0) for r in range(size)), addresses, True, "")
    communicators.form(quorum)
    bell.wait(lambda: bool(formed), lambda: False)
    assert formed == [None], formed
    communicator = communicators.get(quorum.id)
    assert communicator is not None

    numel = max(1, int(megabytes * 1e6 / 4))
    numels = [min(PARAMETER, numel - start) for start in range(0, numel, PARAMETER)]
    layout = Layout(numels)
    terms = ProcessGroupGloo._Options()
    terms._timeout, terms._devices = NEVER, [ProcessGroupGloo.create_device(hostname=host)]
    group = ProcessGroupGloo(PrefixStore("plain", connect(addresses[0], NEVER)), rank, size, terms)
    plain_buffers = [torch.zeros(n) for n in layout.buckets]
    parts = [[torch.randn(n)] for n in layout.buckets]
    nodes = [maximal_nodes([r], size) for r in range(size)]
    sent = 0

    def counting(tensor: torch.Tensor, peer: int, tag: int, what: str) -> Transfer:
        nonlocal sent
        sent += tensor.nbytes
        return Communicator.send(communicator, tensor, peer, tag, what)

    communicator.send = counting  # type: ignore[method-assign]

    def plain() -> None:
        works = [group.allreduce([buffer]) for buffer in plain_buffers]
        for work in works:
            work.wait()

    def ours(exchange: TreeExchange, reduction: str) -> None:
        exchange.begin(nodes, size, size, reduction, tail_bytes=256)
        for bucket, part in enumerate(parts):
            exchange.submit(bucket, part)
        exchange.submit_tail(b"x" * 100)
        exchange.finish()

    ways: dict[str, Callable[[], None]] = {"plain": plain}
    for piece in options.pieces:
        for window in options.windows:
            name = f" {piece:g} MB x{window}" if len(options.pieces) + len(options.windows) > 2 else ""
            exchange = TreeExchange(communicator, layout, int(piece * (1 << 20)), window)
            for reduction in options.reductions:
                ways[reduction + name] = lambda e=exchange, r=reduction: ours(e, r)
    times: dict[str, list[float]] = {way: [] for way in ways}
    busy: dict[str, list[float]] = {way: [] for way in ways}
    megabytes_sent: dict[str, float] = {}
    one = torch.zeros(1)
    for number in range(options.rounds + 2):
        for way, run in ways.items():
            group.allreduce([one]).wait()
            began, worked, sent = time.perf_counter(), time.process_time(), 0
            run()
            if number >= 2:  # the first rounds touch the memory
                times[way].append(time.perf_counter() - began)
                busy[way].append(time.process_time() - worked)
            megabytes_sent[way] = sent / 1e6
    megabytes_sent["plain"] = 2 * (size - 1) / size * numel * 4 / 1e6  # of a ring
    pipe.send({way: (statistics.median(times[way]), statistics.median(busy[way]), megabytes_sent[way]) for way in ways})
    pipe.recv()
    communicators.close()


def measure(
    size: int, options: argparse.Namespace, megabytes: float, networks: Networks | None
) -> dict[str, tuple[float, float, float]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        at = None if networks is None else (networks.of(rank), networks.address(rank))
        process = context.Process(target=rank_main, args=(rank, size, options, megabytes, theirs, at))
        process.start()
        pipes.append(ours)
        processes.append(process)
    addresses = tuple(pipe.recv() for pipe in pipes)
    for pipe in pipes:
        pipe.send(addresses)
    found: list[dict[str, tuple[float, float, float]]] = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return found[0]


def show(size: int, megabytes: float, found: dict[str, tuple[float, float, float]]) -> None:
    plain_seconds, plain_busy, _ = found["plain"]
    for way, (seconds, busy, sent) in found.items():
        print(
            f"{size:>5} {megabytes:>6g}  {way:<20} {seconds * 1e3:>8.2f}  {seconds / plain_seconds:<14.2f}  "
            f"{sent:>8.2f}  ({busy * 1e3:.2f}, {busy / plain_busy:.2f})",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.4, 12, 120])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pieces", type=float, nargs="+", default=[25], help="MB")
    parser.add_argument("--windows", type=int, nargs="+", default=[2])
    parser.add_argument("--reductions", nargs="+", default=list(REDUCTIONS))
    parser.add_argument("--mbit", type=float, help="of each rank's line")
    options = parser.parse_args()
    print(f"{'ranks':>5} {'MB':>6}  {'way':<20} {'ms':>8}  ratio to plain  {'MB sent':>8}  (CPU ms of a rank, ratio)")
    with contextlib.ExitStack() as stack:
        networks = None
        if options.mbit is not None:
            networks = Networks(max(options.ranks))
            stack.callback(networks.close)
            networks.make()
            for rank in range(max(options.ranks)):
                networks.limit(rank, options.mbit)
        for size in options.ranks:
            for megabytes in options.megabytes:
                show(size, megabytes, measure(size, options, megabytes, networks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
