"""Ways to live with failures, as numbers, each with its source.

Measured by us: bench/RESULTS.md, on two GPUs and on CPUs; nothing of ours was measured on more. Published: the systems'
own papers and posts. What is neither is called an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from planaria.core.liveness import COMPUTING, HEARTBEAT
from planaria.sim.goodput.cluster import Layout, Sign


class Loses(Enum):
    """What a failure takes back."""

    CHECKPOINT = "all since the last checkpoint"
    STEP = "the step in flight"
    SHARDS = "nothing; the lost group's shards of the step are computed again"


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    loses: Loses
    stall: float  # seconds for which everybody stands still after a process has died
    dark: float  # and how much longer if a machine falls silent
    hang: float  # or if a process hangs; negative: derived from the time of a shard
    elastic: bool  # goes on with fewer groups; else it waits for machines
    keeps_batch: bool  # a step has all its samples, whoever is there
    overhead: float  # healthy step, over one without any of this
    swap: float | None = None  # seconds in which a spare takes a lost place; None: places are not taken
    kept: float = 1.0  # share of the swaps that lose no progress; the others go back to a checkpoint
    soft_start: float = 90.0  # until a lost group is back whose machines are whole
    hard_start: float = 150.0  # and on another machine
    heal: bool = False  # all wait while one that comes back takes the state
    restart: float = 600.0  # from a stop of the whole job to its next step
    exact: bool = False  # the same result as without failures
    sources: tuple[str, ...] = ()

    def detection(self, sign: Sign, layout: Layout) -> float:
        if sign is Sign.DEATH:
            return 0.0
        if sign is Sign.DARK:
            return self.dark
        if self.hang >= 0:
            return self.hang
        # core.liveness, once it has seen shards: a multiple of the longest, and never less than the floor.
        return min(max(COMPUTING.floor, COMPUTING.factor * layout.step_seconds / layout.shards_per_group), 600.0)


RESTART = 600.0  # Meta at 100,000 GPUs: 10 minutes for each failure before FT-HSDP (arXiv:2602.00277)
_START = (
    "a group is back after 90 s, on another machine after 150 s (Monarch with torchft, 240 H100; bench/RESULTS.md: "
    "4.75 s with groups of one GPU)"
)
_RESTART = "a restart of everything takes 600 s (Meta before FT-HSDP, arXiv:2602.00277)"
_OURS = "everybody stands still for 0.13 s (bench/RESULTS.md, loss of one of two groups on GPUs, 0.84 B parameters)"
_STEP = "healthy step 1.036 x DDP (bench/RESULTS.md, tree, 0.84 B parameters)"
_SILENT = f"a silent machine is given up after {HEARTBEAT.floor:g} s, a hang after 5 shards' time (core/liveness.py)"

CHECKPOINT = Strategy(
    "checkpoint-restart", Loses.CHECKPOINT, stall=0.0, dark=600.0, hang=600.0, elastic=False, keeps_batch=True,
    overhead=1.0, restart=RESTART, exact=True,
    sources=(_RESTART, "silent machines and hangs end in the collectives' time limit: 600 s (PyTorch's default)"),
)  # fmt: skip
DROP = Strategy(
    "drop-and-shrink", Loses.STEP, stall=1.14, dark=5.0, hang=60.0, elastic=True, keeps_batch=False,
    overhead=1.045,
    sources=(
        "torchft: everybody stands still for 1.14 s (bench/RESULTS.md, tuned, CPU) and the step is discarded",
        "healthy step 1.045 x DDP (measured once, NCCL, 2 GPUs); heartbeats expire after 5 s, collectives after 60 s",
        _START,
    ),
)  # fmt: skip
SPARES = Strategy(
    "spares-only", Loses.STEP, stall=0.0, dark=5.0, hang=60.0, elastic=False, keeps_batch=True,
    overhead=1.0, swap=20.0, kept=0.9, restart=RESTART, exact=True,
    sources=(
        "TorchPass publishes seconds: a spare takes a place in 20 s (TrainMover at 1,024 GPUs), the step is done again",
        "90 % of the interruptions lose no progress, the others go back to a checkpoint; no overhead (its own claims)",
        _RESTART,
    ),
)  # fmt: skip
REDISTRIBUTE = Strategy(
    "planaria redistribute", Loses.SHARDS, stall=0.13, dark=HEARTBEAT.floor, hang=-1.0, elastic=True, keeps_batch=True,
    overhead=1.036, heal=True, exact=True,
    sources=(_OURS, _SILENT, _STEP, _START),
)  # fmt: skip
SPARE = Strategy(
    "planaria spare", Loses.SHARDS, stall=0.13, dark=HEARTBEAT.floor, hang=-1.0, elastic=True, keeps_batch=True,
    overhead=1.036, swap=0.84, heal=True, exact=True,
    sources=(
        "a standby in the lost rank's place: whole again after 0.84 s (bench/RESULTS.md, two H200, groups of 2)",
        _OURS, _SILENT, _STEP, _START,
    ),
)  # fmt: skip
SHRINK = Strategy(
    "planaria shrink", Loses.SHARDS, stall=0.13, dark=HEARTBEAT.floor, hang=-1.0, elastic=True, keeps_batch=False,
    overhead=1.036, heal=True,
    sources=(_OURS, _SILENT, _STEP, _START),
)  # fmt: skip

ALL = (CHECKPOINT, DROP, SPARES, REDISTRIBUTE, SPARE, SHRINK)
