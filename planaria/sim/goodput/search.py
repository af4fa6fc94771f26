"""The best group size, spares and checkpoint interval of each strategy, and how it fares with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from planaria.sim.goodput.closed_form import young
from planaria.sim.goodput.cluster import DAY, HOUR, Hazards, Layout
from planaria.sim.goodput.ledger import Outcome
from planaria.sim.goodput.run import Costs, run
from planaria.sim.goodput.strategies import Strategy

# Parameters, and Adam's two moments, in fp32; gradients too while a step is made.
STATE_BYTES = 12
STEP_BYTES = 16
# The share of a GPU's memory that a model's state may take: activations want the rest. Llama 3 405B had 128 GPUs of
# 80 GB in a replica, 63 %.
FOR_STATE = 0.65

# Whoever holds the state in its living groups needs a checkpoint for the day when all are lost only.
RARELY = HOUR

T = TypeVar("T")

_TRIALS = 2  # seeds with which candidates are compared, all with the same failures


@dataclass(frozen=True, slots=True)
class Question:
    gpus: int
    parameters: float
    hazards: Hazards
    machine_gpus: int = 8
    gpu_gbytes: float = 80.0
    group_size: int | None = None  # None: the best
    spares: int | None = None  # machines; None: the best
    every: float | None = None  # seconds between checkpoints; None: the best
    save: float = 5.0
    shards_per_group: int = 16
    step_seconds: float = 10.0
    heal_gbytes: float = 40.0  # a second, into each GPU
    days: float = 30.0
    seeds: int = 20
    first_seed: int = 0

    @property
    def mtbf(self) -> float:
        """Seconds between failures of the whole."""
        return self.hazards.mtbf_gpu_hours * HOUR / self.gpus

    @property
    def smallest_group(self) -> int:
        """GPUs that are enough to hold the model, in whole machines or whole parts of one."""
        least = self.parameters * STEP_BYTES / (self.gpu_gbytes * 1e9 * FOR_STATE)
        return self._whole(2 ** max(0, math.ceil(math.log2(max(least, 1.0)))))

    def group_sizes(self) -> list[int]:
        if self.group_size is not None:
            return [self.group_size]
        sizes = [self._whole(self.smallest_group * factor) for factor in (1, 2, 4, 8, 16)]
        return sorted({size for size in sizes if size <= self.gpus // 2}) or [self.smallest_group]

    def spare_choices(self, size: int) -> list[int]:
        """Machines: enough for what is out of service on average, and for two and four standard deviations more (the
        number of those is Poisson's), in whole groups' worth, because less frees no group's machines."""
        if self.spares is not None:
            return [self.spares]
        out = self.hazards.hard_out * self.gpus
        unit = max(1, size // self.machine_gpus)
        rest = (self.gpus - self.gpus // size * size) // self.machine_gpus
        wanted = (out + more * math.sqrt(out) for more in (0, 2, 4))
        choices = {rest, *(rest + max(0, math.ceil((want - rest) / unit)) * unit for want in wanted)}
        return sorted(each for each in choices if self.layout(size, each).groups >= 1)

    def layout(self, size: int, spares: int) -> Layout:
        return Layout(self.gpus, size, self.machine_gpus, spares, self.shards_per_group, self.step_seconds)

    def costs(self, size: int, every: float) -> Costs:
        return Costs(every, self.save, self.parameters * STATE_BYTES / size / (self.heal_gbytes * 1e9))

    def outcomes(self, strategy: Strategy, layout: Layout, every: float, seeds: int) -> list[Outcome]:
        horizon, costs = self.days * DAY, self.costs(layout.group_size, every)
        found = []
        for seed in range(self.first_seed, self.first_seed + seeds):
            failures = self.hazards.failures(self.gpus, seed, horizon)
            found.append(run(layout, strategy, costs, failures, horizon))
        return found

    def _whole(self, size: int) -> int:
        machine = self.machine_gpus
        if size >= machine:
            return math.ceil(size / machine) * machine
        return next(part for part in range(size, machine + 1) if machine % part == 0)


@dataclass(frozen=True, slots=True)
class Answer:
    strategy: Strategy
    layout: Layout
    every: float
    outcomes: tuple[Outcome, ...]

    def mean(self, of: Callable[[Outcome], float]) -> float:
        return fmean(of(each) for each in self.outcomes)

    def quantile(self, of: Callable[[Outcome], float], share: float) -> float:
        ordered = sorted(of(each) for each in self.outcomes)
        return ordered[round(share * (len(ordered) - 1))]

    def shares(self) -> dict[str, float]:
        """Of the time, on average, by part of the ledger."""
        parts = [each.ledger.shares() for each in self.outcomes]
        return {name: fmean(each[name] for each in parts) for name in parts[0]}


def answer(question: Question, strategy: Strategy) -> Answer:
    """Choices are made one after the other: group size (with spares in between), spares, interval."""
    every = _first_interval(question, strategy)

    def value(layout: Layout, interval: float) -> float:
        trials = question.outcomes(strategy, layout, interval, min(_TRIALS, question.seeds))
        return fmean(each.of_all for each in trials)

    sizes = question.group_sizes()
    middle = [question.layout(size, _middle(question.spare_choices(size))) for size in sizes]
    size = _best(middle, lambda layout: value(layout, every)).group_size
    layouts = [question.layout(size, spares) for spares in question.spare_choices(size)]
    layout = _best(layouts, lambda each: value(each, every))
    if question.every is None and _rewinds(strategy):
        every = _best([every, every / 2, every * 2], lambda each: value(layout, each))
    return Answer(strategy, layout, every, tuple(question.outcomes(strategy, layout, every, question.seeds)))


def _rewinds(strategy: Strategy) -> bool:
    return not strategy.elastic


def _first_interval(question: Question, strategy: Strategy) -> float:
    if question.every is not None:
        return question.every
    if not _rewinds(strategy):
        return RARELY
    share = 1.0 if strategy.swap is None else 1 - strategy.kept
    if share == 0:
        return RARELY
    return young(max(question.save, 1e-3), question.mtbf / share)


def _middle(choices: Sequence[int]) -> int:
    return choices[len(choices) // 2]


def _best(choices: Sequence[T], value: Callable[[T], float]) -> T:
    """The first of the best."""
    if len(choices) == 1:
        return choices[0]
    values = [value(each) for each in choices]
    return choices[values.index(max(values))]
