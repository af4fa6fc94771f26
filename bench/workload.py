"""What every contestant trains, and how every contestant is watched. Imported by all workers, needs only
torch.

A worker runs in one of two modes. In **blocks** it stops before each block of steps until the driver lets the
block go, so that contestants can stay alive and still never run at the same time. In **free** mode it trains
on, and appends a line to a log for each attempt at a step, so that all contestants are timed from the outside
by one clock (CLOCK_MONOTONIC, the same in all processes of a machine).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from bench import gaps, transformer

if TYPE_CHECKING:
    SampleSet = Dataset[tuple[Tensor, Tensor]]
else:
    SampleSet = Dataset

BATCH = 16  # samples per group and step; the global batch is BATCH * groups for all
DATASET = 4096  # samples; the data repeats after that
SIZES = {  # widths of the layers; the names are the numbers of parameters
    "tiny": [16, 32, 4],
    "0.1M": [128, 256, 256, 10],
    "3M": [1024, 1024, 1024, 1024, 10],
    "30M": [2048] * 8 + [10],
}


@dataclass(frozen=True)
class Config:
    """All that a worker is told; travels as JSON in its only argument."""

    mode: str  # "blocks" or "free"; Planaria also "steps": so many and then the end
    directory: str  # where logs, results and go files lie
    groups: int
    size: str = "3M"
    warmup: int = 5  # steps at the start of each block that are not timed
    steps: int = 20  # timed steps of a block
    blocks: int = 1
    sleep: float = 0.0  # seconds added to each step, so that steps of a small model last as long as real ones
    seed: int = 0
    settings: str = "default"  # torchft only
    shards: int = 0  # Planaria only; 0: as many as groups
    device: str = "cpu"  # or "cuda": every process has a GPU of its own
    batch: int = BATCH  # samples per group and step
    fsdp: bool = False  # Planaria only: fully_shard inside the group
    deterministic: bool = False
    traced: int = -1  # the block of which to write down when the GPU stands still

    @staticmethod
    def from_argv() -> Config:
        return Config(**json.loads(sys.argv[1]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shard_count(self) -> int:
        return self.shards or self.groups

    @property
    def shard_batch(self) -> int:
        """Samples of a shard of Planaria, such that its global batch is that of the others."""
        return self.batch * self.groups // self.shard_count

    @property
    def total_steps(self) -> int:
        return self.blocks * (self.warmup + self.steps)


class Counted(nn.Module):
    """A network with one more parameter that counts the samples in an update, whoever computed them.

    The second output is always 0, with gradient 1. Added to each batch's loss it makes the reduced gradient
    of ``count`` equal (batches that went into the update) / (the divisor of the reduction): what was *really*
    summed, not what a library says. Divisors are small powers of two or the number of summands, so the value
    is exact enough to round.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.count = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.count - self.count.detach()

    def samples(self, divisor: int, batch: int) -> int:
        """Samples in the update whose reduced gradients are in ``.grad`` now, given batches of ``batch``
        samples."""
        grad = self.count.grad
        return 0 if grad is None else round(float(grad) * divisor) * batch


def make_net(size: str, seed: int) -> tuple[nn.Sequential, int, int]:
    """Give the network, its input width and its number of classes."""
    widths = SIZES[size]
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), widths[0], widths[-1]


