"""A rank for the tests of the exchange: a process that does what it is told through a pipe.

Its main thread runs one command at a time, as a training thread would; a control thread hears of interruptions, as
that of a real rank does. Every command is a function below; what it returns goes back, exceptions as their text.
"""

from __future__ import annotations

import gc
import hashlib
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from planaria.core.messages import Member, Quorum, QuorumId
from planaria.core.tree import Node, children, root
from planaria.exchange import device_healing, healing
from planaria.exchange.checksum import Checksum
from planaria.exchange.codes import Coded, Coder, coded_bytes, mean_key, part_key
from planaria.exchange.communicator import Communicator, Communicators, Transfer
from planaria.exchange.healing import receive, serve
from planaria.exchange.layout import Layout
from planaria.exchange.rendezvous import RendezvousStore
from planaria.exchange.tree_exchange import TreeExchange, decoded
from planaria.exchange.waiting import Bell

COMMANDS: dict[str, Callable[..., Any]] = {}


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    COMMANDS[function.__name__] = function
    return function


class Rank:
    def __init__(self, member: Member, device: torch.device, column: int) -> None:
        self.member = member
        self.device = device
        self.bell = Bell()
        self.news = False
        self.store = RendezvousStore("127.0.0.1")
        self.formed: dict[QuorumId, str | None] = {}
        self.communicators = Communicators(member, "127.0.0.1", self.bell, self.on_formed, column, device)
        self.exchanges: dict[tuple[QuorumId, tuple[int, ...]], TreeExchange] = {}

    def on_formed(self, quorum_id: QuorumId, error: str | None) -> None:
        self.formed[quorum_id] = error
        self.bell.ring()

    def communicator(self, quorum_id: QuorumId) -> Communicator:
        found = self.communicators.get(quorum_id)
        assert found is not None, f"{quorum_id} is not formed"
        return found


def main(member: Member, commands: Connection, control: Connection, device: str, column: int) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    rank = Rank(member, torch.device(device), column)

    def listen() -> None:
        while True:
            try:
                asked = control.recv()
            except EOFError:  # the test is over
                os._exit(0)
            if asked == "whom do you wait for":
                control.send(waited_for())
                continue
            rank.news = asked
            rank.bell.ring()
            control.send("heard")

    threading.Thread(target=listen, daemon=True).start()
    commands.send(rank.store.address)
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:
            os._exit(0)
        try:
            commands.send((True, COMMANDS[name](rank, **arguments)))
        except Exception as error:
            commands.send((False, f"{type(error).__name__}: {error}"))


def waited_for() -> set[int]:
    """The ranks whose messages are being waited for in this process at this moment."""
    frames = sys._current_frames().values()
    return {frame.f_locals["self"]._peer for frame in frames if frame.f_code is Transfer.wait.__code__}


# --- gradients that everybody can make for itself -------------------------------------------------------------


def gradient(seed: int, shard: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + shard)
    # Wide magnitudes, so that another order of additions gives other bits.
    return torch.randn(numel, generator=generator) * torch.exp(4 * torch.randn(numel, generator=generator))


def node_sum(node: Node, leaf: Callable[[int], Tensor]) -> Tensor:
    """The definition of the sum of a subtree, as plain as can be."""
    if node.size == 1:
        return leaf(node.start)
    left, right = children(node)
    return node_sum(left, leaf) + node_sum(right, leaf)


def sums(node: Node, seed: int, numel: int) -> Tensor:
    return node_sum(node, lambda shard: gradient(seed, shard, numel))


def expected(seed: int, shards: int, numels: tuple[int, ...]) -> list[Tensor]:
    """What an uninterrupted single process computes."""
    layout = Layout(numels, **SMALL)
    return [sums(root(shards), seed, n) / shards for n in layout.buckets]


def coded(values: Tensor, codec: str, key: int) -> Tensor:
    """A whole bucket as it is after its way through codes."""
    numel = values.numel()
    made = Coded.within(torch.empty(coded_bytes(numel), dtype=torch.uint8), numel, codec)
    coder, out = Coder(codec, values.device), torch.empty_like(values)
    coder.encode(values, made, key, 0)
    coder.decode(made, out)
    return out


def expected_coded(seed: int, shards: int, numels: tuple[int, ...], codec: str, noise: int) -> list[Tensor]:
    """The definition of a coded exchange: every shard's part is encoded, and so is the mean."""

    def sum_of(node: Node, bucket: int, numel: int) -> Tensor:
        if node.size == 1:
            return coded(sums(node, seed, numel), codec, part_key(noise, bucket, node.start))
        left, right = children(node)
        return sum_of(left, bucket, numel) + sum_of(right, bucket, numel)

    buckets = enumerate(Layout(numels, **SMALL).buckets)
    return [coded(sum_of(root(shards), b, n) / shards, codec, mean_key(noise, b)) for b, n in buckets]


