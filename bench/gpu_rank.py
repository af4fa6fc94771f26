"""What a member's process does for bench/gpu_exchange.py: one command at a time, each a function below."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from planaria.core.messages import Member, Quorum, QuorumId
from planaria.core.tree import Node, children, maximal_nodes, root
from planaria.errors import CommunicatorError
from planaria.exchange.checksum import Checksum
from planaria.exchange.communicator import Communicator, Communicators
from planaria.exchange.healing import receive, serve
from planaria.exchange.layout import Layout
from planaria.exchange.rendezvous import RendezvousStore, connect
from planaria.exchange.tree_exchange import TreeExchange
from planaria.exchange.waiting import Bell

WIDTH = 4096  # of the layers of the model that is trained

Options = argparse.Namespace


class Rank:
    """A member's process. Its main thread runs one command at a time; a control thread hears of new quorums."""

    def __init__(self, member: Member, device: torch.device, control: Connection) -> None:
        self.member, self.device, self.control = member, device, control
        self.bell, self.formed = Bell(), {}
        self.store = RendezvousStore()
        self.news: Quorum | None = None
        self.communicators = Communicators(member, "127.0.0.1", self.bell, self._on_formed, device=device)
        self.current: Quorum | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _on_formed(self, quorum: QuorumId, error: str | None) -> None:
        self.formed[quorum] = time.monotonic(), error
        self.bell.ring()

    def _listen(self) -> None:
        while True:
            try:
                quorum = self.control.recv()
            except EOFError:
                os._exit(0)
            self.communicators.form(quorum)
            if self.current is not None:
                self.communicators.drop(self.current.id)
            self.news = quorum
            self.bell.ring()

    def join(self, quorum: Quorum) -> Communicator:
        self.communicators.form(quorum)
        self.bell.wait(lambda: quorum.id in self.formed, lambda: False)
        assert self.formed[quorum.id][1] is None, self.formed[quorum.id]
        self.current, self.news = quorum, None
        found = self.communicators.get(quorum.id)
        assert found is not None
        return found

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type != "cpu" else 0

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type != "cpu" else 0


def rank_main(member: Member, device: torch.device, pipe: Connection, control: Connection) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if device.type != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    rank = Rank(member, device, control)
    pipe.send(rank.store.address)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, globals()[name](rank, *arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


# --- commands -------------------------------------------------------------------------------------------------


def model_layout(parameters: float, bucket_megabytes: float) -> Layout:
    numel, each = int(parameters), 1 << 18
    return Layout([min(each, numel - at) for at in range(0, numel, each)], int(bucket_megabytes * (1 << 20)))


def exchange_all(
    exchange: TreeExchange, parts: list[list[Tensor]], size: int, reduction: str, interrupted: Callable[[], bool]
) -> list[Tensor]:
    exchange.begin([maximal_nodes([r], size) for r in range(size)], size, size, reduction, tail_bytes=256)
    for bucket, part in enumerate(parts):
        exchange.submit(bucket, part)
    exchange.submit_tail(b"x" * 100)
    return exchange.finish(interrupted).buckets


def never() -> bool:
    return False


def speed(rank: Rank, quorum: Quorum, options: Options) -> dict[str, Any]:
    """Whole exchanges with nothing to hide behind, all ways by turns."""
    base = rank.allocated()
    found: dict[str, Any] = {"free before forming": rank.free()}
    began = time.monotonic()
    communicator = rank.join(quorum)
    found["forming"] = time.monotonic() - began
    found["free after forming"] = rank.free()
    size = communicator.size
    if not dist.is_initialized():
        store = PrefixStore("plain", connect(quorum.addresses[0], torch.distributed.default_pg_timeout))
        backend = "gloo" if rank.device.type == "cpu" else "nccl"
        dist.init_process_group(backend, store=store, rank=communicator.rank, world_size=size)
    for megabytes in options.buckets:
        found[f"{megabytes:g}"] = compare(
            rank, communicator, model_layout(options.parameters, megabytes), options, base
        )
    return found


def compare(rank: Rank, communicator: Communicator, layout: Layout, options: Options, base: int) -> dict[str, Any]:
    generator = torch.Generator(rank.device).manual_seed(communicator.rank)
    parts = [[torch.randn(n, device=rank.device, generator=generator)] for n in layout.buckets]
    plain_buffers = [torch.randn(n, device=rank.device, generator=generator) for n in layout.buckets]
    exchange = TreeExchange(communicator, layout)
    results: list[Tensor] = []

    def plain() -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in plain_buffers]:
            work.wait()
        rank.sync()

    def ours(reduction: str) -> None:
        results[:] = exchange_all(exchange, parts, communicator.size, reduction, never)

    ways: dict[str, Callable[[], None]] = {"plain": plain}
    ways |= {reduction: lambda reduction=reduction: ours(reduction) for reduction in ("fast", "tree")}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 2):
        for way, run in ways.items():
            rank.sync()
            communicator.gather(b"").wait()
            began = time.perf_counter()
            run()
            if number >= 2:
                times[way].append(time.perf_counter() - began)
    checksum = Checksum(4 * max(layout.buckets), rank.device)
    digest = [int(checksum.of(_whole(bucket))) for bucket in results if bucket.numel() > 1]
    found: dict[str, Any] = {way: statistics.median(each) for way, each in times.items()}
    base += sum(part[0].nbytes for part in parts) + sum(buffer.nbytes for buffer in plain_buffers)
    found["extra bytes per parameter"] = max(rank.allocated() - base, 0) / options.parameters
    found["same bits"] = len(set(communicator.gather(repr(digest).encode()).wait())) == 1
    return found


