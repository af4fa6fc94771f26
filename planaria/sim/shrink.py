"""Makes a failing run small: faults that are not needed for the failure are dropped one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planaria.sim.scenario import Scenario
from planaria.sim.world import Outcome, World

Runner = Callable[[Scenario], Outcome]


def run(scenario: Scenario) -> Outcome:
    return World(scenario).run()


def shrink(scenario: Scenario, outcome: Outcome, run: Runner = run) -> tuple[Scenario, Outcome]:
    """A scenario with as few faults as possible that still fails, and its outcome. Any failure counts as the same:
    a run with less in it that breaks another promise is worth more than the one that was found."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            found = run(candidate)
            if found.failed:
                scenario, outcome, smaller = candidate, found, True
                break
    return scenario, outcome


def _smaller(scenario: Scenario) -> list[Scenario]:
    fewer = [scenario.without(position) for position in range(len(scenario.faults))]
    if scenario.steps > 2:
        fewer.append(replace(scenario, steps=scenario.steps - 1))
    return fewer
