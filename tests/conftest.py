"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline per example, and none for making them: a busy machine is no failure. Tests assert no times anywhere. The
# same examples in every run, so that a run fails for what was changed, and not for its luck; others: make fuzz.
settings.register_profile(
    "planaria",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="PLANARIA_FUZZ" not in os.environ,
)
settings.load_profile("planaria")