def _whole(bucket: Tensor) -> Tensor:
    return bucket[: bucket.numel() // 2 * 2].view(torch.uint8)


def bits(rank: Rank, quorum: Quorum) -> bool:
    """Whether ``tree`` has the bits of the definition, computed on a CPU, for odd sizes and uneven shards."""
    communicator = rank.join(quorum)
    size, shards = communicator.size, 3 * communicator.size + 1
    nodes = [maximal_nodes([s for s in range(shards) if s * 7 % size == r], shards) for r in range(size)]
    layout = Layout([100_003, 7, 1, 2_000_001, 33, 0, 4096], bucket_bytes=1 << 20)

    def gradient(shard: int, numel: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 + shard)
        return torch.randn(numel, generator=generator) * torch.exp(4 * torch.randn(numel, generator=generator))

    def total(node: Node, numel: int) -> Tensor:
        if node.size == 1:
            return gradient(node.start, numel)
        left, right = children(node)
        return total(left, numel) + total(right, numel)

    exchange = TreeExchange(communicator, layout, piece_bytes=1 << 20)
    fine = True
    for _ in range(3):
        exchange.begin(nodes, shards, shards, "tree")
        for bucket, numel in enumerate(layout.buckets):
            exchange.submit(bucket, [total(node, numel).to(rank.device) for node in nodes[communicator.rank]])
        exchange.submit_tail(b"")
        result = exchange.finish()
        wanted = [total(root(shards), numel) / shards for numel in layout.buckets]
        fine &= result.finite and all(torch.equal(a.cpu(), b) for a, b in zip(result.buckets, wanted, strict=True))
    return fine


def launching(rank: Rank, quorum: Quorum) -> dict[str, float]:
    """What one launch of NCCL costs the thread of a life, and how fast messages of a size go both ways at once."""
    communicator = rank.join(quorum)
    if communicator.link is None:
        return {}
    link = communicator.link
    peer = (communicator.rank + 1) % communicator.size
    source = (communicator.rank - 1) % communicator.size

    def measure(numel: int, repeats: int) -> tuple[float, float]:
        mine, theirs = (torch.ones(numel, device=rank.device) for _ in range(2))
        torch.cuda.synchronize(rank.device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = 0.0
        for number in range(repeats + 3):
            if number == 3:
                start.record(link.wire)
            began = time.perf_counter()
            with link.nccl.group():
                link.nccl.send(mine, peer, link.wire)
                link.nccl.receive(theirs, source, link.wire)
            seconds += time.perf_counter() - began if number >= 3 else 0.0
        stop.record(link.wire)
        link.wait(stop)
        return seconds / repeats, start.elapsed_time(stop) / 1e3 / repeats

    def work() -> dict[str, float]:
        found = {"launch us": measure(1, 200)[0] * 1e6}
        for megabytes in (4, 12.5, 32, 128):
            found[f"{megabytes:g} MB"] = megabytes * 1e6 / measure(int(megabytes * 1e6 / 4), 30)[1] / 1e9
        return found

    return communicator.call("measuring", work).wait()


def training(rank: Rank, quorum: Quorum, options: Options) -> dict[str, float]:
    """Milliseconds of a step of a real model, with DDP (and with DDP that waits on the host before the optimizer)
    and with ours, gradients handed over by hooks during backward; and between the end of backward and the optimizer,
    on the device."""
    communicator = rank.join(quorum)
    layers = max(1, int(options.parameters / WIDTH**2))
    torch.manual_seed(0)
    with torch.device(rank.device):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        data = torch.randn(options.tokens, WIDTH)
    parameters = list(model.parameters())
    layout = Layout([p.numel() for p in parameters])
    parts = [torch.empty(n, device=rank.device) for n in layout.buckets]
    exchange = TreeExchange(communicator, layout)
    places = [(slot.bucket, parts[slot.bucket][slot.offset :][: slot.numel]) for slot in layout.slots]
    missing: list[int] = []
    ready: list[int] = []

    def hook(index: int) -> Callable[[Tensor], None]:
        bucket, place = places[index]

        def collect(parameter: Tensor) -> None:
            if not collecting[0]:
                return
            assert parameter.grad is not None
            place.copy_(parameter.grad.view(-1))
            parameter.grad = None
            missing[bucket] -= 1
            while len(ready) < len(parts) and missing[len(ready)] == 0:
                ready.append(len(ready))
                exchange.submit(ready[-1], [parts[ready[-1]]])

        return collect

    collecting = [False]
    gaps: dict[str, list[list[torch.cuda.Event]]] = {}
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(hook(index))
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, fused=rank.device.type != "cpu")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def backward(module: torch.nn.Module) -> None:
        with torch.autocast(rank.device.type, torch.bfloat16):
            loss = module(data).float().square().mean()
        loss.backward()

    def ddp(wait: bool) -> None:
        collecting[0] = False
        backward(wrapped)
        if wait:
            rank.sync()
        optimizer.step()

    size = communicator.size

    def ours(reduction: str) -> None:
        collecting[0] = True
        missing[:] = [len(layout.members_of(bucket)) for bucket in range(len(parts))]
        ready.clear()
        exchange.begin([maximal_nodes([r], size) for r in range(size)], size, size, reduction, tail_bytes=256)
        backward(model)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        exchange.submit_tail(b"x" * 100)
        results = exchange.finish().buckets
        marks[1].record()
        gaps.setdefault(reduction, []).append(marks)
        for parameter, slot in zip(parameters, layout.slots, strict=True):
            parameter.grad = results[slot.bucket][slot.offset :][: slot.numel].view_as(parameter)
        optimizer.step()

    ways: dict[str, Callable[[], None]] = {
        "ddp": lambda: ddp(False),
        "ddp, host waits": lambda: ddp(True),
        "fast": lambda: ours("fast"),
        "tree": lambda: ours("tree"),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds // 2 + 2):
        for way, run in ways.items():
            optimizer.zero_grad(set_to_none=way in ("fast", "tree"))
            rank.sync()
            communicator.gather(b"").wait()
            began = time.perf_counter()
            for _ in range(options.steps):  # in a row: what one step leaves to the device is hidden by the next
                optimizer.zero_grad(set_to_none=way in ("fast", "tree"))
                run()
            rank.sync()
            if number >= 2:
                times[way].append((time.perf_counter() - began) / options.steps)
    found = {way: statistics.median(each) * 1e3 for way, each in times.items()}
    for way, pairs in gaps.items():
        found[f"gap {way}"] = statistics.median(before.elapsed_time(after) for before, after in pairs)
    dist.destroy_process_group()
    return found


def heal(rank: Rank, quorum: Quorum, gigabytes: float) -> list[dict[str, float]]:
    """Members 0 to the one before the last heal the last one, several times."""
    communicator = rank.join(quorum)
    count = 40
    numel = int(gigabytes * 1e9 / 4 / count)
    generator = torch.Generator(rank.device).manual_seed(5)
    state = [torch.randn(numel + 3 * i, device=rank.device, generator=generator) for i in range(count)]
    state.append(torch.arange(1000))  # something in main memory
    last = communicator.size - 1
    sources, healers = list(range(last)), [last]
    found = []
    for _ in range(4):
        rank.sync()
        communicator.gather(b"").wait()
        began = time.perf_counter()
        if communicator.rank < last:
            pending = serve(communicator, state, b"", sources, healers)
            pause = time.perf_counter() - began
            if rank.device.type != "cpu":
                torch.cuda.current_stream(rank.device).synchronize()
            copied = time.perf_counter() - began
            pending.wait()
            found.append({"pause": pause, "copied": copied, "seconds": time.perf_counter() - began})
        else:
            healed = receive(communicator, sources, healers).wait()
            seconds = time.perf_counter() - began
            views = [raw.view(want.dtype) for raw, want in zip(healed.tensors, state, strict=True)]
            assert all(map(torch.equal, views, state)), "healed something else"
            found.append({"seconds": seconds, "bytes": float(sum(each.nbytes for each in state))})
            del healed, views
    return found


def prepare(rank: Rank, options: Options) -> None:
    """For kills: the sums are there, as those of a step that is interrupted."""
    rank.communicators.warm_up()
    rank.layout = model_layout(options.kill_parameters, 25)
    rank.parts = [[torch.randn(n, device=rank.device)] for n in rank.layout.buckets]


def steady(rank: Rank, quorum: Quorum) -> None:
    communicator = rank.join(quorum)
    rank.exchange = TreeExchange(communicator, rank.layout)
    exchange_all(rank.exchange, rank.parts, communicator.size, "tree", never)


def be_killed(rank: Rank) -> None:
    """Submit half of the buckets and no more."""
    size = len(rank.current.members)
    rank.exchange.begin([maximal_nodes([r], size) for r in range(size)], size, size, "tree", tail_bytes=256)
    for bucket in range(len(rank.parts) // 2):
        rank.exchange.submit(bucket, rank.parts[bucket])
    rank.exchange._communicator.call("being in the middle", lambda: None).wait()


def survive(rank: Rank) -> dict[str, float]:
    """Exchange until it fails; then, in the quorum that comes, again. When what was done."""
    size = len(rank.current.members)
    with contextlib.suppress(CommunicatorError):
        exchange_all(rank.exchange, rank.parts, size, "tree", lambda: rank.news is not None)
        raise AssertionError("nobody died")
    return take_part(rank) | {"woken": time.monotonic()}


def take_part(rank: Rank) -> dict[str, float]:
    """In the quorum of which the control thread hears."""
    woken = time.monotonic()
    rank.bell.wait(lambda: rank.news is not None, never)
    communicator = rank.join(rank.news)
    began = time.monotonic()
    rank.exchange = TreeExchange(communicator, rank.layout)
    exchange_all(rank.exchange, rank.parts, communicator.size, "tree", never)
    formed, lives = rank.formed[communicator.quorum_id][0], [t for t in threading.enumerate() if "exchange-" in t.name]
    return {"woken": woken, "formed": formed, "began": began, "done": time.monotonic(), "lives": len(lives)}


def copy_rates(pipe: Connection) -> None:
    """GB/s of plain copies of 1 GiB: from one device to the other, and within one (bytes read plus written)."""
    here, there = torch.ones(1 << 30, dtype=torch.uint8, device="cuda:0"), torch.empty(0)
    rates = []
    for device in ("cuda:1", "cuda:0"):
        there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        for _ in range(2):
            torch.cuda.synchronize(0)
            began = time.perf_counter()
            for _again in range(10):
                there.copy_(here)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            rate = 10 * (1 << 30) / (time.perf_counter() - began) / 1e9
        rates.append(rate)
    pipe.send((rates[0], 2 * rates[1]))