true_checksums = healing._checksum, Checksum.of

SMALL = {"bucket_bytes": 4096, "first_bucket_bytes": 512}


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --- commands -------------------------------------------------------------------------------------------------


@command
def form(rank: Rank, quorum: Quorum) -> float:
    """Begin to form; how long the call took."""
    began = time.monotonic()
    rank.communicators.form(quorum)
    return time.monotonic() - began


@command
def formed(rank: Rank, quorum_id: QuorumId) -> str | None:
    rank.bell.wait(lambda: quorum_id in rank.formed, lambda: rank.news)
    return rank.formed[quorum_id]


@command
def drop(rank: Rank, quorum_id: QuorumId) -> float:
    began = time.monotonic()
    rank.communicators.drop(quorum_id)
    return time.monotonic() - began


@command
def forget_news(rank: Rank) -> None:
    rank.news = False


@command
def join_lives(rank: Rank, count: int = 0) -> list[str]:
    """Wait until at most ``count`` lives have a thread; the names of those that are left."""
    while True:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("planaria-")]
        if len(threads) <= count:
            return [thread.name for thread in threads]
        threads[0].join()  # the oldest


@command
def collects_garbage(rank: Rank, does: bool) -> None:
    gc.collect()  # from here on there is nothing that was left to it
    (gc.enable if does else gc.disable)()


@command
def until_no_transport(rank: Rank) -> None:
    """Wait until there is none of gloo's devices in this process: whoever has joined a thread may still see it."""
    while any(_name_of(each) == "gloo_tcp_loop" for each in os.listdir("/proc/self/task")):
        time.sleep(0.01)


def _name_of(thread: str) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # it has ended since it was listed


@command
def reset(rank: Rank) -> None:
    """As good as new, for the next test. Returns once all lives have ended, which they must."""
    rank.news = False
    for quorum_id in list(rank.communicators._lives):
        rank.communicators.drop(quorum_id)
    assert join_lives(rank) == []
    rank.exchanges.clear()
    rank.formed.clear()


@command
def gather(rank: Rank, quorum_id: QuorumId, payload: bytes) -> list[bytes]:
    return rank.communicator(quorum_id).gather(payload).wait(lambda: rank.news)


@command
def exchange(
    rank: Rank,
    quorum_id: QuorumId,
    numels: tuple[int, ...],
    nodes: tuple[tuple[Node, ...], ...],
    shards: int,
    seed: int,
    reduction: str = "tree",
    piece_bytes: int = 256,
    order: str = "forward",
    poison: int | None = None,
    steps: int = 1,
    withhold: bool = False,
    late: bool = False,
    noise: int | None = None,
) -> dict[str, Any]:
    """Some steps of exchange. ``withhold``: submit only half of the buckets. ``late``: the device has not computed yet
    what is submitted. ``noise``: of a coded reduction, in the first step."""
    layout = Layout(numels, **SMALL)
    communicator = rank.communicator(quorum_id)
    key = (quorum_id, layout.buckets)
    own = nodes[communicator.rank]
    made = rank.exchanges.setdefault(key, TreeExchange(communicator, layout, piece_bytes=piece_bytes, window=3))
    for step in range(steps):
        parts = [[sums(node, seed + step, numel).to(rank.device) for node in own] for numel in layout.buckets]
        if poison is not None and own:
            parts[-1][0][poison] = float("inf")
        before = digest([part for bucket in parts for part in bucket])
        made.begin(nodes, shards, shards, reduction, tail_bytes=64, noise=0 if noise is None else noise + step)
        buckets = list(range(len(layout.buckets)))
        for bucket in buckets if order == "forward" else reversed(buckets):
            if withhold and bucket >= len(buckets) // 2:
                rank.bell.wait(lambda: False, lambda: rank.news)
            given = parts[bucket]
            if late:
                torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
                given = [part.clone() for part in given]
            made.submit(bucket, given)
        made.submit_tail(b"tail of " + bytes([communicator.rank]) * communicator.rank)
        try:
            announced = made.announced(lambda: rank.news)
            result = made.finish(lambda: rank.news)
            assert announced.tails == result.tails
            assert all(map(operator.is_, announced.buckets, result.buckets)), "the result is not where it was said"
            if rank.device.type == "cpu":  # what may be kept of it makes the same bits
                again = [decoded(o, n, reduction) for o, n in zip(made.outcome(), layout.buckets, strict=True)]
                assert digest(again) == digest(result.buckets)
        finally:
            after = digest([part for bucket in parts for part in bucket])
            assert before == after, "the parts were written"
    return {
        "digest": digest(result.buckets),
        "values": [bucket.tolist() for bucket in result.buckets],
        "tails": result.tails,
        "finite": result.finite,
    }


