"""The machines, the job on them, and when something breaks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

HOUR = 3600.0
DAY = 24 * HOUR

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, table 5).
LLAMA3_MTBF_HOURS = 16_384 * 54 * 24 / 419
# Of the same table: what takes a host or its network away (switch and cable 8.4 %, unplanned maintenance 7.6 %, host
# CPU 4.1 %, NIC 1.7 %).
DARK = 0.22


class Sign(Enum):
    """How a failure shows itself."""

    DEATH = "a process ends: its agent sees it at once"
    DARK = "a machine is silent: its stream is"
    HANG = "a process does nothing: its progress page shows it"


@dataclass(frozen=True, slots=True)
class Failure:
    at: float  # seconds
    place: float  # 0 <= place < 1: which machine of all
    hard: bool  # the machine has to be repaired; else starting the processes again is enough
    sign: Sign
    luck: float = 0.5  # 0 <= luck < 1: decides what a strategy leaves to chance
    repair: float = 0.0  # seconds until the machine is back, if it is hard


@dataclass(frozen=True, slots=True)
class Hazards:
    """What breaks. The shares are those of Llama 3's table: what is hardware; ``DARK``; what NCCL's watchdog ended."""

    mtbf_gpu_hours: float = LLAMA3_MTBF_HOURS
    hard: float = 0.76
    dark: float = DARK
    hang: float = 0.02
    repair_hours: float = 24.0  # mean; exponential

    def failures(self, gpus: int, seed: int, horizon: float) -> Iterator[Failure]:
        """A Poisson process: failures of many parts that know nothing of each other. The same seed gives the same
        failures whatever the strategy, so that strategies are compared under the same luck."""
        rng = random.Random(seed)
        rate = gpus / (self.mtbf_gpu_hours * HOUR)
        at = rng.expovariate(rate)
        while at < horizon:
            place, kind, luck, repair = rng.random(), rng.random(), rng.random(), rng.expovariate(1.0)
            sign = Sign.DARK if kind < self.dark else Sign.HANG if kind < self.dark + self.hang else Sign.DEATH
            # Whatever takes a host away is hardware; of the rest, as much as makes up the share.
            rest = (self.hard - self.dark) / (1 - self.dark) if self.dark < 1 else 1.0
            hard = sign is Sign.DARK or rng.random() < rest
            yield Failure(at, place, hard, sign, luck, repair * self.repair_hours * HOUR)
            at += rng.expovariate(rate)

    @property
    def hard_out(self) -> float:
        """Machines out of service on average, per GPU in service."""
        return self.hard * self.repair_hours / self.mtbf_gpu_hours


@dataclass(frozen=True, slots=True)
class Layout:
    """How the GPUs are used. Machines are interchangeable: what is left of a broken group serves the others."""

    gpus: int  # all, spares included
    group_size: int  # GPUs
    machine_gpus: int = 8  # that are repaired together
    spares: int = 0  # machines kept out of the groups
    shards_per_group: int = 16  # micro-batches of a group in a step at full strength
    step_seconds: float = 10.0  # without any failure and without any library's overhead

    @property
    def machines(self) -> int:
        return self.gpus // self.machine_gpus

    @property
    def groups(self) -> int:
        return (self.machines - self.spares) * self.machine_gpus // self.group_size

    @property
    def shards(self) -> int:
        return self.groups * self.shards_per_group

    @property
    def share(self) -> float:
        """Of all GPUs, those at work at full strength."""
        return self.groups * self.group_size / self.gpus

    def capacity(self, healthy: int) -> int:
        """Groups for which ``healthy`` machines are enough."""
        return min(self.groups, healthy * self.machine_gpus // self.group_size)

    @property
    def groups_per_machine(self) -> int:
        """Lost with one machine."""
        return max(1, self.machine_gpus // self.group_size)

    def machines_of(self, groups: int) -> int:
        return math.ceil(groups * self.group_size / self.machine_gpus)