class Samples(SampleSet):
    """Random samples in memory: ``x`` float32 [DATASET, width], ``y`` int64 [DATASET]."""

    def __init__(self, width: int, classes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + 1)
        self.x = torch.randn(DATASET, width, generator=generator)
        self.y = torch.randint(0, classes, (DATASET,), generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Many samples at once, already as a batch."""
        return self.x[indices], self.y[indices]

    def batch(self, step: int, part: int, parts: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """The batch of one group, a pure function of the step and the group. A view: peers pay nothing for
        data."""
        start = (step * parts + part) * size % len(self)
        return self.x[start : start + size], self.y[start : start + size]


class Tokens(Samples):
    """Random text: ``x`` and ``y`` int64 [DATASET, length], y one token further. ``pinned``: a GPU can fetch batches
    while the host goes on, as with any data loader for GPUs."""

    def __init__(self, vocab: int, length: int, seed: int, pinned: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed + 1)
        text = torch.randint(0, vocab, (DATASET, length + 1), generator=generator)
        self.x, self.y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if pinned:
            self.x, self.y = self.x.pin_memory(), self.y.pin_memory()

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """A view where it can be one, for only that stays pinned."""
        if indices == list(range(indices[0], indices[0] + len(indices))):
            return self.x[indices[0] : indices[-1] + 1], self.y[indices[0] : indices[-1] + 1]
        return super().__getitems__(indices)


@dataclass(frozen=True)
class Task:
    """A network on its device, its data, and how it learns. ``loss`` takes a batch from wherever it is."""

    net: nn.Module
    data: Samples
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]

    def optimizer(self) -> torch.optim.Optimizer:
        """Call when the network is what it will be: fully_shard replaces parameters."""
        if isinstance(self.net, transformer.Transformer):
            return torch.optim.AdamW(self.net.parameters(), lr=3e-4, fused=True)
        return torch.optim.SGD(self.net.parameters(), lr=0.01)


def make_task(config: Config, device: torch.device) -> Task:
    """The same on every group and for every contestant."""
    shape = transformer.SHAPES.get(config.size)

    def there(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    if shape is not None:
        torch.manual_seed(config.seed)
        with device:
            net = transformer.Transformer(shape)
        data = Tokens(shape.vocab, shape.length, config.seed, pinned=device.type == "cuda")
        return Task(net, data, lambda model, batch: transformer.loss_of(model, there(batch)))
    mlp, width, classes = make_net(config.size, config.seed)
    lossf = loss_function()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = there(batch)
        found: Tensor = lossf(model(x), y)
        return found

    return Task(mlp.to(device), Samples(width, classes, config.seed), loss)


def be_deterministic(config: Config) -> None:
    """Call before the first kernel."""
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Blocks:
    """Waits before a block for the driver's go file, and times the steps of the block.

    A step lasts from the end of the one before to its own end, so everything between is in it: fetching the
    batch, the optimizer, whatever a library does between steps. On a GPU the ends are events on the stream of the
    training, so that timing makes nobody wait for the device who otherwise would not.
    """

    def __init__(self, config: Config, who: int, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.config, self.who, self.device, self.done = config, who, device, 0
        self.directory = Path(config.directory)
        self.marks: list[Any] = []
        self.profile: Any = None

    def before(self) -> None:
        """Call first in each step."""
        per_block = self.config.warmup + self.config.steps
        if self.done % per_block == 0:
            block = self.done // per_block
            (self.directory / f"at.{block}.{self.who}").touch()
            while not (self.directory / f"go.{block}").exists():
                time.sleep(0.01)  # idle contestants must cost nothing; warm-up steps absorb the uneven start
            if block == self.config.traced and self.device.type == "cuda":
                self._start_profile()
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            self.marks = [self._mark()]

    def _start_profile(self) -> None:
        """On all ranks before any goes on: it takes seconds, which others would spend waiting in mid-step."""
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self.profile.start()
        (self.directory / f"profiles.{self.who}").touch()
        while not all((self.directory / f"profiles.{who}").exists() for who in range(self.config.groups)):
            time.sleep(0.001)

    def after(self) -> None:
        """Call last in each step."""
        self.marks.append(self._mark())
        self.done += 1
        per_block = self.config.warmup + self.config.steps
        if self.done % per_block == 0:
            self._end(self.done // per_block - 1)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, block: int) -> None:
        timed = self.marks[self.config.warmup :]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if self.profile is not None:
                self.profile.stop()
                found = gaps.summary(gaps.kernels_by_stream(self.profile), len(self.marks) - 1)
                self._write(f"trace.{self.who}", found)
                self.profile = None
            seconds = [a.elapsed_time(b) / 1e3 for a, b in pairwise(timed)]
            memory = {"peak": torch.cuda.max_memory_allocated(self.device)}
            torch.cuda.empty_cache()  # the others need it now; warm-up steps get it back
            memory["held"] = torch.cuda.memory_allocated(self.device)
            self._write(f"memory.{block}.{self.who}", memory)
        else:
            seconds = [b - a for a, b in pairwise(timed)]
        self._write(f"block.{block}.{self.who}", seconds)

    def _write(self, name: str, value: Any) -> None:
        part = self.directory / f"{name}.part"  # the driver must see it whole
        part.write_text(json.dumps(value))
        part.rename(self.directory / name)


class CommitLog:
    """One file per life of a worker, one short line per event; bench/timeline.py reads them."""

    def __init__(self, config: Config, group: int) -> None:
        started = time.monotonic_ns()
        path = Path(config.directory) / f"life.{group}.{started}"
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 (lives as long as the process)
        self._write(f"start {os.getpid()} {started}")

    def _write(self, line: str) -> None:
        self.file.write(line + "\n")

    def attempt(self, step: int) -> None:
        """Work on ``step`` begins. Two attempts at a step without a commit between: the first one was
        discarded."""
        self._write(f"attempt {step} {time.monotonic_ns()}")

    def commit(self, step: int, samples: int, took_part: bool) -> None:
        """``step`` is committed: ``samples`` went into it. ``took_part``: this group computed some of them."""
        self._write(f"commit {step} {time.monotonic_ns()} {samples} {int(took_part)}")

    def crash(self, error: BaseException) -> None:
        self._write(f"crash 0 {time.monotonic_ns()} {json.dumps(repr(error)[:300])}")


def limit_threads() -> None:
    """One thread per process for all, as on a machine whose cores are shared by the groups."""
    torch.set_num_threads(1)


def env_int(name: str) -> int:
    return int(os.environ[name])


def loss_function() -> Any:
    return nn.CrossEntropyLoss()
