"""Waiting until a shared machine is quiet enough to measure on."""

from __future__ import annotations

import sys
import time

from bench.report import LoadWatch

# Contestants stand still meanwhile, in the middle of a step. Planaria takes a rank for hung that stands still between
# two steps for a minute; half of that leaves room for the blocks of the others.
QUIET_LIMIT = 30.0
WINDOW = 1.0  # seconds: long enough that one scheduler tick (10 ms) is 1 % of a core


def wait_quiet(share: float, limit: float = QUIET_LIMIT) -> float:
    """Wait until others use less than ``share`` of the machine; go on after ``limit`` seconds all the same,
    saying so. Give the last share seen."""
    end = time.monotonic() + limit
    while True:
        watch = LoadWatch()
        time.sleep(WINDOW)
        used = watch.others()
        if used < share:
            return used
        if time.monotonic() > end:
            print(
                f"others still use {used:.0%} of the machine after {limit:.0f} s; measuring all the same",
                file=sys.stderr,
            )
            return used