def state(seed: int, scale: int = 1, device: torch.device | str = "cpu") -> list[Tensor]:
    """Tensors of all kinds; two of them are in main memory whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randn(1000 * scale, 37, generator=generator),
        torch.tensor(seed),
        torch.empty(0, 5),
        torch.rand(77, generator=generator) > 0.5,
        torch.randn(333, generator=generator).to(torch.bfloat16),
        torch.arange(1001 * scale),
        torch.tensor(3.5, dtype=torch.float64),
    ]
    return [tensor if i in (1, 5) else tensor.to(device) for i, tensor in enumerate(made)]


def described(tensors: list[Tensor]) -> bytes:
    return repr([(str(t.dtype), tuple(t.shape)) for t in tensors]).encode()


@command
def serve_state(
    rank: Rank,
    quorum_id: QuorumId,
    sources: tuple[int, ...],
    healers: tuple[int, ...],
    seed: int,
    scale: int = 1,
    manifest: bytes | None = None,
    corrupt: bool = False,
) -> None:
    tensors = state(seed, scale, rank.device)
    if corrupt:  # stands for a bit that flips on the way: the checksum is that of other bytes
        healing._checksum = lambda block: xxhash.xxh3_64_intdigest(memoryview(block.numpy())) ^ 1
        Checksum.of = lambda self, block: true_checksums[1](self, block) ^ 1  # type: ignore[method-assign]
    try:
        _serve(rank, quorum_id, sources, healers, tensors, manifest or described(tensors))
    finally:
        healing._checksum, Checksum.of = true_checksums  # type: ignore[method-assign]


def _serve(
    rank: Rank,
    quorum_id: QuorumId,
    sources: tuple[int, ...],
    healers: tuple[int, ...],
    tensors: list[Tensor],
    manifest: bytes,
) -> None:
    pending = serve(rank.communicator(quorum_id), tensors, manifest, sources, healers)
    for tensor in tensors:
        tensor.zero_()  # only the stripe's copy may be read from here on
    pending.wait(lambda: rank.news)


@command
def serve_then_gather(
    rank: Rank, quorum_id: QuorumId, sources: tuple[int, ...], healers: tuple[int, ...], seed: int
) -> list[bytes]:
    pending = serve(rank.communicator(quorum_id), state(seed, device=rank.device), b"", sources, healers)
    gathered = rank.communicator(quorum_id).gather(b"").wait(lambda: rank.news)
    pending.wait(lambda: rank.news)
    return gathered


@command
def receive_state(rank: Rank, quorum_id: QuorumId, sources: tuple[int, ...], healers: tuple[int, ...]) -> Any:
    healed = receive(rank.communicator(quorum_id), sources, healers).wait(lambda: rank.news)
    return healed.manifest, [raw.cpu().numpy().tobytes() for raw in healed.tensors]


@command
def receive_and_compare(
    rank: Rank, quorum_id: QuorumId, sources: tuple[int, ...], healers: tuple[int, ...], seed: int, scale: int
) -> bool:
    healed = receive(rank.communicator(quorum_id), sources, healers).wait(lambda: rank.news)
    return all(
        torch.equal(raw.cpu().view(want.dtype).reshape(want.shape), want)
        for raw, want in zip(healed.tensors, state(seed, scale), strict=True)
    )


@command
def leave_little_room(rank: Rank, block_bytes: int, megabytes: float) -> None:
    """From now on the device has so much memory more than it has given out."""
    device_healing.DEVICE_BLOCK_BYTES = block_bytes
    total = torch.cuda.get_device_properties(rank.device).total_memory
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved(rank.device)
    torch.cuda.set_per_process_memory_fraction((used + megabytes * 1e6) / total, rank.device)


@command
def where_healed_state_lies(
    rank: Rank, quorum_id: QuorumId, sources: tuple[int, ...], healers: tuple[int, ...], seed: int, scale: int
) -> set[str]:
    """After comparing it."""
    healed = receive(rank.communicator(quorum_id), sources, healers).wait(lambda: rank.news)
    for raw, want in zip(healed.tensors, state(seed, scale), strict=True):
        assert torch.equal(raw.cpu().view(want.dtype).reshape(want.shape), want)
    return {raw.device.type for raw in healed.tensors}
