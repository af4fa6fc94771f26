"""What can be computed without a simulation; the tests hold the simulation against it."""

from __future__ import annotations

import math


def young(save_seconds: float, mtbf_seconds: float) -> float:
    """Young's checkpoint interval (1974), in seconds of work between two saves: the first-order optimum."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly(every: float, save: float, restart: float, mtbf: float) -> float:
    """Share of the time that is kept by checkpoint and restart (Daly 2006, the complete model): failures are Poisson
    and strike saves and restarts too. All in seconds; ``every``: of work between two saves."""
    return every / (mtbf * math.exp(restart / mtbf) * math.expm1((every + save) / mtbf))


def pauses(pause: float, mtbf: float) -> float:
    """Share of the time outside of pauses if each failure pauses everything, and one in a pause begins it anew."""
    return math.exp(-pause / mtbf)


def absent(rate: float, away: float, groups: int) -> float:
    """Share of a job's groups that is away, if ``rate`` of them are lost per second in all, each for ``away`` seconds:
    Little's law, as long as it is small."""
    return rate * away / groups
