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
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

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

    mode: str  # "blocks" or "free"
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
        return BATCH * self.groups // self.shard_count

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
        return DATASET

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Many samples at once, already as a batch."""
        return self.x[indices], self.y[indices]

    def batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """The batch of one group, a pure function of the step and the group. A view: peers pay nothing for
        data."""
        start = (step * parts + part) * BATCH % DATASET
        return self.x[start : start + BATCH], self.y[start : start + BATCH]


class Blocks:
    """Waits before a block for the driver's go file, and times the steps of the block.

    A step lasts from the end of the one before to its own end, so everything between is in it: fetching the
    batch, the optimizer, whatever a library does between steps.
    """

    def __init__(self, config: Config, who: int) -> None:
        self.config, self.who, self.done = config, who, 0
        self.directory = Path(config.directory)
        self.marks: list[float] = []

    def before(self) -> None:
        """Call first in each step."""
        per_block = self.config.warmup + self.config.steps
        if self.done % per_block == 0:
            block = self.done // per_block
            (self.directory / f"at.{block}.{self.who}").touch()
            while not (self.directory / f"go.{block}").exists():
                time.sleep(0.01)  # idle contestants must cost nothing; warm-up steps absorb the uneven start
            self.marks = [time.perf_counter()]

    def after(self) -> None:
        """Call last in each step."""
        self.marks.append(time.perf_counter())
        self.done += 1
        per_block = self.config.warmup + self.config.steps
        if self.done % per_block == 0:
            timed = self.marks[self.config.warmup :]
            seconds = [b - a for a, b in pairwise(timed)]
            path = self.directory / f"block.{self.done // per_block - 1}.{self.who}"
            part = path.with_name(path.name + ".part")  # the driver must see it whole
            part.write_text(json.dumps(seconds))
            part.rename(path)


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
